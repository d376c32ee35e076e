"""Edge events: a start edge is open until its end edge closes it.

Open edges are retained (semantics.md sections 1 and 4.3).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.conformance.bench import Bench, DeciderBench, bench
from tests.oracle.mover import OracleMover
from tests.oracle.support import EXAMPLES, SOAK, Pair, Tick, World
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

ENGINES = pytest.mark.parametrize("engine", ["oracle", "decider"])
COLUMNS = {"t": "timestamp", "edge": "string", "kind": "string", "k": "string", "v": "long"}
WINDOW = {
    "kind": "tumbling",
    "size": 10,
    "keys": ["k"],
    "late_unit": "event",
    "aggregates": {"n": "count(*)", "v": "max(v)"},
}


def spec(
    window: dict[str, Any] | None = None, source: dict[str, Any] | None = None, **more: Any
) -> PipelineSpec:
    """Machines that start and stop; a watermark says how far the input has come."""
    own = {
        "path": "x",
        "schema": COLUMNS,
        "event_time": "t",
        "edges": {"kind": "edge", "keys": ["k"]},
        "punctuation": {"explicit": True, "advance_to_end": True},
        "barriers": {"kind": "kind", "punctuation": "p"},
        "coalesce": {"idle_timeout": "never"},
        **(source or {}),
    }
    parts: dict[str, Any] = {
        "release": {"mode": "pass_through"},
        "coalesce": {"idle_timeout": "never"},
        **more,
    }
    return PipelineSpec.model_validate(
        {
            "name": "p",
            "sources": {"s": own},
            "windows": {"w": {**WINDOW, **(window or {})}},
            **parts,
        }
    )


def start(t: int, k: str = "a", v: int = 1) -> dict[str, Any]:
    """A start edge."""
    return {"t": t, "edge": "start", "k": k, "v": v}


def end(t: int, k: str = "a") -> dict[str, Any]:
    """An end edge."""
    return {"t": t, "edge": "end", "k": k}


def until(t: int) -> dict[str, Any]:
    """Punctuation."""
    return {"t": t, "kind": "p"}


def told(on: Bench, *rows: dict[str, Any], ends: bool = False) -> list[tuple[str, int, int]]:
    """(key, window start, count) of the results that these rows bring about."""
    results = on.epoch({"s": rows}, end={"s"} if ends else ()).windows["w"]
    return sorted((r["k"], r["window_start"], r["n"]) for r in results)


@ENGINES
def test_an_open_edge_counts_in_every_window_that_closes(engine: str) -> None:
    """It is retained, and counts from its start on, until its end closes it."""
    on = bench(spec(), engine)
    assert told(on, start(3)) == []
    assert told(on, until(10)) == [("a", 0, 1)]
    on.restore()
    assert told(on, until(35)) == [("a", 10, 1), ("a", 20, 1)]
    assert told(on, end(42), until(45)) == [("a", 30, 1)]
    assert told(on, until(100)) == [("a", 40, 1)]  # [40, 42)
    assert told(on, until(200)) == []


@ENGINES
def test_an_edge_that_ends_is_an_interval(engine: str) -> None:
    """Start and end in one epoch, or in many.

    The windows are the same; the end itself counts nowhere.
    """
    on = bench(spec(), engine)
    assert told(on, start(3), end(20), start(25, "b"), end(25, "b"), until(100)) == [
        ("a", 0, 1),
        ("a", 10, 1),
    ]


@ENGINES
def test_an_end_closes_all_open_edges_of_its_keys_and_no_other(engine: str) -> None:
    """Edges of other keys go on; an end that finds none changes nothing."""
    on = bench(spec(), engine)
    assert told(on, start(1), start(2), start(3, "b"), end(4, "c"), until(10)) == [
        ("a", 0, 2),
        ("b", 0, 1),
    ]
    assert told(on, end(10), until(30)) == [("b", 10, 1), ("b", 20, 1)]


@ENGINES
def test_a_late_end_is_late_and_closes_nothing(engine: str) -> None:
    """It would change results that were written.

    It is in the late table, and the edge stays open.
    """
    on = bench(spec(source={"punctuation": None, "lag": 0}), engine)
    assert told(on, start(3), {"t": 25, "k": "x"}) == [("a", 0, 1), ("a", 10, 1)]
    play = on.epoch({"s": [end(20)]})
    assert [(r["t"], r["reason"]) for r in play.late] == [(20, "late_window")]
    assert told(on, {"t": 40, "k": "x"}) == [("a", 20, 1), ("a", 30, 1), ("x", 20, 1)]


@pytest.mark.parametrize("gone", [True, False])
def test_under_another_spec_open_edges_go_on(gone: bool) -> None:
    """A column that is new is null in them, a window that is new counts them.

    A source that is gone takes its edges along.
    """
    two = spec().model_dump(by_alias=True)
    two["sources"]["r"] = two["sources"]["s"]
    on = DeciderBench(PipelineSpec.model_validate(two))
    on.epoch({"s": [start(3)], "r": [start(4, "b"), until(6)]})
    for source in two["sources"].values():
        source["schema"] = {**source["schema"], "more": "string"}
    two["windows"]["x"] = {**two["windows"]["w"], "aggregates": {"n": "count(*)", "m": "max(more)"}}
    if gone:
        del two["sources"]["r"]
    other = DeciderBench(PipelineSpec.model_validate(two))
    other.store, other.state, other.segments, other.position, other.resume = (
        on.store,
        on.state,
        on.segments,
        on.position,
        on.resume,
    )
    other.sources = {**on.sources} if not gone else {"s": on.sources["s"]}
    other.mover = OracleMover(on.store, other.spec, other.sources)
    results = other.epoch({"s": [until(10)], **({} if gone else {"r": [until(10)]})}).windows
    told_of = {
        name: sorted((r["k"], r["n"], r.get("m")) for r in rows) for name, rows in results.items()
    }
    expected = [("a", 1, None)] if gone else [("a", 1, None), ("b", 1, None)]
    assert told_of == {"w": expected, "x": expected}


@ENGINES
def test_the_end_of_all_input_closes_no_edge(engine: str) -> None:
    """At +inf an open edge has been counted up to the newest row's window, and no further.

    Windows have no end.
    """
    on = bench(spec(), engine)
    assert told(on, start(3), start(25, "b"), ends=True) == [
        ("a", 0, 1),
        ("a", 10, 1),
        ("a", 20, 1),
        ("b", 20, 1),
    ]


@ENGINES
@pytest.mark.parametrize("slide", [3, 10, 15])
def test_sliding_windows_count_an_edge_once_each(engine: str, slide: int) -> None:
    """Overlapping windows, and windows with holes between them."""
    on = bench(spec({"kind": "sliding", "slide": slide}), engine)
    steps = [start(3), until(7), until(21), end(33), until(36), until(90)]
    found = [result for step in steps for result in told(on, step)]
    expected = [("a", w, 1) for w in range(-30, 90) if w % slide == 0 and w + 10 > 3 and w < 33]
    assert sorted(found) == sorted(expected)


@ENGINES
def test_edges_at_the_ends_of_time(engine: str) -> None:
    """An edge from the first instant to the last."""
    on = bench(spec({"size": 2**62}), engine)
    assert told(on, start(TICK_MIN), end(TICK_MAX - 1), ends=True) == [
        ("a", n * 2**62, 1) for n in (-2, -1, 0, 1)
    ]


@ENGINES
def test_edges_leave_as_events(engine: str) -> None:
    """Start and end are rows like others for order and for the late table."""
    ordered = spec(
        release={"mode": "ordered"}, source={"punctuation": None, "lag": 0, "frontier": "inclusive"}
    )
    play = bench(ordered, engine).epoch({"s": [start(3), end(9), start(5, "b")]})
    assert [(r["t"], r["edge"]) for r in play.events] == [(3, "start"), (5, "start"), (9, "end")]


@pytest.mark.parametrize(
    ("window", "source", "more", "words"),
    [
        ({"kind": "session", "size": None, "gap": 5}, {}, {}, "a session would never end"),
        ({"lateness": 5}, {}, {}, "lateness must be 0"),
        ({"late_unit": "window"}, {}, {}, "late_unit event"),
        ({"emit": "each_epoch"}, {}, {}, "emit must be close"),
        ({"zero_rows": True}, {}, {}, "without fire_every and zero_rows"),
        ({"on_late": "adjust"}, {}, {}, "an edge is not adjusted"),
        ({}, {}, {"release": {"on_late": "adjust"}}, "an edge is not adjusted"),
        (
            {},
            {"punctuation": {"explicit": True, "on_violation": "adjust"}},
            {},
            "an edge is not adjusted",
        ),
        ({}, {"edges": {"kind": "edge", "keys": ["nobody"]}}, {}, "'nobody' is not in the schema"),
        ({}, {"edges": {"kind": "edge", "keys": ["k"], "start": "x", "end": "x"}}, {}, "both 'x'"),
        ({}, {"edges": {"kind": "v", "keys": ["k"]}}, {}, "'v' must be a string, not long"),
        ({}, {"end_time": "t"}, {}, "not both"),
    ],
)
def test_the_spec_refuses_what_edges_cannot_do(
    window: dict[str, Any], source: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    """Plainly, naming the place."""
    with pytest.raises(ValidationError, match=words):
        spec(window, source, **more)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Edges, other rows and punctuation of one or two sources, out of order, in random cuts."""
    window: dict[str, Any] = {
        "kind": draw(st.sampled_from(["tumbling", "sliding"])),
        "size": draw(st.integers(1, 9)),
    }
    if window["kind"] == "sliding":
        window["slide"] = draw(st.integers(1, 9))
    window["offset"] = draw(
        st.integers(
            1 - window.get("slide", window["size"]), window.get("slide", window["size"]) - 1
        )
    )
    window["on_late"] = draw(st.sampled_from(["side_output", "drop"]))
    window["min_window_start"] = draw(st.sampled_from([None, None, 3]))
    window["keys"] = draw(st.sampled_from([[], ["k"]]))
    source = {
        "lag": draw(st.sampled_from([None, 0, 3])),
        "frontier": draw(st.sampled_from(["exclusive", "inclusive"])),
    }
    base = spec(
        window,
        source,
        release={"mode": draw(st.sampled_from(["ordered", "pass_through", "commit"]))},
    )
    names = ("s", "r")[: draw(st.integers(1, 2))]
    chosen = PipelineSpec.model_validate(
        {
            **base.model_dump(by_alias=True),
            "sources": {name: base.sources["s"].model_dump(by_alias=True) for name in names},
        }
    )
    members = tuple(Member(name) for name in names)
    ticks, ended = [], set[Member]()
    for step in range(draw(st.integers(1, 8))):
        rows = {
            m: [draw(_row(4 * step)) for _ in range(draw(st.integers(0, 4)))]
            for m in members
            if m not in ended
        }
        ends = frozenset(m for m in members if draw(st.integers(0, 9)) == 0)
        ticks.append(Tick(1, rows, draw(st.sampled_from([None, None, 1, 2])), ends))
        ended |= ends
    return World(chosen, members, tuple(ticks))


@st.composite
def _row(draw: st.DrawFn, around: int) -> dict[str, Any]:
    time, key = around + draw(st.integers(-6, 8)), draw(st.sampled_from(["a", "b", None]))
    what = draw(st.sampled_from(["start", "start", "end", "end", "p", None]))
    if what == "p":
        return until(time - 4)
    return {"t": time, "edge": what, "k": key, "v": draw(st.integers(0, 9))}


@settings(max_examples=4 * EXAMPLES, deadline=None, derandomize=not SOAK)
@given(worlds())
def test_mover_and_model_agree_on_edges(world: World) -> None:
    """On random worlds and cuts, epoch by epoch.

    A checkpoint between two epochs changes nothing.
    """
    pair = Pair(world)
    for number, tick in enumerate(world.ticks):
        pair.step(tick, number)
        pair.real.restore()
