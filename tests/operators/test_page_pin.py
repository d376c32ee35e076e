"""The pin DAG's task on a local store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.operators.history import History

from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.operators.recover_and_pin import PinOperator


@pytest.fixture
def history(empty_store: Store) -> History:
    """Three epochs in the store that the task will open."""
    found = History(empty_store, "p")
    found.extend(3)
    return found


def run(**params: str) -> dict[str, Any]:
    """The task's result, started by ann."""
    given = {"action": "pin", "checkpoint": "latest", "name": "", "reason": "", **params}
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
