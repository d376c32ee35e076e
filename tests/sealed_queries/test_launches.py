"""A job under spark-submit, and a standby that takes over."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.sealed_queries.apps import Clicks
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.lease import read_lease
from tidegate.errors import FailureClass

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

_FILES = 6
_SUBMISSION = (sys.executable, "-m", "tidegate.operators.spark_submission")

Open = Callable[..., KilledJob]


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, object]:
    """What the sinks hold after an undisturbed run."""
    with closing(KilledJob(tmp_path / "whole", {}, Clicks, _FILES)) as whole:
        whole.run_to_end_of_input()
        return whole.app.outputs()


def _find_holder(job: KilledJob) -> psutil.Process:
    lease = read_lease(job.log.store, job.app.name)
    assert lease is not None
    assert lease.holder is not None
    return psutil.Process(lease.holder.pid)


def test_a_submitted_job_is_killed_and_goes_on(tmp_path: Path, expected: dict[str, object]) -> None:
    """spark-submit's master is used, and the folder of the launch is kept after a kill.

    The JVM is the driver's parent. Its end is waited for, or the next launch would restore.
    """
    connection = {"conn_type": "spark", "host": "local[2]"}
    environment = {
        **os.environ,
        "AIRFLOW_CONN_HERE": json.dumps(connection),
        "TIDEGATE_STORE": str(tmp_path / "job" / "store"),
    }
    conf = COMBINATIONS["rocksdb-2"]
    with closing(KilledJob(tmp_path / "job", conf, Clicks, _FILES, environment=environment)) as job:
        command = (*_SUBMISSION, str(job.folder / "attempt"), json.dumps({"conn_id": "here"}))
        job.launch(command=command)
        job.wait(lambda: job.positions().get("per_minute", -1) >= 1)
        driver = _find_holder(job)
        parent = driver.parent()
        assert parent is not None
        assert any("SparkSubmit" in part for part in parent.cmdline())
        driver.send_signal(signal.SIGKILL)
        assert job.process is not None
        assert job.process.wait(timeout=120) == 137
        job.launch(command=command)
        job.wait(lambda: job.holds_lease() and job.is_complete())
        _find_holder(job).send_signal(signal.SIGTERM)
        assert job.process.wait(timeout=120) == 0
        assert job.app.outputs() == expected
        assert "continued_in_place" in (job.folder / "driver.log").read_text()
        job.read_line()


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
