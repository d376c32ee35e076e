"""The objects source on real stores: a local folder, and MinIO."""

from __future__ import annotations

import io
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import Store
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits, SourceSpec

ME = Member("a")


def parquet(rows: int) -> bytes:
    """An object of random numbers, so that it does not shrink."""
    table = pa.table(
        {
            "t": pa.array(range(rows), pa.timestamp("us", tz="UTC")),
            "n": [secrets.randbits(60) for _ in range(rows)],
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def spec(path: str = "inbox/a") -> SourceSpec:
    """Times and numbers."""
    return SourceSpec.model_validate(
        {"path": path, "schema": {"t": "timestamp", "n": "long"}, "event_time": "t", "lag": "1s"}
    )


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.minio)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    request.getfixturevalue("minio_environment")
    return open_store(f"s3://tidegate/{secrets.token_hex(4)}")


def test_small_and_large_objects(store: Store) -> None:
    """Rows, ETag and size are those of the store, whether an object is fetched whole or by its end
    only.
    """
    for name, rows in (("1", 3), ("2", 40_000)):
        store.put(f"inbox/a/{name}.parquet", parquet(rows))
    store.put("inbox/a/3.parquet", b"x" * 400_000)
    src = ObjectSource("a", spec(), store)
    part = src.plan(ME, None, ReadLimits())
    assert [p["rows"] for p in part.parts] == [3, 40_000]
    for piece in part.parts:
        head = store.stat(piece["key"])
        assert head is not None
        assert (piece["etag"], piece["size"]) == (head.etag, head.size)
    assert part.parts[1]["size"] > 300_000
    assert [d.reason for d in part.dead] == ["not_parquet"]
    assert src.find_changed_objects(part) == ()


def test_replaced_object_is_noticed(store: Store) -> None:
    """A new version of an object that is open in the resume point is an error row on every store."""
    store.put("inbox/a/1.parquet", parquet(5))
    src = ObjectSource("a", spec(), store)
    first = src.plan(ME, None, ReadLimits(rows=2))
    store.put("inbox/a/1.parquet", parquet(5))
    assert [d.key for d in src.find_changed_objects(first)] == ["inbox/a/1.parquet"]
    assert [d.reason for d in src.plan(ME, first.resume, ReadLimits()).dead] == ["changed_object"]


def test_full_address(tmp_path: Path) -> None:
    """A source may lie in another store than its pipeline."""
    other = LocalStore(tmp_path / "elsewhere")
    other.put("1.parquet", parquet(2))
    pipeline = PipelineSpec(name="p", sources={"a": spec(f"file://{tmp_path}/elsewhere")})
    view = InputView(LocalStore(tmp_path / "store"), pipeline, tmp_path)
    src = ObjectSource("a", pipeline.sources["a"], view)
    assert [p["key"] for p in src.plan(ME, None, ReadLimits()).parts] == ["@a/1.parquet"]


@pytest.mark.minio
def test_a_thousand_objects(minio_environment: object) -> None:
    """Objects beyond one LIST page are planned in bounded slices."""
    store = open_store(f"s3://tidegate/{secrets.token_hex(4)}")
    data = parquet(1)
    for i in range(1003):
        store.put(f"inbox/a/{i:05d}.parquet", data)
    src = ObjectSource("a", spec(), store)
    first = src.plan(ME, None, ReadLimits())
    assert (len(first.parts), first.pending) == (1000, True)
    rest = src.plan(ME, first.resume, ReadLimits())
    assert ([p["ordinal"] for p in rest.parts], rest.pending) == ([1000, 1001, 1002], False)
