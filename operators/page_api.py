"""The Streams page: static files, and the small JSON API that they ask every few seconds.

Every route asks Airflow who the user is and what they may see. No route writes: a restore or a pin
is a DAG run, started through Airflow's own API, with its permissions, its audit log and its refusal
of other sites' requests.
"""

from __future__ import annotations

import hashlib
import mimetypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Annotated, Any, Final

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import (
    GetUserDep,
    requires_access_dag,
    requires_access_view,
)
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.operators.airflow_db import STREAM_DAG_SUFFIX, AirflowQueries
from tidegate.operators.errors import NO_STREAM
from tidegate.operators.stream_view import (
    CHART_POINTS,
    CHECKPOINTS_PER_PAGE,
    READ_WORKERS,
    StreamView,
    build_unknown_row,
)

# The page loads nothing from other sites, runs only its own scripts, and only Airflow may put it
# into a frame.
_PAGE_CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
    " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_COMMON_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": _PAGE_CSP,
    "Cache-Control": "no-cache",
    **_COMMON_HEADERS,
}
# Data Docs show values from the data, so they may have styles but run no scripts.
_DOCS_CSP: Final = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors"
    " 'self'"
)
_DOCS_HEADERS: Final = {"Content-Security-Policy": _DOCS_CSP, **_COMMON_HEADERS}
_MEDIA_TYPES: Final = {"css": "text/css", "js": "text/javascript", "html": "text/html"}

REQUIRE_SITE_ACCESS = Depends(requires_access_view(AccessView.WEBSITE))
REQUIRE_STREAM_ACCESS = Depends(requires_access_dag("GET"))

PositionParam = Annotated[str | None, Query(pattern=r"^\d{1,9}-\d{1,10}$")]


