"""The supervising task of a stream.

Adopt or launch a driver, sleep while a trigger watches, act on what it saw.

    execute   the stream shall run: adopt the live driver, wherever it came from, else launch one;
        then defer
    resume    lost, stalled     launch anew, without using up a retry of the task, as long as
    checkpoints go on
              failed            poison and configuration fail the task at once; transient ones are
              tried again fenced            somebody else drives: adopt that one stopped, finished
              end green, if this was intended; else launch anew live              this run is old
              enough: the next one adopts the driver, so that history stays readable

The truth stays in the bucket (lease, log, desired.json); nothing here has to survive but what the
trigger carries, and that the run said `run` once, which Airflow's task state store keeps from try
to try. A bucket that has forgotten the stream after that is a fault, never a stop: somebody wiped
it, or put another in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import DagRunTriggerException
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.desired_state import (
    DesiredDocument,
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.driver_reports import DriverLog, delete_old_logs, read_log_tail
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.pipeline_identity import read_identity
from tidegate.checkpoints.shared_documents import read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.operators import airflow_metrics
from tidegate.operators.child_processes import DriverLostError, build_retry_policy, rebuild_error
from tidegate.operators.driver_launch import (
    LaunchedDriver,
    make_launcher,
    send_signal,
    tail_log_file,
)
from tidegate.operators.driver_shutdown import find_stop_request, terminate_driver
from tidegate.operators.liveness import LivenessLimits, Observation, StreamLiveness, needs_person
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.trigger import StreamTrigger

_RUN_DECLARED_KEY = "said_run"  # key in the task state store

MAX_RELAUNCHES = (
    3  # in a row without a new checkpoint; then Airflow's own retries and their delay take over
)


@dataclass(frozen=True)
class RelaunchBudget:
    """How often the driver was launched since the last progress.

    Attributes:
        checkpoint: newest checkpoint when it was last launched.
        relaunches: in a row without a newer one.
    """

    checkpoint: str | None = None
    relaunches: int = 0

    def after_loss(self, newest: str | None) -> RelaunchBudget:
        """The budget after one more loss."""
        if newest != self.checkpoint:
            return RelaunchBudget(newest, 1)
        return replace(self, relaunches=self.relaunches + 1)

    @property
    def exhausted(self) -> bool:
        """Launching again by ourselves makes no sense."""
        return self.relaunches > MAX_RELAUNCHES


@dataclass(frozen=True)
class RunMemory:
    """What the run knows of itself, through all of its resumes.

    Attributes:
        uid: identity of the pipeline in the bucket; None before its first driver has made one.
        due: when the next run takes over, in ticks; None for never.
    """

    uid: str | None = None
    due: int | None = None


class StreamOperator(BaseOperator):
    """Runs a pipeline's driver and stays with it until the driver itself says that it is done.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file, as the workers see it.
        recover_to: `latest`, `latest_healthy` or a checkpoint id.
        conn_id: Airflow connection of the store; None for the environment (`TIDEGATE_STORE`).
        stall_after: seconds without a finished step that count as stalled.
        start_timeout: seconds from launch to the lease.
        rotate_after: seconds after which the next run takes over the driver; None for one endless
            run.
        submit: arguments of `SubmitLauncher`, to launch by spark-submit; None for a process on the
            worker's host.
    """

    ui_color = "#d7ecf2"
    template_fields = ("recover_to",)

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str,
        recover_to: str = "latest",
        conn_id: str | None = None,
        stall_after: float = 120.0,
        start_timeout: float = 180.0,
        rotate_after: float | None = None,
        submit: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("retry_delay", timedelta(seconds=5))
        kwargs.setdefault("retry_policy", build_retry_policy(kwargs["retry_delay"]))
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.recover_to, self.conn_id = (
            pipeline,
            spec,
            recover_to,
            conn_id,
        )
        self.stall_after, self.start_timeout, self.rotate_after = (
            stall_after,
            start_timeout,
            rotate_after,
        )
        self.submit = submit

    def execute(self, context: Any) -> dict[str, Any]:
        """Adopt or launch, then defer."""
        access = StoreAccess.resolve(self.conn_id)
        store = access.open()
        desired, memory = (
            read_desired_state(store, self.pipeline).state,
            context["task_state_store"],
        )
        # A try that Airflow ended before it came here said nothing: then this one is the first.
        if (
            desired is DesiredState.STOPPED
            and _is_automatic_retry(context["ti"], self.retries or 0)
            and memory.get(_RUN_DECLARED_KEY)
        ):
            refuse_wiped_bucket(store, self.pipeline, RunMemory())
            return self._end_run("the stream was stopped while this task waited for its retry")
        if desired is not DesiredState.RECOVERING:
            set_desired_state(
                store,
                self.pipeline,
                DesiredState.RUN,
                who=_get_requester(context),
                why=f"run {context['run_id']}",
            )
        memory.set(_RUN_DECLARED_KEY, True, retention=NEVER_EXPIRE)
        due = (
            None
            if self.rotate_after is None
            else SYSTEM_CLOCK.wall_ticks() + round(self.rotate_after * 1e6)
        )
        return self._adopt_or_launch(
            access,
            store,
            RelaunchBudget(_read_newest_checkpoint(store, self.pipeline)),
            RunMemory(due=due),
        )

    def resume(
        self,
        context: Any,
        event: Mapping[str, Any],
        launched: dict[str, Any] | None,
        budget: dict[str, Any],
        past: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Act on what the trigger saw."""
        seen, known = Observation.from_dict(event), RunMemory(**(past or {}))
        access = StoreAccess.resolve(self.conn_id)
        store = access.open()
        self.log.info("%s: %s", seen.state.value, seen.why)
        refuse_wiped_bucket(store, self.pipeline, known)
        if seen.state is StreamLiveness.LIVE:
            return self._hand_over_driver(context, seen.why)
        process = LaunchedDriver.from_dict(launched) if launched else None
        self._show_driver_log(store, process)
        if seen.state is StreamLiveness.FINISHED:
            set_desired_state(
                store, self.pipeline, DesiredState.STOPPED, who="airflow", why=seen.why
            )
            return self._end_run(seen.why)
        request = (
            find_stop_request(store, self.pipeline, seen.token)
            if seen.state is StreamLiveness.STOPPED
            else None
        )
        if request is not None:
            set_desired_state(
                store, self.pipeline, DesiredState.STOPPED, who=request.who, why=request.why
            )
        if read_desired_state(store, self.pipeline).state is DesiredState.STOPPED:
            return self._end_run(f"the stream is meant to be stopped, and {seen.why}")
        if needs_person(seen):
            error = rebuild_error(seen.error)
            self.log.error("%s", error)
            raise error
        left = RelaunchBudget(**budget).after_loss(_read_newest_checkpoint(store, self.pipeline))
        if left.exhausted:
            raise DriverLostError(
                f"{seen.why}; launched {MAX_RELAUNCHES + 1} times without a new checkpoint",
                code="airflow.driver_lost",
                pipeline=self.pipeline,
                kept="everything sealed so far",
                advice=(
                    "read the driver's log:"
                    f" {process.log if process else 'on the host that ran it'}"
                ),
            )
        if seen.state is not StreamLiveness.FAILED:
            self._remove_wedged_driver(store, process)
        return self._adopt_or_launch(access, store, left, known)

    def _hand_over_driver(self, context: Any, why: str) -> dict[str, Any]:
        """End this run while the driver goes on.

        The next run, queued before this one ends, adopts it.
        """
        if context["ti"].get_dr_count(dag_id=self.dag_id, states=["queued"]) > 0:
            return self._end_run(f"{why}; another run is queued already")
        raise DagRunTriggerException(
            trigger_dag_id=self.dag_id,
            dag_run_id=f"rotated__{datetime.now(UTC).isoformat()}",
            conf=None,
            reset_dag_run=False,
            skip_when_already_exists=False,
            wait_for_completion=False,
            allowed_states=[],
            failed_states=[],
            poke_interval=1,
            deferrable=False,
            note=f"{why}: took over from {context['run_id']}",
        )

    def _adopt_or_launch(
        self, access: StoreAccess, store: Store, budget: RelaunchBudget, past: RunMemory
    ) -> dict[str, Any]:
        past = replace(past, uid=past.uid or read_identity(store, self.pipeline))
        lease = read_lease(store, self.pipeline)
        if lease is not None and not lease.is_free and lease.holder is not None:
            self.log.info(
                "adopting the driver with pid %s on %s, token %s",
                lease.holder.pid,
                lease.holder.host,
                lease.token,
            )
            airflow_metrics.record_adoption(self.pipeline)
            return self._defer_to_trigger(None, lease.token, budget, past)
        if read_desired_state(store, self.pipeline).state is DesiredState.RECOVERING:
            self.log.info("a recovery is under way: waiting for its end")
            return self._defer_to_trigger(None, lease.token if lease else 0, budget, past)
        self.log.info(
            "launching a driver from %s (recover_to: %s)",
            budget.checkpoint or "the beginning",
            self.recover_to,
        )
        launched = make_launcher(self.submit).launch(
            self.pipeline, self.spec, access, self.recover_to
        )
        self.log.info("launched attempt %s, log %s", launched.attempt, launched.log)
        airflow_metrics.record_launch(self.pipeline, replaces=budget.relaunches > 0)
        return self._defer_to_trigger(launched, lease.token + 1 if lease else 1, budget, past)

    def _defer_to_trigger(
        self, launched: LaunchedDriver | None, floor: int, budget: RelaunchBudget, past: RunMemory
    ) -> dict[str, Any]:
        process = launched.as_dict() if launched else None
        rules = asdict(
            LivenessLimits(start_timeout=self.start_timeout, stall_after=self.stall_after)
        )
        trigger = StreamTrigger(
            pipeline=self.pipeline,
            floor=floor,
            conn_id=self.conn_id,
            launched=process,
            rules=rules,
            due=past.due,
        )
        remembered = {"launched": process, "budget": asdict(budget), "past": asdict(past)}
        self.defer(trigger=trigger, method_name="resume", kwargs=remembered)
        return {}  # never reached: defer leaves by an exception

    def _remove_wedged_driver(self, store: Store, process: LaunchedDriver | None) -> None:
        """A wedged driver must be gone before the next one starts, and so must what it left of its process group."""
        self.log.info("%s", terminate_driver(store, self.pipeline, say=self.log.info))
        if process is not None:
            send_signal(process.leader, SIGKILL, group=True)

    def _show_driver_log(self, store: Store, process: LaunchedDriver | None) -> None:
        """The end of the driver's log for the task's own.

        What the driver could not send any more is sent by now.
        """
        if process is None:
            return
        lines = tail_log_file(process.log)
        with suppress(TransientError):
            DriverLog(store, self.pipeline, process.attempt, Path(process.log)).send_new_pieces()
            delete_old_logs(store, self.pipeline)
            lines = lines or read_log_tail(
                store, self.pipeline, process.attempt, 20
            )  # it ran on another worker's host
        where = (
            f"{process.log}, in the bucket"
            f" {BucketLayout(self.pipeline).logs_prefix}{process.attempt}/"
        )
        self.log.info("end of the driver's log (%s):\n%s", where, "\n".join(lines))

    def _end_run(self, why: str) -> dict[str, Any]:
        self.log.info("ending: %s", why)
        store = StoreAccess.resolve(self.conn_id).open()
        return {
            "pipeline": self.pipeline,
            "why": why,
            "checkpoint": _read_newest_checkpoint(store, self.pipeline),
        }


