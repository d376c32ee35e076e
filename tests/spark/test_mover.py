"""The Spark mover, against the oracle mover on the same cuts and decisions."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from tests.spark.agreement import COLUMNS, SECOND, TIMESTAMP, Pair, spec_of, table_of
from tests.spark.cast_agreement import ODD_SCHEMA, list_odd_objects
from tidegate.errors import PoisonError

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
    """Three epochs with disorder release in order, keep late rows and revise a window, exactly as
    the reference does.
    """
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


def test_rows_that_waited_leave_without_a_column_added_since(
    session: SparkSession, tmp_path: Path
) -> None:
    """Segments from before and after the change leave together."""
    source = {"schema": {"t": "timestamp", "k": "string"}, "lag": "20s"}
    pair = Pair(spec_of({"a": source}), session, tmp_path)
    pair.put("a", [{"t": s * SECOND, "k": "x"} for s in (3, 1)])
    pair.run(0)
    source["schema"] = {"t": "timestamp", "k": "string", "v": "double"}
    wider = Pair(spec_of({"a": source}), session, tmp_path)
    wider.ordinals, wider.state, wider.epoch = pair.ordinals, pair.state, pair.epoch
    for name, side in wider.sides.items():
        side.segments = pair.sides[name].segments
    wider.put("a", [{"t": s * SECOND, "k": "y", "v": 0.5} for s in (4, 2)])
    wider.run(SECOND)
    wider.run(2 * SECOND, done=True)
    rows = sorted(wider.table("events"), key=lambda r: r["position"])
    assert [(r["k"], r["v"]) for r in rows] == [("x", None), ("y", 0.5)] * 2


def test_an_empty_object_hides_none_behind_it(session: SparkSession, tmp_path: Path) -> None:
    """Rows of objects that follow an object without rows are read (an empty Arrow batch ends the
    stream for Spark).
    """
    pair = Pair(spec_of(release={"mode": "pass_through"}), session, tmp_path)
    pair.put("a", [])
    pair.put("a", [{"t": SECOND}])
    pair.put("b", [])
    pair.put("b", [{"t": 2 * SECOND}])
    spark, _ = pair.run(0)
    assert spark.counters.released == 2


def test_times_of_twelve_bytes_are_instants(session: SparkSession, tmp_path: Path) -> None:
    """INT96, as older Spark writes it, is UTC, also in years that nanoseconds do not reach."""
    pair = Pair(spec_of({"a": {"lag": "0"}}, release={"mode": "pass_through"}), session, tmp_path)
    far = datetime(2900, 1, 1, tzinfo=UTC)
    rows = table_of([{"t": s * SECOND + 1, "k": "x"} for s in (1, 3, int(far.timestamp()))])
    pair.put("a", rows, use_deprecated_int96_timestamps=True, store_schema=False)
    pair.put("a", rows)
    spark, _ = pair.run(0)
    assert (spark.counters.read, spark.counters.released) == (6, 6)
    assert sorted(row["t"] for row in pair.table("events"))[-1] == far.replace(microsecond=1)


def test_sources_may_keep_the_event_time_in_different_columns(
    session: SparkSession, tmp_path: Path
) -> None:
    """Events and late rows carry `_event_time`, and files name its extent."""
    schema = {"t": "timestamp", "u": "timestamp", "v": "long"}
    sources = {
        name: {"schema": schema, "event_time": column, "lag": "0"}
        for name, column in (("a", "t"), ("b", "u"))
    }
    window = {**TUMBLING, "keys": [], "aggregates": {"rows": "count(*)", "top": "max(u)"}}
    adjusted = {**window, "on_late": "adjust"}
    spec = spec_of(sources, windows={"w": window, "x": adjusted})
    pair = Pair(spec, session, tmp_path)
    for number, seconds in enumerate(((1, 5), (40, 41), (3, 42))):
        for source, (own, other) in {"a": ("t", "u"), "b": ("u", "t")}.items():
            times = {own: list(seconds), other: [-s for s in seconds]}
            columns = {c: pa.array(times[c]).cast(pa.timestamp("s", "UTC")) for c in ("t", "u")}
            pair.put(source, pa.table({**columns, "v": pa.array(seconds, pa.int64())}))
        for moved in pair.run(number):
            for name in ("events", "late"):
                for ref in moved.files.get(name, ()):
                    stamps = sorted(row["_event_time"] for row in pair.rows((ref,)))
                    extent = [int(at.timestamp()) * SECOND for at in (stamps[0], stamps[-1])]
                    assert [ref.min_time, ref.max_time] == extent
    assert len(pair.table("late")) >= 2


def test_any_sql_aggregate_over_kept_rows(session: SparkSession, tmp_path: Path) -> None:
    """An aggregate that has no mergeable state is computed over the window's rows of several
    epochs.
    """
    window = {
        **TUMBLING,
        "aggregates": {
            "middle": "sql(percentile(v, 0.5))",
            "pairs": "sql(count(*) * 2)",
            "rows": "count(*)",
        },
    }
    pair = Pair(spec_of({"a": {"lag": "0"}}, windows={"w": window}), session, tmp_path)
    for epoch, seconds in enumerate(((1, 2), (3, 12))):
        pair.put("a", [{"t": s * SECOND, "k": None, "v": float(s)} for s in seconds])
        pair.run_alone(epoch)
    assert [(row["middle"], row["pairs"], row["rows"]) for row in pair.table("w")] == [(2.0, 6, 3)]


def test_rows_that_are_kept_lack_a_column_added_since(
    session: SparkSession, tmp_path: Path
) -> None:
    """It is null in them for `sql(...)`, also where no new row comes."""
    window = {**TUMBLING, "aggregates": {"most": "sql(max(v))"}}
    schema = {name: kind for name, kind in COLUMNS.items() if name != "kind"}
    pair = Pair(spec_of({"a": {"schema": schema}}, windows={"w": window}), session, tmp_path)
    pair.put("a", [{"t": SECOND, "k": "x", "v": 0.5}])
    pair.run_alone(0)
    wider = Pair(spec_of({"a": {}}, windows={"w": window}), session, tmp_path)
    wider.ordinals, wider.state, wider.epoch = pair.ordinals, pair.state, pair.epoch
    wider.sides["spark"].segments = pair.sides["spark"].segments
    wider.run_alone(SECOND, done=True)
    assert [row["most"] for row in wider.table("w")] == [0.5]


@pytest.mark.parametrize("most", [500_000, 0], ids=["driver", "tasks"])
def test_a_sum_of_decimals_that_overflows_ends_the_driver_by_name(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each epoch fits by itself; no traceback is shown, and no task is tried again."""
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", most)
    window = {**TUMBLING, "aggregates": {"sum": "sum(d)"}}
    schema = {"t": "timestamp", "k": "string", "d": "decimal(38,0)"}
    pair = Pair(spec_of({"a": {"schema": schema}}, windows={"w": window}), session, tmp_path)
    times = pa.array([SECOND], pa.int64()).cast(TIMESTAMP)
    large = pa.array([Decimal("9" * 38)], pa.decimal128(38, 0))
    for _ in range(2):
        pair.put("a", pa.table({"t": times, "k": ["x"], "d": large}))
        pair.run_alone(0)
    with pytest.raises(PoisonError) as ended:
        pair.run_alone(SECOND, done=True)
    assert ended.value.code == "spark.failed"


