"""Windows folded by NumPy and DuckDB: the same as by Spark SQL, and the same as the oracle's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.agreement import SECOND, Pair, rows_of, same, spec_of, table_of
from tidegate.jobs.spark.native_windows import (
    SAFE_TICKS,
    explain_spark_window,
    fold_slice,
    plan_window_folds,
)
from tidegate.time_units import TICK_MAX, TICK_MIN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AGGREGATES = {
    "rows": "count(*)",
    "filled": "count(v)",
    "total": "sum(v)",
    "whole": "sum(n)",
    "mean": "avg(v)",
    "level": "avg(n)",
    "low": "min(n)",
    "newest": "max(t)",
}


def draw_windows(draw: random.Random) -> dict[str, Any]:
    """Three windows of kinds that are folded natively, with drawn options."""
    shapes: list[dict[str, Any]] = [
        {"kind": "tumbling", "size": "10s"},
        {"kind": "sliding", "size": "10s", "slide": draw.choice(["5s", "3s", "10s"])},
        {"kind": "sliding", "size": "4s", "slide": "9s"},
    ]
    return {
        f"w{number}": {
            **shape,
            "offset": draw.choice(["0", "-2s", "1s"]),
            "late_unit": draw.choice(["event", "window", "first_window"]),
            "keys": draw.choice([["k"], [], ["k", "_source"], ["n", "t"]]),
            "aggregates": dict(draw.sample(sorted(AGGREGATES.items()), 4)),
            "lateness": draw.choice(["0", "4s", "20s", "never"]),
            "on_late": draw.choice(["side_output", "side_output", "drop", "reject_to_origin"]),
            "emit": draw.choice(["close", "close", "close", "each_epoch", "complete"]),
        }
        for number, shape in enumerate(shapes)
    }


def feed(pair: Pair, draw: random.Random, epochs: int) -> None:
    """Disorder, silence, late rows, dead rows and barriers."""
    around = draw.choice([0, -50])
    for epoch in range(epochs):
        for source in "ab":
            for partition in draw.choice([["0"], ["0", "1"]]):
                rows = rows_of(draw, around)
                if draw.random() < 0.1:
                    rows.append({"t": None, "kind": "data", "k": "x", "n": 1})
                pair.put(source, rows, partition)
        pair.run(epoch * SECOND)
        around += draw.choice([5, 10, 10, 25])
    for drain in range(1, 20):
        if not any(pair.waiting.values()):
            break
        pair.run(drain * 10 * SECOND)
    pair.run(300 * SECOND, done=True)


def read_schemas(pair: Pair) -> dict[str, set[tuple[str, str]]]:
    """Columns and types of every table and kind of segment that the Spark side has written."""
    found: dict[str, set[tuple[str, str]]] = {}
    for moved in pair.sides["spark"].moved:
        for ref in (*moved.segments, *(ref for refs in moved.files.values() for ref in refs)):
            path = pair.store.local_path(ref.key)
            fields = {(field.name, str(field.type)) for field in pq.read_schema(path)}
            assert found.setdefault(ref.kind, fields) == fields, ref.kind
    return found


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_native_windows_are_those_of_spark_sql(
    session: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Equal tables, counters and column types, both ways; and both agree with the oracle."""
    pairs = []
    for native in (True, False):
        draw = random.Random(seed)
        marks = {"kind": "kind", "types": ["stop"]}
        spec = spec_of(
            {"a": {"lag": "2s", "barriers": marks}, "b": {"barriers": marks}},
            release={"mode": "pass_through"},
            outputs={"events": draw.random() < 0.3},
            windows=draw_windows(draw),
            barriers={"timeout": "5s"},
        )
        pair = Pair(spec, session, tmp_path / str(native), native=native)
        feed(pair, draw, epochs=5 if native else 3)
        pairs.append(pair)
    native_side, spark_side = (pair.sides["spark"].moved for pair in pairs)
    for ours, theirs in zip(native_side[:3], spark_side[:3], strict=True):
        assert ours.counters == theirs.counters
        for table in {*ours.files, *theirs.files}:
            left = pairs[0].rows(ours.files.get(table, ()))
            assert same(left, pairs[1].rows(theirs.files.get(table, ())))
    schemas = [read_schemas(pair) for pair in pairs]
    for kind in schemas[0].keys() & schemas[1].keys():
        assert schemas[0][kind] == schemas[1][kind], kind


