"""Row rules on Spark: the same rows as the oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tests.spark.agreement import SECOND, TIMESTAMP, Pair, spec_of
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.driver.spec_checks import judge_with_spark, require_no_mistakes
from tidegate.jobs.rules.native_support import explain_unproven_expressions
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

RULES = {
    "small": {"predicate": "n < 90", "severity": "drop"},
    "known": {"predicate": "k in ('x', 'y')", "severity": "quarantine"},
    "even": {"predicate": "n % 2 = 0 -- null breaks it"},
    "low": {"predicate": "v <= 0.5", "severity": "warn"},
    "time": {"predicate": "t > timestamp '1970-01-01 00:00:04'", "severity": "quarantine"},
}
WINDOW = {"kind": "tumbling", "size": "10s", "aggregates": {"rows": "count(*)", "sum": "sum(n)"}}


def random_rows(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Rows that break some rules, lack times, or come late."""
    return [
        {
            "t": None if draw.random() < 0.1 else draw.randrange(40) * SECOND,
            "kind": draw.choice(["data", "data", None]),
            "k": draw.choice(["x", "y", "z", None]),
            "n": draw.choice([None, draw.randrange(100)]),
            "v": draw.random(),
        }
        for _ in range(count)
    ]


SELECTED: dict[str, Any] = {
    "schema": {"t": "timestamp", "kind": "string", "k": "string", "n": "long", "v": "double"},
    "where": "n > 20 -- null is filtered",
    "select": {"t": "t", "kind": "kind", "k": "k", "n": "cast(n - 20 as long)", "v": "v"},
}


@pytest.mark.parametrize("is_proven", [False, True], ids=["spark", "duckdb"])
def test_both_movers_judge_alike(session: SparkSession, tmp_path: Path, is_proven: bool) -> None:
    """Rows, counts and surveys are equal; a source without rules stays as it is."""
    draw = random.Random(7)
    marks = {"kind": "kind", "types": ["stop"]}
    selected = {**SELECTED, "rules": {"odd": {"predicate": "n % 2 = 1", "severity": "drop"}}}
    sources: dict[str, dict[str, Any]] = {
        "a": {"rules": RULES, "barriers": marks},
        "b": {},
        "c": {**selected, "barriers": marks},
    }
    spec = spec_of(sources, windows={"w": WINDOW})
    if is_proven:  # without a literal and comments that only Spark knows
        text = (
            spec.canonical_json()
            .replace(" -- null breaks it", "")
            .replace(" -- null is filtered", "")
        )
        text = text.replace("t > timestamp '1970-01-01 00:00:04'", "length(k) = 1 and t = t")
        spec = PipelineSpec.model_validate_json(text)
    assert (explain_unproven_expressions(spec) is None) == is_proven
    pair = Pair(spec, session, tmp_path)
    for epoch in range(2):
        for source in sources:
            rows = random_rows(draw, 60)
            if (epoch, source) == (1, "a"):  # rows behind a barrier wait
                rows[50]["kind"] = "stop"
            pair.put(source, rows)
        pair.run(epoch * SECOND)
    counts: dict[str, int] = {}
    for moved in pair.sides["spark"].moved:
        for name, count in moved.counters.per_source["a"].items():
            counts[name] = counts.get(name, 0) + count
        assert not any(name.startswith("rule") for name in moved.counters.per_source["b"])
    assert {f"rule:{name}" for name in RULES} < counts.keys()
    assert counts["rule_quarantined"] == counts["rule:known"] + counts["rule:time"]
    assert counts["dropped:events:rule"] == counts["rule:small"]
    for moved in pair.sides["spark"].moved:
        assert moved.counters.filtered == moved.counters.per_source["c"]["filtered"] > 10


