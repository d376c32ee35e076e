"""A start or stop that someone has asked for is shown as such, never as a broken stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operators.history import History, drives, drove
from tests.operators.supervising import HERE, Memory, make_context
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.driver_reports import DriverLog
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.lease import Lease, read_lease
from tidegate.errors import ConfigurationError, TransientError
from tidegate.operators import sweep_operator
from tidegate.operators.driver_shutdown import terminate_driver
from tidegate.operators.page_data import find_transition
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.stream_view import StreamView
from tidegate.operators.sweep_operator import StopOperator

NOW = 1_000_000_000
ASKED = {"state": "run", "who": "ann", "at": NOW - 5_000}
STOPPED = {"state": "stopped", "who": "ann", "at": NOW - 5_000}
REPLACED = {
    "state": "down",
    "desired": {**ASKED, "at": NOW - 999_000},
    "runs": 1,
    "reported_at": NOW - 100,
}
# What the page knows -> the word that it shows instead of the state; None: the state itself.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "just started": ({"state": "down", "desired": ASKED, "runs": 1}, "starting"),
    "started by the command line": ({"state": "down", "desired": ASKED, "runs": 0}, "starting"),
    "restored, the driver is on its way": (
        {"state": "down", "desired": ASKED, "reported_at": NOW - 9_000},
        "starting",
    ),
    "the run waits for its turn": (
        {"state": "stopped", "desired": STOPPED, "runs": 1, "run_since": NOW - 900},
        "starting",
    ),
    "a failed stream is started again": (
        {
            "state": "failed",
            "desired": {**ASKED, "at": NOW - 99_000},
            "reported_at": NOW - 50_000,
            "runs": 1,
            "run_since": NOW - 900,
        },
        "starting",
    ),
    "a driver was lost, and a run replaces it": (REPLACED, "starting"),
    "no run replaces it": ({**REPLACED, "runs": 0}, None),
    "it replaces nothing for three minutes": ({**REPLACED, "reported_at": NOW - 190_000}, None),
    "Airflow cannot read the DAG of the lost driver": ({**REPLACED, "unread": "errors"}, None),
    "a lost driver's DAG is paused": ({**REPLACED, "paused": True}, None),
    "a driver failed, and is replaced": (
        {**REPLACED, "state": "failed", "error": {"class": "transient", "message": "away"}},
        "starting",
    ),
    "a driver failed, and waits for a person": (
        {**REPLACED, "state": "failed", "error": {"class": "poison", "message": "row 7"}},
        None,
    ),
    "nothing came for three minutes": (
        {"state": "down", "desired": {**ASKED, "at": NOW - 190_000}, "runs": 1},
        None,
    ),
    "its DAG is paused": ({"state": "down", "desired": ASKED, "runs": 1, "paused": True}, None),
    "asked to stop": ({"state": "running", "desired": STOPPED}, "stopping"),
    "no one has ever asked": (
        {"state": "running", "desired": {"state": "stopped", "who": "", "at": 0}},
        None,
    ),
    "has stopped": ({"state": "stopped", "desired": STOPPED, "reported_at": NOW - 100}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_an_intended_transition_has_its_own_word(case: str) -> None:
    """Whoever starts, restores or stops a stream does not see it broken meanwhile."""
    row, word = CASES[case]
    assert find_transition(row, NOW).get("state") == word


def test_the_page_says_who_replaces_a_driver() -> None:
    """A red state with a button to start it would invite a person to start a second run."""
    assert find_transition(REPLACED, NOW)["why"] == (
        "its driver is gone: Airflow is replacing the driver"
    )
    failed = {**REPLACED, "state": "failed", "error": {"class": "transient", "message": "away"}}
    assert find_transition(failed, NOW)["why"] == (
        "its driver failed (away): Airflow is replacing the driver"
    )


def test_a_stream_that_was_just_started_is_not_red() -> None:
    """State, tone and reason go together."""
    store = MemoryStore()
    history = History(store, "p")
    history.extend(2)
    drove(store, "p")
    history.says("stopped")
    time.sleep(0.002)  # the report and the wish are compared in milliseconds
    history.wanted(DesiredState.RUN)
    row = StreamView(store, "p").summary(runs=1)
    assert (row["state"], row["tone"]) == ("starting", "warn")
    assert row["why"] == "a driver is being started by ann"


def _stop(reason: str = "maintenance", replace: str = "False", **known: Any) -> dict[str, Any]:
    operator = StopOperator(task_id="stop", pipeline="p", reason=reason, replace=replace, retries=2)
    run = SimpleNamespace(triggering_user_name="uwe")
    return operator.execute({**make_context(**known), "dag_run": run})


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The store that the operator opens."""
    store = MemoryStore()
    monkeypatch.setattr(StoreAccess, "open", lambda _: store)
    monkeypatch.setenv("TIDEGATE_STORE", "s3://bucket")
    return store


