"""A stream whose DAG file, spec and code come from a git repository, by Airflow's own git bundle.

Airflow's scheduler, DAG processor, triggerer and API server, and real MinIO, Spark and git.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.git_team import SPEC, Team, install_provider
from tests.operators.conftest import Cockpit, cockpit_of
from tidegate.checkpoints.deployed_specs import read_deployed
from tidegate.infra.airflow_processes import COMPONENT_SETTINGS
from tidegate.infra.local_stack import Stack
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import parse_spec

# CI keeps these promises without a bundle: `tests/driver/test_deploys.py` and
# `tests/operators/test_deploy_task.py`.
pytestmark = [
    pytest.mark.airflow,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]

PREFIX = "AIRFLOW__DAG_PROCESSOR__"
# A version that no task has used for a second goes, except the newest.
SETTINGS = {
    "STALE_BUNDLE_CLEANUP_INTERVAL": "5",
    "STALE_BUNDLE_CLEANUP_AGE_THRESHOLD": "1",
    "STALE_BUNDLE_CLEANUP_MIN_VERSIONS": "1",
    "MIN_FILE_PROCESS_INTERVAL": "5",
}


def locate_bundle(repository: Path, storage: Path) -> dict[str, str]:
    """Settings of a process of Airflow's that reads this repository, and keeps checkouts there."""
    bundle = {
        "name": "team",
        "classpath": "airflow.providers.git.bundles.git.GitDagBundle",
        "kwargs": {
            "repo_url": str(repository),
            "tracking_ref": "main",
            "subdir": "dags",
            "refresh_interval": 5,
        },
    }
    return {
        f"{PREFIX}DAG_BUNDLE_STORAGE_PATH": str(storage),
        f"{PREFIX}DAG_BUNDLE_CONFIG_LIST": json.dumps([bundle]),
    }


class Counted:
    """The stream: every row that comes in adds the step of the code that its driver runs."""

    def __init__(self, cockpit: Cockpit) -> None:
        self.cockpit, self.rows = cockpit, 0

    def start(self) -> None:
        """Start its run, which keeps the commit that is the newest now."""
        self.cockpit.known("counted.stream")
        self.cockpit.runs = {"counted": self.cockpit.api.trigger_dag("counted.stream")}

    def count(self) -> int:
        """Send a row, and return by how much the total grew."""
        self.rows += 1
        row = {"at": f"2026-01-01T00:{self.rows:02d}:00Z", "n": self.rows}
        self.cockpit.store.put(f"inbox/{self.rows:03d}.json", json.dumps(row).encode())
        self.cockpit.until(lambda: len(self._read_totals()) == self.rows, 60, f"row {self.rows}")
        *_, before, after = [0, *self._read_totals()]
        return after - before

    def sleep(self) -> None:
        """Wait until no task runs: the stream's is deferred, and the triggerer watches."""
        run = self.cockpit.runs["counted"]
        self.cockpit.until(lambda: self.cockpit.watched("counted", run), 60, "deferred task")

    def kill(self) -> None:
        """kill -9 the driver while its task is deferred, and wait for the next one."""
        self.sleep()
        token = self.cockpit.kill("counted")
        self.cockpit.until(lambda: self.cockpit.token("counted") > token, 120, "next driver")

    def receive(self, commit: str) -> None:
        """Wait until Airflow has read a commit."""
        self.cockpit.until(lambda: self._read_newest() == commit, 60, "the commit in Airflow")

    def sweep(self) -> None:
        """Run the sweep of the newest commit."""
        run = self.cockpit.api.trigger_dag("tidegate.sweep")
        assert self.cockpit.ended("tidegate.sweep", run, 120)["state"] == "success"

    def read_page(self) -> Any:
        """What the page shows of the stream."""
        return json.loads(self.cockpit.get("api/streams/counted.stream", "vic")[1])

    def waits_for_deploy(self) -> bool:
        """Whether the page says that the file waits for a deploy."""
        rows = json.loads(self.cockpit.get("api/streams", "vic")[1])["streams"]
        says = [finding["says"] for row in rows for finding in row["findings"]]
        return any("waits for tidegate deploy; it differs in" in one for one in says)

    @property
    def commit(self) -> str | None:
        """Of what is deployed."""
        current = read_deployed(self.cockpit.store, "counted").current
        return None if current is None else current.commit

    def _read_newest(self) -> object:
        return self.cockpit.api.request("GET", "/dags/counted.stream")["bundle_version"]

    def _read_totals(self) -> list[int]:
        table = read_table(parse_spec(SPEC), self.cockpit.store, "totals")
        return sorted(table["total"].to_pylist())


def test_a_commit_waits_for_its_deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that come while the stream runs and sleeps change nothing until one is deployed.

    Its driver outlives the folder of its run's commit, which a deferred task does not protect.
    The API server has no checkout, and says what waits.
    """
    team, storage = Team(tmp_path / "team"), tmp_path / "bundles"
    first = team.push(1)
    settings = {
        **{f"{PREFIX}{name}": value for name, value in SETTINGS.items()},
        **locate_bundle(team.remote, storage),
        "PYTHONPATH": str(install_provider()),
    }
    nowhere = locate_bundle(tmp_path / "no-repository", tmp_path / "no-checkouts")
    monkeypatch.setitem(
        COMPONENT_SETTINGS, "api-server", {**COMPONENT_SETTINGS["api-server"], **nowhere}
    )
    environment = Stack.environment
    # The specs lie in the bundle.
    monkeypatch.setattr(
        Stack, "environment", lambda stack: {**environment(stack), "TIDEGATE_PIPELINES": ""}
    )
    with cockpit_of(tmp_path, {}, settings, fakes={}) as cockpit:
        stream = Counted(cockpit)
        stream.start()
        assert stream.count() == 1
        assert stream.commit == first[:12]

        stream.receive(team.push(10))
        assert stream.count() == 1
        stream.sleep()
        newest = [team.push(step) for step in range(90, 101)][-1]
        stream.receive(newest)
        stream.kill()
        assert stream.count() == 1
        assert stream.commit == first[:12]

        stream.sweep()
        cockpit.until(stream.waits_for_deploy, 60, "that the page says what waits")
        deploy = cockpit.api.trigger_dag("counted.deploy", {"reason": "bigger steps"})
        assert cockpit.ended("counted.deploy", deploy, 240)["state"] == "success"
        assert stream.count() == 100
        assert stream.commit == newest[:12]
        cockpit.until(lambda: stream.read_page()["commit"] == newest[:12], 60, "its commit there")

        # A worker that begins another task cleans up, and nothing holds the commit of the run.
        stream.sleep()
        stream.sweep()
        folder = storage / "team/versions" / first
        cockpit.until(lambda: not folder.exists(), 60, "deletion of the first commit's folder")
        assert stream.count() == 100
        stream.kill()
        assert stream.count() == 100
        assert stream.commit == newest[:12]
    assert not (tmp_path / "no-checkouts").exists()
