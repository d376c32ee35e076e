"""`<p>.splice`: late rows back into history, with the exact effect before a person who decides.

report     takes the request that the form names, or offers the late rows as one; its effect goes
into the body of the question approve    Airflow's own human-in-the-loop; a rejection closes the
request; a part makes two requests of it, each with an
           effect and a run of its own
merge      refuses when whoever asked has approved; merges only the effect that was shown

The work is done by `tidegate splice` in a process of its own. Who, what and when stand in the
request's trail in the bucket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator, Param
from airflow.sdk.exceptions import AirflowSkipException

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.splice_requests import (
    OPEN_STATES,
    decide_splice_request,
    note_splice_event,
    read_splice_request,
)
from tidegate.errors import ConfigurationError
from tidegate.operators.child_processes import run_tidegate
from tidegate.operators.recover_and_pin import get_requester
from tidegate.operators.store_access import StoreAccess

_PART_PARAMS: Final = {
    "part_until": "Part: event time before, ISO 8601",
    "part_since": "Part: event time from, ISO 8601",
    "part_source": "Part: only rows of these sources, with commas",
    "part_output": "Part: only into these outputs (events, windows), with commas",
}
REPORT, APPROVE, MERGE = "report", "approve", "merge"


class ReportSpliceOperator(BaseOperator):
    """Says exactly what a merge would change.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file.
        at_least: late rows that are worth a request; fewer skip the run.
        request: id of a request that somebody made; a template; empty to offer the late rows.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#d9e8f3"
    template_fields = ("request",)

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str,
        at_least: int,
        request: str = "{{ params.request }}",
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.at_least, self.request, self.conn_id = (
            pipeline,
            spec,
            at_least,
            request,
            conn_id,
        )

    def execute(self, context: Any) -> dict[str, Any]:
        """The question's text, the request and the digest of the effect are the task's result."""
        access = StoreAccess.resolve(self.conn_id)
        who, request = get_requester(context), self.request or self._offer_late_rows(access)
        shown = run_tidegate(access, self.pipeline, "splice", "show", self.spec, request)
        if "impact" not in shown:
            raise AirflowSkipException(
                f"splice request {request} was merged before, in {shown['checkpoint']}"
            )
        impact, asked_by = shown["impact"], shown["request"]["who"]
        if not impact["rows"]:
            raise AirflowSkipException(f"splice request {request} has nothing left to merge")
        store = access.open()
        facts = {"digest": impact["digest"], "run": str(context["run_id"])}
        note_splice_event(
            store,
            self.pipeline,
            request,
            "reported",
            who=who,
            at=SYSTEM_CLOCK.wall_ticks(),
            **facts,
        )
        text = _format_impact(impact, shown["request"])
        self.log.info("%s", text)
        askers = sorted({asked_by, who} - {"airflow"})
        return {
            "request": request,
            "digest": impact["digest"],
            "text": f"```\n{text}\n```",
            "who": askers,
        }

    def _offer_late_rows(self, access: StoreAccess) -> str:
        """The id of a request of the late rows."""
        command = (
            "splice",
            "late",
            self.spec,
            "--skip-rejected",
            "--at-least",
            str(self.at_least),
            "--why",
            "offered by Airflow",
        )
        found = run_tidegate(access, self.pipeline, *command, nothing=("splice.no_rows",))
        if not found.get("request"):
            raise AirflowSkipException(f"fewer than {self.at_least} late rows wait for a merge")
        return str(found["request"])


