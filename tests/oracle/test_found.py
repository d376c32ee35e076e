"""What random worlds found once, shrunk and kept by name.

Model and decider must agree, and on this outcome.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracle.support import COLUMNS, Pair, Tick, World
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

A, B, C = Member("a"), Member("b"), Member("c")
NEVER = {"idle_timeout": "never"}


def played(
    members: list[Member], ticks: list[Tick], own: dict[str, Any] | None = None, **more: Any
) -> Pair:
    """A world of lag-0 sources that never idle, unless `more` says so.

    `own` holds further options by source.
    """
    source = {
        "path": "x",
        "schema": COLUMNS,
        "event_time": "t",
        "end_time": "until",
        "lag": 0,
        "coalesce": NEVER,
        "barriers": {"kind": "kind", "types": ["begin"], "id": "id"},
    }
    sources = {m.source: {**source, **(own or {}).get(m.source, {})} for m in members}
    raw = {"name": "p", "sources": sources, "coalesce": NEVER, **more}
    return Pair(World(PipelineSpec.model_validate(raw), tuple(members), tuple(ticks))).play()


def rows(*times: int) -> list[dict[str, Any]]:
    """Point rows."""
    return [{"t": time, "k": "x", "v": 0} for time in times]


def barriers(count: int) -> list[dict[str, Any]]:
    """Barrier rows."""
    return [{"t": 0, "kind": "begin", "id": number + 1} for number in range(count)]


def test_a_row_equal_to_an_expired_one_leaves_at_once() -> None:
    """The release mark never goes back.

    What ties with a row that left by its residence is not held again.
    """
    ticks = [Tick(0, {A: rows(7)}, None), Tick(5, {}, None), Tick(0, {B: rows(7)}, None)]
    pair = played([A, B, C], ticks, release={"build_window": 5})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [7], [7]]


def test_rows_read_together_expire_together() -> None:
    """No residence runs out for the newest row of an epoch while a member it waits for has rows
    left.
    """
    ticks = [Tick(0, {A: rows(0), B: [*rows(1), *barriers(1)]}, 1), Tick(0, {}, None)]
    pair = played([A, B, C], ticks, release={"build_window": 0})
    assert [len(o.released) for o in pair.outcomes] == [0, 2]


def test_the_build_window_is_nothing_to_rows_that_pass_through() -> None:
    """Without an order buffer no residence can run out, and F does not move by it."""
    pair = played(
        [A, B], [Tick(0, {B: rows(0)}, None)], release={"mode": "pass_through", "build_window": 0}
    )
    assert pair.outcomes[0].after == -(2**63)


def test_data_flows_behind_one_open_barrier_but_not_behind_two() -> None:
    """Alignment `pass`: a member at two open barriers is not read any further."""
    ticks = [Tick(0, {A: barriers(4)}, None), Tick(0, {}, None), Tick(0, {}, None)]
    pair = played([A, B], ticks, barriers={"alignment": "pass"})
    assert [o.consumed["a/0"] for o in pair.outcomes] == [1, 1, 0]


def test_the_last_rows_of_a_member_count_before_its_end() -> None:
    """A member that ends with its last row moves F by that row, also where the end itself holds F."""
    pair = played(
        [A], [Tick(0, {A: rows(8)}, None, frozenset({A}))], coalesce={**NEVER, "all_done": "hold"}
    )
    assert pair.outcomes[0].after == 8


def test_members_of_a_quiet_source_are_idle() -> None:
    """The output's timer makes a source of one partition idle, and its member is shown so."""
    ticks = [Tick(0, {}, None, frozenset({A})), Tick(4, {}, None)]
    pair = played([A, B], ticks, coalesce={"idle_timeout": 4})
    assert pair.outcomes[-1].statuses == {"a/0": "done", "b/0": "idle"}


def test_rows_before_a_tardy_barrier_leave_flagged() -> None:
    """What a tardy member sent before its barrier leaves in the current section, in order, with the
    flag.
    """
    ticks = [
        Tick(0, {A: [*rows(1), *barriers(1), *rows(20)]}, None),
        Tick(6, {}, None),
        Tick(1, {B: [*rows(3), *barriers(1), *rows(30)]}, None),
        Tick(1, {}, None, frozenset({A, B})),
    ]
    pair = played([A, B], ticks, barriers={"timeout": 5})
    left = [
        (row.time, flagged, section) for o in pair.outcomes for section, row, flagged in o.released
    ]
    assert left == [(1, False, 0), (3, True, 1), (20, False, 1), (30, False, 1)]


