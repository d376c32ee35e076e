"""Reads the rows of one slice of a cut, cast to the declared schema.

Each row carries its position and the reason why it is bad, if it is. Columns besides the user's:
``_m`` (index of the member's slice in the cut), ``_p`` (index into the parts of the cut),
``_source``, ``_partition``, ``_seq``, ``_so`` (place of the source in the spec), ``_time`` and
``_et`` (event time as a timestamp and in ticks), ``_end`` (exclusive end in ticks), ``_kind``
(data, barrier, punctuation; null if unknown), ``_dead`` (reason of a dead letter, else null),
``_detail``, ``_json`` (the row as read), ``_rule`` (the rule that removed the row) and ``_warned``
(other rules that it breaks, with commas).
"""

import errno
import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.local_store import translate_os_error
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import replace_column, to_arrow_type
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rules.declared_values import convert_rows
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame, combine_frames
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.rules.worker_memory import require_room
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.object_decoding import BAD_REASON, open_parquet_file
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

from .column_casts import (
    cast_to_declared,
    is_nanosecond_timestamp,
    select_readable_columns,
    spark_to_arrow_type,
)

POSITION_COLUMNS: Final = (
    ("_m", "int", pa.int32()),
    ("_p", "int", pa.int32()),
    ("_o", "bigint", pa.int64()),
    ("_row", "bigint", pa.int64()),
)
_BATCH_ROWS: Final = 128 << 10
PLANNED: Final = ("key", "etag", "ordinal", "rows", "row_start", "row_end")
LARGE_READ: Final = 32 << 20
"""Bytes of pages up to which no one asks whether there is room for them."""
_TRAITS = {
    *("columns", "select", "where", "rules", "event_time", "end_time", "timezone"),
    *("min_event_time", "barriers"),
}

PhysicalColumns = tuple[tuple[str, str], ...]
"""Columns of an object, and the text of each one's Arrow type."""


class RowReader:
    """Reads ranges of the rows of a Parquet object.

    A range that continues the last one, with the same columns, decodes no row again. What is held
    are the bytes of a row group, or of several small ones, and some rows.
    """

    def __init__(self, source: Path | io.IOBase) -> None:
        self._source = source
        self._file: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._left: pa.RecordBatch | None = None
        self._next: tuple[list[str], int] | None = None
        self._asked: list[int] = []  # ends of ranges

    def read_rows(self, names: list[str], start: int, end: int) -> pa.Table:
        """Return columns of the rows from `start` on, before `end`; fewer if it has fewer."""
        if self._file is None:
            self._file = open_parquet_file(self._source)
        self._asked.append(end)
        if self._next != (names, start):
            self._left = None
            self._batches = _iterate_batches(self._file, names, start, self._asked)
        found, missing = list[pa.RecordBatch](), end - start
        while missing > 0:
            batch = self._left or next(self._batches, None)
            if batch is None:
                break
            own = batch.slice(0, missing)
            self._left = batch.slice(missing) if batch.num_rows > missing else None
            missing -= own.num_rows
            found.append(own)
        self._next = (names, end)
        schema = self._file.read_row_groups([], columns=names).schema
        return pa.Table.from_batches(found, schema)


def _iterate_batches(
    file: pq.ParquetFile, names: list[str], start: int, asked: list[int]
) -> Iterator[pa.RecordBatch]:
    """Yield all rows from `start` on; no batch before it is held.

    Arrow fetches small row groups together, as far as their rows are asked for: the last number of
    `asked` is that of the first row which is not.
    """
    groups = list(map(file.metadata.row_group, range(file.num_row_groups)))
    ends = [0, *accumulate(group.num_rows for group in groups)]
    number = bisect_right(ends, start) - 1
    skipped = start - ends[number]
    rows = min(_BATCH_ROWS, asked[-1] - start)  # few are asked for if their values are long
    while number < len(groups):
        chosen, size = [number], groups[number].total_byte_size
        for following in range(number + 1, len(groups)):
            size += groups[following].total_byte_size
            if ends[following] >= asked[-1] or size > LARGE_READ:
                break
            chosen.append(following)
        _require_room_for_groups(file.metadata, chosen, names, at_once=False)
        for batch in file.iter_batches(max(rows, 1), chosen, names):
            if skipped < batch.num_rows:
                yield batch.slice(skipped)
            skipped = max(skipped - batch.num_rows, 0)
        number = chosen[-1] + 1


