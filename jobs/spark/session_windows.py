"""Session windows: rows and live sessions of a key that meet become one session.

Also all windows that fire while they are open.

The live sessions, closed ones within their lateness included, are in one segment that is written
again whenever rows came, a session closed or a result may be due: what meets what depends on all of
them. ``_due`` marks those with a result in the epoch that wrote the segment.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.rows.cut_division import DIVISION
from tidegate.jobs.rows.session_folds import (
    find_late_session_rows,
    fold_parts,
    group_parts,
    merge_parts,
    select_part_rows,
)
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import (
    DuckFrame,
    Frame,
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
from tidegate.json_types import JsonView
from tidegate.time_units import TICK_MIN

from .epoch_context import EpochContext, OutputFiles, collect_to_driver
from .tumbling_sliding_windows import choose_state_engine, is_window_segment_purged

_BOUNDS_TYPE = "array<struct<s:bigint,e:bigint>>"
_BOUNDS_SQL = "named_struct('s', _ws, 'e', _we)"


def process_sessions(epoch: EpochContext, name: str) -> OutputFiles:
    """Fold the epoch's rows into the sessions and write the results that are due."""
    aggregation = Aggregation(epoch.spec, name)
    items = None if epoch.data is None else fold_parts(epoch.judged, aggregation)
    return _update_sessions(epoch, aggregation, items, epoch.staged.rows)


@dataclass(frozen=True)
class TaskItems:
    """The items of an epoch that tasks have made of its rows, one for each key and part.

    Attributes:
        epoch: with the engine in which they are merged with the live sessions.
        aggregation: of their window.
        table: the items; None if the epoch has no rows.
    """

    epoch: EpochContext
    aggregation: Aggregation
    table: pa.Table | None

    @classmethod
    def merge(cls, epoch: EpochContext, name: str, items: pa.Table | None) -> Self:
        """Merge the items of all units in the order of the cut."""
        aggregation, rows = Aggregation(epoch.spec, name), 0
        if items is not None:
            items = merge_parts(DuckFrame.from_table(items), aggregation).toArrow()
            rows = items.num_rows
        live = epoch.live_segments(f"window:{name}")
        return cls(choose_state_engine(epoch, name, rows, live), aggregation, items)

    def find_gone_parts(self) -> pa.Table | None:
        """The keys and parts whose rows came after their session was purged; None without any."""
        window, before = self.aggregation.window, self.epoch.decision.frontier_before
        ends = [] if self.table is None else self.table["_we"]
        # No session ends before the items in it.
        if not len(ends) or not is_window_purged(window, pc.min(ends).as_py(), before):
            return None
        gone = collect_to_driver(_select_gone_parts(self.epoch, self.aggregation, self._placed))
        return gone if gone.num_rows else None

    def process(self) -> OutputFiles:
        """As `process_sessions`."""
        rows = 0 if self.table is None else self.table.num_rows
        placed = self._placed if "_placed" in vars(self) else None
        # Sums of doubles depend on the division.
        extra = {"division": DIVISION}
        return _update_sessions(self.epoch, self.aggregation, self._items, rows, extra, placed)

    @property
    def _items(self) -> Frame | None:
        return None if self.table is None else self.epoch.to_frame(self.table)

    @cached_property
    def _placed(self) -> Frame:
        """As of `_assign_items`, computed once."""
        placed: Any = _assign_items(self.epoch, self.aggregation, self._items)
        return self.epoch.to_frame(placed.toArrow()) if self.epoch.native else placed


def select_late_for_sessions(epoch: EpochContext, name: str) -> Frame:
    """Rows that are late alone, or whose session, with all that it meets, is purged already.

    Without those of the first kind that ``on_late: adjust`` moves. The epoch must have rows.
    """
    aggregation = Aggregation(epoch.spec, name)
    rows = select_part_rows(epoch.judged, aggregation)
    placed = _assign_items(epoch, aggregation, group_parts(rows, aggregation, {}))
    gone = _select_gone_parts(epoch, aggregation, placed)
    return find_late_session_rows(epoch.judged, aggregation, gone)


