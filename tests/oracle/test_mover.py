"""The oracle mover, one epoch at a time, with decisions written by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.oracle.memory_source import MemorySource
from tests.oracle.mover import OracleMover
from tests.oracle.tables import read_rows_of
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.manifest import FileRef
from tidegate.errors import PoisonError
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, Slice, join_seq
from tidegate.jobs.eventtime.decision_types import FIRST_RELEASE_MARK, Decision, Member, ReleaseMark
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits
from tidegate.time_units import TICK_MAX, TICK_MIN

COLUMNS = {"t": "timestamp", "until": "timestamp", "kind": "string", "k": "string", "v": "long"}


def pipeline(source: dict[str, Any] | None = None, **more: Any) -> PipelineSpec:
    """A pipeline with one source `a`."""
    base = {"path": "a", "schema": COLUMNS, "event_time": "t", "lag": 0}
    return PipelineSpec.model_validate(
        {"name": "p", "sources": {"a": {**base, **(source or {})}}, **more}
    )


class Rig:
    """One source in memory, one mover, epochs by hand."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.store = MemoryStore()
        self.source = MemorySource("a")
        self.mover = OracleMover(self.store, spec, {"a": self.source})
        self.resume: dict[str, Any] | None = None
        self.segments: tuple[FileRef, ...] = ()
        self.state: dict[str, Any] = {}
        self.position = 0
        self.epoch = 0

    def plan(self, *rows: dict[str, Any]) -> Slice:
        self.source.append(*rows)
        return self.source.plan(Member("a"), self.resume, ReadLimits())

    def run(
        self, *rows: dict[str, Any], before: int, after: int, decision: Decision | None = None
    ) -> MoveResult:
        part = self.plan(*rows)
        surveyed = self.mover.survey(Cut((part,)), self.state)
        self.epoch += 1
        decided = decision or Decision(
            0,
            before,
            after,
            0,
            ReleaseMark(0, before),
            False,
            ReleaseMark(0, before),
            ReleaseMark(0, after),
        )
        order = MoveOrder(
            Cut((part,)),
            decided,
            self.segments,
            AttemptFolders(BucketLayout("p"), CheckpointId(0, self.epoch, "abcdef")),
            self.position,
        )
        moved = self.mover.move(order, surveyed)
        assert moved.counters.is_conserved()
        self.resume, self.segments, self.position = part.resume, moved.segments, moved.next_position
        self.state = {
            "clock": 0,
            "members": {"a/0": {"generator": surveyed.survey.members[0].punctuation_state}},
        }
        return moved

    def table(self, moved: MoveResult, name: str) -> list[dict[str, Any]]:
        return [row for ref in moved.files.get(name, ()) for row in read_rows_of(self.store, ref)]


def at(time: int | None, v: int = 1, k: str = "x", **more: Any) -> dict[str, Any]:
    """A row."""
    return {"t": time, "v": v, "k": k, **more}


def test_rows_leave_in_order_when_the_mark_passes_them() -> None:
    """Rows wait in the order buffer and leave sorted, with contiguous positions, and the emptied
    segment is dropped.
    """
    rig = Rig(pipeline())
    first = rig.run(at(30, 3), at(10, 1), before=TICK_MIN, after=15)
    assert [(r["t"], r["position"]) for r in rig.table(first, "events")] == [(10, 0)]
    assert first.counters.retained == 1
    second = rig.run(at(20, 2), before=15, after=40)
    assert [(r["t"], r["position"]) for r in rig.table(second, "events")] == [(20, 1), (30, 2)]
    assert not second.segments
    assert second.released_max == ReleaseMark(0, 30)


def test_a_segment_is_kept_until_its_last_row_left() -> None:
    """A row that left is not released again from a segment that still lives."""
    rig = Rig(pipeline())
    rig.run(at(10), at(20), at(30), before=TICK_MIN, after=5)
    assert [r["t"] for r in rig.table(rig.run(before=5, after=15), "events")] == [10]
    assert [r["t"] for r in rig.table(rig.run(before=15, after=25), "events")] == [20]
    assert len(rig.segments) == 1
    assert [r["t"] for r in rig.table(rig.run(before=25, after=35), "events")] == [30]
    assert not rig.segments


