"""Opt-in results for empty windows between the first and the last window of a key (`zero_rows`).

One segment holds a row per key: its first and last window and the gaps between them that F has not passed, as ranges of window
starts, so that waiting costs O(1) whatever a gap's length. What F passes becomes partial aggregates of no rows, which live, are
emitted and purged as all others.
"""

from __future__ import annotations

import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.epoch import EpochContext
from tidegate.jobs.spark.marks import end_reached_sql
from tidegate.jobs.spark.spans import window_purged_sql
from tidegate.jobs.spark.write import WrittenFiles
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN

__all__ = ["fill_gaps", "holds_gaps"]

_RANGES_TYPE = "array<struct<a:bigint,b:bigint>>"


def holds_gaps(ref: FileRef) -> bool:
    """Whether a segment of a window holds gaps, not partial aggregates."""
    return bool(ref.extra.get("gaps"))


def fill_gaps(
    epoch: EpochContext, aggregation: Aggregation, live: list[FileRef], gaps: list[FileRef], fresh: WrittenFiles
) -> tuple[WrittenFiles, tuple[FileRef, ...]]:
    """Partial aggregates of the empty windows that F passes now, and the segment of the gaps that are left.

    Args:
        epoch: the epoch.
        aggregation: of the window.
        live: segments of partial aggregates before the epoch.
        gaps: the segment of gaps before the epoch, if there is one.
        fresh: partial aggregates of the epoch's rows.
    """
    decision, nothing = epoch.order.decision, WrittenFiles((), ())
    kind = next((ref.kind for ref in (*fresh.refs, *gaps, *live)), "")
    if not fresh.refs and (not gaps or decision.frontier_before == decision.frontier_after):
        return nothing, tuple(gaps)
    state = _update_gaps(epoch, aggregation, gaps, fresh)
    rows = sum(ref.rows for ref in (*gaps, *fresh.refs))
    left = epoch.writer.write_segment(kind, epoch.collect_if_small(state, rows), None, {"gaps": True})
    counts = left.read_columns(["_passed"])
    passed = 0 if counts is None else pc.sum(counts["_passed"]).as_py() or 0
    if not passed:
        return nothing, left.refs
    zero = _drop_windows_with_rows(epoch, aggregation, _build_zero_partials(epoch, aggregation, left), live, fresh)
    return epoch.writer.write_segment(kind, epoch.collect_if_small(zero, passed), "_we"), left.refs


def _update_gaps(epoch: EpochContext, aggregation: Aggregation, gaps: list[FileRef], fresh: WrittenFiles) -> DataFrame:
    """Per key what is known after this epoch's windows: first and last window, gaps left, and gaps that F passes now."""
    keys, frames = aggregation.keys, []
    touched = epoch.load_segments([], list(fresh.paths))
    if touched is not None:
        starts = touched.groupBy(*keys).agg(F.expr("sort_array(collect_set(_ws))").alias("_starts"))
        nothing = ["CAST(NULL AS bigint) AS _first", "CAST(NULL AS bigint) AS _last", f"CAST(NULL AS {_RANGES_TYPE}) AS _ranges"]
        frames.append(starts.selectExpr(*keys, "_starts", *nothing))
    known = epoch.load_segments(gaps)
    if known is not None:
        frames.append(known.selectExpr(*keys, "CAST(NULL AS array<bigint>) AS _starts", "_first", "_last", "_ranges"))
    both = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
    marks = ("_starts", "_first", "_last", "_ranges")
    joined = both.groupBy(*keys).agg(*(F.expr(f"first({c}, true)").alias(c) for c in marks))
    reach = joined.selectExpr(*keys, f"{_grow_reach_sql(aggregation.window.period or 1)} AS _r")
    return _split_passed_gaps(reach.selectExpr(*keys, "_r.f AS _first", "_r.l AS _last", "_r.r AS _all"), epoch, aggregation)


