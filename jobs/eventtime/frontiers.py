"""Coalescing: how the frontiers of several inputs become one (semantics.md sections 1 and 2).

The same `Coalescer` joins the partitions of a source and the sources of a pipeline. Signals
(`signal_frontier`, `signal_idle`, `signal_active`, `signal_done`, `join`, `remove`) only record
what happened; `settle` then moves the output frontier once and returns what is emitted. A
conformance case settles after every signal, the decider once per epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict

from tidegate.jobs.spec.event_time_options import CoalesceOptions, FrontierOptions, WallClockOptions
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MAX, TICK_MIN, saturate_ticks

from .decision_types import MemberStatus
from .errors import FRONTIER_REGRESSED, SIGNAL_AFTER_END

ACTIVE: Final = MemberStatus.ACTIVE.value
IDLE: Final = MemberStatus.IDLE.value
DONE: Final = MemberStatus.DONE.value

Signal = tuple[str, int | str]
"""``("watermark", F)`` or ``("status", "idle")``: what a coalescer emits."""


class InputState(TypedDict):
    """What is known of one input. Replaced, never changed in place: states share unchanged inputs.

    A typed dict, not a class: there may be ten thousand, and they go to JSON and back in every
    epoch.
    """

    frontier: int | None
    status: str
    aligned: bool


@dataclass(slots=True)
class Coalescer:
    """Joins the frontiers of its inputs by the options of one level.

    Attributes:
        options: see `CoalesceOptions`.
        regress: whether a frontier that does not grow is ignored or an error.
        inputs: the members by name.
        value: the output frontier F; TICK_MIN: none yet.
        status: the status emitted last.
        joined: whether there has been a member.
    """

    options: CoalesceOptions
    regress: Literal["ignore", "error"] = "ignore"
    inputs: dict[str, InputState] = field(default_factory=dict)
    value: int = TICK_MIN
    status: str = ACTIVE
    joined: bool = False

    @classmethod
    def from_dict(cls, options: CoalesceOptions, data: JsonObject) -> Coalescer:
        """Read the form of `to_dict`, with `regress` ``ignore``; signals do not change the dict."""
        return cls(
            options, "ignore", dict(data["inputs"]), data["value"], data["status"], data["joined"]
        )

    def to_dict(self) -> JsonObject:
        """Return the JSON-ready state; it shares `inputs` with this object."""
        return {
            "inputs": self.inputs,
            "value": self.value,
            "status": self.status,
            "joined": self.joined,
        }

    def join(self, name: str) -> None:
        """Add a member, with F as its frontier or without one (option `joins`).

        Without one it holds F.
        """
        start = self.value if self.options.joins == "at_F" and self.value > TICK_MIN else None
        self.inputs[name] = {"frontier": start, "status": ACTIVE, "aligned": True}
        self.joined = True

    def remove(self, name: str) -> bool:
        """Remove a member; return whether it was one.

        The next `settle` computes F without it; F never falls.
        """
        return self.inputs.pop(name, None) is not None

    def signal_frontier(self, name: str, value: int) -> None:
        """Record a member's frontier; one that does not grow is ignored.

        An idle member becomes active; with ``on_idle_punctuation: ignore`` nothing changes.

        Raises:
            PoisonError: the member is done, or the frontier does not grow and `regress` is
                ``error``.
        """
        known = self.inputs[name]
        if known["status"] != ACTIVE:
            known = self._require_not_done(name, "a frontier")
            if self.options.on_idle_punctuation == "ignore":
                return
            known = self._revive_input(known)
        before = known["frontier"]
        if before is not None and value <= before:
            if self.regress == "error":
                raise FRONTIER_REGRESSED(member=name, value=value, before=before)
            value = before
        aligned = known["aligned"] or value >= self.value
        self.inputs[name] = {"frontier": value, "status": ACTIVE, "aligned": aligned}

    def signal_active(self, name: str) -> None:
        """Record that a member has data again.

        If it is behind F, it is left out of F until it has caught up, unless `revived` is
        ``freeze``.

        Raises:
            PoisonError: the member is done.
        """
        known = self._require_not_done(name, "activity")
        if known["status"] == IDLE:
            self.inputs[name] = self._revive_input(known)

    def signal_idle(self, name: str) -> None:
        """Record that a member is idle; it no longer counts for F.

        Repeated signals change nothing.

        Raises:
            PoisonError: the member is done.
        """
        known = self._require_not_done(name, "an idle signal")
        if known["status"] != IDLE:
            self.inputs[name] = {**known, "status": IDLE, "aligned": False}

    def signal_done(self, name: str) -> None:
        """Record that a member has ended; it leaves F.

        Its last frontier still counts when all other members become idle (option `all_idle`).

        Raises:
            PoisonError: the member is done already.
        """
        known = self._require_not_done(name, "a second end")
        self.inputs[name] = {**known, "status": DONE, "aligned": False}

    def _require_not_done(self, name: str, what: str) -> InputState:
        known = self.inputs[name]
        if known["status"] == DONE:
            duplicate = "duplicate" if what == "a second end" else "not monotonically increasing"
            raise SIGNAL_AFTER_END(member=name, signal=what, detail=duplicate)
        return known

    def _revive_input(self, known: InputState) -> InputState:
        # Without a frontier it is behind every F, but not behind none.
        frontier = TICK_MIN if known["frontier"] is None else known["frontier"]
        aligned = frontier >= self.value or self.options.revived == "freeze"
        return {**known, "status": ACTIVE, "aligned": aligned}

    def raise_frontier(self, name: str, value: int) -> None:
        """Raise the frontier of a member that did not send one, as a lower level passes it on.

        An idle member stays idle.
        """
        known = self.inputs[name]
        if known["frontier"] is None or value > known["frontier"]:
            self.inputs[name] = {**known, "frontier": value}

    def combine_frontiers(
        self, instead: Mapping[str, int | None] | None = None, *, catching_up: bool = False
    ) -> int | None:
        """Coalesce the frontiers of the active, aligned members; None while F has to hold.

        Args:
            instead: frontiers to use in place of some members' own.
            catching_up: include active members that are not aligned yet.
        """
        included = {
            n: i["frontier"]
            for n, i in self.inputs.items()
            if i["status"] == ACTIVE and (i["aligned"] or catching_up)
        }
        if instead:
            included = {n: instead.get(n, frontier) for n, frontier in included.items()}
        known = [frontier for frontier in included.values() if frontier is not None]
        # The greatest needs one member only; the least needs all, because a member without a
        # frontier may still send any time.
        if self.options.coalesce == "max":
            return max(known, default=None)
        return min(known, default=None) if len(known) == len(included) else None

    def settle(self, at_least: int = TICK_MIN) -> list[Signal]:
        """Recompute F and the status.

        Return what is emitted: F if it grew, then the status if it changed.

        Args:
            at_least: F is raised to this, because a residence expired by the recorded wall clock.
        """
        before = self.value, self.status
        self.status, candidate = self._next_status_and_frontier()
        # A frontier is a promise about rows to come, so it is never taken back.
        self.value = max(self.value, at_least, TICK_MIN if candidate is None else candidate)
        signals: list[Signal] = []
        if self.value != before[0]:
            signals.append(("watermark", self.value))
        if self.status != before[1]:
            signals.append(("status", self.status))
        return signals

    def _next_status_and_frontier(self) -> tuple[str, int | None]:
        if any(i["status"] == ACTIVE for i in self.inputs.values()):
            return ACTIVE, self.combine_frontiers()
        statuses = {i["status"] for i in self.inputs.values()}
        # Idle members may come back, ended ones cannot: one idle member keeps the output from being
        # done.
        if IDLE in statuses:
            return IDLE, self.latest_time_frontier() if self.options.all_idle == "jump" else None
        if DONE in statuses:
            return DONE, TICK_MAX if self.options.all_done == "infinity" else None
        silent = self.options.no_members == "silent" and not self.joined
        return (self.status if silent else IDLE), None

    def latest_time_frontier(self) -> int | None:
        """Return the largest frontier of all members below +inf; None if no member has one."""
        return max(
            (f for i in self.inputs.values() if (f := i["frontier"]) is not None and f < TICK_MAX),
            default=None,
        )


# One member's frontier: no further row of the member has an event time below it (semantics.md
# section 1).
#
# All functions return exclusive frontiers; an inclusive declaration (``<= T``) is shifted by one
# tick here and nowhere else. Sums saturate at the int64 ends.


def compute_frontier_lag(options: FrontierOptions) -> int | None:
    """Return how many ticks the heuristic frontier is below the newest row; None without a lag.

    That is the lag, one tick less if the frontier is inclusive.
    """
    if options.lag is None:
        return None
    # "No row at or below T" is the same as "no row below T + 1".
    return options.lag - (options.frontier == "inclusive")


def compute_heuristic_frontier(seen: int | None, distance: int | None) -> int | None:
    """Return ``seen - distance``; None without a lag or before the first row.

    >>> compute_heuristic_frontier(10, 3), compute_heuristic_frontier(10, -1)
    (7, 11)
    """
    if seen is None or distance is None:
        return None
    return saturate_ticks(seen - distance)


def compute_wall_clock_frontier(
    options: WallClockOptions, now: int, newest: int | None, *, inclusive: bool
) -> int | None:
    """Return ``now - lag`` by the recorded wall clock.

    With a cap it is never above the largest time read in the epoch.

    Args:
        options: lag and cap.
        now: the recorded wall clock of the epoch.
        newest: largest event time read in this epoch; None without rows, and then a capped frontier
            does not move.
        inclusive: shift by one tick.
    """
    if options.cap and newest is None:
        return None
    frontier = now - options.lag + inclusive
    return saturate_ticks(min(frontier, newest) if options.cap and newest is not None else frontier)


def round_to_frame(frontier: int | None, frame: int | None) -> int | None:
    """Round a frontier down to a multiple of the frame, as it is emitted.

    A frame of 0 emits none; +inf stays.

    >>> round_to_frame(-1, 10), round_to_frame(17, 10), round_to_frame(17, 0)
    (-10, 10, None)
    >>> round_to_frame(TICK_MAX, 10) == round_to_frame(TICK_MAX, 0) == TICK_MAX
    True
    """
    if frontier is None or frame is None or frontier >= TICK_MAX:
        return frontier
    if frame == 0:
        return None
    return saturate_ticks(frontier // frame * frame)


def max_frontier(one: int | None, other: int | None) -> int | None:
    """Return the greater of the frontiers that are not None.

    >>> max_frontier(None, 3), max_frontier(3, 1), max_frontier(None, None)
    (3, 3, None)
    """
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
