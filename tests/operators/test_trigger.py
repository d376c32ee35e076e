"""The trigger and the asset watcher, driven by hand: no triggerer, no waiting."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tests.epochs import seal_epoch
from tests.manual_clock import ManualClock

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.operators import trigger
from tidegate.operators.assets import SealTrigger, has_new_event
from tidegate.operators.driver_launch import LaunchedDriver
from tidegate.operators.driver_shutdown import StopOrder
from tidegate.operators.liveness import StreamObserver
from tidegate.operators.trigger import EpochTrigger, StreamTrigger, read_settle_seconds
from tidegate.time_units import TICK_MIN

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)


@pytest.fixture
def store(empty_store: Store) -> Store:
    """A bucket of its own per test; a stop is only noted."""
    return empty_store


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons of the stops the trigger ordered."""
    found: list[str] = []

    def stop(store: Store, pipeline: str, order: StopOrder, **_: Any) -> str:
        found.append(order.why)
        return "stopped"

    monkeypatch.setattr(trigger, "stop_driver", stop)
    return found


def _trigger(floor: int = 1) -> StreamTrigger:
    made = StreamTrigger(pipeline="p", floor=floor)
    made._task_instance = SimpleNamespace(
        id="t", dag_id="p.stream", task_id="stream", run_id="r"
    )  # as the triggerer injects it
    return made


def _kill(
    monkeypatch: pytest.MonkeyPatch, state: str | None, floor: int = 1, other_runs: int = 0
) -> None:
    monkeypatch.setattr(trigger, "read_task_state", lambda task: state)
    monkeypatch.setattr(trigger, "count_other_runs", lambda task: other_runs)
    asyncio.run(_trigger(floor).on_kill())


