"""Retention beside a driver and a restore, as an explicit-state model of `checkpoints/retention.py`
and `roots.py`.

Slots 1 and 2 of timeline 0 are sealed at the start; slot 2 still uses the file of slot 1. The
driver writes a file and then seals it, carrying its parent's file along. The restorer claims slot 1
and forks. The collector retires everything but the head, which is more than any policy would, and
sweeps at once, without grace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from tests.simulation.explorer import Explored, explore

Slot = tuple[int, int]  # timeline, number
File = tuple[int, int, int]  # timeline, number, owner
NO_FILES: frozenset[File] = frozenset()
TARGET: Slot = (0, 1)
CASTS = (
    ("driver", "restorer", "collector"),
    ("restorer", "collector", "collector"),
    ("driver", "driver", "collector"),
)


@dataclass(frozen=True)
class Mends:
    """What keeps a needed file from being deleted, each taken out once by the mutation check."""

    claim_before_fork: bool = True
    condemn_by_cas: bool = True  # on the version of roots.json the decision was based on
    claims_before_head: bool = True  # void claims are judged first, the head is read afterwards
    claims_end_with_their_slot: bool = True  # and not when someone thinks they are old
    look_after_claim: bool = (
        True  # whether the target is a stub is looked at after the claim, not before
    )
    head_is_kept: bool = True
    bounds_before_mark: bool = True
    undecided_is_spared: bool = True  # only attempts of slots at or below the bound are swept


class Epoch(NamedTuple):
    """What fills a slot: an epoch with its files, its stub, or a fork to a target."""

    kind: str
    owner: int
    files: frozenset[File] = NO_FILES
    target: Slot | None = None


class Roots(NamedTuple):
    """roots.json."""

    revision: int = 0
    condemned: frozenset[Slot] = frozenset()
    claims: frozenset[tuple[Slot, Slot]] = frozenset()  # target, slot the fork goes into


class Process(NamedTuple):
    """The position of a process and what it remembers."""

    kind: str
    at: str = "load"
    memory: Any = None


class State(NamedTuple):
    """Everything."""

    log: frozenset[tuple[Slot, Epoch]]
    files: frozenset[File]
    roots: Roots
    processes: tuple[Process, ...]


def head(state: State) -> tuple[int, Slot, Slot]:
    """Current timeline, the newest slot on its lineage, and the next slot to fill."""
    log, timeline, base = dict(state.log), 0, TARGET
    while True:
        own = sorted(slot for slot in log if slot[0] == timeline)
        if not own:
            return timeline, base, (timeline, base[1] + 1)
        record = log[own[-1]]
        if record.kind != "fork":
            return timeline, own[-1], (timeline, own[-1][1] + 1)
        assert record.target is not None
        timeline, base = timeline + 1, record.target


class Model:
    """The steps of all processes under a set of mends; drivers seal up to number `last`."""

    def __init__(self, mends: Mends, last: int = 4) -> None:
        self.mends, self.last = mends, last

    def successors(self, state: State) -> Iterator[State]:
        """All states one atomic step of one process away."""
        for number, process in enumerate(state.processes):
            for changed, at, memory in getattr(self, f"_{process.kind}_{process.at}", _nothing)(
                state, number, process.memory
            ):
                after = (
                    *state.processes[:number],
                    Process(process.kind, at, memory),
                    *state.processes[number + 1 :],
                )
                yield changed._replace(processes=after)

    def _driver_load(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        _, at, slot = head(state)
        carried = frozenset(f for f in dict(state.log)[at].files if f[:2] == at)
        if slot[1] <= self.last and dict(state.log)[at].kind == "epoch":
            yield state, "write", (slot, carried)

    def _driver_write(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        slot, carried = memory
        new: File = (*slot, number)
        yield state._replace(files=state.files | {new}), "seal", (slot, carried | {new})

    def _driver_seal(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        slot, files = memory
        log = (
            state.log
            if slot in dict(state.log)
            else state.log | {(slot, Epoch("epoch", number, files))}
        )
        yield state._replace(log=log), "load", None

    def _restorer_load(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        slot = head(state)[2]
        if not self.mends.look_after_claim and dict(state.log)[TARGET].kind == "stub":
            return
        yield state, "read" if self.mends.claim_before_fork else "look", (slot, None)

    def _restorer_read(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        if TARGET not in state.roots.condemned:
            yield state, "claim", (memory[0], state.roots.revision)

    def _restorer_claim(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        slot, revision = memory
        if state.roots.revision != revision:
            yield state, "read", (slot, None)
            return
        roots = state.roots._replace(
            revision=revision + 1, claims=state.roots.claims | {(TARGET, slot)}
        )
        yield (
            state._replace(roots=roots),
            "look" if self.mends.look_after_claim else "fork",
            (slot, None),
        )

    def _restorer_look(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        if dict(state.log)[TARGET].kind == "epoch":
            yield state, "fork", memory

    def _restorer_fork(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        slot = memory[0]
        log = (
            state.log
            if slot in dict(state.log)
            else state.log | {(slot, Epoch("fork", number, target=TARGET))}
        )
        yield state._replace(log=log), "end", None

    def _collector_load(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        """Read roots.json, and then, separately, the claims' slots and the head."""
        yield (
            state,
            "claims" if self.mends.claims_before_head else "head",
            (state.roots, None, None),
        )

    def _collector_claims(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        roots, _, seen = memory
        filled = dict(state.log)
        expired = not self.mends.claims_end_with_their_slot
        valid = frozenset(claim for claim in roots.claims if claim[1] not in filled and not expired)
        yield state, "head" if self.mends.claims_before_head else "condemn", (roots, valid, seen)

    def _collector_head(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        roots, valid, _ = memory
        kept = {head(state)[1]} if self.mends.head_is_kept else set()
        going = frozenset(
            slot for slot, epoch in state.log if epoch.kind == "epoch" and slot not in kept
        )
        yield state, "condemn" if self.mends.claims_before_head else "claims", (roots, valid, going)

    def _collector_condemn(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        roots, valid, going = memory
        if state.roots.revision != roots.revision:
            if self.mends.condemn_by_cas:
                yield state, "load", None
                return
            valid = valid | (
                state.roots.claims - roots.claims
            )  # mutant: merged without deciding again
        condemned = state.roots.condemned | (going - {claim[0] for claim in roots.claims & valid})
        after = Roots(state.roots.revision + 1, condemned, valid)
        yield state._replace(roots=after), "stub", tuple(sorted(condemned))

    def _collector_stub(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        """One slot at a time."""
        if not memory:
            yield state, "bounds" if self.mends.bounds_before_mark else "mark", (None, None)
            return
        log = frozenset((s, Epoch("stub", e.owner) if s == memory[0] else e) for s, e in state.log)
        yield state._replace(log=log), "stub", memory[1:]

    def _collector_bounds(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        more = 0 if self.mends.undecided_is_spared else 1
        timelines = {slot[0] for slot, _ in state.log}
        bounds = tuple(
            sorted(
                (t, more + max(slot[1] for slot, _ in state.log if slot[0] == t)) for t in timelines
            )
        )
        yield state, "mark" if self.mends.bounds_before_mark else "sweep", (bounds, memory[1])

    def _collector_mark(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        marked = frozenset(file for _, epoch in state.log for file in epoch.files)
        yield state, "sweep" if self.mends.bounds_before_mark else "bounds", (memory[0], marked)

    def _collector_sweep(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        """One file at a time, as the listing shows them."""
        bounds, marked = dict(memory[0]), memory[1]
        garbage = sorted(
            file for file in state.files if file not in marked and file[1] <= bounds.get(file[0], 0)
        )
        if not garbage:
            yield state, "acquit", None
        for file in garbage[:1]:
            yield state._replace(files=state.files - {file}), "sweep", memory

    def _collector_acquit(
        self, state: State, number: int, memory: Any
    ) -> Iterator[tuple[State, str, Any]]:
        stubs = {slot for slot, epoch in state.log if epoch.kind == "stub"}
        roots = state.roots._replace(
            revision=state.roots.revision + 1, condemned=state.roots.condemned - stubs
        )
        yield state._replace(roots=roots), "end", None


def wrong_state(state: State) -> str | None:
    """The head must be an epoch, and every epoch that is not condemned must have all its files."""
    log = dict(state.log)
    if log[head(state)[1]].kind != "epoch":
        return "the head was retired"
    for slot, epoch in state.log:
        if slot not in state.roots.condemned and not epoch.files <= state.files:
            return f"slot {slot} lost {sorted(epoch.files - state.files)}"
    return None


def check(mends: Mends) -> Explored:
    """Explore every cast; stop at the first violation."""
    states = 0
    one, two = (0, 1, 8), (0, 2, 9)
    log = frozenset(
        {
            ((0, 1), Epoch("epoch", 8, frozenset({one}))),
            ((0, 2), Epoch("epoch", 9, frozenset({one, two}))),
        }
    )
    for cast in CASTS:
        start = State(log, frozenset({one, two}), Roots(), tuple(Process(kind) for kind in cast))
        found = explore(start, Model(mends).successors, wrong_state, lambda before, after: None)
        states += found.states
        if found.violation:
            return Explored(states, found.violation)
    return Explored(states, None)


def mutants() -> Iterator[tuple[str, Mends]]:
    """Each mend taken out once."""
    for field in fields(Mends):
        yield field.name, replace(Mends(), **{field.name: False})


def _nothing(state: State, number: int, memory: Any) -> Iterator[tuple[State, str, Any]]:
    yield from ()


if __name__ == "__main__":
    print("all mends:", check(Mends()))  # noqa: T201
    for name, mends in mutants():
        print(f"without {name}:", check(mends), file=sys.stdout)  # noqa: T201
