"""Tumbling and sliding windows.

Partial aggregates of the epoch's rows, merged with those of live segments when due.

State is append-only. A segment holds one row per (window, key) that the epoch touched: its partial
aggregates, whether the window was open then (``_on``), whether the row was an update of a closed
one (``_up``), and in how many epochs it was touched (``_n``). The number of earlier results follows
from these, so nothing is written just because a window was emitted, and a segment is dropped when
every window in it is purged.
"""

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.rows.cut_division import DIVISION
from tidegate.jobs.rows.edge_folds import drop_edges
from tidegate.jobs.rows.judged_rows import assign_rows_to_windows
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame, combine_frames, group_rows
from tidegate.jobs.rules.native_support import explain_spark_state
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    is_window_closed,
    is_window_purged,
    opaque_literal,
    quote_name,
    window_purged_sql,
)
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, saturate_ticks

from .edge_events import EpochEdges, assign_intervals
from .epoch_context import EpochContext, OutputFiles, WrittenFiles, collect_to_driver

MERGE_ROWS = 500_000
"""Partial rows of a window that the driver merges, in a few tenths of a second."""


# One epoch of one window output


def process_window(epoch: EpochContext, name: str, edges: EpochEdges) -> OutputFiles:
    """Fold the rows and edges of the epoch into the state and write the results that are due."""
    decision, window = epoch.decision, epoch.spec.windows[name]
    kind, aggregation = f"window:{name}", Aggregation(epoch.spec, name)
    written = WrittenFiles()
    # All pairs that join, of rows and of what lasts, are at least as many as their results.
    rows = None
    if epoch.data is not None:
        points = replace(epoch.judged, data=drop_edges(epoch.spec, epoch.data))
        rows = assign_rows_to_windows(points, window)
    joining, most = assign_intervals(epoch, window, edges)
    if joining is None:
        joining = rows
    elif rows is not None:
        joining = joining.unionByName(rows.selectExpr(*map(quote_name, joining.columns)))
    if joining is not None:
        fresh = aggregation.aggregate_rows(joining, decision.frontier_before, epoch.order.epoch)
        written = epoch.writer.write_segment(
            kind,
            epoch.collect_if_small(fresh, epoch.staged.rows + most),
            "_we",
            aggregation.segment_extra,
        )
    return _update_window(epoch, aggregation, written)


def process_partials(
    epoch: EpochContext,
    name: str,
    folds: pa.Table | None,
    edge_epoch: EpochContext,
    edges: EpochEdges,
) -> OutputFiles:
    """As `process_window`, with the partial aggregates that tasks have made of the rows.

    They are merged in their order; those of `edges`, in the engine of `edge_epoch`, come last.
    """
    decision, aggregation = epoch.decision, Aggregation(epoch.spec, name)
    written = WrittenFiles()
    lasting, _ = assign_intervals(edge_epoch, aggregation.window, edges)
    if lasting is not None:
        more = collect_to_driver(aggregation.fold_rows(lasting))
        folds = more if folds is None else _append_folds(folds, more)
    if folds is not None:
        frame = DuckFrame.from_table(folds)
        fresh = aggregation.merge_folds(frame, decision.frontier_before, epoch.order.epoch)
        # Sums of doubles depend on it.
        extra = {**aggregation.segment_extra, "division": DIVISION}
        written = epoch.writer.write_segment(f"window:{name}", fresh.toArrow(), "_we", extra)
    return _update_window(epoch, aggregation, written)


def _append_folds(folds: pa.Table, more: pa.Table) -> pa.Table:
    """Partial aggregates of two engines, which may order columns in different ways."""
    return pa.concat_tables([folds, more.select(folds.column_names).cast(folds.schema)])


def _update_window(
    epoch: EpochContext, aggregation: Aggregation, written: WrittenFiles
) -> OutputFiles:
    """Write the results that are due, of the state and of what the epoch has `written` to it."""
    decision, window, name = epoch.decision, aggregation.window, aggregation.name
    kind = f"window:{name}"
    live = [ref for ref in epoch.live_segments(kind) if not holds_gaps(ref)]
    gaps: tuple[FileRef, ...] = tuple(ref for ref in epoch.live_segments(kind) if holds_gaps(ref))
    epoch = choose_state_engine(epoch, name, written.rows, live)
    if window.zero_rows:
        zero, gaps = fill_gaps(epoch, aggregation, live, list(gaps), written)
        written += zero
    results = _emit_results(epoch, aggregation, live, written)
    segments = [
        ref
        for ref in (*live, *written.refs)
        if not is_window_segment_purged(window, ref, decision.frontier_after)
    ]
    purged = window_purged_sql(window, "_we", decision.frontier_after)
    merged = epoch.merge_small_segments(
        kind,
        segments,
        "_we",
        lambda rows: aggregation.merge_partials(rows.where(f"NOT ({purged})"), flags={}),
        aggregation,
    )
    return replace(results, segments=(*merged, *gaps), written=written)


