"""The eyes of a supervisor: one look at bucket and process, timed on its own clock, judged by `watch`."""

from __future__ import annotations

from typing import Any

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import LeaseView, LeaseObserver
from tidegate.checkpoints.status import read_status
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.errors import TransientError
from tidegate.operators.launch import LaunchedDriver
from tidegate.operators.watch import Observation, LivenessLimits, LivenessSample, ChangeTimer, judge_liveness, extract_progress

__all__ = ["StreamObserver", "read_flat_status"]


class StreamObserver:
    """Watches one stream. Call `observe` every second or two; the first looks only start the clocks.

    Args:
        floor: token of the driver to watch (or the least it can get); words of earlier drivers do not count.
        launched: the process we started, if we did.

    Attributes:
        floor: follows the lease when another driver takes over: whoever drives now is the one that is watched.
        seen: in the last look; None when the store did not answer it.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        *,
        floor: int,
        launched: LaunchedDriver | None = None,
        rules: LivenessLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.floor = floor
        self.seen: LivenessSample | None = None
        self._store, self._pipeline, self._launched, self._clock = store, pipeline, launched, clock
        self._rules = rules or LivenessLimits()
        self._lease = LeaseObserver(store, pipeline, clock)
        self._progress = ChangeTimer()
        self._begun = clock.monotonic()

    def observe(self) -> Observation | None:
        """One look; None while the store does not answer: then nothing is known, neither good nor bad."""
        try:
            lease = self._lease.observe()
            status = read_flat_status(self._store, self._pipeline)
        except TransientError:
            # The driver could not renew either: its silence must not be counted from before the outage.
            self._lease = LeaseObserver(self._store, self._pipeline, self._clock)
            self.seen = None
            return None
        self._follow_lease(lease)
        now = self._clock.monotonic()
        self.seen = LivenessSample(
            lease=lease,
            silent_for=self._lease.silent_seconds,
            status=status,
            floor=self.floor,
            still_for=self._progress.seconds_unchanged(extract_progress(status), now),
            process_alive=self._launched is not None and self._launched.is_alive(),
            exit_code=self._launched.read_exit_code() if self._launched else None,
            launched_for=now - self._begun,
        )
        return judge_liveness(self.seen, self._rules)

    def _follow_lease(self, lease: LeaseView | None) -> None:
        if lease is not None and not lease.is_free:
            self.floor = max(self.floor, lease.token)


def read_flat_status(store: Store, pipeline: str) -> dict[str, Any] | None:
    """The driver's last report as one flat mapping; None if there is none."""
    status = read_status(store, pipeline)
    return None if status is None else {**status.body, **status.model_dump(exclude={"body"})}
