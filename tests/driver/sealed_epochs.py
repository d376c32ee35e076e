"""Epochs of a real engine, and the facts that the driver reports beside them."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.engine.harness import SECOND, Bench, PlainSteps, barrier, row, spec_of
from tidegate.jobs.engine.epoch_engine import EpochReport

FACTS: dict[str, Any] = {
    "state": "running",
    "error": None,
    "unpublished": 2,
    "sinks": {"iceberg": 2},
    "published_in": {"iceberg": 1.5},
    "trouble": {"class": "transient", "code": "sink.away"},
    "lag": {"a/0": 7},
    "backlog": {"b/": 3},
    "stale": {"b": 90.0},
    "silent": {"b": 5 * SECOND},
    "late_uploads": {"b": 1},
}


def sealed() -> tuple[Bench, list[EpochReport]]:
    """Two epochs: rows of two sources, then a late row and a barrier of both."""
    bench = Bench(spec_of())
    steps = PlainSteps(bench.clock)
    steps.timings = {"plan": 0.1}
    engine = bench.engine(steps=steps)
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
            found[metric.name, tuple(sorted(attributes.items()))] = getattr(
                point, "value", getattr(point, "count", None)
            )
    return found
