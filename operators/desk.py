"""What Airflow knows of the pipelines: their DAGs, who may do what, and the runs by which people act on a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.hitl import HITLDetail
from airflow.models.taskinstance import TaskInstance
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.utils.session import create_session
from sqlalchemy import func, select
from sqlalchemy.orm import selectinload

from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.operators.access import StoreAccess
from tidegate.operators.factory import STORE_TAG

__all__ = ["ACTIONS", "STREAM", "Desk"]

STREAM: Final = ".stream"
ACTIONS: Final = ("recover", "pin", "splice", "backfill", "maintain")  # kinds of DAGs by which a person acts on a stream
_RUNS: Final = 8


class Desk:
    """Reads Airflow's own database. One instance serves every request."""

    def streams(self, user: Any) -> list[dict[str, Any]]:
        """The streams somebody may see, by name."""
        seen = self._readable(user)
        return [stream for stream in self._streams() if stream["dag_id"] in seen]

    def stream(self, dag_id: str) -> dict[str, Any] | None:
        """One of them, or None. The caller has asked whether it may be seen."""
        return next((stream for stream in self._streams() if stream["dag_id"] == dag_id), None)

    def store(self, conn_id: str | None) -> Store:
        """Open the store that an Airflow connection names; None for the environment's. As the API server finds connections.

        Raises:
            ConfigurationError: there is no such connection, or it names no store.
        """
        if conn_id is None:
            return StoreAccess.resolve().open()
        try:
            found = Connection.get_connection_from_secrets(conn_id)
        except AirflowNotFoundException as error:
            raise ConfigurationError(
                f"Airflow knows no connection {conn_id!r}, which the pipeline's store is said to have",
                code="airflow.no_connection",
                advice="make it in Airflow (Admin > Connections), or correct conn_id in build_dags(...)",
            ) from error
        return StoreAccess.of(found).open()

    def actions(self, user: Any, pipeline: str) -> list[str]:
        """The kinds of action DAGs of a pipeline that this user may start."""
        with create_session() as session:
            ids = [f"{pipeline}.{kind}" for kind in ACTIONS]
            there = session.scalars(select(DagModel.dag_id).where(DagModel.dag_id.in_(ids), ~DagModel.is_stale)).all()
        return [dag_id.rpartition(".")[2] for dag_id in there if self._may_start(user, dag_id)]

    def runs(self, user: Any, pipeline: str) -> list[dict[str, Any]]:
        """The newest runs of the action DAGs, newest first, with their unfinished tasks and what they wait for."""
        seen = self._readable(user)
        ids = [f"{pipeline}.{kind}" for kind in ACTIONS if f"{pipeline}.{kind}" in seen]
        with create_session() as session:
            newest = select(DagRun).where(DagRun.dag_id.in_(ids)).order_by(DagRun.run_after.desc()).limit(_RUNS)
            runs = session.scalars(newest).all()
            tasks = session.execute(
                select(TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.state, HITLDetail)
                .join(HITLDetail, HITLDetail.ti_id == TaskInstance.id, isouter=True)
                .where(TaskInstance.dag_id.in_(ids), TaskInstance.run_id.in_([run.run_id for run in runs]))
                .order_by(TaskInstance.start_date)
            ).all()
            return [_run(run, [task for task in tasks if task[:2] == (run.dag_id, run.run_id)]) for run in runs]

    def _readable(self, user: Any) -> set[str]:
        return set(get_auth_manager().get_authorized_dag_ids(user=user, method="GET"))

    def _may_start(self, user: Any, dag_id: str) -> bool:
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        return bool(
            get_auth_manager().is_authorized_dag(method="POST", access_entity=DagAccessEntity.RUN, details=details, user=user)
        )

    def _streams(self) -> list[dict[str, Any]]:
        with create_session() as session:
            found = session.scalars(
                select(DagModel)
                .options(selectinload(DagModel.tags))
                .where(DagModel.dag_id.endswith(STREAM), ~DagModel.is_stale, DagModel.tags.any(name="tidegate"))
                .order_by(DagModel.dag_id)
            ).all()
            dags = [(dag.dag_id, bool(dag.is_paused), _conn_id(tag.name for tag in dag.tags)) for dag in found]
            running = dict(
                session.execute(
                    select(DagRun.dag_id, func.count()).where(DagRun.state.in_(["running", "queued"])).group_by(DagRun.dag_id)
                ).all()
            )
        return [
            {"dag_id": dag_id, "paused": paused, "runs": int(running.get(dag_id, 0)), "conn_id": conn_id}
            for dag_id, paused, conn_id in dags
        ]


def _conn_id(tags: Iterable[str]) -> str | None:
    """The connection of the stream's store, as the factory noted it."""
    return next((tag.removeprefix(STORE_TAG) for tag in tags if tag.startswith(STORE_TAG)), None)


def _run(run: DagRun, tasks: Iterable[Any]) -> dict[str, Any]:
    tasks = list(tasks)
    return {
        "kind": run.dag_id.rpartition(".")[2],
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "state": str(run.state),
        "who": run.triggering_user_name,
        "at": _ms(run.run_after),
        "ended": _ms(run.end_date),
        "conf": {name: value for name, value in (run.conf or {}).items() if isinstance(value, str | bool | int)},
        "tasks": [{"task": task, "state": str(state) if state else None} for _, _, task, state, _ in tasks],
        "question": next(
            (_question(task, asked) for _, _, task, _, asked in tasks if asked and asked.responded_at is None), None
        ),
    }


def _question(task: str, asked: HITLDetail) -> dict[str, Any]:
    return {
        "task": task,
        "subject": asked.subject,
        "body": asked.body,
        "options": list(asked.options),
        "assigned": [person["id"] for person in asked.assignees or []],
        "since": _ms(asked.created_at),
    }


def _ms(at: Any) -> int | None:
    return None if at is None else int(at.timestamp() * 1000)