def choose_state_engine(
    epoch: EpochContext, name: str, fresh: int, live: list[FileRef]
) -> EpochContext:
    """Few partial rows are merged in the driver, also those that Spark made: a job takes longer.

    They are so many `fresh` ones, and those of the `live` segments.
    """
    rows = fresh + sum(ref.rows for ref in live)
    here = rows <= MERGE_ROWS and explain_spark_state(epoch.spec, name) is None
    return replace(epoch, native=True) if here else epoch


def is_window_segment_purged(window: WindowSpec, ref: FileRef, frontier: int) -> bool:
    """Return whether all results that have rows in a segment of the window are purged."""
    return ref.max_time is None or is_window_purged(window, ref.max_time, frontier)


def _emit_results(
    epoch: EpochContext, aggregation: Aggregation, live: list[FileRef], fresh: WrittenFiles
) -> OutputFiles:
    """Merge what is due, at most one result per window."""
    window, before, after = (
        aggregation.window,
        epoch.decision.frontier_before,
        epoch.decision.frontier_after,
    )
    ends = [ref.min_time for ref in fresh.refs if ref.min_time is not None]
    needed = [ref for ref in live if _may_be_due(window, ref, ends, before, after)]
    # Most epochs close no window; they must not cost a job.
    any_due = any(window.emit != "close" or is_window_closed(window, end, after) for end in ends)
    if not needed and not any_due:
        return OutputFiles()
    size = sum(ref.rows for ref in (*needed, *fresh.refs))
    # Only windows that got partials in this epoch, or that close in it, have a result.
    parts = {
        "false": epoch.load_partials(aggregation, needed),
        "true": epoch.load_segments([], fresh.paths),
    }
    rows = combine_frames(
        *(f.selectExpr("*", f"{new} AS _new") for new, f in parts.items() if f is not None)
    )
    if rows is None:
        return OutputFiles()
    over, was_over = end_reached_sql("_we", after), end_reached_sql("_we", before)
    touched = f"_we >= {opaque_literal(min(ends), '_we')}" if ends else "false"
    # In which range of windows some may have a result now, which merged ones have one, and the
    # number of their earlier results.
    may_be_due, due, revision = {
        # No row ever came into a window that only fills a gap.
        "each_epoch": (touched, "_new AND _n > 0", "_n - 1"),
        "complete": ("true", "true", f"{opaque_literal(epoch.order.epoch, '_we')} - _epoch"),
        "close": (
            f"({over}) AND ({touched} OR NOT ({was_over}))",
            f"({over}) AND (_new OR NOT ({was_over}))",
            "_on + _up - 1",
        ),
    }[window.emit]
    # A gap may be found when its windows are purged already.
    fills = " OR (_new AND _n = 0)" if window.zero_rows else ""
    rows = rows.where(f"NOT ({window_purged_sql(window, '_we', before)}){fills}").where(may_be_due)
    # With `delta` a result covers what came since the last one. What came while the window was open
    # has been in no result yet.
    use = "_new" if window.revisions == "delta" else None
    if use and window.emit == "close":
        use = f"_new OR NOT ({was_over})"
    merged = aggregation.merge_partials(rows, flags={"_new": "max(_new)"}, use=use).where(due)
    return epoch.write_results(aggregation, merged, revision, size)


def _may_be_due(window: WindowSpec, ref: FileRef, ends: list[int], before: int, after: int) -> bool:
    if (
        ref.min_time is None
        or ref.max_time is None
        or is_window_purged(window, ref.max_time, before)
    ):
        return False
    if window.emit == "complete":
        return True
    touched = bool(ends) and ref.max_time >= min(ends)
    if window.emit == "each_epoch":
        return touched
    return is_window_closed(window, ref.min_time, after) and (
        touched or not is_window_closed(window, ref.max_time, before)
    )


# Opt-in results for empty windows between the first and the last window of a key (`zero_rows`).
#
# One segment holds a row per key: its first and last window, and in `_due` the windows between them
# that F passes now, as ranges of window starts. So waiting costs O(1) whatever a gap's length. What
# F passes becomes partial aggregates of no rows, which live, are emitted and purged as all others.


def holds_gaps(ref: FileRef) -> bool:
    """Whether a segment of a window holds gaps, not partial aggregates."""
    return bool(ref.extra.get("gaps"))


