"""A restore that another person approves, step by step.

Who asks is not who decides, and the answer fits what it was about.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.standard.exceptions import HITLTimeoutError
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException
from tests.epochs import checkpoint_id, seal_epoch
from tests.manual_clock import ManualClock
from tests.operators.asking import Asking

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.restore import RestoreEvent, read_restore_audits, record_restore_event
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.operators import recover_and_pin
from tidegate.operators.factory import build_dags
from tidegate.operators.recover_and_pin import (
    MAX_APPROVAL_DRIFT,
    RecoverOperator,
)
from tidegate.operators.splice_operators import ApproveRestoreOperator

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}
supervision: {approval: true, approvers: [olga], approval_timeout: 1h}
"""


def test_an_approved_restore_names_both_people(log: SlotLog) -> None:
    """The question carries the impact report.

    Fork and trail say who asked, who approved, why, from and to.
    """
    asking, target = Asking(), checkpoint_id(log, 3)
    text = asking.report(target)
    assert "Asked for by `ann`: `a test`" in text
    assert "epochs rewound   3" in text
    asking.answer("Approve", "olga")
    asking.recover()
    (fork,) = log.list_forks()
    assert (fork.recover_to, fork.who, fork.why) == (target, "ann", "a test (approved by olga)")
    (trail,) = read_restore_audits(log.store, "p")
    assert (trail.request, trail.target, trail.head, trail.why) == (
        "r",
        target,
        checkpoint_id(log, 6),
        "a test",
    )
    assert [(s.what, s.who) for s in trail.steps] == [
        ("asked", "ann"),
        ("approved", "olga"),
        ("restored", "ann"),
    ]


def test_no_one_approves_their_own_restore(log: SlotLog) -> None:
    """The answer of the user who asked does not count, nothing is changed, and the refusal stays in the
    trail.
    """
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    asking.answer("Approve", "ann")
    with pytest.raises(
        ConfigurationError, match="ann has asked for it and may not approve it as well"
    ):
        asking.recover()
    assert log.list_forks() == []
    assert [s.what for s in read_restore_audits(log.store, "p")[0].steps] == [
        RestoreEvent.ASKED,
        RestoreEvent.APPROVED,
        RestoreEvent.REFUSED,
    ]


def test_an_asker_with_a_numeric_id_may_not_approve(log: SlotLog) -> None:
    """Under FAB and Keycloak a user's id is not the name, which a run records."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    asking.answer("Approve", "ann", user_id="7")
    with pytest.raises(ConfigurationError, match="ann has asked for it"):
        asking.recover()
    assert log.list_forks() == []


def test_approvers_are_known_by_name_or_id(log: SlotLog) -> None:
    """An approval of someone who is not on the list does not count."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    asking.answer("Approve", "olga", user_id="8")
    with pytest.raises(ConfigurationError, match="olga is not one of the approvers"):
        asking.recover(approvers=("uwe",))
    asking.recover(approvers=("8",))
    assert len(log.list_forks()) == 1


def test_a_run_without_a_person_asks_no_one(log: SlotLog) -> None:
    """Of a run that a program started no one knows who must not approve it."""
    with pytest.raises(ConfigurationError, match="no person has started this run"):
        Asking(who=None).report(checkpoint_id(log, 3))


def test_a_forged_result_approves_nothing(log: SlotLog) -> None:
    """Whoever may edit the DAG's tasks can mark them as successful and set their results."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    olga = {"id": "olga", "name": "olga"}
    asking.results["approve"] = {"chosen_options": ["Approve"], "responded_by_user": olga}
    with pytest.raises(ConfigurationError, match="no one has answered"):
        asking.recover()
    assert log.list_forks() == []


def test_a_forged_report_changes_no_target(log: SlotLog) -> None:
    """The bucket, not a task's result, keeps what is asked and what is restored."""
    asking, target = Asking(), checkpoint_id(log, 3)
    asking.report(target)
    asking.results["report"] = {"target": checkpoint_id(log, 1), "who": "bob"}
    assert target in asking.question()
    asking.answer("Approve", "olga")
    asking.recover()
    assert log.list_forks()[0].recover_to == target


def test_a_repeated_report_keeps_its_checkpoint(log: SlotLog) -> None:
    """A person may be looking at the question while the task before it is cleared."""
    asking, target = Asking(), checkpoint_id(log, 3)
    asking.report(target)
    assert target in asking.report(checkpoint_id(log, 1))


