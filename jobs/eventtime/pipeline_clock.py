"""The pipeline clock: which time counts for timers (semantics.md section 1, recorded decisions).

A wall clock runs on while the store, a broker or the driver is away. Timers that ran on it would
expire although no row could be read. So timers run on a clock that counts worked time only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class PipelineTime(NamedTuple):
    """Both clocks as an epoch records them, in ticks.

    Attributes:
        clock: the pipeline clock. All timers run on it.
        wall: the recorded wall clock, never behind `clock`. It only says what is too far in the
            future.
    """

    clock: int
    wall: int

    @property
    def uncounted(self) -> int:
        """Ticks by which gaps have put the pipeline clock behind the wall clock."""
        return self.wall - self.clock


def read_pipeline_time(state: Mapping[str, Any]) -> PipelineTime | None:
    """Return both clocks from the decider's state; None before the first epoch."""
    clock = state.get("clock")
    return None if clock is None else PipelineTime(clock, clock + state.get("uncounted", 0))


def advance_clock(
    before: PipelineTime | None, now: int, max_step: int, worked: int | None = None
) -> PipelineTime:
    """Return both clocks of an epoch; neither goes back.

    Args:
        before: the clocks of the epoch before; None: this is the first, and both start at `now`.
        now: wall clock, ticks.
        max_step: the most that the pipeline clock advances if `worked` is None, ticks.
        worked: ticks that it advances by; gaps are counted in them already (`WorkedTime.count`).
            None: it advances as the wall clock does.

    >>> before = PipelineTime(100, 100)
    >>> advance_clock(before, 90, 10), advance_clock(before, 1_000, 10)
    (PipelineTime(clock=100, wall=100), PipelineTime(clock=110, wall=1000))
    >>> advance_clock(before, 1_000, 10, worked=300)
    PipelineTime(clock=400, wall=1000)
    """
    if before is None:
        return PipelineTime(now, now)
    wall = max(before.wall, now)
    step = min(wall - before.wall, max_step) if worked is None else worked
    clock = before.clock + step
    return PipelineTime(clock, max(wall, clock))


class WorkedTime:
    """Counts what one driver has worked since the newest epoch of the log.

    Args:
        max_gap: the most that a gap counts, ticks.
    """

    def __init__(self, max_gap: int) -> None:
        self._max_gap = max_gap
        self._read_at: int | None = None  # None: another driver sealed the newest epoch
        self._worked = 0
        self._interrupted = False

    def count(self, reading: int, since_head: int) -> int:
        """Return the ticks worked since the newest epoch of the log.

        Args:
            reading: ticks on the clock of the driver's lease, which stops while the lease is not
                held.
            since_head: wall-clock ticks since the newest epoch. They count as a gap if this driver
                did not seal it, because what happened in between is not known.
        """
        if self._read_at is None:
            self._worked = min(max(0, since_head), self._max_gap)
        else:
            passed = reading - self._read_at
            self._worked += min(passed, self._max_gap) if self._interrupted else passed
        self._read_at, self._interrupted = reading, False
        return self._worked

    def interrupt(self) -> None:
        """Note that an attempt failed: the time up to the next attempt that succeeds is a gap."""
        self._interrupted = True

    def begin(self, *, sealed_here: bool) -> None:
        """Start again at a new head; the readings so far count only if this driver sealed it."""
        self._worked = 0
        if not sealed_here:
            self._read_at = None


def has_expired(clock: int, since: int, limit: int | None) -> bool:
    """Whether a timer that started at `since` has reached its limit; a limit of None never expires.

    >>> has_expired(10, 0, 10), has_expired(9, 0, 10), has_expired(10**9, 0, None)
    (True, False, False)
    """
    return limit is not None and clock - since >= limit
