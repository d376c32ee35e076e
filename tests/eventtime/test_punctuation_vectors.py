"""Punctuation (CTI): explicit, generated and imported; the project's own copy of those vectors."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.feed import Feed, Point, Punctuation, pipeline

from tidegate.errors import PoisonError
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import BarrierRow, Member, MemberSurvey, Survey
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN


def declared(**punctuation: Any) -> Feed:
    """One source with generated punctuation, rows committed when final."""
    settings = {"on_violation": "drop", **punctuation}
    return Feed(
        pipeline(
            ("s",),
            {"punctuation": settings},
            preset="streaminsight",
            coalesce={"all_done": "infinity"},
        )
    )


def one_by_one(feed: Feed, *times: int) -> tuple[list[int], list[int]]:
    """Every row in an epoch of its own: what left in all, and the frontier after each."""
    left: list[int] = []
    frontiers = []
    for time in times:
        feed.add("s", Point(time))
        step = feed.step(0)
        left += step.times
        frontiers.append(step.decision.frontier_after)
    feed.end("s")
    left += feed.step(0).times
    return left, frontiers


def test_punctuation_after_every_row() -> None:
    """S1: with a delay of zero the newest start is the punctuation.

    An equal start is legal; the end commits all.
    """
    left, frontiers = one_by_one(declared(every_events=1), 0, 1, 3, 7, 9, 10, 12)
    assert left == [0, 1, 3, 7, 9, 10, 12]
    assert frontiers == [0, 1, 3, 7, 9, 10, 12]


def test_a_row_below_the_generated_punctuation_is_dropped() -> None:
    """S2: 7 after 8 violates the punctuation at 8; with a delay of one tick it does not."""
    times = (0, 1, 8, 7, 9, 10, 12)
    assert one_by_one(declared(every_events=1), *times)[0] == [0, 1, 8, 9, 10, 12]
    assert one_by_one(declared(every_events=1, delay=1), *times)[0] == [0, 1, 7, 8, 9, 10, 12]


def test_explicit_punctuation_makes_a_violating_row_an_error() -> None:
    """S3: after CTI(9) a point at 7 fails the epoch and is named; a point at 9 is legal."""
    feed = Feed(pipeline(("s",), preset="streaminsight"))
    feed.add("s", Punctuation(9), Point(9))
    step = feed.step(0)
    assert (step.decision.frontier_after, step.times) == (9, [])
    feed.add("s", Point(7))
    with pytest.raises(PoisonError, match="s/0 row 2"):
        feed.step(0)


def test_a_decision_names_the_punctuation_before_its_epoch() -> None:
    """Rows of the epoch are judged by it; members without punctuation are not named."""
    feed = Feed(pipeline(("s", "t"), preset="streaminsight"))
    feed.add("s", Punctuation(9))
    assert feed.step(0).decision.member_punctuation == {}
    feed.add("s", Point(9), Punctuation(12))
    assert feed.step(0).decision.member_punctuation == {"s/0": 9}


def test_strictly_increasing_and_increasing_sources() -> None:
    """S5: a delay of -1 tick commits at once and a second 5 violates.

    With zero it counts, final only after 6.
    """
    assert one_by_one(declared(every_events=1, delay=-1), 5, 5) == ([5], [6, 6])
    feed = declared(every_events=1)
    feed.add("s", Point(5), Point(5))
    assert feed.step(0).times == []
    feed.add("s", Point(6))
    assert feed.step(0).times == [5, 5]


def test_punctuation_by_a_span_of_event_time() -> None:
    """S8: aligned ahead of the row, on multiples of the span.

    Explicit punctuation counts as well; the end is +inf.
    """
    feed = Feed(
        pipeline(
            ("s",), {"punctuation": {"every_span": 100, "align": "floor", "on_violation": "drop"}}
        )
    )
    frontiers = []
    for item in (Point(90), Point(110), Point(195), Point(200), Punctuation(300), Point(300)):
        feed.add("s", item)
        frontiers.append(feed.step(0).decision.frontier_after)
    assert frontiers == [0, 100, 100, 200, 300, 300]
    feed.end("s")
    assert feed.step(0).decision.frontier_after == TICK_MAX


def test_a_low_watermark_with_a_lag() -> None:
    """S9: span 100 with a delay of 10 on multiples of 100; a row below it violates."""
    times = (0, 99, 110, 90, 99, 100, 190, 260, 370, 410)
    feed = declared(every_span=100, delay=10, align="floor")
    left, frontiers = one_by_one(feed, *times)
    assert [f for f in frontiers if f > TICK_MIN][2:] == [100, 100, 100, 100, 100, 200, 300, 400]
    assert left == [0, 99, 100, 110, 190, 260, 370, 410]


def test_an_input_without_punctuation_blocks_and_is_named() -> None:
    """S10: b has no punctuation, so nothing moves, and b is who holds the frontier."""
    feed = Feed(pipeline(("a", "b"), preset="streaminsight"))
    feed.add("a", Punctuation(10), Punctuation(20))
    feed.add("b", Point(5))
    decision = feed.step(0).decision
    assert decision.frontier_after == TICK_MIN
    assert decision.holder == {"member": "b/0", "since": 0, "why": "no punctuation"}


def test_punctuation_can_be_imported_from_another_source() -> None:
    """S10: b takes a's frontier, and its rows leave up to it."""
    raw = pipeline(("a", "b"), preset="streaminsight").model_dump(by_alias=True)
    raw["sources"]["b"]["punctuation"] |= {"explicit": False, "import_from": "a"}
    feed = Feed(PipelineSpec.model_validate(raw))
    feed.add("a", Punctuation(20))
    feed.add("b", Point(5), Point(25))
    step = feed.step(0)
    assert (step.decision.frontier_after, step.times) == (20, [5])


