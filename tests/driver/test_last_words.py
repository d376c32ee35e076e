"""The end of a driver whose collector does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from tenacity import Retrying, stop_after_attempt

from tests.driver.sealed_epochs import FACTS, sealed
from tests.engine.harness import spec_of
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.lease import Lease, read_lease
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.jobs.driver import epoch_listeners
from tidegate.jobs.driver.epoch_listeners import EpochListeners
from tidegate.jobs.driver.pipeline_run import DriverSession, RunContext, RunOptions
from tidegate.jobs.sources.input_view import InputView


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A receiver of metrics and lineage that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OPENLINEAGE_URL", address)
        monkeypatch.setattr(epoch_listeners, "FLUSH_TIMEOUT", 0.2)
        yield


@pytest.mark.usefixtures("mute")
def test_the_lease_is_free_before_the_collector_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next driver need not wait for it."""
    store, spec = MemoryStore(), spec_of()
    lease = Lease.acquire(store, spec.name, ProcessIdentity.this_process())
    view = InputView(store, spec, tmp_path)
    options = RunOptions(store_url="memory://")
    retry = Retrying(stop=stop_after_attempt(1), reraise=True)
    context = RunContext(spec, options, store, tmp_path, threading.Event(), retry)
    run = DriverSession(context, view, "0" * 32, lease)
    free: list[bool] = []
    really = EpochListeners.close

    def close(observers: EpochListeners) -> None:
        seen = read_lease(store, spec.name)
        free.append(seen is not None and seen.is_free)
        really(observers)

    monkeypatch.setattr(EpochListeners, "close", close)
    run.close()
    view.close()
    assert free == [True]


@pytest.mark.usefixtures("mute")
@pytest.mark.timeout(20)  # the SDK by itself would wait for 30 s, lineage for 15
def test_last_words_are_bounded() -> None:
    """A mute receiver costs what is allowed for it, and a line in the log; nothing is raised."""
    bench, reports = sealed()
    observers = EpochListeners(bench.spec, bench.store, lambda: FACTS, lambda *_: None)
    for report in reports:
        observers.on_epoch(report, 0.1)
    with structlog.testing.capture_logs() as logs:
        observers.close()
    assert "lineage_dropped" in [line["event"] for line in logs]
