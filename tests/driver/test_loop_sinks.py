"""The driver's loop and its sinks: what reaches them, and when the driver waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.driver.loop_rig import LoopRig
from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import FencedError, TransientError
from tidegate.jobs.engine.epoch_engine import EpochRequests


def test_an_epoch_sealed_without_an_answer_is_published() -> None:
    """A slot whose PUT arrives late reaches the sinks although no new row comes."""
    rig = LoopRig()
    rig.feed(1, 2)
    rig.late_seal()

    def world(number: int) -> None:
        if number == 1:
            rig.deliver()
        if number > 3 and rig.publisher.drain(5.0):
            rig.stop.set()

    rig.between = world
    assert rig.run().state == "stopped"
    assert rig.bench.log.head().slot == 1
    assert rig.sink.upto == 1


def test_a_slot_of_another_process_is_published_on_a_quiet_stream() -> None:
    """An idle driver looks at the head now and then, and its sinks follow."""
    rig = LoopRig(coalesce={"idle_timeout": "never"})
    rig.feed(1)
    other: list[int] = []

    def world(number: int) -> None:
        if number == 3:
            report = rig.bench.engine().run_epoch(EpochRequests(ids=("merge",)))
            other.append(report.sealed.slot if report.sealed else 0)
        if number > 90:
            assert rig.publisher.drain(5.0)
            rig.stop.set()

    rig.between = world
    rig.run()
    assert other == [2]
    assert rig.sink.upto == 2


@pytest.mark.parametrize("kind", [RequestKind.STOP, RequestKind.DRAIN])
def test_a_stop_is_heard_while_a_sink_is_away(kind: RequestKind) -> None:
    """Stop and drain end a driver that waits for a sink, and it runs no further epoch."""
    rig = LoopRig(outputs={"max_unpublished": 1})
    rig.feed(1)
    rig.sink.away = lambda: True

    def world(number: int) -> None:
        rig.feed(number + 1)

    rig.between = world
    asked: list[int] = []
    collect = rig.loop.inbox.collect

    def collect_in_wait() -> Any:
        if rig.status.state == "waiting" and not asked:
            asked.append(rig.bench.log.head().slot)
            submit_request(
                rig.bench.store,
                "p",
                kind,
                token=1,
                who="ann",
                request_id="r",
                clock=rig.bench.clock,
            )
        return collect()

    rig.loop.inbox.collect = collect_in_wait  # type: ignore[method-assign]
    assert rig.run().state == "stopped"
    assert asked == [rig.bench.log.head().slot]


def test_a_lost_lease_is_seen_while_a_sink_is_away() -> None:
    """An evicted driver does not stay until the sink is back."""
    rig = LoopRig(outputs={"max_unpublished": 1})
    rig.feed(1)
    rig.sink.away = lambda: True
    rig.between = lambda number: rig.feed(number + 1)
    set_state = rig.status.set_state

    def evict(state: str, **why: Any) -> None:
        set_state(state, **why)
        if state == "waiting":
            rig.steps.error = FencedError("gone", code="lease.lost")
            rig.steps.lost_lease.set()

    rig.status.set_state = evict  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="gone"):
        rig.run()


def test_a_sink_that_catches_up_does_not_hold_the_driver() -> None:
    """A new sink on an old pipeline, slow but getting on, lets the driver seal."""
    rig = LoopRig(outputs={"max_unpublished": 2}, checkpoint={"idle_epochs": "always"})
    engine = rig.bench.engine()
    for second in range(6):
        rig.feed(second)
        engine.run_epoch()
    rig.engine.reload()
    caught_up = threading.Event()
    follow = rig.sink.follow

    def follow_slowly(log: SlotLog, *, flush: bool = True) -> int:
        if rig.sink.upto < 3:
            rig.sink.upto += 1
            raise TransientError("one part failed", code="sink.unavailable")
        caught_up.wait(30.0)
        return follow(log, flush=flush)

    rig.sink.follow = follow_slowly  # type: ignore[method-assign]

    def world(number: int) -> None:
        rig.feed(10 + number)
        if number == 5:
            rig.stop.set()
            caught_up.set()

    rig.between = world
    rig.run()
    assert rig.bench.log.head().slot >= 11
    assert not any(state == "waiting" for state, _ in rig.status.said)


def test_a_stuck_new_sink_holds_the_driver() -> None:
    """A sink that fails twice without applying an epoch counts as away, also at its first start."""
    rig = LoopRig(outputs={"max_unpublished": 1})
    rig.feed(1)
    rig.bench.engine().run_epoch()
    rig.engine.reload()
    rig.sink.away = lambda: True
    rig.between = lambda number: rig.feed(number + 1)
    set_state = rig.status.set_state

    def stop_when_waiting(state: str, **why: Any) -> None:
        set_state(state, **why)
        if state == "waiting":
            rig.stop.set()

    rig.status.set_state = stop_when_waiting  # type: ignore[method-assign]
    assert rig.run().state == "stopped"
