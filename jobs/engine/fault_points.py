"""Fault points: places in an epoch and in a landing where a test can end the process.

``TIDEGATE_FAULT=seal.sent:3`` kills the process with SIGKILL when the point ``seal.sent`` is
reached the third time. The simulation passes its own `Faults` instead and raises. ``seal.sent`` is
reached only if this attempt has filled the slot. The thread of each sink reaches ``publish.start``
and ``publish.done``, once per round.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Final, Protocol

from tidegate.jobs.engine.errors import UNKNOWN_FAULT_POINT

EPOCH_POINTS: Final = (
    "plan",
    "survey",
    "decide",
    "move.start",
    "move.done",
    "seal.start",
    "seal.sent",
    "publish.start",
    "publish.done",
    "report",
)
"""In the order of the epoch.

``seal.sent``: the slot is filled, but this process does not know it yet.
"""

LANDING_POINTS: Final = ("land.written",)
"""Of a landing query: the object is there, and Spark's checkpoint does not know."""


class Faults(Protocol):
    """Receives every fault point that the engine passes."""

    def reach(self, point: str) -> None:
        """Note that `point` was reached; may kill the process or raise instead of returning."""
        ...


class NoFaults:
    """In production, a fault point does nothing."""

    def reach(self, point: str) -> None:
        """Do nothing."""


class KillAtPoint:
    """Kills its own process with SIGKILL when it reaches a point for the n-th time.

    No handler runs, no `finally`, and no buffer is flushed.

    Args:
        point: one of `EPOCH_POINTS` and `LANDING_POINTS`.
        nth: counted from 1.

    Raises:
        ConfigurationError: there is no such point, or `nth` is below 1.
    """

    def __init__(self, point: str, nth: int = 1) -> None:
        if point not in (*EPOCH_POINTS, *LANDING_POINTS) or nth < 1:
            points = ", ".join((*EPOCH_POINTS, *LANDING_POINTS))
            raise UNKNOWN_FAULT_POINT(point=point, nth=nth, points=points)
        self._point, self._nth, self._seen = point, nth, Counter[str]()

    def reach(self, point: str) -> None:
        """Count the point, and kill the process at the n-th time."""
        self._seen[point] += 1
        if point == self._point and self._seen[point] == self._nth:
            # Not sys.exit: the point of the test is that nothing of this process runs any more.
            os.kill(os.getpid(), signal.SIGKILL)


def read_faults_from_environment() -> Faults:
    """Return the fault that the variable ``TIDEGATE_FAULT`` describes; `NoFaults` without it.

    ``POINT`` alone, or with anything but digits behind the colon, means the first time.

    Raises:
        ConfigurationError: there is no such point, or the number is 0.
    """
    text = os.environ.get("TIDEGATE_FAULT", "")
    if not text:
        return NoFaults()
    point, _, nth = text.partition(":")
    return KillAtPoint(point, int(nth) if nth.isdigit() else 1)
