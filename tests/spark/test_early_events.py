"""Tasks that write the events while they read the rows: positions are foretold, or rows read twice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spark.agreement import SECOND, Pair, Row, divide_finely, spec_of
from tidegate.errors import PoisonError
from tidegate.jobs.rows import batch_reading, event_files, long_values
from tidegate.jobs.spark import early_events, python_tasks
from tidegate.jobs.spark.early_events import EarlyEvents
from tidegate.jobs.spark.local_session import LocalSession

_SOURCES: dict[str, dict[str, Any]] = {
    "b": {"on_bad": "dead_letter"},
    "a": {"on_bad": "dead_letter"},
}

_WINDOWS: list[dict[str, Any]] = [
    {"kind": "tumbling", "size": "10s", "lateness": "4s"},
    {"kind": "sliding", "size": "10s", "slide": "3s", "on_late": "adjust"},
    {"kind": "session", "gap": "2s"},
]
_AGGREGATES = {"rows": "count(*)", "total": "sum(v)", "opened": "first(n)"}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the jobs that read rows and those that write events."""
    counted = Counter[str]()

    def count_calls(name: str) -> None:
        """Count the calls of a job."""
        run_job = getattr(python_tasks, name)

        def run_and_count(*given: Any, **named: Any) -> Any:
            """Run it."""
            counted[name] += 1
            return run_job(*given, **named)

        monkeypatch.setattr(python_tasks, name, run_and_count)

    count_calls("run_read_job")
    count_calls("run_events_job")
    return counted


def open_events(folder: Path, **more: Any) -> Pair:
    """Both movers over a pipeline whose rows leave as they come."""
    options: dict[str, Any] = {"release": {"mode": "pass_through"}, **more}
    session: Any = LocalSession()
    return Pair(spec_of(options.pop("sources", _SOURCES), **options), session, folder)


def put_rows(pair: Pair, source: str, times: list[int | None], partition: str = "0") -> None:
    """Write an object; a row without a time is a dead letter."""
    rows: list[Row] = [
        {"t": None if t is None else t * SECOND, "kind": None, "k": "x", "n": 1, "v": 0.5}
        for t in times
    ]
    pair.put(source, rows, partition)


def test_one_job_reads_rows_and_writes_events(tmp_path: Path, jobs: Counter[str]) -> None:
    """An epoch whose planned rows all leave has no second job; the oracle has the same positions."""
    pair = open_events(tmp_path)
    for epoch in range(3):
        for source, partition in (("a", "1"), ("b", "0"), ("a", "0")):
            put_rows(pair, source, [epoch * 10, epoch * 10 + 1], partition)
        pair.run(epoch * SECOND)
    assert jobs == {"run_read_job": 3}
    assert [row["position"] for row in _sort_by_position(pair)] == [*range(18)]


def test_rows_that_do_not_leave_are_read_twice_once(tmp_path: Path, jobs: Counter[str]) -> None:
    """A dead letter costs its epoch a second reading, and four epochs the second job."""
    pair = open_events(tmp_path)
    put_rows(pair, "a", [1, None, 2])
    put_rows(pair, "b", [1, 2])
    pair.run(0)
    assert jobs == {"run_read_job": 2, "run_events_job": 1}
    for epoch in range(early_events.WHOLE_EPOCHS):
        put_rows(pair, "a", [3 + epoch])
        pair.run(epoch * SECOND)
    assert jobs == {"run_read_job": 6, "run_events_job": 5}
    put_rows(pair, "a", [9])
    pair.run(9 * SECOND)
    assert jobs == {"run_read_job": 7, "run_events_job": 5}
    assert [row["position"] for row in _sort_by_position(pair)] == [*range(9)]
    assert len(pair.table("dead_letters")) == 1


def test_an_epoch_without_rows_says_nothing(tmp_path: Path, jobs: Counter[str]) -> None:
    """Polls that find no row do not bring the expectation back that all rows leave."""
    pair = open_events(tmp_path)
    put_rows(pair, "a", [1, None])
    pair.run(0)
    for epoch in range(early_events.WHOLE_EPOCHS):
        pair.run((epoch + 1) * SECOND)
    put_rows(pair, "a", [1, None])
    pair.run(9 * SECOND)
    assert jobs == {"run_read_job": 2 + early_events.WHOLE_EPOCHS + 1, "run_events_job": 2}


def test_files_of_the_first_reading_are_deleted(tmp_path: Path) -> None:
    """Of an epoch that is read twice, all files in the store are those that it names."""
    pair = open_events(tmp_path)
    put_rows(pair, "a", [1, None, 2])
    put_rows(pair, "b", [1, 2])
    moved, _ = pair.run(0)
    named = {ref.key for refs in moved.files.values() for ref in refs}
    stored = {info.key for info in pair.store.list_objects("spark/") if "/tables/" in info.key}
    assert stored == named


