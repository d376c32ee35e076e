"""The eyes of a supervisor: one look at bucket and process, timed on its own clock, judged by `watch`."""

from __future__ import annotations

from typing import Any

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import LeaseView, LeaseWatch
from tidegate.checkpoints.status import read_status
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.errors import TransientError
from tidegate.operators.launch import Launched
from tidegate.operators.watch import Observation, Rules, Sighting, Timer, judge, progress_of

__all__ = ["StreamObserver", "status_of"]


class StreamObserver:
    """Watches one stream. Call `look` every second or two; the first looks only start the clocks.

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
        launched: Launched | None = None,
        rules: Rules | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.floor = floor
        self.seen: Sighting | None = None
        self._store, self._pipeline, self._launched, self._clock = store, pipeline, launched, clock
        self._rules = rules or Rules()
        self._lease = LeaseWatch(store, pipeline, clock)
        self._progress = Timer()
        self._begun = clock.now()

    def look(self) -> Observation | None:
        """One look; None while the store does not answer: then nothing is known, neither good nor bad."""
        try:
            lease = self._lease.look()
            status = status_of(self._store, self._pipeline)
        except TransientError:
            # The driver could not renew either: its silence must not be counted from before the outage.
            self._lease = LeaseWatch(self._store, self._pipeline, self._clock)
            self.seen = None
            return None
        self._follow(lease)
        now = self._clock.now()
        self.seen = Sighting(
            lease=lease,
            silent_for=self._lease.silent_for,
            status=status,
            floor=self.floor,
            still_for=self._progress.still_for(progress_of(status), now),
            process_alive=self._launched is not None and self._launched.alive(),
            exit_code=self._launched.exit_code() if self._launched else None,
            launched_for=now - self._begun,
        )
        return judge(self.seen, self._rules)

    def _follow(self, lease: LeaseView | None) -> None:
        if lease is not None and not lease.free:
            self.floor = max(self.floor, lease.token)


def status_of(store: Store, pipeline: str) -> dict[str, Any] | None:
    """The driver's last report as one flat mapping; None if there is none."""
    status = read_status(store, pipeline)
    return None if status is None else {**status.body, **status.model_dump(exclude={"body"})}
