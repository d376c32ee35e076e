"""Objects that are bad, or that change under the reader.

Real engine, real object source, oracle mover.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.engine.harness import Bench, spec_of
from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.engine.epoch_engine import Engine
from tidegate.jobs.engine.interfaces import MoveOrder, MoveResult, SurveyedCut
from tidegate.jobs.sources.object_source import ObjectSource

START = datetime(2026, 3, 1, tzinfo=UTC)


def objects_spec(**source: Any) -> Any:
    """One source of objects with a time and a value."""
    columns = {"t": "timestamp", "v": "long"}
    fields = {
        "path": "inbox",
        "schema": columns,
        "event_time": "t",
        "lag": "0",
        "limits": {"objects": 1},
        **source,
    }
    return spec_of(sources={"a": fields}, windows={})


def parquet(*values: int) -> bytes:
    """An object with these values, a second apart."""
    times = [START + timedelta(seconds=value) for value in values]
    buffer = io.BytesIO()
    pq.write_table(
        pa.table(
            {"t": pa.array(times, pa.timestamp("us", "UTC")), "v": pa.array(values, pa.int64())}
        ),
        buffer,
    )
    return buffer.getvalue()


class Meddler(OracleMover):
    """Someone does something to the inbox between survey and move, once."""

    def __init__(self, store: Store, spec: Any, deed: Any) -> None:
        super().__init__(store, spec)
        self.deed = deed

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        deed, self.deed = self.deed, lambda: None
        moved = super().move(order, surveyed) if deed.__name__ == "after" else None
        deed()
        return moved if moved is not None else super().move(order, surveyed)


def engine_of(bench: Bench, mover: OracleMover | None = None) -> Engine:
    """The bench's engine on objects."""
    return bench.engine(
        sources=[
            ObjectSource(name, source, bench.store) for name, source in bench.spec.sources.items()
        ],
        mover=mover or OracleMover(bench.store, bench.spec),
    )


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Where ETags come from listings, and where they do not."""
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_object_overwritten_while_it_is_read_is_never_sealed(store: Store, when: str) -> None:
    """Whether its rows were read before or after the change.

    The epoch is planned again, and holds the new rows.
    """
    bench = Bench(objects_spec(), store)
    store.put("inbox/0.parquet", parquet(1, 2))

    def deed() -> None:
        store.put("inbox/0.parquet", parquet(3, 4, 5))

    deed.__name__ = when
    engine = engine_of(bench, Meddler(store, bench.spec, deed))
    with pytest.raises(
        TransientError,
        match=r"epoch 1 of p: inbox/0.parquet of source a/0 changed while it was read",
    ) as caught:
        engine.run_epoch()
    assert (caught.value.code, bench.log.head().slot) == ("source.changed", 0)
    engine.reload()
    report = engine.run_epoch()
    assert report.manifest is not None
    assert report.manifest.counters.read == 3


def test_an_object_removed_while_it_is_read_is_planned_again_without(store: Store) -> None:
    """Transient: the object is gone, the stream is not."""
    bench = Bench(objects_spec(), store)
    store.put("inbox/0.parquet", parquet(1))
    store.put("inbox/1.parquet", parquet(2, 3))
    engine = engine_of(bench, Meddler(store, bench.spec, lambda: store.delete("inbox/0.parquet")))
    with pytest.raises(TransientError, match="it is gone"):
        engine.run_epoch()
    report = engine.run_epoch()
    assert report.manifest is not None
    assert report.manifest.counters.read == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty_object"), (b"a,b\n", "not_parquet"), (parquet(1)[:-9], "truncated")],
)
def test_on_bad_fail_refuses_objects_too(store: Store, data: bytes, reason: str) -> None:
    """The message names pipeline, epoch, source, object and row, and nothing is sealed."""
    bench = Bench(objects_spec(on_bad="fail"), store)
    store.put("inbox/0.parquet", parquet(1))
    store.put("inbox/1.parquet", data)
    engine = engine_of(bench)
    engine.run_epoch()
    what = "epoch 2 of p: inbox/1.parquet of source a/0 cannot be read, from row 0 on: "
    with pytest.raises(PoisonError, match=what + reason) as caught:
        engine.run_epoch()
    assert caught.value.kept
    assert "on_bad: dead_letter" in (caught.value.advice or "")
    assert bench.log.head().slot == 1


def test_bad_objects_are_consumed_by_default(store: Store) -> None:
    """The dead object is a dead letter with its key, and the next one is read."""
    bench = Bench(objects_spec(), store)
    store.put("inbox/0.parquet", b"")
    store.put("inbox/1.parquet", parquet(1))
    engine = engine_of(bench)
    engine.run_epoch()
    engine.run_epoch()
    assert [(row["object"], row["reason"]) for row in bench.rows("dead_letters")] == [
        ("inbox/0.parquet", "empty_object")
    ]
    assert bench.epochs()[-1].counters.read == 1


def corrupt(*values: int) -> bytes:
    """An object whose footer is whole and whose pages are not."""
    data = bytearray(parquet(*values))
    data[4:60] = bytes(56)
    return bytes(data)


def test_corrupt_pages_make_a_dead_letter(store: Store) -> None:
    """The footer promised rows that cannot be read.

    The epoch is planned again, the object named, and the rest goes on.
    """
    bench = Bench(objects_spec(limits={"objects": 3}), store)
    for name, data in {"0": parquet(1, 2), "1": corrupt(3, 4), "2": parquet(5)}.items():
        store.put(f"inbox/{name}.parquet", data)
    engine = engine_of(bench)
    with pytest.raises(
        TransientError, match=r"epoch 1 of p: the data pages of inbox/1.parquet cannot be read"
    ):
        engine.run_epoch()
    report = engine.run_epoch()
    assert report.manifest is not None
    assert report.manifest.counters.read == 3
    assert [(row["object"], row["reason"]) for row in bench.rows("dead_letters")] == [
        ("inbox/1.parquet", "truncated")
    ]
    assert engine.run_epoch().rows == 0


def test_corrupt_pages_end_a_source_that_wants_it(store: Store) -> None:
    """With `on_bad: fail` the object is named and nothing is sealed."""
    bench = Bench(objects_spec(on_bad="fail"), store)
    store.put("inbox/0.parquet", corrupt(1, 2))
    engine = engine_of(bench)
    with pytest.raises(TransientError):
        engine.run_epoch()
    with pytest.raises(PoisonError, match=r"inbox/0.parquet of source a/0 cannot be read"):
        engine.run_epoch()
    assert bench.log.head().slot == 0


# What an epoch counts of objects: those set aside as a whole, and columns that they lack.


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
    bench = Bench(objects_spec(evolution={"added": "dead_letter"}), MemoryStore())
    counts = counts_after(bench, a=parquet(1, 2), b=wider, c=b"no parquet")
    assert (counts["read"], counts["dead_objects"], counts["dead_object_rows"]) == (2, 2, 3)
    assert [epoch.epoch_counters.dead_objects for epoch in bench.epochs()] == [0, 1, 1]


def test_rows_of_objects_with_another_column_are_kept_and_counted() -> None:
    """By default upstream may add a column: every row is read, and every surface says so."""
    times = pa.array([START] * 3, pa.timestamp("us", "UTC"))
    wider = object_of({"t": times, "v": [1, 2, 3], "extra": ["x", "y", "z"]})
    counts = counts_after(Bench(objects_spec(), MemoryStore()), a=parquet(1, 2), b=wider)
    assert (counts["read"], counts["dead_objects"], counts["columns_left_out"]) == (5, 0, 3)


def test_rows_of_objects_that_lack_a_column_are_counted() -> None:
    """The column reads as null; sums over it are too small, and someone has to know."""
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
