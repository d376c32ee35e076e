"""Proves that DuckDB and Spark SQL compute the row rules alike: `python -m tests.spark.engine_agreement`.

Every aggregate that `jobs.rules.aggregates` calls native, over every type it names, and every
condition of `jobs.rules.row_conditions`, on values on which engines like to differ; and every cast
of a column that `is_cast_proven` names.
"""

from __future__ import annotations

import math
import sys
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tests.spark.agreement import same
from tests.spark.cast_agreement import prove_casts
from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.rules import row_conditions
from tidegate.jobs.rules.aggregates import Aggregation, explain_spark_aggregate
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame
from tidegate.jobs.rules.native_support import explain_spark_condition, explain_spark_value
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import AggregateFunction, WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALUES: dict[str, list[Any]] = {
    "int": [None, 0, -1, 2**31 - 1, -(2**31), 7],
    "long": [None, 0, -1, 2**62, -(2**62), 7],
    "float": [None, 0.0, -0.0, 1.5, math.nan, -math.inf],
    "double": [None, 0.0, -0.0, 1e300, math.nan, 0.1],
    "decimal(20, 3)": [
        None,
        *map(Decimal, ("0.000", "-0.001", "99999999999999999.999", "7", "-7")),
    ],
    "decimal(38, 0)": [None, *map(Decimal, ("0", "-1", "9" * 36, "7", "-7"))],
    "string": [None, "", "a", "Z", "ü", "\U0001f600"],
    "boolean": [None, True, False, True, None, False],
    "date": [
        None,
        *map(
            date.fromisoformat,
            ("1969-12-31", "2024-02-29", "1582-10-04", "9999-12-31", "1970-01-01"),
        ),
    ],
    "timestamp": [None, 0, -1, 1_700_000_000_123_456, -30_000_000_000_000_001, 7],
    "binary": [None, b"", b"\x00", b"\xff", b"a", b"b"],
}
FUNCTIONS = [
    f.value
    for f in AggregateFunction
    if f not in (AggregateFunction.SQL, AggregateFunction.APPROX_QUANTILE)
]
ARITHMETIC = ("sum(c0 * 1 - 0)", "max((c1 + 1) * 1)", "avg(c3 * 2)")