def test_rows_before_a_tardy_barrier_leave_flagged_although_an_aborted_one_came_before() -> None:
    """The row of the aborted id is ignored; the newer barrier is tardy all the same.

    docs/semantics.md, sections 3.5 and 3.6.
    """
    two, three = ([{"t": 0, "kind": "begin", "id": id_}] for id_ in (2, 3))
    ticks = [
        Tick(0, {A: two}, None),
        Tick(0, {}, None, aborts=(2,)),
        Tick(0, {A: three}, None),
        Tick(6, {}, None),
        Tick(1, {B: [*rows(1), *two]}, None),
        Tick(1, {B: [*rows(3), *three]}, None),
        Tick(1, {}, None, frozenset({A, B})),
    ]
    pair = played([A, B], ticks, barriers={"timeout": 5, "identity": "id"})
    told = [(b.id, b.outcome, b.tardy) for o in pair.outcomes for b in o.barriers]
    assert told == [(2, "aborted", []), (3, "incomplete", []), (3, "incomplete", ["b/0"])]
    left = [(row.time, flagged) for o in pair.outcomes for _, row, flagged in o.released]
    assert left == [(1, False), (3, True)]


def test_late_rows_expire_nothing() -> None:
    """A late row is in no buffer: its residence cannot run out, and it does not move F."""
    ticks = [
        Tick(0, {A: rows(8), B: rows(9)}, None),
        Tick(1, {C: barriers(1)}, None),
        Tick(1, {C: rows(5)}, None),
    ]
    pair = played([A, B, C], ticks, release={"build_window": 0}, barriers={"alignment": "pass"})
    assert [o.after for o in pair.outcomes] == sorted(o.after for o in pair.outcomes)


def test_an_idle_source_may_stay_deaf_to_punctuation() -> None:
    """With `on_idle_punctuation.

    Ignore` at the output only rows wake an idle source; with `revive` punctuation does.
    """
    for option, status in (("ignore", "idle"), ("revive", "active")):
        source = {
            "path": "x",
            "schema": COLUMNS,
            "event_time": "t",
            "coalesce": {"idle_timeout": 3},
            "punctuation": {"explicit": True},
        }
        source["barriers"] = {"kind": "kind", "types": ["begin"], "id": "id", "punctuation": "p"}
        raw = {
            "name": "p",
            "sources": {"a": source, "b": source},
            "coalesce": {"idle_timeout": 3, "on_idle_punctuation": option},
        }
        ticks = (
            Tick(0, {A: rows(1), B: rows(1)}, None),
            Tick(4, {A: rows(2)}, None),
            Tick(1, {B: [{"t": 9, "kind": "p"}]}, None),
        )
        pair = Pair(World(PipelineSpec.model_validate(raw), (A, B), ticks)).play()
        assert pair.real.state["output"]["inputs"]["b"]["status"] == status
        pair.step(Tick(0, {B: rows(10)}, None), 3)
        assert pair.real.state["output"]["inputs"]["b"]["status"] == "active"


def test_a_circle_of_two_levels_waits_for_who_has_no_frontier() -> None:
    """A member that wakes up without a frontier is left out, also while F has none.

    Having no frontier counts as below.
    """
    options = {"idle_timeout": 2}
    ticks = [
        Tick(0, {A: rows(1)}, None),
        Tick(3, {A: rows(2)}, None),
        Tick(0, {A: rows(7), B: barriers(1)}, None),
    ]
    pair = played([A, B], ticks, coalesce=options, barriers={"timeout": "never"})
    assert pair.outcomes[-1].after == 7


def test_a_barrier_may_have_the_number_zero() -> None:
    """Numbers begin where a source begins them: with no barrier closed yet, none is past."""
    begin = {"t": 0, "kind": "begin"}
    ticks = [
        Tick(0, {A: [*rows(1), {**begin, "id": 0}], B: [*rows(2), {**begin, "id": 0}]}, None),
        Tick(0, {}, None),
    ]
    pair = played([A, B], ticks, barriers={"identity": "id"})
    assert [(b.id, b.outcome) for o in pair.outcomes for b in o.barriers] == [(0, "complete")]


