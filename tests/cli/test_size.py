"""`tidegate size`: cores for a rate, from the pipeline's own epochs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli, seal

from tidegate.checkpoints.driver_reports import DriverLog
from tidegate.checkpoints.slot_log import SlotLog


def _log_tasks(log: SlotLog, folder: Path) -> None:
    """Two epochs of one row task; the later one is the one that counts."""
    head = log.head().slot
    task = {"cpu": 0.001, "pid": 2, "parent": 1, "memory": 250_000_000}
    lines = [
        json.dumps({"event": "tasks_finished", "job": "read", "slot": slot, "tasks": [task]})
        for slot in (head - 1, head)
    ]
    file = folder / "driver.log"
    file.write_text("\n".join(lines) + "\n")
    DriverLog(log.store, "flights", "20260101T000000-aaaaaa", file).send_new_pieces()


def test_cores_and_what_is_assumed_are_printed(cli: Cli, log: SlotLog, tmp_path: Path) -> None:
    """A rate that one core reaches, and one that none does, with exit code 1."""
    seal(log)
    _log_tasks(log, tmp_path)
    said = cli("size", "flights", "--rows-per-second", "1")
    assert said.exit_code == 0
    assert "flights: 1 epochs, 10 rows each" in said.out
    assert "1 rows/s: 1 core of executors" in said.out
    assert "memory: at most 250 MB in a Python worker" in said.out
    assert "assumed: epochs stay as large as those measured" in said.out
    said = cli("size", "flights", "--rows-per-second", "1000000000")
    assert said.exit_code == 1
    assert "1,000,000,000 rows/s: not reached with 64 cores" in said.out


def test_without_figures_it_says_what_to_do(cli: Cli, log: SlotLog) -> None:
    """No driver has sent a log."""
    said = cli("size", "flights", "--rows-per-second", "1")
    assert said.exit_code == 2
    assert "flights has no epoch whose tasks" in said.err
