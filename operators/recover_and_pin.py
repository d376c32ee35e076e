"""Go back to a checkpoint, in steps that can each be repeated.

1. choose and verify the checkpoint; report what would be rewound (a dry run ends here); check the
  approval, if one is needed
2. say that a recovery is under way: nobody else may start the stream
3. stop the driver: ask, SIGTERM, SIGKILL
4. hold the lease and fill the next slot with the fork record: that PUT is the restore
5. say that the stream shall run; its own task launches the driver, or this one does if no task is
  there
6. wait for the first epoch of the new timeline

Who, when, why, from and to stand in the trail of the bucket, also when nothing came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from airflow.sdk import BaseOperator

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.desired_state import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.lease_renewal import LeaseRenewer
from tidegate.checkpoints.manifest import ForkRecord
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.restore import (
    RestoreEvent,
    RestorePlan,
    commit_restore,
    plan_restore,
    record_restore_event,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.operators.driver_launch import make_launcher
from tidegate.operators.driver_shutdown import stop_driver
from tidegate.operators.store_access import StoreAccess

# Epochs sealed between an impact report and its approval, beyond which the report is no longer
# about it.
MAX_APPROVAL_DRIFT: Final = 500

_EPOCH_POLL_SECONDS = 1.0  # seconds
_ACTIVE_DAG_RUN_STATES = ["queued", "running"]


class RecoverOperator(BaseOperator):
    """Restores a pipeline to a checkpoint and sees it running again.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file.
        stream_dag: id of the DAG that supervises it.
        checkpoint: `latest`, `latest_healthy`, a pin, or an id; a template, by default the run's
            param.
        reason: kept with the restore; a template.
        dry_run_only: verify and report; a template that renders to `True` or `False`.
        approval: id of the task whose answer is needed, and of the one that made its report; None
            to restore at once.
        submit: as the stream's.
        conn_id: Airflow connection of the store; None for the environment.
        first_epoch_timeout: seconds to wait for the first epoch after the restore.
    """

    ui_color = "#f3d9cf"
    template_fields = ("checkpoint", "reason", "dry_run_only")

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str,
        stream_dag: str,
        checkpoint: str = "{{ params.checkpoint }}",
        reason: str = "{{ params.reason }}",
        dry_run_only: str = "{{ params.dry_run }}",
        approval: tuple[str, str] | None = None,
        submit: Mapping[str, Any] | None = None,
        conn_id: str | None = None,
        first_epoch_timeout: float = 300.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.stream_dag, self.conn_id = (
            pipeline,
            spec,
            stream_dag,
            conn_id,
        )
        self.checkpoint, self.reason, self.dry_run_only = checkpoint, reason, dry_run_only
        self.first_epoch_timeout, self.approval, self.submit = first_epoch_timeout, approval, submit

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the steps; the report and the outcome are the task's result."""
        access = StoreAccess.resolve(self.conn_id)
        store = access.open()
        log = SlotLog(store, self.pipeline)
        request, who = str(context["run_id"]), get_requester(context)
        fork = _find_fork_of_run(log, request)
        if fork is not None:  # a retry after the PUT must not restore twice
            self._finish_interrupted_restore(store, fork)
        else:
            # Step 1.
            asked = self._check_approval(context, log, who) if self.approval else None
            target = choose_checkpoint(log, asked["target"] if asked else self.checkpoint)
            self.log.info("%s verified: everything it needs is there and whole", target)
            plan = plan_restore(log, target)
            self.log.info("%s", format_impact_report(plan))
            if self.dry_run_only == "True":
                self.log.info("dry run: nothing was changed")
                return {"pipeline": self.pipeline, "dry_run": True, "plan": plan.model_dump()}
            record_restore_event(
                store,
                self.pipeline,
                request,
                RestoreEvent.ASKED,
                who=who,
                target=plan.target,
                head=plan.head,
                why=self.reason,
            )
            why = " ".join(
                [
                    self.reason or f"run {request}",
                    *([f"(approved by {asked['by']})"] if asked else []),
                ]
            )
            self._restore_and_note(store, log, target, request, who, why)
        # Steps 5 and 6.
        head = log.head()
        if context["ti"].get_dr_count(dag_id=self.stream_dag, states=_ACTIVE_DAG_RUN_STATES) == 0:
            launched = make_launcher(self.submit).launch(self.pipeline, self.spec, access, "latest")
            self.log.info(
                "no run of %s is active: launched a driver here, log %s",
                self.stream_dag,
                launched.log,
            )
        seconds = self._await_first_epoch(log, head.timeline)
        fork = fork or _find_fork_of_run(log, request)
        slot = fork.fork_slot if fork else None
        return {
            "pipeline": self.pipeline,
            "timeline": head.timeline,
            "fork_slot": slot,
            "seconds": seconds,
        }

    def _check_approval(self, context: Any, log: SlotLog, who: str) -> dict[str, Any]:
        """What was asked and who approved it, if that approval is good for what the stream is now."""
        assert self.approval is not None  # noqa: S101 - the caller has looked
        answer, reported = (context["ti"].xcom_pull(task_ids=task) for task in self.approval)
        person = (answer or {}).get("responded_by_user") or {}
        by = str(person.get("id") or "")
        refused = _find_refusal_reason(log, reported["bound"], who, by)
        if refused is not None:
            record_restore_event(
                log.store,
                self.pipeline,
                str(context["run_id"]),
                RestoreEvent.REFUSED,
                who="tidegate",
                detail=refused,
            )
            raise ConfigurationError(
                f"the restore is not approved: {refused}",
                code="recover.not_approved",
                pipeline=self.pipeline,
                kept="the running stream, untouched",
                advice=f"start {self.dag_id} again and let somebody else than {who} approve",
            )
        self.log.info("asked by %s, approved by %s", who, by)
        return {"target": reported["target"], "by": by}

    def _restore_and_note(
        self, store: Store, log: SlotLog, target: CheckpointId, request: str, who: str, why: str
    ) -> None:
        try:
            self._restore_checkpoint(store, log, target, request, who, why)
        except Exception as error:
            record_restore_event(
                store,
                self.pipeline,
                request,
                RestoreEvent.FAILED,
                who=who,
                detail=str(error)[:1000],
            )
            raise
        record_restore_event(
            store, self.pipeline, request, RestoreEvent.RESTORED, who=who, detail=why
        )

    def _finish_interrupted_restore(self, store: Store, fork: ForkRecord) -> None:
        """What a try that was killed after the PUT did not come to.

        Its recovery would stand for a quarter of an hour.
        """
        before = read_desired_state(store, self.pipeline)
        if (before.state, before.who, before.why) == (DesiredState.RECOVERING, fork.who, fork.why):
            set_desired_state(store, self.pipeline, DesiredState.RUN, who=fork.who, why=fork.why)
        record_restore_event(
            store,
            self.pipeline,
            fork.request_id,
            RestoreEvent.RESTORED,
            who=fork.who,
            detail=fork.why,
        )

    def _restore_checkpoint(
        self, store: Store, log: SlotLog, target: CheckpointId, request: str, who: str, why: str
    ) -> None:
        # Step 2.
        before = read_desired_state(store, self.pipeline).state
        after = DesiredState.STOPPED if before is DesiredState.STOPPED else DesiredState.RUN
        set_desired_state(store, self.pipeline, DesiredState.RECOVERING, who=who, why=why)
        try:
            # Step 3.
            self.log.info(
                "%s", stop_driver(store, self.pipeline, who=who, why=why, say=self.log.info)
            )
            # Step 4: the driver may have sealed more while it drained, so the plan is made anew
            # before it is carried out.
            lease = Lease.acquire(
                store, self.pipeline, ProcessIdentity.this_process(f"recover-{request}"[:60])
            )
            try:
                with LeaseRenewer(lease) as keeper:
                    keeper.announce_step("restore", 300.0)
                    sealed = commit_restore(
                        log, lease, plan_restore(log, target), request_id=request, who=who, why=why
                    )
            finally:
                lease.release()
            self.log.info(
                "restored %s: fork in slot %s of timeline %s", target, sealed.slot, sealed.timeline
            )
            after = DesiredState.RUN
        finally:
            # After a failure it is as before: a running stream goes on where it stood instead of
            # staying down unattended.
            set_desired_state(store, self.pipeline, after, who=who, why=why)

    def _await_first_epoch(self, log: SlotLog, timeline: int) -> float:
        begun = SYSTEM_CLOCK.monotonic()
        while SYSTEM_CLOCK.monotonic() - begun < self.first_epoch_timeout:
            head = log.head()
            if head.timeline > timeline or (head.timeline == timeline and head.fork is None):
                seconds = SYSTEM_CLOCK.monotonic() - begun
                self.log.info(
                    "first epoch of timeline %s sealed after %.1f s: %s",
                    timeline,
                    seconds,
                    head.checkpoint,
                )
                return round(seconds, 1)
            SYSTEM_CLOCK.sleep(_EPOCH_POLL_SECONDS)
        raise TransientError(
            f"restored, but no epoch was sealed within {self.first_epoch_timeout:.0f} s",
            code="recover.no_epoch",
            pipeline=self.pipeline,
            kept="the restore is done and stays",
            advice=f"see the run of {self.stream_dag} and the driver's log",
        )


