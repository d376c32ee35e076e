"""The Airflow side against real Airflow processes and a real MinIO; only the drivers are fake."""

from __future__ import annotations

import json

import pytest

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.infra.airflow_processes import AirflowApiError

from .conftest import Cockpit

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.timeout(1800),
]  # the first test starts Airflow; a slow machine must not fail it


def test_every_dag_parses(cockpit: Cockpit) -> None:
    """Airflow has no import errors and knows the DAGs of every pipeline."""
    assert cockpit.api.import_errors() == {}
    for kind in ("stream", "recover", "quality"):
        assert cockpit.known(f"lost.{kind}")["is_paused"] is False
    assert cockpit.known("tidegate.sweep")


def test_a_killed_driver_is_noticed_and_replaced(cockpit: Cockpit) -> None:
    """kill -9 is noticed, the next driver goes on after the last checkpoint, and no retry is used
    up.
    """
    run = cockpit.running("lost")
    # Airflow may have failed to start the task on an overloaded machine.
    tried = cockpit.count_tries("lost", run)
    before = cockpit.kill("lost")
    head = cockpit.head("lost")
    cockpit.until(
        lambda: cockpit.token("lost") == before + 1, 75, "new driver in place of the lost one"
    )
    cockpit.until(lambda: cockpit.head("lost") > head, 30, "new checkpoint")
    assert cockpit.count_tries("lost", run) == tried, cockpit.evidence()


def test_a_cleared_task_adopts_its_driver(cockpit: Cockpit) -> None:
    """The new try finds the driver alive.

    Same token, and the late on_kill of the old trigger leaves it alone.
    """
    run = cockpit.running("cleared")
    token = cockpit.token("cleared")
    cockpit.api.clear_task("cleared.stream", run, "stream")
    cockpit.until(lambda: cockpit.watched("cleared", run, at_least=2), 60, "second try")
    head = cockpit.head("cleared")
    # The old trigger's on_kill comes up to 3 s after the clear, and then asks Airflow for the
    # state: let it have its say.
    cockpit.until(lambda: cockpit.head("cleared") >= head + 20, 60, "more checkpoints")
    assert cockpit.token("cleared") == token
    tried = cockpit.task("cleared", run)["try_number"]
    cockpit.until(
        lambda: "adopting the driver" in cockpit.log("cleared", run, try_number=tried),
        60,
        "word of it in the log",
    )


def test_a_task_marked_failed_stops_its_driver(cockpit: Cockpit) -> None:
    """Whoever ends the task in the UI ends the driver too, gently, and nothing starts it again."""
    run = cockpit.running("ended")
    cockpit.api.request(
        "PATCH", f"/dags/ended.stream/dagRuns/{run}/taskInstances/stream", {"new_state": "failed"}
    )
    cockpit.until(lambda: cockpit.holder("ended") is None, 40, "end of the driver")
    desired = read_desired_state(cockpit.store, "ended")
    assert (desired.state, desired.why) == (
        DesiredState.STOPPED,
        "the task was set to failed in Airflow",
    )


def test_poison_fails_at_once(cockpit: Cockpit) -> None:
    """A driver that fails with poison fails the task without a retry, and its message is in the
    log.
    """
    run = cockpit.running("poisoned")
    cockpit.tell("poisoned", "poison")
    cockpit.until(lambda: cockpit.task("poisoned", run)["state"] == "failed", 60, "failed task")
    assert cockpit.count_tries("poisoned", run) == 1
    last = cockpit.task("poisoned", run)["try_number"]
    cockpit.until(
        lambda: "the fake was told to fail" in cockpit.log("poisoned", run, try_number=last),
        60,
        "reason in the log",
    )


def test_a_stream_goes_back_to_an_older_checkpoint(cockpit: Cockpit) -> None:
    """The recover DAG stops the driver, forks, and the stream's own run goes on from there on a new
    timeline.
    """
    run = cockpit.running("restored")
    cockpit.until(lambda: cockpit.head("restored") >= 8, 60, "some checkpoints")
    target = next(
        row.id
        for row in CheckpointCatalog(SlotLog(cockpit.store, "restored")).list_checkpoints()
        if row.slot == 3
    )
    recovery = cockpit.api.trigger_dag(
        "restored.recover", {"checkpoint": target, "reason": "a test"}
    )
    ended = cockpit.ended("restored.recover", recovery, 120)
    log = cockpit.log("restored", recovery, "recover")
    assert ended["state"] == "success", log
    assert f"Impact of restoring restored to {target}" in log
    head = SlotLog(cockpit.store, "restored").head()
    fork = SlotLog(cockpit.store, "restored").list_forks()[0]
    assert head.timeline == 1
    assert (fork.recover_to, fork.why, fork.who) == (target, "a test", "admin")
    assert read_desired_state(cockpit.store, "restored").state is DesiredState.RUN
    cockpit.until(
        lambda: cockpit.task("restored", run)["state"] == "deferred", 60, "watched stream"
    )
    assert cockpit.count_tries("restored", run) == 1


