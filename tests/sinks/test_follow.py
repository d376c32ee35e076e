"""The Iceberg tables follow the log: each slot once, in groups, and grow with the spec."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sinks.conftest import UID, World, make_spec

from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.table_follower import TABLE_PROPERTIES, TableFollower


def test_applies_each_sealed_slot_once(world: World) -> None:
    """After `follow` every table holds the lineage's rows; following again changes nothing."""
    sink = world.sink()
    world.seal(3, ("events", "late"))
    assert sink.follow(world.log) == 3
    assert world.exact(sink)
    assert sink.follow(world.log) == 0
    assert (world.published_slot(), sink.lag(world.log)) == (3, 0)


def _slots_of_snapshots(sink: IcebergSink, table: str) -> list[tuple[int, int]]:
    """`tidegate.from` and `tidegate.upto` of each snapshot, oldest first."""
    summaries = [s.summary for s in sink.open_table(table).metadata.snapshots if s.summary]
    return [(int(s["tidegate.from"] or -1), int(s["tidegate.upto"] or -1)) for s in summaries]


def test_snapshots_say_which_slots_they_hold(world: World) -> None:
    """Those of a table name all slots, each slot once; those of a rewind name none.

    docs/architecture.md, section on the Iceberg tables.
    """
    sink = world.sink()
    for tables in (("events",), ("events",), ("events", "hourly")):
        early = world.seal(2, tables).id
        sink.follow(world.log)
    for table in ("events", "hourly", "late", "checkpoints"):
        ends = _slots_of_snapshots(sink, table)
        assert [first for first, _ in ends] == [1, *[last + 1 for _, last in ends[:-1]]], table
        assert ends[-1][1] == (0 if table == "late" else 6), "a table without rows waits"
    world.seal(2)
    sink.follow(world.log)
    world.fork(early)
    sink.follow(world.log)
    assert _slots_of_snapshots(sink, "events")[-3:] == [(7, 8), (7, 6), (7, 6)]


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


def test_small_manifests_are_merged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without merging, each commit would write a manifest list as long as the table's history."""
    monkeypatch.setitem(TABLE_PROPERTIES, "commit.manifest.min-count-to-merge", "3")
    sink = world.sink()
    for _ in range(7):
        world.seal(1)
        sink.follow(world.log)
    table = sink.open_table("events")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.io)) <= 3


def test_a_group_that_a_crash_left_half_done_is_finished(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers would see rows of an epoch that `checkpoints` does not have yet."""
    world.spec = make_spec(outputs={"publish_every": 3})
    world.seal(1)
    append = TableFollower.append_slots

    def crash(follower: TableFollower, *given: Any, **more: Any) -> None:
        if follower.table.name()[-1] == "checkpoints":
            raise KeyboardInterrupt
        append(follower, *given, **more)

    monkeypatch.setattr(TableFollower, "append_slots", crash)
    with pytest.raises(KeyboardInterrupt):
        world.sink().follow(world.log)
    monkeypatch.undo()
    fresh = world.sink()
    assert fresh.follow(world.log, flush=False) == 1
    assert world.published_slot() == 1
    assert world.exact(fresh)


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
    with pytest.raises(PoisonError, match=r"cannot be added to the table p\.events"):
        sink.follow(world.log)


def _mark(sink: IcebergSink, table: str) -> int:
    mark = TableFollower(sink.open_table(table), UID).newest_position()
    assert mark is not None
    return mark.upto
