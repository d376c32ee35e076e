"""Which epochs a quality run judges, and how they are cut into slices.

The epochs since the previous run are cut into slices of `quality.recent` epochs, or of one
`quality.recent_time`. The last slice may be shorter; it is judged together with epochs before it,
as many as make a whole one: the *newest epochs*. Its verdict counts for its own epochs alone. If
some of the epochs before it are ill, it is judged by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidegate.checkpoints.illness_record import IllRange, TimelineHealth, add_range
from tidegate.jobs.spec.operations import QualitySpec

MOST_SLICES = 60
"""Slices that one run judges, oldest first; each takes about half a second."""


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
        slices: slices of the epochs that no run has judged, oldest first. They end before `newest`
            if there are very many.
        start: epochs up to this one have been judged before.
        is_alone: the last slice is judged alone, however short, as epochs before it are ill.
    """

    newest: EpochSlice
    slices: tuple[EpochSlice, ...]
    start: int
    is_alone: bool = False

    def separate_ill(self, ill: Sequence[IllRange]) -> SlicePlan:
        """Return the plan for ranges known to be ill: they do not make what follows ill."""
        first, last = self.newest.since + 1, self.start
        return replace(self, is_alone=any(one.first <= last and one.last >= first for one in ill))

    @property
    def older(self) -> tuple[EpochSlice, ...]:
        """The slices that are not judged as a part of the newest epochs."""
        last = self.last
        return self.slices if last is None else self.slices[:-1]

    @property
    def last(self) -> EpochSlice | None:
        """The slice that is judged as a part of the newest epochs."""
        if not self.slices:
            return None
        last = self.slices[-1]
        is_part = last.last == self.newest.last and last.since >= self.newest.since
        is_alone = self.is_alone and last != self.newest
        return last if is_part and not is_alone else None

    @property
    def judged(self) -> int:
        """The last slice ends here."""
        return self.slices[-1].last if self.slices else self.start


def plan_slices(
    epochs: Sequence[tuple[int, int]], start: int, size: int, quality: QualitySpec, now: int
) -> SlicePlan:
    """Cut epochs into slices.

    Args:
        epochs: number and time of the seal in ticks, oldest first, without gaps.
        start: epochs up to this one have been judged.
        size: epochs of a slice, if `quality` has no `recent_time`.
        quality: whether slices are as long as a time.
        now: ticks.
    """
    if not epochs:
        return SlicePlan(EpochSlice(start, start), (), start)
    head = epochs[-1][0]
    if quality.recent_time is None:
        newest = EpochSlice(max(epochs[0][0] - 1, head - size), head)
        ends = [*range(start + size, head, size), *([head] if head > start else [])]
    else:
        old = [slot for slot, at in epochs if at <= now - quality.recent_time]
        newest = EpochSlice(max(old, default=epochs[0][0] - 1), head)
        ends = _find_ends_by_time(epochs, start, quality.recent_time)
    ends = ends[:MOST_SLICES]
    pairs = zip([start, *ends], ends, strict=False)
    return SlicePlan(newest, tuple(EpochSlice(since, last) for since, last in pairs), start)


def _find_ends_by_time(epochs: Sequence[tuple[int, int]], start: int, length: int) -> list[int]:
    """Last epochs of slices whose epochs were sealed within a time."""
    ends: list[int] = []
    opened = None
    for slot, at in epochs:
        if slot <= start:
            continue
        if opened is None or at > opened + length:
            opened = at
            ends.append(slot)
        ends[-1] = slot
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
    if plan.last is not None:
        verdicts.append((plan.last, newest))
    for part, failures in verdicts:
        for one in _cut_failures(failures, part.since, part.last):
            ill = add_range(ill, one)
    for check, first, last in damaged:
        ill = add_range(ill, IllRange(check=check, first=first, last=last))
    # Only with slices that are still to be judged: the next run replaces this.
    begin = max(plan.judged, plan.newest.since)
    return health.model_copy(
        update={
            "since": plan.newest.since,
            "judged": plan.judged,
            # Tables that were built anew show fewer epochs than were looked at before.
            "head": max(health.head, plan.newest.last),
            "newest_since": begin,
            "ill": ill,
            "newest": tuple(_cut_failures(newest, begin, plan.newest.last)),
        }
    )


def _cut_failures(failures: Sequence[Failure], since: int, last: int) -> list[IllRange]:
    clipped = [(check, max(a, since + 1), min(b, last)) for check, a, b in failures]
    return [IllRange(check=check, first=a, last=b) for check, a, b in clipped if a <= b]
