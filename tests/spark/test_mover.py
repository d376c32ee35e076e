"""The Spark mover, against the reference mover on the same cuts and decisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.agreement import SECOND, Pair, spec_of

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
