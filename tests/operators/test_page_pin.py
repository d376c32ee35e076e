"""The tasks of the DAGs that pin a checkpoint and abort a barrier, on a local store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.manual_clock import ManualClock
from tests.operators.history import History

from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    RequestKind,
    acknowledge_request,
    list_pending_requests,
)
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.operators import recover_and_pin
from tidegate.operators.recover_and_pin import AbortBarrierOperator, PinOperator


@pytest.fixture
def history(empty_store: Store) -> History:
    """Three epochs in the store that the task will open."""
    found = History(empty_store, "p")
    found.extend(3)
    return found


def run(**params: str) -> dict[str, Any]:
    """The task's result, started by ann."""
    given: dict[str, Any] = {
        "action": "pin",
        "checkpoint": "latest",
        "name": "",
        "reason": "",
        **params,
    }
    task = PinOperator(task_id="pin", pipeline="p", **given)
    return task.execute({"dag_run": SimpleNamespace(triggering_user_name="ann")})


def test_a_pin_keeps_who_and_why(history: History) -> None:
    """The newest checkpoint gets the name.

    Doing it twice changes nothing; unpinning gives it up.
    """
    newest = str(history.log.head().checkpoint)
    assert run(name="good", reason="known")["pins"] == {"good": newest}
    assert run(name="good", reason="known")["pins"] == {"good": newest}
    pin = RootsFile(history.store, "p").read().pins["good"]
    assert (pin.who, pin.why) == ("ann", "known")
    assert run(action="unpin", name="good")["pins"] == {}
    assert run(action="unpin", name="good")["pins"] == {}


def test_a_name_that_is_taken_stays_where_it_is(history: History) -> None:
    """Another checkpoint under the same name, no name, no such checkpoint.

    Refused in a sentence, and nothing is changed.
    """
    before = run(name="good")["pins"]
    history.extend(1)
    with pytest.raises(ConfigurationError, match="'good' already names"):
        run(name="good")
    with pytest.raises(ConfigurationError, match="needs a name"):
        run()
    with pytest.raises(ConfigurationError, match="no such checkpoint"):
        run(name="other", checkpoint="t9-000001-abcdef")
    assert RootsFile(history.store, "p").read().pins["good"].checkpoint == before["good"]


class Driver(ManualClock):
    """A driver that answers the first request while the task waits."""

    def __init__(self, store: Store, outcome: AckOutcome | None) -> None:
        super().__init__()
        self.store, self.outcome = store, outcome

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.outcome is None:
            return
        for request in list_pending_requests(self.store, "p"):
            assert (request.kind, request.barrier) == (RequestKind.ABORT_BARRIER, 7)
            assert (request.who, request.why) == ("ann", "LGA is closed")
            answer = Ack(id=request.id, outcome=self.outcome, detail="why", token=1, at=0)
            acknowledge_request(self.store, "p", answer)


def abort(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> dict[str, Any]:
    """The result of the task that aborts barrier 7."""
    monkeypatch.setattr(recover_and_pin, "SYSTEM_CLOCK", driver)
    task = AbortBarrierOperator(
        task_id="abort_barrier", pipeline="p", barrier="7", reason="LGA is closed"
    )
    asker = SimpleNamespace(triggering_user_name="ann")
    return task.execute({"dag_run": asker, "run_id": "manual__2026-01-01T00:00:00+00:00"})


def test_a_barrier_is_aborted_by_a_request(
    empty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request names who and why, the task waits for the answer, and a retry asks once."""
    driver = Driver(empty_store, AckOutcome.APPLIED)
    assert abort(monkeypatch, driver)["outcome"] == "applied"
    assert abort(monkeypatch, driver)["outcome"] == "applied"
    assert len(list(empty_store.list_objects("p/requests/"))) == 1


def test_an_abort_that_was_not_done_fails_the_task(
    empty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No driver answers, which a retry may find; or the driver refuses."""
    with pytest.raises(TransientError, match="barrier 7 is still open"):
        abort(monkeypatch, Driver(empty_store, None))
    with pytest.raises(ConfigurationError, match="is refused: why"):
        abort(monkeypatch, Driver(empty_store, AckOutcome.REFUSED))
