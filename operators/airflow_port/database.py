"""Reads Airflow's own database: the pipelines' DAGs, permissions and runs."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.errors import ParseImportError
from airflow.models.hitl import HITLDetail
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.utils.session import create_session
from sqlalchemy import func, select
from sqlalchemy.orm import Session, selectinload

from tidegate.checkpoints.store import Store
from tidegate.json_types import JsonObject, JsonView
from tidegate.operators.errors import NO_CONNECTION
from tidegate.operators.factory import APPROVAL_TAG, BROKEN_SPECS_DAG_ID, STORE_TAG_PREFIX
from tidegate.operators.pipeline_operator import ACTIVE_RUN_STATES
from tidegate.operators.store_access import StoreAccess

STREAM_DAG_SUFFIX = ".stream"
TIDEGATE_TAG = "tidegate"
# Kinds of DAGs by which a person acts on a stream.
ACTION_DAG_KINDS = (
    "recover",
    "stop",
    "pin",
    "deploy",
    "abort_barrier",
    "splice",
    "backfill",
    "maintain",
)
# Restores and pins have a trail of their own in the bucket.
TIMELINE_DAG_KINDS = ("stream", "stop", "abort_barrier", "backfill")
_RUNS_SHOWN = 8
# Airflow records all DAGs of one parse within this time; a hundred pipelines take seconds.
_PARSE_WINDOW = timedelta(minutes=1)


class AirflowQueries:
    """Reads Airflow's own database. One instance serves every request."""

    def list_streams(self, user: Any) -> list[JsonObject]:
        """Return the streams that the user may see, by name, with `may_restore`."""
        readable = self._readable_dag_ids(user)

        def may_restore(stream: JsonView) -> bool:
            recover = f"{stream['dag_id'].removesuffix(STREAM_DAG_SUFFIX)}.recover"
            return recover in readable and self._may_start(user, recover)

        return [
            {**stream, "may_restore": may_restore(stream)}
            for stream in self._query_streams()
            if stream["dag_id"] in readable
        ]

    def list_broken_specs(self, user: Any) -> list[str]:
        """Return file, line, field and problem of each spec that could not be read, in Markdown.

        Of all folders whose DAG of broken specs the user may see (`tidegate.broken_specs`, and what
        begins so).
        """
        readable = self._readable_dag_ids(user)
        lines = []
        with create_session() as session:
            dags = session.scalars(
                select(DagModel)
                .where(DagModel.dag_id.startswith(BROKEN_SPECS_DAG_ID), ~DagModel.is_stale)
                .order_by(DagModel.dag_id)
            ).all()  # a stale one's last findings have been corrected
            for dag in (dag for dag in dags if dag.dag_id in readable):
                kept = SerializedDagModel.get(dag.dag_id, session=session)
                data = (kept.data or {}) if kept is not None else {}
                lines += str(data["dag"].get("doc_md", "")).split("\n")
        return [line for line in lines if line]

    def find_stream(self, dag_id: str) -> JsonObject | None:
        """Return one stream, or None. The caller has checked that the user may see it."""
        streams = self._query_streams()
        return next((stream for stream in streams if stream["dag_id"] == dag_id), None)

    def open_store(self, conn_id: str | None) -> Store:
        """Open the store of `resolve_access`."""
        return self.resolve_access(conn_id).open()

    def resolve_access(self, conn_id: str | None) -> StoreAccess:
        """Return access to the store that an Airflow connection names; None: the environment's.

        Raises:
            ConfigurationError: there is no such connection, or it names no store.
        """
        if conn_id is None:
            return StoreAccess.resolve()
        try:
            connection = Connection.get_connection_from_secrets(conn_id)
        except AirflowNotFoundException as error:
            raise NO_CONNECTION(conn_id=conn_id) from error
        return StoreAccess.from_connection(connection)

    def open_stream_store(self, dag_id: str) -> Store | None:
        """Open the store of a stream, even if Airflow no longer finds its DAG.

        Returns None if the DAG does not belong to tidegate.
        """
        with create_session() as session:
            query = select(DagModel).options(selectinload(DagModel.tags))
            # Not by `_query_streams`: a mark must stop the driver of a stale DAG as well.
            dag = session.scalar(query.where(DagModel.dag_id == dag_id))
            tags = [tag.name for tag in dag.tags] if dag is not None else []
        return self.open_store(_find_store_connection(tags)) if TIDEGATE_TAG in tags else None

    def list_startable_actions(self, user: Any, pipeline: str) -> list[str]:
        """Return the kinds of a pipeline's DAGs that the user may start: actions and `stream`."""
        dag_ids = [f"{pipeline}.{kind}" for kind in ("stream", *ACTION_DAG_KINDS)]
        with create_session() as session:
            existing = session.scalars(
                select(DagModel.dag_id).where(DagModel.dag_id.in_(dag_ids), ~DagModel.is_stale)
            ).all()
        return [dag_id.rpartition(".")[2] for dag_id in existing if self._may_start(user, dag_id)]

    def list_action_runs(
        self,
        user: Any,
        pipeline: str,
        kinds: Iterable[str] = ACTION_DAG_KINDS,
        limit: int = _RUNS_SHOWN,
    ) -> list[JsonObject]:
        """Return the newest runs of DAGs of these kinds that the user may see, newest first.

        Each has its tasks with their states, and the question that it waits for; `refusal` in it
        says why an answer of the user would not count, None if it would. Times in milliseconds.
        """
        readable = self._readable_dag_ids(user)
        dag_ids = [dag_id for kind in kinds if (dag_id := f"{pipeline}.{kind}") in readable]
        with create_session() as session:
            runs = session.scalars(
                select(DagRun)
                .where(DagRun.dag_id.in_(dag_ids))
                .order_by(DagRun.run_after.desc())
                .limit(limit)
            ).all()
            task = TaskInstance
            tasks = session.execute(
                select(task.dag_id, task.run_id, task.task_id, task.state, HITLDetail)
                .join(HITLDetail, HITLDetail.ti_id == task.id, isouter=True)
                .where(task.dag_id.in_(dag_ids), task.run_id.in_([run.run_id for run in runs]))
                .order_by(task.start_date)
            ).all()
            return [
                self._describe_run(
                    user, run, [row[2:] for row in tasks if row[:2] == (run.dag_id, run.run_id)]
                )
                for run in runs
            ]

    def _readable_dag_ids(self, user: Any) -> set[str]:
        return set(get_auth_manager().get_authorized_dag_ids(user=user, method="GET"))

    def _may_start(self, user: Any, dag_id: str) -> bool:
        # Starting is a permission per DAG: a user may pin but not restore, for example.
        return self._may(user, dag_id, "POST", DagAccessEntity.RUN)

    def _may(
        self, user: Any, dag_id: str, method: Literal["POST", "PUT"], entity: DagAccessEntity
    ) -> bool:
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        return bool(
            get_auth_manager().is_authorized_dag(
                method=method, access_entity=entity, details=details, user=user
            )
        )

    def _describe_run(self, user: Any, run: DagRun, tasks: list[Any]) -> JsonObject:
        questions = (
            {
                "task": task,
                "subject": asked.subject,
                "body": asked.body,
                "options": list(asked.options),
                "assigned": [person["id"] for person in asked.assignees or []],
                "since": _to_milliseconds(asked.created_at),
                "refusal": self._explain_refusal(user, run, asked),
            }
            for task, _, asked in tasks
            if asked and asked.responded_at is None
        )
        return {
            "kind": run.dag_id.rpartition(".")[2],
            "dag_id": run.dag_id,
            "run_id": run.run_id,
            "state": str(run.state),
            "who": run.triggering_user_name,
            # A scheduled run may be due hours before Airflow could start it.
            "at": _to_milliseconds(run.start_date or run.run_after),
            "ended": _to_milliseconds(run.end_date),
            # Scalars only, as the forms send them; a run by API may carry anything.
            "conf": {
                name: value
                for name, value in (run.conf or {}).items()
                if isinstance(value, str | bool | int)
            },
            "tasks": [
                {"task": task, "state": str(state) if state else None} for task, state, _ in tasks
            ],
            "question": next(questions, None),
        }

    def _explain_refusal(self, user: Any, run: DagRun, asked: HITLDetail) -> str | None:
        """Why an approval by the user would not count; None if it would."""
        names = {str(user.get_name()), str(user.get_id())}
        if run.triggering_user_name in names:
            return "you have asked for it, so another person has to approve it"
        assigned = {str(person["id"]) for person in asked.assignees or []}
        if assigned and not names & assigned:
            return f"only {' or '.join(sorted(assigned))} may answer"
        if not self._may(user, run.dag_id, "PUT", DagAccessEntity.HITL_DETAIL):
            return "you have no right in Airflow to answer"
        return None

    def _query_streams(self) -> list[JsonObject]:
        """Every stream but those that were removed on purpose: see `_explain_stale_dag`."""
        with create_session() as session:
            dags = session.scalars(
                select(DagModel)
                .options(selectinload(DagModel.tags))
                .where(
                    DagModel.dag_id.endswith(STREAM_DAG_SUFFIX),
                    DagModel.tags.any(name=TIDEGATE_TAG),
                )
                .order_by(DagModel.dag_id)
            ).all()
            last_parsed, broken = _query_files(session)
            counts = session.execute(
                select(DagRun.dag_id, func.count(), func.max(DagRun.run_after))
                .where(DagRun.state.in_(ACTIVE_RUN_STATES))
                .group_by(DagRun.dag_id)
            )
            runs = {dag_id: (int(count), newest) for dag_id, count, newest in counts}
            streams = []
            for dag in dags:
                active, begun = runs.get(dag.dag_id, (0, None))
                unread = (
                    _explain_stale_dag(dag, active, last_parsed, broken) if dag.is_stale else None
                )
                if dag.is_stale and unread is None:
                    continue
                tags = [tag.name for tag in dag.tags]
                streams.append(
                    {
                        "dag_id": dag.dag_id,
                        "paused": bool(dag.is_paused),
                        "runs": active,
                        "run_since": _to_milliseconds(begun),
                        "conn_id": _find_store_connection(tags),
                        "approval": APPROVAL_TAG in tags,
                        "unread": unread,
                    }
                )
        return streams