@pytest.mark.parametrize("state", ["failed", "success", "removed"])
def test_a_task_that_a_person_ended_ends_its_driver(
    store: Store, stops: list[str], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Mark failed, mark success: the driver is stopped and nothing brings it back."""
    Lease.acquire(store, "p", ELSEWHERE)
    _kill(monkeypatch, state)
    assert stops == [f"the task was set to {state} in Airflow"]
    assert read_desired_state(store, "p").state is DesiredState.STOPPED


@pytest.mark.parametrize(
    "state", ["deferred", "running", "queued", "scheduled", "up_for_retry", None]
)
def test_a_cleared_task_keeps_its_driver(
    store: Store, stops: list[str], monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    """on_kill comes up to three seconds after a clear, when the new try has adopted the driver.

    It must not kill it.
    """
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    Lease.acquire(store, "p", ELSEWHERE)
    _kill(monkeypatch, state)
    assert stops == []
    assert read_desired_state(store, "p").state is DesiredState.RUN


def test_a_run_that_waits_keeps_the_driver(
    store: Store, stops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether on_kill or the next run comes first is luck; what becomes of the stream is not."""
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    Lease.acquire(store, "p", ELSEWHERE)
    _kill(monkeypatch, "failed", other_runs=1)
    assert stops == []
    assert read_desired_state(store, "p").state is DesiredState.RUN


def test_a_driver_of_another_process_is_not_stopped(
    store: Store, stops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease has a higher token than this trigger ever saw: another task drives now."""
    Lease.acquire(store, "p", ELSEWHERE).release()
    Lease.acquire(store, "p", ELSEWHERE)
    _kill(monkeypatch, "failed", floor=1)
    assert stops == []


def test_a_trigger_survives_its_own_serialisation() -> None:
    """The triggerer builds it again from class path and arguments."""
    launched = LaunchedDriver("a", "log", ELSEWHERE, "exit").as_dict()
    made = StreamTrigger(pipeline="p", floor=3, conn_id="c", launched=launched, due=7)
    path, arguments = made.serialize()
    assert path == "tidegate.operators.trigger.StreamTrigger"
    assert StreamTrigger(**arguments).serialize() == made.serialize()
    waiting = EpochTrigger(pipeline="p", timeline=1, result={"a": 1}, patience=3.0, conn_id="c")
    assert EpochTrigger(**waiting.serialize()[1]).serialize() == waiting.serialize()
    watcher = SealTrigger(pipeline="p", kind="late", every=60.0)
    assert SealTrigger(**watcher.serialize()[1]).serialize() == watcher.serialize()


def test_an_unreadable_desired_state_is_tolerated_at_first(store: Store) -> None:
    """A document of a newer version must not end the trigger, and with it the supervision."""
    Lease.acquire(store, "p", ELSEWHERE).release()
    store.put(BucketLayout("p").desired_key, b'{"field_of_a_newer_version": 1}')
    assert _trigger()._observe_change(store, StreamObserver(store, "p", floor=1)) is None


def test_only_the_driver_that_was_seen_is_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order names its token, because another driver may take over before the stop."""
    orders: list[StopOrder] = []

    def stop(store: Store, pipeline: str, order: StopOrder, **_: Any) -> str:
        orders.append(order)
        return "stopped"

    monkeypatch.setattr(trigger, "stop_driver", stop)
    lease = Lease.acquire(store, "p", ELSEWHERE)
    _kill(monkeypatch, "failed", floor=1)
    assert [order.token for order in orders] == [lease.token]


def test_nothing_is_reported_during_a_restore(store: Store) -> None:
    """The driver is gone because a recovery stopped it.

    The trigger waits until the recovery says what shall be.
    """
    Lease.acquire(store, "p", ELSEWHERE).release()
    write_status(
        store, "p", DriverStatus(token=1, driver="d", step="x", at=0, body={"state": "stopped"})
    )
    set_desired_state(store, "p", DesiredState.RECOVERING, who="ann")
    watching, observer = _trigger(), StreamObserver(store, "p", floor=1)
    assert watching._observe_change(store, observer) is None
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    seen = watching._observe_change(store, observer)
    assert seen is not None
    assert seen.state == "stopped"


def test_a_live_stream_is_reported_when_its_run_is_due(store: Store) -> None:
    """Until then the trigger says nothing of a live stream; from then on the task may hand its driver over."""
    Lease.acquire(store, "p", ELSEWHERE)
    watching, observer = _trigger(), StreamObserver(store, "p", floor=1)
    watching.due = SYSTEM_CLOCK.wall_ticks() + 3_600_000_000
    assert watching._observe_change(store, observer) is None
    watching.due = SYSTEM_CLOCK.wall_ticks()
    seen = watching._observe_change(store, observer)
    assert seen is not None
    assert seen.as_dict()["state"] == "live"


def test_the_settle_time_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default survives the delays that were published: 6.5 and 7 seconds."""
    assert read_settle_seconds() > 7
    monkeypatch.setenv("AIRFLOW__TIDEGATE__TRIGGER_SETTLE", "0.5")
    assert read_settle_seconds() == 0.5


@pytest.mark.parametrize("kind", ["stream", "epoch", "late epoch"])
def test_no_event_comes_before_the_settle_time(
    empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Airflow would lose it, and take the task for killed."""
    clock, settle = ManualClock(), read_settle_seconds()
    begun = clock.monotonic()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    fake = SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread)
    monkeypatch.setattr(trigger, "asyncio", fake)
    monkeypatch.setattr(trigger, "SYSTEM_CLOCK", clock)
    Lease.acquire(empty_log.store, "p", ELSEWHERE).release()
    watching: StreamTrigger | EpochTrigger = _trigger()
    if kind != "stream":
        patience = 300.0 if kind == "epoch" else 1.0
        timeline = 0 if kind == "epoch" else 5
        watching = EpochTrigger(pipeline="p", timeline=timeline, result={}, patience=patience)
        seal_epoch(empty_log)

    async def first() -> None:
        await anext(watching.run())

    asyncio.run(first())
    assert clock.monotonic() - begun >= settle


@pytest.mark.parametrize("first", ["launched", "standby"])
def test_a_standby_takes_over_before_the_task_acts(
    store: Store, tmp_path: Path, first: str
) -> None:
    """The driver was killed, and another process that was launched is about to take its lease.

    Either may have been the driver. Acting at once stopped the one that took over.
    """
    clock, here = ManualClock(), ProcessIdentity.this_process()
    Lease.acquire(store, "p", here.model_copy(update={"start_ticks": here.start_ticks - 1}))
    alive = LaunchedDriver("a", "/log", here, str(tmp_path / "a.exit"))
    known: dict[str, Any] = {"launched": alive.as_dict()} if first == "launched" else {}
    watching = StreamTrigger(
        pipeline="p", floor=1, standby=[] if known else [alive.as_dict()], **known
    )
    observer = StreamObserver(store, "p", floor=1, launched=alive if known else None, clock=clock)
    assert watching._observe_change(store, observer) is None
    clock.advance(30)  # longer than a lease lives: no one has taken it
    seen = watching._observe_change(store, observer)
    assert seen is not None
    assert seen.as_dict()["state"] in ("stalled", "lost")


@pytest.mark.parametrize("lost", ["ended", "took over", "never was", "nothing"])
def test_a_lost_standby_is_reported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It has ended, or drives now; at the earliest half a minute after the last launch."""
    clock = ManualClock()
    monkeypatch.setattr(trigger, "SYSTEM_CLOCK", clock)
    exit_file = tmp_path / "a.exit"
    waiting = LaunchedDriver("a", "/log", ELSEWHERE, str(exit_file))
    lease = Lease.acquire(store, "p", ELSEWHERE)
    watching = StreamTrigger(
        pipeline="p", floor=1, standby=[] if lost == "never was" else [waiting.as_dict()]
    )
    observer = StreamObserver(store, "p", floor=1)
    if lost == "ended":
        exit_file.write_text("3")
    if lost == "took over":
        lease.release()
        Lease.acquire(store, "p", ELSEWHERE)
    assert watching._observe_change(store, observer) is None
    clock.advance(31)
    seen = watching._observe_change(store, observer)
    if lost == "nothing":
        assert seen is None
    else:
        assert seen is not None
        assert seen.as_dict()["state"] == "live"
        assert seen.as_dict()["standby_missing"]


def _manifest(slot: int, late: int = 0, timeline: int = 0) -> Manifest:
    return Manifest(
        timeline=timeline,
        slot=slot,
        pipeline="p",
        uid="u",
        spec_digest="s",
        code_version="c",
        parent=None,
        parent_sha256=None,
        attempt="abcdef",
        lease_token=1,
        driver="d",
        recorded_now=0,
        created_at=0,
        counters=Counters(read=late, late=late, per_source={"a": {"read": late, "late": late}}),
    )


def test_what_counts_as_an_event() -> None:
    """Any checkpoint seals; late rows count only when they are new; a restore starts again."""
    mark = {"timeline": 0, "slot": 5, "late": 3}
    assert has_new_event("sealed", _manifest(6), mark)
    assert not has_new_event("sealed", _manifest(5), mark)
    assert has_new_event("late", _manifest(6, late=4), mark)
    assert not has_new_event("late", _manifest(6, late=3), mark)
    assert has_new_event("late", _manifest(4, late=1, timeline=1), mark)
    assert not has_new_event("late", _manifest(1), None)


@pytest.mark.parametrize("mark", [None, {"timeline": 0, "slot": 5, "late": 0, "frontier": 0}])
def test_a_frontier_before_1970_is_an_event(mark: dict[str, Any] | None) -> None:
    """Without a position on this timeline every frontier is new; without a frontier there is no event."""
    manifest = _manifest(6, timeline=1)
    moved = manifest.model_copy(update={"decision": {"frontier_after": -5}})
    none_yet = manifest.model_copy(update={"decision": {"frontier_after": TICK_MIN}})
    assert has_new_event("frontier", moved, mark)
    assert not has_new_event("frontier", none_yet, mark)


def test_each_closed_barrier_is_one_event(empty_log: SlotLog) -> None:
    """Also if later epochs without barriers are sealed before the watcher looks again."""
    watcher = SealTrigger(pipeline="p", kind="barrier", every=60.0)
    seal_epoch(empty_log)
    ((before, events),) = watcher.find_events(empty_log, None)
    assert events == []
    closed = [{"id": 1, "outcome": "complete"}, {"id": 2, "outcome": "aborted"}]
    tardy = {**closed[1], "tardy": ["one/0"]}  # its row again: the barrier has closed before
    for barriers in (closed[:1], [], closed[1:], [tardy]):
        seal_epoch(empty_log, barriers=barriers)
    steps = watcher.find_events(empty_log, before)
    found = [(event["barrier"], event["outcome"]) for _, events in steps for event in events]
    assert found == [(1, "complete"), (2, "aborted")]
    assert watcher.find_events(empty_log, steps[-1][0]) == []


def test_a_position_is_saved_once_its_event_was_taken(empty_log: SlotLog) -> None:
    """A triggerer that is killed with an event in its hands loses none."""
    watcher = SealTrigger(pipeline="p", kind="sealed", every=0.0)
    seal_epoch(empty_log)
    saved: list[dict[str, Any]] = []

    async def take_one() -> int:
        events = watcher.run()
        await anext(events)
        before = len(saved)
        with suppress(TimeoutError):
            await asyncio.wait_for(anext(events), 0.2)
        return before

    with (
        patch.object(SealTrigger, "open_store", lambda _: empty_log.store),
        patch.object(SealTrigger, "_load_last_position", lambda _: None),
        patch.object(
            SealTrigger, "_save_last_position", lambda _, position: saved.append(position)
        ),
    ):
        assert asyncio.run(take_one()) == 0
    assert [position["slot"] for position in saved] == [1]


def test_barriers_that_close_again_after_a_restore_are_events_again(empty_log: SlotLog) -> None:
    """The new timeline begins before the last position that was reported."""
    watcher = SealTrigger(pipeline="p", kind="barrier", every=60.0)
    for _ in range(4):
        seal_epoch(empty_log)
    before = watcher.find_events(empty_log, None)[-1][0]
    target = empty_log.read_slot(0, 2)
    assert target is not None
    empty_log.fork(empty_log.head(), target.epoch.id, request_id="r", who="ann", why="")
    seal_epoch(empty_log, barriers=[{"id": 7, "outcome": "complete"}])
    steps = watcher.find_events(empty_log, before)
    assert [event["barrier"] for _, events in steps for event in events] == [7]
