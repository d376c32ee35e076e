"""What Airflow knows of the pipelines.

Their DAGs, who may do what, and the runs by which people act on a stream.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.errors import ParseImportError
from airflow.models.hitl import HITLDetail
from airflow.models.taskinstance import TaskInstance
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.utils.session import create_session
from sqlalchemy import event, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import object_session, selectinload

from tidegate.checkpoints.desired_state import (
    DesiredDocument,
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.operators.driver_shutdown import ENDED_TASK_STATES, stop_driver
from tidegate.operators.factory import STORE_TAG_PREFIX
from tidegate.operators.store_access import StoreAccess

if TYPE_CHECKING:
    pass

STREAM_DAG_SUFFIX: Final = ".stream"
TIDEGATE_TAG: Final = "tidegate"
ACTION_DAG_KINDS: Final = (
    "recover",
    "pin",
    "splice",
    "backfill",
    "maintain",
)  # kinds of DAGs by which a person acts on a stream
_RUNS_SHOWN: Final = 8
_ACTIVE_RUN_STATES: Final = ("queued", "running")
_PARSE_WINDOW: Final = timedelta(
    minutes=1
)  # in which Airflow notes all DAGs of a file; a hundred pipelines take seconds
_CLOCK_TOLERANCE: Final = timedelta(minutes=1)  # more than the clocks of two hosts differ


class AirflowQueries:
    """Reads Airflow's own database. One instance serves every request."""

    def list_streams(self, user: Any) -> list[dict[str, Any]]:
        """The streams somebody may see, by name."""
        seen = self._readable_dag_ids(user)
        return [stream for stream in self._query_streams() if stream["dag_id"] in seen]

    def find_stream(self, dag_id: str) -> dict[str, Any] | None:
        """One of them, or None. The caller has asked whether it may be seen."""
        return next(
            (stream for stream in self._query_streams() if stream["dag_id"] == dag_id), None
        )

    def open_store(self, conn_id: str | None) -> Store:
        """Open the store that an Airflow connection names; None for the environment's.

        As the API server finds connections.

        Raises:
            ConfigurationError: there is no such connection, or it names no store.
        """
        if conn_id is None:
            return StoreAccess.resolve().open()
        try:
            found = Connection.get_connection_from_secrets(conn_id)
        except AirflowNotFoundException as error:
            raise ConfigurationError(
                f"Airflow knows no connection {conn_id!r}, which the pipeline's store is said to"
                " have",
                code="airflow.no_connection",
                advice=(
                    "make it in Airflow (Admin > Connections), or correct conn_id in"
                    " build_dags(...)"
                ),
            ) from error
        return StoreAccess.from_connection(found).open()

    def open_stream_store(self, dag_id: str) -> Store | None:
        """The store of a stream, also of one that Airflow no longer finds.

        None when the DAG is none of ours.
        """
        with create_session() as session:
            wanted = (
                select(DagModel)
                .options(selectinload(DagModel.tags))
                .where(DagModel.dag_id == dag_id)
            )
            dag = session.scalar(wanted)
            tags = [tag.name for tag in dag.tags] if dag is not None else []
        return self.open_store(_find_store_connection(tags)) if TIDEGATE_TAG in tags else None

    def find_objection(self, mark: MarkedTask) -> str | None:
        """Why a person's mark of a stream's task does not concern the driver (any more).

        None while it does.
        """
        with create_session() as session:
            of_run = (TaskInstance.dag_id == mark.dag_id, TaskInstance.run_id == mark.run_id)
            tasks = session.execute(
                select(TaskInstance.id, TaskInstance.state).where(
                    *of_run, TaskInstance.task_id == "stream"
                )
            )
            task = tasks.first()  # None: the run was deleted after the mark
            ended = session.scalar(
                select(DagRun.end_date).where(
                    DagRun.dag_id == mark.dag_id, DagRun.run_id == mark.run_id
                )
            )
            of_others = (
                DagRun.dag_id == mark.dag_id,
                DagRun.run_id != mark.run_id,
                DagRun.state.in_(_ACTIVE_RUN_STATES),
            )
            others = session.scalar(select(func.count()).select_from(DagRun).where(*of_others))
        if task is not None and str(task.id) != mark.try_id:
            return "the task was cleared since"
        if task is not None and str(task.state) not in ENDED_TASK_STATES:
            return f"the task is {task.state}"
        if ended is not None and mark.at - ended > _CLOCK_TOLERANCE:
            return "its run had ended long before"
        return "another run waits or has begun, and adopts the driver" if others else None

    def list_startable_actions(self, user: Any, pipeline: str) -> list[str]:
        """The kinds of action DAGs of a pipeline that this user may start."""
        with create_session() as session:
            ids = [f"{pipeline}.{kind}" for kind in ACTION_DAG_KINDS]
            there = session.scalars(
                select(DagModel.dag_id).where(DagModel.dag_id.in_(ids), ~DagModel.is_stale)
            ).all()
        return [dag_id.rpartition(".")[2] for dag_id in there if self._may_start(user, dag_id)]

    def list_action_runs(self, user: Any, pipeline: str) -> list[dict[str, Any]]:
        """The newest runs of the action DAGs, newest first, with their unfinished tasks and what they wait for."""
        seen = self._readable_dag_ids(user)
        ids = [f"{pipeline}.{kind}" for kind in ACTION_DAG_KINDS if f"{pipeline}.{kind}" in seen]
        with create_session() as session:
            newest = (
                select(DagRun)
                .where(DagRun.dag_id.in_(ids))
                .order_by(DagRun.run_after.desc())
                .limit(_RUNS_SHOWN)
            )
            runs = session.scalars(newest).all()
            tasks = session.execute(
                select(
                    TaskInstance.dag_id,
                    TaskInstance.run_id,
                    TaskInstance.task_id,
                    TaskInstance.state,
                    HITLDetail,
                )
                .join(HITLDetail, HITLDetail.ti_id == TaskInstance.id, isouter=True)
                .where(
                    TaskInstance.dag_id.in_(ids),
                    TaskInstance.run_id.in_([run.run_id for run in runs]),
                )
                .order_by(TaskInstance.start_date)
            ).all()
            return [
                _describe_run(run, [task for task in tasks if task[:2] == (run.dag_id, run.run_id)])
                for run in runs
            ]

    def _readable_dag_ids(self, user: Any) -> set[str]:
        return set(get_auth_manager().get_authorized_dag_ids(user=user, method="GET"))

    def _may_start(self, user: Any, dag_id: str) -> bool:
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        return bool(
            get_auth_manager().is_authorized_dag(
                method="POST", access_entity=DagAccessEntity.RUN, details=details, user=user
            )
        )

    def _query_streams(self) -> list[dict[str, Any]]:
        """Every stream that Airflow finds, and of the others those that were not removed on purpose: see `_explain_stale_dag`."""
        with create_session() as session:
            found = session.scalars(
                select(DagModel)
                .options(selectinload(DagModel.tags))
                .where(
                    DagModel.dag_id.endswith(STREAM_DAG_SUFFIX),
                    DagModel.tags.any(name=TIDEGATE_TAG),
                )
                .order_by(DagModel.dag_id)
            ).all()
            of = (DagModel.bundle_name, DagModel.relative_fileloc)
            newest = {
                tuple(row[:2]): row[2]
                for row in session.execute(
                    select(*of, func.max(DagModel.last_parsed_time)).group_by(*of)
                )
            }
            broken = {
                tuple(row)
                for row in session.execute(
                    select(ParseImportError.bundle_name, ParseImportError.filename)
                )
            }
            active = (
                select(DagRun.dag_id, func.count())
                .where(DagRun.state.in_(_ACTIVE_RUN_STATES))
                .group_by(DagRun.dag_id)
            )
            runs = {dag_id: int(count) for dag_id, count in session.execute(active)}
            streams = []
            for dag in found:
                unread = (
                    _explain_stale_dag(dag, runs.get(dag.dag_id, 0), newest, broken)
                    if dag.is_stale
                    else None
                )
                if unread is not None or not dag.is_stale:
                    known = {
                        "dag_id": dag.dag_id,
                        "paused": bool(dag.is_paused),
                        "runs": runs.get(dag.dag_id, 0),
                    }
                    streams.append(
                        {
                            **known,
                            "conn_id": _find_store_connection(tag.name for tag in dag.tags),
                            "unread": unread,
                        }
                    )
        return streams


