"""A large release by the driver and the same one by Spark's tasks.

The same rows, positions and types, sorted by the driver or by Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.spark.agreement import SECOND, Pair, spec_of
from tidegate.jobs.spark import ordered_release

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def feed(pair: Pair) -> None:
    """Disorder, ties between sources, partitions and rows, late rows, rows that wait for several
    epochs.
    """
    for epoch, seconds in enumerate(((3, 1, 3, 14), (2, 9, 9, 30), (24, 1, 30, 28, 45))):
        for source, partition in (("b", "0"), ("a", "10"), ("a", "9")):
            rows = [
                {"t": s * SECOND, "kind": "data", "k": partition, "n": s, "v": s / 2}
                for s in seconds
            ]
            pair.put(source, [*rows, {"t": None, "kind": "data"}], partition)
        pair.run(epoch * SECOND)
    pair.run(300 * SECOND, done=True)


def test_the_driver_arranges_what_tasks_arrange(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, positions, segments and column types are the same, and the same as the reference's."""
    spec = spec_of({"b": {}, "a": {}}, release={"on_late": "emit_flagged"})
    monkeypatch.setattr(ordered_release, "RANGE_ROWS", 4)
    pairs = [Pair(spec, session, tmp_path / "driver")]
    feed(pairs[0])
    monkeypatch.setattr("tidegate.jobs.spark.spark_session.SMALL_ROWS", 0)
    for module in ("epoch_context", "late_and_dead_rows"):
        monkeypatch.setattr(f"tidegate.jobs.spark.{module}.FETCH_ROWS", 0)
    pairs.append(Pair(spec, session, tmp_path / "tasks", native=False))
    feed(pairs[1])
    assert pairs[0].table("events") == pairs[1].table("events")
    assert len(pairs[0].table("events")) == 39
    shapes = [{name: kinds(pair, name) for name in ("events", "order")} for pair in pairs]
    assert shapes[0] == shapes[1]


def kinds(pair: Pair, name: str) -> set[tuple[str, str]]:
    """Columns of a table's files, or of segments of a kind, as the files have them."""
    refs = [
        ref
        for moved in pair.sides["spark"].moved
        for ref in (*moved.files.get(name, ()), *moved.segments)
    ]
    own = [ref for ref in refs if ref.kind in (name, f"table:{name}")]
    assert own
    schemas = [pq.read_schema(pair.store.local_path(ref.key)) for ref in own]
    assert not any(
        field.metadata for schema in schemas for field in schema
    )  # an Iceberg reader takes a field's id for its own
    return {(field.name, str(field.type)) for schema in schemas for field in schema}


def test_state_that_is_too_large_for_the_driver_is_left_to_spark(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that wait and live windows beyond the limit are released and merged by Spark."""
    window = {"kind": "session", "gap": "60s", "aggregates": {"n": "count(*)"}}
    pair = Pair(spec_of({"a": {}}, windows={"w": window}), session, tmp_path)
    pair.put("a", [{"t": s * SECOND} for s in (20, 21, 22, 23)])
    pair.run(0)
    monkeypatch.setattr("tidegate.jobs.spark.mover.NATIVE_CELLS", 0)
    pair.put("a", [{"t": 24 * SECOND}])
    pair.run(SECOND)
    pair.run(2 * SECOND, done=True)
    assert len(pair.table("events")) == 5


@pytest.mark.unit
def test_pieces_are_even() -> None:
    """No piece is larger than a range, and none is much smaller than the others."""
    limit = ordered_release.RANGE_ROWS
    assert ordered_release.split_evenly(0) == []
    assert ordered_release.split_evenly(limit) == [(0, limit)]
    assert ordered_release.split_evenly(limit + 2) == [
        (0, limit // 2 + 1),
        (limit // 2 + 1, limit + 2),
    ]
