"""The recovery, step by step, on a store in memory: what is reported, what is changed, what a second try does."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.checkpoints.desired import DesiredState, read_desired, set_desired
from tidegate.checkpoints.layout import new_attempt
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.checkpoints.open import open_store
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.operators import recover
from tidegate.operators.recover import RecoverOperator, report


@pytest.fixture
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SlotLog:
    """Six epochs of ten rows each; nothing is waited for, no process is started."""
    url = f"memory://{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    monkeypatch.setenv("TIDEGATE_STORE", url)
    monkeypatch.setattr(RecoverOperator, "_await_first_epoch", lambda self, log, timeline: 1.0)
    log = SlotLog(open_store(url), "p")
    for _ in range(6):
        _seal(log)
    return log


def _seal(log: SlotLog) -> None:
    head = log.head()
    manifest = Manifest(
        timeline=head.timeline,
        slot=head.next_slot,
        pipeline="p",
        uid="u",
        spec_digest="s",
        code_version="c",
        parent=str(head.checkpoint) if head.checkpoint else None,
        parent_sha256=head.sha256,
        attempt=new_attempt(),
        lease_token=1,
        driver="d",
        recorded_now=0,
        created_at=0,
        counters=Counters(read=10 * head.next_slot, released=10 * head.next_slot),
    )
    log.seal(manifest)


def _id(log: SlotLog, slot: int) -> str:
    filled = log.read(0, slot)
    assert filled is not None
    return str(filled.epoch.id)


def _run(checkpoint: str, *, dry_run: bool = False, active: int = 1, run_id: str = "r") -> dict[str, Any]:
    operator = RecoverOperator(
        task_id="recover",
        pipeline="p",
        spec="p.yaml",
        stream_dag="p.stream",
        checkpoint=checkpoint,
        reason="a test",
        dry_run_only=str(dry_run),
    )
    person = SimpleNamespace(triggering_user_name="ann")
    return operator.execute({"run_id": run_id, "dag_run": person, "ti": SimpleNamespace(get_dr_count=lambda **_: active)})


def _wish(store: Store) -> DesiredState:
    return read_desired(store, "p").state


def test_a_restore_is_a_fork_with_who_and_why(log: SlotLog) -> None:
    """The next slot of the timeline names the checkpoint, the person and the reason, and the stream shall run."""
    target = _id(log, 3)
    outcome = _run(target)
    fork = log.forks()[0]
    assert (fork.recover_to, fork.who, fork.why, fork.request_id) == (target, "ann", "a test", "r")
    assert (outcome["timeline"], outcome["fork_slot"]) == (1, 3)
    assert _wish(log.store) is DesiredState.RUN


def test_a_dry_run_changes_nothing(log: SlotLog) -> None:
    """Verified and reported: 3 epochs and 30 rows would be taken back."""
    plan = _run(_id(log, 3), dry_run=True)["plan"]
    assert (plan["epochs_rewound"], plan["rows"]["read"]) == (3, 30)
    assert log.forks() == []
    assert _wish(log.store) is DesiredState.STOPPED


def test_a_retry_after_the_fork_does_not_restore_twice(log: SlotLog) -> None:
    """The request is known by the run's id, so a task killed after the PUT only waits for the first epoch."""
    target = _id(log, 3)
    _run(target)
    _seal(log)
    _run(target)
    assert len(log.forks()) == 1
    _run(target, run_id="another")
    assert len(log.forks()) == 2


def test_an_unknown_checkpoint_leaves_the_stream_alone(log: SlotLog) -> None:
    """Nothing is stopped before it is known where to go back to."""
    set_desired(log.store, "p", DesiredState.RUN, who="bob")
    with pytest.raises(ConfigurationError, match="does not name a checkpoint"):
        _run("t9-000001-abcdef")
    assert read_desired(log.store, "p").who == "bob"


def test_a_failed_restore_restores_the_wish(log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong after the stop, the stream does not stay down unattended, nor is a stopped one started."""

    def broken(*_: Any, **__: Any) -> None:
        raise ConfigurationError("no", code="x")

    monkeypatch.setattr(recover, "commit_restore", broken)
    for wish in (DesiredState.RUN, DesiredState.STOPPED):
        set_desired(log.store, "p", wish, who="bob")
        with pytest.raises(ConfigurationError):
            _run(_id(log, 3))
        assert _wish(log.store) is wish


def test_the_report_says_what_is_taken_back(log: SlotLog) -> None:
    """For the task log, and for whoever approves."""
    filled = log.read(0, 2)
    assert filled is not None
    text = report(plan_restore(log, filled.epoch.id))
    assert "epochs rewound   4" in text
    assert "rows taken back  read 40, released 40" in text
