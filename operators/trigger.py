"""Watches a stream while its task sleeps: a look every two seconds, without blocking the loop.

What the Airflow side measures is sent here by Airflow's own metrics. They go where the site's
`[metrics]` settings send Airflow's, under its prefix. The pipeline is in the tags: OpenTelemetry,
Datadog and StatsD with InfluxDB tags have them, plain StatsD has none.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from airflow.sdk import BaseXCom
from airflow.sdk.configuration import conf
from airflow.sdk.observability import stats
from airflow.triggers.base import TaskSuccessEvent, TriggerEvent

from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.pipeline_overview import PipelineState
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError, TransientError
from tidegate.json_types import JsonObject

from .airflow_port.running_tasks import count_other_runs, read_task_state
from .driver_launch import LaunchedDriver
from .driver_shutdown import (
    ENDED_TASK_STATES,
    StopOrder,
    StopTimeouts,
    stop_driver,
)
from .liveness import AnsweredTime, LivenessLimits, LivenessSample, Observation, StreamObserver
from .pipeline_operator import PipelineTrigger
from .store_access import StoreAccess
from .store_guard import find_looks


def record_look(pipeline: str, seen: LivenessSample | None) -> None:
    """Record one look of a trigger; None when the store did not answer."""
    tags = {"pipeline": pipeline}
    stats.gauge("tidegate.stream.watched", 1, tags=tags)
    if seen is None:
        stats.incr("tidegate.stream.looks.unanswered", tags=tags)
        return
    stats.incr("tidegate.stream.looks", tags=tags)
    stats.gauge("tidegate.stream.heartbeat.age", seen.silent_for, tags=tags)
    sealed_at = seen.driver.last_facts.get("sealed_at")
    if sealed_at is not None:
        seal_age = (seen.driver.read_at - sealed_at) / 1_000_000
        stats.gauge("tidegate.stream.seal.age", seal_age, tags=tags)


def record_stream_end(pipeline: str, state: PipelineState) -> None:
    """Record that a stream is no longer live."""
    tags = {"pipeline": pipeline, "state": state.word_for("event")}
    stats.incr("tidegate.stream.ended", tags=tags)


def record_unwatched(pipeline: str) -> None:
    """Mark the stream as unwatched, so that dashboards ignore its last age gauges."""
    stats.gauge("tidegate.stream.watched", 0, tags={"pipeline": pipeline})


def record_launch(pipeline: str, *, replaces: bool) -> None:
    """Record that a task started a driver."""
    why = "replacement" if replaces else "start"
    stats.incr("tidegate.driver.launched", tags={"pipeline": pipeline, "why": why})


def record_adoption(pipeline: str) -> None:
    """Record that a task found its driver running."""
    stats.incr("tidegate.driver.adopted", tags={"pipeline": pipeline})


# Seconds before the first event; 6.5 and 7 were reported to be too few on busy schedulers.
_SETTLE_SECONDS = 10.0
# Seconds for Airflow to answer what state the task is in; once measured at 8.5.
_TASK_STATE_TIMEOUT = 10.0
# Seconds from the launch of a standby to the next one: it may end at once, time after time.
_STANDBY_PAUSE = 30.0
# Of a dead driver, before a standby has its lease.
_TAKEN_OVER_FROM = (PipelineState.LOST, PipelineState.STALLED)
# Airflow gives on_kill 30 s: 10 to ask for the task's state, then these.
_ON_KILL_TIMEOUTS = StopTimeouts(request=10.0, terminate=5.0, kill=3.0)


def read_settle_seconds() -> float:
    """Return the seconds before a trigger's first event.

    Airflow takes an event that comes before its scheduler has seen the task asleep for the end of a
    killed task. Its configuration may have another value, as `trigger_settle` in `[tidegate]`.
    """
    return float(conf.getfloat("tidegate", "trigger_settle", fallback=_SETTLE_SECONDS))


@dataclass(kw_only=True, eq=False, repr=False)
class StreamTrigger(PipelineTrigger):
    """Fires once: the stream is no longer live, its run is old enough, or its standby is missing.

    The payload is an `Observation`.

    Attributes:
        floor: token of the driver to watch, or the least it can get.
        launched: `LaunchedDriver.as_dict` of the process that the task launched, if it did.
        rules: `LivenessLimits` as a dict; empty for its defaults.
        poll: seconds between looks.
        due: ticks from which on a live stream is reported as well; None for never.
        standby: `LaunchedDriver.as_dict` of the drivers that wait for their turn, as far as they
            are known; None if there should be none.
    """

    floor: int
    launched: JsonObject | None = None
    rules: dict[str, float] = field(default_factory=dict)
    poll: float = 2.0
    due: int | None = None
    standby: list[JsonObject] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun, self._seen_token = SYSTEM_CLOCK.monotonic(), self.floor

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until something needs the task, then yield that one event.

        While a restore is under way, the end of a driver is not reported.
        """
        # Every call that may block runs in a thread: a triggerer has one loop for all triggers.
        looks = find_looks(await asyncio.to_thread(self.open_store))
        store = looks.store
        observer = StreamObserver(
            store,
            self.pipeline,
            floor=self.floor,
            launched=LaunchedDriver(**self.launched) if self.launched else None,
            limits=LivenessLimits(**self.rules),
        )
        begun, settle = SYSTEM_CLOCK.monotonic(), read_settle_seconds()
        try:
            while True:
                observation = await looks.run(self._observe_change, store, observer)
                record_look(self.pipeline, observer.seen)
                # What was seen too early is seen again: an event that is held may be out of date.
                if observation is not None and SYSTEM_CLOCK.monotonic() - begun >= settle:
                    break
                await asyncio.sleep(self.poll)
        finally:
            record_unwatched(self.pipeline)
        if observation.state is not PipelineState.RUNNING:
            record_stream_end(self.pipeline, observation.state)
        yield TriggerEvent(observation.as_dict())  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Stop the driver and keep it stopped, because Airflow has ended the task.

        Does nothing if a new try of the task or another run wants the driver, or has it already.

        Airflow does not call this while the triggerer is down, nor for a task that was marked
        before its trigger first ran; `task_state_listener` acts on marks in the API server. This is
        for what ends a task without a person, a time-out for example, and for a mark that came
        while the API server did not reach the store.
        """
        task = self.task_instance
        if task is None:
            return
        # The state is read last, so that it includes every clear that came until then.
        others, state = await asyncio.wait_for(
            asyncio.to_thread(lambda: (count_other_runs(task), read_task_state(task))),
            _TASK_STATE_TIMEOUT,
        )
        if state not in ENDED_TASK_STATES:
            self.log.info("the task is %s: its driver stays", state)
            return
        if others:
            self.log.info(
                "another run of %s waits or has begun, and adopts the driver: it stays", task.dag_id
            )
            return
        await asyncio.to_thread(
            self._stop_watched_driver, f"the task was set to {state} in Airflow", str(task.id)
        )

    def _observe_change(self, store: Store, observer: StreamObserver) -> Observation | None:
        """An observation that needs action, or None."""
        observation = observer.observe()
        if observation is None:
            return None
        if observation.state is PipelineState.RUNNING:
            self._seen_token = observer.floor
            if self.due is not None and SYSTEM_CLOCK.wall_ticks() >= self.due:
                return replace(observation, why="this run is old enough")
            if self._has_lost_standby(observer.floor):
                why = "no standby waits"
                return replace(observation, why=why, standby_missing=True)
            return None
        if observation.state in _TAKEN_OVER_FROM and self._awaits_takeover(observer):
            return None
        try:
            recovering = read_desired_state(store, self.pipeline).state is DesiredState.RECOVERING
        except TransientError:
            return None
        except TidegateError as error:
            return observer.tolerate(error)
        # A restore stops the driver, and sets the desired state at its end.
        return None if recovering else observation

    def _has_lost_standby(self, token: int) -> bool:
        """Whether a standby has ended, or has taken over from the driver."""
        if self.standby is None or SYSTEM_CLOCK.monotonic() - self._begun < _STANDBY_PAUSE:
            return False
        # On another host the end of a process is not to be seen, but a higher token is.
        known = self._list_known_drivers()
        return not self.standby or token > self.floor or not all(d.is_alive() for d in known)

    def _awaits_takeover(self, observer: StreamObserver) -> bool:
        """Whether the driver is dead, and a standby still has time to take its lease.

        To act meanwhile would stop the very process that takes over: any of the launched ones may
        have been the driver.
        """
        seen = observer.seen
        lease = seen.driver.lease if seen else None
        if self.standby is None or seen is None or lease is None or lease.holder is None:
            return False
        others = any(one.is_alive() for one in self._list_known_drivers())
        return lease.holder.is_proven_dead() and others and seen.silent_for <= lease.record.ttl

    def _list_known_drivers(self) -> list[LaunchedDriver]:
        return [LaunchedDriver(**one) for one in (*(self.standby or ()), self.launched) if one]

    def _stop_watched_driver(self, why: str, asker: str) -> None:
        # With a patience of its own: this is asked once, and no one asks again.
        store = StoreAccess.resolve(self.conn_id).open()
        lease = read_lease(store, self.pipeline)
        if lease is not None and lease.token > self._seen_token:
            self.log.info(
                "token %s drives now, not the watched %s: it stays", lease.token, self._seen_token
            )
            return
        set_desired_state(store, self.pipeline, DesiredState.STOPPED, who="airflow", why=why)
        # By its token: another driver may take over between the look and the stop.
        token = lease.token if lease else 0
        order = StopOrder("airflow", why, token=token, asker=asker, timeouts=_ON_KILL_TIMEOUTS)
        self.log.info(stop_driver(store, self.pipeline, order, say=self.log.info))


@dataclass(kw_only=True, eq=False, repr=False)
class EpochTrigger(PipelineTrigger):
    """Ends the task of a restore as soon as the first epoch of its timeline is sealed.

    The task's result is `result` with the seconds that this took. An event, which wakes the task,
    comes only if no driver has begun (``driverless``) or no epoch was sealed in time (``seconds``).

    Attributes:
        timeline: of the restore. A later one counts too: then another restore has followed.
        result: of the task, without the seconds.
        patience: seconds to wait, without those in which the store does not answer; a triggerer
            that is restarted begins again.
        begins_within: seconds in which a driver has to take the lease; None: do not look.
    """

    timeline: int
    result: JsonObject
    patience: float
    begins_within: float | None = None

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look every second, then yield one event."""
        looks = find_looks(await asyncio.to_thread(self.open_store))
        store = looks.store
        begun, answered = SYSTEM_CLOCK.monotonic(), AnsweredTime(SYSTEM_CLOCK)
        waiting_since, settle = answered.monotonic(), read_settle_seconds()
        while True:
            asked = SYSTEM_CLOCK.monotonic()
            sealed = await looks.run(self._has_epoch, SlotLog(store, self.pipeline))
            answered.note(asked, answered=sealed is not None)
            if sealed:
                break
            seconds = answered.monotonic() - waiting_since
            if seconds >= max(self.patience, settle):
                yield TriggerEvent({"seconds": self.patience})  # type: ignore[no-untyped-call]
                return
            if self.begins_within is not None and seconds >= max(self.begins_within, settle):
                if await looks.run(self._is_driverless, store):
                    yield TriggerEvent({"driverless": True})  # type: ignore[no-untyped-call]
                    return
                self.begins_within = None
            await asyncio.sleep(1.0)
        passed = SYSTEM_CLOCK.monotonic() - begun
        await asyncio.sleep(max(0.0, settle - passed))
        seconds = round(passed, 1)
        self.log.info("first epoch of timeline %s sealed after %s s", self.timeline, seconds)
        yield TaskSuccessEvent(
            xcoms={BaseXCom.XCOM_RETURN_KEY: {**self.result, "seconds": seconds}}
        )

    def _has_epoch(self, log: SlotLog) -> bool | None:
        """Whether the timeline has an epoch; None if the store does not answer."""
        try:
            head = log.head()
        except TransientError:
            return None
        same = head.timeline == self.timeline and head.fork is None
        return same or head.timeline > self.timeline

    def _is_driverless(self, store: Store) -> bool:
        """Whether the lease is free, as the restore has left it."""
        try:
            lease = read_lease(store, self.pipeline)
        except TransientError:
            return False
        return lease is None or lease.holder is None
