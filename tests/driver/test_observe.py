"""Metrics, lineage and log lines of the driver, from the reports of a real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from openlineage.client.serde import Serde
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.driver.sealed_epochs import FACTS, measured, sealed
from tests.engine.harness import SECOND, spec_of
from tests.servers.memory_store import MemoryStore
from tests.servers.otlp import collecting
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError
from tidegate.jobs.driver.epoch_listeners import (
    EpochListeners,
    create_lineage_sender,
    make_epoch_events,
    measure_landing,
)
from tidegate.jobs.driver.log_output import add_log_context
from tidegate.jobs.driver.otel_metrics import (
    DRIVER_STATES,
    METRICS,
    DriverMetrics,
    create_meter_provider,
)
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.spec.pipeline import PipelineSpec


def test_metrics_follow_the_counters() -> None:
    """What is measured is what the manifests say.

    Rows by disposition, late rows, windows, barriers, frontier, lags.
    """
    bench, reports = sealed()
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics = DriverMetrics(provider.get_meter("t"), "p", lambda: FACTS, bench.clock, lambda: 5.0)
    for report in reports:
        metrics.record_epoch(report, 0.5)
    found = measured(reader)
    last = reports[-1].manifest
    assert last is not None
    assert found["tidegate.epochs", ()] == found["tidegate.epoch.duration", ()] == 2
    assert found["tidegate.step.duration", (("step", "plan"),)] == 2
    for disposition in ("read", "released", "late"):
        total = sum(
            v
            for (n, a), v in found.items()
            if n == "tidegate.rows" and ("disposition", disposition) in a
        )
        assert total == getattr(last.counters, disposition), disposition
    assert found["tidegate.rows.late", (("output", "events"),)] == last.counters.late == 2
    assert found["tidegate.barriers", (("outcome", "complete"),)] == 1
    assert found["tidegate.frontier.lag", ()] == pytest.approx(
        (bench.clock.wall_ticks() - reports[-1].decision.frontier_after) / SECOND
    )
    assert found["tidegate.source.lag", (("member", "a/0"),)] == 7
    assert found["tidegate.source.backlog", (("member", "b/"),)] == 3
    assert found["tidegate.source.silent", (("source", "b"),)] == 5
    assert (
        found["tidegate.sink.lag", (("sink", "iceberg"),)] == found["tidegate.unpublished", ()] == 2
    )
    assert found["tidegate.publish.duration", (("sink", "iceberg"),)] == 1.5
    assert {name for name, _ in found} <= set(METRICS)
    provider.shutdown()


def test_a_tardy_source_closes_no_further_barrier() -> None:
    """The row of the barrier is written again, with the source that was tardy."""
    bench, reports = sealed()
    tardy = [replace(one, tardy=("a/0",)) for one in reports[-1].decision.barriers]
    report = replace(
        reports[-1],
        decision=replace(reports[-1].decision, barriers=(*reports[-1].decision.barriers, *tardy)),
    )
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics = DriverMetrics(provider.get_meter("t"), "p", lambda: FACTS, bench.clock, lambda: 5.0)
    metrics.record_epoch(report, 0.5)
    assert measured(reader)["tidegate.barriers", (("outcome", "complete"),)] == 1
    provider.shutdown()


def test_states_and_errors_that_are_over_are_shown_as_over() -> None:
    """A series that only ends looks the same for minutes.

    Of the states exactly one is 1, and an error that was is 0.
    """
    reader, facts = InMemoryMetricReader(), dict(FACTS)
    provider = MeterProvider([reader])
    DriverMetrics(provider.get_meter("t"), "p", lambda: facts)
    trouble, other = (
        (("class", "transient"), ("code", "sink.away")),
        (("class", "transient"), ("code", "store.unavailable")),
    )
    assert measured(reader)["tidegate.driver.error", trouble] == 1
    facts |= {
        "state": "waiting",
        "trouble": None,
        "error": {"class": "transient", "code": "store.unavailable"},
    }
    found = measured(reader)
    assert (found["tidegate.driver.error", trouble], found["tidegate.driver.error", other]) == (
        0,
        1,
    )
    assert {
        dict(at)["state"]: v for (n, at), v in found.items() if n == "tidegate.driver.state"
    } == {state: int(state == "waiting") for state in DRIVER_STATES}
    provider.shutdown()


def test_the_age_of_a_turn_is_not_that_of_a_checkpoint() -> None:
    """A driver that finds nothing to do seals nothing, and is well.

    One that does not come round is not.
    """
    bench, reports = sealed()
    reader, now = InMemoryMetricReader(), [0.0]
    provider = MeterProvider([reader])
    metrics = DriverMetrics(
        provider.get_meter("t"), "p", lambda: FACTS, bench.clock, lambda: now[0]
    )
    metrics.record_epoch(reports[0], 0.5)
    now[0] = 100.0
    metrics.record_epoch(replace(reports[1], manifest=None, sealed=None), 0.5)
    now[0] = 107.0
    found = measured(reader)
    assert (found["tidegate.loop.age", ()], found["tidegate.checkpoint.age", ()]) == (7.0, 107.0)
    provider.shutdown()


def test_a_collector_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real exporter, over HTTP; the last that comes of a driver is how it ended."""
    bench, reports = sealed()
    facts = dict(FACTS)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        observers = EpochListeners(bench.spec, bench.store, lambda: facts, lambda *_: None)
        for report in reports:
            observers.on_epoch(report, 0.5)
        facts["state"] = "finished"
        observers.close()
    assert collector.last("tidegate_epochs_total", pipeline="p") == 2
    assert collector.last("tidegate_epoch_duration_seconds_count", pipeline="p") == 2
    assert collector.last("tidegate_driver_state", pipeline="p", state="finished") == 1
    assert collector.last("tidegate_driver_state", pipeline="p", state="running") == 0
    resource = {
        a.key: a.value.string_value
        for a in collector.requests[-1].resource_metrics[0].resource.attributes
    }
    assert (resource["service.name"], resource["service.instance.id"]) == ("tidegate", "p")


