"""The Iceberg tables follow the log: each slot once, through races, sleeps, crashes and restores."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from tests.sinks.conftest import UID, World, make_spec
from tests.sinks.table_checks import is_table, once

from tidegate.errors import ConfigurationError, FencedError, PoisonError, TransientError
from tidegate.jobs.sinks import iceberg_sink
from tidegate.jobs.sinks.iceberg_catalog import _forget_published_tables
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    read_published_cut,
)
from tidegate.jobs.sinks.table_follower import TABLE_PROPERTIES, TableFollower


def test_applies_each_sealed_slot_once(world: World) -> None:
    """After `follow` every table holds the lineage's rows; following again changes nothing."""
    sink = world.sink()
    world.seal(3, ("events", "late"))
    assert sink.follow(world.log) == 3
    assert world.exact(sink)
    assert sink.follow(world.log) == 0
    assert (world.published_slot(), sink.lag(world.log)) == (3, 0)


@pytest.mark.parametrize(
    "error", [CommitFailedException, NoSuchTableError, TableAlreadyExistsError]
)
def test_a_lost_race_in_lag_may_be_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Another publisher may move a table while `lag` loads it; a later call sees its work."""
    world.seal(2)
    sink = world.sink()
    sink.follow(world.log)
    fresh = world.sink()
    with monkeypatch.context() as patch:
        patch.setattr(fresh, "_load_tables", lambda: throw(error("moved")))
        with pytest.raises(TransientError):
            fresh.lag(world.log)
    assert fresh.lag(world.log) == 0


def throw(error: Exception) -> None:
    """Raise the error, in a lambda."""
    raise error


def test_nothing_sealed_is_nothing_to_do(world: World) -> None:
    """An empty log makes no tables and no pointer."""
    sink = world.sink()
    assert (sink.follow(world.log), sink.lag(world.log), world.published_slot()) == (0, 0, 0)


def test_window_table_appears_with_its_first_file(world: World) -> None:
    """A window's table is made from its first file, also when that comes late, and rewinds to
    before it existed.
    """
    sink = world.sink()
    early = world.seal(2).id
    sink.follow(world.log)
    world.seal(1, ("events", "hourly"))
    sink.follow(world.log)
    assert world.rows(sink, "hourly") == [(0, 3)] * 2
    world.fork(early)
    sink.follow(world.log)
    assert world.rows(sink, "hourly") == []
    world.seal(1, ("hourly",))
    sink.follow(world.log)
    assert world.exact(sink)
    assert world.rows(sink, "hourly") == [(1, 3)] * 2


def test_follower_away_for_twenty_epochs_catches_up(world: World) -> None:
    """A sink that was away applies all it missed, in groups, from a new process."""
    world.seal(2)
    world.sink().follow(world.log)
    world.seal(20, ("events", "late"))
    sink = world.sink()
    assert sink.lag(world.log) == 20
    assert sink.follow(world.log) == 20
    assert world.exact(sink)


def test_catching_up_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far behind, one snapshot takes a bounded number of slots."""
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_SLOTS_PER_SNAPSHOT", 4)
    world.seal(11)
    sink = world.sink()
    assert sink.follow(world.log) == 11
    assert world.exact(sink)
    assert list(TableFollower(sink.open_table("events"), UID).list_tags()) == ["t0-e11"]


def test_untouched_tables_cost_nothing_until_the_group_ends(world: World) -> None:
    """A table without new files gets its empty snapshot at the group end only, and then every table
    has the same tag.
    """
    sink = world.sink()
    world.seal(10)
    sink.follow(world.log)
    for _ in range(9):
        world.seal()
        sink.follow(world.log)
    assert _mark(sink, "late") == 10
    world.seal()
    sink.follow(world.log)
    tables = ("events", "late", "barriers", "checkpoints", "dead_letters")
    assert {_mark(sink, t) for t in tables} == {20}
    for table in tables:
        assert {"t0-e10", "t0-e20"} <= set(sink.open_table(table).refs())
    assert sink.open_table("events").scan().use_ref("t0-e10").to_arrow().num_rows == 20


def test_metadata_stays_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old tags and snapshots are forgotten, but for the newest; data files stay."""
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 2)
    sink = world.sink()
    for _ in range(14):
        world.seal()
        sink.follow(world.log)
    metadata = sink.open_table("events").metadata
    assert set(metadata.refs) == {"main", "t0-e13", "t0-e14"}
    assert len(metadata.snapshots) <= 3
    assert world.exact(sink)


def test_publish_every_gathers_epochs(world: World) -> None:
    """With `publish_every` epochs wait until enough are there, or until a flush."""
    world.spec = make_spec(outputs={"publish_every": 3})
    sink = world.sink()
    world.seal(2)
    assert sink.follow(world.log, flush=False) == 0
    world.seal(1)
    assert sink.follow(world.log, flush=False) == 3
    world.seal(1)
    assert sink.follow(world.log) == 1


def test_two_publishers_race(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that was overtaken between load and commit applies nothing twice."""
    one, two = world.sink(), world.sink()
    world.seal(3)
    one.follow(world.log)
    two.follow(world.log)
    world.seal(2)
    once(monkeypatch, "append_slots", is_table("events"), lambda: two.follow(world.log))
    one.follow(world.log)
    assert world.exact(one)


