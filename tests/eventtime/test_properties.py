"""Properties of semantics.md section 9 that concern frontiers, order and barriers, on random
sources cut into random epochs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.feed import Barrier, Feed, Item, Point, Punctuation, Step, pipeline

from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import BarrierOutcome, Member, MemberSurvey, Survey
from tidegate.jobs.eventtime.frontiers import Coalescer
from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

NAMES = ("a", "b", "c")
TIMES = st.integers(-3, 9)
UNHURRIED = settings(deadline=None)

Cut = tuple[int, dict[str, int]]
"""How far the clock advances, and how many items are taken of each source."""


def cuts(advance: int = 15) -> st.SearchStrategy[list[Cut]]:
    """A random schedule of epochs."""
    take = st.fixed_dictionaries({name: st.integers(0, 4) for name in NAMES})
    return st.lists(st.tuples(st.integers(0, advance), take), max_size=25)


def feeds(*kinds: st.SearchStrategy[Item]) -> st.SearchStrategy[dict[str, list[Item]]]:
    """Items of every source."""
    return st.fixed_dictionaries({name: st.lists(st.one_of(*kinds), max_size=8) for name in NAMES})


POINTS = st.builds(Point, TIMES)
BARRIERS = st.builds(Barrier, TIMES, st.sampled_from(["begin", "end"]))
PUNCTUATION = st.builds(Punctuation, TIMES)


@st.composite
def specs(draw: st.DrawFn) -> PipelineSpec:
    """Any combination of options that bears on frontiers, order and barriers."""
    level = {
        "idle_timeout": draw(st.sampled_from([None, 5, 20])),
        "coalesce": draw(st.sampled_from(["min", "min", "max"])),
        "all_idle": draw(st.sampled_from(["jump", "hold"])),
        "all_done": draw(st.sampled_from(["infinity", "hold"])),
        "revived": draw(st.sampled_from(["ignore", "freeze"])),
        "on_idle_punctuation": draw(st.sampled_from(["revive", "ignore"])),
        "joins": draw(st.sampled_from(["at_F", "hold"])),
        "members": draw(st.sampled_from(["declared", "discovered"])),
    }
    source = {
        "lag": draw(st.integers(-1, 5)),
        "frontier": draw(st.sampled_from(["exclusive", "inclusive"])),
        "frame": draw(st.sampled_from([None, None, 7])),
        "punctuation": draw(st.sampled_from([None, {"explicit": True, "on_violation": "drop"}])),
    }
    release = {
        "mode": draw(st.sampled_from(["ordered", "commit", "pass_through"])),
        "build_window": draw(st.sampled_from([None, 0, 10])),
        "startup_grace": draw(st.sampled_from([0, 0, 8])),
    }
    barriers = {
        "timeout": draw(st.sampled_from([None, 10])),
        "alignment": draw(st.sampled_from(["block", "block", "pass"])),
    }
    return pipeline(NAMES, source, coalesce=level, release=release, barriers=barriers)


def run(
    spec: PipelineSpec, items: dict[str, list[Item]], schedule: list[Cut], *, end: bool = False
) -> tuple[Feed, list[Step]]:
    """Feed everything, cut it by the schedule, then let the clock run until nothing is due any
    more.
    """
    feed = Feed(spec)
    for name, queue in items.items():
        feed.add(name, *queue)
        if end:
            feed.end(name)
    now, steps = 0, []
    for advance, take in schedule:
        now += advance
        steps.append(feed.step(now, take))
    for _ in range(8):
        now += 15
        steps.append(feed.step(now))
    return feed, steps


def plain(value: Any) -> Any:
    """As it reads back from JSON."""
    return json.loads(json.dumps(value, default=str, sort_keys=True))


@UNHURRIED
@given(specs(), feeds(POINTS, POINTS, BARRIERS, PUNCTUATION), cuts())
def test_frontiers_and_marks_never_fall(
    spec: PipelineSpec, items: dict[str, list[Item]], schedule: list[Cut]
) -> None:
    """Property 2: F, every F_i, the release mark, the section and the pipeline clock are monotone."""
    _, steps = run(spec, items, schedule)
    for step in steps:
        decision = step.decision
        assert decision.frontier_before <= decision.frontier_after
        assert decision.release_before <= decision.release_after
    for one, two in pairwise(step.decision for step in steps):
        assert one.now <= two.now
        assert one.section <= two.section
        assert one.frontier_after == two.frontier_before
        assert one.release_after == two.release_before
        for source, state in one.after["sources"].items():
            for name, known in state["inputs"].items():
                later = two.after["sources"][source]["inputs"][name]["frontier"]
                assert known["frontier"] is None or later >= known["frontier"]


@UNHURRIED
@given(specs(), feeds(POINTS, POINTS, BARRIERS, PUNCTUATION), cuts())
def test_state_survives_json_and_decide_is_pure(
    spec: PipelineSpec, items: dict[str, list[Item]], schedule: list[Cut]
) -> None:
    """A state restored from JSON at any point gives the same decision, and deciding changes no
    argument.
    """
    feed = Feed(spec)
    for name, queue in items.items():
        feed.add(name, *queue)
    now = 0
    for advance, take in schedule:
        now += advance
        before = feed.state
        text = json.dumps(before, sort_keys=True)
        surveys: list[Survey] = []
        step = feed.step(now, take, watch=surveys.append)
        assert json.dumps(before, sort_keys=True) == text
        again = decide(spec, json.loads(text), surveys[0])
        assert plain(asdict(again)) == plain(asdict(step.decision))


@UNHURRIED
@given(
    st.integers(-1, 4),
    st.sampled_from(["exclusive", "inclusive"]),
    feeds(POINTS, POINTS, BARRIERS),
    cuts(),
)
def test_not_late_in_its_source_is_not_late_in_the_merge(
    lag: int, frontier: str, items: dict[str, list[Item]], schedule: list[Cut]
) -> None:
    """Property 4: with declared members, min, no idleness and no timeouts the merge makes no row
    late.
    """
    spec = pipeline(NAMES, {"lag": lag, "frontier": frontier}, coalesce={"idle_timeout": None})
    feed = Feed(spec)
    for name, queue in items.items():
        feed.add(name, *(Point(i.time, name) if isinstance(i, Point) else i for i in queue))
    now = 0
    for _, take in [*schedule, *([(0, dict.fromkeys(NAMES, 9))] * 10)]:
        own = {
            name: feed.state["sources"][name]["inputs"].get(f"{name}/0", {}).get("frontier")
            for name in NAMES
        }
        for point in feed.step(now, take).late:
            assert own[point.name] is not None
            assert point.time < own[point.name]


@UNHURRIED
@given(
    st.permutations(range(4)),
    st.lists(st.one_of(st.none(), TIMES), min_size=4, max_size=4),
    st.data(),
)
def test_the_order_of_falling_idle_does_not_matter(
    order: list[int], starts: list[int | None], data: st.DataObject
) -> None:
    """Property 5: under `jump` every order of idle signals, repeated or not, ends at the same
    frontier.
    """
    finals = set()
    for sequence in (list(range(4)), order):
        coalescer = Coalescer(CoalesceOptions(idle_timeout=None))
        for number, start in enumerate(starts):
            coalescer.join(str(number))
            if start is not None:
                coalescer.signal_frontier(str(number), start)
        coalescer.settle()
        for number in sequence:
            for _ in range(data.draw(st.integers(1, 2))):
                coalescer.signal_idle(str(number))
                signals = coalescer.settle()
        finals.add(coalescer.value)
        assert coalescer.status == "idle"
        coalescer.signal_idle("0")
        assert coalescer.settle() == []
    assert len(finals) == 1, signals


@UNHURRIED
@given(
    st.sampled_from([0, 10, 25]),
    st.sampled_from([0, 8]),
    st.integers(-1, 3),
    feeds(POINTS, POINTS, BARRIERS),
    cuts(advance=9),
)
def test_no_row_stays_longer_than_the_build_window(
    window: int, grace: int, lag: int, items: dict[str, list[Item]], schedule: list[Cut]
) -> None:
    """Property 6: a row has left by the first epoch in which it is as old as the build window and
    the grace.
    """
    release = {"build_window": window, "startup_grace": grace}
    spec = pipeline(NAMES, {"lag": lag}, coalesce={"idle_timeout": None}, release=release)
    feed, now = Feed(spec), 0
    read_at: dict[str, int] = {}
    for number, (advance, take) in enumerate(schedule):
        now += advance
        for name, count in take.items():
            names = [f"{name}{number}.{i}" for i in range(count)]
            feed.add(
                name,
                *(
                    Point(i.time, n) if isinstance(i, Point) else i
                    for n, i in zip(names, items[name], strict=False)
                ),
            )
        step = feed.step(now)
        for name in feed.names_buffered:
            read_at.setdefault(name, step.decision.now)
        overdue = [
            n for n in feed.names_buffered if step.decision.now - read_at[n] >= window + grace
        ]
        if any(feed.waiting(name) and not feed.blocked(name) for name in NAMES):
            # A slice ended at a tardy barrier: no timer expires that waits for the rows behind it.
            continue
        assert not overdue


@UNHURRIED
@given(feeds(POINTS, BARRIERS), cuts())
def test_a_complete_barrier_divides_every_member_at_its_own(
    items: dict[str, list[Item]], schedule: list[Cut]
) -> None:
    """Property 7: what left before barrier n is exactly each member's prefix before its barrier n."""
    named = {
        name: [
            Point(i.time, f"{name}{number}") if isinstance(i, Point) else i
            for number, i in enumerate(queue)
        ]
        for name, queue in items.items()
    }
    spec = pipeline(
        NAMES, {"lag": 0}, coalesce={"idle_timeout": None}, release={"on_late": "emit_flagged"}
    )
    _, steps = run(spec, named, schedule)
    left: set[str] = set()
    for step in steps:
        left |= {p.name for p in step.released}
        for barrier in step.decision.barriers:
            assert barrier.outcome is BarrierOutcome.COMPLETE
            assert left == {n for queue in named.values() for n in _prefix(queue, barrier.id)}


