from __future__ import annotations

import json

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import build_illness_finder


def test_without_checks_nothing_is_held_against_anybody() -> None:
    """A pipeline whose quality was never checked has healthy checkpoints, on every timeline."""
    assert build_illness_finder(MemoryStore(), "p")(CheckpointId(7, 1, "aaaaaa")) is None


@pytest.mark.parametrize(
    ("runs", "well"),
    [
        # Ill epochs 3 and 4, seen by the run at 5: the others are healthy, later ones too.
        ([(5, 2, [("x", 3, 4)])], {1, 2, 5, 6, 7}),
        # The end is ill, so what continues it is.
        ([(5, 2, [("x", 3, 5)])], {1, 2}),
        # A later run has judged its own epochs; what it did not look at keeps its verdict.
        ([(5, 2, [("x", 3, 5)]), (7, 5, [])], {1, 2, 6, 7}),
        # A failure of an epoch before a run's recent ones speaks of no newer checkpoint.
        ([(7, 4, [("x", 1, 1)])], {1, 2, 3, 4, 5, 6, 7}),
        # Two runs looked at one epoch: the later one judges.
        ([(3, 0, [("x", 1, 3)]), (3, 0, [])], {1, 2, 3, 4, 5, 6, 7}),
        # Fails over the whole past, or warns: no critical check about single epochs.
        ([(7, 4, [])], {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_only_checks_about_a_checkpoints_own_epoch_count(
    runs: list[tuple[int, int, list[tuple[str, int, int]]]], well: set[int]
) -> None:
    """Past failures never send a healthy stream back, and an ill end is not gone with one epoch."""
    store = MemoryStore()
    history = [
        {
            "checkpoint": f"t0-{slot:06d}-aaaaaa",
            "verdict": "fail",
            "id": f"run-{number}",
            "recent_since": since,
            "critical": [{"check": c, "epochs": [first, last]} for c, first, last in critical],
        }
        for number, (slot, since, critical) in enumerate(runs)
    ]
    store.put("p/quality/history.json", json.dumps({"runs": history}).encode())
    assert find_healthy(store, 7) == well


def find_healthy(store: MemoryStore, newest: int = 5) -> set[int]:
    """Slots of the first timeline in which the runs find nothing ill."""
    find_illness = build_illness_finder(store, "p")
    slots = range(1, newest + 1)
    return {slot for slot in slots if find_illness(CheckpointId(0, slot, "bbbbbb")) is None}
