"""What decides about a row: frontiers and windows, as Spark SQL.

`duck_frame` renders the text for DuckDB.
"""

from typing import Final

from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN, saturate_ticks

from .duck_frame import Frame

_WINDOWS_PER_PART: Final = 10_000
"""Windows of one row that are laid out at a time.

A frontier that jumps far ahead must not cost memory.
"""
ROW_ORDER: Final = ("_et", "_so", "_partition", "_seq")
"""The fixed order of ties: event time, source order, partition, position."""


def quote_name(name: str) -> str:
    """A column name in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def quote_text(value: str) -> str:
    """A string literal in Spark SQL."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def time_below_sql(bound: int) -> str:
    """``_et < bound`` on ticks, at the ends a constant that Spark folds away."""
    if bound <= TICK_MIN:
        return "false"
    return "true" if bound >= TICK_MAX else f"_et < {write_ticks(bound)}"


def write_ticks(ticks: int) -> str:
    """Ticks as SQL; the digits of the least number alone are too large.

    >>> write_ticks(5), write_ticks(-5)
    ('5L', '(-4L - 1L)')
    """
    return f"{ticks}L" if ticks >= 0 else f"({ticks + 1}L - 1L)"


def end_reached_sql(
    end: str,
    frontier: int,
    *,
    after_end: bool = False,
    lateness: int | None = 0,
) -> str:
    """Whether the frontier has passed ``end + lateness``; with `lateness` None it never has.

    It has passed a time that it is equal to, but not with `after_end`. `end` is SQL in ticks.

    Before the first frontier the condition is the one of all later epochs: nothing ends as early as
    that.
    """
    if lateness is None:
        return "false"
    if frontier >= TICK_MAX:
        return "true"
    return f"{end} {'<' if after_end else '<='} {write_ticks(saturate_ticks(frontier - lateness))}"


# Which tumbling and sliding windows a row belongs to, and whether it is late for them.


def first_window_start_sql(window: WindowSpec) -> str:
    """Start in ticks of the first window that overlaps the row and is not before the least start.

    Behind `last_window_start_sql` if the row is in no window.
    """
    size = window.size or 0
    slide = window.period or 1
    offset = window.offset
    least = window.min_window_start
    first = f"({_floor_to_period_sql(f'(_et - {size + offset}L)', slide)} + {slide + offset}L)"
    return (
        first
        if least is None
        else f"greatest({first}, {-((offset - least) // slide) * slide + offset}L)"
    )


def last_window_start_sql(window: WindowSpec) -> str:
    """Start in ticks of the last window that overlaps the row; before the first one without any."""
    return (
        f"({_floor_to_period_sql(f'(_end - {1 + window.offset}L)', window.period or 1)} +"
        f" {window.offset}L)"
    )


def _floor_to_period_sql(value: str, period: int) -> str:
    return f"({value} - pmod({value}, {period}L))"


def add_window_span(window: WindowSpec, frame: Frame) -> Frame:
    """Add `_w0` and `_w1`, the starts of a row's first and last window.

    Rows that no window covers are gone.
    """
    spans = frame.selectExpr(
        "*", f"{first_window_start_sql(window)} AS _w0", f"{last_window_start_sql(window)} AS _w1"
    )
    return spans if _covers_every_time(window) else spans.where("_w0 <= _w1")


def expand_spans(window: WindowSpec, spans: Frame) -> Frame:
    """A row for each window from `_w0` to `_w1`, with its bounds as `_ws` and `_we` instead."""
    period = window.period or 1
    # Two explodes instead of one: a sequence of all windows at once is an array in memory. The
    # bound keeps `many * period` within int64.
    many = max(1, min(_WINDOWS_PER_PART, TICK_MAX // 4 // period))
    parts = spans.selectExpr("*", f"explode(sequence(_w0, _w1, {many * period}L)) AS _part")
    part = f"sequence(_part, least(_w1, _part + {(many - 1) * period}L), {period}L)"
    pairs = parts.selectExpr("* EXCLUDE (_w0, _w1, _part)", f"explode({part}) AS _ws")
    return pairs.selectExpr("*", f"_ws + {window.size}L AS _we")


def _covers_every_time(window: WindowSpec) -> bool:
    return window.min_window_start is None and (window.size or 0) >= (window.period or 0)


def late_for_window_sql(window: WindowSpec, frontier: int) -> str:
    """Whether a row (with `_et` and `_end`) is late for the window output.

    A row without windows never is.
    """
    if window.late_unit == "event":
        late = time_below_sql(frontier)
    else:
        start = (
            first_window_start_sql(window)
            if window.late_unit == "first_window"
            else last_window_start_sql(window)
        )
        late = window_purged_sql(window, f"({start} + {window.size}L)", frontier)
        if late not in ("true", "false"):
            # A window that a row is in ends after its time. Few rows are before the frontier, and
            # the engines divide only for these.
            late = f"IF({time_below_sql(frontier)}, {late}, false)"
    if late == "false" or _covers_every_time(window):
        return late
    return f"({late} AND {first_window_start_sql(window)} <= {last_window_start_sql(window)})"


def expired_pairs_sql(window: WindowSpec, frontier: int) -> str:
    """How many tumbling or sliding windows of a row were purged before it came, as a bigint."""
    if window.lateness is None or frontier <= TICK_MIN + (window.size or 0) + window.lateness:
        return "0L"
    bound = TICK_MAX if frontier == TICK_MAX else frontier - (window.size or 0) - window.lateness
    first = first_window_start_sql(window)
    slide = window.period or 1
    return (
        f"greatest((least({last_window_start_sql(window)}, {write_ticks(bound)}) -"
        f" {first} + {slide}L) div {slide}L, 0L)"
    )


def window_purged_sql(window: WindowSpec, end: str, frontier: int) -> str:
    """Whether a window with this end is purged at the frontier; never if `lateness` is None."""
    return end_reached_sql(
        end, frontier, after_end=window.closes_after_end, lateness=window.lateness
    )


def is_window_closed(window: WindowSpec, end: int, frontier: int) -> bool:
    """Whether the frontier has passed a window's end.

    It has passed an end that it is equal to, unless the window `closes_after_end`.
    """
    if frontier == TICK_MAX:
        return True
    return end < frontier if window.closes_after_end else end <= frontier


def is_window_purged(window: WindowSpec, end: int, frontier: int) -> bool:
    """Whether the frontier has passed a window's end and its lateness; never if that is None."""
    return window.lateness is not None and is_window_closed(
        window, saturate_ticks(end + window.lateness), frontier
    )
