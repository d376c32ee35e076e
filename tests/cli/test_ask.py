"""Requests to a running driver from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    RequestKind,
    acknowledge_request,
    list_pending_requests,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.cli.run_commands import _await_answer


def test_nobody_answers(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """Without a driver the request stays, and the error says so."""
    said = cli("abort-barrier", "flights", "7", "--wait", "0")
    assert said.exit_code == 3
    assert "no driver of flights has answered" in said.err
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind, request.barrier) == (RequestKind.ABORT_BARRIER, 7)


def test_a_refusal_is_told(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """What the driver refuses ends with exit code 2 and its reason."""
    cli("savepoint", "flights", "before", "--wait", "0")
    (request,) = list_pending_requests(log.store, "flights")
    refused = Ack(
        id=request.id, outcome=AckOutcome.REFUSED, detail="the name is taken", token=1, at=1
    )
    acknowledge_request(log.store, "flights", refused)
    with pytest.raises(ConfigurationError, match="the name is taken"):
        _await_answer(log, request, 0.0)


@pytest.mark.parametrize("verb", ["attach", "detach", "resume"])
def test_attachments_are_asked_for_by_name(
    cli: Cli, log: SlotLog, spec_file: Path, verb: str
) -> None:
    """The request waits for a driver."""
    assert cli(verb, "flights", "totals", "--wait", "0").exit_code == 3
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind.value, request.name) == (verb, "totals")
