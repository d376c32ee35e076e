"""A plan against a log takes a bounded number of requests, however long the log is."""

from __future__ import annotations

from tests.operators.history import History, make_spec
from tests.servers.memory_store import MemoryStore, StoreRequest

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.checkpoint_specs import plan_against_log
from tidegate.checkpoints.slot_log import SlotLog

MOST_REQUESTS = 600
"""At 3 ms a request, these are the two seconds that `tidegate plan` may take."""


def test_a_refused_change_is_planned_in_a_bounded_number_of_requests() -> None:
    """It also looks for a checkpoint that fits, which is the longest search of a plan."""
    asked: list[str] = []

    def note(request: StoreRequest) -> None:
        asked.append(request.key)

    store = MemoryStore()
    history = History(store, "p", ("a",))
    history.extend(220)
    key = BucketLayout("p").spec_key("s")
    store.put(key, make_spec("p", ["a"]).canonical_json().encode())
    changed = make_spec("p", ["a"]).model_dump(mode="json", by_alias=True)
    changed["windows"]["hourly"]["size"] = "2h"
    spec = type(make_spec("p", ["a"])).model_validate(changed)
    plan = plan_against_log(SlotLog(MemoryStore(store.bucket, hook=note), "p"), spec)
    assert plan.exit_code == 11
    assert 10 < len(asked) < MOST_REQUESTS
