"""The maintenance of a bucket, step by step, on a local store.

The retention's process is only noted.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.epochs import checkpoint_id, seal_epoch

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.verify import SCRUB_EVERY, Verification, is_scrub_due
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.operators import child_operators, child_processes
from tidegate.operators.child_operators import MaintainOperator

FILES = {"events": {"before": 9, "after": 2}}
REPORT = {
    "kind": "gc",
    "data": {
        "retired": ["t0-000001-aa"],
        "deleted": ["x", "y"],
        "deleted_bytes": 7,
        "compacted": FILES,
    },
}


@pytest.fixture
def log(empty_log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> SlotLog:
    """Twenty epochs; the answer of the retention's process is good."""
    _answer(monkeypatch, 0, json.dumps(REPORT))
    for _ in range(20):
        seal_epoch(empty_log)
    return empty_log


def _answer(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str = "", err: str = ""
) -> list[list[str]]:
    said: list[list[str]] = []

    def run(_access: Any, command: list[str], **_: Any) -> Any:
        said.append(command)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(child_processes, "run_child", run)
    return said


def _run() -> dict[str, Any]:
    return MaintainOperator(task_id="maintain", pipeline="p", spec="p.yaml").execute({})


def test_a_good_run_says_what_it_did(log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retired, deleted, scrubbed, forgotten; keys of the bucket are no argument of the process."""
    said = _answer(monkeypatch, 0, json.dumps(REPORT))
    found = _run()
    assert (found["retired"], found["deleted"], found["deleted_bytes"]) == (1, 2, 7)
    assert (found["data_files_before"], found["data_files_after"]) == (9, 2)
    assert found["scrubbed"] == 20
    assert not is_scrub_due(log, SYSTEM_CLOCK.wall_ticks())  # the driver need not do it as well
    assert said[0][4:7] == ["gc", "p.yaml", "--store"]
    assert "--keep-hours" not in said[0]  # the spec's `checkpoint.retain_for` decides


def test_airflow_and_driver_read_the_same_share_of_a_day(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a share is skipped when the two take turns."""
    _answer(monkeypatch, 0, json.dumps(REPORT))
    days: list[int] = []

    def select(_: SlotLog, _shares: int, day: int) -> list[Any]:
        days.append(day)
        return []

    monkeypatch.setattr(child_operators, "select_for_scrub", select)
    monkeypatch.setattr(type(SYSTEM_CLOCK), "wall_ticks", lambda _: 20_000 * SCRUB_EVERY + 5)
    _run()
    assert days == [20_000]  # what the driver takes (jobs/driver/housekeeping.py)


def test_a_damaged_checkpoint_turns_the_run_red(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is condemned, named, and no longer offered; the rest of the work is done."""
    bad = checkpoint_id(log, 20)

    def scrub(_: SlotLog, chosen: list[Any]) -> list[Verification]:
        finding = {"key": "p/x.parquet", "problem": "missing", "detail": ""}
        found = {
            "checkpoint": bad,
            "verdict": "damaged",
            "findings": [finding],
            "objects": 1,
            "bytes": 1,
            "checksums": True,
            "deep": False,
        }
        return [Verification.model_validate(found)]

    monkeypatch.setattr(child_operators, "scrub_checkpoints", scrub)
    with pytest.raises(
        PoisonError, match=r"1 checkpoint\(s\) of p are damaged: .*missing: p/x.parquet"
    ):
        _run()
    assert bad in RootsFile(log.store, "p").read().condemned


@pytest.mark.parametrize(
    ("code", "kind"), [(2, ConfigurationError), (3, TransientError), (-9, TransientError)]
)
def test_a_retention_that_cannot_run_says_why(
    log: SlotLog, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """Its exit code is the class of the failure, its last line the message."""
    _answer(monkeypatch, code, err="something\nthe store is away")
    with pytest.raises(kind, match="the store is away"):
        _run()


def test_an_empty_stream_needs_nothing(empty_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sealed: no process is started."""
    said = _answer(monkeypatch, 1)
    assert _run() == {"pipeline": "p"}
    assert said == []
