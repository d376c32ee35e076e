"""Runs over a whole pipeline that must not judge wrongly: real engine, real checks."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.engine.harness import PlainSteps, restore, row
from tests.expectations.conftest import BARRIERS, arrivals, changed, record, rows
from tests.expectations.preset_pipelines import BREAKING_VALUES, Pipeline
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.expectations import gx_runner, quality_run
from tidegate.expectations.evidence import Evidence
from tidegate.expectations.quality_run import check_quality
from tidegate.expectations.suite_files import load_suites
from tidegate.jobs.spec.pipeline import PipelineSpec

pytestmark = [
    pytest.mark.e2e,  # importing GX takes longer than a unit test may
    pytest.mark.filterwarnings("ignore"),  # GX warns about its own dependencies
]
SIZE = 4
"""Epochs of a slice in these tests."""


def seal(pipeline: Pipeline, epochs: int, *, late: int = 0) -> list[int]:
    """Seal epochs in which each source brings so many late rows beside one in time."""
    behind = [row(-1000 - n) for n in range(late)]
    return [pipeline.run_epoch(*behind) for _ in range(epochs)]


def list_critical(result: dict[str, Any]) -> set[str]:
    """Ids of the critical checks that failed."""
    return {check["id"] for check in result["failed"] if check["severity"] == "critical"}


def read_known_illness(store: Store) -> Any:
    """Return what the runs of the pipeline know of ill slots."""
    # Not at the top: `make faults` runs most tests of this module on code that has no such record.
    from tidegate.checkpoints.illness_record import read_illness

    return read_illness(store, "p")


def find_ill(pipeline: Pipeline, timeline: int = 0) -> set[int]:
    """Slots of a timeline that the runs call ill, of those that are sealed."""
    known = read_known_illness(pipeline.bench.store)
    slots = range(1, pipeline.bench.log.head().slot + 1)
    return {n for n in slots if known.explain_illness(CheckpointId(timeline, n, "aaaaaa"))}


def test_a_burst_between_two_runs_is_judged() -> None:
    """Its slices fail, with their rows and a page; the slices before and after it are healthy."""
    pipeline = Pipeline("flink", recent=SIZE)
    seal(pipeline, 2 * SIZE)
    assert pipeline.check()["verdict"] == "pass"
    burst = seal(pipeline, SIZE, late=10)
    seal(pipeline, 3 * SIZE - 1)
    result = pipeline.check()
    assert (result["verdict"], list_critical(result)) == ("fail", {"late_ratio_critical"})
    failed = next(check for check in result["failed"] if check["id"] == "late_ratio_critical")
    assert failed["epochs"] == [burst[0], burst[-1]]
    assert {sample["_epoch"] for sample in failed["sample"]} <= {*burst}
    folder = result["docs"].removesuffix("index.html")
    assert pipeline.bench.store.stat(f"{folder}{failed['page']}.html") is not None
    assert find_ill(pipeline) == {*burst}
    assert pipeline.latest_healthy() == pipeline.bench.log.head().slot
    seal(pipeline, 1)
    assert list_critical(pipeline.check()) == set()
    assert find_ill(pipeline) == {*burst}


def test_a_long_failure_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """More runs than are listed do not make the first ill epochs healthy."""
    monkeypatch.setattr(quality_run, "_RUNS_KEPT", 2)
    pipeline = Pipeline("flink", recent=SIZE)
    good = seal(pipeline, SIZE)
    pipeline.check()
    ill = []
    for _ in range(4):
        ill += seal(pipeline, SIZE, late=10)
        assert pipeline.check()["verdict"] == "fail"
    assert pipeline.latest_healthy() == good[-1]
    assert find_ill(pipeline) == {*ill}


def test_good_epochs_behind_ill_ones_are_good() -> None:
    """A short slice is not ill because of the ill epochs before it."""
    pipeline = Pipeline("flink", recent=SIZE)
    seal(pipeline, SIZE)
    ill = seal(pipeline, SIZE, late=10)
    pipeline.check()
    seal(pipeline, 1)
    pipeline.check()
    assert find_ill(pipeline) == {*ill}


def test_a_source_that_left_is_known() -> None:
    """Its rows in the late table are those of a source that the pipeline had."""
    pipeline = Pipeline("flink", recent=SIZE)
    seal(pipeline, 3 * SIZE)
    seal(pipeline, 1, late=1)
    raw = pipeline.bench.spec.model_dump(mode="json", by_alias=True)
    raw["sources"].pop("b")
    pipeline.bench.spec = PipelineSpec.model_validate(raw)
    pipeline.bench.sources.pop("b")
    pipeline.engine = pipeline.bench.engine(steps=PlainSteps(pipeline.bench.clock))
    for _ in range(2):
        seal(pipeline, SIZE - 2)
        assert list_critical(pipeline.check()) == set()
    assert find_ill(pipeline) == set()


def test_checks_speak_without_settings(healthy: Evidence) -> None:
    """Rows that are all quarantined fail a run; tables that lag are seen before the driver waits."""
    pipeline = Pipeline("flink", recent=SIZE)
    for epoch in range(SIZE):
        pipeline.run_epoch(*[row(10 * epoch + 1, BREAKING_VALUES["quarantine"])] * 9)
    assert "dead_ratio_critical" in list_critical(pipeline.check())
    assert healthy.head is not None
    waiting = healthy.head.slot + healthy.spec.outputs.max_unpublished
    run = gx_runner.run_suites(changed(healthy, sealed=waiting - 1))
    assert "unpublished" in {check.id for check in run.failed_checks}


_OWN = """\
suite: own
title: Own
checks:
  - {id: mine, summary: table.events, says: own, severity: warn,
     expect: expect_column_values_to_be_between, kwargs: {column: v, %s}}
  - {id: wonders, summary: release, says: own, expect: expect_wonders, kwargs: {}}
  - {id: typo, summary: release, says: own,
     expect: expect_column_values_to_be_in_set, kwargs: {colum: events, value_set: [1]}}
