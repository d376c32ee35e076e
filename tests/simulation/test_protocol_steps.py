"""The rules of the protocol lose nothing, each of them is needed, and the product keeps them."""

from __future__ import annotations

import pytest
from tests.simulation.cheap import cheap
from tests.simulation.judge_traces import is_rejected, select_planted
from tests.simulation.mutants import Mutant
from tests.simulation.protocol_steps import CONDITIONS, QUICK, WHOLE, search_all_steps
from tests.simulation.schedule import run_seed


def test_no_order_of_steps_loses_anything() -> None:
    """One restore, two attempts at a slot, deletions, readers, pins: every order of steps."""
    found = search_all_steps(QUICK)
    assert found.violation is None
    assert found.states > 10_000


@pytest.mark.slow
def test_nor_do_two_restores() -> None:
    """One slot more, and a second restore, which may go back to an abandoned timeline."""
    found = search_all_steps(WHOLE)
    assert found.violation is None
    assert found.states > 50_000


_WITH_TWO_RESTORES = ("a restore finds the way to its target",)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_is_needed(condition: str) -> None:
    """Without it some order of steps loses, doubles or hides something."""
    scenes = WHOLE[-1:] if condition in _WITH_TWO_RESTORES else QUICK
    assert search_all_steps(scenes, frozenset({condition})).violation is not None


def test_a_schedule_takes_allowed_steps_only() -> None:
    """The steps of a schedule with a sink, with restores and retention, are taken."""
    with cheap():
        world = run_seed(11, sink="postgres", focus=("sleep", "fork"))
    assert world.violation is None
    assert world.judge.steps > 20


@pytest.mark.parametrize("mutant", select_planted()[:1], ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_rejected(mutant: Mutant) -> None:
    """`make judge` plants all of them."""
    assert is_rejected(mutant, seconds=60.0)
