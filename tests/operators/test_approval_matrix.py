"""Who may approve a restore, by how people are known to Airflow: `make matrices` prints the table."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowSkipException
from tests.epochs import checkpoint_id
from tests.operators.asking import Asking

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError

IDENTITIES = {
    "id is the name": {"ann": "ann", "olga": "olga"},
    "number (FAB)": {"ann": "7", "olga": "8"},
    "UUID (Keycloak)": {"ann": "5b0c8d1e", "olga": "91f4c2aa"},
}
# What happens -> whether the restore may follow; ann has asked for it.
ANSWERS = {
    "the asker approves": False,
    "the asker is on the list": False,
    "another person approves": True,
    "approver listed by name": True,
    "approver listed by id": True,
    "not on the list": False,
    "result forged by XCom": False,
    "rejected": False,
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("identity", IDENTITIES)
def test_only_another_person_approves(identity: str, answer: str, log: SlotLog) -> None:
    """An approval counts if someone else gave it who is on the list, and only as recorded."""
    ids = IDENTITIES[identity]
    asking = Asking()
    asking.report(checkpoint_id(log, 3))
    by = "ann" if answer.startswith("the asker") else "olga"
    if answer == "result forged by XCom":
        user = {"id": ids[by], "name": by}
        asking.results["approve"] = {"chosen_options": ["Approve"], "responded_by_user": user}
    else:
        asking.answer("Reject" if answer == "rejected" else "Approve", by, user_id=ids[by])
    approvers = {
        "the asker is on the list": ("ann", "olga"),
        "approver listed by name": ("olga",),
        "approver listed by id": (ids["olga"],),
        "not on the list": ("uwe",),
    }.get(answer, ())
    if ANSWERS[answer]:
        asking.recover(approvers=approvers)
    else:
        with pytest.raises((ConfigurationError, AirflowSkipException)):
            asking.recover(approvers=approvers)
    assert len(log.list_forks()) == ANSWERS[answer]
