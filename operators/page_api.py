"""The Streams page: static files, and the small JSON API that they ask every few seconds.

Every route asks Airflow who the user is and what they may see. No route writes: a restore or a pin
is a DAG run, started through Airflow's own API, with its permissions, its audit log and its refusal
of other sites' requests.
"""

import asyncio
import hashlib
import mimetypes
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from airflow.sdk.configuration import conf
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.deploy_requests import propose_deploy
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import ConfigurationError, TidegateError, TransientError
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.spec_masks import mask_spec_lines
from tidegate.jobs.spec.user_code import collect_code
from tidegate.json_types import JsonObject

from .airflow_port.database import (
    STREAM_DAG_SUFFIX,
    TIMELINE_DAG_KINDS,
    AirflowQueries,
)
from .airflow_port.page_access import REQUIRE_SITE_ACCESS, REQUIRE_STREAM_ACCESS, GetUserDep
from .child_processes import ResultsProcess
from .errors import NO_SPEC_FILE, NO_STREAM, PAGE_BUSY
from .store_access import StoreAccess
from .store_guard import shorten_patience
from .stream_view import (
    CHART_POINTS,
    CHECKPOINTS_PER_PAGE,
    READ_WORKERS,
    SpecFile,
    StreamView,
    build_unknown_row,
)

# The page loads nothing from other sites, runs only its own scripts, and only Airflow may put it
# into a frame.
_PAGE_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
    " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_COMMON_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
_PAGE_HEADERS = {
    "Content-Security-Policy": _PAGE_CSP,
    "Cache-Control": "no-cache",
    **_COMMON_HEADERS,
}
# Data Docs show values from the data. So they may have styles, but run no scripts and send no
# forms. `sandbox` gives them an origin of their own: they cannot use the session of their reader.
_DOCS_CSP = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors"
    " 'self'; form-action 'none'; base-uri 'none'; sandbox"
)
_DOCS_HEADERS = {"Content-Security-Policy": _DOCS_CSP, **_COMMON_HEADERS}
_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html"}

ResultsQuestion = Literal["tables", "sample", "export", "row", "whatif", "proof"]
PositionParam = Annotated[str | None, Query(pattern=r"^\d{1,9}-\d{1,10}$")]


# The routes share the API server's 40 threads with Airflow's own routes, among them the heartbeats
# of running tasks. So a bucket that does not answer must never hold more than a few of them.
MAX_REQUESTS = 4
_QUEUE_PATIENCE = 5.0  # seconds; the page asks again after a while
_RUNS_IN_TIMELINE = 60
_FAILURE_KEPT = 5.0  # seconds in which a bucket that did not answer is not asked again


def parse_pipeline_name(dag_id: str) -> str:
    """Return `flights` for `flights.stream`.

    Raises:
        ConfigurationError: the DAG does not belong to tidegate.
    """
    pipeline = dag_id.rpartition(".")[0]
    if not dag_id.endswith(STREAM_DAG_SUFFIX) or not pipeline:
        raise NO_STREAM(dag_id=dag_id)
    return pipeline


@dataclass(eq=False)
class _PageStore:
    """A store, with what is kept of it between requests.

    Attributes:
        store: its client, which is expensive.
        results: the process that reads its tables.
        views: pipeline -> its view.
        failure: why it did not answer the last time, if it did not.
        failed_at: when that was.
    """

    store: Store
    results: ResultsProcess
    views: dict[str, StreamView] = field(default_factory=dict)
    failure: TransientError | None = None
    failed_at: float = 0.0


