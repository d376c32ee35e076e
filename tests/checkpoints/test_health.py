from __future__ import annotations

import json

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import build_health_check


@pytest.mark.parametrize(
    ("runs", "well"),
    [
        ([], {1, 2, 3, 4, 5}),
        ([(3, "pass")], {1, 2, 3, 4, 5}),
        ([(3, "fail")], set()),
        ([(2, "pass"), (4, "fail")], {1, 2}),
        ([(2, "fail"), (4, "warn")], {1, 2, 3, 4, 5}),
        ([(2, "pass"), (3, "fail"), (3, "pass")], {1, 2, 3, 4, 5}),
    ],
)
def test_a_run_speaks_for_what_it_looked_at(runs: list[tuple[int, str]], well: set[int]) -> None:
    """A passing run vouches for all before it, a failing one taints all that nobody vouches for."""
    store = MemoryStore()
    history = [
        {"checkpoint": f"t0-{slot:06d}-aaaaaa", "verdict": verdict} for slot, verdict in runs
    ]
    store.put("p/quality/history.json", json.dumps({"runs": history}).encode())
    judge = build_health_check(store, "p")
    assert {slot for slot in range(1, 6) if judge(CheckpointId(0, slot, "bbbbbb"))} == well


def test_without_checks_nothing_is_held_against_anybody() -> None:
    """A pipeline whose quality was never checked has healthy checkpoints, on every timeline."""
    assert build_health_check(MemoryStore(), "p")(CheckpointId(7, 1, "aaaaaa"))
