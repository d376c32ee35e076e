"""Merges an epoch into the live sessions of keys: rows and sessions that meet become one session.

Also all windows that fire while they are open.

The live sessions, closed ones within their lateness included, are in one segment (one for each
bucket of keys) that is written again whenever rows came, a session closed or a result may be due:
what meets what depends on all of them. ``_due`` marks those with a result in the epoch that wrote
the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import (
    DuckFrame,
    combine_frames,
    get_column_types,
    group_rows,
)
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    is_window_closed,
    is_window_purged,
    window_purged_sql,
)
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import TICK_MIN

from .cut_division import DIVISION
from .session_folds import merge_parts
from .state_files import MergedState, StateFiles
from .window_merges import DueResults, is_window_segment_purged, write_results

_BOUNDS_TYPE = "array<struct<s:bigint,e:bigint>>"
_BOUNDS_SQL = "named_struct('s', _ws, 'e', _we)"


@dataclass(frozen=True)
class SessionMerge:
    """One epoch of a session window, or of one that fires early, for the keys of a bucket.

    Attributes:
        files: of the state.
        aggregation: of the window.
        folds: the items of all units in the bucket, in the order of the cut; None if the epoch has
            no rows in any bucket.
    """

    files: StateFiles
    aggregation: Aggregation
    folds: pa.Table | None

    @cached_property
    def _items(self) -> pa.Table | None:
        """The items of the epoch, one for each key and part."""
        if self.folds is None:
            return None
        merged: pa.Table = merge_parts(DuckFrame.from_table(self.folds), self.aggregation).toArrow()
        return merged if merged.num_rows else None

    @cached_property
    def _live(self) -> list[FileRef]:
        return self.files.order.live_segments(f"window:{self.aggregation.name}")

    @cached_property
    def _placed(self) -> pa.Table | None:
        """The items and the live sessions, as of `_assign_islands`; None if there are neither."""
        items = None if self._items is None else DuckFrame.from_table(self._items)
        both = combine_frames(None if items is None else _add_origin(items), self._load_sessions())
        if both is None:
            return None
        placed: pa.Table = _assign_islands(self.aggregation, both).toArrow()
        return placed if placed.num_rows else None

    def find_gone_parts(self) -> pa.Table | None:
        """The keys and parts whose rows came after their session was purged; None without any."""
        window = self.aggregation.window
        before = self.files.order.decision.frontier_before
        if window.kind is not WindowKind.SESSION or self._items is None:
            return None
        # No session ends before the items in it.
        if not is_window_purged(window, pc.min(self._items["_we"]).as_py(), before):
            return None
        purged = window_purged_sql(window, "_until", before)
        gone = DuckFrame.from_table(self._placed).where(f"_row AND {purged}")
        parts: pa.Table = gone.selectExpr(*self.aggregation.keys, "_part").toArrow()
        return parts if parts.num_rows else None

    @cached_property
    def _merged(self) -> pa.Table | None:
        """All live sessions after the epoch, with `_due`; None where the segment stays."""
        return None if self._stays or self._placed is None else self._merge_placed()

    @cached_property
    def _stays(self) -> bool:
        """No row, no session that closes, none that is shown in every epoch: the segment stays."""
        window, decision = self.aggregation.window, self.files.order.decision
        ends = [ref.min_time for ref in self._live if ref.min_time is not None]
        is_closing = any(is_window_closed(window, end, decision.frontier_after) for end in ends)
        is_closing = is_closing or _passes_early_firing(window, decision)
        is_shown = bool(self._live) and window.emit == "complete"
        # In any bucket: all write the segments again, or none.
        return self.folds is None and not is_closing and not is_shown

    @cached_property
    def due(self) -> DueResults | None:
        """The sessions that have a result now."""
        if self._merged is None:
            return None
        due = self._merged.filter(self._merged["_due"])
        return DueResults(due, "_rev") if due.num_rows else None

    def write(self, sql_values: pa.Table | None = None) -> MergedState:
        """Write the state and the results.

        `sql_values` are those of aggregates that only Spark computes, for the due results.
        """
        files, aggregation, after = (
            self.files,
            self.aggregation,
            self.files.order.decision.frontier_after,
        )
        if self._stays:
            return MergedState(segments=self._select_standing(self._live, after))
        if self._merged is None:
            return MergedState()
        kind = f"window:{aggregation.name}"
        # Sums of doubles depend on the division.
        extra = {**aggregation.segment_extra, "division": DIVISION}
        written = files.write_segment(kind, self._merged, "_we", extra)
        results, overflowed = write_results(files, aggregation, self.due, sql_values)
        standing = self._select_standing(written, after)
        return MergedState(results, standing, written, overflowed, files.footers)

    def _select_standing(self, refs: Any, after: int) -> tuple[FileRef, ...]:
        window = self.aggregation.window
        return tuple(ref for ref in refs if not is_window_segment_purged(window, ref, after))

    def _load_sessions(self) -> Any:
        """The live sessions that are not purged; None without a segment."""
        aggregation, window = self.aggregation, self.aggregation.window
        frame = self.files.load_partials(aggregation, self._live, aggregation.keys)
        if frame is None:
            return None
        purged = window_purged_sql(window, "_we", self.files.order.decision.frontier_before)
        fresh = [
            f"IF(_due, NULL, {c}) AS {c}" if window.revisions == "delta" else c
            for c in aggregation.partials
        ]
        own = ("_ws", "_we", "_rev", "_standing", "_opened")
        return frame.where(f"NOT ({purged})").selectExpr(
            *aggregation.keys, *own, *fresh, "false AS _row"
        )

    def _merge_placed(self) -> pa.Table:
        """All live sessions after the items joined them, with what is due."""
        decision, window, aggregation = (
            self.files.order.decision,
            self.aggregation.window,
            self.aggregation,
        )
        before, after = decision.frontier_before, decision.frontier_after
        placed = DuckFrame.from_table(self._placed)
        types = get_column_types(
            placed if self._items is None else DuckFrame.from_table(self._items)
        )
        standing = placed.where(f"NOT ({window_purged_sql(window, '_until', before)})")
        marks = {
            "_ws": "min(_ws)",
            "_we": "max(_we)",
            "_changed": "max(_row)",
            "_rev": "max(_rev)",
            "_standing": "coalesce(flatten(collect_list(_standing)), array())",
            # A session that grows backwards keeps the time from which its early results are
            # counted.
            "_opened": "coalesce(min(_opened) FILTER (WHERE NOT _row), min(_opened))",
        }
        group = [*aggregation.keys, "_island"]
        frame = group_rows(standing, group, {**marks, **aggregation.merges})
        frame = frame.selectExpr(*aggregation.keys, *marks, *aggregation.cast_states(types))
        due = {
            "each_epoch": "_changed",
            "complete": "true",
            "close": _closing_due_sql(window, before, after),
        }[window.emit]
        is_replacing = "_due" if window.kind is WindowKind.SESSION else "false"
        merged = frame.selectExpr("*", f"({due}) AS _due").selectExpr(
            *aggregation.keys,
            "_ws",
            "_we",
            *aggregation.partials,
            "_due",
            "_rev + CAST(_due AS int) AS _rev",
            f"IF(_due, array({_BOUNDS_SQL}), _standing) AS _standing",
            "_opened",
            f"IF({is_replacing}, {_REPLACED_WINDOWS_SQL}, NULL) AS _replaces",
        )
        table: pa.Table = merged.toArrow()
        return table


def _add_origin(items: DuckFrame) -> DuckFrame:
    """Items as what they are beside live sessions."""
    # Revision -1: never shown. To show a session adds one.
    own = "true AS _row", "-1 AS _rev", f"CAST(NULL AS {_BOUNDS_TYPE}) AS _standing"
    return items.selectExpr("*", *own)


def _assign_islands(aggregation: Aggregation, items: Any) -> Any:
    """Number the session that each item ends up in (`_island`, its end `_until`)."""
    window = aggregation.window
    by_key = f"PARTITION BY {', '.join(aggregation.keys)}" if aggregation.keys else "PARTITION BY 1"
    # Unique, because both passes must meet the items in one order: a row may have the bounds of a
    # live session.
    order = f"{by_key} ORDER BY _ws, _we, _row ROWS BETWEEN UNBOUNDED PRECEDING AND"
    if window.kind is not WindowKind.SESSION:
        return items.selectExpr("*", "_ws AS _island", "_we AS _until")
    # A session begins where an item starts behind the greatest end of all items before it.
    apart = ">" if window.session_touch == "merge" else ">="
    items = items.selectExpr("*", f"max(_we) OVER ({order} 1 PRECEDING) AS _reach")
    first = f"CAST(_reach IS NULL OR _ws {apart} _reach AS int)"
    items = items.selectExpr("*", f"sum({first}) OVER ({order} CURRENT ROW) AS _island")
    return items.selectExpr("*", f"max(_we) OVER ({by_key}, _island) AS _until")


def _closing_due_sql(window: WindowSpec, before: int, after: int) -> str:
    """Closed, and changed or not yet shown within these bounds.

    Or open, and F passes a multiple of `fire_every`.
    """
    over = end_reached_sql("_we", after, after_end=window.closes_after_end)
    shown = f"coalesce(array_contains(_standing, {_BOUNDS_SQL}), false)"
    closed = f"({over}) AND (_changed OR NOT {shown})"
    if window.fire_every is None or after <= TICK_MIN + window.fire_every:
        return closed
    every, was = (
        window.fire_every,
        end_reached_sql("_we", before, after_end=window.closes_after_end),
    )
    # The newest multiple of `fire_every` that F has passed.
    newest = (after - 1) // every * every
    first = f"(_opened - pmod(_opened, {every}L) + {every}L)"
    between = f"{first} <= {newest}L AND ({str(newest >= before).lower()} OR _rev < 0)"
    return f"({closed}) OR (({over}) AND NOT ({was})) OR (NOT ({over}) AND {between})"


def _passes_early_firing(window: WindowSpec, decision: Decision) -> bool:
    """Whether F passes a multiple of `fire_every` in this epoch."""
    before, after = decision.frontier_before, decision.frontier_after
    every = window.fire_every
    return every is not None and before < after and (after - 1) // every * every >= before


def _format_instant_sql(ticks: str) -> str:
    """`format_instant` in Spark SQL."""
    fraction = (
        f"IF(pmod({ticks}, 1000000L) = 0, '', concat('.', lpad(CAST(pmod({ticks}, 1000000L) AS"
        " string), 6, '0')))"
    )
    return (
        f"concat(date_format(timestamp_micros({ticks}), 'yyyy-MM-dd\\'T\\'HH:mm:ss'), {fraction},"
        " 'Z')"
    )


_OTHER_BOUNDS_SQL = "array_sort(array_distinct(filter(_standing, b -> b.s <> _ws OR b.e <> _we)))"
_REPLACED_WINDOWS_SQL = (
    f"transform({_OTHER_BOUNDS_SQL}, b -> concat({_format_instant_sql('b.s')}, '/',"
    f" {_format_instant_sql('b.e')}))"
)
