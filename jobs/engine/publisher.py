"""Step 6: bring the sinks to the head of the log, in a thread of its own, bounded.

Publishing commits nothing: a sealed epoch is complete whether or not a table shows it yet. So a
sink that is away is tried again with back-off while epochs go on, until too many are unpublished;
then the driver waits, visibly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from tenacity import Retrying, retry_if_exception_type, stop_when_event_set, wait_exponential_jitter
from tenacity.nap import sleep_using_event

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import PoisonError, TidegateError, TransientError
from tidegate.jobs.engine.fault_points import Faults
from tidegate.jobs.engine.interfaces import Sink


class Publisher:
    """Follows the log with every sink.

    Sealed epochs are gathered into groups of `group` until the drain.

    Attributes:
        error: what stopped the publisher for good (fenced, poison); None while it is well.
        trouble: the transient failure it is trying to get past; None while it is well.
        took: seconds that the last publishing took, waiting for a sink that was away included; None
            before the first.
    """

    def __init__(
        self, sinks: Sequence[Sink], log: SlotLog, faults: Faults, *, group: int = 1
    ) -> None:
        self._sinks, self._log, self._faults, self._group = tuple(sinks), log, faults, group
        self._sealed = 0
        self._published = 0
        self._flush = False
        self._wake = threading.Condition()
        self._stop = threading.Event()
        self.error: TidegateError | None = None
        self.trouble: TidegateError | None = None
        self.took: float | None = None
        self._thread = threading.Thread(
            target=self._follow_log, name="tidegate-publish", daemon=True
        )

    def start(self, sealed: int) -> None:
        """Begin; `note_sealed` is the head's slot, applied first if the sinks are behind."""
        self._sealed = sealed
        self._published = -1
        self._thread.start()

    def note_sealed(self, slot: int) -> None:
        """An epoch was sealed."""
        with self._wake:
            self._sealed = slot
            self._wake.notify_all()

    @property
    def unpublished_count(self) -> int:
        """Sealed epochs that not every sink shows yet."""
        return max(0, self._sealed - max(self._published, 0))

    def wait_below(self, limit: int, timeout: float) -> bool:
        """Wait until fewer than `limit` epochs are unpublished.

        Whether that came true within `timeout` seconds.

        Raises:
            TidegateError: the publisher has stopped for good.
        """
        with self._wake:
            self._wake.wait_for(
                lambda: self.unpublished_count < limit or self.error is not None, timeout
            )
        if self.error is not None:
            raise self.error
        return self.unpublished_count < limit

    def drain(self, timeout: float) -> bool:
        """Publish what is left, groups that are not full too; whether it was done in time."""
        with self._wake:
            self._flush = True
            self._wake.notify_all()
        return self.wait_below(1, timeout)

    def stop(self) -> None:
        """End the thread after the sink it is busy with."""
        self._stop.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)

    def _follow_log(self) -> None:
        try:
            while not self._stop.is_set():
                target, flush = self._sealed, self._flush
                if self._published < target:
                    begun = time.monotonic()
                    self._follow_sinks(flush)
                    self.took = time.monotonic() - begun
                    self._record_published(
                        target
                        if flush or self._group == 1
                        else target - self._count_waiting_slots()
                    )
                with self._wake:
                    self._wake.wait_for(partial(self._has_work, target, flush))
        except Exception as error:
            with self._wake:
                self.error = (
                    error if isinstance(error, TidegateError) else _wrap_unexpected_error(error)
                )
                self._wake.notify_all()

    def _has_work(self, seen: int, flushed: bool) -> bool:
        """Something was sealed since, or what waits for its group has to go, or it is time to end."""
        return (
            self._stop.is_set()
            or self._sealed > seen
            or (self._flush and not flushed and self._published < self._sealed)
        )

    def _count_waiting_slots(self) -> int:
        """Slots of a group that is not full yet."""
        retrying = self._build_retrying()
        return max((retrying(sink.lag, self._log) for sink in self._sinks), default=0)

    def _record_published(self, target: int) -> None:
        with self._wake:
            self._published = target
            self.trouble = None
            self._wake.notify_all()

    def _build_retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(TransientError),
            wait=wait_exponential_jitter(multiplier=0.5, max=15.0),
            stop=stop_when_event_set(self._stop),
            sleep=sleep_using_event(self._stop),
            before_sleep=lambda state: setattr(
                self, "trouble", state.outcome.exception() if state.outcome else None
            ),
            reraise=True,
        )

    def _follow_sinks(self, flush: bool) -> None:
        retrying = self._build_retrying()
        for sink in self._sinks:
            self._faults.reach("publish.start")
            retrying(sink.follow, self._log, flush=flush)
            self._faults.reach("publish.done")


class PublisherGroup:
    """One publisher per sink: one that is away does not keep the others from following."""

    def __init__(
        self, sinks: Sequence[Sink], log: SlotLog, faults: Faults, *, group: int = 1
    ) -> None:
        self._all = {sink.name: Publisher([sink], log, faults, group=group) for sink in sinks}

    def start(self, sealed: int) -> None:
        """Begin; `note_sealed` is the head's slot."""
        for one in self._all.values():
            one.start(sealed)

    def note_sealed(self, slot: int) -> None:
        """An epoch was sealed."""
        for one in self._all.values():
            one.note_sealed(slot)

    @property
    def unpublished_count(self) -> int:
        """Sealed epochs that not every sink shows yet."""
        return max((one.unpublished_count for one in self._all.values()), default=0)

    @property
    def lags(self) -> dict[str, int]:
        """Sealed epochs that a sink does not show yet, by sink."""
        return {name: one.unpublished_count for name, one in self._all.items()}

    @property
    def publish_seconds(self) -> dict[str, float]:
        """Seconds that the last publishing took, by sink."""
        return {name: round(one.took, 3) for name, one in self._all.items() if one.took is not None}

    @property
    def trouble(self) -> TidegateError | None:
        """The transient failure of a sink that keeps trying; None while all are well."""
        return next((one.trouble for one in self._all.values() if one.trouble is not None), None)

    def wait_below(self, limit: int, timeout: float) -> bool:
        """Wait until every sink has fewer than `limit` epochs to go.

        Whether that came true within `timeout` seconds.

        Raises:
            TidegateError: one of them has stopped for good.
        """
        deadline = time.monotonic() + timeout
        below = [
            one.wait_below(limit, max(0.0, deadline - time.monotonic()))
            for one in self._all.values()
        ]
        return all(below)

    def drain(self, timeout: float) -> bool:
        """Publish what is left; whether it was done in time."""
        deadline = time.monotonic() + timeout
        done = [one.drain(max(0.0, deadline - time.monotonic())) for one in self._all.values()]
        return all(done)

    def stop(self) -> None:
        """End all threads after what they are busy with."""
        for one in self._all.values():
            one.stop()


def _wrap_unexpected_error(error: Exception) -> PoisonError:
    """What no sink should raise.

    Unseen, it would leave the driver waiting for a thread that has ended.
    """
    known = PoisonError(
        f"publishing failed with {type(error).__name__}:"
        f" {str(error).strip().partition(chr(10))[0][:500]}",
        code="sink.unexpected",
        kept="everything sealed; the tables show the epochs before",
        advice=(
            "start the driver again: publishing goes on from the log; if it fails again, report"
            " this message"
        ),
    )
    known.__cause__ = error
    return known
