"""Pipelines whose rows are read, judged and folded by Spark's Python tasks only."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from tests.scheduling import sample_in_ci
from tests.spark.agreement import SECOND, Pair, rows_of, spec_of, table_of
from tests.spark.cast_agreement import ODD_SCHEMA, list_odd_objects
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import PreconditionFailedError, Store
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.engine.arrow_tables import encode_parquet
from tidegate.jobs.engine.errors import BrokenRuleError, CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.eventtime.decider import decide
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import cut_division, event_files
from tidegate.jobs.rows.column_casts import is_cast_proven
from tidegate.jobs.rows.cut_division import divide_cut
from tidegate.jobs.rows.unit_reading import ReadOrder, read_unit
from tidegate.jobs.sources.object_inspection import Footer, read_footer
from tidegate.jobs.spark import mover, python_tasks, task_epochs, task_events, worker_versions
from tidegate.jobs.spark.spark_session import find_carried_error
from tidegate.time_units import TICK_MAX, TICK_MIN, TIME_BOUND

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.minio import RealMinio

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

AGGREGATES = {
    "rows": "count(*)",
    "filled": "count(v)",
    "total": "sum(v)",
    "whole": "sum(n)",
    "mean": "avg(v)",
    "low": "min(n)",
    "opened": "first(n)",
    "ended": "last(v)",
    "kinds": "distinct(n)",
    "about": "approx_distinct(n)",
    "median": "approx_quantile(v, 0.5)",
    "all_of": "collect(n)",
}
WINDOW = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["k"],
    "aggregates": {"n": "count(*)", "s": "sum(v)"},
}


def spec_with(
    windows: dict[str, Any], sources: dict[str, dict[str, Any]] | None = None, **more: Any
) -> Any:
    """A pipeline without an events table."""
    off = {"release": {"mode": "pass_through"}, "outputs": {"events": False}}
    return spec_of(sources, windows=windows, **{**off, **more})


def draw_release(draw: random.Random) -> dict[str, Any]:
    """Options of the events, of all modes."""
    policies = ["side_output", "emit_flagged", "drop", "reject_to_origin", "adjust"]
    mode = draw.choice(["ordered", "ordered", "commit", "pass_through"])
    return {"release": {"mode": mode, "on_late": draw.choice(policies)}, "outputs": {}}


CONDITIONS: list[dict[str, Any]] = [
    {},
    {"where": "n > 0"},
    {
        "rules": {
            "small": {"predicate": "n < 5", "severity": "drop"},
            "known": {"predicate": "k in ('x', 'y')", "severity": "quarantine"},
            "even": {"predicate": "n % 2 = 0"},
            "low": {"predicate": "v <= 9.5", "severity": "warn"},
        }
    },
    {
        "where": "k is not null",
        "select": {
            "t": "t",
            "kind": "kind",
            "k": "cast(coalesce(k, 'z') as string)",
            "n": "cast(n - 1 as long)",
            "v": "v",
        },
        "rules": {"whole": {"predicate": "n >= 0", "severity": "quarantine"}},
    },
]


def draw_windows(draw: random.Random) -> dict[str, Any]:
    """Tumbling and sliding windows with drawn options."""
    shapes: list[dict[str, Any]] = [
        {"kind": "tumbling", "size": "10s", "offset": draw.choice(["0", "-2s", "1s"])},
        {"kind": "sliding", "size": "10s", "slide": draw.choice(["5s", "3s"])},
    ]
    return {
        f"w{i}": {
            **shape,
            "keys": draw.choice([["k"], [], ["k", "_source"]]),
            "aggregates": dict(draw.sample(sorted(AGGREGATES.items()), 6)),
            "late_unit": draw.choice(["event", "window", "first_window"]),
            "lateness": draw.choice(["0", "4s", "20s", "never"]),
            "on_late": draw.choice(["side_output", "drop", "reject_to_origin", "adjust"]),
            "emit": draw.choice(["close", "close", "each_epoch", "complete"]),
            "revisions": draw.choice(["accumulate", "delta"]),
            "zero_rows": draw.random() < 0.3,
        }
        for i, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("seed", sample_in_ci(range(6), 2))
def test_tasks_agree_with_the_oracle(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Surveys, tables and counters, epoch by epoch, with several units an epoch."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 600_000)
    draw = random.Random(seed)
    marks = {"kind": "kind", "types": ["stop"]}
    punctuation = {
        "every_span": "5s",
        "delay": "1s",
        "on_violation": draw.choice(["adjust", "error"]),
    }
    sources: dict[str, dict[str, Any]] = {
        "a": {"barriers": marks} if draw.random() < 0.5 else {},
        "b": {"punctuation": punctuation} if draw.random() < 0.5 else {"max_jump": "30s"},
    }
    for own in sources.values():
        own.update(draw.choice(CONDITIONS))
    pair = Pair(spec_with(draw_windows(draw), sources), session, tmp_path)
    feed(pair, draw, 5)


def feed(pair: Pair, draw: random.Random, epochs: int) -> None:
    """Epochs of disorder, late rows and barriers, to the end of all members."""
    for epoch in range(epochs):
        for source in "ab":
            for partition in draw.choice([["0"], ["0", "1"]]):
                rows = rows_of(draw, 8 * epoch)
                for row in rows:
                    row["t"] = row["t"] if draw.random() < 0.9 else None
                pair.put(source, rows, partition)
        pair.run(epoch * SECOND)
    pair.run(300 * SECOND, done=True)
    for _ in range(20):
        if not any(pair.waiting.values()):
            break
        pair.run(300 * SECOND, done=True)
    pair.run(300 * SECOND, done=True)


@pytest.mark.parametrize("seed", sample_in_ci(range(12), 4))
def test_events_agree_with_the_oracle(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """All modes and late policies, by one task and by ranges, with many segments and with few.

    Ranges are written by tasks that share them, with and without a shuffle, or each by a task of
    its own.
    """
    draw = random.Random(seed)
    monkeypatch.setattr(event_files, "MOST_MOVED", 256 if seed % 4 else 3)
    monkeypatch.setattr(cut_division, "UNIT_BYTES", draw.choice([1, 600_000]))
    monkeypatch.setattr(task_events, "RANGE_BYTES", draw.choice([1, 1_000, 1 << 20]))
    monkeypatch.setattr(task_events, "MANY_SEGMENTS", draw.choice([1, 2, 16]))
    monkeypatch.setattr(task_events, "MOST_READERS", 4 * (seed % 2))
    barriers = {"barriers": {"kind": "kind", "types": ["stop"]}}
    lags = draw.choice([("2s", "5s"), ("10s", "0"), ("20s", "30s")])
    sources: dict[str, dict[str, Any]] = {
        "a": {"lag": lags[0], **draw.choice([{}, barriers])},
        "b": {"lag": lags[1], **draw.choice([{}, barriers, {"max_jump": "30s"}])},
    }
    windows = {"w": WINDOW} if draw.random() < 0.5 else {}
    more = {**draw_release(draw), "barriers": {"timeout": "5s"}}
    pair = Pair(spec_with(windows, sources, **more), session, tmp_path)
    feed_events(pair, draw)


@pytest.mark.parametrize("on_late", ["side_output", "emit_flagged", "drop"])
def test_events_in_exact_order_agree_with_the_oracle(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_late: str
) -> None:
    """Without lag, rows below the newest that was released are late, and those at it are not."""
    draw = random.Random(on_late)
    monkeypatch.setattr(cut_division, "UNIT_BYTES", draw.choice([1, 600_000]))
    barriers = {"barriers": {"kind": "kind", "types": ["stop"]}}
    exact = {"lag": "0", "frontier": "inclusive"}
    release = {"mode": "ordered", "on_late": on_late}
    sources: dict[str, dict[str, Any]] = {"a": {**exact, **barriers}, "b": {**exact}}
    more = {"release": release, "outputs": {}, "barriers": {"timeout": "5s"}}
    pair = Pair(spec_with({"w": WINDOW}, sources, **more), session, tmp_path)
    feed_events(pair, draw)
    counted = [moved.counters.late_by_output for moved in pair.sides["spark"].moved]
    dropped = [moved.counters.dropped for moved in pair.sides["spark"].moved]
    assert any("events" in one for one in counted) or any("late_order" in one for one in dropped)


def feed_events(pair: Pair, draw: random.Random) -> None:
    """Feed rows; positions are contiguous then, and the files are those of tasks."""
    feed(pair, draw, 8)
    positions = [row["position"] for row in pair.table("events")]
    assert sorted(positions) == list(range(len(positions)))
    for moved in pair.sides["spark"].moved:
        for ref in moved.files.get("events", ()):
            assert "part-" in ref.key


def test_each_job_reports_its_tasks(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and bytes of each unit, and the processes, which are not the driver's."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    seen: list[dict[str, Any]] = []
    note = type("Log", (), {"info": lambda _, name, **more: seen.append({"event": name, **more})})()
    monkeypatch.setattr(python_tasks, "_log", note)
    pair = Pair(spec_with({"w": WINDOW}), session, tmp_path)
    for source, rows in (("a", 3), ("b", 5)):
        pair.put(source, [{"t": i * SECOND, "k": "x", "v": 0.5} for i in range(rows)])
    moved, _ = pair.run(0)
    assert [ref.extra["division"] for ref in moved.segments] == [cut_division.DIVISION]
    (job,) = seen
    assert (job["event"], job["job"], job["slot"]) == ("tasks_finished", "read", 1)
    assert [(t["task"], t["rows"]) for t in job["tasks"]] == [(0, 3), (1, 5)]
    sizes = [p.stat().st_size for p in sorted((tmp_path / "store" / "inbox").rglob("*.parquet"))]
    assert [t["bytes"] for t in job["tasks"]] == sizes
    assert os.getpid() not in {t["pid"] for t in job["tasks"]}
    # It has imported Arrow and DuckDB.
    assert all(10 << 20 < t["memory"] < 100 << 30 for t in job["tasks"])


def test_a_task_that_writes_several_files_reports_once(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and bytes of all: the events that leave, and the rows that wait."""
    seen: list[dict[str, Any]] = []
    note = type("Log", (), {"info": lambda _, name, **more: seen.append({"event": name, **more})})()
    monkeypatch.setattr(python_tasks, "_log", note)
    pair = Pair(spec_with({}, outputs={}, release={"mode": "ordered"}), session, tmp_path)
    for source in "ab":
        pair.put(source, [{"t": t * SECOND, "k": "x", "v": 0.5} for t in (1, 2, 30)])
    moved, _ = pair.run(0)
    assert moved.files["events"]
    assert moved.segments
    ((task,),) = (job["tasks"] for job in seen if job["job"] == "events")
    assert (task["task"], task["rows"]) == (0, 6)


