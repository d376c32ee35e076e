"""Someone rolls a table back by hand, to any snapshot it has.

Every row of the lineage comes back, once, with any publisher.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from tests.sinks.conftest import World
from tests.sinks.table_checks import is_table, once

from tidegate.jobs.sinks.iceberg_sink import IcebergSink


def published(world: World, slots: int) -> IcebergSink:
    """A publisher that has followed slot by slot, so that each has a snapshot."""
    sink = world.sink()
    for _ in range(slots):
        world.seal(1, ("events", "late"))
        sink.follow(world.log)
    return sink


def roll_back(sink: IcebergSink, table: str, upto: int) -> None:
    """To the first snapshot in which a table stood at a slot."""
    found = sink.open_table(table)
    target = next(
        s.snapshot_id
        for s in found.metadata.snapshots
        if s.summary and s.summary["tidegate.upto"] == str(upto)
    )
    found.manage_snapshots().set_current_snapshot(snapshot_id=target).commit()


def roll_back_into_rewind(sink: IcebergSink, table: str) -> None:
    """To what a rewind left of the table before it appended its fence."""
    found = sink.open_table(table)
    fence = next(s for s in found.metadata.snapshots if s.summary and s.summary["tidegate.fence"])
    assert fence.parent_snapshot_id is not None
    found.manage_snapshots().set_current_snapshot(snapshot_id=fence.parent_snapshot_id).commit()


def test_into_the_middle_of_a_rewind(world: World) -> None:
    """What a rewind left is not where the snapshot before it was, also for a restore to
    the abandoned slots.
    """
    sink = published(world, 3)
    third = world.log.head().checkpoint
    published(world, 2)
    abandoned = world.log.head().checkpoint
    world.fork(third)
    sink.follow(world.log)
    roll_back_into_rewind(sink, "events")
    world.fork(abandoned)
    fresh = world.sink()
    fresh.follow(world.log)
    assert world.exact(fresh)


def test_one_table_and_then_the_table_of_checkpoints(world: World) -> None:
    """The second rollback is into the rewind that followed from the first."""
    sink = published(world, 5)
    roll_back(sink, "events", 3)
    sink = world.sink()
    sink.follow(world.log)
    roll_back_into_rewind(sink, "checkpoints")
    world.seal(1)
    fresh = world.sink()
    fresh.follow(world.log)
    assert world.exact(fresh)


def test_the_table_of_checkpoints_to_before_a_restore(world: World) -> None:
    """It shows slots that the restore has removed from the other tables.

    After a restore back to them every table gets them again (docs/track-record.md, F54).
    """
    sink = published(world, 3)
    third = world.log.head().checkpoint
    sink = published(world, 2)
    abandoned = world.log.head().checkpoint
    world.fork(third)
    sink.follow(world.log)
    roll_back(sink, "checkpoints", 5)
    world.fork(abandoned)
    fresh = world.sink()
    fresh.follow(world.log)
    assert world.exact(fresh)


def test_while_one_publisher_loads_and_another_repairs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loaded `checkpoints` before the table was rolled back and mended does not take the table
    for complete.
    """
    sink = published(world, 5)
    world.seal(1)
    slow, original = world.sink(), SqlCatalog.load_table
    acted: list[bool] = []

    def load(self: SqlCatalog, identifier: Any) -> Any:
        if not acted and identifier[-1] == "events":
            acted.append(True)
            roll_back(sink, "events", 3)
            with monkeypatch.context() as patch:
                once(patch, "append_slots", is_table("events"), _crash)
                with pytest.raises(KeyboardInterrupt):
                    world.sink().follow(world.log)
        return original(self, identifier)

    monkeypatch.setattr(SqlCatalog, "load_table", load)
    slow.follow(world.log)
    assert acted
    assert world.exact(world.sink())


def _crash() -> None:
    raise KeyboardInterrupt
