"""Positions on lineages."""

from __future__ import annotations

import pytest
from tests.sinks.conftest import World

from tidegate.checkpoints.slot_log import LineageSegment
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    count_shared_slots,
)


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ([(0, 1, None)], [(0, 1, 3), (1, 4, None)], 3),
        ([(0, 1, 5)], [(0, 1, 3), (1, 4, None)], 3),
        ([(0, 1, 3), (1, 4, 6)], [(0, 1, 3), (1, 4, 5), (2, 6, None)], 5),
        ([(0, 1, 3), (1, 4, 6)], [(0, 1, 5), (2, 6, None)], 3),
        ([(0, 1, 5)], [(1, 1, None)], 0),
    ],
)
def test_shared_slots(
    left: list[tuple[int, int, int | None]], right: list[tuple[int, int, int | None]], shared: int
) -> None:
    """Two lineages are the same up to the first place where their timelines or ends differ."""
    assert (
        count_shared_slots([LineageSegment(*s) for s in left], [LineageSegment(*s) for s in right])
        == shared
    )
    assert (
        count_shared_slots([LineageSegment(*s) for s in right], [LineageSegment(*s) for s in left])
        == shared
    )


def test_positions_after_a_restore(world: World) -> None:
    """A table of an old timeline is right up to the fork.

    One of a timeline that no one knows is not judged.
    """
    target = world.seal(2).id
    world.seal(2)
    world.fork(target)
    world.seal(1)
    way = CurrentLineage(world.log, world.log.head())
    found = [
        way.last_shared_slot(FollowerPosition(*mark))
        for mark in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3))
    ]
    assert found == [1, 2, 2, 2, 2, 3]
    assert [
        way.is_in_log(FollowerPosition(*mark)) for mark in ((0, 4), (1, 3), (1, 4), (2, 1))
    ] == [True, True, False, False]
