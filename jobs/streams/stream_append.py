"""Appending a batch to a stream, on Arrow columns.

The rules of `rules.accepted_time` without a loop.

An append is accepted unless its stamp is below the greatest time before it, and what is rejected is
below that by definition; so the stream's last time before each row is the running maximum over
*all* rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.time_units import TICK_MIN


def compute_running_max(times: Any, last: int | None) -> Any:
    """The running maximum of int64 times, starting at `last`."""
    return pc.cumulative_max(_combine_chunks(times), start=TICK_MIN if last is None else last)


def merge_by_stamp(writers: Sequence[Any], now: int) -> Any:
    """The batches of several writers as one.

    By stamp, each writer's own order kept, whatever its stamps say.

    Every batch has a column ``_stamp`` (null: the destination stamps it).
    """
    filled = [table for table in writers if table.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else writers[0]
    keys = [
        pa.table(
            {
                "high": compute_running_max(resolve_stamps(table, now), None),
                "rank": pa.array([rank] * table.num_rows, pa.int32()),
            }
        )
        for rank, table in enumerate(filled)
    ]
    merged = pa.concat_tables(filled)
    number = pa.table({"n": pa.array(range(merged.num_rows))})
    key = pa.concat_tables(keys).append_column("n", number["n"])
    return merged.take(
        pc.sort_indices(
            key, sort_keys=[("high", "ascending"), ("rank", "ascending"), ("n", "ascending")]
        )
    )


def resolve_stamps(rows: Any, now: int) -> Any:
    """The stamp each row wants: its own, or the clock."""
    return pc.fill_null(_combine_chunks(rows["_stamp"]), now)


def append_rows(rows: Any, now: int, last: int | None, position: int) -> tuple[Any, Any]:
    """Append rows in their order.

    (accepted, with ``position`` and ``stream_time``; rejected, with ``_last``).
    """
    high = compute_running_max(resolve_stamps(rows, now), last)
    before = (
        pa.concat_arrays([pa.array([TICK_MIN if last is None else last], pa.int64()), high[:-1]])
        if len(high)
        else high
    )
    stamp = _combine_chunks(rows["_stamp"])
    fits = pc.fill_null(pc.greater_equal(stamp, before), True)
    accepted = rows.append_column("stream_time", high).filter(fits)
    numbers = pa.array(range(position, position + accepted.num_rows), pa.int64())
    return accepted.append_column("position", numbers), rows.append_column("_last", before).filter(
        pc.invert(fits)
    )


def release_below(held: Any, batch: Any, now: int, mark: int) -> tuple[Any, Any]:
    """A buffer: (rows below the mark, in order; rows that go on waiting).

    Both carry the stamp they want.
    """
    arrived = batch.set_column(
        batch.schema.get_field_index("_stamp"), "_stamp", resolve_stamps(batch, now)
    )
    rows = pa.concat_tables([held, arrived])
    key = pa.table(
        {"stamp": _combine_chunks(rows["_stamp"]), "n": pa.array(range(rows.num_rows), pa.int64())}
    )
    rows = rows.take(pc.sort_indices(key, sort_keys=[("stamp", "ascending"), ("n", "ascending")]))
    below = pc.less(_combine_chunks(rows["_stamp"]), mark)
    return rows.filter(below), rows.filter(pc.invert(below))


def _combine_chunks(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
