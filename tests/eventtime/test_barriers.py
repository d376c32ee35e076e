"""Barrier events by id, overtaking, cancelling and resynchronisation, on the decider's own
barriers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conformance.feed import Barrier, Feed, Point, pipeline

from tidegate.errors import PoisonError
from tidegate.jobs.eventtime.barriers import Barriers
from tidegate.jobs.eventtime.decision_types import BarrierOutcome, BarrierRow
from tidegate.jobs.spec.event_time_options import BarrierOptions

COMPLETE, INCOMPLETE, ABORTED = (
    BarrierOutcome.COMPLETE,
    BarrierOutcome.INCOMPLETE,
    BarrierOutcome.ABORTED,
)


class Rig:
    """Members a, b, c; every signal settles at once and goes through JSON."""

    def __init__(self, timeout: int | None = None, **options: Any) -> None:
        self.options = BarrierOptions(**options)
        self.timeout = timeout
        self.roster = dict.fromkeys("abc", "active")
        self.state = Barriers(self.options, timeout).to_dict()
        self.clock = 0

    def open(self) -> Barriers:
        barriers = Barriers.from_dict(
            self.options, self.timeout, json.loads(json.dumps(self.state, sort_keys=True))
        )
        barriers.roster = self.roster
        return barriers

    def close(
        self, barriers: Barriers, *pending: str
    ) -> list[tuple[int, BarrierOutcome, tuple[str, ...]]]:
        barriers.close_ready(self.clock, pending)
        closed = barriers.take_closed()
        self.state = barriers.to_dict()
        return [(c.health.id, c.health.outcome, c.health.tardy or c.health.missing) for c in closed]

    def arrive(
        self, member: str, id_: int | None = None, *, type_: str = "run", time: int = 0
    ) -> Any:
        barriers = self.open()
        row = BarrierRow(self.clock, type_, id_, time)
        barriers.record_arrival(member, row, self.clock)
        return self.close(barriers)

    def tick(self, clock: int, *pending: str) -> Any:
        self.clock = clock
        return self.close(self.open(), *pending)


def test_a_source_that_delivers_a_greater_id_has_skipped_the_smaller() -> None:
    """Under `queue` the skipped barrier closes without it once all others arrived.

    Its own one waits its turn.
    """
    rig = Rig(identity="id")
    assert (rig.arrive("a", 1), rig.arrive("b", 2)) == ([], [])
    assert rig.arrive("c", 1) == [(1, INCOMPLETE, ("b",))]
    assert (rig.arrive("a", 2), rig.arrive("c", 2)) == ([], [(2, COMPLETE, ())])


def test_a_late_id_is_ignored_or_recorded_as_tardy() -> None:
    """An id that closed without the member is recorded when it comes after all.

    An aborted one is ignored.
    """
    rig = Rig(identity="id", timeout=10)
    rig.arrive("a", 1)
    rig.arrive("b", 1)
    assert rig.tick(10) == []
    assert rig.tick(11) == [(1, INCOMPLETE, ("c",))]
    assert rig.arrive("c", 1) == [(1, INCOMPLETE, ("c",))]
    assert rig.open().members_at_barrier() == set()


def test_a_newer_id_subsumes_the_open_one() -> None:
    """Under `subsume` the older one aborts and its sources unblock.

    Older ids are ignored from then on.
    """
    rig = Rig(identity="id", overtake="subsume")
    rig.arrive("a", 1)
    assert rig.arrive("b", 2) == [(1, ABORTED, ("b", "c"))]
    assert rig.open().blocked_members() == {"b"}
    assert (rig.arrive("c", 1), rig.open().blocked_members()) == ([], {"b"})


def test_under_subsume_an_older_id_never_opens_behind_a_newer_one() -> None:
    """A barrier that was never seen before is ignored while one with a greater id is open."""
    rig = Rig(identity="id", overtake="subsume")
    rig.arrive("a", 2)
    assert rig.arrive("b", 1) == []
    assert ([b["id"] for b in rig.open().open], rig.open().blocked_members()) == ([2], {"a"})


def test_a_closed_barrier_says_why_it_closed() -> None:
    """Complete, without members that it no longer waits for, or by its timeout."""
    causes = []
    for idle, arriving, clock in (("", "abc", 0), ("c", "ab", 0), ("", "a", 11)):
        rig = Rig(timeout=10)
        rig.roster |= dict.fromkeys(idle, "idle")
        barriers = rig.open()
        for member in arriving:
            barriers.record_arrival(member, BarrierRow(0, "run", None, 0), 0)
        barriers.close_ready(clock, ())
        causes += [closed.cause for closed in barriers.take_closed()]
    assert causes == ["complete", "missing", "timeout"]


def test_abort_concerns_one_id_and_cancel_all_up_to_it() -> None:
    """An id aborted before its first arrival is ignored, the ids before it are not.

    `cancel` ends those too.
    """
    rig = Rig(identity="id")
    barriers = rig.open()
    assert barriers.abort(3, 0)
    assert not barriers.abort(3, 0)
    assert rig.close(barriers) == [(3, ABORTED, ())]
    assert rig.arrive("a", 1) == []
    assert (rig.arrive("b", 3), rig.open().members_at_barrier()) == ([], {"a"})
    barriers = rig.open()
    barriers.cancel_up_to(2, 0)
    assert [c[:2] for c in rig.close(barriers)] == [(1, ABORTED), (2, ABORTED)]
    assert (rig.arrive("b", 2), rig.open().members_at_barrier()) == ([], set())


def test_arrivals_at_an_aborted_ordinal_are_ignored() -> None:
    """Whether it was open or still to come; they are not tardy, and the next one is complete."""
    rig = Rig()
    barriers = rig.open()
    assert barriers.abort(1, 0)
    rig.close(barriers)
    assert [rig.arrive(member) for member in "abc"] == [[], [], []]
    rig.arrive("a", time=5)
    barriers = rig.open()
    assert barriers.abort(2, 0)
    rig.close(barriers)
    assert [rig.arrive(member, time=5) for member in "bc"] == [[], []]
    assert [rig.arrive(member, time=9) for member in "abc"][2] == [(3, COMPLETE, ())]


def abort_second_ordinal() -> Rig:
    """Member a has delivered the first two ordinals, b none; the second one is aborted."""
    rig = Rig(alignment="pass")
    rig.roster = dict.fromkeys("ab", "active")
    rig.arrive("a", time=10)
    rig.arrive("a", time=20)
    barriers = rig.open()
    assert barriers.abort(2, 0)
    rig.close(barriers)
    return rig


def test_an_abort_of_a_second_open_ordinal_concerns_no_later_row() -> None:
    """The member at it has delivered it; the other's row of it is ignored, and the next one is not.

    docs/semantics.md, section 3.6.
    """
    rig = abort_second_ordinal()
    assert not rig.open().abort(2, 0)
    assert rig.arrive("b", time=10) == [(1, COMPLETE, ())]
    assert rig.arrive("b", time=20) == []
    assert rig.arrive("a", time=30) == []
    assert rig.arrive("b", time=30) == [(3, COMPLETE, ())]


def test_a_row_goes_to_no_closed_ordinal_behind_an_open_one() -> None:
    """The open one is the member's next, also if the time of its row is nearer to a later one.

    docs/semantics.md, section 3.5.
    """
    rig = abort_second_ordinal()
    assert rig.arrive("b", time=19) == [(1, COMPLETE, ())]
    assert rig.arrive("b", time=29) == []
    assert rig.arrive("a", time=30) == []
    assert rig.arrive("b", time=39) == [(3, COMPLETE, ())]


def test_ordinals_up_to_a_cancelled_one_are_ignored() -> None:
    """Those that were open and those still to come; the number behind them opens next."""
    rig = Rig()
    rig.arrive("a")
    barriers = rig.open()
    barriers.cancel_up_to(3, 0)
    assert [c[:2] for c in rig.close(barriers)] == [(1, ABORTED), (3, ABORTED)]
    assert not rig.open().abort(2, 0)
    for time, members in ((0, "bc"), (5, "abc"), (9, "abc")):
        assert [rig.arrive(member, time=time) for member in members] == [[]] * len(members)
    assert rig.open().open == []
    assert [rig.arrive(member, time=20) for member in "abc"][2] == [(4, COMPLETE, ())]
    assert (rig.state["missed"], "cancelled" in rig.state) == ({}, False)


def test_a_cancel_leaves_later_barriers_open() -> None:
    """Only the barriers up to the id of the cancel are aborted; docs/semantics.md, section 3.6."""
    rig = Rig(identity="id")
    rig.arrive("a", 1)
    rig.arrive("b", 5)
    barriers = rig.open()
    barriers.cancel_up_to(3, 0)
    assert [c[:2] for c in rig.close(barriers)] == [(1, ABORTED), (3, ABORTED)]
    assert [b["id"] for b in rig.open().open] == [5]


def test_an_aborted_id_is_remembered_only_until_a_later_one_closes() -> None:
    """Every id up to a closed one is past, so the state does not grow with the aborted ones."""
    rig = Rig(identity="id")
    barriers = rig.open()
    barriers.abort(3, 0)
    rig.close(barriers)
    assert rig.state["aborted"] == [3]
    assert [rig.arrive(member, 5) for member in "abc"][2] == [(5, COMPLETE, ())]
    assert (rig.state["aborted"], rig.state["last_id"]) == ([], 5)


def test_the_checkpoint_class_aborts_on_timeout() -> None:
    """`on_timeout: abort`, strictly after the timeout, counted from the later of first arrival and
    previous close.
    """
    rig = Rig(identity="id", timeout=10, on_timeout="abort")
    rig.arrive("a", 1)
    rig.clock = 5
    rig.arrive("b", 2)
    assert rig.tick(11) == [(1, ABORTED, ("b", "c"))]
    assert rig.tick(21) == []
    assert rig.tick(22) == [(2, ABORTED, ("a", "c"))]


def test_the_timer_that_runs_is_that_of_the_oldest_barrier() -> None:
    """It runs from the first arrival or from the close before, whichever is later.

    docs/semantics.md, section 3.5: it has expired when strictly more than the timeout has passed.
    """
    rig = Rig(identity="id", timeout=10)
    assert rig.open().timeout_at() is None
    rig.arrive("a", 1)
    rig.clock = 5
    rig.arrive("b", 2)
    assert rig.open().timeout_at() == 11
    assert rig.tick(11) == [(1, INCOMPLETE, ("b", "c"))]
    assert rig.open().timeout_at() == 22


def test_no_barrier_times_out_while_the_awaited_has_rows() -> None:
    """A member with rows left may still deliver: the timer runs on but does not expire."""
    rig = Rig(timeout=10)
    rig.arrive("a")
    assert rig.tick(50, "b") == []
    assert rig.tick(51) == [(1, INCOMPLETE, ("b", "c"))]


def test_resynchronisation_prefers_type_then_time_then_age() -> None:
    """A tardy barrier goes to the candidate of its type, then of nearest time.

    Older candidates are missed for good.
    """
    rig = Rig(timeout=10)
    for number, (type_, time) in enumerate([("begin", 100), ("end", 200), ("begin", 300)]):
        rig.clock = number * 100
        rig.arrive("a", type_=type_, time=time)
        rig.arrive("b", type_=type_, time=time)
        rig.tick(number * 100 + 11)
    assert rig.arrive("c", type_="end", time=290) == [(2, INCOMPLETE, ("c",))]
    assert rig.arrive("c", type_="end", time=290) == [(3, INCOMPLETE, ("c",))]
    rig.arrive("a", type_="begin", time=400)
    rig.arrive("b", type_="begin", time=400)
    assert rig.arrive("c", type_="begin", time=400) == [(4, COMPLETE, ())]


def test_a_member_back_in_step_joins_the_open_barrier() -> None:
    """The open barrier is a candidate like the missed ones.

    Chosen, it leaves those missed for good.
    """
    rig = Rig(timeout=10)
    rig.arrive("a", type_="begin", time=100)
    rig.arrive("b", type_="begin", time=100)
    rig.tick(11)
    rig.arrive("a", type_="begin", time=500)
    rig.arrive("b", type_="begin", time=500)
    assert rig.arrive("c", type_="begin", time=499) == [(2, COMPLETE, ())]
    assert rig.state["missed"] == {}


def test_two_tardy_members_are_both_on_record() -> None:
    """The second amendment of a barrier names the first tardy member as well."""
    rig = Rig(timeout=10)
    rig.arrive("a")
    rig.tick(11)
    assert rig.arrive("b") == [(1, INCOMPLETE, ("b",))]
    assert rig.arrive("c") == [(1, INCOMPLETE, ("b", "c"))]


def test_members_that_are_tardy_together_are_all_named() -> None:
    """The rows of each of them leave flagged; docs/semantics.md, section 3.5."""
    rig = Rig(timeout=10)
    rig.arrive("a")
    rig.tick(11)
    barriers = rig.open()
    for member in "bc":
        barriers.record_arrival(member, BarrierRow(1, "run", None, 0), 12)
    assert barriers.tardy_members() == {"b", "c"}


def test_a_tardy_member_of_one_barrier_changes_no_other() -> None:
    """Two members missed the same two barriers; the one that comes for the older one is listed there.

    docs/semantics.md, sections 3.5 and 3.7.
    """
    rig = Rig(timeout=10)
    for number, type_ in enumerate(("begin", "end")):
        rig.clock = number * 100
        rig.arrive("a", type_=type_, time=100 * number)
        rig.tick(number * 100 + 11)
    assert rig.arrive("b", type_="end", time=100) == [(2, INCOMPLETE, ("b",))]
    assert rig.arrive("c", type_="begin", time=0) == [(1, INCOMPLETE, ("c",))]
    assert rig.arrive("c", type_="end", time=100) == [(2, INCOMPLETE, ("b", "c"))]


def test_a_tardy_row_is_matched_by_its_own_id() -> None:
    """A row with an id that no barrier had is not taken for a barrier that its member missed.

    docs/semantics.md, section 3.5.
    """
    rig = Rig(identity="id", timeout=10)
    rig.arrive("a", 3000)
    rig.arrive("b", 3000)
    assert rig.tick(11) == [(3000, INCOMPLETE, ("c",))]
    assert rig.arrive("c", 2000) == []
    rig.arrive("a", 4000)
    rig.arrive("b", 4000)
    assert rig.tick(22) == [(4000, INCOMPLETE, ("c",))]
    assert rig.arrive("c", 4000) == [(4000, INCOMPLETE, ("c",))]


def test_a_member_that_goes_past_an_id_has_missed_it_for_good() -> None:
    """It delivered a later barrier, so a row of the older one is ignored and not tardy.

    docs/semantics.md, section 3.4.
    """
    rig = Rig(identity="id", timeout=10)
    rig.arrive("a", 1)
    rig.arrive("b", 1)
    assert rig.tick(11) == [(1, INCOMPLETE, ("c",))]
    assert [rig.arrive(member, 2) for member in "cab"] == [[], [], [(2, COMPLETE, ())]]
    assert rig.arrive("c", 1) == []


def test_a_smaller_id_leaves_newer_missed_ones_to_come() -> None:
    """Only older ones are missed for good, so the newer one is tardy when it comes.

    docs/semantics.md, section 3.5; the smaller id was aborted, so its row is ignored.
    """
    rig = Rig(identity="id", timeout=10)
    barriers = rig.open()
    barriers.abort(2, 0)
    rig.close(barriers)
    for member in "ab":
        rig.arrive(member, 3)
    assert rig.tick(11) == [(3, INCOMPLETE, ("c",))]
    assert rig.arrive("c", 2) == []
    assert rig.arrive("c", 3) == [(3, INCOMPLETE, ("c",))]


def test_only_members_that_ended_are_listed_as_ended() -> None:
    """A member that is missing is not: `missing` and `ended` exclude each other.

    docs/semantics.md, sections 3.4 and 3.7.
    """
    rig = Rig(timeout=10)
    rig.roster["b"] = "done"
    rig.arrive("a")
    barriers = rig.open()
    barriers.close_ready(11, ())
    (closed,) = barriers.take_closed()
    assert (closed.health.ended, closed.health.missing) == (("b",), ("c",))


def test_what_is_remembered_of_a_silent_member_is_bounded() -> None:
    """A member that never sends a barrier does not make the state grow forever."""
    rig = Rig(timeout=0)
    for number in range(1, 101):
        rig.arrive("a")
        rig.arrive("b")
        rig.tick(number)
    assert len(rig.state["missed"]["c"]) == 64


def test_an_id_is_required_where_barriers_are_paired_by_id() -> None:
    """The row is named."""
    with pytest.raises(PoisonError, match="barrier row of a at position 0 has no id"):
        Rig(identity="id").arrive("a")


def test_under_pass_a_second_barrier_is_another_one() -> None:
    """A member may deliver its next barrier while the first is open.

    Two numbers, and each waits for its own partner.
    """
    feed = Feed(
        pipeline(
            ("a", "b"),
            {"lag": 0},
            barriers={"alignment": "pass"},
            coalesce={"idle_timeout": "never"},
        )
    )
    feed.add("a", Barrier(1), Barrier(2))
    feed.add("b", Point(1))
    assert [b.id for now in (0, 1) for b in feed.step(now).decision.barriers] == []
    feed.add("b", Barrier(1), Barrier(2))
    assert [b.id for now in (2, 3) for b in feed.step(now).decision.barriers] == [1, 2]


def test_under_pass_data_flows_behind_the_barrier_but_the_frontier_waits() -> None:
    """At least once.

    Rows behind an open barrier leave, F does not pass it; it catches up on the close.
    """
    feed = Feed(
        pipeline(
            ("a", "b"), {"lag": 0}, release={"mode": "pass_through"}, barriers={"alignment": "pass"}
        )
    )
    feed.add("a", Point(1), Barrier(2), Point(50))
    feed.add("b", Point(40))
    assert feed.step(0).times == [1, 40]
    step = feed.step(0)
    assert (step.times, step.decision.frontier_after) == ([50], 1)
    feed.add("a", Barrier(51), Point(60))
    assert feed.step(0).decision.blocked == ("a/0",)
    feed.add("b", Barrier(41))
    step = feed.step(0)
    assert (step.decision.section, step.decision.after["barriers"]["section"]) == (0, 1)
    assert step.decision.frontier_after == 40  # what stood between a's two barriers counts now
    feed.add("b", Point(70))
    step = feed.step(0)
    assert (step.times, step.decision.frontier_after) == ([60, 70], 50)
    feed.add("b", Barrier(71))
    assert feed.step(0).decision.frontier_after == 60


def removable(**sections: Any) -> Feed:
    """Partitions a, b and c of one source, which never idle."""
    never = {"idle_timeout": "never"}
    source = {"lag": 0, "partition_by": "folder", "coalesce": never}
    feed = Feed(pipeline(("s",), source, coalesce=never, **sections), empty=True)
    for partition in "abc":
        feed.add("s", Point(1), partition=partition)
    feed.step(0)
    return feed


def test_a_partition_that_is_gone_leaves_no_state_behind() -> None:
    """Nor the barriers that it missed, so names that come and go do not make the state grow."""
    feed = removable(barriers={"timeout": 10})
    feed.add("s", Barrier(2), partition="a")
    feed.add("s", Barrier(2), partition="b")
    feed.step(1)
    assert [b.missing for b in feed.step(12).decision.barriers] == [("s/c",)]
    assert feed.state["barriers"]["missed"].keys() == {"s/c"}
    feed.remove("s", "c")
    feed.step(13)
    assert feed.state["barriers"]["missed"] == {}
    assert feed.state["members"].keys() == feed.state["sources"]["s"]["inputs"].keys()
    assert feed.state["members"].keys() == {"s/a", "s/b"}


def test_a_barrier_closes_although_a_partition_at_it_is_gone() -> None:
    """What the partition held behind its barrier went with it; the others go on."""
    feed = removable(barriers={"alignment": "pass"})
    feed.add("s", Barrier(2), Point(9), partition="a")
    feed.add("s", Barrier(2), Point(5), partition="b")
    feed.step(1)
    feed.step(1)
    feed.remove("s", "a")
    feed.add("s", Barrier(2), Point(7), partition="c")
    assert feed.step(2).completed == (1,)
    assert feed.step(3).frontier_after == 5


def test_a_wall_clock_does_not_pass_a_barrier_in_the_epoch_that_closes_it() -> None:
    """Rows that were held behind it count at once; the clock counts from the next epoch on."""
    clocked = {"wall_clock": {"lag": 0, "cap": False}}
    feed = Feed(pipeline(("a", "b"), clocked, barriers={"alignment": "pass"}))
    feed.add("a", Point(1), Barrier(2))
    feed.add("b", Point(1))
    before = feed.step(10).frontier_after
    feed.add("a", Point(3))
    feed.add("b", Barrier(2))
    closing = feed.step(20)
    assert closing.completed == (1,)
    assert (closing.frontier_after, feed.step(20).frontier_after) == (before, 20)
