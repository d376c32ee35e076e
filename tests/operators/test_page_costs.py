"""What the Streams page asks of the store, however many streams and epochs there are.

`make bench-page` prints the seconds.
"""

from __future__ import annotations

import pytest
from sortedcontainers import SortedDict
from starlette.testclient import TestClient
from tests.checkpoints.histories import CountingStore
from tests.operators.history import History
from tests.operators.pages import FakeAirflowQueries, app_of
from tests.servers.memory_store import MemoryBucket

from tidegate.checkpoints.bucket_layout import generate_attempt_id
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_index import SlotIndex

QUESTIONS = ("", "/checkpoints", "/checkpoints?before=0-900", "/checkpoints?before=0-200")


@pytest.fixture
def store() -> CountingStore:
    """An empty store that counts what it is asked."""
    return CountingStore(MemoryBucket(SortedDict()))


def ask(store: CountingStore, pipelines: list[str], path: str) -> tuple[int, int, int]:
    """Ask a page that has just started: requests, bytes that it read, bytes of the answer."""
    app = app_of(FakeAirflowQueries(pipelines, store))
    before, received = store.requests.total(), store.received
    with TestClient(app) as page:
        answer = page.get(path)
    assert answer.status_code == 200
    return store.requests.total() - before, store.received - received, len(answer.content)


def test_fifty_streams_cost_fifty_times_one(store: CountingStore) -> None:
    """At most eight requests for each; bytes read and answered grow no faster than the streams."""
    names = [f"p{number:02}" for number in range(50)]
    for name in names:
        History(store, name).extend(2)
    one, fifty = ask(store, names[:1], "/api/streams"), ask(store, names, "/api/streams")
    assert one[0] <= 8
    for spent, alone in zip(fifty, one, strict=True):
        assert spent <= 50 * alone


@pytest.fixture(scope="module")
def long_stream() -> tuple[CountingStore, list[dict[str, int]]]:
    """A stream of 4,000 epochs, indexed as drivers do it; what each question cost at 1,000."""
    store = CountingStore(MemoryBucket(SortedDict()))
    history = History(store, "long")
    first = history.extend(1)[0]
    add_epochs(history, first, 1_000)
    short = [ask(store, ["long"], f"/api/streams/long.stream{path}") for path in QUESTIONS]
    add_epochs(history, first, 4_000)
    return store, [{"requests": one[0], "read": one[1], "answered": one[2]} for one in short]


def add_epochs(history: History, first: Manifest, newest: int) -> None:
    """Seal copies of the first epoch up to this slot, and refresh the index."""
    for slot in range(history.log.head().slot + 1, newest + 1):
        changed = {"slot": slot, "attempt": generate_attempt_id()}
        changed |= {"created_at": first.created_at + slot * 1_000_000}
        copy = first.model_copy(update=changed)
        history.store.put(history.log.layout.slot_key(0, slot), copy.to_bytes())
    SlotIndex(history.log, workers=2).refresh()


@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=["stream", "newest", "deep", "first"])
def test_a_long_history_costs_as_much_as_a_short_one(
    long_stream: tuple[CountingStore, list[dict[str, int]]], number: int
) -> None:
    """Four times the epochs: a few more requests for the index, and an answer of the same size."""
    store, short = long_stream
    requests, read, answered = ask(store, ["long"], f"/api/streams/long.stream{QUESTIONS[number]}")
    assert requests <= short[number]["requests"] + 8
    assert read <= short[number]["read"] + 3_000 * 350  # bytes of an epoch in the index
    assert answered <= 1.2 * short[number]["answered"]
