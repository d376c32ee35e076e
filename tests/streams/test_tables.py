"""Streams as published tables: what a reader of the Iceberg tables sees of them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.engine.harness import SECOND
from tests.manual_clock import ManualClock
from tests.streams.support import World, streams_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.published_tables import read_positions, read_table
from tidegate.jobs.streams.row_history import LogHistory


def test_streams_and_rejections_are_tables(tmp_path: Path) -> None:
    """One cut over all of them; a restore takes streams back as it does events."""
    fold = {"from": "events", "to": "sums", "function": "tests.streams.folds:totals", "initial": 0}
    spec = streams_spec(
        streams={"copy": {}, "sums": {"schema": {"v": "long"}}},
        pipes={
            "p": {"from": "events", "to": "copy"},
            "old": {"from": "events", "to": "copy", "inherit": True, "where": "v = 2"},
        },
        reducers={"r": fold},
    )
    store = LocalStore(tmp_path / "store")
    world = World(spec, store=store)
    sink = IcebergSink(spec, store, "0" * 32)
    for second in range(1, 4):
        world.epoch((second, second))
    sink.follow(world.bench.log)
    assert [
        row["v"] for row in read_table(spec, store, "copy").sort_by("position").to_pylist()
    ] == [1, 2, 3]
    assert read_table(spec, store, "sums").schema == build_table_schema(spec, "sums")
    (refused,) = read_table(spec, store, "rejections").to_pylist()
    assert (refused["stream"], refused["row_id"], refused["via"]) == ("events", "a/0/1", "old")
    first = world.bench.epochs()[0].id
    world.bench.log.fork(world.bench.log.head(), first, request_id="q", who="me", why="test", at=0)
    world.driver()
    world.epoch()
    sink.follow(world.bench.log)
    assert [
        row["v"] for row in read_table(spec, store, "copy").sort_by("position").to_pylist()
    ] == [1, 2, 3]
    assert [
        row["position"] for row in read_table(spec, store, "sums").sort_by("position").to_pylist()
    ] == [0, 1, 2]
    assert {row["_timeline"] for row in read_table(spec, store, "copy").to_pylist()} == {0, 1}


def retire_all_but_the_head(world: World) -> None:
    """What retention does once the sinks have the epochs: the files of the tables stay."""
    policy = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
    log = world.bench.log
    tables = log.store.list_objects(log.layout.attempt_prefixes(0)[1])
    external = [log.store.uri(entry.key) for entry in tables]
    clock = ManualClock(wall_ticks=2_000_000_000_000_000)
    assert Retention(log, policy, external=lambda: external, clock=clock).run().retired
    world.driver()


@pytest.mark.parametrize("rows_per_epoch", [1, 3, 100])
def test_a_stream_is_added_to_a_pipeline_whose_first_epochs_were_retired(
    tmp_path: Path, rows_per_epoch: int
) -> None:
    """The backfill reads the events table where no manifest names the files any more, and gives
    each row the same place as one that was attached from the first epoch on.
    """
    pipe = {"from": "events", "to": "copy", "rows_per_epoch": rows_per_epoch}
    chain = {"q": {"from": "copy", "to": "again", "attach": "on_request"}}
    plain = streams_spec(release={"mode": "pass_through"})
    spec = streams_spec(
        release={"mode": "pass_through"},
        streams={"copy": {}, "again": {}},
        pipes={"p": pipe, **chain},
    )
    times = (5, 4, 7, 6, 8, 2)  # out of order: the time of a stream never goes back
    copies, worlds = [], []
    for first in (plain, spec):
        store = LocalStore(tmp_path / first.digest()[:8])
        world = World(first, store=store)
        sink = IcebergSink(first, store, "0" * 32)
        for second in times:
            world.epoch((second, second))
        sink.follow(world.bench.log)
        if first is plain:
            retire_all_but_the_head(world)
            world.driver(spec=spec)
            sink = IcebergSink(spec, store, "0" * 32)
        world.epoch((10, 10))
        for _ in times:
            world.epoch()
        sink.follow(world.bench.log)
        rows = read_table(spec, store, "copy").sort_by("position").to_pylist()
        copies.append([[row[f] for f in ("v", "position", "_origin_id")] for row in rows])
        worlds.append((world, sink))
    assert copies[0] == copies[1]
    assert [value for value, *_ in copies[0]] == [*times, 10]
    # A backfill reads in pieces; the time of the events never goes back.
    world, sink = worlds[0]
    history = LogHistory(
        world.bench.log, "t", published=partial(read_positions, spec, world.bench.store)
    )
    seen = [
        second // SECOND
        for start in (1, 3, 2)
        for second in history.read_rows("events", {}, start, start + 2)["stream_time"].to_pylist()
    ]
    assert seen == [5, 7, 7, 8, 7, 7]
    # The epochs of the stream are retired as well before something is attached to it.
    world.epoch((11, 11))
    sink.follow(world.bench.log)
    retire_all_but_the_head(world)
    world.epoch(ask=(("attach", "q"),))
    world.epoch()
    sink.follow(world.bench.log)
    again = read_table(spec, world.bench.store, "again").sort_by("position").to_pylist()
    assert [row["v"] for row in again] == [*times, 10, 11]


def test_the_last_time_of_a_long_history_needs_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests tell it; of retired epochs the times are read, a part at a time."""
    monkeypatch.setattr("tidegate.jobs.streams.row_history._TIMES_AT_ONCE", 2)
    world = World(streams_spec(release={"mode": "pass_through"}), store=LocalStore(tmp_path))
    seconds = (5, 9, 7, 6, 8, 2)
    for second in seconds:
        world.epoch((second, second))
    log, asked = world.bench.log, list[tuple[int, int, tuple[str, ...]]]()

    def read_times(_: str, start: int, end: int, columns: Collection[str]) -> Any:
        """Return rows of a published table, and note which were asked for."""
        asked.append((start, end, tuple(columns)))
        times = pa.array([second * SECOND for second in seconds[start:end]], pa.int64())
        return pa.table({"t": times.cast(TIMESTAMP_UTC)})

    history = LogHistory(log, "t", published=read_times)
    for epoch in world.bench.epochs():
        for file in epoch.files["events"]:
            log.store.delete(file.key)
    assert history.read_last_time(0) == 9 * SECOND
    assert asked == []
    retire_all_but_the_head(world)
    assert history.read_last_time(0) == 9 * SECOND
    assert asked == [(0, 2, ("t",)), (2, 4, ("t",)), (4, 5, ("t",))]


