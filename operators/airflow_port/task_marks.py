"""Marks of people on tasks, as the API server's listener and database know them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow.listeners.listener import get_listener_manager
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import event, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import object_session

from tidegate.operators.pipeline_operator import ACTIVE_RUN_STATES

DatabaseAwayError = SQLAlchemyError


@dataclass(frozen=True)
class TaskFacts:
    """What the database knows of a stream's task, its run, and the other runs.

    Attributes:
        try_id: of the present try; None if the run was deleted.
        state: of the task.
        run_ended: when the run ended, if it has.
        other_runs: runs of the stream that wait or have begun.
    """

    try_id: str | None
    state: str | None
    run_ended: datetime | None
    other_runs: int


def register_listener(listener: object) -> None:
    """Have Airflow call the listener in this process."""
    get_listener_manager().add_listener(listener)  # type: ignore[no-untyped-call]  # Airflow's


def run_after_commit(task: Any, call: Callable[[], object]) -> None:
    """Call when the request that changes the task is committed; at once without a request."""
    session = object_session(task)
    if session is None:
        call()
    else:
        event.listen(session, "after_commit", lambda _: call(), once=True)


def read_task_facts(dag_id: str, run_id: str) -> TaskFacts:
    """Read what is known of the task `stream` of a run."""
    with create_session() as session:
        task = session.execute(
            select(TaskInstance.id, TaskInstance.state).where(
                TaskInstance.dag_id == dag_id,
                TaskInstance.run_id == run_id,
                TaskInstance.task_id == "stream",
            )
        ).first()
        of_dag, of_run = DagRun.dag_id == dag_id, DagRun.run_id == run_id
        ended = session.scalar(select(DagRun.end_date).where(of_dag, of_run))
        other_runs = session.scalar(
            select(func.count())
            .select_from(DagRun)
            .where(of_dag, ~of_run, DagRun.state.in_(ACTIVE_RUN_STATES))
        )
    try_id, state = (str(task.id), str(task.state)) if task is not None else (None, None)
    return TaskFacts(try_id, state, ended, int(other_runs or 0))
