"""What the quality checks see of the sealed batches of a job, and what they say about them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli, refuse_undocumented
from tests.cli.conftest import cli as cli
from tests.sealed_queries.conftest import JobBench

from tidegate.checkpoints.batch_notes import BatchReport, SourceProgress
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.illness_record import IllnessRecord
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.errors import ConfigurationError
from tidegate.expectations.job_batches import (
    JobEvidence,
    summarize_batches,
    summarize_queries,
)
from tidegate.expectations.quality_run import check_quality, gather_batch_slices
from tidegate.expectations.suite_files import load_suites
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import PipelineSpec

_SECOND = 1_000_000


@pytest.fixture
def job(tmp_path: Path) -> JobBench:
    made = JobBench(tmp_path)
    ensure_identity(made.store, "clicks")
    return made


def _spec(**quality: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"kind": "job", "name": "clicks", "app": "clicks.py", "quality": quality}
    )


def _report(**facts: Any) -> BatchReport:
    """A batch of 100 rows in half a second, with a backlog and a watermark."""
    seconds, backlog = facts.pop("seconds", 0.5), facts.pop("backlog", 0)
    usual = {
        "rows": 100,
        "state_bytes": 1000,
        "phases": {"triggerExecution": seconds} if seconds is not None else {},
        "sources": (SourceProgress(name="kafka", rows=100, backlog=backlog),),
    }
    return BatchReport.model_validate(usual | facts)


def _seal(job: JobBench, *reports: BatchReport, name: str = "q", interval: float = 1.0) -> None:
    query, made = job.query(name)
    query.facts.interval = interval
    for batch, report in enumerate(reports):
        made.commit(batch)
        assert job.sealer.seal(query, batch, report)


def _query(job: JobBench, name: str = "q") -> dict[str, Any]:
    frame = summarize_queries(job.sealed).set_index("query")
    return dict(frame.loc[name])


def _gather_newest(spec: JobSpec, job: JobBench) -> JobEvidence:
    newest = gather_batch_slices(spec, job.store, SYSTEM_CLOCK, IllnessRecord()).newest
    assert isinstance(newest, JobEvidence)
    return newest


def test_a_row_per_batch(job: JobBench) -> None:
    """Duration against the trigger, backlog, and how far the watermark is behind the seal."""
    _seal(job, _report(backlog=7, watermark=0), interval=2.0)
    (row,) = summarize_batches(job.sealed).to_dict("records")
    sealed = job.sealed[0].created_at
    assert row["batch"] == "q/0"
    assert (row["seconds"], row["busy"], row["backlog"]) == (0.5, 0.25, 7)
    assert row["watermark_delay_s"] == sealed / _SECOND


def test_a_lost_report_does_not_count_as_fast(job: JobBench) -> None:
    """A batch without Spark's report has no duration, no counts and no watermark."""
    _seal(job, BatchReport())
    (row,) = summarize_batches(job.sealed).to_dict("records")
    assert all(math.isnan(row[name]) for name in {*row} - {"batch", "epoch", "query"})
    query = _query(job)
    assert math.isnan(query["busy_p95"])
    assert math.isnan(query["state_bytes"])


def test_a_lost_report_does_not_hide_the_state(job: JobBench) -> None:
    """Size and growth of the state are those of the batches that Spark has reported."""
    sizes = (10, 10, None, 30, 30, None)
    _seal(job, *(_report(state_bytes=size) if size else BatchReport() for size in sizes))
    query = _query(job)
    assert (query["state_bytes"], query["state_growth"], query["batches"]) == (30, 3, 6)


def test_the_share_of_dropped_rows(job: JobBench) -> None:
    """Of a query's recent rows; another query does not count."""
    _seal(job, _report(dropped=10), _report(dropped=0))
    _seal(job, _report(dropped=100), name="other")
    assert _query(job)["dropped_ratio"] == 0.05
    assert _query(job, "other")["dropped_ratio"] == 1.0


def test_a_watermark_that_does_not_move_while_rows_arrive(job: JobBench) -> None:
    """Only batches with rows count, and only those since it last moved."""
    marks = [(1, 100), (2, 100), (2, 0), (2, 100), (2, 100)]
    _seal(job, *(_report(watermark=mark * _SECOND, rows=rows) for mark, rows in marks))
    assert _query(job)["watermark_still"] == 2
    _seal(job, _report(), _report(), name="without")
    assert _query(job, "without")["watermark_still"] == 0


@pytest.mark.parametrize(
    ("backlogs", "rising"), [((0, 1, 2, 3), 3), ((9, 8, 9), 1), ((5, 5), 0), ((1, 2, 2), 0)]
)
def test_a_backlog_that_grows(job: JobBench, backlogs: tuple[int, ...], rising: int) -> None:
    """How often in a row, up to the newest batch, more messages were waiting than before."""
    _seal(job, *(_report(backlog=backlog) for backlog in backlogs))
    assert _query(job)["backlog_rising"] == rising


def test_the_growth_of_the_state(job: JobBench) -> None:
    """The medians of both halves, so that one large batch says nothing."""
    _seal(job, *(_report(state_bytes=size) for size in (100, 900, 100, 300, 100, 300)))
    assert _query(job)["state_growth"] == 3
    assert _query(job)["state_bytes"] == 300
    _seal(job, _report(), name="first")
    assert math.isnan(_query(job, "first")["state_growth"])