@pytest.mark.spark
def test_an_epoch_without_events_asks_spark_for_nothing(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Survey, windows, late rows and more segments than are kept: no DataFrame is ever built."""

    def refuse(*_: Any) -> DataFrame:
        raise AssertionError("a DataFrame was built")

    for place in ("cut_reader.arrow_to_frame", "epoch_context.arrow_to_frame"):
        monkeypatch.setattr(f"tidegate.jobs.spark.{place}", refuse)
    window = {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "lateness": "never",
        "late_unit": "event",
        "aggregates": AGGREGATES,
    }
    spec = spec_of(
        {"a": {}},
        release={"mode": "pass_through"},
        outputs={"events": False},
        windows={"w": window},
    )
    pair = Pair(spec, session, tmp_path)
    for epoch in range(20):
        times = (epoch * 10, epoch * 10 + 7, max(epoch * 10 - 9, 0))
        pair.put("a", [{"t": t * SECOND, "kind": "data", "k": "x", "n": 1} for t in times])
        pair.run(epoch * SECOND)
    assert pair.table("late")
    assert len(pair.sides["spark"].segments) < 20


@pytest.mark.spark
def test_a_decision_by_another_frontier_is_left_to_spark_sql(
    session: SparkSession, tmp_path: Path
) -> None:
    """The fold judged the rows by the frontier in the state; a decision that names another one
    does not get these results.
    """
    from dataclasses import replace

    from tidegate.jobs.eventtime.decider import decide

    window = {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)"}}
    spec = spec_of(
        {"a": {}},
        release={"mode": "pass_through"},
        outputs={"events": False},
        windows={"w": window},
    )
    pair = Pair(spec, session, tmp_path)
    pair.put("a", [{"t": t * SECOND, "kind": "data"} for t in (3, 14, 40)])
    usual = decide(spec, pair.state, replace(_survey(pair), now=SECOND))
    pair.run(SECOND, decision=replace(usual, frontier_before=10 * SECOND))
    assert len(pair.table("late")) == 1


def _survey(pair: Pair) -> Any:
    from tidegate.jobs.engine.interfaces import Cut
    from tidegate.jobs.eventtime.decision_types import Member

    cut = Cut((pair._slice(Member("a", "0"), done=False, blocked=False),))
    return pair.sides["reference"].mover.survey(cut, pair.state).survey


@pytest.mark.spark
def test_objects_of_one_slice_may_differ_in_form(session: SparkSession, tmp_path: Path) -> None:
    """Keys as a dictionary and as text, a narrower number, a dead row: folded all the same."""
    window = {"kind": "tumbling", "size": "10s"}
    windows = {
        "all": {**window, "aggregates": {"n": "count(*)"}},
        "each": {**window, "keys": ["k"], "aggregates": {"s": "sum(n)"}},
    }
    for number, names in enumerate((["all"], ["all", "each"])):
        spec = spec_of(
            {"a": {}},
            release={"mode": "pass_through"},
            outputs={"events": False},
            windows={name: windows[name] for name in names},
        )
        pair = Pair(spec, session, tmp_path / str(number))
        plain = table_of([{"t": SECOND, "k": "x", "n": 1}, {"t": None, "k": "x", "n": 1}])
        other = plain.set_column(2, "k", plain["k"].dictionary_encode())
        pair.put("a", other.set_column(3, "n", plain["n"].cast(pa.int32())))
        pair.put("a", plain)
        pair.run(0)
        pair.run(300 * SECOND, done=True)
        assert [row["n"] for row in pair.table("all")] == [2]


# Without Spark


def plan(**window: Any) -> Any:
    """The fold of a tumbling window of 10 s with these options; None if Spark SQL has to."""
    base = {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)"}}
    spec = spec_of(windows={"w": {**base, **window}})
    assert (explain_spark_window(spec, "w") is None) == ("w" in plan_window_folds(spec))
    return plan_window_folds(spec).get("w")


@pytest.mark.unit
@pytest.mark.parametrize(
    "window",
    [
        {"kind": "session", "size": None, "gap": "5s"},
        {"on_late": "adjust"},
        {"zero_rows": True, "keys": ["k"]},
        {"fire_every": "3s"},
        {"revisions": "delta", "lateness": "5s"},
        {"keys": ["v"]},
        {"aggregates": {"top": "max(v)"}},
        {"aggregates": {"twice": "sum(n * 2)"}},
        {"aggregates": {"all": "collect(n)"}},
        {"aggregates": {"name": "min(k)"}},
    ],
)
def test_what_is_not_proven_equal_is_left_to_spark_sql(window: dict[str, Any]) -> None:
    """Floats compare by their own rules, lists have no bound, expressions are Spark's language."""
    assert plan(**window) is None


@pytest.mark.unit
def test_a_sliding_row_counts_in_each_of_its_open_windows() -> None:
    """Windows of 10 s every 5 s: a purged one is left out, a closed one gets an update."""
    fold = plan(kind="sliding", slide="5s", lateness="5s", aggregates={"n": "count(*)"})
    times = np.array([12, 14, 21]) * SECOND
    found = fold_slice({"w": fold}, "a", table_of([{}, {}, {}]), times, 20 * SECOND)
    assert found is not None
    rows = {
        (row["_ws"] // SECOND, row["_on"], row["_n"], row["_s0"])
        for row in found.partials["w"].to_pylist()
    }
    assert rows == {(10, 0, 1, 2), (15, 1, 1, 1), (20, 1, 1, 1)}
    assert (found.late["w"].tolist(), found.expired["w"]) == ([], 2)


@pytest.mark.unit
def test_rows_that_int64_or_a_sum_cannot_hold_are_left_to_spark_sql() -> None:
    """Spark SQL raises its own error, or computes with more care."""
    fold = plan(aggregates={"s": "sum(n)"})
    large = table_of([{"n": TICK_MAX}, {"n": 1}])
    assert fold_slice({"w": fold}, "a", large, np.array([1, 2]), TICK_MIN) is None
    small = table_of([{"n": 1}, {"n": 1}])
    assert fold_slice({"w": fold}, "a", small, np.array([1, 2]), TICK_MIN) is not None
    assert fold_slice({"w": fold}, "a", small, np.array([1, SAFE_TICKS + 1]), TICK_MIN) is None


@pytest.mark.unit
@pytest.mark.parametrize(("frontier", "late"), [(TICK_MIN, 0), (TICK_MAX, 2)])
def test_before_the_first_frontier_nothing_is_late_and_after_the_last_everything(
    frontier: int, late: int
) -> None:
    """The ends of int64 are no times."""
    fold = plan()
    found = fold_slice({"w": fold}, "a", table_of([{}, {}]), np.array([1, 2]), frontier)
    assert found is not None
    assert (found.late["w"].size, found.expired["w"]) == (late, late)
    assert pa.compute.sum(found.partials["w"]["_s0"]).as_py() == (None if late else 2)
