"""The log of slots and its followers as an explicit-state model.

Two drivers and a restorer, in every interleaving.

A follower models an Iceberg table or a SQL sink. It holds a mark (the last slot it applied),
rows, and a version that its commits compare; a rollback brings an old version back, which is the
ABA trap the fence snapshot is for. The lease is left out on purpose: a sleeper passed its check
long ago. Restores go back to slot 1 of timeline 0, which is sealed at the start.

Run by itself with more slots: `python tests/simulation/protocol_model.py 3`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

from tests.simulation.explorer import Explored, explore

FORK_POINT = 1
CASTS = (("driver", "driver", "restorer"), ("driver", "restorer", "restorer"))

Slot = tuple[int, int]  # timeline, number
Record = tuple[str, int]  # ("epoch", owner) or ("fork", new timeline)
Log = frozenset[tuple[Slot, Record]]


@dataclass(frozen=True)
class Mends:
    """What the protocol does against each known killer.

    The mutation check takes them out one by one.
    """

    conditional_seal: bool = True  # a slot is filled only while it is empty
    predecessor_check: bool = (
        True  # a follower applies a slot only after its predecessor on the lineage
    )
    no_blind_retry: bool = True  # a commit that met another version starts again from reading
    fork_marks_follower: bool = True  # a rewind leaves an empty fence behind
    fork_in_slot: bool = (
        True  # a restore is a record in the next slot, not a pointer beside the log
    )
    pair_retried: bool = True  # rollback and fence are repeated as a pair until both hold


class Follower(NamedTuple):
    """A table: what it applied last, its rows, and its version (fence, content)."""

    mark: Slot
    rows: tuple[Slot, ...]
    version: tuple[int, tuple[Slot, ...]]

    def apply(self, slot: Slot) -> Follower:
        """One more slot, in one commit."""
        return Follower(slot, (*self.rows, slot), (self.version[0], (*self.version[1], slot)))


class Process(NamedTuple):
    """A driver or a restorer: its position and what it remembers."""

    kind: str
    at: str
    timeline: int = 0
    number: int = 0
    seen: Follower | None = None


class State(NamedTuple):
    """Everything."""

    log: Log
    follower: Follower
    processes: tuple[Process, ...]


@cache
def head(log: Log) -> Slot:
    """The current timeline and its newest slot, by following forks from timeline 0."""
    timeline = 0
    while True:
        forks = [record[1] for slot, record in log if slot[0] == timeline and record[0] == "fork"]
        if not forks:
            return timeline, max((slot[1] for slot, _ in log if slot[0] == timeline), default=0)
        timeline = forks[0]


def inherited(timeline: int) -> tuple[Slot, ...]:
    """Rows a follower of a timeline holds from before the timeline itself."""
    return () if timeline == 0 else tuple((0, n) for n in range(1, FORK_POINT + 1))


class Model:
    """The processes' steps under a set of mends; drivers seal up to `last_slot`."""

    def __init__(self, mends: Mends, last_slot: int) -> None:
        self.mends, self.last_slot = mends, last_slot
        self._judged: dict[tuple[Log, Follower], str | None] = {}

    def successors(self, state: State) -> Iterator[State]:
        """All states one atomic step of one process away."""
        for number in range(len(state.processes)):
            after = self.step(state, number)
            if after is not None:
                yield after

    def step(self, state: State, number: int) -> State | None:
        """One step of one process; None when it is at its end."""
        process = state.processes[number]
        found = (
            getattr(self, f"_{process.at}")(state, process, number) if process.at != "end" else None
        )
        if found is None:
            return None
        changed, after = found
        processes = (*state.processes[:number], after, *state.processes[number + 1 :])
        return State(changed.log, changed.follower, processes)

    def _load(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """The head of the log as a process sees it. A restorer that sees no fork yet will make one."""
        timeline, slot = head(state.log)
        forked = any(record[0] == "fork" for _, record in state.log)
        to = "fork" if process.kind == "restorer" and not forked else "follow"
        return state, Process(process.kind, to, timeline, slot)

    def _fork(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """The restore is this one PUT."""
        again = Process(process.kind, "load")
        if process.number < FORK_POINT:
            return state, Process(process.kind, "end")
        record: Record = ("fork", 10 + number)
        if not self.mends.fork_in_slot:  # a pointer that can always be written
            rest = frozenset(
                e for e in state.log if not (e[0][0] == process.timeline and e[1][0] == "fork")
            )
            return state._replace(log=rest | {((process.timeline, 99), record)}), again
        slot = (process.timeline, process.number + 1)
        if slot in dict(state.log):
            return state, again
        return state._replace(log=state.log | {(slot, record)}), again

    def _follow(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """Bring the follower to this process's position: the reading half of one commit."""
        mark, timeline = state.follower.mark, process.timeline
        if mark[0] == timeline and mark[1] >= process.number:
            return state, process._replace(at="seal" if process.number < self.last_slot else "end")
        if self.mends.predecessor_check and mark[0] not in (timeline, 0):
            return state, process._replace(at="superseded")
        return state, process._replace(at="commit", seen=state.follower)

    def _superseded(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """The follower is outside my lineage: either I slept through a restore, or I am fenced."""
        return state, Process(
            process.kind, "load" if head(state.log)[0] != process.timeline else "end"
        )

    def _commit(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """The writing half: compare the version with the one read, or (mutant) re-base blindly."""
        seen, timeline = process.seen, process.timeline
        assert seen is not None
        again = process._replace(at="follow", seen=None)
        if state.follower.version != seen.version and self.mends.no_blind_retry:
            return state, again
        mark = seen.mark
        if mark[0] == timeline or (mark[0] == 0 and mark[1] < FORK_POINT):
            return state._replace(follower=state.follower.apply((mark[0], mark[1] + 1))), again
        back = inherited(timeline)
        rewound = Follower((0, FORK_POINT), back, (0, back))
        if not self.mends.fork_marks_follower:
            return state._replace(follower=rewound._replace(mark=(timeline, 0))), again
        return state._replace(follower=rewound), process._replace(at="fence", seen=rewound)

    def _fence(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """An empty commit after the rollback, which only this rewind could have made."""
        assert process.seen is not None
        again = process._replace(at="follow", seen=None)
        if state.follower.version != process.seen.version and self.mends.pair_retried:
            return state, again  # someone slipped in between: roll back again
        rows = state.follower.rows
        return (
            state._replace(
                follower=Follower((process.timeline, 0), rows, (process.timeline, rows))
            ),
            again,
        )

    def _seal(self, state: State, process: Process, number: int) -> tuple[State, Process]:
        """Fill the next slot, or read again after a 412."""
        slot = (process.timeline, process.number + 1)
        filled = slot in dict(state.log)
        if filled and self.mends.conditional_seal:
            return state, Process(process.kind, "load")
        log = frozenset(e for e in state.log if e[0] != slot) | {(slot, ("epoch", number))}
        after = (
            Process(process.kind, "load")
            if filled
            else process._replace(at="follow", number=process.number + 1)
        )
        return state._replace(log=log), after

    def wrong_state(self, state: State) -> str | None:
        """What a reader sees now, and what a fresh driver would make of it, at any place where a process sleeps."""
        key = (state.log, state.follower)
        if key not in self._judged:
            self._judged[key] = _wrong_rows(state) or self._wrong_after_recovery(state)
        return self._judged[key]

    def wrong_step(self, before: State, after: State) -> str | None:
        """What must never happen from one state to the next."""
        now = dict(after.log)
        if any(now.get(slot) != record for slot, record in before.log):
            return "a filled slot changed"
        if sum(record[0] == "fork" and slot[0] == 0 for slot, record in after.log) > 1:
            return "two restores won"
        if before.follower.mark[0] != 0 and after.follower.mark[0] == 0:
            return "an abandoned timeline came back into a follower"
        return None

    def _wrong_after_recovery(self, state: State) -> str | None:
        alone = State(state.log, state.follower, (Process("driver", "load"),))
        for _ in range(60):
            after = self.step(alone, 0) if alone.processes[0].at != "seal" else None
            if after is None:
                break
            alone = after
        timeline, newest = head(alone.log)
        epochs = {slot for slot, record in alone.log if record[0] == "epoch"}
        own = tuple((timeline, n) for n in range(1, newest + 1) if (timeline, n) in epochs)
        want = inherited(timeline) + own
        return (
            None
            if alone.follower.rows == want
            else f"after recovery the table holds {alone.follower.rows}, the log {want}"
        )


def _wrong_rows(state: State) -> str | None:
    """Rows must be those of a lineage, each slot once."""
    rows = state.follower.rows
    if len(rows) != len(set(rows)):
        return "a slot was applied twice"
    for timeline in {0} | {record[1] for _, record in state.log if record[0] == "fork"}:
        base = inherited(timeline)
        if rows == base + tuple((timeline, n) for n in range(1, len(rows) - len(base) + 1)):
            return None
    return f"rows of no lineage: {rows}"


def check(mends: Mends, last_slot: int = 2) -> Explored:
    """Explore every cast; stop at the first violation."""
    states = 0
    for cast in CASTS:
        first: Slot = (0, 1)
        follower = Follower(first, (first,), (0, (first,)))
        start = State(
            frozenset({(first, ("epoch", 9))}),
            follower,
            tuple(Process(kind, "load") for kind in cast),
        )
        model = Model(mends, last_slot)
        found = explore(start, model.successors, model.wrong_state, model.wrong_step)
        states += found.states
        if found.violation:
            return Explored(states, found.violation)
    return Explored(states, None)


def mutants() -> Iterator[tuple[str, Mends]]:
    """Each mend taken out once."""
    for field in fields(Mends):
        yield field.name, replace(Mends(), **{field.name: False})


if __name__ == "__main__":
    slots = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print("all mends:", check(Mends(), slots))  # noqa: T201
    for name, mends in mutants():
        print(f"without {name}:", check(mends, slots))  # noqa: T201