def refuse_wiped_bucket(store: Store, pipeline: str, past: RunMemory) -> None:
    """Refuse to go on, and to end green, when the bucket no longer knows a stream that this run has seen running.

    Raises:
        ConfigurationError: desired.json, which the run wrote itself, is gone, or the identity is
            gone or another one.
    """
    said, _ = read_document(store, BucketLayout(pipeline).desired_key, DesiredDocument)
    uid = read_identity(store, pipeline)
    if said is not None and past.uid in (None, uid):
        return
    gone = (
        f"its identity is {uid or 'gone'}, it was {past.uid}"
        if past.uid not in (None, uid)
        else "its desired.json is gone"
    )
    raise ConfigurationError(
        f"the bucket no longer knows {pipeline}, which this run has seen running: {gone}",
        code="airflow.bucket_wiped",
        pipeline=pipeline,
        kept="what is left in the bucket; no driver was started",
        advice=(
            "restore the bucket or point Airflow at the right one; to begin from nothing, start a"
            " new run"
        ),
    )


def _read_newest_checkpoint(store: Store, pipeline: str) -> str | None:
    checkpoint = SlotLog(store, pipeline).head().checkpoint
    return str(checkpoint) if checkpoint else None


def _get_requester(context: Any) -> str:
    return str(getattr(context.get("dag_run"), "triggering_user_name", None) or "airflow")


def _is_automatic_retry(task: Any, retries: int) -> bool:
    """A retry by Airflow itself; a person's clear raises `max_tries` above the operator's own."""
    return int(task.try_number) > 1 and int(task.max_tries) <= retries
