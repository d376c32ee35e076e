"""A restore that another person has to approve.

Who asks is not who decides, and the impact report is what is decided on.

report     chooses and verifies the checkpoint; what would be rewound goes into the body of the
question approve    Airflow's own human-in-the-loop; the answer stands in the trail recover
refuses when whoever asked has approved, or when the stream is no longer what the report was about
"""

from __future__ import annotations

from typing import Any, Final

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from tidegate.checkpoints.restore import RestoreEvent, plan_restore, record_restore_event
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.operators.recover_and_pin import (
    MAX_APPROVAL_DRIFT,
    choose_checkpoint,
    format_impact_report,
    get_requester,
)
from tidegate.operators.store_access import StoreAccess

REPORT_TASK_ID: Final = "report"


class ReportRestoreOperator(BaseOperator):
    """Verifies the checkpoint and says what going back to it would take back; a dry run ends here.

    Args:
        pipeline: name of the pipeline.
        checkpoint: as `RecoverOperator`'s; a template.
        reason: kept in the trail; a template.
        dry_run_only: a template that renders to `True` or `False`.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#f3d9cf"
    template_fields = ("checkpoint", "reason", "dry_run_only")

    def __init__(
        self,
        *,
        pipeline: str,
        checkpoint: str = "{{ params.checkpoint }}",
        reason: str = "{{ params.reason }}",
        dry_run_only: str = "{{ params.dry_run }}",
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.checkpoint, self.reason, self.conn_id = (
            pipeline,
            checkpoint,
            reason,
            conn_id,
        )
        self.dry_run_only = dry_run_only

    def execute(self, context: Any) -> dict[str, Any]:
        """Plan; the text for the question and the head it is bound to are the task's result."""
        log = SlotLog(StoreAccess.resolve(self.conn_id).open(), self.pipeline)
        target = choose_checkpoint(log, self.checkpoint)
        plan = plan_restore(log, target)
        text = format_impact_report(plan)
        self.log.info("%s", text)
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
        bound = {"timeline": plan.timeline, "slot": plan.slot, "sha256": plan.sha256}
        return {
            "text": _format_approval_question(text, who, self.reason),
            "target": str(target),
            "bound": bound,
            "who": who,
        }


class ApproveRestoreOperator(ApprovalOperator):
    """Asks another person.

    The answer is kept in the bucket; a rejection ends the run without a restore.

    An answer that meets the task in the instant it parks makes this try fail, although Airflow has
    accepted it: so it is tried again, which asks again.
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
        super().__init__(
            subject=(
                f"Restore {pipeline} to {{{{ ti.xcom_pull(task_ids='{REPORT_TASK_ID}')['target']"
                " }}?"
            ),
            body=f"{{{{ ti.xcom_pull(task_ids='{REPORT_TASK_ID}')['text'] }}}}",
            assigned_users=[{"id": user, "name": user} for user in approvers] or None,
            **kwargs,
        )

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Keep the answer, then do what Airflow does with it."""
        if "error" not in event:
            person, chosen = event.get("responded_by_user") or {}, event["chosen_options"]
            what = RestoreEvent.APPROVED if chosen == [self.APPROVE] else RestoreEvent.REJECTED
            store = StoreAccess.resolve(self.conn_id).open()
            record_restore_event(
                store,
                self.pipeline,
                str(context["run_id"]),
                what,
                who=str(person.get("id") or "nobody"),
            )
        return super().execute_complete(context=context, event=event)


def _format_approval_question(text: str, who: str, reason: str) -> str:
    told = f"**{who}** asks for this restore: {reason or 'no reason given'}"
    binding = (
        f"The approval holds for this checkpoint and timeline, and for up to {MAX_APPROVAL_DRIFT}"
        " further epochs; then ask again."
    )
    return f"{told}\n\n```\n{text}\n```\n\n{binding}"
