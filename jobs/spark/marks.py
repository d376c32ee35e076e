"""Marks and frontiers as Spark SQL conditions."""

from __future__ import annotations

from typing import Final

from tidegate.jobs.eventtime.types import Decision, Mark
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN

__all__ = ["ORDER", "below", "late_bound", "leave_bound", "reached", "under"]

ORDER: Final = ("_et", "_so", "_partition", "_seq")
"""The fixed order of ties: event time, source order, partition, position."""


def below(column: str, bound: int) -> str:
    """``column < bound`` on ticks, at the ends a constant that Spark folds away."""
    if bound <= TICK_MIN:
        return "false"
    return "true" if bound >= TICK_MAX else f"{column} < {bound}L"


def reached(end: str, frontier: int, *, after_end: bool = False, lateness: int | None = 0) -> str:
    """Whether the frontier has passed ``end + lateness``; with `lateness` None it never has."""
    if lateness is None or frontier <= TICK_MIN:
        return "false"
    if frontier >= TICK_MAX:
        return "true"
    return f"{end} {'<' if after_end else '<='} {frontier - lateness}L"


def under(mark: Mark) -> str:
    """Whether a buffered row is below a mark."""
    return f"(_section < {mark.section}L OR (_section = {mark.section}L AND {below('_et', mark.time)}))"


def late_bound(decision: Decision) -> int:
    """Rows of this epoch with an event time below this are late for the events output."""
    mark = decision.order_late
    if mark is None:
        return TICK_MIN
    return mark.time if decision.order_late_by_time else bound_in_section(mark, decision.section)


def leave_bound(decision: Decision) -> int:
    """Rows of this epoch with an event time below this leave at once."""
    return bound_in_section(decision.release_after, decision.section)


def bound_in_section(mark: Mark, section: int) -> int:
    """The mark as a bound on the event time of rows of one section."""
    if section == mark.section:
        return mark.time
    return TICK_MAX if section < mark.section else TICK_MIN
