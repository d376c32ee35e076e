"""Tumbling and sliding windows: partial aggregates of the epoch's rows, merged with those of live segments when due.

State is append-only. A segment holds one row per (window, key) that the epoch touched: its partial aggregates, whether the
window was open then (``_on``), whether the row was an update of a closed one (``_up``), and in how many epochs it was touched
(``_n``). The number of earlier results follows from these, so nothing is written just because a window was emitted, and a
segment is dropped when every window in it is purged.
"""

from __future__ import annotations

from functools import reduce

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.compact import compact_window
from tidegate.jobs.spark.edges import Edges, lasting, others
from tidegate.jobs.spark.epoch import Epoch, WindowWork
from tidegate.jobs.spark.few import MERGE_ROWS, merges, results_of
from tidegate.jobs.spark.marks import passed, reached
from tidegate.jobs.spark.order import adjusted
from tidegate.jobs.spark.schema import quote
from tidegate.jobs.spark.spans import closed_at, late_verdict, purged, purged_at, with_spans
from tidegate.jobs.spark.write import Written, joined
from tidegate.jobs.spark.zero_rows import fill_gaps, is_gaps
from tidegate.jobs.spec.options import LatePolicy
from tidegate.jobs.spec.windows import WindowSpec

__all__ = ["accepted", "work_window"]


# Which rows join


def accepted(epoch: Epoch, window: WindowSpec) -> DataFrame:
    """(row, window) pairs that join, with `_ws` and `_we`."""
    assert epoch.data is not None  # noqa: S101 - called with rows only
    frontier, frame = epoch.order.decision.frontier_before, epoch.data
    late = late_verdict(window, frontier)
    if window.on_late is not LatePolicy.ADJUST:
        frame = frame.where(f"NOT ({late})")  # also where no row is late: the code is the same in every epoch
    elif epoch.low is not None and epoch.low < frontier:
        start = passed(frontier, "_et")
        moved = adjusted(frame.selectExpr("*", f"{late} AS _was"), epoch.spec, f"_was AND _end > {start}", start)
        frame = moved.where("_moved OR NOT _was").drop("_moved", "_was")
    frame = with_spans(window, others(epoch.spec, frame))
    if window.size == window.period and all(s.end_time is None for s in epoch.spec.sources.values()):
        return frame.selectExpr("*", "_w0 AS _ws", f"_w0 + {window.size}L AS _we")
    pairs = frame.selectExpr("*", f"explode(sequence(_w0, _w1, {window.period}L)) AS _ws")
    pairs = pairs.selectExpr("*", f"_ws + {window.size}L AS _we")
    return pairs.where(f"NOT ({purged(window, '_we', frontier)})")


def _joining(epoch: Epoch, window: WindowSpec, edges: Edges) -> tuple[DataFrame | None, int]:
    """All pairs that join, of rows and of what lasts; and a number of results that they do not exceed."""
    rows = None if epoch.data is None else accepted(epoch, window)
    found = lasting(epoch, window, edges)
    if found is None:
        return rows, epoch.staged.rows
    pairs, most = found
    return (pairs if rows is None else pairs.unionByName(rows.selectExpr(*map(quote, pairs.columns)))), epoch.staged.rows + most


# One epoch of one window output


def work_window(epoch: Epoch, name: str, edges: Edges) -> WindowWork:
    """Fold the epoch's rows and edges into the window's state and write the results that are due."""
    decision, window = epoch.order.decision, epoch.spec.windows[name]
    kind, aggregation = f"window:{name}", Aggregation(epoch.spec, name)
    live = [ref for ref in epoch.segments(kind) if not is_gaps(ref)]
    gaps: tuple[FileRef, ...] = tuple(ref for ref in epoch.segments(kind) if is_gaps(ref))
    fresh: pa.Table | DataFrame | None = None
    written = Written((), ())
    joining, most = _joining(epoch, window, edges)
    if joining is not None:
        fresh = epoch.result(aggregation.partial(joining, decision.frontier_before, epoch.order.epoch), most)
        written = _segment(epoch, kind, fresh)
    if window.zero_rows:
        zero, gaps = fill_gaps(epoch, aggregation, live, list(gaps), written)
        written = joined((written, zero))
    results = _emit(epoch, name, aggregation, live, written)
    segments = [ref for ref in (*live, *written.refs) if not _gone(window, ref, decision.frontier_after)]
    return WindowWork(results, (*compact_window(epoch, name, segments), *gaps), written)


def _segment(epoch: Epoch, kind: str, rows: pa.Table | DataFrame) -> Written:
    return epoch.writer.segment(kind, rows, "_we")


