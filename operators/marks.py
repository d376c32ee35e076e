"""A person ended a stream's task in Airflow: the API server, which did it, sees to the driver; no triggerer is needed.

Airflow tells a trigger that its task has ended only if it runs it: not while the triggerer is down, and not when the mark
came before the trigger. But the API server tells listeners of every mark. Ours notes which try was marked, waits for the
request's commit, and then, in a thread beside the request:

1. looks who drives, and only then whether the mark holds: not cleared since, no other run that waits or has begun
2. says that the stream shall be stopped, so that the sweep leaves it alone
3. looks once more whether the mark holds, and takes step 2 back if not: a re-run may have said `run` in between
4. asks the driver of step 1, by its token, to drain; then goes on as `stop_driver` does

A re-run that comes later says `run` itself, and launches a driver when the one that drains has gone. A task that was awake
may have launched a driver that has no lease yet; so it is looked after for a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import object_session

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.desired import DesiredDocument, DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.errors import ConfigurationError, TransientError
from tidegate.operators.control import stop_driver

__all__ = ["MarkedTask", "StopOnMark", "on_task_marked"]

_ACTOR: Final = "airflow"
_RETRY_SECONDS: Final = 300.0  # seconds, while store or database do not answer
_RETRY_AFTER: Final = 5.0
# A worker hears with its next heartbeat that its task was ended (a minute by default); a driver has its lease soon after.
_AWAKE_TASK_SECONDS: Final = 120.0
_LEASE_POLL_SECONDS: Final = 3.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MarkedTask:
    """What a person did.

    Attributes:
        try_id: of the task's try; a clear gives the task another one.
        dag_id: `<pipeline>.stream`.
        run_id: of the run.
        state: what the task was set to.
        asleep: the task was deferred, so that it launches nothing any more.
        at: when.
    """

    try_id: str
    dag_id: str
    run_id: str
    state: str
    asleep: bool
    at: datetime

    @property
    def pipeline(self) -> str:
        """Whose stream it is."""
        return self.dag_id.rpartition(".")[0]

    @property
    def why(self) -> str:
        """Said to the driver, and in desired.json."""
        return f"the task was set to {self.state} in Airflow"


def on_task_marked(task: Any, state: str) -> None:
    """Called by Airflow inside the request that marks the task. Returns at once; acts when the request is committed."""
    mark = MarkedTask(str(task.id), task.dag_id, task.run_id, state, task.trigger_id is not None, datetime.now(UTC))
    session = object_session(task)
    if session is None:
        _start_stop_thread(mark)
    else:
        event.listen(session, "after_commit", lambda _: _start_stop_thread(mark), once=True)


def _start_stop_thread(mark: MarkedTask) -> None:
    threading.Thread(target=_stop_marked_driver, args=(mark,), name=f"mark {mark.dag_id}", daemon=True).start()


def _stop_marked_driver(mark: MarkedTask) -> None:
    """What the thread does. Nobody waits for it, so it says everything in the API server's log."""
    from tidegate.operators.desk import AirflowQueries

    desk = AirflowQueries()

    def log_step(text: str) -> None:
        _log.info("%s of %s: %s: %s", mark.run_id, mark.dag_id, mark.why, text)

    try:
        StopOnMark(mark, lambda: desk.open_stream_store(mark.dag_id), lambda: desk.find_objection(mark), say=log_step).run()
    except Exception:
        _log.exception("%s of %s: %s, and the driver may go on", mark.run_id, mark.dag_id, mark.why)


class StopOnMark:
    """Brings one mark to the driver.

    Args:
        mark: what was done.
        store: opens the pipeline's store; None when the DAG is none of ours.
        objection: why the mark does not hold (any more); None while it does.
        clock: for waiting.
        say: told about every step.
    """

    def __init__(
        self,
        mark: MarkedTask,
        store: Callable[[], Store | None],
        objection: Callable[[], str | None],
        *,
        clock: Clock = SYSTEM_CLOCK,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._mark, self._open, self._objection, self._clock, self._say = mark, store, objection, clock, say
        self._asked: set[int] = set()  # tokens of the drivers that were stopped

    def run(self) -> None:
        """Until the driver is gone and no other can come, or the mark no longer holds."""
        begun = self._clock.monotonic()
        awake_until = begun if self._mark.asleep else begun + _AWAKE_TASK_SECONDS
        first = True
        while True:
            try:
                store = self._open()
                if store is None or not self._apply_mark(store, first):
                    return
                first = False
            except (TransientError, SQLAlchemyError) as error:
                if self._clock.monotonic() - begun > _RETRY_SECONDS:
                    self._say(f"given up, the driver may go on: {error}")
                    return
                self._say(f"once more in {_RETRY_AFTER:.0f} s: {error}")
                self._clock.sleep(_RETRY_AFTER)
                continue
            if self._clock.monotonic() >= awake_until:
                return
            self._clock.sleep(_LEASE_POLL_SECONDS)

    def _apply_mark(self, store: Store, first: bool) -> bool:
        """Whether the mark holds; then the driver that was there is gone, and the stream is said to be stopped."""
        pipeline, mark = self._mark.pipeline, self._mark
        before, lease = read_desired_state(store, pipeline), read_lease(store, pipeline)
        token = None if lease is None or lease.is_free else lease.token
        if not first and not self._was_undone_by_run(before, token):
            return True
        objection = self._objection()
        if objection is None and before.state is DesiredState.RECOVERING:
            objection = "a restore is under way, and says itself what shall be"
        if objection is None and before.state is DesiredState.RUN:
            set_desired_state(store, pipeline, DesiredState.STOPPED, who=_ACTOR, why=mark.why)
            objection = self._objection()
            if objection is not None:
                with suppress(ConfigurationError):  # somebody else has said by now what shall be
                    set_desired_state(store, pipeline, before.state, who=before.who, why=before.why, only_from=DesiredState.STOPPED)
        if objection is not None:
            self._say(f"{objection}: the driver stays")
            return False
        if token is not None:
            self._asked.add(token)
            stopped = stop_driver(
                store, pipeline, who=_ACTOR, why=mark.why, token=token, asker=mark.try_id, clock=self._clock, say=self._say
            )
            self._say(stopped)
        elif first:
            self._say("nobody drives")
        return True

    def _was_undone_by_run(self, now: DesiredDocument, token: int | None) -> bool:
        """Whether the marked run itself has undone the mark before its worker heard of it."""
        if now.state is DesiredState.RUN:
            return now.why == f"run {self._mark.run_id}"
        return now.state is DesiredState.STOPPED and now.why == self._mark.why and token is not None and token not in self._asked
