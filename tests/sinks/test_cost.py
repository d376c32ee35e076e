"""What an epoch costs in requests: at most two PUTs beyond its data objects."""

from __future__ import annotations

import io
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.engine.harness import Bench, row, spec_of
from tests.sinks.flight_tables import make_world
from tests.sinks.table_checks import InlinePool

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.file_footers import FileFooter, note_footers
from tidegate.jobs.sinks import table_follower
from tidegate.jobs.sinks.iceberg_catalog import StoreFileIO
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.table_files import describe_data_file
from tidegate.jobs.sinks.table_follower import _CachedTransaction


class Counting(LocalStore):
    """Counts what is written; Iceberg's own metadata does not come this way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts: Counter[str] = Counter()

    def create(self, key: str, data: bytes) -> str:
        self._count(key)
        return super().create(key, data)

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        self._count(key)
        return super().compare_and_swap(key, data, etag)

    def put(self, key: str, data: bytes) -> str:
        self._count(key)
        return super().put(key, data)

    def _count(self, key: str) -> None:
        kinds = ("/slots/", "/state/", "/tables/")
        self.puts[next((kind.strip("/") for kind in kinds if kind in key), key)] += 1


def test_an_epoch_costs_two_puts_beyond_its_data(tmp_path: Path) -> None:
    """The slot and the readers' pointer, whatever the number of tables.

    Data objects are one per table and kind of state.
    """
    store = Counting(tmp_path / "store")
    bench = Bench(spec_of(), store)
    engine, sink = bench.engine(), IcebergSink(bench.spec, store, "uid")
    epochs = 5
    for number in range(epochs):
        bench.sources["a"].append(row(20 * number + 1), row(20 * number + 2))
        bench.sources["b"].append(row(20 * number + 1))
        engine.run_epoch()
        sink.follow(bench.log)
    beside = {key: count for key, count in store.puts.items() if key not in ("state", "tables")}
    assert beside == {"slots": epochs, "p/iceberg/current.json": epochs}
    own = [
        sum(1 for f in e.all_files() if f"/{e.slot:06d}-{e.attempt}/" in f.key)
        for e in bench.epochs()
    ]
    assert max(own) <= 4  # events, a window's results, buffered rows, the window's state
    assert (
        store.puts["state"] + store.puts["tables"] == sum(own) + epochs
    )  # and the row of `checkpoints`


def test_footers_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that catches up with many epochs does not wait for one footer after the other."""
    world, second = make_world(tmp_path), threading.Event()
    begun: list[bool] = []
    met: list[bool] = []

    def describe(*given: Any) -> Any:
        """The first call waits for the second one."""
        begun.append(True)
        if len(begun) > 1:
            second.set()
        met.append(second.wait(0.3))
        return describe_data_file(*given)

    for _ in range(2):
        world.seal(1, ("events",), rows=3)
    follower = world.sink()
    monkeypatch.setattr(follower, "_pool", InlinePool())  # one table at a time
    monkeypatch.setattr(table_follower, "describe_data_file", describe)
    follower.follow(world.log)
    assert met[0]


def test_a_footer_that_a_task_has_sent_is_not_read(tmp_path: Path) -> None:
    """What the table says of a file is the same; the file itself is not opened."""
    world = make_world(tmp_path)
    first, second = (world.seal(1, ("events",), rows=3).files["events"][0].key for _ in "ab")
    data = world.store.get(second).data
    footer = FileFooter.pack(pq.read_metadata(io.BytesIO(data)), len(data))
    note_footers(world.store, {second: footer})
    world.store.put(second, b"gone")
    sink = world.sink()
    sink.follow(world.log)
    files = sink.open_table("events").inspect.files().to_pylist()
    found = {file["file_path"]: file for file in files}
    read, known = (found[world.store.uri(key)] for key in (first, second))
    assert (known["record_count"], known["file_size_in_bytes"]) == (3, len(data))
    for field in ("null_value_counts", "value_counts", "split_offsets"):
        assert known[field] == read[field]


def test_a_commit_rewrites_no_more_entries_in_a_longer_table(tmp_path: Path) -> None:
    """A commit that merges manifests writes the entries of only a part of the files again."""
    world = make_world(tmp_path)
    sink = world.sink()
    world.seal(800)
    sink.follow(world.log)
    rewritten = []
    for _ in range(20):
        world.seal(1)
        sink.follow(world.log)
        table = sink.open_table("events")
        newest = table.current_snapshot()
        assert newest is not None
        rewritten += [
            manifest.existing_files_count or 0
            for manifest in newest.manifests(table.io)
            if manifest.added_snapshot_id == newest.snapshot_id
        ]
    assert 0 < max(rewritten) < 700


def test_a_commit_builds_the_metadata_of_a_table_once_for_each_change(tmp_path: Path) -> None:
    """pyiceberg copies all of it at every access, which was most of a commit's time."""
    world = make_world(tmp_path)
    world.seal(1)
    world.sink().follow(world.log)
    with _CachedTransaction(world.sink().open_table("events")) as commit:
        before = commit.table_metadata
        assert commit.table_metadata is before
        commit.set_properties({"owner": "ann"})
        assert commit.table_metadata.properties["owner"] == "ann"
        assert commit.table_metadata is commit.table_metadata


def test_small_files_go_by_one_put() -> None:
    """Arrow's own way is an upload of parts, three requests for each of Iceberg's metadata files."""
    files = StoreFileIO(
        {"s3.endpoint": "http://127.0.0.1:1", "s3.region": "us-east-1"}
    ).fs_by_scheme("s3", "bucket")
    assert files.__reduce__()[1][0]["allow_delayed_open"] is True
