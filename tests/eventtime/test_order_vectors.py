"""Ordered release and barrier events as users of an event orderer know them.

The project's own copy of those vectors.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.feed import Barrier, Feed, Point, Step, pipeline

from tidegate.jobs.eventtime.decision_types import BarrierHealth, BarrierOutcome
from tidegate.time_units import TICK_MIN

S = 1_000_000
KNOWN: dict[str, Any] = {"coalesce": {"members": "declared"}, "release": {"startup_grace": "0"}}


def orderer(**sections: Any) -> Feed:
    """Two sources known from the start, lag 0, build window 20 s."""
    return Feed(pipeline(("a", "b"), preset="nscldaq", **(KNOWN | sections)))


def points(*times: int) -> list[Point]:
    """Rows at these times."""
    return [Point(t) for t in times]


def closed(step: Step) -> list[tuple[BarrierOutcome, tuple[str, ...], tuple[str, ...]]]:
    """Outcome, participants and missing members of every barrier that closed."""
    return [(b.outcome, tuple(b.participants), b.missing) for b in step.decision.barriers]


def test_rows_leave_up_to_the_least_of_the_newest() -> None:
    """O1: with data in every queue, rows up to the least of the largest times leave, those equal to
    it too.
    """
    feed = orderer()
    feed.add("a", *points(10, 30))
    feed.add("b", *points(20, 25))
    assert feed.step(0).times == [10, 20, 25]
    assert feed.buffered == [30]


def test_a_source_not_yet_discovered_is_not_waited_for() -> None:
    """O2: without a grace the first source's row leaves at once and the second source's older row
    is late.
    """
    feed = Feed(pipeline(("a", "b"), preset="nscldaq", release={"startup_grace": "0"}))
    feed.add("a", *points(100))
    assert feed.step(0).times == [100]
    feed.add("b", *points(90))
    step = feed.step(S)
    assert step.times == [90]
    assert step.decision.order_late is not None
    assert step.decision.order_late.time == 100


def test_the_start_up_grace_gathers_sources_first() -> None:
    """O2: with a grace of 2 s nothing leaves before it has passed, then both sources' rows leave in
    order.
    """
    feed = Feed(pipeline(("a", "b"), preset="nscldaq"))
    feed.add("a", *points(100))
    step = feed.step(0)
    assert (step.times, step.decision.frontier_after) == (
        [],
        TICK_MIN,
    )  # nor does the frontier: b's rows are not late then
    feed.add("b", *points(90))
    step = feed.step(S)
    assert (step.times, step.decision.frontier_after) == ([], TICK_MIN)
    released = feed.step(2 * S).times
    for second in range(3, 22):
        released += feed.step(second * S).times
    assert released == [90, 100]


def test_the_end_of_the_start_up_grace_is_recorded_once() -> None:
    """It used a clock, so a replay needs it; docs/semantics.md, section 1 (recorded decisions)."""
    feed = Feed(pipeline(("a", "b"), preset="nscldaq"))
    feed.add("a", *points(100))
    found = [feed.step(second * S).decision.recorded for second in range(4)]
    assert found == [(), (), ({"kind": "startup_grace_over"},), ()]


def test_the_build_window_lets_rows_go_without_the_silent_source() -> None:
    """O3: a row leaves when it has waited exactly the build window.

    The silent source's older row is then late.
    """
    feed = orderer()
    feed.add("a", *points(100))
    assert feed.step(0).times == []
    feed.add("a", *points(110))
    assert feed.step(5 * S).times == []
    assert feed.step(15 * S).times == []
    assert feed.step(19 * S).times == []
    assert feed.step(20 * S).times == [100]
    assert feed.step(24 * S).times == []
    assert feed.step(25 * S).times == [110]
    feed.add("b", *points(90))
    step = feed.step(26 * S)
    assert step.times == [90]
    feed.add("a", *points(120))
    assert feed.step(27 * S).times == []
    assert feed.buffered == [120]


def test_an_expired_time_counts_as_released_in_the_exact_order() -> None:
    """With inclusive frontiers F passes the expired time, as it passes every row that has left."""
    feed = orderer()
    feed.add("a", *points(100))
    steps = [feed.step(second * S) for second in (0, 10, 20)]
    assert [step.times for step in steps] == [[], [], [100]]
    assert steps[-1].frontier_after == 101


def test_late_rows_start_no_residence() -> None:
    """A row that leaves at once, because it is late, expires nothing, whatever the window is."""
    feed = orderer(release={"startup_grace": "0", "build_window": "0"})
    feed.add("a", *points(100))
    assert [r["kind"] for r in feed.step(0).decision.recorded] == ["residence_expired"]
    feed.add("a", *points(50))
    step = feed.step(S)
    assert (step.times, step.decision.recorded) == ([50], ())


def test_a_barrier_holds_back_the_rows_behind_it() -> None:
    """O4: rows before the barrier leave, rows behind it wait until all sources have delivered
    theirs.
    """
    feed = orderer()
    feed.add("a", Point(10), Barrier(11), Point(20))
    feed.add("b", *points(12, 15))
    step = feed.step(0)
    assert step.times == [10, 12, 15]
    assert step.decision.blocked == ("a/0",)
    feed.add("b", Barrier(16))
    assert closed(feed.step(S)) == [(BarrierOutcome.COMPLETE, ("a/0", "b/0"), ())]
    feed.add("b", *points(30))
    assert feed.step(2 * S).times == [20]


def test_an_incomplete_barrier_names_who_is_missing() -> None:
    """O5: the barrier times out strictly after four build windows, naming the missing source.

    Then flow resumes.
    """
    feed = orderer()
    feed.add("a", Barrier(11), Point(20))
    feed.add("b", *points(15))
    assert feed.step(0).times == [15]
    for second in range(10, 81, 10):
        assert closed(feed.step(second * S)) == []
    step = feed.step(81 * S)
    assert closed(step) == [(BarrierOutcome.INCOMPLETE, ("a/0",), ("b/0",))]
    assert step.decision.recorded == (
        {"kind": "barrier", "id": 1, "outcome": "incomplete", "cause": "timeout"},
    )
    released = [feed.step(second * S).times for second in (82, 92, 102)]
    assert released == [[], [], [20]]


def test_types_that_differ_make_a_heterogeneous_barrier() -> None:
    """O6: the barrier is complete and lists each source's type; it is not homogeneous."""
    feed = orderer()
    feed.add("a", Barrier(101, "begin"))
    feed.add("b", Barrier(102, "end"))
    (barrier,) = feed.step(0).decision.barriers
    assert barrier.outcome is BarrierOutcome.COMPLETE
    assert (barrier.types, barrier.homogeneous) == (("begin", "end"), False)