def test_a_large_batch_becomes_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that are written at once have files of about `FILE_BYTES`."""
    monkeypatch.setattr(event_files, "FILE_BYTES", 100)
    pair = open_events(tmp_path, sources={"a": {}})
    put_rows(pair, "a", [*range(9)])
    moved, _ = pair.run(0)
    assert len(moved.files["events"]) > 2
    assert [row["position"] for row in _sort_by_position(pair)] == [*range(9)]


def test_a_second_job_joins_rows_with_long_values(
    tmp_path: Path, jobs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which a task holds few at a time: each time it would write a file. It is not tried again."""
    monkeypatch.setattr(long_values, "_FEW_VALUES", 0)
    monkeypatch.setattr(long_values, "MOST_LONG_BYTES", 50)
    pair = open_events(tmp_path, sources={"a": {}})
    for epoch in range(early_events.WHOLE_EPOCHS + 2):
        put_rows(pair, "a", [*range(9)])
        moved, _ = pair.run(epoch * SECOND)
        assert len(moved.files["events"]) == 1
    assert jobs == {
        "run_read_job": early_events.WHOLE_EPOCHS + 3,
        "run_events_job": early_events.WHOLE_EPOCHS + 2,
    }


def test_a_condition_has_to_let_all_rows_pass_first(tmp_path: Path, jobs: Counter[str]) -> None:
    """With `where` the first epochs have two jobs, until four of them in turn have lost no row."""
    pair = open_events(tmp_path, sources={"a": {"where": "n > 0"}})
    for epoch in range(early_events.WHOLE_EPOCHS + 1):
        put_rows(pair, "a", [epoch])
        pair.run(epoch * SECOND)
    assert jobs == {"run_read_job": 5, "run_events_job": 4}


@pytest.mark.parametrize(
    "options",
    [
        {"release": {"mode": "ordered"}},
        {"release": {"mode": "pass_through"}, "outputs": {"events": False}},
        {"sources": {"a": {"barriers": {"kind": "kind", "types": ["stop"]}}}},
    ],
    ids=["ordered", "no-events", "barriers"],
)
def test_other_pipelines_foretell_nothing(options: dict[str, Any]) -> None:
    """The order, or the rows before a barrier, are known only when all rows are read."""
    given = {"sources": _SOURCES, "release": {"mode": "pass_through"}, **options}
    spec = spec_of(given.pop("sources"), **given)
    units: list[Any] = [object()]
    assert EarlyEvents(spec).plan_positions(units, 0) is units


def test_no_position_is_foretold_without_the_first(tmp_path: Path) -> None:
    """A survey without the next position keeps the rows, as that of a replay does."""
    units: list[Any] = [object()]
    spec = spec_of(release={"mode": "pass_through"})
    assert EarlyEvents(spec).plan_positions(units, None) is units


def test_events_at_other_positions_are_refused(tmp_path: Path) -> None:
    """A decision that gives the events other positions than the tasks is a defect, with a message."""
    pair = open_events(tmp_path, sources={"a": {}})
    put_rows(pair, "a", [1])
    side, move = pair.sides["spark"], pair._move

    def move_from_elsewhere(name: str, surveyed: Any, decision: Any) -> Any:
        """Move as if other events had been sealed since the survey."""
        side.position += 7
        return move(name, surveyed, decision)

    pair._move = move_from_elsewhere  # type: ignore[method-assign]
    with pytest.raises(PoisonError, match=r"events were written as \(0, 1, 0, \(\)\), not \(7"):
        pair.run(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_events_of_random_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: Counter[str], seed: int, divided: bool
) -> None:
    """Tables, counters and positions are those of the oracle, foretold or not, in any division.

    Each epoch is expected to be whole. With two values a batch each row is one.
    """
    draw = random.Random(seed)
    monkeypatch.setattr(early_events, "WHOLE_EPOCHS", 0)
    if divided:
        divide_finely(monkeypatch, draw.choice([1, 400]))
        monkeypatch.setattr(batch_reading, "MOST_CELLS", draw.choice([2, 12, 8_000_000]))
    policy = draw.choice(["side_output", "emit_flagged", "drop", "reject_to_origin", "adjust"])
    rule = {"high": {"predicate": "n > 4", "severity": draw.choice(["drop", "quarantine"])}}
    own: dict[str, Any] = {
        "on_bad": "dead_letter",
        **draw.choice([{}, {"where": "n > 0"}, {"rules": rule}]),
    }
    pair = open_events(
        tmp_path,
        sources={"b": own, "a": {"on_bad": "dead_letter", "lag": "2s"}},
        release={"mode": "pass_through", "on_late": policy},
        windows={"w": {**draw.choice(_WINDOWS), "keys": ["k"], "aggregates": _AGGREGATES}},
    )
    for epoch in range(4):
        is_odd = draw.random() < 0.4
        for source, partition in (("a", "1"), ("b", "0"), ("a", "0"), ("a", "1")):
            rows: list[Row] = [
                {
                    "t": None
                    if is_odd and draw.random() < 0.1
                    else (epoch * 10 + draw.randint(-9, 9)) * SECOND,
                    "kind": None,
                    "k": draw.choice(["x", "y", None]),
                    "n": draw.randint(0 if is_odd else 1, 5 if is_odd else 4),
                    "v": draw.choice([0.25, 0.5, 7.5]),
                }
                for _ in range(draw.randint(0, 9))
            ]
            if rows:
                pair.put(source, rows, partition)
        pair.run(epoch * 10 * SECOND)
    pair.run(1000 * SECOND, done=True)
    assert jobs["run_read_job"] > jobs["run_events_job"]


def _sort_by_position(pair: Pair) -> list[Row]:
    return sorted(pair.table("events"), key=lambda row: int(row["position"]))
