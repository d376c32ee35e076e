"""Sketches of tasks and of Spark SQL are the same state: each engine reads and merges the other's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tidegate.jobs.rules.duck_frame import DuckFrame, group_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

RANKS = (0.0, 1e-05, 0.1, 0.14, 0.25, 0.28, 1 / 3, 0.5, 0.501, 0.9, 0.99, 0.999, 0.99999999, 1.0)


@pytest.mark.parametrize("count", [0, 1, 3, 20, 300, 5000, 60_000])
def test_texts_make_equal_sketches(session: SparkSession, count: int) -> None:
    """In all modes of an HLL sketch; nulls and empty texts do not count, and repeats once."""
    texts = [None, "", *(f"\u00fc\U0001f30a{n}" for n in range(count)), *map(str, range(count))]
    rows = pa.table({"x": pa.array([*texts, "0" if count else None], pa.string())})
    fold = {"state": "hll_sketch_agg(CAST(x AS string))"}
    mine, theirs = (group_rows(frame, [], fold).toArrow() for frame in _both(session, rows))
    assert mine["state"].to_pylist() == theirs["state"].to_pylist()
    own, other = _read(session, mine, ["hll_sketch_estimate(state) AS found"])
    assert own == other
    assert own["found"] == [pytest.approx(2 * count, rel=0.05)]


@pytest.mark.parametrize("sizes", [[], [0, 0], [3, 4], [5000], [3, 5000], [5000, 3], [9000] * 4])
def test_either_engine_merges_texts(session: SparkSession, sizes: list[int]) -> None:
    """Every second sketch is of the other engine; nulls do not count."""
    states: list[bytes | None] = [None]
    for number, size in enumerate(sizes):
        texts = pa.array([f"{n + number * 2500}" for n in range(size)], pa.string())
        fold = {"state": "hll_sketch_agg(CAST(x AS string))"}
        frame = _both(session, pa.table({"x": texts}))[number % 2]
        states += group_rows(frame, [], fold).toArrow()["state"].to_pylist()
    rows = pa.table({"state": pa.array(states, pa.binary())})
    merge = {"state": "hll_union_agg(state)"}
    for merged in (group_rows(frame, [], merge).toArrow() for frame in _both(session, rows)):
        own, other = _read(session, merged, ["hll_sketch_estimate(state) AS found"])
        assert own == other
        different = len({n + i * 2500 for i, size in enumerate(sizes) for n in range(size)})
        assert own["found"] == [pytest.approx(different, rel=0.05)]


def test_either_engine_reads_the_same_quantiles(session: SparkSession) -> None:
    """Of sketches that both have made, small and large, with extremes and with repeats."""
    numbers = random.Random(7)
    states: list[bytes] = []
    for size in (0, 1, 2, 7, 199, 200, 201, 300, 401, 777, 800, 1000, 5000, 60_000):
        values = [numbers.gauss(0, 1) for _ in range(size)] if size % 2 else [*range(size)]
        rows = pa.table({"x": pa.array([None, float("nan"), *values], pa.float64())})
        fold = {"state": "kll_sketch_agg_double(CAST(x AS double))"}
        for frame in _both(session, rows):
            states += group_rows(frame, [], fold).toArrow()["state"].to_pylist()
    merge = {"state": "kll_merge_agg_double(state)"}
    for first in range(0, len(states), 2):  # the sketches of both engines over the same numbers
        parts = pa.table({"state": pa.array([states[-1], *states[first : first + 2]], pa.binary())})
        for frame in _both(session, parts):
            states += group_rows(frame, [], merge).toArrow()["state"].to_pylist()
    quantiles = [
        f"IF(kll_sketch_get_n_double(state) = 0, NULL,"
        f" kll_sketch_get_quantile_double(state, {rank!r}D)) AS q{i}"
        for i, rank in enumerate(RANKS)
    ]
    table = pa.table({"state": pa.array(states, pa.binary())})
    own, other = _read(session, table, ["kll_sketch_get_n_double(state) AS n", *quantiles])
    assert own == other


@pytest.mark.parametrize("size", range(2300, 6300, 500))
def test_a_merged_sketch_has_its_quantiles(size: int) -> None:
    """Also if merging has left it without a number of weight 1."""
    numbers = [random.Random(size + n).random() for n in range(5000 + size)]
    fold = {"state": "kll_sketch_agg_double(CAST(x AS double))"}
    parts = pa.concat_tables(
        group_rows(DuckFrame.from_table(pa.table({"x": some})), [], fold).toArrow()
        for some in (numbers[:5000], numbers[5000:])
    )
    merge = {"state": "kll_merge_agg_double(state)"}
    merged = group_rows(DuckFrame.from_table(parts), [], merge)
    read = merged.selectExpr("kll_sketch_get_quantile_double(state, 0.9D) AS q").toArrow()
    assert read["q"].to_pylist() == [pytest.approx(0.9, abs=0.04)]


def test_either_engine_merges_numbers(session: SparkSession) -> None:
    """A merged sketch holds all numbers, whoever made its parts; few enough keep all of them."""
    fold = {"state": "kll_sketch_agg_double(CAST(x AS double))"}
    states: list[Any] = [None]
    for number in range(4):
        values = [float(number * 40 + n) for n in range(40)]
        frame = _both(session, pa.table({"x": values}))[number % 2]
        states += group_rows(frame, [], fold).toArrow()["state"].to_pylist()
    rows = pa.table({"state": pa.array(states, pa.binary())})
    merge = {"state": "kll_merge_agg_double(state)"}
    columns = [
        "kll_sketch_get_n_double(state) AS n",
        "kll_sketch_get_quantile_double(state, 0.5D) AS middle",
    ]
    for merged in (group_rows(frame, [], merge).toArrow() for frame in _both(session, rows)):
        for found in _read(session, merged, columns):
            assert found == {"n": [160], "middle": [79.0]}


def _both(session: SparkSession, rows: pa.Table) -> tuple[Any, Any]:
    """The rows in both engines, in one partition: so they are folded in their order."""
    return DuckFrame.from_table(rows), session.createDataFrame(rows).coalesce(1)


def _read(session: SparkSession, states: pa.Table, columns: list[str]) -> Iterator[dict[str, Any]]:
    """What each engine reads in the same states."""
    return (frame.selectExpr(*columns).toArrow().to_pydict() for frame in _both(session, states))