def test_recent_counts_the_batches_of_each_query(job: JobBench) -> None:
    """With two queries and `recent: 2` the newest four slots are read."""
    for name in ("a", "b"):
        _seal(job, *[_report()] * 3, name=name)
    evidence = _gather_newest(_spec(recent=2), job)
    assert [manifest.slot for manifest in evidence.manifests] == [3, 4, 5, 6]
    assert evidence.recent_since == 2


def test_recent_time_leaves_older_batches_out(job: JobBench) -> None:
    """The time counts from the seal of a batch."""
    _seal(job, _report(), _report())
    evidence = _gather_newest(_spec(recent_time="1us"), job)
    assert (evidence.manifests, evidence.recent_since) == ([], 2)


def test_a_healthy_job_passes(job: JobBench) -> None:
    """Every check runs, also before the first batch; the result is in the store."""
    assert check_quality(_spec(), job.store)["verdict"] == "pass"
    _seal(job, *(_report(watermark=n * _SECOND) for n in range(8)))
    result = check_quality(_spec(), job.store)
    assert (result["verdict"], result["failed"]) == ("pass", [])
    assert result["checkpoint"] == str(job.sealed[-1].id)
    assert job.store.stat(result["key"]) is not None
    assert job.store.stat(result["docs"]) is not None


def test_an_ill_job_fails_each_check(job: JobBench) -> None:
    """Slow batches, a growing backlog and state, dropped rows, a watermark that does not move."""
    reports = [
        _report(seconds=2, backlog=n, state_bytes=1000 * 10**n, dropped=60, watermark=0)
        for n in range(9)
    ]
    _seal(job, *reports, BatchReport())
    result = check_quality(_spec(), job.store)
    assert result["verdict"] == "fail"
    assert {check["id"] for check in result["failed"]} == {
        *("batch_reported", "batch_time", "backlog_rising", "state_growth", "state_bytes"),
        *("rows_dropped", "rows_dropped_critical", "watermark_still"),
    }
    (still,) = (check for check in result["failed"] if check["id"] == "watermark_still")
    assert (still["offenders"], still["command"]) == (["q: 8"], "tidegate status clicks")


def test_limits_and_severities_of_the_spec_count(job: JobBench) -> None:
    """A check that is off is not run, and a limit that is raised passes."""
    _seal(job, *(_report(dropped=5, backlog=n) for n in range(8)))
    quality = {"limits": {"batch_dropped": 0.05}, "severity": {"backlog_rising": "off"}}
    assert check_quality(_spec(**quality), job.store)["verdict"] == "pass"


_OWN = """
suite: own
title: Own
checks:
  - id: small_batches
    summary: {summary}
    expect: expect_column_values_to_be_between
    kwargs: {{column: {column}, max_value: 50}}
    severity: critical
    says: Batches are small
"""


def test_a_suite_beside_the_job(job: JobBench, tmp_path: Path) -> None:
    """It may look at every column of the summaries of jobs."""
    folder = tmp_path / "checks"
    folder.mkdir()
    (folder / "own.yaml").write_text(_OWN.format(summary="batches", column="rows"))
    _seal(job, _report())
    result = check_quality(_spec(suites=str(folder)), job.store)
    assert [check["id"] for check in result["failed"]] == ["small_batches"]
    assert result["failed"][0]["epochs"] == [1, 1]


@pytest.mark.parametrize(
    ("summary", "column", "says"),
    [
        ("release", "events", "clicks has no summary 'release'; there are: batches, queries"),
        ("table.events", "rows", "clicks has no table 'events'; there are: none"),
        ("batches", "lines", "no column 'lines' in batches; there are: batch, epoch, query"),
    ],
)
def test_a_suite_that_does_not_fit_a_job(
    tmp_path: Path, summary: str, column: str, says: str
) -> None:
    """The error names what a job has."""
    (tmp_path / "own.yaml").write_text(_OWN.format(summary=summary, column=column))
    with pytest.raises(ConfigurationError, match=says):
        load_suites(_spec(suites=str(tmp_path)))


def test_a_pipeline_has_no_batches_of_queries(tmp_path: Path, spec: PipelineSpec) -> None:
    """The summaries of jobs are refused in a suite of a pipeline, and not offered."""
    (tmp_path / "own.yaml").write_text(_OWN.format(summary="queries", column="batches"))
    quality = spec.quality.model_copy(update={"suites": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="has no summary 'queries'") as refused:
        load_suites(spec.model_copy(update={"quality": quality}))
    offered = refused.value.message.partition("there are: ")[2].split(", ")
    assert {"release", "and table.NAME"} <= {*offered}
    assert not {"batches", "queries"} & {*offered}


def test_the_command_reads_the_yaml_of_a_job(tmp_path: Path, cli: Cli) -> None:
    """Its suites are looked for next to the YAML file."""
    (tmp_path / "clicks.yaml").write_text(
        "{kind: job, name: clicks, app: clicks.py, quality: {suites: checks}}"
    )
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/own.yaml").write_text(_OWN.format(summary="batches", column="rows"))
    ensure_identity(LocalStore(tmp_path / "store"), "clicks")
    said = cli(
        "quality", str(tmp_path / "clicks.yaml"), "--store", str(tmp_path / "store"), "--json"
    )
    assert said.exit_code == 0
    envelope = json.loads(said.out)
    refuse_undocumented(envelope)
    result = envelope["data"]
    assert "small_batches" in {check["id"] for check in result["checks"]}
