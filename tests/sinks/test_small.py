"""The small tables that the driver writes itself."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.jobs.engine.interfaces import Cut, DeadObject, MoveOrder, Slice
from tidegate.jobs.eventtime.decision_types import (
    FIRST_RELEASE_MARK,
    BarrierHealth,
    BarrierOutcome,
    Decision,
    Member,
)
from tidegate.jobs.sinks.output_tables import (
    DriverTables,
    build_barrier_rows,
    build_dead_object_rows,
    build_system_schema,
    write_parquet_once,
)

BARRIER = BarrierHealth(
    id=7,
    outcome=BarrierOutcome.INCOMPLETE,
    types=("day_close",),
    homogeneous=True,
    participants={"a/0": (10, 3, 5)},
    missing=("b/0",),
    ended=(),
    tardy=(),
    opened=10,
    closed=25,
    section=2,
)
DEAD = DeadObject(Member("a"), 1 << 32, "inbox/a/1", "e", 3, "not_parquet", "no magic")


def decision(*barriers: BarrierHealth) -> Decision:
    """A decision that closed these barriers."""
    return Decision(
        now=0,
        frontier_before=0,
        frontier_after=0,
        section=0,
        order_late=None,
        order_late_by_time=False,
        release_before=FIRST_RELEASE_MARK,
        release_after=FIRST_RELEASE_MARK,
        barriers=barriers,
    )


def order(decided: Decision, *dead: DeadObject) -> MoveOrder:
    """An epoch's work."""
    cut = Cut((Slice(Member("a"), 0, 1, dead=dead),))
    return MoveOrder(
        cut, decided, (), AttemptFolders(BucketLayout("p"), CheckpointId(0, 4, "abcdef")), 0
    )


def test_barrier_rows() -> None:
    """A closed barrier becomes one row with outcome, participants, missing and waiting time."""
    table = build_barrier_rows(decision(BARRIER), 1, 4)
    row = table.to_pylist()[0]
    assert table.schema == build_system_schema("barriers")
    assert (row["barrier_id"], row["outcome"], row["missing"], row["waited_us"], row["_epoch"]) == (
        7,
        "incomplete",
        ["b/0"],
        15,
        4,
    )
    assert json.loads(row["participants"]) == {"a/0": {"arrived": 10, "seq": 3, "event_time": 5}}


def test_dead_object_rows() -> None:
    """An unreadable object becomes one dead letter with its origin and no row."""
    row = build_dead_object_rows([DEAD], 0, 4).to_pylist()[0]
    assert (row["reason"], row["object"], row["etag"], row["row"], row["_seq"]) == (
        "not_parquet",
        "inbox/a/1",
        "e",
        None,
        1 << 32,
    )


def test_writes_into_the_attempts_own_folders() -> None:
    """Files go below the attempt's tag; a table without rows gets none."""
    store = MemoryStore()
    assert DriverTables(store).write(order(decision())) == {}
    files = DriverTables(store).write(order(decision(BARRIER), DEAD))
    assert {table: [f.key for f in refs] for table, refs in files.items()} == {
        "barriers": ["p/timelines/0/tables/barriers/000004-abcdef/driver.parquet"],
        "dead_letters": ["p/timelines/0/tables/dead_letters/000004-abcdef/driver.parquet"],
    }
    ref = files["barriers"][0]
    data = store.get(ref.key).data
    assert (ref.rows, ref.bytes, ref.kind) == (1, len(data), "table:barriers")
    assert pq.read_table(io.BytesIO(data)).num_rows == 1


def test_second_writer_keeps_the_first_file() -> None:
    """Two publishers of one slot write the same key.

    Whoever comes second refers to what lies there.
    """
    store = MemoryStore()
    key = "p/timelines/0/tables/barriers/000004-abcdef/driver.parquet"
    first = write_parquet_once(store, key, build_barrier_rows(decision(BARRIER), 0, 4))
    assert write_parquet_once(store, key, build_barrier_rows(decision(BARRIER), 0, 4)) == first
