"""What the trigger and the task tell Airflow's own metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
from airflow.sdk._shared.observability.metrics.base_stats_logger import NoStatsLogger, StatsLogger
from airflow.sdk._shared.observability.metrics.otel_logger import SafeOtelLogger
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.observability import stats
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.operators.stream_metrics import STREAM_METRICS
from tests.operators.supervising import NotingLauncher, execute_stream, resume_stream

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import Store, StoreUnavailableError
from tidegate.operators import stream_operator, trigger
from tidegate.operators.trigger import StreamTrigger

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)
Noted = Callable[[], dict[tuple[str, str], float]]


@pytest.fixture
def noted() -> Iterator[Noted]:
    """(name without Airflow's prefix, tags besides the pipeline) -> value, by the logger that
    Airflow has for OpenTelemetry.
    """
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    stats.initialize(
        factory=lambda: cast(StatsLogger, SafeOtelLogger(provider)), export_legacy_names=True
    )

    def read() -> dict[tuple[str, str], float]:
        data = reader.get_metrics_data()
        found: dict[tuple[str, str], float] = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else ():
            for point in metric.data.data_points:
                tags = dict(point.attributes or {})
                assert tags.pop("pipeline") == "p"
                found[metric.name.removeprefix("airflow."), ",".join(map(str, tags.values()))] = (
                    getattr(point, "value", 0.0)
                )
        return found

    yield read
    stats.initialize(factory=NoStatsLogger, export_legacy_names=True)
    provider.shutdown()


@pytest.fixture
def store(empty_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A bucket of its own per test; triggers look at it without settling."""
    monkeypatch.setattr(trigger, "read_settle_seconds", lambda: 0.0)
    return empty_store


async def _until(noted: Noted, name: str, least: float) -> None:
    while noted().get((name, ""), 0.0) < least:
        await asyncio.sleep(0.01)


async def _watch(during: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """The payload of a trigger's event; `during` runs beside it."""
    watching = StreamTrigger(pipeline="p", floor=1, poll=0.01)

    async def first() -> dict[str, Any]:
        (payload,) = [dict(event.payload) async for event in watching.run()]
        return payload

    beside = asyncio.ensure_future(during())
    payload = await first()
    await beside
    return payload


def test_a_watched_stream_and_its_loss(store: Store, noted: Noted) -> None:
    """Looks are counted while it lives, with the ages of heartbeat and seal.

    Its end by state, and that no one looks any more.
    """
    lease = Lease.acquire(store, "p", ELSEWHERE)
    sealed_at = SYSTEM_CLOCK.wall_ticks() - 60_000_000
    write_status(
        store,
        "p",
        DriverStatus(
            token=1,
            driver="d",
            step="wait",
            at=0,
            body={"state": "running", "sealed_at": sealed_at},
        ),
    )
    alive: dict[tuple[str, str], float] = {}

    async def during() -> None:
        await _until(noted, "tidegate.stream.looks", 3)
        alive.update(noted())
        lease.release()

    assert asyncio.run(_watch(during))["state"] == "lost"
    assert alive["tidegate.stream.watched", ""] == 1
    assert (
        0
        <= alive["tidegate.stream.heartbeat.age", ""]
        < 60
        <= alive["tidegate.stream.seal.age", ""]
        < 120
    )
    assert not any(name == "tidegate.stream.ended" for name, _ in alive)
    after = noted()
    assert after["tidegate.stream.ended", "lost"] == 1
    assert after["tidegate.stream.watched", ""] == 0
    assert {name for name, _ in after} <= STREAM_METRICS


def test_looks_without_an_answer(
    store: Store, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that does not answer does not count as a lost stream, but as an unanswered look."""
    lease = Lease.acquire(store, "p", ELSEWHERE)

    def away(*_: object) -> None:
        raise StoreUnavailableError("away", code="store.unavailable")

    async def during() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "get", away)
            await _until(noted, "tidegate.stream.looks.unanswered", 2)
        lease.release()

    asyncio.run(_watch(during))
    assert noted()["tidegate.stream.ended", "lost"] == 1


def test_a_cancelled_trigger_watches_no_more(store: Store, noted: Noted) -> None:
    """Its task was cleared, or the triggerer ends.

    The stream counts as watched by the trigger that watches it then.
    """
    Lease.acquire(store, "p", ELSEWHERE)

    async def cancelled() -> None:
        watching = asyncio.ensure_future(_watch(lambda: asyncio.sleep(0)))
        await _until(noted, "tidegate.stream.looks", 1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(cancelled())
    assert noted()["tidegate.stream.watched", ""] == 0
    assert not any(name == "tidegate.stream.ended" for name, _ in noted())


def test_launches_and_adoptions(
    store: Store, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start, a replacement of what was lost, and a driver that ran already are three things."""
    monkeypatch.setattr(stream_operator, "launch_driver", NotingLauncher.launch)
    execute_stream()
    with pytest.raises(TaskDeferred):
        resume_stream("lost")
    Lease.acquire(store, "p", ELSEWHERE)
    execute_stream()
    found = noted()
    launched = {
        tags: value for (name, tags), value in found.items() if name == "tidegate.driver.launched"
    }
    assert launched == {"start": 1, "replacement": 1}
    assert found["tidegate.driver.adopted", ""] == 1
