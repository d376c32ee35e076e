"""Time as an argument: protocols of this package wait and measure through a `Clock`.

Tests and the simulation pass clocks of their own. The safety of data never depends on comparing the
clocks of two hosts. Courtesies compare them: ages of reports, expiries, abandoned restores, and
retention by age.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as this package reads it."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back and runs on while the host sleeps."""
        ...

    def wall_ticks(self) -> int:
        """Return microseconds since 1970 UTC, for display and courtesies between hosts only."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait; a manual clock moves forward instead."""
        ...


class SystemClock:
    """The clock of the host: CLOCK_BOOTTIME where the platform has it.

    A laptop that was suspended must not believe that its lease is still young.
    """

    def monotonic(self) -> float:
        """Return seconds since boot, including suspended time."""
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.clock_gettime(clock)

    def wall_ticks(self) -> int:
        """Return microseconds since 1970 UTC."""
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
