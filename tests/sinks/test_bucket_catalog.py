"""The catalog that the bucket itself provides, without a SQLite file or a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError
from tests.sinks.conftest import UID, World
from tests.sinks.table_checks import filled, is_table, once

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import _make_record, ensure_identity
from tidegate.checkpoints.store import OutcomeUnknownError
from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.iceberg_catalog import StoreCatalog, forget_published_tables, open_catalog
from tidegate.jobs.sinks.pipeline_move import move_pipeline
from tidegate.jobs.sinks.table_maintenance import CompactionResult, compact_tables


class _NoStoreAtAllError(Exception):
    """Replaces the local store: for that one `open_catalog` would make a SQLite file."""


@pytest.fixture(autouse=True)
def without_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local store takes the place of a bucket."""
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_catalog.LocalStore", _NoStoreAtAllError)


def test_two_publishers_share_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was overtaken between load and commit loads again; each slot is applied once."""
    one, two = world.sink(), world.sink()
    world.seal(2)
    once(monkeypatch, "append_slots", is_table("events"), lambda: two.follow(world.log))
    one.follow(world.log)
    world.seal(1, ("events", "late"))
    two.follow(world.log)
    one.follow(world.log)
    assert isinstance(open_catalog(world.spec, world.store), StoreCatalog)
    assert world.exact(one)
    assert world.exact(two)


def test_small_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket without `outputs.catalog` has one catalog for all drivers, so maintenance merges."""
    monkeypatch.setattr(table_maintenance, "_NEWEST_SLOTS_KEPT", 2)
    monkeypatch.setattr(table_maintenance, "_MIN_FILES_PER_MERGE", 3)
    world = filled(tmp_path)
    assert compact_tables(world.spec, world.store)["events"] == CompactionResult(6, 3)
    assert world.exact(world.sink())


def test_a_commit_without_an_answer_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes the commit and the answer is lost: the next call does not apply it again."""
    sink, swap = world.sink(), LocalStore.compare_and_swap
    world.seal(1)
    sink.follow(world.log)
    world.seal(1)

    def lose_answer(self: LocalStore, key: str, *args: Any) -> str:
        etag = swap(self, key, *args)
        if key == world.layout.table_catalog_key("events"):
            monkeypatch.setattr(LocalStore, "compare_and_swap", swap)
            raise OutcomeUnknownError("no answer", code="store.outcome_unknown")
        return etag

    monkeypatch.setattr(LocalStore, "compare_and_swap", lose_answer)
    with pytest.raises(OutcomeUnknownError):
        sink.follow(world.log)
    assert sink.follow(world.log) == 1
    assert world.exact(sink)


def test_a_copy_forgets_the_tables_of_the_original(world: World) -> None:
    """Adopting drops every entry, so that nothing is appended to tables at the old address."""
    world.seal(1, ("events", "late"))
    world.sink().follow(world.log)
    catalog = open_catalog(world.spec, world.store)
    assert {"events", "late", "checkpoints"} <= {one[-1] for one in catalog.list_tables(("p",))}
    forget_published_tables(world.spec, world.log)
    assert catalog.list_tables(("p",)) == []


def test_what_is_not_there_and_what_is_there_twice(world: World) -> None:
    """Errors are those of Iceberg, by which publishers decide what to do."""
    world.seal(1)
    world.sink().follow(world.log)
    catalog = open_catalog(world.spec, world.store)
    location = catalog.load_table(("p", "events")).metadata_location
    with pytest.raises(TableAlreadyExistsError):
        catalog.register_table(("p", "events"), location)
    catalog.drop_table(("p", "events"))
    with pytest.raises(NoSuchTableError):
        catalog.load_table(("p", "events"))
    assert Path(location).exists()


@pytest.mark.parametrize("layout", [{}, {"events": {"partition_by": ["bucket(2, carrier)"]}}])
def test_a_move_takes_merged_files_and_partitions_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]
) -> None:
    """A restore after it takes back a part of a merged file."""
    monkeypatch.setattr(table_maintenance, "_NEWEST_SLOTS_KEPT", 2)
    monkeypatch.setattr(table_maintenance, "_MIN_FILES_PER_MERGE", 3)
    world = filled(tmp_path / "origin", layout=layout)
    # The uid of this module's publishers.
    world.store.put("p/identity.json", _make_record(world.store, "p", UID).to_bytes())
    assert compact_tables(world.spec, world.store)["events"].after < 6
    (fourth,) = world.log.epochs_between(0, 4, 4)
    target = World(LocalStore(tmp_path / "target"), tmp_path / "work", world.spec)
    move_pipeline(world.spec, world.log, target.store)
    sink = target.sink(uid=ensure_identity(target.store, "p"))
    sink.follow(target.log)
    assert target.exact(sink)
    assert sink.open_table("events").spec().is_unpartitioned() is not bool(layout)
    target.fork(fourth.epoch.id)
    target.seal(1)
    sink.follow(target.log)
    assert target.exact(sink)
