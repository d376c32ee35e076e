"""Whatever is merged.

The streams are those of a run in which the rows had come in time, and nothing before them moved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.stream_model import Attachment, MergeMode, World, pipe
from tidegate.jobs.streams.stream_rows import Event

ROOT, STREAMS = "root", ("root", "a", "b", "c")
Operation = tuple[str, Any]


def running(state: int, event: Event, index: int) -> tuple[int, list[Mapping[str, int]]]:
    """Sensitive to order, to the index and to every row: dispatches none, one or two rows."""
    after = state * 3 + event["v"] + index
    return after % 1009, [{"v": after % 97 + n} for n in range(after % 3)]


def totals(state: int, event: Event, index: int) -> tuple[int, list[Mapping[str, int]]]:
    """Per key."""
    return state + event["v"], [{"v": state + index + event["v"]}]


def attachment(
    name: str, origin: str, to: str, kind: str, inherit: bool, merge: MergeMode
) -> Attachment:
    """One of three kinds."""
    if kind == "pipe":
        return pipe(
            name,
            origin,
            to,
            positions=(1, 9),
            where=lambda v: v["v"] % 4 != 0,
            inherit=inherit,
            merge=merge,
        )
    if kind == "keyed":
        return Attachment(name, origin, (to,), totals, 0, inherit, merge, key=lambda v: v["v"] % 3)
    return Attachment(name, origin, (to,), running, 0, inherit, merge)


def attachments(edges: list[Any]) -> list[Attachment]:
    """One for every edge of the strategy."""
    return [attachment(f"n{i}", edge[0], edge[1], *rest) for i, (edge, *rest) in enumerate(edges)]


graph = st.lists(
    st.tuples(
        st.sampled_from([("root", "a"), ("a", "b"), ("root", "b"), ("a", "c"), ("b", "c")]),
        st.sampled_from(["reducer", "keyed", "pipe"]),
        st.booleans(),
        st.sampled_from(MergeMode),
    ),
    min_size=1,
    max_size=4,
)
stamps = st.lists(st.integers(0, 60), min_size=1, max_size=4)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), stamps),
        st.tuples(st.just("unstamped"), st.sampled_from(["root", "a"])),
        st.tuples(st.just("attach"), st.integers(0, 3)),
        st.tuples(st.just("detach"), st.integers(0, 3)),
        st.tuples(st.just("late"), st.tuples(st.sampled_from([ROOT, "a"]), stamps)),
        st.tuples(st.just("merge"), stamps),
        st.tuples(st.just("merge"), stamps),
        st.tuples(st.just("decide"), st.tuples(st.integers(0, 5), st.booleans())),
    ),
    min_size=4,
    max_size=12,
).map(
    lambda steps: [
        ("append", [5, 20, 35]),
        ("attach", 0),
        steps[0],
        ("attach", 1),
        *steps[1:],
        ("decide", (0, True)),
    ]
)


@dataclass
class Run:
    """A world and what was done to it, so that it can be done again."""

    attachments: list[Attachment]
    world: World = field(default_factory=World)
    script: list[Operation] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in STREAMS:
            self.world.stream(name, buffered=name == "c")
        self.note("nothing", ROOT)

    def note(self, what: str, argument: Any) -> None:
        """Do one thing, and write it down."""
        now = 10 * len(self.script)
        self.script.append((what, argument))
        world = self.world
        match what, argument:
            case "append", (stream, rows):
                world.append(
                    stream,
                    *(({"v": stamp}, stamp) for _, stamp in rows),
                    now=now,
                    ids=[i for i, _ in rows],
                )
            case "unstamped", stream:
                world.append(stream, {"v": now}, now=now, ids=[f"unstamped/{now}"])
            case "attach", number:
                world.attach(self.attachments[number], now)
            case "detach", number:
                world.detach(self.attachments[number].name)
            case "advance", frontier:
                world.advance(frontier, now)
            case "merge", request:
                world.merge(request, now)
            case _:
                world.append(ROOT, now=now)

    def take(self, number: int, operation: Operation) -> None:
        """An operation of the strategy; one that makes no sense now does nothing."""
        match operation:
            case "append", rows:
                self.note(
                    "append", (ROOT, [(f"{number}/{n}", stamp) for n, stamp in enumerate(rows)])
                )
                self.note("advance", max(rows))
            case "unstamped", stream:
                self.note("unstamped", stream)
            case "attach", which if (
                which < len(self.attachments)
                and self.attachments[which].name not in self.attached()
            ):
                self.note("attach", which)
            case "detach", which if (
                which < len(self.attachments) and self.attachments[which].name in self.attached()
            ):
                self.note("detach", which)
            case "late", (stream, rows):
                self.world.request(
                    f"late{number}",
                    stream,
                    [(f"late{number}/{n}", s, {"v": s}) for n, s in enumerate(sorted(rows))],
                )
            case "merge", rows:
                self.take(number, ("late", (ROOT, rows)))
                self.merge(f"late{number}")
            case "decide", (which, yes):
                self.decide(which, yes)
            case _:
                pass

    def attached(self) -> set[str]:
        """Names that were attached so far."""
        return {self.attachments[n].name for what, n in self.script if what == "attach"}

    def decide(self, which: int, yes: bool) -> None:
        """Merge or reject one open request."""
        waiting = sorted(r.id for r in self.world.requests.values() if r.state == "created")
        if not waiting:
            return
        chosen = waiting[which % len(waiting)]
        if yes:
            self.merge(chosen)
        else:
            self.world.reject(chosen)

    def merge(self, request: str) -> None:
        """Merge, and see that nothing before the insertion moved."""
        world, destination = self.world, self.world.requests[request].destination
        before = {name: world.rows(name) for name in STREAMS}
        states = {
            a.name: world.states(a.name)
            for a in self.attachments
            if a.name in self.attached() and a.origin == destination
        }
        first = min((a.stamp or 0 for a in world.requests[request].rows), default=10**9)
        kept = sum(row.time <= first for row in before[destination])
        self.note("merge", request)
        assert world.rows(destination)[:kept] == before[destination][:kept]
        for name, known in states.items():
            assert world.states(name)[: kept + 1] == known[: kept + 1]
        for name in STREAMS:
            rows = world.rows(name)
            assert [row.position for row in rows] == list(range(len(rows)))
            assert [row.time for row in rows] == sorted(row.time for row in rows)


def seen(world: World) -> dict[str, Any]:
    """What a reader sees of all streams."""
    return {
        name: [(r.id, r.position, r.time, r.value) for r in world.rows(name)] for name in STREAMS
    }


def in_time(run: Run) -> World:
    """The same script, but the root's rows come in their final order, merged ones in the turn of
    the row before them.
    """
    again = Run(run.attachments)
    rows = run.world.rows(ROOT)
    roots = {r.id for r in run.world.requests.values() if r.destination == ROOT}
    for turn in range(len(run.script)):
        batch = [row for row in rows if max(row.turn, 1) == turn + 1]
        what, argument = run.script[turn]
        rewritten = what in ("append", "nothing") or (what, argument) == ("unstamped", ROOT)
        if turn == 0:
            again.world = World()
            for name in STREAMS:
                again.world.stream(name, buffered=name == "c")
            again.script.clear()
        if rewritten or (what == "merge" and argument in roots):
            assert rewritten or not batch
            again.world.append(
                ROOT,
                *((row.value, row.time) for row in batch),
                now=10 * turn,
                ids=[row.id for row in batch],
            )
            again.script.append(("nothing", ROOT))
            continue
        assert not batch
        if what == "merge" and argument not in again.world.requests:
            request = run.world.requests[argument]
            again.world.request(
                argument, request.destination, [(a.id, a.stamp or 0, a.value) for a in request.rows]
            )
        again.note(what, argument)
    return again.world


@given(graph, operations)
@settings(max_examples=60, deadline=None)
def test_merged_is_as_if_in_time(edges: list[Any], steps: list[Operation]) -> None:
    """All streams, their positions, stamps, identities and values equal those of the run without
    late rows.
    """
    run = Run(attachments(edges))
    for number, step in enumerate(steps):
        run.take(number, step)
    assert seen(in_time(run)) == seen(run.world)


@given(graph, operations)
@settings(max_examples=20, deadline=None)
def test_order_of_every_writer_is_kept(edges: list[Any], steps: list[Operation]) -> None:
    """What a writer appended to a destination is there in the order of its origin, merged rows
    by their stamps.
    """
    run = Run(attachments(edges))
    for number, step in enumerate(steps):
        run.take(number, step)
    before = copy.deepcopy(seen(run.world))
    for spec in run.attachments:
        if spec.name not in run.attached() or spec.merge is MergeMode.SPLICE or spec.to[0] == "c":
            continue
        places = {row.id: row.position for row in run.world.rows(spec.origin)}
        sent = [
            r.origin
            for r in run.world.rows(spec.to[0])
            if r.origin is not None and r.origin.attachment == spec.name
        ]
        order = [(places[origin.row_id], origin.nth) for origin in sent]
        assert order == sorted(order)
    assert seen(run.world) == before
