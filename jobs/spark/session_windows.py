"""Session windows: rows and live sessions of a key that meet become one session.

Also all windows that fire while they are open.

The live sessions, closed ones within their lateness included, are in one segment that is written
again whenever rows came, a session closed or a result may be due: what meets what depends on all of
them. ``_due`` marks those with a result in the epoch that wrote the segment.
"""

from dataclasses import replace

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.rows.judged_rows import adjust_late_rows, assign_rows_to_windows
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import Frame, combine_frames, get_column_types, group_rows
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    is_window_closed,
    quote_name,
    window_purged_sql,
)
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import TICK_MIN

from .epoch_context import EpochContext, OutputFiles
from .tumbling_sliding_windows import is_window_segment_purged

_BOUNDS_TYPE = "array<struct<s:bigint,e:bigint>>"
_BOUNDS_SQL = "named_struct('s', _ws, 'e', _we)"


def process_sessions(epoch: EpochContext, name: str) -> OutputFiles:
    """Fold the epoch's rows into the sessions and write the results that are due."""
    kind, window, after = (
        f"window:{name}",
        epoch.spec.windows[name],
        epoch.decision.frontier_after,
    )
    live = epoch.live_segments(kind)
    closing = any(
        ref.min_time is not None and is_window_closed(window, ref.min_time, after) for ref in live
    ) or _passes_early_firing(epoch, window)
    # No row, no session that closes, none that is shown in every epoch: the segment stays.
    if epoch.data is None and not closing and not (live and window.emit == "complete"):
        kept = tuple(ref for ref in live if not is_window_segment_purged(window, ref, after))
        return OutputFiles(segments=kept)
    aggregation = Aggregation(epoch.spec, name)
    merged = _merge_sessions(epoch, aggregation, live)
    if merged is None:
        return OutputFiles()
    size = epoch.staged.rows + sum(ref.rows for ref in live)
    written = epoch.writer.write_segment(
        kind, epoch.collect_if_small(merged, size), "_we", aggregation.segment_extra
    )
    due = epoch.load_segments([], written.paths)
    shown = OutputFiles()
    if due is not None:
        shown = epoch.write_results(aggregation, due.where("_due"), "_rev", written.rows)
    standing = (ref for ref in written.refs if not is_window_segment_purged(window, ref, after))
    return replace(shown, segments=tuple(standing), written=written)


def select_late_for_sessions(epoch: EpochContext, name: str) -> Frame:
    """Rows that are late alone, or whose session, with all that it meets, is purged already.

    Without those of the first kind that ``on_late: adjust`` moves. The epoch must have rows.
    """
    window, before = epoch.spec.windows[name], epoch.decision.frontier_before
    aggregation = Aggregation(epoch.spec, name)
    place = [*(quote_name(c) for c in epoch.spec.columns), "_source", "_partition", "_seq", "_et"]
    rows = _select_rows(epoch, aggregation)
    part = [*aggregation.keys, "_part"]
    live = _select_live_sessions(epoch, aggregation, epoch.live_segments(f"window:{name}"))
    items = _assign_islands(aggregation, _group_parts(rows, aggregation, {}), live)
    gone = items.where(f"_row AND {window_purged_sql(window, '_until', before)}")
    # The session of a row ends no earlier than the row's own gap, so few rows are looked at.
    own = rows.where(window_purged_sql(window, "_we", before))
    both = own.selectExpr(*place, *part, "false AS _late").unionByName(
        gone.selectExpr(*part, "true AS _late"), allowMissingColumns=True
    )
    marked = both.selectExpr("*", f"max(_late) OVER (PARTITION BY {', '.join(part)}) AS _gone")
    late = marked.where("_gone AND NOT _late").selectExpr(*place)
    alone = _late_alone_sql(window, before)
    if alone == "false" or epoch.data is None:
        return late
    stays = f"_end <= {before}L" if window.on_late is LatePolicy.ADJUST else "true"
    return late.unionByName(epoch.data.where(f"{alone} AND {stays}").selectExpr(*place))


