"""Random pipelines whose tasks run in this process: the outputs are those of the oracle."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.oracle.mover import OracleMover
from tests.scheduling import sample_in_ci
from tests.spark.agreement import (
    COLUMNS,
    SECOND,
    TIMESTAMP,
    Pair,
    divide_finely,
    feed_random_rows,
    rows_of,
    spec_of,
    table_of,
)
from tidegate.checkpoints.row_counts import TARDY
from tidegate.jobs.engine.arrow_tables import _has_checksum
from tidegate.jobs.engine.errors import FileUnreadableError
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import slice_scan
from tidegate.jobs.rows.column_casts import cast_to_declared
from tidegate.jobs.rows.late_rows import CountedRows
from tidegate.jobs.rows.session_folds import number_parts_sql
from tidegate.jobs.rows.slice_reading import add_positions
from tidegate.jobs.rows.state_files import MergedState
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.spark import mover
from tidegate.jobs.spark.epoch_outputs import EpochOutputs
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spark.task_events import ReleasedRows
from tidegate.time_units import TICK_MAX, TICK_MIN

CASES = int(os.environ.get("TIDEGATE_SOAK", "6"))
AGGREGATES = {
    "rows": "count(*)",
    "filled": "count(v)",
    "total": "sum(v)",
    "whole": "sum(n)",
    "mean": "avg(v)",
    "level": "avg(n)",
    "low": "min(n)",
    "name": "max(k)",
    "newest": "max(t)",
    "opened": "first(n)",
    "ended": "last(v)",
    "kinds": "distinct(n)",
    "all_of": "collect(n)",
}


def open_pair(spec: Any, folder: Path) -> Pair:
    """Both movers, and no JVM."""
    session: Any = LocalSession()
    return Pair(spec, session, folder)


def draw_windows(draw: random.Random) -> dict[str, Any]:
    """Windows of all kinds with drawn options."""
    shapes: list[dict[str, Any]] = [
        {"kind": "tumbling", "size": "10s"},
        {"kind": "sliding", "size": "10s", "slide": draw.choice(["5s", "3s", "10s"])},
        {"kind": "sliding", "size": "4s", "slide": "9s"},
        {
            "kind": "session",
            "gap": draw.choice(["2s", "5s"]),
            "session_touch": draw.choice(["merge", "separate"]),
            "session_late": draw.choice(["merged", "own", "event"]),
            "session_close": draw.choice(["at_end", "after_end"]),
        },
    ]
    windows = {}
    for number, shape in enumerate(shapes):
        aligned = {
            "offset": draw.choice(["0", "-2s", "1s"]),
            "late_unit": draw.choice(["event", "window", "first_window"]),
            "zero_rows": draw.choice([True, False, False]),
        }
        windows[f"w{number}"] = {
            **shape,
            **({} if shape["kind"] == "session" else aligned),
            "keys": draw.choice([["k"], [], ["k", "_source"], ["n", "t"]]),
            "aggregates": dict(draw.sample(sorted(AGGREGATES.items()), 5)),
            "lateness": draw.choice(["0", "4s", "20s", "never"]),
            "on_late": draw.choice(
                ["side_output", "side_output", "drop", "reject_to_origin", "adjust"]
            ),
            "emit": draw.choice(["close", "close", "close", "each_epoch", "complete"]),
            "revisions": draw.choice(["accumulate", "accumulate", "delta"]),
        }
        is_filled = windows[f"w{number}"].get("zero_rows")
        if windows[f"w{number}"]["emit"] == "close" and not is_filled:
            windows[f"w{number}"]["fire_every"] = draw.choice([None, None, "3s"])
    return windows


def draw_spec(draw: random.Random, *, has_barriers: bool = True) -> Any:
    """A pipeline of two sources."""
    marks = {"kind": "kind", "types": ["stop"]} if has_barriers else None
    lags = draw.choice([("0", "0"), ("2s", "5s"), ("10s", "0")])
    sources = {name: {"lag": lag, "barriers": marks} for name, lag in zip("ab", lags, strict=True)}
    release: dict[str, Any] = {
        "mode": draw.choice(["ordered", "ordered", "pass_through", "commit"]),
        "on_late": draw.choice(
            ["side_output", "emit_flagged", "drop", "reject_to_origin", "adjust"]
        ),
    }
    events = release["mode"] != "pass_through" or draw.random() < 0.5
    return spec_of(
        sources,
        release=release,
        outputs={"events": events},
        windows=draw_windows(draw),
        barriers={"timeout": "5s"},
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("most", [500_000, 30], ids=["driver", "tasks"])
@pytest.mark.parametrize("seed", sample_in_ci(range(CASES), 3))
def test_outputs_are_those_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, most: int
) -> None:
    """Tables, counters, positions and segments, epoch by epoch, and no Spark session at all.

    State is merged by the driver, or by tasks, a bucket of keys each. In half of the pipelines
    several tasks share each slice; without barriers it can be divided.
    """
    if seed % 2:
        divide_finely(monkeypatch, 1_500)
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    if most < 500_000:
        monkeypatch.setattr("tidegate.jobs.rows.window_merges.MANY_SEGMENTS", 3)
    draw = random.Random(seed)
    pair = open_pair(draw_spec(draw, has_barriers=seed % 2 == 0), tmp_path)
    feed_random_rows(pair, draw, epochs=8)


@pytest.mark.parametrize(
    "planted",
    [{"aggregates": {"low": "max(n)"}}, {"keys": []}, {"size": "9s"}],
    ids=["value", "key", "window"],
)
def test_a_difference_between_the_sides_is_noticed(tmp_path: Path, planted: dict[str, Any]) -> None:
    """The control of the tests above: the reference computes by a rule that differs."""
    window = {
        "kind": "tumbling",
        "size": "10s",
        "keys": ["k"],
        "aggregates": {"low": "min(n)"},
        "emit": "each_epoch",
    }
    feed_random_rows(
        open_pair(spec_of(windows={"w": window}), tmp_path / "same"), random.Random(1), epochs=2
    )
    pair = open_pair(spec_of(windows={"w": window}), tmp_path / "other")
    other = spec_of(windows={"w": {**window, **planted}})
    pair.sides["reference"].mover = OracleMover(pair.store, other)
    with pytest.raises(AssertionError, match="only spark"):
        feed_random_rows(pair, random.Random(1), epochs=2)


@pytest.mark.parametrize("seed", sample_in_ci(range(3), 1))
def test_aggregates_are_reordered_while_windows_are_open(tmp_path: Path, seed: int) -> None:
    """Each epoch has another order; the results of windows open across them are the oracle's."""
    draw = random.Random(seed)
    windows: dict[str, Any] = {
        "w": {"kind": "sliding", "size": "20s", "slide": "10s", "keys": ["k"]},
        "s": {"kind": "session", "gap": "15s", "keys": ["k"], "emit": "each_epoch"},
    }
    folder = tmp_path / "pair"
    pair = open_pair(
        spec_of(windows={n: {**w, "aggregates": AGGREGATES} for n, w in windows.items()}), folder
    )
    for epoch in range(20):
        names = draw.sample(sorted(AGGREGATES), len(AGGREGATES))
        order = {name: AGGREGATES[name] for name in names}
        spec = spec_of(windows={n: {**w, "aggregates": order} for n, w in windows.items()})
        session: Any = LocalSession()
        pair.sides["spark"].mover = mover.SparkMover(
            pair.store, spec, folder / f"work-{epoch}", session=session
        )
        pair.put("a", rows_of(draw, 2 * epoch))
        pair.put("b", rows_of(draw, 2 * epoch))
        pair.run(epoch * SECOND)
    pair.run(300 * SECOND, done=True)
    assert pair.table("w")


