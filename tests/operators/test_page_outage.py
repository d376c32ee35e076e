"""The page while the bucket does not answer: it must not hold up the API server it runs in."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from fastapi import Request
from tests.manual_clock import ManualClock
from tests.operators.history import History
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.operators import page_api
from tidegate.operators.page_api import MAX_REQUESTS
from tidegate.operators.stream_view import StreamView


def _ask(url: str) -> None:
    with suppress(urllib.error.URLError), urllib.request.urlopen(url, timeout=30) as answer:
        answer.read()


def test_a_silent_bucket_leaves_threads_for_other_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty requests of open tabs wait for the bucket, and a task's heartbeat is answered."""
    monkeypatch.setattr(page_api, "_QUEUE_PATIENCE", 0.2)
    answers, arrived = threading.Event(), threading.Semaphore(0)

    def hang(request: StoreRequest) -> None:
        answers.wait(60)

    def beat() -> dict[str, str]:
        return {}

    async def count(request: Request, proceed: Any) -> Any:
        arrived.release()
        return await proceed(request)

    app = app_of(FakeAirflowQueries(["p"], MemoryStore(hook=hang)))
    app.add_api_route("/heartbeat", beat)  # in the same pool of threads, like Airflow's own
    app.middleware("http")(count)
    with served(app) as url, ThreadPoolExecutor(60) as tabs:
        for number in range(60):
            kind = "" if number % 2 else "/p.stream"
            tabs.submit(_ask, f"{url}/api/streams{kind}")
        for _ in range(60):
            assert arrived.acquire(timeout=20)
        with urllib.request.urlopen(f"{url}/heartbeat", timeout=10) as answer:
            assert answer.status == 200
        answers.set()


def test_a_failure_is_shared_for_a_while() -> None:
    """A bucket that did not answer is not asked again by each tab; after five seconds it is."""
    clock, bucket, away, asked = ManualClock(), MemoryBucket(), [False], [0]
    History(MemoryStore(bucket), "p").extend(2)

    def count(request: StoreRequest) -> Fault | None:
        asked[0] += 1
        return Fault.REFUSED if away[0] else None

    queries = FakeAirflowQueries(["p", "q"], MemoryStore(bucket, hook=count))
    with served(app_of(queries, clock)) as url:
        away[0] = True
        _ask(f"{url}/api/streams")
        begun = asked[0]
        assert begun > 0
        for path in ("", "/p.stream", "/q.stream/checkpoints"):
            _ask(f"{url}/api/streams{path}")
        assert asked[0] == begun
        away[0] = False
        clock.advance(5.0)
        with urllib.request.urlopen(f"{url}/api/streams/p.stream") as answer:
            assert answer.status == 200


def test_a_row_that_is_being_read_is_shown_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for another one holds a thread, so it takes what was seen last."""
    monkeypatch.setattr("tidegate.operators.stream_view._LOCK_PATIENCE", 0.05)
    store = MemoryStore()
    History(store, "p").extend(2)
    view = StreamView(store, "p", fresh=0.0)
    before = view.summary()
    with ThreadPoolExecutor(1) as other:
        other.submit(view._lock.acquire).result()
        assert view.summary() == before
        other.submit(view._lock.release).result()


def test_the_page_lets_few_requests_in() -> None:
    """The API server has 40 threads for everything that it does."""
    assert MAX_REQUESTS <= 4
