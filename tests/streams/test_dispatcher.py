"""Dispatching in the engine.

Streams as tables, attachments that come and go, failures, crashes, replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore
from tests.streams import folds
from tests.streams.support import World, streams_spec
from tidegate.checkpoints.open_store import ScratchStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import list_splice_requests
from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.epoch_engine import EpochPorts
from tidegate.jobs.engine.interfaces import EPOCH_POINTS
from tidegate.jobs.engine.replay import replay_epoch
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.dispatcher import StreamDispatcher, make_local_runner
from tidegate.jobs.streams.row_history import LogHistory
from tidegate.jobs.streams.stream_rows import find_root_source
from tidegate.jobs.streams.stream_state import SpliceRequestSink

V = {"schema": {"v": "long"}}


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    folds.broken.clear()
    yield
    folds.broken.clear()


def reducer(name: str, **fields: Any) -> dict[str, Any]:
    """A reducer of `tests.streams.folds` from events to d."""
    return {
        "from": "events",
        "to": "d",
        "function": f"tests.streams.folds:{name}",
        "initial": 0,
        **fields,
    }


def world_of(kind: str, name: str, attachment: dict[str, Any], **streams: Any) -> World:
    """A world with stream d and one attachment."""
    d = {} if kind == "pipes" else V
    return World(streams_spec(streams=streams or {"d": d}, **{kind: {name: attachment}}))


def test_a_pipe_copies_what_its_predicate_chooses() -> None:
    """Rows with contiguous positions, their parent's stamps and identities that name their origin."""
    world = world_of(
        "pipes", "p", {"from": "events", "to": "d", "where": "v % 2 = 1", "inherit": True}
    )
    world.epoch((1, 1), (2, 2), (3, 3))
    world.epoch((4, 5))
    assert world.values("d") == [1, 3, 5]
    assert [r["position"] for r in world.rows("d")] == [0, 1, 2]
    assert [r["_id"] for r in world.rows("d")] == ["p:a/0/0#0", "p:a/0/2#0", "p:a/0/3#0"]
    assert [r["stream_time"] for r in world.rows("d")] == [r["t"] for r in world.rows("d")]
    assert {(r["_via"], r["_origin"]) for r in world.rows("d")} == {("p", "events")}


def test_rejections_are_logged_and_nothing_stops() -> None:
    """A destination stamped by the clock refuses the old stamps of a pipe that inherits.

    Both attachments go on.
    """
    spec = streams_spec(
        streams={"d": {}},
        pipes={
            "clocked": {"from": "events", "to": "d", "where": "v = 1"},
            "old": {"from": "events", "to": "d", "inherit": True},
        },
    )
    world = World(spec)
    world.epoch((1, 1))
    world.epoch((2, 2))
    assert [r["_via"] for r in world.rows("d")] == ["old", "clocked"]
    assert [
        (r["stream"], r["row_id"], r["destination"], r["via"]) for r in world.rows("rejections")
    ] == [("events", "a/0/1", "d", "old")]
    assert world.head().counters.per_source["a"]["rejected:d"] == 1
    assert {a.status for a in world.state().attachments.values()} == {"attached"}


@pytest.mark.parametrize("identity", ["a/0/1", "p:a/x:y/1#0", "q@0-000002:p:a/0/1#0#3"])
def test_a_row_of_a_stream_belongs_to_the_source_of_its_event(identity: str) -> None:
    """However many attachments it went through, and whatever its partition is called."""
    assert find_root_source(identity) == "a"


def test_reducer_state_is_sealed_with_the_epoch() -> None:
    """Another driver goes on with the state of the newest manifest; small segments are gathered."""
    world = world_of("reducers", "r", reducer("running"))
    reference = world_of("reducers", "r", reducer("running"))
    for second in range(9):
        world.epoch((second, second))
        world.driver()
    reference.epoch(*((s, s) for s in range(9)))
    assert world.values("d") == reference.values("d")
    assert len([s for s in world.head().segments if s.kind == "reducer:r"]) <= 5


