"""The Streams page: one HTML file that asks this small JSON API every few seconds.

Every route asks Airflow who is there and what they may see. There is no writing route: a restore is a run of the recover
DAG, started through Airflow's own API, with its permissions, its audit log and its check of the request's origin.
"""

from __future__ import annotations

import mimetypes
from importlib.resources import files
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag, requires_access_view
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from sqlalchemy import func, select

from tidegate.checkpoints.layout import Layout
from tidegate.checkpoints.store import NotFoundError
from tidegate.jobs.spec.errors import ConfigurationError, TidegateError
from tidegate.operators.access import StoreAccess
from tidegate.operators.view import StreamView, impact

__all__ = ["make_app"]

_STREAM = ".stream"
# The page loads nothing from anywhere else, and only Airflow may put it into a frame.
_POLICY = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'self'"
_HEADERS = {"Content-Security-Policy": _POLICY}
_DOCS_HEADERS = {"Content-Security-Policy": f"{_POLICY}; script-src 'none'"}  # Data Docs show values from the data


def make_app() -> FastAPI:
    """The application behind `/tidegate`."""
    everyone = [Depends(requires_access_view(AccessView.WEBSITE))]
    app = FastAPI(title="tidegate", dependencies=everyone, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TidegateError, _explain)
    views: dict[str, StreamView] = {}

    def view(dag_id: str) -> StreamView:
        pipeline = pipeline_of(dag_id)
        if pipeline not in views:
            views[pipeline] = StreamView(StoreAccess.resolve().open(), pipeline)
        return views[pipeline]

    @app.get("/page")
    def page() -> HTMLResponse:
        return HTMLResponse(files("tidegate.operators").joinpath("web/page.html").read_text(encoding="utf-8"), headers=_HEADERS)

    @app.get("/api/streams")
    def streams(user: GetUserDep) -> list[dict[str, Any]]:
        return [{**view(d["dag_id"]).summary(), **d} for d in _stream_dags() if _may(user, "GET", d["dag_id"])]

    @app.get("/api/streams/{dag_id}", dependencies=[Depends(requires_access_dag("GET"))])
    def stream(dag_id: str, user: GetUserDep) -> dict[str, Any]:
        recover = f"{pipeline_of(dag_id)}.recover"
        return {
            **_dag(dag_id),
            **view(dag_id).detail(),
            "recover_dag": recover,
            "may_restore": _may(user, "POST", recover, DagAccessEntity.RUN),
        }

    @app.get("/api/streams/{dag_id}/checkpoints", dependencies=[Depends(requires_access_dag("GET"))])
    def checkpoints(dag_id: str, offset: Annotated[int, Query(ge=0)] = 0) -> list[dict[str, Any]]:
        return view(dag_id).checkpoints(offset)

    @app.get("/api/streams/{dag_id}/impact", dependencies=[Depends(requires_access_dag("GET"))])
    def impact_of(dag_id: str, checkpoint: str) -> dict[str, Any]:
        return impact(view(dag_id).log, checkpoint)

    @app.get("/docs/{dag_id}/{path:path}", dependencies=[Depends(requires_access_dag("GET"))])
    def docs(dag_id: str, path: str) -> Response:
        pipeline = dag_id.removesuffix(".quality")
        key = f"{Layout(pipeline).quality}docs/{path or 'index.html'}"
        try:
            data = StoreAccess.resolve().open().get(key).data
        except (NotFoundError, ValueError):
            raise HTTPException(404, f"no such page: {key}") from None
        return Response(data, media_type=mimetypes.guess_type(key)[0] or "text/plain", headers=_DOCS_HEADERS)

    return app


def pipeline_of(dag_id: str) -> str:
    """`flights` of `flights.stream`.

    Raises:
        ConfigurationError: the DAG is none of ours.
    """
    pipeline = dag_id.rpartition(".")[0]
    if not dag_id.endswith(_STREAM) or not pipeline:
        raise _no_stream(dag_id)
    return pipeline


def _explain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TidegateError)  # noqa: S101 - registered for this class only
    return JSONResponse(error.as_dict(), status_code=404 if isinstance(error, ConfigurationError) else 503)


def _may(user: Any, method: Any, dag_id: str, entity: DagAccessEntity | None = None) -> bool:
    return bool(
        get_auth_manager().is_authorized_dag(method=method, access_entity=entity, details=DagDetails(id=dag_id), user=user)
    )


def _stream_dags() -> list[dict[str, Any]]:
    with create_session() as session:
        rows = session.execute(
            select(DagModel.dag_id, DagModel.is_paused)
            .where(DagModel.dag_id.endswith(_STREAM), ~DagModel.is_stale, DagModel.tags.any(name="tidegate"))
            .order_by(DagModel.dag_id)
        ).all()
        running = dict(
            session.execute(
                select(DagRun.dag_id, func.count()).where(DagRun.state.in_(["running", "queued"])).group_by(DagRun.dag_id)
            ).all()
        )
    return [{"dag_id": dag_id, "paused": bool(paused), "runs": int(running.get(dag_id, 0))} for dag_id, paused in rows]


def _dag(dag_id: str) -> dict[str, Any]:
    found = next((dag for dag in _stream_dags() if dag["dag_id"] == dag_id), None)
    if found is None:
        raise _no_stream(dag_id)
    return found


def _no_stream(dag_id: str) -> ConfigurationError:
    return ConfigurationError(f"there is no stream {dag_id!r}", code="page.no_stream", advice="see the list of streams")
