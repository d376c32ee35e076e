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

from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, combine_frames
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    is_window_closed,
    is_window_purged,
    window_purged_sql,
)
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import TICK_MIN

from .session_folds import merge_parts
from .state_files import MergedState
from .window_merges import DueResults, StateMerge

_BOUNDS_TYPE = "array<struct<s:bigint,e:bigint>>"
_BOUNDS_SQL = "named_struct('s', _ws, 'e', _we)"


@dataclass(frozen=True)
class SessionMerge(StateMerge):
    """As `StateMerge`, of a session window, or of one that fires early; folds are items."""

    @cached_property
    def _items(self) -> pa.Table | None:
        """The items of the epoch, one for each key and part."""
        if self.folds is None:
            return None
        merged = merge_parts(DuckFrame.from_table(self.folds), self.aggregation).toArrow()
        return merged if merged.num_rows else None

    @cached_property
    def _placed(self) -> pa.Table | None:
        """The items and the live sessions, as of `_assign_islands`; None if there are neither."""
        items = None
        if self._items is not None:
            # Revision -1: never shown. To show a session adds one.
            none = f"CAST(NULL AS {_BOUNDS_TYPE}) AS _standing"
            items = DuckFrame.from_table(self._items)
            items = items.selectExpr("*", "true AS _row", "-1 AS _rev", none)
        both = combine_frames(items, self._load_sessions())
        if both is None:
            return None
        placed = _assign_islands(self.aggregation, both).toArrow()
        return placed if placed.num_rows else None

    def find_gone_parts(self) -> pa.Table | None:
        """The keys and parts whose rows came after their session was purged; None without any."""
        window = self.window
        if window.kind is not WindowKind.SESSION or self._items is None:
            return None
        # No session ends before the items in it.
        if not is_window_purged(window, pc.min(self._items["_we"]).as_py(), self.before):
            return None
        purged = window_purged_sql(window, "_until", self.before)
        gone = DuckFrame.from_table(self._placed).where(f"_row AND {purged}")
        parts = gone.selectExpr(*self.aggregation.keys, "_part").toArrow()
        return parts if parts.num_rows else None

    @cached_property
    def _merged(self) -> pa.Table | None:
        """All live sessions after the epoch, with `_due`; None where the segment stays."""
        return None if self._stays or self._placed is None else self._merge_placed()

    @cached_property
    def _stays(self) -> bool:
        """No row, no session that closes, none that is shown in every epoch: the segment stays."""
        ends = [ref.min_time for ref in self.live if ref.min_time is not None]
        is_closing = any(is_window_closed(self.window, end, self.after) for end in ends)
        is_shown = bool(self.live) and self.window.emit == "complete"
        # In any bucket: all write the segments again, or none.
        is_quiet = self.folds is None and not is_closing and not is_shown
        return is_quiet and not self._passes_early_firing()

    def _passes_early_firing(self) -> bool:
        """Whether F passes a multiple of `fire_every` in this epoch."""
        every = self.window.fire_every
        if every is None or self.before >= self.after:
            return False
        return (self.after - 1) // every * every >= self.before

    @cached_property
    def due(self) -> DueResults | None:
        """The sessions that have a result now."""
        if self._merged is None:
            return None
        due = self._merged.filter(self._merged["_due"])
        return DueResults(due, "_rev") if due.num_rows else None

    def write(self, sql_values: pa.Table | None = None) -> MergedState:
        """Write the state and the results; as `WindowMerge.write`."""
        if self._stays:
            return MergedState(segments=self.select_standing(self.live))
        if self._merged is None:
            return MergedState()
        written = self.write_rows(self._merged)
        results, overflowed = self.write_results(self.due, sql_values)
        standing = self.select_standing(written)
        return MergedState(results, standing, written, overflowed, self.files.footers)

    def _load_sessions(self) -> Any:
        """The live sessions that are not purged; None without a segment."""
        aggregation = self.aggregation
        frame = self.load_partials(self.live)
        if frame is None:
            return None
        states = list(aggregation.partials)
        if self.window.revisions == "delta":
            states = [f"IF(_due, NULL, {name}) AS {name}" for name in states]
        own = ("_ws", "_we", "_rev", "_standing", "_opened", "false AS _row")
        purged = window_purged_sql(self.window, "_we", self.before)
        return frame.where(f"NOT ({purged})").selectExpr(*aggregation.keys, *own, *states)

    def _merge_placed(self) -> pa.Table:
        """All live sessions after the items joined them, with what is due."""
        window = self.window
        aggregation = self.aggregation
        purged = window_purged_sql(window, "_until", self.before)
        standing = DuckFrame.from_table(self._placed).where(f"NOT ({purged})")
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
        frame = aggregation.merge_states(standing, [*aggregation.keys, "_island"], marks)
        due = {
            "each_epoch": "_changed",
            "complete": "true",
            "close": _closing_due_sql(window, self.before, self.after),
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
        return merged.toArrow()


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
    every = window.fire_every
    was = end_reached_sql("_we", before, after_end=window.closes_after_end)
    # The newest multiple of `fire_every` that F has passed.
    newest = (after - 1) // every * every
    first = f"(_opened - pmod(_opened, {every}L) + {every}L)"
    between = f"{first} <= {newest}L AND ({str(newest >= before).lower()} OR _rev < 0)"
    return f"({closed}) OR (({over}) AND NOT ({was})) OR (NOT ({over}) AND {between})"


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