def test_two_pipelines_of_a_session_take_their_own_answers(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ran between the tasks of another and its end takes none of its answers."""
    pairs = [Pair(spec_with({"w": WINDOW}), session, tmp_path / name) for name in ("one", "two")]
    for pair in pairs:
        pair.put("a", [{"t": SECOND, "k": "x", "v": 0.5}])
        pair.put("b", [{"t": SECOND, "k": "x", "v": 0.5}])
    take, waiting, moved = python_tasks._Inbox.take, [pairs[1]], []

    def take_late(inbox: Any, job: str) -> list[Any]:
        if waiting:
            moved.append(waiting.pop().run(0)[0])  # the whole epoch of the other pipeline
        return take(inbox, job)

    monkeypatch.setattr(python_tasks._Inbox, "take", take_late)
    moved.append(pairs[0].run(0)[0])
    assert [sum(ref.rows for ref in one.segments) for one in moved] == [1, 1]


def test_late_rows_are_written_once_by_a_task_that_runs_twice(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of a task writes a file of its own; the manifest names that of one answer."""
    pair = Pair(spec_with({"w": WINDOW}), session, tmp_path)
    pair.put("a", [{"t": t * SECOND, "k": "x", "v": 0.1} for t in (1, 40)])
    pair.put("b", [{"t": t * SECOND, "k": "x", "v": 0.1} for t in (1, 40)])
    pair.run(0)
    run = python_tasks.run_read_job

    def run_twice(*given: Any) -> Any:
        run(*given)
        return run(*given)

    monkeypatch.setattr(python_tasks, "run_read_job", run_twice)
    pair.put("a", [{"t": 2 * SECOND, "k": "x", "v": 0.1}])
    moved, _ = pair.run(SECOND)
    (late,) = moved.files["late"]
    written = list((tmp_path / "store" / "spark").rglob("late/*/part-*.parquet"))
    assert len(written) == 2
    assert late.rows == 1
    assert late.min_time == late.max_time == 2 * SECOND


def test_sums_of_doubles_do_not_depend_on_who_runs_the_tasks(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of each sum, also for values that are no binary fractions.

    The units are folded one after the other, and merged in the order of the cut, by this process
    as by tasks.
    """
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    found = []
    for folder in ("tasks", "here"):
        if folder == "here":

            def run_here(_: Any, order: Any, units: Any, *__: Any) -> Any:
                answers = [read_unit(order, unit).answer for unit in reversed(units)]
                return answers[::-1], None

            monkeypatch.setattr(python_tasks, "run_read_job", run_here)
        visits = {**WINDOW, "kind": "session", "size": None, "gap": "1s"}
        pair = Pair(spec_with({"w": WINDOW, "s": visits}), session, tmp_path / folder)
        draw = random.Random(1)
        for source in "ab":
            for partition in "012":
                rows = [
                    {
                        "t": draw.randint(0, 30) * SECOND,
                        "k": draw.choice("xyz"),
                        "v": draw.random() / 3,
                    }
                    for _ in range(500)
                ]
                pair.put(source, rows, partition)
        pair.run(0)
        pair.run(SECOND, done=True)
        found.append([pair.table("w"), pair.table("s")])
    assert found[0] == found[1]
    assert [len(rows) for rows in found[0]] == [12, 3]


def test_late_rows_under_error_name_the_first_one(session: SparkSession, tmp_path: Path) -> None:
    """The one with the least position, of the first unit that has one."""
    pair = Pair(spec_with({"w": {**WINDOW, "on_late": "error"}}), session, tmp_path)
    for source in "ab":
        pair.put(source, [{"t": t * SECOND, "k": "x"} for t in (1, 40)])
    pair.run(0)
    pair.put("b", [{"t": t * SECOND, "k": "x"} for t in (50, 3, 2)])
    # The oracle says the same in `move`.
    cut = pair_cut(pair)
    surveyed = pair._survey("spark", cut)
    pair.epoch += 1
    decision = decide(pair.spec, pair.state, replace(surveyed.survey, now=SECOND))
    with pytest.raises(PoisonError, match=r"b/0 row 4294967297: event time 3000000 is late for w"):
        pair._move("spark", surveyed, decision)


@pytest.mark.parametrize("on_bad", ["dead_letter", "fail"])
def test_dead_rows_are_letters_or_refused(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_bad: str
) -> None:
    """Tasks write the letters, or name the first row in the order of the cut."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    sources: dict[str, dict[str, Any]] = {"a": {}, "b": {"on_bad": on_bad}, "c": {"on_bad": on_bad}}
    pair = Pair(spec_with({"w": WINDOW}, sources), session, tmp_path)
    for source in sources:
        pair.put(source, [{"t": SECOND, "k": "x"}, {"t": None, "k": "y", "v": 0.5}, {"t": None}])
    if on_bad == "fail":
        with pytest.raises(PoisonError, match=r"bad rows in b/0; the first is row 1 of .*no_event"):
            pair._survey("spark", pair_cut(pair))
        return
    moved, _ = pair.run(0)
    assert moved.counters.dead_lettered == 6
    assert len(moved.files["dead_letters"]) == 3
    letter = pq.read_table(tmp_path / "store" / moved.files["dead_letters"][0].key)
    assert letter.to_pylist()[0] | {"etag": ""} == {
        "reason": "no_event_time",
        "detail": "t",
        "object": "inbox/a/0-00000.parquet",
        "etag": "",
        "row": '{"k":"y","v":0.5}',
        "_source": "a",
        "_partition": "0",
        "_seq": 1,
        "_timeline": 0,
        "_epoch": 1,
    }


def test_values_are_cast_and_judged_by_tasks(session: SparkSession, tmp_path: Path) -> None:
    """What does not fit is a dead letter, wherever DuckDB is proven to cast as Spark SQL does."""
    aggregates = {f"high_{name}": f"max({name})" for name in ("s", "i", "l", "y", "m", "w")}
    window = {**WINDOW, "keys": [], "aggregates": {"rows": "count(*)", **aggregates}}
    source = {"schema": ODD_SCHEMA, "lag": "0"}
    pair = Pair(spec_with({"w": window}, {"a": source}), session, tmp_path)
    proven = [
        rows
        for kind, name, rows in list_odd_objects()
        if is_cast_proven(str(kind), ODD_SCHEMA[name], None)
    ]
    for rows in proven:
        pair.put("a", rows)
    moved, _ = pair.run(0)
    assert moved.counters.dead_lettered > 100
    pair.run(SECOND, done=True)
    (result,) = pair.table("w")
    assert result["rows"] == sum(map(len, proven)) - moved.counters.dead_lettered


def test_a_rule_that_stops_the_epoch_names_its_first_row(
    session: SparkSession, tmp_path: Path
) -> None:
    """Before a barrier; what is behind it belongs to another epoch."""
    source = {
        "rules": {"low": {"predicate": "n < 5", "severity": "fail"}},
        "barriers": {"kind": "kind", "types": ["stop"]},
    }
    pair = Pair(spec_with({"w": WINDOW}, {"a": source}), session, tmp_path)
    good = {"t": SECOND, "kind": "data", "k": "x", "n": 1, "v": 0.5}
    pair.put("a", [good, {**good, "kind": "stop"}, {**good, "n": 7}])
    pair.run(SECOND)
    with pytest.raises(BrokenRuleError, match=r'row 2 of inbox/a/.* breaks rule low .*"n":7'):
        pair._survey("spark", pair_cut(pair))


def test_corrupt_objects_of_all_units_are_named(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task fails: Spark would try it again."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    pair = Pair(spec_with({"w": WINDOW}), session, tmp_path)
    for source in "ab":
        pair.put(source, [{"t": SECOND, "k": "x", "v": 0.5}] * 100)
        path = pair.store.local_path(f"inbox/{source}/0-00000.parquet")
        assert path is not None
        footer = pq.ParquetFile(path).metadata.serialized_size
        whole = path.read_bytes()
        path.write_bytes(b"\xff" * (len(whole) - footer - 8) + whole[-footer - 8 :])
    with pytest.raises(CorruptObjectsError) as caught:
        pair._survey("spark", pair_cut(pair))
    assert caught.value.keys == ("inbox/a/0-00000.parquet", "inbox/b/0-00000.parquet")


def pair_cut(pair: Pair) -> Any:
    """The cut over everything that waits."""
    return Cut(tuple(pair._slice(m, done=False, blocked=False) for m in sorted(pair.waiting)))


def test_large_partials_go_by_way_of_the_store(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks merge them then, and nothing of them stays."""
    monkeypatch.setattr(task_epochs, "SENT_BYTES", 1)
    pair = Pair(spec_with({"w": WINDOW}), session, tmp_path)
    pair.put("a", [{"t": SECOND, "k": "x", "v": 0.5}, {"t": 20 * SECOND, "k": "x", "v": 0.25}])
    pair.put("b", [{"t": 30 * SECOND, "k": "x", "v": 0.5}])
    pair.run(0)
    pair.put("a", [{"t": t * SECOND, "k": "x", "v": 0.5} for t in (25, 26)])
    pair.run(SECOND)
    pair.run(2 * SECOND, done=True)
    assert pair.table("w")
    assert not [entry.key for entry in pair.store.list_objects("") if "partials" in entry.key]


@pytest.mark.parametrize("mode", ["ordered", "pass_through"])
def test_times_of_all_years_are_taken(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A time so far that sums with it overflow costs its row, and the rows beside it nothing."""
    windows = {
        "w": {**WINDOW, "lateness": "never"},
        "s": {**WINDOW, "kind": "session", "size": None, "gap": "400000d"},
        "x": {**WINDOW, "kind": "sliding", "size": "400000d", "slide": "200000d"},
    }
    release = {"mode": mode, "on_late": "emit_flagged"}
    pair = Pair(spec_of(windows=windows, release=release), session, tmp_path)
    monkeypatch.setattr(pair, "rows", partial(read_ticks, pair.store))
    near = [-TIME_BOUND, -(10**17), -30_610_224_000_000_001, 0, 253_402_300_800_000_000, TIME_BOUND]
    far = [TICK_MIN, TICK_MIN + 1, -TIME_BOUND - 1, TIME_BOUND + 1, TICK_MAX - 1, TICK_MAX]
    for source, times in (("a", [*near, *far]), ("b", near)):
        pair.put(source, [{"t": t, "k": "x", "n": 1, "v": 0.5} for t in times])
    moved, _ = pair.run(0)
    assert moved.counters.dead_lettered == len(far)
    pair.run(SECOND, done=True)
    assert len(pair.table("events")) == 2 * len(near)
    assert sum(row["n"] for row in pair.table("w")) == 2 * len(near)


def read_ticks(store: Any, refs: tuple[FileRef, ...]) -> list[dict[str, Any]]:
    """As `Pair.rows`, with times as ticks: Python has years of four digits only."""
    found: list[dict[str, Any]] = []
    for ref in refs:
        table = pq.read_table(store.local_path(ref.key), partitioning=None)
        columns = {
            name: table[name].cast(pa.int64()) if pa.types.is_timestamp(kind) else table[name]
            for name, kind in zip(table.schema.names, table.schema.types, strict=True)
            if name not in ("detail", "row")
        }
        found += pa.table(columns).to_pylist()
    return sorted(found, key=lambda row: json.dumps(row, default=str, sort_keys=True))


def put_object(store: Store, key: str, seconds: list[int]) -> dict[str, Any]:
    """Write an object, and describe it as a plan does."""
    rows = [{"t": s * SECOND, "k": "x", "n": 1, "v": s / 3} for s in seconds]
    data = encode_parquet(table_of(rows))
    footer = read_footer(len(data), lambda start, length: data[start : start + length])
    assert isinstance(footer, Footer)
    counts = {"ordinal": 0, "rows": len(rows), "row_start": 0, "row_end": len(rows)}
    found = {"key": key, "etag": store.put(key, data), "size": len(data), **counts}
    return {**found, "columns": footer.columns}


@pytest.mark.timeout(1800)
def test_tasks_read_a_bucket_as_planned(
    session: SparkSession, tmp_path: Path, minio_environment: RealMinio
) -> None:
    """Tasks read and write the bucket with the driver's keys, which no setting of Spark names.

    They give the same bytes as this process, and refuse an object that was replaced.
    """
    spec = spec_with({"w": WINDOW})
    with closing(open_store(f"s3://{minio_environment.bucket}/{tmp_path.name}")) as store:
        parts = {s: put_object(store, f"inbox/{s}/0.parquet", [1, 25, 3]) for s in "ab"}
        cut = Cut(tuple(Slice(Member(s), 0, 3, (p,)) for s, p in parts.items()))
        units = divide_cut(spec, cut, {}, store)
        folders = AttemptFolders(BucketLayout("p"), CheckpointId(0, 1, "abcdef"))
        mark = 20 * SECOND
        order = ReadOrder(spec, mark, TICK_MIN, mark, folders, store.url)
        here = read_unit(order, units[0]).answer
        ((there,), _) = python_tasks.run_read_job(session, order, units)
        assert (here.rows, here.error, there.error) == (6, None, None)
        assert there.partials == here.partials
        (late,) = there.late.written
        assert len(store.get(late.key).data) == late.bytes
        secret = minio_environment.environment()["TIDEGATE_S3_SECRET_KEY"]
        assert secret not in str(session.sparkContext.getConf().getAll())
        put_object(store, "inbox/b/0.parquet", [1, 2])
        ((changed,), _) = python_tasks.run_read_job(session, order, units)
        assert isinstance(changed.error, PreconditionFailedError)


def test_a_cluster_without_tidegate_is_refused(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts may have Spark's own image; the error names what to bring."""

    def fail_to_import(*_: Any) -> None:
        raise PySparkException("ModuleNotFoundError: No module named 'tidegate'")

    monkeypatch.setattr(python_tasks, "start_workers", fail_to_import)
    monkeypatch.setattr(mover, "open_session", lambda _: session)
    with pytest.raises(ConfigurationError, match="tidegate pack") as refused:
        mover.SparkMover(LocalStore(tmp_path), spec_with({"w": WINDOW}), tmp_path / "work")
    assert refused.value.code == "spark.no_python_workers"


# A worker that waits for a task when the JVM goes, as `pyspark.daemon` runs it.
_WAITING_WORKER = """
import os, socket, sys
from pyspark import daemon
from tidegate.jobs.spark.python_tasks import end_with_jvm
os.environ["PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE"] = "1"  # as Spark sets it
ours, theirs = socket.socketpair()
theirs.close()
run = end_with_jvm(daemon.worker) if sys.argv[1] == "quiet" else daemon.worker
print("code", run(ours, True))
"""


@pytest.mark.parametrize("manner", ["quiet", "as it comes"])
def test_a_worker_without_its_jvm_ends_without_a_word(manner: str) -> None:
    """PySpark would write a traceback into the driver's log."""
    command = [sys.executable, "-c", _WAITING_WORKER, manner]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if manner == "quiet":
        assert (ended.stdout, ended.stderr) == ("code 1\n", "")
    else:
        assert "BrokenPipeError" in ended.stderr


def test_a_worker_with_other_packages_is_named(
    session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes nothing: at the start its host is the answer, and later its task fails."""
    other = json.loads(worker_versions.describe_versions()) | {"duckdb": "0.0.1"}
    monkeypatch.setattr(python_tasks, "describe_versions", lambda: json.dumps(other))
    with pytest.raises(
        ConfigurationError, match=r"has duckdb .*, and the driver has 0\.0\.1"
    ) as met:
        python_tasks.start_workers(session)
    assert socket.gethostname() in met.value.message
    with pytest.raises(Py4JJavaError) as failed:
        python_tasks.run_small_job(session, python_tasks.describe_units, [1])
    carried = find_carried_error(failed.value)
    assert carried is not None
    assert carried.code == "spark.other_versions"
    monkeypatch.undo()
    python_tasks.start_workers(session)


def test_workers_end_with_their_jvm(session: SparkSession) -> None:
    """What each worker calls for a task is the quiet way."""

    def find_way(numbers: Iterable[int]) -> Iterable[str]:
        python_tasks.prepare_worker()
        yield from (sys.modules["__main__"].worker.__qualname__ for _ in numbers)

    ways = session.sparkContext.parallelize([1], 1).mapPartitions(find_way).collect()
    assert ways == ["end_with_jvm.<locals>.run_quietly"]