@pytest.mark.parametrize("kind", ["order", "window:w"])
def test_a_wrong_byte_of_state_is_noticed(tmp_path: Path, kind: str) -> None:
    """Wherever it is in the segment; Parquet alone reads most of them as another value."""
    window = {"kind": "tumbling", "size": "50s", "keys": ["k"], "aggregates": AGGREGATES}
    pair = open_pair(spec_of(windows={"w": window}), tmp_path)
    for source in "ab":
        pair.put(source, rows_of(random.Random(1), 0))
    pair.run(0)
    (segment,) = (ref for ref in pair.sides["spark"].segments if ref.kind == kind)
    path = pair.store.local_path(segment.key)
    assert path is not None
    whole = path.read_bytes()
    for place in range(10, len(whole), 997):
        _has_checksum.cache_clear()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        with pytest.raises(FileUnreadableError, match=segment.key):
            pair.run(300 * SECOND, done=True)
    _has_checksum.cache_clear()
    path.write_bytes(whole)
    pair.run(300 * SECOND, done=True)


def test_numpy_surveys_plain_points_as_duckdb_does() -> None:
    """Also without an event time, before 1970, and at the ends of the years that DuckDB gets."""
    ticks = [5, None, -1, -30_610_224_000_000_000, 253_402_300_799_999_999]
    time = pa.timestamp("us", "UTC")
    places = {name: pa.array([0] * 5, pa.int32()) for name in ("_m", "_p")}
    rows = pa.table(
        {"t": pa.array(ticks, time), **places, "_o": pa.array([0, 0, 1, 7, 7], pa.int64())}
    ).append_column("_row", pa.array([0, 1, 0, 3, 2**31], pa.int64()))
    spec = spec_of({"a": {"schema": {"t": "timestamp"}}})
    source = spec.sources["a"]
    cast = cast_to_declared(DuckFrame.from_table(rows), source, {"t": str(time)})
    frame = add_positions(cast, spec, Cut((Slice(Member("a"), 0, 5),)))
    duckdb = slice_scan.select_surveyed(frame, source, []).toArrow()
    numpy = slice_scan.select_plain_points(rows, "t")
    assert slice_scan.has_plain_points(source, rows)
    assert numpy.drop_columns("_end").equals(
        duckdb.drop_columns("_end").cast(numpy.drop_columns("_end").schema)
    )
    # The end of a row without a time is never read.
    timed = pc.not_equal(numpy["_et"], TICK_MIN)
    assert numpy.filter(timed)["_end"].equals(duckdb.filter(timed)["_end"])


