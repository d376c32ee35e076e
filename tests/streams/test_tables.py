"""Streams as published tables: what a reader of the Iceberg tables sees of them."""

from __future__ import annotations

from pathlib import Path

from tests.streams.support import World, streams_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.published_tables import read_table


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
