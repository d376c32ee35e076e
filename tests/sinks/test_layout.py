"""Partitioned and sorted tables: the same rows, in files that readers can pass over."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from pyiceberg.transforms import VoidTransform
from tests.manual_clock import ManualClock
from tests.sinks.conftest import make_spec
from tests.sinks.flight_tables import COLUMNS, LAYOUT, content, make_world, paths, published

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.errors import PoisonError
from tidegate.jobs.sinks.iceberg_catalog import forget_published_tables
from tidegate.jobs.sinks.published_tables import (
    find_published_slot,
    have_followers_rewound,
    read_table,
)
from tidegate.jobs.sinks.table_maintenance import list_referenced_files


def test_rows_lie_in_the_files_of_their_partition(tmp_path: Path) -> None:
    """Every file has one day and one bucket, sorted.

    And the table has the rows that it would have without.
    """
    plain, world = make_world(tmp_path / "plain"), make_world(tmp_path / "arranged", layout=LAYOUT)
    for one in (plain, world):
        one.seal(3, rows=40)
        one.sink().follow(one.log)
    assert content(world) == content(plain)
    assert world.exact(world.sink())
    table = published(world)
    assert [str(field.transform) for field in table.spec().fields] == ["day", "bucket[4]"]
    for path in paths(table):
        rows = pq.read_table(path).to_pylist()
        assert len({row["t"].date() for row in rows}) == 1
        keys = [
            (row["carrier"] is None, row["carrier"] or "", -row["t"].timestamp()) for row in rows
        ]
        assert keys == sorted(keys)


def test_readers_pass_over_what_they_do_not_want(tmp_path: Path) -> None:
    """A day, a bucket: pandas and DuckDB find the rows of the whole in a part of the files."""
    world = make_world(tmp_path, layout=LAYOUT)
    world.seal(4, rows=40)
    world.sink().follow(world.log)
    table, everything = published(world), content(world)
    second = "t >= '2024-02-29T00:00:00+00:00' and t < '2024-03-01T00:00:00+00:00'"
    wanted = [row["n"] for row in everything if row["t"].date() == dt.date(2024, 2, 29)]
    assert len(paths(table, row_filter=second)) < len(paths(table)) / 2
    assert sorted(table.scan(row_filter=second).to_pandas()["n"]) == sorted(wanted)
    with duckdb.connect() as db:
        table.scan(row_filter="carrier = 'C1'").to_duckdb("events", connection=db)
        found = {n for (n,) in db.sql("select n from events").fetchall()}
    assert found == {row["n"] for row in everything if row["carrier"] == "C1"}
    assert len(paths(table, row_filter="carrier = 'C1'")) < len(paths(table)) / 2


@pytest.mark.parametrize(
    "by",
    [
        "year(t)",
        "month(t)",
        "hour(t)",
        "day",
        "month(day)",
        "truncate(1, carrier)",
        "ok",
        "bucket(3, raw)",
    ],
)
def test_every_kind_of_partition(tmp_path: Path, by: str) -> None:
    """Iceberg's own reading of the files agrees with the partition they were put in.

    A scan by it loses nothing.
    """
    world = make_world(tmp_path, layout={"events": {"partition_by": [by, "bucket(2, price)"]}})
    world.seal(1, rows=30)
    world.sink().follow(world.log)
    table, everything = published(world), content(world)
    assert len(everything) == 30
    for row in everything[::5]:
        value = row["t"].isoformat()
        found = table.scan(
            row_filter=f"t = '{value}' and n = {row['n']} and price = {row['price']}"
        ).to_arrow()
        assert found["n"].to_pylist() == [row["n"]]


def test_all_tables_can_be_arranged(tmp_path: Path) -> None:
    """Also those that the driver writes itself, and windows; lists go along."""
    layout = {
        "barriers": {"partition_by": ["bucket(2, barrier_id)"], "sort_by": ["barrier_id desc"]},
        "checkpoints": {"partition_by": ["day(sealed_at)"]},
        "hourly": {"sort_by": ["window_start"]},
        "late": {"partition_by": ["_source", "day(t)"]},
    }
    plain, world = make_world(tmp_path / "plain"), make_world(tmp_path / "arranged", layout=layout)
    for one in (plain, world):
        one.seal(12, tuple(layout.keys() - {"checkpoints"}), rows=5)
        one.sink().follow(one.log)
    assert world.exact(world.sink())
    for table in ("barriers", "hourly", "late"):
        assert content(world, table) == content(plain, table)


def test_the_partitioning_may_change(tmp_path: Path) -> None:
    """Files that are there stay as they are, new ones come by the new rule, and readers see one
    table; also back again.
    """
    world = make_world(tmp_path)
    layouts: list[dict[str, Any]] = [
        {},
        {"events": {"partition_by": ["day(t)"]}},
        {"events": {"partition_by": ["bucket(4, carrier)", "day(t)"], "sort_by": ["n"]}},
        {"events": {"partition_by": ["hour(t)"]}},
        {"events": {"partition_by": ["day(t)"]}},
        {},
    ]
    for layout in layouts:
        world.spec = make_spec(COLUMNS, outputs={"layout": layout})
        world.seal(1, rows=20)
        world.sink().follow(world.log)
    assert world.exact(world.sink())
    table = published(world)
    assert table.spec().is_unpartitioned()
    assert len({task.file.spec_id for task in table.scan().plan_files()}) == 4
    second = "t >= '2024-02-29T00:00:00+00:00' and t < '2024-03-01T00:00:00+00:00'"
    wanted = [row["n"] for row in content(world) if row["t"].date() == dt.date(2024, 2, 29)]
    assert sorted(table.scan(row_filter=second).to_arrow()["n"].to_pylist()) == sorted(wanted)


def test_a_partitioning_that_tidegate_does_not_know_is_replaced(tmp_path: Path) -> None:
    """Somebody gave a table a partition by hand; new files come by the spec again."""
    world = make_world(tmp_path)
    world.seal(1)
    world.sink().follow(world.log)
    with world.sink().open_table("events").update_spec() as update:
        update.add_field("carrier", VoidTransform())
    world.seal(1)
    world.sink().follow(world.log)
    assert published(world).spec().is_unpartitioned()
    assert world.exact(world.sink())


def test_a_restore_takes_partitions_back(tmp_path: Path) -> None:
    """A rewind drops the files of later slots, whatever partition they lie in.

    Older cuts can be read.
    """
    world = make_world(tmp_path, layout=LAYOUT)
    target = world.seal(2, rows=10).id
    world.seal(2, rows=10)
    sink = world.sink()
    sink.follow(world.log)
    assert read_table(world.spec, world.store, "events", at=3).num_rows == 30
    before = paths(sink.open_table("events"))
    world.fork(target)
    world.seal(1, rows=10)
    sink.follow(world.log)
    assert world.exact(sink)
    old = {path for path in paths(sink.open_table("events")) if "/timelines/0/" in path}
    assert old < before


def test_a_second_publisher_finds_the_first_ones_files(tmp_path: Path) -> None:
    """What an epoch's arranged files are called follows from what is in them.

    Nothing is there twice.
    """
    world = make_world(tmp_path, layout=LAYOUT)
    world.seal(3, rows=20)
    sink = world.sink()
    sink.follow(world.log)
    before = paths(sink.open_table("events"))
    forget_published_tables(world.spec, world.log)
    world.sink().follow(world.log)
    assert paths(world.sink().open_table("events")) == before
    assert world.exact(world.sink())


def test_a_file_from_another_process_is_not_taken(tmp_path: Path) -> None:
    """Other rows under the name of an arranged file stop the publisher, with advice."""
    world = make_world(tmp_path, layout=LAYOUT)
    epoch = world.seal(1, rows=20)
    sink = world.sink()
    stolen = pq.read_table(world.store.uri(epoch.files["events"][0].key)).slice(0, 1)

    def other(self: LocalStore, key: str, data: bytes) -> object:
        if "/tables/events/" in key:
            pq.write_table(stolen, world.store.uri(key))
        return original(self, key, data)

    original = LocalStore.create
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "create", other)
        Path(world.store.uri(f"{world.layout.table_prefix('events', epoch.id)}x")).parent.mkdir(
            parents=True, exist_ok=True
        )
        with pytest.raises(PoisonError, match="has 1 rows, not"):
            sink.follow(world.log)


def test_retention_keeps_what_the_tables_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an epoch is retired its own files go, and the arranged ones stay."""
    world = make_world(tmp_path, layout=LAYOUT)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._SLOTS_PER_GROUP", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.iceberg_sink._MAX_TAGS", 1)
    epoch, sink = world.seal(1, rows=20), world.sink()
    for _ in range(2):
        sink.follow(world.log)
        world.seal(1, rows=2)
    sink.follow(world.log)
    everything = content(world)
    retention = Retention(
        world.log,
        RetentionPolicy(keep_last=1, keep_for=0, grace=0),
        external=lambda: list_referenced_files(world.spec, world.store),
        published_upto=lambda: find_published_slot(world.spec, world.log),
        rewound=lambda: have_followers_rewound(world.spec, world.log),
        clock=ManualClock(wall_ticks=4_000_000_000_000_000),
    )
    report = retention.run()
    assert epoch.files["events"][0].key in report.deleted
    assert content(world) == everything


def test_a_publisher_that_slept_before_it_read_files_needs_no_deleted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another publisher has arranged them, and retention has deleted what no table names."""
    world = make_world(tmp_path, layout=LAYOUT)
    world.seal(2)
    world.sink().follow(world.log)
    file = world.seal(1).files["events"][0]
    sleeper = world.sink()
    prepare = sleeper._prepare_files

    def prepare_late(*given: Any) -> Any:
        monkeypatch.undo()
        world.sink().follow(world.log)
        world.seal(1)
        world.retire(3)
        world.store.delete(file.key)
        return prepare(*given)

    monkeypatch.setattr(sleeper, "_prepare_files", prepare_late)
    assert sleeper.follow(world.log) == 1
    assert world.rows(sleeper) == world.wanted_of(4)
