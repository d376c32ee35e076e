"""DuckDB and Spark SQL compute the row rules alike."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

from tests.spark.agreement import COLUMNS, spec_of, table_of
from tests.spark.engine_agreement import prove
from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.rows.row_texts import write_row_texts
from tidegate.jobs.rules.aggregates import Aggregation, list_spark_arguments
from tidegate.jobs.rules.duck_frame import DuckFrame, group_rows, open_database
from tidegate.jobs.rules.native_support import (
    explain_spark_aggregates,
    explain_unproven_expressions,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_no_native_aggregate_and_no_condition_differs(session: SparkSession) -> None:
    """Null, NaN, -0.0, decimals, times before 1970, unicode and bytes have equal results."""
    line, wrong = prove(session)
    assert wrong == []
    assert line.endswith("0 differ")


def test_extremes_of_doubles_are_those_of_spark(session: SparkSession) -> None:
    """NaN is the greatest, and zeros are equal, in any order of values."""
    values = [None, 0.0, -0.0, math.nan, math.inf, -math.inf, 1.5]
    places: list[int] = []
    numbers: list[float | None] = []
    for place, own in enumerate(itertools.permutations(values, 3)):
        places += [place] * 3
        numbers += own
    for kind in (pa.float32(), pa.float64()):
        rows = pa.table({"k": places, "v": pa.array(numbers, kind)})
        frames = DuckFrame.from_table(rows), session.createDataFrame(rows).coalesce(1)
        extremes = {"low": "min(v) + CAST(0 AS float)", "high": "max(v) + CAST(0 AS float)"}
        found = [group_rows(frame, ["k"], extremes).toArrow().sort_by("k") for frame in frames]
        assert repr(found[0].to_pylist()) == repr(found[1].to_pylist())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ({}, None),
        ({"revisions": "delta", "lateness": "5s"}, None),
        ({"kind": "session", "size": None, "gap": "5s"}, None),
        ({"aggregates": {"twice": "sum(n * 2)"}}, None),
        ({"zero_rows": True, "keys": ["k"]}, None),
        ({"keys": ["v"]}, None),
        ({"aggregates": {"top": "max(v)"}}, None),
        ({"aggregates": {"last": "sql(max_by(n, t))"}}, "sql is Spark's own"),
        ({"aggregates": {"about": "approx_distinct(k)"}}, None),
        ({"aggregates": {"about": "approx_distinct(v)"}}, "approx_distinct(v) over double"),
        ({"aggregates": {"middle": "approx_quantile(v, 0.5)"}}, None),
        (
            {"aggregates": {"h": "max(hour(t))"}},
            "max(hour(t)): an expression that is not proven equal in DuckDB",
        ),
    ],
)
def test_the_reason_for_spark_sql_is_named(window: dict[str, Any], reason: str | None) -> None:
    """What is not proven equal is left to Spark SQL, with one sentence."""
    base = {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)"}}
    spec = spec_of(windows={"w": {**base, **window}})
    assert explain_spark_aggregates(spec) == (reason and f"window w: {reason}")
    assert explain_unproven_expressions(spec) is None


@pytest.mark.unit
def test_only_unproven_row_rules_leave_a_pipeline_to_spark_sql() -> None:
    """The reason names source and expression."""
    spec = spec_of({"a": {"rules": {"positive": {"predicate": "n > 0"}}}, "b": {}})
    assert explain_unproven_expressions(spec) is None
    spec = spec_of({"a": {"rules": {"named": {"predicate": "k rlike 'x'"}}}, "b": {}})
    reason = "source a: k RLIKE 'x' is not proven equal in DuckDB"
    assert explain_unproven_expressions(spec) == reason


@pytest.mark.unit
def test_a_product_that_overflows_is_an_error_and_not_a_number() -> None:
    """Spark SQL then raises its own error, which names the overflow."""
    with pytest.raises(duckdb.Error):
        _fold_numbers("sum(n * n)")


@pytest.mark.unit
def test_a_sum_of_whole_numbers_is_exact_in_state() -> None:
    """Whatever comes to it later."""
    (state,) = _fold_numbers("sum(n)").to_pylist()
    assert state["_s0"] is None
    assert state["_s0_over"] == 2**63


@pytest.mark.unit
def test_state_of_arguments_that_spark_computes_has_the_types_of_spark() -> None:
    """Also `sql(...)`, whose state are the rows: a pipeline goes on from the state it has."""
    calls = {
        "whole": "sum(abs(n))",
        "exact": "sum(cast(n as decimal(10, 2)))",
        "half": "sum(n / 2)",
        "first": "first(upper(k))",
        "own": "sql(max_by(n, t))",
    }
    window = {"kind": "tumbling", "size": "10s", "keys": ["v"], "aggregates": calls}
    spec = spec_of(windows={"w": window})
    arguments = [[7], [Decimal("7.00")], [3.5], ["X"]]
    rows = table_of([{"t": 1, "k": "x", "n": 7, "v": -0.0}])
    places = {
        "_et": [1],
        "_seq": [0],
        "_ws": [0],
        "_we": [10],
        "_source": ["a"],
        "_partition": ["0"],
    }
    places |= dict(zip(list_spark_arguments(spec), arguments, strict=True))
    for name, values in places.items():
        rows = rows.append_column(name, pa.array(values))
    rows = rows.append_column("_so", pa.array([0], pa.int32()))
    rows = replace_column(rows, "_a0_1", rows["_a0_1"].cast(pa.decimal128(10, 2)))
    aggregation = Aggregation(spec, "w", is_evaluated=True)
    folded = aggregation.fold_rows(DuckFrame.from_table(rows)).toArrow()
    place = [("_et", pa.int64()), ("_so", pa.int32()), ("_partition", pa.string())]
    place.append(("_seq", pa.int64()))
    row = pa.struct([*rows.select([*COLUMNS, "_source"]).schema])
    assert {name: folded[name].type for name in aggregation.partials} == {
        "_s0": pa.int64(),
        "_s1": pa.decimal128(20, 2),
        "_s2": pa.float64(),
        "_s3_v": pa.struct([("v", pa.string())]),
        "_s3_at": pa.struct(place),
        "_rows": pa.list_(pa.field("l", pa.struct([*place, ("v", row)]))),
    }
    assert str(folded["_k0"][0].as_py()) == "0.0"


def _fold_numbers(aggregate: str) -> pa.Table:
    window = {"kind": "tumbling", "size": "10s", "aggregates": {"s": aggregate}}
    aggregation = Aggregation(spec_of(windows={"w": window}), "w")
    rows = pa.table({"n": [2**62, 2**62], "_ws": [0, 0], "_we": [10, 10]})
    return aggregation.fold_rows(DuckFrame.from_table(rows)).toArrow()


@pytest.mark.unit
@pytest.mark.parametrize("cast", ["cast(t as timestamp)", "try_cast(t AS\nTimestamp )"])
def test_a_timestamp_that_select_casts_keeps_its_zone(cast: str) -> None:
    """In whatever letters the type is written: times without a zone fit no table."""
    rows = pa.table({"t": pa.array([7], pa.timestamp("us", "UTC"))})
    assert DuckFrame.from_table(rows).selectExpr(f"{cast} AS t").toArrow().equals(rows)


@pytest.mark.spark
def test_a_dead_row_is_shown_as_spark_shows_it(session: SparkSession) -> None:
    """All types that can be read, with what their texts may have: signs, zones, digits, nulls."""
    texts = [*map(chr, range(128)), '\\"/', "\u2028\u00fc\U0001f30a\ufffd", "", "  "]
    doubles = [0.1, -0.0, 1e7, 12345678.25, 1e-3, 1.5e-5, 1e300, float("nan"), float("-inf"), None]
    times = [0, -1, 1_700_000_000_123_456, 253_402_300_799_999_999, None]
    who = pa.struct([("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    names = [None, {"name": None, "at": 5}, {"name": "x", "at": None}]
    values: dict[str, Any] = {
        "text": pa.array(texts),
        "double": pa.array(doubles),
        "float": pa.array(doubles[:6], pa.float32()),
        "whole": pa.array([None, -(2**63), 2**63 - 1]),
        "flag": pa.array([True, False, None]),
        "time": pa.array(times, pa.timestamp("us", "UTC")),
        "local": pa.array(times, pa.timestamp("us")),
        "day": pa.array([0, -1, 19_000, None], pa.date32()),
        "bytes": pa.array([b"", b"\x00\xff", None]),
        "price": pa.array([Decimal("0.10"), Decimal("-7.00"), None], pa.decimal128(6, 2)),
        "list": pa.array([[1, None], [], None], pa.list_(pa.int64())),
        "who": pa.array(names, who),
        "many": pa.array([names, None], pa.list_(who)),
    }
    size = max(map(len, values.values()))
    table = pa.table(
        {
            name: pa.concat_arrays([own, pa.nulls(size - len(own), own.type)])
            for name, own in values.items()
        }
    )
    rows = session.createDataFrame(table).coalesce(1)
    read = [name if name != "local" else "CAST(local AS timestamp_ntz) AS local" for name in values]
    shown = rows.selectExpr(*read).selectExpr("to_json(struct(*)) AS shown")
    assert write_row_texts(table) == shown.toArrow()["shown"].to_pylist()


def test_a_duckdb_engine_is_replaced_and_open_sessions_keep_theirs() -> None:
    """DuckDB keeps some memory for each session until the whole engine ends."""
    with open_database() as first:
        first.execute("CREATE TABLE of_the_first_engine AS SELECT 1 AS one")
        for _ in range(1_000):
            with open_database():
                pass
        with open_database() as later, pytest.raises(duckdb.CatalogException):
            later.execute("FROM of_the_first_engine")
        assert first.execute("FROM of_the_first_engine").fetchall() == [(1,)]