def test_rows_that_are_only_counted_need_no_spark_sql(tmp_path: Path) -> None:
    """Tasks filter, select, warn and drop."""
    rules = {"low": {"predicate": "n < 50"}, "even": {"predicate": "n % 2 = 0", "severity": "drop"}}
    source = {**SELECTED, "where": "n > 20", "rules": rules}
    spec = spec_of({"a": source}, windows={"w": WINDOW})
    session: Any = LocalSession()
    pair = Pair(spec, session, tmp_path)
    pair.put("a", [{**row, "t": row["t"] or 0} for row in random_rows(random.Random(3), 60)])
    moved, _ = pair.run(SECOND)
    counts = moved.counters.per_source["a"]
    assert counts.keys() > {"filtered", "rule:low", "rule:even", "rule_warned", "released"}


def test_nested_fields_and_json_are_selected(session: SparkSession, tmp_path: Path) -> None:
    """Fields of structs and of JSON texts become columns; a row of another form is a dead letter."""
    own = {
        "schema": {"at": "timestamp", "who": "struct<name: string, born: int>", "text": "string"},
        "select": {
            "t": "at",
            "kind": "cast(null as string)",
            "k": "cast(who.name as string)",
            "n": "cast(who.born as long)",
            "v": "cast(get_json_object(text, '$.v') as double)",
        },
        "where": "who is not null",
        "barriers": None,
    }
    pair = Pair(spec_of({"a": own}), session, tmp_path)
    who = pa.struct([("name", pa.string()), ("born", pa.int32())])
    columns = {
        "at": pa.array([1, 2, 3], pa.int64()).cast(TIMESTAMP),
        "who": pa.array([{"name": "ü", "born": 3}, None, {"name": None, "born": None}], who),
        "text": pa.array(['{"v": 1.5}', '{"v": 2}', "{}"]),
    }
    pair.put("a", pa.table(columns))
    moved, _ = pair.run(SECOND)
    assert (moved.counters.read, moved.counters.filtered) == (3, 1)
    pair.put("a", pa.table({**columns, "who": pa.array(["x", None, "y"])}))
    moved, _ = pair.run(2 * SECOND, done=True)
    assert (moved.counters.dead_lettered, moved.counters.filtered) == (2, 1)
    rows = {(row["k"], row["n"], row["v"]) for row in pair.table("events")}
    assert rows == {("ü", 3, 1.5), (None, None, None)}


def test_fail_names_rule_object_and_row(session: SparkSession, tmp_path: Path) -> None:
    """The first broken row in front of the barrier stops the epoch; rows behind it wait."""
    rules = {"low": {"predicate": "n < 5", "severity": "fail"}}
    sources = {"a": {"rules": rules, "barriers": {"kind": "kind", "types": ["stop"]}}}
    pair = Pair(spec_of(sources), session, tmp_path)
    good = {"t": SECOND, "kind": "data", "k": "x", "n": 1, "v": 0.5}
    pair.put("a", [good, {**good, "kind": "stop"}, {**good, "n": 7}])
    pair.run(SECOND)
    with pytest.raises(PoisonError, match=r"row 2 of inbox/a/.* rule low .*\(n < 5\).*\"n\":7"):
        pair.spark.survey(pair_cut(pair), pair.state, pair.folders("spark", 2))


def pair_cut(pair: Pair) -> Any:
    """The cut over everything that waits."""
    from tidegate.jobs.engine.interfaces import Cut
    from tidegate.jobs.eventtime.decision_types import Member

    return Cut((pair._slice(Member("a"), done=False, blocked=False),))


@pytest.mark.parametrize("predicate", ["lenght(k) > 1", "k > date '2020-01-01' + k"])
def test_a_rule_that_spark_cannot_use_ends_the_start(session: SparkSession, predicate: str) -> None:
    """What only Spark can know is an error of the configuration before anything is read."""
    spec = spec_of({"a": {"rules": {"odd": {"predicate": predicate}}}})
    with pytest.raises(ConfigurationError, match=r"sources.a.rules.odd.predicate: "):
        judge_with_spark(session, spec, require_no_mistakes(spec))
