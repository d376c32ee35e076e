"""Step 6, publishing: bring each sink to the head of the log in a thread of its own.

Publishing commits nothing: a sealed epoch is complete whether or not a table shows it yet. The
publisher therefore retries an unreachable sink with back-off while epochs go on, until too many
epochs are unpublished. Then the driver waits, and its status says so.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tenacity import (
    RetryCallState,
    Retrying,
    stop_when_event_set,
    wait_exponential_jitter,
)
from tenacity.nap import sleep_using_event

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import TidegateError, TransientError, get_first_line

from .errors import SINK_UNEXPECTED
from .interfaces import Faults, Sink

_JOIN_SECONDS = 30.0
# Seconds for which a store that refuses a sink's first publishing is asked again.
_DENIED_PATIENCE = 300.0


class Publisher:
    """Follows the log with every sink; an unreachable sink does not delay the others.

    Args:
        sinks: the sinks, each with a name of its own.
        log: the log to follow.
        faults: fault points of tests.
        group: how many sealed epochs a sink applies together (``outputs.publish_every``). `drain`
            also publishes a group that is not full.
    """

    def __init__(
        self, sinks: Sequence[Sink], log: SlotLog, faults: Faults, *, group: int = 1
    ) -> None:
        self._threads = {sink.name: _SinkThread(sink, log, faults, group) for sink in sinks}

    def start(self, timeline: int, slot: int) -> None:
        """Start the threads; `slot` is the head of the log and is applied first."""
        for thread in self._threads.values():
            thread.start((timeline, slot))

    def note_sealed(self, timeline: int, slot: int) -> None:
        """Publish up to `slot`, the newest slot of the log, whichever process filled it."""
        for thread in self._threads.values():
            thread.publish_up_to((timeline, slot))

    @property
    def unpublished_count(self) -> int:
        """The greatest of `lags`; 0 without sinks."""
        return max(self.lags.values(), default=0)

    @property
    def lags(self) -> dict[str, int]:
        """Slots sealed that a sink does not show yet, by sink.

        Each sink says how far it is when its thread begins. Until it has answered, only the slots
        that were sealed since then count. If it cannot say it, all slots of the log count.
        """
        return {name: thread.shown_lag for name, thread in self._threads.items()}

    @property
    def publish_seconds(self) -> dict[str, float]:
        """Seconds that the last publishing took, with its retries, by sink that has published."""
        return {
            name: round(thread.seconds, 3)
            for name, thread in self._threads.items()
            if thread.seconds is not None
        }

    @property
    def trouble(self) -> TidegateError | None:
        """The transient failure of a sink that is being retried; None if there is none."""
        return next((t.trouble for t in self._threads.values() if t.trouble is not None), None)

    def wait_below(self, limit: int, timeout: float) -> bool:
        """Wait until each sink lags by fewer than `limit` epochs; return whether all do so in time.

        A sink that catches up with old epochs for the first time in this process, and gets on with
        it, does not count: retention keeps its epochs, and sealing need not wait for them.

        Args:
            limit: epochs.
            timeout: seconds, for all sinks together.

        Raises:
            TidegateError: a sink cannot go on (fenced, poison).
        """
        return self._wait_for_all(lambda thread: thread.catches_up or thread.lag < limit, timeout)

    def drain(self, timeout: float) -> bool:
        """Publish everything, also groups that are not full; return whether it is done in time.

        Groups are no longer waited for afterwards.

        Args:
            timeout: seconds, for all sinks together.

        Raises:
            TidegateError: a sink cannot go on.
        """
        for thread in self._threads.values():
            thread.flush()
        return self._wait_for_all(lambda thread: thread.lag < 1, timeout)

    def _wait_for_all(self, holds: Callable[[_SinkThread], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        # A list: every thread is asked, so that no error is hidden by a sink that is only slow.
        held = [
            thread.wait_until(holds, max(0.0, deadline - time.monotonic()))
            for thread in self._threads.values()
        ]
        return all(held)

    def stop(self) -> None:
        """End each thread after the call of the sink that it is in; wait up to 30 s for each."""
        for thread in self._threads.values():
            thread.stop()


@dataclass(eq=False)
class _SinkThread:
    """Follows the log with one sink.

    Attributes:
        error: the error that ended the thread; None while it runs.
        trouble: the transient failure that is being retried; None if there is none.
        seconds: duration of the last publishing with its retries; None before the first.
        catches_up: the sink has not reached the head yet since the thread began, and each of its
            failures so far came after new epochs had been applied.
    """

    _sink: Sink
    _log: SlotLog
    _faults: Faults
    _group: int

    def __post_init__(self) -> None:
        # Timeline and slot: after a restore slot numbers are smaller than those published before.
        self._sealed = (0, 0)
        self._published = (0, -1)  # below every slot: the head is applied first
        self._shown = (0, 0)
        self._flush = False
        self._wake = threading.Condition()
        self._stop = threading.Event()
        self.error: TidegateError | None = None
        self.trouble: TidegateError | None = None
        self.seconds: float | None = None
        self.catches_up = True
        self._shown_at_failure = (-1, -1)
        self._thread = threading.Thread(
            target=self._follow_log, name=f"tidegate-publish-{self._sink.name}", daemon=True
        )

    @property
    def lag(self) -> int:
        """Sealed epochs that this thread has not published; all before it has published once."""
        return self._count_slots_after(self._published)

    @property
    def shown_lag(self) -> int:
        """Sealed epochs that the sink does not show yet, as far as it has said."""
        return self._count_slots_after(self._shown)

    def _count_slots_after(self, position: tuple[int, int]) -> int:
        timeline, slot = self._sealed
        return max(0, slot - max(position[1], 0)) if position[0] == timeline else slot

    def start(self, head: tuple[int, int]) -> None:
        """Start the thread; it applies everything up to `head` first."""
        self._sealed = self._shown = head
        self._thread.start()

    def publish_up_to(self, head: tuple[int, int]) -> None:
        """Say that `head` is the newest slot."""
        with self._wake:
            self._sealed = head
            self._wake.notify_all()

    def flush(self) -> None:
        """Publish groups that are not full as well, from now on."""
        with self._wake:
            self._flush = True
            self._wake.notify_all()

    def wait_until(self, holds: Callable[[_SinkThread], bool], timeout: float) -> bool:
        """Wait for a condition; return whether it holds in time. Raises what ended the thread."""
        with self._wake:
            self._wake.wait_for(lambda: holds(self) or self.error is not None, timeout)
        if self.error is not None:
            raise self.error
        return holds(self)

    def stop(self) -> None:
        """End the thread after the call of the sink that it is in."""
        self._stop.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_SECONDS)

    def _follow_log(self) -> None:
        if self._ask_lag() == math.inf:
            self._shown = (0, 0)
        try:
            while not self._stop.is_set():
                # Read once: more epochs may be sealed while the sink works, and what counts as
                # published is what was sealed before it looked.
                target, flush = self._sealed, self._flush
                if self._published < target:
                    self._publish(target, flush)
                with self._wake:
                    self._wake.wait_for(partial(self._has_work, target, flush))
        # The driver learns of it in its next `wait_below`, on its own thread.
        except Exception as error:
            with self._wake:
                self.error = error if isinstance(error, TidegateError) else _wrap_unexpected(error)
                self._wake.notify_all()

    def _publish(self, target: tuple[int, int], flush: bool) -> None:
        # With its retries: what people want to know is how far the tables are behind.
        begun = time.monotonic()
        self._faults.reach("publish.start")
        self._retry(self._sink.follow, self._log, flush=flush)
        self._faults.reach("publish.done")
        self.seconds = time.monotonic() - begun
        # Without a flush the sink leaves a group that is not full unpublished.
        waiting = 0 if flush or self._group == 1 else self._retry(self._sink.lag, self._log)
        with self._wake:
            self._published = self._shown = target[0], target[1] - waiting
            self.trouble, self.catches_up = None, False
            self._wake.notify_all()

    def _has_work(self, target: tuple[int, int], flushed: bool) -> bool:
        return (
            self._stop.is_set()
            or self._sealed > target
            or (self._flush and not flushed and self._published < self._sealed)
        )

    @property
    def _retry(self) -> Retrying:
        return Retrying(
            retry=self._may_pass,
            wait=wait_exponential_jitter(multiplier=0.5, max=15.0),
            stop=stop_when_event_set(self._stop),
            sleep=sleep_using_event(self._stop),
            before_sleep=self._note_trouble,
            reraise=True,
        )

    def _may_pass(self, state: RetryCallState) -> bool:
        """Whether it is worth trying again.

        A store may refuse this process for a while (keys that expired, a policy that is rolled
        out). If it has worked, the loop meets the same store and says when that is enough. If it
        never has, the sink's own keys may be wrong.
        """
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, StoreDeniedError):
            return self.seconds is not None or state.idle_for < _DENIED_PATIENCE
        return isinstance(error, TransientError)

    def _note_trouble(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self.trouble = error if isinstance(error, TidegateError) else None
        if not self.catches_up:
            return
        # The patience ends with a sink that fails twice without having applied an epoch. Not by the
        # lag, which a driver that goes on sealing keeps from getting smaller.
        is_known, before = self._ask_lag() < math.inf, self._shown_at_failure
        self._shown_at_failure = self._shown
        if not is_known or self._shown <= before:
            with self._wake:
                self.catches_up = False
                self._wake.notify_all()

    def _ask_lag(self) -> float:
        """Return and note how far the sink is behind, as it says; infinite if it does not."""
        timeline, slot = self._sealed
        # Any error: this only informs, and the next try of the sink meets it again.
        with suppress(Exception):
            lag = self._sink.lag(self._log)
            self._shown = timeline, slot - lag
            return lag
        return math.inf


def _wrap_unexpected(error: Exception) -> TidegateError:
    """Wrap a defect of a sink, so that `wait_below` raises it instead of waiting without end."""
    kind, detail = type(error).__name__, get_first_line(error)
    wrapped: TidegateError = SINK_UNEXPECTED(kind=kind, detail=detail)
    wrapped.__cause__ = error
    return wrapped
