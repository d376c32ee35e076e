"""Large objects of a real MinIO are read in ranges."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows.units import rows_at
from tests.servers.minio import RealMinio
from tests.spark.agreement import spec_of, table_of
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import PreconditionFailedError
from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.rows import object_reading, slice_reading
from tidegate.jobs.rows.cut_division import EXTENT, SHARED
from tidegate.jobs.rows.object_reading import (
    FoundObject,
    count_read_bytes,
    describe_unit,
    divide_objects,
    make_part,
    open_part,
)
from tidegate.jobs.rows.slice_reading import RowReader, read_parts
from tidegate.jobs.sources import byte_streams, object_decoding, object_inspection, text_chunks
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject, read_footer
from tidegate.json_types import JsonObject

pytestmark = pytest.mark.minio
KEY = "inbox/a/large.parquet"


@pytest.fixture
def planned(minio_environment: RealMinio, tmp_path: Path) -> tuple[S3Store, JsonObject, pa.Table]:
    """The store, an object of ten row groups as it was planned, and its rows."""
    store = S3Store(minio_environment.settings())
    rows = table_of(rows_at(*range(60_000)))
    rows = replace_column(rows, "v", pa.array(np.random.default_rng(1).random(60_000)))
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=6_000)
    data = (tmp_path / "rows.parquet").read_bytes()
    store.put(KEY, data)
    footer = read_footer(len(data), lambda start, length: data[start : start + length])
    assert isinstance(footer, Footer)
    info = store.stat(KEY)
    assert info is not None
    part = {"key": KEY, "etag": info.etag, "size": info.size, "ordinal": 0, "rows": 60_000}
    return store, {**part, "row_start": 0, "row_end": 60_000, "columns": footer.columns}, rows


def read_rows(part: JsonObject, store: S3Store) -> Any:
    """The times of the planned rows."""
    source = spec_of({"a": {}}).sources["a"]
    own = open_part(0, part, store.uri(KEY), source)
    return read_parts(own.columns, [(0, own)], source)["t"]


def count_fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each later answer of the store."""
    fetched: list[int] = []
    get_version = S3Store.get_version

    def get_counted(self: S3Store, *arguments: Any) -> bytes:
        data = get_version(self, *arguments)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(S3Store, "get_version", get_counted)
    return fetched


