"""Positions on lineages."""

from __future__ import annotations

import pytest
from tests.sinks.conftest import World

from tidegate.checkpoints.log import Stretch
from tidegate.jobs.sinks.marks import Mark, Way, shared_slots


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
def test_shared_slots(left: list[tuple[int, int, int | None]], right: list[tuple[int, int, int | None]], shared: int) -> None:
    """Two lineages are the same up to the first place where their timelines or ends differ."""
    assert shared_slots([Stretch(*s) for s in left], [Stretch(*s) for s in right]) == shared
    assert shared_slots([Stretch(*s) for s in right], [Stretch(*s) for s in left]) == shared


def test_positions_after_a_restore(world: World) -> None:
    """A mark of an old timeline holds up to the fork, not beyond; an empty root holds everywhere before."""
    target = world.seal(2).id
    world.seal(2)
    world.fork(target)
    world.seal(1)
    way = Way(world.log, world.log.head())
    found = [way.position(Mark(0, timeline, upto)) for timeline, upto in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 4), (2, 1))]
    assert found == [1, 2, None, 2, 3, None, None]
    assert way.position(Mark(0, 0, 4, root=True)) == 2
