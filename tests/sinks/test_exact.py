"""The independent check recomputes what lasts (intervals, edges from start to end), and leaves out
what went to no output.
"""

from __future__ import annotations

import io
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.engine.harness import SECOND, PlainSteps
from tests.manual_clock import ManualClock
from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.engine.arrow_tables import write_parquet_object
from tidegate.jobs.engine.epoch_engine import Engine, EngineRuntime, EpochPorts
from tidegate.jobs.engine.interfaces import NoFaults
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND, ManifestAuthor
from tidegate.jobs.sinks.exactness_audit import ExactnessReport, _read_merged_rows, audit_exactness
from tidegate.jobs.sinks.output_tables import DriverTables, build_table_schema
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec

TIME = pa.timestamp("us", tz="UTC")
SCHEMA = {"t": "timestamp", "till": "timestamp", "what": "string", "k": "string", "v": "long"}
LASTS = [
    {"edges": {"kind": "what", "keys": ["k"]}},
    {"end_time": "till"},
    {"lag": None, "punctuation": {"every_events": 3, "advance_to_end": True}},
]


class World:
    """A pipeline on a store in memory with one source, an object an epoch, and what its manifests
    say is published.
    """

    def __init__(self, lasts: dict[str, Any], *, bounded: bool) -> None:
        source = {
            "path": "in",
            "schema": SCHEMA,
            "event_time": "t",
            "lag": "3s",
            "limits": {"objects": 1},
            "bounded": bounded,
        }
        window = {"kind": "tumbling", "size": "10s", "offset": "3s", "late_unit": "event"}
        aggregates = {"n": "count(*)", "s": "sum(v)", "top": "max(v)"}
        windows = {
            name: {**window, "keys": keys, "aggregates": aggregates}
            for name, keys in (("by", ["k"]), ("all", []))
        }
        self.spec = PipelineSpec.model_validate(
            {"name": "p", "sources": {"s": {**source, **lasts}}, "windows": windows}
        )
        self.store, self.objects = MemoryStore(), 0
        self.log, clock = SlotLog(self.store, "p"), ManualClock()
        self.engine = Engine(
            self.spec,
            self.log,
            EpochPorts(
                [ObjectSource("s", self.spec.sources["s"], self.store)],
                OracleMover(self.store, self.spec),
                DriverTables(self.store).write,
            ),
            EngineRuntime(
                ManifestAuthor(ensure_identity(self.store, "p"), "driver", "0"),
                PlainSteps(clock),
                clock,
                NoFaults(),
            ),
        )

    def play(self, draw: random.Random, objects: int) -> None:
        """Random rows about times that go on, read to the end."""
        for number in range(objects):
            times = [(8 * number + draw.randint(-6, 8)) * SECOND for _ in range(draw.randint(1, 8))]
            columns = {
                "t": pa.array(times, pa.int64()).cast(TIME),
                "till": (
                    pa.array(
                        [draw.choice([None, t + draw.randint(1, 30) * SECOND]) for t in times],
                        pa.int64(),
                    ).cast(TIME)
                ),
                "what": pa.array(
                    [draw.choice(["start", "start", "end", "end", None]) for _ in times],
                    pa.string(),
                ),
                "k": pa.array([draw.choice(["a", "b", None]) for _ in times], pa.string()),
                "v": pa.array([draw.randint(0, 9) for _ in times], pa.int64()),
            }
            buffer = io.BytesIO()
            pq.write_table(pa.table(columns), buffer)
            self.store.put(f"in/{number:05d}.parquet", buffer.getvalue())
        if self.spec.sources["s"].bounded:
            self.store.put("in/_DONE", b"")
        for _ in range(objects + 2):
            self.engine.run_epoch()

    def read(self, name: str) -> pa.Table:
        """A table as the manifests name its files."""
        files = [
            f
            for filled in self.log.epochs_between(0, 1, self.log.head().slot)
            for f in filled.epoch.files.get(name, [])
            if f.rows
        ]
        parts = [pq.read_table(io.BytesIO(self.store.get(file.key).data)) for file in files]
        return pa.concat_tables(
            [build_table_schema(self.spec, name).empty_table(), *parts],
            promote_options="permissive",
        )

    def exact(self, lose: str = "") -> ExactnessReport:
        """What the check finds; of the table `lose` it is not shown the last row."""

        def table(name: str) -> pa.Table:
            whole = self.read(name)
            return whole.slice(0, whole.num_rows - (name == lose))

        return audit_exactness(self.spec, self.store, self.log, table)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("lasts", LASTS, ids=["edges", "intervals", "violations"])
