"""Jobs in the simulation: what must hold does, and bugs that are planted are found."""

from __future__ import annotations

import pytest
from tests.simulation.job_mutants import JOB_MUTANTS, hunt_in_jobs
from tests.simulation.job_world import run_world
from tests.simulation.planting import Mutant

_WORLDS = 30
_HUNTED = 200  # at most; a hunt ends with the first history that shows the bug
# Found within a few histories; `make jobs-soak` hunts them all.
_QUICK = {
    "finished_without_evidence",
    "finished_after_a_failure",
    "debts_forgotten",
    "logs_left",
    "tables_left",
    "pack_key_shared",
    "jvm_outlives_python",
    "restored_after_sleep",
    "owners_noted_late",
    "unknown_sink_taken_over",
    "noted_rewinds_decide",
    "memory_sinks_kept",
    "scripts_judged_first",
    "slot_before_first",
    "never_stalled",
    "starts_without_end",
    "ends_overlooked",
    "ends_trusted",
    "root_logger_taken",
    "idle_jobs_old",
}


@pytest.mark.parametrize("first", range(0, _WORLDS, 10))
def test_jobs_hold_what_they_promise(first: int) -> None:
    """In histories with kills, restores, retention, outages and clocks that go back."""
    for seed in range(first, first + 10):
        run_world(seed)


def test_a_seed_decides_the_whole_history() -> None:
    """So a history that shows a fault can be run again."""
    assert run_world(3).events == run_world(3).events


@pytest.mark.parametrize("mutant", JOB_MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_of_jobs_can_be_planted(mutant: Mutant) -> None:
    """The text that it rewords is still there."""
    assert mutant.make()


@pytest.mark.parametrize(
    "mutant", [one for one in JOB_MUTANTS if one.name in _QUICK], ids=lambda mutant: mutant.name
)
def test_the_simulation_of_jobs_finds_planted_bugs(mutant: Mutant) -> None:
    """Each within a few histories."""
    assert hunt_in_jobs(mutant, _HUNTED) is not None
