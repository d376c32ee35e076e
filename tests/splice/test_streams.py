"""Merging into streams: the effect of single merges, crashes, races and restores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore
from tests.splice.stream_rows import V, current, values
from tests.splice.worlds import CRASH_POINTS
from tests.streams import folds
from tests.streams.support import World, streams_spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.open_store import ScratchStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import list_splice_requests, read_splice_request
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.replay import make_content_check, replay_epoch
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import (
    DriverTables,
)
from tidegate.jobs.sinks.published_tables import RowSelection, read_table, scan_table
from tidegate.jobs.splice.merge import MergeDecision, estimate_impact, merge_request
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    create_from_file,
    create_from_late_rows,
)
from tidegate.jobs.streams.dispatcher import StreamDispatcher, make_local_runner
from tidegate.jobs.streams.row_history import LogHistory


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    yield
    folds.broken.clear()


def late_world(**fields: Any) -> World:
    """Three rows, and one that came too late; a reducer sums them, and another the sums."""
    sums = {
        "from": "events",
        "to": "sums",
        "function": "tests.streams.folds:plain",
        "initial": 0,
        "inherit": True,
    }
    graph = {
        "streams": {"sums": V, "more": V},
        "reducers": {"sum": {**sums, **fields}, "again": {**sums, "from": "sums", "to": "more"}},
    }
    world = World(streams_spec(**graph))
    world.epoch((1, 1))
    world.epoch((5, 5), (9, 9))
    world.epoch((3, 3))
    return world


def late_request(world: World) -> str:
    """The late row, asked for."""
    bench = world.bench
    return create_from_late_rows(bench.spec, bench.log, LateFilter(), RequestOptions("ann")).id


def test_a_late_row_reaches_everything_behind_the_events() -> None:
    """Events, sums and sums of sums are those of a run in time.

    The report listed each row before, and nothing before it moved.
    """
    world = late_world()
    bench = world.bench
    assert (values(world, "sums"), values(world, "more")) == ([1, 6, 15], [1, 7, 22])
    request = late_request(world)
    _, impact = estimate_impact(
        bench.spec, bench.log, read_splice_request(bench.store, "p", request)
    )
    found = {t.table: (t.added, t.changed, t.removed, t.moved) for t in impact.tables}
    assert found == {"events": (1, 0, 0, 2), "sums": (1, 2, 0, 0), "more": (1, 2, 0, 0)}
    sums = next(t for t in impact.tables if t.table == "sums")
    assert [(c["old"] and c["old"]["v"], c["new"]["v"]) for c in sums.changes] == [
        (None, 4),
        (6, 9),
        (15, 18),
    ]
    outcome = merge_request(
        bench.spec, bench.log, request, MergeDecision("ann", digest=impact.digest)
    )
    assert outcome.actual == outcome.reported_digest == impact.digest
    assert (values(world, "sums"), values(world, "more")) == ([1, 4, 9, 18], [1, 5, 14, 32])
    assert {name: sum(f.rows for f in files) for name, files in world.head().files.items()} == {
        "events": 1,
        "sums": 3,
        "more": 3,
    }
    world.driver()
    world.epoch((10, 1))
    assert values(world, "sums") == [1, 4, 9, 18, 19]
    assert [r["position"] for r in current(world, "sums").to_pylist()] == [0, 1, 2, 3, 4]


class Crash(BaseException):
    """What a kill -9 looks like."""


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_crash_at_any_step_of_a_merge_into_streams(point: str) -> None:
    """Before or after, never between.

    Called again it is there once; the driver goes on above it.
    """
    world = late_world()
    bench, before = world.bench, values(world, "more")
    request = late_request(world)

    def step(reached: str) -> None:
        if reached == point:
            raise Crash

    with pytest.raises(Crash):
        merge_request(bench.spec, bench.log, request, MergeDecision("ann"), step=step)
    done = CRASH_POINTS.index(point) > CRASH_POINTS.index("merge.seal")
    assert values(world, "more") == ([1, 5, 14, 32] if done else before)
    world.driver()
    world.epoch((10, 1))
    assert values(world, "sums") == ([1, 4, 9, 18, 19] if done else [1, 6, 15, 16])
    assert merge_request(bench.spec, bench.log, request, MergeDecision("ann")).again == done
    assert values(world, "sums") == [1, 4, 9, 18, 19]


def test_a_driver_that_seals_meanwhile_loses_nothing() -> None:
    """Epochs that are sealed while a merge is made are part of it.

    What was approved is the effect on what was there.
    """
    world = late_world()
    bench = world.bench
    request, driver = late_request(world), world.engine
    _, impact = estimate_impact(
        bench.spec, bench.log, read_splice_request(bench.store, "p", request)
    )
    races = iter([True, True, False])

    def step(point: str) -> None:
        if point == "merge.seal" and next(races):
            world.feed((20 + bench.log.head().slot, 1))
            assert driver.run_epoch().sealed

    outcome = merge_request(
        bench.spec, bench.log, request, MergeDecision("ann", digest=impact.digest), step=step
    )
    assert (outcome.lost, outcome.actual) == (2, outcome.reported_digest)
    assert values(world, "sums") == [1, 4, 9, 18, 19, 20]
    world.feed((40, 1))
    assert driver.run_epoch().lost
    assert driver.run_epoch().sealed
    assert values(world, "sums") == [1, 4, 9, 18, 19, 20, 21]


def test_a_merge_that_keeps_losing_is_given_the_next_slot() -> None:
    """A driver that seals before every seal of the merge is asked to hold after two, and goes on
    when the merge is over.
    """
    world = late_world()
    bench, driver = world.bench, world.engine
    inbox = RequestInbox(
        bench.store, bench.spec, lambda: 1, threading.Event(), lambda: bench.log.head().record
    )
    request = late_request(world)

    def step(point: str) -> None:
        inbox.collect()
        if point == "merge.seal" and inbox.held is None:
            world.feed((20 + bench.log.head().slot, 1))
            assert driver.run_epoch().sealed

    outcome = merge_request(bench.spec, bench.log, request, MergeDecision("ann"), step=step)
    assert (outcome.lost, outcome.actual) == (2, outcome.reported_digest)
    inbox.collect()
    assert inbox.held is None
    assert values(world, "sums") == [1, 4, 9, 18, 19, 20]


def test_another_effect_than_the_approved_one_is_refused() -> None:
    """A merge in between changes the effect on rows that were there.

    It has to be looked at again.
    """
    world = late_world()
    bench = world.bench
    first = late_request(world)
    _, impact = estimate_impact(bench.spec, bench.log, read_splice_request(bench.store, "p", first))
    world.epoch((2, 2))
    merge_request(bench.spec, bench.log, late_request(world), MergeDecision("bob"))
    with pytest.raises(ConfigurationError, match="not the one that was approved"):
        merge_request(bench.spec, bench.log, first, MergeDecision("ann", digest=impact.digest))


def test_a_merge_over_which_a_reducer_fails_is_refused() -> None:
    """With the row and the reason; nothing is changed, and the request is open still."""
    world = late_world(function="tests.streams.folds:picky")
    world.epoch((4, 13))
    with pytest.raises(PoisonError, match="would stop sum at a/0/4: ValueError: not a 13"):
        merge_request(world.bench.spec, world.bench.log, late_request(world), MergeDecision("ann"))
    assert read_splice_request(world.bench.store, "p", read_only(world)).state == "created"
    assert values(world, "sums") == [0, 1, 2]


def read_only(world: World) -> str:
    """Id of the one request that there is."""
    (request,) = list_splice_requests(world.bench.store, "p")
    return request.id


def test_a_paused_reducer_stays_paused_at_its_row() -> None:
    """Rows merged before the row at which it stopped are dispatched, those behind it wait with it."""
    folds.broken.add(9)
    world = late_world(function="tests.streams.folds:fragile")
    merge_request(world.bench.spec, world.bench.log, late_request(world), MergeDecision("ann"))
    assert values(world, "sums") == [100, 301, 502]
    state = world.state().attachments["sum"]
    assert (state.status, state.cursor, state.failure and state.failure["position"]) == (
        "paused",
        3,
        3,
    )
    folds.broken.clear()
    world.driver()
    world.epoch(ask=(("resume", "sum"),))
    assert values(world, "sums") == [100, 301, 502, 903]


def test_a_stream_may_end_earlier_than_before() -> None:
    """A fold that dispatches nothing any more leaves an empty stream, and the next row is its
    first.
    """
    world = late_world(function="tests.streams.folds:until_three")
    assert values(world, "sums") == [5, 9]
    merge_request(world.bench.spec, world.bench.log, late_request(world), MergeDecision("ann"))
    assert values(world, "sums") == []
    world.driver()
    world.epoch((11, 100))
    assert [(r["position"], r["v"]) for r in current(world, "sums").to_pylist()] == [(0, 100)]


def test_a_restore_takes_a_merge_into_streams_back() -> None:
    """The streams are the old ones again, the driver goes on with the old states, and the request
    is open.
    """
    world = late_world()
    bench = world.bench
    target, request = bench.log.head().checkpoint, late_request(world)
    merge_request(bench.spec, bench.log, request, MergeDecision("ann"))
    bench.log.fork(bench.log.head(), target, request_id="r", who="ann", why="oops")
    world.driver()
    world.epoch((10, 1))
    assert values(world, "sums") == [1, 6, 15, 16]
    merge_request(bench.spec, bench.log, request, MergeDecision("ann"))
    assert values(world, "sums") == [1, 4, 9, 18, 19]


def test_an_attachment_made_after_a_merge_reads_the_merged_rows() -> None:
    """Its backfill has the merged rows in their places, from the events and from a stream."""
    world = late_world()
    merge_request(world.bench.spec, world.bench.log, late_request(world), MergeDecision("ann"))
    spec = world.bench.spec.model_dump(by_alias=True)
    copies: dict[str, Any] = {"all": {}, "of_sums": {}}
    pipes = {"p": {"from": "events", "to": "all"}, "q": {"from": "sums", "to": "of_sums"}}
    graph = {
        "streams": {"sums": V, "more": V, **copies},
        "reducers": spec["reducers"],
        "pipes": pipes,
    }
    world.driver(spec=streams_spec(**graph))
    world.epoch((12, 12))
    assert values(world, "all") == [1, 3, 5, 9, 12]
    assert values(world, "of_sums") == [1, 4, 9, 18, 30]


def test_readers_of_the_published_tables_see_one_version(tmp_path: Path) -> None:
    """The old version until the new one is published.

    Then the new one, and the old one still, at its slot.
    """
    store = LocalStore(tmp_path / "store")
    world = World(late_world().bench.spec, store=store)
    for rows in ([(1, 1)], [(5, 5), (9, 9)], [(3, 3)]):
        world.epoch(*rows)
    spec, log = world.bench.spec, world.bench.log
    sink = IcebergSink(spec, store, "0" * 32)
    sink.follow(log)
    slot = log.head().slot
    merge_request(spec, log, late_request(world), MergeDecision("ann"))

    def shown(**options: Any) -> list[int]:
        return list(read_table(spec, store, "sums", **options)["v"].to_pylist())

    assert shown() == [1, 6, 15]
    sink.follow(log)
    assert shown() == [1, 4, 9, 18]
    assert shown(at=slot) == [1, 6, 15]
    assert scan_table(spec, store, "sums", RowSelection(spliced=False))["v"].to_pylist() == [
        1,
        6,
        15,
    ]
    world.driver()
    world.epoch((10, 1))
    sink.follow(log)
    assert shown() == [1, 4, 9, 18, 19]
    assert read_table(spec, store, "sums", columns=("v",)).column_names == ["v"]


def test_with_pass_through_merged_rows_are_the_next_ones(tmp_path: Path) -> None:
    """They are appended, so the driver's next epoch dispatches them as any other."""
    sums = {"from": "events", "to": "sums", "function": "tests.streams.folds:plain", "initial": 0}
    world = World(
        streams_spec(streams={"sums": V}, reducers={"sum": sums}, release={"mode": "pass_through"})
    )
    for rows in ([(1, 1)], [(5, 5)]):
        world.epoch(*rows)
    lost = tmp_path / "lost.csv"
    lost.write_text("t,v\n1970-01-01T00:00:03Z,3\n")
    bench = world.bench
    merge_request(
        bench.spec,
        bench.log,
        create_from_file(bench.spec, bench.log, lost, RequestOptions("ann")).id,
        MergeDecision("ann"),
    )
    assert values(world, "sums") == [1, 6]
    world.driver()
    world.epoch((6, 6))
    assert values(world, "sums") == [1, 6, 9, 15]


