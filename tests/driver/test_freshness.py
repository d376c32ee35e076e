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


def seal_at(meter: FreshnessMeter, clock: ManualClock, slot: int, wait: float) -> None:
    """Seal an epoch now whose rows have waited."""
    now = clock.wall_ticks() / SECOND
    meter.note_sealed(epoch(slot, now, a=now - wait))


def test_a_backlog_at_the_start_is_over_when_the_driver_has_caught_up() -> None:
    """Files that lay there for minutes say nothing about the rows that arrive now."""
    clock = ManualClock()
    meter = FreshnessMeter(10 * SECOND, lambda: 0, clock)
    for slot in range(1, 11):
        seal_at(meter, clock, slot, 600.0)
        assert meter.read_facts()["stale"] == {"a": 600.0}
        clock.advance(2.0)
    seal_at(meter, clock, 11, 3.0)
    found = meter.read_facts()
    assert found["stale"] == {}
    assert found["freshness"]["a"]["visible"][1] == 600.0


def test_an_outage_is_over_when_the_driver_has_caught_up() -> None:
    """While nothing is sealed rows wait; those that arrive behind the outage are fresh."""
    clock = ManualClock()
    meter = FreshnessMeter(10 * SECOND, lambda: 0, clock)
    for slot in range(1, 6):
        seal_at(meter, clock, slot, 1.0)
        meter.read_facts()
        clock.advance(2.0)
    clock.advance(300.0)
    for slot in range(6, 9):
        seal_at(meter, clock, slot, 290.0)
        assert meter.read_facts()["stale"] == {"a": 290.0}
        clock.advance(2.0)
    seal_at(meter, clock, 9, 2.0)
    assert meter.read_facts()["stale"] == {}


def test_an_outage_of_the_tables_is_over_when_they_have_caught_up() -> None:
    """Epochs go on being sealed, and no reader sees them for a while."""
    clock, waiting = ManualClock(), [0]
    meter = FreshnessMeter(10 * SECOND, lambda: waiting[0], clock)
    for slot in range(1, 31):
        seal_at(meter, clock, slot, 1.0)
        waiting[0] += 10 < slot <= 25
        found = meter.read_facts()["stale"]
        clock.advance(2.0)
    assert set(found) == {"a"}
    waiting[0] = 0
    meter.read_facts()
    clock.advance(2.0)
    seal_at(meter, clock, 31, 1.0)
    assert meter.read_facts()["stale"] == {}


def test_rows_that_are_slow_without_an_outage_stay_stale() -> None:
    """One epoch of five takes too long: no pause explains it."""
    clock = ManualClock()
    meter = FreshnessMeter(10 * SECOND, lambda: 0, clock)
    for slot in range(1, 51):
        seal_at(meter, clock, slot, 30.0 if slot % 5 == 0 else 1.0)
        found = meter.read_facts()
        clock.advance(2.0)
    assert found["stale"] == {"a": 30.0}
