"""Real tables under the command line.

The engine on its oracle mover, a local store, Iceberg, Great Expectations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli
from tests.engine.harness import Bench, barrier, row, spec_of

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.spec.pipeline import PipelineSpec

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
]  # pyiceberg and GX warn about their own dependencies


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(
        json.dumps(spec_of().model_dump(mode="json", by_alias=True, exclude_defaults=True))
    )  # JSON is YAML
    return path


@pytest.fixture
def bench(store: LocalStore, tmp_path: Path) -> Bench:
    """Six steps with late rows and two barriers, sealed and published."""
    spec: PipelineSpec = spec_of()
    uid = ensure_identity(store, spec.name)
    bench = Bench(spec, store)
    engine = bench.engine()
    for step in range(6):
        for offset, source in enumerate(bench.sources.values()):
            source.append(*(row(10 * step + i + offset, i) for i in range(5)))
            if step == 3:
                source.append(row(1, 100))
            if step in (2, 3):
                source.append(barrier(10 * step + 6, step))
        bench.clock.advance(1.0)
        while engine.run_epoch().rows:
            bench.clock.advance(1.0)
    IcebergSink(spec, store, uid).follow(bench.log)
    return bench


def test_tables_and_status_agree_with_the_log(cli: Cli, bench: Bench, spec_file: Path) -> None:
    """What the tables hold is what the manifests count, and nothing is unpublished."""
    counts = {r["table"]: r["rows"] for r in cli("tables", "p.yaml", "--json").data}
    status: dict[str, Any] = cli("status", "p.yaml", "--json").data
    assert (counts["events"], counts["late"]) == (
        status["rows"]["released"],
        len(bench.rows("late")),
    )
    assert (status["unpublished"], counts["checkpoints"]) == (0, len(bench.epochs()))
    assert set(status["sources"]) == {"a", "b"}
    shown = cli("tables", "p.yaml", "w", "--current", "--json").data["rows"]
    assert len({r["window_start"] for r in shown}) == len(shown)


def test_quality_finds_nothing_wrong_with_an_exact_pipeline(
    cli: Cli, bench: Bench, spec_file: Path
) -> None:
    """Every critical check holds on tables that a real sink wrote.

    The result names the checkpoint that was looked at.
    """
    said = cli("quality", str(spec_file), "--json")
    assert said.exit_code == 0
    result = said.data
    assert [c["id"] for c in result["failed"] if c["severity"] == "critical"] == []
    assert result["checkpoint"] == str(bench.log.head().checkpoint)
    seen = {c["id"]: c["observed"] for c in result["checks"]}
    assert seen["late_counted"] == "0"
    assert seen["barrier_outcomes"] != "nothing to check"
