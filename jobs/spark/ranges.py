"""A large release, cut into ranges of about equal size: each is sorted by one task and knows its first position beforehand.

One pass over the times alone counts the rows per narrow bucket; neighbouring buckets are joined to ranges. A range then reads
only what its bounds let through (Parquet skips row groups, Spark skips objects), so rows that arrive nearly in order are read
about once, and nothing is shuffled or kept in memory between the passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from pyspark.sql import DataFrame

from tidegate.jobs.spark.cast import text
from tidegate.jobs.spark.write import fetch

__all__ = ["Range", "ranges_by_arrival", "ranges_by_time"]

RANGE_ROWS: Final = 400_000
"""Rows that one task sorts: a few hundred megabytes at most, and several ranges for the cores of an epoch of millions."""
_BUCKETS: Final = 4096


@dataclass(frozen=True, slots=True)
class Range:
    """Rows that follow each other in the output: a condition that selects them, how many they are, and if they are late ones."""

    condition: str
    rows: int
    late: bool = False


def ranges_by_time(leaving: DataFrame, low: int, high: int, time: str | None) -> list[Range]:
    """Ranges by (flagged late first, section, event time).

    Args:
        leaving: the rows, with `_late`, `_section` and `_et`.
        low: no row is below; rows at or above `high` fall into the last bucket.
        high: see `low`.
        time: the timestamp column with the event time, on which files can be skipped; None when sources name it differently.
    """
    width = (high - low) // _BUCKETS + 1
    bucket = f"CAST(least(greatest((_et - {low}L) div {width}L, 0L), {_BUCKETS - 1}L) AS int)"
    counts = fetch(
        leaving.selectExpr("_late", "_section", f"{bucket} AS _b").groupBy("_late", "_section", "_b").count()
    ).to_pylist()
    ordered = sorted(counts, key=lambda row: (not row["_late"], row["_section"], row["_b"]))
    found = []
    for (late, section), rows in groupby(ordered, key=lambda row: (row["_late"], row["_section"])):
        for first, last, size in _joined((row["_b"], row["count"]) for row in rows):
            bounds = _between(
                low + first * width if first else None, low + (last + 1) * width if last < _BUCKETS - 1 else None, time
            )
            found.append(Range(f"_late = {str(late).lower()} AND _section = {section}L{bounds}", size, late))
    return found


def ranges_by_arrival(leaving: DataFrame) -> list[Range]:
    """Ranges by (flagged late first, source order, partition, object)."""
    group = ["_late", "_so", "_partition", "_p"]
    counts = fetch(leaving.groupBy(*group).count()).to_pylist()
    late = sum(row["count"] for row in counts if row["_late"])
    found = [Range("_late", late, late=True)] if late else []
    ordered = sorted((row for row in counts if not row["_late"]), key=lambda row: (row["_so"], row["_partition"], row["_p"]))
    for (place, partition), rows in groupby(ordered, key=lambda row: (row["_so"], row["_partition"])):
        own = f"NOT _late AND _so = {place} AND _partition = {text(partition)}"
        for first, last, size in _joined((row["_p"], row["count"]) for row in rows):
            found.append(Range(f"{own} AND _p >= {first} AND _p <= {last}", size))
    return found


def _joined(counts: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int, int]]:
    """Neighbours joined while they stay small: (first, last, rows)."""
    found: list[tuple[int, int, int]] = []
    for place, rows in counts:
        if found and found[-1][2] + rows <= RANGE_ROWS:
            first, _, size = found[-1]
            found[-1] = (first, place, size + rows)
        else:
            found.append((place, place, rows))
    return found


def _between(low: int | None, high: int | None, time: str | None) -> str:
    conditions: list[Any] = []
    for sign, bound in ((">=", low), ("<", high)):
        if bound is not None:
            conditions += [f"_et {sign} {bound}L", *([f"{time} {sign} timestamp_micros({bound}L)"] if time else [])]
    return "".join(f" AND {condition}" for condition in conditions)
