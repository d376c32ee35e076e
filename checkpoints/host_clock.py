"""Time as an argument: protocols of this package wait and measure through a `Clock`.

Tests and the simulation pass clocks of their own. The safety of data never depends on comparing the
clocks of two hosts. Courtesies compare them: ages of reports, expiries, abandoned restores, and
retention by age.
"""

import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

Found = TypeVar("Found")


class Clock:
    """The clock of the host: CLOCK_BOOTTIME where the platform has it.

    A laptop that was suspended must not believe that its lease is still young. Clocks of tests
    inherit from this one.
    """

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back and runs on while the host sleeps."""
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.clock_gettime(clock)

    def wall_ticks(self) -> int:
        """Return microseconds since 1970 UTC, for display and courtesies between hosts only."""
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        """Wait; a manual clock moves forward instead."""
        time.sleep(seconds)


SYSTEM_CLOCK = Clock()


def poll_until(
    look: Callable[[], Found], timeout: float, every: float, clock: Clock = SYSTEM_CLOCK
) -> Found:
    """Look until there is something, and return what the last look found.

    Args:
        look: returns what it finds; something false for nothing.
        timeout: seconds after which no further look begins.
        every: seconds between looks.
        clock: for waiting.
    """
    deadline = clock.monotonic() + timeout
    while not (found := look()) and clock.monotonic() < deadline:
        clock.sleep(every)
    return found


class PeriodicThread:
    """A thread that calls a function at intervals, from one interval after its start on.

    Args:
        name: of the thread.
        call: must not raise, because that would end the thread.
        every: seconds between two calls.
    """

    def __init__(self, name: str, call: Callable[[], object], every: float) -> None:
        self._call, self._every = call, every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run_calls, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread, and return this object."""
        self._thread.start()
        return self

    def stop(self, patience: float | None = None) -> None:
        """End the thread and wait for it, at most `patience` seconds if given."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(patience)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run_calls(self) -> None:
        while not self._ended.wait(self._every):
            self._call()
