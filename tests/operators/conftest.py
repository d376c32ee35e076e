"""Fixtures of the Airflow side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tenacity import retry, retry_if_result, stop_after_attempt, wait_fixed
from tests.epochs import seal_epoch
from tests.servers.airflow import ApiForTests

from tidegate.checkpoints.driver_requests import read_desired_state
from tidegate.checkpoints.lease import LeaseView, read_lease
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.infra import airflow_processes
from tidegate.infra.airflow_processes import build_airflow_settings
from tidegate.infra.local_stack import Stack, StackSettings
from tidegate.operators.driver_launch import tail_log_file

_REPOSITORY = Path(__file__).resolve().parents[2]

FAKES: Mapping[str, str] = {
    "TIDEGATE_DRIVER": "fake_driver.py",
    "TIDEGATE_CHECKS": "fake_checks.py",
}
PATIENCE = 6.0  # every deadline of this room is so many times what an idle machine may need

Wait = Callable[..., None]


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store that the operators open, without an object."""
    monkeypatch.setenv("TIDEGATE_STORE", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def empty_log(empty_store: Store) -> SlotLog:
    """Pipeline `p` without epochs, in the store that the operators open."""
    return SlotLog(empty_store, "p")


@pytest.fixture
def log(empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> SlotLog:
    """Six epochs of ten rows each; nothing is waited for, no process is started."""
    monkeypatch.setattr(
        "tidegate.operators.recover_and_pin.RecoverOperator._await_first_epoch",
        lambda *_, **__: 1.0,
    )
    for _ in range(6):
        seal_epoch(empty_log)
    return empty_log


@pytest.fixture
def wait_until() -> Wait:
    """Wait for a condition on real processes; fails when it does not come true in time."""

    def wait(
        condition: Callable[[], object], seconds: float = 10.0, what: str = "the condition"
    ) -> None:
        deadline = time.monotonic() + seconds * PATIENCE
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what} did not come true within {seconds * PATIENCE:.0f} s"
            )
            time.sleep(0.05)

    return wait


STREAMS = ("flaky", "lost", "cleared", "restored", "ended", "poisoned")
PIPELINES = (*STREAMS, "checked", "swept")

_SPEC = """\
apiVersion: tidegate/v1
name: {name}
sources:
  one:
    path: inbox/one
    schema: {{at: timestamp, value: long}}
    event_time: at
    lag: 1m
supervision: {{retries: 20, retry_delay: 1s, sweep: "0 0 1 1 *"}}  # swept by hand only: its own sweep would be first, at times
"""


def spec_of(name: str) -> str:
    """A small pipeline."""
    return _SPEC.format(name=name)