@pytest.mark.parametrize("seed", range(2))
def test_what_lasts_is_recomputed(lasts: dict[str, Any], seed: int, bounded: bool) -> None:
    """Late edges close nothing, open ones count as far as F came or to the newest row.

    A missing result is found.

    Rows that violate punctuation are in the late table for the events, and are in no window
    either.
    """
    world = World(lasts, bounded=bounded)
    world.play(random.Random(seed), objects=6)
    found = world.exact()
    assert (found.problems, found.skipped) == ([], {})
    assert min(found.windows.values()) > 3
    assert world.exact(lose="by").problems == [
        "1 results of window by differ from a recomputation over the accepted rows"
    ]


def test_objects_set_aside_are_named() -> None:
    """What the tables have is exact, and the report says that rows of an object are in none."""
    strict = {"evolution": {"added": "dead_letter"}}
    world = World({"end_time": "till", **strict}, bounded=False)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"t": pa.array([0, 1], TIME), "stranger": ["x", "y"]}), buffer)
    world.store.put("in/00000-wider.parquet", buffer.getvalue())
    world.play(random.Random(0), objects=3)
    found = world.exact()
    assert found.problems == []
    assert found.set_aside == {"s": {"dead_objects": 1, "dead_object_rows": 2}}


def test_retired_epochs_are_left_out_and_the_rest_is_compared() -> None:
    """Behind them rows are compared by position, and windows that begin after all rows before."""
    world = World({"lag": 0}, bounded=True)
    world.play(random.Random(5), objects=12)
    whole = world.exact()
    assert (whole.problems, whole.retired_upto) == ([], None)
    tables = {name: world.read(name) for name in (*world.spec.windows, EVENTS, LATE, DEAD_LETTERS)}
    policy = RetentionPolicy(keep_last=7, keep_for=0, grace=3600)
    clock = ManualClock(wall_ticks=2_000_000_000_000_000)
    assert Retention(world.log, policy, external=tuple, clock=clock).run().retired
    found = audit_exactness(world.spec, world.store, world.log, tables.__getitem__)
    assert found.problems == []
    assert found.retired_upto is not None
    assert 0 < found.rows["s"]["read"] < whole.rows["s"]["read"]
    assert sum(found.windows.values()) > 0
    for name in ("by", EVENTS):
        last = tables[name].slice(0, tables[name].num_rows - 1)
        short = audit_exactness(
            world.spec, world.store, world.log, (tables | {name: last}).__getitem__
        )
        assert len(short.problems) == 1


def test_rows_merged_into_a_stream_are_left_out() -> None:
    """The segment of such a merge has the columns of the stream, and no row of the events."""
    world = World({"end_time": "till"}, bounded=False)
    world.play(random.Random(0), objects=3)
    rows = pa.table({"k": ["a"], "_stamp": pa.array([1], pa.int64()), "_id": ["s/f/0"]})
    extra = {"request": "r", "checkpoint": "t0-000002-aa", "stream": "copies"}
    segment = write_parquet_object(world.store, "merged", rows, SPLICE_KIND, extra=extra)
    newest = world.log.head().record
    assert newest is not None
    merged = newest.model_copy(update={"segments": [*newest.segments, segment]})
    assert _read_merged_rows(world.spec, world.store, merged).num_rows == 0


def test_topics_are_not_read_again() -> None:
    """A topic may have forgotten its messages.

    The check says what it left out, and still finds a row in two places.
    """
    world = World({"end_time": "till"}, bounded=False)
    world.play(random.Random(0), objects=3)
    read = world.exact().rows["s"]["read"]
    topic = {"kind": "kafka", "kafka": {"servers": "b:9092", "topic": "t"}, "path": ""}
    raw = world.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    world.spec = PipelineSpec.model_validate(
        {**raw, "sources": {"s": {**raw["sources"]["s"], **topic}}}
    )
    for entry in list(world.store.list_objects("in/")):
        world.store.delete(entry.key)
    found = world.exact()
    assert (found.problems, found.topics, found.windows, set(found.skipped)) == (
        [],
        ["s"],
        {},
        {"by", "all"},
    )
    assert found.rows["s"]["read"] == read


def test_a_column_may_be_younger_than_a_merge() -> None:
    """Rows that were merged before the spec had the column are null in it."""
    world = World({"end_time": "till"}, bounded=False)
    world.play(random.Random(0), objects=3)
    values: dict[str, list[object]] = {
        "_source": ["s"],
        "_partition": ["f"],
        "_seq": [0],
        "_reason": ["file"],
    }
    rows = pa.table({**values, "_outputs": [[EVENTS]]})
    extra = {"request": "r", "checkpoint": "t0-000002-aa"}
    segment = write_parquet_object(world.store, "merged", rows, SPLICE_KIND, extra=extra)
    newest = world.log.head().record
    assert newest is not None
    merged = newest.model_copy(update={"segments": [*newest.segments, segment]})
    (found,) = _read_merged_rows(world.spec, world.store, merged).to_pylist()
    assert {name: found[name] for name in values} == {
        name: column[0] for name, column in values.items()
    }
    assert all(found[name] is None for name in world.spec.columns)
