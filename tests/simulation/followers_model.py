"""Several followers beside drivers, a restore, pins and retention, as an explicit-state model of
`sinks/slots.py` and its like.

Slots 1 and 2 of timeline 0 are sealed at the start. Each follower has a ledger of its own
(timeline, position) and its rows; a publisher reads the ledger, then the head, and applies or takes
back slot by slot. Any number of publishers may serve a follower, and each may sleep forever
between two steps. The model has no lease: what holds without one holds with one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from tests.simulation.explorer import Explored, explore

Slot = tuple[int, int]  # timeline, number
Mark = tuple[int, int]  # timeline, position on its lineage
TARGET = 1  # the slot that the restore goes back to and the pinner pins
CASTS = (
    ("driver", "restorer", "publisher0", "publisher0"),
    ("driver", "restorer", "publisher0", "publisher1", "collector"),
    ("restorer", "publisher0", "publisher1", "collector", "pinner"),
)


@dataclass(frozen=True)
class Mends:
    """What keeps followers right, each taken out once by the mutation check."""

    predecessor: bool = True  # a ledger moves only from where it was judged to be
    rewind_first: bool = (
        True  # what is on another timeline is taken back before anything is applied
    )
    ledger_before_head: bool = True  # so that no follower looks as if it were ahead of the log
    every_follower_published: bool = True  # retention asks all of them how far they are
    every_follower_rewound: bool = True  # and whether they have left abandoned timelines
    pins_as_they_are: bool = (
        True  # condemning looks at the pins of the moment, not at those it read before
    )
    look_after_pin: bool = True  # whether the slot was retired is looked at after pinning


class Follower(NamedTuple):
    """A ledger and the rows, which move together."""

    mark: Mark = (0, 1)
    rows: frozenset[Slot] = frozenset({(0, 1)})


class Process(NamedTuple):
    """The position of a process and what it remembers."""

    kind: str
    at: str = "load"
    memory: Any = None


class State(NamedTuple):
    """Everything."""

    log: frozenset[tuple[Slot, str]]  # slot -> epoch | stub | fork
    files: frozenset[Slot]
    followers: tuple[Follower, ...]
    pins: frozenset[Slot]
    condemned: frozenset[Slot]
    processes: tuple[Process, ...]


def fork_slot(state: State) -> int | None:
    """The number of the slot that ended timeline 0; None while it goes on."""
    return next((slot[1] for slot, kind in state.log if kind == "fork"), None)


def lineage(timeline: int, upto: int) -> list[Slot]:
    """The slots at positions 1 to `upto` on the lineage of a timeline."""
    return [(0 if n <= TARGET else timeline, n) for n in range(1, upto + 1)]


def head(state: State) -> Mark:
    """Current timeline and the newest position on it."""
    timeline = 0 if fork_slot(state) is None else 1
    own = [slot[1] for slot, kind in state.log if slot[0] == timeline and kind != "fork"]
    return timeline, max(own, default=TARGET)


class Model:
    """The steps of all processes under a set of mends; drivers seal up to number `last`."""

    def __init__(self, mends: Mends, last: int = 3) -> None:
        self.mends, self.last = mends, last

    def successors(self, state: State) -> Iterator[State]:
        """All states one atomic step of one process away."""
        for number, process in enumerate(state.processes):
            kind, follower = (
                process.kind.rstrip("01"),
                int(process.kind[-1]) if process.kind[-1].isdigit() else 0,
            )
            for changed, at, memory in getattr(self, f"_{kind}_{process.at}")(
                state, follower, process.memory
            ):
                after = (
                    *state.processes[:number],
                    Process(process.kind, at, memory),
                    *state.processes[number + 1 :],
                )
                yield changed._replace(processes=after)

    def _driver_load(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        timeline, slot = head(state)
        if slot < self.last:
            yield state, "seal", (timeline, slot + 1)

    def _driver_seal(self, state: State, _: int, slot: Slot) -> Iterator[tuple[State, str, Any]]:
        if slot in dict(state.log):
            yield state, "load", None
        else:
            yield (
                state._replace(log=state.log | {(slot, "epoch")}, files=state.files | {slot}),
                "load",
                None,
            )

    def _restorer_load(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        """Claim the target.

        Retirement and claims exclude each other by compare-and-swap (`gc_model` has that in steps).
        """
        if (0, TARGET) not in state.condemned and dict(state.log)[0, TARGET] == "epoch":
            yield state._replace(pins=state.pins | {(0, TARGET)}), "fork", (0, head(state)[1] + 1)

    def _restorer_fork(self, state: State, _: int, slot: Slot) -> Iterator[tuple[State, str, Any]]:
        log = state.log if slot in dict(state.log) else state.log | {(slot, "fork")}
        yield state._replace(log=log), "end", None

    def _restorer_end(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        yield from ()

    def _publisher_load(
        self, state: State, f: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        first = state.followers[f].mark if self.mends.ledger_before_head else head(state)
        yield state, "judge", first

    def _publisher_judge(
        self, state: State, f: int, first: Mark
    ) -> Iterator[tuple[State, str, Any]]:
        mark, now = (
            (first, head(state))
            if self.mends.ledger_before_head
            else (state.followers[f].mark, first)
        )
        if mark[0] > now[0] or (mark[0] == now[0] and mark[1] > now[1]):
            yield state, "fenced", None
        elif mark[0] != now[0] and self.mends.rewind_first:
            yield state, "rewind", (mark, (now[0], min(mark[1], TARGET)))
        elif mark[1] < now[1]:
            yield state, "read", (mark, (now[0], mark[1] + 1))

    def _publisher_rewind(
        self, state: State, f: int, memory: tuple[Mark, Mark]
    ) -> Iterator[tuple[State, str, Any]]:
        before, after = memory
        if state.followers[f].mark == before or not self.mends.predecessor:
            rows = frozenset(slot for slot in state.followers[f].rows if slot[1] <= after[1])
            state = self._moved(state, f, Follower(after, rows))
        yield state, "load", None

    def _publisher_read(
        self, state: State, f: int, memory: tuple[Mark, Mark]
    ) -> Iterator[tuple[State, str, Any]]:
        """Open the manifest and the files of the slot.

        What is gone does no harm if the ledger has moved on as well.
        """
        before, (timeline, number) = memory
        if lineage(timeline, number)[-1] in state.files:
            yield state, "apply", memory
        else:
            yield state, "load" if state.followers[f].mark != before else "starved", None

    def _publisher_apply(
        self, state: State, f: int, memory: tuple[Mark, Mark]
    ) -> Iterator[tuple[State, str, Any]]:
        before, after = memory
        if state.followers[f].mark == before or not self.mends.predecessor:
            rows = state.followers[f].rows | {lineage(*after)[-1]}
            state = self._moved(state, f, Follower(after, rows))
        yield state, "load", None

    def _publisher_fenced(
        self, state: State, _: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        yield from ()

    _publisher_starved = _publisher_fenced

    def _collector_load(
        self, state: State, _: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        """Read head, marks and pins.

        What is retired is behind every follower, or abandoned by every one of them.
        """
        timeline, slot = head(state)
        marks = [follower.mark for follower in state.followers]
        asked = marks if self.mends.every_follower_published else marks[:1]
        published = min(m[1] if m[0] == timeline else min(m[1], TARGET) for m in asked)
        left = all(
            m[0] == timeline for m in (marks if self.mends.every_follower_rewound else marks[:1])
        )
        on = set(lineage(timeline, slot))
        kept = {lineage(timeline, slot)[-1]}
        epochs = {s for s, kind in state.log if kind == "epoch"}
        yield (
            state,
            "condemn",
            (
                frozenset(s for s in epochs - kept if (s[1] <= published if s in on else left)),
                state.pins,
            ),
        )

    def _collector_condemn(
        self, state: State, _: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        wanted, pins = memory
        going = (
            wanted
            - (state.pins if self.mends.pins_as_they_are else pins)
            - {lineage(*head(state))[-1]}
        )
        yield state._replace(condemned=state.condemned | going), "stub", going

    def _collector_stub(
        self, state: State, _: int, going: frozenset[Slot]
    ) -> Iterator[tuple[State, str, Any]]:
        log = frozenset((slot, "stub" if slot in going else kind) for slot, kind in state.log)
        yield state._replace(log=log), "sweep", going

    def _collector_sweep(
        self, state: State, _: int, going: frozenset[Slot]
    ) -> Iterator[tuple[State, str, Any]]:
        yield (
            state._replace(files=state.files - going, condemned=state.condemned - going),
            "load",
            None,
        )

    def _pinner_load(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        if self.mends.look_after_pin or dict(state.log)[0, TARGET] == "epoch":
            yield state, "pin", None

    def _pinner_pin(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        if (0, TARGET) not in state.condemned:
            yield (
                state._replace(pins=state.pins | {(0, TARGET)}),
                "look" if self.mends.look_after_pin else "pinned",
                None,
            )

    def _pinner_look(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        if dict(state.log)[0, TARGET] == "epoch":
            yield state, "pinned", None
        else:
            yield state._replace(pins=state.pins - {(0, TARGET)}), "refused", None

    def _pinner_pinned(self, state: State, _: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
        yield from ()

    _pinner_refused = _pinner_pinned

    @staticmethod
    def _moved(state: State, f: int, follower: Follower) -> State:
        return state._replace(followers=(*state.followers[:f], follower, *state.followers[f + 1 :]))


def wrong_state(state: State) -> str | None:
    """Every follower holds exactly what its ledger says.

    No one is starved or fenced by mistake; a pin holds.
    """
    for follower in state.followers:
        if follower.rows != frozenset(lineage(*follower.mark)):
            return f"a follower at {follower.mark} holds {sorted(follower.rows)}"
    for process in state.processes:
        if process.at in ("starved", "fenced"):
            return f"a {process.kind} is {process.at}"
        if process.at == "pinned" and (
            (0, TARGET) not in state.files or dict(state.log)[0, TARGET] != "epoch"
        ):
            return "a pinned checkpoint was retired"
    return None


def check(mends: Mends) -> Explored:
    """Explore every cast; stop at the first violation."""
    states = 0
    sealed: frozenset[tuple[Slot, str]] = frozenset({((0, 1), "epoch"), ((0, 2), "epoch")})
    files: frozenset[Slot] = frozenset({(0, 1), (0, 2)})
    for cast in CASTS:
        followers = (Follower(), Follower())
        start = State(
            sealed,
            files,
            followers,
            frozenset(),
            frozenset(),
            tuple(Process(kind) for kind in cast),
        )
        found = explore(start, Model(mends).successors, wrong_state, lambda before, after: None)
        states += found.states
        if found.violation:
            return Explored(states, found.violation)
    return Explored(states, None)


def mutants() -> Iterator[tuple[str, Mends]]:
    """Each mend taken out once."""
    for field in fields(Mends):
        yield field.name, replace(Mends(), **{field.name: False})


if __name__ == "__main__":
    print("all mends:", check(Mends()))  # noqa: T201
    for name, mends in mutants():
        print(f"without {name}:", check(mends), file=sys.stdout)  # noqa: T201