@pytest.mark.parametrize(("error", "last"), [(None, "stopped"), (ValueError("x"), "failed")])
def test_the_last_word_of_a_landing(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, last: str
) -> None:
    """Whether it was stopped or failed is sent to the collector at its end, whenever that is."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with (
            nullcontext() if error is None else pytest.raises(ValueError, match="x"),
            measure_landing("p", "a") as landing,
        ):
            landing.record_batch(3)
            if error is not None:
                raise error
    own = {"pipeline": "p", "source": "a"}
    assert collector.last("tidegate_landing_rows_total", **own) == 3
    states = {
        s.attributes["state"]: s.value
        for s in collector.samples
        if s.name == "tidegate_landing_state"
    }
    assert states == {state: int(state == last) for state in ("running", "stopped", "failed")}


def test_nothing_is_measured_unless_asked() -> None:
    """Without an endpoint in the environment no meter is made, and no lineage is sent."""
    assert create_meter_provider({}, "p") is None
    assert (
        create_meter_provider(
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, "p"
        )
        is None
    )
    assert create_lineage_sender({"OPENLINEAGE_URL": "file:///etc/passwd"}) is None


class _Taker(BaseHTTPRequestHandler):
    bodies: list[tuple[str, str | None, dict[str, Any]]] = []  # noqa: RUF012 - one server, one test

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.bodies.append(
            (self.path, self.headers["Authorization"], json.loads(self.rfile.read(length)))
        )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def taker() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Taker)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_lineage_per_epoch(taker: str) -> None:
    """Each sealed epoch is one finished run, with its inputs, and its outputs' rows.

    The same epoch has the same run id.
    """
    bench, reports = sealed()
    sender = create_lineage_sender({"OPENLINEAGE_URL": taker, "OPENLINEAGE_API_KEY": "k"})
    assert sender is not None
    listeners = EpochListeners(bench.spec, bench.store, dict, lambda *_: None)
    listeners.lineage = sender
    for report in reports:
        listeners.on_epoch(report, 0.1)
    listeners.on_end(PoisonError("p: a row", code="x.y"))
    listeners.close()
    assert {(path, auth) for path, auth, _ in _Taker.bodies} == {("/api/v1/lineage", "Bearer k")}
    bodies = [body for _, _, body in _Taker.bodies]
    assert [body["eventType"] for body in bodies] == [
        "START",
        "COMPLETE",
        "START",
        "COMPLETE",
        "START",
        "FAIL",
    ]
    runs = [body["run"]["runId"] for body in bodies]
    assert (runs[::2], len(set(runs))) == (runs[1::2], 3)
    first = reports[0].manifest
    assert first is not None
    events = make_epoch_events(bench.spec, bench.store, first, 0.1, "tidegate")
    assert bodies[:2] == [Serde.to_dict(event) for event in events]
    assert bodies[0]["eventTime"] < bodies[1]["eventTime"]
    inputs = [(place["namespace"], place["name"]) for place in bodies[1]["inputs"]]
    assert inputs == [("memory://test", "inbox/x")] * 2
    rows = {
        o["name"]: o["outputFacets"]["outputStatistics"]["rowCount"] for o in bodies[1]["outputs"]
    }
    assert rows["p/iceberg/events"] == sum(f.rows for f in first.files["events"])
    assert bodies[5]["run"]["facets"]["errorMessage"]["message"] == "p: a row"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"path": "inbox/x"}, ("s3://bucket", "pre/inbox/x")),
        ({"path": "s3://other/a/b/"}, ("s3://other", "a/b")),
        ({"path": "s3://other"}, ("s3://other", "/")),
        ({"path": "FOLDER/in"}, ("file", "FOLDER/in")),
        (
            {"kind": "kafka", "kafka": {"servers": "b1:9092,b2:9092", "topic": "orders"}},
            ("kafka://b1:9092", "orders"),
        ),
    ],
)
def test_sources_have_the_names_that_other_tools_give_them(
    tmp_path: Path, source: dict[str, Any], expected: tuple[str, str]
) -> None:
    """A bucket and a path in it, a local path, a broker and a topic.

    Never tidegate's own namespace.
    """
    text = json.dumps(
        {"schema": {"t": "timestamp"}, "event_time": "t", "lag": "0", **source}
    ).replace("FOLDER", str(tmp_path))
    store = S3Store(S3Settings(bucket="bucket", prefix="pre"))
    (place,) = _second_of(spec_of(sources={"a": json.loads(text)}, windows={}), store)["inputs"]
    assert (place["namespace"], place["name"].replace(str(tmp_path), "FOLDER")) == expected


def test_sinks_are_outputs_and_tell_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table goes to Iceberg and by the sinks that follow it.

    Of an address only the parts that name the place are sent.
    """
    monkeypatch.setenv("SECRET", "hunter2")
    sinks = {
        "pg": {"kind": "postgres", "url": "postgresql://me:${SECRET}@db/shop", "namespace": "s"},
        "files": {"kind": "files", "path": "s3://lake/out/", "tables": ["events"]},
        "topics": {"kind": "kafka", "servers": "b:9092", "topic": "p.{table}", "tables": ["w"]},
        "hook": {
            "kind": "webhook",
            "url": "https://hook.example/${SECRET}?key=${SECRET}",
            "tables": ["events"],
        },
    }
    event = _second_of(spec_of(sinks=sinks), MemoryStore())
    places = {(o["namespace"], o["name"]) for o in event["outputs"] if o["name"].endswith("events")}
    assert places == {
        ("memory://test", "p/iceberg/events"),
        ("postgres://db:5432", "shop.s.events"),
        ("s3://lake", "out/events"),
        ("https://hook.example", "hook/events"),
    }
    assert ("kafka://b:9092", "p.w") in {(o["namespace"], o["name"]) for o in event["outputs"]}
    assert "hunter2" not in json.dumps(event)


