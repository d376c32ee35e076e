"""Great Expectations itself runs here: its import alone takes seconds, the checks do not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from tests.expectations.conftest import LATE, changed, manifest, rows
from tests.servers.memory_store import MemoryStore

from tidegate.errors import ConfigurationError
from tidegate.expectations import data_docs, gx_runner
from tidegate.expectations.gx_runner import RunResult
from tidegate.expectations.summaries import Evidence
from tidegate.jobs.spec.pipeline import PipelineSpec

pytestmark = [
    pytest.mark.e2e,  # importing GX takes longer than a unit test may
    pytest.mark.filterwarnings(
        "ignore"
    ),  # GX warns about its own dependencies; what runs here is checked by the results
]


def record(run: RunResult, number: int = 0) -> dict[str, object]:
    """A result as `quality` makes it."""
    failed = [{"id": c.id, "suite": c.suite} for c in run.failed_checks]
    checks = [
        {"id": c.id, "suite": c.suite, "says": c.says, "observed": c.observed, "passed": c.passed, "severity": c.severity,
         "sample": c.sample, "command": c.command,
         "summary": c.summary, "page": c.page_name}
        for c in run.checks
    ]  # fmt: skip
    at = f"2026-11-21T18:00:{number % 60:02d}Z"
    return {"id": f"run{number:03d}", "pipeline": "flights", "at": at, "verdict": run.verdict, "checkpoint": "t0-000003-aaaaaa",
            "failed": failed, "checks": checks}  # fmt: skip


def test_healthy_pipeline_passes_every_check(healthy: Evidence) -> None:
    """Nothing is reported where nothing is wrong."""
    run = gx_runner.run_suites(healthy)
    assert (run.verdict, [c.id for c in run.failed_checks]) == ("pass", [])


def test_warning_names_check_and_offender(healthy: Evidence) -> None:
    """A source above its limit makes a warning that names it and its value."""
    run = gx_runner.run_suites(
        changed(healthy, head=manifest(3, late=10), late=pa.concat_tables([healthy.late] * 10))
    )
    assert run.verdict == "warn"
    failed, whole_past = run.failed_checks
    assert (failed.id, failed.observed) == ("late_ratio", "EWR: 0.2, JFK: 0.2")
    assert {row["_source"] for row in failed.sample} == {"EWR", "JFK"}
    assert (failed.epochs, failed.scope) == ((1, 3), "recent")
    assert (whole_past.id, whole_past.epochs) == ("late_ratio_all", None)


def test_critical_comes_first_and_fails(healthy: Evidence) -> None:
    """A row that nobody counted, with an unknown reason, is critical and stands before warnings."""
    odd = rows(
        LATE, {"output": "x", "reason": "nonsense", "lateness_us": 1, "_source": "EWR", "_epoch": 1}
    )
    late = pa.concat_tables([healthy.late, odd])
    run = gx_runner.run_suites(
        changed(healthy, late=late, barriers=healthy.barriers.slice(0, 0), sealed=99)
    )
    assert run.verdict == "fail"
    assert [(c.id, c.severity) for c in run.failed_checks] == [
        ("late_counted", "critical"),
        ("late_reasons", "critical"),
        ("unpublished", "warn"),
    ]


def test_check_on_a_column_that_is_not_there_is_a_configuration_error(
    healthy: Evidence, tmp_path: Path
) -> None:
    """A check that cannot be computed never counts as passed or failed."""
    (tmp_path / "mine.yaml").write_text(
        "suite: mine\ntitle: Mine\nchecks: [{id: own, summary: release, says: x,"
        " expect: expect_column_values_to_be_in_set, kwargs: {column: nope, value_set: [1]}}]\n"
    )
    spec = PipelineSpec.model_validate(
        healthy.spec.model_dump(by_alias=True) | {"quality": {"suites": str(tmp_path)}}
    )
    with pytest.raises(ConfigurationError, match=r"no column .nope. in release"):
        gx_runner.run_suites(changed(healthy, spec=spec))


def test_unknown_expectation_type_is_a_configuration_error(
    healthy: Evidence, tmp_path: Path
) -> None:
    """A type that GX does not have is named."""
    (tmp_path / "mine.yaml").write_text(
        "suite: mine\ntitle: Mine\nchecks: [{id: own, summary: release, says: x, expect:"
        " expect_wonders, kwargs: {}}]\n"
    )
    spec = PipelineSpec.model_validate(
        healthy.spec.model_dump(by_alias=True) | {"quality": {"suites": str(tmp_path)}}
    )
    with pytest.raises(ConfigurationError, match="no expect_wonders"):
        gx_runner.run_suites(changed(healthy, spec=spec))


def test_docs_need_no_network_and_no_scripts(healthy: Evidence) -> None:
    """No page loads anything from anywhere; the pages link each other."""
    store = MemoryStore()
    run = gx_runner.run_suites(healthy)
    key = data_docs.publish_data_docs(store, record(run), run)
    pages = {k: v.decode() for k, v in store.bucket.objects.items() if k.endswith(".html")}
    assert len(pages) == 2 + len(run.validations)
    for page in pages.values():
        assert "<script" not in page
        assert "http" not in page
    assert 'href="late_rows.late_by_source.html"' in pages["flights/quality/docs/run000/index.html"]
    assert 'href="run000/index.html"' in pages["flights/quality/docs/index.html"]
    assert store.get(key).data == store.get("flights/quality/results/latest.json").data


def test_history_is_bounded_and_old_pages_go(
    healthy: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that fall out of the index are deleted, results stay; trends are drawn."""
    monkeypatch.setattr(data_docs, "_RUNS_KEPT", 2)
    store = MemoryStore()
    run = gx_runner.run_suites(healthy)
    for number in range(3):
        data_docs.publish_data_docs(store, record(run, number), run)
    assert store.list_folders("flights/quality/docs/") == ["run001", "run002"]
    assert len(list(store.list_objects("flights/quality/results/run"))) == 3
    assert [
        r["id"] for r in json.loads(store.get("flights/quality/history.json").data)["runs"]
    ] == ["run002", "run001"]
    assert "<polyline" in store.get("flights/quality/docs/index.html").data.decode()