def _late_alone_sql(window: WindowSpec, before: int) -> str:
    """Rows judged before they meet other sessions."""
    # Rows of other windows are judged by these.
    if window.kind is not WindowKind.SESSION or before == TICK_MIN or window.lateness is None:
        return "false"
    if window.session_late == "event":
        return f"_et < {before - window.lateness}L"
    return (
        window_purged_sql(window, f"(_end + {(window.gap or 0) - 1}L)", before, beside="_et")
        if window.session_late == "own"
        else "false"
    )


def _select_rows(epoch: EpochContext, aggregation: Aggregation) -> Frame:
    """The epoch's rows with the bounds of a session of their own, and `_part`.

    Rows of a key and a part are in the same session for certain.
    """
    assert epoch.data is not None  # noqa: S101 - called with rows only
    window, before, frame = aggregation.window, epoch.decision.frontier_before, epoch.data
    alone = _late_alone_sql(window, before)
    if alone != "false" and window.on_late is LatePolicy.ADJUST:
        frame = adjust_late_rows(frame, epoch.spec, alone, f"{before}L")
    elif alone != "false":
        frame = frame.where(f"NOT ({alone})")
    if window.kind is not WindowKind.SESSION:
        return assign_rows_to_windows(epoch.judged, window).selectExpr(
            "*", *aggregation.key_columns, "_ws AS _part"
        )
    gap = window.gap or 0
    bounds = f"_end + {gap - 1}L AS _we", f"{number_parts_sql(max(gap, 1))} AS _part"
    return frame.selectExpr("*", *aggregation.key_columns, "_et AS _ws", *bounds)


def number_parts_sql(gap: int) -> str:
    """Which part of time, as long as the gap, a row is in: rows of a part are in one session.

    The division rounds down, and no step of it leaves the range of ticks.
    """
    return f"IF(_et < 0L, -1L - (-1L - _et) div {gap}L, _et div {gap}L)"


def _group_parts(rows: Frame, aggregation: Aggregation, states: dict[str, str]) -> Frame:
    """The rows of each part as one item: far fewer to sort than rows."""
    bounds = {"_ws": "min(_ws)", "_we": "max(_we)", "_opened": "min(_et)"}
    items = group_rows(rows, [*aggregation.keys, "_part"], {**bounds, **states})
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


def _assign_islands(aggregation: Aggregation, *found: Frame | None) -> Frame:
    """Number the session that each item ends up in (`_island`, its end `_until`)."""
    items, window = combine_frames(*found), aggregation.window
    assert items is not None  # noqa: S101 - the callers have rows or sessions
    by_key = f"PARTITION BY {', '.join(aggregation.keys)}" if aggregation.keys else "PARTITION BY 1"
    order = f"{by_key} ORDER BY _ws, _we ROWS BETWEEN UNBOUNDED PRECEDING AND"
    if window.kind is not WindowKind.SESSION:
        return items.selectExpr("*", "_ws AS _island", "_we AS _until")
    # A session begins where an item starts behind the greatest end of all items before it.
    apart = ">" if window.session_touch == "merge" else ">="
    items = items.selectExpr("*", f"max(_we) OVER ({order} 1 PRECEDING) AS _reach")
    first = f"CAST(_reach IS NULL OR _ws {apart} _reach AS int)"
    items = items.selectExpr("*", f"sum({first}) OVER ({order} CURRENT ROW) AS _island")
    return items.selectExpr("*", f"max(_we) OVER ({by_key}, _island) AS _until")


def _merge_sessions(
    epoch: EpochContext, aggregation: Aggregation, live: list[FileRef]
) -> Frame | None:
    """All live sessions after the epoch's rows joined them, with what is due."""
    before, after = epoch.decision.frontier_before, epoch.decision.frontier_after
    window = aggregation.window
    fresh = None
    if epoch.data is not None:
        rows = _select_rows(epoch, aggregation)
        fresh = _group_parts(rows, aggregation, aggregation.partials)
    kept = _select_live_sessions(epoch, aggregation, live)
    first = kept if fresh is None else fresh
    if first is None:
        return None
    # Spark widens a decimal with every sum; the state keeps the type of the first partial.
    types = get_column_types(first)
    items = _assign_islands(aggregation, fresh, kept).where(
        f"NOT ({window_purged_sql(window, '_until', before)})"
    )
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
    frame = group_rows(items, group, {**marks, **aggregation.merges})
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
