"""The driver's loop while the store or the disk refuses what the driver asks."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from tests.driver.loop_rig import LoopRig
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import PoisonError, TidegateError
from tidegate.jobs.driver.epoch_loop import EndConditions
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.engine.epoch_engine import EpochReport


def test_an_outage_is_not_silence() -> None:
    """`--until-idle` does not end a run on the ground of time in which the store was away."""
    rig = LoopRig(until=EndConditions(idle=0.5))
    rig.feed(1, 2, 3)
    failures: list[int] = []

    def hook(request: StoreRequest) -> Fault | None:
        if threading.current_thread() is not threading.main_thread():
            return None
        failures.append(1)
        return Fault.REFUSED if len(failures) <= 3 else None

    troubles: list[TidegateError | None] = []
    rig.between = lambda _: troubles.append(rig.loop.trouble)
    assert isinstance(rig.bench.store, MemoryStore)
    rig.bench.store.hook = hook
    outcome = rig.run()
    assert (outcome.why, outcome.trouble) == ("no row for 0.5 s", None)
    assert (troubles[0] is None, troubles[-1]) == (False, None)
    assert rig.bench.epochs()[-1].counters.read == 6


def _deny(rig: LoopRig, seconds: float) -> None:
    """The store refuses the driver's main thread from the second epoch on, for some seconds."""
    begun: list[float] = []

    def hook(request: StoreRequest) -> Fault | None:
        if threading.current_thread() is not threading.main_thread() or not rig.reports:
            return None
        now = rig.bench.clock.monotonic()
        begun.append(now)
        if now - begun[0] < seconds:
            raise StoreDeniedError("403 ExpiredToken", code="store.denied")
        return None

    assert isinstance(rig.bench.store, MemoryStore)
    rig.bench.store.hook = hook


def test_a_store_that_refuses_a_running_driver_is_waited_for() -> None:
    """Keys that expire, or a policy that is rolled out, do not end a running stream."""
    rig = LoopRig(until=EndConditions(epochs=2))
    rig.feed(1)
    rig.between = lambda number: rig.feed(number + 1)
    _deny(rig, 300.0)
    assert rig.run().why == "2 epochs were asked for"
    assert ("waiting", "trying again by itself, for 10 minutes") in rig.status.said


def test_a_store_that_goes_on_refusing_ends_the_run() -> None:
    """A key that was withdrawn is an error of the configuration after ten minutes."""
    rig = LoopRig()
    rig.feed(1)
    _deny(rig, float("inf"))
    begun = rig.bench.clock.monotonic()
    with pytest.raises(StoreDeniedError, match="ExpiredToken"):
        rig.run()
    assert 600.0 <= rig.bench.clock.monotonic() - begun <= 700.0


def test_time_in_which_no_one_asked_is_no_refusal() -> None:
    """A host that slept for hours between two refusals has not been refused for hours."""
    rig = LoopRig(until=EndConditions(epochs=2))
    rig.feed(1)
    rig.between = lambda number: rig.feed(number + 1)
    _deny(rig, 30.0 + 4 * 3600.0)
    wait, slept = rig.stop.wait, list[float]()

    def sleep_once(seconds: float | None = None) -> bool:
        if rig.status.state == "waiting" and not slept:
            slept.append(4 * 3600.0)
            rig.bench.clock.advance(slept[0])
        return wait(seconds)

    rig.stop.wait = sleep_once  # type: ignore[method-assign, assignment]
    assert rig.run().why == "2 epochs were asked for"


def test_a_run_that_is_stopped_while_the_disk_is_full_says_so() -> None:
    """Otherwise it looks as if there had been nothing to read."""
    rig = LoopRig()
    rig.feed(1)
    wait = rig.stop.wait

    def fill_disk(*_asked: Any, **_named: Any) -> EpochReport:
        raise OSError(errno.ENOSPC, "No space left on device", "/scratch")

    def stop_after_trouble(seconds: float | None = None) -> bool:
        rig.stop.set()
        return wait(seconds)

    rig.engine.run_epoch = fill_disk  # type: ignore[method-assign]
    rig.stop.wait = stop_after_trouble  # type: ignore[method-assign, assignment]
    trouble = rig.run().trouble
    assert trouble is not None
    assert trouble.code == "driver.disk_full"


def test_what_is_met_behind_a_full_disk_is_not_taken_for_one() -> None:
    """The head that is read again after the wait is damaged; that needs a person, not room."""
    rig = LoopRig()
    rig.feed(1)
    run_epoch = rig.engine.run_epoch

    def fill_disk_behind_epoch(*asked: Any, **named: Any) -> EpochReport:
        if rig.reports:
            rig.bench.store.put(rig.bench.log.layout.slot_key(0, 1), b"{")
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch")
        return run_epoch(*asked, **named)

    rig.engine.run_epoch = fill_disk_behind_epoch  # type: ignore[method-assign]
    with pytest.raises(PoisonError) as raised:
        rig.run()
    assert classify_error("p", raised.value).code == "manifest.malformed"
