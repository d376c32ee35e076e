"""The dispatcher on Arrow against the model, event by event.

The same streams, rejections, requests and states.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import stream_model
from tests.oracle.stream_model import MergeMode
from tests.streams.attachments import attachment, attachments, spec_of
from tests.streams.support import World

epochs = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=5),
        st.tuples(st.sampled_from(["attach", "detach"]), st.integers(0, 3)),
    ),
    min_size=2,
    max_size=8,
).map(lambda steps: [("attach", 0), steps[0], ("attach", 1), *steps[1:]])


def ranked(drawn: list[Any]) -> list[int]:
    """Attachments in the order of the spec: pipes first."""
    return sorted(range(len(drawn)), key=lambda n: (drawn[n][1] != "pipe", n))


def seen(world: World, name: str) -> list[Any]:
    """Position, stamp, identity and value of the rows of a stream table."""
    return [
        (r["position"], round(r["stream_time"].timestamp() * 1e6), r["_id"], r["v"])
        for r in world.rows(name)
    ]


@given(attachments, epochs)
@settings(max_examples=8, deadline=None)
def test_the_dispatcher_does_what_the_model_does(drawn: list[Any], steps: list[Any]) -> None:
    """Random graphs, epochs, attachments that come and go; drivers change in between."""
    world, reference = World(spec_of(drawn, 10**6)), stream_model.World()
    for name in ("events", "a", "b", "c"):
        reference.stream(name, buffered=name == "c")
    known: set[str] = set()
    second = 0
    for step in steps:
        if isinstance(step, list):
            rows = []
            for gap, value in step:
                second += gap
                rows.append((second, value))
            follow(world, reference, rows)
            continue
        verb, number = step
        name = f"n{number}"
        if number >= len(drawn) or (verb == "attach") == (name in known):
            continue
        known.add(name)
        world.epoch(ask=((verb, name),))
        if verb == "attach":
            reference.attach(attachment(number, drawn[number]), world.head().recorded_now)
        else:
            reference.detach(name)
        settle(world, reference)
        world.driver()
    for name in ("a", "b", "c"):
        assert seen(world, name) == [
            (r.position, r.time, r.id, r.value["v"]) for r in reference.rows(name)
        ]
    assert sorted((r["stream"], r["row_id"], r["via"]) for r in world.rows("rejections")) == sorted(
        (r.stream, r.row_id, r.attachment)
        for origin in ("events", "a", "b")
        for r in reference.rejections(origin)
    )
    for request in world.state().requests.values():
        assert request.rows == len(reference.requests[request.attachment].rows)


def follow(world: World, reference: stream_model.World, rows: list[tuple[float, int]]) -> None:
    """One epoch; the model gets the events it released, and the frontier it reached."""
    before = len(reference.rows("events"))
    world.epoch(*rows)
    head = world.head()
    events = sorted(world.bench.rows("events"), key=lambda r: r["position"])[before:]
    values = [({"v": r["v"], "t": r["t"]}, round(r["t"].timestamp() * 1e6)) for r in events]
    ids = [f"{r['_source']}/{r['_partition']}/{r['_seq']}" for r in events]
    reference.append(
        "events", *values, now=head.recorded_now, ids=ids, frontier=head.decision["frontier_after"]
    )


def settle(world: World, reference: stream_model.World) -> None:
    """Buffers let go in every epoch."""
    head = world.head()
    reference.advance(head.decision["frontier_after"], head.recorded_now)


@given(st.lists(st.integers(0, 20), min_size=3, max_size=12), st.integers(1, 4))
@settings(max_examples=4, deadline=None)
def test_a_backfill_in_pieces_is_the_backfill_at_once(values: list[int], chunk: int) -> None:
    """For a splice and for a reducer's state the pieces do not show."""
    states, collected = [], []
    for size in (chunk, 10**6):
        drawn = [
            (("events", "a"), "running", False, MergeMode.SPLICE),
            (("events", "b"), "totals", False, MergeMode.CONCAT),
        ]
        world = World(spec_of(drawn, size))
        world.epoch(*((n, v) for n, v in enumerate(values)))
        world.epoch(ask=(("attach", "n0"), ("attach", "n1")))
        while world.epoch().sealed:
            pass
        world.epoch((100, 7))
        states.append(
            [(json.dumps(r["v"]), r["_id"]) for name in ("a", "b") for r in world.rows(name)]
        )
        collected.append(
            [(r.rows, r.min_time, r.max_time, r.open) for r in world.state().requests.values()]
        )
    assert states[0] == states[1]
    assert collected[0] == collected[1]
