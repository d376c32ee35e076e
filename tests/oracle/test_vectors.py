"""Vectors of StreamInsight, Hazelcast and Wire about punctuation and windows, in own words, on
model and mover alike.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.bench import ENGINES, Bench, Play, bench
from tests.conformance.windows_common import END, WINDOW, pipeline, watermark
from tests.oracle.glom import Group, Left, build
from tests.oracle.support import EXAMPLES
from tests.oracle.windows import spans_of
from tidegate.errors import PoisonError
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spec.event_time_options import GlomOptions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

engines = pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "spark"])

COUNT: dict[str, Any] = {"aggregates": {"n": "count(*)"}}
SCHEMA = {"t": "timestamp", "until": "timestamp", "kind": "string", "v": "long"}


def one_source(source: dict[str, Any], **more: Any) -> PipelineSpec:
    """One source `a`, never idle."""
    base = {
        "path": "x",
        "schema": SCHEMA,
        "event_time": "t",
        "end_time": "until",
        "coalesce": {"idle_timeout": "never"},
    }
    marks = {"barriers": {"kind": "kind", "punctuation": "cti"}}
    coalesce = {"idle_timeout": "never"}
    return PipelineSpec.model_validate(
        {"name": "p", "sources": {"a": base | marks | source}, "coalesce": coalesce, **more}
    )


def rows(*times: int) -> dict[str, list[dict[str, Any]]]:
    """Point rows of source `a`."""
    return {"a": [{"t": time} for time in times]}


def counts(play: Play) -> list[tuple[int, int, int]]:
    """(start, end, count) of the window's results, by end."""
    return sorted(
        ((r["window_start"], r["window_end"], r["n"]) for r in play.windows[WINDOW]),
        key=lambda c: (c[1], c[0]),
    )


def feed(window: dict[str, Any], engine: str, **more: Any) -> Bench:
    """A bench with hand-fed watermarks."""
    return bench(pipeline({WINDOW: {**window, **COUNT}}, **more), engine)


def events(*times: int) -> dict[str, list[dict[str, Any]]]:
    """Point rows for a bench with hand-fed watermarks."""
    return {"events": [{"t": time} for time in times]}


GENERATED = {"every_events": 1, "on_violation": "drop"}
THREES = {"windows": {WINDOW: {"kind": "tumbling", "size": 3, **COUNT}}}


def tumble(times: list[int], delay: int, engine: str) -> list[tuple[int, int]]:
    """Counts per three ticks, with a CTI after every row."""
    on = bench(one_source({"punctuation": {**GENERATED, "delay": delay}}, **THREES), engine)
    plays = [on.epoch(rows(time)) for time in times]
    plays.append(on.epoch({}, end={"a"}))
    return [(start, n) for play in plays for start, _, n in counts(play)]


@engines
def test_s1_a_cti_after_each_row(engine: str) -> None:
    """Windows close as the CTIs pass their ends, and the end of the input closes the last."""
    assert tumble([0, 1, 3, 7, 9, 10, 12], 0, engine) == [(0, 2), (3, 1), (6, 1), (9, 2), (12, 1)]


@engines
def test_s2_a_delay_saves_the_row_out_of_order(engine: str) -> None:
    """With no delay the row that comes after a later one is dropped.

    With a delay of one tick it counts.
    """
    disordered = [0, 1, 8, 7, 9, 10, 12]
    assert tumble(disordered, 0, engine) == [(0, 2), (6, 1), (9, 2), (12, 1)]
    assert tumble(disordered, 1, engine) == [(0, 2), (6, 2), (9, 2), (12, 1)]


def after_cti(row: dict[str, Any], engine: str, policy: str, release: str = "side_output") -> Play:
    """CTI(9), then a row of the same member."""
    spec = one_source(
        {"punctuation": {"explicit": True, "on_violation": policy}},
        release={"mode": "ordered", "on_late": release},
    )
    on = bench(spec, engine)
    on.epoch({"a": [{"t": 9, "kind": "cti"}]})
    on.epoch({"a": [row]})
    return on.epoch({}, end={"a"})


@engines
def test_s3_a_point_before_the_cti_is_an_error_row(engine: str) -> None:
    """Explicit punctuation that is broken makes an error row, and fails the epoch where late rows
    are errors.
    """
    spec = one_source({"punctuation": {"explicit": True}})
    on = bench(spec, engine)
    play = on.epoch({"a": [{"t": 9, "kind": "cti"}, {"t": 7}]})
    assert [(r["reason"], r["_seq"]) for r in play.late] == [("cti_violation", 1)]
    with pytest.raises(PoisonError):
        after_cti({"t": 7}, engine, "error", "error")


