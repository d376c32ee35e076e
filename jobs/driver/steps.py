"""The steps of an epoch as the driver watches them: a deadline for the lease, a name for the status, seconds for the manifest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tidegate.checkpoints.clock import SYSTEM_CLOCK
from tidegate.checkpoints.keeper import LeaseRenewer
from tidegate.jobs.driver.logs import bind_log_context

__all__ = ["STEP_DEADLINES", "DriverSteps"]

STEP_DEADLINES: Final[Mapping[str, float]] = {
    "plan": 120.0,  # listing and footers; a slow store answers within its own budget of 30 s per request
    "survey": 1800.0,  # one Spark job over the cut
    "decide": 60.0,
    "move": 3600.0,  # the whole epoch's rows
    "seal": 60.0,  # twice the seal's own budget
    "wait": 120.0,
    "start": 300.0,  # a cold JVM on a busy machine
    "publish": 3600.0,
}
"""Seconds a step may take before the driver counts as wedged and its lease runs out."""


class DriverSteps:
    """Implements `tidegate.jobs.engine.epoch.Steps` on a lease keeper."""

    def __init__(self, keeper: LeaseRenewer) -> None:
        self._keeper = keeper
        self._timings: dict[str, float] = {}
        self.current = "start"
        self.since = 0
        self.enter("start")

    def enter(self, name: str) -> None:
        """Announce a step without measuring it."""
        self.current, self.since = name, SYSTEM_CLOCK.wall_ticks()
        self._keeper.announce_step(name, STEP_DEADLINES[name])

    @contextmanager
    def measure_step(self, name: str) -> Iterator[None]:
        """Announce and measure a step; after it, the driver counts as between steps."""
        self.enter(name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._timings[name] = self._timings.get(name, 0.0) + time.perf_counter() - begun
            self.enter("wait")

    def begin_attempt(self, epoch: int, name: str) -> None:
        """Let the log say which attempt is under way."""
        bind_log_context(epoch=epoch, attempt=name)

    def require_lease(self) -> int:
        """The token of the lease, checked now. Raises FencedError when it is gone."""
        self._keeper.lease.ensure_held()
        return self._keeper.lease.token

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per step since `begin_epoch`."""
        return dict(self._timings)

    def begin_epoch(self) -> None:
        """Forget the last epoch's timings, but for its seal: no manifest can hold the time of its own."""
        seal = self._timings.get("seal")
        self._timings = {} if seal is None else {"seal_before": seal}
