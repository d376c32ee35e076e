"""Time as an argument: every wait and every measured age in this room goes through a `Clock`.

Tests and the simulation pass a `ManualClock`; nothing here ever compares the clocks of two hosts.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What the bucket side needs of time."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back and keeps running while the host sleeps."""
        ...

    def wall_ticks(self) -> int:
        """Wall-clock time in microseconds UTC.

        For records shown to people, never for a decision between hosts.
        """
        ...

    def sleep(self, seconds: float) -> None:
        """Wait; a manual clock moves itself forward instead."""
        ...


class SystemClock:
    """CLOCK_BOOTTIME where the platform has it.

    A suspended laptop must not believe that its lease is still young.
    """

    def monotonic(self) -> float:
        """Seconds since boot, suspend included."""
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.clock_gettime(clock)

    def wall_ticks(self) -> int:
        """Microseconds since 1970 UTC."""
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        """Really wait."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to, or when somebody sleeps on it."""

    def __init__(self, start: float = 1_000.0, wall_ticks: int = 1_750_000_000_000_000) -> None:
        self._now = start
        self._wall_offset = wall_ticks - int(start * 1_000_000)
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """The current reading."""
        with self._lock:
            return self._now

    def wall_ticks(self) -> int:
        """The wall clock moves with the reading."""
        return int(self.monotonic() * 1_000_000) + self._wall_offset

    def sleep(self, seconds: float) -> None:
        """Move forward at once."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        with self._lock:
            self._now += seconds


SYSTEM_CLOCK = SystemClock()
