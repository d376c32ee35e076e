"""How long rows wait until they can be seen, apart from the rows that waited for an outage.

After an outage, or before the first start, objects have waited for the driver. Once the driver has
caught up with them, their waits say nothing about how fresh rows are now.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class Wait:
    """Rows of one source in one epoch; times in ticks.

    Attributes:
        arrived: when the oldest object arrived.
        done: when the rows were sealed or visible; now, while they are neither.
        after_outage: nothing was sealed or visible for longer than the goal just before.
        is_over: the rows were sealed or visible.
    """

    arrived: int
    done: int
    after_outage: bool = False
    is_over: bool = True


def select_since_outage(waits: Sequence[Wait], goal: int) -> Sequence[Wait]:
    """Return the waits of rows that arrived since the newest outage was caught up with.

    The driver has caught up with the first rows that wait no longer than the goal. While it has
    not, all waits from the outage on count: then rows are stale now.

    Args:
        waits: of one source, in the order of the epochs.
        goal: ticks.
    """
    start = max((n for n, wait in enumerate(waits) if wait.after_outage), default=0)
    caught_up = (w for w in waits[start:] if w.is_over and w.done - w.arrived <= goal)
    first = next(caught_up, None)
    if first is None:
        return waits[start:]
    return [wait for wait in waits[start:] if wait.arrived >= first.arrived]


def find_outages(times: Iterable[int], goal: int) -> list[bool]:
    """Return for each time of a seal whether more than the goal has passed since the one before.

    The first one counts as the end of an outage.
    """
    marks: list[bool] = []
    before = None
    for at in times:
        marks.append(before is None or at - before > goal)
        before = at
    return marks