def fill_gaps(
    epoch: EpochContext,
    aggregation: Aggregation,
    live: list[FileRef],
    gaps: list[FileRef],
    fresh: WrittenFiles,
) -> tuple[WrittenFiles, tuple[FileRef, ...]]:
    """Return partial aggregates of the empty windows that F passes now, and the segment of gaps.

    Args:
        epoch: the epoch.
        aggregation: of the window.
        live: segments of partial aggregates before the epoch.
        gaps: the segment of gaps before the epoch, if there is one.
        fresh: partial aggregates of the epoch's rows.
    """
    decision, nothing = epoch.decision, WrittenFiles()
    kind = f"window:{aggregation.name}"
    if not fresh.refs and (not gaps or decision.frontier_before == decision.frontier_after):
        return nothing, tuple(gaps)
    state = _update_gaps(epoch, aggregation, gaps, fresh)
    rows = sum(ref.rows for ref in (*gaps, *fresh.refs))
    left = epoch.writer.write_segment(
        kind, epoch.collect_if_small(state, rows), None, {"gaps": True}
    )
    due = left.read_columns(["_due"])
    spans = None if due is None else pc.list_flatten(due["_due"])
    if not spans:
        return nothing, left.refs
    a, b = pc.struct_field(spans, "a"), pc.struct_field(spans, "b")
    steps = pc.sum(pc.divide(pc.subtract(b, a), aggregation.window.period)).as_py()
    zero = epoch.collect_if_small(
        _build_zero_partials(epoch, aggregation, left, live, fresh), steps + len(spans)
    )
    return epoch.writer.write_segment(kind, zero, "_we", aggregation.segment_extra), left.refs


def _update_gaps(
    epoch: EpochContext, aggregation: Aggregation, gaps: list[FileRef], fresh: WrittenFiles
) -> Frame:
    """Per key its first and last window after this epoch, and the ranges of windows to look at.

    Those are the windows that F passes now, and of those by which the key has grown also the ones
    that F has passed before.
    """
    keys, decision = aggregation.keys, epoch.decision
    known, touched = epoch.load_segments(gaps), epoch.load_segments([], fresh.paths)
    bounds = [(known, "_first", "_last", "true"), (touched, "_ws", "_ws", "false")]
    rows = combine_frames(
        *(
            frame.selectExpr(*keys, f"{a} AS _first", f"{b} AS _last", f"{old} AS _old")
            for frame, a, b, old in bounds
            if frame is not None
        )
    )
    ends = {
        "_first": "min(_first)",
        "_last": "max(_last)",
        "_from": "min(IF(_old, _first, NULL))",
        "_to": "max(IF(_old, _last, NULL))",
    }
    reach = group_rows(rows, keys, ends)
    period, size = aggregation.window.period or 1, aggregation.window.size or 0
    before, after = (
        opaque_literal(TICK_MAX if f == TICK_MAX else saturate_ticks(f - size), "_first")
        for f in (decision.frontier_before, decision.frontier_after)
    )
    # The first window that F has not passed before, or the first one behind the known ones.
    begin = (
        f"CASE WHEN {before} >= _to THEN _to + {period}L WHEN {before} < _from THEN _from"
        f" ELSE _from + (({before} - _from) div {period}L + 1L) * {period}L END"
    )
    ranges = [
        ("_first", f"coalesce(_from, _first) - {period}L"),
        (f"coalesce({begin}, _first)", "_last"),
    ]
    spans = ", ".join(f"named_struct('a', {a}, 'b', least({b}, {after}))" for a, b in ranges)
    due = f"filter(array({spans}), x -> x.a <= x.b) AS _due"
    return reach.selectExpr(*keys, "_first", "_last", due)


def _build_zero_partials(
    epoch: EpochContext,
    aggregation: Aggregation,
    gaps: WrittenFiles,
    live: list[FileRef],
    fresh: WrittenFiles,
) -> Frame:
    """Partial aggregates of no rows, one for each window that is due and that has no rows.

    They have the columns of the others, which are in `live` and `fresh`.
    """
    window, frame = aggregation.window, epoch.load_segments([], gaps.paths)
    standing = epoch.load_partials(aggregation, live, fresh.paths)
    assert frame is not None  # noqa: S101 - it was just written
    assert standing is not None  # noqa: S101 - the last window of a key outlives the gaps before it
    before = epoch.decision.frontier_before
    marks = aggregation.select_marks(before, epoch.order.epoch, epochs=0)
    zero = (
        frame.selectExpr(*aggregation.keys, "explode(_due) AS _d")
        .selectExpr(*aggregation.keys, f"explode(sequence(_d.a, _d.b, {window.period}L)) AS _ws")
        .selectExpr("*", f"_ws + {window.size}L AS _we")
        .selectExpr(*aggregation.group_columns, *marks)
    )
    columns = standing.where("false").selectExpr(
        *aggregation.group_columns, "_on", "_up", "_n", "_epoch", *aggregation.partials
    )
    standing = standing.where(f"NOT ({window_purged_sql(window, '_we', before)})")
    # `<=>` joins null keys as well.
    names = ("_ws", *aggregation.keys)
    other = standing.selectExpr(*(f"{c} AS _j{c}" for c in names)).distinct()
    empty = zero.join(other, F.expr(" AND ".join(f"{c} <=> _j{c}" for c in names)), "left_anti")
    return columns.unionByName(empty, allowMissingColumns=True)
