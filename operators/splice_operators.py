"""`<p>.splice`: merge late rows into history, after a person has approved the exact effect.

    report     takes the request that the form names, or makes one of the late rows; its effect is
               the question's text
    approve    Airflow's own human-in-the-loop; a rejection closes the request; a part makes two
               requests of it, each with its own effect and run
    merge      refuses if the requester has approved, and merges only the effect that was shown

`tidegate splice` does the work in a child process. A user who may edit a DAG's tasks can set their
results (XCom) and mark them as successful. So neither the question nor the answer is read from
there: both are in `approvals/` in the bucket, where only the tasks write. The request's own
document tells people the same, but operators at a command line may write it. `execute_complete`
runs only after Airflow has accepted a person's answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param
from airflow.sdk.exceptions import AirflowSkipException

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.restore import RestoreEvent, plan_restore, record_restore_event
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import (
    OPEN_STATES,
    SpliceApproval,
    SpliceRequest,
    note_splice_event,
    read_splice_approval,
    read_splice_request,
    record_splice_approval,
    reject_splice_request,
)
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.operations import SpliceSpec
from tidegate.json_types import JsonObject, JsonView

from .child_processes import run_tidegate
from .errors import MERGE_NOT_APPROVED, RESTORE_NOT_APPROVED
from .pipeline_operator import PipelineOperator, get_requester, render_text
from .recover_and_pin import (
    MAX_APPROVAL_DRIFT,
    format_impact_report,
    read_restore_audit,
)
from .store_access import StoreAccess


@dataclass(frozen=True)
class Responder:
    """The person who has answered; with some of Airflow's logins the id is a number."""

    name: str
    id: str

    @classmethod
    def from_event(cls, event: JsonObject) -> Responder:
        """Read the person from the event with which Airflow resumes the task."""
        person = event.get("responded_by_user") or {}
        user_id = str(person.get("id") or "nobody")
        return cls(str(person.get("name") or user_id), user_id)


