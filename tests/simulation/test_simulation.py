"""The real engine, log, lease, restore, retention and follower under seeded storms, and without
each of their mends.
"""

from __future__ import annotations

import marshal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from tests.servers.memory_store import StoreRequest
from tests.simulation import schedule
from tests.simulation.actors import Stage
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import rows_of
from tests.simulation.coverage import CELLS
from tests.simulation.judge import read_lineage
from tests.simulation.judge_rows import judge_epochs
from tests.simulation.judge_streams import judge_streams
from tests.simulation.killers import KILLERS, Killer, play
from tests.simulation.mutants import MUTANTS, hunt, planted
from tests.simulation.planting import Mutant
from tests.simulation.schedule import finish, recover, simulated
from tests.simulation.shapes import SHAPES, STREAMS
from tests.simulation.soak import soak
from tests.simulation.storage import JudgeStore
from tests.simulation.world import SimClock, World

from tidegate.checkpoints.driver_requests import RequestKind, submit_request

SECONDS = 8.0  # `make ci` soaks for a minute
_ROOT = Path(__file__).parents[2]
QUICK = (
    "a full disk is not waited for",
    "a defect ends housekeeping",
    "savepoints are not acknowledged",
    "a catalog in the bucket takes commits without a condition",
    "one probe decides about a store",
    "a record of a newer version counts as damaged",
    "a 412 taken as a loss without reading back",
    "publishers rebase (pyiceberg's own retry)",
    "off by one in the cut: a row skipped",
    "PostgreSQL: rows and ledger in two transactions",
    "webhook: marked before it is delivered",
    "compaction: parts that a restore took are brought back",
    "compaction: a merged part stays as well",
    "files: named before they are there",
)
# Schedules behind which the hunt of a bug begins, because the first ones do not find it.
_FIRST_SCHEDULES = {
    "a record of a newer version counts as damaged": 70,
    "publishers rebase (pyiceberg's own retry)": 20,
    "PostgreSQL: rows and ledger in two transactions": 82,
    "webhook: marked before it is delivered": 34,
}


@pytest.mark.timeout(120)
def test_a_short_soak_finds_nothing() -> None:
    """No schedule loses, doubles or misorders a row, changes a sealed slot, or deletes what
    someone needs; no job ends without evidence, or with a sink that differs.
    """
    done = soak(SECONDS)
    assert done.violations == []
    assert done.schedules > 0
    assert done.histories > 0
    assert {(kind, step) for kind, step in done.faults} <= set(CELLS)


