"""Drivers whose spec and code come from a git repository, by Airflow's own git bundle.

Real git and Airflow's provider; its processes take part in `test_git_deploys.py`. CI keeps the same
promises without a bundle in `tests/driver/test_deploys.py` and `tests/operators/test_deploy_task.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.git_team import Team, install_provider
from tidegate.checkpoints.deployed_specs import make_copy, read_deployed, start_deploy
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.driver.launch_spec import LaunchSpec, choose_launch_spec
from tidegate.jobs.spec.git_commit import find_commit
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.user_code import collect_code

pytestmark = [pytest.mark.airflow, pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

# What a task of Airflow does first, with the version of its run, and what cleans up.
INITIALIZE = """\
import sys
from airflow.dag_processing.bundles.base import BundleUsageTrackingManager, BundleVersionLock
from airflow.dag_processing.bundles.manager import DagBundlesManager
bundle = DagBundlesManager().get_bundle("team", sys.argv[1])
bundle.initialize()
with BundleVersionLock(bundle_name="team", bundle_version=sys.argv[1]):
    print("path", bundle.path)
BundleUsageTrackingManager().remove_stale_bundle_versions()
"""


class Workers:
    """A host on which tasks of Airflow run, each in the commit of its run; it keeps one commit."""

    def __init__(self, folder: Path, team: Team) -> None:
        kwargs = {"repo_url": str(team.remote), "tracking_ref": "main", "subdir": "dags"}
        path = "airflow.providers.git.bundles.git.GitDagBundle"
        bundle = {"name": "team", "classpath": path, "kwargs": kwargs}
        settings = {
            "DAG_BUNDLE_STORAGE_PATH": str(folder / "bundles"),
            "DAG_BUNDLE_CONFIG_LIST": json.dumps([bundle]),
            "STALE_BUNDLE_CLEANUP_AGE_THRESHOLD": "0",
            "STALE_BUNDLE_CLEANUP_MIN_VERSIONS": "1",
        }
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(install_provider()),
            "AIRFLOW_HOME": str(folder / "airflow"),
            **{f"AIRFLOW__DAG_PROCESSOR__{name}": value for name, value in settings.items()},
        }
        self.store = LocalStore(folder / "store")

    def begin_task(self, commit: str) -> Path:
        """The spec that a task of a run with this commit has; the folders of others go."""
        found = subprocess.run(
            [sys.executable, "-c", INITIALIZE, commit],
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        )
        (path,) = [line[5:] for line in found.stdout.splitlines() if line.startswith("path ")]
        return Path(path) / "pipelines/counted.yaml"

    def launch(self, spec: Path) -> LaunchSpec:
        """A driver that has its first round."""
        launch = choose_launch_spec(spec, self.store)
        launch.turn.begin(self.store)
        launch.turn.confirm(self.store)
        return launch

    def deploy(self, spec: Path) -> None:
        """What `<p>.deploy` does in the commit of its run."""
        copy = make_copy(load_any_spec(spec), collect_code(load_any_spec(spec), spec))
        start_deploy(self.store, "counted", copy, who="ann", commit=find_commit(spec))

    @property
    def commit(self) -> str | None:
        """Of what is deployed."""
        current = read_deployed(self.store, "counted").current
        return None if current is None else current.commit


def read_step(launch: LaunchSpec) -> str:
    """What each row counts for in the code that a driver runs."""
    return (launch.folder / "rules/steps.py").read_text().partition("\n")[0]


def test_a_driver_outlives_the_folder_of_its_commit(tmp_path: Path) -> None:
    """The run of a stream keeps its first commit, through many commits and the deploy of another."""
    team = Team(tmp_path / "team")
    workers = Workers(tmp_path, team)
    first = team.push(1)
    of_run = workers.begin_task(first)
    driver = workers.launch(of_run)
    assert (workers.commit, read_step(driver)) == (first[:12], "STEP = 1")

    newest = [team.push(step) for step in range(90, 101)][-1]
    assert read_step(workers.launch(of_run)) == "STEP = 1"
    of_deploy = workers.begin_task(newest)
    assert not of_run.exists()
    assert read_step(driver) == "STEP = 1"

    workers.deploy(of_deploy)
    assert workers.begin_task(first) == of_run
    # The file of the run says `deploy: auto`, and is that of an older commit.
    for _ in range(2):
        assert read_step(workers.launch(of_run)) == "STEP = 100"
        assert workers.commit == newest[:12]
