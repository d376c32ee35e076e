"""What shows pipelines also shows a job: page, impact report, command line."""

from __future__ import annotations

import json

import pytest

from tests.sealed_queries.conftest import JobBench
from tidegate.checkpoints.batch_notes import SinkRewind
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.restore import plan_restore
from tidegate.jobs.cli.status_and_logs import describe_pipeline
from tidegate.jobs.sealed_queries.batch_sealer import BatchReport
from tidegate.operators.recover_and_pin import format_impact_report
from tidegate.operators.stream_view import StreamView

_WATERMARK = 1_767_225_639_699_000


@pytest.fixture
def job(bench: JobBench) -> JobBench:
    """Three sealed batches."""
    ensure_identity(bench.store, "clicks")
    query, made = bench.query("q", SinkRewind.CALLBACK)
    report = BatchReport(rows=5, watermark=_WATERMARK, sink="FileSink[/x]", state_rows=7)
    for batch in range(3):
        made.commit(batch)
        bench.sealer.seal(query, batch, report)
    return bench


def test_the_page_shows_a_job(job: JobBench) -> None:
    """With its rows, and the watermark as its frontier."""
    view = StreamView(job.store, "clicks")
    assert json.dumps(view.summary())
    detail = view.detail()
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
        "dropped": 0,
        "state_rows": 7,
        "state_bytes": 0,
        "seconds": None,
    }
    assert json.dumps(status)


def test_the_impact_report_names_the_sinks(job: JobBench) -> None:
    """Who approves a restore sees what happens to each."""
    report = format_impact_report(plan_restore(job.log, job.sealed[0].id))
    assert "q: from batch 2 to 0, sink FileSink[/x]: callback" in report
