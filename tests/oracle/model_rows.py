"""What the model knows of one member, and the frontier that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.time_units import saturate_ticks


@dataclass
class ModelMember:
    """One member and what it remembers of its rows.

    Attributes:
        memory: what its rows left behind for the rows to come.
        seen: largest time that counts for F_i, that is before the open barrier.
        promised: punctuation that counts for F_i.
        active_at: pipeline clock of the last activity.
        pending: rows were left when the cut was planned.
        before_barrier: position of a barrier row -> newest time and punctuation before it.
    """

    member: Member
    source: SourceSpec
    active_at: int
    memory: dict[str, int] = field(default_factory=dict)
    seen: int | None = None
    promised: int | None = None
    pending: bool = False
    done: bool = False
    before_barrier: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """Largest event time so far."""
        return self.memory.get("newest")

    @property
    def punctuation(self) -> int | None:
        """Its frontier by punctuation."""
        return self.memory.get("current")

    def frontier(self, now: int, newest_read: int | None, *, clocked: bool) -> int | None:
        """F_i: the largest of what heuristic, punctuation and wall clock promise."""
        source, promises = self.source, [self.promised]
        more = 1 if source.frontier == "inclusive" else 0
        if source.lag is not None and self.seen is not None:
            promises.append(self.seen - source.lag + more)
        if (
            clocked
            and source.wall_clock is not None
            and (newest_read is not None or not source.wall_clock.cap)
        ):
            wall = now - source.wall_clock.lag + more
            promises.append(
                min(wall, newest_read)
                if source.wall_clock.cap and newest_read is not None
                else wall
            )
        return max((saturate_ticks(p) for p in promises if p is not None), default=None)