"""


def test_a_check_that_cannot_run_is_red_and_harms_nothing(tmp_path: Path) -> None:
    """It is critical, the other checks are judged, and no epoch is ill because of it."""
    (tmp_path / "own.yaml").write_text(_OWN % "max_value: 1000000")
    pipeline = Pipeline("flink", recent=SIZE, suites=str(tmp_path))
    good = seal(pipeline, SIZE)
    result = pipeline.check()
    assert (result["verdict"], list_critical(result)) == ("fail", {"wonders", "typo"})
    assert {check["trouble"] != "" for check in result["failed"]} == {True}
    assert find_ill(pipeline) == set()
    ill = seal(pipeline, SIZE, late=10)
    result = pipeline.check()
    assert list_critical(result) == {"wonders", "typo", "late_ratio_critical"}
    assert find_ill(pipeline) == {*ill}
    assert pipeline.latest_healthy() == good[-1]


@pytest.mark.parametrize(
    ("limit", "column", "says"),
    [
        ("max_value: .inf", "v", "nothing can be compared with inf"),
        ("min_value: .nan", "v", "nothing can be compared with nan"),
        ("min_value: five", "v", "v of events holds a number"),
        ("min_value: 2013-01-01", "v", "v of events holds a number"),
        ("min_value: 5", "kind", "kind of events holds a text"),
        ("min_value: 5", "t", "t of events holds a time"),
        ("min_value: 2013-01-01", "t", "t of events holds a time"),
        ("min_value: '2013-01-01T00:00:00'", "t", "t of events holds a time"),
        ("min_value: noon", "t", "t of events holds a time"),
        ("min_value: true", "v", "v of events holds a number"),
    ],
)
def test_a_limit_that_cannot_be_compared_is_refused(
    tmp_path: Path, limit: str, column: str, says: str
) -> None:
    """`tidegate validate` says so, before a run has to."""
    text = (_OWN % limit).replace("column: v", f"column: {column}")
    (tmp_path / "own.yaml").write_text(text)
    pipeline = Pipeline("flink", recent=SIZE, suites=str(tmp_path))
    with pytest.raises(ConfigurationError, match=says):
        load_suites(pipeline.bench.spec)


@pytest.mark.parametrize("time", ["2013-01-01T00:00:00Z", "'2013-01-01T00:00:00Z'"])
def test_a_time_is_a_limit_however_it_is_written(tmp_path: Path, time: str) -> None:
    """YAML makes a time of it, or leaves it a text."""
    text = (_OWN % f"min_value: {time}").replace("column: v", "column: t")
    (tmp_path / "own.yaml").write_text(text.partition("  - {id: wonders")[0])
    pipeline = Pipeline("flink", recent=SIZE, suites=str(tmp_path))
    seal(pipeline, 2)
    result = pipeline.check()
    mine = next(check for check in result["checks"] if check["id"] == "mine")
    assert mine["trouble"] == ""


@pytest.mark.parametrize("new_epochs", [0, 3, 12])
def test_tables_of_an_abandoned_timeline_are_not_judged(new_epochs: int) -> None:
    """However far the new timeline is: the newest row says which one the tables show."""
    pipeline = Pipeline("flink", recent=SIZE)
    seal(pipeline, SIZE)
    seal(pipeline, SIZE + 2, late=1)
    bench = pipeline.bench
    names = ("late", "barriers", "checkpoints", "dead_letters", "events")
    old = {name: pipeline.read_table(name, whole=True) for name in names}

    def read_old(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        return old[name].filter(pc.greater(old[name]["_epoch"], since))

    restore(bench, bench.epochs()[SIZE - 1].id)
    pipeline.engine = bench.engine(steps=PlainSteps(bench.clock))
    seal(pipeline, new_epochs)
    result = check_quality(bench.spec, bench.store, read=read_old, clock=bench.clock)
    assert result["verdict"] == "warn"
    assert [check["id"] for check in result["failed"]] == ["tables_current"]
    assert "tables_current" not in {check["id"] for check in pipeline.check()["failed"]}


def test_counters_of_the_whole_past_need_no_old_rows() -> None:
    """A run reads the epochs since the run before; checks of the whole past go on counting."""
    pipeline = Pipeline("flink", recent=SIZE)
    seen: list[tuple[str, int]] = []
    read = pipeline.read_table

    def read_noted(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        seen.append((name, since))
        return read(name, since=since, whole=whole)

    bench = pipeline.bench
    for _ in range(3):
        seal(pipeline, 2 * SIZE)
        seen.clear()
        check_quality(bench.spec, bench.store, read=read_noted, clock=bench.clock)
    assert min(since for name, since in seen if name != "events") >= 2 * SIZE
    totals = read_known_illness(bench.store).timelines[0].totals
    assert totals["checkpoints"] == 6 * SIZE


EVIL = (
    '<img src=x><form action="https://evil.example/"><scr<script></script>ipt>alert(1)'
    '</scr<script></script>ipt><meta http-equiv="refresh" content="0">&lt;b&gt;'
)
_ALLOWED = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")


def test_no_text_of_the_data_is_live_in_a_page(healthy: Evidence) -> None:
    """Names and values of rows are escaped on every page, GX's included."""
    barrier = {"outcome": "incomplete", "types": [EVIL], "homogeneous": False, "tardy": [EVIL]}
    barrier |= {"missing": [EVIL], "participants": arrivals(0), "waited_us": 10**9}
    ill = changed(
        healthy,
        barriers=rows(BARRIERS, *({**barrier, "barrier_id": n, "_epoch": n} for n in (1, 3))),
        late=healthy.late.set_column(1, "reason", pa.array([EVIL] * healthy.late.num_rows)),
    )
    store, run = MemoryStore(), gx_runner.run_suites(ill)
    assert run.failed_checks
    quality_run.publish_data_docs(store, record(run), run)
    pages = {k: v.decode() for k, v in store.bucket.objects.items() if k.endswith(".html")}
    assert any(html.escape("evil.example") in page for page in pages.values())
    for name, page in pages.items():
        assert "form-action 'none'; base-uri 'none'" in page, name
        live = _ALLOWED.sub("", page)
        for tag in ("<script", "<form", "<img", "<meta http-equiv", "<b>"):
            assert tag not in live, (name, tag)


def test_history_can_be_read_by_older_versions() -> None:
    """They look for these fields of a run, and ignore others."""
    pipeline = Pipeline("flink", recent=SIZE)
    seal(pipeline, SIZE)
    burst = seal(pipeline, SIZE, late=10)
    pipeline.check()
    history = json.loads(pipeline.bench.store.get("p/quality/history.json").data)
    (run,) = history["runs"]
    assert history["format_version"] == 1
    assert (run["recent_since"], run["checkpoint"].split("-")[0]) == (0, "t0")
    assert run["critical"] == [{"check": "late_ratio_critical", "epochs": [burst[0], burst[-1]]}]
