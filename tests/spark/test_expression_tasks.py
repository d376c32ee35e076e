"""Pipelines of which Spark SQL evaluates expressions or casts, between two Python tasks."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.agreement import (
    SECOND,
    Pair,
    difference,
    divide_finely,
    rows_of,
    same,
    spec_of,
    table_of,
)
from tests.spark.cast_agreement import ODD_SCHEMA, list_odd_objects
from tidegate.errors import PoisonError
from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.engine.errors import BrokenRuleError, CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rows import cut_division
from tidegate.jobs.rows.column_casts import cast_to_declared, is_cast_proven
from tidegate.jobs.spark import expression_tasks, late_sessions, python_tasks, task_epochs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SELECT = {"t": "t", "kind": "kind", "k": "k", "n": "n", "v": "v"}
RULES = {
    "known": {"predicate": "upper(k) in ('X', 'Y')", "severity": "quarantine"},
    "small": {"predicate": "abs(n) < 5", "severity": "drop"},
    "even": {"predicate": "abs(n) % 2 = 0"},
    "low": {"predicate": "abs(v) <= 9.5", "severity": "warn"},
}
PROVEN_RULES = {
    "known": {"predicate": "k in ('x', 'y')", "severity": "quarantine"},
    "small": {"predicate": "n < 4", "severity": "drop"},
    "low": {"predicate": "v <= 9.5", "severity": "warn"},
}
UNPROVEN: dict[str, dict[str, Any]] = {
    "where": {"where": "upper(k) in ('X', 'Y')"},
    "rules": {"rules": RULES},
    "select": {
        "select": {**SELECT, "k": "cast(upper(k) as string)", "n": "cast(abs(n) as long)"},
        "where": "k is not null",
        "rules": {"few": {"predicate": "n < 7", "severity": "drop"}},
    },
}
WINDOWS = {
    "w": {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "aggregates": {"rows": "count(*)", "sum": "sum(v)", "whole": "sum(n)", "last": "last(n)"},
        "lateness": "4s",
    }
}


SPARK_AGGREGATES = {
    "upper": "max(upper(k))",
    "sum": "sum(n / 10 + v)",
    "whole": "sum(abs(n))",
    "exact": "sum(cast(n as decimal(10, 2)))",
    "texts": "approx_distinct(v)",
    "level": "avg(abs(v))",
    "first": "first(concat(k, _source))",
    "all": "collect(abs(n))",
    "kinds": "distinct(v)",
    "top": "max(abs(v))",
    "own": "sql(max(n) + count_if(v > 1))",
}


LETTER = ("reason", "detail", "object", "row", "_source", "_partition", "_seq")


@pytest.fixture
def _only_expression_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark SQL evaluates the rows of every cut, between Python tasks."""
    monkeypatch.delattr(python_tasks, "run_read_job")


def put_rows(pair: Pair, draw: random.Random, epoch: int) -> None:
    """Rows in disorder, some without times, of two columns' types in one member."""
    for source in "ab":
        for value in (pa.float64(), pa.decimal128(10, 3)):
            rows = rows_of(draw, 8 * epoch)
            for row in rows:
                row["t"] = row["t"] if draw.random() < 0.9 else None
            table = table_of(rows)
            if "cast" in pair.spec.name:
                table = replace_column(table, "v", table["v"].cast(value))
            pair.put(source, table, draw.choice("01"))


def run_to_end(pair: Pair, draw: random.Random, epochs: int) -> None:
    """Epochs over such rows, to the end of all members; both movers agree on each."""
    for epoch in range(epochs):
        put_rows(pair, draw, epoch)
        pair.run(epoch * SECOND)
    for _ in range(20):
        pair.run(300 * SECOND, done=True)
        if not any(pair.waiting.values()):
            break
    pair.run(400 * SECOND, done=True)


