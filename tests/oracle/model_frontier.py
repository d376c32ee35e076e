"""Frontiers of the event-at-a-time model: one level of coalescing (semantics.md sections 1 and 2).

Written apart from `jobs/eventtime` on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.time_units import TICK_MAX


@dataclass
class Input:
    """A member as its level sees it. `frontier` None: it has none yet."""

    frontier: int | None = None
    status: str = "active"
    aligned: bool = True

    def raise_to(self, frontier: int | None) -> None:
        """A frontier never decreases."""
        if frontier is not None and (self.frontier is None or frontier > self.frontier):
            self.frontier = frontier


@dataclass
class Level:
    """Members joined into one frontier; `frontier` None: none yet."""

    options: CoalesceOptions
    inputs: dict[str, Input] = field(default_factory=dict)
    frontier: int | None = None
    status: str = "active"
    ends: bool = (
        False  # a completed input promises everything (`advance_to_end`), whatever `all_done` says
    )
    joined: bool = False
    last_time: int | None = None  # its largest frontier below +inf

    def join(self, name: str) -> Input:
        """The member of this name; a new one starts at F, or holds F."""
        self.joined = True
        if name not in self.inputs:
            self.inputs[name] = Input(self.frontier if self.options.joins == "at_F" else None)
        return self.inputs[name]

    def set_status(self, name: str, status: str) -> None:
        """Active, idle or done.

        Idling loses the alignment; waking up behind F does not regain it, unless F is to freeze.
        """
        one = self.inputs[name]
        if one.status == status:
            return
        one.status = status
        # Having none counts as minus infinity: below F once there is one.
        caught_up = self.frontier is None or (
            one.frontier is not None and one.frontier >= self.frontier
        )
        one.aligned = status == "active" and (self.options.revived == "freeze" or caught_up)

    def settle(self) -> None:
        """Recompute F and the level's own status."""
        for one in self.inputs.values():
            if one.status == "active" and one.frontier is not None and one.frontier >= self._floor:
                one.aligned = True
        statuses = {one.status for one in self.inputs.values()}
        if "active" in statuses:
            self.status, candidate = "active", self.combine({})
        elif "idle" in statuses:
            self.status, candidate = (
                "idle",
                self._largest() if self.options.all_idle == "jump" else None,
            )
        elif "done" in statuses:
            self.status, candidate = "done", self._at_end()
        else:
            silent = self.options.no_members == "silent" and not self.joined
            self.status, candidate = self.status if silent else "idle", None
        self.raise_to(candidate)

    def raise_to(self, frontier: int | None) -> None:
        """F = max(F, frontier)."""
        if frontier is not None:
            self.frontier = max(self._floor, frontier)
            if self.frontier < TICK_MAX:
                self.last_time = self.frontier

    def combine(self, instead: dict[str, int | None], *, catching_up: bool = False) -> int | None:
        """Min or max over the members that count (or also those catching up), some frontiers
        replaced; None: F holds.
        """
        counted = [
            (n, i)
            for n, i in self.inputs.items()
            if i.status == "active" and (i.aligned or catching_up)
        ]
        values = [instead.get(n, i.frontier) for n, i in counted]
        known = [v for v in values if v is not None]
        if not known or (self.options.coalesce == "min" and len(known) < len(values)):
            return None
        return min(known) if self.options.coalesce == "min" else max(known)

    @property
    def _floor(self) -> int:
        return -(2**63) if self.frontier is None else self.frontier

    def _largest(self) -> int | None:
        return max(
            (
                i.frontier
                for i in self.inputs.values()
                if i.frontier is not None and i.frontier < TICK_MAX
            ),
            default=None,
        )

    def _at_end(self) -> int | None:
        return TICK_MAX if self.ends or self.options.all_done == "infinity" else None
