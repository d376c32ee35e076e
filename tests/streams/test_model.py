"""The rules of streams, on the model.

Vectors P1 to P6, the table of stamps, pauses, buffers, merges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.oracle.stream_model import (
    Attachment,
    DispatchPhase,
    MergeMode,
    World,
    inherits_stamp,
    is_collected,
    pipe,
)
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.streams.stream_rows import Event

HEAD_ROW = 40


def world_of(*streams: str, tick: int = 0) -> World:
    """A world with empty streams."""
    world = World(tick)
    for name in streams:
        world.stream(name)
    return world


def put(world: World, stream: str, *stamps: int, now: int = 0) -> None:
    """Append stamped rows whose value is their stamp."""
    world.append(stream, *(({"v": stamp}, stamp) for stamp in stamps), now=now)


def counting(name: str, origin: str, to: str, **options: Any) -> Attachment:
    """A reducer that dispatches the running sum of `v`."""

    def fold(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
        return state + event["v"], [{"sum": state + event["v"], "index": index}]

    return Attachment(name, origin, (to,), fold, initial=0, **options)


def test_unstamped_rows_never_go_back_and_stamped_ones_are_refused() -> None:
    """P1: below the last is rejected, equal is accepted, unstamped gets the later of clock and
    last.
    """
    world = world_of("d")
    put(world, "d", 100)
    put(world, "d", 90)
    put(world, "d", 100)
    world.append("d", {"v": 0}, now=95)
    world.append("d", {"v": 0}, now=130)
    assert world.times("d") == [100, 100, 100, 130]
    assert [r.reason for r in world.rejections("d")] == ["stamp 90 is below 100, the last of d"]
    assert [row.position for row in world.rows("d")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("inherit", "merge", "before_merge", "after_merge", "refused"),
    [
        (True, MergeMode.CONCAT, [1000, 1001, 1002], None, [HEAD_ROW]),
        (True, MergeMode.SPLICE, [HEAD_ROW], [10, 20, 30, HEAD_ROW], []),
        (False, MergeMode.CONCAT, [1000, 1001, 1002, 1003], None, []),
        (False, MergeMode.SPLICE, [1003], [10, 20, 30, 1003], []),
    ],
)
def test_every_row_of_the_stamp_table(
    inherit: bool,
    merge: MergeMode,
    before_merge: list[int],
    after_merge: list[int] | None,
    refused: list[int],
) -> None:
    """P2 and P6: an origin of 10, 20, 30 and then 40, through each kind of attachment."""
    world = world_of("o", "d", tick=1)
    put(world, "o", 10, 20, 30)
    world.attach(pipe("p", "o", "d", inherit=inherit, merge=merge), now=1000)
    put(world, "o", HEAD_ROW, now=1003)
    assert world.times("d") == before_merge
    assert [r.stamp for r in world.rejections("o")] == refused
    if after_merge is not None:
        assert [a.stamp for a in world.requests["p"].rows] == [10, 20, 30]
        world.merge("p")
        assert world.times("d") == after_merge


@pytest.mark.parametrize(
    ("inherit", "merge", "phase"), [*itertools.product([True, False], MergeMode, DispatchPhase)]
)
def test_all_cells_of_the_stamp_table(
    inherit: bool, merge: MergeMode, phase: DispatchPhase
) -> None:
    """Parent or destination, request or stream, for each of the eight cells."""
    parent = {
        (True, MergeMode.CONCAT): {DispatchPhase.HEAD},
        (True, MergeMode.SPLICE): {DispatchPhase.BACKFILL, DispatchPhase.HEAD},
        (False, MergeMode.CONCAT): set[DispatchPhase](),
        (False, MergeMode.SPLICE): {DispatchPhase.BACKFILL},
    }
    assert inherits_stamp(inherit, merge, phase) == (phase in parent[inherit, merge])
    assert is_collected(merge, phase) == (
        merge is MergeMode.SPLICE and phase is DispatchPhase.BACKFILL
    )


def test_merge_inserts_behind_equal_stamps_and_renumbers() -> None:
    """P3: existing rows first on ties; positions move, identities stay."""
    world = world_of("d")
    put(world, "d", 15, 25)
    ids = [row.id for row in world.rows("d")]
    world.request("r", "d", [(f"lost/{t}", t, {"v": t}) for t in (10, 20, 25, 30)])
    world.merge("r")
    assert [(row.time, row.id) for row in world.rows("d")] == [
        (10, "lost/10"),
        (15, ids[0]),
        (20, "lost/20"),
        (25, ids[1]),
        (25, "lost/25"),
        (30, "lost/30"),
    ]
    assert [row.position for row in world.rows("d") if row.id in ids] == [1, 3]


def test_a_rejected_request_leaves_everything() -> None:
    """P3: reject changes nothing, and a decision is final."""
    world = world_of("d")
    put(world, "d", 15, 25)
    before = world.rows("d")
    world.request("r", "d", [("lost", 10, {"v": 10})])
    world.reject("r")
    assert world.rows("d") == before
    with pytest.raises(ConfigurationError, match="rejected already"):
        world.merge("r")


def test_a_rejected_dispatch_does_not_stop_a_reducer() -> None:
    """P4: B wrote 105 first; A's 100 is logged on A's origin, and A goes on."""
    world = world_of("a", "d")
    world.attach(counting("sum", "a", "d", inherit=True))
    put(world, "d", 105)
    put(world, "a", 100)
    put(world, "a", 110)
    assert [row.value.get("sum", "outside") for row in world.rows("d")] == ["outside", 210]
    assert [(r.stream, r.attachment, r.stamp) for r in world.rejections("a")] == [("a", "sum", 100)]
    assert world.failure("sum") is None


def test_a_replayed_reducer_has_the_same_state_at_every_row() -> None:
    """P5: a second run over the same rows, in other turns, has equal states and dispatches."""
    first, second = world_of("o", "d"), world_of("o", "d")
    put(first, "o", 1, 2, 3, 4)
    first.attach(counting("sum", "o", "d"))
    second.attach(counting("sum", "o", "d"))
    for stamp in (1, 2, 3, 4):
        put(second, "o", stamp)
    assert (
        first.states("sum")
        == second.states("sum")
        == [{}, {None: 1}, {None: 3}, {None: 6}, {None: 10}]
    )
    assert [row.value for row in first.rows("d")] == [row.value for row in second.rows("d")]


def test_pipes_select_by_position_time_and_predicate() -> None:
    """Half-open ranges and a predicate, all at once."""
    world = world_of("o", "d")
    put(world, "o", 10, 20, 30, 40, 50)
    world.attach(
        pipe("p", "o", "d", positions=(1, 4), times=(20, 41), where=lambda v: v["v"] != 30)
    )
    assert [row.value["v"] for row in world.rows("d")] == [20, 40]


def failing_at(value: int, broken: Callable[[], bool]) -> Attachment:
    """A reducer that cannot take one value while `broken`."""

    def fold(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
        if event["v"] == value and broken():
            raise ValueError(f"cannot take {value}")
        return state + 1, [{"v": event["v"], "n": state}]

    return Attachment("f", "o", ("d",), fold, initial=0, inherit=True)


def test_a_failing_reducer_pauses_and_resumes_where_it_was() -> None:
    """The event is named; later rows wait; nothing is dispatched twice or left out."""
    faults = {"broken": True}
    world = world_of("o", "d")
    world.attach(failing_at(20, lambda: faults["broken"]))
    put(world, "o", 10, 20)
    put(world, "o", 30)
    failure = world.failure("f")
    assert failure is not None
    assert (failure.row_id, failure.error) == ("o/1", "ValueError('cannot take 20')")
    assert world.times("d") == [10]
    faults["broken"] = False
    world.resume("f")
    assert [(row.value["v"], row.value["n"]) for row in world.rows("d")] == [
        (10, 0),
        (20, 1),
        (30, 2),
    ]


def test_a_merge_that_would_stop_a_reducer_is_refused() -> None:
    """Nothing changes, and the request can still be decided."""
    world = world_of("o", "d")
    world.attach(failing_at(15, lambda: True))
    put(world, "o", 10, 20)
    before = world.rows("o"), world.rows("d")
    world.request("r", "o", [("late", 15, {"v": 15})])
    with pytest.raises(PoisonError, match="would stop f"):
        world.merge("r")
    assert (world.rows("o"), world.rows("d")) == before
    world.reject("r")


def test_detached_means_no_later_row() -> None:
    """What was dispatched stays; a row merged into the time before is dispatched as well."""
    world = world_of("o", "d")
    world.attach(counting("sum", "o", "d", inherit=True))
    put(world, "o", 10, 30)
    world.detach("sum")
    put(world, "o", 40)
    assert world.times("d") == [10, 30]
    world.request("r", "o", [("late", 20, {"v": 20})])
    world.merge("r")
    assert [(row.time, row.value["sum"]) for row in world.rows("d")] == [
        (10, 10),
        (20, 30),
        (30, 60),
    ]


def test_detaching_twice_is_detaching_once() -> None:
    """The first time is kept.

    Rows that came in between are not dispatched by whatever is computed again later.
    """
    world = world_of("o", "d")
    world.attach(counting("sum", "o", "d", inherit=True))
    put(world, "o", 10)
    world.detach("sum")
    put(world, "o", 40)
    world.detach("sum")
    world.request("r", "o", [("late", 20, {"v": 20})])
    world.merge("r")
    assert 40 not in world.times("d")


def test_a_buffer_orders_and_never_rejects() -> None:
    """Two writers out of step reach the final stream in order.

    What comes below the mark is moved up to it.
    """
    world = world_of("a", "b")
    world.stream("final", buffered=True)
    for origin in ("a", "b"):
        world.attach(pipe(f"p{origin}", origin, "final", inherit=True))
    put(world, "a", 10, 30, 50)
    put(world, "b", 20, 40)
    assert world.times("final") == []
    world.advance(35)
    assert world.times("final") == [10, 20, 30]
    world.append("final", ({"v": 5}, 5))
    world.advance(100)
    assert world.times("final") == [10, 20, 30, 30, 40, 50]
    assert world.rejections("a") == world.rejections("b") == world.rejections("final") == []


def test_cycles_are_refused() -> None:
    """Also one over several streams, and a stream onto itself."""
    world = world_of("a", "b", "c")
    world.attach(pipe("ab", "a", "b"))
    world.attach(pipe("bc", "b", "c"))
    for name, origin, to in (("ca", "c", "a"), ("aa", "a", "a")):
        with pytest.raises(ConfigurationError, match="cycle"):
            world.attach(pipe(name, origin, to))


def test_a_merge_runs_nothing_before_the_insertion() -> None:
    """Folds start at the inserted row, with the state they had there.

    What comes before is the same.
    """
    seen: list[int] = []

    def fold(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
        seen.append(event.time)
        return state + event["v"], [{"v": state + event["v"]}]

    world = world_of("o", "d", "e")
    world.attach(Attachment("r", "o", ("d",), fold, initial=0, inherit=True))
    world.attach(counting("sum", "d", "e", inherit=True))
    put(world, "o", *range(0, 100, 10))
    before = {name: world.rows(name) for name in ("o", "d", "e")}
    states = world.states("r")
    seen.clear()
    world.request("late", "o", [("lost", 55, {"v": 55})])
    world.merge("late")
    assert seen == [55, 60, 70, 80, 90]
    assert world.states("r")[:7] == states[:7]
    for name, rows in before.items():
        assert world.rows(name)[:6] == rows[:6]
        assert [row.time for row in world.rows(name)[6:]] == [55, 60, 70, 80, 90]
