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
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.marks import reached
from tidegate.jobs.spark.spans import purged
from tidegate.jobs.spark.write import Written
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN

__all__ = ["fill_gaps", "is_gaps"]

_RANGES = "array<struct<a:bigint,b:bigint>>"


def is_gaps(ref: FileRef) -> bool:
    """Whether a segment of a window holds gaps, not partial aggregates."""
    return bool(ref.extra.get("gaps"))


def fill_gaps(
    epoch: Epoch, aggregation: Aggregation, live: list[FileRef], gaps: list[FileRef], fresh: Written
) -> tuple[Written, tuple[FileRef, ...]]:
    """Partial aggregates of the empty windows that F passes now, and the segment of the gaps that are left.

    Args:
        epoch: the epoch.
        aggregation: of the window.
        live: segments of partial aggregates before the epoch.
        gaps: the segment of gaps before the epoch, if there is one.
        fresh: partial aggregates of the epoch's rows.
    """
    decision, nothing = epoch.order.decision, Written((), ())
    kind = next((ref.kind for ref in (*fresh.refs, *gaps, *live)), "")
    if not fresh.refs and (not gaps or decision.frontier_before == decision.frontier_after):
        return nothing, tuple(gaps)
    state = _gaps(epoch, aggregation, gaps, fresh)
    rows = sum(ref.rows for ref in (*gaps, *fresh.refs))
    left = epoch.writer.segment(kind, epoch.result(state, rows), None, {"gaps": True})
    counts = left.read(["_passed"])
    passed = 0 if counts is None else pc.sum(counts["_passed"]).as_py() or 0
    if not passed:
        return nothing, left.refs
    zero = _without(epoch, aggregation, _zero(epoch, aggregation, left), live, fresh)
    return epoch.writer.segment(kind, epoch.result(zero, passed), "_we"), left.refs


def _gaps(epoch: Epoch, aggregation: Aggregation, gaps: list[FileRef], fresh: Written) -> DataFrame:
    """Per key what is known after this epoch's windows: first and last window, gaps left, and gaps that F passes now."""
    keys, frames = aggregation.keys, []
    touched = epoch.load([], list(fresh.paths))
    if touched is not None:
        starts = touched.groupBy(*keys).agg(F.expr("sort_array(collect_set(_ws))").alias("_starts"))
        nothing = ["CAST(NULL AS bigint) AS _first", "CAST(NULL AS bigint) AS _last", f"CAST(NULL AS {_RANGES}) AS _ranges"]
        frames.append(starts.selectExpr(*keys, "_starts", *nothing))
    known = epoch.load(gaps)
    if known is not None:
        frames.append(known.selectExpr(*keys, "CAST(NULL AS array<bigint>) AS _starts", "_first", "_last", "_ranges"))
    both = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
    marks = ("_starts", "_first", "_last", "_ranges")
    joined = both.groupBy(*keys).agg(*(F.expr(f"first({c}, true)").alias(c) for c in marks))
    reach = joined.selectExpr(*keys, f"{_reach(aggregation.window.period or 1)} AS _r")
    return _split(reach.selectExpr(*keys, "_r.f AS _first", "_r.l AS _last", "_r.r AS _all"), epoch, aggregation)


def _reach(period: int) -> str:
    """Let first and last window grow by the starts touched, in order; what is skipped is a new gap."""
    begin = f"named_struct('f', coalesce(_first, _starts[0]), 'l', coalesce(_last, _starts[0]), 'r', {_list('_ranges')})"
    before = f"concat(acc.r, array(named_struct('a', s + {period}L, 'b', acc.f)))"
    behind = f"concat(acc.r, array(named_struct('a', acc.l + {period}L, 'b', s)))"
    step = (
        f"CASE WHEN s < acc.f THEN named_struct('f', s, 'l', acc.l, 'r', {before}) "
        f"WHEN s > acc.l THEN named_struct('f', acc.f, 'l', s, 'r', {behind}) ELSE acc END"
    )
    return f"aggregate(coalesce(_starts, CAST(array() AS array<bigint>)), {begin}, (acc, s) -> {step})"


def _list(column: str) -> str:
    return f"coalesce({column}, CAST(array() AS {_RANGES}))"


def _split(frame: DataFrame, epoch: Epoch, aggregation: Aggregation) -> DataFrame:
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


def _zero(epoch: Epoch, aggregation: Aggregation, left: Written) -> DataFrame:
    """Partial aggregates of no rows, one for each window passed."""
    window, frame = aggregation.window, epoch.load([], list(left.paths))
    assert frame is not None  # noqa: S101 - it was just written
    due = frame.where("_passed > 0").selectExpr(*aggregation.keys, "explode(_due) AS _d")
    starts = due.selectExpr(*aggregation.keys, f"explode(sequence(_d.a, _d.b - 1L, {window.period}L)) AS _ws")
    update = f"CAST({reached('_we', epoch.order.decision.frontier_before)} AS int)"
    marks = [f"1 - {update} AS _on", f"{update} AS _up", "0 AS _n", f"CAST({epoch.order.epoch} AS bigint) AS _epoch"]
    return starts.selectExpr("*", f"_ws + {window.size}L AS _we").selectExpr(*aggregation.group, *marks)


def _without(epoch: Epoch, aggregation: Aggregation, zero: DataFrame, live: list[FileRef], fresh: Written) -> DataFrame:
    """Only windows that have no rows, with the columns of the others."""
    standing = epoch.load(live, list(fresh.paths))
    assert standing is not None  # noqa: S101 - the last window of a key outlives the gaps before it
    columns = standing.where("false").selectExpr(*aggregation.group, "_on", "_up", "_n", "_epoch", *aggregation.partials)
    standing = standing.where(f"NOT ({purged(aggregation.window, '_we', epoch.order.decision.frontier_before)})")
    names = ("_ws", *aggregation.keys)
    other = standing.selectExpr(*(f"{c} AS _j{c}" for c in names)).distinct()
    empty = zero.join(other, F.expr(" AND ".join(f"{c} <=> _j{c}" for c in names)), "left_anti")
    return columns.unionByName(empty, allowMissingColumns=True)
