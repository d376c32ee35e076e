"""Tables are rewound after restores and rollbacks, through crashes at any point."""

from __future__ import annotations

import pytest
from tests.sinks.conftest import World
from tests.sinks.table_checks import is_table, once

from tidegate.jobs.sinks.lineage_position import (
    read_published_cut,
)


@pytest.mark.parametrize("where", ["before", "after events", "between rollback and fence"])
def test_crash_during_a_rewind_heals(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever part of a rewind happened before the crash, the next publisher finishes it."""
    target = world.seal(3).id
    world.seal(2, ("events", "late"))
    sink = world.sink()
    sink.follow(world.log)
    world.fork(target)
    if (
        where == "between rollback and fence"
    ):  # our own pair is one commit; another tool's may not be
        table = sink.open_table("events")
        first = table.metadata.snapshots[0].snapshot_id
        table.manage_snapshots().set_current_snapshot(snapshot_id=first).commit()
    else:
        crashing = is_table("events") if where == "before" else is_table("late")
        with monkeypatch.context() as patch:
            once(patch, "rewind", crashing, _crash)
            with pytest.raises(KeyboardInterrupt):
                sink.follow(world.log)
    world.seal(1)
    fresh = world.sink()
    fresh.follow(world.log)
    assert world.exact(fresh)


@pytest.mark.parametrize("table", ["events", "late", "hourly", "checkpoints"])
def test_crash_between_tables_heals(
    world: World, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """A publisher that dies before any table's commit leaves a readable cut, and the next one
    completes it.
    """
    world.seal(1, ("events", "late", "hourly"))
    sink = world.sink()
    sink.follow(world.log)
    world.seal(1, ("events", "late", "hourly"))
    with monkeypatch.context() as patch:
        once(patch, "append_slots", is_table(table), _crash)
        with pytest.raises(KeyboardInterrupt):
            sink.follow(world.log)
    fresh = world.sink()
    assert (world.published_slot(), fresh.lag(world.log)) == (1, 1)
    fresh.follow(world.log)
    assert world.exact(fresh)
    assert world.published_slot() == 2


def test_restore_of_a_restore(world: World) -> None:
    """Forks of forks, also back into an older timeline, and to the very beginning."""
    sink = world.sink()
    ids = [world.seal().id for _ in range(5)]
    sink.follow(world.log)
    world.fork(ids[1])
    sink.follow(world.log)
    own = world.seal(2, ("events", "late")).id
    sink.follow(world.log)
    for target in (ids[4], own, None):
        world.fork(target)
        assert sink.lag(world.log) >= 0
        sink.follow(world.log)
        assert world.exact(sink)
        world.seal(1)
        sink.follow(world.log)
        assert world.exact(sink)


def test_a_restore_without_a_new_epoch_is_seen_by_readers(world: World) -> None:
    """Readers no longer see what a restore took back, although no epoch was sealed since.

    A sink that is filled from the tables would wait for that pointer forever.
    """
    sink = world.sink()
    kept = world.seal(2).id
    world.seal(1)
    sink.follow(world.log, flush=False)
    world.fork(kept)
    sink.follow(world.log, flush=False)
    cut = read_published_cut(world.store, world.spec.name)
    assert cut is not None
    assert (cut.timeline, cut.upto) == (1, 2)


def test_restore_before_anything_was_published(world: World) -> None:
    """Slots sealed, restored and sealed again while no table existed.

    Only the lineage is published.
    """
    target = world.seal(2).id
    world.seal(2)
    world.fork(target)
    world.seal(1)
    sink = world.sink()
    sink.follow(world.log)
    assert world.exact(sink)


def test_restore_to_a_checkpoint_whose_predecessors_were_retired(world: World) -> None:
    """A rewind needs neither old snapshots nor old manifests.

    A pinned checkpoint is restored after all around it is gone.
    """
    world.seal(2, ("events", "late"))
    pinned = world.seal(1, ("events", "hourly")).id
    world.seal(2, ("events", "late", "hourly"))
    sink = world.sink()
    sink.follow(world.log)
    for slot in (1, 2, 4):
        world.retire(slot)
    world.fork(pinned)
    world.seal(1)
    assert sink.follow(world.log) == 1
    assert world.rows(sink) == [(0, 1)] * 2 + [(0, 2)] * 2 + [(0, 3)] * 2 + [(1, 4)] * 2
    assert world.rows(sink, "late") == [(0, 1)] * 2 + [(0, 2)] * 2
    assert world.rows(sink, "hourly") == [(0, 3)] * 2
    assert world.rows(sink, "checkpoints") == [(0, 1), (0, 2), (0, 3), (1, 4)]


def test_rewind_of_a_table_that_another_program_compacted(world: World) -> None:
    """Rows of several slots in one foreign file are rewritten, not lost and not kept."""
    target = world.seal(2).id
    world.seal(2)
    sink = world.sink()
    sink.follow(world.log)
    table = sink.open_table("events")
    table.overwrite(table.scan().to_arrow())
    world.fork(target)
    fresh = world.sink()
    fresh.follow(world.log)
    assert world.rows(fresh) == [(0, 1)] * 2 + [(0, 2)] * 2
    # It was not rewritten as a file that tidegate has merged: its layout is that of the other program.
    files = fresh.open_table("events").scan().plan_files()
    assert not any("/merged/" in task.file.file_path for task in files)


def test_table_rolled_back_by_hand_is_filled_again(world: World) -> None:
    """Whoever rolls one table back gets its rows again with the next epoch, once."""
    sink = world.sink()
    for _ in range(3):
        world.seal(1, ("events", "late"))
        sink.follow(world.log)
    table = sink.open_table("events")
    second = next(
        s.snapshot_id
        for s in table.metadata.snapshots
        if s.summary and s.summary["tidegate.upto"] == "2"
    )
    table.manage_snapshots().rollback_to_snapshot(second).commit()
    world.seal(1)
    fresh = world.sink()
    fresh.follow(world.log)
    assert world.exact(fresh)


def test_rewind_drops_whole_files_only(world: World) -> None:
    """A rewind reads and writes no data file: the bounds of `_epoch` say which files go."""
    target = world.seal(2).id
    world.seal(2)
    sink = world.sink()
    sink.follow(world.log)
    before = {task.file.file_path for task in sink.open_table("events").scan().plan_files()}
    world.fork(target)
    sink.follow(world.log)
    after = {task.file.file_path for task in sink.open_table("events").scan().plan_files()}
    assert after < before
    assert len(after) == 2


def _crash() -> None:
    raise KeyboardInterrupt