def read_letters(pair: Pair) -> list[dict[str, Any]]:
    """The dead letters of the Spark mover, with their texts."""
    files = [
        ref for moved in pair.sides["spark"].moved for ref in moved.files.get("dead_letters", ())
    ]
    tables = [pq.read_table(pair.store.local_path(ref.key), columns=list(LETTER)) for ref in files]
    ordered = pa.concat_tables(tables).sort_by([(name, "ascending") for name in LETTER])
    letters: list[dict[str, Any]] = ordered.to_pylist()
    return letters


@pytest.mark.parametrize("what", [*UNPROVEN, "cast"])
def test_tasks_agree_with_the_oracle(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Surveys, tables and counters, with barriers, late and dead rows, and ordered events."""
    draw = random.Random(what)
    if what != "cast":  # an epoch without objects has none
        monkeypatch.delattr(python_tasks, "run_read_job")
    # One unit has slices of several plans, or each has one slice.
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1 if what == "rules" else 1_200_000)
    if what == "where":  # rows of units with several batches are sorted
        monkeypatch.setattr(expression_tasks, "divide_unit", lambda _, unit: [unit, unit])
    marks: dict[str, Any] = {"barriers": {"kind": "kind", "types": ["stop"]}}
    sources = {"a": {**UNPROVEN.get(what, {}), **marks}, "b": {"lag": "2s", "max_jump": "30s"}}
    if what == "rules":  # several units share a slice
        divide_finely(monkeypatch)
        sources["a"].pop("barriers")
    spec = spec_of(sources, windows=WINDOWS, name=f"p_{what}", barriers={"timeout": "5s"})
    pair = Pair(spec, session, tmp_path)
    run_to_end(pair, draw, 5)
    assert pair.table("late")
    assert pair.table("dead_letters")
    assert len(pair.table("events")) > 20


@pytest.mark.parametrize("what", ["plain", "rules", "cast"])
def test_duckdb_agrees_with_spark_sql(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each row of each table, with the texts of dead letters, whichever evaluates the rows."""
    source = {"rules": PROVEN_RULES} if what == "rules" else {}
    spec = spec_of({"a": source, "b": source}, windows=WINDOWS, name=f"p_{what}")
    found = []
    for by_spark in (True, False):
        pair = Pair(spec, session, tmp_path / str(by_spark))
        with monkeypatch.context() as patched:
            if by_spark:
                patched.setattr(task_epochs, "explain_spark_expressions", lambda *_: "a test")
            run_to_end(pair, random.Random(what), 3)
        tables = {name: pair.table(name) for name in ("events", "late", "w")}
        counters = [moved.counters for moved in pair.sides["spark"].moved]
        found.append((tables, read_letters(pair), counters))
    assert found[0] == found[1]


@pytest.mark.parametrize("most", [500_000, 4], ids=["driver", "tasks"])
def test_aggregates_of_spark_are_those_of_a_query(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Whatever Spark SQL computes of them, over all rows of a window at once."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    keys = ["v"] if most == 4 else []
    window = {"kind": "tumbling", "size": "10s", "keys": keys, "aggregates": SPARK_AGGREGATES}
    base = {"lag": "1000s"}
    pair = Pair(spec_of({"a": base, "b": base}, windows={"w": window}), session, tmp_path)
    draw = random.Random("aggregates")
    for epoch in range(3):
        put_rows(pair, draw, epoch)
        pair.run_alone(epoch * SECOND)
    for _ in range(2):
        pair.run_alone(9000 * SECOND, done=True)
    calls = {
        name: call.removeprefix("sql(")[:-1] if call.startswith("sql(") else call
        for name, call in SPARK_AGGREGATES.items()
    }
    calls |= {
        "texts": "approx_count_distinct(v)",
        "first": "sort_array(collect_list(struct(t, _so, _partition, _seq, concat(k, _source) as x)))[0].x",
        "all": "transform(sort_array(collect_list(if(n is null, null, struct(t, _so, _partition,"
        " _seq, abs(n) as x)))), r -> r.x)",
        "kinds": "count(distinct v)",
    }
    files = [ref for m in pair.sides["spark"].moved for ref in m.files.get("events", ())]
    rows = pa.concat_tables(
        pq.read_table(pair.store.local_path(ref.key), partitioning=None) for ref in files
    )
    frame = session.createDataFrame(rows).selectExpr("*", "if(_source = 'a', 0, 1) AS _so")
    frame = frame.selectExpr("*", "unix_micros(t) - pmod(unix_micros(t), 10000000L) AS start")
    wanted = frame.selectExpr("* except (v)", "v + 0.0 AS v").groupBy("start", *keys)
    found = wanted.agg(*(F.expr(call).alias(name) for name, call in calls.items())).toArrow()
    expected = [
        {**row, "start": datetime.fromtimestamp(row["start"] / SECOND, UTC)}
        for row in found.to_pylist()
    ]
    results = [
        {"start": row["window_start"], **{name: row[name] for name in (*keys, *calls)}}
        for row in pair.table("w")
    ]
    pairs = [
        sorted(own, key=lambda row: repr((row["start"], row.get("v"))))
        for own in (results, expected)
    ]
    assert same(*pairs), difference("w", *pairs)
    assert len(results) > 3


@pytest.mark.usefixtures("_only_expression_tasks")
def test_rows_of_purged_sessions_are_evaluated_again(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second job of late sessions reads the same rows as the first one did."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    read_again, run_job = [], task_epochs.read_units

    def read_units(*given: Any) -> Any:
        read_again.append(given)
        return run_job(*given)

    monkeypatch.setattr(late_sessions, "read_units", read_units)
    window = {**WINDOWS["w"], "kind": "session", "gap": "2s", "session_late": "merged"}
    del window["size"]
    source = UNPROVEN["select"]
    pair = Pair(spec_of({"a": source, "b": source}, windows={"s": window}), session, tmp_path)
    for epoch, times in enumerate([(100,), (50, 99, 40)]):
        for name in "ab":
            rows = [{"t": t * SECOND, "k": "x", "n": -1, "v": 0.1} for t in times]
            pair.put(name, rows if name == "a" or not epoch else rows[1:2])
        pair.run(epoch * SECOND)
    assert len(read_again) == 1
    late = [row for row in pair.table("late") if row["output"] == "s"]
    assert [(row["k"], row["n"]) for row in late] == [("X", 1), ("X", 1)]


def test_values_are_cast_and_judged_by_spark_sql(session: SparkSession, tmp_path: Path) -> None:
    """Wherever DuckDB is not proven to cast as Spark SQL does, a bad value costs its row only."""
    window = {**WINDOWS["w"], "keys": [], "aggregates": {"rows": "count(*)"}}
    source = {"schema": ODD_SCHEMA, "lag": "0"}
    pair = Pair(spec_of({"a": source}, windows={"w": window}), session, tmp_path)
    unproven = [
        rows
        for kind, name, rows in list_odd_objects()
        if not is_cast_proven(str(kind), ODD_SCHEMA[name], None)
    ]
    for rows in unproven:
        pair.put("a", rows)
    moved, _ = pair.run(0)
    assert moved.counters.dead_lettered > 5
    pair.run(SECOND, done=True)
    (result,) = pair.table("w")
    assert result["rows"] == sum(map(len, unproven)) - moved.counters.dead_lettered


@pytest.mark.usefixtures("_only_expression_tasks")
@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ({"on_bad": "fail"}, PoisonError, r'row 3 of inbox/a/.*no_event_time.*"n":8'),
        (
            {"rules": {"few": {"predicate": "abs(n) < 7", "severity": "fail"}}},
            BrokenRuleError,
            r'row 2 of inbox/a/.* breaks rule few .*"n":7',
        ),
    ],
    ids=["value", "rule"],
)
def test_a_row_that_stops_the_epoch_is_named(
    session: SparkSession, tmp_path: Path, source: dict[str, Any], error: type, said: str
) -> None:
    """The first one, with its text; rows that `where` leaves out stop nothing."""
    own = {"where": "upper(k) = 'X'", **source}
    pair = Pair(spec_of({"a": own}, windows=WINDOWS), session, tmp_path)
    rows = [(0, "x", 1), (None, "y", 9), (1, "x", 7), (None, "x", 8), (None, "x", 9)]
    pair.put("a", [{"t": t and t * SECOND, "k": k, "n": n} for t, k, n in rows])
    with pytest.raises(error, match=said):
        pair._survey("spark", cut_of(pair))


@pytest.mark.usefixtures("_only_expression_tasks")
def test_an_expression_that_fails_ends_the_epoch(session: SparkSession, tmp_path: Path) -> None:
    """The error is the one that Spark SQL has for it."""
    source = {"select": {**SELECT, "n": "cast(10 div n as long)"}}
    pair = Pair(spec_of({"a": source}, windows=WINDOWS), session, tmp_path)
    pair.put("a", [{"t": SECOND, "k": "x", "n": n} for n in (1, 0)])
    with pytest.raises(PoisonError, match="DIVIDE_BY_ZERO"):
        pair._survey("spark", cut_of(pair))


@pytest.mark.parametrize(
    ("window", "error"), [("count(*)", None), ("sum(n * n)", "Overflow in multiplication")]
)
def test_what_duckdb_cannot_compute_is_evaluated_by_spark_sql(
    session: SparkSession, tmp_path: Path, window: str, error: str | None
) -> None:
    """Which looks at no product behind a condition that holds. Neither may fold what overflows."""
    windows = {"w": {**WINDOWS["w"], "aggregates": {"n": window}}}
    pair = Pair(
        spec_of({"a": {"where": "k = 'x' or n * 4 > 0"}}, windows=windows), session, tmp_path
    )
    pair.put("a", [{"t": SECOND, "k": "x", "n": n} for n in (2**62, 1)])
    if error is None:
        (member,) = pair._survey("spark", cut_of(pair)).survey.members
        assert member.rows == 2
        return
    with pytest.raises(PoisonError, match=error):
        pair._survey("spark", cut_of(pair))


@pytest.mark.usefixtures("_only_expression_tasks")
def test_corrupt_objects_of_all_units_are_named(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task fails: Spark would try it again."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    pair = Pair(spec_of(dict.fromkeys("abc", UNPROVEN["where"])), session, tmp_path)
    for source in "abc":
        pair.put(source, [{"t": SECOND, "k": "x", "v": 0.5}] * 100)
    for source in "ac":
        path = pair.store.local_path(f"inbox/{source}/0-00000.parquet")
        assert path is not None
        footer = pq.ParquetFile(path).metadata.serialized_size
        whole = path.read_bytes()
        path.write_bytes(b"\xff" * (len(whole) - footer - 8) + whole[-footer - 8 :])
    with pytest.raises(CorruptObjectsError) as caught:
        pair._survey("spark", cut_of(pair))
    assert caught.value.keys == ("inbox/a/0-00000.parquet", "inbox/c/0-00000.parquet")


@pytest.mark.usefixtures("_only_expression_tasks")
def test_rows_that_get_lost_between_the_tasks_end_the_epoch(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is counted against what was folded."""
    pair = Pair(spec_of({"a": UNPROVEN["where"]}), session, tmp_path)
    pair.put("a", [{"t": SECOND, "k": k} for k in "xyz"])

    def lose_rows(*given: Any) -> Any:
        return cast_to_declared(*given).where("k <> 'z'")

    monkeypatch.setattr(expression_tasks, "cast_to_declared", lose_rows)
    with pytest.raises(PoisonError, match="answers of tasks did not arrive"):
        pair._survey("spark", cut_of(pair))


def cut_of(pair: Pair) -> Cut:
    """The cut over everything that waits."""
    return Cut(tuple(pair._slice(m, done=False, blocked=False) for m in sorted(pair.waiting)))
