"""Go back to a checkpoint, in steps that can each be repeated; keep checkpoints; abort barriers.

1. Choose and verify the checkpoint; report what would be rewound (a dry run ends here); check the
   approval if one is needed.
2. Set the desired state to recovering, so that nothing else starts the stream.
3. Stop the driver: request, SIGTERM, SIGKILL.
4. Hold the lease and fill the next slot with the fork record: that PUT is the restore.
5. Set the desired state to run; the stream's own task launches the driver, or this one if no run
   of the stream is active.
6. Wait in the triggerer for the first epoch of the new timeline. If no driver begins, repeat
   step 5.

The audit document in the bucket keeps who, when, why, from and to, also if the restore failed.
"""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from airflow.sdk.exceptions import AirflowSkipException

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import (
    AckOutcome,
    DesiredState,
    RequestKind,
    read_ack,
    read_desired_state,
    set_desired_state,
    submit_request,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, poll_until
from tidegate.checkpoints.lease import Lease, LeaseRenewer
from tidegate.checkpoints.manifest import ForkRecord
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import (
    RestoreAudit,
    RestoreAuditEntry,
    RestoreEvent,
    RestorePlan,
    commit_restore,
    plan_restore,
    record_restore_event,
)
from tidegate.checkpoints.shared_documents import read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import ConfigurationError, FailureClass, TidegateError
from tidegate.jobs.spec.job_spec import SupervisedSpec
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.json_types import JsonObject, JsonView

from .child_processes import rebuild_error
from .driver_launch import launch_driver
from .driver_shutdown import StopOrder, stop_driver
from .errors import (
    ABORT_REFUSED,
    ABORT_UNANSWERED,
    CHECKPOINT_UNFIT,
    NO_EPOCH_AFTER_RESTORE,
    PIN_WITHOUT_NAME,
    RESTORE_NOT_APPROVED,
    RUN_ID_USED,
)
from .pipeline_operator import (
    ACTIVE_RUN_STATES,
    PipelineOperator,
    get_requester,
    render_text,
)
from .trigger import EpochTrigger

# Epochs sealed between an impact report and its approval. With more of them, the report no longer
# describes what the restore would take back.
MAX_APPROVAL_DRIFT = 500

_DRIVER_BEGINS_WITHIN = 10.0  # seconds; a run that watches launches one within a few
_FIRST_EPOCH_WITHIN = 300.0  # seconds to wait for the first epoch after the restore
_EPOCH_POLL_SECONDS = 1.0
_ABORT_TIMEOUT = 60.0  # seconds to wait for the driver's answer
_ANSWERS = (RestoreEvent.APPROVED, RestoreEvent.REJECTED)


class ReportRestoreOperator(PipelineOperator):
    """Verifies the checkpoint and reports what a restore would take back; a dry run ends here.

    Args:
        checkpoint: `latest`, `latest_healthy`, a pin, or an id.
        reason: kept with the restore.
        dry_run_only: verify and report.
    """

    ui_color = "#f3d9cf"
    template_fields = ("checkpoint", "reason", "dry_run_only")
    default_templates: ClassVar = {"dry_run_only": "{{ params.dry_run }}"}
    checkpoint: str
    reason: str
    dry_run_only: str

    def execute(self, context: Any) -> JsonObject:
        """Plan, and note in the trail which checkpoint and head the question is about.

        Raises:
            PoisonError: the checkpoint is damaged or retired.
            ConfigurationError: the checkpoint is unknown or condemned, or no person has started
                the run, so it cannot be checked that another person approves.
            AirflowSkipException: it is a dry run.
        """
        log, who, run = self.open_log(), get_requester(context), str(context["run_id"])
        if context["dag_run"].triggering_user_name is None and self.dry_run_only != "True":
            reason = "no person has started this run, so no other person can approve it"
            raise RESTORE_NOT_APPROVED(
                pipeline=self.pipeline, reason=reason, dag_id=self.dag_id, requester="the starter"
            )
        audit = read_restore_audit(log, run)
        # A repeated report stays with its first checkpoint: a person may be looking at it.
        asked = audit.target if audit is not None and audit.bound else self.checkpoint
        plan = plan_restore(log, choose_checkpoint(log, asked), spec=self._read_spec())
        self.log.info("%s", format_impact_report(plan))
        if self.dry_run_only == "True":
            raise AirflowSkipException("dry run: nothing was changed, no one is asked")
        self._record_request(log, run, who, plan, bound=(plan.timeline, plan.slot))
        return {"target": plan.target, "who": who}

    def _read_spec(self) -> SupervisedSpec | None:
        """Read the spec, whose present word about sinks counts; None if it cannot be read."""
        with suppress(ConfigurationError, OSError):
            return load_any_spec(Path(self.spec))
        return None

    def _record_request(
        self, log: SlotLog, run: str, who: str, plan: RestorePlan, **facts: Any
    ) -> RestoreAudit:
        facts |= {"target": plan.target, "head": plan.head, "why": self.reason}
        return self._record(log, run, RestoreEvent.ASKED, who, **facts)

    def _record(
        self, log: SlotLog, run: str, what: RestoreEvent, who: str, detail: str = "", **facts: Any
    ) -> RestoreAudit:
        """Add a line to the trail of a run, and return the trail."""
        return record_restore_event(
            log.store, self.pipeline, run, what, who=who, detail=detail, **facts
        )


class RecoverOperator(ReportRestoreOperator):
    """Restores a pipeline to a checkpoint and waits until it runs again."""

    def execute(self, context: Any) -> JsonObject:
        """Run the steps; timeline, fork and seconds are the task's result, of a dry run the plan.

        If the run has restored before and is tried again, only the steps after the restore are run.

        Raises:
            ConfigurationError: the approval is missing or does not hold, the checkpoint is unknown
                or condemned, a sink cannot follow, or another run with this id has restored.
            PoisonError: the checkpoint is damaged or retired.
            TransientError: the store did not answer.
        """
        log = self.open_log()
        request = str(context["run_id"])
        # A dry run never restores, so it has nothing to go on with.
        fork = None if self.dry_run_only == "True" else _find_fork_of_run(log, request)
        if fork is not None:  # a retry after the PUT must not restore twice
            self._refuse_other_restore(log, fork, get_requester(context))
            # Do what a try that was killed after the PUT left out. Otherwise the stream would stay
            # in recovery until the sweep gives it up.
            desired = read_desired_state(log.store, self.pipeline)
            by_fork = (DesiredState.RECOVERING, fork.who, fork.why)
            if (desired.state, desired.who, desired.why) == by_fork:
                set_desired_state(
                    log.store, self.pipeline, DesiredState.RUN, who=fork.who, why=fork.why
                )
            self._record(log, fork.request_id, RestoreEvent.RESTORED, fork.who, fork.why)
        else:
            plan = self._restore(context, log, request)
            if plan is not None:
                return {
                    "pipeline": self.pipeline,
                    "dry_run": True,
                    "plan": plan.model_dump(mode="json"),
                }
            fork = _find_fork_of_run(log, request)
        launched = self._launch_if_unwatched(context)
        result = {
            "pipeline": self.pipeline,
            "timeline": log.head().timeline,
            "fork_slot": fork.fork_slot if fork else None,
        }
        return {**result, "seconds": self._await_first_epoch(result, relooks=not launched)}

    def resume_without_epoch(self, context: Any, event: JsonView, result: JsonView) -> None:
        """Launch a driver if none has begun, and wait again; Airflow's database has this name.

        A run of the stream that was stopped just before the restore counts as active for a moment
        longer, and launches nothing.

        Raises:
            TransientError: no epoch was sealed in time; the restore itself is done.
        """
        if "driverless" not in event:
            self.fail_without_epoch(context, event)
        self._launch_if_unwatched(context)
        self._await_first_epoch(result)

    def fail_without_epoch(self, context: Any, event: JsonView) -> None:
        """Fail: no epoch was sealed in time. Airflow's database has this name.

        Raises:
            TransientError: always; the restore itself is done.
        """
        raise NO_EPOCH_AFTER_RESTORE(
            pipeline=self.pipeline,
            seconds=event["seconds"],
            stream_dag=f"{self.pipeline}.stream",
        )

    def _refuse_other_restore(self, log: SlotLog, fork: ForkRecord, who: str) -> None:
        """Refuse a run whose id another run had before it, and which asks for something else.

        Airflow lets an id be used again when its run was deleted, or its database lost.
        """
        # A condition such as `latest` finds another checkpoint after the restore than before it.
        asked = fork.recover_to
        if self.checkpoint not in ("latest", "latest_healthy"):
            asked = str(CheckpointCatalog(log).resolve(self.checkpoint))
        if (asked, who) != (fork.recover_to, fork.who):
            raise RUN_ID_USED(
                pipeline=self.pipeline,
                run=fork.request_id,
                checkpoint=fork.recover_to,
                who=fork.who,
                dag_id=self.dag_id,
            )

    def _restore(self, context: Any, log: SlotLog, request: str) -> RestorePlan | None:
        """Steps 1 to 4; returns the plan of a dry run."""
        who = get_requester(context)
        why, checkpoint = self.reason or f"run {request}", self.checkpoint
        if self.supervision.approval:
            checkpoint, approver = self._check_approval(log, request, who)
            why = f"{why} (approved by {approver})"
        target = choose_checkpoint(log, checkpoint)
        self.log.info("%s verified: everything it needs is there and whole", target)
        plan = plan_restore(log, target, spec=self._read_spec())
        self.log.info("%s", format_impact_report(plan))
        if self.dry_run_only == "True":
            self.log.info("dry run: nothing was changed")
            return plan
        plan.require_sinks_follow()  # before the driver is stopped for nothing
        before = read_desired_state(log.store, self.pipeline).state
        # A try that was killed left `recovering`. What was desired before it is in the trail.
        recovering = before is DesiredState.RECOVERING
        audit = self._record_request(
            log, request, who, plan, desired=None if recovering else before.value
        )
        # After a failure the desired state is as before, so that a running stream goes on from its
        # head and does not stay down unattended.
        stopped = audit.desired == DesiredState.STOPPED
        otherwise = DesiredState.STOPPED if stopped else DesiredState.RUN
        try:
            self._restore_checkpoint(
                log, target, request=request, who=who, why=why, after=otherwise
            )
        except Exception as error:
            self._record(log, request, RestoreEvent.FAILED, who, str(error)[:1000])
            raise
        self._record(log, request, RestoreEvent.RESTORED, who, why)
        return None

    def _check_approval(self, log: SlotLog, run: str, who: str) -> tuple[str, str]:
        """The approved checkpoint and the approver, if the approval holds for the present head."""
        audit = read_restore_audit(log, run) or RestoreAudit(request=run)
        answers = [s for s in audit.steps if s.what in _ANSWERS]
        # The newest answer decides. An answer of the asker does not count, so that it cannot undo
        # a rejection either.
        others = [s for s in answers if who not in (s.who, s.detail)]
        answer = next(reversed(others or answers), None)
        refusal = _find_refusal_reason(log, audit.bound, who, answer, self.supervision)
        if refusal is not None or answer is None:
            refusal = refusal or "no one has answered"
            self._record(log, run, RestoreEvent.REFUSED, "tidegate", refusal)
            raise RESTORE_NOT_APPROVED(
                pipeline=self.pipeline, reason=refusal, dag_id=self.dag_id, requester=who
            )
        self.log.info("asked by %s, approved by %s", who, answer.who)
        return audit.target, answer.who

    def _restore_checkpoint(
        self,
        log: SlotLog,
        target: CheckpointId,
        *,
        request: str,
        who: str,
        why: str,
        after: DesiredState,
    ) -> None:
        """Steps 2 to 4, and the first half of step 5; `after` is desired after a failure."""
        store = log.store
        # First of all, or the trigger and the sweep would replace the driver that is stopped next.
        set_desired_state(store, self.pipeline, DesiredState.RECOVERING, who=who, why=why)
        try:
            stopped = stop_driver(store, self.pipeline, StopOrder(who, why), say=self.log.info)
            self.log.info("%s", stopped)
            holder = ProcessIdentity.this_process(f"recover-{request}"[:60])
            lease = Lease.acquire(store, self.pipeline, holder)
            try:
                # A restore may take longer than the lease's TTL, so a thread renews it.
                with LeaseRenewer(lease) as keeper:
                    keeper.announce_step("restore", 300.0)
                    # The driver may have sealed more while it drained, so the plan is made again.
                    plan = plan_restore(log, target, spec=self._read_spec())
                    sealed = commit_restore(log, lease, plan, request_id=request, who=who, why=why)
            finally:
                # Also after a failure: the next driver need not wait until the lease expires.
                lease.release()
            self.log.info(
                "restored %s: fork in slot %s of timeline %s", target, sealed.slot, sealed.timeline
            )
            after = DesiredState.RUN
        finally:
            set_desired_state(store, self.pipeline, after, who=who, why=why)

    def _launch_if_unwatched(self, context: Any) -> bool:
        """Step 5: launch a driver, and return True, if no run of the stream is active to do it."""
        stream_dag = f"{self.pipeline}.stream"
        if context["ti"].get_dr_count(dag_id=stream_dag, states=ACTIVE_RUN_STATES) > 0:
            return False
        # `latest` is the restored checkpoint: the fork record is the head of the log.
        launched = launch_driver(
            self.pipeline,
            self.spec,
            self.resolve_access(),
            "latest",
            submit=self.supervision.submit,
        )
        self.log.info(
            "no run of %s is active: launched a driver here, log %s", stream_dag, launched.log
        )
        return True

    def _await_first_epoch(self, result: JsonView, *, relooks: bool = False) -> float:
        """Step 6, in the triggerer, which ends the task; with `relooks` it may wake the task.

        A task that waited here would keep the slot that the stream's own task needs in order to
        launch the driver: as many restores at once as Airflow has slots would wait for each other.
        """
        trigger = EpochTrigger(
            pipeline=self.pipeline,
            timeline=result["timeline"],
            result=dict(result),
            patience=_FIRST_EPOCH_WITHIN,
            conn_id=self.conn_id,
            begins_within=_DRIVER_BEGINS_WITHIN if relooks else None,
        )
        self.defer(
            trigger=trigger, method_name="resume_without_epoch", kwargs={"result": dict(result)}
        )
        return 0.0  # never reached: defer leaves by an exception


def choose_checkpoint(log: SlotLog, text: str) -> CheckpointId:
    """Resolve what a person wrote to a checkpoint, and verify it.

    Raises:
        ConfigurationError: `text` names no checkpoint, or a condemned one.
        PoisonError: the checkpoint is damaged or retired.
        TransientError: the store could not answer.
    """
    checkpoint = CheckpointCatalog(log).resolve(text)
    result = verify_checkpoint(log, checkpoint)
    if result.verdict is CheckpointVerdict.HEALTHY:
        # Here, because the restore refuses it only when the driver has been stopped.
        RootsFile(log.store, log.pipeline).require_not_condemned(checkpoint)
        return checkpoint
    findings = "; ".join(f"{f.key}: {f.problem.value}" for f in result.findings[:5])
    unfit: TidegateError = CHECKPOINT_UNFIT(
        pipeline=log.pipeline, checkpoint=checkpoint, verdict=result.verdict, findings=findings
    )
    if result.verdict is CheckpointVerdict.UNKNOWN:
        # The store did not answer, so a retry may find the checkpoint whole.
        raise rebuild_error({**unfit.as_dict(), "class": FailureClass.TRANSIENT.value})
    raise unfit


def format_impact_report(plan: RestorePlan) -> str:
    """Return the impact report, for the task log and for the person who approves."""
    return render_text("restore_impact", plan=plan)


def _find_fork_of_run(log: SlotLog, request: str) -> ForkRecord | None:
    """The record of the restore that this run made."""
    return next((fork for fork in log.list_forks() if fork.request_id == request), None)


def read_restore_audit(log: SlotLog, run: str) -> RestoreAudit | None:
    """Return the trail of one run of the recover DAG; None if it has none."""
    return read_document(log.store, log.layout.restore_audit_key(run), RestoreAudit)[0]


def _find_refusal_reason(
    log: SlotLog,
    bound: tuple[int, int] | None,
    who: str,
    answer: RestoreAuditEntry | None,
    supervision: SupervisionSpec,
) -> str | None:
    """Why an answer is not a valid approval; None if it is.

    See docs/decisions/0061-an-approval-covers-one-timeline-and-500-epochs.md.
    """
    if answer is None or bound is None:
        return "no one has answered"
    # With some logins (FAB, Keycloak) a user's id is not the name; `detail` has such an id.
    names = {answer.who, answer.detail}
    if answer.what is RestoreEvent.REJECTED:
        return f"{answer.who} has rejected it"
    if who in names:
        return f"{answer.who} has asked for it and may not approve it as well"
    if supervision.approvers and not names.intersection(supervision.approvers):
        return f"{answer.who} is not one of the approvers"
    valid_for = supervision.approval_timeout
    if valid_for is not None and SYSTEM_CLOCK.wall_ticks() - answer.at > valid_for:
        longest = timedelta(microseconds=valid_for)
        return f"the approval by {answer.who} is older than {longest}"
    head = log.head()
    if head.timeline != bound[0]:
        return "the stream was restored to something else after the report"
    drift = head.slot - bound[1]
    if drift > MAX_APPROVAL_DRIFT:
        return f"{drift} epochs were sealed after the report, it holds for {MAX_APPROVAL_DRIFT}"
    return None


class PinOperator(PipelineOperator):
    """Pins a checkpoint of a pipeline, or unpins it. Trying again is harmless.

    It has its own DAG so that Airflow's audit log shows who changed pins.

    Args:
        action: `pin` or `unpin`.
        checkpoint: `latest`, `latest_healthy`, another pin, or an id; `unpin` ignores it.
        name: of the pin.
        reason: kept with the pin.
    """

    ui_color = "#d9e6f3"
    template_fields = ("action", "checkpoint", "name", "reason")
    action: str
    checkpoint: str
    name: str
    reason: str

    def execute(self, context: Any) -> JsonObject:
        """Change the pins; all pins of the pipeline are the task's result.

        Raises:
            ConfigurationError: the name is missing or taken, or the checkpoint is unknown or
                condemned.
            PoisonError: the checkpoint was retired.
        """
        log = self.open_log()
        roots = RootsFile(log.store, self.pipeline)
        if not self.name:
            raise PIN_WITHOUT_NAME(pipeline=self.pipeline)
        if self.action == "unpin":
            roots.unpin(self.name)
            self.log.info("the pin %s was removed", self.name)
        else:
            target = CheckpointCatalog(log).resolve(self.checkpoint)
            pin_checkpoint(log, self.name, target, who=get_requester(context), why=self.reason)
            self.log.info("%s is kept as %s", target, self.name)
        pins = {name: pin.checkpoint for name, pin in roots.read().pins.items()}
        return {"pipeline": self.pipeline, "pins": pins}


class AbortBarrierOperator(PipelineOperator):
    """Asks the driver to abort an open barrier, so that the rows behind it flow on.

    Trying again is harmless: a run makes one request.

    Args:
        barrier: its id.
        reason: kept with the request.
    """

    ui_color = "#f0e3c8"
    template_fields = ("barrier", "reason")
    barrier: str
    reason: str

    def execute(self, context: Any) -> JsonObject:
        """Ask, and wait for the answer, which is the task's result.

        Raises:
            ConfigurationError: the driver has refused.
            TransientError: no driver has answered in time; the next one still aborts the barrier
                within a day.
        """
        store = self.resolve_access().open()
        request = submit_request(
            store,
            self.pipeline,
            RequestKind.ABORT_BARRIER,
            who=get_requester(context),
            why=self.reason,
            barrier=int(self.barrier),
            # One request per run, so that a task that is tried again asks once.
            request_id=f"abort-{context['run_id']}"[:200],
        )
        # Polled, because the acknowledgement is an object that the driver writes.
        answer = poll_until(
            lambda: read_ack(store, self.pipeline, request.id),
            _ABORT_TIMEOUT,
            _EPOCH_POLL_SECONDS,
            SYSTEM_CLOCK,
        )
        if answer is None:
            raise ABORT_UNANSWERED(
                pipeline=self.pipeline, barrier=self.barrier, seconds=_ABORT_TIMEOUT
            )
        if answer.outcome is not AckOutcome.APPLIED:
            raise ABORT_REFUSED(
                pipeline=self.pipeline,
                barrier=self.barrier,
                outcome=answer.outcome.value,
                detail=answer.detail,
            )
        self.log.info("barrier %s was aborted in %s", self.barrier, answer.checkpoint)
        return answer.model_dump(mode="json")
