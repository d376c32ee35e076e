"""The dashboard and the alerts speak of metrics that exist."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import cast

import pytest
from airflow.sdk._shared.observability.metrics.base_stats_logger import NoStatsLogger, StatsLogger
from airflow.sdk._shared.observability.metrics.otel_logger import SafeOtelLogger
from airflow.sdk.observability import stats
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from ruamel.yaml import YAML
from tests.driver.sealed_epochs import FACTS, sealed
from tests.infra.deploy import DEPLOY
from tests.operators.stream_metrics import STREAM_METRICS
from tests.servers.otlp import Collector, collecting

from tidegate.checkpoints.driver_reports import DriverStatus
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_overview import DriverOverview, PipelineState
from tidegate.jobs.driver.epoch_listeners import (
    EpochListeners,
    Receivers,
    measure_landing,
)
from tidegate.jobs.driver.otel_metrics import METRICS
from tidegate.operators import trigger as airflow_metrics
from tidegate.operators.liveness import LivenessSample

_METRIC = re.compile(r"(?:airflow_)?tidegate_[a-z_]*[a-z]")


@pytest.fixture(scope="module")
def told() -> set[str]:
    """The series of a driver, a landing and Airflow, as a collector got them from the exporter and
    Prometheus names them.
    """
    bench, reports = sealed()
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        observers = EpochListeners(bench.spec, bench.store, lambda: FACTS, lambda *_: None)
        for report in (*reports, replace(reports[-1], manifest=None, sealed=None, lost=True)):
            observers.on_epoch(report, 0.5)
        observers.close()
        with measure_landing("p", "a") as landing:
            landing.record_batch(3)
            landing.record_restart()
        _job()
        _airflow(collector)
    return collector.names


def _job() -> None:
    """A batch of a query that reads Kafka, and counts of a window that only some epochs have."""
    receivers = Receivers("p", lambda: FACTS)
    assert receivers.metrics is not None
    manifest = Manifest.model_construct(
        notes={
            "epoch": {"overflowed": {"w": 1}},
            "batch": {
                "query": "q",
                "location": "",
                "queries": {
                    "q": {
                        "batch": 0,
                        "sink": "",
                        "rewind": "repeat",
                        "watermark": 1,
                        "sources": [{"name": "kafka", "rows": 1, "backlog": 2}],
                    }
                },
            },
        }
    )
    receivers.metrics.record_sealed(manifest, 0.5)
    receivers.close()


def _airflow(collector: Collector) -> None:
    """What triggers and tasks note goes by Airflow's own logger."""
    exporter = OTLPMetricExporter(f"{collector.url}/v1/metrics")
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False)
    stats.initialize(
        factory=lambda: cast(StatsLogger, SafeOtelLogger(provider)), export_legacy_names=True
    )
    airflow_metrics.record_look("p", None)
    report = DriverStatus(token=1, driver="d", step="x", at=0, body={"sealed_at": 0})
    airflow_metrics.record_look("p", LivenessSample(DriverOverview(None, report), 1.0, 1))
    airflow_metrics.record_stream_end("p", PipelineState.LOST)
    airflow_metrics.record_launch("p", replaces=True)
    airflow_metrics.record_adoption("p")
    airflow_metrics.record_unwatched("p")
    provider.shutdown()
    stats.initialize(factory=NoStatsLogger, export_legacy_names=True)


def test_every_metric_is_sent(told: set[str]) -> None:
    """What is promised to be measured comes to a collector."""
    promised = [*METRICS, *(f"airflow.{name}" for name in STREAM_METRICS)]
    assert [
        name for name in promised if not any(t.startswith(name.replace(".", "_")) for t in told)
    ] == []


def dashboard_queries() -> list[str]:
    """Every query of the dashboard."""
    panels = json.loads((DEPLOY / "grafana" / "tidegate.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_rules() -> list[dict[str, str]]:
    """Every alert."""
    return list(YAML(typ="safe").load(DEPLOY / "alerts.yaml")["groups"][0]["rules"])


def test_every_metric_is_shown(told: set[str]) -> None:
    """The dashboard asks for metrics that come, and shows each of them."""
    asked = {name for query in dashboard_queries() for name in _METRIC.findall(query)}
    assert asked - told == set()
    assert {
        name for name in told if not name.endswith(("_sum", "_count", "_bucket"))
    } - asked == set()


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: str(rule["alert"]))
def test_alerts_follow_guarantees(rule: dict[str, dict[str, str]], told: set[str]) -> None:
    """An alert asks for metrics that come, names the guarantee it watches and what to do."""
    assert set(_METRIC.findall(str(rule["expr"]))) - told == set()
    assert rule["annotations"]["guarantee"]
    assert "tidegate " in rule["annotations"]["action"] or "Bring" in rule["annotations"]["action"]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_sees_a_counter_that_appears(rule: dict[str, str]) -> None:
    """A counter appears with its first value, from which `increase` sees nothing."""
    for counter in re.findall(r"increase\((\w+(?:{[^}]*})?)\[\w+\]\) > \d", rule["expr"]):
        assert f"unless {counter} offset" in rule["expr"]
