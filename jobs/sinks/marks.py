"""Where a follower stands: a position on the lineage of a timeline, and whether that is also a position of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.checkpoints.log import LogHead, SlotLog, LineageSegment

__all__ = ["FollowerPosition", "CurrentLineage", "count_shared_slots"]

_OPEN_END = 1 << 62  # an open stretch: more slots than any timeline has


@dataclass(frozen=True, slots=True)
class FollowerPosition:
    """What a table holds: slots 1 to `upto` of the lineage of `timeline`, each once."""

    timeline: int
    upto: int


class CurrentLineage:
    """The lineage of the current timeline, up to the head of the log."""

    def __init__(self, log: SlotLog, head: LogHead) -> None:
        self.timeline = head.timeline
        self.slot = head.slot
        self._lineage: Callable[[int], list[LineageSegment]] = log.lineage
        self._head: Callable[[], LogHead] = log.head
        self._shared: dict[int, int] = {head.timeline: head.slot}

    def list_segments(self) -> list[LineageSegment]:
        """Where the epochs of the current timeline's history lie, oldest first; no other epoch counts."""
        return self._lineage(self.timeline)

    def is_current(self) -> bool:
        """Whether no restore has ended this timeline; asks the log again."""
        return self._head().timeline == self.timeline

    def is_in_log(self, mark: FollowerPosition) -> bool:
        """Whether the log has this timeline, and for its current one this slot."""
        return mark.timeline < self.timeline or (mark.timeline == self.timeline and mark.upto <= self.slot)

    def last_shared_slot(self, mark: FollowerPosition) -> int:
        """How far a table with this mark is right on this lineage: slots after that are of an abandoned one."""
        if mark.timeline not in self._shared:
            self._shared[mark.timeline] = count_shared_slots(self._lineage(mark.timeline), self._lineage(self.timeline))
        return min(mark.upto, self._shared[mark.timeline])


def count_shared_slots(left: Sequence[LineageSegment], right: Sequence[LineageSegment]) -> int:
    """The number of slots at which two lineages are the same, counted from the first."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one.timeline != other.timeline:
            break
        ends = [_OPEN_END if s.last is None else s.last for s in (one, other)]
        shared = max(shared, min(ends))
        if ends[0] != ends[1]:
            break
    return shared