def test_with_a_build_window_of_zero_rows_leave_at_once() -> None:
    """O7: off is not zero: a window of zero releases at once, and an older row is reported late
    once.
    """
    feed = orderer(release={"startup_grace": "0", "build_window": "0"})
    feed.add("a", *points(100))
    assert feed.step(0).times == [100]
    feed.add("b", *points(50))
    step = feed.step(S)
    assert step.times == [50]
    assert step.decision.order_late is not None
    assert step.decision.order_late.time == 100


def test_queued_barriers_are_two_barriers() -> None:
    """O9: a second pair of barriers already queued is a second complete barrier, never data."""
    feed = orderer()
    feed.add("a", Barrier(5), Point(10), Barrier(20))
    feed.add("b", Barrier(6), Point(12), Barrier(21))
    first, second = feed.step(0), feed.step(S)
    assert closed(first) == closed(second) == [(BarrierOutcome.COMPLETE, ("a/0", "b/0"), ())]
    assert second.times == [10, 12]
    assert [b.id for s in (first, second) for b in s.decision.barriers] == [1, 2]


def test_a_tardy_barrier_is_not_paired_with_the_next() -> None:
    """O10: the partner's late barrier is recorded with the barrier it missed, and the next one
    waits for its own.
    """
    feed = orderer()
    feed.add("a", Barrier(11, "run1"))
    for second in range(0, 81, 10):
        assert closed(feed.step(second * S)) == []
    assert closed(feed.step(81 * S)) == [(BarrierOutcome.INCOMPLETE, ("a/0",), ("b/0",))]
    feed.add("b", Point(9), Barrier(12, "run1"))
    decision = feed.step(90 * S).decision
    (tardy,) = decision.barriers
    assert (decision.section, decision.flagged) == (
        1,
        ("b/0",),
    )  # rows before it leave in the current section, flagged
    assert (tardy.id, tardy.outcome, tardy.tardy) == (1, BarrierOutcome.INCOMPLETE, ("b/0",))
    feed.add("a", Barrier(50, "run2"))
    step = feed.step(100 * S)
    assert closed(step) == []
    assert step.decision.blocked == ("a/0",)
    feed.add("b", Barrier(51, "run2"))
    (barrier,) = feed.step(101 * S).decision.barriers
    assert (barrier.id, barrier.outcome, barrier.homogeneous) == (2, BarrierOutcome.COMPLETE, True)


