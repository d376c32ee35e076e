"""What shows pipelines also shows a job: page, impact report, command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.driver.sealed_epochs import measured
from tests.sealed_queries.conftest import JobBench
from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind
from tidegate.checkpoints.checkpoint_catalog import DifferingPair, diff_checkpoints
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.restore import plan_restore
from tidegate.jobs.cli.status_and_logs import describe_pipeline
from tidegate.jobs.driver.otel_metrics import METRICS, DriverMetrics
from tidegate.jobs.sealed_queries.batch_sealer import read_progress
from tidegate.operators.recover_and_pin import format_impact_report
from tidegate.operators.stream_view import StreamView

_WATERMARK = 1_767_225_639_699_000
_KAFKA = "KafkaV2[Subscribe[clicks]]"
_PROGRESS: dict[str, Any] = {
    "sources": [
        {
            "description": _KAFKA,
            "numInputRows": 3,
            "endOffset": {"clicks": {"0": 5, "1": 7}},
            "latestOffset": {"clicks": {"0": 9, "1": 7}},
        },
        {
            "description": "FileStreamSource[/in]",
            "numInputRows": 2,
            "endOffset": {"logOffset": 1},
            "latestOffset": None,
        },
    ],
    "sink": {"description": "FileSink[/x]"},
    "eventTime": {"watermark": "2026-01-01T00:00:39.699Z"},
    "stateOperators": [{"numRowsTotal": 7, "memoryUsedBytes": 640, "numRowsDroppedByWatermark": 2}],
    "durationMs": {"addBatch": 400, "triggerExecution": 500},
}


@pytest.fixture
def job(bench: JobBench) -> JobBench:
    """Three sealed batches."""
    ensure_identity(bench.store, "clicks")
    query, made = bench.query("q", SinkRewind.CALLBACK)
    report = read_progress(_PROGRESS)
    for batch in range(3):
        made.commit(batch)
        bench.sealer.seal(query, batch, report)
    return bench


def test_the_page_shows_a_job(job: JobBench) -> None:
    """With its rows, and the watermark as its frontier."""
    view = StreamView(job.store, "clicks")
    assert json.dumps(view.summary())
    detail = view.detail()
    assert detail["queries"]["q"]["watermark"] == _WATERMARK // 1000
    assert f'"frontier": {_WATERMARK // 1000}' in json.dumps(detail)
    assert json.dumps(view.checkpoint_page())
    target = str(job.sealed[0].id)
    assert view.restore_impact(target)["sinks"][0]["rewind"] == "callback"


def test_the_status_lists_the_queries(job: JobBench) -> None:
    """No batch of a job waits for a table."""
    status = describe_pipeline(job.log)
    assert status["unpublished"] == 0
    assert status["queries"]["q"] == {
        "batch": 2,
        "sink": "FileSink[/x]",
        "rewind": "callback",
        "watermark": _WATERMARK,
        "rows": 5,
        "dropped": 2,
        "state_rows": 7,
        "state_bytes": 640,
        "seconds": 0.5,
        "sources": [
            {"name": _KAFKA, "rows": 3, "backlog": 4},
            {"name": "FileStreamSource[/in]", "rows": 2, "backlog": None},
        ],
        "phases": {"addBatch": 0.4, "triggerExecution": 0.5},
        "id": "x",
    }
    assert status["holder"]["member"] == "q"
    assert json.dumps(status)


def test_the_metrics_count_a_batch_by_query_and_source(job: JobBench) -> None:
    """Rows and dropped rows add up; state, backlog and watermark are those of the newest batch."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics = DriverMetrics(provider.get_meter("t"), "p", lambda: {"state": "running"})
    for manifest in job.sealed:
        metrics.record_sealed(manifest, 0.5)
    found = measured(reader)
    query = ("query", "q")
    assert found["tidegate.query.rows", (query, ("source", _KAFKA))] == 9
    assert found["tidegate.query.dropped", (query,)] == 6
    assert found["tidegate.query.backlog", (query, ("source", _KAFKA))] == 4
    assert found["tidegate.query.state.rows", (query,)] == 7
    assert found["tidegate.query.state.bytes", (query,)] == 640
    assert found["tidegate.query.watermark.lag", (query,)] > 0
    assert found["tidegate.step.duration", (("step", "addBatch"),)] == 3
    assert {name for name, _ in found} <= set(METRICS)
    provider.shutdown()


def test_the_impact_report_names_the_sinks(job: JobBench) -> None:
    """Who approves a restore sees what happens to each."""
    report = format_impact_report(plan_restore(job.log, job.sealed[0].id))
    assert "q: from batch 2 to 0, sink FileSink[/x]: callback" in report


def test_two_batches_are_compared(job: JobBench) -> None:
    """By offsets, and rows of state; the objects of a job hold files, not rows."""
    query, made = job.query("q", SinkRewind.CALLBACK)
    made.commit(3)
    job.sealer.seal(query, 3, BatchReport(rows=4, state_rows=9))
    diff = diff_checkpoints(job.sealed[1], job.sealed[3])
    assert diff.counters["read"] == 9
    assert diff.state == {"q": DifferingPair(left=7, right=9)}
    assert diff.positions["q/0"].right == '{"logOffset": 3}'