class Cockpit:
    """A real Airflow and MinIO with one small pipeline per test, driven by fake drivers."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.api, self.store = stack, ApiForTests.of(stack), open_store(stack.store_url)
        self.runs: dict[str, str] = {}
        self.checks = ""

    def begin(self) -> None:
        """Trigger every run the tests want to look at.

        They overlap, so that no test waits for what another could have begun.
        """
        for name in PIPELINES:
            self.known(f"{name}.quality")
        self.tell("flaky", "transient")
        self.runs = {name: self.api.trigger_dag(f"{name}.stream") for name in STREAMS}
        self.checks = self.api.trigger_dag("checked.quality")

    def known(self, dag_id: str) -> dict[str, Any]:
        """Wait until Airflow knows the DAG."""
        return self.api.wait_for_dag(dag_id, timeout=60 * PATIENCE)

    def ended(self, dag_id: str, run: str, seconds: float) -> dict[str, Any]:
        """Wait for the end of a run, good or bad."""
        self.until(
            lambda: self.api.get_run(dag_id, run)["state"] in ("success", "failed"),
            seconds,
            f"end of {run} of {dag_id}",
        )
        return self.api.get_run(dag_id, run)

    def running(self, pipeline: str) -> str:
        """Wait until the stream runs, is watched and has sealed something; the run id."""
        run = self.runs[pipeline]
        self.until(
            lambda: self.head(pipeline) > 0 and self.task(pipeline, run)["state"] == "deferred",
            120,
            "a running stream",
        )
        return run

    def task(
        self, pipeline: str, run: str, kind: str = "stream", task: str | None = None
    ) -> dict[str, Any]:
        """A task instance of a run; by default the one that is called like the kind of DAG."""
        return self.api.task_instances(f"{pipeline}.{kind}", run)[task or kind]

    def count_tries(self, pipeline: str, run: str) -> int:
        """Return how many tries the stream's task began, without those that Airflow used up itself.

        Airflow's scheduler takes a task for killed from outside if the trigger fires before the
        scheduler has read that the worker ended. It begins another try then.
        """
        query = (
            "SELECT count(*) FROM log WHERE event = 'state mismatch' AND task_id = 'stream'"
            " AND dag_id = ? AND run_id = ?"
        )
        with database_of(self.stack) as database:
            (by_airflow,) = database.execute(query, (f"{pipeline}.stream", run)).fetchone()
        return int(self.task(pipeline, run)["try_number"]) - int(by_airflow)

    def watched(self, pipeline: str, run: str, *, at_least: int = 1) -> bool:
        """Whether the stream's task sleeps while a trigger watches, in this try of it or a later
        one.
        """
        task = self.task(pipeline, run)
        return bool(task["state"] == "deferred" and task["try_number"] >= at_least)

    def log(self, pipeline: str, run: str, kind: str = "stream", try_number: int = 1) -> str:
        """Its log."""
        return self.api.read_task_log(f"{pipeline}.{kind}", run, kind, try_number)

    def holder(self, pipeline: str) -> LeaseView | None:
        """The lease, if someone alive holds it."""
        view = read_lease(self.store, pipeline)
        return None if view is None or view.is_free else view

    def token(self, pipeline: str) -> int:
        """Token of the live driver; 0 without one."""
        view = self.holder(pipeline)
        return view.token if view else 0

    def head(self, pipeline: str) -> int:
        """Position of the newest checkpoint."""
        return SlotLog(self.store, pipeline).head().slot

    def tell(self, pipeline: str, mode: str) -> None:
        """Tell the fake driver what to do."""
        self.store.put(f"{pipeline}/fake.json", json.dumps({"mode": mode}).encode())

    def kill(self, pipeline: str) -> int:
        """kill -9 the driver; the token it had."""
        view = self.holder(pipeline)
        assert view is not None
        assert view.holder is not None
        os.kill(view.holder.pid, signal.SIGKILL)
        return view.token

    def password(self, user: str) -> str:
        """From the stack's private file."""
        found: dict[str, str] = json.loads(self.stack.credentials_file.read_text())[
            "airflow_passwords"
        ]
        return found[user]

    def bearer(self, user: str) -> str:
        """A token of this user, as the browser has it in its cookie."""
        body = json.dumps({"username": user, "password": self.password(user)}).encode()
        asked = urllib.request.Request(
            f"{self.stack.airflow_url}/auth/token", body, {"Content-Type": "application/json"}
        )
        return str(json.loads(_asked(asked)[1])["access_token"])

    def get(self, path: str, user: str | None = None) -> tuple[int, bytes]:
        """Ask the page's routes, as a user or as no one."""
        headers = {} if user is None else {"Authorization": f"Bearer {self.bearer(user)}"}
        return _asked(
            urllib.request.Request(f"{self.stack.airflow_url}/tidegate/{path}", headers=headers)
        )

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """Wait for a condition that an idle machine brings about in so many seconds.

        How long it took.
        """
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > seconds * PATIENCE:
                pytest.fail(
                    f"no {what} within {seconds * PATIENCE:.0f} s\n{self.evidence()}", pytrace=False
                )
            time.sleep(0.1)
        return time.monotonic() - begun

    def evidence(self) -> str:
        """What tells, on a machine that no one can look at any more, who was waiting for whom."""
        asked = {
            "tasks": (
                "SELECT dag_id, run_id, state, try_number, trigger_id, end_date FROM task_instance"
                " ORDER BY dag_id, run_id"
            ),
            "earlier tries": (
                "SELECT dag_id, run_id, state, try_number, end_date FROM task_instance_history"
                " ORDER BY dag_id, run_id, try_number"
            ),
            "what Airflow logged of tasks": (
                "SELECT dttm, dag_id, event, try_number, substr(extra, 1, 300) FROM log"
                " WHERE task_id IS NOT NULL ORDER BY id DESC LIMIT 60"
            ),
            "stale DAGs": (
                "SELECT dag_id, has_import_errors, last_parsed_time FROM dag WHERE is_stale"
            ),
            "import errors": "SELECT filename, substr(stacktrace, -300) FROM import_error",
        }
        with database_of(self.stack) as database:
            found = {
                name: [" | ".join(map(str, row)) for row in database.execute(query)]
                for name, query in asked.items()
            }
        found["desired, lease"] = [
            f"{name}: {read_desired_state(self.store, name).model_dump(exclude={'at'})} token"
            f" {self.token(name)}"
            for name in self.runs
        ]
        for log in sorted((self.stack.home / "logs").glob("*.log")):
            found[log.name] = [
                line[:400]
                for line in tail_log_file(str(log), 2_000, 1 << 20)
                if "http.access" not in line
            ][-25:]
        for folder in sorted((self.stack.home / "drivers").glob("*")):
            for log in sorted(folder.glob("*.log"))[-1:]:
                found[f"{folder.name}/{log.name}"] = tail_log_file(str(log), 5)
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in found.items())


