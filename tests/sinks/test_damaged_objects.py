"""Objects of the store that are cut off or gone: a clear refusal or a repair, never a wrong table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore
from tests.sinks.conftest import World, make_spec
from tests.sinks.flight_tables import LAYOUT, content, make_world, paths, published
from tests.sinks.table_checks import filled

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.errors import PoisonError
from tidegate.jobs.engine.arrow_tables import read_parquet_object, write_parquet_object
from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.lineage_position import count_table_rows
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.table_maintenance import (
    compact_tables,
    list_referenced_files,
    note_table_versions,
)
from tidegate.jobs.sources.arrival_log import ArrivalLog

HOUR = 3600.0
LATER = 4_000_000_000_000_000  # wall clock: after every file of these tests


def cut_off(world: World, key: str) -> None:
    """Half of an object is left."""
    data = world.store.get(key).data
    world.store.put(key, data[: len(data) // 2])


def retention_of(world: World, clock: ManualClock) -> Retention:
    """Retention that keeps one epoch, and deletes at once what no one names."""
    policy = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
    referenced = lambda: list_referenced_files(world.spec, world.store)  # noqa: E731
    return Retention(world.log, policy, external=referenced, clock=clock)


@pytest.mark.parametrize("notes", ["whole", "cut off"])
def test_a_lost_pointer_takes_no_file_of_the_tables(tmp_path: Path, notes: str) -> None:
    """Nothing else names the files of retired epochs, so retention deletes nothing without it.

    The next publisher writes the pointer again.
    """
    world, clock = filled(tmp_path, 6), ManualClock(wall_ticks=LATER)
    note_table_versions(world.spec, world.store, grace=HOUR, clock=clock)
    assert retention_of(world, clock).run().retired
    before = content(world)
    world.store.delete(BucketLayout("p").published_cut_key)
    if notes == "cut off":
        cut_off(world, BucketLayout("p").table_versions_key)
    with pytest.raises(PoisonError) as refused:
        retention_of(world, clock).run()
    assert refused.value.code == "tables.pointer_lost"
    world.sink().follow(world.log)
    assert content(world) == before
    retention_of(world, clock).run()
    assert content(world) == before


def test_a_damaged_pointer_is_named(tmp_path: Path) -> None:
    """Readers, publishers and retention say which object it is."""
    world, clock = filled(tmp_path, 2), ManualClock(wall_ticks=LATER)
    key = BucketLayout("p").published_cut_key
    cut_off(world, key)
    world.seal(1)
    for act in (
        lambda: content(world),
        lambda: world.sink().follow(world.log),
        lambda: retention_of(world, clock).run(),
    ):
        with pytest.raises(PoisonError) as refused:
            act()
        assert refused.value.code == "document.malformed"
        assert key in refused.value.message


def test_damaged_notes_are_made_again(tmp_path: Path) -> None:
    """As without notes, nothing is deleted until the new one is as old as the grace."""
    world, clock = filled(tmp_path, 2), ManualClock(wall_ticks=LATER)
    note_table_versions(world.spec, world.store, grace=HOUR, clock=clock)
    cut_off(world, BucketLayout("p").table_versions_key)
    clock.advance(2 * HOUR)
    assert note_table_versions(world.spec, world.store, grace=HOUR, clock=clock) == math.inf
    clock.advance(2 * HOUR)
    assert note_table_versions(world.spec, world.store, grace=HOUR, clock=clock) == 2 * HOUR


def test_a_damaged_data_file_does_not_end_maintenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table stays as it is and says why; the others are compacted."""
    monkeypatch.setattr(table_maintenance, "_NEWEST_SLOTS_KEPT", 2)
    monkeypatch.setattr(table_maintenance, "_MIN_FILES_PER_MERGE", 3)
    world = filled(tmp_path)
    damaged = Path(min(paths(published(world))))
    damaged.write_bytes(damaged.read_bytes()[:100])
    done = compact_tables(world.spec, world.store)
    assert "a data file is damaged" in done["events"].skipped
    assert (done["events"].after, done["checkpoints"].after) == (6, 3)
    with pytest.raises(PoisonError) as refused:
        content(world)
    assert refused.value.code == "file.unreadable"


@pytest.mark.parametrize("layout", [{}, {"layout": LAYOUT}])
def test_a_publisher_names_a_damaged_file(tmp_path: Path, layout: dict[str, Any]) -> None:
    """It is not a defect of the program, and no table shows a part of the epoch."""
    world = make_world(tmp_path, **layout)
    sink = world.sink()
    world.seal(1)
    sink.follow(world.log)
    before = content(world)
    cut_off(world, world.seal(1).files["events"][0].key)
    with pytest.raises(PoisonError) as refused:
        sink.follow(world.log)
    assert refused.value.code == "file.unreadable"
    assert content(world) == before


def test_other_readers_name_a_damaged_file() -> None:
    """Sinks, streams and merges read whole files."""
    store = MemoryStore()
    rows = build_table_schema(make_spec(), "events").empty_table()
    write_parquet_object(store, "p/x.parquet", rows, "table:events")
    store.put("p/x.parquet", store.get("p/x.parquet").data[:50])
    with pytest.raises(PoisonError, match=r"p/x\.parquet is not a readable Parquet file"):
        read_parquet_object(store, "p/x.parquet")


def test_a_damaged_page_of_the_arrival_log_is_named() -> None:
    """Guessing what it held would give other objects the positions of those that were read."""
    store = MemoryStore()
    store.put("in/a.parquet", b"")

    def read_log() -> list[str]:
        log = ArrivalLog(
            store, "p/arrivals/a/0/", "in/", is_data=lambda _: True, safety=60.0, clock=lambda: 0.0
        )
        log.discover([])
        return log.read_keys(0, 1)

    assert read_log() == ["in/a.parquet"]
    store.put("p/arrivals/a/0/000000000000.json", b'{"keys": ["in')
    with pytest.raises(PoisonError) as refused:
        read_log()
    assert refused.value.code == "document.malformed"


def test_metadata_that_cannot_be_read_give_no_count_of_rows() -> None:
    """The number of rows of a table is unknown then, and nothing fails."""
    store = MemoryStore()
    address = "s3://bucket/p/iceberg/events/metadata/1.json"
    assert count_table_rows(store, "p", address) is None
    key = "p/iceberg/events/metadata/1.json"
    store.put(key, b"{nonsense")
    assert count_table_rows(store, "p", address) is None
    snapshots = [{"snapshot-id": 4, "summary": {"total-records": "7"}}]
    store.put(key, json.dumps({"snapshots": snapshots, "current-snapshot-id": 4}).encode())
    assert count_table_rows(store, "p", address) == 7