def test_a_late_row_goes_to_the_late_table_with_what_it_missed() -> None:
    """The side output names output, reason, lateness and frontier."""
    rig = Rig(pipeline())
    moved = rig.run(at(7), before=10, after=10)
    row = rig.table(moved, "late")[0]
    assert (row["output"], row["reason"], row["lateness_us"], row["frontier"], row["_seq"]) == (
        "events",
        "late_order",
        3,
        10,
        0,
    )
    assert moved.counters.late == 1


@pytest.mark.parametrize(
    ("policy", "released", "late", "dropped", "rejected"),
    [
        ("emit_flagged", 1, 0, 0, 0),
        ("drop", 0, 0, 1, 0),
        ("reject_to_origin", 0, 0, 0, 1),
        ("adjust", 0, 1, 0, 0),
    ],
)
def test_late_policies_count_apart(
    policy: str, released: int, late: int, dropped: int, rejected: int
) -> None:
    """Each policy has its own disposition; a point row cannot be adjusted."""
    moved = Rig(pipeline(release={"on_late": policy})).run(at(7), before=10, after=10)
    c = moved.counters
    assert (c.released, c.late, sum(c.dropped.values()), c.rejected) == (
        released,
        late,
        dropped,
        rejected,
    )


def test_an_interval_row_is_adjusted_to_the_frontier() -> None:
    """With `adjust` a late interval that reaches beyond F starts at F."""
    rig = Rig(pipeline({"end_time": "until"}, release={"on_late": "adjust"}))
    moved = rig.run(at(7, until=12), before=10, after=11)
    assert [(r["t"], r["_late"]) for r in rig.table(moved, "events")] == [(10, False)]


def test_error_policy_names_the_row() -> None:
    """With `error` the epoch fails and says which row."""
    with pytest.raises(PoisonError, match="a/0 row 0"):
        Rig(pipeline(release={"on_late": "error"})).run(at(7), before=10, after=10)


def test_flagged_rows_leave_first() -> None:
    """`emit_flagged`: late rows leave at once, before the others, marked."""
    rig = Rig(pipeline(release={"on_late": "emit_flagged"}))
    moved = rig.run(at(12), at(7), before=10, after=20)
    assert [(r["t"], r["_late"]) for r in rig.table(moved, "events")] == [(7, True), (12, False)]


def test_a_flagged_row_is_reported_with_what_it_missed() -> None:
    """`emit_flagged`: the late table and the counts name a late row that was released."""
    rig = Rig(pipeline(release={"on_late": "emit_flagged"}))
    moved = rig.run(at(12), at(7), before=10, after=20)
    late = [
        (r["output"], r["reason"], r["lateness_us"], r["frontier"])
        for r in rig.table(moved, "late")
    ]
    assert late == [("events", "flagged", 3, 10)]
    counts = moved.counters.per_source["a"]
    assert (counts["released"], counts["flagged"], counts["late_rows"]) == (2, 1, 1)


def test_windows_update_and_purge() -> None:
    """W3: a window is emitted when F passes it, updated while lateness lasts, then its rows are
    late.
    """
    window = {"kind": "tumbling", "size": 10, "lateness": 5, "aggregates": {"n": "count(*)"}}
    rig = Rig(pipeline(release={"mode": "pass_through"}, windows={"w": window}))
    free = Decision(0, 0, 0, 0, None, False, FIRST_RELEASE_MARK, FIRST_RELEASE_MARK)

    def step(*rows: dict[str, Any], before: int, after: int) -> MoveResult:
        return rig.run(
            *rows,
            before=before,
            after=after,
            decision=replace(free, frontier_before=before, frontier_after=after),
        )

    assert step(at(2), before=TICK_MIN, after=TICK_MIN).files.keys() == {"events"}
    assert [(r["n"], r["revision"]) for r in rig.table(step(before=TICK_MIN, after=10), "w")] == [
        (1, 0)
    ]
    assert [(r["n"], r["revision"]) for r in rig.table(step(at(3), before=10, after=10), "w")] == [
        (2, 1)
    ]
    assert step(before=10, after=14).segments
    assert not step(before=14, after=15).segments
    moved = step(at(4), before=15, after=15)
    assert [(r["output"], r["reason"]) for r in rig.table(moved, "late")] == [("w", "late_window")]
    assert moved.counters.late_by_output == {"w": 1}
    assert moved.counters.released == 1


def test_bad_rows_become_dead_letters() -> None:
    """Rows without an event time or before the minimum are counted and kept with a reason."""
    rig = Rig(pipeline({"min_event_time": 5}))
    moved = rig.run(at(None), at(3), at(9), before=TICK_MIN, after=TICK_MAX)
    assert [r["reason"] for r in rig.table(moved, "dead_letters")] == [
        "no_event_time",
        "before_min_event_time",
    ]
    assert moved.counters.dead_lettered == 2