@pytest.mark.parametrize(("advance", "frontier"), [(False, 20), (True, TICK_MAX)])
def test_the_mere_end_of_a_source_promises_nothing_about_its_importers(
    advance: bool, frontier: int
) -> None:
    """b keeps what a had promised when a ends.

    Only an `advance_to_end` says that nothing at all is to come.
    """
    raw = pipeline(("a", "b"), preset="streaminsight").model_dump(by_alias=True)
    raw["sources"]["a"]["punctuation"] |= {"advance_to_end": advance}
    raw["sources"]["b"]["punctuation"] |= {"explicit": False, "import_from": "a"}
    feed = Feed(PipelineSpec.model_validate(raw))
    feed.add("a", Punctuation(20))
    feed.add("b", Point(25))
    feed.step(0)
    feed.end("a")
    assert feed.step(0).decision.frontier_after == frontier


@pytest.mark.parametrize("sooner", [False, True])
def test_a_source_that_ended_still_exports_its_last_time_frontier(sooner: bool) -> None:
    """A partition that joins behind the end holds F at it, as one that joined before.

    docs/semantics.md, section 2. Of the two partitions of a that end together the smaller counts.
    """
    options = {
        "lag": 0,
        "partition_by": "folder",
        "coalesce": {"idle_timeout": None, "joins": "hold"},
    }
    spec = pipeline(("a", "b", "c"), options, coalesce={"idle_timeout": None})
    raw = spec.model_dump(by_alias=True)
    raw["sources"]["b"] |= {"lag": None, "punctuation": {"import_from": "a"}}
    feed = Feed(PipelineSpec.model_validate(raw), empty=True)
    feed.add("a", Point(20))
    feed.add("a", Point(30), partition="1")
    feed.add("c", Point(10))
    if sooner:
        feed.add("b", Point(25), partition="new")
    feed.step(0)
    feed.end("a")
    feed.end("a", "1")
    feed.step(1)
    feed.add("b", Point(25), partition="new")
    feed.add("c", Point(50))
    assert feed.step(2).frontier_after == 20


def test_a_regressing_punctuation_is_an_error_if_asked() -> None:
    """`regress: error` names the member; by default it is counted and ignored."""
    for regress in ("error", "ignore"):
        feed = Feed(pipeline(("s",), {"punctuation": {"explicit": True, "regress": regress}}))
        feed.add("s", Punctuation(10), Punctuation(5))
        if regress == "error":
            with pytest.raises(PoisonError, match="s/0"):
                feed.step(0)
        else:
            assert feed.step(0).decision.frontier_after == 10


