"""Merges an epoch into the state of tumbling and sliding windows, and builds the results.

State is append-only. A segment holds one row per (window, key) that the epoch touched: its partial
aggregates, whether the window was open then (``_on``), whether the row was an update of a closed
one (``_up``), and in how many epochs it was touched (``_n``). The number of earlier results follows
from these, so nothing is written just because a window was emitted, and a segment is dropped when
every window in it is purged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, combine_frames, group_rows
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    expand_spans,
    is_window_closed,
    is_window_purged,
    window_purged_sql,
    write_ticks,
)
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, saturate_ticks

from .cut_division import DIVISION
from .state_files import MANY_SEGMENTS, SMALL_SEGMENT_ROWS, MergedState, StateFiles


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
class StateMerge:
    """One epoch of a window, for the keys of a bucket.

    Attributes:
        files: of the state.
        aggregation: of the window.
        folds: what units have made of the epoch's rows in the bucket, in the order of the cut; None
            if the epoch has no rows in any bucket.
    """

    files: StateFiles
    aggregation: Aggregation
    folds: pa.Table | None

    @property
    def window(self) -> WindowSpec:
        """The window."""
        return self.aggregation.window

    @property
    def kind(self) -> str:
        """Of its segments."""
        return f"window:{self.aggregation.name}"

    @property
    def before(self) -> int:
        """The frontier before the epoch."""
        return self.files.order.decision.frontier_before

    @property
    def after(self) -> int:
        """The frontier after the epoch."""
        return self.files.order.decision.frontier_after

    @cached_property
    def live(self) -> list[FileRef]:
        """Live segments of partial aggregates."""
        live = self.files.order.live_segments(self.kind)
        return [ref for ref in live if not holds_gaps(ref)]

    def load_partials(self, refs: list[FileRef]) -> Any:
        """The rows of segments that are in the bucket; None without a segment."""
        return self.files.load_partials(self.aggregation, refs)

    def write_rows(self, rows: pa.Table) -> tuple[FileRef, ...]:
        """Write state that the epoch's rows have changed."""
        # Sums of doubles depend on the division.
        extra = {**self.aggregation.segment_extra, "division": DIVISION}
        return self.files.write_segment(self.kind, rows, "_we", extra)

    def write_results(
        self, due: DueResults | None, sql_values: pa.Table | None
    ) -> tuple[tuple[FileRef, ...], int]:
        """Write the results of the window; return their files, and how many lack a sum."""
        if due is None:
            return (), 0
        aggregation = self.aggregation
        order = self.files.order
        timeline = order.folders.attempt.timeline
        origin = [f"CAST({timeline} AS int) AS _timeline", f"{order.epoch}L AS _epoch"]
        merged = DuckFrame.from_table(due.merged)
        rows = aggregation.build_results(merged, due.revision, origin, sql_values).toArrow()
        overflowed = 0
        if aggregation.overflow is not None:
            overflowed = pc.sum(rows["_overflow"]).as_py() or 0
            rows = rows.drop_columns("_overflow")
        return self.files.write_results(aggregation.name, rows), overflowed

    def select_standing(self, refs: Iterable[FileRef]) -> tuple[FileRef, ...]:
        """Return the segments that have rows of results that are not purged."""
        return tuple(
            ref
            for ref in refs
            if ref.max_time is not None
            and not is_window_purged(self.window, ref.max_time, self.after)
        )


