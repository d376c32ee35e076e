"""The events output: rows leave sorted, with contiguous positions; the others wait in immutable segments.

A segment is never rewritten because part of it left: rows below `release_before` count as gone, and the segment is dropped
when all of them are. A large release is sorted by ranges; its positions come from the sizes of the sorted partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.eventtime.types import Mark
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.marks import ORDER, below, late_bound, leave_bound
from tidegate.jobs.spark.read import local_copy
from tidegate.jobs.spark.schema import quote
from tidegate.jobs.spark.write import FETCH_ROWS, Written
from tidegate.jobs.spec.options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS

__all__ = ["ORDER_KIND", "Released", "accepted", "buffered", "release"]

ORDER_KIND = "order"
_SORT = ["_section", *ORDER]


@dataclass(frozen=True, slots=True)
class Released:
    """What left and what waits.

    Attributes:
        per_source: source -> rows that left.
    """

    events: Written
    segments: tuple[FileRef, ...]
    written: Written
    rows: int
    maximum: Mark | None
    per_source: dict[str, int]


def accepted(epoch: Epoch) -> DataFrame | None:
    """The cut's rows that join the events output, adjusted where the policy says so, with `_late` and `_section`."""
    if epoch.data is None:
        return None
    decision, policy = epoch.order.decision, epoch.spec.release.on_late
    bound = late_bound(decision)
    late = below("_et", bound)
    frame = epoch.data
    if policy is LatePolicy.ADJUST:
        start = max(decision.frontier_before, bound)
        frame = adjusted(frame, epoch, f"({late}) AND _end > {start}L", start)
        frame = frame.where(f"_moved OR NOT ({late})").drop("_moved")
    flagged = policy is LatePolicy.EMIT_FLAGGED
    if not flagged and policy is not LatePolicy.ADJUST:
        frame = frame.where(f"NOT ({late})")
    return frame.selectExpr("*", f"{late if flagged else 'false'} AS _late", f"CAST({decision.section} AS bigint) AS _section")


def adjusted(frame: DataFrame, epoch: Epoch, condition: str, start: int) -> DataFrame:
    """Move the start of rows that meet the condition; `_moved` tells which."""
    columns = list(epoch.spec.columns)
    times = {source.event_time for source in epoch.spec.sources.values()}
    moved = frame.selectExpr("*", f"({condition}) AS _moved")
    others = [c for c in frame.columns if c not in columns and c not in ("_et", "_time")]
    own = [
        f"IF(_moved AND _time <=> {quote(c)}, timestamp_micros({start}L), {quote(c)}) AS {quote(c)}" if c in times else quote(c)
        for c in columns
    ]
    return moved.selectExpr(
        *own, *others, f"IF(_moved, {start}L, _et) AS _et", f"IF(_moved, timestamp_micros({start}L), _time) AS _time", "_moved"
    )


def release(epoch: Epoch) -> Released:
    """Write the rows that leave, and the new segment of those that wait."""
    decision = epoch.order.decision
    live = epoch.segments(ORDER_KIND)
    after = decision.release_after
    frames = [frame for frame in (_from_cut(epoch), _from_buffer(epoch, live)) if frame is not None]
    kept = tuple(ref for ref in live if _standing(ref, after))
    if not frames:
        return Released(Written((), ()), kept, Written((), ()), 0, None, {})
    rows = reduce(DataFrame.unionAll, frames)
    if epoch.staged.rows + sum(ref.rows for ref in live) <= FETCH_ROWS:
        events, waiting = _few(epoch, rows)
    else:
        events, waiting = _many(epoch, rows)
    return Released(events, (*kept, *waiting.refs), waiting, events.rows, _maximum(epoch, events), _per_source(events))


def buffered(epoch: Epoch, segments: tuple[FileRef, ...] | list[FileRef], mark: Mark) -> int:
    """Rows at or above the mark in order segments: counted, where only part of a segment has left, in its rows."""
    total = 0
    for ref in segments:
        if ref.kind != ORDER_KIND or not _standing(ref, mark):
            continue
        if Mark(ref.extra["section_min"], ref.min_time or 0) >= mark and ref.extra["section_min"] == ref.extra["section_max"]:
            total += ref.rows
            continue
        table = pq.read_table(local_copy(epoch.store, ref.key, epoch.kept), columns=["_section", "_et"], partitioning=None)
        total += pc.sum(_at_or_above(table, mark)).as_py() or 0
    return total


def _at_or_above(table: pa.Table, mark: Mark) -> Any:
    section, time = table["_section"], table["_et"]
    same = pc.and_(pc.equal(section, mark.section), pc.greater_equal(time, mark.time))
    return pc.or_(pc.greater(section, mark.section), same)


def _standing(ref: FileRef, mark: Mark) -> bool:
    return ref.max_time is not None and Mark(ref.extra["section_max"], ref.max_time) >= mark


def _columns(epoch: Epoch) -> list[str]:
    return [*(quote(c) for c in epoch.spec.columns), "_late", "_section", "_et", "_so", "_source", "_partition", "_seq", "_leaves"]


def _from_cut(epoch: Epoch) -> DataFrame | None:
    frame = accepted(epoch)
    if frame is None:
        return None
    at_once = epoch.spec.release.mode is ReleaseMode.PASS_THROUGH
    leaves = "true" if at_once else f"_late OR {below('_et', leave_bound(epoch.order.decision))}"
    return frame.selectExpr("*", f"{leaves} AS _leaves").selectExpr(*_columns(epoch))