def test_an_open_barrier_starves_no_other_member() -> None:
    """O11: rows of the other source leave although one source waits at its barrier.

    What it held is not late.
    """
    feed = orderer()
    feed.add("a", Barrier(11), Point(20))
    feed.add("b", *points(12, 15, 30))
    step = feed.step(0)
    assert step.times == [12, 15, 30]
    for second in range(10, 81, 10):
        feed.step(second * S)
    assert closed(feed.step(81 * S)) == [(BarrierOutcome.INCOMPLETE, ("a/0",), ("b/0",))]
    step = feed.step(82 * S)
    assert (step.times, step.decision.section) == ([20], 1)


def test_an_expired_residence_passes_no_row_behind_a_barrier() -> None:
    """Rows leave when they have stayed long enough, but the frontier of the windows waits for what
    a barrier holds back.
    """
    feed = Feed(pipeline(("a", "b", "c"), preset="nscldaq", **KNOWN))
    feed.add("a", Point(10), Barrier(11), Point(20))
    feed.add("b", Point(30))
    assert feed.step(0).times == []  # nothing of c yet
    for second in (10, 20):
        step = feed.step(second * S)
    assert step.times == [10, 30]
    assert step.decision.frontier_after == 11  # not 31: row 20 of a is still to come


def test_a_row_below_what_left_at_an_open_barrier_is_late() -> None:
    """While a waits at its barrier the section goes on ahead of F.

    A row that would break its order is late.
    """
    feed = Feed(pipeline(("a", "b"), {"lag": 2}, coalesce={"idle_timeout": "never"}))
    feed.add("a", Point(10), Barrier(11))
    feed.add("b", *points(25, 30))
    step = feed.step(0)
    assert (step.times, step.decision.frontier_after) == ([10, 25], 8)
    feed.add("b", *points(20, 29))
    step = feed.step(1)
    assert ([p.time for p in step.late], step.times) == ([20], [])


def test_a_partition_that_catches_up_does_not_take_its_source_back_at_a_barrier() -> None:
    """Rows below the source's own frontier leave although a partition that woke up is behind it.

    docs/semantics.md, sections 1 (F never falls) and 3.3.
    """
    source = {"lag": 0, "partition_by": "folder", "coalesce": {"idle_timeout": 5}}
    feed = Feed(pipeline(("s", "t"), source, coalesce={"idle_timeout": "never"}), empty=True)
    feed.add("s", Point(30), partition="1")
    for now in (0, 5):
        feed.add("s", Point(50), partition="0")
        feed.add("t", Point(20))
        step = feed.step(now)
    assert (step.statuses["s/1"], step.frontier_after) == ("idle", 20)
    feed.add("s", Barrier(51), partition="0")
    feed.add("s", Point(45), partition="1")
    feed.add("t", Barrier(21))
    step = feed.step(6)
    assert (step.times, step.frontier_after) == ([20, 20, 30, 45], 20)


def test_every_late_row_is_counted() -> None:
    """O12: three rows below what was released are three late rows, not one."""
    feed = orderer(release={"startup_grace": "0", "on_late": "side_output"})
    feed.add("a", *points(100))
    released = [feed.step(second * S).times for second in (0, 10, 20)]
    assert released == [[], [], [100]]
    feed.add("b", *points(50, 60, 70))
    assert [p.time for p in feed.step(21 * S).late] == [50, 60, 70]


def test_disorder_inside_a_source_is_sorted() -> None:
    """O13: rows of one source that arrive out of order leave in order."""
    feed = orderer()
    feed.add("a", *points(10, 30, 20))
    feed.add("b", *points(40))
    assert feed.step(0).times == [10, 20, 30]


def test_an_outage_expires_nothing_by_itself() -> None:
    """After a gap of an hour the pipeline clock has moved by its largest step, and catches nothing up.

    The row still waits.
    """
    feed = orderer()
    feed.add("a", *points(100))
    feed.step(0)
    step = feed.step(3600 * S)
    assert step.times == []
    assert step.decision.now == 10 * S
    assert [feed.step(at * S).decision.now for at in (3601, 3609)] == [11 * S, 19 * S]
    assert feed.step(3610 * S).times == [100]


