"""Airflow's own API application and database, in a process beside this one.

No server is started, no scheduler waited for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

WELL = {"one.stream": None, "two.stream": None}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "home").mkdir()
    settings = {
        "AIRFLOW_HOME": str(folder / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "tidegate.infra.airflow_processes.PATIENT",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__API_AUTH__JWT_SECRET": "j" * 64,
        "AIRFLOW__API__SECRET_KEY": "k" * 64,
        "TIDEGATE_STORE": str(folder / "store"),
    }
    command = [sys.executable, "-m", "tests.operators.api_server", str(folder)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_broken_spec_stops_no_other_pipeline(seen: dict[str, Any]) -> None:
    """It is not an import error, by which Airflow would call every DAG of the file stale.

    Its DAG names file, line and field.
    """
    assert seen["well"] == seen["broken spec"] == seen["mended"] == {"errors": 0, "streams": WELL}
    assert "bad.yaml:3: sauces: unknown field" in seen["told"]


def test_streams_of_a_broken_file_stay_on_the_page(seen: dict[str, Any]) -> None:
    """All of them, with what it means.

    One whose DAG is gone from a good file, and has no run, was removed.
    """
    assert seen["broken file"] == {"errors": 1, "streams": dict.fromkeys(WELL, "errors")}
    assert seen["removed"] == {"one.stream": None}


def test_the_api_server_sees_to_the_driver_of_a_marked_task(seen: dict[str, Any]) -> None:
    """Of a task, and of a whole run, without a triggerer.

    A mark of a run that was over long ago concerns no one.
    """
    assert seen["one"] == ["the task was set to failed in Airflow", [["drain", 1]]]
    assert seen["two"] == ["the task was set to success in Airflow", [["drain", 1]]]
    assert seen["long over"] == "by hand"
