"""The Spark mover, against the reference mover on the same cuts and decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.agreement import SECOND, Pair, spec_of
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decider import decide
from tidegate.jobs.eventtime.types import Member
from tidegate.jobs.spec.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TUMBLING = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["k"],
    "lateness": "5s",
    "aggregates": {"rows": "count(*)", "total": "sum(v)"},
}


def test_ordered_release_late_rows_and_revisions(session: SparkSession, tmp_path: Path) -> None:
    """Three epochs with disorder release in order, keep late rows and revise a window, exactly as the reference does."""
    pair = Pair(spec_of(windows={"w": TUMBLING}), session, tmp_path)
    pair.put("a", [{"t": s * SECOND, "k": "x", "n": s, "v": s / 2} for s in (1, 3, 2, 14)])
    pair.put("b", [{"t": s * SECOND, "k": "y", "n": s, "v": s / 2} for s in (2, 12, 13)])
    pair.run(0)
    pair.put("a", [{"t": s * SECOND, "k": "x", "n": s, "v": s / 2} for s in (8, 4, 30)])
    pair.put("b", [{"t": s * SECOND, "k": None, "n": s, "v": None} for s in (9, 25, 29)])
    pair.run(SECOND)
    pair.put("a", [{"t": s * SECOND, "k": "x", "n": s, "v": s / 2} for s in (17, 1, 40)])
    pair.put("b", [{"t": s * SECOND, "k": "x", "n": s, "v": 1.0} for s in (16, 60)])
    pair.run(2 * SECOND)
    pair.run(3 * SECOND, done=True)
    events = pair.table("events")
    assert sorted(row["position"] for row in events) == list(range(len(events)))
    assert pair.table("late")
    assert any(row["revision"] == 1 for row in pair.table("w"))


def test_an_empty_object_hides_none_behind_it(session: SparkSession, tmp_path: Path) -> None:
    """Rows of objects that follow an object without rows are read (an empty Arrow batch ends the stream for Spark)."""
    pair = Pair(spec_of(release={"mode": "pass_through"}), session, tmp_path)
    pair.put("a", [])
    pair.put("a", [{"t": SECOND}])
    pair.put("b", [])
    pair.put("b", [{"t": 2 * SECOND}])
    spark, _ = pair.run(0)
    assert spark.counters.released == 2


def test_any_sql_aggregate_over_kept_rows(session: SparkSession, tmp_path: Path) -> None:
    """An aggregate that has no mergeable state is computed over the window's rows of several epochs."""
    window = {**TUMBLING, "aggregates": {"middle": "sql(percentile(v, 0.5))", "pairs": "sql(count(*) * 2)", "rows": "count(*)"}}
    pair = Pair(spec_of({"a": {"lag": "0"}}, windows={"w": window}), session, tmp_path)
    pair.sides["reference"] = pair.sides["spark"]
    mover = pair.spark
    for epoch, seconds in enumerate(((1, 2), (3, 12))):
        pair.put("a", [{"t": s * SECOND, "k": None, "v": float(s)} for s in seconds])
        cut = Cut((pair._slice(Member("a"), done=False, blocked=False),))
        decision = decide(pair.spec, pair.state, replace(mover.survey(cut, pair.state), now=epoch))
        pair.epoch += 1
        pair._move("spark", cut, decision)
        pair.state = decision.after
        pair._consume(cut.slices[0])
    assert [(row["middle"], row["pairs"], row["rows"]) for row in pair.table("w")] == [(2.0, 6, 3)]


def test_what_spark_cannot_do_is_refused(session: SparkSession, tmp_path: Path) -> None:
    """An option that would be left out without a word is a configuration error."""
    with pytest.raises(ConfigurationError, match="zero_rows"):
        Pair(spec_of(windows={"w": {**TUMBLING, "zero_rows": True}}), session, tmp_path)
