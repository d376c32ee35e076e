"""A release by one task and the same one by several.

The same rows, positions and types.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.spark.agreement import SECOND, Pair, spec_of
from tidegate.jobs.spark import task_events

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


def test_one_task_arranges_what_several_arrange(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, positions, segments and column types are the same, and the same as the reference's."""
    spec = spec_of({"b": {}, "a": {}}, release={"on_late": "emit_flagged"})
    pairs = [Pair(spec, session, tmp_path / "one")]
    feed(pairs[0])
    monkeypatch.setattr(task_events, "RANGE_BYTES", 1000)
    for readers in (4, 0):  # tasks that share the ranges, then a task for each
        monkeypatch.setattr(task_events, "MOST_READERS", readers)
        pairs.append(Pair(spec, session, tmp_path / f"several {readers}"))
        feed(pairs[-1])
    assert len(pairs[0].table("events")) == 39
    shapes = [{name: kinds(pair, name) for name in ("events", "order")} for pair in pairs]
    for pair, shape in zip(pairs[1:], shapes[1:], strict=True):
        assert pair.table("events") == pairs[0].table("events")
        assert shape == shapes[0]


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