def test_failed_expectations_turn_the_run_red(cockpit: Cockpit) -> None:
    """The failed expectation is named in the task's log; a warning alone would not fail it."""
    run = cockpit.checks
    assert cockpit.ended("checked.quality", run, 60)["state"] == "failed"
    log = cockpit.log("checked", run, "quality")
    assert "failed expectation: late.late_ratio: few rows are late (seen: 0.7 of LGA)" in log
    assert "failed expectation: late.reasons" not in log


def test_the_sweep_starts_what_should_run(cockpit: Cockpit) -> None:
    """A stream that should run and has neither driver nor run gets a run.

    One that is stopped does not.
    """
    set_desired_state(cockpit.store, "swept", DesiredState.RUN, who="test", why="it should run")
    run = cockpit.api.trigger_dag("tidegate.sweep")
    assert cockpit.ended("tidegate.sweep", run, 90)["state"] == "success"
    cockpit.until(lambda: cockpit.token("swept") > 0, 60, "driver")
    assert "swept: should run and does not" in cockpit.api.read_task_log(
        "tidegate.sweep", run, "look"
    )
    assert "ended: desired: stopped" in cockpit.api.read_task_log("tidegate.sweep", run, "look")


def test_a_driver_that_never_seals_ends_in_airflow_s_retries(cockpit: Cockpit) -> None:
    """Transient failures without progress are relaunched a few times, then retried, then the task
    fails.
    """
    run = cockpit.runs["flaky"]
    cockpit.until(lambda: cockpit.task("flaky", run)["try_number"] >= 2, 120, "second try")

    def told() -> bool:
        # Some tries end for reasons of Airflow's own, and while one changes hands Airflow does not
        # know its log.
        for number in range(1, cockpit.task("flaky", run)["try_number"] + 1):
            try:
                log = cockpit.log("flaky", run, try_number=number)
            except AirflowApiError as error:
                if error.status != 404:
                    raise
                continue
            if "without a new checkpoint" in log:
                return True
        return False

    cockpit.until(told, 120, "reason in a log")
    cockpit.tell("flaky", "finish")
    cockpit.until(lambda: cockpit.task("flaky", run)["state"] == "success", 60, "good end")


def test_the_page_is_behind_airflow_s_login(cockpit: Cockpit) -> None:
    """Without a login every route refuses.

    A viewer sees streams and may not restore; a user may; nothing else exists.
    """
    stream = "api/streams/lost.stream"
    paths = (
        "page",
        "api/streams",
        stream,
        f"{stream}/checkpoints",
        "docs/checked.quality/1/index.html",
    )
    cockpit.ended("checked.quality", cockpit.checks, 60)  # it writes the last of them
    cockpit.running("lost")
    assert {path: cockpit.get(path)[0] for path in paths} == dict.fromkeys(paths, 401)
    assert {path: cockpit.get(path, "vic")[0] for path in paths} == dict.fromkeys(paths, 200), (
        cockpit.evidence()
    )
    seen = {user: json.loads(cockpit.get(stream, user)[1]) for user in ("vic", "uwe")}
    assert (seen["vic"]["may"], sorted(seen["uwe"]["may"])) == (
        [],
        ["deploy", "maintain", "pin", "recover", "stop", "stream"],
    )
    assert (seen["vic"]["state"], seen["vic"]["holder"]["member"]) == ("running", "JFK/0")
    assert cockpit.get("api/streams/nobody.stream", "vic")[0] == 404
    assert cockpit.get("docs/checked.quality/..%2F..%2Flease.json", "vic")[0] == 404


def test_a_viewer_cannot_start_a_recovery(cockpit: Cockpit) -> None:
    """The page's only writing call is Airflow's own API, which refuses a viewer."""
    with pytest.raises(AirflowApiError, match="403"):
        cockpit.stack.airflow_api("vic").trigger_dag("lost.recover", {"checkpoint": "latest"})