def test_a_barrier_aborted_and_delivered_in_one_epoch_is_listed_once() -> None:
    """The member that came after the abort is ignored, not tardy."""
    ticks = [Tick(0, {A: barriers(1)}, None), Tick(0, {B: barriers(1)}, None, aborts=(1,))]
    pair = played([A, B], ticks)
    told = [
        (b.id, b.outcome, sorted(b.missing), b.tardy) for o in pair.outcomes for b in o.barriers
    ]
    assert told == [(1, "aborted", ["b/0"], [])]


@pytest.mark.parametrize(
    ("identity", "first", "second"), [("ordinal", 1, 2), ("id", 1, 2), ("id", 5, 3)]
)
def test_an_abort_of_a_second_barrier_keeps_the_frontier_before_the_first(
    identity: str, first: int, second: int
) -> None:
    """Rows behind a barrier that is still open do not count, also where a later one is closed.

    docs/semantics.md, section 1 (member frontier). The rows count when the first barrier closes.
    """
    one, two = ({"t": 0, "kind": "begin", "id": id_} for id_ in (first, second))
    ticks = [
        Tick(0, {A: [*rows(1), one], B: rows(40)}, None),
        Tick(0, {A: [*rows(50), two]}, None),
        Tick(0, {}, None, aborts=(second,)),
        Tick(0, {B: rows(45)}, None),
        Tick(0, {B: [one]}, None),
    ]
    pair = played([A, B], ticks, barriers={"alignment": "pass", "identity": identity})
    assert [o.after for o in pair.outcomes] == [1, 1, 1, 1, 45]


def test_the_ordinal_behind_an_aborted_one_opens_while_the_first_is_open() -> None:
    """An aborted second barrier was delivered, so the next row of its member is the third.

    docs/semantics.md, section 3.6. Number 4 was aborted beforehand, so its rows are ignored.
    """
    one, two, three, four, five = ({"t": time, "kind": "begin"} for time in (10, 20, 30, 40, 50))
    ticks = [
        Tick(0, {A: [one]}, None),
        Tick(0, {A: [two]}, None),
        Tick(0, {}, None, aborts=(2, 4)),
        Tick(0, {A: [three]}, None),
        *(Tick(0, {B: [row]}, None) for row in (one, two, three)),
        *(Tick(0, {A: [row], B: [row]}, None) for row in (four, five)),
    ]
    pair = played([A, B], ticks, barriers={"alignment": "pass"})
    told = [[(b.id, b.outcome) for b in o.barriers] for o in pair.outcomes]
    aborted = [(2, "aborted"), (4, "aborted")]
    complete = [[(number, "complete")] for number in (1, 3, 5)]
    assert told == [[], [], aborted, [], complete[0], [], complete[1], [], complete[2]]


IDLE = {"coalesce": {"idle_timeout": 4}}
DEAD_ROW = [{"t": None, "k": "x", "v": 0}]  # activity that gives no frontier


def test_who_returns_before_the_first_frontier_holds_it() -> None:
    """Both fell idle before F existed; who returns without a frontier is not behind any."""
    ticks = [
        Tick(0, {}, None),
        Tick(10, {}, None),
        Tick(0, {A: rows(10), B: DEAD_ROW}, None),
        Tick(0, {B: rows(3)}, None),
    ]
    pair = played([A, B], ticks, **IDLE)
    assert [o.after for o in pair.outcomes] == [TICK_MIN, TICK_MIN, TICK_MIN, 3]


def test_who_returns_behind_a_frontier_without_one_is_left_out() -> None:
    """F went on without it; it counts when its first frontier is not below F."""
    ticks = [
        Tick(0, {}, None),
        Tick(10, {A: rows(10)}, None),
        Tick(0, {A: rows(20), B: DEAD_ROW}, None),
        Tick(0, {A: rows(40), B: rows(30)}, None),
    ]
    pair = played([A, B], ticks, **IDLE)
    assert [o.after for o in pair.outcomes] == [TICK_MIN, 10, 20, 30]


