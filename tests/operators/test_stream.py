"""The supervising task, step by step, on a local store and with a launcher that only notes what it
should start.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import DagRunTriggerException, TaskDeferred
from tests.manual_clock import ManualClock
from tests.operators.supervising import (
    HERE,
    Memory,
    NotingLauncher,
    execute_stream,
    make_context,
    make_event,
    make_operator,
    resume_stream,
)
from tests.servers.memory_store import Fault, MemoryStore

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_reports import DriverStatus, read_status, write_status
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    RequestKind,
    read_desired_state,
    set_desired_state,
    submit_request,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import (
    ProcessIdentity,
    ensure_identity,
    move_identity,
)
from tidegate.checkpoints.pipeline_overview import PipelineState
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.operators import stream_operator
from tidegate.operators.driver_launch import LaunchedDriver
from tidegate.operators.errors import DriverLostError
from tidegate.operators.liveness import LivenessLimits, StreamObserver
from tidegate.operators.stream_operator import (
    MAX_RELAUNCHES,
    RelaunchBudget,
    RunMemory,
    StreamOperator,
)


@pytest.fixture
def store(empty_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """A bucket of its own per test, and no process is ever started."""
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(NotingLauncher, "started", [])
    monkeypatch.setattr(NotingLauncher, "standby", [])
    monkeypatch.setattr(stream_operator, "launch_driver", NotingLauncher.launch)
    return empty_store


def test_a_free_stream_is_launched(store: Store) -> None:
    """No one drives.

    The task starts a driver, says that the stream should run, and watches for the next token.
    """
    deferred = execute_stream()
    assert NotingLauncher.started == ["latest"]
    assert read_desired_state(store, "p").state is DesiredState.RUN
    assert (deferred.trigger.floor, deferred.trigger.launched["attempt"]) == (1, "attempt-1")
    assert deferred.method_name == "resume"


def test_a_live_driver_is_adopted(store: Store) -> None:
    """Wherever the driver came from: nothing is started, and its token is watched."""
    Lease.acquire(store, "p", HERE)
    deferred = execute_stream()
    assert NotingLauncher.started == []
    assert (deferred.trigger.floor, deferred.trigger.launched) == (1, None)


def test_nothing_is_launched_during_a_restore(store: Store) -> None:
    """A recovery under way is waited for by the trigger; the wish of the restorer stays."""
    set_desired_state(store, "p", DesiredState.RECOVERING, who="ann")
    execute_stream()
    assert NotingLauncher.started == []
    assert read_desired_state(store, "p").state is DesiredState.RECOVERING


def test_an_automatic_retry_respects_a_stop(store: Store) -> None:
    """Stopped while the task waited for its retry: it ends green.

    A person's clear starts the stream again.
    """
    set_desired_state(store, "p", DesiredState.STOPPED, who="ann")
    assert "stopped" in make_operator().execute(make_context(try_number=2))["why"]
    execute_stream(try_number=2, max_tries=4)
    assert read_desired_state(store, "p").state is DesiredState.RUN


def test_a_retry_after_a_clear_respects_a_stop(store: Store) -> None:
    """A person cleared the task; the retry of that try ends green if someone stopped the stream."""
    memory = Memory()
    execute_stream(memory=memory)
    execute_stream(try_number=2, max_tries=4, memory=memory)
    set_desired_state(store, "p", DesiredState.STOPPED, who="ann")
    retried = make_operator().execute(make_context(try_number=3, max_tries=4, memory=memory))
    assert "stopped" in retried["why"]
    assert read_desired_state(store, "p").state is DesiredState.STOPPED


@pytest.mark.parametrize("state", ["lost", "stalled", "stopped"])
def test_an_unintended_end_is_followed_by_a_new_driver(store: Store, state: str) -> None:
    """Lost, stalled, or stopped by no one.

    The stream should run, so it is launched again without a retry.
    """
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    with pytest.raises(TaskDeferred) as deferred:
        resume_stream(state)
    assert NotingLauncher.started == ["latest"]
    assert deferred.value.kwargs is not None
    kept: Any = deferred.value.kwargs
    assert kept["budget"]["relaunches"] == 1


def test_without_progress_airflow_s_retries_take_over(store: Store) -> None:
    """After a few launches in a row without a new checkpoint the task fails as transient."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    with pytest.raises(DriverLostError, match="without a new checkpoint"):
        resume_stream("lost", budget=RelaunchBudget(None, MAX_RELAUNCHES))
    assert NotingLauncher.started == []