def _second_of(spec: PipelineSpec, store: Store) -> dict[str, Any]:
    """The completion of an epoch that has rows in each table, as a pipeline of this spec would tell
    it.
    """
    _, reports = sealed()
    manifest = reports[1].manifest
    assert manifest is not None
    files = manifest.files["events"]
    events = make_epoch_events(
        spec,
        store,
        manifest.model_copy(update={"files": {"events": files, "w": files}}),
        1.0,
        "tidegate",
    )
    return Serde.to_dict(events[1])


def test_lineage_that_is_not_taken_changes_nothing() -> None:
    """An address where no one listens costs a line in the log."""
    bench, reports = sealed()
    sender = create_lineage_sender({"OPENLINEAGE_URL": "http://127.0.0.1:9"})
    assert sender is not None
    with structlog.testing.capture_logs() as logs:
        listeners = EpochListeners(bench.spec, bench.store, dict, lambda *_: None)
        listeners.lineage = sender
        listeners.on_epoch(reports[0], 0.1)
        listeners.close()
    assert [line["event"] for line in logs] == ["sealed", *["lineage_not_sent"] * 2]


def test_a_line_per_sealed_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealed epoch is one structured line with pipeline, epoch and attempt.

    Later lines carry pipeline and epoch as well.
    """
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OPENLINEAGE_URL"):
        monkeypatch.delenv(name, raising=False)
    bench, reports = sealed()
    progress: list[EpochReport] = []
    observers = EpochListeners(
        bench.spec, bench.store, dict, lambda report, _: progress.append(report)
    )
    with structlog.testing.capture_logs([add_log_context]) as logs:
        observers.on_epoch(reports[0], 0.25)
        structlog.get_logger().info("later")
    observers.close()
    first = reports[0].manifest
    assert first is not None
    assert progress == reports[:1]
    assert (logs[0]["event"], logs[0]["pipeline"], logs[0]["epoch"], logs[0]["attempt"]) == (
        "sealed",
        "p",
        1,
        first.attempt,
    )
    assert (logs[1]["pipeline"], logs[1]["epoch"]) == ("p", 2)
    with structlog.testing.capture_logs([add_log_context]) as logs:
        structlog.get_logger().info("another pipeline's")
    assert "pipeline" not in logs[0]
