"""Every surface derives its numbers from the counts of the manifest (semantics, Counters)."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.driver.sealed_epochs import FACTS, measured
from tests.engine.harness import Bench, PlainSteps, row, spec_of

from tidegate.checkpoints.pipeline_overview import read_overview
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.jobs.cli.output import print_text
from tidegate.jobs.cli.status_and_logs import _describe_progress, describe_pipeline
from tidegate.jobs.driver.otel_metrics import DriverMetrics
from tidegate.operators.assets import has_new_event
from tidegate.operators.page_data import build_epoch_point

LATE = 2
"""Rows of each source below that are late for the window; none is late for the events."""


def late_for_a_window(preset: str) -> tuple[Bench, list[Any]]:
    """Two sources under `release: pass_through`; the second epoch brings what comes too late."""
    window = {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)"}}
    spec = spec_of(preset=preset, release={}, windows={"w": window})
    bench = Bench(spec)
    bench.clock.advance(100)
    engine = bench.engine(steps=PlainSteps(bench.clock))
    reports = []
    for rows in ([row(1), row(60)], [row(2), row(3), row(61)]):
        for source in bench.sources.values():
            source.append(*rows)
        reports.append(engine.run_epoch())
    return bench, reports


@pytest.mark.parametrize("preset", ["wire", "hazelcast", "flink"])
def test_rows_late_for_windows_show_on_every_surface(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The late table, status, page, list of checkpoints, asset and metrics agree."""
    bench, reports = late_for_a_window(preset)
    head = bench.epochs()[-1]
    late = len(bench.rows("late"))
    assert (late, head.counters.late) == (2 * LATE, 0)
    overview = read_overview(bench.log)
    assert overview.row_counts.late_ratio == late / 10
    progress = _describe_progress(overview)
    assert progress["counts"]["late_by_output"] == {"w": late}
    more: dict[str, Any] = {"landings": {}, "store": {"url": "memory"}, "deployed": None}
    report = describe_pipeline(bench.log) | more
    print_text("status", data=report, waiting={})
    shown = " ".join(capsys.readouterr().out.split())
    assert "late: 4 rows (40.0%): 4 for w (40.0%) store: memory" in shown
    point = build_epoch_point(head)
    assert (point["late"], point["sources"]["a"]["late"]) == (late, LATE)
    assert next(SlotIndex(bench.log).iterate_newest_first(0)).late == late
    before = {"timeline": 0, "slot": 1, "late": 0, "frontier": 0}
    assert has_new_event("late", head, before)
    found = measure(bench, reports)
    assert found["tidegate.rows.late", (("output", "w"),)] == late
    assert found["tidegate.rows", (("disposition", "late_rows"), ("source", "a"))] == LATE


def measure(bench: Bench, reports: list[Any]) -> dict[Any, Any]:
    """What the driver's metrics say of the epochs."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics = DriverMetrics(provider.get_meter("t"), "p", lambda: FACTS, bench.clock, lambda: 5.0)
    for report in reports:
        metrics.record_epoch(report, 0.5)
    found = measured(reader)
    provider.shutdown()
    return found
