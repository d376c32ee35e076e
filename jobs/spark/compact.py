"""Compaction: many small state segments of one kind become one, so that an epoch opens a bounded number of files.

Order segments are put one after the other without the rows that have left; window partials are merged. Sessions need none: their
segment is written anew anyway.
"""

from __future__ import annotations

from typing import Final

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.eventtime.types import Mark
from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.marks import under
from tidegate.jobs.spark.spans import purged

__all__ = ["MANY_SEGMENTS", "compact_order", "compact_window"]

MANY_SEGMENTS: Final = 16
"""More live segments of one kind than this are merged."""
_SMALL_ROWS: Final = 200_000
"""Larger segments are left alone: rewriting them again and again would cost more than opening them."""


def compact_order(epoch: Epoch, live: list[FileRef], mark: Mark) -> tuple[FileRef, ...]:
    """The order segments after compaction; rows below the mark have left."""
    small, large = _split(live)
    frame = epoch.load(small) if len(small) > MANY_SEGMENTS else None
    if frame is None:
        return tuple(live)
    sections = [bound for ref in small for bound in (ref.extra["section_min"], ref.extra["section_max"])]
    extra = {"section_min": min(sections), "section_max": max(sections)}
    rows = epoch.result(frame.where(f"NOT {under(mark)}"), sum(ref.rows for ref in small))
    return (*large, *epoch.writer.segment("order", rows, "_et", extra).refs)


def compact_window(epoch: Epoch, name: str, live: list[FileRef]) -> tuple[FileRef, ...]:
    """The segments of a tumbling or sliding window after compaction."""
    small, large = _split(live)
    frame = epoch.load(small) if len(small) > MANY_SEGMENTS else None
    if frame is None:
        return tuple(live)
    window = epoch.spec.windows[name]
    kept = frame.where(f"NOT ({purged(window, '_we', epoch.order.decision.frontier_after)})")
    merged = Aggregation(epoch.spec, name).merge(kept, flags={})
    rows = epoch.result(merged, sum(ref.rows for ref in small))
    return (*large, *epoch.writer.segment(f"window:{name}", rows, "_we").refs)


def _split(live: list[FileRef]) -> tuple[list[FileRef], list[FileRef]]:
    small = [ref for ref in live if ref.rows <= _SMALL_ROWS]
    return small, [ref for ref in live if ref.rows > _SMALL_ROWS]
