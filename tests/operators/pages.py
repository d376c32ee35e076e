"""The page served without Airflow: a desk that knows its DAGs by heart, and no login.

python -m tests.operators.pages [PORT]     seven streams, of which one is alive, until interrupted
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from airflow.api_fastapi.core_api.security import get_user
from fastapi import FastAPI
from tests.operators.history import GALLERY, gallery
from tests.servers.memory_store import MemoryBucket, MemoryStore

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.store import Store
from tidegate.jobs.cli.page_results import answer_question
from tidegate.operators.airflow_port.page_access import REQUIRE_SITE_ACCESS, REQUIRE_STREAM_ACCESS
from tidegate.operators.child_processes import rebuild_error
from tidegate.operators.page_api import make_app
from tidegate.operators.store_access import StoreAccess


class FakeAirflowQueries:
    """Knows the DAGs by heart; everyone may do what `may` says. All are in one store."""

    def __init__(
        self,
        pipelines: Sequence[str],
        store: Store,
        *,
        may: Sequence[str] = ("stream", "stop", "recover", "pin", "deploy", "abort_barrier"),
        paused: Sequence[str] = (),
    ) -> None:
        self.pipelines, self.may, self.paused = list(pipelines), list(may), set(paused)
        self.shown: list[dict[str, Any]] = []
        self.past: list[dict[str, Any]] = []
        self.broken: list[str] = []
        self.approval = False
        self.store = store

    def open_store(self, conn_id: str | None) -> Store:
        return self.store

    def resolve_access(self, conn_id: str | None) -> StoreAccess:
        return StoreAccess(self.store.url)

    def list_streams(self, user: Any) -> list[dict[str, Any]]:
        own = {"runs": 1, "run_since": None, "conn_id": None, "approval": self.approval}
        own["may_restore"] = "recover" in self.may
        return [
            {"dag_id": f"{p}.stream", "paused": p in self.paused, "unread": None, **own}
            for p in sorted(self.pipelines)
        ]

    def list_broken_specs(self, user: Any) -> list[str]:
        return self.broken

    def find_stream(self, dag_id: str) -> dict[str, Any] | None:
        return next(
            (stream for stream in self.list_streams(None) if stream["dag_id"] == dag_id), None
        )

    def list_startable_actions(self, user: Any, pipeline: str) -> list[str]:
        return self.may

    def list_action_runs(self, user: Any, pipeline: str, *kinds: Any) -> list[dict[str, Any]]:
        runs = self.past if kinds else self.shown
        return [run for run in runs if run["dag_id"].startswith(f"{pipeline}.")]


class ResultsInThisProcess:
    """Answers from a store that no other process can open."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ask(self, pipeline: str, ask: str, arguments: dict[str, str]) -> dict[str, Any]:
        question = {"pipeline": pipeline, "ask": ask, "arguments": arguments}
        answer = answer_question(self._store, question)
        if "error" in answer:
            raise rebuild_error(answer["error"])
        data: dict[str, Any] = answer["data"]
        return data


def app_of(desk: FakeAirflowQueries, clock: Clock = SYSTEM_CLOCK) -> FastAPI:
    """The page's application for a user whom no one asks for a login."""
    options: dict[str, Any] = {"airflow": desk, "clock": clock}
    if isinstance(desk.store, MemoryStore):
        options["open_results"] = lambda _: ResultsInThisProcess(desk.store)
    app = make_app(**options)
    for asked in (REQUIRE_SITE_ACCESS.dependency, REQUIRE_STREAM_ACCESS.dependency, get_user):
        assert asked is not None
        app.dependency_overrides[asked] = lambda: None
    return app


@contextmanager
def served(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The application on a port of this machine; its address."""
    outer = FastAPI()
    outer.mount("/tidegate", app)
    server = uvicorn.Server(
        uvicorn.Config(outer, host="127.0.0.1", port=port, log_level="warning", ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/tidegate"
    finally:
        server.should_exit = True
        thread.join(60)


def main() -> None:
    """Serve the gallery until interrupted; its first stream goes on."""
    store = MemoryStore(MemoryBucket())
    alive = gallery(store)
    with served(
        app_of(FakeAirflowQueries(GALLERY, store, paused=["orders"])),
        int(sys.argv[1]) if len(sys.argv) > 1 else 0,
    ) as url:
        sys.stdout.write(f"{url}/page\n")
        while True:
            time.sleep(alive.every)
            alive.epoch(time.time())


if __name__ == "__main__":
    main()
