"""The rules of the protocol lose nothing, each of them is needed, and the product keeps them."""

from __future__ import annotations

import pytest
from tests.simulation.cheap import cheap
from tests.simulation.judge_traces import is_rejected, select_planted
from tests.simulation.planting import Mutant
from tests.simulation.protocol_search import QUICK, WHOLE, search_all_steps
from tests.simulation.protocol_steps import CONDITIONS
from tests.simulation.schedule import run_seed

_SECOND = "a restore finds the way to its target"


def test_no_order_of_steps_loses_anything() -> None:
    """One restore, retention, deletions, readers, pins: every order of steps."""
    found = search_all_steps(QUICK)
    assert found.violation is None
    assert found.states > 3_000


@pytest.mark.slow
def test_nor_do_two_restores() -> None:
    """Two attempts at a slot, one slot more, a second restore, also to an abandoned timeline."""
    found = search_all_steps(WHOLE)
    assert found.violation is None
    assert found.states > 50_000


@pytest.mark.parametrize("condition", [one for one in CONDITIONS if one != _SECOND])
def test_every_condition_is_needed(condition: str) -> None:
    """Without it some order of steps loses, doubles or hides something."""
    assert search_all_steps(QUICK, frozenset({condition})).violation is not None


@pytest.mark.slow
def test_so_is_the_condition_of_a_second_restore() -> None:
    """It matters to a restore of an abandoned timeline only."""
    assert search_all_steps(WHOLE[-1:], frozenset({_SECOND})).violation is not None


def test_a_schedule_takes_allowed_steps_only() -> None:
    """The steps of a schedule with a sink, with restores and retention, are taken."""
    with cheap():
        world = run_seed(11, sink="postgres", focus=("sleep", "fork"))
    assert world.violation is None
    assert world.judge.steps > 20


@pytest.mark.parametrize(
    "mutant",
    [m for m in select_planted() if m.name.startswith("publish before")],
    ids=lambda mutant: mutant.name,
)
def test_a_planted_bug_is_rejected(mutant: Mutant) -> None:
    """`make judge` plants more of them."""
    assert is_rejected(mutant, seconds=60.0)
