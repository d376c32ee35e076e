"""The rows of a cut as one DataFrame, cast to the declared schema, each with its place and its verdict.

Columns besides the user's: ``_m`` (index of the member's slice in the cut), ``_object`` (index into `CutFrame.parts`),
``_source``, ``_partition``, ``_seq``, ``_so`` (place of the source in the spec), ``_et`` (event time in ticks),
``_kind`` (data, barrier, punctuation), ``_dead`` (reason of a dead letter, else null) and ``_detail``. Spark computes only
those that a plan asks for.

Objects are read in place where the store has them as files, else from copies in the scratch folder; either way Spark's tasks
see them under folders ``_m=../_p=../_o=..``, so that their place arrives as partition columns, at no cost per row. Few rows are
read in the driver and handed over as Arrow: a third of the time of a scan that has to open every file anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everybody knows

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import CorruptObjectsError, Cut
from tidegate.jobs.sources.footers import parquet_file
from tidegate.jobs.sources.kafka import PLACE
from tidegate.jobs.sources.view import STAGED
from tidegate.jobs.spark.cast import declared, physical_columns, text
from tidegate.jobs.spark.schema import is_nanos, quote, spark_of_declared
from tidegate.jobs.spark.staging import Staging
from tidegate.jobs.spec.errors import TransientError
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = [
    "SMALL_ROWS",
    "CutFrame",
    "Ints",
    "Part",
    "Sessions",
    "arrow_types",
    "frame_of",
    "local_copy",
    "needs_no_cast",
    "open_cut",
    "rows_at",
    "table_at",
    "unreadable",
]

Ints = NDArray[np.int64]
_Read = Callable[[Any, list[tuple[int, "Part"]]], DataFrame]

SMALL_ROWS: Final = 20_000
"""Up to this many rows the driver reads objects itself; `createDataFrame` wins below, a parallel scan above."""
_BITE_ROWS: Final = 250_000
_PLACE: Final = (
    ("_m", "int", pa.int32()),
    ("_p", "int", pa.int32()),
    ("_o", "bigint", pa.int64()),
    ("_row", "bigint", pa.int64()),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One object of a cut.

    Attributes:
        member: index of its slice in the cut.
        path: the object as a file.
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
    def numbered(self) -> bool:
        """Whether the rows' places stand in a column of their own, because some are missing; then all rows are in the cut."""
        return any(name == PLACE for name, _ in self.columns)

    @property
    def whole(self) -> bool:
        """Whether every row of the object is in the cut."""
        return self.numbered or (self.row_start == 0 and self.row_end == self.rows)

    def cut(self, rows: pa.Table) -> pa.Table:
        """The rows of the object that are in the cut."""
        return rows if self.whole else rows.slice(self.row_start, self.row_end - self.row_start)

    def numbers(self, rows: pa.Table) -> Any:
        """The places of the cut's rows in the object."""
        if self.numbered:
            return rows[PLACE].combine_chunks()
        return pa.array(np.arange(self.row_start, self.row_start + rows.num_rows, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class CutFrame:
    """A cut, staged and readable.

    Attributes:
        frame: its rows; None when there are none.
        rows: rows of all kinds in it.
        in_driver: the driver has read them; else tasks will.
    """

    cut: Cut
    parts: tuple[Part, ...]
    frame: DataFrame | None
    rows: int
    in_driver: bool

    def blame(self) -> CorruptObjectsError | TransientError | None:
        """The error that names the objects whose pages cannot be read; None when all can. Reads every part."""
        bad = [part.key for part in self.parts if not _readable(part)]
        return unreadable(bad) if bad else None


@dataclass(frozen=True, slots=True)
class Sessions:
    """Two sessions of one Spark: interpreted for few rows, compiling for many."""

    quick: SparkSession
    full: SparkSession

    def of(self, rows: int) -> SparkSession:
        """The session for so many rows."""
        return self.quick if rows <= SMALL_ROWS else self.full


def open_cut(sessions: Sessions, spec: PipelineSpec, store: Store, cut: Cut, scratch: Path, staging: Staging) -> CutFrame:
    """Stage the objects of a cut below `scratch` and describe their rows. Runs no Spark job."""
    if any(spec.sources[piece.member.source].kafka is not None for piece in cut.slices):
        from tidegate.jobs.spark.kafka import stage_kafka  # late: few pipelines need it

        stage_kafka(sessions.full, spec, cut, scratch / "objects", staging)
    parts = _parts(store, cut, scratch)
    rows = sum(part.row_end - part.row_start for part in parts)
    session, small = sessions.of(rows), rows <= SMALL_ROWS

    def read(columns: Any, chosen: list[tuple[int, Part]]) -> DataFrame:
        return _in_driver(session, columns, chosen) if small else _scan(session, columns, chosen, scratch, staging)

    frame = _typed(spec, cut, list(enumerate(parts)), read)
    if frame is not None and small:
        frame = frame.coalesce(1)  # one task, and no shuffle anywhere behind it
    return CutFrame(cut, parts, frame, rows, small)


def rows_at(sessions: Sessions, spec: PipelineSpec, staged: CutFrame, places: Mapping[int, Ints]) -> DataFrame | None:
    """Some rows of a staged cut, read by the driver: `places` counts the rows of each slice, ascending."""
    wanted = _wanted(staged, places)
    session = sessions.of(sum(found.size for found in wanted.values()))

    def read(columns: Any, chosen: list[tuple[int, Part]]) -> DataFrame:
        return _in_driver(session, columns, chosen, wanted)

    frame = _typed(spec, staged.cut, [(index, staged.parts[index]) for index in wanted], read)
    return None if frame is None else frame.coalesce(1)


def _wanted(staged: CutFrame, places: Mapping[int, Ints]) -> dict[int, Ints]:
    """Index of the part -> rows of its object, where there are any."""
    wanted: dict[int, Ints] = {}
    passed: dict[int, int] = {}
    for index, part in enumerate(staged.parts):
        first, size = passed.get(part.member, 0), part.row_end - part.row_start
        passed[part.member] = first + size
        found = places.get(part.member, np.zeros(0, dtype=np.int64))
        inside = found[np.searchsorted(found, first) : np.searchsorted(found, first + size)]
        if inside.size:
            wanted[index] = inside - first + (0 if part.numbered else part.row_start)  # a staged range begins with its first row
    return wanted


def arrow_types(spec: PipelineSpec) -> dict[str, pa.DataType]:
    """The declared columns as Arrow has them."""
    return {name: _handed_over(spark_of_declared(own).replace(" ", ""), own) for name, own in spec.columns.items()}


def needs_no_cast(spec: PipelineSpec, staged: CutFrame) -> bool:
    """Whether every object holds every declared column in just its type, but for the name of the time zone."""
    types = {name: str(kind) for name, kind in arrow_types(spec).items()}
    for columns in {part.columns for part in staged.parts}:
        found = {name: re.sub(r"^timestamp\[us, tz=.*\]$", "timestamp[us, tz=UTC]", own) for name, own in columns}
        if any(found.get(name) != kind for name, kind in types.items()):
            return False
    return True


def table_at(spec: PipelineSpec, staged: CutFrame, places: Mapping[int, Ints], limit: int) -> tuple[pa.Table, Ints, Ints]:
    """Some rows of a staged cut that need no cast, in order of its slices: declared columns, index of the slice, position.

    Args:
        spec: the pipeline.
        staged: the cut.
        places: as for `rows_at`.
        limit: beyond so many bytes the remaining rows are not read.
    """
    types = arrow_types(spec)
    tables = [pa.schema(types).empty_table()]
    place: list[tuple[Ints, Ints]] = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    size = 0
    for index, wanted in _bites(staged, _wanted(staged, places)):
        part = staged.parts[index]
        fields = {**types, **({PLACE: pa.int64()} if part.numbered else {}), **{name: arrow for name, _, arrow in _PLACE}}
        rows = _read_part(index, part, pa.schema(fields), wanted)
        tables.append(rows.select(list(types)))
        place.append((np.full(rows.num_rows, part.member), (part.ordinal << 32) + rows["_row"].to_numpy()))
        size += tables[-1].nbytes
        if size > limit:
            break
    return pa.concat_tables(tables), np.concatenate([m for m, _ in place]), np.concatenate([seqs for _, seqs in place])


def _bites(staged: CutFrame, wanted: Mapping[int, Ints]) -> Iterator[tuple[int, Ints]]:
    """Rows of objects, some row groups at a time."""
    for index, rows in wanted.items():
        part = staged.parts[index]
        try:
            footer = pq.read_metadata(part.path)
        except (pa.ArrowException, OSError) as error:
            raise unreadable([part.key]) from error
        first, end = 0, 0
        for group in range(footer.num_row_groups):
            end += footer.row_group(group).num_rows
            if end - first >= _BITE_ROWS or group == footer.num_row_groups - 1:
                inside = rows[np.searchsorted(rows, first) : np.searchsorted(rows, end)]
                first = end
                if inside.size:
                    yield index, inside


def _typed(spec: PipelineSpec, cut: Cut, parts: Sequence[tuple[int, Part]], read: _Read) -> DataFrame | None:
    """Objects that look alike are read together; the rows of all, cast and with their places."""
    groups: dict[tuple[Any, ...], list[tuple[int, Part]]] = {}
    for index, part in parts:
        source = spec.sources[cut.slices[part.member].member.source]
        traits = (source.event_time, source.timezone, source.min_event_time, source.barriers)
        groups.setdefault((part.columns, *traits), []).append((index, part))
    frames = []
    for (columns, *_), chosen in groups.items():
        source = spec.sources[cut.slices[chosen[0][1].member].member.source]
        frames.append(declared(read(columns, chosen), source, dict(columns)))
    return _placed(reduce(DataFrame.unionAll, frames), spec, cut) if frames else None


def local_copy(store: Store, key: str, folder: Path) -> Path:
    """The object as a file: in place where the store can, else downloaded once into `folder`."""
    path = store.local_path(key)
    if path is not None:
        return path
    copy = folder / key.replace("/", "~")
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        store.download(key, copy)
    return copy


def _parts(store: Store, cut: Cut, scratch: Path) -> tuple[Part, ...]:
    found = [(index, part) for index, piece in enumerate(cut.slices) for part in piece.parts]
    with ThreadPoolExecutor(8) as pool:  # a download waits for the network, not for a core
        paths = list(pool.map(lambda item: local_copy(store, item[1]["key"], scratch / "objects"), found))
    return tuple(
        Part(
            index,
            part["key"],
            part["etag"],
            part["ordinal"],
            part["rows"],
            part["row_start"],
            part["row_end"],
            path,
            tuple(part["columns"].items()),
        )
        for (index, part), path in zip(found, paths, strict=True)
    )


def _readable(part: Part) -> bool:
    try:
        pq.read_table(part.path)
    except (pa.ArrowException, OSError):
        return False
    return True


def unreadable(keys: Sequence[str]) -> CorruptObjectsError | TransientError:
    """The error for objects whose pages are corrupt. A copy of offsets is not the topic: it is fetched anew, never given up."""
    staged = [key for key in keys if key.startswith(STAGED)]
    if not staged:
        return CorruptObjectsError.of(keys)
    return TransientError(
        f"the driver's copy of {staged[0]} cannot be read",
        code="kafka.copy_unreadable",
        kept="everything sealed so far; the messages stay in their topic",
        advice="it is fetched again by itself; if that does not help, look at the disk of the driver's scratch folder",
        retry_after=1.0,
    )


def _ddl(columns: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{quote(name)} {own}" for name, own in columns)


def _scan(session: SparkSession, columns: Any, parts: list[tuple[int, Part]], scratch: Path, staging: Staging) -> DataFrame:
    base = scratch / "cut"
    with ThreadPoolExecutor(8) as pool:  # where tasks do not see the disk, this uploads
        paths = list(pool.map(lambda item: staging.shown(_link(base, *item)), parts))
    schema = _ddl([*physical_columns(columns), *((name, own) for name, own, _ in _PLACE[:3])])
    frame = session.read.schema(schema).option("basePath", staging.address(base)).parquet(*paths)
    frame = frame.withColumn("_row", F.expr(PLACE if parts[0][1].numbered else "_metadata.row_index"))
    for index, part in parts:
        if not part.whole:
            frame = frame.where(f"_p <> {index} OR (_row >= {part.row_start}L AND _row < {part.row_end}L)")
    return frame


def _link(base: Path, index: int, part: Part) -> Path:
    folder = base / f"_m={part.member}" / f"_p={index}" / f"_o={part.ordinal}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "rows.parquet"
    if not link.is_symlink():
        link.symlink_to(part.path.resolve())
    return link


def _in_driver(
    session: SparkSession, columns: Any, parts: list[tuple[int, Part]], wanted: Mapping[int, Ints] | None = None
) -> DataFrame:
    physical = physical_columns(columns)
    fields = [pa.field(name, _handed_over(own, dict(columns)[name])) for name, own in physical]
    schema = pa.schema([*fields, *(pa.field(name, arrow) for name, _, arrow in _PLACE)])
    table = pa.concat_tables(
        [_read_part(index, part, schema, None if wanted is None else wanted[index]) for index, part in parts]
    )
    return frame_of(session, table, schema=_ddl([*physical, *((name, own) for name, own, _ in _PLACE)]))


def frame_of(session: SparkSession, table: pa.Table, schema: str | None = None) -> DataFrame:
    """An Arrow table as a DataFrame, in one chunk: Spark takes an empty record batch for the end and loses what follows."""
    whole = table.combine_chunks()
    return session.createDataFrame(whole) if schema is None else session.createDataFrame(whole, schema=schema)


def _handed_over(own: str, arrow: str) -> pa.DataType:
    """The Arrow type that `createDataFrame` takes for a Spark type."""
    if is_nanos(arrow):
        return pa.int64()
    if own.startswith("timestamp"):
        return pa.timestamp("us", None if own == "timestamp_ntz" else "UTC")
    if own.startswith("decimal"):
        precision, scale = own[8:-1].split(",")
        return pa.decimal128(int(precision), int(scale))
    kinds = {"boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64()}
    rest = {"float": pa.float32(), "double": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32()}
    return {**kinds, **rest}[own]


def _read_part(index: int, part: Part, schema: pa.Schema, wanted: Ints | None) -> pa.Table:
    names = schema.names[: -len(_PLACE)]
    try:
        file = parquet_file(part.path)
        rows = part.cut(file.read(columns=names)) if wanted is None else _taken(file, names, wanted)
    except (pa.ArrowException, OSError) as error:
        raise unreadable([part.key]) from error
    size = rows.num_rows
    numbers = part.numbers(rows) if wanted is None or part.numbered else pa.array(wanted)
    place = [
        pa.repeat(pa.scalar(v, t), size) for v, (_, _, t) in zip((part.member, index, part.ordinal), _PLACE[:3], strict=True)
    ]
    return pa.table([*(rows[name].cast(schema.field(name).type) for name in names), *place, numbers], schema=schema)


def _taken(file: pq.ParquetFile, names: list[str], wanted: Ints) -> pa.Table:
    """Rows of an object; row groups without any are skipped."""
    pieces, first = [], 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        inside = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + size)]
        if inside.size:
            pieces.append(file.read_row_group(group, columns=names).take(pa.array(inside - first)))
        first += size
    return pa.concat_tables(pieces)


def _placed(frame: DataFrame, spec: PipelineSpec, cut: Cut) -> DataFrame:
    """Add provenance: the member's names from literals, the position from ordinal and row."""
    order = {name: place for place, name in enumerate(spec.sources)}
    members = [piece.member for piece in cut.slices]
    sources = ", ".join(text(m.source) for m in members)
    partitions = ", ".join(text(m.partition) for m in members)
    places = ", ".join(str(order[m.source]) for m in members)
    columns = [quote(name) for name in spec.columns]
    return frame.selectExpr(
        *columns,
        f"array({sources})[_m] AS _source",
        f"array({partitions})[_m] AS _partition",
        "shiftleft(_o, 32) + _row AS _seq",
        f"array({places})[_m] AS _so",
        "unix_micros(_time) AS _et",
        "_time",
        "_end",
        "_kind",
        "_dead",
        "_detail",
        "_json",
        "_m",
        "_p",
    )
