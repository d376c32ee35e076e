"""The pipeline clock.

The recorded `now` made safe for timers (semantics.md section 1, recorded decisions).
"""

from __future__ import annotations


def advance_clock(clock: int | None, now: int, max_step: int) -> int:
    """The pipeline clock of an epoch.

    Never backward, at most `max_step` forward, so that an outage expires nothing.

    >>> advance_clock(100, 90, 10), advance_clock(100, 105, 10), advance_clock(100, 1_000, 10)
    (100, 105, 110)
    """
    if clock is None:
        return now
    return min(max(clock, now), clock + max_step)


def has_expired(clock: int, since: int, limit: int | None) -> bool:
    """Whether a timer that started at `since` has run out.

    Age >= limit; a limit of None never does.

    >>> has_expired(10, 0, 10), has_expired(9, 0, 10), has_expired(10**9, 0, None)
    (True, False, False)
    """
    return limit is not None and clock - since >= limit
