"""Sessions and windows that fire early, of rows that Spark's Python tasks read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.scheduling import sample_in_ci
from tests.spark.agreement import SECOND, Pair, divide_finely, spec_of
from tests.spark.session_cases import run_case
from tidegate.errors import PoisonError
from tidegate.jobs.rows import cut_division
from tidegate.jobs.rows.unit_reading import read_unit
from tidegate.jobs.spark import mover, task_epochs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SESSION = {
    "kind": "session",
    "gap": "5s",
    "session_late": "merged",
    "keys": ["k"],
    "aggregates": {"rows": "count(*)", "total": "sum(v)"},
}
OFF: dict[str, Any] = {"release": {"mode": "pass_through"}, "outputs": {"events": False}}


@pytest.fixture
def tasks_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """This process runs the tasks, the last unit first; returns each job with its slices."""
    jobs: list[tuple[str, list[int]]] = []

    def run_here(_: Any, order: Any, units: Any, *__: Any) -> Any:
        indexes = [index for unit in units for index in unit.indexes]
        jobs.append(("late" if order.gone else "read", indexes))
        answers = [read_unit(order, unit).answer for unit in reversed(units)]
        return answers[::-1], None

    def open_nothing(_: Any) -> Any:
        return SimpleNamespace(stop=lambda: None)

    monkeypatch.setattr(mover, "open_session", open_nothing)
    runner = SimpleNamespace(start_workers=lambda *_: None, run_read_job=run_here)
    for module in (mover, task_epochs):
        monkeypatch.setattr(module, "choose_runner", lambda _: runner)
    return jobs


@pytest.mark.parametrize("seed", sample_in_ci(range(6), 4))
def test_sessions_are_those_of_the_oracle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tasks_here: list[tuple[str, list[int]]],
    seed: int,
) -> None:
    """Tables and counters, epoch by epoch, with one unit an epoch, a slice, or a few rows."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", [1, 600_000][seed % 2])
    if seed % 4 == 2:
        divide_finely(monkeypatch)
    run_case(None, tmp_path, seed, epochs=6)
    assert tasks_here


def put_times(pair: Pair, source: str, *seconds: int, key: str | None = "x") -> None:
    """One object with rows at these times."""
    pair.put(source, [{"t": t * SECOND, "k": key, "v": 0.1} for t in seconds])


def open_pair(folder: Path, monkeypatch: pytest.MonkeyPatch, **windows: Any) -> Pair:
    """A pipeline whose frontier is at 95 s, with a unit for each member."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    pair = Pair(spec_of(windows=windows, **OFF), None, folder)
    for source in "ab":
        put_times(pair, source, 100)
    pair.run(0)
    return pair


@pytest.mark.parametrize("key", ["x", None])
def test_a_row_is_saved_by_a_row_of_another_unit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tasks_here: list[tuple[str, list[int]]],
    key: str | None,
) -> None:
    """88 s alone would be late, and so would be 86 s; what they meet ends behind the frontier.

    Nothing meets 50 s. Only its unit is read again.
    """
    pair = open_pair(tmp_path, monkeypatch, s=SESSION)
    put_times(pair, "a", 88, key=key)
    put_times(pair, "b", 50, 91, 86, key=key)
    pair.run(SECOND)
    assert [row["_seq"] & 0xFFFFFFFF for row in pair.table("late")] == [0]
    assert tasks_here[1:] == [("read", [0, 1]), ("late", [1])]
    pair.run(2 * SECOND, done=True)
    assert sorted(row["rows"] for row in pair.table("s") if row["k"] == key)[-1] >= 2


def test_a_row_that_is_late_for_several_outputs_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks_here: list[tuple[str, list[int]]]
) -> None:
    """For a tumbling window in the first job, for sessions in the second."""
    tumbling = {**SESSION, "kind": "tumbling", "size": "10s"}
    for name in ("gap", "session_late"):
        del tumbling[name]
    pair = open_pair(tmp_path, monkeypatch, w=tumbling, s=SESSION, d={**SESSION, "on_late": "drop"})
    put_times(pair, "a", 40, 41, 99)
    put_times(pair, "b", 99)
    moved, _ = pair.run(SECOND)
    assert [job for job, _ in tasks_here] == ["read", "read", "late"]
    assert moved.counters.per_source["a"]["late_rows"] == 2
    assert sorted(row["output"] for row in pair.table("late")) == ["s", "s", "w", "w"]


def test_the_first_late_row_under_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks_here: list[tuple[str, list[int]]]
) -> None:
    """Of the first unit that has one; nothing is written."""
    pair = open_pair(tmp_path, monkeypatch, s={**SESSION, "on_late": "error"})
    put_times(pair, "b", 99, 60, 40, 50)
    with pytest.raises(PoisonError, match=r"b/0 row 4294967297: event time 60000000 is late for s"):
        pair.run(SECOND)
    assert tasks_here[-1] == ("late", [1])


def test_a_row_at_the_bounds_of_a_live_session_joins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks_here: list[tuple[str, list[int]]]
) -> None:
    """And never the session before it, whatever order the engine gives to equal bounds."""
    window = {**SESSION, "session_touch": "separate", "lateness": "never", "keys": []}
    pair = open_pair(tmp_path, monkeypatch, s=window)
    times = range(0, 90, 6)
    for second in range(2):
        put_times(pair, "a", *times)
        pair.run(second * SECOND)
    assert tasks_here
    pair.run(9 * SECOND, done=True)
    assert {row["rows"] for row in pair.table("s") if row["revision"] == 1} == {2}


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", sample_in_ci([2, 4], 1))
def test_sessions_of_spark_tasks_are_those_of_the_oracle(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In real tasks, beside ordered events; the items are merged by tasks where they are many."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    if seed == 4:
        monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", 5)
    more = {"release": {"mode": "ordered", "on_late": "side_output"}, "outputs": {"events": True}}
    run_case(session, tmp_path, seed, epochs=4, **more)