def test_zero_rows_of_a_long_gap_wait_at_no_cost(session: SparkSession, tmp_path: Path) -> None:
    """A gap of ten thousand windows is one row of state until the frontier passes it.

    Late rows then revise what was empty.
    """
    window = {
        **TUMBLING,
        "zero_rows": True,
        "lateness": "5s",
        "aggregates": {"rows": "count(*)", "total": "sum(v)"},
    }
    pair = Pair(
        spec_of({"a": {"lag": "0"}, "b": {"lag": "0"}}, windows={"w": window}), session, tmp_path
    )
    pair.put("a", [{"t": SECOND, "k": "x", "v": 1.0}, {"t": 100_000 * SECOND, "k": "x", "v": 2.0}])
    pair.put("b", [{"t": 5 * SECOND, "k": "y", "v": 1.0}])
    pair.run(0)
    state = [ref for ref in pair.sides["spark"].segments if ref.kind == "window:w"]
    assert sum(ref.rows for ref in state) == 5  # three windows, and one row for each key
    pair.put("b", [{"t": 43 * SECOND, "k": "x", "v": 1.0}])
    pair.run(SECOND)
    pair.put(
        "b", [{"t": 38 * SECOND, "k": "x", "v": 8.0}, {"t": 100_001 * SECOND, "k": "y", "v": 1.0}]
    )
    pair.run(2 * SECOND)
    pair.run(3 * SECOND, done=True)
    revised = [
        row for row in pair.table("w") if row["k"] == "x" and row["window_start"].timestamp() == 30
    ]
    assert [(row["revision"], row["rows"], row["total"]) for row in revised] == [
        (0, 0, None),
        (1, 1, 8.0),
    ]