@engines
@pytest.mark.parametrize(
    ("interval", "kept"), [((7, 11), [(9, 11)]), ((7, 9), []), ((9, 10), [(9, 10)])]
)
def test_s3_an_interval_is_adjusted(
    interval: tuple[int, int], kept: list[tuple[int, int]], engine: str
) -> None:
    """Adjust moves the start to the CTI if the end lies beyond it, and drops the row otherwise."""
    play = after_cti({"t": interval[0], "until": interval[1]}, engine, "adjust")
    assert [(r["t"], r["until"]) for r in play.events] == kept


@engines
@pytest.mark.parametrize(
    ("row", "kept", "released"), [({"t": 2, "until": 5}, 4, 5), ({"t": 5}, 5, 6)]
)
def test_s4_state_is_released_exactly_at_its_end(
    row: dict[str, Any], kept: int, released: int, engine: str
) -> None:
    """An event's own window is held until the CTI reaches its end, not one tick less."""
    on = feed({"kind": "session", "gap": 1, "session_close": "at_end"}, engine)
    on.epoch({"events": [row]})
    assert counts(on.epoch(watermark(kept))) == []
    assert len(counts(on.epoch(watermark(released)))) == 1


@engines
def test_s5_equal_stamps(engine: str) -> None:
    """A strictly increasing source breaks its promise with an equal stamp.

    An increasing one does not.
    """
    strictly = bench(one_source({"punctuation": {**GENERATED, "delay": -1}}, **THREES), engine)
    assert counts(strictly.epoch(rows(5))) == [(3, 6, 1)]
    assert strictly.epoch(rows(5)).events == []
    increasing = bench(one_source({"punctuation": GENERATED}, **THREES), engine)
    increasing.epoch(rows(5))
    increasing.epoch(rows(5))
    assert counts(increasing.epoch(rows(6))) == [(3, 6, 2)]


def sorted_by(lag: int, times: list[int], engine: str) -> list[int]:
    """What leaves when every row is an epoch, in order."""
    on = bench(one_source({"lag": lag}), engine)
    plays = [on.epoch(rows(time)) for time in times]
    plays.append(on.epoch({}, end={"a"}))
    return [r["t"] for play in plays for r in play.events]


@engines
def test_s6_each_key_has_its_own_high_water(engine: str) -> None:
    """One pipeline per key: a row is dropped by its own key's high water only."""
    assert sorted_by(10, [1, 3, 20, 2, 30], engine) == [1, 3, 20, 30]
    assert sorted_by(10, [1, 3, 5, 6, 7, 8, 2, 13], engine) == [1, 2, 3, 5, 6, 7, 8, 13]


@engines
@settings(max_examples=EXAMPLES, deadline=None)
@given(times=st.lists(st.integers(0, 30), max_size=12), lag=st.integers(0, 10))
def test_s7_kept_rows_are_those_near_the_high_water(
    engine: str, times: list[int], lag: int
) -> None:
    """With a lag L a row is kept iff it is at most L behind the largest before it, and kept rows
    leave sorted.
    """
    kept = [t for n, t in enumerate(times) if t >= max(times[:n], default=t) - lag]
    assert sorted_by(lag, times, engine) == sorted(kept)


@engines
@pytest.mark.parametrize("backwards", [False, True])
def test_h13_sliding_windows_rise_and_fall(backwards: bool, engine: str) -> None:
    """Sliding counts do not depend on the order of arrival."""
    on = feed({"kind": "sliding", "size": 4, "slide": 1}, engine, preset="hazelcast")
    arrivals = [-1, 0, 1, 2, 3]
    on.epoch(events(*(arrivals[::-1] if backwards else arrivals)))
    assert [n for mark in range(8) for _, _, n in counts(on.epoch(watermark(mark)))] == [
        1,
        2,
        3,
        4,
        4,
        3,
        2,
        1,
    ]


@engines
def test_h13_h14_a_row_is_late_by_its_first_window(engine: str) -> None:
    """With `first_window` a row whose earliest window is over is late, even if a later one is open."""
    sliding = feed({"kind": "sliding", "size": 4, "slide": 1}, engine, preset="hazelcast")
    sliding.epoch(watermark(10))
    late = sliding.epoch(events(6, 7, 8, 9, 10)).late
    assert [r["t"] for r in late] == [6, 7, 8, 9]
    assert [end for _, end, _ in counts(sliding.epoch(END))] == [11, 12, 13, 14]
    tumbling = feed({"kind": "tumbling", "size": 10}, engine, preset="hazelcast")
    tumbling.epoch(watermark(15))
    assert [r["t"] for r in tumbling.epoch(events(12, 9)).late] == [9]


