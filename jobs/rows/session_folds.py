"""Session windows, and all windows that fire while they are open: what one unit knows of them.

Rows of a key that are in the same *part* of time are in the same session for certain. So they are
one item, and far fewer items than rows are merged with the live sessions.
"""

from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import Frame, group_rows
from tidegate.jobs.rules.row_conditions import quote_name, window_purged_sql
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import TICK_MIN

from .judged_rows import JudgedRows, apply_late_policy, assign_rows_to_windows

_BOUNDS = {"_ws": "min(_ws)", "_we": "max(_we)", "_opened": "min(_et)"}


def fold_parts(judged: JudgedRows, aggregation: Aggregation) -> Frame:
    """The items of the rows: their bounds and partial aggregates. There must be rows."""
    rows = select_part_rows(judged, aggregation)
    states = aggregation.select_partials(rows)
    return group_rows(rows, [*aggregation.keys, "_part"], {**_BOUNDS, **states})


def merge_parts(items: Frame, aggregation: Aggregation) -> Frame:
    """One item for each key and part, of the items of several units in their order."""
    bounds = {**_BOUNDS, "_opened": "min(_opened)"}
    return aggregation.merge_states(items, [*aggregation.keys, "_part"], bounds)


def select_part_rows(judged: JudgedRows, aggregation: Aggregation) -> Frame:
    """The rows with the bounds of a session of their own, and `_part`.

    Rows of a key and a part are in the same session for certain. Rows that are late alone are left
    out, or moved.
    """
    window = aggregation.window
    if window.kind is not WindowKind.SESSION:
        return assign_rows_to_windows(judged, window).selectExpr(
            "*", *aggregation.key_columns, "_ws AS _part"
        )
    frame = apply_late_policy(judged, window, _late_alone_sql(window, judged.frontier))
    gap = window.gap or 0
    bounds = f"_end + {gap - 1}L AS _we", f"{number_parts_sql(max(gap, 1))} AS _part"
    return frame.selectExpr("*", *aggregation.key_columns, "_et AS _ws", *bounds)


def find_late_session_rows(
    judged: JudgedRows, aggregation: Aggregation, gone: Frame | None
) -> Frame | None:
    """The rows that are late for a session window; None if there can be none.

    Rows that are late alone, without those that ``on_late: adjust`` moves; and the rows of parts
    that are `gone`: their session, with all that it meets, is purged already.
    """
    if judged.data is None:
        return None
    window = aggregation.window
    before = judged.frontier
    columns = map(quote_name, judged.spec.columns)
    place = [*columns, "_source", "_partition", "_seq", "_et"]
    late = None
    if gone is not None:
        rows = select_part_rows(judged, aggregation)
        # The session of a row ends no earlier than the row's own gap, so few rows are looked at.
        own = rows.where(window_purged_sql(window, "_we", before))
        late = select_rows_of_parts(own, aggregation, gone, place)
    alone = _late_alone_sql(window, before)
    if alone == "false":
        return late
    stays = f"_end <= {before}L" if window.on_late is LatePolicy.ADJUST else "true"
    found = judged.data.where(f"{alone} AND {stays}").selectExpr(*place)
    return found if late is None else late.unionByName(found)


def select_rows_of_parts(
    rows: Frame, aggregation: Aggregation, parts: Frame, columns: list[str]
) -> Frame:
    """These columns of the rows whose key and part are among `parts`; null keys are equal."""
    own = [*aggregation.keys, "_part"]
    both = rows.selectExpr(*columns, *own, "false AS _named").unionByName(
        parts.selectExpr(*own, "true AS _named"), allowMissingColumns=True
    )
    marked = both.selectExpr("*", f"max(_named) OVER (PARTITION BY {', '.join(own)}) AS _among")
    return marked.where("_among AND NOT _named").selectExpr(*columns)


def _late_alone_sql(window: WindowSpec, before: int) -> str:
    """Rows judged before they meet other sessions."""
    if before == TICK_MIN or window.lateness is None:
        return "false"
    if window.session_late == "event":
        return f"_et < {before - window.lateness}L"
    return (
        window_purged_sql(window, f"(_end + {(window.gap or 0) - 1}L)", before)
        if window.session_late == "own"
        else "false"
    )


def number_parts_sql(gap: int) -> str:
    """Which part of time, as long as the gap, a row is in: rows of a part are in one session.

    The division rounds down, and no step of it leaves the range of ticks.
    """
    return f"IF(_et < 0L, -1L - (-1L - _et) div {gap}L, _et div {gap}L)"
