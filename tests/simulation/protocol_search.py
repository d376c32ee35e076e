"""A search over the steps of the protocol: everything that its conditions allow, in every order.

There is one table, "w", and every epoch has one file with a row for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from tests.simulation.explorer import Explored, explore
from tests.simulation.protocol_steps import Claim, Protocol, Record, Slot, UntakeableError


class Scene(NamedTuple):
    """How far a search goes, and what it is about; each scene leaves something out.

    Attributes:
        slot: newest number of an epoch.
        timeline: newest timeline.
        rivals: two attempts at a slot, one of which sleeps.
        pins: a person pins the oldest checkpoint and unpins it.
        deletes: files are deleted.
        readers: the pointer moves by itself; otherwise with the table.
    """

    slot: int
    timeline: int
    rivals: bool = False
    pins: bool = False
    deletes: bool = False
    readers: bool = False


QUICK = (Scene(2, 1, deletes=True, readers=True), Scene(2, 1, pins=True))
WHOLE = (*QUICK, Scene(2, 1, rivals=True, deletes=True), Scene(3, 1), Scene(2, 2))


def start(without: frozenset[str] = frozenset()) -> Protocol:
    """Slots 1 and 2 are sealed, slot 1 is published."""
    found = Protocol(without=without)
    for number in (1, 2):
        slot, name = (0, number), f"0.{number}"
        found = found.write((*slot, name)).seal(slot, _epoch(found, slot, name))
    found = found.follow("w", (0, 1), found.rows_at("w", (0, 1)))
    return found.publish((0, 1), found.tables)


def list_next(now: Protocol, scene: Scene) -> Iterator[Protocol]:
    """Yield what comes after each step that the conditions allow."""
    for step in _possible_steps(now, scene):
        try:
            after = now.take(step)
            if step[0] == "follow" and not scene.readers:
                after = after.publish(step[2], after.tables)
        except UntakeableError:
            continue
        yield after


def _possible_steps(now: Protocol, scene: Scene) -> Iterator[tuple[Any, ...]]:
    """Steps that a process may want to take; the conditions decide about most of them."""
    yield from _steps_of_log(now, scene)
    yield from _steps_of_roots(now, scene)
    for file in now.files if scene.deletes else ():
        yield "delete", file, file[:2], file[2]
    there = now.tables["w"]
    for timeline in now.bases:
        for slot in range(now.newest(timeline) + 2):
            mark = (timeline, slot)
            yield "follow", "w", mark, now.rows_at("w", mark)
            if slot == there.mark[1] + 1:  # a publisher that has judged an older version
                newest = now.sealed.get(now.home(*mark))
                files = frozenset(f for _, f in newest.rows) if newest else frozenset()
                yield "follow", "w", mark, there.files | files
            if scene.readers:
                yield "publish", mark, now.tables


def _steps_of_log(now: Protocol, scene: Scene) -> Iterator[tuple[Any, ...]]:
    for timeline in now.bases:
        newest = now.newest(timeline)
        for number in range(max(1, newest), newest + 2):
            slot = (timeline, number)
            names = (f"{timeline}.{number}", f"{timeline}.{number}'")[: 1 + scene.rivals]
            ended = timeline < now.timeline
            for name in names if number <= scene.slot + 2 * ended else ():
                if (*slot, name) in now.written:
                    yield from _seals_of(now, slot, name)
                elif slot not in now.slots:
                    yield "write", (*slot, name)
            yield from _restores_at(now, slot, scene)


def _seals_of(now: Protocol, slot: Slot, name: str) -> Iterator[tuple[Any, ...]]:
    """An attempt, also one that judged an older head or carries too much."""
    epoch = _epoch(now, slot, name)
    yield "seal", slot, epoch
    yield "seal", slot, epoch._replace(parent="older")
    yield "seal", slot, epoch._replace(files=epoch.files | {(0, 1, "0.1")})


def _restores_at(now: Protocol, slot: Slot, scene: Scene) -> Iterator[tuple[Any, ...]]:
    if now.timeline < scene.timeline:
        name = f"fork of {slot}"
        record = Record("fork", name, name, _hash_before(now, slot))
        yield "fork", slot, record, now.timeline + 1, 0, None
        for target, epoch in now.sealed.items():
            yield "fork", slot, record, now.timeline + 1, target[1], epoch.name


def _epoch(now: Protocol, slot: Slot, name: str) -> Record:
    """An attempt at a slot: a file of its own, and the one that its parent wrote."""
    own, parent = (*slot, name), now.sealed.get(now.home(slot[0], slot[1] - 1))
    carried = {file for file in parent.files if file[2] == parent.name} if parent else set()
    rows = frozenset({("w", own)})
    return Record("epoch", name, name, _hash_before(now, slot), frozenset({own, *carried}), rows)


def _hash_before(now: Protocol, slot: Slot) -> str | None:
    before = now.slots.get((slot[0], slot[1] - 1))
    return before.sha if before else now.opened[slot[0]]


def _steps_of_roots(now: Protocol, scene: Scene) -> Iterator[tuple[Any, ...]]:
    following = (now.timeline, now.newest(now.timeline) + 1)
    for slot, epoch in now.sealed.items():
        name, kind = epoch.name, now.slots[slot].kind
        if not now.claims and now.timeline < scene.timeline:
            yield "protect", frozenset({Claim(name, following)}), now.pins, now.retiring
        if kind == "epoch":
            yield "retire", slot, epoch.sha
            if not now.retiring:
                yield "protect", now.claims, now.pins, frozenset({name})
        if name in now.retiring:
            yield "protect", now.claims, now.pins, now.retiring - {name}
    if now.claims:
        yield "protect", frozenset(), now.pins, now.retiring
    if scene.pins:
        yield "protect", now.claims, now.pins ^ {"0.1"}, now.retiring


def find_loss(now: Protocol) -> str | None:
    """What must hold whatever was done, and by whom."""
    head = now.head()
    if head[1] and (now.slots[head].kind != "epoch" or now.slots[head].name in now.retiring):
        return "the head was retired"
    for slot, record in now.slots.items():
        spared = record.kind != "epoch" or record.name in now.retiring
        if not spared and not record.files <= now.files:
            return f"{slot} lost {set(record.files - now.files)}"
    table = now.tables["w"]
    if table.files != now.rows_at("w", table.mark):
        return f"the table at {table.mark} holds {set(table.files)}"
    if not table.files | now.shown <= now.files:
        return "a table or a reader lacks a file"
    if now.shown != now.rows_at("w", now.pointer):
        return f"readers at {now.pointer} see {set(now.shown)}"
    done = min(table.mark[1], now.shared(table.mark[0], now.timeline))
    for slot in now.needed_by((now.timeline, done)):
        record = now.slots[slot]
        if record.kind == "stub" or (record.kind == "epoch" and not record.files <= now.files):
            return f"the table cannot be brought to the head: {slot}"
    return _find_broken_chain(now)


def _find_broken_chain(now: Protocol) -> str | None:
    for timeline in now.bases:
        sha = now.opened[timeline]
        for number in range(now.bases[timeline][1] + 1, now.newest(timeline) + 1):
            record = now.slots[timeline, number]
            last = number == now.newest(timeline)
            if record.parent != sha or (record.kind == "fork") > last:
                return f"the chain breaks at {(timeline, number)}"
            sha = record.sha
    for slot, record in now.sealed.items():
        if now.slots[slot].name != record.name:
            return f"{slot} changed"
    return None


def find_wrong_step(before: Protocol, after: Protocol) -> str | None:
    """What no step may do."""
    for slot, record in before.slots.items():
        now = after.slots[slot]
        if (now.name, now.sha) != (record.name, record.sha):
            return f"{slot} changed"
        if record.kind == "epoch" and now.kind == "stub" and record.name in before.pins:
            return f"{record.name} was retired although it is pinned"
    if after.tables["w"].mark[0] < before.tables["w"].mark[0] or after.pointer < before.pointer:
        return "what a restore took back came again"
    return None


def search_all_steps(
    scenes: tuple[Scene, ...] = WHOLE, without: frozenset[str] = frozenset()
) -> Explored:
    """Take every step in every order, scene by scene; stop at the first loss."""
    states = 0
    for scene in scenes:
        after = partial(list_next, scene=scene)
        found = explore(start(without), after, find_loss, find_wrong_step)
        states += found.states
        if found.violation:
            return Explored(states, found.violation)
    return Explored(states, None)
