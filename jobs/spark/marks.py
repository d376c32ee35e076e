"""Marks and frontiers as Spark SQL conditions.

Spark writes numbers into the Java code it generates, so a frontier in a plan would have that code compiled anew in every epoch,
by Janino and then by the own compilers of the JVM: for a big epoch that costs as much as the rows do. Arrays are passed beside
the code, so what changes from epoch to epoch stands in an array of one element.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tidegate.jobs.eventtime.types import Decision, ReleaseMark
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN, saturate_ticks

__all__ = ["ROW_ORDER", "time_below_sql", "mask_reached_ends", "compute_late_bound", "compute_release_bound", "opaque_literal", "end_reached_sql", "below_mark_sql"]

ROW_ORDER: Final = ("_et", "_so", "_partition", "_seq")
"""The fixed order of ties: event time, source order, partition, position."""


def time_below_sql(column: str, bound: int) -> str:
    """``column < bound`` on ticks, at the ends a constant that Spark folds away."""
    if bound <= TICK_MIN:
        return "false"
    return "true" if bound >= TICK_MAX else f"{column} < {opaque_literal(bound, column)}"


def opaque_literal(number: int, beside: str) -> str:
    """A number that is no part of the generated code; `beside` is any bigint of the row (null makes null).

    The index is always 0, but Spark cannot know it, and so does not replace the whole by its value.

    >>> opaque_literal(5, "_et")
    'array(5L)[CAST(_et & 0L AS int)]'
    """
    literal = f"{number}L" if number > TICK_MIN else f"{TICK_MIN + 1}L - 1L"
    return f"array({literal})[CAST({beside} & 0L AS int)]"


def end_reached_sql(end: str, frontier: int, *, after_end: bool = False, lateness: int | None = 0, beside: str = "_we") -> str:
    """Whether the frontier has passed ``end + lateness``; with `lateness` None it never has.

    Before the first frontier the condition is the one of all later epochs: nothing ends as early as that.
    """
    if lateness is None:
        return "false"
    if frontier >= TICK_MAX:
        return "true"
    return f"{end} {'<' if after_end else '<='} {opaque_literal(saturate_ticks(frontier - lateness), beside)}"


def mask_reached_ends(ends: NDArray[np.int64], frontier: int, lateness: int | None = 0) -> NDArray[np.bool_]:
    """`reached`, of values that the driver has."""
    if lateness is None or frontier >= TICK_MAX:
        return np.full(ends.size, lateness is not None)
    return ends <= saturate_ticks(frontier - lateness)


def below_mark_sql(mark: ReleaseMark) -> str:
    """Whether a buffered row is below a mark."""
    section = opaque_literal(mark.section, "_et")
    return f"(_section < {section} OR (_section = {section} AND {time_below_sql('_et', mark.time)}))"


def compute_late_bound(decision: Decision) -> int:
    """Rows of this epoch with an event time below this are late for the events output."""
    mark = decision.order_late
    if mark is None:
        return TICK_MIN
    return mark.time if decision.order_late_by_time else compute_section_bound(mark, decision.section)


def compute_release_bound(decision: Decision) -> int:
    """Rows of this epoch with an event time below this leave at once."""
    return compute_section_bound(decision.release_after, decision.section)


def compute_section_bound(mark: ReleaseMark, section: int) -> int:
    """The mark as a bound on the event time of rows of one section."""
    if section == mark.section:
        return mark.time
    return TICK_MAX if section < mark.section else TICK_MIN
