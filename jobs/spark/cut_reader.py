"""Reads the rows of a cut as one DataFrame, cast to the declared schema.

Each row carries its position and the reason why it is bad, if it is.

Columns besides the user's: ``_m`` (index of the member's slice in the cut), ``_p`` (index into
`CutFrame.parts`), ``_source``, ``_partition``, ``_seq``, ``_so`` (place of the source in the spec),
``_time`` and ``_et`` (event time as a timestamp and in ticks), ``_end`` (exclusive end in ticks),
``_kind`` (data, barrier, punctuation; null if unknown), ``_dead`` (reason of a dead letter, else
null), ``_detail``, ``_json`` (the row as read), ``_rule`` (the rule that removed the row) and
``_warned`` (other rules that it breaks, with commas). Spark computes only those that a plan asks
for.

Objects are read in place where the store has them as files, else from copies in the scratch folder;
either way Spark's tasks see them under folders ``_m=../_p=../_o=..``, so that their place arrives
as partition columns, at no cost per row. Few rows are read in the driver and handed over as Arrow:
a third of the time of a scan that has to open every file anyway.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everyone knows

from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.errors import TransientError
from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame, combine_frames
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.sources.input_view import STAGED_PREFIX
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.object_decoding import open_parquet_file
from tidegate.jobs.spec.pipeline import PipelineSpec

from .column_casts import (
    cast_to_declared,
    is_nanosecond_timestamp,
    select_readable_columns,
    spark_to_arrow_type,
)
from .errors import COPY_UNREADABLE
from .spark_session import SparkSessions
from .staging import Staging

Ints = NDArray[np.int64]

_POSITION_COLUMNS = (
    ("_m", "int", pa.int32()),
    ("_p", "int", pa.int32()),
    ("_o", "bigint", pa.int64()),
    ("_row", "bigint", pa.int64()),
)


_PLANNED = ("key", "etag", "ordinal", "rows", "row_start", "row_end")
_TRAITS = {
    *("columns", "select", "where", "rules", "event_time", "end_time", "timezone"),
    *("min_event_time", "barriers"),
}


@dataclass(frozen=True, slots=True)
class CutPart:
    """The rows of one object that are in a cut.

    Attributes:
        member: index of its slice in the cut.
        ordinal: place of the object in its member.
        rows: of the whole object.
        row_start, row_end: the rows in the cut, the end exclusive; all if `has_row_numbers`.
        path: the whole object as a local file.
        columns: physical column -> Arrow type text, as planned.
    """

    member: int
    key: str
    etag: str
    ordinal: int
    rows: int
    row_start: int
    row_end: int
    path: Path
    columns: tuple[tuple[str, str], ...]

    @property
    def has_row_numbers(self) -> bool:
        """Whether the rows' places are in a column of their own, because some are missing.

        Then all rows are in the cut.
        """
        return any(name == OFFSET_COLUMN for name, _ in self.columns)

    @property
    def is_whole(self) -> bool:
        """Whether every row of the object is in the cut."""
        return self.has_row_numbers or (self.row_start == 0 and self.row_end == self.rows)


_NumberedPart = tuple[int, CutPart]  # its index in the cut
_PartReader = Callable[[Any, list[_NumberedPart]], Frame]


@dataclass(frozen=True)
class CutFrame:
    """A cut, staged and readable.

    Attributes:
        build: describes its rows to Spark; None when it has no parts.
        rows: rows of all kinds in it, as planned; ranges of Kafka may hold fewer.
        scratch: the folder with its files.
    """

    cut: Cut
    parts: tuple[CutPart, ...]
    build: Callable[[], DataFrame | None]
    rows: int
    scratch: Path

    @cached_property
    def frame(self) -> DataFrame | None:
        """Its rows; None when it has no parts. The first access starts Spark."""
        return self.build()

    def find_corruption(self) -> CorruptObjectsError | TransientError | None:
        """The error that names the objects whose pages cannot be read; None when all can.

        Reads every part. A copy of a Kafka range that cannot be read gives a TransientError.
        """
        bad = [part.key for part in self.parts if not _is_readable(part)]
        return unreadable_objects_error(bad) if bad else None


def open_cut(
    sessions: SparkSessions,
    spec: PipelineSpec,
    store: Store,
    cut: Cut,
    scratch: Path,
    staging: Staging,
) -> CutFrame:
    """Stage the objects of a cut below `scratch` and describe their rows.

    It copies objects that the store does not have as files. Ranges of Kafka are there already
    (see `KafkaStager`).

    Raises:
        TidegateError: the store does not give an object.
    """
    parts = _download_parts(store, cut, scratch)
    rows = sum(part.row_end - part.row_start for part in parts)
    small = sessions.is_small(rows)

    def build_frame() -> DataFrame | None:
        session = sessions.session_for(rows)
        frame = _read_similar_parts(
            spec,
            cut,
            list(enumerate(parts)),
            lambda columns, chosen: (
                arrow_to_frame(
                    session,
                    _read_parts(columns, chosen),
                    _format_ddl(columns, _POSITION_COLUMNS),
                )
                if small
                else _scan_in_tasks(session, columns, chosen, scratch, staging)
            ),
        )
        # One task, and no shuffle anywhere behind it.
        return frame.coalesce(1) if frame is not None and small else frame

    return CutFrame(cut, parts, build_frame, rows, scratch)


def read_in_driver(
    staged: CutFrame, spec: PipelineSpec, member: int, names: set[str]
) -> tuple[Frame, list[pa.Table]]:
    """The rows of one slice in DuckDB, with only these columns of the objects; the rest is null.

    Also the tables that they are made of, one for each form of objects.

    Raises:
        CorruptObjectsError: an object cannot be read; a TransientError for a copy of offsets.
    """
    chosen = [(i, part) for i, part in enumerate(staged.parts) if part.member == member]

    def read(columns: Any, parts: list[_NumberedPart]) -> Frame:
        """Read objects that look alike."""
        tables.append(_read_parts(columns, parts))
        return DuckFrame.from_table(tables[-1])

    tables: list[pa.Table] = []
    return _read_similar_parts(spec, staged.cut, chosen, read, names), tables


def _read_similar_parts(
    spec: PipelineSpec,
    cut: Cut,
    parts: Sequence[_NumberedPart],
    read: _PartReader,
    names: set[str] | None = None,
) -> Frame | None:
    """Objects that look alike are read together; the rows of all, cast and with their places."""
    groups: dict[tuple[Any, ...], list[_NumberedPart]] = {}
    for index, part in parts:
        source = spec.sources[cut.slices[part.member].member.source]
        columns = tuple((c, own) for c, own in part.columns if names is None or c in names)
        # What decides about casts and verdicts. Parts that agree in it share one plan.
        traits = source.model_dump_json(include=_TRAITS)
        groups.setdefault((columns, traits), []).append((index, part))
    rows = None
    for (columns, _), chosen in groups.items():
        source = spec.sources[cut.slices[chosen[0][1].member].member.source]
        cast = cast_to_declared(read(columns, chosen), source, dict(columns))
        rows = combine_frames(rows, cast)
    return None if rows is None else _add_positions(rows, spec, cut)


def ensure_local_file(store: Store, key: str, folder: Path) -> Path:
    """The object as a file: in place where the store can, else downloaded once into `folder`."""
    path = store.local_path(key)
    if path is not None:
        return path
    copy = folder / key.replace("/", "~")
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        store.download(key, copy)
    return copy


def _download_parts(store: Store, cut: Cut, scratch: Path) -> tuple[CutPart, ...]:
    found = [(index, part) for index, piece in enumerate(cut.slices) for part in piece.parts]
    paths = map_in_threads(
        lambda item: ensure_local_file(store, item[1]["key"], scratch / "objects"), found, 8
    )
    return tuple(
        CutPart(
            member=index,
            path=path,
            columns=tuple(part["columns"].items()),
            **{name: part[name] for name in _PLANNED},
        )
        for (index, part), path in zip(found, paths, strict=True)
    )


def _is_readable(part: CutPart) -> bool:
    try:
        pq.read_table(part.path)
    except (pa.ArrowException, OSError):
        return False
    return True


def unreadable_objects_error(keys: Sequence[str]) -> CorruptObjectsError | TransientError:
    """The error for objects whose pages are corrupt; it is returned, not raised.

    A copy of offsets is not the topic: it is fetched again, never given up. So with a copy among
    them the error is transient, and names the first copy only.
    """
    staged = [key for key in keys if key.startswith(STAGED_PREFIX)]
    if not staged:
        return CorruptObjectsError.for_keys(keys)
    return COPY_UNREADABLE(key=staged[0])


def _format_ddl(columns: Any, places: Iterable[tuple[str, str, Any]]) -> str:
    read = [*select_readable_columns(columns), *((name, own) for name, own, _ in places)]
    return ", ".join(f"{quote_name(name)} {own}" for name, own in read)


def _scan_in_tasks(
    session: SparkSession,
    columns: Any,
    parts: list[_NumberedPart],
    scratch: Path,
    staging: Staging,
) -> DataFrame:
    base = scratch / "cut"
    # Where tasks do not see the disk, this uploads.
    paths = map_in_threads(lambda item: staging.expose_file(_link_object(base, *item)), parts, 8)
    schema = _format_ddl(columns, _POSITION_COLUMNS[:3])
    frame = session.read.schema(schema).option("basePath", staging.address(base)).parquet(*paths)
    row = OFFSET_COLUMN if parts[0][1].has_row_numbers else "_metadata.row_index"
    # Not beside it: an object may have a column of this name that the spec does not declare.
    frame = frame.withColumn("_row", F.expr(row))
    for index, part in parts:
        # At most the first and the last object of a slice are in the cut in part.
        if not part.is_whole:
            frame = frame.where(
                f"_p <> {index} OR (_row >= {part.row_start}L AND _row < {part.row_end}L)"
            )
    return frame


def _link_object(base: Path, index: int, part: CutPart) -> Path:
    # A link gives the object a path that names its place; nothing is copied.
    folder = base / f"_m={part.member}" / f"_p={index}" / f"_o={part.ordinal}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "rows.parquet"
    if not link.is_symlink():
        link.symlink_to(part.path.resolve())
    return link


def _read_parts(columns: Any, parts: list[_NumberedPart]) -> pa.Table:
    physical = select_readable_columns(columns)
    fields = [
        pa.field(name, _choose_arrow_type(own, dict(columns)[name])) for name, own in physical
    ]
    schema = pa.schema([*fields, *(pa.field(name, arrow) for name, _, arrow in _POSITION_COLUMNS)])
    return pa.concat_tables([_read_part(index, part, schema) for index, part in parts])


def arrow_to_frame(session: SparkSession, table: pa.Table, schema: str | None = None) -> DataFrame:
    """An Arrow table as a DataFrame, in one chunk.

    Spark takes an empty record batch for the end and loses what follows.
    """
    return session.createDataFrame(table.combine_chunks(), schema)


def _choose_arrow_type(own: str, arrow: str) -> pa.DataType:
    """The Arrow type that `createDataFrame` takes for a Spark type."""
    if is_nanosecond_timestamp(arrow):
        return pa.int64()
    if own == "timestamp":
        return pa.timestamp("us", "UTC")
    if own.startswith("decimal"):
        return to_arrow_type(own)
    if "<" in own:
        from pyspark.sql.pandas.types import to_arrow_type as to_nested_type
        from pyspark.sql.types import DataType

        return to_nested_type(DataType.fromDDL(own), timestamp_utc=True)
    return pa.type_for_alias(spark_to_arrow_type(own))


def _read_part(index: int, part: CutPart, schema: pa.Schema) -> pa.Table:
    names = schema.names[: -len(_POSITION_COLUMNS)]
    try:
        rows = open_parquet_file(part.path).read(columns=names)
    except (pa.ArrowException, OSError) as error:
        raise unreadable_objects_error([part.key]) from error
    if not part.is_whole:
        rows = rows.slice(part.row_start, part.row_end - part.row_start)
    size = rows.num_rows
    # The places in the object, from 0.
    numbers = (
        rows[OFFSET_COLUMN].combine_chunks()
        if part.has_row_numbers
        else pa.array(np.arange(part.row_start, part.row_start + size, dtype=np.int64))
    )
    # The columns that a scan by tasks takes from the folders' names.
    place = [
        pa.array(np.full(size, value, kind.to_pandas_dtype()))  # faster than `pa.repeat`
        for value, (_, _, kind) in zip(
            (part.member, index, part.ordinal), _POSITION_COLUMNS[:3], strict=True
        )
    ]
    return pa.table(
        [*(rows[name].cast(schema.field(name).type) for name in names), *place, numbers],
        schema=schema,
    )


def _add_positions(frame: Frame, spec: PipelineSpec, cut: Cut) -> Frame:
    """Add provenance and position; the latter from ordinal and row."""
    columns = [*select_provenance(spec, cut), "shiftleft(_o, 32) + _row AS _seq"]
    more = ["_time", "_end", "_kind", "_dead", "_detail", "_json", "_rule", "_warned", "_m", "_p"]
    return frame.selectExpr(*columns, "unix_micros(_time) AS _et", *more)


def select_provenance(spec: PipelineSpec, cut: Cut) -> list[str]:
    """The user's columns, `_source`, `_partition` and `_so`, as Spark SQL over rows with `_m`."""
    order = {name: place for place, name in enumerate(spec.sources)}
    members = [piece.member for piece in cut.slices]
    sources = ", ".join(quote_text(m.source) for m in members)
    partitions = ", ".join(quote_text(m.partition) for m in members)
    places = ", ".join(str(order[m.source]) for m in members)
    return [
        *map(quote_name, spec.columns),
        f"array({sources})[_m] AS _source",
        f"array({partitions})[_m] AS _partition",
        f"array({places})[_m] AS _so",
    ]
