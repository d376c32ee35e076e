"""Merges an epoch into the state of tumbling and sliding windows, and builds the results.

State is append-only. A segment holds one row per (window, key) that the epoch touched: its partial
aggregates, whether the window was open then (``_on``), whether the row was an update of a closed
one (``_up``), and in how many epochs it was touched (``_n``). The number of earlier results follows
from these, so nothing is written just because a window was emitted, and a segment is dropped when
every window in it is purged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, combine_frames, group_rows
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    is_window_closed,
    is_window_purged,
    window_purged_sql,
    write_ticks,
)
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, saturate_ticks

from .cut_division import DIVISION
from .state_files import MANY_SEGMENTS, SMALL_SEGMENT_ROWS, MergedState, StateFiles

_WINDOWS_PER_PART: Final = 10_000
"""Windows of one key that are laid out at a time."""


@dataclass(frozen=True)
class DueResults:
    """The merged state of the windows that have a result in an epoch.

    Attributes:
        merged: a row for each result, with the columns of state.
        revision: SQL over them.
    """

    merged: pa.Table
    revision: str


@dataclass(frozen=True)
class WindowMerge:
    """One epoch of a tumbling or sliding window, for the keys of a bucket.

    Attributes:
        files: of the state.
        aggregation: of the window.
        folds: partial aggregates of the epoch's rows in the bucket without marks, in the order of
            the cut; None without rows.
    """

    files: StateFiles
    aggregation: Aggregation
    folds: pa.Table | None

    @property
    def window(self) -> WindowSpec:
        """The window."""
        return self.aggregation.window

    @property
    def bucket_columns(self) -> list[str]:
        """What the bucket of a row follows from."""
        return list_bucket_columns(self.aggregation)

    @cached_property
    def _live(self) -> list[FileRef]:
        """Live segments of partial aggregates."""
        live = self.files.order.live_segments(f"window:{self.aggregation.name}")
        return [ref for ref in live if not holds_gaps(ref)]

    @cached_property
    def fresh(self) -> pa.Table | None:
        """The partial aggregates of the epoch, one row per window and key, with their marks."""
        order = self.files.order
        if self.folds is None:
            return None
        folds = DuckFrame.from_table(self.folds)
        merged = self.aggregation.merge_folds(folds, order.decision.frontier_before, order.epoch)
        table: pa.Table = merged.toArrow()
        return table if table.num_rows else None

    @cached_property
    def _zero(self) -> tuple[pa.Table | None, tuple[FileRef, ...]]:
        return fill_gaps(self) if self.window.zero_rows else (None, ())

    @cached_property
    def touched(self) -> pa.Table | None:
        """What the epoch adds to the state, windows without rows of `zero_rows` included."""
        added = [one for one in (self.fresh, self._zero[0]) if one is not None]
        return pa.concat_tables(added, promote_options="permissive") if added else None

    @cached_property
    def due(self) -> DueResults | None:
        """The state of what has a result now, at most one per window; None without any."""
        decision, window = self.files.order.decision, self.window
        before, after = decision.frontier_before, decision.frontier_after
        touched = self.touched
        least_end = None if touched is None else pc.min(touched["_we"]).as_py()
        needed = [ref for ref in self._live if _may_be_due(window, ref, least_end, before, after)]
        # Most epochs close no window.
        is_due = least_end is not None and (
            window.emit != "close" or is_window_closed(window, least_end, after)
        )
        if not needed and not is_due:
            return None
        # Only windows that got partials in this epoch, or that close in it, have a result.
        fresh = None if touched is None else DuckFrame.from_table(touched)
        live = self.files.load_partials(self.aggregation, needed, self.bucket_columns)
        marked = [
            frame.selectExpr("*", f"{is_new} AS _new")
            for is_new, frame in (("false", live), ("true", fresh))
            if frame is not None
        ]
        rows = combine_frames(*marked)
        if rows is None:
            return None
        return self._select_due(rows, least_end)

    def _select_due(self, rows: Any, least_end: int | None) -> DueResults | None:
        order, window = self.files.order, self.window
        before, after = order.decision.frontier_before, order.decision.frontier_after
        over, was_over = end_reached_sql("_we", after), end_reached_sql("_we", before)
        is_touched = "false" if least_end is None else f"_we >= {write_ticks(least_end)}"
        # In which range of windows some may have a result now, which merged ones have one, and the
        # number of their earlier results.
        may_be_due, is_due, revision = {
            # No row ever came into a window that only fills a gap.
            "each_epoch": (is_touched, "_new AND _n > 0", "_n - 1"),
            "complete": ("true", "true", f"{order.epoch}L - _epoch"),
            "close": (
                f"({over}) AND ({is_touched} OR NOT ({was_over}))",
                f"({over}) AND (_new OR NOT ({was_over}))",
                "_on + _up - 1",
            ),
        }[window.emit]
        # A gap may be found when its windows are purged already.
        fills = " OR (_new AND _n = 0)" if window.zero_rows else ""
        rows = rows.where(f"NOT ({window_purged_sql(window, '_we', before)}){fills}")
        # With `delta` a result covers what came since the last one. What came while the window was
        # open has been in no result yet.
        use = "_new" if window.revisions == "delta" else None
        if use and window.emit == "close":
            use = f"_new OR NOT ({was_over})"
        merged = self.aggregation.merge_partials(
            rows.where(may_be_due), flags={"_new": "max(_new)"}, use=use
        )
        table = merged.where(is_due).toArrow()
        return DueResults(table, revision) if table.num_rows else None

    def write(self, sql_values: pa.Table | None = None) -> MergedState:
        """Write the state and the results.

        `sql_values` are those of aggregates that only Spark computes, for the due results.
        """
        files, aggregation = self.files, self.aggregation
        kind, after = f"window:{aggregation.name}", files.order.decision.frontier_after
        written: tuple[FileRef, ...] = ()
        # Sums of doubles depend on the division.
        extra = {**aggregation.segment_extra, "division": DIVISION}
        for rows in (self.fresh, self._zero[0]):
            if rows is not None:
                written += files.write_segment(kind, rows, "_we", extra)
        results, overflowed = write_results(files, aggregation, self.due, sql_values)
        standing = [
            ref for ref in self._live if not is_window_segment_purged(self.window, ref, after)
        ]
        added = tuple(
            ref for ref in written if not is_window_segment_purged(self.window, ref, after)
        )
        segments = (*self._merge_small_segments(kind, standing), *added, *self._zero[1])
        return MergedState(results, segments, written, overflowed, files.footers)

    def _merge_small_segments(self, kind: str, live: list[FileRef]) -> tuple[FileRef, ...]:
        """Merge small segments if there are many; return those that are live then."""
        small = [ref for ref in live if ref.rows <= SMALL_SEGMENT_ROWS]
        # An epoch writes a segment for each bucket.
        if len(small) < MANY_SEGMENTS * self.files.order.buckets:
            return tuple(live)
        aggregation, after = self.aggregation, self.files.order.decision.frontier_after
        rows = self.files.load_partials(aggregation, small, self.bucket_columns)
        standing = rows.where(f"NOT ({window_purged_sql(self.window, '_we', after)})")
        merged = aggregation.merge_partials(standing, flags={}).toArrow()
        large = [ref for ref in live if ref.rows > SMALL_SEGMENT_ROWS]
        return (*large, *self.files.write_segment(kind, merged, "_we", aggregation.segment_extra))


def list_bucket_columns(aggregation: Aggregation) -> list[str]:
    """The state columns from which the bucket of a row of an aligned window follows."""
    # What fills gaps is looked for by key.
    return aggregation.keys if aggregation.window.zero_rows else aggregation.group_columns


def write_results(
    files: StateFiles,
    aggregation: Aggregation,
    due: DueResults | None,
    sql_values: pa.Table | None = None,
) -> tuple[tuple[FileRef, ...], int]:
    """Write the results of a window; return their files, and how many lack a sum."""
    if due is None:
        return (), 0
    order = files.order
    timeline = order.folders.attempt.timeline
    origin = [f"CAST({timeline} AS int) AS _timeline", f"{order.epoch}L AS _epoch"]
    merged = DuckFrame.from_table(due.merged)
    rows = aggregation.build_results(merged, due.revision, origin, sql_values).toArrow()
    overflowed = 0
    if aggregation.overflow is not None:
        overflowed = pc.sum(rows["_overflow"]).as_py() or 0
        rows = rows.drop_columns("_overflow")
    return files.write_results(aggregation.name, rows), overflowed


def is_window_segment_purged(window: WindowSpec, ref: FileRef, frontier: int) -> bool:
    """Return whether all results that have rows in a segment of the window are purged."""
    return ref.max_time is None or is_window_purged(window, ref.max_time, frontier)


def _may_be_due(
    window: WindowSpec, ref: FileRef, least_end: int | None, before: int, after: int
) -> bool:
    if (
        ref.min_time is None
        or ref.max_time is None
        or is_window_purged(window, ref.max_time, before)
    ):
        return False
    if window.emit == "complete":
        return True
    touched = least_end is not None and ref.max_time >= least_end
    if window.emit == "each_epoch":
        return touched
    return is_window_closed(window, ref.min_time, after) and (
        touched or not is_window_closed(window, ref.max_time, before)
    )


# Opt-in results for empty windows between the first and the last window of a key (`zero_rows`).
#
# One segment holds a row per key: its first and last window. So waiting costs O(1) whatever a gap's
# length. The windows between them that F passes now become partial aggregates of no rows, which
# live, are emitted and purged as all others.


def holds_gaps(ref: FileRef) -> bool:
    """Whether a segment of a window holds gaps, not partial aggregates."""
    return bool(ref.extra.get("gaps"))


def fill_gaps(merge: WindowMerge) -> tuple[pa.Table | None, tuple[FileRef, ...]]:
    """Return partial aggregates of the empty windows that F passes now, and segments of gaps."""
    files, aggregation = merge.files, merge.aggregation
    decision, kind = files.order.decision, f"window:{aggregation.name}"
    gaps = [ref for ref in files.order.live_segments(kind) if holds_gaps(ref)]
    fresh = merge.fresh
    if fresh is None and (not gaps or decision.frontier_before == decision.frontier_after):
        # Every bucket of an epoch keeps, or writes again, the same segments.
        is_whole = files.order.buckets == 1
        if is_whole or not gaps:
            return None, tuple(gaps)
    reach = _measure_keys(merge, gaps)
    if reach is None:
        return None, ()
    known = [*aggregation.keys, "_first", "_last"]
    segments = files.write_segment(kind, reach.select(known), None, {"gaps": True})
    spans = DuckFrame.from_table(reach)
    ranges = [spans.selectExpr(*aggregation.keys, f"_a{i} AS _a", f"_b{i} AS _b") for i in range(2)]
    due = ranges[0].unionByName(ranges[1]).where("_a <= _b")
    return _build_zero_partials(merge, due.toArrow()), segments


def _measure_keys(merge: WindowMerge, gaps: list[FileRef]) -> pa.Table | None:
    """Per key its first and last window after this epoch, and two ranges of windows to look at.

    The ranges, from `_a0` to `_b0` and from `_a1` to `_b1`, are the windows that F passes now, and
    of those by which the key has grown also the ones that F has passed before.
    """
    aggregation, decision = merge.aggregation, merge.files.order.decision
    keys = aggregation.keys
    known = merge.files.load_segments(gaps, keys)
    touched = None if merge.fresh is None else DuckFrame.from_table(merge.fresh)
    bounds = [(known, "_first", "_last", "true"), (touched, "_ws", "_ws", "false")]
    rows = combine_frames(
        *(
            frame.selectExpr(*keys, f"{a} AS _first", f"{b} AS _last", f"{old} AS _old")
            for frame, a, b, old in bounds
            if frame is not None
        )
    )
    if rows is None or not rows.limit(1).toArrow().num_rows:
        return None
    ends = {
        "_first": "min(_first)",
        "_last": "max(_last)",
        "_from": "min(IF(_old, _first, NULL))",
        "_to": "max(IF(_old, _last, NULL))",
    }
    period, size = merge.window.period or 1, merge.window.size or 0
    before, after = (
        TICK_MAX if f == TICK_MAX else saturate_ticks(f - size)
        for f in (decision.frontier_before, decision.frontier_after)
    )
    lower, upper = write_ticks(before), write_ticks(after)
    # The first window that F has not passed before, or the first one behind the known ones.
    begin = (
        f"CASE WHEN {lower} >= _to THEN _to + {period}L WHEN {lower} < _from THEN _from"
        f" ELSE _from + (({lower} - _from) div {period}L + 1L) * {period}L END"
    )
    reach = group_rows(rows, keys, ends).selectExpr(
        *keys,
        "_first",
        "_last",
        "_first AS _a0",
        f"least(coalesce(_from, _first) - {period}L, {upper}) AS _b0",
        f"coalesce({begin}, _first) AS _a1",
        f"least(_last, {upper}) AS _b1",
    )
    table: pa.Table = reach.toArrow()
    return table


def _build_zero_partials(merge: WindowMerge, spans: pa.Table) -> pa.Table | None:
    """Partial aggregates of no rows, one for each window that is due and that has no rows.

    They have the columns of the others. `spans` has ranges of window starts, `_a` to `_b`.
    """
    aggregation, window, order = merge.aggregation, merge.window, merge.files.order
    if not spans.num_rows:
        return None
    before = order.decision.frontier_before
    marks = aggregation.select_marks(before, order.epoch, epochs=0)
    period, keys = window.period or 1, aggregation.keys
    # Not all windows of a key at once: DuckDB holds the lists of many rows.
    step = f"explode(sequence(_a, _b, {_WINDOWS_PER_PART * period}L)) AS _a"
    part = f"sequence(_a, least(_b, _a + {(_WINDOWS_PER_PART - 1) * period}L), {period}L)"
    zero = (
        DuckFrame.from_table(spans)
        .selectExpr(*keys, step, "_b")
        .selectExpr(*keys, f"explode({part}) AS _ws")
        .selectExpr("*", f"_ws + {window.size}L AS _we")
        .selectExpr(*aggregation.group_columns, *marks)
    )
    fresh = None if merge.fresh is None else DuckFrame.from_table(merge.fresh)
    live = merge.files.load_partials(aggregation, merge._live, merge.bucket_columns)
    standing = combine_frames(live, fresh)
    assert standing is not None  # noqa: S101 - the last window of a key outlives the gaps before it
    columns = [*aggregation.group_columns, "_on", "_up", "_n", "_epoch", *aggregation.partials]
    standing = standing.where(f"NOT ({window_purged_sql(window, '_we', before)})")
    empty = zero.join_anti(standing, ["_ws", *keys])
    found = standing.where("false").selectExpr(*columns).unionByName(empty)
    table: pa.Table = found.selectExpr(*columns).toArrow()
    return table if table.num_rows else None
