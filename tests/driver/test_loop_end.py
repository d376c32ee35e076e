"""The driver's loop: what ends a run, and what it must not miss before it ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.driver.loop_rig import LoopRig
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.checkpoints.bucket_layout import generate_attempt_id
from tidegate.checkpoints.driver_requests import RequestKind, read_ack, submit_request
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.errors import FencedError
from tidegate.jobs.engine.epoch_engine import EpochReport, EpochRequests


def test_a_bounded_run_reads_what_a_lost_last_slot_left() -> None:
    """A run is not finished while its last epoch has lost the slot to an earlier attempt."""
    rig = LoopRig()
    rig.feed(1, 2)
    rig.late_seal()
    seal = rig.engine._log.seal

    def seal_after_late_put(record: Any) -> Any:
        if rig.reports or len(sealed) != 1:
            sealed.append(record)
            return seal(record)
        sealed.append(record)
        rig.deliver()  # the first attempt's PUT arrives while the second is being sealed
        return seal(record)

    sealed: list[Any] = []
    rig.engine._log.seal = seal_after_late_put  # type: ignore[method-assign]

    def producer(number: int) -> None:
        if number == 1:
            rig.feed(3, 4, 5, end=True)

    rig.between = producer
    outcome = rig.run()
    assert outcome.state == "finished"
    assert any(report.lost for report in rig.reports)
    counters = rig.bench.epochs()[-1].counters
    assert counters.read == 10
    assert rig.sink.upto == rig.bench.log.head().slot


def test_finished_waits_for_the_sinks() -> None:
    """A bounded run says "finished" only when every sink has every epoch."""
    rig = LoopRig()
    rig.feed(1, 2, end=True)
    rig.sink.away = lambda: not any("not in every sink" in why for _, why in rig.status.said)
    assert rig.run().state == "finished"
    assert rig.sink.upto == rig.bench.log.head().slot
    assert any("table (1)" in why for _, why in rig.status.said)


def test_an_epoch_sealed_between_two_looks_at_the_head_is_published() -> None:
    """The sinks begin with one head; another driver seals the rest before the engine reads its own."""
    rig = LoopRig()
    rig.publisher.start(0, 0)
    while not rig.publisher.publish_seconds:
        pass
    rig.feed(1, 2, end=True)
    rig.bench.engine().run_epoch()
    rig.engine.reload()
    assert rig.loop.run().state == "finished"
    rig.publisher.stop()
    assert rig.sink.upto == rig.bench.log.head().slot == 1


def test_finished_waits_for_a_merge_that_was_sealed_behind_the_last_epoch() -> None:
    """The merge fills a slot when the sinks have followed the last epoch."""
    rig = LoopRig()
    rig.feed(1, 2, end=True)
    follow, log = rig.sink.follow, rig.bench.log

    def follow_before_merge(log: SlotLog, *, flush: bool = True) -> int:
        count, head = follow(log, flush=flush), log.head()
        if head.slot == 1:
            assert head.record is not None
            facts = {"slot": 2, "attempt": generate_attempt_id(), "parent": str(head.record.id)}
            merge = head.record.model_copy(update={**facts, "parent_sha256": head.sha256})
            assert isinstance(log.seal(merge), Sealed)
        return count

    rig.sink.follow = follow_before_merge  # type: ignore[method-assign]
    assert rig.run().state == "finished"
    assert rig.sink.upto == log.head().slot == 2


def test_a_run_whose_lease_was_taken_does_not_call_itself_finished() -> None:
    """Another driver seals while the sinks follow the last epoch; what is left is its work."""
    rig = LoopRig()
    rig.feed(1, 2, end=True)
    follow = rig.sink.follow

    def follow_and_lose(log: SlotLog, *, flush: bool = True) -> int:
        count = follow(log, flush=flush)
        if log.head().slot == 1:
            rig.bench.engine().run_epoch(EpochRequests(ids=("asked",)))
            rig.steps.error = FencedError("taken", code="lease.lost")
            rig.steps.lost_lease.set()
        return count

    rig.sink.follow = follow_and_lose  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        rig.run()


def test_a_finished_run_that_waits_for_a_sink_does_what_it_is_asked() -> None:
    """A savepoint needs an epoch, and the wait may take as long as the sink is away."""
    rig = LoopRig()
    rig.feed(1, 2, end=True)
    store, clock = rig.bench.store, rig.bench.clock
    rig.sink.away = lambda: rig.bench.log.head().slot < 2
    collect, looks = rig.loop.inbox.collect, []

    def ask_on_third_look() -> EpochRequests:
        looks.append(1)
        if len(looks) == 3:
            submit_request(
                store,
                "p",
                RequestKind.SAVEPOINT,
                who="ann",
                name="now",
                request_id="s",
                clock=clock,
            )
        if len(looks) == 1000:
            rig.stop.set()
        return collect()

    rig.loop.inbox.collect = ask_on_third_look  # type: ignore[method-assign]
    assert rig.run().state == "finished"
    ack = read_ack(store, "p", "s")
    assert ack is not None
    assert ack.outcome == "applied"
    assert rig.sink.upto == 2


def test_a_stop_while_a_merge_has_the_next_slot_is_no_end_of_the_sources() -> None:
    """What the merge seals afterwards is in no sink, so another driver has to start."""
    rig = LoopRig()
    rig.feed(1, 2, end=True)
    store, clock = rig.bench.store, rig.bench.clock
    run_epoch = rig.engine.run_epoch

    def hold_behind_epoch(*asked: Any, **named: Any) -> EpochReport:
        report = run_epoch(*asked, **named)
        submit_request(store, "p", RequestKind.HOLD, who="ann", name="m", ttl=1e9, clock=clock)
        return report

    rig.engine.run_epoch = hold_behind_epoch  # type: ignore[method-assign]
    rig.between = lambda number: rig.stop.set()
    outcome = rig.run()
    assert outcome.state == "stopped"
    assert outcome.why == "asked to stop before a merge had filled the next slot"


def test_a_stop_ends_the_wait_of_a_finished_run() -> None:
    """A stop request is heard while a finished run waits for a sink; the run is then "stopped"."""
    rig = LoopRig()
    rig.feed(1, 2, end=True)
    rig.sink.away = lambda: True
    submit_request(
        rig.bench.store,
        "p",
        RequestKind.STOP,
        token=1,
        who="ann",
        request_id="late",
        clock=rig.bench.clock,
    )
    inbox = rig.loop.inbox
    inbox.collect = _ignore_first(inbox.collect)  # type: ignore[method-assign]
    assert rig.run().state == "stopped"


def _ignore_first(collect: Callable[[], Any]) -> Callable[[], Any]:
    """Hide requests from the first look, as if they came later."""
    looks: list[int] = []

    def later() -> Any:
        looks.append(1)
        return collect() if len(looks) > 1 else EpochRequests()

    return later


@pytest.mark.parametrize("seed", range(60))
def test_finished_is_complete_whatever_the_store_answers(seed: int) -> None:
    """However requests are lost, late or refused, a run that says "finished" has read every row into
    exactly one epoch, and every sink has every epoch.
    """
    chance = random.Random(seed)
    last = chance.randrange(1, 5)
    rig = LoopRig()
    rig.engine._log._seal_budget = 0.0
    store = rig.bench.store
    assert isinstance(store, MemoryStore)

    def hook(request: StoreRequest) -> Fault | None:
        if threading.current_thread() is not threading.main_thread():
            return None
        seals = request.verb == "create" and "/slots/" in request.key
        if seals and store.bucket.held and chance.random() < 0.5:
            store.bucket.deliver_held()  # an earlier attempt arrives first
        if chance.random() > (0.4 if seals else 0.02):
            return None
        # What is written before the seal is written once, and has no answer to lose.
        return chance.choice([*Fault, Fault.LATE, Fault.LATE]) if seals else Fault.REFUSED

    def world(number: int) -> None:
        if number <= last:
            rig.feed(*range(2 * number, 2 * number + 2), end=number == last)
        elif number > 60:
            store.hook = None
        while store.bucket.held and chance.random() < 0.3:
            store.bucket.deliver_held()

    rig.between, store.hook = world, hook
    rig.feed(0)
    assert rig.run().state == "finished"
    store.hook = None
    head = rig.bench.log.head()
    assert head.record is not None
    assert head.record.counters.read == 2 * (1 + last * 2)
    assert rig.sink.upto == head.slot