def test_a_wall_clock_that_goes_back_takes_no_timer_back() -> None:
    """The pipeline clock stops until the wall clock has caught up."""
    feed = orderer()
    feed.add("a", *points(100))
    assert [feed.step(at * S).decision.now for at in (7, 3, 8)] == [7 * S, 7 * S, 8 * S]


def test_the_build_window_waits_for_a_source_that_has_rows() -> None:
    """A row does not expire while the source it waits for still had rows to read when the cut was
    planned.
    """
    feed = orderer()
    feed.add("a", *points(100))
    feed.add("b", *points(10, 20, 30))
    assert feed.step(0, {"a": 1, "b": 1}).times == [10]
    for second in (10, 20):
        assert feed.step(second * S, {}).times == []
    assert feed.step(30 * S, {"b": 1}).times == [20]
    assert feed.step(31 * S).times == [30, 100]


def test_a_residence_waits_for_the_partition_that_has_rows_not_for_its_source() -> None:
    """A row expires that is below the frontier of the partition with rows left to read.

    docs/semantics.md, section 3.2. The other partition is silent, and the source is at its frontier.
    """
    source = {"lag": 0, "partition_by": "folder"}
    release = {"build_window": "20s"}
    spec = pipeline(("a", "b"), source, coalesce={"idle_timeout": None}, release=release)
    feed = Feed(spec)
    feed.add("a", *points(20))
    feed.add("b", *points(10), partition="1")
    assert feed.step(0).times == []
    feed.add("b", *points(30, 40))
    assert feed.step(10 * S, {"b": 1}).times == []
    step = feed.step(20 * S, {})
    assert (step.times, step.frontier_after) == ([10, 20], 20)


def test_a_dead_source_is_missing_and_waited_for_no_longer() -> None:
    """A source that fell idle is missing from the barrier, which closes at once when all the others
    arrived.
    """
    feed = orderer(coalesce={"members": "declared", "idle_timeout": "5s"})
    feed.add("a", Point(1), Barrier(2))
    assert closed(feed.step(0)) == []
    feed.add("a", Point(3))
    assert closed(feed.step(5 * S)) == [(BarrierOutcome.INCOMPLETE, ("a/0",), ("b/0",))]


def test_an_ended_source_satisfies_every_barrier() -> None:
    """A done source counts as having delivered: the barrier is complete and lists it as ended."""
    feed = orderer()
    feed.add("a", Barrier(1))
    feed.end("b")
    (barrier,) = feed.step(0).decision.barriers
    assert (barrier.outcome, barrier.ended) == (BarrierOutcome.COMPLETE, ("b/0",))


def test_a_barrier_can_be_aborted_by_hand() -> None:
    """An open barrier aborted by request closes as aborted, and the partner's own barrier of it is
    ignored: it is neither tardy nor the next one.
    """
    feed = orderer()
    feed.add("a", Barrier(1))
    feed.step(0)
    (barrier,) = feed.step(S, aborts=(1,)).decision.barriers
    assert barrier.outcome is BarrierOutcome.ABORTED
    feed.add("b", Point(1), Barrier(2))
    decision = feed.step(2 * S).decision
    assert (decision.barriers, decision.flagged, decision.blocked) == ((), (), ())
    feed.add("a", Barrier(9))
    feed.add("b", Barrier(9))
    assert closed(feed.step(3 * S)) == [(BarrierOutcome.COMPLETE, ("a/0", "b/0"), ())]


def test_a_barrier_to_come_can_be_aborted() -> None:
    """A future ordinal aborted by request is ignored when it arrives, from every source."""
    feed = orderer()
    assert [b.outcome for b in feed.step(0, aborts=(1,)).decision.barriers] == [
        BarrierOutcome.ABORTED
    ]
    feed.add("a", Barrier(1), Point(5))
    feed.add("b", Barrier(1), Point(6))
    assert feed.step(S).decision.blocked == ()
    feed.add("a", Barrier(9))
    feed.add("b", Barrier(9))
    steps: list[BarrierHealth] = [
        b for second in (2, 3) for b in feed.step(second * S).decision.barriers
    ]
    assert [(b.id, b.outcome) for b in steps] == [(2, BarrierOutcome.COMPLETE)]
