"""kill -9 in each step of the epoch, on real Spark: the tables equal an undisturbed run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.drivers import SIGKILLED, Steady
from tidegate.jobs.engine.faults import POINTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OBJECTS = 36


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Steady:
    """The undisturbed run."""
    steady = Steady(tmp_path_factory.mktemp("calm"), OBJECTS)
    assert steady.run() == 0, steady.log_text()
    return steady


def test_the_undisturbed_run_is_exact(calm: Steady) -> None:
    """Every row in one place, windows equal a recomputation (9.1, 9.8)."""
    found = calm.exact()
    assert found.problems == []
    assert sum(source["read"] for source in found.rows.values()) == calm.rows
    assert found.windows["per_minute"] > 50


def test_killed_twice_in_every_step(calm: Steady, tmp_path: Path) -> None:
    """Twice in a row at each fault point, then to the end: no loss, no duplicate, the same rows in every table."""
    steady = Steady(tmp_path, OBJECTS)
    for point in POINTS:
        for _ in range(2):
            assert steady.run(f"{point}:2") == SIGKILLED, f"{point}: {steady.log_text()}"
    assert steady.run() == 0, steady.log_text()
    assert steady.exact().problems == []
    assert steady.content() == calm.content()


def test_two_drivers_started_at_once(calm: Steady, tmp_path: Path) -> None:
    """One takes the lease, the other ends as fenced; the tables are the same."""
    steady = Steady(tmp_path, OBJECTS)
    first, second = steady.start(), steady.start()
    assert sorted([first.wait(timeout=240), second.wait(timeout=240)]) == [0, 4]
    assert steady.content() == calm.content()
