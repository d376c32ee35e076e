"""Requests to a running driver from the command line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.conftest import Cli

from tidegate.checkpoints import driver_requests
from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    RequestKind,
    acknowledge_request,
    list_pending_requests,
)
from tidegate.checkpoints.slot_log import SlotLog


def test_no_answer_arrives(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """Without a driver the request stays, and the error says so."""
    said = cli("abort-barrier", "flights", "7", "--wait", "0")
    assert said.exit_code == 3
    assert "no driver of flights has answered" in said.err
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind, request.barrier) == (RequestKind.ABORT_BARRIER, 7)


def test_a_refusal_is_reported(
    cli: Cli, log: SlotLog, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver refuses ends with exit code 2 and its reason."""
    # The answer is there before the question, whose id is known.
    monkeypatch.setattr(driver_requests, "secrets", SimpleNamespace(token_hex=lambda _: "r1"))
    refused = Ack(id="r1", outcome=AckOutcome.REFUSED, detail="the name is taken", token=1, at=1)
    acknowledge_request(log.store, "flights", refused)
    said = cli("savepoint", "flights", "before", "--wait", "0")
    assert (said.exit_code, "the name is taken" in said.err) == (2, True)


def test_a_cti_names_its_source_and_its_time(cli: Cli, log: SlotLog, spec_file: Path) -> None:
    """A time that is none is refused before anything is asked."""
    assert cli("cti", "flights", "EWR", "noon", "--wait", "0").exit_code == 2
    assert list_pending_requests(log.store, "flights") == []
    assert cli("cti", "flights", "EWR", "1970-01-01T01:00:05+01:00", "--wait", "0").exit_code == 3
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind, request.name, request.time) == (RequestKind.CTI, "EWR", 5_000_000)


def test_requests_without_a_time_can_be_read_by_older_drivers(
    cli: Cli, log: SlotLog, spec_file: Path
) -> None:
    """They refuse fields that they do not know; also `stop` would be one."""
    cli("abort-barrier", "flights", "7", "--and-earlier", "--wait", "0")
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind, request.barrier) == (RequestKind.CANCEL_BARRIERS, 7)
    assert b"time" not in request.to_bytes()


@pytest.mark.parametrize("verb", ["attach", "detach", "resume"])
def test_attachments_are_asked_for_by_name(
    cli: Cli, log: SlotLog, spec_file: Path, verb: str
) -> None:
    """The request waits for a driver."""
    assert cli(verb, "flights", "totals", "--wait", "0").exit_code == 3
    (request,) = list_pending_requests(log.store, "flights")
    assert (request.kind.value, request.name) == (verb, "totals")
