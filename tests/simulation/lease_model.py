"""The lease as an explicit-state model.

Two drivers, a clock that ticks whenever it likes, requests that arrive whenever they do.

A driver watches the record, takes it when it has stood unchanged for longer than its lifetime, and
renews it. A process may sleep between any two steps, and between sending a request and its effect.
What must hold: no one believes to hold the lease while someone else does, and the token grows with
every taking. That a sleeper wins a slot all the same is the other models' business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from tests.simulation.explorer import Explored, explore

TTL = 2  # ticks
LAST = 6  # the clock stops here
SKEW = (0, 3)  # what the two hosts' clocks say beside the time


@dataclass(frozen=True)
class Mends:
    """What keeps two drivers apart, each taken out once by the mutation check."""

    swapped: bool = (
        True  # the record is written on the condition that it is the one that was judged
    )
    counted_from_sending: bool = (
        True  # a holder counts its lifetime from before it sent the request
    )
    own_clock: bool = (
        True  # an observer times an unchanged record by its own clock, and trusts no time in it
    )
    fresh_nonce: bool = True  # a renewal looks different from the record before it


class Record(NamedTuple):
    """`lease.json`; `version` is its ETag, `stamp` what the writer's clock said (no one should look
    at it).
    """

    version: int = 0
    holder: int = -1
    token: int = 0
    stamp: int = 0


class Driver(NamedTuple):
    """The step that a driver has reached.

    Attributes:
        seen, since: the version it saw last, and when it saw it first.
        sent: when it sent the request that is under way.
        known, until: the version it wrote, and until when it believes to hold the lease.
    """

    at: str = "watch"
    seen: int = -1
    since: int = 0
    sent: int = 0
    known: int = -1
    until: int = -1


class State(NamedTuple):
    """Everything."""

    now: int
    record: Record
    drivers: tuple[Driver, ...]


class Model:
    """The steps of both drivers and of the clock under a set of mends."""

    def __init__(self, mends: Mends) -> None:
        self.mends = mends

    def successors(self, state: State) -> Iterator[State]:
        """All states one atomic step away."""
        if state.now < LAST:
            yield state._replace(now=state.now + 1)
        for number, driver in enumerate(state.drivers):
            for record, after in getattr(self, f"_{driver.at}")(state, number, driver):
                drivers = (*state.drivers[:number], after, *state.drivers[number + 1 :])
                yield state._replace(record=record, drivers=drivers)

    def _watch(self, state: State, number: int, driver: Driver) -> Iterator[tuple[Record, Driver]]:
        """Look; take what is free, or has been silent for longer than it lives."""
        record, now = state.record, state.now
        if record.version != driver.seen:
            driver = driver._replace(seen=record.version, since=now)
        silent = now - driver.since if self.mends.own_clock else now + SKEW[number] - record.stamp
        at = "take" if record.holder == -1 or silent > TTL else "watch"
        yield record, driver._replace(at=at, sent=now)

    def _take(self, state: State, number: int, driver: Driver) -> Iterator[tuple[Record, Driver]]:
        """The request arrives."""
        if state.record.version != driver.seen and self.mends.swapped:
            yield state.record, Driver(seen=driver.seen, since=driver.since)
            return
        token = state.record.token + 1 if self.mends.swapped else driver.seen + 1
        record = Record(state.record.version + 1, number, token, state.now + SKEW[number])
        yield record, driver._replace(at="answer", known=record.version)

    def _answer(self, state: State, number: int, driver: Driver) -> Iterator[tuple[Record, Driver]]:
        """The answer arrives, or the record is read back and found to be mine."""
        begun = driver.sent if self.mends.counted_from_sending else state.now
        yield state.record, driver._replace(at="hold", until=begun + TTL)

    def _hold(self, state: State, number: int, driver: Driver) -> Iterator[tuple[Record, Driver]]:
        """Send a renewal, one a tick at most, also when the time is over.

        Whoever took the record meanwhile refuses it.
        """
        if state.now > driver.sent:
            yield state.record, driver._replace(at="renew", sent=state.now)

    def _renew(self, state: State, number: int, driver: Driver) -> Iterator[tuple[Record, Driver]]:
        """The renewal arrives."""
        if state.record.version != driver.known and self.mends.swapped:
            yield state.record, Driver()
            return
        version = state.record.version + self.mends.fresh_nonce
        record = Record(version, number, state.record.token, state.now + SKEW[number])
        yield record, driver._replace(at="answer", known=version)


def wrong_state(state: State) -> str | None:
    """At most one driver believes that the lease is its own."""
    holding = [n for n, driver in enumerate(state.drivers) if driver.until > state.now]
    return f"both hold the lease at {state.now}" if len(holding) > 1 else None


def wrong_step(before: State, after: State) -> str | None:
    """The token grows when the holder changes, and never falls."""
    left, right = before.record, after.record
    if right.token < left.token or (right.holder != left.holder and right.token == left.token):
        return f"the token went from {left.token} to {right.token}"
    return None


def check(mends: Mends) -> Explored:
    """Explore all interleavings; stop at the first violation."""
    return explore(
        State(0, Record(), (Driver(), Driver())), Model(mends).successors, wrong_state, wrong_step
    )


def mutants() -> Iterator[tuple[str, Mends]]:
    """Each mend taken out once."""
    for field in fields(Mends):
        yield field.name, replace(Mends(), **{field.name: False})


if __name__ == "__main__":
    print("all mends:", check(Mends()))  # noqa: T201
    for name, mends in mutants():
        print(f"without {name}:", check(mends), file=sys.stdout)  # noqa: T201
