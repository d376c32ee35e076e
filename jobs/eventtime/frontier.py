"""One member's frontier: no further row of the member has an event time below it (semantics.md section 1).

All functions return exclusive frontiers; an inclusive declaration (``<= T``) is shifted by one tick here and nowhere else.
Sums saturate at the int64 ends.
"""

from __future__ import annotations

from tidegate.jobs.spec.options import FrontierOptions, WallClockOptions
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN, saturate_ticks

__all__ = ["compute_frontier_lag", "compute_heuristic_frontier", "max_frontier", "round_to_frame", "compute_wall_clock_frontier"]


def compute_frontier_lag(options: FrontierOptions) -> int | None:
    """How far the heuristic frontier stands below the newest row: the lag, one tick less if inclusive; None without a lag."""
    if options.lag is None:
        return None
    return options.lag - (options.frontier == "inclusive")


def compute_heuristic_frontier(seen: int | None, distance: int | None) -> int | None:
    """``seen - distance``; None without a lag or before the first row.

    >>> compute_heuristic_frontier(10, 3), compute_heuristic_frontier(10, -1), compute_heuristic_frontier(None, 3)
    (7, 11, None)
    """
    if seen is None or distance is None:
        return None
    value = seen - distance
    return value if TICK_MIN <= value <= TICK_MAX else saturate_ticks(value)


def compute_wall_clock_frontier(options: WallClockOptions, now: int, newest: int | None, *, inclusive: bool) -> int | None:
    """``now - lag`` by the recorded wall clock; capped, it never passes the largest time read in the epoch.

    Args:
        options: lag and cap.
        now: the recorded wall clock of the epoch.
        newest: largest event time read in this epoch; None without rows, and then a capped frontier does not move.
        inclusive: shift by one tick.
    """
    if options.cap and newest is None:
        return None
    frontier = now - options.lag + inclusive
    return saturate_ticks(min(frontier, newest) if options.cap and newest is not None else frontier)


def round_to_frame(frontier: int | None, frame: int | None) -> int | None:
    """The emitted form: rounded down to a multiple of the frame; a frame of 0 emits none; +inf stays.

    >>> round_to_frame(-1, 10), round_to_frame(17, 10), round_to_frame(17, 0), round_to_frame(17, None)
    (-10, 10, None, 17)
    """
    if frontier is None or frame == 0:
        return None
    if frame is None or frontier >= TICK_MAX:
        return frontier
    return saturate_ticks(frontier // frame * frame)


def max_frontier(*frontiers: int | None) -> int | None:
    """The greatest of the frontiers that exist.

    >>> max_frontier(None, 3, 1), max_frontier(None)
    (3, None)
    """
    known = [f for f in frontiers if f is not None]
    return max(known) if known else None
