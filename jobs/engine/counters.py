"""Rows by disposition: what a mover counts in one epoch, and how epochs add up along a lineage.

Row equation (design.md section 6), per epoch: ``read + retained_before = released + late + dropped + rejected +
dead_lettered + retained``; summed up, `retained_before` cancels out and the manifest's cumulative form remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.checkpoints.manifest import Counters

__all__ = ["EpochCounters", "accumulate_counters"]


@dataclass(frozen=True, slots=True)
class EpochCounters:
    """Counts of one epoch. `late` is about the events output; lateness per window is in `late_by_output`.

    Attributes:
        retained_before: rows in the order buffer before the epoch.
        retained: rows in it after the epoch.
        dropped: reason -> rows dropped under the `drop` policy, counted only.
        late_by_output: output ("events" or a window) -> rows side-output for it.
        windows: window -> results emitted (first emissions and revisions).
        per_source: source -> disposition ("read", "released", "late", "dropped", "rejected", "dead_lettered") -> rows.
        dead_objects: objects that could not be read; counted apart, their rows are unknown.
    """

    read: int = 0
    released: int = 0
    late: int = 0
    rejected: int = 0
    dead_lettered: int = 0
    retained_before: int = 0
    retained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    late_by_output: dict[str, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    per_source: dict[str, dict[str, int]] = field(default_factory=dict)
    dead_objects: int = 0

    def is_conserved(self) -> bool:
        """Whether every row read, and every row buffered before, stands in exactly one place."""
        out = self.released + self.late + sum(self.dropped.values()) + self.rejected + self.dead_lettered + self.retained
        return self.read + self.retained_before == out


def accumulate_counters(before: Counters, epoch: EpochCounters) -> Counters:
    """The cumulative counters after one more epoch."""
    return Counters(
        read=before.read + epoch.read,
        released=before.released + epoch.released,
        late=before.late + epoch.late,
        dropped=_add_counts(before.dropped, epoch.dropped),
        rejected=before.rejected + epoch.rejected,
        dead_lettered=before.dead_lettered + epoch.dead_lettered,
        retained=epoch.retained,
        per_source={
            source: _add_counts(before.per_source.get(source, {}), epoch.per_source.get(source, {}))
            for source in sorted({*before.per_source, *epoch.per_source})
        },
    )


def _add_counts(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in sorted({*left, *right})}