def test_survey_ends_at_the_first_barrier() -> None:
    """Rows behind a barrier row are not surveyed; the barrier is named with its position."""
    rig = Rig(pipeline({"barriers": {"kind": "kind", "types": ["begin"]}}))
    part = rig.plan(at(10), at(11, kind="begin"), at(20))
    member = rig.mover.survey(Cut((part,)), {}).survey.members[0]
    assert (member.rows, member.max_time) == (1, 10)
    assert member.barrier is not None
    assert (member.barrier.seq, member.barrier.type, member.barrier.event_time) == (1, "begin", 11)
    trimmed = rig.source.trim(part, 2)
    assert (trimmed.end, trimmed.resume, trimmed.pending) == (2, {"next": 2}, True)


def test_far_future_rows_are_quarantined() -> None:
    """`max_jump`: a stamp far ahead of partition and clock goes to the late table and does not move
    the frontier.
    """
    rig = Rig(pipeline({"max_jump": 100}))
    rig.state = {"clock": 1000}
    moved = rig.run(at(1000), at(5000), at(1001), before=TICK_MIN, after=TICK_MIN)
    assert [(r["reason"], r["t"]) for r in rig.table(moved, "late")] == [("max_jump", 5000)]
    assert rig.state["members"]["a/0"]["generator"]["newest"] == 1001


def test_a_source_may_run_ahead_of_the_clock_step_by_step() -> None:
    """`max_jump` asks for both.

    Far ahead of the clock, and as far ahead of the partition's own newest row.
    """
    rig = Rig(pipeline({"max_jump": 100}))
    rig.state = {"clock": 1000}
    moved = rig.run(at(1090), at(1190), at(1291), before=TICK_MIN, after=TICK_MIN)
    assert [r["t"] for r in rig.table(moved, "late")] == [1291]


def test_object_slices_are_cast_to_the_schema() -> None:
    """Object rows are read by range, converted value by value, and what cannot be converted is a
    dead letter.
    """
    spec = pipeline()
    store = MemoryStore()
    table = pa.table(
        {
            "t": pa.array([1, 2, 3], pa.timestamp("ms", "UTC")),
            "v": ["1", "zwei", "3"],
            "k": ["x", "y", "z"],
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    store.put("a/one.parquet", buffer.getvalue())
    piece = {"key": "a/one.parquet", "ordinal": 2, "row_start": 1, "row_end": 3}
    part = Slice(Member("a"), join_seq(2, 1), join_seq(2, 3), (piece,))
    mover = OracleMover(store, spec)
    surveyed = mover.survey(Cut((part,)), {})
    survey = surveyed.survey.members[0]
    assert (survey.rows, survey.dead, survey.max_time) == (1, 1, 3000)
    decision = Decision(
        0, TICK_MIN, TICK_MAX, 0, None, False, FIRST_RELEASE_MARK, ReleaseMark(1, TICK_MIN)
    )
    moved = mover.move(
        MoveOrder(
            Cut((part,)),
            decision,
            (),
            AttemptFolders(BucketLayout("p"), CheckpointId(0, 1, "abcdef")),
            0,
        ),
        surveyed,
    )
    rows = read_rows_of(store, moved.files["events"][0])
    assert [(r["t"], r["v"], r["_seq"]) for r in rows] == [(3000, 3, join_seq(2, 2))]
    dead = read_rows_of(store, moved.files["dead_letters"][0])
    assert [(r["reason"], r["object"], r["_seq"]) for r in dead] == [
        ("bad_value", "a/one.parquet", join_seq(2, 1))
    ]


def test_many_segments_are_gathered() -> None:
    """Segments of one kind stay bounded in number, and nothing is lost or doubled by gathering
    them.
    """
    window = {"kind": "tumbling", "size": 1000, "aggregates": {"n": "count(*)"}}
    rig = Rig(pipeline(windows={"w": window}))
    for time in range(40):
        moved = rig.run(at(100 + time), before=TICK_MIN, after=TICK_MIN)
        assert len(moved.segments) <= 34
    assert moved.counters.retained == 40
    final = rig.run(before=TICK_MIN, after=TICK_MAX)
    assert [r["t"] for r in rig.table(final, "events")] == list(range(100, 140))
    assert [r["n"] for r in rig.table(final, "w")] == [40]
