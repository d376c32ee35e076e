"""Two sources that keep the event time in different columns of the schema they share."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.engine.harness import SECOND, Bench, spec_of
from tests.splice.worlds import results, table

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.sinks.output_tables import SPLICE_COLUMN, compute_current_positions
from tidegate.jobs.splice.merge import MergeDecision, merge_request
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    cast_rows,
    create_from_late_rows,
)
from tidegate.jobs.streams.dispatcher import StreamDispatcher, make_local_runner
from tidegate.jobs.streams.row_history import LogHistory

EVENT_TIMES = {"a": "t", "b": "u"}
OTHER = {"t": "u", "u": "t"}
FAR = 10_000.0
IN_TIME = [{"a": [1, 5, 3, 12], "b": [2, 9, 12]}]
LATE = [{"a": [1, 5], "b": [2]}, {"a": [40], "b": [41]}, {"a": [3, 12], "b": [9, 12]}]


def row(source: str, second: float) -> dict[str, Any]:
    """A row whose other time column says something that lies far away from its event time."""
    column = EVENT_TIMES[source]
    return {column: int(second * SECOND), OTHER[column]: -int(second * SECOND), "v": int(second)}


def bench_of(**fields: Any) -> Bench:
    """A pipeline with a tumbling window over both sources."""
    schema = {"t": "timestamp", "u": "timestamp", "v": "long"}
    sources = {
        name: {"path": f"inbox/{name}/", "schema": schema, "event_time": column, "lag": "0"}
        for name, column in EVENT_TIMES.items()
    }
    aggregates = {"n": "count(*)", "s": "sum(v)"}
    windows = {"w": {"kind": "tumbling", "size": "10s", "aggregates": aggregates}}
    return Bench(spec_of(**{"sources": sources, "windows": windows, **fields}))


def play(bench: Bench, epochs: Sequence[Mapping[str, Sequence[float]]]) -> Bench:
    """The epochs, and one that closes everything before it."""
    log = SlotLog(bench.store, bench.spec.name, clock=bench.clock)
    history = LogHistory(log, bench.spec.event_time_column)
    run = make_local_runner(bench.store, history)
    dispatcher = StreamDispatcher(bench.spec, run) if bench.spec.streams else None
    engine = bench.engine(dispatch=dispatcher)
    closing: dict[str, list[float]] = {name: [FAR] for name in EVENT_TIMES}
    for seconds in [*epochs, closing]:
        for name, source in bench.sources.items():
            source.append(*(row(name, second) for second in seconds[name]))
        bench.clock.advance(1.0)
        engine.run_epoch()
    return bench


def event_seconds(bench: Bench) -> list[float]:
    """Event times of the events in their current order, in seconds."""
    found, column = table(bench, "events"), bench.spec.event_time_column
    if SPLICE_COLUMN in found.column_names:
        inserted = found.filter(found[SPLICE_COLUMN].is_valid())
        found = compute_current_positions(found, inserted, column)
    rows = found.sort_by("position").to_pylist()
    return [r[EVENT_TIMES[r["_source"]]].timestamp() for r in rows]


@pytest.mark.parametrize("name", ["events", "late"])
def test_files_name_the_extent_of_event_times(name: str) -> None:
    """The bounds of a file are those of its rows' event times, whichever column they are in."""
    bench = play(bench_of(), LATE)
    files = [file for epoch in bench.epochs() for file in epoch.files.get(name, [])]
    assert files
    for file in files:
        rows = pq.read_table(io.BytesIO(bench.store.get(file.key).data)).to_pylist()
        times = [int(r[EVENT_TIMES[r["_source"]]].timestamp() * SECOND) for r in rows]
        assert (file.min_time, file.max_time) == (min(times), max(times))


def test_streams_stamp_rows_with_their_event_time() -> None:
    """The time of a stream is the running maximum of the rows' event times."""
    pipes = {"p": {"from": "events", "to": "d", "inherit": True}}
    bench = play(bench_of(streams={"d": {}}, pipes=pipes), IN_TIME)
    stamps = [r["stream_time"].timestamp() for r in bench.rows("d")]
    assert stamps == [1, 2, 3, 5, 9, 12, 12, FAR, FAR][: len(stamps)]
    assert len(stamps) >= 7


def test_merged_rows_are_inserted_at_their_event_time() -> None:
    """After a merge of late rows, events and windows equal those of a run without late rows."""
    bench, expected = (
        play(bench_of(), LATE),
        play(
            bench_of(), [{name: [s for epoch in LATE for s in epoch[name]] for name in EVENT_TIMES}]
        ),
    )
    assert results(bench, "w") != results(expected, "w")
    request = create_from_late_rows(bench.spec, bench.log, LateFilter(), RequestOptions("ann"))
    merge_request(bench.spec, bench.log, request.id, MergeDecision("ann"))
    assert event_seconds(bench) == event_seconds(expected)
    assert results(bench, "w") == results(expected, "w")


def test_late_rows_are_chosen_by_event_time() -> None:
    """`--since` and `--until` of a splice request look at the event time of each row."""
    bench = play(bench_of(), LATE)
    which = LateFilter(since=9 * SECOND, until=10 * SECOND)
    request = create_from_late_rows(bench.spec, bench.log, which, RequestOptions("ann"))
    assert sum(file.rows for file in request.row_files()) == 1


def test_rows_of_a_request_have_their_event_time() -> None:
    """Repaired dead letters and rows of files get the time of the column that their source uses."""
    given = [
        {**row(name, 7), "_source": name, "_partition": "0", "_seq": 1} for name in EVENT_TIMES
    ]
    rows = cast_rows(bench_of().spec, given)
    assert [time.timestamp() for time in rows["_event_time"].to_pylist()] == [7, 7]


def test_one_column_needs_no_other() -> None:
    """Where all sources agree the tables have no column beside the declared ones."""
    source = {"path": "x/", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "0"}
    spec = spec_of(sources={"a": source, "b": source}, windows={})
    assert (spec.event_time_column, list(spec.row_columns)) == ("t", ["t"])
    assert bench_of().spec.event_time_column == "_event_time"
