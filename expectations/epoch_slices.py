"""Which epochs a quality run judges, and how they are cut into slices.

A slice has `quality.recent` epochs, or those of one `quality.recent_time`. Slices follow each other
from the beginning of a timeline, so that it does not matter when the runs took place. Each complete
one is judged once. The newest epochs are judged by every run besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.checkpoints.illness_record import IllRange, TimelineHealth, add_range
from tidegate.jobs.spec.operations import QualitySpec

MOST_SLICES = 60
"""Complete slices that one run judges, oldest first; each takes about half a second."""


@dataclass(frozen=True)
class EpochSlice:
    """The epochs after `since` up to `last`."""

    since: int
    last: int


@dataclass(frozen=True)
class SlicePlan:
    """What one run judges.

    Attributes:
        newest: the newest epochs, a full slice if there are that many.
        complete: slices that no run has judged, oldest first; the last one may equal `newest`.
        start: the last slice that was judged before ends with this epoch.
    """

    newest: EpochSlice
    complete: tuple[EpochSlice, ...]
    start: int

    @property
    def older(self) -> tuple[EpochSlice, ...]:
        """Complete slices other than the newest epochs."""
        return tuple(one for one in self.complete if one != self.newest)

    @property
    def judged(self) -> int:
        """The last complete slice ends here."""
        return self.complete[-1].last if self.complete else self.start


def plan_slices(
    epochs: Sequence[tuple[int, int]], start: int, size: int, quality: QualitySpec, now: int
) -> SlicePlan:
    """Cut epochs into slices.

    Args:
        epochs: number and time of the seal in ticks, oldest first, without gaps.
        start: epochs up to this one are in slices that were judged.
        size: epochs of a slice, if `quality` has no `recent_time`.
        quality: whether slices are as long as a time.
        now: ticks.
    """
    if not epochs:
        return SlicePlan(EpochSlice(start, start), (), start)
    head = epochs[-1][0]
    if quality.recent_time is None:
        newest = EpochSlice(max(epochs[0][0] - 1, head - size), head)
        ends = [*range(start + size, head + 1, size)]
    else:
        old = [slot for slot, at in epochs if at <= now - quality.recent_time]
        newest = EpochSlice(max(old, default=epochs[0][0] - 1), head)
        ends = _find_ends_by_time(epochs, start, quality.recent_time, now)
    ends = ends[:MOST_SLICES]
    pairs = zip([start, *ends], ends, strict=False)
    return SlicePlan(newest, tuple(EpochSlice(since, last) for since, last in pairs), start)


def _find_ends_by_time(
    epochs: Sequence[tuple[int, int]], start: int, length: int, now: int
) -> list[int]:
    """Last epochs of the complete slices: no later epoch can belong to them."""
    ends: list[int] = []
    opened, before = None, start
    for slot, at in epochs:
        if slot <= start:
            continue
        if opened is not None and at > opened + length:
            ends.append(before)
            opened = None
        opened = at if opened is None else opened
        before = slot
    if opened is not None and now > opened + length:
        ends.append(before)
    return ends


Failure = tuple[str, int, int]
"""A critical check, and the first and last epoch for which it failed."""


def note_verdicts(
    health: TimelineHealth,
    plan: SlicePlan,
    older: Sequence[Sequence[Failure]],
    newest: Sequence[Failure],
    damaged: Sequence[Failure] = (),
) -> TimelineHealth:
    """Return what is known about a timeline after a run.

    Args:
        health: what was known before.
        plan: what the run has judged.
        older: the failures in each slice of `SlicePlan.older`.
        newest: those in the newest epochs.
        damaged: failures that are about single epochs however slices are cut; they are kept.
    """
    ill = health.ill
    verdicts = [*zip(plan.older, older, strict=True)]
    is_complete = plan.newest in plan.complete
    if is_complete:
        verdicts.append((plan.newest, newest))
    for part, failures in verdicts:
        for one in _clip_failures(failures, part.since, part.last):
            ill = add_range(ill, one)
    for check, first, last in damaged:
        ill = add_range(ill, IllRange(check=check, first=first, last=last))
    # Slices before the newest epochs have their own verdicts.
    begin = max(plan.judged, plan.newest.since)
    provisional = [] if is_complete else _clip_failures(newest, begin, plan.newest.last)
    last_since = plan.complete[-1].since if plan.complete else health.since
    return health.model_copy(
        update={
            "since": last_since,
            "judged": plan.judged,
            "head": plan.newest.last,
            "newest_since": begin,
            "ill": ill,
            "newest": tuple(provisional),
        }
    )


def _clip_failures(failures: Sequence[Failure], since: int, last: int) -> list[IllRange]:
    clipped = [(check, max(a, since + 1), min(b, last)) for check, a, b in failures]
    return [IllRange(check=check, first=a, last=b) for check, a, b in clipped if a <= b]