def test_progress_renews_the_budget() -> None:
    """A stream that seals between two losses may be lost as often as it likes."""
    assert RelaunchBudget("a", MAX_RELAUNCHES).after_loss("b") == RelaunchBudget("b", 1)
    assert not RelaunchBudget("a", MAX_RELAUNCHES - 1).after_loss("a").exhausted
    assert RelaunchBudget("a", MAX_RELAUNCHES).after_loss("a").exhausted


@pytest.mark.parametrize(
    ("kind", "error"), [("poison", PoisonError), ("configuration", ConfigurationError)]
)
def test_what_needs_a_person_fails_the_task(
    store: Store, kind: str, error: type[Exception]
) -> None:
    """Poison and configuration are raised as they were reported, for the retry policy to see."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    with pytest.raises(error, match="row 7"):
        resume_stream("failed", {"class": kind, "message": "row 7"})
    assert NotingLauncher.started == []


def test_a_fenced_driver_means_that_another_one_drives(store: Store) -> None:
    """The other one is adopted; nothing is wrong with the stream."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    Lease.acquire(store, "p", HERE)
    with pytest.raises(TaskDeferred) as deferred:
        resume_stream("failed", {"class": "fenced"})
    assert NotingLauncher.started == []
    assert deferred.value.trigger.launched is None


def test_a_wanted_stop_ends_green(store: Store) -> None:
    """Someone said stopped, and the driver has stopped."""
    set_desired_state(store, "p", DesiredState.STOPPED, who="ann")
    assert "meant to be stopped" in resume_stream("stopped")["why"]


def test_a_request_from_outside_is_a_wish_to_stop(store: Store) -> None:
    """Whoever asked the driver to stop meant it, whatever desired.json says.

    A recovery's own request does not count.
    """
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    submit_request(store, "p", RequestKind.DRAIN, who="airflow", token=1, request_id="hold-1")
    with pytest.raises(TaskDeferred):
        resume_stream("stopped")
    submit_request(store, "p", RequestKind.STOP, who="bob", why="enough", token=1)
    assert "meant to be stopped" in resume_stream("stopped")["why"]
    assert read_desired_state(store, "p").who == "bob"


def test_a_finished_stream_stays_finished(store: Store) -> None:
    """All sources are done: the run ends green, and the sweep has nothing to bring back."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    resume_stream("finished")
    assert read_desired_state(store, "p").state is DesiredState.STOPPED


def _wipe(store: Store) -> None:
    for entry in list(store.list_objects(BucketLayout("p").pipeline_prefix)):
        store.delete(entry.key)


def test_a_wiped_bucket_is_no_stop(store: Store) -> None:
    """A run left over from another time meets an empty bucket.

    It fails and says so, it does not end green or start again.
    """
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    past = asdict(RunMemory(uid=ensure_identity(store, "p")))
    _wipe(store)
    for state in ("lost", "stopped", "finished", "stalled"):
        with pytest.raises(ConfigurationError, match=r"no longer knows p.*is gone"):
            make_operator().resume(
                make_context(), make_event(state, {}), None, asdict(RelaunchBudget()), past
            )
    with pytest.raises(
        ConfigurationError, match=r"no longer knows p"
    ):  # of an older run, that remembered nothing
        resume_stream("lost")
    assert NotingLauncher.started == []


def test_the_last_words_of_a_wiped_stream_are_not_those_of_the_next(store: Store) -> None:
    """Its report outlived the lease; the driver that is launched has said nothing yet."""
    status = DriverStatus(token=1, driver="d", step="wait", at=1, body={"state": "failed"})
    write_status(store, "p", status)
    execute_stream()
    assert len(NotingLauncher.started) == 1
    found = read_status(store, "p")
    assert found is not None
    assert (found.token, found.body) == (0, {})  # below every token that a driver can have


def test_a_first_start_deletes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that serve Airflow may delete no document of a pipeline."""
    monkeypatch.setattr(type(store), "delete", lambda *_: pytest.fail("it deletes an object"))
    execute_stream()
    assert len(NotingLauncher.started) == 1


def _see_stall(store: Store, lease: Lease, step_since: int = 1) -> dict[str, Any]:
    """What the trigger reports of a driver that has finished no step for too long."""
    body = {"state": "running", "step_since": step_since}
    write_status(
        store, "p", DriverStatus(token=lease.token, driver="d", step="wait", at=0, body=body)
    )
    clock = ManualClock()
    observer = StreamObserver(
        store, "p", floor=1, limits=LivenessLimits(lease_margin=9_999), clock=clock
    )
    observer.observe()
    clock.advance(126)
    found = observer.observe()
    assert found is not None
    assert found.state is PipelineState.STALLED
    return found.as_dict()


