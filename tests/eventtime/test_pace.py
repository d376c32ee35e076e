"""Who holds the frontier, back-pressure, timers, and when an epoch without rows is worth sealing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.feed import Barrier, Feed, Point, Punctuation, pipeline

from tidegate.jobs.eventtime.decider import (
    create_initial_state,
    decide,
    find_next_timer,
    list_blocked_members,
    select_members_ahead,
)
from tidegate.jobs.eventtime.decision_types import BarrierRow, Member, MemberSurvey, Survey
from tidegate.jobs.eventtime.members import resolve_partition_timeout

S = 1_000_000
A, B = Member("a"), Member("b")


def feed_of(**sections: Any) -> Feed:
    """Two sources, lag 0, idle after 60 s."""
    return Feed(pipeline(("a", "b"), {"lag": 0}, **sections))


def test_the_silent_source_holds_the_frontier() -> None:
    """A source without rows holds it from the first epoch on, while its idle timer runs."""
    feed = feed_of()
    feed.add("a", Point(10))
    feed.step(0)
    feed.add("a", Point(20))
    assert feed.step(5 * S).decision.holder == {
        "member": "b/0",
        "since": 0,
        "why": "idle timer running",
    }


def test_without_a_timer_there_is_just_no_data() -> None:
    """Idleness switched off: nothing but a row ends it."""
    feed = feed_of(coalesce={"idle_timeout": "never"})
    feed.add("a", Point(10))
    assert feed.step(0).decision.holder == {"member": "b/0", "since": 0, "why": "no data"}


def test_an_open_barrier_holds_the_frontier() -> None:
    """The member that waits at its barrier is named, since it became the one that holds."""
    feed = feed_of()
    feed.add("a", Point(1), Barrier(2))
    feed.add("b", Point(5))
    feed.step(0)
    feed.add("b", Point(9))
    assert feed.step(S).decision.holder == {"member": "a/0", "since": 0, "why": "open barrier"}


def test_rows_still_to_read_hold_the_frontier() -> None:
    """A member with a backlog holds because of it."""
    feed = feed_of()
    feed.add("a", Point(1), Point(2))
    feed.add("b", Point(9))
    assert feed.step(0, {"a": 1, "b": 1}).decision.holder == {
        "member": "a/0",
        "since": 0,
        "why": "buffered rows",
    }


def test_no_member_holds_when_all_have_ended() -> None:
    """All done: none holds the frontier."""
    feed = feed_of()
    feed.end("a")
    feed.end("b")
    assert feed.step(0).decision.holder is None


def test_a_member_far_ahead_is_not_read() -> None:
    """`max_ahead`: while the other has rows, the one further ahead than that waits.

    Otherwise no one does.
    """
    feed = feed_of(release={"max_ahead": "10us"})
    feed.add("a", Point(100), Point(101))
    feed.add("b", Point(5), Point(6))
    feed.step(0, {"a": 1, "b": 1})
    assert select_members_ahead(feed.spec, feed.state) == {A}
    feed.step(0, {"b": 1})
    assert select_members_ahead(feed.spec, feed.state) == set()


@pytest.mark.parametrize(("time", "held"), [(15, set()), (16, {A})])
def test_a_member_as_far_ahead_as_allowed_is_read(time: int, held: set[Member]) -> None:
    """Only one that is ahead by more than `max_ahead` is not; docs/semantics.md, section 7.4."""
    feed = feed_of(release={"max_ahead": "10us"})
    feed.add("a", Point(time), Point(time))
    feed.add("b", Point(5), Point(6))
    feed.step(0, {"a": 1, "b": 1})
    assert select_members_ahead(feed.spec, feed.state) == held


def test_a_full_buffer_stops_the_members_ahead() -> None:
    """`max_buffered_rows`: the slowest member is still read."""
    feed = feed_of(release={"max_buffered_rows": 2})
    feed.add("a", Point(10), Point(11), Point(12))
    feed.add("b", Point(5))
    feed.step(0)
    assert select_members_ahead(feed.spec, feed.state, buffered_rows=1) == set()
    assert select_members_ahead(feed.spec, feed.state, buffered_rows=2) == {A}


def test_a_member_behind_an_open_barrier_does_not_count_as_ahead() -> None:
    """Ahead is measured from where the section has been released to, so a barrier cannot dam its
    own partners.
    """
    feed = feed_of(release={"max_buffered_rows": 1, "max_ahead": "10us"})
    feed.add("a", Point(1), Barrier(2))
    feed.add("b", Point(500), Point(501))
    feed.step(0, {"a": 2, "b": 1})
    assert select_members_ahead(feed.spec, feed.state, buffered_rows=5) == set()
    assert list_blocked_members(feed.state) == {A}


def test_the_next_timer() -> None:
    """Idle timers, the build window, a barrier's timeout and the start-up grace.

    Whichever is first.
    """
    assert find_next_timer(feed_of().spec, create_initial_state(feed_of().spec)) is None
    feed = feed_of()
    feed.step(0)
    assert find_next_timer(feed.spec, feed.state) == 60 * S
    feed = feed_of(release={"build_window": "20s"})
    feed.add("a", Point(1), Barrier(2))
    feed.step(S)
    assert find_next_timer(feed.spec, feed.state) == 21 * S
    feed.add("b", Point(5))
    feed.step(2 * S)
    assert find_next_timer(feed.spec, feed.state) == 22 * S
    feed = feed_of(release={"startup_grace": "3s"}, coalesce={"idle_timeout": "never"})
    feed.add("a", Point(1))
    feed.step(0)
    assert find_next_timer(feed.spec, feed.state) == 3 * S
    feed.step(3 * S)
    assert find_next_timer(feed.spec, feed.state) is None


def test_the_clock_of_a_running_timer_is_worth_an_epoch() -> None:
    """Quiet epochs are not worth sealing, until the pipeline clock has to go on for a timer to be
    reached at all.
    """
    feed = feed_of()
    feed.add("a", Point(1))
    feed.step(0)
    assert not feed.step(S).decision.changed
    assert feed.step(11 * S).decision.changed
    feed = feed_of(coalesce={"idle_timeout": "never"})
    feed.add("a", Point(1))
    feed.step(0)
    assert not feed.step(60 * S).decision.changed


def test_each_thing_that_moves_makes_an_epoch_worth_sealing() -> None:
    """F alone, an outcome alone and released rows alone; no timer runs here."""
    quiet = {"idle_timeout": "never"}
    promised = pipeline(
        ("a",),
        {"punctuation": {"explicit": True}},
        coalesce=quiet,
        release={"mode": "pass_through"},
    )
    feed = Feed(promised)
    assert not feed.step(0).decision.changed
    feed.add("a", Punctuation(5))
    moved = feed.step(0).decision
    assert (moved.emitted, moved.recorded, moved.changed) == ((("watermark", 5),), (), True)
    recorded = feed.step(0, cancels=(3,)).decision
    assert (recorded.emitted, recorded.changed) == ((), True)
    feed = feed_of(coalesce=quiet)
    feed.add("a", Point(1))
    feed.add("b", Point(5))
    feed.step(0)
    feed.add("a", Barrier(2))
    released = feed.step(0).decision
    assert (released.emitted, released.recorded, released.changed) == ((), (), True)


def test_wall_clock_outcomes_are_recorded() -> None:
    """The decision has what the clock decided."""
    feed = feed_of(coalesce={"idle_timeout": "5s"}, release={"build_window": "2s"})
    feed.add("a", Point(1))
    feed.step(0)
    kinds = [r["kind"] for second in (2, 5) for r in feed.step(second * S).decision.recorded]
    assert kinds == ["residence_expired", "idle", "idle", "idle", "idle"]


def test_no_timer_of_a_source_runs_while_it_has_rows_left() -> None:
    """The next timer is that of a source whose rows have all been read."""
    source = {"lag": 0, "coalesce": {"idle_timeout": "never"}}
    feed = Feed(pipeline(("a",), source, coalesce={"idle_timeout": 50}))
    feed.add("a", Point(1), Point(2))
    feed.step(0, {"a": 1})
    assert find_next_timer(feed.spec, feed.state) is None
    feed.step(1)
    assert find_next_timer(feed.spec, feed.state) == 51


@pytest.mark.parametrize(("timeout", "timer"), [("60s", 50), ("59s", 59 * S)])
def test_a_source_that_repeats_the_default_timeout_has_that_of_the_output(
    timeout: str, timer: int
) -> None:
    """A source of one partition follows the output unless its timeout differs from the default.

    docs/semantics.md, section 1 (members, sources and levels).
    """
    source = {"lag": 0, "coalesce": {"idle_timeout": timeout}}
    spec = pipeline(("a",), source, coalesce={"idle_timeout": 50})
    assert resolve_partition_timeout(spec, spec.sources["a"]) == timer


def test_rows_that_no_epoch_has_read_stop_the_timer_of_a_source_without_any() -> None:
    """The first rows of a source count as its backlog although the cut leaves all of them unread.

    docs/semantics.md, section 1 (pending, status) and section 4.4.
    """
    source = {"lag": 0, "coalesce": {"idle_timeout": "never"}}
    feed = Feed(pipeline(("a",), source, coalesce={"idle_timeout": 50}))
    feed.step(0)
    assert find_next_timer(feed.spec, feed.state) == 50
    feed.add("a", Point(1))
    decision = feed.step(1, {}).decision
    assert decision.holder == {"member": "a/0", "since": 0, "why": "buffered rows"}
    assert find_next_timer(feed.spec, feed.state) is None


@pytest.mark.parametrize(
    "read",
    [
        {"rows": 1, "min_time": 5, "max_time": 5},
        {"quarantined": 1},
        {"dead": 1},
        {"barrier": BarrierRow(0, "run", None, 5)},
        {"punctuation": 5},
    ],
)
def test_whatever_is_read_of_a_member_restarts_its_idle_timers(read: dict[str, Any]) -> None:
    """Rows, barriers and new punctuation are activity, also rows that go to a side output.

    docs/semantics.md, section 1 (status). The second survey repeats the punctuation, which is none.
    """
    spec = pipeline(("a",), {"punctuation": {"explicit": True}}, coalesce={"idle_timeout": 50})
    state, repeated = create_initial_state(spec), {"punctuation": read.get("punctuation")}
    timers = []
    for now, seen in ((0, {}), (30, read), (40, repeated)):
        state = decide(spec, state, Survey(now, (MemberSurvey(A, **seen),))).after
        timers.append(find_next_timer(spec, state))
    assert timers == [50, 80, 80]
