"""The end of a driver's log on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.conftest import Cli

from tidegate.checkpoints.driver_reports import DriverLog
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.cli import output

OLD, NEW = "20260101T000000-aaaaaa", "20260102T000000-bbbbbb"


def _sent(log: SlotLog, tmp_path: Path) -> None:
    for attempt in (OLD, NEW):
        file = tmp_path / f"{attempt}.log"
        file.write_text("".join(f"{attempt} line {number}\n" for number in range(100)))
        DriverLog(log.store, "flights", attempt, file).send_new_pieces()


def test_the_driver_started_last_is_shown(cli: Cli, log: SlotLog, tmp_path: Path) -> None:
    """Its last lines; another one by its name; all names on demand."""
    _sent(log, tmp_path)
    assert cli("logs", "flights", "-n", "2").out.splitlines() == [
        f"{NEW} line 98",
        f"{NEW} line 99",
    ]
    assert cli("logs", "flights", "--attempt", OLD, "-n", "1", "--json").data == {
        "attempt": OLD,
        "lines": [f"{OLD} line 99"],
    }
    assert cli("logs", "flights", "--attempts").out.split() == [NEW, OLD]


def test_lines_stay_as_they_were_written(
    cli: Cli, log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also long ones on a narrow terminal, so that what is copied from it is what was logged."""
    monkeypatch.setattr(output, "console", lambda **_: Console(width=20))
    line = '{"event": "sealed", "at": "12:b:3", "sink": "[a]"}'
    (tmp_path / "a.log").write_text(f"{line}\n")
    DriverLog(log.store, "flights", NEW, tmp_path / "a.log").send_new_pieces()
    assert cli("logs", "flights").out == f"{line}\n"


def test_no_log_says_why(cli: Cli, log: SlotLog, tmp_path: Path) -> None:
    """Before a driver sent one, and for a name that is not kept."""
    said = cli("logs", "flights")
    assert (said.exit_code, "ten seconds after its start" in said.err) == (2, True)
    _sent(log, tmp_path)
    said = cli("logs", "flights", "--attempt", "other")
    assert (said.exit_code, NEW in said.err) == (2, True)
