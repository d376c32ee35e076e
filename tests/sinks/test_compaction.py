"""Small files become larger ones.

No row changes if others commit, restore, sleep or die meanwhile.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.table.snapshots import Operation
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore
from tests.sinks.conftest import World, make_spec
from tests.sinks.flight_tables import COLUMNS, LAYOUT, content, make_world, paths, published
from tests.sinks.table_checks import before_the_commit, filled

from tidegate.jobs.engine.interfaces import run_work_here
from tidegate.jobs.sinks import table_files, table_maintenance
from tidegate.jobs.sinks.lineage_position import PublishedCut, read_published_cut
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sinks.table_follower import TableFollower
from tidegate.jobs.sinks.table_maintenance import (
    CompactionResult,
    compact_tables,
    delete_orphan_files,
    list_referenced_files,
)

LATER = ManualClock(wall_ticks=4_000_000_000_000_000)


class CrashError(BaseException):
    """kill -9 at this point."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files are enough, and only the newest two slots are left alone."""
    monkeypatch.setattr(table_maintenance, "_NEWEST_SLOTS_KEPT", 2)
    monkeypatch.setattr(table_maintenance, "_MIN_FILES_PER_MERGE", 3)


def merged_files(world: World) -> set[str]:
    """All merged files in the store, by address."""
    return {
        world.store.uri(entry.key)
        for entry in world.store.list_objects("p/iceberg/")
        if "/merged/" in entry.key
    }


def test_small_files_become_a_large_one(tmp_path: Path) -> None:
    """The same rows are in fewer files, and the snapshot is a replacement.

    Readers of the pointer are there at once, at every cut.
    """
    world = filled(tmp_path)
    everything = content(world)
    done = compact_tables(world.spec, world.store)
    assert done["events"] == CompactionResult(6, 3)
    assert done["checkpoints"] == CompactionResult(6, 3)
    table = published(world)
    assert len(paths(table)) == 3
    snapshot = table.metadata.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.REPLACE
    assert snapshot.summary["tidegate.compacted"] == "4"
    assert snapshot.summary["total-records"] == "18"
    assert content(world) == everything
    for cut in (1, 3, 4, 5):
        assert read_table(world.spec, world.store, "events", at=cut).num_rows == 3 * cut
    with duckdb.connect() as db:
        table.scan(row_filter="_epoch = 2").to_duckdb("events", connection=db)
        assert db.sql("select count(*) from events").fetchall() == [(3,)]
    assert sorted(table.scan().to_pandas()["n"]) == [row["n"] for row in everything]


def test_a_renamed_column_survives_a_merge(tmp_path: Path) -> None:
    """A merged file has the values of a column that another engine renamed since."""
    world = filled(tmp_path)
    with world.sink().open_table("events").update_schema() as update:
        update.rename_column("n", "number")
    wanted = world.sink().open_table("events").scan().to_arrow()["number"].to_pylist()
    assert None not in wanted
    assert compact_tables(world.spec, world.store)["events"] == CompactionResult(6, 3)
    found = world.sink().open_table("events").scan().to_arrow()["number"].to_pylist()
    assert sorted(found) == sorted(wanted)


