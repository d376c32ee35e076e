"""Metrics, lineage and log lines of the driver, from the reports of a real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.engine.harness import SECOND, Bench, barrier, row, spec_of
from tidegate.jobs.driver.lineage import event_of, lineage_from_environment
from tidegate.jobs.driver.metrics import NAMES, DriverMetrics, metrics_from_environment
from tidegate.jobs.driver.observe import Observers
from tidegate.jobs.engine.epoch import EpochReport

FACTS: dict[str, Any] = {"unpublished": 2, "sinks": {"iceberg": 2}, "trouble": None, "lag": {"a/0": 7}, "late_uploads": {"b": 1}}


def sealed() -> tuple[Bench, list[EpochReport]]:
    """Two epochs: rows of two sources, then a late row and a barrier of both."""
    bench = Bench(spec_of())
    engine = bench.engine()
    bench.clock.advance(100)
    reports = []
    for rows in ([row(1), row(30)], [row(2), row(41), barrier(42, 1)]):
        for name in bench.sources:
            bench.sources[name].append(*rows)
        reports.append(engine.run_epoch())
    assert all(report.sealed for report in reports)
    return bench, reports


def measured(reader: InMemoryMetricReader) -> dict[tuple[str, tuple[tuple[str, Any], ...]], Any]:
    """(name, attributes without the pipeline) -> value, or count of a histogram."""
    data = reader.get_metrics_data()
    assert data is not None
    found = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            attributes = dict(point.attributes or {})
            assert attributes.pop("pipeline") == "p"
            found[metric.name, tuple(sorted(attributes.items()))] = getattr(point, "value", getattr(point, "count", None))
    return found


def test_metrics_follow_the_counters() -> None:
    """What is measured is what the manifests say: rows by disposition, late rows, windows, barriers, frontier, lags."""
    bench, reports = sealed()
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics = DriverMetrics(provider.get_meter("t"), "p", lambda: FACTS, bench.clock, lambda: 5.0)
    for report in reports:
        metrics.epoch(report, 0.5)
    found = measured(reader)
    last = reports[-1].manifest
    assert last is not None
    assert found["tidegate.epochs", ()] == found["tidegate.epoch.duration", ()] == 2
    for disposition in ("read", "released", "late"):
        total = sum(v for (n, a), v in found.items() if n == "tidegate.rows" and ("disposition", disposition) in a)
        assert total == getattr(last.counters, disposition), disposition
    assert found["tidegate.rows.late", (("output", "events"),)] == last.counters.late == 2
    assert found["tidegate.barriers", (("outcome", "complete"),)] == 1
    assert found["tidegate.frontier.lag", ()] == pytest.approx(
        (bench.clock.ticks() - reports[-1].decision.frontier_after) / SECOND
    )
    assert found["tidegate.source.lag", (("member", "a/0"),)] == 7
    assert found["tidegate.sink.lag", (("sink", "iceberg"),)] == found["tidegate.unpublished", ()] == 2
    assert {name for name, _ in found} <= set(NAMES)
    provider.shutdown()


def test_nothing_is_measured_unless_asked() -> None:
    """Without an endpoint in the environment no meter is made, and no lineage is sent."""
    assert metrics_from_environment({}, "p", dict) is None
    assert metrics_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, "p", dict) is None
    assert lineage_from_environment({"OPENLINEAGE_URL": "file:///etc/passwd"}, spec_of()) is None


class _Taker(BaseHTTPRequestHandler):
    bodies: list[tuple[str, str | None, dict[str, Any]]] = []  # noqa: RUF012 - one server, one test

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.bodies.append((self.path, self.headers["Authorization"], json.loads(self.rfile.read(length))))
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
    """Each sealed epoch is one finished run, with its inputs, and its outputs' rows; the same epoch has the same run id."""
    bench, reports = sealed()
    lineage = lineage_from_environment({"OPENLINEAGE_URL": taker, "OPENLINEAGE_API_KEY": "k"}, bench.spec)
    assert lineage is not None
    for report in reports:
        lineage.epoch(report, 0.1)
    lineage.close(5.0)
    assert [(path, auth) for path, auth, _ in _Taker.bodies] == [("/api/v1/lineage", "Bearer k")] * 2
    first = reports[0].manifest
    assert first is not None
    body = _Taker.bodies[0][2]
    assert body == event_of(bench.spec, first, "tidegate")
    assert {place["name"] for place in body["inputs"]} == {"inbox/x"}
    rows = {o["name"]: o["outputFacets"]["outputStatistics"]["rowCount"] for o in body["outputs"]}
    assert rows["p.events"] == sum(f.rows for f in first.files["events"])
    assert body["run"]["runId"] != _Taker.bodies[1][2]["run"]["runId"]


def test_lineage_nobody_takes_changes_nothing() -> None:
    """An address where nobody listens costs a line in the log."""
    bench, reports = sealed()
    lineage = lineage_from_environment({"OPENLINEAGE_URL": "http://127.0.0.1:9"}, bench.spec)
    assert lineage is not None
    with structlog.testing.capture_logs() as logs:
        lineage.epoch(reports[0], 0.1)
        lineage.close(5.0)
    assert [line["event"] for line in logs] == ["lineage_not_sent"]


def test_a_line_per_sealed_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealed epoch is one structured line with pipeline, epoch and attempt; later lines carry pipeline and epoch as well."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OPENLINEAGE_URL"):
        monkeypatch.delenv(name, raising=False)
    bench, reports = sealed()
    progress: list[EpochReport] = []
    observers = Observers(bench.spec, dict, lambda report, _: progress.append(report))
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        observers.epoch(reports[0], 0.25)
        structlog.get_logger().info("later")
    observers.close()
    first = reports[0].manifest
    assert first is not None
    assert progress == reports[:1]
    assert (logs[0]["event"], logs[0]["pipeline"], logs[0]["epoch"], logs[0]["attempt"]) == ("sealed", "p", 1, first.attempt)
    assert (logs[1]["pipeline"], logs[1]["epoch"]) == ("p", 2)
    assert structlog.contextvars.get_contextvars() == {}