def test_an_epoch_before_a_merge_is_replayed_on_what_it_had() -> None:
    """A backfill that is run again reads the rows of then, not those that were merged since."""
    copy = {"from": "events", "to": "copy", "attach": "on_request"}
    spec = streams_spec(streams={"copy": {}}, pipes={"p": copy})
    world = World(spec)
    world.epoch((1, 1))
    world.epoch((5, 5), (9, 9))
    world.epoch(ask=(("attach", "p"),))
    world.epoch((3, 3))
    merge_request(spec, world.bench.log, late_request(world), MergeDecision("ann"))
    parent, attaching = world.bench.epochs()[1:3]
    scratch = MemoryStore()
    overlay = ScratchStore(world.bench.store, scratch)
    history = LogHistory(SlotLog(overlay, "p", clock=world.bench.clock), "t", parent)
    mover = OracleMover(overlay, spec, world.bench.sources)
    dispatcher = StreamDispatcher(spec, make_local_runner(overlay, history))
    ports = EpochPorts((), mover, DriverTables(overlay).write, dispatcher)
    found = replay_epoch(spec, attaching, parent, ports, world.bench.store, scratch)
    assert found.is_equal, found.tables
    assert values(world, "copy") == [1, 3, 5, 9]


def test_a_merge_into_streams_verifies() -> None:
    """Every checkpoint of the lineage, the merge's own among them, is whole when it is looked at to
    the last row.
    """
    world = late_world()
    merge_request(world.bench.spec, world.bench.log, late_request(world), MergeDecision("ann"))
    world.driver()
    world.epoch((10, 1))
    for epoch in world.bench.epochs():
        assert make_content_check(world.bench.store)(epoch) == []
