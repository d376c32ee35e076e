"""What the versions of the tables leave behind, and who still needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable
from tests.manual_clock import ManualClock
from tests.sinks.conftest import World
from tests.sinks.table_checks import before_the_commit, filled, is_table, once

from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.jobs.driver import housekeeping
from tidegate.jobs.sinks import table_files, table_maintenance
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.published_tables import find_published_slot, have_followers_rewound
from tidegate.jobs.sinks.table_maintenance import (
    compact_tables,
    delete_orphan_files,
    list_referenced_files,
    note_table_versions,
)
from tidegate.jobs.spec.pipeline import PipelineSpec

HOUR = 3600.0
LATER = 4_000_000_000_000_000  # wall clock: after every file of these tests


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files are merged, and few snapshots stay."""
    monkeypatch.setattr(table_maintenance, "_NEWEST_SLOTS_KEPT", 2)
    monkeypatch.setattr(table_maintenance, "_MIN_FILES_PER_MERGE", 3)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 2)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)


def metadata_files(world: World) -> dict[str, int]:
    """Iceberg's own files in the store: key -> bytes."""
    listed = world.store.list_objects("p/iceberg/")
    return {entry.key: entry.size for entry in listed if "/metadata/" in entry.key}


def publish(world: World, epochs: int) -> None:
    """Seal epochs, each with a commit of its own."""
    sink = world.sink()
    for _ in range(epochs):
        world.seal(1, ("events",), rows=3)
        sink.follow(world.log)


def sweep(world: World, clock: ManualClock, *, dry_run: bool = False) -> list[str]:
    """What maintenance does about the tables; returns the deleted keys."""
    kept_for = note_table_versions(
        world.spec, world.store, grace=HOUR, clock=clock, dry_run=dry_run
    )
    # The files of these tests are younger than the margin between a file and the newest snapshot.
    kept_for = 0.0 if kept_for < 10 * HOUR else kept_for
    gone = delete_orphan_files(
        world.spec, world.store, grace=kept_for, clock=clock, dry_run=dry_run
    )
    return [entry.key for entry in gone]


def referenced_exist(world: World) -> bool:
    """Whether every file that the tables name is there."""
    return all(Path(file).exists() for file in list_referenced_files(world.spec, world.store))


def test_metadata_of_many_epochs_is_bounded(tmp_path: Path) -> None:
    """Twice the epochs leave as many metadata files, and every row is still there.

    A round of epochs writes 55 files; the number that is left varies with the merging of manifests.
    """
    world, clock = filled(tmp_path, 0), ManualClock(wall_ticks=LATER)
    kept = []
    for _ in range(4):
        publish(world, 8)
        compact_tables(world.spec, world.store)
        sweep(world, clock)
        clock.advance(HOUR)
        kept.append(metadata_files(world))
    assert len(kept[3]) <= 1.2 * len(kept[1])
    assert sum(kept[3].values()) <= 1.3 * sum(kept[1].values())
    assert world.exact(world.sink())
    assert referenced_exist(world)


def test_a_reader_keeps_its_version_for_the_grace(tmp_path: Path) -> None:
    """A scan that began before compaction and 40 commits ends well within the grace.

    Neither its metadata nor its data files go; after the grace both do.
    """
    world, clock = filled(tmp_path, 12), ManualClock(wall_ticks=LATER)
    sweep(world, clock)
    clock.advance(HOUR)
    cut = read_published_cut(world.store, "p")
    assert cut is not None
    sweep(world, clock)
    before = metadata_files(world)
    clock.advance(0.9 * HOUR)  # the reader opens the version that the last note names
    compact_tables(world.spec, world.store)
    publish(world, 40)
    compact_tables(world.spec, world.store)
    sweep(world, clock)
    clock.advance(0.9 * HOUR)
    sweep(world, clock)
    reader = StaticTable.from_metadata(cut.tables["events"])
    assert reader.scan().to_arrow().num_rows == 36
    named = list_referenced_files(world.spec, world.store)
    assert {file.file.file_path for file in reader.scan().plan_files()} <= named
    for _ in range(3):
        clock.advance(HOUR)
        sweep(world, clock)
    assert not metadata_files(world).keys() & before.keys()
    assert world.exact(world.sink())