@dataclass(frozen=True, slots=True)
class CutPart:
    """The rows of one object that are in a cut.

    Attributes:
        member: index of its slice in the cut.
        ordinal: place of the object in its member.
        rows: of the whole object.
        row_start, row_end: the rows in the cut, the end exclusive; all if `has_row_numbers`.
        path: the object as a local file, its bytes, or what reads them; of a topic, the rows of the
            range.
        columns: physical column -> Arrow type text, as planned.
        reader: has read the rows before these, if another batch had them.
        skipped: how many of the first rows of the object `path` lacks.
    """

    member: int
    key: str
    etag: str
    ordinal: int
    rows: int
    row_start: int
    row_end: int
    path: Path | io.IOBase | pa.Table
    columns: PhysicalColumns
    reader: RowReader | None = None
    skipped: int = 0

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


NumberedPart = tuple[int, CutPart]  # its index in the cut
PartsForm = tuple[PhysicalColumns, str]
"""What objects agree in that look alike: columns, and what decides about casts and verdicts."""


def group_similar_parts(
    spec: PipelineSpec, cut: Cut, parts: Sequence[NumberedPart], names: set[str] | None = None
) -> dict[PartsForm, list[NumberedPart]]:
    """Return the parts that share one plan, by what they agree in."""
    groups: dict[PartsForm, list[NumberedPart]] = {}
    for index, part in parts:
        source = spec.sources[cut.slices[part.member].member.source]
        columns = tuple((c, own) for c, own in part.columns if names is None or c in names)
        traits = source.model_dump_json(include=_TRAITS)
        groups.setdefault((columns, traits), []).append((index, part))
    return groups


def read_slice(
    spec: PipelineSpec, cut: Cut, parts: Sequence[CutPart], member: int, names: set[str]
) -> tuple[Frame, list[pa.Table]]:
    """The rows of one slice in DuckDB, with only these columns of the objects; the rest is null.

    Also the tables that they are made of, one for each form of objects.

    Args:
        spec: the pipeline.
        cut: what the slice is in.
        parts: of all slices of the cut.
        member: index of the slice.
        names: columns, none of them nested.

    Raises:
        CorruptObjectsError: an object cannot be read.
    """
    own = [(i, part) for i, part in enumerate(parts) if part.member == member]
    rows, tables = None, []
    for (columns, _), chosen in group_similar_parts(spec, cut, own, names).items():
        source = spec.sources[cut.slices[member].member.source]
        table = read_parts(columns, chosen, source)
        has_reasons = BAD_REASON in table.column_names
        physical = dict(columns) | ({BAD_REASON: "string"} if has_reasons else {})
        cast = cast_to_declared(DuckFrame.from_table(table), source, physical)
        rows = combine_frames(rows, cast)
        tables.append(table)
    return add_positions(rows, spec, cut), tables


def read_parts(
    columns: Any,
    parts: list[NumberedPart],
    source: SourceSpec,
    to_nested_type: Callable[[str], pa.DataType] | None = None,
) -> pa.Table:
    """The rows of objects that look alike, with their places; `BAD_REASON` if a value is none.

    `to_nested_type` gives the Arrow type of a nested type of Spark SQL; without it there may be no
    such column.
    """
    schema = build_row_schema(columns, to_nested_type)
    tables = [_read_part(index, part, schema, source) for index, part in parts]
    return pa.concat_tables(tables, promote_options="default")


def build_row_schema(
    columns: Any, to_nested_type: Callable[[str], pa.DataType] | None = None
) -> pa.Schema:
    """The schema of the rows of `read_parts`, without `BAD_REASON`."""
    fields = [
        pa.field(
            name,
            to_nested_type(own)
            if to_nested_type is not None and "<" in own
            else _choose_arrow_type(own, dict(columns)[name]),
        )
        for name, own in select_readable_columns(columns)
    ]
    return pa.schema([*fields, *(pa.field(name, arrow) for name, _, arrow in POSITION_COLUMNS)])


def _choose_arrow_type(own: str, arrow: str) -> pa.DataType:
    """The Arrow type that `createDataFrame` takes for a Spark type."""
    if is_nanosecond_timestamp(arrow):
        return pa.int64()
    if own == "timestamp":
        return pa.timestamp("us", "UTC")
    if own.startswith("decimal"):
        return to_arrow_type(own)
    return pa.type_for_alias(spark_to_arrow_type(own))