def _gone(window: WindowSpec, ref: FileRef, frontier: int) -> bool:
    return ref.max_time is None or purged_at(window, ref.max_time, frontier)


def _emit(epoch: Epoch, name: str, aggregation: Aggregation, live: list[FileRef], fresh: Written) -> Written:
    """Merge what is due, at most one result per window."""
    window, before, after = aggregation.window, epoch.order.decision.frontier_before, epoch.order.decision.frontier_after
    ends = [ref.min_time for ref in fresh.refs if ref.min_time is not None]
    needed = [ref for ref in live if _may_be_due(window, ref, ends, before, after)]
    if not needed and not _any_due(window, ends, after):
        return Written((), ())
    size = sum(ref.rows for ref in (*needed, *fresh.refs))
    if size <= MERGE_ROWS and (few := _few(epoch, aggregation, needed, fresh)) is not None:
        return epoch.writer.table(name, few, "window_end")
    rows = _state(epoch, needed, fresh)
    if rows is None:
        return Written((), ())
    fills = " OR (_new AND _n = 0)" if window.zero_rows else ""  # a gap may be found when its windows are purged already
    rows = rows.where(f"NOT ({purged(window, '_we', before)}){fills}").where(_range(window, ends, before, after))
    due, revision = _due(window, before, after, epoch.order.epoch)
    use = f"_new OR NOT ({reached('_we', before)})" if window.revisions == "delta" and window.emit == "close" else None
    if window.revisions == "delta" and window.emit != "close":
        use = "_new"
    merged = aggregation.merge(rows, flags={"_new": "max(_new)"}, use=use).where(due)
    results = aggregation.results(merged, revision, epoch.provenance(beside="_we")[3:])
    return epoch.writer.table(name, epoch.result(results, size), "window_end")


def _few(epoch: Epoch, aggregation: Aggregation, needed: list[FileRef], fresh: Written) -> pa.Table | None:
    """The results by the driver; None where this is Spark's."""
    order, decision = epoch.order, epoch.order.decision
    old, new = epoch.paths(needed), list(fresh.paths)
    if not all(merges(aggregation, pq.read_schema(path)) for path in (*old, *new)):
        return None
    known = [(pq.read_table(path, partitioning=None), path in new) for path in (*old, *new)]
    if not known:
        return None
    marked = [table.append_column("_new", pa.repeat(is_new, table.num_rows)) for table, is_new in known]
    rows = pa.concat_tables(marked, promote_options="permissive")
    return results_of(aggregation, rows, decision.frontier_before, decision.frontier_after, order.timeline, order.epoch)


def _state(epoch: Epoch, needed: list[FileRef], fresh: Written) -> DataFrame | None:
    frames = []
    old = epoch.load(needed)
    if old is not None:
        frames.append(old.selectExpr("*", "false AS _new"))
    new = epoch.load([], list(fresh.paths))
    if new is not None:
        frames.append(new.selectExpr("*", "true AS _new"))
    return reduce(DataFrame.unionByName, frames) if frames else None


def _due(window: WindowSpec, before: int, after: int, slot: int) -> tuple[str, str]:
    """(which merged windows have a result now, the number of their earlier results)."""
    match window.emit:
        case "each_epoch":
            return "_new AND _n > 0", "_n - 1"  # no row ever came into a window that only fills a gap
        case "complete":
            return "true", f"{passed(slot, '_we')} - _epoch"
        case _:
            return f"({reached('_we', after)}) AND (_new OR NOT ({reached('_we', before)}))", "_on + _up - 1"


def _range(window: WindowSpec, ends: list[int], before: int, after: int) -> str:
    """Windows outside this range have no result now."""
    if window.emit == "complete":
        return "true"
    touched = f"_we >= {passed(min(ends), '_we')}" if ends else "false"
    if window.emit == "each_epoch":
        return touched
    return f"({reached('_we', after)}) AND ({touched} OR NOT ({reached('_we', before)}))"


def _may_be_due(window: WindowSpec, ref: FileRef, ends: list[int], before: int, after: int) -> bool:
    if ref.min_time is None or ref.max_time is None or purged_at(window, ref.max_time, before):
        return False
    if window.emit == "complete":
        return True
    touched = bool(ends) and ref.max_time >= min(ends)
    if window.emit == "each_epoch":
        return touched
    return closed_at(window, ref.min_time, after) and (touched or not closed_at(window, ref.max_time, before))


def _any_due(window: WindowSpec, ends: list[int], after: int) -> bool:
    return any(window.emit != "close" or closed_at(window, end, after) for end in ends)
