"""Says whether what a stream uses grows with its epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

MEASURES: Final = ("memory", "objects", "requests", "disk")
_TOLERANCE: Final = 0.10  # of the median, over all epochs that are judged
_CERTAIN: Final = 2.0  # standard errors: a slope within them of nothing is noise


@dataclass(frozen=True)
class Sample:
    """What a stream uses at one moment.

    Attributes:
        slot: newest sealed epoch.
        memory: bytes.
        objects: in the store.
        requests: to the store, for each epoch since the sample before.
        disk: bytes.
    """

    slot: int
    memory: float
    objects: float
    requests: float
    disk: float


@dataclass(frozen=True)
class Slope:
    """How one measure went over the epochs that were judged.

    Attributes:
        per_epoch: slope of the line with the least squares.
        error: standard error of that slope.
        growth: over all epochs, as a share of the median.
        certain: the same of the slope less its error, so that a sawtooth is not taken for growth.
    """

    measure: str
    median: float
    per_epoch: float
    error: float
    growth: float
    certain: float

    @property
    def is_flat(self) -> bool:
        """Whether it certainly grew by no more than a tenth."""
        return self.certain <= _TOLERANCE

    def __str__(self) -> str:
        verdict = "flat" if self.is_flat else "GROWS"
        return (
            f"{self.measure:9} {verdict:5} median {self.median:,.1f}, {self.per_epoch:+,.3f} an epoch"
            f" (error {self.error:,.3f}), {self.growth:+.1%} in all, at least {self.certain:+.1%}"
        )


def judge_slopes(samples: Sequence[Sample]) -> list[Slope]:
    """Return the slope of every measure.

    Raises:
        ValueError: there are fewer than eight samples, which say nothing about a slope.
    """
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples are too few to judge; run longer")
    slots = np.array([sample.slot for sample in samples], dtype=float)
    return [_fit(measure, slots, samples) for measure in MEASURES]


def _fit(measure: str, slots: np.ndarray, samples: Sequence[Sample]) -> Slope:
    values = np.array([getattr(sample, measure) for sample in samples], dtype=float)
    (slope, _), errors = np.polyfit(slots, values, 1, cov=True)
    error = float(np.sqrt(errors[0, 0]))
    median = float(np.median(values))
    share = float(slots[-1] - slots[0]) / max(median, 1e-9)
    certain = float(slope) - _CERTAIN * error
    return Slope(measure, median, float(slope), error, float(slope) * share, certain * share)


def format_verdict(slopes: Sequence[Slope]) -> str:
    """Return a line for each measure; the last one counts those that are flat."""
    flat = sum(slope.is_flat for slope in slopes)
    return "\n".join([*map(str, slopes), f"{flat} of {len(slopes)} slopes flat"])