def test_nothing_expires_while_a_member_without_a_frontier_has_rows_left() -> None:
    """Every row could still be behind one of its rows, so the build window waits for it."""
    ticks = [
        Tick(0, {A: rows(5), B: [*DEAD_ROW, *DEAD_ROW, *rows(3)]}, 1),
        Tick(9, {}, 1),
        Tick(9, {}, None),
    ]
    pair = played([A, B], ticks, release={"build_window": 5})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [], [3, 5]]


def test_a_residence_passes_no_row_behind_a_barrier_of_a_member_without_a_frontier() -> None:
    """The row that has stayed too long leaves, and F does not move: any row may be held there."""
    ticks = [Tick(0, {A: rows(5), B: [*barriers(1), *rows(3)]}, None), Tick(9, {}, None)]
    pair = played([A, B, C], ticks, release={"build_window": 5})
    assert [row.time for _, row, _ in pair.outcomes[1].released] == [5]
    assert pair.outcomes[1].after == TICK_MIN


def test_back_pressure_reads_a_member_without_a_frontier_first() -> None:
    """Without an F everyone who has a frontier is ahead, and who has none is nearest."""
    ticks = [Tick(0, {A: rows(50, 51), B: [*DEAD_ROW, *rows(3)]}, 1), Tick(0, {}, 1)]
    pair = played([A, B], ticks, release={"max_ahead": 10})
    assert [o.consumed for o in pair.outcomes] == [{"a/0": 1, "b/0": 1}, {"a/0": 0, "b/0": 1}]


def test_an_older_row_expires_while_a_newer_one_waits_for_a_member_with_rows() -> None:
    """Each epoch's rows have an age of their own, also when an earlier epoch read a later time.

    docs/semantics.md, section 2 (build_window) and section 3.2.
    """
    ticks = [
        Tick(0, {A: rows(20), B: rows(15, 5, 5, 5, 5)}, 1),
        Tick(1, {A: rows(10)}, 1),
        Tick(5, {}, 1),
    ]
    pair = played([A, B, C], ticks, release={"build_window": 5})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [], [5, 5, 10]]


def test_two_epochs_of_one_clock_have_ages_of_their_own() -> None:
    """The row of the first leaves while that of the second waits for the member that has rows left.

    docs/semantics.md, section 2 (build_window) and section 3.2.
    """
    ticks = [Tick(0, {A: rows(9, 10, 9)}, 1), Tick(0, {}, 1), Tick(0, {}, 1)]
    pair = played([A, B], ticks, release={"build_window": 0})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [9], [9, 10]]


def test_a_residence_that_passes_nothing_makes_no_frontier() -> None:
    """Rows held behind a barrier kept F from moving, so who returns without a frontier holds it.

    docs/semantics.md, section 1 (alignment of members).
    """
    ticks = [
        Tick(0, {A: [*barriers(1), *rows(2)], C: rows(4)}, None),
        Tick(4, {C: rows(10)}, None),
        Tick(0, {}, None, cancels=(1,)),
        Tick(0, {B: DEAD_ROW}, None),
    ]
    pair = played([A, B, C], ticks, **IDLE, release={"build_window": 3})
    assert [len(o.released) for o in pair.outcomes] == [0, 1, 1, 0]
    assert {o.after for o in pair.outcomes} == {TICK_MIN}


def test_a_source_that_emits_no_frontier_holds_no_section_at_its_barrier() -> None:
    """A member that is waiting at its barrier counts as +inf for the section, whatever the frame.

    docs/semantics.md, section 3.3.
    """
    ticks = [Tick(0, {A: [*rows(16), *barriers(1)], B: rows(12, 20, 30)}, None)]
    pair = played([A, B], ticks, {"a": {"frame": "never"}})
    assert [row.time for _, row, _ in pair.outcomes[-1].released] == [12, 16, 20]


