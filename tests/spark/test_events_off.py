"""Pipelines that only count what leaves (``outputs.events: false``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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


TASKS = ("epoch_context", "late_and_dead_rows")


@pytest.mark.parametrize(
    ("many", "native"),
    [((), True), ((), False), (TASKS, False)],
)
def test_windows_and_late_rows_without_events(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    many: tuple[str, ...],
    native: bool,
) -> None:
    """Both movers count what left, write windows and late rows, and no event.

    By the driver, and by Spark few and many.
    """
    if many:
        monkeypatch.setattr("tidegate.jobs.spark.spark_session.SMALL_ROWS", 0)
        monkeypatch.setattr("tidegate.jobs.spark.tumbling_sliding_windows.MERGE_ROWS", 0)
    for module in many:
        monkeypatch.setattr(f"tidegate.jobs.spark.{module}.FETCH_ROWS", 0)
    spec = spec_of(release={"mode": "pass_through"}, outputs={"events": False}, windows=WINDOWS)
    pair = Pair(spec, session, tmp_path, native=native)
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


def test_a_warm_epoch_compiles_no_code(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frontiers and epoch numbers are no part of the code that Spark generates.

    Three epochs in a row run what was there.
    """
    monkeypatch.setattr(
        "tidegate.jobs.spark.spark_session.SMALL_ROWS", 4
    )  # the eight rows of a cut are many, its late ones few
    for module in TASKS:
        monkeypatch.setattr(f"tidegate.jobs.spark.{module}.FETCH_ROWS", 0)
    pair = Pair(
        spec_of(release={"mode": "pass_through"}, outputs={"events": False}, windows=WINDOWS),
        session,
        tmp_path,
        native=False,
    )
    assert session._jvm is not None
    metrics = session._jvm.org.apache.spark.metrics.source.CodegenMetrics
    compiled: list[int] = []
    while len(set(compiled[-4:])) > 1 or len(compiled) < 4:
        epoch = len(compiled)
        assert epoch < 20, compiled  # threads may plan a stage in another way, now and then
        for source in ("a", "b"):
            times = [epoch * 20 + t for t in (21, 35, 39, 3)]
            pair.put(
                source,
                [{"t": t * SECOND, "kind": "data", "k": "x", "n": 1, "v": 0.5} for t in times],
            )
        pair.run(epoch * SECOND)
        compiled.append(metrics.METRIC_COMPILATION_TIME().getCount())
    assert pair.table("late")


def test_dropped_rows_are_counted_by_spark(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be more than the driver holds."""
    for module in TASKS:
        monkeypatch.setattr(f"tidegate.jobs.spark.{module}.FETCH_ROWS", 0)
    windows = {"w": WINDOWS["w"] | {"on_late": "drop"}}
    spec = spec_of(release={"mode": "pass_through"}, outputs={"events": False}, windows=windows)
    pair = Pair(spec, session, tmp_path, native=False)
    collected: list[list[str]] = []
    frames = type(session.range(1))
    collect = frames.toArrow

    def note_columns(frame: Any) -> Any:
        """Collect, and note of what."""
        table = collect(frame)
        collected.append(table.column_names)
        return table

    monkeypatch.setattr(frames, "toArrow", note_columns)
    for epoch, times in enumerate(([1, 14], [31, 3])):
        for source in ("a", "b"):
            pair.put(source, [{"t": t * SECOND, "kind": "data", "k": "x"} for t in times])
        pair.run(epoch * SECOND)
    pair.run(2 * SECOND, done=True)
    assert ["_source", "output", "reason", "_dropped", "count_all"] in collected
    assert not [names for names in collected if {"output", "_seq"} <= {*names}]
