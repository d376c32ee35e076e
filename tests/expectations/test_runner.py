"""Great Expectations itself runs here: its import alone takes seconds, the checks do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.expectations.conftest import BARRIERS, LATE, arrivals, changed, manifest, record, rows
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.manifest import FileRef
from tidegate.errors import ConfigurationError
from tidegate.expectations import gx_runner, quality_run
from tidegate.expectations.evidence import Evidence
from tidegate.jobs.spec.pipeline import PipelineSpec

pytestmark = [
    pytest.mark.e2e,  # importing GX takes longer than a unit test may
    pytest.mark.filterwarnings(
        "ignore"
    ),  # GX warns about its own dependencies; what runs here is checked by the results
]


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


_BARRIER = {
    "outcome": "complete",
    "types": ["day_close"] * 2,
    "homogeneous": True,
    "missing": [],
    "tardy": [],
    "waited_us": 10**6,
    "barrier_id": 4,
    "section": 4,
    "_epoch": 4,
}


def _add_barrier(evidence: Evidence, **fields: object) -> Evidence:
    one = rows(BARRIERS, {**_BARRIER, **fields})
    return changed(evidence, barriers=pa.concat_tables([evidence.barriers, one]))


def _change_newest(evidence: Evidence, **fields: object) -> Evidence:
    head = manifest(3).model_copy(update=fields)
    return changed(evidence, head=head, manifests=(*evidence.manifests[:2], head))


_STATE = FileRef(key="k", rows=1, bytes=2 * 10_737_418_240, sha256="0", kind="order")
_MUCH_LATER = 3_600_000_000
# Check -> (what is broken, the value that is judged, first column of the rows that broke it).
_FAULTS: dict[str, tuple[Callable[[Evidence], Evidence], float, str]] = {
    "aborted_attempts": (
        lambda e: _change_newest(e, notes={"aborted": ["a", "b", "c", "d"]}),
        *(4, "t0-000003-aaaaaa"),
    ),
    "state_bytes": (
        lambda e: _change_newest(e, segments=[_STATE]),
        *(2 * 10_737_418_240, "t0-000003-aaaaaa"),
    ),
    "seal_p95": (
        lambda e: changed(
            e,
            checkpoints=e.checkpoints.set_column(
                e.checkpoints.column_names.index("seal_ms"), "seal_ms", pa.array([9000.0] * 3)
            ),
        ),
        *(9, ""),
    ),
    "freshness": (
        lambda e: changed(
            e,
            manifests=tuple(
                m.model_copy(update={"created_at": m.created_at + 60_000_000}) for m in e.manifests
            ),
        ),
        *(62, "EWR"),
    ),
    "barriers_completed": (lambda e: _add_barrier(e, waited_us=_MUCH_LATER), 3492.03, ""),
    "barriers_held": (
        lambda e: _add_barrier(e, participants=arrivals(0, _MUCH_LATER)),
        *(3492.03, "JFK/0"),
    ),
    "barrier_members_tardy": (
        lambda e: _add_barrier(e, outcome="incomplete", tardy=["JFK/0"]),
        *(0.25, "JFK/0"),
    ),
    "lateness_lags": (
        lambda e: changed(
            e,
            late=rows(
                LATE,
                *(
                    {"output": "events", "reason": "late_order", "lateness_us": lateness}
                    | {"_source": source, "_partition": "0", "_seq": 7, "_epoch": 1}
                    for source, lateness in (("EWR", 1), ("JFK", 400 * 3_600_000_000))
                ),
            ),
        ),
        *(400, "JFK"),
    ),
}


@pytest.mark.parametrize("check", _FAULTS)
def test_a_fault_fails_its_check_and_names_the_value(healthy: Evidence, check: str) -> None:
    """The healthy pipeline has a value within the limit; the broken one has one beyond it."""
    break_it, value, offender = _FAULTS[check]
    before = next(c for c in gx_runner.run_suites(healthy).checks if c.id == check)
    after = next(c for c in gx_runner.run_suites(break_it(healthy)).checks if c.id == check)
    assert before.passed
    assert before.value is not None
    assert before.limit is not None
    assert before.value <= before.limit
    assert not after.passed
    assert after.value == pytest.approx(value, rel=1e-3)
    assert (after.value or 0) > before.limit
    assert after.offenders[0].startswith(offender)


def test_an_owner_is_inherited(healthy: Evidence, tmp_path: Path) -> None:
    """A check's owner is its own, its suite's, or the pipeline's."""
    check = (
        "summary: release, says: x, expect: expect_column_values_to_be_in_set,"
        " kwargs: {column: rows_doubled, value_set: [0]}"
    )
    (tmp_path / "mine.yaml").write_text(
        f"suite: mine\ntitle: Mine\nowner: uwe\nchecks:\n  - {{id: one, {check}}}\n"
        f"  - {{id: two, owner: eva, {check}}}\n"
    )
    quality = {"suites": str(tmp_path)}
    for section, owner in ({}, "ann"), ({"owner": "team"}, "team"):
        spec = PipelineSpec.model_validate(
            healthy.spec.model_dump(by_alias=True) | {"quality": quality | section}
        )
        run = gx_runner.run_suites(changed(healthy, spec=spec))
        owners = {c.id: c.owner for c in run.checks}
        assert (owners["one"], owners["two"], owners["late_ratio"]) == ("uwe", "eva", owner)


