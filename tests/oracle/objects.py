"""Rows of object slices.

Parquet objects read whole, converted to the spec's types value by value where need be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.oracle.casts import fitted
from tests.oracle.rows import RawRow
from tests.oracle.tables import from_arrow
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC, to_arrow_type
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Slice, join_seq
from tidegate.jobs.sources.object_decoding import BAD_REASON, read_typed_object
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.table_layout import DeadLetterReason
from tidegate.time_units import TICK_MAX

_FARTHEST = 2**63 - 2**57  # a data row's time is at most so far from 0; stated again on purpose
_Column = tuple[
    list[Any], dict[int, tuple[DeadLetterReason, str]]
]  # values, row -> (reason, detail)


class ObjectReader:
    """Gives the rows of object slices from a store."""

    def __init__(self, store: Store, source: SourceSpec) -> None:
        self._store = store
        self._source = source

    def rows(self, part: Slice) -> Iterator[RawRow]:
        """Rows of all parts in order."""
        for piece in part.parts:
            yield from self._piece(piece)

    def _piece(self, piece: dict[str, Any]) -> Iterator[RawRow]:
        found = self._store.get(piece["key"])
        if piece.get("etag") and found.etag != piece["etag"]:
            raise PoisonError(
                f"{piece['key']} changed after it was planned (ETag {piece['etag']}, now"
                f" {found.etag})",
                code="source.changed_object",
                kept="everything sealed so far",
                advice="objects must not be overwritten; put the rows into a new object",
            )
        start, stop = piece["row_start"], piece["row_end"]
        try:
            table = read_typed_object(found.data, "parquet").slice(start, stop - start)
        except (pa.ArrowException, OSError) as error:
            raise CorruptObjectsError.for_keys([piece["key"]]) from error
        columns: dict[str, _Column] = {
            name: self._column(table, name) for name in self._source.columns
        }
        undecoded = (
            table.column(BAD_REASON).to_pylist()
            if BAD_REASON in table.column_names
            else [None] * table.num_rows
        )
        for number, why in enumerate(undecoded):
            found_bad = (faults[number] for _, faults in columns.values() if number in faults)
            bad: tuple[DeadLetterReason, str] | None = (
                ("bad_value", why) if why else next(found_bad, None)
            )
            values = {name: column[number] for name, (column, _) in columns.items()}
            bad = bad or self._find_far_time(values)
            yield RawRow(
                join_seq(piece["ordinal"], start + number), values, piece["key"], found.etag, bad
            )

    def _find_far_time(self, values: dict[str, Any]) -> tuple[DeadLetterReason, str] | None:
        """What is wrong with the times of a data row; the model itself clamps them."""
        marks = self._source.barriers
        kind = values.get(marks.kind) if marks else None
        if marks is not None and kind not in (None, marks.data):
            return None
        for name in (self._source.event_time, self._source.end_time):
            if name is not None and abs(values.get(name) or 0) > _FARTHEST:
                return "bad_value", f"{name} is too far"
        return None

    def _column(self, table: Any, name: str) -> _Column:
        if name not in table.column_names:
            return [None] * table.num_rows, {}
        column, declared = table.column(name), self._source.columns[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if "<" in declared:  # nested values are as the declared type, or of another form
            fault: tuple[DeadLetterReason, str] = ("bad_value", f"{name} is no {declared}")
            raw = column.to_pylist()
            other = not pa.types.is_nested(column.type)
            return raw, {n: fault for n, v in enumerate(raw) if other and v is not None}
        if declared == "timestamp" and pa.types.is_timestamp(column.type):
            ticks = {"s": 1_000_000, "ms": 1_000}.get(column.type.unit, 1)
            numbers = column.cast(pa.int64()).to_pylist()
            far = {n for n, v in enumerate(numbers) if v is not None and abs(v * ticks) > TICK_MAX}
            near = pa.array([None if n in far else v for n, v in enumerate(numbers)], pa.int64())
            values, faults = self._timestamps(near.cast(column.type), name)
            return values, faults | dict.fromkeys(far, ("bad_value", f"{name} is too far"))
        if pa.types.is_string(column.type) and declared == "string":
            return _texts(column, name)
        if column.type == to_arrow_type(declared):
            return from_arrow(column), {}
        return _one_by_one(column, declared, name)

    def _timestamps(self, column: Any, name: str) -> _Column:
        """Finer units are cut to microseconds; naive ones need the source's time zone."""
        if column.type.tz is not None:
            return from_arrow(column.cast(TIMESTAMP_UTC, safe=False)), {}
        if self._source.timezone is None:
            fault: tuple[DeadLetterReason, str] = (
                "naive_time",
                f"{name} has no time zone, and the source has no 'timezone'",
            )
            raw = column.to_pylist()
            return raw, {n: fault for n, value in enumerate(raw) if value is not None}
        naive = column.cast(pa.timestamp("us"), safe=False)
        zoned = pc.assume_timezone(
            naive, self._source.timezone, ambiguous="earliest", nonexistent="earliest"
        )
        skipped: tuple[DeadLetterReason, str] = (
            "bad_value",
            f"{name} is a local time that {self._source.timezone} skips",
        )
        same = pc.fill_null(pc.equal(pc.local_timestamp(zoned), naive), True).to_pylist()
        faults = {number: skipped for number, is_same in enumerate(same) if not is_same}
        return from_arrow(zoned.cast(TIMESTAMP_UTC)), faults


def _texts(column: Any, name: str) -> _Column:
    values: list[Any] = []
    faults: dict[int, tuple[DeadLetterReason, str]] = {}
    for number, raw in enumerate(column.cast(pa.binary()).to_pylist()):
        values.append(None if raw is None else raw.decode("utf-8", "replace"))
        if raw is not None and values[-1].encode() != raw:
            faults[number] = ("bad_value", f"{name} is not UTF-8")
    return values, faults


def _one_by_one(column: Any, declared: str, name: str) -> _Column:
    values: list[Any] = []
    faults: dict[int, tuple[DeadLetterReason, str]] = {}
    for number, found in enumerate(column):
        value = found.as_py()
        try:
            values.append(None if value is None else fitted(value, column.type, declared))
        except (ValueError, pa.ArrowNotImplementedError) as error:
            values.append(value)
            faults[number] = ("bad_value", f"{name}: {error}")
    return values, faults
