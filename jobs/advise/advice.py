"""The advisor: from the lateness sketches of a source to the lag it needs, and to what its present lag costs.

A lag is bought with delay: nothing is released, and no window closes, before its source has shown a row `lag` newer. The curve of
late rows over the lag tells what the delay buys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from tidegate.jobs.advise.sketch import merge_sketches

__all__ = ["TARGET_SHARES", "LagAdvice", "LatenessCurve", "LagTarget", "advise_lags"]

TARGET_SHARES: Final = (Fraction(1, 100), Fraction(1, 1_000), Fraction(1, 10_000))
"""Shares of late rows that people ask for: 1 %, 0.1 %, 0.01 %."""


class LatenessCurve:
    """Late rows over lag, of one source.

    Args:
        rows: greatest disorder of a bucket -> rows in it, as `merge_sketches` gives it.
    """

    def __init__(self, rows: Mapping[int, int]) -> None:
        self._rows = dict(sorted(rows.items()))
        self.rows = sum(self._rows.values())

    def late_rows_at(self, lag: int) -> int:
        """Rows that are late at this lag, at most."""
        return sum(count for disorder, count in self._rows.items() if disorder > lag)

    def lag_for(self, share: Fraction) -> int | None:
        """The least lag that leaves at most this share of the rows late; None without rows."""
        allowed, late, lag = share * self.rows, 0, None
        for disorder, count in reversed(self._rows.items()):
            lag = disorder
            if late + count > allowed:
                return lag
            late += count
        return 0 if lag is not None else None

    def points(self) -> list[tuple[int, float]]:
        """(lag, share of late rows), one for each bucket with rows in it, and one for no lag."""
        found: list[tuple[int, float]] = []
        late = self.rows
        for disorder, count in self._rows.items():
            if disorder > 0 and not found:
                found.append((0, late / self.rows))
            late -= count
            found.append((disorder, late / self.rows))
        return found


@dataclass(frozen=True, slots=True)
class LagTarget:
    """A wanted share of late rows.

    Attributes:
        lag: ticks it needs.
        more_delay: that lag less the present one: what it would cost in delay, or (negative) save. None: no present lag known.
    """

    share: Fraction
    lag: int
    more_delay: int | None


@dataclass(frozen=True, slots=True)
class LagAdvice:
    """What is known of one source.

    Attributes:
        source: its name.
        curve: late rows over lag.
        present: the lag in force, which is the delay of everything that waits for this source; None: unknown, or none set.
        read: rows read so far; the sketch holds fewer where large epochs were sampled.
        late: rows that were late for the events output so far.
        targets: by `TARGET_SHARES`; empty without rows.
    """

    source: str
    curve: LatenessCurve
    present: int | None = None
    read: int = 0
    late: int = 0
    targets: tuple[LagTarget, ...] = field(default=())

    @property
    def present_share(self) -> float | None:
        """Share of the rows that the present lag leaves late, at most; None where it is not known."""
        if self.present is None or not self.curve.rows:
            return None
        return self.curve.late_rows_at(self.present) / self.curve.rows

    def as_dict(self) -> dict[str, Any]:
        """As the command line's JSON has it; times in microseconds."""
        return {
            "rows": self.curve.rows,
            "rows_read": self.read,
            "rows_late": self.late,
            "present": {"lag_us": self.present, "delay_us": self.present, "late_share": self.present_share},
            "targets": [
                {"late_share": float(t.share), "lag_us": t.lag, "delay_us": t.lag, "more_delay_us": t.more_delay}
                for t in self.targets
            ],
            "curve": [{"lag_us": lag, "late_share": share} for lag, share in self.curve.points()],
        }


def advise_lags(
    sketches: Iterable[Mapping[str, Mapping[str, Any]]],
    lags: Mapping[str, int | None],
    counters: Mapping[str, Mapping[str, int]],
) -> list[LagAdvice]:
    """Advice for every source that has a sketch, a lag or rows.

    Args:
        sketches: of each epoch, by source.
        lags: source -> present lag in ticks; None: it has none.
        counters: source -> disposition -> rows, as the newest manifest counts them.
    """
    by_source: dict[str, list[Mapping[str, Any]]] = {name: [] for name in (*lags, *counters)}
    for epoch in sketches:
        for source, sketch in epoch.items():
            by_source.setdefault(source, []).append(sketch)
    found = []
    for source, own in by_source.items():
        curve, present, counts = LatenessCurve(merge_sketches(own)), lags.get(source), counters.get(source, {})
        targets = tuple(_compute_lag_target(share, curve, present) for share in TARGET_SHARES) if curve.rows else ()
        found.append(LagAdvice(source, curve, present, counts.get("read", 0), counts.get("late", 0), targets))
    return found


def _compute_lag_target(share: Fraction, curve: LatenessCurve, present: int | None) -> LagTarget:
    lag = curve.lag_for(share) or 0
    return LagTarget(share, lag, None if present is None else lag - present)