def read_stored_rows(part: CutPart, numbers: pa.Array) -> pa.Table:
    """Rows of an object, by their places in it, with all columns that can be read, as stored."""
    names = [name for name, _ in select_readable_columns(part.columns)]
    if isinstance(part.path, pa.Table):
        rows = part.path.select(names)
        return rows.take(pc.index_in(numbers, value_set=rows[OFFSET_COLUMN]))
    first, last = pc.min_max(numbers).as_py().values()
    rows = _read_some_rows(RowReader(part.path), part, names, first, last + 1)
    return rows.take(pc.subtract(numbers, first))


@contextmanager
def name_damaged_object(part: CutPart) -> Iterator[None]:
    """Say of Arrow's errors that the object is damaged, unless the system has refused to read it.

    Raises:
        CorruptObjectsError: the object is damaged, or gone.
        TidegateError: its file system has failed; a dead letter would take its rows away.
    """
    try:
        yield
    except MemoryError:  # Arrow's is an ArrowException
        raise
    except (pa.ArrowException, OSError) as error:
        # Arrow gives an error of the system its number, and none to what it finds damaged.
        number = error.errno if isinstance(error, OSError) else None
        if number not in (None, errno.ENOENT):
            path = part.path if isinstance(part.path, Path) else Path(part.key)
            raise translate_os_error(path, error) from error
        raise CorruptObjectsError.for_keys([part.key]) from error


def _read_columns(part: CutPart, names: list[str]) -> pa.Table:
    """Columns of an object."""
    if isinstance(part.path, pa.Table):
        return part.path.select(names)
    with name_damaged_object(part):
        file = open_parquet_file(part.path)
        _require_room_for_groups(file.metadata, range(file.metadata.num_row_groups), names)
        return file.read(columns=names)


def _require_room_for_groups(
    footer: Any, groups: Iterable[int], names: list[str], *, at_once: bool = True
) -> None:
    """Refuse row groups whose columns a worker cannot hold, before it tries.

    If they are not decoded at once, their pages are held as they are stored.

    Raises:
        OutOfRoomError: their pages need more memory than is left.
    """
    found = list(map(footer.row_group, groups))
    if sum(one.total_byte_size for one in found) < LARGE_READ:
        return
    columns = (one.column(place) for one in found for place in range(one.num_columns))
    wanted = set(names)
    require_room(
        sum(
            column.total_uncompressed_size if at_once else column.total_compressed_size
            for column in columns
            if column.path_in_schema.partition(".")[0] in wanted
        )
    )


def _read_some_rows(
    reader: RowReader, part: CutPart, names: list[str], start: int, end: int
) -> pa.Table:
    """Rows of an object by their places in it, the end exclusive."""
    with name_damaged_object(part):
        return reader.read_rows(names, start - part.skipped, end - part.skipped)


def _read_part(index: int, part: CutPart, schema: pa.Schema, source: SourceSpec) -> pa.Table:
    names = schema.names[: -len(POSITION_COLUMNS)]
    if part.is_whole:
        rows = _read_columns(part, names)
    else:
        reader = part.reader or RowReader(part.path)
        rows = _read_some_rows(reader, part, names, part.row_start, part.row_end)
    size = rows.num_rows
    # The places in the object, from 0.
    numbers = (
        rows[OFFSET_COLUMN].combine_chunks()
        if part.has_row_numbers
        else np.arange(part.row_start, part.row_start + size, dtype=np.int64)
    )
    place = [  # faster than `pa.repeat`
        np.full(size, part.member, np.int32),
        np.full(size, index, np.int32),
        np.full(size, part.ordinal, np.int64),
    ]
    own = pa.schema([schema.field(name) for name in names])
    columns, reasons = convert_rows(rows, own, source.columns)
    found = pa.table([*columns, *place, numbers], schema=schema)
    if reasons is None:
        return found
    if BAD_REASON in names:  # of a decoded object: what it says of a row comes first
        return replace_column(found, BAD_REASON, pc.coalesce(found[BAD_REASON], reasons))
    return found.append_column(BAD_REASON, reasons)


def add_positions(
    frame: Frame, spec: PipelineSpec, cut: Cut, others: tuple[str, ...] = ()
) -> Frame:
    """Add provenance and position; the latter from ordinal and row. `others` are kept."""
    columns = [*select_provenance(spec, cut), "shiftleft(_o, 32) + _row AS _seq"]
    more = ["_time", "_end", "_kind", "_dead", "_detail", "_json", "_rule", "_warned", "_m", "_p"]
    return frame.selectExpr(*columns, "unix_micros(_time) AS _et", *more, *others)


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
