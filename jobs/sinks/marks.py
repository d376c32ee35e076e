"""Where a follower stands: a position on the lineage of a timeline, and whether that is also a position of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.checkpoints.log import Head, SlotLog, Stretch

__all__ = ["Mark", "Way", "shared_slots"]

_END = 1 << 62  # an open stretch: more slots than any timeline has


@dataclass(frozen=True, order=True, slots=True)
class Mark:
    """What a table's snapshot holds: slots 1 to `upto` of the lineage of `timeline`, each once.

    Attributes:
        root: the table was empty up to here, so the mark holds at every earlier position as well.
    """

    snapshot_id: int
    timeline: int
    upto: int
    root: bool = False


class Way:
    """The lineage of the current timeline, up to the head of the log."""

    def __init__(self, log: SlotLog, head: Head) -> None:
        self.timeline = head.timeline
        self.slot = head.slot
        self._lineage: Callable[[int], list[Stretch]] = log.lineage
        self._shared: dict[int, int] = {head.timeline: head.slot}

    def position(self, mark: Mark) -> int | None:
        """The position on this lineage whose rows a marked snapshot holds exactly; None if it holds others."""
        if mark.timeline > self.timeline:
            return None
        if mark.timeline not in self._shared:
            self._shared[mark.timeline] = shared_slots(self._lineage(mark.timeline), self._lineage(self.timeline))
        shared = self._shared[mark.timeline]
        if mark.root:
            return min(mark.upto, shared)
        return mark.upto if mark.upto <= shared else None


def shared_slots(left: Sequence[Stretch], right: Sequence[Stretch]) -> int:
    """The number of slots at which two lineages are the same, counted from the first."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one.timeline != other.timeline:
            break
        ends = [_END if s.last is None else s.last for s in (one, other)]
        shared = max(shared, min(ends))
        if ends[0] != ends[1]:
            break
    return shared
