"""Pipelines that only count what leaves (``outputs.events: false``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.agreement import SECOND, Pair, spec_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

WINDOWS = {
    "w": {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "aggregates": {"n": "count(*)", "s": "sum(v)"},
    }
}


@pytest.mark.parametrize("most", [500_000, 1], ids=["driver", "tasks"])
def test_windows_and_late_rows_without_events(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Both movers count what left, write windows and late rows, and no event.

    State is merged by the driver, and by tasks.
    """
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    spec = spec_of(release={"mode": "pass_through"}, outputs={"events": False}, windows=WINDOWS)
    pair = Pair(spec, session, tmp_path)
    for epoch, times in enumerate(([1, 2, 14], [15, 31, 3], [4, 40])):
        for source in ("a", "b"):
            pair.put(
                source,
                [{"t": t * SECOND, "kind": "data", "k": "x", "n": 1, "v": 0.5} for t in times],
            )
        pair.run(epoch * SECOND)
    moved, _ = pair.run(10 * SECOND, done=True)
    assert moved.files.get("events", ()) == ()
    assert pair.table("events") == []
    accepted, late = sum(row["n"] for row in pair.table("w")), len(pair.table("late"))
    assert (accepted + late, late) == (16, 2)
