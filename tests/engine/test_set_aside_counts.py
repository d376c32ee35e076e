"""What an epoch counts of objects: those set aside as a whole, and columns that they lack."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.engine.harness import Bench
from tests.engine.test_bad_objects import START, engine_of, objects_spec, parquet
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.row_counts import RowCounts


def object_of(columns: dict[str, Any]) -> bytes:
    """A Parquet object."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def counts_after(bench: Bench, **objects: bytes) -> RowCounts:
    """The counts after every object was read, one in an epoch."""
    for name, data in objects.items():
        bench.store.put(f"inbox/{name}.parquet", data)
    engine = engine_of(bench)
    for _ in objects:
        engine.run_epoch()
    return RowCounts.of_sources(bench.epochs()[-1].counters.per_source)


def test_an_object_set_aside_as_a_whole_is_counted_with_its_rows() -> None:
    """Upstream adds a column: 3 rows are missing, and every surface can say so."""
    times = pa.array([START] * 3, pa.timestamp("us", "UTC"))
    wider = object_of({"t": times, "v": [1, 2, 3], "extra": ["x", "y", "z"]})
    bench = Bench(objects_spec(), MemoryStore())
    counts = counts_after(bench, a=parquet(1, 2), b=wider, c=b"no parquet")
    assert (counts["read"], counts["dead_objects"], counts["dead_object_rows"]) == (2, 2, 3)
    assert [epoch.epoch_counters.dead_objects for epoch in bench.epochs()] == [0, 1, 1]


def test_rows_of_objects_that_lack_a_column_are_counted() -> None:
    """The column reads as null; sums over it are too small, and somebody has to know."""
    narrower = object_of({"t": pa.array([START] * 2, pa.timestamp("us", "UTC"))})
    bench = Bench(objects_spec(), MemoryStore())
    counts = counts_after(bench, a=parquet(1), b=narrower)
    assert (counts["read"], counts["nulls_filled"]) == (3, 2)


def test_an_object_whose_rows_cannot_be_counted_has_the_bytes_of_before() -> None:
    """A dead object names its rows in the manifest only if they are known."""
    bench = Bench(objects_spec(), MemoryStore())
    counts_after(bench, a=b"")
    assert [sorted(dead) for dead in bench.epochs()[-1].cut["a/0"]["dead"]] == [
        ["detail", "etag", "key", "member", "reason", "seq", "size"]
    ]