def _update_sessions(
    epoch: EpochContext,
    aggregation: Aggregation,
    items: Frame | None,
    rows: int,
    extra: JsonView = MappingProxyType({}),
    placed: Frame | None = None,
) -> OutputFiles:
    """Merge the items of the epoch, of at most so many rows, with the live sessions.

    Segments carry `extra`; `placed` are the items as `_assign_items` gives them, if it was asked.
    """
    window, after = aggregation.window, epoch.decision.frontier_after
    kind = f"window:{aggregation.name}"
    live = epoch.live_segments(kind)
    closing = any(
        ref.min_time is not None and is_window_closed(window, ref.min_time, after) for ref in live
    ) or _passes_early_firing(epoch, window)
    # No row, no session that closes, none that is shown in every epoch: the segment stays.
    if items is None and not closing and not (live and window.emit == "complete"):
        kept = tuple(ref for ref in live if not is_window_segment_purged(window, ref, after))
        return OutputFiles(segments=kept)
    if placed is None:
        placed = _assign_items(epoch, aggregation, items)
    if placed is None:
        return OutputFiles()
    # Spark widens a decimal with every sum; the state keeps the type of the first partial.
    types = get_column_types(placed if items is None else items)
    merged = _merge_placed(epoch, aggregation, placed, types)
    size = rows + sum(ref.rows for ref in live)
    written = epoch.writer.write_segment(
        kind, epoch.collect_if_small(merged, size), "_we", {**aggregation.segment_extra, **extra}
    )
    due = epoch.load_segments([], written.paths)
    shown = OutputFiles()
    if due is not None:
        shown = epoch.write_results(aggregation, due.where("_due"), "_rev", written.rows)
    standing = (ref for ref in written.refs if not is_window_segment_purged(window, ref, after))
    return replace(shown, segments=tuple(standing), written=written)


def _select_gone_parts(epoch: EpochContext, aggregation: Aggregation, placed: Frame) -> Frame:
    """The keys and parts of the items whose session, with all that it meets, is purged."""
    purged = window_purged_sql(aggregation.window, "_until", epoch.decision.frontier_before)
    return placed.where(f"_row AND {purged}").selectExpr(*aggregation.keys, "_part")


def _assign_items(
    epoch: EpochContext, aggregation: Aggregation, items: Frame | None
) -> Frame | None:
    """The items and the live sessions, as of `_assign_islands`; None if there are neither."""
    live = epoch.live_segments(f"window:{aggregation.name}")
    kept = _select_live_sessions(epoch, aggregation, live)
    both = combine_frames(None if items is None else _add_origin(items), kept)
    return None if both is None else _assign_islands(aggregation, both)


def _add_origin(items: Frame) -> Frame:
    """Items as what they are beside live sessions."""
    # Revision -1: never shown. To show a session adds one.
    own = "true AS _row", "-1 AS _rev", f"CAST(NULL AS {_BOUNDS_TYPE}) AS _standing"
    return items.selectExpr("*", *own)


def _select_live_sessions(
    epoch: EpochContext, aggregation: Aggregation, live: list[FileRef]
) -> Frame | None:
    frame, window = epoch.load_partials(aggregation, live), aggregation.window
    if frame is None:
        return None
    frame = frame.where(f"NOT ({window_purged_sql(window, '_we', epoch.decision.frontier_before)})")
    fresh = [
        f"IF(_due, NULL, {c}) AS {c}" if window.revisions == "delta" else c
        for c in aggregation.partials
    ]
    return frame.selectExpr(
        *aggregation.keys, "_ws", "_we", "_rev", "_standing", "_opened", *fresh, "false AS _row"
    )


def _assign_islands(aggregation: Aggregation, items: Frame) -> Frame:
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


def _merge_placed(
    epoch: EpochContext, aggregation: Aggregation, placed: Frame, types: dict[str, str]
) -> Frame:
    """All live sessions after the items joined them, with what is due.

    States have these types.
    """
    before, after = epoch.decision.frontier_before, epoch.decision.frontier_after
    window = aggregation.window
    standing = placed.where(f"NOT ({window_purged_sql(window, '_until', before)})")
    marks = {
        "_ws": "min(_ws)",
        "_we": "max(_we)",
        "_changed": "max(_row)",
        "_rev": "max(_rev)",
        "_standing": "coalesce(flatten(collect_list(_standing)), array())",
        # A session that grows backwards keeps the time from which its early results are counted.
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
    return frame.selectExpr("*", f"({due}) AS _due").selectExpr(
        *aggregation.keys,
        "_ws",
        "_we",
        *aggregation.partials,
        "_due",
        "_rev + CAST(_due AS int) AS _rev",
        f"IF(_due, array({_BOUNDS_SQL}), _standing) AS _standing",
        "_opened",
        f"IF({'_due' if window.kind is WindowKind.SESSION else 'false'}, {_REPLACED_WINDOWS_SQL},"
        " NULL) AS _replaces",
    )


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


def _passes_early_firing(epoch: EpochContext, window: WindowSpec) -> bool:
    """Whether F passes a multiple of `fire_every` in this epoch."""
    before, after = epoch.decision.frontier_before, epoch.decision.frontier_after
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
