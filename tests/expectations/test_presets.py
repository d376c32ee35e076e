"""Every preset healthy, ill and recovered: real engine, real suites, real recovery."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.engine.harness import Bench, PlainSteps, barrier, row, spec_of

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.errors import ConfigurationError
from tidegate.expectations.quality_run import check_quality
from tidegate.jobs.sinks.output_tables import build_checkpoint_rows, build_table_schema
from tidegate.jobs.spec.pipeline import CHECKPOINTS

pytestmark = [
    pytest.mark.e2e,  # importing GX takes longer than a unit test may
    pytest.mark.filterwarnings("ignore"),  # GX warns about its own dependencies
]
RECENT = 2
LATE_ROWS = 3
"""Late rows of each source in an ill epoch, beside one row in time."""


class Pipeline:
    """A pipeline whose epochs follow each other by three seconds and ten seconds of event time."""

    def __init__(self, preset: str, **quality: Any) -> None:
        fields: dict[str, Any] = {"preset": preset, "quality": {"recent": RECENT, **quality}}
        self.bench = Bench(spec_of(**fields))
        self.engine = self.bench.engine(steps=PlainSteps(self.bench.clock))
        self.time = 0

    def run_epoch(
        self, *late: dict[str, Any], markers: dict[str, dict[str, Any]] | None = None
    ) -> int:
        """Seal an epoch in which every source brings a row in time behind `late` ones."""
        self.bench.clock.advance(3)
        self.time += 10
        for name, source in self.bench.sources.items():
            source.append(*late, row(self.time))
            if markers and name in markers:
                source.append(markers[name])
        report = self.engine.run_epoch()
        assert report.manifest is not None
        return report.manifest.slot

    def check(self) -> dict[str, Any]:
        """Run the quality checks over everything that is sealed."""
        return check_quality(
            self.bench.spec, self.bench.store, read=self._read, clock=self.bench.clock
        )

    def latest_healthy(self) -> int:
        """The slot at which `recover_to: latest_healthy` goes on."""
        return CheckpointCatalog(self.bench.log).resolve("latest_healthy").slot

    def _read(self, name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        epochs = [epoch for epoch in self.bench.epochs() if epoch.slot > since]
        if name == CHECKPOINTS:
            return build_checkpoint_rows(epochs)
        schema = build_table_schema(self.bench.spec, name)
        files = [file for epoch in epochs for file in epoch.files.get(name, [])]
        tables = [pq.read_table(io.BytesIO(self.bench.store.get(f.key).data)) for f in files]
        return pa.concat_tables(
            [schema.empty_table(), *(t.select(schema.names).cast(schema) for t in tables)]
        )


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
    pipeline.run_epoch(row(1))  # nobody has checked it; it continues what was ill
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
    assert min(released) >= bad
    for _ in range(RECENT + 1):
        pipeline.run_epoch()
    assert pipeline.check()["failed"] == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("table.w", "table.x", "no table 'x'; there are: events, late, w"),
        ("column: n", "column: nn", "counted cannot run"),
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