@engines
def test_by_event_a_row_at_the_frontier_is_on_time(engine: str) -> None:
    """With `event` a row is late iff it is before the frontier, however long its window stays open.

    At the frontier it is not.
    """
    on = feed({"kind": "tumbling", "size": 10, "late_unit": "event"}, engine, preset="hazelcast")
    on.epoch(watermark(5))
    assert [r["t"] for r in on.epoch(events(5, 4, 6)).late] == [4]
    assert counts(on.epoch(END)) == [(0, 10, 2)]


@engines
def test_h15_sessions_by_event_time(engine: str) -> None:
    """Sessions close at their end, drop what is behind the frontier, and stay apart when they only
    touch.
    """
    on = feed({"kind": "session", "gap": 10}, engine, preset="hazelcast")
    on.epoch(events(1, 6, 12, 30, 35, 40))
    assert counts(on.epoch(watermark(25))) == [(1, 22, 3)]
    assert counts(on.epoch(END)) == [(30, 50, 3)]
    late = feed({"kind": "session", "gap": 10}, engine, preset="hazelcast")
    late.epoch(watermark(20))
    assert [r["t"] for r in late.epoch(events(19)).late] == [19]
    touching = feed({"kind": "session", "gap": 10}, engine, preset="hazelcast")
    touching.epoch(events(0, 10))
    assert counts(touching.epoch(END)) == [(0, 10, 1), (10, 20, 1)]


@pytest.mark.parametrize(("time", "span"), [(-4, (-7, -3)), (0, (-3, 1)), (1, (1, 5)), (5, (5, 9))])
def test_h16_windows_floor_with_an_offset(time: int, span: tuple[int, int]) -> None:
    """A row belongs to the window at or below it, also before zero."""
    window = WindowSpec.model_validate({"kind": "tumbling", "size": 4, "offset": 1, **COUNT})
    assert spans_of(window, time, time + 1) == [span]


@engines
def test_h16_w7_windows_end_at_the_ends_of_time(engine: str) -> None:
    """Windows are clamped to int64.

    A row at either end counts, and the last window closes with the input.
    """
    on = feed({"kind": "tumbling", "size": 10}, engine)
    on.epoch(events(TICK_MIN, TICK_MAX - 1))
    assert counts(on.epoch(watermark(0)))[0][0] == TICK_MIN
    assert counts(on.epoch(END))[0][1] == TICK_MAX


@engines
def test_w3_update_while_lateness_lasts(engine: str) -> None:
    """Count 1 at the end, count 2 for the late row, purged exactly at end + lateness, late after
    that.
    """
    on = feed({"kind": "tumbling", "size": 10, "lateness": 5}, engine)
    on.epoch(events(2))
    assert counts(on.epoch(watermark(10))) == [(0, 10, 1)]
    update = on.epoch(events(3))
    assert [(r["n"], r["revision"]) for r in update.windows[WINDOW]] == [(2, 1)]
    assert counts(on.epoch(watermark(9))) == []
    on.epoch(watermark(14))
    assert counts(on.epoch(events(5))) == [(0, 10, 3)]
    on.epoch(watermark(15))
    assert [r["t"] for r in on.epoch(events(4)).late] == [4]


@engines
def test_w4_a_row_counts_in_the_windows_still_open(engine: str) -> None:
    """One window of a sliding row is over, the other counts it.

    Windows before zero floor correctly.
    """
    on = feed({"kind": "sliding", "size": 10, "slide": 5}, engine)
    on.epoch(events(7))
    assert counts(on.epoch(watermark(10))) == [(0, 10, 1)]
    assert on.epoch(events(8)).late == []
    assert counts(on.epoch(watermark(15))) == [(5, 15, 2)]
    negative = feed({"kind": "tumbling", "size": 10}, engine)
    negative.epoch(events(-1))
    assert counts(negative.epoch(watermark(0))) == [(-10, 0, 1)]


