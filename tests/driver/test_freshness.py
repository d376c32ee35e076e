"""From arrival to sealed to visible."""

from __future__ import annotations

from tests.engine.harness import SECOND
from tests.manual_clock import ManualClock
from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.driver.status_reporter import FreshnessMeter


def epoch(slot: int, sealed_at: float, **arrived: float) -> Manifest:
    """One whose members read objects that arrived at these seconds."""
    cut = {f"{name}/0": {"arrived": int(at * SECOND)} for name, at in arrived.items()}
    return Manifest.model_construct(
        slot=slot, created_at=int(sealed_at * SECOND), cut={**cut, "topic/0": {}}
    )


def test_an_epoch_is_sealed_and_later_visible() -> None:
    """What no sink shows yet is as old as it is now; then its age no longer grows."""
    clock, waiting = ManualClock(), [1]
    meter = FreshnessMeter(10 * SECOND, lambda: waiting[0], clock)
    begun = clock.wall_ticks() / SECOND
    meter.note_sealed(epoch(1, begun + 2, a=begun - 1, b=begun))
    clock.advance(7.0)
    found = meter.read_facts()
    assert found["freshness"]["a"] == {"sealed": [3.0] * 3, "visible": [8.0] * 3}
    assert found["stale"] == {}
    clock.advance(4.0)
    waiting[0] = 0
    assert meter.read_facts()["stale"] == {"a": 12.0, "b": 11.0}
    clock.advance(100.0)
    found = meter.read_facts()
    assert found["freshness"]["b"] == {"sealed": [2.0] * 3, "visible": [11.0] * 3}
    assert set(found["freshness"]) == {"a", "b"}


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    """Of epochs that took 1 to 200 s: 100, 190 and 198; without a goal no source is stale."""
    meter = FreshnessMeter(None, lambda: 0, ManualClock())
    for slot in range(1, 201):
        meter.note_sealed(epoch(slot, slot, a=0))
    found = meter.read_facts()
    assert (found["freshness"]["a"]["sealed"], found["stale"]) == ([100.0, 190.0, 198.0], {})
