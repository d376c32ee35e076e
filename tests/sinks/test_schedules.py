"""Random schedules of publishers, compactions, crashes, overtakings, restores, lost catalogs.

In the end tables equal the log.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.manual_clock import ManualClock
from tests.sinks.conftest import World, make_spec
from tests.sinks.table_checks import InlinePool

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sinks.table_follower import TableFollower
from tidegate.jobs.sinks.table_maintenance import (
    compact_tables,
    delete_orphan_files,
    list_referenced_files,
    note_table_versions,
)

TABLES = ("events", "late", "hourly", "barriers")
LATER = ManualClock(wall_ticks=4_000_000_000_000_000)


class _CrashError(BaseException):
    """kill -9 at this point."""


class Schedule:
    """One seeded run.

    `interrupt` acts just before a random commit: another publisher, a restore, or a crash.
    """

    def __init__(self, folder: Path, seed: int, compacts: bool) -> None:
        self.compacts, self.rare = compacts, [self.restore, self.lose_catalog, self.roll_back]
        self.dice = random.Random(seed)
        self.world = World(LocalStore(folder / "store"), folder / "work", make_spec())
        self.sinks = [self.world.sink() for _ in range(2)]
        self.pending: Callable[[], None] | None = None
        self.deciding = threading.Lock()
        self.ids: list[CheckpointId] = []

    def step(self) -> None:
        """Do something."""
        acts = [self.seal] * 5 + [self.publish] * 4 + [self.disturbed] * 4
        acts += (
            [self.compact] * 3 + [self.restore, self.lose_catalog] if self.compacts else self.rare
        )
        self.dice.choice(acts)()

    def seal(self) -> None:
        """Seal up to four epochs with random tables."""
        for _ in range(self.dice.randint(1, 4)):
            tables = tuple(t for t in TABLES if self.dice.random() < 0.5)
            self.ids.append(self.world.seal(1, tables, rows=1).id)

    def publish(self) -> None:
        """One publisher follows."""
        self.dice.choice(self.sinks).follow(self.world.log)

    def disturbed(self) -> None:
        """A publisher follows, and between its load and one of its commits something else happens."""
        one, other = self.dice.sample(self.sinks, 2)
        self.seal()

        def overtake() -> None:
            other.follow(self.world.log)

        def overtake_after_restore() -> None:
            self.restore()
            other.follow(self.world.log)

        def crash() -> None:
            raise _CrashError

        self.pending = self.dice.choice([overtake, overtake_after_restore, self.restore, crash])
        try:
            one.follow(self.world.log)
        except _CrashError:
            self.sinks = [self.world.sink() if sink is one else sink for sink in self.sinks]
        self.pending = None

    def compact(self) -> None:
        """Merge files and delete what no one names.

        Perhaps someone else acts before one of its commits, or it dies there.
        """
        follow = self.dice.choice(self.sinks).follow

        def overtake() -> None:
            self.seal()
            follow(self.world.log)

        def crash() -> None:
            raise _CrashError

        self.pending = self.dice.choice([None, overtake, self.restore, crash])
        with suppress(_CrashError):
            compact_tables(self.world.spec, self.world.store)
            note_table_versions(self.world.spec, self.world.store, grace=0.0, clock=LATER)
            delete_orphan_files(self.world.spec, self.world.store, grace=0.0, clock=LATER)
        self.pending = None

    def restore(self) -> None:
        """Fork to any checkpoint that was ever completed, or to the beginning."""
        self.world.fork(self.dice.choice([*self.ids, None]) if self.ids else None)

    def lose_catalog(self) -> None:
        """The SQLite file is gone; every process starts again."""
        if (self.world.workdir.parent / "store" / ".tidegate-store" / "catalog.sqlite").exists():
            self.world.lose_catalog()
        self.sinks = [self.world.sink() for _ in range(2)]

    def roll_back(self) -> None:
        """Someone rolls one table back by hand, to any snapshot that it has, also into the middle
        of a rewind.
        """
        sink, name = self.world.sink(), self.dice.choice((*TABLES, "checkpoints"))
        if sink._catalog.table_exists(("p", name)):
            table = sink.open_table(name)
            known = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
            if known:  # none: a publisher died while making the table
                table.manage_snapshots().set_current_snapshot(
                    snapshot_id=self.dice.choice(known)
                ).commit()

    def interrupt(self) -> None:
        """Called before every commit of a table."""
        # Several tables commit at once, each in a thread: only one of them may act.
        with self.deciding:
            acts = self.pending is not None and self.dice.random() < 0.4
            act, self.pending = (self.pending, None) if acts else (None, self.pending)
        if act is not None:
            act()

    def finish(self) -> None:
        """Publish what is left with a fresh process, and judge."""
        self.pending = None
        world, sink = self.world, self.world.sink()
        sink.follow(world.log)
        assert world.exact(sink)
        assert all(Path(file).exists() for file in list_referenced_files(world.spec, world.store))
        for table in ("events", "checkpoints"):
            rows = read_table(world.spec, world.store, table)
            found = zip(rows["_timeline"].to_pylist(), rows["_epoch"].to_pylist(), strict=True)
            assert sorted(found) == world.wanted(table)


def run(
    folder: Path, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch, *, compacts: bool = False
) -> None:
    """One schedule."""
    if compacts:
        monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink.ThreadPoolExecutor", InlinePool)
    schedule = Schedule(folder, seed, compacts)
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._NEWEST_SLOTS_KEPT", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._MIN_FILES_PER_MERGE", 2)
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._MERGES_PER_COMMIT", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.table_files._COMMITS_UNTIL_EXPIRY", 3)
    for name in ("append_slots", "rewind", "initialize", "replace_files"):
        original = getattr(TableFollower, name)

        def disturbed(
            self: TableFollower, *args: Any, original: Any = original, **more: Any
        ) -> None:
            schedule.interrupt()
            original(self, *args, **more)

        monkeypatch.setattr(TableFollower, name, disturbed)
    for _ in range(steps):
        schedule.step()
    schedule.finish()


@pytest.mark.parametrize("seed", range(4))
def test_tables_equal_the_log_after_any_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever happened, a fresh publisher leaves every row of the lineage in its table once, and
    nothing else.
    """
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 3)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)
    run(tmp_path, seed, 12, monkeypatch)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 106))]
)
def test_files_are_merged_in_any_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same while small files are merged and garbage is deleted at any moment, by someone who
    may die of it. Odd seeds use the catalog of a bucket, even ones a SQLite file.
    """
    if seed % 2:
        # A class that no store has: the local store then takes the place of a bucket.
        monkeypatch.setattr("tidegate.jobs.sinks.iceberg_catalog.LocalStore", _CrashError)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 3)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)
    run(tmp_path, seed, 12, monkeypatch, compacts=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same, many times."""
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 3)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_SLOTS_PER_SNAPSHOT", 5)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)
    run(tmp_path, seed, 15, monkeypatch)
