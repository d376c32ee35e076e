"""Merges many small state segments of one kind, so that an epoch opens few files.

Order segments are put one after the other without the rows that have left; window partials are
merged. Sessions need none: their segment is written anew anyway.
"""

from __future__ import annotations

from typing import Final

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.epoch_context import EpochContext
from tidegate.jobs.spark.sql_conditions import below_mark_sql, window_purged_sql

MANY_SEGMENTS: Final = 16
"""More live segments of one kind than this are merged."""
_SMALL_ROWS: Final = 200_000
"""Larger segments are left alone.

Rewriting them again and again would cost more than opening them.
"""


def compact_order_segments(
    epoch: EpochContext, live: list[FileRef], mark: ReleaseMark
) -> tuple[FileRef, ...]:
    """The order segments after compaction; rows below the mark have left."""
    small, large = _split_by_size(live)
    frame = epoch.load_segments(small) if len(small) > MANY_SEGMENTS else None
    if frame is None:
        return tuple(live)
    sections = [
        bound for ref in small for bound in (ref.extra["section_min"], ref.extra["section_max"])
    ]
    extra = {"section_min": min(sections), "section_max": max(sections)}
    rows = epoch.collect_if_small(
        frame.where(f"NOT {below_mark_sql(mark)}"), sum(ref.rows for ref in small)
    )
    return (*large, *epoch.writer.write_segment("order", rows, "_et", extra).refs)


def compact_window_segments(
    epoch: EpochContext, name: str, live: list[FileRef]
) -> tuple[FileRef, ...]:
    """The segments of a tumbling or sliding window after compaction."""
    small, large = _split_by_size(live)
    frame = epoch.load_segments(small) if len(small) > MANY_SEGMENTS else None
    if frame is None:
        return tuple(live)
    window = epoch.spec.windows[name]
    kept = frame.where(
        f"NOT ({window_purged_sql(window, '_we', epoch.order.decision.frontier_after)})"
    )
    merged = Aggregation(epoch.spec, name).merge_partials(kept, flags={})
    rows = epoch.collect_if_small(merged, sum(ref.rows for ref in small))
    return (*large, *epoch.writer.write_segment(f"window:{name}", rows, "_we").refs)


def _split_by_size(live: list[FileRef]) -> tuple[list[FileRef], list[FileRef]]:
    small = [ref for ref in live if ref.rows <= _SMALL_ROWS]
    return small, [ref for ref in live if ref.rows > _SMALL_ROWS]