def test_keys_have_states_of_their_own() -> None:
    """Each key's fold sees only its rows, with an index of its own."""
    world = world_of("reducers", "r", reducer("totals", keys=["v"]))
    world.epoch((1, 5), (2, 7), (3, 5))
    world.epoch((4, 5), (5, 7))
    assert world.values("d") == [5, 7, 11, 17, 15]


def test_running_aggregates_need_no_function() -> None:
    """SQL expressions, kept per key from epoch to epoch.

    What SQL cannot do with the data pauses it, as anything else.
    """
    columns = {"v": "long", "n": "long", "total": "long", "low": "long", "latest": "long"}
    aggregates = {
        "n": "count(nullif(v, 7))",
        "total": "sum(v * 10)",
        "low": "min(v - 3)",
        "latest": "last(v)",
    }
    fold = {"from": "events", "to": "d", "aggregates": aggregates, "keys": ["v"]}
    world = World(streams_spec(streams={"d": {"schema": columns}}, reducers={"r": fold}))
    world.epoch((1, 5), (2, 7), (3, 5))
    world.driver()
    world.epoch((4, 5))
    found = [tuple(row[column] for column in columns) for row in world.rows("d")]
    assert found == [(5, 1, 50, 2, 5), (7, 0, 70, 4, 7), (5, 2, 100, 2, 5), (5, 3, 150, 2, 5)]


def test_an_attachment_made_later_backfills_first() -> None:
    """Old rows are read from sealed epochs, new ones of the same epoch follow as head."""
    world = world_of("pipes", "p", {"from": "events", "to": "d", "attach": "on_request"})
    world.epoch((1, 1), (2, 2))
    world.epoch((3, 3))
    assert world.values("d") == []
    world.epoch((4, 4), ask=(("attach", "p"),))
    assert world.values("d") == [1, 2, 3, 4]
    assert (world.state().attachments["p"].head, world.state().attachments["p"].cursor) == (3, 4)


def test_a_long_backfill_is_spread_over_epochs_without_new_rows() -> None:
    """The engine goes on sealing epochs until the attachment has caught up, and then stops."""
    world = world_of(
        "pipes", "p", {"from": "events", "to": "d", "attach": "on_request", "rows_per_epoch": 2}
    )
    world.epoch(*((s, s) for s in range(5)))
    world.epoch(ask=(("attach", "p"),))
    reports = [world.epoch() for _ in range(4)]
    assert [(r.sealed is not None, r.pending) for r in reports] == [
        (True, True),
        (True, False),
        (False, False),
        (False, False),
    ]
    assert world.values("d") == [0, 1, 2, 3, 4]


def test_streams_added_to_a_pipeline_that_has_run() -> None:
    """Its old events are backfill, with the stream time they would have had."""
    world = World(streams_spec())
    world.epoch((1, 1), (5, 5))
    world.driver(
        spec=streams_spec(
            streams={"d": {}},
            pipes={"p": {"from": "events", "to": "d", "inherit": True, "merge": "splice"}},
        )
    )
    world.epoch((9, 9))
    assert world.values("d") == [9]
    (request,) = world.state().requests.values()
    assert (request.rows, request.min_time, request.max_time, request.open) == (
        2,
        1_000_000,
        5_000_000,
        False,
    )


def test_rows_that_a_splice_inserted_into_events_are_not_dispatched() -> None:
    """They have no position of their own.

    A backfill over a merge finds every row that has one, once.
    """
    world = world_of("pipes", "p", {"from": "events", "to": "d", "attach": "on_request"})
    world.epoch((1, 1), (2, 2))
    head = world.bench.log.head()
    assert head.record is not None
    place = {
        "slot": head.next_slot,
        "attempt": "ab" * 6,
        "parent": str(head.checkpoint),
        "parent_sha256": head.sha256,
    }
    merge = {"request": "s1", "rows": 0, "digest": "", "tables": {}, "who": "ann", "why": ""}
    world.bench.log.seal(
        head.record.model_copy(update={**place, "notes": {**head.record.notes, "splice": merge}})
    )
    world.driver()
    world.epoch((3, 3), ask=(("attach", "p"),))
    assert world.values("d") == [1, 2, 3]


