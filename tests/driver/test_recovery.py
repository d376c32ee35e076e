"""Where a driver goes on from, by `supervision.recover_to`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.epochs import seal_epoch
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.driver.startup import select_start_checkpoint
from tidegate.jobs.spec.loader import parse_spec

SPEC = parse_spec(
    "{apiVersion: tidegate/v1, name: p, sources: {one: {path: inbox, schema: {at: timestamp},"
    " event_time: at, lag: 1m}}}"
)


@pytest.fixture
def log() -> SlotLog:
    """Six epochs without files."""
    log = SlotLog(MemoryStore(), "p")
    for _ in range(6):
        seal_epoch(log)
    return log


def _checked(log: SlotLog, **verdicts: str) -> None:
    """Quality runs: `s4="fail"` is one that looked at slot 4."""
    runs: list[dict[str, Any]] = []
    seen = 0
    for name, verdict in verdicts.items():
        slot = int(name[1:])
        filled = log.read_slot(0, slot)
        assert filled is not None
        failed = [{"check": "late_ratio", "epochs": [seen + 1, slot]}]
        critical = failed if verdict == "fail" else []
        run = {"id": name, "checkpoint": str(filled.epoch.id), "verdict": verdict}
        runs.append({**run, "recent_since": seen, "critical": critical})
        seen = slot
    log.store.put("p/quality/history.json", json.dumps({"runs": runs}).encode())


def _settle(log: SlotLog, recover_to: str) -> tuple[int, int]:
    lease = Lease.acquire(log.store, "p", ProcessIdentity.this_process())
    try:
        select_start_checkpoint(SPEC, log, lease, recover_to)
    finally:
        lease.release()
    head = log.head()
    return head.timeline, head.slot


def test_latest_goes_on_after_the_newest(log: SlotLog) -> None:
    """Whatever the checks said: only a damaged checkpoint is passed over."""
    _checked(log, s4="fail")
    assert _settle(log, "latest") == (0, 6)


def test_latest_healthy_goes_back_before_what_failed(log: SlotLog) -> None:
    """The newest checkpoint that a good run speaks for; a fork that says why, never silent."""
    _checked(log, s3="pass", s5="fail")
    assert _settle(log, "latest_healthy") == (1, 3)
    (fork,) = log.list_forks()
    assert fork.why == "started with recover_to=latest_healthy"


def test_latest_healthy_goes_back_once(log: SlotLog) -> None:
    """The next driver finds the new timeline healthy and goes on.

    A stream that is lost again and again loses no more.
    """
    _checked(log, s3="pass", s5="fail")
    for _ in range(3):
        assert _settle(log, "latest_healthy") == (1, 3)
    assert len(log.list_forks()) == 1


def test_without_failed_checks_latest_healthy_is_latest(log: SlotLog) -> None:
    """Nothing is held against what no one checked, or what passed with warnings."""
    assert _settle(log, "latest_healthy") == (0, 6)
    _checked(log, s4="warn")
    assert _settle(log, "latest_healthy") == (0, 6)
    assert log.list_forks() == []


def test_when_everything_failed_a_person_has_to_look(log: SlotLog) -> None:
    """No checkpoint is healthy: the driver names the check instead of beginning from nothing."""
    name = str(log.head().checkpoint)
    critical = [{"check": "late_ratio_critical", "epochs": [1, 6]}]
    run = {"id": "1", "checkpoint": name, "recent_since": 0, "critical": critical}
    log.store.put("p/quality/history.json", json.dumps({"runs": [run]}).encode())
    with pytest.raises(
        ConfigurationError, match="late_ratio_critical failed for epochs 1 to 6"
    ) as e:
        _settle(log, "latest_healthy")
    assert "recover_to: latest" in str(e.value.advice)