@pytest.mark.parametrize(("frame", "left"), [(10, [[9], [12, 16, 17]]), ("never", [[], []])])
def test_a_section_is_not_ahead_of_what_a_framed_source_emits(
    frame: int | str, left: list[list[int]]
) -> None:
    """The frame rounds the frontier that the section takes as well: a row above it is on time.

    docs/semantics.md, section 2 (frame) and section 3.3.
    """
    first, second = Member("a", "0"), Member("a", "1")
    ticks = [
        Tick(0, {first: [*rows(16), *barriers(1)], second: rows(9, 17), B: rows(40)}, None),
        Tick(0, {second: rows(12, 27)}, None),
    ]
    pair = played([first, second, B], ticks, {"a": {"frame": frame, "partition_by": "folder"}})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == left
    assert not any(o.late for o in pair.outcomes)


def punctuated(on_violation: str) -> dict[str, Any]:
    """Options of source a with punctuation rows."""
    marks = {"kind": "kind", "types": ["begin"], "id": "id", "punctuation": "p"}
    options = {"explicit": True, "on_violation": on_violation}
    return {"a": {"punctuation": options, "barriers": marks}}


@pytest.mark.parametrize("on_violation", ["error", "drop", "adjust"])
@pytest.mark.parametrize("sent", ["before", "together", "by a person"])
def test_a_row_that_broke_its_punctuation_expires_nothing(sent: str, on_violation: str) -> None:
    """A violation is in no buffer: its residence cannot run out, and it does not move F.

    docs/semantics.md, section 2 (build_window) and section 4.1.
    """
    mark = [{"t": 24, "kind": "p"}]
    ticks = [
        Tick(
            0, {A: mark} if sent == "before" else {}, None, ctis=(("a", 24),) * ("person" in sent)
        ),
        Tick(0, {A: [*(mark if sent == "together" else []), *rows(21)]}, None),
    ]
    pair = played([A, B], ticks, punctuated(on_violation), release={"build_window": 0})
    assert pair.outcomes[-1].after == TICK_MIN


def test_a_row_beside_a_violation_expires_by_its_own_time() -> None:
    """The build window releases what was kept of an epoch, up to the newest of that.

    docs/semantics.md, section 2 (build_window) and section 4.1.
    """
    ticks = [Tick(0, {A: [*rows(12), {"t": 24, "kind": "p"}, *rows(21)]}, None), Tick(5, {}, None)]
    pair = played([A, B], ticks, punctuated("drop"), release={"build_window": 5})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [12]]
    assert pair.outcomes[-1].after == 12


def test_an_adjusted_row_expires_by_the_time_it_moved_to() -> None:
    """A row that broke its punctuation and was moved to it stays no longer than the build window.

    docs/semantics.md, section 2 (build_window) and section 4.1.
    """
    ticks = [
        Tick(0, {A: [{"t": 24, "kind": "p"}, {"t": 21, "until": 30, "k": "x", "v": 0}]}, None),
        Tick(5, {}, None),
    ]
    pair = played([A, B], ticks, punctuated("adjust"), release={"build_window": 5})
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[], [24]]


def test_a_late_row_that_was_moved_expires_by_the_time_it_moved_to() -> None:
    """A late row moved to a frontier above all rows read stays no longer than the build window.

    docs/semantics.md, section 2 (build_window and on_late).
    """
    ticks = [
        Tick(0, {B: rows(30)}, None),
        Tick(0, {A: [{"t": 21, "until": 40, "k": "x", "v": 0}]}, None),
        Tick(5, {}, None),
    ]
    own = {"b": {"frontier": "inclusive"}}
    release = {"build_window": 5, "on_late": "adjust"}
    pair = played([A, B], ticks, own, coalesce={**NEVER, "coalesce": "max"}, release=release)
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[30], [], [31]]


def test_the_end_of_a_partition_counts_in_the_epoch_in_which_its_source_falls_idle() -> None:
    """All that moves in an epoch counts if its source was active when the epoch began.

    docs/semantics.md, section 2 (on_idle_punctuation).
    """
    first, second = Member("a", "p0"), Member("a", "p1")
    ticks = [Tick(0, {second: rows(-5, 2)}, None), Tick(4, {}, None, ends=frozenset({first}))]
    generated = {"punctuation": {"every_span": 3, "align": "floor"}, "partition_by": "folder"}
    quiet = {"idle_timeout": 4, "on_idle_punctuation": "ignore"}
    pair = played([first, second], ticks, {"a": {"lag": None, **generated}}, coalesce=quiet)
    assert pair.outcomes[-1].after == 0
    assert [row.time for _, row, _ in pair.outcomes[-1].released] == [-5]


