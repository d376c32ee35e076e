"""The recovery, step by step, on a local store.

What is reported, what is changed, what a second try does.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.epochs import checkpoint_id, seal_epoch

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import RestoreEvent, plan_restore, read_restore_audits
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.operators import recover_and_pin, trigger
from tidegate.operators.recover_and_pin import RecoverOperator, format_impact_report
from tidegate.operators.trigger import EpochTrigger


def _run(
    checkpoint: str,
    *,
    dry_run: bool = False,
    active: int = 1,
    run_id: str = "r",
    who: str = "ann",
) -> dict[str, Any]:
    operator = RecoverOperator(
        task_id="recover",
        pipeline="p",
        spec="p.yaml",
        checkpoint=checkpoint,
        reason="a test",
        dry_run_only=str(dry_run),
    )
    person = SimpleNamespace(triggering_user_name=who)
    return operator.execute(
        {
            "run_id": run_id,
            "dag_run": person,
            "ti": SimpleNamespace(get_dr_count=lambda **_: active),
        }
    )


def _wish(store: Store) -> DesiredState:
    return read_desired_state(store, "p").state


def test_a_restore_is_a_fork_with_who_and_why(log: SlotLog) -> None:
    """The next slot of the timeline names the checkpoint, the person and the reason, and the stream
    shall run.
    """
    target = checkpoint_id(log, 3)
    outcome = _run(target)
    fork = log.list_forks()[0]
    assert (fork.recover_to, fork.who, fork.why, fork.request_id) == (target, "ann", "a test", "r")
    assert (outcome["timeline"], outcome["fork_slot"]) == (1, 3)
    assert _wish(log.store) is DesiredState.RUN


def test_a_dry_run_changes_nothing(log: SlotLog) -> None:
    """Verified and reported: 3 epochs and 30 rows would be taken back."""
    plan = _run(checkpoint_id(log, 3), dry_run=True)["plan"]
    assert (plan["epochs_rewound"], plan["rows"]["read"]) == (3, 30)
    assert log.list_forks() == []
    assert _wish(log.store) is DesiredState.STOPPED


@pytest.mark.parametrize("other", ["checkpoint", "person", "both"])
def test_a_run_id_that_was_used_before_restores_nothing_and_says_so(
    log: SlotLog, other: str
) -> None:
    """Airflow's database was lost, or the run deleted: the id is new to Airflow, not to the bucket."""
    three, two = checkpoint_id(log, 3), checkpoint_id(log, 2)
    _run(three)
    for _ in range(2):
        seal_epoch(log)
    who, target = ("ann" if other == "checkpoint" else "bob"), (three if other == "person" else two)
    with pytest.raises(ConfigurationError, match=f"nothing was restored.*{three} for ann"):
        _run(target, who=who)
    assert len(log.list_forks()) == 1
    (audit,) = read_restore_audits(log.store, "p")
    assert {step.who for step in audit.steps} == {"ann"}


def test_a_dry_run_with_a_used_id_reports(log: SlotLog) -> None:
    """It changes nothing, so its id does not matter; and it starts no driver."""
    _run(checkpoint_id(log, 3))
    assert _run(checkpoint_id(log, 2), dry_run=True, active=0)["dry_run"]


def test_a_retry_after_the_fork_does_not_restore_twice(log: SlotLog) -> None:
    """The request is known by the run's id, so a task killed after the PUT only waits for the first
    epoch.
    """
    target = checkpoint_id(log, 3)
    _run(target)
    seal_epoch(log)
    _run(target)
    assert len(log.list_forks()) == 1
    _run(target, run_id="another")
    assert len(log.list_forks()) == 2


def test_a_try_killed_after_the_fork_is_made_up_for(log: SlotLog) -> None:
    """The stream shall run again, and the trail says what was done.

    A restore of someone else is left alone.
    """
    _run(checkpoint_id(log, 3))
    fork = log.list_forks()[0]
    trail = next(entry.key for entry in log.store.list_objects("p/") if "/trail/" in entry.key)
    log.store.delete(trail)
    set_desired_state(log.store, "p", DesiredState.RECOVERING, who=fork.who, why=fork.why)
    _run(checkpoint_id(log, 3))
    assert _wish(log.store) is DesiredState.RUN
    assert [step.what for step in read_restore_audits(log.store, "p")[0].steps] == [
        RestoreEvent.RESTORED
    ]
    set_desired_state(log.store, "p", DesiredState.RECOVERING, who="bob", why="another")
    _run(checkpoint_id(log, 3))
    assert _wish(log.store) is DesiredState.RECOVERING


