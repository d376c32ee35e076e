"""What people do to runs and tasks in Airflow, with the triggerer up and down, and what becomes of
the driver (docs/airflow.md).

One real Airflow and MinIO; the drivers are fake. The tests run in this order: the triggerer is
killed late.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

import pytest
from tests.operators.conftest import Cockpit, cockpit_of, spec_of, task_state
from tests.servers.airflow import ApiForTests

from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.infra.airflow_processes import AirflowApiError
from tidegate.infra.local_processes import is_process_alive
from tidegate.infra.stack_state import StackState

pytestmark = [pytest.mark.airflow, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

STREAMS = (
    "marked",
    "followed",
    "paused",
    "resumed",
    "asked",
    "blind_cleared",
    "blind_failed",
    "blind_success",
    "blind_lost",
)
_APPROVAL = "supervision: {approval: true, approvers: [olga], "


@pytest.fixture(scope="module")
def cockpit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cockpit]:
    """A stream for each test, all running."""
    specs = {name: spec_of(name) for name in STREAMS}
    specs["asked"] = specs["asked"].replace("supervision: {", _APPROVAL)
    with cockpit_of(tmp_path_factory.mktemp("actions"), specs) as found:
        for name in STREAMS:
            found.known(f"{name}.stream")
        found.runs = {name: found.api.trigger_dag(f"{name}.stream") for name in STREAMS}
        yield found


def _mark(cockpit: Cockpit, pipeline: str, run: str, state: str) -> None:
    cockpit.api.request(
        "PATCH", f"/dags/{pipeline}.stream/dagRuns/{run}/taskInstances/stream", {"new_state": state}
    )


def _clear(
    cockpit: Cockpit, pipeline: str, run: str, kind: str = "stream", task: str = "stream"
) -> None:
    cockpit.api.clear_task(f"{pipeline}.{kind}", run, task)


def _ended(cockpit: Cockpit, pipeline: str, run: str) -> None:
    cockpit.until(
        lambda: cockpit.api.get_run(f"{pipeline}.stream", run)["state"] in ("success", "failed"),
        60,
        "end of the run",
    )


def _delete(cockpit: Cockpit, pipeline: str, run: str) -> None:
    cockpit.api.request("DELETE", f"/dags/{pipeline}.stream/dagRuns/{run}")


def _crash(cockpit: Cockpit, component: str) -> None:
    mark = StackState.load(cockpit.stack.home / "stack.json").processes[component]
    os.kill(mark.pid, SIGKILL)
    cockpit.until(lambda: not is_process_alive(mark), 60, f"end of the {component}")


def _sweep(cockpit: Cockpit) -> None:
    run = cockpit.api.trigger_dag("tidegate.sweep")
    assert cockpit.ended("tidegate.sweep", run, 120)["state"] == "success"


def test_marked_success_deleted_and_run_again(cockpit: Cockpit) -> None:
    """A running run cannot be deleted.

    Marked success, its driver stops; cleared, it runs again; ended, it goes.
    """
    run = cockpit.running("marked")
    with pytest.raises(AirflowApiError, match="409"):
        _delete(cockpit, "marked", run)
    token = cockpit.token("marked")
    _mark(cockpit, "marked", run, "success")
    cockpit.until(lambda: cockpit.holder("marked") is None, 40, "end of the driver")
    desired = read_desired_state(cockpit.store, "marked")
    assert (desired.state, desired.why) == (
        DesiredState.STOPPED,
        "the task was set to success in Airflow",
    )
    _ended(
        cockpit, "marked", run
    )  # or the scheduler, which ends the run at its own pace, undoes the clear
    _clear(cockpit, "marked", run)
    cockpit.until(lambda: cockpit.token("marked") == token + 1, 60, "driver of the re-run")
    assert read_desired_state(cockpit.store, "marked").state is DesiredState.RUN
    cockpit.until(lambda: cockpit.watched("marked", run), 60, "watched re-run")
    _mark(cockpit, "marked", run, "failed")
    cockpit.until(lambda: cockpit.holder("marked") is None, 40, "end of the second driver")
    _ended(cockpit, "marked", run)
    _delete(cockpit, "marked", run)
    assert cockpit.api.list_runs("marked.stream") == []
    assert read_desired_state(cockpit.store, "marked").state is DesiredState.STOPPED


def test_a_run_that_waits_takes_the_driver_over(cockpit: Cockpit) -> None:
    """A second run waits; when the first is marked failed, the second adopts the driver.

    Nothing is stopped or started.
    """
    first = cockpit.running("followed")
    token = cockpit.token("followed")
    second = cockpit.api.trigger_dag("followed.stream")
    _mark(cockpit, "followed", first, "failed")
    cockpit.until(lambda: cockpit.watched("followed", second), 60, "watched second run")
    head = cockpit.head("followed")
    cockpit.until(lambda: cockpit.head("followed") >= head + 10, 60, "more checkpoints")
    assert cockpit.token("followed") == token
    assert read_desired_state(cockpit.store, "followed").state is DesiredState.RUN


def test_a_clear_right_after_a_mark_wins(cockpit: Cockpit) -> None:
    """Whatever of the mark has happened by then, the re-run runs.

    With the old driver, or with the next one.

    A clear that meets the scheduler, which is about to end the run, is undone by that: then a
    person clears once more.
    """
    run = next(
        run["dag_run_id"]
        for run in cockpit.api.list_runs("followed.stream")
        if run["state"] == "running"
    )
    token = cockpit.token("followed")
    _mark(cockpit, "followed", run, "failed")
    _clear(cockpit, "followed", run)

    def again() -> bool:
        if cockpit.api.get_run("followed.stream", run)["state"] in ("success", "failed"):
            _clear(cockpit, "followed", run)
        return cockpit.watched("followed", run, at_least=2)

    cockpit.until(again, 60, "second try")
    head = cockpit.head("followed")
    cockpit.until(
        lambda: cockpit.head("followed") >= head + 30, 120, "checkpoints long after the mark"
    )
    cockpit.until(lambda: cockpit.watched("followed", run, at_least=2), 60, "watched second try")
    assert cockpit.token("followed") in (token, token + 1)
    assert read_desired_state(cockpit.store, "followed").state is DesiredState.RUN


def test_a_dead_stream_of_a_paused_dag_says_so(cockpit: Cockpit) -> None:
    """It is not launched again, the page says why, and unpaused it goes on by itself."""
    run = cockpit.running("paused")
    cockpit.api.pause("paused.stream")
    token = cockpit.kill("paused")
    cockpit.until(
        lambda: cockpit.task("paused", run)["state"] == "scheduled", 60, "resume that waits"
    )
    _sweep(cockpit)
    shown = json.loads(cockpit.get("api/streams/paused.stream", "vic")[1])
    assert (shown["state"], shown["paused"]) == ("down", True)
    assert "its DAG is paused in Airflow, so nothing starts it" in [
        finding["says"] for finding in shown["findings"]
    ]
    assert cockpit.token("paused") == 0
    cockpit.api.unpause("paused.stream")
    cockpit.until(lambda: cockpit.token("paused") == token + 1, 60, "driver after the pause")


def test_a_resume_outlives_the_api_server(cockpit: Cockpit) -> None:
    """The task that resumes while the API server is away waits for it, and uses up no retry."""
    run = cockpit.running("resumed")
    _crash(cockpit, "api-server")
    token = cockpit.kill("resumed")
    cockpit.until(
        lambda: task_state(cockpit.stack, "resumed.stream", run) == "queued",
        60,
        "resume that asks in vain",
    )
    assert cockpit.token("resumed") == 0
    cockpit.stack.up(print)
    cockpit.until(lambda: cockpit.token("resumed") == token + 1, 90, "new driver")
    cockpit.until(lambda: cockpit.watched("resumed", run), 60, "watched task")
    assert cockpit.count_tries("resumed", run) == 1


def test_an_approval_at_once_is_not_lost(cockpit: Cockpit) -> None:
    """An answer in the instant of asking is taken, or the question is asked again.

    The stream is restored once, never twice.
    """
    cockpit.running("asked")
    recovery = cockpit.api.trigger_dag(
        "asked.recover", {"checkpoint": "latest", "reason": "a test"}
    )
    olga = ApiForTests.of(cockpit.stack, "olga")
    path = f"/dags/asked.recover/dagRuns/{recovery}/taskInstances/approve"
    waiting: dict[int, float] = {}

    def answered() -> bool:
        with suppress(AirflowApiError):  # not asked yet
            olga.answer_question("asked.recover", recovery, "approve", ["Approve"])
            return True
        return False

    def ended() -> bool:
        """What a person does who finds the question still there, or again.

        Answer it; clear one that took no notice.
        """
        task = cockpit.task("asked", recovery, "recover", "approve")
        if (
            task["state"] == "awaiting_input"
        ):  # from here on: a busy machine may take long to ask again
            since = time.monotonic() - waiting.setdefault(task["try_number"], time.monotonic())
            taken = cockpit.api.request("GET", f"{path}/-1/hitlDetails")["responded_at"] is not None
            if not taken and since > 3:
                answered()
            elif taken and since > 30:
                _clear(cockpit, "asked", recovery, "recover", "approve")
        return cockpit.api.get_run("asked.recover", recovery)["state"] in ("success", "failed")

    cockpit.until(answered, 60, "question")
    cockpit.until(ended, 240, "end of the restore")
    assert cockpit.api.get_run("asked.recover", recovery)["state"] == "success"
    assert [fork.why for fork in SlotLog(cockpit.store, "asked").list_forks()] == [
        "a test (approved by olga)"
    ]


def test_broken_files_take_nothing_down(cockpit: Cockpit) -> None:
    """A broken spec is a red DAG of its own.

    While the DAG file cannot be read, streams say so and go on; then all is well.
    """
    run, token = cockpit.running("paused"), cockpit.token("paused")
    spec, code = (
        cockpit.stack.settings.dags / name for name in ("pipelines/bad.yaml", "tidegate_dags.py")
    )
    good = code.read_text()
    file = cockpit.api.request("GET", "/dags/paused.stream")["file_token"]

    def changed(path: Path, text: str) -> None:
        path.write_text(text)
        with suppress(AirflowApiError):  # it is about to be read anyway
            cockpit.api.request("PUT", f"/parseDagFile/{file}")

    def unread() -> object:
        return json.loads(cockpit.get("api/streams/paused.stream", "vic")[1])["unread"]

    changed(spec, "apiVersion: tidegate/v1\nname: bad\nsauces: {}\n")
    cockpit.until(
        lambda: cockpit.api.get_dag("tidegate.broken_specs"), 60, "DAG of the broken spec"
    )
    told = cockpit.api.trigger_dag("tidegate.broken_specs")
    assert cockpit.ended("tidegate.broken_specs", told, 60)["state"] == "failed"
    assert "bad.yaml:3: sauces: unknown field" in cockpit.api.read_task_log(
        "tidegate.broken_specs", told, "read"
    )
    assert (unread(), cockpit.api.import_errors()) == (None, {})
    spec.unlink()
    changed(code, "# a DAG of airflow\nraise RuntimeError('broken on purpose')\n")
    cockpit.until(lambda: unread() == "errors", 60, "word of the broken file")
    listed = json.loads(cockpit.get("api/streams", "vic")[1])["streams"]
    assert {row["pipeline"]: row["unread"] for row in listed} == dict.fromkeys(STREAMS, "errors")
    head = cockpit.head("paused")
    cockpit.until(lambda: cockpit.head("paused") > head, 30, "checkpoint of a driver that goes on")
    changed(code, good)
    cockpit.until(lambda: unread() is None, 60, "word of the mended file")
    assert (cockpit.token("paused"), cockpit.watched("paused", run)) == (token, True)


def test_without_a_triggerer(cockpit: Cockpit) -> None:
    """Marks are heard and obeyed.

    A clear adopts; a loss waits for the triggerer, and then all is in order again.
    """
    runs = {name: cockpit.running(name) for name in STREAMS if name.startswith("blind_")}
    tokens = {name: cockpit.token(name) for name in runs}
    _crash(cockpit, "triggerer")
    _clear(cockpit, "blind_cleared", runs["blind_cleared"])
    cockpit.kill("blind_lost")
    with pytest.raises(AirflowApiError, match="409"):
        _delete(cockpit, "blind_lost", runs["blind_lost"])
    for state in ("failed", "success"):
        _mark(cockpit, f"blind_{state}", runs[f"blind_{state}"], state)
        cockpit.until(
            lambda state=state: _stopped(cockpit, f"blind_{state}"),  # type: ignore[misc]
            40,
            f"driver that heard of {state}",
        )
        assert (
            read_desired_state(cockpit.store, f"blind_{state}").why
            == f"the task was set to {state} in Airflow"
        )
    cockpit.until(
        lambda: cockpit.watched("blind_cleared", runs["blind_cleared"], at_least=2),
        60,
        "second try",
    )
    _ended(cockpit, "blind_success", runs["blind_success"])
    _delete(cockpit, "blind_success", runs["blind_success"])
    assert cockpit.token("blind_lost") == 0
    cockpit.stack.up(print)
    cockpit.until(
        lambda: cockpit.token("blind_lost") == tokens["blind_lost"] + 1,
        120,
        "driver in place of the lost one",
    )
    assert cockpit.count_tries("blind_lost", runs["blind_lost"]) == 1
    assert cockpit.token("blind_cleared") == tokens["blind_cleared"]
    _sweep(cockpit)
    assert [_stopped(cockpit, name) for name in ("blind_failed", "blind_success")] == [True, True]
    assert cockpit.api.list_runs("blind_success.stream") == []


def _stopped(cockpit: Cockpit, pipeline: str) -> bool:
    """No one drives it, and no one shall."""
    return (
        cockpit.holder(pipeline) is None
        and read_desired_state(cockpit.store, pipeline).state is DesiredState.STOPPED
    )