def test_punctuation_that_a_person_sends_stands_before_a_second_barrier() -> None:
    """With `pass` a member may be behind one barrier and arrive at another with it.

    docs/semantics.md, section 4.1.
    """
    ticks = [
        Tick(0, {A: barriers(2)}, None),
        Tick(0, {B: rows(50)}, None, ctis=(("a", 35),)),
        Tick(0, {B: barriers(1)}, None),
    ]
    pair = played([A, B], ticks, punctuated("error"), barriers={"alignment": "pass"})
    assert [o.after for o in pair.outcomes] == [TICK_MIN, TICK_MIN, 35]


def test_punctuation_that_a_person_sends_to_a_member_at_two_barriers() -> None:
    """It comes before the second barrier row, so it counts when the first one closes.

    docs/semantics.md, section 4.1.
    """
    ticks = [
        Tick(0, {A: barriers(2), B: rows(50)}, None),
        Tick(0, {}, None),
        Tick(0, {}, None, ctis=(("a", 40),)),
        Tick(0, {}, None, cancels=(1,)),
    ]
    options = {"identity": "id", "alignment": "pass"}
    pair = played([A, B], ticks, punctuated("error"), barriers=options)
    assert [o.after for o in pair.outcomes] == [TICK_MIN, TICK_MIN, TICK_MIN, 40]


def test_punctuation_counts_of_an_idle_partition_that_has_rows_left() -> None:
    """The rows that are left wake it, so its punctuation is that of an active partition.

    docs/semantics.md, sections 1 (status) and 2 (on_idle_punctuation).
    """
    quiet = {"idle_timeout": 4, "on_idle_punctuation": "ignore"}
    own = {**punctuated("error")["a"], "partition_by": "folder", "coalesce": quiet}
    ticks = [
        Tick(0, {}, None),
        Tick(4, {}, None),
        Tick(0, {Member("a", "p0"): [{"t": 29, "kind": "p"}, *barriers(1)]}, 1),
    ]
    pair = played([Member("a", "p0")], ticks, {"a": own})
    assert pair.outcomes[-1].after == 29


def test_punctuation_that_a_person_sends_goes_no_further_than_the_last_instant() -> None:
    """An inclusive source promises one tick more, which the last instant does not have.

    docs/semantics.md, sections 4.1 and 9.10.
    """
    own = {"a": {**punctuated("error")["a"], "frontier": "inclusive"}}
    pair = played([A], [Tick(0, {A: rows(1)}, None, ctis=(("a", TICK_MAX),))], own)
    assert pair.outcomes[-1].after == TICK_MAX
    assert pair.moved[-1][0].after["members"]["a/0"]["punctuation"] == TICK_MAX


def test_a_late_row_that_cannot_be_moved_expires_nothing() -> None:
    """A point row ends before the frontier that it missed, so it is in no buffer.

    docs/semantics.md, section 2 (build_window and on_late).
    """
    ticks = [
        Tick(0, {B: rows(30)}, None),
        Tick(0, {A: rows(21)}, None),
        Tick(5, {A: rows(31)}, None),
    ]
    own = {"b": {"frontier": "inclusive"}}
    release = {"build_window": 5, "on_late": "adjust"}
    pair = played([A, B], ticks, own, coalesce={**NEVER, "coalesce": "max"}, release=release)
    assert [[row.time for _, row, _ in o.released] for o in pair.outcomes] == [[30], [], []]


def test_a_source_that_catches_up_holds_the_section_of_a_barrier() -> None:
    """F goes on without it, and rows of the section above its frontier wait for it.

    docs/semantics.md, section 3.3.
    """
    ticks = [
        Tick(0, {A: rows(10), B: rows(10), C: rows(1)}, None),
        Tick(50, {A: rows(20), B: rows(20)}, None),
        Tick(0, {A: [*rows(22), *barriers(1)], B: rows(25, 40), C: rows(5)}, None),
    ]
    pair = played([A, B, C], ticks, coalesce={"idle_timeout": 50})
    assert [o.after for o in pair.outcomes] == [1, 20, 22]
    assert [row.time for _, row, _ in pair.outcomes[-1].released] == [20, 20]
