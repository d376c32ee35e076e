"""Edge events on Spark.

Against the oracle mover on random edges and cuts, and through restores.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.oracle.mover import OracleMover
from tests.spark.agreement import COLUMNS, SECOND, Pair, Row, Side, spec_of
from tests.spark.edge_cases import run_case
from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.errors import FileUnreadableError
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CASES = int(os.environ.get("TIDEGATE_SOAK", "1"))


@pytest.mark.timeout(900)  # a case is some 50 small jobs; on a loaded machine each takes seconds
@pytest.mark.parametrize("seed", range(CASES))
def test_movers_agree_on_edges(session: SparkSession, tmp_path: Path, seed: int) -> None:
    """On equal cuts and decisions both movers give the same tables and counters, epoch by epoch, on
    to the end of all input.
    """
    run_case(session, tmp_path, seed, epochs=4)


@pytest.mark.timeout(900)
def test_movers_agree_on_many_edges(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that merge buckets of keys give what the driver gives for few rows."""
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", 5)
    run_case(session, tmp_path, seed=1, epochs=2)


WINDOW = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["k"],
    "late_unit": "event",
    "aggregates": {"rows": "count(*)", "top": "max(n)"},
}
MACHINES = {"edges": {"kind": "kind", "keys": ["k"]}, "lag": "0"}


def edge(second: int, what: str | None, key: str = "x", number: int = 1) -> Row:
    """A start, an end, or a row that is neither."""
    return {"t": second * SECOND, "kind": what, "k": key, "n": number, "v": None}


def told(pair: Pair) -> list[tuple[str, int, int, int]]:
    """(key, window start, rows, greatest n) of all results."""
    return sorted(
        (r["k"], int(r["window_start"].timestamp()), r["rows"], r["top"]) for r in pair.table("w")
    )


def restored(pair: Pair, spec: PipelineSpec, session: SparkSession, folder: Path) -> Pair:
    """Both movers again, on another disk: what they go on from is what a manifest holds."""
    from tidegate.jobs.spark.mover import SparkMover

    after = Pair(spec, session, folder)
    after.store = pair.store
    after.spark = SparkMover(pair.store, spec, folder / "work", session=session)
    after.state = json.loads(json.dumps(pair.state))
    after.epoch, after.ordinals, after.waiting = pair.epoch, pair.ordinals, pair.waiting
    for name, mover in (("spark", after.spark), ("reference", OracleMover(pair.store, spec))):
        old = pair.sides[name]
        kept = tuple(FileRef.model_validate_json(ref.model_dump_json()) for ref in old.segments)
        after.sides[name] = Side(mover, old.pipeline, kept, old.position, old.moved)
    return after


def test_an_edge_that_is_open_at_a_restore_goes_on(session: SparkSession, tmp_path: Path) -> None:
    """It is in the checkpoint, counts in what closes after the restore, also on other
    partitions, and its end ends it.
    """
    pair = Pair(spec_of({"a": MACHINES}, windows={"w": WINDOW}), session, tmp_path)
    pair.put("a", [edge(3, "start", number=7), edge(4, "start", "y"), edge(12, None, "z")])
    pair.run(0)
    assert [
        (ref.kind, ref.rows, ref.min_time)
        for ref in pair.sides["spark"].segments
        if ref.kind == "edges"
    ] == [("edges", 2, 3 * SECOND)]
    before = session.conf.get("spark.sql.shuffle.partitions") or "1"
    try:
        session.conf.set("spark.sql.shuffle.partitions", "7")
        pair = restored(pair, pair.spec, session, tmp_path / "other")
        pair.put("a", [edge(25, "end", "y"), edge(31, None, "z")])
        spark, _ = pair.run(SECOND)
        assert (
            sum(ref.rows for ref in spark.segments if ref.kind == "edges") == 1
        )  # released at its end, the other retained
        pair.put("a", [edge(33, "end"), edge(95, None, "z")])
        spark, _ = pair.run(2 * SECOND)
        assert not any(ref.kind == "edges" for ref in spark.segments)
    finally:
        session.conf.set("spark.sql.shuffle.partitions", before)
    expected = [("x", start, 1, 7) for start in (0, 10, 20, 30)] + [
        ("y", start, 1, 1) for start in (0, 10, 20)
    ]
    assert told(pair) == [*expected, ("z", 10, 1, 1), ("z", 30, 1, 1)]