def choose_checkpoint(log: SlotLog, text: str) -> CheckpointId:
    """The checkpoint somebody named, verified.

    Raises:
        ConfigurationError: it names none.
        PoisonError, TransientError: it is damaged; the store could not say.
    """
    checkpoint = CheckpointCatalog(log).resolve(text)
    result = verify_checkpoint(log, checkpoint)
    if result.verdict is not CheckpointVerdict.HEALTHY:
        found = "; ".join(f"{f.key}: {f.problem.value}" for f in result.findings[:5])
        kind = TransientError if result.verdict is CheckpointVerdict.UNKNOWN else PoisonError
        raise kind(
            f"{checkpoint} is {result.verdict.value}: {found}",
            code="recover.unfit",
            pipeline=log.pipeline,
            kept="the running stream, untouched",
            advice="choose another checkpoint: tidegate checkpoints list",
        )
    return checkpoint


def get_requester(context: Any) -> str:
    """Who started the run."""
    return str(getattr(context.get("dag_run"), "triggering_user_name", None) or "airflow")


def format_impact_report(plan: RestorePlan) -> str:
    """The impact report, for the task log and for whoever approves."""
    lines = [
        f"Impact of restoring {plan.pipeline} to {plan.target or 'the beginning'}",
        f"  head now         {plan.head} (slot {plan.slot} of timeline {plan.timeline})",
        f"  epochs rewound   {plan.epochs_rewound}"
        + (f", regained {plan.epochs_regained}" if plan.epochs_regained else ""),
        f"  rows taken back  {_format_counts(plan.rows)}",
        f"  per table        {_format_counts(plan.tables)}",
        f"  window results   {_format_counts(plan.windows)}",
    ]
    if plan.spec_changed:
        lines.append("  note             the spec has changed since that checkpoint")
    return "\n".join(lines)


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"