@pytest.mark.parametrize("alive", ["step", "takeover", "nothing"])
def test_the_task_looks_again_before_it_ends_a_driver(
    store: Store, monkeypatch: pytest.MonkeyPatch, alive: str
) -> None:
    """A driver that went on while the event was on its way is adopted, and so is its successor."""
    ended: list[int] = []
    monkeypatch.setattr(
        stream_operator, "terminate_driver", lambda _store, _name, token, _say: ended.append(token)
    )
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    lease = Lease.acquire(store, "p", HERE)
    event = _see_stall(store, lease)
    if alive == "step":
        _see_stall(store, lease, step_since=2)
    if alive == "takeover":
        lease.release()
        Lease.acquire(store, "p", HERE)
    with pytest.raises(TaskDeferred) as deferred:
        make_operator().resume(make_context(), event, None, asdict(RelaunchBudget()))
    assert ended == ([lease.token] if alive == "nothing" else [])
    assert deferred.value.trigger.floor == lease.token + (alive == "takeover")
    kept: Any = deferred.value.kwargs
    assert kept["budget"]["relaunches"] == (alive == "nothing")


@pytest.mark.parametrize("state", ["stalled", "lost", "failed", "stopped", "finished", "live"])
def test_no_task_ends_while_the_store_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The task sleeps again, and touches no driver."""
    monkeypatch.setattr(
        stream_operator, "terminate_driver", lambda *_: pytest.fail("it ends a driver")
    )
    event = {**make_event(state, {}), "floor": 2}
    away = MemoryStore(hook=lambda _: Fault.REFUSED)
    monkeypatch.setattr(
        StreamOperator, "resolve_access", lambda _: SimpleNamespace(open=lambda: away)
    )
    process = LaunchedDriver("a", "/nowhere/log", HERE, "/nowhere/exit").as_dict()
    with pytest.raises(TaskDeferred) as deferred:
        make_operator().resume(make_context(), event, process, asdict(RelaunchBudget()))
    assert NotingLauncher.started == []
    assert (deferred.value.trigger.floor, deferred.value.trigger.launched) == (2, process)


def test_another_bucket_under_the_same_name_is_refused(store: Store) -> None:
    """The identity differs from the one the run has seen: another stream lives there."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    ensure_identity(store, "p")
    with pytest.raises(ConfigurationError, match="it was the-old-one"):
        make_operator().resume(
            make_context(),
            make_event("lost", {}),
            None,
            asdict(RelaunchBudget()),
            asdict(RunMemory(uid="the-old-one")),
        )


def test_the_origin_of_a_moved_pipeline_stays_stopped(store: Store, tmp_path: Path) -> None:
    """A run at the old address fails, launches nothing, and leaves the desired state alone."""
    ensure_identity(store, "p")
    target = LocalStore(tmp_path / "target")
    for found in store.list_objects("p/"):
        target.put(found.key, store.get(found.key).data)
    set_desired_state(store, "p", DesiredState.STOPPED, who="move")
    move_identity(store, target, "p")
    with pytest.raises(ConfigurationError, match="copy of"):
        make_operator().execute(make_context())
    assert NotingLauncher.started == []
    assert read_desired_state(store, "p").state is DesiredState.STOPPED


def test_a_retry_over_a_wiped_bucket_fails(store: Store) -> None:
    """No one said stopped: there is no one left who could have."""
    with pytest.raises(ConfigurationError, match="no longer knows p"):
        make_operator().execute(make_context(try_number=2))


def test_a_retry_of_a_try_that_never_came_so_far_is_the_first(store: Store) -> None:
    """Airflow ended the first try before it did anything.

    The bucket of a new stream is empty, and that is not a fault.
    """
    memory = Memory()
    with pytest.raises(TaskDeferred):
        make_operator().execute(make_context(try_number=2, memory=memory))
    assert read_desired_state(store, "p").state is DesiredState.RUN
    set_desired_state(store, "p", DesiredState.STOPPED, who="ann")
    assert (
        "was stopped" in make_operator().execute(make_context(try_number=3, memory=memory))["why"]
    )