def test_streams_taken_out_and_put_back_go_on_where_they_were() -> None:
    """What was released meanwhile is dispatched then, once, and stream time never goes back."""
    graph = {
        "streams": {"d": {}, "s": V},
        "pipes": {"p": {"from": "events", "to": "d", "inherit": True}},
    }
    graph["reducers"] = {"r": {**reducer("totals"), "to": "s"}}
    world = World(streams_spec(**graph))
    world.epoch((1, 1), (5, 5))
    world.driver(spec=streams_spec())
    world.epoch((6, 6))
    world.epoch((7, 7))
    world.driver(spec=streams_spec(**graph))
    world.epoch((8, 8))
    assert world.values("d") == [1, 5, 6, 7, 8]
    assert [r["stream_time"] for r in world.rows("d")] == [r["t"] for r in world.rows("d")]
    assert world.values("s") == [1, 7, 14, 22, 31]


def test_a_splice_collects_one_request_per_attachment() -> None:
    """Over several epochs.

    It is open until the backfill ends; head rows go to the stream meanwhile.
    """
    world = world_of(
        "pipes",
        "p",
        {
            "from": "events",
            "to": "d",
            "attach": "on_request",
            "merge": "splice",
            "rows_per_epoch": 2,
        },
    )
    world.epoch(*((s, s) for s in range(3)))
    world.epoch((3, 3), ask=(("attach", "p"),))
    assert [r.open for r in world.state().requests.values()] == [True]
    world.epoch()
    ((name, request),) = world.state().requests.items()
    assert (name, request.rows, request.open) == ("p-0-000002", 3, False)
    assert world.values("d") == [3]
    segments = [s for s in world.head().segments if s.kind == "splice:p"]
    assert sum(s.rows for s in segments) == 3
    assert {s.extra["request"] for s in segments} == {name}


def test_detach_and_attach_again() -> None:
    """Detached rows are not dispatched; a second round starts again under a name of its own."""
    world = world_of("reducers", "r", reducer("totals"))
    world.epoch((1, 1))
    world.epoch((2, 2), ask=(("detach", "r"),))
    assert world.values("d") == [1]
    world.epoch(ask=(("attach", "r"),))
    assert world.values("d") == [1, 1, 4]
    assert [r["_via"] for r in world.rows("d")] == ["r", "r@2", "r@2"]


def test_a_failing_reducer_pauses_there_and_goes_on_there() -> None:
    """The event is named, others go on, and after `resume` every row was dispatched once, in order."""
    spec = streams_spec(
        streams={"d": V, "copy": {}},
        reducers={"r": reducer("fragile")},
        pipes={"p": {"from": "events", "to": "copy"}},
    )
    world = World(spec)
    folds.broken.add(2)
    world.epoch((1, 1), (2, 2), (3, 3))
    world.epoch((4, 4))
    failure = world.state().attachments["r"].failure
    assert failure == {"position": 1, "id": "a/0/1", "error": "ValueError: cannot take 2"}
    assert world.values("d") == [100]
    assert world.values("copy") == [1, 2, 3, 4]
    world.epoch(ask=(("resume", "r"),))
    assert world.state().attachments["r"].status == "paused"
    folds.broken.clear()
    world.epoch(ask=(("resume", "r"),))
    assert world.values("d") == [100, 201, 302, 403]


@pytest.mark.parametrize(
    ("name", "position", "error"),
    [
        ("dicing", 0, "not deterministic"),
        ("writing", 0, "SideEffectError: open"),
        ("calling", 0, "SideEffectError: socket.connect"),
        ("forgetful", 0, "not JSON"),
        ("misfit", 2, "does not fit its columns"),
        ("stray", 0, "not among its destinations"),
    ],
)
def test_what_a_fold_must_not_do_pauses_it(name: str, position: int, error: str) -> None:
    """Each with the row and the reason."""
    world = world_of("reducers", "r", reducer(name))
    world.epoch((1, 1), (2, 2), (3, 3))
    failure = world.state().attachments["r"].failure
    assert failure is not None
    assert failure["position"] == position
    assert error in failure["error"]