def test_a_value_that_does_not_fit_is_a_dead_letter(session: SparkSession, tmp_path: Path) -> None:
    """What a cast would cut, round or trim is a bad value for both movers, and so is what has no
    meaning in that type.
    """
    source = {"lag": "0", "schema": ODD_SCHEMA}
    pair = Pair(spec_of({"a": source}, release={"mode": "pass_through"}), session, tmp_path)
    for _, _, rows in list_odd_objects():
        pair.put("a", rows)
    spark, reference = pair.run(0)
    assert spark.counters == reference.counters
    assert spark.counters.released == 156
    assert spark.counters.dead_lettered == 208


def test_rows_before_a_tardy_barrier_leave_in_order_and_flagged(
    session: SparkSession, tmp_path: Path
) -> None:
    """The rows that a tardy member sent before its barrier leave with `_late`, in order among the
    others.
    """
    marks = {"lag": "0", "frontier": "inclusive", "barriers": {"kind": "kind", "types": ["stop"]}}
    release = {"glom": {"dt": "5s"}}
    pair = Pair(
        spec_of({"a": marks, "b": marks}, barriers={"timeout": "5s"}, release=release),
        session,
        tmp_path,
    )
    pair.put(
        "a", [{"t": SECOND, "n": 1}, {"t": 2 * SECOND, "kind": "stop"}, {"t": 20 * SECOND, "n": 2}]
    )
    pair.put("b", [{"t": 0, "n": 0}])
    pair.run(0)
    pair.run(6 * SECOND)
    pair.put(
        "b",
        [{"t": 3 * SECOND, "n": 3}, {"t": 30 * SECOND, "n": 4}, {"t": 2 * SECOND, "kind": "stop"}],
    )
    pair.run(7 * SECOND)
    pair.run(8 * SECOND, done=True)
    events = sorted(pair.table("events"), key=lambda row: int(row["position"]))
    left = [(row["n"], row["_late"], row["section"]) for row in events]
    assert left == [(0, False, 0), (1, False, 0), (3, True, 1), (2, False, 1), (4, True, 1)]
    assert [
        row["rows"] for row in sorted(pair.table("built"), key=lambda row: int(row["number"]))
    ] == [2, 1, 1, 1]


def test_a_session_that_grew_after_its_result_is_emitted_again(
    session: SparkSession, tmp_path: Path
) -> None:
    """A row joins a session that has a result and moves its end past the frontier.

    The result of the new end comes when it is reached.
    """
    window = {
        "kind": "session",
        "gap": "10s",
        "lateness": "30s",
        "aggregates": {"rows": "count(*)"},
    }
    pair = Pair(spec_of({"a": {"lag": "0"}}, windows={"w": window}), session, tmp_path)
    for epoch, seconds in enumerate(((0, 20), (15,), (10,), (31,), (60,))):
        pair.put("a", [{"t": s * SECOND} for s in seconds])
        pair.run(epoch * SECOND)
    told = [(row["rows"], row["revision"], row["replaces"]) for row in pair.table("w")]
    assert (4, 1, ["1970-01-01T00:00:00Z/1970-01-01T00:00:10Z"]) in told


