"""A clock for tests: it moves only by `advance` and `sleep`."""

from __future__ import annotations

import threading
from unittest.mock import patch

from tidegate.checkpoints import driver_requests
from tidegate.checkpoints.driver_requests import DesiredDocument, DesiredState
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.store import Store


class ManualClock(Clock):
    """A clock that moves only by `advance` and `sleep`."""

    def __init__(self, start: float = 1_000.0, wall_ticks: int = 1_750_000_000_000_000) -> None:
        self._now = start
        self._wall_offset = wall_ticks - int(start * 1_000_000)
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """Return the current reading."""
        with self._lock:
            return self._now

    def wall_ticks(self) -> int:
        """Return the wall clock, which moves with the reading."""
        return int(self.monotonic() * 1_000_000) + self._wall_offset

    def sleep(self, seconds: float) -> None:
        """Move forward at once."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        with self._lock:
            self._now += seconds


def set_desired_at(
    clock: Clock, store: Store, pipeline: str, state: DesiredState, *, who: str, why: str = ""
) -> DesiredDocument:
    """Record what people want of a pipeline at the time of a clock."""
    with patch.object(driver_requests, "SYSTEM_CLOCK", clock):
        return driver_requests.set_desired_state(store, pipeline, state, who=who, why=why)