@retry(
    retry=retry_if_result(lambda found: found[0] >= 500),
    stop=stop_after_attempt(10),
    wait=wait_fixed(1),
    retry_error_callback=lambda state: state.outcome and state.outcome.result(),
)
def _asked(request: urllib.request.Request) -> tuple[int, bytes]:
    """Status and answer.

    Asked again, as the page does, while the server says that it cannot just now.
    """
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def database_of(stack: Stack) -> Iterator[sqlite3.Connection]:
    """Airflow's own database, to read: the API server may be the one that is dead."""
    with closing(
        sqlite3.connect(
            f"file:{stack.home / 'airflow' / 'airflow.db'}?mode=ro", uri=True, timeout=60
        )
    ) as database:
        yield database


def task_state(stack: Stack, dag_id: str, run_id: str) -> str:
    """State of a run's first task, without the API server."""
    with database_of(stack) as database:
        asked = "SELECT state FROM task_instance WHERE dag_id = ? AND run_id = ?"
        row = database.execute(asked, (dag_id, run_id)).fetchone()
    return str(row[0]) if row else ""


def _patient(*arguments: Any) -> dict[str, str]:
    """Airflow's settings.

    A worker or scheduler that a busy machine holds up is not given up, or it would cost a try.
    """
    given = ("TASK_INSTANCE_HEARTBEAT_TIMEOUT", "SCHEDULER_HEALTH_CHECK_THRESHOLD")
    return {
        **build_airflow_settings(*arguments),
        **{f"AIRFLOW__SCHEDULER__{name}": "180" for name in given},
    }


@contextmanager
def cockpit_of(
    folder: Path,
    specs: Mapping[str, str],
    more: Mapping[str, str] | None = None,
    fakes: Mapping[str, str] = FAKES,
) -> Iterator[Cockpit]:
    """A stack with these pipelines (name -> YAML), by default their drivers and checks fake.

    The environment names its store.

    Args:
        folder: of the stack and its DAGs.
        specs: of the pipelines.
        more: settings of Airflow's.
        fakes: variable that names a program -> the file that is run in its place.
    """
    dags = folder / "dags"
    (dags / "pipelines").mkdir(parents=True)
    shutil.copy(_REPOSITORY / "dags" / "tidegate_dags.py", dags)
    for name, text in specs.items():
        (dags / "pipelines" / f"{name}.yaml").write_text(text)
    stack = Stack(StackSettings(home=folder / "home", dags=dags))
    with pytest.MonkeyPatch.context() as patch:
        for variable, program in fakes.items():
            patch.setenv(variable, f"{sys.executable} {Path(__file__).with_name(program)}")
        patch.setattr(
            airflow_processes,
            "build_airflow_settings",
            lambda *arguments: {**_patient(*arguments), **(more or {})},
        )
        try:
            stack.up(print)
            for key, value in stack.environment().items():
                patch.setenv(key, value)
            yield Cockpit(stack)
        finally:
            stack.down(print)


@pytest.fixture(scope="module")
def cockpit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cockpit]:
    """One stack for the tests of a file.

    Then it is gone, since it would take a third of a core from all others.
    """
    with cockpit_of(
        tmp_path_factory.mktemp("cockpit"), {name: spec_of(name) for name in PIPELINES}
    ) as found:
        found.begin()
        yield found
