"""Two levels at once.

Partitions that appear, disappear, fall silent and end, in two sources, by random options.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.feed import pipeline

from tidegate.jobs.eventtime.decider import (
    create_initial_state,
    decide,
    find_next_timer,
    select_members_ahead,
)
from tidegate.jobs.eventtime.decision_types import Member, MemberSurvey, Survey
from tidegate.jobs.spec.pipeline import PipelineSpec

MEMBERS = [Member(source, partition) for source in ("a", "b") for partition in "012"]

LEVEL = st.fixed_dictionaries(
    {
        "idle_timeout": st.sampled_from([None, 5, 20]),
        "coalesce": st.sampled_from(["min", "max"]),
        "all_idle": st.sampled_from(["jump", "hold"]),
        "all_done": st.sampled_from(["infinity", "hold"]),
        "revived": st.sampled_from(["ignore", "freeze"]),
        "joins": st.sampled_from(["at_F", "hold"]),
        "members": st.sampled_from(["declared", "discovered"]),
        "no_members": st.sampled_from(["idle", "silent"]),
    }
)

# Per epoch and member: None (not there), or newest time (None: no rows), pending, done.
SEEN = st.one_of(
    st.none(), st.tuples(st.one_of(st.none(), st.integers(-5, 30)), st.booleans(), st.booleans())
)
EPOCHS = st.lists(st.tuples(st.integers(0, 8), st.lists(SEEN, min_size=6, max_size=6)), max_size=12)


@st.composite
def specs(draw: st.DrawFn) -> PipelineSpec:
    """Two sources with folders as partitions; options per level."""
    source = {"lag": draw(st.integers(0, 3)), "partition_by": "folder", "coalesce": draw(LEVEL)}
    release = {"build_window": draw(st.sampled_from([None, 10]))}
    return pipeline(("a", "b"), source, coalesce=draw(LEVEL), release=release)


def surveys(epochs: list[tuple[int, list[Any]]]) -> list[Survey]:
    """Legal surveys: a member that ended has no more rows while it exists."""
    now, ended, given_ = 0, set[Member](), []
    for advance, seen in epochs:
        now += advance
        entries = []
        for member, one in zip(MEMBERS, seen, strict=True):
            if one is None:
                ended.discard(member)
                continue
            time, pending, done = (None, False, True) if member in ended else one
            if done:
                ended.add(member)
            rows = 0 if time is None else 1
            entries.append(
                MemberSurvey(member, rows, time, time, pending=pending and not done, done=done)
            )
        given_.append(Survey(now, tuple(entries)))
    return given_


@settings(deadline=None)
@given(specs(), EPOCHS)
def test_any_life_of_partitions_keeps_the_promises(
    spec: PipelineSpec, epochs: list[tuple[int, list[Any]]]
) -> None:
    """F and every F_i are monotone, a status is emitted only when it changes, and a state from JSON
    has the same future.
    """
    state = create_initial_state(spec)
    status = "active"
    for survey in surveys(epochs):
        decision = decide(spec, state, survey)
        restored = decide(spec, json.loads(json.dumps(state, sort_keys=True)), survey)
        assert json.dumps(asdict(restored), sort_keys=True) == json.dumps(
            asdict(decision), sort_keys=True
        )
        assert decision.frontier_after >= decision.frontier_before
        emitted = dict(decision.emitted)
        assert ("watermark" in emitted) == (decision.frontier_after != decision.frontier_before)
        assert emitted.get("status", status) == decision.after["output"]["status"]
        assert emitted.get("status") != status
        status = decision.after["output"]["status"]
        for source, known in decision.after["sources"].items():
            before = state["sources"][source]["inputs"]
            for name, now in known["inputs"].items():
                earlier = before[name]["frontier"] if name in before else None
                assert earlier is None or now["frontier"] >= earlier
        state = decision.after
        timer = find_next_timer(spec, state)
        assert timer is None or isinstance(timer, int)
        assert select_members_ahead(spec, state) == set()


@settings(deadline=None)
@given(specs(), EPOCHS)
def test_the_frontier_does_not_overtake_an_active_partition(
    spec: PipelineSpec, epochs: list[tuple[int, list[Any]]]
) -> None:
    """Property 2: F moves only as far as the least frontier among active, aligned partitions,
    unless a timer let it.
    """
    if (
        "max" in (spec.coalesce.coalesce, spec.sources["a"].coalesce.coalesce)
        or spec.release.build_window is not None
    ):
        return
    state = create_initial_state(spec)
    for survey in surveys(epochs):
        decision = decide(spec, state, survey)
        state = decision.after
        if (
            decision.frontier_after == decision.frontier_before
            or state["output"]["status"] != "active"
        ):
            continue
        for name, source in state["sources"].items():
            if (
                state["output"]["inputs"].get(name, {}).get("status") != "active"
                or not state["output"]["inputs"][name]["aligned"]
            ):
                continue
            for known in source["inputs"].values():
                if (
                    known["status"] == "active"
                    and known["aligned"]
                    and source["value"] <= decision.frontier_before
                ):
                    assert known["frontier"] is not None
                    assert decision.frontier_after <= max(
                        known["frontier"], decision.frontier_before
                    )
