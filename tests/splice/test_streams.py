"""Merging into streams.

Whatever is merged, streams, states and requests are those of the model, and so of a run in time.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tests.oracle import stream_model
from tests.oracle.mover import OracleMover
from tests.oracle.stream_model import MergeMode
from tests.servers.memory_store import MemoryStore
from tests.splice.stream_rows import V, current, values
from tests.streams import folds
from tests.streams.attachments import EDGES, attachment, spec_of
from tests.streams.support import World, streams_spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.open_store import ScratchStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import list_splice_requests, read_splice_request
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.engine.replay import make_content_check, replay_epoch
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import (
    SPLICE_COLUMN,
    DriverTables,
)
from tidegate.jobs.sinks.published_tables import RowSelection, read_table, scan_table
from tidegate.jobs.splice.merge import CRASH_POINTS, MergeDecision, estimate_impact, merge_request
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    create_from_file,
    create_from_late_rows,
)
from tidegate.jobs.streams.dispatcher import StreamDispatcher
from tidegate.jobs.streams.row_history import LogHistory
from tidegate.jobs.streams.stream_state import SpliceRequestSink

STREAMS = ("a", "b", "c")


def seen(world: World, name: str) -> list[tuple[Any, ...]]:
    """Position, stamp, identity and value of its rows."""
    rows = current(world, name)
    times = rows["stream_time"].cast(pa.int64()).to_pylist()
    return list(
        zip(
            rows["position"].to_pylist(),
            times,
            rows["_id"].to_pylist(),
            rows["v"].to_pylist(),
            strict=True,
        )
    )


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    yield
    folds.broken.clear()


class Pair:
    """A pipeline and the model, given the same rows."""

    def __init__(self, drawn: list[Any]) -> None:
        self.drawn, self.world, self.reference = (
            drawn,
            World(spec_of(drawn, 10**6)),
            stream_model.World(),
        )
        for name in ("events", *STREAMS):
            self.reference.stream(name, buffered=name == "c")
        self.second, self.released = 0, 0
        self.known: set[str] = set()

    def rows(self, step: list[tuple[int, int]]) -> None:
        """One epoch; the model gets the events it released, and the frontier it reached."""
        rows = []
        for gap, value in step:
            self.second += gap
            rows.append((self.second, value))
        self.epoch(rows)

    def epoch(self, rows: list[tuple[int, int]]) -> None:
        """The same with the times of the rows given."""
        self.world.epoch(*rows)
        self._told()

    def _told(self) -> None:
        head = self.world.head()
        every = sorted(
            (r for r in self.world.bench.rows("events") if not r.get(SPLICE_COLUMN)),
            key=lambda r: r["position"],
        )
        events, self.released = every[self.released :], len(every)
        values = [({"v": r["v"], "t": r["t"]}, round(r["t"].timestamp() * 1e6)) for r in events]
        ids = [f"{r['_source']}/{r['_partition']}/{r['_seq']}" for r in events]
        frontier = head.decision["frontier_after"]
        self.reference.append("events", *values, now=head.recorded_now, ids=ids, frontier=frontier)

    def asked(self, verb: str, number: int) -> None:
        """Attach or detach."""
        name = f"n{number}"
        if number >= len(self.drawn) or (verb == "attach") == (name in self.known):
            return
        self.known.add(name)
        self.world.epoch(ask=((verb, name),))
        now = self.world.head().recorded_now
        if verb == "attach":
            self.reference.attach(attachment(number, self.drawn[number]), now)
        else:
            self.reference.detach(name)
        self.reference.advance(self.world.head().decision["frontier_after"], now)

    def merge(self, number: int) -> None:
        """Merge what an attachment has collected."""
        name = f"n{number}"
        state = self.world.state()
        known = state.attachments.get(name)
        found = state.requests.get(known.request_id(name)) if known else None
        if known is None or found is None or found.open or found.merged or not found.rows:
            return
        SpliceRequestSink(self.world.bench.clock).follow(self.world.bench.log)
        self._merged(known.request_id(name))
        self.reference.merge(name, self.world.head().recorded_now)

    def late(self, back: int, value: int) -> None:
        """A row that comes too late, and is merged into the events."""
        if self.second - back < 0:
            return
        self.epoch([(self.second - back, value)])
        late = [row for row in self.world.bench.rows("late") if row["output"] == "events"]
        bench = self.world.bench
        try:
            request = create_from_late_rows(
                bench.spec, bench.log, LateFilter(outputs=("events",)), RequestOptions("ann")
            )
            self._merged(request.id)
        except ConfigurationError as error:
            assert error.code in ("splice.no_rows", "splice.too_early")  # noqa: PT017
            return
        segment = next(
            s
            for s in self.world.head().segments
            if s.kind == SPLICE_KIND and s.extra["request"] == request.id
        )
        there = pq.read_table(io.BytesIO(bench.store.get(segment.key).data)).to_pylist()
        ids = {(r["_source"], r["_partition"], r["_seq"]) for r in there}
        rows = [r for r in late if (r["_source"], r["_partition"], r["_seq"]) in ids]
        named = [
            (
                f"{r['_source']}/{r['_partition']}/{r['_seq']}",
                round(r["t"].timestamp() * 1e6),
                {"v": r["v"], "t": r["t"]},
            )
            for r in rows
        ]
        self.reference.request(request.id, "events", named)
        self.reference.merge(request.id, self.world.head().recorded_now)

    def _merged(self, request: str) -> None:
        bench = self.world.bench
        before = {name: seen(self.world, name) for name in STREAMS}
        outcome = merge_request(bench.spec, bench.log, request, MergeDecision("ann"))
        assert outcome.actual == outcome.reported_digest
        rewrites = next(
            s.extra
            for s in self.world.head().segments
            if s.kind == SPLICE_KIND and s.extra["request"] == request
        ).get("rewrites", {})
        for name in STREAMS:
            kept = rewrites.get(name, len(before[name]))
            assert seen(self.world, name)[:kept] == before[name][:kept]
        self.world.driver()

    def compare(self) -> None:
        """Everything a reader sees."""
        for name in STREAMS:
            assert seen(self.world, name) == [
                (r.position, r.time, r.id, r.value["v"]) for r in self.reference.rows(name)
            ], name
        for name, request in self.world.state().requests.items():
            assert request.rows == len(self.reference.requests[request.attachment].rows), name


attachments = st.lists(
    st.tuples(
        st.sampled_from(EDGES),
        st.sampled_from(["running", "totals", "pipe"]),
        st.booleans(),
        st.sampled_from(MergeMode),
    ),
    min_size=1,
    max_size=4,
)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("rows"),
            st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=4),
        ),
        st.tuples(st.sampled_from(["attach", "detach", "merge"]), st.integers(0, 3)),
        st.tuples(st.just("merge"), st.integers(0, 3)),
        st.tuples(st.just("late"), st.tuples(st.integers(1, 12), st.integers(0, 20))),
    ),
    min_size=3,
    max_size=10,
).map(
    lambda s: [
        ("attach", 0),
        ("rows", [(2, 5), (2, 7), (1, 11)]),
        s[0],
        ("attach", 1),
        ("attach", 2),
        *s[1:],
    ]
)


FOUND = (  # rows merged into an empty stream came with the merge, whatever comes later
    [
        (("a", "b"), "pipe", True, MergeMode.SPLICE),
        (("events", "b"), "pipe", True, MergeMode.SPLICE),
        (("b", "c"), "pipe", False, MergeMode.SPLICE),
        (("b", "c"), "totals", True, MergeMode.CONCAT),
    ],
    [
        *[
            ("attach", 0),
            ("rows", [(2, 5), (2, 7), (1, 11)]),
            ("late", (7, 9)),
            ("attach", 1),
            ("attach", 2),
            ("late", (9, 19)),
        ],
        *[
            ("merge", 0),
            ("detach", 0),
            ("merge", 1),
            ("merge", 3),
            ("rows", [(3, 9), (3, 13)]),
            ("merge", 2),
        ],
    ],
)


@example(*FOUND)
@settings(
    max_examples=int(os.environ.get("TIDEGATE_EXAMPLES", "10")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(attachments, steps)
def test_merges_do_to_a_pipeline_what_they_do_to_the_model(
    drawn: list[Any], steps: list[Any]
) -> None:
    """Random graphs.

    Rows, late rows, attaching, detaching and merges in any order; drivers go on after each merge.
    """
    pair = Pair(drawn)
    for what, argument in steps:
        match what:
            case "rows":
                pair.rows(argument)
            case "merge":
                pair.merge(argument)
            case "late":
                pair.late(*argument)
            case _:
                pair.asked(what, argument)
        pair.compare()
    pair.rows([(1, 3), (1, 9)])
    pair.compare()


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
    dispatcher = StreamDispatcher(spec, overlay, history)
    ports = EpochPorts((), mover, DriverTables(overlay).write, dispatcher)
    found = replay_epoch(spec, attaching, parent, ports, overlay, scratch)
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