def make_rows() -> pa.Table:
    """Two rounds of the values, in two groups, with places."""
    count = len(VALUES["int"]) * 2
    columns = {
        f"c{i}": pa.array(values * 2, pa.int64()).cast(to_arrow_type(kind))
        if kind == "timestamp"
        else pa.array(values * 2, to_arrow_type(kind))
        for i, (kind, values) in enumerate(VALUES.items())
    }
    numbers = pa.array(range(count), pa.int64())
    return pa.table(
        {
            **columns,
            "k": pa.array(["x"] * (count // 2) + [None] * (count // 2)),
            "_et": numbers,
            "_end": pa.array(range(1, count + 1), pa.int64()),
            "_seq": numbers,
            "_so": pa.array([0] * count, pa.int32()),
            "_partition": pa.array(["0", "1"] * (count // 2)),
            "_ws": pa.array([0] * count, pa.int64()),
            "_we": pa.array([10] * count, pa.int64()),
        }
    )


def make_spec() -> PipelineSpec:
    """A window with every aggregate over every type."""
    schema = {f"c{i}": kind for i, kind in enumerate(VALUES)} | {"k": "string", "t": "timestamp"}
    calls = [f"{name}(c{i})" for name in FUNCTIONS for i in range(len(VALUES))]
    calls += [f"approx_quantile(c{i}, 0.6)" for i in range(len(VALUES))]
    window = {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "aggregates": {f"a{n}": call for n, call in enumerate(["count(*)", *calls, *ARITHMETIC])},
    }
    source = {"schema": schema, "event_time": "t", "lag": "1s", "path": "inbox"}
    return PipelineSpec.model_validate(
        {"name": "p", "sources": {"a": source}, "windows": {"w": window}}
    )


def compute_window(spec: PipelineSpec, frame: Frame) -> list[dict[str, Any]]:
    """Partial, merged and final, in two halves that are merged."""
    aggregation = Aggregation(spec, "w")
    marks = aggregation.select_marks(0, 1, epochs=1)
    halves = [
        aggregation.fold_rows(frame.where(f"pmod(_et, 2L) = {n}L")).selectExpr("*", *marks)
        for n in (0, 1)
    ]
    merged = aggregation.merge_partials(halves[0].unionByName(halves[1]), flags={})
    rows = aggregation.build_results(merged, "0", []).toArrow().to_pylist()
    for row in rows:
        for name, what in spec.windows["w"].aggregates.items():
            if what.function is AggregateFunction.COLLECT:
                row[name] = list(row[name])
    return sorted(rows, key=lambda row: str(row.get("k")))


def prove_aggregates(session: SparkSession) -> tuple[set[str], set[str], list[str]]:
    """(proven, left to Spark SQL, differences) of the aggregates."""
    whole, table = make_spec(), make_rows()
    window = whole.windows["w"]
    reasons = {n: explain_spark_aggregate(a, whole.columns) for n, a in window.aggregates.items()}
    native = {n: a for n, a in window.aggregates.items() if reasons[n] is None}
    spec = whole.model_copy(
        update={"windows": {"w": window.model_copy(update={"aggregates": native})}}
    )
    left = compute_window(spec, DuckFrame.from_table(table))
    right = compute_window(spec, session.createDataFrame(table))
    wrong = [
        f"{native[name]} over {whole.columns.get(native[name].expression)}: DuckDB {mine[name]!r}, Spark {theirs[name]!r}"
        for mine, theirs in zip(left, right, strict=True)
        for name in native
        if not same(mine[name], theirs[name])
    ]
    names = {n: f"{a} {whole.columns.get(a.expression, '')}" for n, a in window.aggregates.items()}
    return {names[n] for n in native}, {names[n] for n in names if n not in native}, wrong


def prove_keys(session: SparkSession) -> tuple[set[str], list[str]]:
    """(proven, differences) of columns of every type as keys."""
    whole, table = make_spec(), make_rows()
    window = whole.windows["w"]
    count = {"n": window.aggregates["a0"]}
    wrong: list[str] = []
    proven: set[str] = set()
    for i, kind in enumerate(VALUES):
        own = window.model_copy(update={"keys": (f"c{i}",), "aggregates": count})
        spec = whole.model_copy(update={"windows": {"w": own}})
        found = [
            sorted(compute_window(spec, frame), key=lambda row: str(row[f"c{i}"]))
            for frame in (DuckFrame.from_table(table), session.createDataFrame(table))
        ]
        proven.add(f"key of type {kind}")
        if not same(*found):
            wrong.append(f"key of type {kind}: DuckDB {found[0]!r}, Spark {found[1]!r}")
    return proven, wrong


def list_conditions() -> dict[str, str]:
    """Name -> Spark SQL over a row."""
    found = {"below the frontier": row_conditions.time_below_sql(5)}
    shapes: dict[str, dict[str, Any]] = {
        "tumbling": {"kind": "tumbling", "size": 4},
        "sliding": {"kind": "sliding", "size": 5, "slide": 2, "offset": -1},
        "holes": {"kind": "sliding", "size": 2, "slide": 5, "min_window_start": 0},
    }
    for name, shape in shapes.items():
        window = WindowSpec.model_validate(
            {**shape, "aggregates": {"n": "count(*)"}, "lateness": 2}
        )
        found[f"{name}: first start"] = row_conditions.first_window_start_sql(window)
        found[f"{name}: last start"] = row_conditions.last_window_start_sql(window)
        for unit in ("event", "window", "first_window"):
            other = window.model_copy(update={"late_unit": unit})
            for frontier in (TICK_MIN, -3, 8, TICK_MAX):
                found[f"{name}: late by {unit} at {frontier}"] = row_conditions.late_for_window_sql(
                    other, frontier
                )
        for frontier in (TICK_MIN, 8, TICK_MAX):
            found[f"{name}: expired at {frontier}"] = row_conditions.expired_pairs_sql(
                window, frontier
            )
    return found


def prove_conditions(session: SparkSession) -> tuple[set[str], list[str]]:
    """(proven, differences) of the conditions, on times around zero."""
    times = list(range(-12, 13))
    table = pa.table(
        {"_et": pa.array(times, pa.int64()), "_end": pa.array([t + 1 for t in times], pa.int64())}
    )
    conditions = list_conditions()
    columns = ["_et", *(f"({sql}) AS c{i}" for i, sql in enumerate(conditions.values()))]
    frames = (DuckFrame.from_table(table), session.createDataFrame(table))
    left, right = (
        sorted(f.selectExpr(*columns).toArrow().to_pylist(), key=lambda r: r["_et"]) for f in frames
    )
    wrong = [
        f"{name} at {mine['_et']}: DuckDB {mine[f'c{i}']!r}, Spark {theirs[f'c{i}']!r}"
        for i, name in enumerate(conditions)
        for mine, theirs in zip(left, right, strict=True)
        if mine[f"c{i}"] != theirs[f"c{i}"]
    ]
    return set(conditions), wrong


# Over the columns of `make_rows`: c0 int, c1 long, c3 double, c6 string, c7 boolean, c8 date, c9 timestamp.
CONDITIONS = [
    *(
        f"{c} {sign} {v}"
        for c in ("c0", "c1", "c3")
        for sign in ("=", "<>", "<", ">=")
        for v in (7, 0.1)
    ),
    *(f"{c} {sign} 'a'" for c in ("c6",) for sign in ("=", "<>", "<", ">=", "<=>")),
    *(f"c1 {sign} c0 and c3 {sign} c1" for sign in ("=", "<", ">", "<=>")),
    *("c0 between -1 and 7", "c6 not between 'Z' and 'b'", "c3 between 0.0 and 0.1", "c3 = -0.0"),
    *(
        "c0 in (0, 7, null)",
        "c1 in (7, 2.5)",
        "c6 in ('', 'ü')",
        "c3 not in (0.1, 5)",
        "c6 not in ('a', null)",
    ),
    *(
        "c0 is null or not c7",
        "c7 and c0 is not null",
        "c7 = true",
        "not (c7 <=> null)",
        "null",
        "true",
    ),
    *(
        "c0 % 2 = 1",
        "c1 % 3 <> -1",
        "-c3 > c1",
        "(c0 - 1) * 2 < c1",
        "c3 * 2 + 1 >= c3",
        "c3 = c3",
        "c3 < c3 + 1",
    ),
    *("length(c6) = 1", "coalesce(c0, 5) = 5", "coalesce(c6, 'a') < 'b'", "coalesce(c7, false)"),
    *(
        "c8 < c8",
        "c9 = c9",
        "c8 is null",
        "coalesce(c9, c9) > c9",
        "c0 < 1 and c0 is not null -- left to Spark",
    ),
    *("c2 > 1", "c4 = 7", "c6 like 'a%'", "lower(c6) = 'a'", "c0 / 2 > 1", "c0 % c0 = 0", "c6 > 5"),
]
VALUES_OF_SELECT = [
    *(
        "c0",
        "c6",
        "`c9`",
        "cast(c0 as bigint)",
        "cast(c0 as double)",
        "cast(c1 as double)",
        "cast(c3 as double)",
    ),
    *("cast(c6 as string)", "cast(c7 as boolean)", "cast(c8 as date)", "cast(c0 - 1 as bigint)"),
    *("cast(c0 > 1 as boolean)", "cast(length(c6) as bigint)", "cast(coalesce(c6, 'x') as string)"),
    *("cast(c1 as int)", "cast(c3 as bigint)", "try_cast(c6 as int)", "cast(c0 as string)"),
]


def prove_expressions(session: SparkSession) -> tuple[set[str], set[str], list[str]]:
    """(proven, left to Spark SQL, differences) of conditions and columns of `select`."""
    table, columns = make_rows(), make_spec().columns
    # A sum that overflows is left to Spark SQL at run time, which says so.
    table = table.set_column(0, "c0", pa.array([None, 0, -1, 2**29, -(2**29), 7] * 2, pa.int32()))
    reasons = {sql: explain_spark_condition(sql, columns) for sql in CONDITIONS}
    reasons |= {sql: explain_spark_value(sql, columns) for sql in VALUES_OF_SELECT}
    native = [sql for sql, reason in reasons.items() if reason is None]
    chosen = ["_seq", *(f"(\n{sql}\n) AS v{i}" for i, sql in enumerate(native))]
    left, right = (
        sorted(f.selectExpr(*chosen).toArrow().to_pylist(), key=lambda r: r["_seq"])
        for f in (DuckFrame.from_table(table), session.createDataFrame(table))
    )
    wrong = [
        f"{sql} of row {mine['_seq']}: DuckDB {mine[f'v{i}']!r}, Spark {theirs[f'v{i}']!r}"
        for i, sql in enumerate(native)
        for mine, theirs in zip(left, right, strict=True)
        if not same(mine[f"v{i}"], theirs[f"v{i}"])
    ]
    return {*native}, reasons.keys() - {*native}, wrong


def prove(session: SparkSession) -> tuple[str, list[str]]:
    """Return the last line of the report, and the differences."""
    proven, left, wrong = prove_aggregates(session)
    conditions, more = prove_conditions(session)
    expressions, others, found = prove_expressions(session)
    casts, lossy, differ = prove_casts(session)
    keys, unlike = prove_keys(session)
    proven, left = proven | conditions | expressions | casts | keys, left | others | lossy
    wrong = [*wrong, *more, *found, *differ, *unlike]
    line = f"{len(proven)} functions proven, {len(left)} on Spark SQL, {len(wrong)} differ"
    return line, wrong


def main() -> int:
    """Print each difference and the sum."""
    from tests.spark.agreement import spec_of
    from tidegate.jobs.spark.spark_session import open_session

    session = open_session(spec_of(spark={"jvm": "quick"}))
    line, wrong = prove(session)
    print(*wrong, line, sep="\n")  # noqa: T201
    session.stop()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
