"""Stops the driver when a person ends a stream's task in Airflow.

The API server, where the person did it, does this itself, because a trigger learns that its task
has ended only if a triggerer runs it: not while the triggerer is down, and not if the task was
marked before the trigger began. The reasons are in
docs/decisions/0064-manual-task-states-are-handled-in-the-api-server.md.

The listener records which try was marked and waits until the request is committed. Then a thread

1. reads who drives, and only then whether the mark still holds: the task was not cleared since, and
   no other run waits or has begun;
2. sets the desired state to stopped, so that the sweep leaves the stream alone;
3. checks again that the mark holds, and takes step 2 back if not: a new run may have asked for the
   stream in between;
4. asks the driver of step 1, by its token, to drain, and goes on as `stop_driver` does.

A later run sets the desired state itself, and launches a driver when the draining one has ended. A
task that was awake may have launched a driver that has no lease yet, so the thread watches the
lease for a while.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tidegate.checkpoints.driver_requests import (
    DesiredDocument,
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError

from .airflow_port.database import AirflowQueries
from .airflow_port.task_marks import DatabaseAwayError, read_task_facts, run_after_commit
from .driver_shutdown import ENDED_TASK_STATES, StopOrder, stop_driver

_ACTOR = "airflow"
_RETRY_SECONDS = 300.0  # while store or database do not answer
_RETRY_AFTER = 5.0  # seconds
# A worker learns with its next heartbeat that its task was ended (a minute by default), and a
# driver has its lease soon after its launch.
_AWAKE_TASK_SECONDS = 120.0
_LEASE_POLL_SECONDS = 3.0
_CLOCK_TOLERANCE = timedelta(minutes=1)  # more than the clocks of two hosts differ

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MarkedTask:
    """A stream's task that a person has marked.

    Attributes:
        try_id: of the task's try; clearing the task gives it another one.
        dag_id: `<pipeline>.stream`.
        state: what the task was set to.
        asleep: the task was deferred, so it launches nothing any more.
        at: when it was marked.
    """

    try_id: str
    dag_id: str
    run_id: str
    state: str
    asleep: bool
    at: datetime

    @property
    def pipeline(self) -> str:
        """Name of the pipeline."""
        return self.dag_id.rpartition(".")[0]

    @property
    def why(self) -> str:
        """The reason in the stop request and in desired.json."""
        return f"the task was set to {self.state} in Airflow"


def on_task_marked(task: Any, state: str) -> None:
    """Handle a mark; Airflow calls this inside the request that marks the task.

    Returns at once and acts when the request is committed.
    """
    asleep = task.trigger_id is not None
    mark = MarkedTask(
        str(task.id), task.dag_id, task.run_id, state, asleep=asleep, at=datetime.now(UTC)
    )
    run_after_commit(task, lambda: _start_stop_thread(mark))


def _start_stop_thread(mark: MarkedTask) -> None:
    threading.Thread(
        target=_stop_marked_driver, args=(mark,), name=f"mark {mark.dag_id}", daemon=True
    ).start()


def _stop_marked_driver(mark: MarkedTask) -> None:
    """Body of the thread. No caller waits for it, so every step goes to the API server's log."""
    airflow = AirflowQueries()

    def log_step(text: str) -> None:
        """Say which mark a line of the API server's log is about."""
        _log.info("%s of %s: %s: %s", mark.run_id, mark.dag_id, mark.why, text)

    try:
        StopOnMark(
            mark,
            lambda: airflow.open_stream_store(mark.dag_id),
            lambda: _find_objection(mark),
            log_step,
        ).run()
    except Exception:
        _log.exception("%s of %s: %s, and the driver may go on", mark.run_id, mark.dag_id, mark.why)


