"""What Airflow's side did in commit e3dab94, by its own names: each test says what should hold."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.operators.history import History
from tests.operators.supervising import (
    HERE,
    NotingLauncher,
    execute_stream,
    make_context,
    make_event,
    make_operator,
)
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_overview import DriverOverview
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.operators import stream_operator, trigger
from tidegate.operators.page_data import describe_frontier_holder, diagnose_stream
from tidegate.operators.pipeline_operator import PipelineTrigger
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.stream_operator import RelaunchBudget
from tidegate.operators.sweep_operator import SweepOperator, SweepReportOperator
from tidegate.operators.trigger import StreamTrigger

_MANY = 60  # more than a default pool of threads has on any machine
_PATIENCE = 10.0  # seconds
NOW = 1_800_000_000_000


@pytest.fixture
def store(empty_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """A bucket of its own per test, and no process is ever started."""
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(NotingLauncher, "started", [])
    monkeypatch.setattr(stream_operator, "launch_driver", NotingLauncher.launch)
    return empty_store


def test_newcomer_1(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that went on after the look that found it stalled is not ended."""
    ended: list[int] = []
    monkeypatch.setattr(
        stream_operator, "terminate_driver", lambda _store, _name, token, _say: ended.append(token)
    )
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    lease = Lease.acquire(store, "p", HERE)
    body = {"state": "running", "step_since": 2}
    write_status(
        store, "p", DriverStatus(token=lease.token, driver="d", step="wait", at=0, body=body)
    )
    with pytest.raises(TaskDeferred):
        make_operator().resume(
            make_context(), make_event("stalled", {}), None, asdict(RelaunchBudget())
        )
    assert ended == []


def test_ops_v1(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start deletes no document: the documented keys may not."""
    deleted: list[str] = []
    monkeypatch.setattr(type(store), "delete", lambda _, key: deleted.append(key))
    execute_stream()
    assert deleted == []


def test_newcomer_9() -> None:
    """The holder is that of the frontiers shown, not of a report of another moment."""
    body = {"holder": {"member": "JFK/0", "why": "no data", "since": 1}}
    driver = DriverOverview(None, DriverStatus(token=1, driver="d", step="x", at=0, body=body))
    store = MemoryStore()
    History(store, "p").extend(1)
    shown = describe_frontier_holder(driver, SlotLog(store, "p").head().record)
    assert shown is not None
    assert shown["member"] == "EWR/0"


def _list_findings(**facts: Any) -> list[str]:
    row = {
        "state": "running",
        "why": "",
        "sealed_at": NOW - 1000,
        "unpublished": 0,
        "silent": {},
        "stale": {},
        "warnings": [],
        "trouble": None,
        "quality": None,
    }
    return [str(one) for one in diagnose_stream({**row, **facts}, NOW)]


def test_ops_q5() -> None:
    """A verdict of a year ago is old while epochs are sealed."""
    verdict = {"at": "2026-01-01T00:00:00Z", "verdict": "pass", "checkpoint": "t0", "failed": []}
    assert _list_findings(quality=verdict) != []


def test_ops_v12() -> None:
    """A job seals nothing without data, so its newest checkpoint is not old."""
    old = {"sealed_at": NOW - 18_000_000}
    assert len(_list_findings(**old)) == 1
    assert _list_findings(**old, queries={"q": {"batch": 7}}) == []


def test_newcomer_4() -> None:
    """The page says how many keys its chart leaves out; the answer has had the number."""
    script = Path(__file__).parents[2] / "operators" / "web" / "results.js"
    assert "left_out" in script.read_text("utf-8")


def _sweep(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Look at three pipelines, and report; the streams to start."""
    monkeypatch.setattr(StoreAccess, "resolve", lambda _: SimpleNamespace(open=lambda: store))
    kept: dict[str, Any] = {}
    task = SimpleNamespace(
        get_dr_count=lambda **_: 0,
        xcom_push=lambda key, value: kept.update({key: value}),
        xcom_pull=lambda task_ids, key: kept[key],
    )
    look = SweepOperator(task_id="look", pipelines=["a", "b", "c"])
    started = look.execute({"ti": task})
    SweepReportOperator(task_id="report").execute({"ti": task})
    return list(started)


def test_ops_v3(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that cannot be reached fails the sweep's report."""
    with pytest.raises(TidegateError):
        _sweep(MemoryStore(hook=lambda _: Fault.REFUSED), monkeypatch)


def test_ops_v11(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep asks the pipelines side by side: their first requests meet."""
    bucket, asked, lock = MemoryBucket(), set[str](), threading.Lock()
    for name in ("a", "b", "c"):
        set_desired_state(MemoryStore(bucket), name, DesiredState.RUN, who="ann")
    together, alone = threading.Barrier(3), list[str]()

    def meet(request: StoreRequest) -> None:
        name = request.key[0]
        with lock:
            is_first = name not in asked
            asked.add(name)
        if is_first:
            try:
                together.wait(_PATIENCE / 10)
            except threading.BrokenBarrierError:
                alone.append(name)

    assert len(_sweep(MemoryStore(bucket, hook=meet), monkeypatch)) == 3
    assert alone == []


def test_ops_v4(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs starves no look at another."""
    returned, good = threading.Event(), MemoryStore()

    def hang(_: StoreRequest) -> Fault:
        returned.wait()
        return Fault.REFUSED

    bad = MemoryStore(hook=hang)
    Lease.acquire(good, "good", HERE)
    monkeypatch.setattr(trigger, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(
        PipelineTrigger, "open_store", lambda self: good if self.pipeline == "good" else bad
    )

    async def watch(name: str) -> Any:
        return await anext(StreamTrigger(pipeline=name, floor=1, due=0).run())

    async def main() -> Any:
        waiting = [asyncio.create_task(watch(f"bad{n}")) for n in range(_MANY)]
        try:
            await asyncio.sleep(1)
            return await asyncio.wait_for(watch("good"), _PATIENCE)
        except TimeoutError:
            return None
        finally:
            returned.set()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    assert asyncio.run(main()) is not None, "no look at the other store"
