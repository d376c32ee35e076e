"""Requests of people.

Each applied once, acknowledged once, and what follows from it made up for after a crash.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import structlog

from tests.engine.harness import SECOND, Bench, barrier, row, spec_of
from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore, StoreRequest
from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    DriverRequest,
    RequestKind,
    acknowledge_request,
    read_ack,
    submit_request,
)
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.errors import PoisonError
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.engine.epoch_engine import Engine, EpochPorts, EpochReport
from tidegate.jobs.engine.replay import replay_epoch


class Driver:
    """An engine with an inbox."""

    def __init__(self, bench: Bench) -> None:
        self.engine: Engine = bench.engine()
        newest = lambda: self.engine.resume_state.head.record  # noqa: E731
        self.inbox = RequestInbox(
            bench.store, bench.spec, lambda: 1, threading.Event(), newest, bench.clock
        )

    def epoch(self, *, crash: bool = False) -> EpochReport:
        """One epoch; with `crash` nothing happens after the seal."""
        report = self.engine.run_epoch(self.inbox.collect())
        if not crash and report.sealed:
            self.inbox.acknowledge_applied(report)
        return report


@pytest.fixture
def bench() -> Bench:
    found = Bench(spec_of())
    found.sources["a"].append(row(1))
    found.sources["b"].append(row(2))
    return found


def test_a_savepoint_is_pinned_and_acknowledged(bench: Bench) -> None:
    """The epoch that applied it is what is pinned."""
    asked = submit_request(
        bench.store, "p", RequestKind.SAVEPOINT, who="ann", name="before", clock=bench.clock
    )
    report = Driver(bench).epoch()
    ack = read_ack(bench.store, "p", asked.id)
    assert ack is not None
    assert (ack.outcome, ack.checkpoint) == (AckOutcome.APPLIED, str(report.sealed))
    assert RootsFile(bench.store, "p").read().pins["before"].checkpoint == str(report.sealed)


@pytest.mark.parametrize("kind", [RequestKind.SAVEPOINT, RequestKind.PIN])
def test_a_pin_is_made_up_for_by_the_successor(bench: Bench, kind: RequestKind) -> None:
    """Killed between the seal and the pin.

    The next driver pins the very epoch that applied it, once.
    """
    asked = submit_request(bench.store, "p", kind, who="ann", name="before", clock=bench.clock)
    sealed = Driver(bench).epoch(crash=True).sealed
    assert read_ack(bench.store, "p", asked.id) is None
    bench.sources["a"].append(row(3))
    successor = Driver(bench)
    report = successor.epoch()
    assert report.manifest is not None
    assert report.manifest.requests == []
    assert RootsFile(bench.store, "p").read().pins["before"].checkpoint == str(sealed)
    ack = read_ack(bench.store, "p", asked.id)
    assert ack is not None
    assert ack.checkpoint == str(sealed)


def test_a_refused_pin_is_reported(bench: Bench) -> None:
    """The name is taken by another checkpoint."""
    for _ in range(2):
        asked = submit_request(
            bench.store, "p", RequestKind.SAVEPOINT, who="ann", name="same", clock=bench.clock
        )
        Driver(bench).epoch()
    ack = read_ack(bench.store, "p", asked.id)
    assert ack is not None
    assert ack.outcome is AckOutcome.REFUSED
    assert "already names" in ack.detail


def test_a_driver_that_did_not_know_it_had_sealed_finishes_its_requests(bench: Bench) -> None:
    """The answer to its PUT was lost; after a reload its own epoch is the newest."""
    asked = submit_request(
        bench.store, "p", RequestKind.SAVEPOINT, who="ann", name="before", clock=bench.clock
    )
    driver = Driver(bench)
    driver.epoch(crash=True)
    assert read_ack(bench.store, "p", asked.id) is None
    driver.engine.reload()
    assert driver.inbox.collect().ids == ()
    assert read_ack(bench.store, "p", asked.id) is not None


PUNCTUATED = {
    "path": "inbox/x/",
    "event_time": "t",
    "punctuation": {"explicit": True},
    "schema": {"t": "timestamp", "v": "long", "kind": "string", "n": "long"},
    "barriers": {"kind": "kind", "types": ["cut"], "id": "n", "punctuation": "cti"},
}


def ask_cti(bench: Bench, source: str, second: int) -> DriverRequest:
    """What `tidegate cti` does."""
    return submit_request(
        bench.store,
        "p",
        RequestKind.CTI,
        who="ann",
        name=source,
        time=second * SECOND,
        clock=bench.clock,
    )


def test_a_cti_that_a_person_sends_is_sealed_as_punctuation() -> None:
    """F moves with it, later rows below it are violations, and a replay decides the same."""
    bench = Bench(spec_of(sources={"a": PUNCTUATED}, preset="streaminsight"))
    bench.sources["a"].append(row(1), row(8))
    driver = Driver(bench)
    driver.epoch()
    asked = ask_cti(bench, "a", 5)
    sealed = driver.epoch().sealed
    ack = read_ack(bench.store, "p", asked.id)
    assert ack is not None
    assert (ack.outcome, ack.checkpoint) == (AckOutcome.APPLIED, str(sealed))
    epoch = bench.epochs()[-1]
    assert {"kind": "cti", "source": "a", "time": 5 * SECOND} in epoch.decision["recorded"]
    assert epoch.decision["frontier_after"] == 5 * SECOND
    assert [r["v"] for r in bench.rows("events")] == [1]
    replayed = replay_epoch(
        *(bench.spec, epoch, bench.epochs()[-2]),
        EpochPorts((), OracleMover(bench.store, bench.spec, bench.sources), lambda _: {}),
        *(bench.store, bench.store),
    )
    assert replayed.decided_differently == ()
    bench.sources["a"].append(row(5), row(8))
    driver.epoch()
    assert bench.rows("late") == []  # a start at the CTI is legal
    bench.sources["a"].append(row(4))
    with pytest.raises(PoisonError, match="late for"):  # `on_late: error`, as in StreamInsight
        driver.epoch()


def test_a_cti_in_the_past_is_a_violation() -> None:
    """It is refused with what was promised; so is one for a source without punctuation."""
    lagging = {**PUNCTUATED, "punctuation": None, "lag": "0"}
    bench = Bench(spec_of(sources={"a": PUNCTUATED, "b": lagging}))
    bench.sources["a"].append(row(1), {**row(9), "kind": "cti"})
    driver = Driver(bench)
    driver.epoch()
    for source, second, why in (
        ("a", 9, "CTI violation: a has promised 1970-01-01T00:00:09Z"),
        ("a", 3, "CTI violation: a has promised 1970-01-01T00:00:09Z"),
        ("b", 10, "no source b with a 'punctuation' section; sources with one: a"),
        ("c", 10, "no source c with a 'punctuation' section; sources with one: a"),
    ):
        asked = ask_cti(bench, source, second)
        driver.epoch()
        ack = read_ack(bench.store, "p", asked.id)
        assert ack is not None
        assert (ack.outcome, ack.detail) == (AckOutcome.REFUSED, why)
    assert len(bench.epochs()) == 1


def test_all_barriers_up_to_one_are_cancelled(bench: Bench) -> None:
    """Open ones close as aborted, later arrivals of them are ignored, and a replay agrees."""
    bench.spec = spec_of(barriers={"identity": "id"})
    bench.sources["a"].append(barrier(3, 1), row(4), barrier(5, 2), row(6), barrier(7, 3))
    driver = Driver(bench)
    for _ in range(3):
        driver.epoch()
    submit_request(
        *(bench.store, "p", RequestKind.CANCEL_BARRIERS), who="ann", barrier=2, clock=bench.clock
    )
    for _ in range(4):
        driver.epoch()
    bench.sources["b"].append(barrier(3, 1), barrier(5, 2), barrier(7, 3), row(8))
    for _ in range(4):
        driver.epoch()
    found = [(b["barrier_id"], b["outcome"]) for b in bench.rows("barriers")]
    assert found == [(1, "aborted"), (2, "aborted"), (3, "complete")]
    for parent, epoch in pairwise(bench.epochs()):
        ports = EpochPorts((), OracleMover(bench.store, bench.spec, bench.sources), lambda _: {})
        replayed = replay_epoch(bench.spec, epoch, parent, ports, bench.store, bench.store)
        assert replayed.decided_differently == ()


def test_attach_detach_and_resume_reach_the_dispatcher(bench: Bench) -> None:
    """They are handed on in order; a name that the spec does not know is refused."""
    inbox = RequestInbox(
        bench.store,
        SimpleNamespace(name="p", stream_graph=SimpleNamespace(attachments={"pick"})),  # type: ignore[arg-type]
        lambda: 1,
        threading.Event(),
        lambda: None,
        bench.clock,
    )
    for kind in (RequestKind.ATTACH, RequestKind.DETACH, RequestKind.RESUME):
        submit_request(bench.store, "p", kind, who="ann", name="pick", clock=bench.clock)
        bench.clock.advance(1)
    stranger = submit_request(
        bench.store, "p", RequestKind.ATTACH, who="ann", name="pickk", clock=bench.clock
    )
    assert inbox.collect().attachments == (
        ("attach", "pick"),
        ("detach", "pick"),
        ("resume", "pick"),
    )
    ack = read_ack(bench.store, "p", stranger.id)
    assert ack is not None
    assert (ack.outcome, ack.detail) == (AckOutcome.REFUSED, "no pipe or reducer named pickk")


def test_a_hold_lasts_until_the_merge_is_over(bench: Bench) -> None:
    """It does not belong to an epoch; the process that asked acknowledges it."""
    asked = submit_request(
        bench.store, "p", RequestKind.HOLD, who="ann", name="request", clock=bench.clock
    )
    inbox = Driver(bench).inbox
    assert inbox.collect().ids == ()
    assert inbox.held == asked
    acknowledge_request(
        bench.store, "p", Ack(id=asked.id, outcome=AckOutcome.APPLIED, token=0, at=0)
    )
    inbox.collect()
    assert inbox.held is None


def test_a_hold_of_the_dead_is_over_by_the_drivers_own_clock(bench: Bench) -> None:
    """However far ahead the clock of whoever asked is.

    Five minutes after it was first seen the driver goes on.
    """
    asked = submit_request(
        bench.store, "p", RequestKind.HOLD, who="ann", name="request", ttl=1e6, clock=bench.clock
    )
    inbox = Driver(bench).inbox
    inbox.collect()
    bench.clock.advance(299.0)
    inbox.collect()
    assert inbox.held == asked
    bench.clock.advance(1.0)
    inbox.collect()
    assert inbox.held is None
    ack = read_ack(bench.store, "p", asked.id)
    assert ack is not None
    assert ack.outcome is AckOutcome.EXPIRED


def test_a_turn_makes_one_list_that_does_not_grow(bench: Bench) -> None:
    """However many requests were answered before: their LIST forgets them after an hour."""
    listed: list[str] = []

    def note_list(request: StoreRequest) -> None:
        if request.verb == "list":
            listed.append(request.key)

    assert isinstance(bench.store, MemoryStore)
    bench.store.hook = note_list
    driver = Driver(bench)
    for number in range(5):
        bench.sources["a"].append(row(10 + number))
        submit_request(
            bench.store, "p", RequestKind.SAVEPOINT, who="ann", name=f"s{number}", clock=bench.clock
        )
        driver.epoch()
        bench.clock.advance(3600.0)
        listed.clear()
        driver.inbox.collect()
        assert listed == ["p/requests/"]
    driver.inbox.collect()
    assert list(bench.store.list_objects("p/requests/")) == []
    assert list(bench.store.list_objects("p/acks/")) == []


def test_a_request_of_a_newer_version_does_not_end_the_driver(bench: Bench) -> None:
    """During an upgrade people may ask for what this driver does not know; it goes on and says so."""
    driver = Driver(bench)
    request = submit_request(bench.store, "p", RequestKind.SAVEPOINT, who="ann", name="s")
    newer = request.to_bytes().replace(b'"savepoint"', b'"teleport"')
    bench.store.put("p/requests/newer.json", newer.replace(request.id.encode(), b"newer"))
    with structlog.testing.capture_logs() as logs:
        assert driver.epoch().sealed
        driver.inbox.collect()
    assert [line["request"] for line in logs if line["event"] == "request_not_read"] == ["newer"]
    ack = read_ack(bench.store, "p", request.id)
    assert ack is not None
    assert ack.outcome is AckOutcome.APPLIED


def test_a_savepoint_that_was_retired_meanwhile_is_refused(bench: Bench) -> None:
    """A driver whose seal is answered late does not pin a checkpoint that is gone."""
    driver = Driver(bench)
    asked = submit_request(
        bench.store, "p", RequestKind.SAVEPOINT, who="ann", name="before", clock=bench.clock
    )
    report = driver.epoch(crash=True)
    for second in (3, 4):
        bench.sources["a"].append(row(second))
        bench.engine().run_epoch()
    policy = RetentionPolicy(keep_last=1, keep_for=-1e9, grace=0.0)
    Retention(bench.log, policy, external=set, clock=bench.clock).run()
    driver.inbox.acknowledge_applied(report)
    ack = read_ack(bench.store, "p", asked.id)
    assert ack is not None
    assert ack.outcome is AckOutcome.REFUSED
    assert RootsFile(bench.store, "p").read().pins == {}