def _find_objection(mark: MarkedTask) -> str | None:
    """Why a mark does not concern the driver (any more); None while it does."""
    facts = read_task_facts(mark.dag_id, mark.run_id)
    if facts.try_id is not None and facts.try_id != mark.try_id:
        return "the task was cleared since"
    if facts.try_id is not None and facts.state not in ENDED_TASK_STATES:
        return f"the task is {facts.state}"
    if facts.run_ended is not None and mark.at - facts.run_ended > _CLOCK_TOLERANCE:
        return "its run had ended long before"
    return "another run waits or has begun, and adopts the driver" if facts.other_runs else None


@dataclass(frozen=True)
class StopOnMark:
    """Stops the driver of one marked task.

    Attributes:
        mark: the marked task.
        open_store: opens the pipeline's store; None if the DAG does not belong to tidegate.
        find_objection: why the mark does not hold (any more); None while it does.
        say: called with a line per step.
        clock: for waiting.
        stopped_tokens: of the drivers that were asked to end.
    """

    mark: MarkedTask
    open_store: Callable[[], Store | None]
    find_objection: Callable[[], str | None]
    say: Callable[[str], None]
    clock: Clock = SYSTEM_CLOCK
    stopped_tokens: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Act until the driver is gone and no other can come, or until the mark no longer holds.

        Gives up, and says so, when store or database have not answered for five minutes.
        """
        begun = self.clock.monotonic()
        awake_until = begun if self.mark.asleep else begun + _AWAKE_TASK_SECONDS
        first = True
        while True:
            try:
                store = self.open_store()
                if store is None or not self._apply_mark(store, first):
                    return
                first = False
            except (TransientError, DatabaseAwayError) as error:
                if self.clock.monotonic() - begun > _RETRY_SECONDS:
                    self.say(f"given up, the driver may go on: {error}")
                    return
                self.say(f"once more in {_RETRY_AFTER:.0f} s: {error}")
                self.clock.sleep(_RETRY_AFTER)
                continue
            if self.clock.monotonic() >= awake_until:
                return
            self.clock.sleep(_LEASE_POLL_SECONDS)

    def _apply_mark(self, store: Store, first: bool) -> bool:
        """One round: stop the present driver. Returns whether the mark (still) holds."""
        pipeline, mark = self.mark.pipeline, self.mark
        desired, lease = read_desired_state(store, pipeline), read_lease(store, pipeline)
        token = None if lease is None or lease.is_free else lease.token
        if not first and not self._was_undone_by_run(desired, token):
            return True
        objection = self.find_objection()
        if objection is None and desired.state is DesiredState.RECOVERING:
            objection = "a restore is under way, and sets the desired state at its end"
        if objection is None and desired.state is DesiredState.RUN:
            objection = self._set_stopped(store, desired)
        if objection is not None:
            self.say(f"{objection}: the driver stays")
            return False
        if token is not None:
            # Noted before the stop: if the stop fails, the next round must not take it for undone.
            self.stopped_tokens.add(token)
            order = StopOrder(_ACTOR, mark.why, token=token, asker=mark.try_id)
            self.say(stop_driver(store, pipeline, order, clock=self.clock, say=self.say))
        elif first:
            self.say("no driver holds the lease")
        return True

    def _set_stopped(self, store: Store, before: DesiredDocument) -> str | None:
        """Steps 2 and 3. Returns why the mark no longer holds."""
        pipeline = self.mark.pipeline
        set_desired_state(store, pipeline, DesiredState.STOPPED, who=_ACTOR, why=self.mark.why)
        objection = self.find_objection()
        if objection is not None:
            # Another writer that came in between keeps its desired state.
            with suppress(ConfigurationError):
                set_desired_state(
                    store,
                    pipeline,
                    before.state,
                    who=before.who,
                    why=before.why,
                    only_from=DesiredState.STOPPED,
                )
        return objection

    def _was_undone_by_run(self, desired: DesiredDocument, token: int | None) -> bool:
        """Whether the marked run has undone the stop before its worker learned of the mark."""
        if desired.state is DesiredState.RUN:
            return desired.why == f"run {self.mark.run_id}"
        return (
            desired.state is DesiredState.STOPPED
            and desired.why == self.mark.why
            and token is not None
            and token not in self.stopped_tokens
        )
