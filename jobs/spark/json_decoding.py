"""Plain JSON messages of a topic become files of rows without Spark SQL.

Arrow parses a batch of objects at once, in the driver or in Spark's Python workers. The workers
import this module, so it imports little. Messages that Arrow might read in another way than Spark
are handed back, and Spark reads them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

_SMALLEST_BATCH = 64
"""So many messages go to Spark for one odd message among them; a larger batch is halved."""
_LOWER_HALF = (1 << 32) - 1
_ROW_GROUP = 65_536
"""Rows of a partition that are held before they are written."""
_MOST_HELD_BYTES = 64 << 20
"""So much is held for all partitions together."""
_PARSERS = 2
"""Threads that parse batches in the driver."""
PARTITION: Final = "_partition"
"""Column of a staged range: the partition of the topic."""
_NO_ROWS = pa.table({PARTITION: pa.array([], pa.int32())})
_MOST = 1_000
"""Spark refuses longer numbers and deeper values. A text of this length has neither."""
_MOST_BYTES = 50_000
"""Spark refuses names of more characters. Longer messages gain little from Arrow."""
_ODD_NUMBER = r"[0-9]{300}|[:,\[]\s*-?(NaN|Inf)"
_MOST_DIGITS = 15
"""A double gives so many decimal digits back, and holds ten to the power of up to 22 exactly."""
_MOST_SCALE = 22
_DATE = "[1-9][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = "(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9])"


@dataclass(frozen=True)
class PlainMessages:
    """What becomes of the plain messages of a topic.

    Attributes:
        fields: of an object, with the types of their columns.
        columns: of the file: those of the source, then four: the reason why a message is bad, its
            text, its offset within 32 bits, its partition.
        former: column -> the name that its field had before.
        envelope: column -> ``key`` or ``timestamp`` of the message.
        ignore_others: whether an object may have more fields.
        tick: microseconds in the unit of times that are numbers; None: they are ISO texts.
    """

    fields: pa.Schema
    columns: pa.Schema
    former: Mapping[str, str]
    envelope: Mapping[str, str]
    ignore_others: bool
    tick: int | None


MESSAGE_DDL: Final = "key binary, value binary, partition int, offset bigint, timestamp timestamp"
"""Columns of the messages that Spark has to read."""


def write_messages(messages: DataFrame, plan: PlainMessages, folder: Path) -> None:
    """Let Spark's tasks write the messages of ranges into a folder, as `write_batches` does.

    The messages have the columns of `MESSAGE_DDL`. The tasks have to see the folder.
    """

    def write_range(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the messages of one task, in a Python worker of Spark's."""
        _write_tables((split_messages(batch, plan) for batch in batches), folder)
        return iter(())

    rows = messages.mapInArrow(write_range, MESSAGE_DDL)
    rows.write.format("noop").mode("append").save()


def write_batches(
    batches: Iterable[pa.RecordBatch], plan: PlainMessages | None, folder: Path
) -> None:
    """Write messages into a folder, each partition in their order into files of its own.

    ``plain-*.parquet`` has the columns of the plan. ``other-*.parquet`` has the messages that Spark
    has to read, as they came; without a plan it has all.
    """
    if plan is None:
        _write_tables(((_NO_ROWS, pa.Table.from_batches([batch])) for batch in batches), folder)
        return
    with ThreadPoolExecutor(_PARSERS, thread_name_prefix="kafka-parse") as pool:
        _write_tables(_parse_ahead(pool, batches, plan), folder)