class ApproveSpliceOperator(ApprovalOperator):
    """Asks a person.

    A rejection closes the request and skips the merge; so does a part, which nobody has seen the
    effect of.

    An answer that meets the task in the instant it parks makes this try fail, although Airflow has
    accepted it: so it is tried again, which asks again.
    """

    PART = "Part"

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str,
        approvers: tuple[str, ...] = (),
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.pipeline, self.spec, self.conn_id = pipeline, spec, conn_id
        kwargs.pop("params", None)  # the DAG's: what its form asks for is not asked again here
        super().__init__(
            subject=(
                f"Merge splice request {{{{ ti.xcom_pull(task_ids='{REPORT}')['request'] }}}} into"
                f" {pipeline}?"
            ),
            body=f"{{{{ ti.xcom_pull(task_ids='{REPORT}')['text'] }}}}",
            assigned_users=[{"id": user, "name": user} for user in approvers] or None,
            params={
                name: Param("", type="string", title=title) for name, title in _PART_PARAMS.items()
            },
            **kwargs,
        )
        self.options = [self.APPROVE, self.PART, self.REJECT]

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Keep the answer, then do what Airflow does with it."""
        if "error" not in event:
            # Airflow's form sends every field; whoever answers through its API sends those that
            # they mean.
            event = {
                **event,
                "params_input": {
                    **dict.fromkeys(_PART_PARAMS, ""),
                    **(event.get("params_input") or {}),
                },
            }
            self.validate_params_input(event["params_input"])  # before anything is done
            reported, chosen = context["ti"].xcom_pull(task_ids=REPORT), event["chosen_options"]
            who = str((event.get("responded_by_user") or {}).get("id") or "nobody")
            if chosen == [self.PART]:
                self._split_request(reported["request"], event["params_input"], who)
            else:
                self._record_answer(reported, chosen == [self.APPROVE], who)
        return super().execute_complete(context=context, event=event)

    def _split_request(self, request: str, choice: Mapping[str, str], who: str) -> None:
        """Two requests of one, by what the person has filled in."""
        options = [
            word
            for name in _PART_PARAMS
            for value in str(choice.get(name) or "").split(",")
            if value.strip()
            for word in (f"--{name.removeprefix('part_')}", value.strip())
        ]
        command = (
            "splice",
            "part",
            self.spec,
            request,
            *options,
            "--who",
            who,
            "--why",
            f"decided by {who} in Airflow",
        )
        made = run_tidegate(StoreAccess.resolve(self.conn_id), self.pipeline, *command)
        self.log.info("%s is %s (%s rows) and %s (%s rows) now: start %s again with one of them", request, made["request"],
                      made["rows"], made["rest"], made["rest_rows"], self.dag_id)  # fmt: skip

    def _record_answer(self, reported: dict[str, Any], approved: bool, who: str) -> None:
        store, request, now = (
            StoreAccess.resolve(self.conn_id).open(),
            reported["request"],
            SYSTEM_CLOCK.wall_ticks(),
        )
        if approved and who in reported["who"]:
            note_splice_event(
                store,
                self.pipeline,
                request,
                "refused",
                who="tidegate",
                at=now,
                because=f"{who} asked for it",
            )
        elif approved and read_splice_request(store, self.pipeline, request).state in OPEN_STATES:
            facts = {
                "state": "approved",
                "decided_by": who,
                "decided_at": now,
                "approved_digest": reported["digest"],
            }
            note_splice_event(store, self.pipeline, request, "approved", who=who, at=now, **facts)
        elif not approved:
            decide_splice_request(
                store,
                self.pipeline,
                request,
                "rejected",
                who=who,
                why="rejected in Airflow",
                at=now,
            )


class MergeSpliceOperator(BaseOperator):
    """Merges what was approved, and nothing else."""

    ui_color = "#d9e8f3"

    def __init__(
        self, *, pipeline: str, spec: str, conn_id: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.conn_id = pipeline, spec, conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Merge; the sealed checkpoint is the task's result.

        May be tried again after a crash at any point.

        Raises:
            ConfigurationError: nobody else than who asked has approved.
            TidegateError: the merge was refused or failed; nothing was changed.
        """
        reported, answer = (context["ti"].xcom_pull(task_ids=task) for task in (REPORT, APPROVE))
        by = str(((answer or {}).get("responded_by_user") or {}).get("id") or "")
        rejected = by and answer["chosen_options"] != [ApprovalOperator.APPROVE]
        if not by or rejected or by in reported["who"]:
            raise ConfigurationError(
                f"the merge is not approved: {_explain_refusal(by, bool(rejected))}",
                code="splice.not_approved",
                pipeline=self.pipeline,
                kept="the request; nothing was merged",
                advice=f"start {self.dag_id} again with this request and let somebody else approve",
            )
        why = f"approved by {by} in {context['run_id']}"
        command = (
            "splice",
            "merge",
            self.spec,
            reported["request"],
            "--digest",
            reported["digest"],
            "--who",
            by,
            "--why",
            why,
        )
        merged = run_tidegate(StoreAccess.resolve(self.conn_id), self.pipeline, *command)
        self.log.info(
            "merged in %s; promised %s, actual %s",
            merged["checkpoint"],
            merged["promised"],
            merged["actual"],
        )
        return {
            name: merged[name] for name in ("request", "checkpoint", "promised", "actual", "again")
        }


def add_splice_tasks(
    *,
    pipeline: str,
    spec: str,
    at_least: int,
    approvers: tuple[str, ...],
    patience: float,
    conn_id: str | None,
) -> None:
    """The three tasks, in the DAG that is being built; `patience` in seconds."""
    report = ReportSpliceOperator(
        task_id=REPORT, pipeline=pipeline, spec=spec, at_least=at_least, conn_id=conn_id
    )
    approve = ApproveSpliceOperator(
        task_id=APPROVE,
        pipeline=pipeline,
        spec=spec,
        approvers=approvers,
        conn_id=conn_id,
        response_timeout=timedelta(seconds=patience),
        retries=2,
        retry_delay=timedelta(seconds=2),
    )
    retry = {"retries": 2, "retry_delay": timedelta(seconds=10)}
    (
        report
        >> approve
        >> MergeSpliceOperator(
            task_id=MERGE, pipeline=pipeline, spec=spec, conn_id=conn_id, **retry
        )
    )


def _explain_refusal(by: str, rejected: bool) -> str:
    if not by:
        return "nobody has answered"
    return f"{by} has rejected it" if rejected else f"{by} has asked for it"


def _format_impact(impact: dict[str, Any], request: dict[str, Any]) -> str:
    """The report in a few lines, and the first changes."""
    origin = request["origin"].replace("_", " ")
    lines = [
        f"{impact['rows']:,} rows from {origin}, asked for by {request['who']}:"
        f" {request['why'] or 'no reason given'}"
    ]
    for table in impact["tables"]:
        counts = ", ".join(
            f"{table[word]:,} {word}"
            for word in ("added", "changed", "removed", "moved")
            if table[word]
        )
        lines.append(
            f"{table['table']}: {counts or 'nothing changes'}, {table['first']} to {table['last']}"
        )
        shown = [c for c in table["changes"] if c["old"]][:5]
        lines += [
            f"    {_identify_change(c)}: {json.dumps(c['old'])} -> {json.dumps(c['new'])}"
            for c in shown
        ]
    cost = impact["cost"]
    lines.append(
        f"cost: {cost['rows_read']:,.0f} rows read, {cost['rows_written']:,.0f} written,"
        f" {cost['seconds']:.1f} s"
    )
    return "\n".join(lines)


def _identify_change(change: dict[str, Any]) -> str:
    """A result by its key and window, a row of a stream by who it is."""
    return (
        str(change["id"])
        if "id" in change
        else f"{json.dumps(change['key'])} {change['window_start']}"
    )