def _find_fork_of_run(log: SlotLog, request: str) -> ForkRecord | None:
    """The record of the restore that this run made."""
    return next((fork for fork in log.list_forks() if fork.request_id == request), None)


def _find_refusal_reason(log: SlotLog, bound: dict[str, Any], who: str, by: str) -> str | None:
    """Why an approval does not count; None when it does."""
    if not by:
        return "nobody has answered"
    if by == who:
        return f"{by} has asked for it and may not approve it as well"
    head = log.head()
    if head.timeline != bound["timeline"]:
        return "the stream was restored to something else after the report"
    if head.slot - bound["slot"] > MAX_APPROVAL_DRIFT:
        return (
            f"{head.slot - bound['slot']} epochs were sealed after the report, it holds for"
            f" {MAX_APPROVAL_DRIFT}"
        )
    return None


# Keep a checkpoint under a name, or give the name up. A run of its own, so that it stands in
# Airflow's audit log.


class PinOperator(BaseOperator):
    """Pins a checkpoint of a pipeline, or unpins it. Trying again is harmless.

    Args:
        pipeline: name of the pipeline.
        action: `pin` or `unpin`; a template, as are the others; by default the run's params.
        checkpoint: `latest`, `latest_healthy`, another pin, or an id; not looked at by `unpin`.
        name: the name to give or to give up.
        reason: kept with the pin.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#d9e6f3"
    template_fields = ("action", "checkpoint", "name", "reason")

    def __init__(
        self,
        *,
        pipeline: str,
        action: str = "{{ params.action }}",
        checkpoint: str = "{{ params.checkpoint }}",
        name: str = "{{ params.name }}",
        reason: str = "{{ params.reason }}",
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.conn_id = pipeline, conn_id
        self.action, self.checkpoint, self.name, self.reason = action, checkpoint, name, reason

    def execute(self, context: Any) -> dict[str, Any]:
        """Change the pins; what they are afterwards is the task's result.

        Raises:
            ConfigurationError: the name is missing or taken, or the checkpoint is unknown or
                condemned.
            PoisonError: the checkpoint was retired.
        """
        log = SlotLog(StoreAccess.resolve(self.conn_id).open(), self.pipeline)
        roots = RootsFile(log.store, self.pipeline)
        if not self.name:
            raise ConfigurationError(
                "a pin needs a name",
                code="pin.no_name",
                pipeline=self.pipeline,
                advice="start it with a name",
            )
        if self.action == "unpin":
            roots.unpin(self.name)
            self.log.info("%s is no pin any more", self.name)
        else:
            target = CheckpointCatalog(log).resolve(self.checkpoint)
            pin_checkpoint(log, self.name, target, who=get_requester(context), why=self.reason)
            self.log.info("%s is kept as %s", target, self.name)
        return {
            "pipeline": self.pipeline,
            "pins": {name: pin.checkpoint for name, pin in roots.read().pins.items()},
        }
