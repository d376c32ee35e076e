"""Decider plus oracle mover against the event-at-a-time model.

Random pipelines, worlds and cuts (semantics.md section 9).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.bench import DeciderBench
from tests.oracle.support import (
    COLUMNS,
    EXAMPLES,
    SOAK,
    Pair,
    Tick,
    World,
    dense_worlds,
    place,
    worlds,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import format_instant

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
# A CI run tries the same examples every time; a soak run (TIDEGATE_EXAMPLES=2000) tries new ones.
AGREE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=SLOW,
    print_blob=True,
    derandomize=not SOAK,
)
SIGNALS = {
    "barriers": {"kind": "kind", "types": ["begin", "end"], "id": "id", "punctuation": "p"},
    "coalesce": {"idle_timeout": "never"},
}


@AGREE
@given(worlds())
def test_decider_and_model_agree(world: World) -> None:
    """On equal cuts and clocks both give the same rows, windows, late rows, barriers, frontiers and
    statuses, epoch by epoch.
    """
    Pair(world).play()


@AGREE
@given(worlds(), st.data())
def test_decider_and_model_agree_on_punctuation_that_people_send(
    world: World, data: st.DataObject
) -> None:
    """A CTI is punctuation behind what was read, also in the past, at a barrier, while idle, at the
    end.
    """
    source = st.sampled_from(sorted({member.source for member in world.members}))
    sent = st.lists(st.tuples(source, st.integers(-8, 40)), max_size=2).map(tuple)
    ticks = tuple(replace(tick, ctis=data.draw(sent)) for tick in world.ticks)
    Pair(replace(world, ticks=ticks)).play()


@AGREE
@given(worlds(), st.data())
def test_decider_and_model_agree_on_barriers_that_people_cancel(
    world: World, data: st.DataObject
) -> None:
    """A cancel aborts every id up to one, open or still to come."""
    sent = st.lists(st.integers(0, 4), max_size=1).map(tuple)
    ticks = tuple(replace(tick, cancels=data.draw(sent)) for tick in world.ticks)
    Pair(replace(world, ticks=ticks)).play()


@AGREE
@given(dense_worlds())
def test_decider_and_model_agree_on_dense_signals(world: World) -> None:
    """Barriers, aborts, cancels and punctuation meet in every way (semantics.md sections 3, 4)."""
    Pair(world).play()


@AGREE
@given(worlds())
def test_every_row_has_one_disposition(world: World) -> None:
    """Property 1: a row read is released, late, dropped, dead or still buffered, exactly once.

    Tables and counters agree.
    """
    pair = Pair(world).play()
    places = []
    dropped = 0
    for decision, moved in pair.moved:
        assert decision.frontier_before <= decision.frontier_after
        places += [place(r) for r in pair.real.table(moved, "events")]
        late = [r for r in pair.real.table(moved, "late") if r["output"] == "events"]
        places += [place(r) for r in late if r["reason"] != "flagged"]  # these are released
        places += [place(r) for r in pair.real.table(moved, "dead_letters")]
        dropped += sum(moved.counters.dropped.values())
    assert len(places) == len(set(places))
    assert len(places) + dropped + pair.real.buffered == sum(
        outcome.read for outcome in pair.outcomes
    )


@AGREE
@given(worlds())
def test_positions_are_contiguous_and_late_rows_are_counted_once(world: World) -> None:
    """Positions count from zero without a gap, and a row is at most once in the late table for each
    output.
    """
    pair = Pair(world).play()
    positions = [r["position"] for _, moved in pair.moved for r in pair.real.table(moved, "events")]
    assert positions == list(range(len(positions)))
    late = [
        (*place(r), r["output"]) for _, moved in pair.moved for r in pair.real.table(moved, "late")
    ]
    assert len(late) == len(set(late))


@AGREE
@given(worlds())
def test_replay_gives_the_same_bytes(world: World) -> None:
    """Property 9: the same input and clocks give the same files, byte by byte, also with the state
    through JSON in between.
    """
    first = Pair(world).play()
    again = Pair(world)
    for number, tick in enumerate(world.ticks):
        again.step(tick, number)
        again.real.restore()
    assert [moved for _, moved in again.moved] == [moved for _, moved in first.moved]


PLAIN = {"coalesce": {"idle_timeout": "never"}, "barriers": {"timeout": "never"}, "windows": {}}
ORDERED = {"release": {"mode": "ordered"}, **PLAIN}


@AGREE
@given(st.data(), st.sampled_from(["exclusive", "inclusive"]), st.integers(0, 3))
def test_ordered_output_is_sorted(data: st.DataObject, frontier: str, lag: int) -> None:
    """Property 3: without timeouts the events leave sorted by section and time, whatever the
    disorder and the cuts.
    """
    source = {
        "path": "x",
        "schema": COLUMNS,
        "event_time": "t",
        "lag": lag,
        "frontier": frontier,
        **SIGNALS,
    }
    spec = PipelineSpec.model_validate(
        {"name": "p", "sources": {"a": source, "b": source}, **ORDERED}
    )
    pair = Pair(data.draw(worlds(spec))).play()
    events = [r for _, moved in pair.moved for r in pair.real.table(moved, "events")]
    marks = [(r["section"], r["t"]) for r in events]
    assert marks == sorted(marks)


@AGREE
@given(st.data(), st.integers(1, 8), st.integers(0, 9))
def test_windows_equal_the_batch_over_the_accepted_rows(
    data: st.DataObject, size: int, lateness: int
) -> None:
    """Property 8: the last revision of every window is the aggregate over all rows that were not
    late for it.
    """
    window = {
        "kind": "tumbling",
        "size": size,
        "lateness": lateness,
        "aggregates": {"n": "count(*)"},
    }
    source = {"path": "x", "schema": COLUMNS, "event_time": "t", "lag": 2, **SIGNALS}
    raw = {
        "name": "p",
        "sources": {"a": source, "b": source},
        "release": {"mode": "pass_through"},
        **PLAIN,
    }
    spec = PipelineSpec.model_validate({**raw, "windows": {"w": window}})
    pair = Pair(data.draw(worlds(spec, barriers=False))).play()
    tables = {
        n: [r for _, moved in pair.moved for r in pair.real.table(moved, n)]
        for n in ("events", "late", "w")
    }
    late = {place(r) for r in tables["late"]}
    batch = Counter(r["t"] // size * size for r in tables["events"] if place(r) not in late)
    current = {r["window_start"]: r["n"] for r in tables["w"]}
    final = pair.moved[-1][0].frontier_after
    assert {start: n for start, n in batch.items() if start + size <= final} == current


KINDS = {
    "tumbling": {"kind": "tumbling", "size": 5},
    "sliding": {"kind": "sliding", "size": 6, "slide": 4, "late_unit": "first_window"},
    "session": {"kind": "session", "gap": 3, "session_late": "event", "session_touch": "separate"},
}


@AGREE
@given(st.data(), st.sampled_from(sorted(KINDS)), st.sampled_from([0, 2, 9]))
def test_windows_equal_the_results_in_order(data: st.DataObject, kind: str, lateness: int) -> None:
    """Property 8: at the end every window is as if its accepted rows had come in order."""
    window = {
        **KINDS[kind],
        "keys": ["k"],
        "lateness": lateness,
        "aggregates": {"n": "count(*)", "s": "sum(v)"},
    }
    source = {"path": "x", "schema": COLUMNS, "event_time": "t", "lag": 2, **SIGNALS}
    raw = {
        "name": "p",
        "sources": {"a": source, "b": source},
        "release": {"mode": "pass_through"},
        **PLAIN,
    }
    spec = PipelineSpec.model_validate({**raw, "windows": {"w": window}})
    world = data.draw(worlds(spec, barriers=False))
    members = frozenset(world.members)
    pair = Pair(
        replace(world, ticks=(*world.ticks, Tick(0, {}, None), Tick(0, {}, None, members)))
    ).play()
    tables = {
        n: [r for _, moved in pair.moved for r in pair.real.table(moved, n)]
        for n in ("events", "late", "w")
    }
    late = {place(r) for r in tables["late"]}
    accepted = sorted((r for r in tables["events"] if place(r) not in late), key=lambda r: r["t"])
    on = DeciderBench(
        PipelineSpec.model_validate(
            {**raw, "sources": {"a": {**source, "lag": 0}}, "windows": {"w": window}}
        )
    )
    in_order = on.epoch(
        {"a": [{name: r[name] for name in COLUMNS} for r in accepted]}, end={"a"}
    ).windows["w"]
    assert find_current_results(tables["w"]) == find_current_results(in_order)
    for row in tables["late"]:
        assert row["frontier"] is not None


def find_current_results(results: list[dict[str, Any]]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Key and bounds of each result that no later one replaces -> its values."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for r in results:
        for bounds in r["replaces"] or ():
            found = {
                k: v
                for k, v in found.items()
                if (k[0], f"{format_instant(k[1])}/{format_instant(k[2])}") != (r["k"], bounds)
            }
        found[r["k"], r["window_start"], r["window_end"]] = (r["n"], r["s"])
    return found
