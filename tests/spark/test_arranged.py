"""A large release by the driver and the same one by Spark's tasks.

The same rows, positions and types, whoever arranges them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.agreement import SECOND, Pair, spec_of, table_of
from tidegate.jobs.spark import ordered_release, release_sorting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every epoch is a large one.

    What the driver has arranged, None where it left the release to Spark.
    """
    seen: list[Any] = []

    def noted(epoch: Any) -> Any:
        seen.append(release_sorting.sort_release(epoch))
        return seen[-1]

    monkeypatch.setattr(ordered_release, "sort_release", noted)
    monkeypatch.setattr("tidegate.jobs.spark.cut_reader.SMALL_ROWS", 0)
    monkeypatch.setattr(release_sorting, "RANGE_ROWS", 4)
    for module in ("file_writer", "epoch_context", "late_and_dead_rows", "cut_survey"):
        monkeypatch.setattr(f"tidegate.jobs.spark.{module}.FETCH_ROWS", 0)
    return seen


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
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Any]
) -> None:
    """Rows, positions, segments and column types are the same, and the same as the reference's."""
    spec = spec_of({"b": {}, "a": {}}, release={"on_late": "emit_flagged"})
    pairs = []
    for limit, folder in ((release_sorting.DRIVER_SORT_ROWS, "driver"), (-1, "tasks")):
        monkeypatch.setattr(release_sorting, "DRIVER_SORT_ROWS", limit)
        pairs.append(Pair(spec, session, tmp_path / folder))
        feed(pairs[-1])
    assert [piece is not None for piece in found] == [True] * 4 + [False] * 4
    assert pairs[0].table("events") == pairs[1].table("events")
    assert len(pairs[0].table("events")) == 39
    shapes = [{name: kinds(pair, name) for name in ("events", "order")} for pair in pairs]
    assert shapes[0] == shapes[1]


def kinds(pair: Pair, name: str) -> set[tuple[str, str]]:
    """Columns of a table's files, or of segments of a kind, as they stand in the files."""
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


def test_what_needs_a_cast_is_left_to_spark(
    session: SparkSession, tmp_path: Path, found: list[Any]
) -> None:
    """An object with a narrower type than the declared one, or without a column, is cast by Spark
    as ever.
    """
    pair = Pair(spec_of({"a": {}}), session, tmp_path)
    table = table_of([{"t": s * SECOND, "n": s} for s in (2, 1, 3)])
    pair.put("a", table.set_column(3, "n", table["n"].cast(pa.int32())))
    pair.run(0)
    pair.put("a", table.drop_columns(["v"]))
    pair.run(SECOND)
    pair.put("a", table)
    pair.run(2 * SECOND, done=True)
    assert [piece is not None for piece in found] == [False, False, True]


def test_what_is_too_large_is_left_to_spark(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Any]
) -> None:
    """Beyond a number of bytes, of the cut or of rows that waited, the driver does not hold them."""
    monkeypatch.setattr(release_sorting, "DRIVER_SORT_BYTES", 100)
    pair = Pair(spec_of({"a": {}}), session, tmp_path)
    for epoch, seconds in enumerate((range(20), range(20, 23), ())):
        if seconds:
            pair.put("a", [{"t": s * SECOND} for s in seconds])
        pair.run(epoch * SECOND, done=not seconds)
    assert found[0] is None
    assert len(pair.table("events")) == 23


@pytest.mark.unit
def test_pieces_are_even() -> None:
    """No piece is larger than a range, and none is much smaller than the others."""
    limit = release_sorting.RANGE_ROWS
    assert release_sorting.split_evenly(0) == []
    assert release_sorting.split_evenly(limit) == [(0, limit)]
    assert release_sorting.split_evenly(limit + 2) == [
        (0, limit // 2 + 1),
        (limit // 2 + 1, limit + 2),
    ]
