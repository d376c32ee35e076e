"""Frontiers and statuses of coalesced inputs.

The project's own copy of the vectors of stream engines.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.feed import Feed, Point, Punctuation, pipeline

from tidegate.errors import PoisonError
from tidegate.jobs.eventtime.frontiers import Coalescer
from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.time_units import TICK_MAX, TICK_MIN

FREEZE: dict[str, Any] = {
    "idle_timeout": None,
    "revived": "freeze",
    "joins": "hold",
    "all_done": "hold",
}
IGNORE: dict[str, Any] = {
    "idle_timeout": None,
    "revived": "ignore",
    "on_idle_punctuation": "ignore",
    "joins": "hold",
}


class Inputs:
    """Inputs 0, 1, .. of one coalescer; every call gives what it emits."""

    def __init__(self, count: int, regress: Any = "ignore", **options: Any) -> None:
        self.coalescer = Coalescer(CoalesceOptions(**options), regress)
        for number in range(count):
            self.coalescer.join(str(number))

    def at(self, number: int, value: int) -> list[int | str]:
        self.coalescer.signal_frontier(str(number), value)
        return self.emitted()

    def idle(self, number: int) -> list[int | str]:
        self.coalescer.signal_idle(str(number))
        return self.emitted()

    def active(self, number: int) -> list[int | str]:
        self.coalescer.signal_active(str(number))
        return self.emitted()

    def done(self, number: int) -> list[int | str]:
        self.coalescer.signal_done(str(number))
        return self.emitted()

    def emitted(self) -> list[int | str]:
        return [value for _, value in self.coalescer.settle()]


def test_the_least_frontier_is_emitted() -> None:
    """H1: nothing before both inputs have a frontier, then always the least."""
    inputs = Inputs(2, **FREEZE)
    assert [inputs.at(0, 1), inputs.at(1, 2), inputs.at(0, 3), inputs.at(1, 4)] == [
        [],
        [1],
        [2],
        [3],
    ]
    assert inputs.coalescer.latest_time_frontier() == 4


def test_an_idle_input_is_left_out_until_it_has_data() -> None:
    """H2: with input 0 idle, input 1 alone decides.

    Active again without a frontier, input 0 holds.
    """
    inputs = Inputs(2, **FREEZE)
    assert (inputs.idle(0), inputs.at(1, 11)) == ([], [11])
    assert (inputs.active(0), inputs.at(1, 12), inputs.at(0, 13)) == ([], [], [12])


def test_a_frontier_is_forwarded_when_the_other_falls_idle() -> None:
    """H3: the idle input stops holding at once."""
    inputs = Inputs(2, **FREEZE)
    assert (inputs.at(0, 100), inputs.idle(1)) == ([], [100])


@pytest.mark.parametrize("last", ["idle", "done"])
def test_all_quiet_jumps_to_the_largest_seen(last: str) -> None:
    """H4: when the last live input falls quiet, the largest frontier seen is emitted, then idle."""
    inputs = Inputs(2, **FREEZE)
    assert (inputs.at(0, 10), inputs.at(1, 11), inputs.idle(1)) == ([], [10], [])
    assert getattr(inputs, last)(0) == [11, "idle"]


def test_the_order_of_falling_idle_does_not_matter() -> None:
    """H4, F4: whichever input falls idle first, the final frontier is the same."""
    finals = []
    for first, second in ((0, 1), (1, 0)):
        inputs = Inputs(2, **FREEZE)
        inputs.at(0, 1)
        inputs.at(1, 2)
        inputs.idle(first)
        inputs.idle(second)
        finals.append(inputs.coalescer.value)
    assert finals == [2, 2]


def test_all_done_holds_and_signals_after_the_end_are_errors() -> None:
    """H5: ending emits no frontier under `hold`.

    A done input may not speak again; frontiers grow strictly.
    """
    inputs = Inputs(2, "error", **FREEZE)
    assert (inputs.done(0), inputs.done(1)) == ([], ["done"])
    with pytest.raises(PoisonError, match="duplicate"):
        inputs.done(0)
    with pytest.raises(PoisonError, match="done"):
        inputs.at(0, 5)
    with pytest.raises(PoisonError, match="done"):
        inputs.idle(0)
    regressing = Inputs(1, "error", **FREEZE)
    regressing.at(0, 10)
    with pytest.raises(PoisonError, match="monotonically"):
        regressing.at(0, 9)


def test_all_done_goes_to_infinity_by_default() -> None:
    """Under `infinity` the frontier passes everything when all inputs have ended."""
    inputs = Inputs(2, idle_timeout=None)
    inputs.at(0, 10)
    assert (inputs.done(1), inputs.done(0)) == ([10], [TICK_MAX, "done"])


def test_a_repeated_idle_signal_changes_nothing() -> None:
    """H6: idle is emitted once."""
    inputs = Inputs(2, **FREEZE)
    assert [inputs.at(0, 10), inputs.idle(1), inputs.idle(0), inputs.idle(0)] == [
        [],
        [10],
        ["idle"],
        [],
    ]


def test_a_revived_input_freezes_the_frontier() -> None:
    """H7: under `freeze` the revived input holds F until it has passed it."""
    inputs = Inputs(2, **FREEZE)
    assert (inputs.at(0, 5), inputs.idle(1), inputs.at(0, 50)) == ([], [5], [50])
    assert [inputs.active(1), inputs.at(0, 60), inputs.at(1, 30), inputs.at(1, 55)] == [
        [],
        [],
        [],
        [55],
    ]


def test_removal_lets_the_others_go_on() -> None:
    """H12: without the input that lags, F advances; without the one ahead, nothing happens."""
    lagging, ahead = Inputs(2, **FREEZE), Inputs(2, **FREEZE)
    lagging.at(0, 10)
    lagging.coalescer.remove("1")
    assert lagging.emitted() == [10]
    ahead.at(0, 10)
    ahead.at(1, 20)
    ahead.coalescer.remove("1")
    assert ahead.emitted() == []


def test_hold_keeps_the_frontier_when_all_are_idle() -> None:
    """W1: min of three.

    A third idle lets 100 through; all idle emit no frontier; a revived one behind changes nothing.
    """
    inputs = Inputs(3, idle_timeout=None, all_idle="hold", revived="freeze")
    inputs.at(0, 100)
    inputs.at(1, 200)
    assert inputs.at(2, 50) == [50]
    assert inputs.idle(2) == [100]
    assert (inputs.idle(0), inputs.idle(1)) == ([200], ["idle"])
    assert inputs.at(2, 60) == ["active"]
    assert inputs.coalescer.value == 200


def test_the_last_idle_input_flushes_the_maximum() -> None:
    """F1: 10, 5, 3 give 3; once all are idle the maximum is flushed."""
    inputs = Inputs(3, **IGNORE)
    assert (inputs.at(0, 10), inputs.at(1, 5), inputs.at(2, 3)) == ([], [], [3])
    assert (inputs.idle(0), inputs.idle(1), inputs.idle(2)) == ([], [], [10, "idle"])


def test_a_revived_input_is_left_out_until_it_caught_up() -> None:
    """F2: active again at 5 it is ignored; at 9 it is past F and counts."""
    inputs = Inputs(3, **IGNORE)
    inputs.at(0, 10)
    inputs.at(1, 7)
    inputs.at(2, 3)
    assert inputs.idle(2) == [7]
    assert (inputs.active(2), inputs.at(2, 5), inputs.at(2, 9), inputs.at(1, 12)) == (
        [],
        [],
        [],
        [9],
    )


def test_a_revived_input_does_not_hold_the_others_back() -> None:
    """While it catches up the frontier follows the others, past its own."""
    inputs = Inputs(3, **IGNORE)
    inputs.at(0, 10)
    inputs.at(1, 7)
    inputs.at(2, 3)
    assert inputs.idle(2) == [7]
    assert (inputs.active(2), inputs.at(2, 5), inputs.at(1, 8)) == ([], [], [8])
    assert (inputs.at(2, 8), inputs.at(1, 20), inputs.at(2, 9)) == ([], [], [9])


def test_a_revived_input_without_a_frontier_counts_as_minus_infinity() -> None:
    """Before the first F it is not below F, so it holds F; behind an F it is left out."""
    before, behind = Inputs(2, **IGNORE), Inputs(2, **IGNORE)
    assert (before.idle(1), before.active(1), before.at(0, 10), before.at(1, 5)) == (
        [],
        [],
        [],
        [5],
    )
    assert (behind.idle(1), behind.at(0, 10), behind.active(1), behind.at(0, 50)) == (
        [],
        [10],
        [],
        [50],
    )


def test_nothing_moves_while_no_active_input_is_aligned() -> None:
    """F3: idle inputs behind, active ones unaligned: the frontier holds instead of passing
    everything.
    """
    inputs = Inputs(2, **IGNORE)
    inputs.at(0, 15)
    inputs.at(1, 10)
    assert inputs.idle(1) == [15]
    assert inputs.active(1) == []
    assert (inputs.idle(0), inputs.at(1, 11)) == ([], [])
    assert inputs.at(1, 18) == [18]


def test_punctuation_of_an_idle_input_can_be_ignored() -> None:
    """Ignored means not even remembered: active again, the input is still where it was."""
    inputs = Inputs(1, **IGNORE)
    assert (inputs.at(0, 25), inputs.idle(0), inputs.at(0, 50), inputs.active(0)) == (
        [25],
        ["idle"],
        [],
        ["active"],
    )
    assert inputs.at(0, 50) == [50]


def test_max_follows_the_fastest() -> None:
    """`coalesce: max` needs only one input."""
    inputs = Inputs(3, idle_timeout=None, coalesce="max")
    assert (inputs.at(0, 10), inputs.at(1, 5), inputs.at(1, 20)) == ([10], [], [20])


def test_before_the_first_member() -> None:
    """`no_members`: idle is emitted at once, or nothing until a member has come and gone."""
    assert Inputs(0, **FREEZE).emitted() == ["idle"]
    silent = Inputs(0, **FREEZE, no_members="silent")
    assert silent.emitted() == []
    silent.coalescer.join("0")
    assert silent.at(0, 1) == [1]
    silent.coalescer.remove("0")
    assert silent.emitted() == ["idle"]


def test_a_new_member_starts_at_the_frontier() -> None:
    """`joins: at_F`: the newcomer holds F where it is, and is aligned there."""
    inputs = Inputs(1, idle_timeout=None)
    inputs.at(0, 10)
    inputs.coalescer.join("new")
    assert inputs.coalescer.inputs["new"]["frontier"] == 10
    assert inputs.at(0, 20) == []
    inputs.coalescer.signal_frontier("new", 15)
    assert inputs.emitted() == [15]


# ---------------------------------------------------------------------- members, through the
# decider


def partitions(
    lag: int | None, *, timeout: int | None = None, count: int = 2, **source: Any
) -> Feed:
    """One source with partitions 0, 1, ..; the pipeline clock starts at 0."""
    level = {**FREEZE, "idle_timeout": timeout}
    spec = pipeline(
        ("s",),
        {"lag": lag, "partition_by": "folder", "coalesce": level, **source},
        coalesce=FREEZE,
        release={"mode": "pass_through"},
    )
    feed = Feed(spec, empty=True)
    for number in range(count):
        feed.add("s", partition=str(number))
    feed.step(0)
    return feed


def emitted(
    feed: Feed, now: int, partition: int | None = None, time: int | None = None
) -> list[int | str]:
    """One row of one partition, or none; what the output emits."""
    if time is not None:
        feed.add("s", Point(time), partition=str(partition))
    return [value for _, value in feed.step(now).decision.emitted]


def test_rows_left_unread_keep_a_member_in() -> None:
    """Silent for the timeout, but with rows waiting that no epoch has read.

    Not idle, so the frontier waits for them.
    """
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, coalesce={"idle_timeout": 50}))
    feed.add("a", Point(30))
    feed.add("b", Point(10), Point(20))
    feed.step(0, {"a": 1, "b": 1})
    decision = feed.step(100, {}).decision
    assert (decision.statuses, decision.frontier_after) == ({"a/0": "idle", "b/0": "active"}, 10)
    assert feed.step(101).decision.frontier_after == 20


def test_partitions_fall_idle_by_the_clock() -> None:
    """H8: idle exactly at the timeout, once.

    A row of one partition wakes the source; F never falls.
    """
    feed = partitions(3, timeout=5)
    assert (emitted(feed, 1), emitted(feed, 5), emitted(feed, 5)) == ([], ["idle"], [])
    assert emitted(feed, 5, 0, 100) == [97, "active"]
    assert (emitted(feed, 5, 0, 90), emitted(feed, 5, 0, 101)) == ([], [98])


def test_without_idleness_every_partition_is_waited_for() -> None:
    """H9: the least partition decides, each with the lag taken off."""
    feed = partitions(3)
    assert [emitted(feed, 0, 0, 10), emitted(feed, 0, 0, 11), emitted(feed, 0, 1, 10)] == [
        [],
        [],
        [7],
    ]
    assert [emitted(feed, 0, 1, 11), emitted(feed, 0, 1, 12), emitted(feed, 0, 0, 13)] == [
        [8],
        [],
        [9],
    ]


@pytest.mark.parametrize(
    ("frame", "times", "expected"),
    [
        (10, (14, 15, 24), [[10], [], [20]]),
        (2, (10, 11, 12, 13), [[6], [8], [], [10]]),
        (0, (10, 20), [[], []]),
    ],
)
def test_the_emitted_frontier_is_rounded_down(
    frame: int, times: tuple[int, ...], expected: list[list[int]]
) -> None:
    """H10: the frontier is emitted in multiples of the frame; a frame of zero emits none."""
    feed = partitions(3, count=1, frame=frame)
    assert [emitted(feed, 0, 0, time) for time in times] == expected


def test_negative_frontiers_round_down_too() -> None:
    """Rounding goes towards minus infinity."""
    assert emitted(partitions(0, count=1, frame=10), 0, 0, -1) == [-10]


def test_a_wall_clock_frontier_is_capped_by_what_was_read() -> None:
    """H11: the clock says 42, the row 41: F is 41; an older row does not move it."""
    feed = partitions(None, count=1, wall_clock={"lag": 0})
    assert (emitted(feed, 42, 0, 41), emitted(feed, 42, 0, 40)) == ([41], [])


def test_a_wall_clock_frontier_of_a_new_member_never_goes_back() -> None:
    """The recorded wall clock counts, which a replay knows too; not a clock that was set back."""
    feed = partitions(None, count=0, wall_clock={"lag": 0, "cap": False})
    feed.step(42)
    feed.add("s", partition="new")
    assert emitted(feed, 40)[0] == 42


@pytest.mark.parametrize(("frontier", "expected"), [("exclusive", 37), ("inclusive", 38)])
def test_a_wall_clock_without_a_cap_passes_what_was_read(frontier: str, expected: int) -> None:
    """It is the clock minus its lag, one tick more if "none at or below" is declared.

    docs/semantics.md, sections 1 (member frontier) and 2 (options of a source).
    """
    clock = {"lag": 5, "cap": False}
    feed = partitions(None, count=1, wall_clock=clock, frontier=frontier)
    assert emitted(feed, 42, 0, 10) == [expected]


def test_a_wall_clock_wakes_no_idle_member() -> None:
    """A frontier that rises by itself does not count as activity; docs/semantics.md, section 1 (status)."""
    feed = partitions(None, timeout=5, wall_clock={"lag": 0, "cap": False})
    assert [set(feed.step(now).statuses.values()) for now in (4, 5, 6, 7)] == [
        {"active"},
        {"idle"},
        {"idle"},
        {"idle"},
    ]


def test_the_idle_clock_holds_until_the_exact_instant() -> None:
    """W2: one tick before the timeout the silent input still holds.

    At it, F moves; later it revives behind F.
    """
    minute = 60
    spec = pipeline(
        ("a", "b"),
        {"lag": 0},
        coalesce={**FREEZE, "idle_timeout": minute},
        release={"mode": "pass_through"},
    )
    feed = Feed(spec)
    feed.step(0)
    for now in (1, minute - 1):
        feed.add("a", Point(100))
        assert feed.step(now).decision.frontier_after == TICK_MIN
    feed.add("a", Point(100))
    step = feed.step(minute)
    assert step.decision.frontier_after == 100
    assert step.decision.statuses == {"a/0": "active", "b/0": "idle"}
    feed.add("b", Point(50))
    step = feed.step(minute)
    assert (step.decision.frontier_after, step.decision.statuses["b/0"]) == (100, "active")


def test_a_strictly_increasing_source_commits_its_newest_row() -> None:
    """A lag of -1 tick and an inclusive frontier without lag promise the same."""
    for source in ({"lag": -1}, {"lag": 0, "frontier": "inclusive"}):
        feed = Feed(pipeline(("s",), source))
        feed.add("s", Point(7))
        assert feed.step(0).decision.frontier_after == 8


def test_frontiers_saturate() -> None:
    """At the ends of int64 nothing wraps around."""
    high = Feed(pipeline(("s",), {"lag": -1}))
    high.add("s", Point(TICK_MAX))
    assert high.step(0).decision.frontier_after == TICK_MAX
    low = Feed(pipeline(("s",), {"lag": 5}))
    low.add("s", Point(TICK_MIN + 1))
    assert low.step(0).decision.frontier_after == TICK_MIN


def test_rows_after_the_end_are_refused() -> None:
    """A done member that sends rows again is an error that names it."""
    feed = Feed(pipeline(("s",), {"lag": 0}))
    feed.end("s")
    feed.step(0)
    feed.add("s", Point(1))
    with pytest.raises(PoisonError, match="s/0 has ended"):
        feed.step(0)


def test_what_a_source_read_before_its_end_counts() -> None:
    """Under `hold` the last rows of a bounded source still move F, also when its end is in the
    same cut.
    """
    spec = pipeline(("a", "b"), {"lag": 0}, coalesce={"idle_timeout": None, "all_done": "hold"})
    feed = Feed(spec)
    for name in ("a", "b"):
        feed.add(name, Point(7))
        feed.end(name)
    decision = feed.step(0).decision
    assert decision.emitted == (("watermark", 7), ("status", "done"))


def test_the_jump_counts_what_ended_members_had_seen() -> None:
    """When the last live source falls idle, F jumps to the largest time frontier, that of an ended
    source included.
    """
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, coalesce={"idle_timeout": 5}))
    feed.add("a", Point(50))
    feed.end("a")
    feed.add("b", Point(7))
    assert feed.step(0).decision.frontier_after == 7
    assert feed.step(5).decision.frontier_after == 50


def test_an_end_counts_in_the_epoch_that_reads_the_last_rows() -> None:
    """A partition that ends with rows is done at once, and the others are waited for alone."""
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, coalesce={"idle_timeout": "never"}))
    feed.add("a", Point(1))
    feed.add("b", Point(1))
    feed.step(0)
    feed.add("a", Point(2))
    feed.add("b", Point(9))
    feed.end("a")
    step = feed.step(1)
    assert (step.statuses["a/0"], step.frontier_after) == ("done", 9)


@pytest.mark.parametrize(
    ("choice", "status", "frontier"), [("revive", "active", 30), ("ignore", "idle", 10)]
)
def test_punctuation_alone_revives_an_idle_partition_only_if_asked(
    choice: str, status: str, frontier: int
) -> None:
    """`on_idle_punctuation` of a source decides about its partitions; rows revive them always.

    docs/semantics.md, section 2 (options of coalescing).
    """
    level = {"idle_timeout": 50, "on_idle_punctuation": choice}
    source = {"lag": 0, "punctuation": {"explicit": True}, "partition_by": "folder"}
    feed = Feed(pipeline(("s",), {**source, "coalesce": level}, coalesce={"idle_timeout": None}))
    feed.add("s", Point(10))
    feed.step(0)
    assert feed.step(50).statuses == {"s/0": "idle"}
    feed.add("s", Punctuation(30))
    step = feed.step(51)
    assert (step.statuses["s/0"], step.frontier_after) == (status, frontier)
    feed.add("s", Point(40))
    step = feed.step(52)
    assert (step.statuses["s/0"], step.frontier_after) == ("active", 40)


@pytest.mark.parametrize("choice", ["revive", "ignore"])
def test_punctuation_moves_an_active_partition_in_any_case(choice: str) -> None:
    """`on_idle_punctuation` is about idle members only.

    docs/semantics.md, section 2 (options of coalescing).
    """
    source = {
        "lag": 0,
        "punctuation": {"explicit": True},
        "coalesce": {"on_idle_punctuation": choice},
    }
    feed = Feed(pipeline(("s",), source))
    feed.add("s", Point(10))
    feed.step(0)
    feed.add("s", Punctuation(30))
    assert feed.step(1).frontier_after == 30