class _PageServices:
    """What the routes share.

    Attributes:
        airflow: reads Airflow's DAGs, runs and connections.
        slots: of the requests that may use a thread at the same time.
    """

    def __init__(
        self,
        airflow: AirflowQueries,
        clock: Clock,
        open_results: Callable[[StoreAccess], ResultsProcess],
    ) -> None:
        self.airflow, self.slots = airflow, asyncio.Semaphore(MAX_REQUESTS)
        self._clock, self._lock, self._open_results = clock, threading.Lock(), open_results
        self._stores: dict[str | None, _PageStore] = {}
        self._pool = ThreadPoolExecutor(READ_WORKERS, thread_name_prefix="tidegate-page")

    @contextmanager
    def open_store(self, conn_id: str | None) -> Iterator[_PageStore]:
        """Yield a store, unless it did not answer a moment ago: then fail at once.

        Raises:
            TransientError: the store does not answer, or did not.
        """
        found, now = self._find_store(conn_id), self._clock.monotonic()
        if found.failure is not None and now - found.failed_at < _FAILURE_KEPT:
            raise copy(found.failure)  # an exception that is raised twice would collect tracebacks
        try:
            yield found
        except TransientError as error:
            if error.code != PAGE_BUSY.code:
                found.failure, found.failed_at = error, self._clock.monotonic()
            raise

    def find_dag(self, dag_id: str) -> JsonObject:
        """What Airflow knows of the stream; 404 if there is none."""
        dag = self.airflow.find_stream(dag_id)
        if dag is None:
            raise NO_STREAM(dag_id=dag_id)
        return dag

    @contextmanager
    def open_view(self, dag: JsonObject) -> Iterator[StreamView]:
        """Yield the view of a stream, as `open_store`."""
        with self.open_store(dag["conn_id"]) as found:
            pipeline = parse_pipeline_name(dag["dag_id"])
            find_file = partial(_load_spec_file, pipeline)
            view = StreamView(found.store, pipeline, find_file=find_file)
            yield found.views.setdefault(pipeline, view)

    def ask_results(
        self, dag_id: str, ask: ResultsQuestion, arguments: dict[str, str]
    ) -> JsonObject:
        """Ask the process that reads the tables of the stream's store."""
        found = self._find_store(self.find_dag(dag_id)["conn_id"])
        return found.results.ask(parse_pipeline_name(dag_id), ask, arguments)

    def _find_store(self, conn_id: str | None) -> _PageStore:
        with self._lock:
            if conn_id not in self._stores:
                results = self._open_results(self.airflow.resolve_access(conn_id))
                store = shorten_patience(self.airflow.open_store(conn_id))
                self._stores[conn_id] = _PageStore(store, results)
            return self._stores[conn_id]

    def summaries(self, dags: list[JsonObject]) -> list[JsonObject]:
        """A row per stream.

        Where the first stream of a store finds that the store does not answer, the store's other
        streams do not wait for the same time-out.
        """
        # One after another, so that each store is asked once before the pool asks for the rest.
        first = {dag["conn_id"]: dag for dag in reversed(dags)}
        rows = {dag["dag_id"]: self._summarize_stream(dag) for dag in first.values()}
        others = [dag for dag in dags if dag["dag_id"] not in rows]
        found = self._pool.map(self._summarize_stream, others)
        rows |= {dag["dag_id"]: row for dag, row in zip(others, found, strict=True)}
        return [rows[dag["dag_id"]] for dag in dags]

    def _summarize_stream(self, dag: JsonObject) -> JsonObject:
        try:
            with self.open_view(dag) as view:
                return view.summary(**dag)
        except TidegateError as error:
            # Also if the connection is missing or names no store: the others are still shown.
            return build_unknown_row(parse_pipeline_name(dag["dag_id"]), error, **dag)


def _find_services(request: Request) -> _PageServices:
    services: _PageServices = request.app.state.services
    return services


ServicesDep = Annotated[_PageServices, Depends(_find_services)]


async def _take_slot(services: ServicesDep) -> AsyncIterator[None]:
    """Let `MAX_REQUESTS` in. The others wait in the event loop, which costs no thread."""
    try:
        await asyncio.wait_for(services.slots.acquire(), _QUEUE_PATIENCE)
    except TimeoutError:
        raise PAGE_BUSY(what=f"{MAX_REQUESTS} of them") from None
    try:
        yield  # FastAPI resumes this after the answer
    finally:
        services.slots.release()


def _open_view(dag_id: str, services: ServicesDep) -> Iterator[StreamView]:
    with services.open_view(services.find_dag(dag_id)) as view:
        yield view


ViewDep = Annotated[StreamView, Depends(_open_view)]
_TAKE_SLOT = Depends(_take_slot)

# Routes are plain functions, which FastAPI runs in threads: the stores' clients block.

# The page itself, the list of streams, and the Data Docs.
_SITE_ROUTES = APIRouter()


@_SITE_ROUTES.get("/page")
def serve_page(request: Request) -> Response:
    """The page itself, the same for everyone."""
    return _serve_file("page.html", request)