def test_only_the_ranges_of_planned_rows_are_fetched(
    planned: tuple[S3Store, JsonObject, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those of the whole object, and a task never has all of its bytes."""
    store, part, rows = planned
    fetched = count_fetched(monkeypatch)
    some = {**part, "row_start": 8_000, "row_end": 13_000}
    assert read_rows(some, store).equals(rows["t"].slice(8_000, 5_000))
    assert fetched == [part["size"]]
    fetched.clear()
    monkeypatch.setattr(object_reading, "RANGED_BYTES", part["size"] - 1)
    assert read_rows(some, store).equals(rows["t"].slice(8_000, 5_000))
    assert len(fetched) > 1
    assert sum(fetched) < part["size"] / 2  # two of ten row groups, and the footer
    assert read_rows(part, store).equals(rows["t"])


def test_a_task_that_shares_an_object_fetches_its_row_groups_at_once(
    planned: tuple[S3Store, JsonObject, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for the footer, one for the rows, and what it reports is what it has fetched."""
    store, part, rows = planned
    fetched = count_fetched(monkeypatch)
    source = spec_of({"a": {}}).sources["a"]
    share = {**part, "row_start": 18_000, "row_end": 42_000, SHARED: True}
    assert read_rows(share, store).equals(rows["t"].slice(18_000, 24_000))
    assert len(fetched) == 2
    assert abs(fetched[1] - count_read_bytes(share, source, is_open=False)) < part["size"] / 20
    whole = {**part, SHARED: False}
    assert count_read_bytes(whole, source, is_open=False) == part["size"]
    fetched.clear()
    monkeypatch.setattr(slice_reading, "LARGE_READ", 1)  # too much to be held
    assert read_rows(share, store).equals(rows["t"].slice(18_000, 24_000))
    assert len(fetched) == 5


def test_a_plan_knows_where_an_object_can_be_divided(
    planned: tuple[S3Store, JsonObject, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where row groups begin, if they are large enough; small objects are not divided."""
    store, part, _ = planned
    data = store.get(KEY).data

    def find_breaks(least: int) -> tuple[int, ...]:
        """The breaks of row groups of at least so many bytes."""
        monkeypatch.setattr(object_inspection, "BREAK_BYTES", least)
        footer = read_footer(len(data), lambda start, length: data[start : start + length])
        assert isinstance(footer, Footer)
        return footer.breaks

    assert find_breaks(1) == tuple(range(6_000, 60_000, 6_000))
    assert find_breaks(part["size"] // 4) == (18_000, 36_000, 54_000)
    assert find_breaks(part["size"]) == ()


def test_an_object_without_a_footer_is_corrupt(
    planned: tuple[S3Store, JsonObject, pa.Table],
) -> None:
    """It had one when it was planned, and keeps its ETag in no real store; a disk may be damaged."""
    store, part, _ = planned
    store.put(KEY, b"PAR1" + bytes(part["size"] - 4))
    head = store.stat(KEY)
    assert head is not None
    damaged = {**part, "etag": head.etag, "row_end": 6_000, SHARED: True}
    with pytest.raises(CorruptObjectsError):
        read_rows(damaged, store)


def test_batches_fetch_each_range_once(
    planned: tuple[S3Store, JsonObject, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that ends within a row group leaves the rest of it to the next one."""
    store, part, rows = planned
    fetched = count_fetched(monkeypatch)
    monkeypatch.setattr(object_reading, "RANGED_BYTES", 1)
    source = spec_of({"a": {}}).sources["a"]
    opened = open_part(0, part, store.uri(KEY), source)
    found = []
    for start in range(0, 60_000, 4_000):
        batch = {**part, "row_start": start, "row_end": start + 4_000}
        own = make_part(0, batch, opened.path, opened.reader)
        found.append(read_parts(own.columns, [(0, own)], source)["t"])
    assert pa.chunked_array([chunk for own in found for chunk in own.chunks]).equals(rows["t"])
    assert sum(fetched) < part["size"] + 3 * (64 << 10)  # the end is read to find the footer


def test_rows_before_a_range_are_not_held(tmp_path: Path) -> None:
    """A slice of a batch would keep all of its values."""
    numbers = pa.table({"n": np.random.default_rng(1).integers(0, 1 << 60, 1_000_000)})
    pq.write_table(numbers, tmp_path / "rows.parquet")
    before = pa.total_allocated_bytes()
    rows = RowReader(tmp_path / "rows.parquet").read_rows(["n"], 900_000, 1_000_000)
    assert rows.equals(numbers.slice(900_000))
    assert pa.total_allocated_bytes() - before < 3_000_000  # of 8 MB


def test_a_replaced_object_is_never_read_in_part(
    planned: tuple[S3Store, JsonObject, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each range is asked of the planned version."""
    store, part, _ = planned
    monkeypatch.setattr(object_reading, "RANGED_BYTES", 1)
    store.put(KEY, store.get(KEY).data + b"x")
    with pytest.raises(PreconditionFailedError):
        read_rows(part, store)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_text_is_decoded_in_ranges(
    minio_environment: RealMinio, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It is found, and read as it was found; one that is replaced meanwhile is not."""
    monkeypatch.setattr(object_reading, "RANGED_BYTES", 1)
    monkeypatch.setattr(byte_streams, "READ_BYTES", 10_000)
    monkeypatch.setattr(text_chunks, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(object_decoding, "BREAK_BYTES", 10_000)
    store, key = S3Store(minio_environment.settings()), f"inbox/a/{ending}large.json{ending}"
    source = spec_of({"a": {"format": "json"}}).sources["a"]
    times = [f"2026-01-01T00:{n // 60:02}:{n % 60:02}Z" for n in range(3_000)]
    lines = "".join(f'{{"t": "{time}", "n": {n}, "o": 0}}\n' for n, time in enumerate(times))
    store.put(key, gzip.compress(lines.encode()) if ending else lines.encode())
    info = store.stat(key)
    assert info is not None
    fetched = count_fetched(monkeypatch)
    (unit,) = divide_objects(source, [FoundObject(key, store.uri(key), info.size)])
    (found,) = describe_unit(unit).found
    assert isinstance(found, InspectedObject)
    assert isinstance(found.content, Footer)
    assert (found.etag, found.content.rows) == (info.etag, 3_000)
    part = {"key": key, "etag": info.etag, "size": info.size, "ordinal": 0, "rows": 3_000}
    part |= {"row_start": 1_000, "row_end": 3_000, "columns": found.content.columns}
    own = open_part(0, part, store.uri(key), source)
    assert read_parts(own.columns, [(0, own)], source)["n"].to_pylist() == [*range(1_000, 3_000)]
    assert max(fetched) <= 10_000
    assert sum(fetched) == 2 * info.size
    assert bool(found.content.offsets) == (not ending)
    store.put(key, b"{}")
    with pytest.raises(PreconditionFailedError):
        open_part(0, part, store.uri(key), source)


def test_a_share_of_a_text_is_one_range_of_the_planned_version(
    minio_environment: RealMinio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a small object, which would be fetched whole."""
    store, key = S3Store(minio_environment.settings()), "inbox/a/shared.json"
    source = spec_of({"a": {"format": "json"}}).sources["a"]
    line = '{"t": "2026-01-01T00:00:00Z", "n": %d}\n'
    lines = [line % n for n in range(3_000)]
    store.put(key, "".join(lines).encode())
    info = store.stat(key)
    assert info is not None
    start, end = (sum(map(len, lines[:number])) for number in (1_000, 1_500))
    part = {"key": key, "etag": info.etag, "size": info.size, "ordinal": 0, "rows": 3_000}
    extent = {"row": 1_000, "header": 0, "start": start, "end": end}
    part |= {"row_start": 1_100, "row_end": 1_500, "columns": {"n": "int64"}, EXTENT: extent}
    fetched = count_fetched(monkeypatch)
    own = open_part(0, part, store.uri(key), source)
    assert read_parts(own.columns, [(0, own)], source)["n"].to_pylist() == [*range(1_100, 1_500)]
    assert fetched == [end - start] == [count_read_bytes(part, source, is_open=False)]
    store.put(key, b"{}")
    with pytest.raises(PreconditionFailedError):
        open_part(0, part, store.uri(key), source)
