"""The supervising task of a stream: adopt or launch a driver, sleep while a trigger watches, act.

    execute   the stream shall run: adopt the live driver, wherever it was started, or launch one;
              then defer to the trigger
    resume    lost, stalled      launch again, without using up a retry of the task, as long as new
                                 checkpoints are sealed
              failed             poison and configuration fail the task at once; others are launched
                                 again
              stopped, finished  end green if this was intended, else launch again
              live               this run is old enough: the next one adopts the driver, so that
                                 Airflow's history stays readable

Before the task ends a driver that is lost or stalled, it looks again itself. While the store does
not answer, it touches no driver and goes back to sleep.

The truth stays in the bucket (lease, log, desired.json). Only two things are kept here: what the
trigger carries, and in Airflow's task state store that this run has set the desired state to run.
If the bucket has forgotten the stream after that, it was wiped or replaced: an error, not a stop.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

from airflow.sdk.execution_time.context import NEVER_EXPIRE

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_reports import (
    DriverLog,
    DriverStatus,
    delete_old_logs,
    read_log_tail,
    read_status,
    write_status,
)
from tidegate.checkpoints.driver_requests import (
    DesiredDocument,
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.pipeline_identity import read_identity, refuse_copied_store
from tidegate.checkpoints.pipeline_overview import (
    DriverOverview,
    PipelineState,
    needs_person,
    read_driver,
)
from tidegate.checkpoints.shared_documents import read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import TransientError
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.json_types import JsonObject, JsonView

from .child_processes import build_retry_policy, rebuild_error
from .driver_launch import (
    LaunchedDriver,
    find_standby,
    is_on_this_host,
    launch_driver,
    make_driver_folder,
    send_signal,
    tail_log_file,
)
from .driver_shutdown import find_stop_request, terminate_driver
from .errors import BUCKET_WIPED, DRIVER_LOST
from .liveness import LivenessLimits, Observation
from .pipeline_operator import (
    PipelineOperator,
    get_requester,
    start_dag_run,
)
from .trigger import StreamTrigger, record_adoption, record_launch

# Key in the task state store; its value is the `max_tries` of the tries that it is about.
_RUN_DECLARED_KEY = "run_declared_by_try"

# In a row without a new checkpoint; then Airflow's own retries and their delay take over.
MAX_RELAUNCHES = 3
# Seconds beyond the lease's TTL in which a standby takes over, before a driver counts as lost.
_TAKE_OVER_SECONDS = 10.0


@dataclass(frozen=True)
class RelaunchBudget:
    """How often the driver was launched since the last progress. Deferred tasks carry this.

    Attributes:
        checkpoint: newest checkpoint when it was last launched.
        relaunches: in a row without a newer one.
    """

    checkpoint: str | None = None
    relaunches: int = 0

    def after_loss(self, newest: str | None) -> RelaunchBudget:
        """Return the budget after one more loss."""
        if newest != self.checkpoint:
            return RelaunchBudget(newest, 1)
        return replace(self, relaunches=self.relaunches + 1)

    @property
    def exhausted(self) -> bool:
        """Whether this task must not launch the driver again by itself."""
        return self.relaunches > MAX_RELAUNCHES


@dataclass(frozen=True)
class RunMemory:
    """What the run keeps through all of its resumes. Deferred tasks carry this.

    Attributes:
        uid: identity of the pipeline in the bucket; None before its first driver has made one.
        due: ticks from which on this run starts the next one and leaves it the driver; None for
            never.
    """

    uid: str | None = None
    due: int | None = None


class StreamOperator(PipelineOperator):
    """Runs a pipeline's driver and stays with it until the driver itself reports its end.

    A driver that is lost is launched again. The task also ends when the stream is meant to be
    stopped, and when the next run takes over (`rotate_after`).

    """

    ui_color = "#d7ecf2"

    def __init__(self, *, supervision: SupervisionSpec, **kwargs: Any) -> None:
        delay = timedelta(microseconds=supervision.retry_delay)
        super().__init__(
            supervision=supervision,
            retries=supervision.retries,
            retry_delay=delay,
            retry_policy=build_retry_policy(delay),
            **kwargs,
        )

    def execute(self, context: Any) -> JsonObject:
        """Set the desired state to run, adopt or launch a driver, then defer.

        During a restore the desired state stays. A retry ends at once if the stream was stopped
        while it waited.
        """
        store, task_state = self.resolve_access().open(), context["task_state_store"]
        desired = read_desired_state(store, self.pipeline).state
        # Airflow raises `max_tries` when a person clears the task to have the stream run. With
        # the same value, an earlier try has declared the run, and this is its retry.
        most_tries = context["ti"].max_tries
        if desired is DesiredState.STOPPED and task_state.get(_RUN_DECLARED_KEY) == most_tries:
            refuse_wiped_bucket(store, self.pipeline, RunMemory())
            return self._end_run("the stream was stopped while this task waited for its retry")
        # The origin of a moved pipeline has to stay stopped: its driver is at the new address.
        refuse_copied_store(store, self.pipeline)
        # A restore sets the desired state at its end; the trigger waits for that.
        if desired is not DesiredState.RECOVERING:
            who, why = get_requester(context), f"run {context['run_id']}"
            set_desired_state(store, self.pipeline, DesiredState.RUN, who=who, why=why)
        # Retries find this, so that a stop between two tries is not undone by the second.
        task_state.set(_RUN_DECLARED_KEY, most_tries, retention=NEVER_EXPIRE)
        period = self.supervision.rotate_after
        due = None if period is None else SYSTEM_CLOCK.wall_ticks() + period
        budget = RelaunchBudget(_read_newest_checkpoint(store, self.pipeline))
        return self._adopt_or_launch(store, budget, RunMemory(due=due))

    def resume(
        self,
        context: Any,
        event: JsonView,
        launched: JsonObject | None,
        budget: JsonObject,
        past: JsonObject | None = None,
    ) -> JsonObject:
        """Act on the event of the trigger. Airflow's database has this name and these arguments.

        Raises:
            DagRunTriggerException: the next run takes over; this task succeeds.
            TransientError: the driver was lost four times in a row without a new checkpoint.
            ConfigurationError: the bucket has forgotten the stream.
            TidegateError: the driver's error, if a person has to act on it.
        """
        seen, memory = Observation.from_dict(event), RunMemory(**(past or {}))
        store = self.resolve_access().open()
        self.log.info("%s: %s", event["state"], seen.why)
        process = LaunchedDriver(**launched) if launched else None
        try:
            refuse_wiped_bucket(store, self.pipeline, memory)
            driver = read_driver(store, self.pipeline)
        except TransientError as error:
            self.log.warning("the store does not answer, so nothing is done: %s", error.message)
            waiting: list[LaunchedDriver] | None = [] if self.supervision.standby else None
            known = RelaunchBudget(**budget)
            return self._defer_to_trigger(process, seen.floor or seen.token, known, memory, waiting)
        if seen.is_refuted_by(driver):
            # The event took some seconds to come here, in which the driver has gone on.
            self.log.info("looked again: a driver lives, so nothing is ended")
            self._end_if_replaced(process, driver)
            return self._adopt_or_launch(store, RelaunchBudget(**budget), memory)
        if seen.state is PipelineState.RUNNING:
            if seen.standby_missing:
                return self._adopt_or_launch(store, RelaunchBudget(**budget), memory)
            return self._hand_over_driver(context, seen.why)
        self._show_driver_log(store, process)
        self._keep_intended_end(store, seen)
        if seen.state is PipelineState.FINISHED:
            return self._end_run(seen.why)
        # Read after the driver's end was noted, so that a stop which came meanwhile is seen.
        if read_desired_state(store, self.pipeline).state is DesiredState.STOPPED:
            return self._end_run(f"the stream is meant to be stopped, and {seen.why}")
        if seen.state is PipelineState.FAILED and needs_person(seen.error):
            reported = rebuild_error(seen.error)
            self.log.error("%s", reported)
            raise reported
        return self._replace_driver(store, seen, process, RelaunchBudget(**budget), memory)

    def _replace_driver(
        self,
        store: Store,
        seen: Observation,
        process: LaunchedDriver | None,
        budget: RelaunchBudget,
        memory: RunMemory,
    ) -> JsonObject:
        """End what is left of a driver, and launch the next one."""
        newest = _read_newest_checkpoint(store, self.pipeline)
        remaining = budget.after_loss(newest)
        if remaining.exhausted:
            log = process.log if process else "on the host that ran it"
            raise DRIVER_LOST(
                pipeline=self.pipeline, why=seen.why, launches=MAX_RELAUNCHES + 1, log=log
            )
        if seen.state is not PipelineState.FAILED:
            # A wedged driver, and the rest of its process group, must end before the next starts.
            self.log.info("%s", terminate_driver(store, self.pipeline, seen.token, self.log.info))
            if process is not None:
                send_signal(process.leader, SIGKILL, group=True)
        return self._adopt_or_launch(store, remaining, memory, process)

    def _end_if_replaced(self, process: LaunchedDriver | None, driver: DriverOverview) -> None:
        """End the rest of a launched driver whose lease another process of this host has taken."""
        holder = driver.lease.holder if driver.lease else None
        if process is None or holder is None or not is_on_this_host(holder):
            return
        if not process.runs(holder):
            send_signal(process.leader, SIGKILL, group=True)

    def _keep_intended_end(self, store: Store, seen: Observation) -> None:
        """Set the desired state to stopped if the driver finished or a person stopped it."""
        who, why = "airflow", seen.why
        if seen.state is not PipelineState.FINISHED:
            request = (
                find_stop_request(store, self.pipeline, seen.token)
                if seen.state is PipelineState.STOPPED
                else None
            )
            if request is None:
                return
            who, why = request.who, request.why
        set_desired_state(store, self.pipeline, DesiredState.STOPPED, who=who, why=why)

    def _hand_over_driver(self, context: Any, why: str) -> JsonObject:
        """End this run while the driver goes on; the next run, queued before, adopts it."""
        if context["ti"].get_dr_count(dag_id=self.dag_id, states=["queued"]) > 0:
            return self._end_run(f"{why}; another run is queued already")
        run_id = f"rotated__{datetime.now(UTC).isoformat()}"
        raise start_dag_run(self.dag_id, run_id, f"{why}: took over from {context['run_id']}")

    def _adopt_or_launch(
        self,
        store: Store,
        budget: RelaunchBudget,
        memory: RunMemory,
        ended: LaunchedDriver | None = None,
    ) -> JsonObject:
        """Make sure that a driver runs, and a standby if wanted; then defer.

        Args:
            store: the bucket.
            budget: of launches without progress.
            memory: of this run.
            ended: the process that was just killed.
        """
        # Kept from the first time on, so that a bucket that was replaced later is noticed.
        memory = replace(memory, uid=memory.uid or read_identity(store, self.pipeline))
        lease = read_lease(store, self.pipeline)
        holder = None if lease is None or lease.is_free else lease.holder
        folder = make_driver_folder(self.pipeline)
        wanted = self.supervision.standby
        standby = find_standby(folder, holder, ended) if wanted else None
        if lease is not None and holder is not None:
            self.log.info(
                "adopting the driver with pid %s on %s, token %s",
                holder.pid,
                holder.host,
                lease.token,
            )
            record_adoption(self.pipeline)
            waiting = [standby or self._launch(budget)] if wanted else None
            return self._defer_to_trigger(None, lease.token, budget, memory, waiting)
        if read_desired_state(store, self.pipeline).state is DesiredState.RECOVERING:
            self.log.info("a recovery is under way: waiting for its end")
            waiting = [] if wanted else None
            token = lease.token if lease else 0
            return self._defer_to_trigger(None, token, budget, memory, waiting)
        if lease is None and read_status(store, self.pipeline) is not None:
            # The report of a driver whose lease was wiped says nothing of the next one. It is
            # overwritten, because the keys of drivers and Airflow may delete no document.
            write_status(store, self.pipeline, DriverStatus(token=0, driver="", step="", at=0))
        # A standby takes the free lease by itself, and then needs a standby of its own.
        launched = standby or self._launch(budget)
        waiting = [self._launch(budget)] if wanted else None
        # The launched driver's token will be higher than that of the lease as it is now.
        floor = lease.token + 1 if lease else 1
        return self._defer_to_trigger(launched, floor, budget, memory, waiting)

    def _launch(self, budget: RelaunchBudget) -> LaunchedDriver:
        start = budget.checkpoint or "the beginning"
        options = self.supervision
        self.log.info("launching a driver from %s (recover_to: %s)", start, options.recover_to)
        launched = launch_driver(
            self.pipeline,
            self.spec,
            self.resolve_access(),
            options.recover_to,
            submit=options.submit,
            standby=options.standby,
        )
        self.log.info("launched attempt %s, log %s", launched.attempt, launched.log)
        record_launch(self.pipeline, replaces=budget.relaunches > 0)
        return launched

    def _defer_to_trigger(
        self,
        launched: LaunchedDriver | None,
        floor: int,
        budget: RelaunchBudget,
        memory: RunMemory,
        standby: list[LaunchedDriver] | None,
    ) -> JsonObject:
        process = launched.as_dict() if launched else None
        options = self.supervision
        limits = LivenessLimits(options.start_timeout / 1e6, options.stall_after / 1e6)
        if standby is not None:
            limits = replace(limits, lease_margin=_TAKE_OVER_SECONDS)
        trigger = StreamTrigger(
            pipeline=self.pipeline,
            floor=floor,
            conn_id=self.conn_id,
            launched=process,
            rules=asdict(limits),
            due=memory.due,
            standby=None if standby is None else [driver.as_dict() for driver in standby],
        )
        remembered = {"launched": process, "budget": asdict(budget), "past": asdict(memory)}
        self.defer(trigger=trigger, method_name="resume", kwargs=remembered)
        return {}  # never reached: defer leaves by an exception

    def _show_driver_log(self, store: Store, process: LaunchedDriver | None) -> None:
        """Copy the end of the driver's log into the task's, and what is missing to the bucket."""
        if process is None:
            return
        lines = tail_log_file(process.log)
        with suppress(TransientError):
            DriverLog(store, self.pipeline, process.attempt, Path(process.log)).send_new_pieces()
            delete_old_logs(store, self.pipeline)
            # Without a file here, the driver ran on another worker's host.
            lines = lines or read_log_tail(store, self.pipeline, process.attempt, 20)
        folder = BucketLayout(self.pipeline).attempt_logs_prefix(process.attempt)
        where = f"{process.log}, in the bucket {folder}"
        self.log.info("end of the driver's log (%s):\n%s", where, "\n".join(lines))

    def _end_run(self, why: str) -> JsonObject:
        self.log.info("ending: %s", why)
        newest = _read_newest_checkpoint(self.resolve_access().open(), self.pipeline)
        return {"pipeline": self.pipeline, "why": why, "checkpoint": newest}


def refuse_wiped_bucket(store: Store, pipeline: str, memory: RunMemory) -> None:
    """Refuse to go on, or to end green, if the bucket has forgotten a stream that this run saw.

    Raises:
        ConfigurationError: desired.json, which the run wrote itself, is gone, or the identity is
            gone or another one.
    """
    desired, _ = read_document(store, BucketLayout(pipeline).desired_key, DesiredDocument)
    uid = read_identity(store, pipeline)
    if memory.uid not in (None, uid):
        change = f"its identity is {uid or 'gone'}, it was {memory.uid}"
        raise BUCKET_WIPED(pipeline=pipeline, change=change)
    if desired is None:
        raise BUCKET_WIPED(pipeline=pipeline, change="its desired.json is gone")


def _read_newest_checkpoint(store: Store, pipeline: str) -> str | None:
    checkpoint = SlotLog(store, pipeline).head().checkpoint
    return str(checkpoint) if checkpoint else None
