"""A catalog may be lost, and tables that are not the pipeline's own are refused."""

from __future__ import annotations

import pytest
from tests.sinks.conftest import World

from tidegate.errors import ConfigurationError, FencedError, PoisonError
from tidegate.jobs.sinks.iceberg_catalog import forget_published_tables
from tidegate.jobs.sinks.lineage_position import CurrentLineage


def test_lost_catalog_is_found_through_the_pointer(world: World) -> None:
    """A new catalog takes over the tables where they are: nothing is published again."""
    world.seal(3, ("events", "hourly"))
    world.sink().follow(world.log)
    world.lose_catalog()
    fresh = world.sink()
    assert fresh.lag(world.log) == 0
    world.seal(1, ("events", "hourly"))
    assert fresh.follow(world.log) == 1
    assert world.exact(fresh)


@pytest.mark.parametrize("lost", ["tables", "catalog and pointer"])
def test_catalog_is_rebuilt_from_the_log(world: World, lost: str) -> None:
    """Tables made again from the log alone hold the same rows."""
    target = world.seal(3, ("events", "hourly")).id
    sink = world.sink()
    sink.follow(world.log)
    world.fork(target)
    world.seal(2, ("events", "late"))
    sink.follow(world.log)
    if lost == "tables":
        forget_published_tables(world.spec, world.log)
    else:
        world.lose_catalog()
        world.store.delete("p/iceberg/current.json")
    fresh = world.sink()
    assert fresh.follow(world.log) == 5
    assert world.exact(fresh)


def test_rebuild_says_when_an_epoch_was_retired(world: World) -> None:
    """A retired manifest no longer names its files: rebuilding is refused, not guessed."""
    world.seal(2)
    world.retire(1)
    with pytest.raises(PoisonError, match="no manifest"):
        world.sink().follow(world.log)


@pytest.mark.parametrize("flush", [True, False])
def test_tables_that_another_moved_on_need_no_retired_epoch(world: World, flush: bool) -> None:
    """A publisher that slept has old tables in memory; what they lack may be retired by now."""
    sleeper = world.sink()
    world.seal(2, ("events",))
    assert sleeper.follow(world.log) == 2
    world.seal(2, ("events",))
    world.sink().follow(world.log)
    world.retire(3)
    world.seal(1, ("events",))
    assert sleeper.follow(world.log, flush=flush) == 1
    assert {epoch for _, epoch in world.rows(world.sink())} == {1, 2, 3, 4, 5}
    assert len(world.rows(world.sink())) == 10


def test_a_publisher_that_slept_in_its_first_call_needs_no_retired_epoch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another publisher applied what it was about to apply, and retention has retired it since."""
    world.seal(2, ("events",))
    world.sink().follow(world.log)
    world.seal(2, ("events",))
    sleeper = world.sink()
    rewind = sleeper._rewind_tables

    def rewind_late(lineage: CurrentLineage) -> None:
        monkeypatch.undo()
        world.sink().follow(world.log)
        world.retire(3)
        rewind(lineage)

    monkeypatch.setattr(sleeper, "_rewind_tables", rewind_late)
    assert sleeper.follow(world.log) == 0
    assert world.rows(sleeper) == world.wanted_of(4)


def test_tables_outside_the_lineage_are_fenced(world: World) -> None:
    """Tables on a timeline that this log does not know, or ahead of it, are left alone."""
    target = world.seal(2).id
    world.fork(target)
    world.seal(1)
    world.sink().follow(world.log)
    world.forget_after(0, 2)
    with pytest.raises(FencedError, match="timeline 1"):
        world.sink().follow(world.log)


def test_tables_ahead_of_the_log_are_fenced(world: World) -> None:
    """A log that lost slots which the tables already show is refused."""
    world.seal(3)
    world.sink().follow(world.log)
    world.forget_after(0, 2)
    with pytest.raises(FencedError, match="slot 3"):
        world.sink().follow(world.log)


def test_tables_of_another_pipeline_are_refused(world: World) -> None:
    """Another uid means another pipeline's tables: a configuration error that changes nothing."""
    world.seal(1)
    world.sink().follow(world.log)
    with pytest.raises(ConfigurationError, match="another pipeline"):
        world.sink(uid="1" * 32).follow(world.log)