def test_times_and_infinities_are_judged(healthy: Evidence, tmp_path: Path) -> None:
    """A limit that is a time has no value to draw, and an infinite value fits into a result."""
    between = "summary: table.events, says: x, expect: expect_column_values_to_be_between"
    (tmp_path / "mine.yaml").write_text(
        "suite: mine\ntitle: Mine\nchecks:\n"
        f"  - {{id: cheap, {between}, kwargs: {{column: price, max_value: 5}}}}\n"
        f"  - {{id: young, {between}, kwargs: {{column: sched, min_value: '2013-01-01T00:00:00Z'}}}}\n"
    )
    data = healthy.spec.model_dump(by_alias=True)
    for source in data["sources"].values():
        source["schema"]["price"] = "double"
    spec = PipelineSpec.model_validate(data | {"quality": {"suites": str(tmp_path)}})
    prices = pa.array([1.0, float("inf")] * (healthy.events.num_rows // 2))
    table = healthy.events.append_column("price", prices)
    run = gx_runner.run_suites(changed(healthy, spec=spec, tables={"events": table}))
    cheap, young = (next(c for c in run.checks if c.id == name) for name in ("cheap", "young"))
    assert (cheap.passed, cheap.value, cheap.limit) == (False, None, 5)
    assert (young.passed, young.value, young.limit) == (True, None, None)
    assert canonical_bytes([cheap.sample, cheap.value])


def test_critical_comes_first_and_fails(healthy: Evidence) -> None:
    """A row that no counter has, with an unknown reason, is critical and comes before warnings."""
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


def test_docs_need_no_network_and_no_scripts(healthy: Evidence) -> None:
    """No page loads anything from anywhere; the pages link each other."""
    store = MemoryStore()
    run = gx_runner.run_suites(healthy)
    key = quality_run.publish_data_docs(store, record(run), run)
    pages = {k: v.decode() for k, v in store.bucket.objects.items() if k.endswith(".html")}
    assert len(pages) == 2 + len(run.validations)
    for page in pages.values():
        assert "<script" not in page
        assert "http:" not in page
        assert "https" not in page
    assert 'href="late_rows.late_by_source.html"' in pages["flights/quality/docs/run000/index.html"]
    assert 'href="run000/index.html"' in pages["flights/quality/docs/index.html"]
    assert store.get(key).data == store.get("flights/quality/results/latest.json").data


def test_history_is_bounded_and_old_pages_go(
    healthy: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages and results that fall out of the index are deleted."""
    monkeypatch.setattr(quality_run, "_RUNS_KEPT", 2)
    store = MemoryStore()
    run = gx_runner.run_suites(healthy)
    for number in range(3):
        quality_run.publish_data_docs(store, record(run, number), run)
    assert store.list_folders("flights/quality/docs/") == ["run001", "run002"]
    assert len(list(store.list_objects("flights/quality/results/run"))) == 2
    runs = json.loads(store.get("flights/quality/history.json").data)["runs"]
    assert [r["id"] for r in runs] == ["run002", "run001"]
    assert runs[0]["values"]["late_ratio"] == pytest.approx(0.02)
