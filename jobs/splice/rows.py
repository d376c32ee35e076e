"""Rows of a stream with the slots in which they came: what a merge computes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.columns import to_arrow_type
from tidegate.jobs.sinks.positions import ARRIVAL_SLOT_COLUMN, SPLICE_COLUMN
from tidegate.jobs.spec.time import TICK_MIN
from tidegate.jobs.streams.history import PROVENANCE_FIELDS

__all__ = [
    "NEVER",
    "ARRIVAL_SLOT",
    "StreamChange",
    "find_first_difference",
    "order_stream_rows",
    "make_stream_columns",
    "fill_arrival_slots",
    "add_arrival_slot",
    "format_rewritten_rows",
]

ARRIVAL_SLOT: Final = "_turn"
"""The slot in which a row came; a merged row came with the row before it, in front of all with the first one that was there.

Before that is worked out it is the negative slot of the merge."""
NEVER: Final = 2**62
"""The slot of what has not happened yet."""


@dataclass(frozen=True)
class StreamChange:
    """A stream from its first changed row on.

    Attributes:
        first: position of that row.
        rows: the rows as they will stand; with the columns of `make_stream_columns`.
        old: the rows that stood there.
    """

    first: int
    rows: Any
    old: Any


def make_stream_columns(columns: Mapping[str, str]) -> dict[str, Any]:
    """Columns of the rows of a stream, with their types."""
    user = {name: to_arrow_type(kind) for name, kind in columns.items()}
    return {**user, "position": pa.int64(), "stream_time": pa.int64(), **PROVENANCE_FIELDS, ARRIVAL_SLOT: pa.int64()}


def add_arrival_slot(rows: Any, turn: int) -> Any:
    """Rows that came in one slot; negative: were merged in one."""
    return rows.append_column(ARRIVAL_SLOT, pa.array([turn] * rows.num_rows, pa.int64()))


def fill_arrival_slots(turns: Any) -> Any:
    """Slots of all rows in order: those of merged ones are worked out; they never go back."""
    plain = np.asarray(turns)
    known = plain > 0
    front = int(np.argmax(known)) if known.any() else len(plain)
    filled = np.where(known, plain, TICK_MIN)
    filled[:front] = np.minimum(plain[front] if front < len(plain) else NEVER, -plain[:front])
    return pa.array(np.maximum.accumulate(filled), pa.int64()) if len(filled) else pa.array([], pa.int64())


def order_stream_rows(parts: Sequence[Any], position: int) -> Any:
    """Rows of a stream by stamp, those that stand further in front first on ties, with positions and slots."""
    rows = pa.concat_tables(parts)
    rows = rows.take(pa.array(np.argsort(rows["stream_time"].to_numpy(), kind="stable")))
    rows = _replace_column(rows, "position", pa.array(range(position, position + rows.num_rows), pa.int64()))
    return _replace_column(rows, ARRIVAL_SLOT, fill_arrival_slots(rows[ARRIVAL_SLOT]))


def find_first_difference(old: Any, new: Any) -> int | None:
    """Number of the first row that is not the same in both; None if all are."""
    shared = min(old.num_rows, new.num_rows)
    same = np.ones(shared, bool)
    for name in new.column_names:
        a, b = (t[name].slice(0, shared) for t in (old, new))
        neither = pc.and_(pc.is_null(a), pc.is_null(b))
        same &= np.asarray(pc.or_(pc.fill_null(pc.equal(a, b), False), neither))
    if not same.all():
        return int(np.argmin(same))
    return None if old.num_rows == new.num_rows else shared


def format_rewritten_rows(change: StreamChange, request: str) -> Any:
    """Rows of a stream as a merge writes them. Where none is left, one without `_id` says where the stream ends now."""
    rows = change.rows
    if rows.num_rows == 0:
        values = {name: [None] for name in rows.column_names} | {"position": [change.first]}
        rows = pa.table(values, schema=rows.schema)
    times = rows["stream_time"].cast(pa.timestamp("us", tz="UTC"))
    rows = _replace_column(rows, "stream_time", times).rename_columns([ARRIVAL_SLOT_COLUMN if n == ARRIVAL_SLOT else n for n in rows.column_names])
    return rows.append_column(SPLICE_COLUMN, pa.array([request] * rows.num_rows, pa.string()))


def _replace_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), name, values)
