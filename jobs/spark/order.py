"""The events output: rows leave sorted, with contiguous positions; the others wait in immutable segments.

A segment is never rewritten because part of it left: rows below `release_before` count as gone, and the segment is dropped
when all of them are. A large release is sorted in ranges (see `ranges`), a small one by a single task.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.eventtime.types import Decision, Mark
from tidegate.jobs.spark.arranged import arranged
from tidegate.jobs.spark.cast import text
from tidegate.jobs.spark.compact import compact_order
from tidegate.jobs.spark.epoch import ORDER_KIND, Epoch, standing
from tidegate.jobs.spark.marks import ORDER, below, late_bound, leave_bound, passed, under
from tidegate.jobs.spark.ranges import numbered, ranges_by_arrival, ranges_by_time
from tidegate.jobs.spark.read import local_copy
from tidegate.jobs.spark.schema import quote
from tidegate.jobs.spark.spans import late_verdict
from tidegate.jobs.spark.survey import Surveyed
from tidegate.jobs.spark.write import Written, fetch
from tidegate.jobs.spec.options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.time import TICK_MAX
from tidegate.jobs.spec.windows import WindowKind

__all__ = ["ORDER_KIND", "Released", "adjusted", "buffered", "counted", "late_columns", "release"]

_SORT = ["_section", *ORDER]
_IN_PARTITION = (1 << 33) - 1  # the bits of `monotonically_increasing_id` that count rows in one partition


@dataclass(frozen=True, slots=True)
class Released:
    """What left and what waits.

    Attributes:
        per_source: source -> rows that left.
        flagged: how many of them, the first ones, are late rows that left at once.
    """

    events: Written
    segments: tuple[FileRef, ...]
    written: Written
    rows: int
    maximum: Mark | None
    per_source: dict[str, int]
    flagged: int = 0


def accepted(epoch: Epoch, frame: DataFrame, *, keep_late: bool = False) -> DataFrame:
    """Rows of the cut that join the events output, adjusted where the policy says so, with `_late`, `_tardy` and `_section`."""
    decision, policy = epoch.order.decision, epoch.spec.release.on_late
    bound = late_bound(decision)
    late = below("_et", bound)
    if policy is LatePolicy.ADJUST and late != "false":
        start = max(decision.frontier_before, bound)
        frame = adjusted(frame, epoch.spec, f"({late}) AND _end > {start}L", f"{start}L")
        frame = frame.where(f"_moved OR NOT ({late})").drop("_moved")
    flagged = policy is LatePolicy.EMIT_FLAGGED
    if not flagged and policy is not LatePolicy.ADJUST and late != "false" and not keep_late:
        frame = frame.where(f"NOT ({late})")
    own = [f"{late if flagged else 'false'} AS _late", f"{_tardy(decision)} AS _tardy"]
    return frame.selectExpr("*", *own, f"{passed(decision.section, '_seq')} AS _section")


def _tardy(decision: Decision) -> str:
    """Whether a row of this epoch stood before a tardy barrier: it leaves in order, but flagged (section 3.5)."""
    names = ", ".join(text(member) for member in decision.flagged)
    return f"concat(_source, '/', _partition) IN ({names})" if names else "false"


def adjusted(frame: DataFrame, spec: PipelineSpec, condition: str, start: str) -> DataFrame:
    """Move the start of rows that meet the condition; `_moved` tells which."""
    columns = list(spec.columns)
    times = {source.event_time for source in spec.sources.values()}
    moved = frame.selectExpr("*", f"({condition}) AS _moved")
    others = [c for c in frame.columns if c not in columns and c not in ("_et", "_time")]
    own = [
        f"IF(_moved AND _time <=> {quote(c)}, timestamp_micros({start}), {quote(c)}) AS {quote(c)}" if c in times else quote(c)
        for c in columns
    ]
    return moved.selectExpr(
        *own, *others, f"IF(_moved, {start}, _et) AS _et", f"IF(_moved, timestamp_micros({start}), _time) AS _time", "_moved"
    )


def release(epoch: Epoch) -> tuple[Released, pa.Table | None]:
    """Write the rows that leave, and the new segment of those that wait.

    Where the cut is small and no row has to be adjusted or set aside, all its rows come to the driver with their verdicts: the
    second result, from which the late table follows without another job.
    """
    live, after = epoch.segments(ORDER_KIND), epoch.order.decision.release_after
    kept = tuple(ref for ref in live if standing(ref, after))
    if epoch.data is None and not epoch.touched():
        return Released(Written((), ()), kept, Written((), ()), 0, None, {}), None
    found, judged = None if epoch.small else arranged(epoch), None
    if found is not None:
        waiting, flagged = _segment(epoch, found.waiting), found.flagged
        events = epoch.writer.pieces(EVENTS, found.events, _time_column(epoch))
    else:
        together = can_judge(epoch)
        frames = [frame for frame in (_from_cut(epoch, together), _from_buffer(epoch, together)) if frame is not None]
        rows = reduce(DataFrame.unionAll, frames)
        if epoch.small:
            events, waiting, flagged, judged = _few(epoch, rows, late_columns(epoch) if together else [])
        else:
            events, waiting, flagged = _many(epoch, rows)
    segments = compact_order(epoch, [*kept, *waiting.refs], after)
    released = Released(events, segments, waiting, events.rows, _maximum(epoch, events, flagged), _per_source(events), flagged)
    return released, judged


def counted(surveyed: Surveyed) -> Released:
    """The rows that would leave, where no events table is kept: with ``pass_through`` all data rows that were not set aside."""
    leaving: Counter[str] = Counter()
    for index, member in enumerate(surveyed.survey.members):
        aside = sum(verdict.what in ("dropped", "cti_violation") for verdict in surveyed.verdicts.get(index, ()))
        leaving[member.member.source] += member.rows - aside
    return Released(Written((), ()), (), Written((), ()), leaving.total(), None, dict(leaving))


def can_judge(epoch: Epoch) -> bool:
    """Whether release and late rows can come from one query."""
    policies = [epoch.spec.release.on_late, *(window.on_late for window in epoch.spec.windows.values())]
    sessions = any(window.kind is WindowKind.SESSION for window in epoch.spec.windows.values())
    return epoch.small and epoch.aside is None and LatePolicy.ADJUST not in policies and not sessions


def late_columns(epoch: Epoch) -> list[str]:
    """Verdict columns, one for the events output and one for each window."""
    return ["_late_events", *(f"_late_{name}" for name in epoch.spec.windows)]


def buffered(epoch: Epoch, segments: tuple[FileRef, ...] | list[FileRef], mark: Mark) -> int:
    """Rows at or above the mark in order segments: counted, where only part of a segment has left, in its rows."""
    total = 0
    for ref in segments:
        if ref.kind != ORDER_KIND or not standing(ref, mark):
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


def _columns(epoch: Epoch, together: bool) -> list[str]:
    place = ["_late", "_tardy", "_section", "_et", "_so", "_source", "_partition", "_seq", "_leaves", "_p"]
    return [*(quote(c) for c in epoch.spec.columns), *place, *(late_columns(epoch) if together else [])]


def _from_cut(epoch: Epoch, together: bool) -> DataFrame | None:
    if epoch.data is None:
        return None
    frame = accepted(epoch, epoch.data, keep_late=together)
    decision = epoch.order.decision
    at_once = epoch.spec.release.mode is ReleaseMode.PASS_THROUGH
    leaves = "true" if at_once else f"_late OR {below('_et', leave_bound(decision))}"
    verdicts: list[str] = []
    if together:
        flagged = epoch.spec.release.on_late is LatePolicy.EMIT_FLAGGED
        verdicts = [f"{'false' if flagged else below('_et', late_bound(decision))} AS _late_events"]
        for name, window in epoch.spec.windows.items():
            possible = epoch.low is not None and epoch.low < decision.frontier_before
            verdicts.append(
                f"{late_verdict(window, decision.frontier_before) if possible else 'false'} AS {quote('_late_' + name)}"
            )
    return frame.selectExpr("*", f"{leaves} AS _leaves", *verdicts).selectExpr(*_columns(epoch, together))


def _from_buffer(epoch: Epoch, together: bool) -> DataFrame | None:
    """Rows that waited and leave now."""
    before, after = epoch.order.decision.release_before, epoch.order.decision.release_after
    frame = epoch.load(epoch.touched())
    if frame is None:
        return None
    rows = frame.where(f"NOT {under(before)} AND {under(after)}")
    tardy = "coalesce(_tardy, false)" if "_tardy" in frame.columns else "false"  # older segments do not know of it
    rows = rows.selectExpr(*(c for c in _waiting_columns(epoch) if c != "_tardy"), f"{tardy} AS _tardy")
    verdicts = [f"false AS {quote(c)}" for c in late_columns(epoch)] if together else []
    return rows.selectExpr("*", "false AS _late", "true AS _leaves", "-1 AS _p", *verdicts).selectExpr(*_columns(epoch, together))


def _sort_keys(epoch: Epoch) -> list[Any]:
    """Flagged late rows leave first; without ordering the others follow in order of arrival."""
    flagged = [F.col("_late").desc()] if epoch.spec.release.on_late is LatePolicy.EMIT_FLAGGED else []
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        arrival = [F.expr(f"IF(_late, {c}, NULL)") for c in ("_section", "_et")] if flagged else []
        return [*flagged, *arrival, *(F.col(c) for c in ("_so", "_partition", "_seq"))]
    return [*flagged, *(F.col(c) for c in _SORT)]


def _event_columns(epoch: Epoch, position: str) -> list[str]:
    own = [f"{position} AS position", "_section AS section", "(_late OR _tardy) AS _late"]
    return [*(quote(c) for c in epoch.spec.columns), *own, *epoch.provenance()]


def _waiting_columns(epoch: Epoch) -> list[str]:
    return [*(quote(c) for c in epoch.spec.columns), "_section", "_tardy", "_et", "_so", "_source", "_partition", "_seq"]


def _time_column(epoch: Epoch) -> str:
    return next(iter(epoch.spec.sources.values())).event_time


def _few(epoch: Epoch, rows: DataFrame, verdicts: list[str]) -> tuple[Written, Written, int, pa.Table | None]:
    """One task sorts everything; the driver splits it."""
    late = quote(verdicts[0]) if verdicts else "false"
    rows = rows.selectExpr("*", f"_leaves AND NOT {late} AS _goes")
    one = rows.coalesce(1).sortWithinPartitions(F.col("_goes").desc(), *_sort_keys(epoch))
    position = (
        f"{epoch.order.next_position}L + monotonically_increasing_id()"  # one partition, those that leave first: 0, 1, 2, ...
    )
    own = [*_event_columns(epoch, position), "_leaves", "_goes", "_late AS _first", "_tardy", "_section", "_et", "_so"]
    own += [quote(c) for c in verdicts]
    table = one.selectExpr(*own).toArrow()
    events = table.filter(table["_goes"]).select([c.rpartition(" AS ")[2].strip("`") for c in _event_columns(epoch, position)])
    stays = pc.invert(table["_leaves"])
    if verdicts:
        stays = pc.and_(stays, pc.invert(table[verdicts[0]]))
    waiting = table.filter(stays).select([c.strip("`") for c in _waiting_columns(epoch)])
    written = epoch.writer.table(EVENTS, events, _time_column(epoch))
    flagged = pc.sum(pc.and_(table["_goes"], table["_first"])).as_py() or 0
    return written, _segment(epoch, waiting), flagged, table if verdicts else None


def _segment(epoch: Epoch, waiting: pa.Table | DataFrame) -> Written:
    section = epoch.order.decision.section  # rows of one epoch have one section
    return epoch.writer.segment(ORDER_KIND, waiting, "_et", {"section_min": section, "section_max": section})


def _many(epoch: Epoch, rows: DataFrame) -> tuple[Written, Written, int]:
    """Sorted by ranges, one task each."""
    waiting, leaving = Written((), ()), rows.where("_leaves")
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        ranges = ranges_by_arrival(leaving)
    else:
        waiting = _segment(epoch, _waiting(epoch, rows))
        ranges = ranges_by_time(leaving, *_extent(epoch))
    if not ranges:
        return Written((), ()), waiting, 0
    starts = accumulate((piece.rows for piece in ranges[:-1]), initial=epoch.order.next_position)
    apart = leaving.selectExpr("*", f"{numbered(ranges)} AS _range").repartitionById(len(ranges), F.col("_range"))
    in_range = f"(monotonically_increasing_id() & {_IN_PARTITION}L)"
    position = f"array({', '.join(f'{start}L' for start in starts)})[_range] + {in_range}"
    events = apart.sortWithinPartitions(*_sort_keys(epoch)).selectExpr(*_event_columns(epoch, position))
    written = epoch.writer.table(EVENTS, events, _time_column(epoch))
    return written, waiting, sum(piece.rows for piece in ranges if piece.late)


def _waiting(epoch: Epoch, rows: DataFrame) -> pa.Table | DataFrame:
    """The rows that stay, the newest: by the driver, where they are known and few."""
    bound, moved = leave_bound(epoch.order.decision), epoch.spec.release.on_late is LatePolicy.ADJUST
    if moved or bound < late_bound(epoch.order.decision) or not epoch.known.few(bound, TICK_MAX):
        return rows.where("NOT _leaves").selectExpr(*_waiting_columns(epoch))
    newest = epoch.known.rows(bound, TICK_MAX)
    stays = None if newest is None else accepted(epoch, newest)
    if stays is None:
        return pa.table({})
    return fetch(stays.selectExpr(*_waiting_columns(epoch)))


def _extent(epoch: Epoch) -> tuple[int, int]:
    """Bounds of the event times that may leave; adjusted rows stand at F."""
    live = epoch.segments(ORDER_KIND)
    ends = [time for ref in live for time in (ref.min_time, ref.max_time) if time is not None]
    ends += [time for time in (epoch.low, epoch.high) if time is not None]
    return (min(ends), max(ends)) if ends else (0, 0)


def _maximum(epoch: Epoch, events: Written, flagged: int) -> Mark | None:
    """Greatest (section, event time) that left, late rows that left at once apart: those are the first ones."""
    times = {name: source.event_time for name, source in epoch.spec.sources.items()}
    table = events.read(["section", "position", "_source", *dict.fromkeys(times.values())])
    if table is None:
        return None
    in_order = pc.greater_equal(table["position"], epoch.order.next_position + flagged)
    marks = [
        _greatest(table["section"], table[column].cast(pa.int64()), pc.and_(pc.equal(table["_source"], name), in_order))
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
