"""`tidegate alerts`: a test message for each receiver, and what is due."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import SPEC, Cli
from tests.servers.alert_receivers import running

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.slot_log import SlotLog

ALERTS = """\
supervision:
  alerts:
    slack: env:SLACK_WEBHOOK_URL
    alertmanager: env:ALERTMANAGER_URL
"""


def test_each_receiver_is_tried(
    cli: Cli, log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses, or whose variable is not set, is named, and ends with its exit code."""
    spec = tmp_path / "flights.yaml"
    spec.write_text(SPEC)
    assert cli("alerts", "test", str(spec)).exit_code == 2
    spec.write_text(SPEC + ALERTS)
    with running() as receivers:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", receivers.environment["SLACK_WEBHOOK_URL"])
        monkeypatch.setenv("ALERTMANAGER_URL", receivers.url)
        said = cli("alerts", "test", str(spec))
        assert (said.exit_code, said.out.count(": sent [critical] flights: this is a test")) == (
            0,
            2,
        )
        assert len(receivers.taken) == 4
        labels = [body[0]["labels"] for path, body in receivers.taken if path.endswith("/alerts")]
        assert [one["alertname"] for one in labels] == ["tidegate_test"] * 2
        receivers.answers = [403]
        said = cli("alerts", "test", str(spec))
        assert (said.exit_code, "env:SLACK_WEBHOOK_URL (it answered 403)" in said.err) == (3, True)
        monkeypatch.delenv("SLACK_WEBHOOK_URL")
        said = cli("alerts", "test", str(spec))
        assert (said.exit_code, "SLACK_WEBHOOK_URL is not set" in said.err) == (2, True)
    assert receivers.refused == []


def test_what_is_due_is_sent_by_hand(
    cli: Cli, log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by cron for example, without Airflow and without a driver."""
    spec = tmp_path / "flights.yaml"
    spec.write_text(SPEC + "supervision: {alerts: {slack: env:SLACK_WEBHOOK_URL}}\n")
    error = {"class": "poison", "code": "c", "message": "row 7"}
    body = {"state": "failed", "error": error}
    write_status(log.store, "flights", DriverStatus(token=1, driver="d", step="x", at=1, body=body))
    with running() as receivers:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", receivers.environment["SLACK_WEBHOOK_URL"])
        said = [cli("alerts", "send", str(spec)) for _ in range(2)]
    assert [one.out for one in said] == ["slack: sent [critical] flights: row 7 (c)\n", ""]
    assert len(receivers.taken) == 1
