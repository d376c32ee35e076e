"""Every preset healthy, ill and recovered: real engine, real suites, real recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.harness import barrier, row
from tests.expectations.preset_pipelines import RECENT, Pipeline

from tidegate.checkpoints.row_counts import RowCounts
from tidegate.errors import ConfigurationError

pytestmark = [
    pytest.mark.e2e,  # importing GX takes longer than a unit test may
    pytest.mark.filterwarnings("ignore"),  # GX warns about its own dependencies
]
LATE_ROWS = 3
"""Late rows of each source in an ill epoch, beside one row in time."""


def list_failed(result: dict[str, Any], severity: str) -> set[str]:
    """Ids of the failed checks of one severity."""
    return {check["id"] for check in result["failed"] if check["severity"] == severity}


PRESETS = ["nscldaq", "streaminsight", "hazelcast", "flink", "pipet", "wire"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_healthy_ill_and_recovered(preset: str) -> None:
    """Late rows fail the check whatever becomes of them, send the stream back, and are forgiven."""
    pipeline = Pipeline(preset)
    for _ in range(3):
        healthy = pipeline.run_epoch()
    assert pipeline.check()["failed"] == []
    assert pipeline.latest_healthy() == healthy

    for _ in range(RECENT):
        ill = pipeline.run_epoch(*(row(n) for n in range(1, 1 + LATE_ROWS)))
    counts = RowCounts.of_sources(pipeline.bench.epochs()[-1].counters.per_source)
    assert counts.late_rows == 2 * RECENT * LATE_ROWS
    result = pipeline.check()
    assert list_failed(result, "critical") == {"late_ratio_critical"}
    failed = next(check for check in result["failed"] if check["id"] == "late_ratio_critical")
    assert failed["epochs"] == [healthy + 1, ill]
    assert {sample["_epoch"] for sample in failed["sample"]} <= {healthy + 1, ill}
    assert "tidegate tables p late" in failed["command"]
    assert pipeline.latest_healthy() == healthy
    pipeline.run_epoch(row(1))  # no one has checked it; it continues what was ill
    assert pipeline.latest_healthy() == healthy

    for _ in range(RECENT):
        recovered = pipeline.run_epoch()
    result = pipeline.check()
    assert list_failed(result, "critical") == set()
    assert pipeline.latest_healthy() == recovered


def test_a_tardy_barrier_sends_no_stream_back() -> None:
    """A source misses a barrier and brings it later: a warning, once, and no second barrier."""
    pipeline = Pipeline("nscldaq")
    for _ in range(2):
        pipeline.run_epoch()
    pipeline.run_epoch(markers={"a": barrier(30, 1)})
    pipeline.bench.clock.advance(100)  # more than four build windows of 20 s
    while not pipeline.bench.rows("barriers"):
        pipeline.run_epoch()
    tardy = pipeline.run_epoch(markers={"b": barrier(31, 1)})
    told = [(r["barrier_id"], r["outcome"], r["tardy"]) for r in pipeline.bench.rows("barriers")]
    assert told == [(1, "incomplete", []), (1, "incomplete", ["b/0"])]
    result = pipeline.check()
    assert list_failed(result, "critical") == set()
    assert "barriers_tardy" in list_failed(result, "warn")
    assert pipeline.latest_healthy() == tardy
    for _ in range(RECENT):
        pipeline.run_epoch()
    assert list_failed(pipeline.check(), "warn") == {"barriers_complete_all"}


OWN_SUITE = """\
suite: values
title: Values
checks:
  - {id: small, summary: table.events, expect: expect_column_values_to_be_between,
     kwargs: {column: v, max_value: 5}, says: Values are small, severity: critical}
  - {id: counted, summary: table.w, expect: expect_column_values_to_be_between,
     kwargs: {column: n, min_value: 1}, says: Windows have rows}
"""


def test_own_suites_look_at_any_table(tmp_path: Path) -> None:
    """A check of a table names row, epoch and values of what broke it, and forgets it later."""
    (tmp_path / "values.yaml").write_text(OWN_SUITE)
    pipeline = Pipeline("tidegate", suites=str(tmp_path))
    pipeline.run_epoch()
    bad = pipeline.run_epoch(row(15, value=99))
    pipeline.run_epoch()  # with lag 0 rows leave with the next epoch
    result = pipeline.check()
    (failed,) = result["failed"]
    assert (failed["id"], failed["severity"], len(failed["sample"])) == ("small", "critical", 2)
    assert {(r["_source"], r["_seq"], r["v"]) for r in failed["sample"]} == {
        ("a", 1, 99),
        ("b", 1, 99),
    }
    released = {r["_epoch"] for r in pipeline.bench.rows("events") if r["v"] == 99}
    assert failed["epochs"] == [min(released), max(released)]
    assert failed["command"] == (
        f'tidegate tables p events --where "_epoch between {min(released)} and {max(released)}'
        " and concat_ws('/', _source, _partition, _seq) in ('a/0/1', 'b/0/1')\""
    )
    assert min(released) >= bad
    for _ in range(RECENT + 1):
        pipeline.run_epoch()
    assert pipeline.check()["failed"] == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("table.w", "table.x", "no table 'x'; there are: events, late, w"),
        ("column: n", "column: nn", "no column 'nn' in table.w"),
        ("says: Windows", "scope: all, says: Windows", "recent rows"),
    ],
)
def test_a_wrong_check_of_a_table_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    """An unknown table or column never counts as passed or failed."""
    (tmp_path / "values.yaml").write_text(OWN_SUITE.replace(old, new))
    pipeline = Pipeline("tidegate", suites=str(tmp_path))
    pipeline.run_epoch()
    pipeline.run_epoch()
    with pytest.raises(ConfigurationError, match=says):
        pipeline.check()
