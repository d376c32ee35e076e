"""Row rules on Spark: the same rows as the oracle, for few rows and for many."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.agreement import SECOND, Pair, spec_of
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.driver.spec_checks import judge_with_spark, require_no_mistakes

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


@pytest.mark.parametrize("many", [False, True])
def test_both_movers_judge_alike(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """Rows, counts and surveys are equal; a source without rules stays as it is."""
    if many:
        monkeypatch.setattr("tidegate.jobs.spark.spark_session.SMALL_ROWS", 0)
        for module in ("file_writer", "epoch_context", "late_and_dead_rows"):
            monkeypatch.setattr(f"tidegate.jobs.spark.{module}.FETCH_ROWS", 0)
    draw = random.Random(7)
    marks = {"kind": "kind", "types": ["stop"]}
    sources = {"a": {"rules": RULES, "barriers": marks}, "b": {}}
    pair = Pair(spec_of(sources, windows={"w": WINDOW}), session, tmp_path)
    for epoch in range(1 if many else 2):  # the plans for many rows take longer
        for source in sources:
            rows = random_rows(draw, 60)
            if (epoch, source) == (0 if many else 1, "a"):  # rows behind a barrier wait
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


def test_fail_names_rule_object_and_row(session: SparkSession, tmp_path: Path) -> None:
    """The first broken row in front of the barrier stops the epoch; rows behind it wait."""
    rules = {"low": {"predicate": "n < 5", "severity": "fail"}}
    sources = {"a": {"rules": rules, "barriers": {"kind": "kind", "types": ["stop"]}}}
    pair = Pair(spec_of(sources), session, tmp_path)
    good = {"t": SECOND, "kind": "data", "k": "x", "n": 1, "v": 0.5}
    pair.put("a", [good, {**good, "kind": "stop"}, {**good, "n": 7}])
    pair.run(SECOND)
    with pytest.raises(PoisonError, match=r"row 2 of inbox/a/.* rule low .*\(n < 5\).*\"n\":7"):
        pair.spark.survey(pair_cut(pair), pair.state)


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