def _explain_stale_dag(
    dag: DagModel,
    runs: int,
    newest: Mapping[tuple[Any, ...], datetime | None],
    broken: set[tuple[Any, ...]],
) -> str | None:
    """How a DAG that Airflow calls stale came to be so.

    `errors` in its file, or `missing` under a run; None: removed.

    Errors in a file make all of its DAGs stale, also those that were removed from it long ago. So
    only those count that it had when it was last read. A file that is removed as a whole loses its
    errors. A DAG may also be missing only because its file was read too slowly.
    """
    file = (dag.bundle_name, dag.relative_fileloc)
    last = newest.get(file)
    if (
        file in broken
        and last is not None
        and dag.last_parsed_time is not None
        and last - dag.last_parsed_time < _PARSE_WINDOW
    ):
        return "errors"
    return "missing" if runs else None


def _find_store_connection(tags: Iterable[str]) -> str | None:
    """The connection of the stream's store, as the factory noted it."""
    return next(
        (tag.removeprefix(STORE_TAG_PREFIX) for tag in tags if tag.startswith(STORE_TAG_PREFIX)),
        None,
    )


def _describe_run(run: DagRun, tasks: Iterable[Any]) -> dict[str, Any]:
    tasks = list(tasks)
    return {
        "kind": run.dag_id.rpartition(".")[2],
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "state": str(run.state),
        "who": run.triggering_user_name,
        "at": _convert_to_milliseconds(run.run_after),
        "ended": _convert_to_milliseconds(run.end_date),
        "conf": {
            name: value
            for name, value in (run.conf or {}).items()
            if isinstance(value, str | bool | int)
        },
        "tasks": [
            {"task": task, "state": str(state) if state else None} for _, _, task, state, _ in tasks
        ],
        "question": next(
            (
                _describe_question(task, asked)
                for _, _, task, _, asked in tasks
                if asked and asked.responded_at is None
            ),
            None,
        ),
    }