def _from_buffer(epoch: Epoch, live: list[FileRef]) -> DataFrame | None:
    """Rows that waited and leave now."""
    before, after = epoch.order.decision.release_before, epoch.order.decision.release_after
    if before >= after:
        return None
    touched = [ref for ref in live if _standing(ref, before) and Mark(ref.extra["section_min"], ref.min_time or 0) < after]
    frame = epoch.load(touched)
    if frame is None:
        return None
    rows = frame.where(f"NOT {_under(before)} AND {_under(after)}")
    return rows.selectExpr("*", "false AS _late", "true AS _leaves").selectExpr(*_columns(epoch))


def _under(mark: Mark) -> str:
    return f"(_section < {mark.section}L OR (_section = {mark.section}L AND {below('_et', mark.time)}))"


def _sort_keys(epoch: Epoch) -> list[Any]:
    """Flagged late rows leave first; without ordering the others follow in order of arrival."""
    flagged = [F.col("_late").desc()] if epoch.spec.release.on_late is LatePolicy.EMIT_FLAGGED else []
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        arrival = [F.expr(f"IF(_late, {c}, NULL)") for c in ("_section", "_et")] if flagged else []
        return [*flagged, *arrival, *(F.col(c) for c in ("_so", "_partition", "_seq"))]
    return [*flagged, *(F.col(c) for c in _SORT)]


def _event_columns(epoch: Epoch, position: str) -> list[str]:
    own = [f"{position} AS position", "_section AS section", "_late"]
    return [*(quote(c) for c in epoch.spec.columns), *own, *epoch.provenance()]


def _waiting_columns(epoch: Epoch) -> list[str]:
    return [*(quote(c) for c in epoch.spec.columns), "_section", "_et", "_so", "_source", "_partition", "_seq"]


def _time_column(epoch: Epoch) -> str:
    return next(iter(epoch.spec.sources.values())).event_time


def _few(epoch: Epoch, rows: DataFrame) -> tuple[Written, Written]:
    """One task sorts everything; the driver splits it into two files."""
    one = rows.coalesce(1).sortWithinPartitions(F.col("_leaves").desc(), *_sort_keys(epoch))
    base = epoch.order.next_position
    position = f"{base}L + monotonically_increasing_id()"  # one partition, those that leave first: 0, 1, 2, ...
    columns = [*_event_columns(epoch, position), "_leaves", "_section", "_et", "_so"]
    table = one.selectExpr(*columns).toArrow()
    leaves = table["_leaves"]
    events = table.filter(leaves).drop_columns(["_leaves", "_section", "_et", "_so"])
    waiting = table.filter(pc.invert(leaves)).select([c.strip("`") for c in _waiting_columns(epoch)])
    return epoch.writer.table(EVENTS, events, _time_column(epoch)), _segment(epoch, waiting)


def _segment(epoch: Epoch, waiting: pa.Table | DataFrame) -> Written:
    section = epoch.order.decision.section  # rows of one epoch have one section
    return epoch.writer.segment(ORDER_KIND, waiting, "_et", {"section_min": section, "section_max": section})


def _many(epoch: Epoch, rows: DataFrame) -> tuple[Written, Written]:
    waiting = Written((), ())
    if epoch.spec.release.mode is not ReleaseMode.PASS_THROUGH:
        waiting = _segment(epoch, rows.where("NOT _leaves").selectExpr(*_waiting_columns(epoch)))
    leaving = rows.where("_leaves")
    return _sorted_events(epoch, leaving), waiting


def _sorted_events(epoch: Epoch, leaving: DataFrame) -> Written:
    """Sort by ranges once (kept on local disk or in memory), count the partitions, then number them."""
    held = leaving.orderBy(*_sort_keys(epoch)).selectExpr("*", "spark_partition_id() AS _part").persist(StorageLevel.MEMORY_AND_DISK)
    try:
        sizes = {row["_part"]: row["count"] for row in held.groupBy("_part").count().toArrow().to_pylist()}
        parts = sorted(sizes)
        starts = [0, *accumulate(sizes[p] for p in parts)][:-1]
        offsets = ", ".join(f"{p}, {start}L" for p, start in zip(parts, starts, strict=True))
        if not parts:
            return Written((), ())
        base = epoch.order.next_position
        position = f"{base}L + map({offsets})[_part] + (monotonically_increasing_id() & {(1 << 33) - 1}L)"
        return epoch.writer.table(EVENTS, held.selectExpr(*_event_columns(epoch, position)), _time_column(epoch))
    finally:
        held.unpersist()


def _maximum(epoch: Epoch, events: Written) -> Mark | None:
    """Greatest (section, event time) that left, flagged late rows apart."""
    times = {name: source.event_time for name, source in epoch.spec.sources.items()}
    table = events.read(["section", "_late", "_source", *dict.fromkeys(times.values())])
    if table is None:
        return None
    marks = [
        _greatest(table["section"], table[column].cast(pa.int64()), pc.and_(pc.equal(table["_source"], name), pc.invert(table["_late"])))
        for name, column in times.items()
    ]
    return max((mark for mark in marks if mark is not None), default=None)


def _greatest(section: Any, time: Any, counts: Any) -> Mark | None:
    table = pa.table({"section": section, "time": time}).filter(counts)
    if table.num_rows == 0:
        return None
    top = pc.max(table["section"])
    return Mark(top.as_py(), pc.max(table.filter(pc.equal(table["section"], top))["time"]).as_py())


def _per_source(events: Written) -> dict[str, int]:
    table = events.read(["_source"])
    if table is None:
        return {}
    return {item["values"]: item["counts"] for item in pc.value_counts(table["_source"]).to_pylist()}