def test_a_reducer_may_write_to_several_streams() -> None:
    """Order is kept per destination."""
    world = World(
        streams_spec(
            streams={"even": V, "odd": V}, reducers={"r": reducer("split", to=["even", "odd"])}
        )
    )
    world.epoch(*((s, s) for s in range(6)))
    assert (world.values("even"), world.values("odd")) == ([0, 2, 4], [1, 3, 5])


def test_a_buffer_orders_what_its_writers_send() -> None:
    """Held until the frontier has passed the stamps, then in order of stamps, and nothing is
    rejected.
    """
    spec = streams_spec(
        streams={"d": {"buffer": True}, "slow": {}},
        pipes={
            "first": {"from": "events", "to": "d", "where": "v % 2 = 0", "inherit": True},
            "second": {"from": "slow", "to": "d", "inherit": True, "attach": "on_request"},
            "feed": {"from": "events", "to": "slow", "where": "v % 2 = 1", "inherit": True},
        },
    )
    world = World(spec)
    world.epoch((1, 1), (2, 2), ask=(("attach", "second"),))
    world.epoch((3, 3), (4, 4), (5, 5))
    assert world.values("d") == [1, 2, 3, 4, 5]
    assert world.rows("rejections") == []


@pytest.mark.parametrize(
    "point",
    [p for p in EPOCH_POINTS if p.split(".")[0] in ("plan", "survey", "decide", "move", "seal")],
)
def test_a_crash_at_any_step_dispatches_everything_once(point: str) -> None:
    """Streams, states, rejections and requests equal those of a run without a crash."""

    class CrashOnce:
        def __init__(self) -> None:
            self.left = 2

        def reach(self, reached: str) -> None:
            if reached == point:
                self.left -= 1
                if self.left == 0:
                    raise Crash

    def run(faults: CrashOnce | None) -> World:
        spec = streams_spec(
            streams={"d": V, "e": {}},
            reducers={"r": reducer("running")},
            pipes={
                "p": {
                    "from": "events",
                    "to": "e",
                    "merge": "splice",
                    "attach": "on_request",
                    "rows_per_epoch": 1,
                }
            },
        )
        world = World(spec)
        if faults is not None:
            world.driver(faults)
        for second in range(6):
            ask = (("attach", "p"),) if second == 2 else ()
            try:
                world.epoch((second, second), ask=ask)
            except Crash:
                world.driver()
                world.epoch(ask=ask)
        return world

    crashed, smooth = run(CrashOnce()), run(None)
    assert crashed.values("d") == smooth.values("d")
    assert crashed.values("e") == smooth.values("e")
    assert crashed.rows("rejections") == smooth.rows("rejections")
    assert [r.rows for r in crashed.state().requests.values()] == [
        r.rows for r in smooth.state().requests.values()
    ]


def test_bad_predicates_and_functions_are_refused_at_the_start() -> None:
    """Before an epoch runs, with the field named."""
    with pytest.raises(ConfigurationError, match=r"pipes\.p: .*nowhere"):
        world_of("pipes", "p", {"from": "events", "to": "d", "where": "nowhere = 1"})
    with pytest.raises(ConfigurationError, match="pmod"):  # only the row rules have it
        world_of("pipes", "p", {"from": "events", "to": "d", "where": "pmod(v, 2) = 1"})
    with pytest.raises(ConfigurationError, match=r"no reducer at tests\.streams\.folds:nothing"):
        world_of("reducers", "r", reducer("nothing"))
    with pytest.raises(ConfigurationError, match=r"reducers\.r\.aggregates: .*nowhere"):
        world_of(
            "reducers", "r", {"from": "events", "to": "d", "aggregates": {"v": "sum(nowhere)"}}
        )


