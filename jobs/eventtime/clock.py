"""The pipeline clock: the recorded `now` made safe for timers (semantics.md section 1, recorded decisions)."""

from __future__ import annotations

__all__ = ["advance", "expired"]


def advance(clock: int | None, now: int, max_step: int) -> int:
    """The pipeline clock of an epoch: never backward, at most `max_step` forward, so that an outage expires nothing.

    >>> advance(100, 90, 10), advance(100, 105, 10), advance(100, 1_000, 10)
    (100, 105, 110)
    """
    if clock is None:
        return now
    return min(max(clock, now), clock + max_step)


def expired(clock: int, since: int, limit: int | None) -> bool:
    """Whether a timer that started at `since` has run out: age >= limit; a limit of None never does.

    >>> expired(10, 0, 10), expired(9, 0, 10), expired(10**9, 0, None)
    (True, False, False)
    """
    return limit is not None and clock - since >= limit
