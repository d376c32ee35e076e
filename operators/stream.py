"""The supervising task of a stream: adopt or launch a driver, sleep while a trigger watches, act on what it saw.

    execute   the stream shall run: adopt the live driver, wherever it came from, else launch one; then defer
    resume    lost, stalled     launch anew, without using up a retry of the task, as long as checkpoints go on
              failed            poison and configuration fail the task at once; transient ones are tried again
              fenced            somebody else drives: adopt that one
              stopped, finished end green, if this was intended; else launch anew

The truth stays in the bucket (lease, log, desired.json); nothing here has to survive but what the trigger carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from signal import SIGKILL
from typing import Any

from airflow.sdk import BaseOperator

from tidegate.checkpoints.desired import DesiredState, read_desired, set_desired
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.operators.access import StoreAccess
from tidegate.operators.control import asked_to_stop, remove_driver
from tidegate.operators.failures import DriverLostError, failure_of, retry_policy
from tidegate.operators.launch import Launched, LocalLauncher, send_signal, tail
from tidegate.operators.trigger import StreamTrigger
from tidegate.operators.watch import Observation, Rules, StreamState, is_final

__all__ = ["Budget", "StreamOperator"]

RELAUNCHES = 3  # in a row without a new checkpoint; then Airflow's own retries and their delay take over


@dataclass(frozen=True)
class Budget:
    """How often the driver was launched since the last progress.

    Attributes:
        checkpoint: newest checkpoint when it was last launched.
        relaunches: in a row without a newer one.
    """

    checkpoint: str | None = None
    relaunches: int = 0

    def spend(self, newest: str | None) -> Budget:
        """The budget after one more loss."""
        if newest != self.checkpoint:
            return Budget(newest, 1)
        return replace(self, relaunches=self.relaunches + 1)

    @property
    def exhausted(self) -> bool:
        """Launching again by ourselves makes no sense."""
        return self.relaunches > RELAUNCHES


class StreamOperator(BaseOperator):
    """Runs a pipeline's driver and stays with it until the driver itself says that it is done.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file, as the workers see it.
        recover_to: `latest`, `latest_healthy` or a checkpoint id.
        conn_id: Airflow connection of the store; None for the environment (`TIDEGATE_STORE`).
        stall_after: seconds without a finished step that count as stalled.
        start_timeout: seconds from launch to the lease.
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
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("retry_delay", timedelta(seconds=5))
        kwargs.setdefault("retry_policy", retry_policy(kwargs["retry_delay"]))
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.recover_to, self.conn_id = pipeline, spec, recover_to, conn_id
        self.stall_after, self.start_timeout = stall_after, start_timeout

    def execute(self, context: Any) -> dict[str, Any]:
        """Adopt or launch, then defer."""
        access = StoreAccess.resolve(self.conn_id)
        store = access.open()
        desired = read_desired(store, self.pipeline).state
        if desired is DesiredState.STOPPED and _is_automatic_retry(context["ti"], self.retries or 0):
            return self._ended("the stream was stopped while this task waited for its retry")
        if desired is not DesiredState.RECOVERING:
            set_desired(store, self.pipeline, DesiredState.RUN, who=_who(context), why=f"run {context['run_id']}")
        return self._adopt_or_launch(access, store, Budget(_newest(store, self.pipeline)))

    def resume(
        self, context: Any, event: Mapping[str, Any], launched: dict[str, Any] | None, budget: dict[str, Any]
    ) -> dict[str, Any]:
        """Act on what the trigger saw."""
        seen = Observation.from_dict(event)
        access = StoreAccess.resolve(self.conn_id)
        store = access.open()
        self.log.info("%s: %s", seen.state.value, seen.why)
        process = Launched.from_dict(launched) if launched else None
        self._show_log(process, seen)
        if seen.state is StreamState.FINISHED:
            set_desired(store, self.pipeline, DesiredState.STOPPED, who="airflow", why=seen.why)
            return self._ended(seen.why)
        request = asked_to_stop(store, self.pipeline, seen.token) if seen.state is StreamState.STOPPED else None
        if request is not None:
            set_desired(store, self.pipeline, DesiredState.STOPPED, who=request.who, why=request.why)
        if read_desired(store, self.pipeline).state is DesiredState.STOPPED:
            return self._ended(f"the stream is meant to be stopped, and {seen.why}")
        if is_final(seen):
            error = failure_of(seen.error)
            self.log.error("%s", error)
            raise error
        left = Budget(**budget).spend(_newest(store, self.pipeline))
        if left.exhausted:
            raise DriverLostError(
                f"{seen.why}; launched {RELAUNCHES + 1} times without a new checkpoint",
                code="airflow.driver_lost",
                pipeline=self.pipeline,
                kept="everything sealed so far",
                advice=f"read the driver's log: {process.log if process else 'on the host that ran it'}",
            )
        if seen.state is not StreamState.FAILED:
            self._clear_away(store, process)
        return self._adopt_or_launch(access, store, left)

    def _adopt_or_launch(self, access: StoreAccess, store: Store, budget: Budget) -> dict[str, Any]:
        lease = read_lease(store, self.pipeline)
        if lease is not None and not lease.free and lease.holder is not None:
            self.log.info("adopting the driver with pid %s on %s, token %s", lease.holder.pid, lease.holder.host, lease.token)
            return self._watch(None, lease.token, budget)
        if read_desired(store, self.pipeline).state is DesiredState.RECOVERING:
            self.log.info("a recovery is under way: waiting for its end")
            return self._watch(None, lease.token if lease else 0, budget)
        self.log.info("launching a driver from %s (recover_to: %s)", budget.checkpoint or "the beginning", self.recover_to)
        launched = LocalLauncher().launch(self.pipeline, self.spec, access, self.recover_to)
        self.log.info("launched attempt %s, log %s", launched.attempt, launched.log)
        return self._watch(launched, lease.token + 1 if lease else 1, budget)

    def _watch(self, launched: Launched | None, floor: int, budget: Budget) -> dict[str, Any]:
        process = launched.as_dict() if launched else None
        rules = asdict(Rules(start_timeout=self.start_timeout, stall_after=self.stall_after))
        trigger = StreamTrigger(pipeline=self.pipeline, floor=floor, conn_id=self.conn_id, launched=process, rules=rules)
        self.defer(trigger=trigger, method_name="resume", kwargs={"launched": process, "budget": asdict(budget)})
        return {}  # never reached: defer leaves by an exception

    def _clear_away(self, store: Store, process: Launched | None) -> None:
        """A wedged driver must be gone before the next one starts, and so must what it left of its process group."""
        self.log.info("%s", remove_driver(store, self.pipeline, say=self.log.info))
        if process is not None:
            send_signal(process.leader, SIGKILL, group=True)

    def _show_log(self, process: Launched | None, seen: Observation) -> None:
        if process is not None:
            self.log.info("end of the driver's log (%s):\n%s", process.log, "\n".join(tail(process.log)))

    def _ended(self, why: str) -> dict[str, Any]:
        self.log.info("ending: %s", why)
        store = StoreAccess.resolve(self.conn_id).open()
        return {"pipeline": self.pipeline, "why": why, "checkpoint": _newest(store, self.pipeline)}


def _newest(store: Store, pipeline: str) -> str | None:
    checkpoint = SlotLog(store, pipeline).head().checkpoint
    return str(checkpoint) if checkpoint else None


def _who(context: Any) -> str:
    return str(getattr(context.get("dag_run"), "triggering_user_name", None) or "airflow")


def _is_automatic_retry(task: Any, retries: int) -> bool:
    """A retry by Airflow itself; a person's clear raises `max_tries` above the operator's own."""
    return int(task.try_number) > 1 and int(task.max_tries) <= retries