def test_replay_dispatches_the_same_and_changes_nothing() -> None:
    """Every sealed epoch, run again from its manifest: the same rows in every stream."""
    spec = streams_spec(
        streams={"d": V, "e": {}},
        reducers={"r": reducer("running")},
        pipes={"p": {"from": "events", "to": "e", "attach": "on_request", "inherit": True}},
    )
    world = World(spec)
    for second in range(4):
        world.epoch((second, second), ask=(("attach", "p"),) if second == 2 else ())
    before = {entry.key: entry.etag for entry in world.bench.store.list_objects("p/")}
    parent, replayed = None, set[str]()
    for epoch in world.bench.epochs():
        scratch = MemoryStore()
        overlay = ScratchStore(world.bench.store, scratch)
        mover = OracleMover(overlay, spec, world.bench.sources)
        history = LogHistory(SlotLog(overlay, "p", clock=world.bench.clock), "t")
        dispatch = StreamDispatcher(spec, make_local_runner(overlay, history))
        ports = EpochPorts((), mover, DriverTables(overlay).write, dispatch)
        found = replay_epoch(spec, epoch, parent, ports, world.bench.store, scratch)
        assert found.is_equal, found.tables
        replayed |= found.tables.keys()
        parent = epoch
    assert replayed == {"events", "d", "e", "rejections"}
    assert {entry.key: entry.etag for entry in world.bench.store.list_objects("p/")} == before


def test_the_document_of_a_request_follows_the_log() -> None:
    """Written when the request is complete, once, by any of several writers.

    Its files are those of the manifest.
    """
    world = world_of(
        "pipes",
        "p",
        {
            "from": "events",
            "to": "d",
            "attach": "on_request",
            "merge": "splice",
            "rows_per_epoch": 2,
        },
    )
    sink, log = SpliceRequestSink(world.bench.clock), world.bench.log
    world.epoch(*((s, s) for s in range(3)))
    world.epoch(ask=(("attach", "p"),))
    sink.follow(log)
    assert list_splice_requests(world.bench.store, "p") == []
    world.epoch()
    for follower in (sink, sink, SpliceRequestSink(world.bench.clock)):
        follower.follow(log)
    (request,) = list_splice_requests(world.bench.store, "p")
    assert (request.id, request.origin, request.destination, request.row_count) == (
        "p-0-000002",
        "attachment",
        "d",
        3,
    )
    assert (request.min_time, request.max_time, request.state) == (0, 2_000_000, "created")
    assert [file.key for file in request.row_files()] == [
        s.key for s in world.head().segments if s.kind == "splice:p"
    ]
    assert sink.lag(log) == 0


def test_a_backfill_reads_rows_that_are_older_than_a_column() -> None:
    """They are null in it; the missing column ended the driver, in every epoch."""
    world = world_of("reducers", "sum", reducer("plain", attach="on_request"))
    world.epoch((1, 1), (2, 2))
    world.epoch((3, 3))
    raw = world.bench.spec.model_dump(mode="json", by_alias=True)
    raw["sources"]["a"]["schema"]["extra"] = "long"
    world.driver(spec=PipelineSpec.model_validate(raw))
    world.epoch(ask=(("attach", "sum"),))
    assert world.values("d") == [1, 3, 6]


def test_an_attachment_may_begin_to_splice_within_its_backfill() -> None:
    """The rest of the backfill is collected; the driver ended at every start."""
    pipe = {"from": "events", "to": "d", "attach": "on_request", "rows_per_epoch": 2}
    world = world_of("pipes", "p", pipe)
    world.epoch(*((s, s) for s in range(5)))
    world.epoch(ask=(("attach", "p"),))
    raw = world.bench.spec.model_dump(mode="json", by_alias=True)
    raw["pipes"]["p"]["merge"] = "splice"
    world.driver(spec=PipelineSpec.model_validate(raw))
    world.epoch()
    world.epoch()
    SpliceRequestSink(world.bench.clock).follow(world.bench.log)
    (request,) = list_splice_requests(world.bench.store, "p")
    assert (request.id, request.destination, request.row_count) == ("p-0-000002", "d", 3)
    assert world.values("d") == [0, 1]
