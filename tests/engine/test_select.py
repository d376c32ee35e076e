"""`where` and `select` in the protocol: where filtered rows are counted."""

from __future__ import annotations

from tests.engine.harness import Bench, row, spec_of
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.jobs.cli.output import format_row_counts
from tidegate.jobs.sinks.output_tables import _checkpoint_to_row
from tidegate.jobs.spec.pipeline import PipelineSpec


def test_filtered_rows_have_a_place_of_their_own() -> None:
    """They are in the row equation and on every surface, and no output is offered them."""
    raw = spec_of().model_dump(mode="json", by_alias=True)
    columns = raw["sources"]["a"]["schema"]
    raw["sources"]["a"] |= {"where": "v > 0", "select": {name: name for name in columns}}
    bench = Bench(PipelineSpec.model_validate(raw))
    bench.sources["a"].append(row(10), row(10, -1), {**row(12), "v": None}, row(13, 4))
    bench.sources["b"].append(row(10, -1), row(13))
    engine = bench.engine()
    engine.run_epoch()
    bench.sources["a"].append(row(1, -1), row(1, 4))
    engine.run_epoch()
    manifest = bench.epochs()[-1]
    counters = manifest.counters
    assert counters.is_conserved()
    assert (counters.read, counters.filtered, counters.dropped) == (8, 3, {})
    assert (counters.per_source["a"]["filtered"], counters.late) == (3, 1)
    assert "filtered" not in counters.per_source["b"]
    assert RowCounts.of_sources(counters.per_source).count_offered("events") == 5
    assert bench.rows("dead_letters") == []
    assert "3 filtered" in format_row_counts(counters.model_dump())
    assert _checkpoint_to_row(manifest)["rows_dropped"] == 1


def test_manifests_without_where_keep_their_bytes() -> None:
    """The count is left out when it is zero."""
    bench = Bench(spec_of())
    bench.sources["a"].append(row(10))
    bench.engine().run_epoch()
    assert b"filtered" not in bench.epochs()[-1].to_bytes()