_TWICE = """
from tests.simulation.schedule import run_seed
first, second = run_seed(7, rate=0.1, trace=True), run_seed(7, rate=0.1, trace=True)
assert first.trace == second.trace
assert (first.steps, first.faults, first.slot_marks) == (second.steps, second.faults, second.slot_marks)
"""


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same schedule, step by step.

    In a process of its own: a thread that another test left behind may draw from the schedule's
    dice.
    """
    done = subprocess.run(
        [sys.executable, "-c", _TWICE], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_recovery_goes_on_although_another_driver_finished_in_its_place() -> None:
    """A standby that woke up may be faster than the fresh driver, and note that none is wanted."""
    world = World(3, rate=0.0, focus=("", ""))
    with simulated(world):
        stage = Stage(world)
        try:
            stage.feed(0)
            stage.end_sources()
            faster = stage.driver("faster", epochs=60)
            world.run(until=lambda: "faster" in world.bucket.tokens)
            schedule._fresh(stage, "fresh")
            assert faster.outcome == "finished"
        finally:
            finish(world)


def test_a_driver_comes_for_a_request_that_arrives_behind_the_recovery() -> None:
    """The last driver may have ended before a write that was on its way takes effect."""
    world = World(3, rate=0.0, focus=("", ""))
    store, clock = JudgeStore(world.bucket), SimClock(world, 0)

    def ask() -> None:
        kind = RequestKind.SAVEPOINT
        submit_request(store, PIPELINE, kind, who="ann", name="kept", clock=clock)

    world.late.append(("a savepoint", ask))
    with simulated(world):
        stage = Stage(world)
        try:
            stage.feed(0)
            recover(stage)
        finally:
            finish(world)
    assert not world.bucket.asked


@pytest.mark.parametrize("shape", SHAPES)
def test_the_recomputation_notices_a_row_that_was_written_otherwise(shape: str) -> None:
    """Of each spec that a seed may choose: what an epoch wrote is compared row by row."""
    world = World(3, rate=0.0, focus=("", ""))
    with simulated(world):
        stage = Stage(world, shape=shape)
        try:
            for step in range(3):
                stage.feed(step)
            recover(stage)
            lineage = read_lineage(stage)
            file = next(files["w"][0] for epoch in lineage if (files := epoch.files).get("w"))
            rows = rows_of(world.bucket.written[file.key])
            rows[0]["n"] += 1
            world.bucket.written[file.key] = marshal.dumps([*rows], 2)
            with pytest.raises(Violation, match="w lacks"):
                judge_epochs(stage, lineage)
        finally:
            finish(world)


@pytest.mark.parametrize("table", ["copy", "again", "sums"])
def test_the_recomputation_of_streams_notices_a_row_that_is_missing(table: str) -> None:
    """What pipes and a reducer have sent, by position and at once."""
    world = World(3, rate=0.0, focus=("", ""))
    with simulated(world):
        stage = Stage(world, shape=STREAMS)
        try:
            for step in range(3):
                stage.feed(step)
            recover(stage)
            lineage = read_lineage(stage)
            judge_streams(stage, lineage)
            file = next(files[table][0] for epoch in lineage if (files := epoch.files).get(table))
            rows = rows_of(world.bucket.written[file.key])
            world.bucket.written[file.key] = marshal.dumps([*rows[1:]], 2)
            with pytest.raises(Violation, match=f"{table} lacks"):
                judge_streams(stage, lineage)
        finally:
            finish(world)


def test_a_driver_that_nothing_disturbs_has_to_answer_soon() -> None:
    """It is judged whenever it renews its lease; a fault gives it time."""
    world = World(3, rate=0.0, focus=("", ""))
    Stage(world)
    bucket, driver = world.bucket, world.process("d")
    driver.calm_since = world.now
    with patch.object(world, "current", lambda: SimpleNamespace(process=driver)):
        bucket.apply(StoreRequest("put", "p/requests/a.json", b'{"kind": "savepoint"}'))
        world.now += 50.0
        bucket._require_prompt_answers("d")
        world.now += 50.0
        with pytest.raises(Violation, match="d has not answered savepoint"):
            bucket._require_prompt_answers("d")
        driver.calm_since = world.now
        bucket._require_prompt_answers("d")
        world.now += 100.0
        bucket.apply(StoreRequest("put", "p/acks/a.json", b"{}"))
        bucket._require_prompt_answers("d")


@pytest.mark.parametrize("killer", KILLERS, ids=lambda killer: killer.name)
def test_known_killers_do_no_harm(killer: Killer) -> None:
    """The script ends in tables and checkpoints that are right."""
    assert play(killer).violation is None


@pytest.mark.parametrize("killer", KILLERS, ids=lambda killer: killer.name)
def test_their_corrections_are_needed(killer: Killer) -> None:
    """Without its mend the same script ends in a violation."""
    assert play(killer, mended=False).violation is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_can_be_planted(mutant: Mutant) -> None:
    """The code that it changes is still there."""
    with planted(mutant):
        pass


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.name in QUICK], ids=lambda mutant: mutant.name
)
def test_the_soak_finds_planted_bugs(mutant: Mutant) -> None:
    """A bug put in on purpose is found within a moment; `make mutants` hunts them all."""
    assert hunt(mutant, seconds=60.0, seed=_FIRST_SCHEDULES.get(mutant.name, 0))[1]