def _grow_reach_sql(period: int) -> str:
    """Let first and last window grow by the starts touched, in order; what is skipped is a new gap."""
    begin = f"named_struct('f', coalesce(_first, _starts[0]), 'l', coalesce(_last, _starts[0]), 'r', {_ranges_or_empty_sql('_ranges')})"
    before = f"concat(acc.r, array(named_struct('a', s + {period}L, 'b', acc.f)))"
    behind = f"concat(acc.r, array(named_struct('a', acc.l + {period}L, 'b', s)))"
    step = (
        f"CASE WHEN s < acc.f THEN named_struct('f', s, 'l', acc.l, 'r', {before}) "
        f"WHEN s > acc.l THEN named_struct('f', acc.f, 'l', s, 'r', {behind}) ELSE acc END"
    )
    return f"aggregate(coalesce(_starts, CAST(array() AS array<bigint>)), {begin}, (acc, s) -> {step})"


def _ranges_or_empty_sql(column: str) -> str:
    return f"coalesce({column}, CAST(array() AS {_RANGES_TYPE}))"


def _split_passed_gaps(frame: DataFrame, epoch: EpochContext, aggregation: Aggregation) -> DataFrame:
    """Divide the gaps at the last window that is closed."""
    period, size, after = aggregation.window.period or 1, aggregation.window.size or 0, epoch.order.decision.frontier_after
    bound = TICK_MAX if after == TICK_MAX else TICK_MIN if after < TICK_MIN + size else after - size
    until = f"least(x.b, x.a + (least({bound}L, x.b - 1L) - x.a) div {period}L * {period}L + {period}L)"
    passed = f"transform(filter(_all, x -> x.a < x.b AND x.a <= {bound}L), x -> named_struct('a', x.a, 'b', {until}))"
    left = f"transform(_all, x -> named_struct('a', IF(x.a <= {bound}L, {until}, x.a), 'b', x.b))"
    own = [f"filter({left}, x -> x.a < x.b) AS _ranges", f"{passed} AS _due"]
    frame = frame.selectExpr(*aggregation.keys, "_first", "_last", *own)
    count = f"aggregate(_due, 0L, (n, x) -> n + (x.b - x.a + {period - 1}L) div {period}L) AS _passed"
    return frame.selectExpr("*", count)


def _build_zero_partials(epoch: EpochContext, aggregation: Aggregation, left: WrittenFiles) -> DataFrame:
    """Partial aggregates of no rows, one for each window passed."""
    window, frame = aggregation.window, epoch.load_segments([], list(left.paths))
    assert frame is not None  # noqa: S101 - it was just written
    due = frame.where("_passed > 0").selectExpr(*aggregation.keys, "explode(_due) AS _d")
    starts = due.selectExpr(*aggregation.keys, f"explode(sequence(_d.a, _d.b - 1L, {window.period}L)) AS _ws")
    update = f"CAST({end_reached_sql('_we', epoch.order.decision.frontier_before)} AS int)"
    marks = [f"1 - {update} AS _on", f"{update} AS _up", "0 AS _n", f"CAST({epoch.order.epoch} AS bigint) AS _epoch"]
    return starts.selectExpr("*", f"_ws + {window.size}L AS _we").selectExpr(*aggregation.group_columns, *marks)


def _drop_windows_with_rows(epoch: EpochContext, aggregation: Aggregation, zero: DataFrame, live: list[FileRef], fresh: WrittenFiles) -> DataFrame:
    """Only windows that have no rows, with the columns of the others."""
    standing = epoch.load_segments(live, list(fresh.paths))
    assert standing is not None  # noqa: S101 - the last window of a key outlives the gaps before it
    columns = standing.where("false").selectExpr(*aggregation.group_columns, "_on", "_up", "_n", "_epoch", *aggregation.partials)
    standing = standing.where(f"NOT ({window_purged_sql(aggregation.window, '_we', epoch.order.decision.frontier_before)})")
    names = ("_ws", *aggregation.keys)
    other = standing.selectExpr(*(f"{c} AS _j{c}" for c in names)).distinct()
    empty = zero.join(other, F.expr(" AND ".join(f"{c} <=> _j{c}" for c in names)), "left_anti")
    return columns.unionByName(empty, allowMissingColumns=True)
