"""The few rows of a cut between two times, read by the driver.

What can be late stands below the frontier, what waits for it above, and the survey has seen the
time of every row: it is known which rows these are, and only their row groups are read again,
without a Spark job over the cut. Their columns are cast and judged by the same Spark SQL.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pyspark.sql import DataFrame

from tidegate.jobs.spark.cut_reader import CutFrame, Ints, SparkSessions, read_rows_at
from tidegate.jobs.spark.file_writer import FETCH_ROWS
from tidegate.jobs.spec.pipeline import PipelineSpec


class SurveyedRows:
    """Rows of one cut, by their times.

    Attributes:
        times: index of the slice -> event times of its rows in order, TICK_MAX for what is no data
            row; empty if not known.
    """

    def __init__(
        self,
        sessions: SparkSessions,
        spec: PipelineSpec,
        staged: CutFrame,
        times: Mapping[int, Ints],
    ) -> None:
        self._sessions, self._spec, self._staged, self.times = sessions, spec, staged, times
        self._found: dict[tuple[int, int], DataFrame | None] = {}

    @property
    def row_count(self) -> int:
        """Rows of the cut whose times are known."""
        return sum(times.size for times in self.times.values())

    def fits_in_driver(self, low: int, high: int) -> bool:
        """Return whether the driver may read the rows with ``low <= time < high`` without a job."""
        if self._staged.in_driver or not self.times:
            return False
        return sum(found.size for found in self._find_positions(low, high).values()) <= FETCH_ROWS

    def read_rows(self, low: int, high: int) -> DataFrame | None:
        """The rows; None when there are none."""
        if (low, high) not in self._found:
            self._found[low, high] = read_rows_at(
                self._sessions, self._spec, self._staged, self._find_positions(low, high)
            )
        return self._found[low, high]

    def _find_positions(self, low: int, high: int) -> dict[int, Ints]:
        return {
            index: np.flatnonzero((times >= low) & (times < high))
            for index, times in self.times.items()
        }