def test_parts_of_sessions_are_numbered_over_all_ticks() -> None:
    """A time near the least tick is in a part as well: the number needs no time before it."""
    gap, times = 10, [TICK_MIN, TICK_MIN + 1, -11, -10, -1, 0, 9, 10, TICK_MAX]
    rows = DuckFrame.from_table(pa.table({"_et": pa.array(times, pa.int64())}))
    found = rows.selectExpr(f"{number_parts_sql(gap)} AS part").toArrow()["part"].to_pylist()
    assert found == [time // gap for time in times]


def test_a_count_below_zero_reaches_the_manifest() -> None:
    """It is a defect, which the balance of the counters then shows."""
    member = SimpleNamespace(member=Member("a"), rows=1, quarantined=0, dead=0)
    scans: Any = SimpleNamespace(
        survey=SimpleNamespace(members=[member]),
        count_verdicts=lambda: Counter({(0, "cti_violation"): 3}),
    )
    none = CountedRows()
    outputs = EpochOutputs(scans, ReleasedRows(), none, none, MergedState(), {})
    counts = outputs.counters(0, 0, [str(member.member)]).per_source
    assert counts == {"a": {"read": 1, TARDY: -2}}


@pytest.mark.parametrize("on_violation", ["error", "drop", "adjust"])
def test_surveys_agree_on_what_violations_leave(tmp_path: Path, on_violation: str) -> None:
    """The newest time that is kept of an epoch's rows is the oracle's, in every survey.

    docs/semantics.md, section 2 (build_window) and section 4.1.
    """
    draw, kept = random.Random(1), set()
    source = {
        "schema": {**COLUMNS, "until": "timestamp"},
        "end_time": "until",
        "barriers": {"kind": "kind", "types": ["stop"], "punctuation": "p"},
        "punctuation": {"explicit": True, "on_violation": on_violation},
    }
    pair = open_pair(spec_of({"a": source}), tmp_path)
    for epoch in range(12):
        rows = []
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(["p", "data", "data"])
            begin = (epoch + draw.randint(-6, 2)) * SECOND
            rows.append({"t": begin, "kind": kind, "until": begin + draw.randint(1, 9) * SECOND})
        ends = pa.array([row["until"] for row in rows], pa.int64()).cast(TIMESTAMP)
        pair.put("a", table_of(rows).append_column("until", ends))
        cut = Cut(tuple(pair._slice(m, done=False, blocked=False) for m in pair.waiting))
        (survey,) = pair._survey("spark", cut).survey.members
        kept.add(survey.newest_kept is None)
        pair.run(epoch * SECOND)
    assert kept == {True, False}