def test_nothing_goes_before_a_note_is_as_old_as_the_grace(tmp_path: Path) -> None:
    """The first sweep notes what readers may have open; a dry run notes nothing."""
    world, clock = filled(tmp_path, 12), ManualClock(wall_ticks=LATER)
    assert note_table_versions(world.spec, world.store, grace=HOUR, clock=clock, dry_run=True) == (
        float("inf")
    )
    for waited in (0.0, 0.5, 0.4):
        clock.advance(waited * HOUR)
        assert sweep(world, clock) == []
    clock.advance(0.2 * HOUR)
    would_go = sweep(world, clock, dry_run=True)
    assert would_go
    assert sweep(world, clock) == would_go


def test_maintenance_keeps_data_files_of_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention and garbage collection use the age of the note, not that of the files alone."""
    world = filled(tmp_path, 12)
    found: list[float] = []

    def delete(*_: Any, grace: float, **__: Any) -> list[Any]:
        found.append(grace)
        return []

    original = housekeeping.make_retention

    def make(*args: Any) -> Any:
        found.append(args[3])
        return original(*args)

    monkeypatch.setattr(housekeeping, "make_retention", make)
    monkeypatch.setattr(housekeeping, "delete_orphan_files", delete)
    monkeypatch.setattr(housekeeping, "note_table_versions", lambda *_, **__: 7000.0)
    monkeypatch.setattr(housekeeping, "refuse_copied_store", lambda *_: None)
    housekeeping.maintain_bucket(world.spec, world.log)
    assert found == [7000.0, 7000.0]


def test_a_sleeping_publisher_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote stays while its commit could still succeed; once main moved on, it goes."""
    world, clock = filled(tmp_path, 12), ManualClock(wall_ticks=LATER)
    sweep(world, clock)

    def sleep() -> None:
        for _ in range(4):
            clock.advance(HOUR)
            sweep(world, clock)

    once(monkeypatch, "append_slots", is_table("checkpoints"), sleep)
    publish(world, 1)
    assert world.exact(world.sink())
    assert referenced_exist(world)
    monkeypatch.setattr(table_files, "_COMMITS_UNTIL_EXPIRY", 2)

    def move_on() -> None:
        publish(world, 4)
        sleep()

    before_the_commit(monkeypatch, move_on)
    compact_tables(world.spec, world.store)
    assert world.exact(world.sink())
    assert referenced_exist(world)


def test_tables_elsewhere_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog that writes addresses in another form makes no file look unneeded."""
    world, clock = filled(tmp_path, 12), ManualClock(wall_ticks=LATER)
    monkeypatch.setattr(
        "tidegate.jobs.sinks.table_maintenance._collect_named_files", lambda _: set[str]()
    )
    monkeypatch.setattr(world.store, "uri", lambda key: f"s3://elsewhere/{key}", raising=False)
    assert delete_orphan_files(world.spec, world.store, grace=0.0, clock=clock) == []


def test_files_of_a_window_that_left_the_spec_stay(world: World) -> None:
    """Its table is read as before: retention and garbage collection know that it needs them."""
    world.seal(3, ("events", "hourly"))
    world.sink().follow(world.log)
    raw = world.spec.model_dump(mode="json", by_alias=True)
    raw["windows"] = {"daily": raw["windows"]["hourly"] | {"size": "1d"}}
    world.spec = PipelineSpec.model_validate(raw)
    world.seal(3)
    sink = world.sink()
    sink.follow(world.log)
    clock = ManualClock(wall_ticks=LATER)
    swept = Retention(
        world.log,
        RetentionPolicy(keep_last=1, keep_for=0, grace=0),
        external=lambda: list_referenced_files(world.spec, world.store),
        published_upto=lambda: find_published_slot(world.spec, world.log),
        rewound=lambda: have_followers_rewound(world.spec, world.log),
        clock=clock,
    ).run()
    assert swept.retired
    sweep(world, clock)
    assert world.rows(sink, "hourly") == world.wanted_of(3)
    # Someone who does not want it any more may delete it.
    cut = read_published_cut(world.store, "p")
    assert cut is not None
    Path(cut.tables["hourly"]).unlink()
    assert all(
        "/hourly/" not in address for address in list_referenced_files(world.spec, world.store)
    )
    sweep(world, clock)
