"""Questions to a person: what they are shown, and how their answer is kept.

A user who may edit a DAG's tasks can set their results (XCom) and mark them as successful. So
neither the question nor the answer is read from there: both are in the bucket, where only the tasks
write. `execute_complete` runs only after Airflow has accepted a person's answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.restore import RestoreEvent, plan_restore, record_restore_event
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.operators.errors import RESTORE_NOT_APPROVED
from tidegate.operators.pipeline_operator import get_requester
from tidegate.operators.recover_and_pin import (
    MAX_APPROVAL_DRIFT,
    format_impact_report,
    read_restore_audit,
)
from tidegate.operators.store_access import StoreAccess


@dataclass(frozen=True)
class Responder:
    """The person who has answered; with some of Airflow's logins the id is a number."""

    name: str
    id: str

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> Responder:
        """Read the person from the event with which Airflow resumes the task."""
        person = event.get("responded_by_user") or {}
        user_id = str(person.get("id") or "nobody")
        return cls(str(person.get("name") or user_id), user_id)

    def is_among(self, people: set[str]) -> bool:
        """Whether a list of people has this one, by name or by id."""
        return bool(people & {self.name, self.id})


class AskOperator(ApprovalOperator):
    """Asks a person to approve something about a pipeline. A rejection skips what follows.

    Airflow fails this try if the answer arrives in the moment in which the task is deferred, though
    it has accepted the answer; so the task has retries, and a retry asks again.

    Args:
        pipeline: its name.
        approvers: ids of the users that Airflow lets answer; empty for everybody.
        conn_id: Airflow connection of the store; None for the environment.
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
            assigned_users=[{"id": user, "name": user} for user in approvers] or None, **kwargs
        )

    def execute(self, context: Any) -> Any:
        """Ask, and say until when the answer is awaited."""
        # Set here and not as a template: templates are rendered from results of other tasks.
        self.body = self.build_question(context)
        if self.response_timeout:
            until = datetime.now(UTC) + self.response_timeout
            self.body += f"\n\nWithout an answer by {until:%Y-%m-%d %H:%M} UTC it expires."
        return super().execute(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Keep the answer, then let Airflow's own operator act on it."""
        if "error" in event:
            self.record_expiry(context, event)
        else:
            self.record_answer(context, event, Responder.from_event(event))
        return super().execute_complete(context=context, event=event)

    def build_question(self, context: Any) -> str:
        """Return the question in Markdown."""
        raise NotImplementedError

    def record_answer(self, context: Any, event: dict[str, Any], person: Responder) -> None:
        """Keep the answer in the bucket."""
        raise NotImplementedError

    def record_expiry(self, context: Any, event: dict[str, Any]) -> None:
        """Record that the question expired without an answer; by default only Airflow knows it."""


class ApproveRestoreOperator(AskOperator):
    """Asks another person whether to restore; the restore's trail keeps the answer."""

    def __init__(self, *, pipeline: str, **kwargs: Any) -> None:
        super().__init__(pipeline=pipeline, subject=f"Restore {pipeline}?", **kwargs)

    def build_question(self, context: Any) -> str:
        """Return what the restore would take back, computed now from the checkpoint asked for.

        Raises:
            ConfigurationError: the report's task has made no report.
        """
        log = SlotLog(StoreAccess.resolve(self.conn_id).open(), self.pipeline)
        audit = read_restore_audit(log.store, self.pipeline, str(context["run_id"]))
        who = get_requester(context)
        if audit is None or not audit.target:
            reason = "the report was not made, only marked as made"
            raise RESTORE_NOT_APPROVED(
                pipeline=self.pipeline, reason=reason, dag_id=self.dag_id, requester=who
            )
        self.subject = f"Restore {self.pipeline} to {audit.target}?"
        report = format_impact_report(plan_restore(log, CheckpointId.parse(audit.target)))
        request = f"Asked for by {quote_text(who)}: {quote_text(audit.why or 'no reason given')}"
        binding = (
            f"The approval holds for this checkpoint and timeline, and for up to"
            f" {MAX_APPROVAL_DRIFT} further epochs; then ask again."
        )
        if self.response_timeout:
            binding += f" It expires {self.response_timeout} after it was given."
        return f"{fence_text(report)}\n\n{request}\n\n{binding}"

    def record_answer(self, context: Any, event: dict[str, Any], person: Responder) -> None:
        """Keep who answered, by name and, where it differs, by id."""
        approved = event["chosen_options"] == [self.APPROVE]
        record_restore_event(
            StoreAccess.resolve(self.conn_id).open(),
            self.pipeline,
            str(context["run_id"]),
            RestoreEvent.APPROVED if approved else RestoreEvent.REJECTED,
            who=person.name,
            detail="" if person.id == person.name else person.id,
        )

    def record_expiry(self, context: Any, event: dict[str, Any]) -> None:
        """Keep that the question has expired, so that the Streams page says so."""
        record_restore_event(
            StoreAccess.resolve(self.conn_id).open(),
            self.pipeline,
            str(context["run_id"]),
            RestoreEvent.REFUSED,
            who="tidegate",
            detail=f"no one has answered within {self.response_timeout}",
        )


def quote_text(text: str) -> str:
    """Return the first 500 characters of a text as one line of Markdown that is shown as it is.

    Otherwise the asker's words could imitate the report, or show links and remote images.
    """
    line = join_lines(text).replace("`", "'")
    return f"`{line}`" if line else ""


def join_lines(text: str) -> str:
    """Return what a person wrote as one line of at most 500 characters."""
    return " ".join(text.split())[:500]


def fence_text(text: str) -> str:
    """Return lines as a Markdown block that its content cannot end."""
    return "```\n" + text.replace("```", "'''") + "\n```"
