"""Rows of a stream with the slots in which they arrived: the data that a stream merge computes on.

Rows are Arrow tables with the columns of `make_stream_columns`, in order of their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.sinks.row_positions import ARRIVAL_SLOT_COLUMN, SPLICE_COLUMN
from tidegate.jobs.streams.row_history import PROVENANCE_FIELDS
from tidegate.time_units import TICK_MIN

ARRIVAL_SLOT: Final = "_turn"
"""Column with the slot in which a row arrived.

A merged row counts as arrived with the row before it, or with the first row if it is the first.
Until `fill_arrival_slots` has worked that out, the column holds the negative slot of its merge."""
NEVER: Final = 2**62
"""The slot of what has not happened yet."""


@dataclass(frozen=True)
class StreamChange:
    """A stream from its first changed row on.

    Attributes:
        first: position of the first changed row.
        rows: the rows after the merge.
        old: the rows before the merge.
    """

    first: int
    rows: Any
    old: Any


def make_stream_columns(columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a stream's rows with their Arrow types; `columns` are the user's."""
    return {
        **{name: to_arrow_type(kind) for name, kind in columns.items()},
        "position": pa.int64(),
        "stream_time": pa.int64(),
        **PROVENANCE_FIELDS,
        ARRIVAL_SLOT: pa.int64(),
    }


def add_arrival_slot(rows: Any, slot: int) -> Any:
    """Return rows that all arrived in one slot; negative: that all were merged in it."""
    return rows.append_column(ARRIVAL_SLOT, pa.array([slot] * rows.num_rows, pa.int64()))


def fill_arrival_slots(slots: Any) -> Any:
    """Replace the negative slots of merged rows; the result never decreases."""
    given = np.asarray(slots)
    if len(given) == 0:
        return pa.array([], pa.int64())
    arrived = given > 0
    front = int(np.argmax(arrived)) if arrived.any() else len(given)
    filled = np.where(arrived, given, TICK_MIN)
    # Merged rows in front of all others arrive with the first one, but not after their own merge.
    first = given[front] if front < len(given) else NEVER
    filled[:front] = np.minimum(first, -given[:front])
    return pa.array(np.maximum.accumulate(filled), pa.int64())


def order_stream_rows(parts: Sequence[Any], position: int) -> Any:
    """Return the rows of all parts by stamp, with positions from `position` and arrival slots.

    On ties the rows of earlier parts come first.
    """
    rows = pa.concat_tables(parts)
    rows = rows.take(pa.array(np.argsort(rows["stream_time"].to_numpy(), kind="stable")))
    positions = pa.array(range(position, position + rows.num_rows), pa.int64())
    rows = replace_column(rows, "position", positions)
    return replace_column(rows, ARRIVAL_SLOT, fill_arrival_slots(rows[ARRIVAL_SLOT]))


def find_first_difference(old: Any, new: Any) -> int | None:
    """Return the number of the first row that differs between two tables; None if none does."""
    shared = min(old.num_rows, new.num_rows)
    same = np.ones(shared, bool)
    for name in new.column_names:
        a, b = (table[name].slice(0, shared) for table in (old, new))
        both_null = pc.and_(pc.is_null(a), pc.is_null(b))
        same &= np.asarray(pc.or_(pc.fill_null(pc.equal(a, b), False), both_null))
    if not same.all():
        return int(np.argmin(same))
    return None if old.num_rows == new.num_rows else shared


def format_rewritten_rows(change: StreamChange, request: str) -> Any:
    """Return the rows of a change as the merge writes them into the stream's table.

    If the change leaves no rows, one row without `_id` marks where the stream ends now.
    """
    rows = change.rows
    if rows.num_rows == 0:
        values = {name: [None] for name in rows.column_names} | {"position": [change.first]}
        rows = pa.table(values, schema=rows.schema)
    times = rows["stream_time"].cast(pa.timestamp("us", tz="UTC"))
    rows = replace_column(rows, "stream_time", times).rename_columns(
        [ARRIVAL_SLOT_COLUMN if name == ARRIVAL_SLOT else name for name in rows.column_names]
    )
    return rows.append_column(SPLICE_COLUMN, pa.array([request] * rows.num_rows, pa.string()))


def replace_column(table: Any, name: str, values: Any) -> Any:
    """Return a table with other values in one column."""
    return table.set_column(table.column_names.index(name), name, values)


def slice_slot(rows: Any, slot: int) -> Any:
    """Return the rows that arrived in a slot, without that column."""
    slots = rows[ARRIVAL_SLOT].to_numpy()
    begin, end = np.searchsorted(slots, [slot, slot + 1])
    return rows.slice(begin, end - begin).drop_columns([ARRIVAL_SLOT])


def apply_caught_up_slots(
    slots: Any, caught_up: Sequence[tuple[int, int, int]], cursor: int, begin: int
) -> Any:
    """Return the slots in which an attachment took rows, from the slots in which they arrived.

    Args:
        slots: the slot in which each row arrived.
        caught_up: `AttachmentState.caught_up`: rows that were taken later than they arrived.
        cursor: position of the first row that was not taken yet.
        begin: position of the first of `slots`.
    """
    taken = slots.copy()
    for start, end, slot in caught_up:
        low, high = max(start - begin, 0), max(end - begin, 0)
        taken[low:high] = np.maximum(taken[low:high], slot)
    taken[max(cursor - begin, 0) :] = NEVER
    return taken


def find_caught_up_ranges(arrived: Any, taken: Any, begin: int) -> list[tuple[int, int, int]]:
    """Return `AttachmentState.caught_up` for rows from `begin` on; the inverse of the above."""
    ranges: list[tuple[int, int, int]] = []
    for index in np.flatnonzero((taken > arrived) & (taken < NEVER)):
        position, slot = begin + int(index), int(taken[index])
        if ranges and ranges[-1][1:] == (position, slot):
            ranges[-1] = (ranges[-1][0], position + 1, slot)
        else:
            ranges.append((position, position + 1, slot))
    return ranges