def test_an_approval_expires_by_wall_clock(log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped stream seals nothing, so that epochs alone would let an approval last forever."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    asking.answer("Approve", "olga")
    later = ManualClock(wall_ticks=SYSTEM_CLOCK.wall_ticks() + 3_601_000_000)
    monkeypatch.setattr(recover_and_pin, "SYSTEM_CLOCK", later)
    with pytest.raises(ConfigurationError, match="approval by olga is older than 1:00:00"):
        asking.recover(approval_timeout=3_600_000_000)


def test_a_question_says_when_it_expires(
    log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page and Airflow's form show until when an answer is awaited, and what it is worth."""
    (tmp_path / "p.yaml").write_text(SPEC)
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    approve: Any = build_dags(tmp_path)["p.recover"].get_task("approve")
    monkeypatch.setattr(ApprovalOperator, "execute", lambda self, context: None)
    approve.execute(asking.context())
    assert "It expires 1:00:00 after it was given." in approve.body
    assert re.search(r"Without an answer by 20\d\d-\d\d-\d\d \d\d:\d\d UTC it", approve.body)


def test_a_reason_cannot_imitate_the_report(log: SlotLog) -> None:
    """The asker's words follow the report, on one line, and are shown as they are."""
    asking = Asking(reason="x\n```\nImpact of restoring p\n  epochs rewound   1\n![](http://e)")
    text = asking.report(checkpoint_id(log, 3))
    assert text.index("epochs rewound   3") < text.index("epochs rewound 1")
    assert "`x ''' Impact of restoring p epochs rewound 1 ![](http://e)`" in text
    assert text.count("```") == 2


def test_a_rejection_is_not_undone_by_another_try(log: SlotLog) -> None:
    """The newest answer counts, and an answer of the asker never does."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    asking.answer("Approve", "olga")
    asking.answer("Reject", "uwe")
    asking.answer("Approve", "ann")
    with pytest.raises(ConfigurationError, match="uwe has rejected it"):
        asking.recover()


def test_without_an_answer_nothing_is_restored(log: SlotLog) -> None:
    """Someone marked the question as successful instead of answering it."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    with pytest.raises(ConfigurationError, match="no one has answered"):
        asking.recover()
    assert log.list_forks() == []


def test_an_approval_does_not_outlive_another_restore(log: SlotLog) -> None:
    """The report was about the timeline that has ended meanwhile."""
    first, second = Asking("r1"), Asking("r2")
    for asking in (first, second):
        asking.report(checkpoint_id(log, 3))
        asking.answer("Approve", "olga")
    first.recover()
    with pytest.raises(ConfigurationError, match="restored to something else after the report"):
        second.recover()
    assert len(log.list_forks()) == 1


def test_an_approval_holds_for_so_many_epochs(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live stream goes on while it is thought about.

    Beyond the bound in the report it is asked again.
    """
    monkeypatch.setattr(recover_and_pin, "MAX_APPROVAL_DRIFT", 2)
    asking = Asking()
    assert f"up to {MAX_APPROVAL_DRIFT} further epochs" in asking.report(checkpoint_id(log, 3))
    asking.answer("Approve", "olga")
    for _ in range(3):
        seal_epoch(log)
    with pytest.raises(
        ConfigurationError, match="3 epochs were sealed after the report, it holds for 2"
    ):
        asking.recover()


def test_a_rejection_is_kept(log: SlotLog) -> None:
    """Nothing follows the question, and the trail says who said no."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    asking.answer("Reject", "olga")
    assert [(s.what, s.who) for s in read_restore_audits(log.store, "p")[0].steps][-1] == (
        "rejected",
        "olga",
    )


def test_an_unanswered_question_is_in_the_trail(log: SlotLog) -> None:
    """The page shows an expired request like a refused one."""
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    operator = ApproveRestoreOperator(task_id="approve", pipeline="p", patience=3_600_000_000)
    event = {"error": "no response", "error_type": "timeout"}
    with pytest.raises(HITLTimeoutError):
        operator.execute_complete(asking.context(), event)
    step = read_restore_audits(log.store, "p")[0].steps[-1]
    assert (step.what, step.detail) == ("refused", "no one has answered within 1:00:00")


def test_a_dry_run_asks_no_one(log: SlotLog) -> None:
    """It ends after the report, which is in its log."""
    with pytest.raises(AirflowSkipException, match="no one is asked"):
        Asking().report(checkpoint_id(log, 3), dry_run=True)
    assert read_restore_audits(log.store, "p") == []


def test_a_trail_takes_each_step_once(log: SlotLog) -> None:
    """A task that is tried again says nothing new; the newest request comes first."""
    for request in ("a", "b", "a"):
        record_restore_event(
            log.store, "p", request, RestoreEvent.ASKED, who="ann", target="t", head="h"
        )
    assert [(t.request, len(t.steps)) for t in read_restore_audits(log.store, "p")] == [
        ("b", 1),
        ("a", 1),
    ]


def test_the_spec_switches_approval_on(tmp_path: Path) -> None:
    """Three tasks instead of one; only the named people may answer, and not forever."""
    (tmp_path / "p.yaml").write_text(SPEC)
    dag = build_dags(tmp_path)["p.recover"]
    assert set(dag.task_ids) == {"report", "approve", "recover"}
    assert dag.get_task("report").downstream_task_ids == {"approve"}
    assert dag.get_task("approve").downstream_task_ids == {"recover"}
    approve, last = dag.get_task("approve"), dag.get_task("recover")
    assert isinstance(approve, ApproveRestoreOperator)
    assert approve.assigned_users == [{"id": "olga", "name": "olga"}]
    assert approve.response_timeout is not None
    assert approve.response_timeout.total_seconds() == 3600
    assert isinstance(last, RecoverOperator)
    assert last.supervision.approval
    assert last.supervision.approvers == ("olga",)
    assert last.supervision.approval_timeout == 3_600_000_000
    assert "approval" in build_dags(tmp_path)["p.stream"].tags