def test_the_identity_is_remembered_once_there_is_one(store: Store) -> None:
    """The first launch finds none; the next resume does."""
    first = execute_stream()
    assert first.kwargs is not None
    assert first.kwargs["past"]["uid"] is None
    uid = ensure_identity(store, "p")
    with pytest.raises(TaskDeferred) as again:
        make_operator().resume(
            make_context(),
            make_event("lost", {}),
            None,
            asdict(RelaunchBudget()),
            first.kwargs["past"],
        )
    assert again.value.kwargs is not None
    assert again.value.kwargs["past"]["uid"] == uid


def test_an_old_run_hands_its_driver_over(store: Store) -> None:
    """A live stream whose run is due.

    The next run is queued before this one ends; the driver is not touched.
    """
    with DAG("p.stream"):
        operator = StreamOperator(
            task_id="stream",
            pipeline="p",
            spec="p.yaml",
            supervision=SupervisionSpec(rotate_after=3_600_000_000),
        )
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(make_context())
    remembered = deferred.value.kwargs
    assert remembered is not None
    assert 3590e6 < deferred.value.trigger.due - SYSTEM_CLOCK.wall_ticks() <= 3600e6
    with pytest.raises(DagRunTriggerException) as handed:
        operator.resume(make_context(), make_event("live", {}), **remembered)
    assert (handed.value.trigger_dag_id, handed.value.wait_for_completion) == ("p.stream", False)
    assert (
        "already"
        in operator.resume(make_context(queued=1), make_event("live", {}), **remembered)["why"]
    )
    assert read_desired_state(store, "p").state is DesiredState.RUN
    assert NotingLauncher.started == ["latest"]


def _pair() -> StreamOperator:
    options = SupervisionSpec(retries=2, rotate_after=None, standby=True)
    return StreamOperator(task_id="stream", pipeline="p", spec="p.yaml", supervision=options)


def test_a_stream_with_a_standby_begins_with_two_drivers(store: Store) -> None:
    """Both wait for their turn; the trigger watches both and gives the standby time."""
    with pytest.raises(TaskDeferred) as deferred:
        _pair().execute(make_context())
    assert NotingLauncher.standby == [True, True]
    trigger = deferred.value.trigger
    assert trigger.launched["attempt"] == "attempt-1"
    assert [waiting["attempt"] for waiting in trigger.standby] == ["attempt-2"]
    assert trigger.rules["lease_margin"] == 10.0


def test_a_missing_standby_is_replaced_beside_the_driver(store: Store) -> None:
    """The driver is adopted as it is, and no launch is counted against the stream."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    Lease.acquire(store, "p", HERE)
    event = {**make_event("live", {}), "standby_missing": True}
    budget = asdict(RelaunchBudget(None, MAX_RELAUNCHES))
    with pytest.raises(TaskDeferred) as deferred:
        _pair().resume(make_context(), event, None, budget)
    assert NotingLauncher.standby == [True]
    trigger = deferred.value.trigger
    assert (trigger.launched, trigger.floor) == (None, 1)
    assert [waiting["attempt"] for waiting in trigger.standby] == ["attempt-1"]
    assert deferred.value.kwargs is not None
    assert deferred.value.kwargs["budget"] == budget


def test_a_living_standby_is_found_again(store: Store, tmp_path: Path) -> None:
    """The next run, or a cleared task, adopts both: it launches no third driver."""
    Lease.acquire(store, "p", HERE)
    folder = tmp_path / "home" / "drivers" / "p"
    folder.mkdir(parents=True)
    here = ProcessIdentity.this_process("d")
    alive = LaunchedDriver("20260101T000000-a", "/log", here, str(tmp_path / "no.exit"))
    (folder / "20260101T000000-a.json").write_text(json.dumps(alive.as_dict()))
    with pytest.raises(TaskDeferred) as deferred:
        _pair().execute(make_context())
    assert NotingLauncher.started == []
    assert [waiting["attempt"] for waiting in deferred.value.trigger.standby] == [alive.attempt]


def test_a_standby_takes_the_place_of_a_lost_driver(store: Store, tmp_path: Path) -> None:
    """It takes the free lease by itself; the task launches only its successor as a standby."""
    folder = tmp_path / "home" / "drivers" / "p"
    folder.mkdir(parents=True)
    here = ProcessIdentity.this_process("d")
    alive = LaunchedDriver("20260101T000000-a", "/log", here, str(tmp_path / "no.exit"))
    (folder / "20260101T000000-a.json").write_text(json.dumps(alive.as_dict()))
    with pytest.raises(TaskDeferred) as deferred:
        _pair().execute(make_context())
    trigger = deferred.value.trigger
    assert trigger.launched["attempt"] == alive.attempt
    assert [waiting["attempt"] for waiting in trigger.standby] == ["attempt-1"]