@dataclass(frozen=True)
class WindowMerge(StateMerge):
    """As `StateMerge`, of a tumbling or sliding window, whose folds have no marks."""

    @cached_property
    def fresh(self) -> pa.Table | None:
        """The partial aggregates of the epoch, one row per window and key, with their marks."""
        if self.folds is None:
            return None
        aggregation = self.aggregation
        merged = aggregation.merge_same_windows(DuckFrame.from_table(self.folds))
        marks = aggregation.select_marks(self.before, self.files.order.epoch, epochs=1)
        columns = *aggregation.group_columns, *marks, *aggregation.partials
        table = merged.selectExpr(*columns).toArrow()
        return table if table.num_rows else None

    @cached_property
    def _zero(self) -> tuple[pa.Table | None, tuple[FileRef, ...]]:
        return fill_gaps(self) if self.window.zero_rows else (None, ())

    @cached_property
    def _added(self) -> list[pa.Table]:
        """What the epoch adds to the state: of its rows, and of `zero_rows`."""
        return [rows for rows in (self.fresh, self._zero[0]) if rows is not None]

    @cached_property
    def due(self) -> DueResults | None:
        """The state of what has a result now, at most one per window; None without any."""
        least_end = None
        marked = []
        if self._added:
            touched = pa.concat_tables(self._added, promote_options="permissive")
            least_end = pc.min(touched["_we"]).as_py()
        needed = [ref for ref in self.live if self._may_be_due(ref, least_end)]
        # Most epochs close no window.
        is_due = least_end is not None and (
            self.window.emit != "close" or is_window_closed(self.window, least_end, self.after)
        )
        if not needed and not is_due:
            return None
        # Only windows that got partials in this epoch, or that close in it, have a result.
        if needed:
            live = self.load_partials(needed)
            marked.append(live.selectExpr("*", "false AS _new"))
        if self._added:
            marked.append(DuckFrame.from_table(touched).selectExpr("*", "true AS _new"))
        return self._select_due(combine_frames(*marked), least_end)

    def _may_be_due(self, ref: FileRef, least_end: int | None) -> bool:
        window = self.window
        if ref.min_time is None or ref.max_time is None:
            return False
        if is_window_purged(window, ref.max_time, self.before):
            return False
        if window.emit == "complete":
            return True
        touched = least_end is not None and ref.max_time >= least_end
        if window.emit == "each_epoch":
            return touched
        return is_window_closed(window, ref.min_time, self.after) and (
            touched or not is_window_closed(window, ref.max_time, self.before)
        )

    def _select_due(self, rows: Any, least_end: int | None) -> DueResults | None:
        window = self.window
        over = end_reached_sql("_we", self.after)
        was_over = end_reached_sql("_we", self.before)
        is_touched = "false" if least_end is None else f"_we >= {write_ticks(least_end)}"
        # In which range of windows some may have a result now, which merged ones have one, and the
        # number of their earlier results.
        may_be_due, is_due, revision = {
            # No row ever came into a window that only fills a gap.
            "each_epoch": (is_touched, "_new AND _n > 0", "_n - 1"),
            "complete": ("true", "true", f"{self.files.order.epoch}L - _epoch"),
            "close": (
                f"({over}) AND ({is_touched} OR NOT ({was_over}))",
                f"({over}) AND (_new OR NOT ({was_over}))",
                "_on + _up - 1",
            ),
        }[window.emit]
        # A gap may be found when its windows are purged already.
        fills = " OR (_new AND _n = 0)" if window.zero_rows else ""
        rows = rows.where(f"NOT ({window_purged_sql(window, '_we', self.before)}){fills}")
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
        written = tuple(ref for rows in self._added for ref in self.write_rows(rows))
        results, overflowed = self.write_results(self.due, sql_values)
        live = self._merge_small_segments(self.select_standing(self.live))
        segments = *live, *self.select_standing(written), *self._zero[1]
        return MergedState(results, segments, written, overflowed, self.files.footers)

    def _merge_small_segments(self, live: tuple[FileRef, ...]) -> tuple[FileRef, ...]:
        """Merge small segments if there are many; return those that are live then."""
        small = [ref for ref in live if ref.rows <= SMALL_SEGMENT_ROWS]
        # An epoch writes a segment for each bucket.
        if len(small) < MANY_SEGMENTS * self.files.order.buckets:
            return live
        purged = window_purged_sql(self.window, "_we", self.after)
        standing = self.load_partials(small).where(f"NOT ({purged})")
        merged = self.aggregation.merge_partials(standing, flags={}).toArrow()
        large = [ref for ref in live if ref.rows > SMALL_SEGMENT_ROWS]
        extra = self.aggregation.segment_extra
        return (*large, *self.files.write_segment(self.kind, merged, "_we", extra))


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
    order = merge.files.order
    keys = merge.aggregation.keys
    gaps = tuple(ref for ref in order.live_segments(merge.kind) if holds_gaps(ref))
    # Every bucket of an epoch keeps, or writes again, the same segments.
    is_quiet = not gaps or (order.buckets == 1 and merge.before == merge.after)
    if merge.fresh is None and is_quiet:
        return None, gaps
    reach = _measure_keys(merge, list(gaps))
    if reach is None:
        return None, ()
    known = reach.select([*keys, "_first", "_last"])
    segments = merge.files.write_segment(merge.kind, known, None, {"gaps": True})
    spans = DuckFrame.from_table(reach)
    first, second = (spans.selectExpr(*keys, f"_a{i} AS _w0", f"_b{i} AS _w1") for i in range(2))
    due = first.unionByName(second).where("_w0 <= _w1").toArrow()
    return _build_zero_partials(merge, due) if due.num_rows else None, segments


