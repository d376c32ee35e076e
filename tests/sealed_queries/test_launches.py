"""A job under spark-submit, and a standby that takes over."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from tests.sealed_queries.apps import Clicks
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.errors import FailureClass

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

_FILES = 6


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, object]:
    """What the sinks hold after an undisturbed run."""
    with closing(KilledJob(tmp_path / "whole", {}, Clicks, _FILES)) as whole:
        whole.run_to_end_of_input()
        return whole.app.outputs()


def test_a_submitted_job_is_killed_and_goes_on(tmp_path: Path, expected: dict[str, object]) -> None:
    """spark-submit's master is used, and the folder of the launch is kept after a kill.

    The JVM is the driver's parent. Its end is waited for, or the next launch would restore.
    """
    conf = COMBINATIONS["rocksdb-2"]
    with closing(KilledJob(tmp_path / "job", conf, Clicks, _FILES)) as job:
        job.launch(submitted=True)
        job.wait(lambda: job.positions().get("per_minute", -1) >= 1)
        driver = job.find_holder()
        parent = driver.parent()
        assert parent is not None
        assert any("SparkSubmit" in part for part in parent.cmdline())
        driver.send_signal(signal.SIGKILL)
        assert job.process is not None
        assert job.process.wait(timeout=120) == 137
        job.launch(submitted=True)
        job.wait(lambda: job.holds_lease() and job.is_complete())
        job.find_holder().send_signal(signal.SIGTERM)
        assert job.process.wait(timeout=120) == 0
        assert job.app.outputs() == expected
        assert "continued_in_place" in (job.folder / "driver.log").read_text()
        job.read_line()


# In CI, a standby takes over under Airflow in `tests/e2e/test_airflow_submit.py`.
@pytest.mark.long
def test_a_standby_takes_over(tmp_path: Path, expected: dict[str, object]) -> None:
    """It waits, seals on when the driver is killed, and ends when the job is stopped."""
    with closing(KilledJob(tmp_path / "job", {}, Clicks, _FILES)) as job:
        first = job.launch()
        job.wait(lambda: job.positions().get("per_minute", -1) >= 1)
        options = ("--standby", "--ends-when-stopped")
        second = job.launch(*options)
        log = job.folder / "driver.log"
        job.wait(lambda: "standing_by" in log.read_text())
        first.kill()
        first.wait()
        job.wait(lambda: job.holds_lease() and job.is_complete())
        third = job.launch(*options)
        job.wait(lambda: log.read_text().count("standing_by") == 2)
        set_desired_state(job.log.store, job.app.name, DesiredState.STOPPED, who="t", why="t")
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=120) == 0
        assert third.wait(timeout=120) == FailureClass.FENCED.exit_code
        assert job.app.outputs() == expected
        job.read_line()