def _prefix(queue: list[Point | Barrier] | list[Item], ordinal: int) -> list[str]:
    """Names of the rows before the barrier with this ordinal."""
    names: list[str] = []
    for item in queue:
        if isinstance(item, Barrier):
            ordinal -= 1
            if ordinal == 0:
                break
        elif isinstance(item, Point):
            names.append(item.name)
    return names


@UNHURRIED
@given(
    st.sampled_from(["exclusive", "inclusive"]),
    st.integers(0, 4),
    feeds(POINTS, POINTS, BARRIERS),
    cuts(),
)
def test_ordered_output_is_sorted(
    frontier: str, lag: int, items: dict[str, list[Item]], schedule: list[Cut]
) -> None:
    """Property 3: without timeouts what leaves in order is sorted by section and time, however it
    was cut.
    """
    spec = pipeline(NAMES, {"lag": lag, "frontier": frontier}, coalesce={"idle_timeout": None})
    _, steps = run(spec, items, schedule)
    whole = (
        lag == 0 and frontier == "inclusive"
    )  # rows equal to the mark leave: a later equal one follows them
    entries = [entry[:2] if whole else entry for step in steps for entry in step.order]
    assert entries == sorted(entries)


@UNHURRIED
@given(feeds(POINTS), cuts(), cuts())
def test_ordered_output_does_not_depend_on_the_cuts(
    items: dict[str, list[Item]], one: list[Cut], two: list[Cut]
) -> None:
    """Property 3: sources in order, exclusive frontiers: the same rows in the same order from every
    schedule.
    """
    in_order: dict[str, list[Item]] = {
        name: sorted(queue, key=lambda i: i.time) for name, queue in items.items()
    }
    spec = pipeline(NAMES, {"lag": 0}, coalesce={"idle_timeout": None})
    outputs = [
        [p for step in run(spec, in_order, schedule, end=True)[1] for p in step.released]
        for schedule in (one, two)
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == sum(len(queue) for queue in items.values())


EXTREMES = st.sampled_from([TICK_MIN, TICK_MIN + 1, -1, 0, 1, 10**17, TICK_MAX - 1, TICK_MAX])


@UNHURRIED
@given(
    st.lists(EXTREMES, max_size=4),
    st.integers(0, 3),
    st.sampled_from([-1, 0, 10**18]),
    st.sampled_from(["exclusive", "inclusive"]),
    st.sampled_from([None, 3, 10**18]),
    st.booleans(),
)
def test_extremes(
    times: list[int], count: int, lag: int, frontier: str, frame: int | None, done: bool
) -> None:
    """Property 10: int64 ends, far-future stamps, no member at all, one member, all done: frontiers
    stay in int64.
    """
    spec = pipeline(
        ("s",), {"lag": lag, "frontier": frontier, "frame": frame, "partition_by": "folder"}
    )
    state = create_initial_state(spec)
    for time in [*times, None]:
        ends = done and time is None
        rows = 0 if time is None else 1
        members = tuple(
            MemberSurvey(Member("s", str(n)), rows, time, time, done=ends) for n in range(count)
        )
        decision = decide(spec, state, Survey(0, members))
        state = decision.after
        assert TICK_MIN <= decision.frontier_after <= TICK_MAX
    if count == 0:
        assert decision.frontier_after == TICK_MIN
    elif done:
        assert decision.frontier_after == TICK_MAX