@engines
def test_w5_a_session_that_was_emitted_merges_and_replaces(engine: str) -> None:
    """A row between two sessions joins them.

    The update comes at the new end and names what it replaces.
    """
    on = feed({"kind": "session", "gap": 10, "lateness": 30}, engine, preset="wire")
    on.epoch(events(0, 20))
    assert counts(on.epoch(watermark(15))) == [(0, 10, 1)]
    assert counts(on.epoch(events(10))) == []
    result = on.epoch(watermark(30)).windows[WINDOW][0]
    assert (result["window_start"], result["window_end"], result["n"], result["revision"]) == (
        0,
        30,
        3,
        1,
    )
    assert result["replaces"] == ["1970-01-01T00:00:00Z/1970-01-01T00:00:00.000010Z"]


@engines
def test_w6_a_restore_does_not_fire_again(engine: str) -> None:
    """After a restore a fired window stays quiet, takes late rows, and stays purged once it is."""
    on = feed({"kind": "tumbling", "size": 10, "lateness": 5}, engine)
    on.epoch(events(2))
    on.epoch(watermark(10))
    on.restore()
    assert counts(on.epoch(watermark(11))) == []
    assert counts(on.epoch(events(2))) == [(0, 10, 2)]
    on.epoch(watermark(15))
    on.restore()
    assert [r["t"] for r in on.epoch(events(4)).late] == [4]


@engines
def test_zero_rows_fill_a_gap(engine: str) -> None:
    """Empty windows between a key's first and last window are emitted once each, when F has passed
    them.
    """
    on = feed({"kind": "tumbling", "size": 10, "zero_rows": True}, engine)
    on.epoch(events(1, 31))
    assert counts(on.epoch(watermark(25))) == [(0, 10, 1), (10, 20, 0)]
    assert counts(on.epoch(watermark(60))) == [(20, 30, 0), (30, 40, 1)]
    assert counts(on.epoch(events(61))) == [(40, 50, 0), (50, 60, 0)]
    assert counts(on.epoch(END)) == [(60, 70, 1)]


@engines
@pytest.mark.parametrize(
    ("emit", "told"),
    [
        ("close", [[], [], [(0, 10, 2)], []]),
        ("each_epoch", [[(0, 10, 1)], [(0, 10, 2), (20, 30, 1)], [], [(20, 30, 2)]]),
        (
            "complete",
            [[(0, 10, 1)], [(0, 10, 2), (20, 30, 1)], [(0, 10, 2), (20, 30, 1)], [(20, 30, 2)]],
        ),
    ],
)
def test_what_is_announced_when(emit: str, told: list[Any], engine: str) -> None:
    """A result when F passes the end.

    What has changed in every epoch; or all live windows in every epoch.
    """
    on = feed({"kind": "tumbling", "size": 10, "emit": emit}, engine)
    assert [
        counts(on.epoch(given)) for given in (events(1), events(2, 21), watermark(10), events(22))
    ] == told


@engines
def test_windows_before_the_least_start_do_not_exist(engine: str) -> None:
    """Rows that no other window covers count nowhere, and are not late for anything either."""
    on = feed({"kind": "sliding", "size": 10, "slide": 5, "min_window_start": 0}, engine)
    play = on.epoch(events(-1, 2, 7))
    assert [*counts(play), *play.late] == []
    assert counts(on.epoch(watermark(30))) == [(0, 10, 2), (5, 15, 1)]


@engines
@pytest.mark.parametrize(("revisions", "sums"), [("accumulate", [1, 3]), ("delta", [1, 2])])
def test_what_a_later_firing_carries(revisions: str, sums: list[int], engine: str) -> None:
    """The whole window again, or only what came since."""
    on = feed({"kind": "tumbling", "size": 10, "lateness": 10, "revisions": revisions}, engine)
    on.epoch(events(1))
    plays = [on.epoch(watermark(10)), on.epoch(events(2, 3))]
    assert [[(r["n"], r["revision"]) for r in play.windows[WINDOW]] for play in plays] == [
        [(n, i)] for i, n in enumerate(sums)
    ]


@engines
@pytest.mark.parametrize(
    ("touch", "close", "told"),
    [
        ("merge", "at_end", 10),
        ("merge", "after_end", 11),
        ("separate", "at_end", 10),
        ("separate", "after_end", 11),
        (
            "merge",
            None,
            11,
        ),  # a row at 10 would touch, so whether it merges must not depend on the cut
        ("separate", None, 10),
    ],
)
def test_when_a_session_closes(touch: str, close: str | None, told: int, engine: str) -> None:
    """At its end, or when F is behind it: the default where touching sessions merge."""
    on = feed(
        {"kind": "session", "gap": 10, "session_touch": touch, "session_close": close}, engine
    )
    on.epoch(events(0))
    found = {time: counts(on.epoch(watermark(time))) for time in (9, 10, 11)}
    assert found == {time: [(0, 10, 1)] if time == told else [] for time in (9, 10, 11)}


