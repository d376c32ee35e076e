"""Sketches of Apache DataSketches, in the bytes that Spark SQL reads and writes.

`approx_distinct` is an HLL sketch of the texts of values, `approx_quantile` a KLL one of doubles.
DuckDB has neither. Here they are functions over lists that DuckDB has collected, one list a group
and no null in it; `duckdb.toml` gives them Spark's names.

Of the same values in the same order Spark SQL builds an equal HLL sketch. A KLL sketch of more than
200 values drops some of them by chance, here as in Spark SQL.
"""

import math
from bisect import bisect_left
from itertools import pairwise
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasketches import hll_sketch, hll_union, kll_doubles_sketch, tgt_hll_type
from duckdb.func import FunctionNullHandling, PythonUDFType

LOG_BUCKETS: Final = 12
"""Of Spark's HLL sketches: logarithm of the number of their buckets."""
VALUES: Final = 200
"""Of Spark's KLL sketches: the parameter `k`."""
_ROUNDING: Final = 1e7


def register_sketches(database: duckdb.DuckDBPyConnection) -> None:
    """Give a DuckDB the functions of this module."""
    functions: list[tuple[Any, list[Any], str]] = [
        (fold_texts, ["VARCHAR[]"], "BLOB"),
        (merge_text_sketches, ["BLOB[]"], "BLOB"),
        (estimate_texts, ["BLOB"], "BIGINT"),
        (fold_numbers, ["DOUBLE[]"], "BLOB"),
        (merge_number_sketches, ["BLOB[]"], "BLOB"),
        (count_numbers, ["BLOB"], "BIGINT"),
        (read_quantiles, ["BLOB", "DOUBLE"], "DOUBLE"),
    ]
    for function, arguments, result in functions:
        database.create_function(
            function.__name__,
            function,
            arguments,
            result,
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
        )


def fold_texts(groups: Any) -> Any:
    """Return an HLL sketch of each list; empty texts do not count."""

    def fold(texts: list[str]) -> bytes:
        sketch = hll_sketch(LOG_BUCKETS, tgt_hll_type.HLL_8)
        for text in dict.fromkeys(texts):
            sketch.update(text)
        return bytes(sketch.serialize_updatable())

    return _map_lists(fold, groups)


def merge_text_sketches(groups: Any) -> Any:
    """Return the union of each list of HLL sketches."""

    def merge(states: list[bytes]) -> bytes:
        union = hll_union(LOG_BUCKETS)
        for state in states:
            union.update(hll_sketch.deserialize(state))
        return bytes(union.get_result(tgt_hll_type.HLL_8).serialize_updatable())

    return _map_lists(merge, groups)


def estimate_texts(states: Any) -> Any:
    """Return of each HLL sketch how many different texts it has seen, about."""

    def estimate(state: bytes) -> int:
        # Java rounds halves up.
        return math.floor(float(hll_sketch.deserialize(state).get_estimate()) + 0.5)

    return _map_values(estimate, pa.int64(), states)


def fold_numbers(groups: Any) -> Any:
    """Return a KLL sketch of each list; NaN does not count."""

    def fold(numbers: Any) -> bytes:
        sketch = kll_doubles_sketch(VALUES)
        sketch.update(numbers)
        return bytes(sketch.serialize())

    # A copy, because the library takes no array that is read-only.
    return _map_lists(fold, groups, pc.list_flatten(groups).to_numpy().copy())


def merge_number_sketches(groups: Any) -> Any:
    """Return one KLL sketch of each list of them."""

    def merge(states: list[bytes]) -> bytes:
        sketch = kll_doubles_sketch(VALUES)
        for state in states:
            sketch.merge(kll_doubles_sketch.deserialize(state))
        return bytes(sketch.serialize())

    return _map_lists(merge, groups)


def count_numbers(states: Any) -> Any:
    """Return of each KLL sketch how many numbers it has seen."""
    return _map_values(lambda state: kll_doubles_sketch.deserialize(state).n, pa.int64(), states)


def read_quantiles(states: Any, ranks: Any) -> Any:
    """Return a quantile of each KLL sketch; null of an empty one."""

    def read(state: bytes, rank: float) -> float | None:
        return read_quantile(kll_doubles_sketch.deserialize(state), rank)

    return _map_values(read, pa.float64(), states, ranks)


def read_quantile(sketch: Any, rank: float) -> float | None:
    """Return a quantile as the Java library reads it; null of an empty sketch.

    That one takes the least number that has at least so many at or below it. Unlike the library in
    Python it puts the extremes to the ends of what the sketch has kept, and rounds.
    """
    if sketch.is_empty():
        return None
    # The weights beside the values are wrong if none of them is 1, as after a merge.
    values = sorted(value for value, _ in sketch)
    last = values[-1]
    least = sketch.get_min_value()
    greatest = sketch.get_max_value()

    def count_upto(value: float) -> int:
        """Return how many numbers are at or below it."""
        count: int = round(sketch.get_rank(value, inclusive=True) * sketch.n)
        return count - 1 if value == last and last != greatest else count

    wanted = rank * sketch.n
    if sketch.n <= _ROUNDING:
        wanted = math.floor(wanted * _ROUNDING + 0.5) / _ROUNDING
    if math.ceil(wanted) <= 1:
        return float(least)
    place = bisect_left(values, math.ceil(wanted), key=count_upto)
    return float(values[place] if place < len(values) else greatest)


def _map_lists(function: Any, groups: Any, values: Any = None) -> Any:
    """What a function makes of each list, as states; `values` are those of all lists in a row."""
    if values is None:
        values = pc.list_flatten(groups).to_pylist()
    ends = np.cumsum(pc.list_value_length(groups)).tolist()
    states = [function(values[a:b]) for a, b in pairwise([0, *ends])]
    return pa.array(states, pa.binary())


def _map_values(function: Any, kind: pa.DataType, states: Any, *more: Any) -> Any:
    """What a function makes of each state that is not null, and of further arguments."""
    rows = zip(states.to_pylist(), *(column.to_pylist() for column in more), strict=True)
    found = (None if row[0] is None else function(*row) for row in rows)
    return pa.array(found, kind)
