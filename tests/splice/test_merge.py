"""Merging late rows back.

Windows and events must be those of a run in which the rows had come in time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.engine.harness import SECOND, Bench, row, spec_of
from tests.manual_clock import ManualClock
from tests.splice.worlds import (
    CRASH_POINTS,
    LATE_ONES,
    WINDOWS,
    Epochs,
    in_time,
    play,
    results,
    stream,
    table,
    world,
)

from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.rules.duck_frame import open_database
from tidegate.jobs.rules.recomputation import WindowBounds, recompute_results
from tidegate.jobs.sinks.published_tables import select_current_revisions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.splice.merge import (
    MergeDecision,
    estimate_impact,
    find_merge_checkpoint,
    merge_request,
)
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    RowRepair,
    cast_rows,
    create_from_dead_letters,
    create_from_file,
    create_from_late_rows,
    list_pending_rows,
    resolve_request_state,
    split_request,
)
from tidegate.jobs.splice.row_trace import trace_rows
from tidegate.jobs.splice.window_merge import AffectedWindow


def _request(bench: Bench, **which: Any) -> str:
    return create_from_late_rows(
        bench.spec, bench.log, LateFilter(**which), RequestOptions("ann", "test")
    ).id


def _merge(bench: Bench, **which: Any) -> Any:
    return merge_request(bench.spec, bench.log, _request(bench, **which), MergeDecision("ann"))


def _same_as_in_time(bench: Bench, epochs: Epochs) -> None:
    expected = in_time(bench.spec, epochs)
    for name in bench.spec.windows:
        assert results(bench, name) == results(expected, name), name
    assert [p for p, _, _ in stream(bench)] == list(range(len(stream(expected))))
    assert [t for _, t, _ in stream(bench)] == [t for _, t, _ in stream(expected)]


@pytest.mark.parametrize("window", list(WINDOWS))
def test_merged_rows_count_as_if_in_time(window: str) -> None:
    """After the merge each window equals that of a run in which the rows had come in time, and so
    does the stream.
    """
    bench = world([window])
    play(bench, LATE_ONES)
    assert results(bench, window) != results(in_time(bench.spec, LATE_ONES), window)
    outcome = _merge(bench)
    assert outcome.actual == outcome.reported_digest
    _same_as_in_time(bench, LATE_ONES)


def test_only_touched_results_are_written() -> None:
    """A merge writes its own rows and the results they change, and nothing else.

    Revisions count on.
    """
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    before = table(bench, "fixed").num_rows
    _merge(bench, sources=("a",))
    manifest = bench.epochs()[-1]
    assert {name: sum(f.rows for f in files) for name, files in manifest.files.items()} == {
        "events": 2,
        "fixed": 2,
    }
    written = table(bench, "fixed").to_pylist()[before:]
    assert [(r["_source"], r["n"], r["revision"]) for r in written] == [("a", 3, 1), ("a", 1, 0)]


def test_existing_rows_come_first_on_ties() -> None:
    """A merged row is behind the rows that have its stamp already.

    Its identity stays; no one else is written again.
    """
    bench = world([])
    play(
        bench,
        [
            {"a": [row(1, 1), row(5, 2)], "b": [row(5, 3)]},
            {"a": [row(30)], "b": [row(30)]},
            {"a": [row(5, 9)], "b": []},
        ],
    )
    before = stream(bench)
    _merge(bench)
    after = stream(bench)
    assert [who for _, t, who in after if t == 5 * SECOND] == [
        ("a", "0", 1),
        ("b", "0", 0),
        ("a", "0", 3),
    ]
    assert after[:3] == before[:3]
    assert [who for _, _, who in after[4:]] == [who for _, _, who in before[3:]]


def test_a_later_merge_finds_its_place_among_merged_rows() -> None:
    """Rows merged one after the other at one place are in the order of their stamps."""
    bench = world([])
    epochs: Epochs = [
        {"a": [row(1)], "b": [row(1)]},
        {"a": [row(50)], "b": [row(50)]},
        {"a": [row(20), row(10)], "b": [row(15), row(20)]},
    ]
    play(bench, epochs)
    _merge(bench, sources=("b",))
    _merge(bench, sources=("a",))
    assert [t // SECOND for _, t, _ in stream(bench)] == [1, 1, 10, 15, 20, 20, 50, 50]
    ties = [who for _, t, who in stream(bench) if t == 20 * SECOND]
    assert ties == [("b", "0", 3), ("a", "0", 2)], "the earlier merge was there first"


@pytest.mark.parametrize("away", [0, 30, 2_000, 4_000])
def test_a_place_is_found_however_far_the_next_row_is(away: int) -> None:
    """Seconds, a minute, an hour around a row are looked at before the whole stream is."""
    bench = world([])
    both = [row(1), row(5_000 - away), row(5_000 + away, 2), row(9_500)]
    play(bench, [{"a": both, "b": [row(9_500)]}, {"a": [], "b": [row(5_000, 9)]}])
    _merge(bench)
    times = [t // SECOND for _, t, _ in stream(bench)]
    assert times == sorted([1, 5_000 - away, 5_000, 5_000 + away, 9_500, 9_500, *times[6:]])


def test_a_merge_reads_around_its_rows_only() -> None:
    """What lies minutes before and behind a late row costs nothing."""
    bench = world(["fixed"])
    play(
        bench,
        [{"a": [row(n) for n in range(2_000)], "b": [row(2_000)]}, {"a": [], "b": [row(1_000, 9)]}],
    )
    request = create_from_late_rows(bench.spec, bench.log, LateFilter(), RequestOptions("ann"))
    _, impact = estimate_impact(bench.spec, bench.log, request)
    assert impact.cost["rows_read"] < 50


def test_rows_that_were_emitted_late_are_not_offered_again() -> None:
    """`emit_flagged`: the late table names the row, but it is among the events already."""
    bench = world(["fixed"], release={"on_late": "emit_flagged"})
    play(bench, [{"a": [row(10), row(60)], "b": [row(60)]}, {"a": [], "b": [row(12), row(61)]}])
    late = {(r["output"], r["reason"]) for r in bench.rows("late")}
    assert late == {("events", "flagged"), ("fixed", "late_window")}
    pending = list_pending_rows(bench.spec, bench.log, LateFilter())
    assert pending["_outputs"].to_pylist() == [["fixed"]]


def test_the_report_is_the_merge() -> None:
    """The impact report tells each change before it happens, and its digest is that of the sealed
    rows.
    """
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    request = create_from_late_rows(
        bench.spec, bench.log, LateFilter(sources=("b",)), RequestOptions("ann")
    )
    _, impact = estimate_impact(bench.spec, bench.log, request)
    events, fixed = impact.tables
    assert (
        events.table,
        events.added,
        events.changed,
        fixed.table,
        fixed.added,
        fixed.changed,
    ) == (
        "events",
        2,
        0,
        "fixed",
        1,
        1,
    )
    change = next(c for c in fixed.changes if c["old"])
    assert (change["key"], change["old"]["n"], change["new"]["n"], change["revision"]) == (
        {"_source": "b"},
        1,
        2,
        1,
    )
    assert (
        merge_request(bench.spec, bench.log, request.id, MergeDecision("ann")).actual
        == impact.digest
    )


def test_an_effect_that_changed_is_refused() -> None:
    """An approval is for one effect.

    After another merge in the same window the request has to be looked at again.
    """
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    mine = _request(bench, sources=("a",), until=5 * SECOND)
    digest = estimate_impact(bench.spec, bench.log, _read(bench, mine))[1].digest
    other = _request(bench)
    merge_request(bench.spec, bench.log, other, MergeDecision("bob"))
    with pytest.raises(ConfigurationError, match="not the one that was approved"):
        merge_request(bench.spec, bench.log, mine, MergeDecision("ann", digest="0" * 64))
    assert len(digest) == 64


def _read(bench: Bench, request_id: str) -> Any:
    from tidegate.checkpoints.splice_requests import read_splice_request

    return read_splice_request(bench.store, bench.spec.name, request_id)


def test_a_live_driver_goes_on_after_the_merge() -> None:
    """A driver that loses its slot to a merge seals the same epoch in the next one.

    Its state is what it was.
    """
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    driver = bench.engine()
    _merge(bench)
    bench.sources["a"].append(row(10_001, 5))
    bench.sources["b"].append(row(10_001, 5))
    expected = results(bench, "fixed")
    assert driver.run_epoch().lost
    report = driver.run_epoch()
    assert report.manifest is not None
    assert [s.kind for s in report.manifest.segments if s.kind == "splice"] == ["splice"]
    assert results(bench, "fixed")[: len(expected)] == expected
    assert [p for p, _, _ in stream(bench)] == list(range(13))


def test_a_merge_goes_on_after_a_drivers_epoch() -> None:
    """A merge whose slot a driver sealed first takes the next one, with the same effect."""
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    driver = bench.engine()
    races = iter([True, True, False])

    def step(point: str) -> None:
        if point == "merge.seal" and next(races):
            for name in bench.sources:
                bench.sources[name].append(row(10_002 + bench.log.head().slot, 1))
            bench.clock.advance(1.0)
            assert driver.run_epoch().sealed

    outcome = merge_request(bench.spec, bench.log, _request(bench), MergeDecision("ann"), step=step)
    assert (outcome.lost, outcome.actual) == (2, outcome.reported_digest)
    assert str(bench.log.head().checkpoint) == outcome.checkpoint


class Crash(BaseException):
    """What a kill -9 looks like."""


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_crash_at_every_step(point: str) -> None:
    """Before or after, never between.

    A crash leaves the old results or the new ones, and the merge can be called again.
    """
    bench = world(["fixed", "visits"])
    play(bench, LATE_ONES)
    before = {name: results(bench, name) for name in bench.spec.windows}
    mine = _request(bench)

    def step(reached: str) -> None:
        if reached == point:
            raise Crash

    with pytest.raises(Crash):
        merge_request(bench.spec, bench.log, mine, MergeDecision("ann"), step=step)
    if CRASH_POINTS.index(point) <= CRASH_POINTS.index("merge.seal"):
        assert {name: results(bench, name) for name in bench.spec.windows} == before
        assert find_merge_checkpoint(bench.log, mine) is None
    else:
        _same_as_in_time(bench, LATE_ONES)
    again = merge_request(bench.spec, bench.log, mine, MergeDecision("ann"))
    assert again.again == (CRASH_POINTS.index(point) > CRASH_POINTS.index("merge.seal"))
    assert _read(bench, mine).state == "merged"
    _same_as_in_time(bench, LATE_ONES)
    assert merge_request(bench.spec, bench.log, mine, MergeDecision("ann")).again


def test_a_restore_takes_the_merge_back() -> None:
    """After a restore to before the merge its rows are late again, and the request can be merged
    once more.
    """
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    target = bench.log.head().checkpoint
    mine = _request(bench)
    merge_request(bench.spec, bench.log, mine, MergeDecision("ann"))
    bench.log.fork(bench.log.head(), target, request_id="r", who="ann", why="oops")
    assert resolve_request_state(bench.log, _read(bench, mine)) == "created"
    assert results(bench, "fixed") != results(in_time(bench.spec, LATE_ONES), "fixed")
    assert not merge_request(bench.spec, bench.log, mine, MergeDecision("ann")).again
    _same_as_in_time(bench, LATE_ONES)


def test_rows_are_asked_for_once() -> None:
    """Rows in an open request, and merged ones, are not offered again."""
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    mine = _request(bench)
    with pytest.raises(ConfigurationError, match="no such rows"):
        _request(bench)
    merge_request(bench.spec, bench.log, mine, MergeDecision("ann"))
    with pytest.raises(ConfigurationError, match="no such rows"):
        _request(bench)


def test_rows_set_aside_are_found_by_each_output() -> None:
    """They are in the late table once, although they missed every output."""
    plain = world(["fixed", "visits"]).spec
    sources = {
        name: source.model_copy(update={"max_jump": 3600 * SECOND})
        for name, source in plain.sources.items()
    }
    bench = Bench(plain.model_copy(update={"sources": sources}))
    engine = bench.engine()
    for at in (0.0, 7200.0):
        bench.sources["a"].append(row(bench.clock.wall_ticks() / SECOND + at))
        for _ in range(2):
            engine.run_epoch()
            bench.clock.advance(1)
    assert [entry["reason"] for entry in bench.rows("late")] == ["max_jump"]
    for outputs in ((), ("events",), ("visits",), ("fixed", "events")):
        found = list_pending_rows(bench.spec, bench.log, LateFilter(outputs=outputs))
        (missed,) = found["_outputs"].to_pylist()
        assert set(missed) == set(outputs or ("events", "fixed", "visits"))


def test_a_file_of_a_source_that_the_pipeline_lacks_is_refused(tmp_path: Path) -> None:
    """Its rows would belong to no source: lag and keys of windows depend on it."""
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    lost = tmp_path / "lost.csv"
    lost.write_text("t,v\n1970-01-01T00:00:03Z,3\n")
    with pytest.raises(ConfigurationError, match="p has no source c") as refused:
        create_from_file(bench.spec, bench.log, lost, RequestOptions("ann"), source="c")
    assert refused.value.code == "splice.wrong_source"
    assert create_from_file(bench.spec, bench.log, lost, RequestOptions("ann"), source="b")


def test_an_expired_request_cannot_be_split() -> None:
    """Its parts would have a new expiry."""
    bench = world(["fixed", "visits"])
    play(bench, LATE_ONES)
    options = RequestOptions("ann", expires_in=0, clock=ManualClock())
    request = create_from_late_rows(bench.spec, bench.log, LateFilter(), options)
    which = LateFilter(outputs=("fixed",))
    with pytest.raises(ConfigurationError, match="is expired"):
        split_request(bench.spec, bench.log, request.id, which, RequestOptions("bob"))


def test_windows_that_live_are_left_alone() -> None:
    """A row is late for the order but not for a window that still waits for it.

    The merge goes to the events only.
    """
    bench = world(["slow"])
    play(
        bench,
        [
            {"a": [row(1)], "b": [row(1)]},
            {"a": [row(20)], "b": [row(20)]},
            {"a": [row(4)], "b": []},
        ],
    )
    _merge(bench)
    assert set(bench.epochs()[-1].files) == {"events"}
    _same_as_in_time(bench, [{"a": [row(1), row(20), row(4)], "b": [row(1), row(20)]}])


def test_without_an_events_table_nothing_is_merged() -> None:
    """The rows of its windows are nowhere: the merge is refused, with advice."""
    bench = world(["fixed"], outputs={"events": False}, release={"mode": "pass_through"})
    play(bench, LATE_ONES)
    with pytest.raises(ConfigurationError, match="keeps no events table"):
        _merge(bench)


def test_windows_over_edges_are_refused() -> None:
    """What a late edge changes reaches over many windows.

    Into the events it goes, into them it is refused, whole.
    """
    source = spec_of().sources["a"].model_dump(by_alias=True) | {
        "edges": {"kind": "what", "keys": ["v"]}
    }
    source["schema"] = {**source["schema"], "what": "string"}
    window = WINDOWS["fixed"] | {"late_unit": "event"}
    bench = Bench(spec_of(sources={"a": source, "b": source}, windows={"fixed": window}))
    play(
        bench,
        [
            {"a": [row(1)], "b": [row(1)]},
            {"a": [row(40)], "b": [row(40)]},
            {"a": [row(3) | {"what": "end"}], "b": []},
        ],
    )
    _merge(bench, outputs=("events",))
    assert set(bench.epochs()[-1].files) == {"events"}
    head = bench.log.head().slot
    with pytest.raises(
        ConfigurationError,
        match=r"window fixed of p is over edge events \(a\): nothing can be merged into it",
    ):
        _merge(bench)
    assert bench.log.head().slot == head


def test_what_cannot_be_reproduced_is_refused() -> None:
    """Rows that a policy dropped were counted by the window but are kept nowhere.

    A merge could not be exact.
    """
    bench = world(["slow"], release={"on_late": "drop"})
    both: list[dict[str, list[dict[str, Any]]]] = [
        {"a": [row(t)], "b": [row(t)]} for t in (1, 20, 50)
    ]
    play(bench, [*both[:2], {"a": [row(4)], "b": []}, both[2], {"a": [row(5)], "b": []}])
    with pytest.raises(PoisonError, match="does not follow from the rows that are kept"):
        _merge(bench)


seconds = st.integers(0, 60)
arrivals = st.fixed_dictionaries(
    {n: st.lists(st.builds(row, seconds, st.integers(-3, 9)), max_size=5) for n in ("a", "b")}
)


@settings(
    max_examples=int(os.environ.get("TIDEGATE_EXAMPLES", "5")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # an example takes a second: a smaller one is not worth five minutes
)
@given(
    epochs=st.lists(arrivals, min_size=2, max_size=5),
    cuts=st.lists(seconds, max_size=3),
    data=st.data(),
)
def test_any_series_of_merges_equals_a_run_in_time(
    epochs: Epochs, cuts: Sequence[int], data: st.DataObject
) -> None:
    """Whatever was late, and however it is cut into requests and in which order they are merged.

    At the end nothing was lost.
    """
    bench = world()
    play(bench, epochs)
    bounds = [None, *sorted({c * SECOND for c in cuts}), None]
    mine = []
    for since, until in pairwise(bounds):
        for source in ("a", "b"):
            which = LateFilter(since=since, until=until, sources=(source,))
            if list_pending_rows(bench.spec, bench.log, which).num_rows:
                mine.append(
                    create_from_late_rows(bench.spec, bench.log, which, RequestOptions("ann")).id
                )
    for request in data.draw(st.permutations(mine)):
        outcome = merge_request(bench.spec, bench.log, request, MergeDecision("ann"))
        assert outcome.actual == outcome.reported_digest
    _same_as_in_time(bench, epochs)
    for name, window in bench.spec.windows.items():
        found = table(bench, name)
        assert found is None or select_current_revisions(found, window).num_rows == len(
            results(bench, name)
        )


def test_dead_rows_keep_the_times_they_have() -> None:
    """Times in a dead letter are ticks or texts, in one column.

    Both are read when only another column is mended.
    """
    bench = world(["fixed"])
    play(
        bench,
        [
            {"a": [row(1), {"t": None, "v": 3, "kind": "data", "n": None}], "b": [row(1)]},
            {"a": [row(30)], "b": [row(30)]},
        ],
    )
    mend = RowRepair({"t": "1970-01-01T00:00:02Z"}, {})
    request = create_from_dead_letters(bench.spec, bench.log, mend, RequestOptions("ann"))
    merge_request(bench.spec, bench.log, request.id, MergeDecision("ann"))
    assert sorted(r["n"] for r in results(bench, "fixed") if r["_source"] == "a") == [1, 2]
    rows = cast_rows(bench.spec, [{"t": 5, "_seq": 1}, {"t": "1970-01-01T00:00:02Z", "_seq": 2}])
    assert rows["t"].cast("int64").to_pylist() == [5, 2 * SECOND]


def test_merges_go_on_after_a_column_was_added_to_the_spec() -> None:
    """Rows of earlier requests and merges are null in it; none of them could be read any more."""
    bench = world(["fixed"])
    play(bench, LATE_ONES)
    _merge(bench, sources=("a",))
    request = _request(bench)
    raw = bench.spec.model_dump(mode="json", by_alias=True)
    for source in raw["sources"].values():
        source["schema"]["extra"] = "long"
    bench.spec = PipelineSpec.model_validate(raw)
    for source in bench.sources.values():
        source.append({**row(10_100), "extra": 3})
    bench.engine().run_epoch()
    assert list_pending_rows(bench.spec, bench.log, LateFilter()).num_rows == 0
    merge_request(bench.spec, bench.log, request, MergeDecision("ann"))
    traced = [len(trace_rows(bench.spec, bench.log, {name: "3"})) for name in ("v", "extra")]
    assert traced == [1, 2]
    expected = in_time(world(["fixed"]).spec, LATE_ONES)
    found, wanted = (
        [r for r in results(one, "fixed") if r["window_start"].timestamp() < 10_000]
        for one in (bench, expected)
    )
    assert found == wanted


def test_no_revision_of_a_delta_window_counts_as_removed() -> None:
    """Each revision is a part of the result; the report said that the merge removes some."""
    parts = {"kind": "tumbling", "size": "10s", "lateness": "30s", "revisions": "delta"}
    bench = Bench(spec_of(windows={"parts": {**parts, "aggregates": {"n": "count(*)"}}}))
    play(
        bench,
        [
            {"a": [row(1)], "b": [row(1)]},
            {"a": [row(15)], "b": [row(15)]},
            {"a": [row(2)], "b": [row(20)]},
            {"a": [row(60)], "b": [row(60)]},
            {"a": [row(3)], "b": [row(61)]},
        ],
    )
    request = create_from_late_rows(
        bench.spec, bench.log, LateFilter(outputs=("parts",)), RequestOptions("ann")
    )
    _, impact = estimate_impact(bench.spec, bench.log, request)
    assert [(t.table, t.added, t.removed) for t in impact.tables] == [("parts", 1, 0)]


def test_sessions_that_touch_overlap_only_where_touching_ones_merge() -> None:
    """With `session_touch: separate` two sessions side by side follow from their rows."""
    target = AffectedWindow(
        WindowBounds((), 0, 20), [{"_ws": 0, "_we": 10}, {"_ws": 10, "_we": 20}]
    )
    assert target.has_overlapping_sessions(merge_touching=True)
    assert not target.has_overlapping_sessions(merge_touching=False)
    target.published_results[1]["_ws"] = 9
    assert target.has_overlapping_sessions(merge_touching=False)


@pytest.mark.parametrize("kind", ["tumbling", "session"])
def test_keys_that_look_alike_as_texts_are_told_apart(kind: str) -> None:
    """A key may hold any character, and -0.0 is the key 0.0."""
    span = {"size": "10s"} if kind == "tumbling" else {"gap": "10s"}
    aggregates = {"n": "count(*)"}
    window = {"kind": kind, **span, "keys": ["x", "y", "f"], "aggregates": aggregates}
    columns = {"t": "timestamp", "x": "string", "y": "string", "f": "double"}
    source = {"path": "a/", "schema": columns, "event_time": "t", "lag": "0"}
    spec = spec_of(sources={"a": source}, windows={"w": window})
    keys = [("a\x1fvb", "c", 0.0), ("a", "b\x1fvc", 0.0), (None, "n", 1.5), ("n", None, 1.5)]
    schema = pa.schema([("x", pa.string()), ("y", pa.string()), ("f", pa.float64())])
    schema = schema.append(pa.field("n", pa.int64()))
    rows = [dict(zip("xyf", key, strict=True), _et=1, _end=2, _seq=0, _so=0) for key in keys]
    with open_database(for_frames=True) as db:
        db.register("accepted", pa.Table.from_pylist([*rows, {**rows[0], "f": -0.0}]))
        targets = [WindowBounds(key, 0, 10 * SECOND) for key in keys]
        found = recompute_results(db, spec.windows["w"], "accepted", targets, schema)
    assert [one["n"] for one in found] == [2, 1, 1, 1]


@pytest.mark.parametrize(("number", "total"), [(0, 2**63 - 1), (1, None)])
def test_a_recomputed_sum_that_overflows_is_null(number: int, total: int | None) -> None:
    """As in a run."""
    window = {"kind": "tumbling", "size": "10s", "aggregates": {"s": "sum(v)"}}
    spec = spec_of(windows={"w": window})
    rows = [{"v": v, "_et": 1, "_end": 2, "_seq": 0, "_so": 0} for v in (2**63 - 1, number)]
    with open_database(for_frames=True) as db:
        db.register("accepted", pa.Table.from_pylist(rows))
        target, schema = WindowBounds((), 0, 10 * SECOND), pa.schema([("s", pa.int64())])
        (found,) = recompute_results(db, spec.windows["w"], "accepted", [target], schema)
    assert found["s"] == total


def test_a_correction_means_what_a_text_in_an_object_means() -> None:
    """A value that does not fit is refused, not rounded; a whole number of a file may be a double."""
    spec = spec_of()
    (row,) = cast_rows(spec, [{"t": 5, "v": 2.0, "_seq": 1}]).to_pylist()
    assert row["v"] == 2
    for value in ("1.5", 1.5, "2e3", "0x10"):
        with pytest.raises(ConfigurationError, match=f"{value} is no long"):
            cast_rows(spec, [{"t": 5, "v": value, "_seq": 1}])