@engines
@pytest.mark.parametrize(("session_late", "accepted"), [("merged", 2), ("own", 2), ("event", 1)])
def test_how_a_session_row_is_judged(session_late: str, accepted: int, engine: str) -> None:
    """A row below F whose own session is still open, and one whose own is closed but that meets a
    live one.
    """
    window = {
        "kind": "session",
        "gap": 10,
        "session_late": session_late,
        "session_touch": "separate",
    }
    on = feed(window, engine)
    on.epoch(events(20))
    on.epoch(watermark(21))
    late = on.epoch(events(15)).late
    assert counts(on.epoch(watermark(40))) == [(15 if accepted == 2 else 20, 30, accepted)]
    assert len(late) == 2 - accepted


@engines
@pytest.mark.parametrize(("session_late", "start"), [("merged", 12), ("own", 20)])
def test_a_session_row_may_be_kept_by_the_session_it_meets(
    session_late: str, start: int, engine: str
) -> None:
    """Its own session ends at 22, when F is 25: late on its own, in time after it merged."""
    on = feed(
        {"kind": "session", "gap": 10, "session_late": session_late, "session_touch": "separate"},
        engine,
    )
    on.epoch(events(20))
    on.epoch(watermark(25))
    on.epoch(events(12))
    assert [c[0] for c in counts(on.epoch(watermark(40)))] == [start]


@engines
def test_a_window_fires_while_it_is_open(engine: str) -> None:
    """`fire_every` shows an open window whenever F passes a multiple behind the rows that opened
    it, and again at its end.
    """
    on = feed({"kind": "tumbling", "size": 100, "fire_every": 10}, engine)
    on.epoch(events(12))
    assert counts(on.epoch(watermark(20))) == []
    assert counts(on.epoch(watermark(21))) == [(0, 100, 1)]
    on.epoch(events(15, 95))
    on.restore()
    assert counts(on.epoch(watermark(55))) == [(0, 100, 3)]
    assert counts(on.epoch(watermark(58))) == []
    assert counts(on.epoch(END)) == [(0, 100, 3)]


def test_a_gap_of_a_million_windows_costs_nothing() -> None:
    """Waiting and jumping over 10^6 empty windows takes no work per window, with zero rows too as
    long as F does not move.
    """
    on = feed({"kind": "tumbling", "size": 10, "zero_rows": True}, "decider")
    on.epoch(events(1, 10_000_001))
    assert counts(on.epoch(watermark(15))) == [(0, 10, 1)]
    plain = feed({"kind": "tumbling", "size": 10}, "decider")
    plain.epoch(events(1, 10_000_001))
    assert len(counts(plain.epoch(END))) == 2


def test_g1_rows_are_grouped_by_the_first_of_the_group() -> None:
    """A row within dt of the group's first row joins it.

    Dt 0 groups equal stamps; groups are bounded; three stamps.
    """

    def groups(times: list[int], **options: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        group = Group()
        for epoch in (
            [Left(0, time, n)] for n, time in enumerate(times)
        ):  # every row in an epoch of its own
            done, group = build(
                group, epoch, GlomOptions.model_validate(options), ReleaseMark(0, epoch[0].time)
            )
            found += [
                (one.row(GlomOptions.model_validate(options))["stamp"], len(one.times))
                for one in done
            ]
        done, group = build(
            group, [], GlomOptions.model_validate(options), ReleaseMark(0, 2**63 - 1)
        )
        assert not group.times
        return [
            *found,
            *(
                (one.row(GlomOptions.model_validate(options))["stamp"], len(one.times))
                for one in done
            ),
        ]

    times = [100, 105, 110, 111, 125]
    assert groups(times, dt=10) == [(100, 3), (111, 1), (125, 1)]
    assert groups([1, 1, 2], dt=0) == [(1, 2), (2, 1)]
    assert groups([1, 2, 3], dt=10, max_rows=2) == [(1, 2), (3, 1)]
    assert [stamp for stamp, _ in groups(times, dt=10, stamp="latest")] == [110, 111, 125]
    assert [stamp for stamp, _ in groups(times, dt=10, stamp="mean")] == [105, 111, 125]
