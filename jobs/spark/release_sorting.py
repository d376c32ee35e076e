"""Cuts a large release into ranges of about equal size, for Spark's tasks to sort.

One task sorts each range, and the range's first position is known beforehand. One pass over the
times alone counts the rows per narrow bucket, and neighbouring buckets are joined to ranges. A
second pass sends each row to the task of its range. Both passes run the same code in every epoch
(see `opaque_literal`). A job per range, with bounds in its code that let Parquet skip row groups,
would be compiled anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from pyspark.sql import DataFrame

from tidegate.jobs.rules.row_conditions import opaque_literal, quote_text
from tidegate.jobs.spark.file_writer import collect_to_driver
from tidegate.time_units import TICK_MAX, TICK_MIN

RANGE_ROWS: Final = 400_000
"""Rows that one task sorts.

A few hundred megabytes at most, and several ranges for the cores of an epoch of millions.
"""
_TIME_BUCKETS: Final = 4096
_RANGE_COUNT_STEP: Final = 8


@dataclass(frozen=True, slots=True)
class SortRange:
    """Rows that follow each other in the output.

    A condition that selects them, how many they are, and if they are late ones.
    """

    condition: str
    rows: int
    late: bool = False


def range_number_sql(ranges: Sequence[SortRange]) -> str:
    """The number of a row's range, from 0, as Spark SQL; null for a row in none."""
    spare = [_MATCHES_NOTHING] * (
        -len(ranges) % _RANGE_COUNT_STEP
    )  # a few ranges more or less are the same code
    cases = " ".join(
        f"WHEN {condition} THEN {i}"
        for i, condition in enumerate([*(piece.condition for piece in ranges), *spare])
    )
    return f"CASE {cases} END"


def split_evenly(rows: int) -> list[tuple[int, int]]:
    """Return (first, end) of the fewest pieces of about equal size, none above `RANGE_ROWS`."""
    pieces = -(-rows // RANGE_ROWS)
    return [(rows * piece // pieces, rows * (piece + 1) // pieces) for piece in range(pieces)]


def plan_ranges_by_time(leaving: DataFrame, low: int, high: int) -> list[SortRange]:
    """Ranges by (flagged late first, section, event time); a Spark job counts their rows.

    A range has more than `RANGE_ROWS` if a single bucket, one of 4096 between the times, has more.

    Args:
        leaving: the rows, with `_late`, `_section` and `_et`.
        low: event time in ticks from which the rows are divided; earlier ones are in the first
            bucket.
        high: event time in ticks up to which; later ones are in the last bucket.
    """
    width = (high - low) // _TIME_BUCKETS + 1
    bucket = (
        f"CAST(least(greatest((_et - {opaque_literal(low, '_et')}) div"
        f" {opaque_literal(width, '_et')}, 0L), {_TIME_BUCKETS - 1}L) AS int)"
    )
    counts = collect_to_driver(
        leaving.selectExpr("_late", "_section", f"{bucket} AS _b")
        .groupBy("_late", "_section", "_b")
        .count()
    ).to_pylist()
    ordered = sorted(counts, key=lambda row: (not row["_late"], row["_section"], row["_b"]))
    found = []
    for (late, section), rows in groupby(ordered, key=lambda row: (row["_late"], row["_section"])):
        for first, last, size in _join_neighbours((row["_b"], row["count"]) for row in rows):
            begin = low + first * width if first else TICK_MIN
            end = low + (last + 1) * width if last < _TIME_BUCKETS - 1 else TICK_MAX
            found.append(SortRange(_within_range_sql(late, section, begin, end), size, late))
    return found


def plan_ranges_by_arrival(leaving: DataFrame) -> list[SortRange]:
    """Ranges by (flagged late first, source order, partition, object); a Spark job counts rows.

    Late rows are one range, whatever their number, and so are the rows of one object: a range may
    have more than `RANGE_ROWS`.
    """
    group = ["_late", "_so", "_partition", "_p"]
    counts = collect_to_driver(leaving.groupBy(*group).count()).to_pylist()
    late = sum(row["count"] for row in counts if row["_late"])
    found = [SortRange("_late", late, late=True)] if late else []
    ordered = sorted(
        (row for row in counts if not row["_late"]),
        key=lambda row: (row["_so"], row["_partition"], row["_p"]),
    )
    for (place, partition), rows in groupby(
        ordered, key=lambda row: (row["_so"], row["_partition"])
    ):
        own = f"NOT _late AND _so = {place} AND _partition = {quote_text(partition)}"
        for first, last, size in _join_neighbours((row["_p"], row["count"]) for row in rows):
            found.append(SortRange(f"{own} AND _p >= {first} AND _p <= {last}", size))
    return found


def _join_neighbours(counts: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int, int]]:
    """Neighbours joined while they stay small: (first, last, rows)."""
    found: list[tuple[int, int, int]] = []
    for place, rows in counts:
        if found and found[-1][2] + rows <= RANGE_ROWS:
            first, _, size = found[-1]
            found[-1] = (first, place, size + rows)
        else:
            found.append((place, place, rows))
    return found


def _within_range_sql(late: bool, section: int, begin: int, end: int) -> str:
    """``begin <= _et < end``; a time of TICK_MAX itself is in the range that ends there."""
    place = f"_late = {str(late).lower()} AND _section = {opaque_literal(section, '_et')}"
    above = f"(_et < {opaque_literal(end, '_et')} OR {opaque_literal(end, '_et')} = {TICK_MAX}L)"
    return f"({place} AND _et >= {opaque_literal(begin, '_et')} AND {above})"


_MATCHES_NOTHING: Final = _within_range_sql(False, -1, TICK_MAX, TICK_MIN)
