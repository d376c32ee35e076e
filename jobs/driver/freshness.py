"""How long rows take from their arrival until they are sealed, and until readers see them.

An epoch counts with the oldest object that it read of a source, so the figures are upper bounds
for its other rows. The store's clock stamps arrivals, the driver's clock seals. Topics are not
measured.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import Manifest

_EPOCHS_KEPT: Final = 1_000
_PERCENTILES: Final = (50, 95, 99)
_P95: Final = _PERCENTILES.index(95)


@dataclass
class _Journey:
    """Rows of one source in one epoch; times in ticks.

    Attributes:
        visible_at: when every sink had the epoch; None until then.
    """

    source: str
    slot: int
    arrived_at: int
    sealed_at: int
    visible_at: int | None = None


class FreshnessMeter:
    """Measures the epochs of this driver, the newest 1,000 of all sources together.

    `visible` is as exact as the readings are frequent: the status reads every two seconds.

    Args:
        goal: ticks from arrival to visible that 95 of 100 epochs should keep; None or 0: no goal.
        count_unpublished: returns how many sealed epochs a sink does not show yet.
        clock: tells when an epoch is seen to be visible.
    """

    def __init__(
        self, goal: int | None, count_unpublished: Callable[[], int], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._goal, self._count_unpublished, self._clock = goal, count_unpublished, clock
        self._journeys: deque[_Journey] = deque(maxlen=_EPOCHS_KEPT)
        self._newest_slot = 0
        self._lock = threading.Lock()

    def note_sealed(self, manifest: Manifest) -> None:
        """Count an epoch that was sealed just now."""
        with self._lock:
            self._newest_slot = manifest.slot
            self._journeys.extend(
                _Journey(source, manifest.slot, arrived, manifest.created_at)
                for source, arrived in manifest.find_oldest_arrivals().items()
            )

    def read_facts(self) -> dict[str, Any]:
        """Return the fields of the status, and note which epochs have become visible.

        `freshness` has per source a list of seconds at the percentiles 50, 95 and 99 until `sealed`
        and until `visible`. `stale` names sources beyond the goal, with the seconds of their 95th
        percentile until `visible`.
        """
        with self._lock:
            published, now = self._newest_slot - self._count_unpublished(), self._clock.wall_ticks()
            waits: dict[str, dict[str, list[int]]] = {}
            for one in self._journeys:
                if one.visible_at is None and one.slot <= published:
                    one.visible_at = now
                found = waits.setdefault(one.source, {"sealed": [], "visible": []})
                found["sealed"].append(one.sealed_at - one.arrived_at)
                # What readers do not see yet is at least as old as it is now.
                found["visible"].append((one.visible_at or now) - one.arrived_at)
        freshness = {
            source: {stage: _compute_percentiles(ticks) for stage, ticks in stages.items()}
            for source, stages in sorted(waits.items())
        }
        p95 = {source: stages["visible"][_P95] for source, stages in freshness.items()}
        stale = {s: wait for s, wait in p95.items() if self._goal and wait * 1e6 > self._goal}
        return {"freshness": freshness, "stale": stale}


def _compute_percentiles(ticks: list[int]) -> list[float]:
    """Seconds at each of `_PERCENTILES`, by the nearest rank."""
    ordered = sorted(ticks)
    ranks = (ceil(len(ordered) * percent / 100) - 1 for percent in _PERCENTILES)
    # The clocks of store and driver may differ, so a short wait can come out negative.
    return [round(max(0, ordered[rank]) / 1e6, 3) for rank in ranks]
