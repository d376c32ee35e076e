"""Appends a batch to a stream, on Arrow columns without a loop.

The rule is that of `compute_stream_time`. A row is rejected if its stamp is below the greatest time
before it, so rejected rows never raise that maximum. The stream's last time before each row is
therefore the running maximum over *all* rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.time_units import TICK_MIN


def compute_running_max(times: Any, last: int | None) -> Any:
    """Return the running maximum of int64 times, starting at `last`."""
    return pc.cumulative_max(_combine_chunks(times), start=TICK_MIN if last is None else last)


def merge_by_stamp(writers: Sequence[Any], now: int) -> Any:
    """Merge the batches of one or more writers by stamp; each writer's rows keep their order.

    On ties the rows of earlier writers come first. Every batch has a column ``_stamp`` (null: the
    destination stamps the row, here with `now`).
    """
    filled = [table for table in writers if table.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else writers[0]
    merged = pa.concat_tables(filled)
    # Sorting by the running maximum keeps each writer's order. Rows are concatenated by writer, so
    # their number breaks ties in favour of the earlier writer.
    high = [compute_running_max(resolve_stamps(table, now), None) for table in filled]
    key = pa.table({"high": pa.concat_arrays(high), "n": pa.array(range(merged.num_rows))})
    return merged.take(pc.sort_indices(key, sort_keys=[("high", "ascending"), ("n", "ascending")]))


def resolve_stamps(rows: Any, now: int) -> Any:
    """Return the stamp of each row; `now` for rows without one."""
    return pc.fill_null(_combine_chunks(rows["_stamp"]), now)


def append_rows(rows: Any, now: int, last: int | None, position: int) -> tuple[Any, Any]:
    """Append rows in their order, the first accepted one at `position`.

    A row without a stamp gets `now`, or `last` if that is greater, and is never rejected.

    Returns:
        The accepted rows, with ``position`` and ``stream_time``, and the rejected rows, with
        ``_last``.
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


def release_below(held: Any, batch: Any, now: int, mark: int, last: int | None) -> tuple[Any, Any]:
    """Split a buffer and new arrivals at the time `mark`.

    What leaves is never rejected: a row below `last`, the time of the stream, gets that stamp.

    Returns:
        The rows below the mark, in order, and the rows that keep waiting; both with their stamps.
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
    leaving, waiting = rows.filter(below), rows.filter(pc.invert(below))
    if last is not None:
        stamps = pc.max_element_wise(leaving["_stamp"], pa.scalar(last, pa.int64()))
        leaving = leaving.set_column(leaving.schema.get_field_index("_stamp"), "_stamp", stamps)
    return leaving, waiting


def _combine_chunks(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
