"""One store that hangs holds up no look at another, and the sweep reports it within minutes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.manual_clock import ManualClock
from tests.operators.clocks import World
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import NotFoundError, Store, StoreUnavailableError
from tidegate.errors import PoisonError
from tidegate.operators import sweep_operator, trigger
from tidegate.operators.assets import SealTrigger
from tidegate.operators.pipeline_operator import PipelineTrigger
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.store_guard import wrap_store
from tidegate.operators.sweep_operator import SweepOperator, SweepReportOperator
from tidegate.operators.trigger import EpochTrigger, StreamTrigger

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)
MANY = 60  # more than a default pool of threads has on any machine


@pytest.mark.parametrize("ask", ["get", "list"])
def test_a_store_that_gives_no_answer_is_left_alone_for_a_while(ask: str) -> None:
    """After three failures in a row each request fails at once, until five seconds have passed."""
    clock, asked, away = ManualClock(), [0], [True]

    def count(_: StoreRequest) -> Fault | None:
        asked[0] += 1
        return Fault.REFUSED if away[0] else None

    store = wrap_store(MemoryStore(hook=count), clock)

    def fails() -> bool:
        try:
            store.get("x") if ask == "get" else list(store.list_objects("x"))
        except StoreUnavailableError:
            return True
        except NotFoundError:
            return False
        return False

    assert [fails() for _ in range(5)] == [True] * 5
    assert asked == [3]
    clock.advance(5)
    assert [fails() for _ in range(3)] == [True] * 3
    assert asked == [4]
    clock.advance(5)
    away[0] = False
    assert not fails()
    away[0] = True
    assert fails()
    away[0] = False
    assert not fails()


def _make_triggers() -> dict[str, Callable[[str], PipelineTrigger]]:
    return {
        "stream": lambda name: StreamTrigger(pipeline=name, floor=1, due=SYSTEM_CLOCK.wall_ticks()),
        "epoch": lambda name: EpochTrigger(
            pipeline=name, timeline=1, result={}, patience=9_999.0, begins_within=0.0
        ),
        "asset": lambda name: SealTrigger(pipeline=name, kind="sealed", every=0.0),
    }


@pytest.mark.parametrize("kind", ["stream", "epoch", "asset"])
def test_a_store_that_hangs_starves_no_look_at_another(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its looks wait in threads of their own, however many streams it has."""
    returned, good = threading.Event(), MemoryStore()

    def hang(_: StoreRequest) -> Fault:
        returned.wait()
        return Fault.REFUSED

    bad = MemoryStore(hook=hang)
    Lease.acquire(good, "good", ELSEWHERE)
    monkeypatch.setattr(trigger, "read_settle_seconds", lambda: 0.0)
    monkeypatch.setattr(
        PipelineTrigger, "open_store", lambda self: good if self.pipeline == "good" else bad
    )
    monkeypatch.setattr(SealTrigger, "_load_last_position", lambda _: None)
    make = _make_triggers()["stream"]

    async def watch(one: PipelineTrigger) -> Any:
        return await anext(one.run())

    async def main() -> Any:
        hanging = _make_triggers()[kind]
        waiting = [asyncio.create_task(watch(hanging(f"bad{n}"))) for n in range(MANY)]
        try:
            await asyncio.sleep(0)
            return await asyncio.wait_for(watch(make("good")), 120)
        finally:
            returned.set()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    assert asyncio.run(main()).payload["state"] == "live"


def _sweep(store: Store, monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> list[str]:
    """Look at three pipelines, and report; the streams to start."""
    monkeypatch.setattr(StoreAccess, "resolve", lambda _: SimpleNamespace(open=lambda: store))
    monkeypatch.setattr(sweep_operator, "SYSTEM_CLOCK", clock)
    kept: dict[str, Any] = {}
    task = SimpleNamespace(
        get_dr_count=lambda **_: 0,
        xcom_push=lambda key, value: kept.update({key: value}),
        xcom_pull=lambda task_ids, key: kept[key],
    )
    names = ["a", "b", "c"]
    started = SweepOperator(task_id="look", pipelines=names).execute({"ti": task})
    SweepReportOperator(task_id="report").execute({"ti": task})
    return list(started)


def _wish_all(bucket: MemoryBucket) -> None:
    for name in ("a", "b", "c"):
        set_desired_state(MemoryStore(bucket), name, DesiredState.RUN, who="ann")


def test_a_store_that_cannot_be_reached_turns_the_sweep_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, after a second look a minute later; nothing is touched."""
    bucket, clock = MemoryBucket(), ManualClock()
    _wish_all(bucket)
    before = dict(bucket.objects)
    begun = clock.monotonic()
    with pytest.raises(PoisonError, match=r"could not judge a, b, c: a: .*could not be reached"):
        _sweep(MemoryStore(bucket, hook=lambda _: Fault.REFUSED), monkeypatch, clock)
    assert clock.monotonic() - begun == 60
    assert bucket.objects == before


def test_a_store_that_comes_back_within_a_minute_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the streams are started as ever."""
    bucket, away = MemoryBucket(), [True]
    _wish_all(bucket)
    store = MemoryStore(bucket, hook=lambda _: Fault.REFUSED if away[0] else None)
    monkeypatch.setattr(sweep_operator, "wrap_store", lambda store: store)
    started = _sweep(store, monkeypatch, World(lambda: away.__setitem__(0, False)))
    assert started == ["a.stream", "b.stream", "c.stream"]
    assert read_desired_state(store, "a").state is DesiredState.RUN


def test_the_sweep_asks_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pipeline's first request is answered only when all three have been sent."""
    bucket, asked, lock = MemoryBucket(), set[str](), threading.Lock()
    _wish_all(bucket)
    together = threading.Barrier(3, timeout=120)

    def meet(request: StoreRequest) -> None:
        with lock:
            is_first = request.key[0] not in asked
            asked.add(request.key[0])
        if is_first:
            together.wait()

    assert len(_sweep(MemoryStore(bucket, hook=meet), monkeypatch, ManualClock())) == 3