def _parse_ahead(
    pool: ThreadPoolExecutor, batches: Iterable[pa.RecordBatch], plan: PlainMessages
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Parse a few batches beside each other; yield what becomes of each, in their order."""
    waiting = deque[Future[tuple[pa.Table, pa.Table]]]()
    for batch in batches:
        waiting.append(pool.submit(split_messages, batch, plan))
        if len(waiting) > _PARSERS:
            yield waiting.popleft().result()
    yield from (parsed.result() for parsed in waiting)


def _write_tables(found: Iterable[tuple[pa.Table, pa.Table]], folder: Path) -> None:
    """Write pairs of plain rows and other messages."""
    writers: dict[tuple[str, int], _RowsWriter] = {}
    for rows, others in found:
        for kind, table, column in (("plain", rows, PARTITION), ("other", others, "partition")):
            for partition, own in _split_by_partition(table, column):
                if (kind, partition) not in writers:
                    path = folder / f"{kind}-{uuid4().hex}.part"
                    writers[kind, partition] = _RowsWriter(path)
                writers[kind, partition].add(own)
        if sum(writer.held_bytes for writer in writers.values()) > _MOST_HELD_BYTES:
            for writer in writers.values():
                writer.flush()
    for writer in writers.values():
        writer.finish()


def _split_by_partition(table: pa.Table, column: str) -> Iterator[tuple[int, pa.Table]]:
    partitions = pc.unique(table[column]).to_pylist()
    for partition in partitions:
        is_own = pc.equal(table[column], partition)
        yield partition, table if len(partitions) == 1 else table.filter(is_own)


class _RowsWriter:
    """Writes one file, many rows at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._pieces = path, list[pa.Table]()
        self._writer: Any = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are not yet written."""
        return sum(piece.nbytes for piece in self._pieces)

    def add(self, rows: pa.Table) -> None:
        """Take rows behind the others."""
        self._pieces.append(rows)
        if sum(piece.num_rows for piece in self._pieces) >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._pieces:
            rows = pa.concat_tables(self._pieces)
            self._pieces.clear()
            # Not before: a topic may have more partitions than a process may have files open.
            self._writer = self._writer or pq.ParquetWriter(
                self._path, rows.schema, use_dictionary=False, compression="lz4"
            )
            self._writer.write_table(rows)

    def finish(self) -> None:
        """Write the rest. Only now the file has its name: Spark may run a task that fails again."""
        self.flush()
        self._writer.close()
        self._path.rename(self._path.with_suffix(".parquet"))


def split_messages(batch: pa.RecordBatch, plan: PlainMessages) -> tuple[pa.Table, pa.Table]:
    """Return the rows of plain messages, and the messages that Spark has to read."""
    found = parse_objects(batch["value"], plan)
    if "key" in plan.envelope.values() and _has_odd_keys(batch):
        found = pa.nulls(len(found), found.type)
    plain = found.is_valid()
    if "timestamp" in plan.envelope.values():
        plain = pc.and_(plain, batch["timestamp"].is_valid())
    fields = dict(zip(plan.fields.names, found.filter(plain).flatten(), strict=True))
    messages = batch.filter(plain)
    own: list[Any] = [
        messages[plan.envelope[column.name]].cast(column.type)
        if column.name in plan.envelope
        else pc.coalesce(fields[column.name], fields[plan.former[column.name]])
        if column.name in plan.former
        else fields[column.name]
        for column in list(plan.columns)[:-4]
    ]
    good = pa.nulls(messages.num_rows, pa.string())
    offsets = pc.bit_wise_and(messages["offset"], _LOWER_HALF)
    rows = pa.table([*own, good, good, offsets, messages["partition"]], plan.columns)
    return rows, pa.Table.from_batches([batch.filter(pc.invert(plain))])


def _has_odd_keys(batch: pa.RecordBatch) -> bool:
    """Whether a key is not UTF-8."""
    try:
        batch["key"].cast(pa.string())
    except pa.ArrowInvalid:
        return True
    return False


def parse_objects(values: pa.Array, plan: PlainMessages) -> pa.Array:
    """Return messages as structs of the fields; null where Spark has to read the message."""
    fit = _find_objects(values, ignore_others=plan.ignore_others)
    texts = values.filter(pa.array(fit))
    try:
        rows = _parse_texts(texts, plan)
    except pa.ArrowException:
        if len(values) <= _SMALLEST_BATCH:
            return pa.nulls(len(values), pa.struct(plan.fields))
        middle = len(values) // 2
        halves = (values[:middle], values[middle:])
        return pa.concat_arrays([parse_objects(half, plan) for half in halves])
    return rows.take(pa.array(np.cumsum(fit) - 1, mask=~fit))


def _find_objects(values: pa.Array, *, ignore_others: bool) -> Any:
    """Messages that are objects if they can be parsed, and of which Arrow accepts no more."""
    fit = pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))
    sizes = pc.binary_length(values)
    if ignore_others or pc.any(pc.greater(sizes, _MOST)).as_py():
        depth = pc.add(pc.count_substring(values, "{"), pc.count_substring(values, "["))
        odd = pc.or_(pc.match_substring_regex(values, _ODD_NUMBER), pc.greater(depth, _MOST))
        fit = pc.and_not(fit, pc.or_(odd, pc.greater(sizes, _MOST_BYTES)))
    return pc.fill_null(fit, False).to_numpy(zero_copy_only=False)


def _parse_texts(texts: pa.Array, plan: PlainMessages) -> pa.Array:
    """Objects, one for each text; null where a value is read in another way by Spark.

    Raises:
        pa.ArrowException: one of the texts is odd.
    """
    schema = plan.fields
    if not len(texts):
        return pa.nulls(0, pa.struct(schema))
    # The cast refuses what is not UTF-8. A zero byte would end the input.
    words = texts.cast(pa.string())
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(words)], words), "\n")[0].as_buffer()
    parsed = [field.with_type(_choose_parsed_type(field.type, plan.tick)) for field in schema]
    found = pj.read_json(
        pa.BufferReader(lines),
        pj.ReadOptions(use_threads=False, block_size=lines.size + 1),
        pj.ParseOptions(
            explicit_schema=pa.schema(parsed),
            unexpected_field_behavior="ignore" if plan.ignore_others else "error",
        ),
    )
    # Each text begins and ends with a brace, so as many objects as texts are one in each: between
    # a closing and an opening brace there is a comma in anything but a row of objects.
    if found.num_rows != len(words) or b"\0" in memoryview(lines).tobytes():
        raise pa.ArrowInvalid("a message has more than one object")
    found.validate(full=True)  # an escape of half a character is no UTF-8
    columns, odd = [], np.zeros(len(words), dtype=bool)
    for field in schema:
        column, strange = _convert_column(found[field.name].combine_chunks(), field.type, plan.tick)
        columns.append(column)
        if strange is not None:
            odd |= strange
    return pa.StructArray.from_arrays(columns, fields=list(schema), mask=pa.array(odd))


def _choose_parsed_type(kind: pa.DataType, tick: int | None) -> pa.DataType:
    """What Arrow reads a field as, before it is converted."""
    # Spark takes a fraction for a double on its way to a decimal, and Arrow's own decimals may
    # overflow without a word.
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_timestamp(kind):
        return pa.string() if tick is None else pa.int64()
    return pa.string() if pa.types.is_date(kind) else kind


def _convert_column(column: Any, kind: pa.DataType, tick: int | None) -> tuple[Any, Any]:
    """The values as they were parsed, as values of a type, and which of them Spark has to read.

    Raises:
        pa.ArrowException: one of the values cannot be converted.
    """
    if pa.types.is_floating(column.type):
        values = column.fill_null(0.0).to_numpy()
        if pa.types.is_decimal(kind):
            ticks, strange = _find_decimals(values, kind)
            whole = pa.array(ticks, mask=column.is_null().to_numpy(zero_copy_only=False))
            wide = whole.cast(pa.decimal128(19, 0)).view(pa.decimal128(19, kind.scale))
            return wide.cast(kind), strange
        # Spark reads -0 as 0.0, and takes no number for an infinity.
        return column, ~np.isfinite(values) | ((values == 0) & np.signbit(values))
    if pa.types.is_timestamp(kind) and tick is not None:
        return pc.multiply_checked(column, tick).cast(kind), None
    if pa.types.is_temporal(kind):
        form = f"^{_DATE}$" if pa.types.is_date(kind) else f"^{_DATE}[T ]{_TIME}{_ZONE}$"
        plain = pc.fill_null(pc.match_substring_regex(column, form), True)
        values = pc.if_else(plain, column, None).cast(kind)
        return values, pc.invert(plain).to_numpy(zero_copy_only=False)
    return column, None


def _find_decimals(values: Any, kind: Any) -> tuple[Any, Any]:
    """Doubles as decimals without a point, and which of them Spark may take for another one.

    Spark makes a decimal of the text of the double, which has up to 17 digits. Up to 15 of them are
    those of the number as it was written.
    """
    power = 10.0**kind.scale
    with np.errstate(over="ignore"):
        ticks = np.rint(values * power)
    fit = (np.abs(ticks) < 10.0 ** min(_MOST_DIGITS, kind.precision)) & (ticks / power == values)
    fit &= (values == 0) | (kind.scale <= _MOST_SCALE)
    return np.where(fit, ticks, 0).astype(np.int64), ~fit