def test_epochs_go_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that had the table open meets the replacement, and applies what comes next once,
    also over group ends.
    """
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 2)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)
    world = filled(tmp_path, 6)
    sink = world.sink()
    sink.follow(world.log)
    for _ in range(3):
        compact_tables(world.spec, world.store)
        world.seal(2, ("events",), rows=3)
        sink.follow(world.log)
    assert world.exact(world.sink())
    assert len(content(world)) == 36


def test_nothing_is_merged_again_and_again(tmp_path: Path) -> None:
    """A run over what the last one left does nothing.

    Merged files wait for others of their size.
    """
    world = filled(tmp_path)
    compact_tables(world.spec, world.store)
    before = merged_files(world)
    assert compact_tables(world.spec, world.store)["events"] == CompactionResult(3, 3)
    assert merged_files(world) == before


def test_files_of_the_size_wanted_are_left_alone(tmp_path: Path) -> None:
    """A file that is large enough is not read."""
    world = filled(tmp_path, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            table_maintenance,
            "merge_data_files",
            lambda *_: pytest.fail("nothing is to be written"),
        )
        patch.setattr(table_maintenance, "_LOWEST_LEVEL_BYTES", 1)
        target = table_maintenance._TableCompactor(
            world.spec,
            world.store,
            world.sink()._catalog,
            PublishedCut("0" * 32, 0, 0),
            "events",
            partial(run_work_here, world.store),
        )
        target._target = 100
        assert target.compact() == CompactionResult(6, 6)


def test_partitions_stay_apart(tmp_path: Path) -> None:
    """Merged files have one partition each and are sorted; scans pass over as many as before."""
    world = filled(tmp_path, layout=LAYOUT)
    everything, before = content(world), paths(published(world))
    done = compact_tables(world.spec, world.store)["events"]
    assert done.after < done.before == len(before)
    assert content(world) == everything
    table = published(world)
    for one in ("C0", "C1", "C2"):
        wanted = sorted(row["n"] for row in everything if row["carrier"] == one)
        assert (
            sorted(table.scan(row_filter=f"carrier = '{one}'").to_arrow()["n"].to_pylist())
            == wanted
        )
        assert len(paths(table, row_filter=f"carrier = '{one}'")) < len(paths(table))


def test_old_files_are_arranged_again(tmp_path: Path) -> None:
    """Where the partitioning has changed, maintenance brings older files over, once."""
    world = filled(tmp_path, 6)
    world.spec = make_spec(COLUMNS, outputs={"layout": LAYOUT})
    world.seal(1, rows=3)
    world.sink().follow(world.log)
    everything = content(world)
    compact_tables(world.spec, world.store)
    table = published(world)
    old = [task for task in table.scan().plan_files() if task.file.spec_id == 0]
    assert len(old) == 1  # of the newest slots
    assert content(world) == everything
    before = merged_files(world)
    compact_tables(world.spec, world.store)
    assert merged_files(world) == before


def test_a_restore_into_a_merged_file(tmp_path: Path) -> None:
    """Its rows of later slots go, the others stay.

    And the file that takes its place is one of those that can be deleted.
    """
    world = make_world(tmp_path, layout={"late": LAYOUT["events"]})
    target = world.seal(3, ("events", "late"), rows=3).id
    world.seal(5, ("events", "late"), rows=3)
    sink = world.sink()
    sink.follow(world.log)
    compact_tables(world.spec, world.store)
    world.fork(target)
    world.seal(1, ("events",), rows=3)
    sink.follow(world.log)
    assert world.exact(world.sink())
    for table in ("events", "late", "checkpoints"):
        assert all(
            "/timelines/" in path or table_files.parse_commit_bound(path)
            for path in paths(published(world, table))
        )
    assert len(content(world, "late")) == 9


def test_a_publisher_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that is published meanwhile makes the commit start again, not the writing."""
    world = filled(tmp_path)
    sink = world.sink()
    sink.follow(world.log)
    world.seal(1, ("events",), rows=3)
    before_the_commit(monkeypatch, lambda: sink.follow(world.log))
    assert compact_tables(world.spec, world.store)["events"] == CompactionResult(6, 3)
    assert world.exact(world.sink())
    assert len(content(world)) == 21
    world.seal(1, ("events",), rows=3)
    sink.follow(world.log)
    assert world.exact(world.sink())


def test_a_restore_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a restore has taken away are not brought back by their merged form."""
    world = make_world(tmp_path)
    target = world.seal(3, rows=3).id
    world.seal(6, rows=3)
    sink = world.sink()
    sink.follow(world.log)

    def restore() -> None:
        world.fork(target)
        sink.follow(world.log)

    before_the_commit(monkeypatch, restore)
    assert compact_tables(world.spec, world.store)["events"] == CompactionResult(
        9, 9
    )  # as it found them; it left them alone
    assert world.exact(world.sink())
    assert {row["_epoch"] for row in content(world)} == {1, 2, 3}


@pytest.mark.parametrize("step", ["_commit_merged_files", "replace_table_location"])
def test_a_crash_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Before the commit nothing has happened, after it everything.

    Garbage goes, and what is named stays.
    """
    world = filled(tmp_path)
    everything = content(world)

    def crash(*_: Any) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(
            table_maintenance._TableCompactor if step.startswith("_") else table_maintenance,
            step,
            crash,
        )
        with pytest.raises(CrashError):
            compact_tables(world.spec, world.store)
    assert content(world) == everything
    assert world.exact(world.sink())
    world.seal(1, ("events",), rows=3)
    world.sink().follow(world.log)
    assert world.exact(world.sink())
    assert compact_tables(world.spec, world.store)["events"].after <= 4
    assert world.exact(world.sink())


