"""A restore that another person has to approve: the impact report is what they decide on.

report     chooses and verifies the checkpoint; what would be rewound is the question's text
approve    Airflow's own human-in-the-loop; the answer is kept in the audit document
recover    refuses if the requester has approved, or if the stream has moved on since the report
"""

from __future__ import annotations

from typing import Any, Final

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException

from tidegate.checkpoints.restore import RestoreEvent, plan_restore, record_restore_event
from tidegate.operators.pipeline_operator import PipelineOperator, get_requester
from tidegate.operators.recover_and_pin import (
    MAX_APPROVAL_DRIFT,
    choose_checkpoint,
    format_impact_report,
)
from tidegate.operators.store_access import StoreAccess

REPORT_TASK_ID: Final = "report"


class ReportRestoreOperator(PipelineOperator):
    """Verifies the checkpoint and reports what a restore would take back; a dry run ends here.

    Args:
        checkpoint: as `RecoverOperator`'s; a template.
        reason: kept in the audit document; a template.
        dry_run_only: a template that renders to `True` or `False`.
    """

    ui_color = "#f3d9cf"
    template_fields = ("checkpoint", "reason", "dry_run_only")

    def __init__(
        self,
        *,
        checkpoint: str = "{{ params.checkpoint }}",
        reason: str = "{{ params.reason }}",
        dry_run_only: str = "{{ params.dry_run }}",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.checkpoint, self.reason, self.dry_run_only = checkpoint, reason, dry_run_only

    def execute(self, context: Any) -> dict[str, Any]:
        """Plan; the question's text and the head it is bound to are the task's result."""
        log = self.open_log()
        target = choose_checkpoint(log, self.checkpoint)
        plan = plan_restore(log, target)
        report = format_impact_report(plan)
        self.log.info("%s", report)
        if self.dry_run_only == "True":
            raise AirflowSkipException("dry run: nothing was changed, nobody is asked")
        who, request = get_requester(context), str(context["run_id"])
        record_restore_event(
            log.store,
            self.pipeline,
            request,
            RestoreEvent.ASKED,
            who=who,
            target=plan.target,
            head=plan.head,
            why=self.reason,
        )
        return {
            "text": _format_approval_question(report, who, self.reason),
            "target": str(target),
            # The approval is good for this head only: see `MAX_APPROVAL_DRIFT`.
            "bound": {"timeline": plan.timeline, "slot": plan.slot, "sha256": plan.sha256},
            "who": who,
        }


class ApproveRestoreOperator(ApprovalOperator):
    """Asks another person, and keeps the answer in the bucket. A rejection ends the run.

    Airflow fails this try if the answer arrives in the moment in which the task is deferred, though
    it has accepted the answer; so the task has retries, and a retry asks again.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        approvers: tuple[str, ...] = (),
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.pipeline, self.conn_id = pipeline, conn_id
        report = f"ti.xcom_pull(task_ids='{REPORT_TASK_ID}')"
        super().__init__(
            subject=f"Restore {pipeline} to {{{{ {report}['target'] }}}}?",
            body=f"{{{{ {report}['text'] }}}}",
            assigned_users=[{"id": user, "name": user} for user in approvers] or None,
            **kwargs,
        )

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Keep the answer, then do what Airflow does with it."""
        if "error" not in event:
            person, chosen = event.get("responded_by_user") or {}, event["chosen_options"]
            answer = RestoreEvent.APPROVED if chosen == [self.APPROVE] else RestoreEvent.REJECTED
            record_restore_event(
                StoreAccess.resolve(self.conn_id).open(),
                self.pipeline,
                str(context["run_id"]),
                answer,
                who=str(person.get("id") or "nobody"),
            )
        return super().execute_complete(context=context, event=event)


def _format_approval_question(report: str, who: str, reason: str) -> str:
    request = f"**{who}** asks for this restore: {reason or 'no reason given'}"
    binding = (
        f"The approval holds for this checkpoint and timeline, and for up to {MAX_APPROVAL_DRIFT}"
        " further epochs; then ask again."
    )
    return f"{request}\n\n```\n{report}\n```\n\n{binding}"
