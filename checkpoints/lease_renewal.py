"""Renews a lease in the background, but only while the driver makes progress.

A driver that hangs has to lose its lease, so that a standby can take over.
"""

from __future__ import annotations

import threading

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import Lease
from tidegate.errors import FencedError, TidegateError

# Seconds; three renewals fit into `LEASE_TTL`.
LEASE_RENEW_INTERVAL = 2.0


class LeaseRenewer:
    """Renews a lease every `every` seconds while the current step is within its deadline.

    The driver announces each step with a deadline. After the deadline the renewals stop and the
    lease expires. A later step starts the renewals again, unless another process has the lease.

    Attributes:
        lost: set once a renewal found the lease lost.
        error: why `lost` is set.
        step_name: the step that was announced last.
        trouble: why the last renewal failed although the lease is not lost, for the status.
    """

    def __init__(
        self, lease: Lease, *, every: float = LEASE_RENEW_INTERVAL, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.lease = lease
        self.lost = threading.Event()
        self.error: FencedError | None = None
        self.trouble: TidegateError | None = None
        self.step_name = "starting"
        self._every, self._clock = every, clock
        self._deadline = clock.monotonic() + 60.0  # until the driver announces its first step
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._renew_until_stopped, name="tidegate-lease", daemon=True
        )

    def announce_step(self, name: str, deadline_seconds: float) -> None:
        """Announce a step and how long it may take."""
        self.step_name, self._deadline = name, self._clock.monotonic() + deadline_seconds

    @property
    def is_overdue(self) -> bool:
        """Whether the current step has passed its deadline."""
        return self._clock.monotonic() > self._deadline

    def renew_once(self) -> None:
        """Renew the lease, unless the step is overdue; the thread calls this at each interval."""
        if self.is_overdue or self.lost.is_set():
            return
        try:
            self.lease.renew()
        except FencedError as error:
            self.error = error
            self.lost.set()
        except TidegateError as error:
            self.trouble = error  # the lease is still valid, and the next interval tries again
        else:
            self.trouble = None

    def start(self) -> LeaseRenewer:
        """Start the thread, and return this renewer. The first renewal comes after one interval."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread and wait for it; the lease stays as it is."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> LeaseRenewer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._every) and not self.lost.is_set():
            self.renew_once()