def test_a_stop_keeps_the_stream_stopped(bucket: MemoryStore) -> None:
    """Who and why are kept with the wish; without a driver nothing waits."""
    drove(bucket, "p")
    assert _stop()["said"] == "no driver was running"
    desired = read_desired_state(bucket, "p")
    assert (desired.state, desired.who, desired.why) == ("stopped", "uwe", "maintenance")


def test_a_driver_that_hangs_is_replaced(bucket: MemoryStore) -> None:
    """It loses the lease at once, and the stream is still meant to run, so that it goes on."""
    lease = Lease.acquire(bucket, "p", HERE)
    set_desired_state(bucket, "p", DesiredState.RUN, who="ann")
    assert "the lease was taken away" in _stop(replace="True")["said"]
    held = read_lease(bucket, "p")
    assert held is not None
    assert (held.is_free, held.token) == (True, lease.token + 1)
    assert read_desired_state(bucket, "p").state is DesiredState.RUN


@pytest.mark.parametrize("cleared_before", [False, True])
@pytest.mark.parametrize("cleared", [False, True])
def test_a_retry_of_a_replacement_spares_the_next_driver(
    bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, cleared_before: bool, cleared: bool
) -> None:
    """The first try failed after it had ended the driver; a cleared task begins from the start.

    Both hold for a task that was cleared before, too.
    """
    memory, hung = Memory(), Lease.acquire(bucket, "p", HERE)
    begun: dict[str, Any] = {"try_number": 4, "max_tries": 5} if cleared_before else {}
    again: dict[str, Any] = {
        "try_number": begun.get("try_number", 1) + 1,
        "max_tries": begun.get("max_tries", 2) + cleared,
    }
    with monkeypatch.context() as patch:
        patch.setattr(sweep_operator, "terminate_driver", _fail_after(terminate_driver))
        with pytest.raises(TransientError):
            _stop(replace="True", memory=memory, **begun)
    successor = Lease.acquire(bucket, "p", HERE)
    assert successor.token > hung.token
    said = _stop(replace="True", memory=memory, **again)["said"]
    held = read_lease(bucket, "p")
    assert held is not None
    assert held.is_free is cleared
    assert said.startswith("the lease was taken" if cleared else "no driver was running")


def _fail_after(act: Callable[..., Any]) -> Callable[..., Any]:
    def act_and_fail(*given: Any) -> None:
        act(*given)
        raise TransientError("the store is away", code="store.away")

    return act_and_fail


def test_a_stop_does_not_cross_a_restore(bucket: MemoryStore) -> None:
    """The end of the restore would start the stream again, so the stop is refused."""
    keeper = drives(bucket, "p")
    set_desired_state(bucket, "p", DesiredState.RECOVERING, who="ann")
    with pytest.raises(ConfigurationError, match="p is being restored by ann"):
        _stop()
    keeper.stop()
    assert read_desired_state(bucket, "p").state is DesiredState.RECOVERING


def test_the_newest_log_is_shown(tmp_path: Any) -> None:
    """The page shows the end of what the newest driver has sent."""
    store = MemoryStore()
    view = StreamView(store, "p")
    assert view.read_newest_log() == {"attempt": None, "lines": []}
    for attempt, text in (("20260101-a", "old\n"), ("20260102-b", "one\ntwo\n")):
        file = tmp_path / attempt
        file.write_text(text)
        DriverLog(store, "p", attempt, file).send_new_pieces()
    assert view.read_newest_log() == {"attempt": "20260102-b", "lines": ["one", "two"]}