def test_under_another_spec_open_edges_go_on(session: SparkSession, tmp_path: Path) -> None:
    """A column that is new is null in them, a window that is new counts them.

    A source that is gone takes its edges along.
    """
    release = {"mode": "pass_through"}  # a column is added only where no rows wait to leave
    pair = Pair(
        spec_of({"a": MACHINES, "b": MACHINES}, windows={"w": WINDOW}, release=release),
        session,
        tmp_path,
    )
    pair.put("a", [edge(3, "start"), edge(6, None, "z")])
    pair.put("b", [edge(4, "start", "y"), edge(6, None, "z")])
    pair.run(0)
    more = {**MACHINES, "schema": {**COLUMNS, "more": "string"}}
    added = {**WINDOW, "keys": [], "aggregates": {"rows": "count(*)", "more": "max(more)"}}
    spec = spec_of({"a": more}, windows={"w": WINDOW, "x": added}, release=release)
    pair = restored(pair, spec, session, tmp_path / "other")
    del pair.ordinals[Member("b")], pair.waiting[Member("b")]
    pair.put("a", [edge(15, "end"), edge(16, None, "z")])
    pair.run(SECOND)
    pair.run(2 * SECOND, done=True)
    assert [r for r in told(pair) if r[0] in "xy"] == [("x", 0, 1, 1), ("x", 10, 1, 1)]
    assert [(r["rows"], r["more"]) for r in pair.table("x")] == [(1, None), (2, None)]


@pytest.mark.parametrize("most", [500_000, 2], ids=["one_task", "several"])
def test_what_only_spark_computes_of_edges_is_computed_between_two_tasks(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Of those that ended, and of those that are open when a window closes."""
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    found = []
    for top in ("max(n)", "max(abs(n))", "sql(max(n))"):
        window = {**WINDOW, "aggregates": {"rows": "count(*)", "top": top}}
        folder = tmp_path / top
        pair = Pair(spec_of({"a": MACHINES}, windows={"w": window}), session, folder)
        pair.put("a", [edge(3, "start", number=7), edge(4, "start", "y"), edge(12, None, "z")])
        pair.run_alone(0)
        pair.put("a", [edge(25, "end", "y", 3), edge(31, None, "z", 5)])
        pair.run_alone(SECOND)
        pair.run_alone(2 * SECOND)  # nothing comes
        pair.put("a", [edge(33, "end"), edge(95, None, "z")])
        moved = pair.run_alone(3 * SECOND)
        assert not any(ref.kind == "edges" for ref in moved.segments)
        found.append(told(pair))
    assert found[0] == found[1] == found[2]
    assert [r for r in found[0] if r[0] == "x"] == [("x", start, 1, 7) for start in (0, 10, 20, 30)]


def test_damaged_edges_are_named_also_between_two_tasks(
    session: SparkSession, tmp_path: Path
) -> None:
    """By the error that the task has met, and not as a failure of Spark."""
    window = {**WINDOW, "aggregates": {"rows": "count(*)", "top": "max(abs(n))"}}
    pair = Pair(spec_of({"a": MACHINES}, windows={"w": window}), session, tmp_path)
    pair.put("a", [edge(3, "start"), edge(12, None, "z")])
    pair.run_alone(0)
    (segment,) = (ref for ref in pair.sides["spark"].segments if ref.kind == "edges")
    path = pair.store.local_path(segment.key)
    assert path is not None
    path.write_bytes(b"PAR1" + path.read_bytes()[4:-1] + b"x")
    pair.put("a", [edge(25, "end")])
    with pytest.raises(FileUnreadableError, match=segment.key):
        pair.run_alone(SECOND)