def test_rows_that_are_in_no_table_pause_the_attachment(tmp_path: Path) -> None:
    """No sink has followed this log, so nothing has the rows of retired epochs; the rest goes on."""
    pipes = {"p": {"from": "events", "to": "copy"}}
    store = LocalStore(tmp_path / "store")
    world = World(streams_spec(), store=store)
    for second in range(1, 4):
        world.epoch((second, second))
    retire_all_but_the_head(world)
    world.driver(spec=streams_spec(streams={"copy": {}}, pipes=pipes))
    assert world.epoch((4, 4)).sealed
    head = world.bench.log.head().record
    assert head is not None
    attachment = head.stream_state["attachments"]["p"]
    assert attachment["status"] == "paused"
    assert "row 0 of events lies in an epoch that was retired" in attachment["failure"]["error"]
    assert "tidegate detach" in attachment["failure"]["error"]
    assert world.epoch((5, 5)).sealed


def test_a_backfill_goes_on_where_all_its_epochs_were_retired(tmp_path: Path) -> None:
    """No manifest names a file of the events any more, and two of four rows are still to come."""
    store = LocalStore(tmp_path / "store")
    pipe = {"from": "events", "to": "copy", "rows_per_epoch": 1}
    plain = streams_spec(release={"mode": "pass_through"})
    spec = streams_spec(release={"mode": "pass_through"}, streams={"copy": {}}, pipes={"p": pipe})
    world = World(plain, store=store)
    for second in range(1, 4):
        world.epoch((second, second))
    IcebergSink(plain, store, "0" * 32).follow(world.bench.log)
    retire_all_but_the_head(world)
    world.driver(spec=spec)
    sink = IcebergSink(spec, store, "0" * 32)
    world.epoch((4, 4))
    world.epoch()
    sink.follow(world.bench.log)
    retire_all_but_the_head(world)
    while world.epoch().sealed:
        pass
    sink.follow(world.bench.log)
    copies = read_table(spec, store, "copy").sort_by("position").to_pylist()
    assert [row["v"] for row in copies] == [1, 2, 3, 4]