def make_app(airflow: AirflowQueries | None = None) -> FastAPI:
    """Return the application behind `/tidegate`.

    Args:
        airflow: reads Airflow's DAGs, runs and connections.
    """
    app = FastAPI(
        title="tidegate",
        dependencies=[REQUIRE_SITE_ACCESS],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_exception_handler(TidegateError, _respond_with_error)
    airflow = airflow or AirflowQueries()
    views = _StreamViews(airflow)
    # Routes are plain functions, which FastAPI runs in threads: the stores' clients block.
    prefix = "/api/streams/{dag_id}"
    app.include_router(_make_site_routes(views, airflow))
    app.include_router(
        _make_stream_routes(views, airflow), prefix=prefix, dependencies=[REQUIRE_STREAM_ACCESS]
    )
    return app


def _make_site_routes(views: _StreamViews, airflow: AirflowQueries) -> APIRouter:
    """The page itself, the list of streams, and the Data Docs."""
    routes = APIRouter()

    @routes.get("/page")
    def serve_page(request: Request) -> Response:
        return _serve_file("page.html", request)

    @routes.get("/assets/{name}")
    def serve_asset(name: str, request: Request) -> Response:
        return _serve_file(name, request)

    @routes.get("/api/streams")
    def list_streams(user: GetUserDep) -> dict[str, Any]:
        return {
            "at": time.time_ns() // 1_000_000,
            "streams": views.summaries(airflow.list_streams(user)),
        }

    @routes.get("/docs/{dag_id}/{path:path}", dependencies=[REQUIRE_STREAM_ACCESS])
    def serve_data_docs(dag_id: str, path: str) -> Response:
        pipeline = dag_id.removesuffix(".quality")
        key = f"{BucketLayout(pipeline).quality_prefix}docs/{path or 'index.html'}"
        dag = airflow.find_stream(f"{pipeline}{STREAM_DAG_SUFFIX}")
        if dag is None:
            raise NO_STREAM(dag_id=dag_id)
        try:
            data = views.store_for(dag["conn_id"]).get(key).data
        except (NotFoundError, ValueError):
            raise HTTPException(404, f"no such page: {key}") from None
        return Response(
            data, media_type=mimetypes.guess_type(key)[0] or "text/plain", headers=_DOCS_HEADERS
        )

    return routes


def _make_stream_routes(views: _StreamViews, airflow: AirflowQueries) -> APIRouter:
    """What the page asks about one stream. The caller checks that the user may see it."""
    routes = APIRouter()

    def find_view(dag_id: str) -> StreamView:
        return views.view_for(find_dag(dag_id))

    def find_dag(dag_id: str) -> dict[str, Any]:
        dag = airflow.find_stream(dag_id)
        if dag is None:
            raise NO_STREAM(dag_id=dag_id)
        return dag

    @routes.get("")
    def show_stream(
        dag_id: str,
        user: GetUserDep,
        since: PositionParam = None,
        span: Annotated[int, Query(ge=0)] = CHART_POINTS,
    ) -> dict[str, Any]:
        pipeline, dag = parse_pipeline_name(dag_id), find_dag(dag_id)
        return {
            "now": time.time_ns() // 1_000_000,
            **views.view_for(dag).detail(_parse_position(since), span, **dag),
            "may": airflow.list_startable_actions(user, pipeline),
            "actions": airflow.list_action_runs(user, pipeline),
        }

    @routes.get("/checkpoints")
    def list_checkpoints(
        dag_id: str,
        before: PositionParam = None,
        limit: Annotated[int, Query(ge=1, le=100)] = CHECKPOINTS_PER_PAGE,
        abandoned: bool = False,
    ) -> dict[str, Any]:
        return find_view(dag_id).checkpoint_page(
            _parse_position(before), limit=limit, abandoned=abandoned
        )

    @routes.get("/impact")
    def show_impact(dag_id: str, checkpoint: str) -> dict[str, Any]:
        return find_view(dag_id).restore_impact(checkpoint)

    @routes.get("/diff")
    def show_diff(dag_id: str, left: str, right: str) -> dict[str, Any]:
        return find_view(dag_id).diff(left, right)

    @routes.get("/verify")
    def verify_checkpoint(dag_id: str, checkpoint: str) -> dict[str, Any]:
        return find_view(dag_id).verify(checkpoint)

    return routes


def parse_pipeline_name(dag_id: str) -> str:
    """Return `flights` for `flights.stream`.

    Raises:
        ConfigurationError: the DAG does not belong to tidegate.
    """
    pipeline = dag_id.rpartition(".")[0]
    if not dag_id.endswith(STREAM_DAG_SUFFIX) or not pipeline:
        raise NO_STREAM(dag_id=dag_id)
    return pipeline


class _StreamViews:
    """One view per pipeline, and one client per store, because clients are expensive."""

    def __init__(self, airflow: AirflowQueries) -> None:
        self._airflow, self._lock = airflow, threading.Lock()
        self._stores: dict[str | None, Store] = {}
        self._views: dict[str, StreamView] = {}
        self._pool = ThreadPoolExecutor(READ_WORKERS, thread_name_prefix="tidegate-page")

    def store_for(self, conn_id: str | None) -> Store:
        with self._lock:
            if conn_id not in self._stores:
                self._stores[conn_id] = self._airflow.open_store(conn_id)
            return self._stores[conn_id]

    def view_for(self, dag: dict[str, Any]) -> StreamView:
        pipeline, store = parse_pipeline_name(dag["dag_id"]), self.store_for(dag["conn_id"])
        with self._lock:
            # The DAG may name another connection, and so another store, than at the last request.
            if pipeline not in self._views or self._views[pipeline].store is not store:
                self._views[pipeline] = StreamView(store, pipeline)
            return self._views[pipeline]

    def summaries(self, dags: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A row per stream.

        Where the first stream of a store finds that the store does not answer, the store's other
        streams do not wait for the same time-out.
        """
        first: dict[str | None, dict[str, Any]] = {}
        for dag in dags:
            if dag["conn_id"] not in first:
                first[dag["conn_id"]] = self._summarize_stream(dag)
        rows = self._pool.map(lambda dag: self._summarize_like(first[dag["conn_id"]], dag), dags)
        return list(rows)

    def _summarize_like(self, first: dict[str, Any], dag: dict[str, Any]) -> dict[str, Any]:
        if first["dag_id"] == dag["dag_id"]:
            return first
        if first.get("away"):
            return {**first, **dag, "pipeline": parse_pipeline_name(dag["dag_id"])}
        return self._summarize_stream(dag)

    def _summarize_stream(self, dag: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.view_for(dag).summary(**dag)
        except ConfigurationError as error:
            # The connection is missing or names no store: the other streams are still shown.
            return build_unknown_row(parse_pipeline_name(dag["dag_id"]), error, **dag)


def _serve_file(name: str, request: Request) -> Response:
    """A file of the page; 304 if the browser has this version."""
    kind = _MEDIA_TYPES.get(name.rpartition(".")[2])
    file = files("tidegate.operators").joinpath("web", name)
    if kind is None or "/" in name or not file.is_file():
        raise HTTPException(404, f"no such file: {name}")
    data = file.read_bytes()
    # Cache-Control no-cache and a tag: an upgrade shows at the next reload, at the cost of a 304.
    headers = {**_PAGE_HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:20]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=f"{kind}; charset=utf-8", headers=headers)


def _parse_position(text: str | None) -> tuple[int, int] | None:
    timeline, _, slot = (text or "").partition("-")
    return (int(timeline), int(slot)) if slot else None


def _respond_with_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TidegateError)  # noqa: S101 - registered for this class only
    status = 404 if isinstance(error, ConfigurationError) else 503
    return JSONResponse(error.as_dict(), status_code=status)