class AskOperator(ApprovalOperator):
    """Asks a person to approve something about a pipeline. A rejection skips what follows.

    Airflow fails this try if the answer arrives in the moment in which the task is deferred, though
    it has accepted the answer; so the task has retries, and a retry asks again.

    Args:
        pipeline: its name.
        approvers: ids of the users that Airflow lets answer; empty for everyone.
        patience: ticks after which the question expires; None: never.
        conn_id: Airflow connection of the store; None for the environment.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        approvers: tuple[str, ...] = (),
        patience: int | None = None,
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.pipeline, self.conn_id = pipeline, conn_id
        super().__init__(
            assigned_users=[{"id": user, "name": user} for user in approvers] or None,
            response_timeout=None if patience is None else timedelta(microseconds=patience),
            retries=2,
            retry_delay=timedelta(seconds=2),
            **kwargs,
        )

    def execute(self, context: Any) -> Any:
        """Ask, and say until when the answer is awaited."""
        # Set here and not as a template: templates are rendered from results of other tasks.
        self.body = self.build_question(context)
        if self.response_timeout:
            until = datetime.now(UTC) + self.response_timeout
            self.body += f"\n\nWithout an answer by {until:%Y-%m-%d %H:%M} UTC it expires."
        return super().execute(context)

    def execute_complete(self, context: Any, event: JsonObject) -> Any:
        """Keep the answer, then let Airflow's own operator act on it."""
        if "error" in event:
            self.record_expiry(context, event)
        else:
            self.record_answer(context, event, Responder.from_event(event))
        return super().execute_complete(context=context, event=event)

    def open_store(self) -> Store:
        """Open the pipeline's store."""
        return StoreAccess.resolve(self.conn_id).open()

    def build_question(self, context: Any) -> str:
        """Return the question in Markdown."""
        raise NotImplementedError

    def record_answer(self, context: Any, event: JsonObject, person: Responder) -> None:
        """Keep the answer in the bucket."""
        raise NotImplementedError

    def record_expiry(self, context: Any, event: JsonObject) -> None:
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
        log = SlotLog(self.open_store(), self.pipeline)
        audit = read_restore_audit(log, str(context["run_id"]))
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

    def record_answer(self, context: Any, event: JsonObject, person: Responder) -> None:
        """Keep who answered, by name and, where it differs, by id."""
        approved = event["chosen_options"] == [self.APPROVE]
        record_restore_event(
            self.open_store(),
            self.pipeline,
            str(context["run_id"]),
            RestoreEvent.APPROVED if approved else RestoreEvent.REJECTED,
            who=person.name,
            detail="" if person.id == person.name else person.id,
        )

    def record_expiry(self, context: Any, event: JsonObject) -> None:
        """Keep that the question has expired, so that the Streams page says so."""
        record_restore_event(
            self.open_store(),
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


_PART_PARAMS = {
    "part_until": "Part: event time before, ISO 8601",
    "part_since": "Part: event time from, ISO 8601",
    "part_source": "Part: only rows of these sources, with commas",
    "part_output": "Part: only into these outputs (events, windows), with commas",
}
REPORT, APPROVE, MERGE = "report", "approve", "merge"


class ReportSpliceOperator(PipelineOperator):
    """Reports exactly what a merge would change.

    Args:
        at_least: late rows that are worth a request; fewer skip the run.
        request: id of an existing request; empty to make one of the late rows.
    """

    ui_color = "#d9e8f3"
    template_fields = ("request",)
    request: str

    def __init__(self, *, at_least: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at_least = at_least

    def execute(self, context: Any) -> JsonObject:
        """The question's text and the request are the task's result.

        The bucket keeps the digest of the effect, and that of the text: the result itself can be
        changed by users who may edit the DAG's tasks.

        Raises:
            AirflowSkipException: too few late rows wait, the request was merged before, or it has
                nothing left to merge.
        """
        access = self.resolve_access()
        who, request = get_requester(context), self.request or self._offer_late_rows(access)
        shown = run_tidegate(access, self.pipeline, "splice", "show", self.spec, request)
        if "impact" not in shown:
            raise AirflowSkipException(
                f"splice request {request} was merged before, in {shown['checkpoint']}"
            )
        impact = shown["impact"]
        if not impact["rows"]:
            raise AirflowSkipException(f"splice request {request} has nothing left to merge")
        request_facts = shown["request"]
        text = render_text(
            "merge_impact",
            impact=impact,
            request=request_facts,
            who=join_lines(request_facts["who"]),
            why=join_lines(request_facts["why"] or "no reason given"),
        )
        self.log.info("%s", text)
        run, at = str(context["run_id"]), SYSTEM_CLOCK.wall_ticks()
        line: JsonObject = {"what": "reported", "who": who, "at": at, "run": run}
        line |= {"digest": impact["digest"], "question": _hash_text(text)}
        store = access.open()
        # Who made the request is kept as well: its document may be changed before the answer.
        asker = {"asker": request_facts["who"]}
        record_splice_approval(store, self.pipeline, request, {**line, **asker})
        note_splice_event(store, self.pipeline, request, **line)
        return {"request": request, "text": text}

    def _offer_late_rows(self, access: StoreAccess) -> str:
        """The id of a request of the late rows."""
        options = ("--skip-rejected", "--at-least", str(self.at_least))
        command = ("splice", "late", self.spec, *options, "--why", "offered by Airflow")
        made = run_tidegate(access, self.pipeline, *command, empty_on=("splice.no_rows",))
        if not made.get("request"):
            raise AirflowSkipException(f"fewer than {self.at_least} late rows wait for a merge")
        return str(made["request"])


class ApproveSpliceOperator(AskOperator):
    """Asks a person whether to merge.

    A rejection closes the request and skips the merge. So does an answer that chooses a part: it
    makes two new requests, whose effects no person has seen yet.

    Args:
        spec: path of the pipeline's YAML file.
    """

    PART = "Part"

    def __init__(self, *, pipeline: str, spec: str, **kwargs: Any) -> None:
        self.spec = spec
        kwargs.pop("params", None)  # those of the DAG's form, which this form does not repeat
        super().__init__(
            pipeline=pipeline,
            subject=f"Merge a splice request into {pipeline}?",
            params={
                name: Param("", type="string", title=title) for name, title in _PART_PARAMS.items()
            },
            **kwargs,
        )
        # ApprovalOperator's constructor accepts no options of its own.
        self.options = [self.APPROVE, self.PART, self.REJECT]

    def build_question(self, context: Any) -> str:
        """Return the report that the report's task has made.

        Raises:
            ConfigurationError: it was changed after it was made.
        """
        result = context["ti"].xcom_pull(task_ids=REPORT)
        request, report = self._read_report(context)
        if report is None or report["question"] != _hash_text(result["text"]):
            reason = "its report was changed after it was made"
            raise MERGE_NOT_APPROVED(pipeline=self.pipeline, reason=reason, dag_id=self.dag_id)
        self.subject = f"Merge splice request {request.id} into {self.pipeline}?"
        return fence_text(result["text"])

    def execute_complete(self, context: Any, event: JsonObject) -> Any:
        """Fill in the fields that a client of Airflow's API left out, then keep the answer."""
        if "error" not in event:
            form = {**dict.fromkeys(_PART_PARAMS, ""), **(event.get("params_input") or {})}
            event = {**event, "params_input": form}
            self.validate_params_input(form)  # before anything is done
        return super().execute_complete(context, event)

    def record_answer(self, context: Any, event: JsonObject, person: Responder) -> None:
        """Split the request, or keep the decision in its document.

        An approval by the person who made the request or started the run is kept as refused.
        """
        request, report = self._read_report(context)
        if event["chosen_options"] == [self.PART]:
            self._split_request(request.id, event["params_input"], person.name)
        elif report is not None:
            approved = event["chosen_options"] == [self.APPROVE]
            self._record_decision(request, report, person, approved=approved)

    def _read_report(self, context: Any) -> tuple[SpliceRequest, JsonObject | None]:
        request = context["ti"].xcom_pull(task_ids=REPORT)["request"]
        store = self.open_store()
        approval = read_splice_approval(store, self.pipeline, request)
        found = read_splice_request(store, self.pipeline, request)
        return found, _find_report(approval, str(context["run_id"]))

    def _split_request(self, request: str, form: Mapping[str, str], who: str) -> None:
        """Make two requests of one, as the person has filled in the form."""
        options = [
            word
            for name in _PART_PARAMS
            for value in str(form.get(name) or "").split(",")
            if value.strip()
            for word in (f"--{name.removeprefix('part_')}", value.strip())
        ]
        options += ["--who", who, "--why", f"decided by {who} in Airflow"]
        # In a child process: splitting the rows needs the table libraries.
        access = StoreAccess.resolve(self.conn_id)
        made = run_tidegate(access, self.pipeline, "splice", "part", self.spec, request, *options)
        parts = "{request} ({rows} rows) and {rest} ({rest_rows} rows)".format_map(made)
        self.log.info("%s is %s now: start %s again with one of them", request, parts, self.dag_id)

    def _record_decision(
        self, request: SpliceRequest, report: JsonObject, person: Responder, *, approved: bool
    ) -> None:
        who, now = person.name, SYSTEM_CLOCK.wall_ticks()
        about = (self.open_store(), self.pipeline, request.id)
        line: JsonObject
        if not approved:
            reject_splice_request(*about, who=who, why="rejected in Airflow", at=now)
        # Who made the request or started the run may not approve it; `airflow` is a schedule.
        elif {person.name, person.id} & ({report["asker"], report["who"]} - {"airflow"}):
            line = {"what": "refused", "who": "tidegate", "because": f"{who} has asked for it"}
            record_splice_approval(*about, {**line, "at": now})
            note_splice_event(*about, **line, at=now)
        elif request.state in OPEN_STATES:
            line = {"what": "approved", "who": who, "at": now}
            record_splice_approval(*about, {**line, "digest": report["digest"]})
            line |= {"decided_by": who, "decided_at": now, "approved_digest": report["digest"]}
            note_splice_event(*about, **line, state="approved")


class MergeSpliceOperator(PipelineOperator):
    """Merges what was approved, and nothing else."""

    ui_color = "#d9e8f3"

    def execute(self, context: Any) -> JsonObject:
        """Merge; checkpoint and digests of the effect are the task's result.

        May be tried again after a crash at any point.

        Raises:
            ConfigurationError: no person other than the requester has approved.
            TidegateError: the merge was refused or failed; nothing was changed.
        """
        run, access = str(context["run_id"]), self.resolve_access()
        name = context["ti"].xcom_pull(task_ids=REPORT)["request"]
        store = access.open()
        request = read_splice_request(store, self.pipeline, name)
        approval = read_splice_approval(store, self.pipeline, name)
        given = _find_approval(approval, run)
        if given is None or request.state == "rejected":
            reason = _explain_refusal(request, approval)
            raise MERGE_NOT_APPROVED(pipeline=self.pipeline, reason=reason, dag_id=self.dag_id)
        approver, digest = given["who"], given["digest"]
        options = ("--digest", digest, "--who", approver)
        why = f"approved by {approver} in {run}"
        command = ("splice", "merge", self.spec, request.id, *options, "--why", why)
        merged = run_tidegate(access, self.pipeline, *command)
        text = "merged in {checkpoint}; promised {promised}, actual {actual}".format_map(merged)
        self.log.info("%s", text)
        names = ("request", "checkpoint", "promised", "actual", "again")
        return {name: merged[name] for name in names}


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _find_report(approval: SpliceApproval, run: str) -> JsonObject | None:
    """The newest report of this run."""
    lines = (line for line in reversed(approval.lines) if line["what"] == "reported")
    return next((line for line in lines if line["run"] == run), None)


def _find_approval(approval: SpliceApproval, run: str) -> JsonObject | None:
    """The newest approval, of any run, of the effect that this run has reported."""
    report = _find_report(approval, run)
    given = (line for line in reversed(approval.lines) if line["what"] == "approved")
    return next((line for line in given if report and line["digest"] == report["digest"]), None)


def _explain_refusal(request: SpliceRequest, approval: SpliceApproval) -> str:
    if request.state == "rejected":
        return f"{request.decided_by} has rejected it"
    refusals = [line["because"] for line in approval.lines if line["what"] == "refused"]
    return refusals[-1] if refusals else "no one has answered"


def add_splice_tasks(splice: SpliceSpec, about: JsonView) -> None:
    """Add the three tasks to the DAG that is being built.

    Args:
        splice: the spec's options.
        about: arguments of `PipelineOperator`.
    """
    report = ReportSpliceOperator(task_id=REPORT, at_least=splice.offer_rows or 1, **about)
    approve = ApproveSpliceOperator(
        task_id=APPROVE,
        approvers=splice.approvers,
        patience=splice.patience,
        **about,
    )
    merge = MergeSpliceOperator(
        task_id=MERGE, retries=2, retry_delay=timedelta(seconds=10), **about
    )
    report >> approve >> merge