def test_windows_fire_while_they_are_open(session: SparkSession, tmp_path: Path) -> None:
    """`fire_every` shows tumbling windows and sessions as the frontier passes its multiples, and at
    their end.
    """
    common = {
        "keys": ["k"],
        "aggregates": {"rows": "count(*)", "total": "sum(v)"},
        "fire_every": "5s",
        "lateness": "5s",
    }
    windows = {
        "w": {"kind": "tumbling", "size": "30s", **common},
        "s": {"kind": "session", "gap": "8s", **common},
    }
    windows["d"] = {**windows["w"], "revisions": "delta"}
    pair = Pair(spec_of({"a": {"lag": "0"}}, windows=windows), session, tmp_path)
    for epoch, seconds in enumerate(((3, 4), (6,), (8, 12), (21,), (29, 31), (27,), (60,))):
        pair.put("a", [{"t": s * SECOND, "k": "xy"[s % 2], "v": 1.0} for s in seconds])
        pair.run(epoch * SECOND)
    assert max(row["revision"] for row in pair.table("w")) >= 3


@pytest.mark.parametrize("emit", ["close", "each_epoch", "complete"])
def test_what_the_driver_merges_is_what_the_oracle_merges(
    session: SparkSession, tmp_path: Path, emit: str
) -> None:
    """Few rows are merged without a Spark job.

    Results, revisions and nulls are the reference's, under any `emit`.
    """
    aggregates = {
        "rows": "count(*)",
        "filled": "count(v)",
        "total": "sum(v)",
        "whole": "sum(n)",
        "mean": "avg(v)",
        "low": "min(n)",
    }
    slides = {"kind": "sliding", "slide": "5s", "keys": ["k", "n"]}
    windows = {
        "w": {**TUMBLING, "emit": emit, "aggregates": aggregates},
        "s": {**TUMBLING, **slides, "emit": emit},
    }
    pair = Pair(spec_of({"a": {"lag": "0"}}, windows=windows), session, tmp_path)
    for epoch, seconds in enumerate(((1, 3, 14), (2, 12, 8), (16, 9, 31), (30, 60))):
        rows = [
            {
                "t": s * SECOND,
                "k": [None, "x"][s % 2],
                "n": s % 4 or None,
                "v": [s / 4, None][s % 3 == 0],
            }
            for s in seconds
        ]
        pair.put("a", rows)
        pair.run(epoch * SECOND)
    pair.run(9 * SECOND, done=True)
    assert pair.table("w")
    assert pair.table("late")


def test_only_the_source_with_an_end_column_judges_ends(
    session: SparkSession, tmp_path: Path
) -> None:
    """An end before the begin is a dead letter where `end_time` names the column, and only there."""
    columns = {"schema": {**COLUMNS, "until": "timestamp"}}
    pair = Pair(spec_of({"a": columns, "b": {**columns, "end_time": "until"}}), session, tmp_path)
    rows = table_of([{"t": 2 * SECOND, "k": "x", "n": 1, "v": 1.0}])
    # Not every value is a double, so there is a cast.
    rows = rows.set_column(rows.column_names.index("v"), "v", pa.array([1], pa.int64()))
    rows = rows.append_column("until", pa.array([SECOND], pa.int64()).cast(TIMESTAMP))
    for source in ("a", "b"):
        pair.put(source, rows)
    moved, _ = pair.run(SECOND)
    assert moved.counters.dead_lettered == 1


def test_sources_name_their_barrier_columns_differently(
    session: SparkSession, tmp_path: Path
) -> None:
    """Type and id of a barrier come from the columns of its own source, also after casts."""
    marks = {
        "a": {"barriers": {"kind": "kind", "types": ["stop"]}},
        "b": {"barriers": {"kind": "k", "types": ["halt"], "id": "n"}},
    }
    pair = Pair(spec_of(marks, barriers={"timeout": "5s"}), session, tmp_path)
    for source, kind, k in (("a", "stop", "x"), ("b", "x", "halt")):
        rows = table_of(
            [
                {"t": SECOND, "kind": "data", "k": "data", "n": 1, "v": 1.0},
                {"t": 2 * SECOND, "kind": kind, "k": k, "n": 7, "v": 1.0},
            ]
        )
        whole = pa.array(
            [1, 1], pa.int64()
        )  # not every one of them is a double, so there is a cast
        pair.put(source, rows.set_column(rows.column_names.index("v"), "v", whole))
    pair.run(SECOND)