def test_completion_can_advance_to_the_end() -> None:
    """`advance_to_end`.

    The frontier of a completed bounded source is +inf even where `all_done` holds.
    """
    punctuation = {"explicit": True, "advance_to_end": True}
    feed = Feed(pipeline(("s",), {"punctuation": punctuation}, coalesce={"all_done": "hold"}))
    feed.add("s", Point(5))
    feed.end("s")
    assert feed.step(0).decision.frontier_after == TICK_MAX


def test_a_requested_punctuation_counts_for_a_member_that_joins_with_rows() -> None:
    """A CTI that a person sends to a source holds for a partition whose first rows come with it."""
    source = {"punctuation": {"explicit": True}, "coalesce": {"members": "discovered"}}
    feed = Feed(pipeline(("s",), source), empty=True)
    feed.add("s", Point(5))
    step = feed.step(0, ctis=(("s", 20),))
    assert step.frontier_after == 20
    assert step.decision.recorded == ({"kind": "cti", "source": "s", "time": 20},)


@pytest.mark.parametrize(
    ("read", "frontier"),
    [
        ({}, TICK_MIN),
        ({"rows": 1, "max_time": 5}, 20),
        ({"quarantined": 1}, 20),
        ({"dead": 1}, 20),
        ({"barrier": BarrierRow(0, "run", None, 5)}, 20),
        ({"punctuation": 5}, 20),
    ],
)
def test_a_member_joins_with_whatever_is_read_first_of_it(
    read: dict[str, Any], frontier: int
) -> None:
    """Then a CTI of the same epoch is for it too; a member of which nothing was read has not joined.

    docs/semantics.md, sections 2 (`members: discovered`) and 4.1.
    """
    source = {"punctuation": {"explicit": True}, "coalesce": {"members": "discovered"}}
    spec = pipeline(("s",), source)
    survey = Survey(0, (MemberSurvey(Member("s"), **read),), ctis=(("s", 20),))
    assert decide(spec, create_initial_state(spec), survey).frontier_after == frontier


def test_a_requested_punctuation_is_not_for_a_member_that_has_ended() -> None:
    """A CTI that a person sends raises the partitions that go on; one that ended does not get it.

    docs/semantics.md, section 4.1.
    """
    source = {"punctuation": {"explicit": True}, "partition_by": "folder"}
    feed = Feed(pipeline(("s",), source), empty=True)
    feed.add("s", Point(5), partition="gone")
    feed.add("s", Point(5), partition="here")
    feed.end("s", partition="gone")
    feed.step(0)
    step = feed.step(1, ctis=(("s", 20),))
    assert step.frontier_after == 20
    assert step.statuses == {"s/gone": "done", "s/here": "active"}


def test_a_requested_punctuation_lowers_no_promise() -> None:
    """A partition that has promised more than the CTI of a person keeps its own punctuation.

    docs/semantics.md, section 4.1: a row below it is a violation.
    """
    source = {"punctuation": {"explicit": True}, "partition_by": "folder"}
    feed = Feed(pipeline(("s",), source), empty=True)
    feed.add("s", Punctuation(30), partition="far")
    feed.add("s", Point(5), partition="near")
    feed.step(0)
    assert feed.step(1, ctis=(("s", 20),)).frontier_after == 20
    feed.add("s", Point(25), partition="far")
    surveys: list[Survey] = []
    feed.step(2, watch=surveys.append)
    assert [(str(one.member), one.violations) for one in surveys[0].members] == [
        ("s/far", 1),
        ("s/near", 0),
    ]


@pytest.mark.parametrize("repeated", [None, 7])
def test_no_survey_takes_a_punctuation_back(repeated: int | None) -> None:
    """A slice that names no punctuation, or a lower one, leaves what its member promised.

    docs/semantics.md, sections 1 (member frontier) and 9.2.
    """
    spec = pipeline(("s",), {"punctuation": {"explicit": True}})
    state = create_initial_state(spec)
    for punctuation in (9, repeated):
        entry = MemberSurvey(Member("s"), rows=1, max_time=20, punctuation=punctuation)
        state = decide(spec, state, Survey(0, (entry,))).after
    decision = decide(spec, state, Survey(0, (MemberSurvey(Member("s")),)))
    assert decision.member_punctuation == {"s/0": 9}