@_SITE_ROUTES.get("/assets/{name}")
def serve_asset(name: str, request: Request) -> Response:
    """A script or style sheet of the page."""
    return _serve_file(name, request)


@_SITE_ROUTES.get("/errors")
def serve_error_codes(request: Request) -> Response:
    """What each error code means: docs/errors.md, with an anchor for each code."""
    return _serve_file("errors.html", request)


@_SITE_ROUTES.get("/api/streams", dependencies=[_TAKE_SLOT])
def list_streams(user: GetUserDep, services: ServicesDep) -> JsonObject:
    """A row for each stream that the user may see."""
    return {
        "at": time.time_ns() // 1_000_000,
        "streams": services.summaries(services.airflow.list_streams(user)),
        "broken_specs": services.airflow.list_broken_specs(user),
    }


@_SITE_ROUTES.get("/docs/{dag_id}/{path:path}", dependencies=[REQUIRE_STREAM_ACCESS, _TAKE_SLOT])
def serve_data_docs(dag_id: str, path: str, services: ServicesDep) -> Response:
    """A page of Great Expectations' Data Docs, from the bucket."""
    pipeline, _, kind = dag_id.rpartition(".")
    if kind != "quality":
        raise NO_STREAM(dag_id=dag_id)
    dag = services.find_dag(f"{pipeline}{STREAM_DAG_SUFFIX}")
    key = f"{BucketLayout(pipeline).quality_prefix}docs/{path or 'index.html'}"
    try:
        with services.open_store(dag["conn_id"]) as found:
            data = found.store.get(key).data
    except (NotFoundError, ValueError):
        raise HTTPException(404, f"no such page: {key}") from None
    return Response(
        data, media_type=mimetypes.guess_type(key)[0] or "text/plain", headers=_DOCS_HEADERS
    )


# What the page asks about one stream.
_STREAM_ROUTES = APIRouter(
    prefix="/api/streams/{dag_id}", dependencies=[REQUIRE_STREAM_ACCESS, _TAKE_SLOT]
)


@_STREAM_ROUTES.get("")
def show_stream(
    dag_id: str,
    user: GetUserDep,
    services: ServicesDep,
    since: PositionParam = None,
    span: Annotated[int, Query(ge=0)] = CHART_POINTS,
) -> JsonObject:
    """Everything about one stream, and what the user may do with it."""
    pipeline, dag = parse_pipeline_name(dag_id), services.find_dag(dag_id)
    with services.open_view(dag) as view:
        detail = view.detail(_parse_position(since), span, **dag)
    return {
        "now": time.time_ns() // 1_000_000,
        **detail,
        "may": services.airflow.list_startable_actions(user, pipeline),
        "actions": services.airflow.list_action_runs(user, pipeline),
    }


@_STREAM_ROUTES.get("/checkpoints")
def list_checkpoints(
    view: ViewDep,
    before: PositionParam = None,
    limit: Annotated[int, Query(ge=1, le=100)] = CHECKPOINTS_PER_PAGE,
    abandoned: bool = False,
    until: int | None = None,
    restorable: bool = False,
) -> JsonObject:
    """A page of the checkpoint table."""
    return view.checkpoint_page(
        _parse_position(before),
        limit=limit,
        abandoned=abandoned,
        until=until,
        restorable=restorable,
    )


@_STREAM_ROUTES.get("/impact")
def show_impact(view: ViewDep, checkpoint: str) -> JsonObject:
    """What a restore to the checkpoint would take back."""
    return view.restore_impact(checkpoint)


@_STREAM_ROUTES.get("/diff")
def show_diff(view: ViewDep, left: str, right: str) -> JsonObject:
    """What differs between two checkpoints."""
    return view.diff(left, right)


@_STREAM_ROUTES.get("/log")
def show_log(view: ViewDep) -> JsonObject:
    """The end of the newest driver's log."""
    return view.read_newest_log()


@_STREAM_ROUTES.get("/spec")
def show_spec(dag_id: str) -> JsonObject:
    """The file of the stream's spec, with line numbers as errors name them."""
    pipeline = parse_pipeline_name(dag_id)
    file, text = _find_spec_file(pipeline)
    return {"file": str(file), "lines": mask_spec_lines(text)}