def _measure_keys(merge: WindowMerge, gaps: list[FileRef]) -> pa.Table | None:
    """Per key its first and last window after this epoch, and two ranges of windows to look at.

    The ranges, from `_a0` to `_b0` and from `_a1` to `_b1`, are the windows that F passes now, and
    of those by which the key has grown also the ones that F has passed before.
    """
    keys = merge.aggregation.keys
    found = []
    known = merge.files.load_segments(gaps, keys)
    if known is not None:
        found.append(known.selectExpr(*keys, "_first", "_last", "true AS _old"))
    if merge.fresh is not None:
        touched = DuckFrame.from_table(merge.fresh)
        found.append(touched.selectExpr(*keys, "_ws AS _first", "_ws AS _last", "false AS _old"))
    rows = combine_frames(*found)
    if rows is None or not rows.limit(1).toArrow().num_rows:
        return None
    ends = {
        "_first": "min(_first)",
        "_last": "max(_last)",
        "_from": "min(IF(_old, _first, NULL))",
        "_to": "max(IF(_old, _last, NULL))",
    }
    period = merge.window.period or 1
    size = merge.window.size or 0
    lower, upper = (
        write_ticks(TICK_MAX if frontier == TICK_MAX else saturate_ticks(frontier - size))
        for frontier in (merge.before, merge.after)
    )
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
    return reach.toArrow()


def _build_zero_partials(merge: WindowMerge, spans: pa.Table) -> pa.Table | None:
    """Partial aggregates of no rows, one for each window that is due and that has no rows.

    They have the columns of the others. `spans` has ranges of window starts, `_w0` to `_w1`.
    """
    aggregation = merge.aggregation
    window = merge.window
    marks = aggregation.select_marks(merge.before, merge.files.order.epoch, epochs=0)
    windows = expand_spans(window, DuckFrame.from_table(spans))
    zero = windows.selectExpr(*aggregation.group_columns, *marks)
    fresh = None if merge.fresh is None else DuckFrame.from_table(merge.fresh)
    # There are some: the last window of a key outlives the gaps before it.
    standing: Any = combine_frames(merge.load_partials(merge.live), fresh)
    columns = [*aggregation.group_columns, "_on", "_up", "_n", "_epoch", *aggregation.partials]
    standing = standing.where(f"NOT ({window_purged_sql(window, '_we', merge.before)})")
    empty = zero.join_anti(standing, ["_ws", *aggregation.keys])
    table = standing.where("false").selectExpr(*columns).unionByName(empty).toArrow()
    return table if table.num_rows else None
