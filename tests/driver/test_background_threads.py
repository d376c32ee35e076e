"""Threads of the driver outlive errors that no one planned, and scratch does not outlive drivers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.engine.harness import spec_of
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.driver_reports import read_status
from tidegate.checkpoints.lease import Lease, evict_lease_holder
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver import startup
from tidegate.jobs.driver.epoch_listeners import OpenLineageSender
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.driver.status_reporter import STEP_DEADLINES, DriverSteps, StatusReporter


def steps(store: MemoryStore) -> DriverSteps:
    """Steps of a driver that has just taken the lease."""
    clock = ManualClock()
    lease = Lease.acquire(store, "p", ProcessIdentity.this_process(), clock=clock)
    return DriverSteps(lease, 10_000_000, clock)


def test_housekeeping_goes_on_after_an_unexpected_error() -> None:
    """The error is the trouble of the round; the next round clears it."""
    keeper = Housekeeper(spec_of(), SlotLog(MemoryStore(), "p"))
    with patch.object(SlotLog, "head", side_effect=KeyError("misfit")):
        keeper.run_round()
    assert keeper.trouble is not None
    assert keeper.trouble.message == "housekeeping failed with KeyError: 'misfit'"
    keeper.run_round()
    assert keeper.trouble is None


def test_the_lease_is_renewed_after_an_unexpected_error() -> None:
    """A defect of a client library does not let the lease run out under a healthy driver."""
    own = steps(MemoryStore())
    with patch.object(Lease, "renew", side_effect=ValueError("half an answer")):
        own.renew_once()
    assert own.trouble is not None
    assert own.trouble.code == "driver.background_failed"
    own.renew_once()
    assert own.trouble is None
    assert not own.lost.is_set()


def test_the_status_is_written_without_facts_that_cannot_be_read() -> None:
    """The document goes on, so that no one takes the driver for stuck, and says what failed."""
    store = MemoryStore()
    reporter = StatusReporter(store, steps(store), {"pipeline": "p"}, ManualClock())

    def misfit() -> dict[str, Any]:
        raise RuntimeError("dictionary changed size during iteration")

    reporter._read_live_facts = misfit
    reporter.write()
    status = read_status(store, "p")
    assert status is not None
    assert "dictionary changed size" in status.body["trouble"]["message"]


def test_a_driver_that_fails_late_leaves_the_status_of_its_successor() -> None:
    """The successor may have ended: no process would write its last status again."""
    store = MemoryStore()
    stale = StatusReporter(store, steps(store), {"pipeline": "p"}, ManualClock())
    evict_lease_holder(store, "p")
    StatusReporter(store, steps(store), {"pipeline": "p"}, ManualClock()).set_state("finished")
    stale.set_state("failed")
    status = read_status(store, "p")
    assert status is not None
    assert status.body["state"] == "finished"


def test_the_status_says_how_long_a_step_may_take() -> None:
    """An observer can tell a long step from a stuck driver."""
    store = MemoryStore()
    own = steps(store)
    reporter = StatusReporter(store, own, {"pipeline": "p"}, ManualClock())
    with own.measure_step("move"):
        reporter.write()
        status = read_status(store, "p")
    assert status is not None
    assert status.step == "move"
    assert status.body["step_limit"] == STEP_DEADLINES["move"]


def test_lineage_goes_on_after_an_unexpected_error() -> None:
    """An event that the client cannot send does not cost the events after it."""
    sent: list[object] = []

    def emit(event: object) -> None:
        sent.append(event)
        if len(sent) == 1:
            raise RuntimeError("no route")

    sender = OpenLineageSender("tidegate", SimpleNamespace(emit=emit))
    sender.send(lambda: ["first", "second"])  # type: ignore[list-item]
    sender.close(10.0)
    assert sent == ["first", "second"]


def test_the_next_driver_removes_the_scratch_of_a_killed_one(tmp_path: Path) -> None:
    """Only what no one uses: a folder that a live driver has locked stays as it is."""
    with startup.open_work_folder(tmp_path) as work:
        (work / "spark-dead").mkdir()
        (work / "decoded").mkdir()
        (work / "mine").mkdir()
        with startup.open_work_folder(tmp_path):
            assert (work / "spark-dead").exists()
    with startup.open_work_folder(tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "mine"]


def test_temporary_scratch_of_killed_drivers_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder goes if its lock is free and old; others of that name are left alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, young, foreign = (tmp_path / f"tidegate-{name}" for name in ("dead", "young", "foreign"))
    for folder in (dead, young, foreign):
        folder.mkdir()
        (folder / "rows.parquet").touch()
    for folder in (dead, young):
        (folder / ".lock").touch()
    os.utime(dead / ".lock", (0, 0))
    with startup.open_work_folder(None) as live:
        os.utime(live / ".lock", (0, 0))
        with startup.open_work_folder(None) as other:
            assert {p.name for p in tmp_path.iterdir()} == {
                live.name,
                other.name,
                young.name,
                foreign.name,
            }
    assert sorted(p.name for p in tmp_path.iterdir()) == [foreign.name, young.name]