@_STREAM_ROUTES.get("/deploy")
def show_deploy(view: ViewDep) -> JsonObject:
    """What a deploy of the file would change; nothing, while drivers run the file itself."""
    file, _ = _find_spec_file(view.pipeline)
    spec = load_any_spec(file)
    found = propose_deploy(view.store, spec, collect_code(spec, file))
    if found is None:
        return {"digest": None, "changes": [], "plan": [], "refused": False}
    return {
        "digest": found.copy.digest,
        "changes": [str(change) for change in found.changes],
        "plan": found.plan_lines,
        "refused": found.is_refused,
    }


@_STREAM_ROUTES.get("/verify")
def verify_checkpoint(view: ViewDep, checkpoint: str) -> JsonObject:
    """Whether everything that the checkpoint needs is there."""
    return view.verify(checkpoint)


@_STREAM_ROUTES.get("/timeline")
def show_timeline(view: ViewDep, user: GetUserDep, services: ServicesDep) -> JsonObject:
    """What happened to the stream, and the runs by which people acted on it."""
    events = view.read_timeline()
    runs = services.airflow.list_action_runs(
        user, view.pipeline, TIMELINE_DAG_KINDS, _RUNS_IN_TIMELINE
    )
    return {"events": events, "runs": runs}


@_STREAM_ROUTES.get("/checks")
def show_checks(view: ViewDep) -> JsonObject:
    """The quality checks of the newest run, and the values of earlier runs."""
    return view.read_checks()


@_STREAM_ROUTES.get("/results/{ask}")
def show_results(
    dag_id: str, ask: ResultsQuestion, request: Request, services: ServicesDep
) -> Response:
    """Tables, a sample of one, its newest rows as CSV, where a row is, or a what-if."""
    found = services.ask_results(dag_id, ask, dict(request.query_params))
    if ask != "export":
        return JSONResponse(found)
    name = f"{parse_pipeline_name(dag_id)}-{request.query_params.get('table')}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"', **_COMMON_HEADERS}
    return Response(found["csv"], media_type="text/csv", headers=headers)


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


def _load_spec_file(pipeline: str) -> SpecFile | None:
    """The spec in the file and its code; None if there is no file here, or it is not valid."""
    try:
        file, _ = _find_spec_file(pipeline)
        spec = load_any_spec(file)
        return spec, collect_code(spec, file)
    except TidegateError:
        return None


def _find_spec_file(pipeline: str) -> tuple[Path, str]:
    """The file that names the pipeline, and its text."""
    default = f"{conf.get('core', 'dags_folder')}/pipelines"
    folder = Path(os.environ.get("TIDEGATE_PIPELINES") or default)
    # The name stands at the margin, or in the outermost braces of a file in flow style or JSON.
    key, value = r"""^(\{[^{]*?)?["']?name["']?:""", rf"""["']?{re.escape(pipeline)}["']?"""
    named = re.compile(rf"{key}\s*{value}\s*([#,}}]|$)", re.MULTILINE)
    unread = []
    for file in sorted(folder.glob("*.yaml")):
        try:
            text = file.read_text("utf-8", errors="replace")
        except OSError as error:
            unread.append(f"; {file} could not be read: {error.strerror}")
            continue
        if named.search(text):
            return file, text
    raise NO_SPEC_FILE(pipeline=pipeline, folder=folder, unread="".join(unread))


def _parse_position(text: str | None) -> tuple[int, int] | None:
    timeline, _, slot = (text or "").partition("-")
    return (int(timeline), int(slot)) if slot else None


def _respond_with_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TidegateError)  # noqa: S101 - registered for this class only
    status = 404 if isinstance(error, ConfigurationError) else 503
    return JSONResponse(error.as_dict(), status_code=status)


def make_app(
    airflow: AirflowQueries | None = None,
    clock: Clock = SYSTEM_CLOCK,
    open_results: Callable[[StoreAccess], ResultsProcess] = ResultsProcess,
) -> FastAPI:
    """Return the application behind `/tidegate`.

    Args:
        airflow: reads Airflow's DAGs, runs and connections.
        clock: tells how long ago a store failed.
        open_results: makes the reader of a store's tables.
    """
    app = FastAPI(
        title="tidegate",
        dependencies=[REQUIRE_SITE_ACCESS],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_exception_handler(TidegateError, _respond_with_error)
    app.state.services = _PageServices(airflow or AirflowQueries(), clock, open_results)
    app.include_router(_SITE_ROUTES)
    app.include_router(_STREAM_ROUTES)
    return app
