"""Sinks, layouts and compaction in Spark's tasks: the results of one process, and the same errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog.testing
from confluent_kafka import Consumer, TopicPartition

from tests.servers.kafka_in_process import KafkaInProcess
from tests.sinks.conftest import UID, World, make_spec
from tests.sinks.flight_tables import COLUMNS, LAYOUT, flights
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError
from tidegate.jobs.engine.interfaces import WorkRunner, run_work_here
from tidegate.jobs.sinks.base_follower import SlotFollower
from tidegate.jobs.sinks.factory import make_sinks
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.table_maintenance import compact_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

MakeRunner = Callable[[World], WorkRunner]


@pytest.fixture
def in_tasks(session: SparkSession, tmp_path: Path) -> MakeRunner:
    from tidegate.jobs.spark.mover import SparkMover

    return lambda world: SparkMover(world.store, world.spec, tmp_path / "mover", session).run_work


def make_world(folder: Path, **more: Any) -> World:
    """A log with rows of all types."""
    return World(LocalStore(folder), folder, make_spec(COLUMNS, **more), flights)


def follow(world: World, run: WorkRunner) -> None:
    """Bring the sink `out` to the head."""
    sink = make_sinks(world.spec, world.store, UID, run)[1]
    assert isinstance(sink, SlotFollower)
    sink.follow(world.log)


def run_to_end(world: World, run: WorkRunner) -> set[int]:
    """Follow five epochs and a restore; return the processes of the tasks."""
    with structlog.testing.capture_logs() as lines:
        sealed = [world.seal(1, rows=20).id for _ in range(5)]
        follow(world, run)
        world.fork(sealed[2])
        world.seal(2, rows=20)
        follow(world, run)
    tasks = [task for line in lines if line["event"] == "tasks_finished" for task in line["tasks"]]
    return {task["pid"] for task in tasks}


def test_on_one_host_sinks_are_not_looked_at_before_they_follow(
    tmp_path: Path, session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay may lack their clients and variables, and makes no folder for them."""
    from tidegate.jobs.spark.mover import SparkMover, list_libraries

    monkeypatch.delenv("NOT_SET", raising=False)
    sinks = {
        "db": {"kind": "postgres", "url": "${NOT_SET}"},
        "out": {"kind": "files", "path": "${NOT_SET}"},
        "here": {"kind": "files", "path": str(tmp_path / "out")},
    }
    world = make_world(tmp_path / "store", sinks=sinks)
    SparkMover(world.store, world.spec, tmp_path / "mover", session).close()
    assert not (tmp_path / "out").exists()
    assert list_libraries(world.spec) == []
    far = world.spec.spark.model_copy(update={"master": "spark://far:7077"})
    assert list_libraries(world.spec.model_copy(update={"spark": far})) == ["psycopg"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files(tmp_path: Path, in_tasks: MakeRunner, kind: str) -> None:
    """A files sink writes the same objects by a task as by one process."""
    found: list[dict[str, int]] = []
    for name in ("here", "tasks"):
        out = tmp_path / f"{name}-out"
        sinks = {"out": {"kind": "files", "path": str(out), "format": kind, "tables": ["events"]}}
        world = make_world(tmp_path / name, sinks=sinks)
        run = in_tasks(world) if name == "tasks" else partial(run_work_here, world.store)
        pids = run_to_end(world, run)
        assert bool(pids) == (name == "tasks")
        assert os.getpid() not in pids
        epochs = [json.loads(one.read_bytes()) for one in (out / "_epochs").iterdir()]
        found.append({str(one["epoch"]): sum(one["files"].values()) for one in epochs})
        assert len(list((out / "events").iterdir())) == 7
        assert (out / "_restores" / "t1.json").exists()
    assert found[0] == found[1] == dict.fromkeys("12345", 20)


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_kafka(tmp_path: Path, in_tasks: MakeRunner, delivery: str) -> None:
    """A task sends each row of an epoch once, whichever delivery was asked for."""
    broker = KafkaInProcess()
    given = {"kind": "kafka", "servers": broker.servers, "topic": "out", "delivery": delivery}
    world = make_world(tmp_path / "store", sinks={"out": {**given, "tables": ["events"]}})
    world.seal(3, rows=20)
    for _ in range(2):
        follow(world, in_tasks(world))
    client = Consumer(
        {"bootstrap.servers": broker.servers, "group.id": "r", "auto.offset.reset": "earliest"}
    )
    client.assign([TopicPartition("out", partition, 0) for partition in range(4)])
    values: list[dict[str, Any]] = []
    while len(values) < 60:
        message = client.poll(30)
        assert message is not None, f"only {len(values)} messages came"
        assert message.error() is None
        values.append(json.loads(message.value() or b""))
    assert client.poll(1) is None
    client.close()
    assert sorted((one["_epoch"], one["n"]) for one in values) == sorted(
        (slot, slot * 100 + n) for slot in (1, 2, 3) for n in range(20)
    )


def test_layout_compaction_and_a_restore_behind_it(tmp_path: Path, in_tasks: MakeRunner) -> None:
    """Tables with a layout, merged files, and merged files that a restore cuts."""
    world = make_world(tmp_path / "store", outputs={"layout": LAYOUT})
    run = in_tasks(world)
    sink = IcebergSink(world.spec, world.store, UID, run)
    sealed = [world.seal(1, rows=3).id for _ in range(130)]
    sink.follow(world.log)
    with structlog.testing.capture_logs() as lines:
        done = compact_tables(world.spec, world.store, run)["events"]
    assert done.after < done.before
    jobs = [line for line in lines if line["event"] == "tasks_finished"]
    assert jobs
    assert os.getpid() not in {task["pid"] for job in jobs for task in job["tasks"]}
    assert world.exact(sink)
    world.fork(sealed[9])
    world.seal(1, rows=3)
    sink.follow(world.log)
    assert world.exact(sink)


def test_an_error_of_a_task_is_that_of_the_sink(tmp_path: Path, in_tasks: MakeRunner) -> None:
    """A damaged file is named as if the driver had read it, and Spark does not try it again."""
    world = make_world(tmp_path / "store", outputs={"layout": LAYOUT})
    epoch = world.seal(1, rows=20)
    Path(world.store.uri(epoch.files["events"][0].key)).write_bytes(b"no parquet")
    sink = IcebergSink(world.spec, world.store, UID, in_tasks(world))
    with pytest.raises(PoisonError, match="is damaged") as caught:
        sink.follow(world.log)
    assert caught.value.code == "file.unreadable"


def _raise_what_cannot_be_sent(_: Store) -> None:
    class OfThisFunctionError(Exception):
        """No other process knows it."""

    raise OfThisFunctionError("the seventh")


def test_an_error_that_cannot_be_sent(tmp_path: Path, in_tasks: MakeRunner) -> None:
    """Its text ends the work all the same, without a second try by Spark."""
    with pytest.raises(RuntimeError, match="OfThisFunctionError: the seventh"):
        in_tasks(make_world(tmp_path / "store"))(_raise_what_cannot_be_sent)
