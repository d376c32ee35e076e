"""Which tumbling and sliding windows a row belongs to, and whether it is late for them, as Spark SQL."""

from __future__ import annotations

from pyspark.sql import DataFrame

from tidegate.jobs.spark.marks import opaque_literal, end_reached_sql
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN, saturate_ticks
from tidegate.jobs.spec.windows import WindowSpec

__all__ = ["is_window_closed", "expired_pairs_sql", "late_for_window_sql", "window_purged_sql", "is_window_purged", "add_window_span"]


def first_window_start_sql(window: WindowSpec) -> str:
    """Start of the first window that overlaps the row and exists."""
    size, slide, offset, least = window.size or 0, window.period or 1, window.offset, window.min_window_start
    first = f"({_floor_to_period_sql(f'(_et - {size + offset}L)', slide)} + {slide + offset}L)"
    return first if least is None else f"greatest({first}, {-((offset - least) // slide) * slide + offset}L)"


def last_window_start_sql(window: WindowSpec) -> str:
    """Start of the last window that overlaps the row; before the first one where there is none."""
    return f"({_floor_to_period_sql(f'(_end - {1 + window.offset}L)', window.period or 1)} + {window.offset}L)"


def _floor_to_period_sql(value: str, period: int) -> str:
    return f"({value} - pmod({value}, {period}L))"


def add_window_span(window: WindowSpec, frame: DataFrame) -> DataFrame:
    """Add `_w0` and `_w1`, the starts of a row's first and last window; rows that no window covers are gone."""
    spans = frame.selectExpr("*", f"{first_window_start_sql(window)} AS _w0", f"{last_window_start_sql(window)} AS _w1")
    return spans if _covers_every_time(window) else spans.where("_w0 <= _w1")


def _covers_every_time(window: WindowSpec) -> bool:
    return window.min_window_start is None and (window.size or 0) >= (window.period or 0)


def late_for_window_sql(window: WindowSpec, frontier: int) -> str:
    """Whether a row (with `_et` and `_end`) is late for the window output; a row without windows never is."""
    if window.late_unit == "event":
        late = "true" if frontier >= TICK_MAX else f"_et < {opaque_literal(frontier, '_et')}"
    else:
        start = first_window_start_sql(window) if window.late_unit == "first_window" else last_window_start_sql(window)
        late = window_purged_sql(window, f"({start} + {window.size}L)", frontier, beside="_et")
    if late == "false" or _covers_every_time(window):
        return late
    return f"({late} AND {first_window_start_sql(window)} <= {last_window_start_sql(window)})"


def expired_pairs_sql(window: WindowSpec, frontier: int) -> str:
    """How many windows of a row were purged before it came."""
    if window.lateness is None or frontier <= TICK_MIN + (window.size or 0) + window.lateness:
        return "0L"
    bound = TICK_MAX if frontier == TICK_MAX else frontier - (window.size or 0) - window.lateness
    first, slide = first_window_start_sql(window), window.period or 1
    return f"greatest((least({last_window_start_sql(window)}, {bound}L) - {first} + {slide}L) div {slide}L, 0L)"


def window_purged_sql(window: WindowSpec, end: str, frontier: int, beside: str = "_we") -> str:
    """Whether a window with this end is purged at the frontier."""
    return end_reached_sql(end, frontier, after_end=window.closes_after_end, lateness=window.lateness, beside=beside)


def is_window_closed(window: WindowSpec, end: int, frontier: int) -> bool:
    """Whether the frontier has passed a window's end."""
    if frontier == TICK_MAX:
        return True
    return end < frontier if window.closes_after_end else end <= frontier


def is_window_purged(window: WindowSpec, end: int, frontier: int) -> bool:
    """Whether the frontier has passed a window's end and its lateness."""
    return window.lateness is not None and is_window_closed(window, saturate_ticks(end + window.lateness), frontier)