def _restore_until_deferred(log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> EpochTrigger:
    """Restore the first of two epochs; the trigger that the task sleeps on."""
    monkeypatch.setattr(trigger, "read_settle_seconds", lambda: 0.0)
    seal_epoch(log)
    seal_epoch(log)
    with pytest.raises(TaskDeferred) as deferred:
        _run(checkpoint_id(log, 1))
    assert deferred.value.method_name == "resume_without_epoch"
    assert isinstance(deferred.value.trigger, EpochTrigger)
    return deferred.value.trigger


def _await_event(waiting: EpochTrigger) -> Any:
    async def read_one() -> Any:
        return await anext(waiting.run())

    return asyncio.run(read_one())


def test_the_first_epoch_is_awaited_without_a_slot(
    empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task sleeps, so that the stream's own task finds a slot to launch the driver in.

    The triggerer ends it with its result.
    """
    waiting = _restore_until_deferred(empty_log, monkeypatch)
    seal_epoch(empty_log)
    event = _await_event(waiting)
    assert event.task_instance_state == "success"
    assert event.xcoms["return_value"] == {
        "pipeline": "p",
        "timeline": 1,
        "fork_slot": 1,
        "seconds": pytest.approx(0, abs=5),
    }


def test_a_restore_right_after_a_stop_launches_a_driver(
    empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of the stream that was stopped counts as active for a moment, and launches nothing.

    When no driver has begun, the task looks again: now no run is active, and it launches one.
    """
    launched: list[str] = []

    def launch(pipeline: str, *_: object, **_options: object) -> SimpleNamespace:
        launched.append(pipeline)
        return SimpleNamespace(log="log")

    monkeypatch.setattr(recover_and_pin, "launch_driver", launch)
    waiting = _restore_until_deferred(empty_log, monkeypatch)
    assert launched == []
    assert waiting.begins_within == 10.0
    waiting.begins_within = 0.0
    event = _await_event(waiting)
    assert event.payload == {"driverless": True}
    operator = RecoverOperator(task_id="recover", pipeline="p", spec="p.yaml")
    for active, expected in ((1, []), (0, ["p"])):
        context = {"ti": SimpleNamespace(get_dr_count=lambda active=active, **_: active)}
        with pytest.raises(TaskDeferred) as deferred:
            operator.resume_without_epoch(context, event.payload, waiting.result)
        assert launched == expected
        assert isinstance(deferred.value.trigger, EpochTrigger)
        assert deferred.value.trigger.begins_within is None


def test_a_restore_looks_again_only_where_no_driver_has_begun(
    empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that holds the lease may take long to its first epoch."""
    waiting = _restore_until_deferred(empty_log, monkeypatch)
    waiting.begins_within, waiting.patience = 0.0, 0.5
    holder = ProcessIdentity.this_process("driver")
    Lease.acquire(empty_log.store, "p", holder)
    assert _await_event(waiting).payload == {"seconds": 0.5}


def test_a_restore_fails_without_an_epoch_in_time(
    empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork record does not count as an epoch. The message names the stream's DAG, which has to launch."""
    waiting = _restore_until_deferred(empty_log, monkeypatch)
    waiting.patience = 0.0
    event = _await_event(waiting)
    operator = RecoverOperator(task_id="recover", pipeline="p", checkpoint="latest")
    with pytest.raises(TransientError, match=r"p\.stream"):
        operator.resume_without_epoch({}, event.payload, {})


def test_an_unknown_checkpoint_leaves_the_stream_alone(log: SlotLog) -> None:
    """Nothing is stopped before it is known where to go back to."""
    set_desired_state(log.store, "p", DesiredState.RUN, who="bob")
    with pytest.raises(ConfigurationError, match="does not name a checkpoint"):
        _run("t9-000001-abcdef")
    assert read_desired_state(log.store, "p").who == "bob"


def test_a_condemned_checkpoint_leaves_the_stream_alone(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the driver is stopped, also in a dry run."""
    bad = checkpoint_id(log, 3)
    RootsFile(log.store, "p").condemn_damaged(CheckpointId.parse(bad), "missing: x")
    set_desired_state(log.store, "p", DesiredState.RUN, who="bob")
    stopped: list[Any] = []
    monkeypatch.setattr(recover_and_pin, "stop_driver", lambda *a, **_: stopped.append(a))
    for dry_run in (True, False):
        with pytest.raises(ConfigurationError, match="missing: x") as caught:
            _run(bad, dry_run=dry_run)
        assert caught.value.code == "roots.refused"
    assert (stopped, read_desired_state(log.store, "p").who) == ([], "bob")


def test_a_failed_restore_restores_the_wish(log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong after the stop, the stream does not stay down unattended, nor is a
    stopped one started.
    """

    def broken(*_: Any, **__: Any) -> None:
        raise ConfigurationError("no", code="x")

    monkeypatch.setattr(recover_and_pin, "commit_restore", broken)
    for wish in (DesiredState.RUN, DesiredState.STOPPED):
        set_desired_state(log.store, "p", wish, who="bob")
        with pytest.raises(ConfigurationError):
            _run(checkpoint_id(log, 3))
        assert _wish(log.store) is wish


def test_a_retried_restore_that_fails_leaves_a_stopped_stream_stopped(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed try leaves `recovering`; what was desired before it is kept in the trail."""

    def broken(*_: Any, **__: Any) -> None:
        raise ConfigurationError("no", code="x")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    set_desired_state(log.store, "p", DesiredState.STOPPED, who="bob")
    with monkeypatch.context() as patch:
        patch.setattr(recover_and_pin, "stop_driver", killed)
        with pytest.raises(KeyboardInterrupt):
            _run(checkpoint_id(log, 3))
    set_desired_state(
        log.store, "p", DesiredState.RECOVERING, who="ann", why="as a kill -9 leaves it"
    )
    monkeypatch.setattr(recover_and_pin, "commit_restore", broken)
    with pytest.raises(ConfigurationError):
        _run(checkpoint_id(log, 3))
    assert _wish(log.store) is DesiredState.STOPPED


def test_the_report_says_what_is_taken_back(log: SlotLog) -> None:
    """For the task log, and for the person who approves."""
    filled = log.read_slot(0, 2)
    assert filled is not None
    text = format_impact_report(plan_restore(log, filled.epoch.id))
    assert "epochs rewound   4" in text
    assert "rows taken back  read 40, released 40" in text