_DagFile = tuple[Any, ...]  # bundle and path


def _query_files(session: Session) -> tuple[dict[_DagFile, datetime | None], set[_DagFile]]:
    """When each DAG file was last read without errors, and which files have errors now."""
    file = (DagModel.bundle_name, DagModel.relative_fileloc)
    parsed = session.execute(select(*file, func.max(DagModel.last_parsed_time)).group_by(*file))
    errors = session.execute(select(ParseImportError.bundle_name, ParseImportError.filename))
    return {tuple(row[:2]): row[2] for row in parsed}, {tuple(row) for row in errors}


def _explain_stale_dag(
    dag: DagModel, runs: int, last_parsed: Mapping[_DagFile, datetime | None], broken: set[_DagFile]
) -> str | None:
    """Why Airflow calls a DAG stale: `errors` in its file, `missing` under a run; None: removed.

    Errors in a file make all of its DAGs stale, also those that were removed from it long ago, so
    only DAGs of the file's last good parse count. A file that is removed as a whole loses its
    errors. A DAG may also be missing only because its file was read too slowly.
    """
    file = (dag.bundle_name, dag.relative_fileloc)
    last = last_parsed.get(file)
    if (
        file in broken
        and last is not None
        and dag.last_parsed_time is not None
        and last - dag.last_parsed_time < _PARSE_WINDOW
    ):
        return "errors"
    return "missing" if runs else None


def _find_store_connection(tags: Iterable[str]) -> str | None:
    """The connection of the stream's store, which the factory writes into a tag of the DAG."""
    prefix = STORE_TAG_PREFIX
    return next((tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)), None)


def _to_milliseconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp() * 1000)