def test_garbage_goes_when_no_process_can_commit_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleeper's files stay until the table has moved on past their bound.

    Then they go, and the sleeper is refused.
    """
    monkeypatch.setattr(table_files, "_COMMITS_UNTIL_EXPIRY", 2)
    world = filled(tmp_path)
    sink = world.sink()

    def delete_merged(**options: Any) -> list[str]:
        gone = delete_orphan_files(world.spec, world.store, grace=0.0, clock=LATER, **options)
        return [entry.key for entry in gone if "/merged/" in entry.key]

    def sleep() -> None:
        for _ in range(3):
            assert delete_merged() == []
            world.seal(1, ("events",), rows=3)
            sink.follow(world.log)
        would_go = delete_merged(dry_run=True)
        (gone,) = delete_merged()
        assert would_go == [gone]
        assert gone.startswith("p/iceberg/events/merged/")

    before_the_commit(monkeypatch, sleep)
    assert compact_tables(world.spec, world.store)["events"] == CompactionResult(
        6, 6
    )  # the plan said so
    assert world.exact(world.sink())
    assert all(Path(file).exists() for file in list_referenced_files(world.spec, world.store))


def test_named_files_are_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the table has moved on.

    What a snapshot names stays; what was merged further goes with its last snapshot.
    """
    monkeypatch.setattr(table_files, "_COMMITS_UNTIL_EXPIRY", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)
    monkeypatch.setattr(
        table_maintenance, "_LOWEST_LEVEL_BYTES", 1_000_000
    )  # merged files are of one level with their parts
    world = filled(tmp_path, 5)
    deleted = 0
    for _ in range(3):
        compact_tables(world.spec, world.store)
        world.seal(3, ("events",), rows=3)
        for _ in range(2):
            world.sink().follow(world.log)
            world.seal(1, ("events",), rows=3)
        world.sink().follow(world.log)
        deleted += len(delete_orphan_files(world.spec, world.store, grace=0.0, clock=LATER))
        assert all(Path(file).exists() for file in list_referenced_files(world.spec, world.store))
        assert world.exact(world.sink())
    assert deleted > 0


def test_where_it_does_nothing(tmp_path: Path) -> None:
    """Without a table, and with `compact: false`."""
    world = make_world(tmp_path / "one")
    assert compact_tables(world.spec, world.store) == {}
    world = filled(tmp_path / "two", 6, compact=False)
    assert compact_tables(world.spec, world.store) == {}
    assert delete_orphan_files(make_spec(), MemoryStore(), grace=0.0) == []


def test_tables_that_it_must_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pipeline's, one that is not in the catalog, one from which another engine deleted
    single rows: said, and left.
    """
    world = filled(tmp_path, 5)
    current = read_published_cut(world.store, "p")
    assert current is not None
    catalog = world.sink()._catalog
    run = partial(run_work_here, world.store)
    other = table_maintenance._TableCompactor(
        world.spec, world.store, catalog, PublishedCut("1" * 32, 0, 5), "events", run
    )
    assert "another pipeline" in other.compact().skipped
    absent = table_maintenance._TableCompactor(
        world.spec, world.store, catalog, current, "hourly", run
    )
    assert "does not have it" in absent.compact().skipped

    def refuse(_: TableFollower) -> None:
        raise ValueError("another engine deleted single rows of it")

    monkeypatch.setattr(TableFollower, "live_files", refuse)
    done = compact_tables(world.spec, world.store)["events"]
    assert done == CompactionResult(0, 0, "another engine deleted single rows of it")
