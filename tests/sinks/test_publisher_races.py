"""Publishers that race, or sleep through a restore, show each slot once."""

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
from tests.servers.memory_store import MemoryBucket, MemoryStore, StoreRequest
from tests.sinks.conftest import UID, World
from tests.sinks.table_checks import is_table, once

from tidegate.errors import TransientError
from tidegate.jobs.sinks import iceberg_sink
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    PublishedCut,
    advance_published_cut,
    read_published_cut,
    replace_table_location,
)
from tidegate.jobs.sinks.table_follower import TABLE_PROPERTIES, TableFollower


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


def test_a_lost_race_leaves_no_commit_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commits of the other tables have ended before the next try begins."""
    world.seal(1, ("events", "late"))
    sink = world.sink()
    sink.follow(world.log)
    world.seal(1, ("events", "late"))
    lost, behind, tried_again = list[bool](), list[bool](), threading.Event()
    append, load = TableFollower.append_slots, sink._load_tables

    def lose_or_wait(self: TableFollower, *args: Any) -> None:
        if self.table.name()[-1] == "events" and not lost:
            lost.append(True)
            raise CommitFailedException("another publisher was faster")
        if self.table.name()[-1] == "late" and not behind:
            behind.append(tried_again.wait(0.3))
        append(self, *args)

    def load_again() -> None:
        if lost:
            tried_again.set()
        load()

    monkeypatch.setattr(TableFollower, "append_slots", lose_or_wait)
    monkeypatch.setattr(sink, "_load_tables", load_again)
    sink.follow(world.log)
    assert (lost, behind) == ([True], [False])
    assert world.exact(sink)


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
    mine.rewind(1, 2, lambda *_: pytest.fail("no file was merged"))
    assert mine.newest_position() == FollowerPosition(1, 2)
    assert mine.table.metadata.current_snapshot_id != seen
    with pytest.raises(CommitFailedException):
        asleep.append_slots({}, 0, 3, 3)


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


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("slower", "stays"), [(3, 5), (7, 7)])
def test_the_pointer_names_the_newest_cut_of_two_publishers(
    first: bool, slower: int, stays: int
) -> None:
    """A publisher that another one overtakes between its read and its write looks again."""
    bucket = MemoryBucket()
    fast, faults = MemoryStore(bucket), [5]

    def overtake(request: StoreRequest) -> None:
        if request.is_write and faults:
            advance_published_cut(fast, "p", PublishedCut("u", 0, faults.pop()))

    if not first:
        advance_published_cut(fast, "p", PublishedCut("u", 0, 1))
    slow = MemoryStore(bucket, hook=overtake)
    advance_published_cut(slow, "p", PublishedCut("u", 0, slower))
    current = read_published_cut(fast, "p")
    assert current is not None
    assert current.upto == stays


def test_maintenance_names_a_new_metadata_file_only_in_the_cut_it_read() -> None:
    """A pointer that a publisher has moved meanwhile, or that is away, stays as it is."""
    store = MemoryStore()
    assert not replace_table_location(store, "p", "events", "1.json", "2.json")
    assert read_published_cut(store, "p") is None
    advance_published_cut(store, "p", PublishedCut("u", 0, 1, tables={"events": "3.json"}))
    assert not replace_table_location(store, "p", "events", "1.json", "2.json")
    assert replace_table_location(store, "p", "events", "3.json", "4.json")
    cut = read_published_cut(store, "p")
    assert cut is not None
    assert cut.tables == {"events": "4.json"}