def with_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as pyiceberg makes them by default, with its commit retry on."""
    properties = {
        **TABLE_PROPERTIES,
        "commit.retry.num-retries": "4",
        "commit.retry.min-wait-ms": "1",
    }
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink.TABLE_PROPERTIES", properties)


@pytest.mark.parametrize("missing", ["no retry", "mark check"])
def test_the_race_doubles_rows_without_the_corrections(
    world: World, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The same race publishes an epoch twice with pyiceberg's retry on, or if the mark is not
    judged again after a conflict.
    """
    if missing == "no retry":
        with_retry(monkeypatch)
    one, two = world.sink(), world.sink()
    world.seal(3)
    one.follow(world.log)
    two.follow(world.log)
    world.seal(1)
    once(monkeypatch, "append_slots", is_table("events"), lambda: two.follow(world.log))
    if missing == "mark check":
        monkeypatch.setattr(
            TableFollower, "newest_position", lambda self: FollowerPosition(0, 3 + (self.twice > 1))
        )
        monkeypatch.setattr(
            TableFollower,
            "twice",
            property(lambda self: world.rows(one).count((0, 4)) // 2),
            raising=False,
        )
    one.follow(world.log)
    assert world.rows(one).count((0, 4)) == 4


def test_racing_threads_publish_each_slot_once(world: World) -> None:
    """Three publishers in earnest, on one catalog, while epochs are sealed."""
    world.seal(2)
    sinks = [world.sink() for _ in range(3)]
    sinks[0].follow(world.log)
    failures: list[BaseException] = []

    def publish(sink: IcebergSink) -> None:
        try:
            for _ in range(6):
                try:
                    sink.follow(world.log)
                except TransientError:
                    continue
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    world.seal(6, ("events", "late"))
    for thread in threads:
        thread.join()
    assert failures == []
    sinks[0].follow(world.log)
    assert world.exact(sinks[0])


def test_publish_that_straddles_a_rewind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher asleep between load and commit wakes after restore and rewind.

    Its slot does not come back.
    """
    sleeper, other = world.sink(), world.sink()
    target = world.seal(2).id
    world.seal(1)
    sleeper.follow(world.log)
    world.seal(2)

    def restore() -> None:
        world.fork(target)
        other.follow(world.log)
        world.seal(1)

    once(monkeypatch, "append_slots", is_table("events"), restore)
    sleeper.follow(world.log)
    assert world.exact(sleeper)
    assert world.rows(sleeper) == [(0, 1)] * 2 + [(0, 2)] * 2 + [(1, 3)] * 2


def test_a_table_begun_by_another_is_judged_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg's SQL catalog loads what it has just created.

    A restore's publisher may have begun it (found by a soak).
    """
    sleeper, other = world.sink(), world.sink()
    world.seal(2)
    load, create = SqlCatalog.load_table, SqlCatalog.create_table
    made, slept = list[str](), list[str]()

    def making(
        catalog: SqlCatalog, identifier: tuple[str, str], *given: Any, **named: Any
    ) -> Table:
        made.append(identifier[1])
        return create(catalog, identifier, *given, **named)

    def late(catalog: SqlCatalog, identifier: tuple[str, str]) -> Table:
        if identifier[1] == "events" in made and not slept:
            slept.append("once")
            world.fork(None)
            world.seal(1)
            other.follow(world.log)
        return load(catalog, identifier)

    begun, begin = list[FollowerPosition | None](), TableFollower.initialize

    def noted(follower: TableFollower, timeline: int, upto: int) -> None:
        begun.append(follower.newest_position())
        begin(follower, timeline, upto)

    monkeypatch.setattr(TableFollower, "initialize", noted)
    monkeypatch.setattr(SqlCatalog, "create_table", making)
    monkeypatch.setattr(SqlCatalog, "load_table", late)
    sleeper.follow(world.log)
    assert slept
    assert world.exact(sleeper)
    assert set(begun) == {None}


def test_straddling_publish_comes_back_with_the_retry(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pyiceberg's retry on, the same sleeper puts the abandoned slot on top of the fence."""
    with_retry(monkeypatch)
    sleeper, other = world.sink(), world.sink()
    target = world.seal(2).id
    sleeper.follow(world.log)
    world.seal(1)

    def restore() -> None:
        world.fork(target)
        other.follow(world.log)

    once(monkeypatch, "append_slots", is_table("events"), restore)
    sleeper.follow(world.log)
    assert (0, 3) in world.rows(sleeper)


def test_a_bare_rollback_stops_no_sleeper_in_general_but_a_fence_does(world: World) -> None:
    """After a rewind main is a snapshot that no one has seen before, so a commit prepared on the
    old one fails.
    """
    world.seal(2)
    sink = world.sink()
    sink.follow(world.log)
    asleep, mine = (TableFollower(sink.open_table("events"), UID) for _ in range(2))
    seen = mine.table.metadata.current_snapshot_id
    mine.rewind(1, 2)
    assert mine.newest_position() == FollowerPosition(1, 2)
    assert mine.table.metadata.current_snapshot_id != seen
    with pytest.raises(CommitFailedException):
        asleep.append_slots({}, 0, 3, 3)


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
        _forget_published_tables(world.spec, world.log)
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


def test_unreachable_catalog_is_transient(world: World) -> None:
    """A catalog that cannot be opened is tried again later."""
    world.spec = make_spec(outputs={"catalog": "sqlite:////nonexistent/folder/catalog.sqlite"})
    world.seal(1)
    with pytest.raises(TransientError, match="cannot be reached"):
        world.sink().follow(world.log)


def test_missing_file_is_poison(world: World) -> None:
    """A sealed epoch whose file is gone is named; trying again cannot help."""
    epoch = world.seal(1)
    world.store.delete(epoch.files["events"][0].key)
    with pytest.raises(PoisonError, match="is gone"):
        world.sink().follow(world.log)


def test_no_retry_property_is_in_every_table(world: World) -> None:
    """The property that keeps pyiceberg from rebasing a commit is set on every table."""
    world.seal(1, ("events", "hourly"))
    sink = world.sink()
    sink.follow(world.log)
    for table in world.spec.table_names:
        assert sink.open_table(table).properties["commit.retry.num-retries"] == "0"


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


def test_tables_grow_with_the_spec(world: World) -> None:
    """A new column and a new aggregate are added to the tables.

    Rows from before read as null there.
    """
    world.seal(1, ("events", "hourly"))
    world.sink().follow(world.log)
    columns = {"t": "timestamp", "carrier": "string", "delay": "double", "gate": "int"}
    aggregates = {"n": "count(*)", "worst": "max(delay)"}
    world.spec = make_spec(
        columns, windows={"hourly": {"kind": "tumbling", "size": "1h", "aggregates": aggregates}}
    )
    world.seal(1, ("events", "hourly"))
    sink = world.sink()
    sink.follow(world.log)
    assert world.exact(sink)
    assert "gate" in sink.open_table("events").scan().to_arrow().column_names
    assert "worst" in sink.open_table("hourly").scan().to_arrow().column_names
    world.seal(1, ("events", "hourly"))
    sink.follow(world.log)
    assert world.exact(sink)


def test_file_that_does_not_fit_is_poison(world: World) -> None:
    """A file with other columns than its table is named with advice, not a traceback."""
    world.seal(1)
    sink = world.sink()
    sink.follow(world.log)
    strange = world.spec.model_copy(
        update={"sources": make_spec(columns={"t": "timestamp", "other": "string"}).sources}
    )
    world.spec, old = strange, world.spec
    world.seal(1)
    world.spec = old
    with pytest.raises(PoisonError, match="does not fit"):
        sink.follow(world.log)


def _mark(sink: IcebergSink, table: str) -> int:
    mark = TableFollower(sink.open_table(table), UID).newest_position()
    assert mark is not None
    return mark.upto


def _crash() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("mended", [True, False])
def test_a_table_made_by_a_publisher_that_missed_a_restore_stays_empty(
    world: World, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """The restore was followed before the table was there; its maker dies right after.

    Without the mend abandoned rows stay.
    """
    monkeypatch.setattr(iceberg_sink, "_COMMIT_THREADS", 1)
    first = world.seal(1)
    stale, other = world.sink(), world.sink()
    stale.follow(world.log)
    world.seal(1, ("hourly",))
    create = IcebergSink._create_table

    def slept(sink: IcebergSink, table: str, *arguments: Any) -> Any:
        world.fork(first.id)
        other.follow(world.log)
        monkeypatch.setattr(IcebergSink, "_load_tables", _die)
        return create(sink, table, *arguments)

    monkeypatch.setattr(IcebergSink, "_create_table", slept)
    if not mended:
        monkeypatch.setattr(CurrentLineage, "is_current", lambda _: True)
    with pytest.raises(BaseException, match="killed"):
        stale.follow(world.log)
    assert (world.rows(other, "hourly") == []) == mended


def test_a_publisher_that_knew_a_table_before_checkpoints_does_not_show_it_as_it_was(
    world: World,
) -> None:
    """The readers' pointer never goes back to a version of a table from before another publisher
    moved it on.

    Found by the simulation: readers missed rows, and the collector took their files for garbage.
    """
    stale, other = world.sink(), world.sink()
    stale._create_table("events", [], 0, 0)
    world.seal()
    other.follow(world.log)
    world.seal(1, ("late",))
    stale.follow(world.log)
    current = read_published_cut(world.store, "p")
    assert current is not None
    assert (current.upto, current.tables["events"]) == (
        2,
        other.open_table("events").metadata_location,
    )


def _die(_: IcebergSink) -> None:
    raise SystemExit("killed")