def _describe_question(task: str, asked: HITLDetail) -> dict[str, Any]:
    return {
        "task": task,
        "subject": asked.subject,
        "body": asked.body,
        "options": list(asked.options),
        "assigned": [person["id"] for person in asked.assignees or []],
        "since": _convert_to_milliseconds(asked.created_at),
    }


def _convert_to_milliseconds(at: Any) -> int | None:
    return None if at is None else int(at.timestamp() * 1000)


# A person ended a stream's task in Airflow: the API server, which did it, sees to the driver; no
# triggerer is needed.
#
# Airflow tells a trigger that its task has ended only if it runs it: not while the triggerer is
# down, and not when the mark came before the trigger. But the API server tells listeners of every
# mark. Ours notes which try was marked, waits for the request's commit, and then, in a thread
# beside the request:
#
# 1. looks who drives, and only then whether the mark holds: not cleared since, no other run that
# waits or has begun 2. says that the stream shall be stopped, so that the sweep leaves it alone 3.
# looks once more whether the mark holds, and takes step 2 back if not: a re-run may have said `run`
# in between 4. asks the driver of step 1, by its token, to drain; then goes on as `stop_driver`
# does
#
# A re-run that comes later says `run` itself, and launches a driver when the one that drains has
# gone. A task that was awake may have launched a driver that has no lease yet; so it is looked
# after for a while.

_ACTOR: Final = "airflow"
_RETRY_SECONDS: Final = 300.0  # seconds, while store or database do not answer
_RETRY_AFTER: Final = 5.0
# A worker hears with its next heartbeat that its task was ended (a minute by default); a driver has
# its lease soon after.
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
    """Called by Airflow inside the request that marks the task.

    Returns at once; acts when the request is committed.
    """
    mark = MarkedTask(
        str(task.id),
        task.dag_id,
        task.run_id,
        state,
        task.trigger_id is not None,
        datetime.now(UTC),
    )
    session = object_session(task)
    if session is None:
        _start_stop_thread(mark)
    else:
        event.listen(session, "after_commit", lambda _: _start_stop_thread(mark), once=True)


def _start_stop_thread(mark: MarkedTask) -> None:
    threading.Thread(
        target=_stop_marked_driver, args=(mark,), name=f"mark {mark.dag_id}", daemon=True
    ).start()


def _stop_marked_driver(mark: MarkedTask) -> None:
    """What the thread does. Nobody waits for it, so it says everything in the API server's log."""
    desk = AirflowQueries()

    def log_step(text: str) -> None:
        _log.info("%s of %s: %s: %s", mark.run_id, mark.dag_id, mark.why, text)

    try:
        StopOnMark(
            mark,
            lambda: desk.open_stream_store(mark.dag_id),
            lambda: desk.find_objection(mark),
            say=log_step,
        ).run()
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
        self._mark, self._open, self._objection, self._clock, self._say = (
            mark,
            store,
            objection,
            clock,
            say,
        )
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
        """Whether the mark holds.

        Then the driver that was there is gone, and the stream is said to be stopped.
        """
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
                    set_desired_state(
                        store,
                        pipeline,
                        before.state,
                        who=before.who,
                        why=before.why,
                        only_from=DesiredState.STOPPED,
                    )
        if objection is not None:
            self._say(f"{objection}: the driver stays")
            return False
        if token is not None:
            self._asked.add(token)
            stopped = stop_driver(
                store,
                pipeline,
                who=_ACTOR,
                why=mark.why,
                token=token,
                asker=mark.try_id,
                clock=self._clock,
                say=self._say,
            )
            self._say(stopped)
        elif first:
            self._say("nobody drives")
        return True

    def _was_undone_by_run(self, now: DesiredDocument, token: int | None) -> bool:
        """Whether the marked run itself has undone the mark before its worker heard of it."""
        if now.state is DesiredState.RUN:
            return now.why == f"run {self._mark.run_id}"
        return (
            now.state is DesiredState.STOPPED
            and now.why == self._mark.why
            and token is not None
            and token not in self._asked
        )
