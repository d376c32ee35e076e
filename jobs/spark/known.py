"""The few rows of a cut between two times, read by the driver.

What can be late stands below the frontier, what waits for it above, and the survey has seen the time of every row: it is known
which rows these are, and only their row groups are read again, without a Spark job over the cut. Their columns are cast and
judged by the same Spark SQL.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pyspark.sql import DataFrame

from tidegate.jobs.spark.read import CutFrame, Ints, Sessions, rows_at
from tidegate.jobs.spark.write import FETCH_ROWS
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["Known"]


class Known:
    """Rows of one cut, by their times.

    Attributes:
        times: index of the slice -> event times of its rows in order, TICK_MAX for what is no data row; empty if not known.
    """

    def __init__(self, sessions: Sessions, spec: PipelineSpec, staged: CutFrame, times: Mapping[int, Ints]) -> None:
        self._sessions, self._spec, self._staged, self.times = sessions, spec, staged, times
        self._found: dict[tuple[int, int], DataFrame | None] = {}

    @property
    def size(self) -> int:
        """Rows of the cut whose times are known."""
        return sum(times.size for times in self.times.values())

    def few(self, low: int, high: int) -> bool:
        """Whether the rows with ``low <= time < high`` are known, few enough for the driver, and not there yet."""
        if self._staged.in_driver or not self.times:
            return False
        return sum(found.size for found in self._places(low, high).values()) <= FETCH_ROWS

    def rows(self, low: int, high: int) -> DataFrame | None:
        """The rows; None when there are none."""
        if (low, high) not in self._found:
            self._found[low, high] = rows_at(self._sessions, self._spec, self._staged, self._places(low, high))
        return self._found[low, high]

    def _places(self, low: int, high: int) -> dict[int, Ints]:
        return {index: np.flatnonzero((times >= low) & (times < high)) for index, times in self.times.items()}
