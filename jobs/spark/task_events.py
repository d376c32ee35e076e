"""The events output: the second job of an epoch, if the first has not written it.

Rows leave sorted, with contiguous positions; the others wait in immutable segments. A segment is
never rewritten because part of it left: rows below `release_before` count as gone, and the segment
is dropped when all of them are.

The driver plans the job from what the tasks of the first job say of their rows, and sees none.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.rows.event_files import (
    RANGE_BYTES,
    EventsOrder,
    FileAnswer,
    RangesOrder,
    assign_first_positions,
    list_event_members,
)
from tidegate.jobs.rows.late_rows import SourceCounts
from tidegate.jobs.rows.state_files import MANY_SEGMENTS, SMALL_SEGMENT_ROWS, MergedState
from tidegate.jobs.rows.topic_reading import remove_settings
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS

from .epoch_context import EpochContext, has_rows_from_mark
from .errors import SPARK_FAILED
from .python_tasks import count_tasks
from .task_epochs import TaskScans
from .task_runner import choose_runner

_TABLE: Final = f"table:{EVENTS}"
_SEGMENT_SAMPLES: Final = 64
MOST_READERS: Final = 4
"""Up to so many tasks each reads all rows, and Spark moves none.

That was measured to be quicker with two tasks. All of them together read as many times the rows as
there are tasks, so with many it cannot be.
"""
_SHARE_BYTES: Final = 4 * RANGE_BYTES
"""Bytes of rows that such a task holds, as Arrow has them."""
_UNPACKED: Final = 4
"""How many times as large rows are in Arrow as in a Parquet file, about."""
_Weights = list[tuple[ReleaseMark, float]]
"""Some rows, each with how many there are like it."""


@dataclass(frozen=True)
class ReleasedRows(MergedState):
    """What left, in the events table if one is kept, and what waits.

    Attributes:
        counts: (source, `released`) -> rows that left.
        maximum: greatest (section, event time) that left in order; None if none did.
        flagged: how many rows, the first ones, are late rows that left at once.
        waiting: key of a segment -> its rows that waited before and after the epoch, as tasks have
            counted them.
    """

    counts: SourceCounts = field(default_factory=Counter)
    maximum: ReleaseMark | None = None
    flagged: int = 0
    waiting: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many left."""
        return self.counts.total()


def count_released_rows(scans: TaskScans) -> ReleasedRows:
    """Count the rows that would leave, where no events table is kept: no file is written.

    These are all data rows that were not set aside, as the spec then has ``pass_through``.
    """
    leaving, verdicts = SourceCounts(), scans.count_verdicts()
    for index, member in enumerate(scans.survey.members):
        aside = verdicts[index, "dropped"] + verdicts[index, "cti_violation"]
        leaving[member.member.source, "released"] += member.rows - aside
    return ReleasedRows(counts=leaving)


def count_buffered_rows(
    segments: Iterable[FileRef], mark: ReleaseMark, known: Mapping[str, int]
) -> int:
    """Rows at or above the mark in order segments; segments of other kinds do not count.

    `known` has those of segments of which a part has left.
    """
    total = 0
    for ref in segments:
        if ref.kind == ORDER_KIND and has_rows_from_mark(ref, mark):
            total += ref.rows if is_waiting_whole(ref, mark) else known[ref.key]
    return total


def is_waiting_whole(ref: FileRef, mark: ReleaseMark) -> bool:
    """Whether all rows of an order segment are known to be at or above the mark."""
    # Of several sections the least time may belong to any of them.
    return ref.extra["section_min"] == ref.extra["section_max"] and (
        ReleaseMark(ref.extra["section_min"], ref.min_time or 0) >= mark
    )


def release_in_tasks(epoch: EpochContext, scans: TaskScans) -> ReleasedRows:
    """Write the rows that leave, and the new segments of those that wait.

    Raises:
        TidegateError: a segment is damaged, the store does not answer, or rows were lost.
    """
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        return _write_all_rows(epoch, scans)
    order, untouched = _plan_release(epoch, scans)
    if not order.kept and not order.segments:
        return ReleasedRows(segments=untouched)
    runner = choose_runner(epoch.session)
    found = runner.run_release_job(epoch.session, scans.kept, order)
    return _sum_answers(epoch, untouched, found)


def _write_all_rows(epoch: EpochContext, scans: TaskScans) -> ReleasedRows:
    live = tuple(epoch.live_segments(ORDER_KIND))
    if scans.early_from is not None:
        written = [files for answer in scans.answers for files in answer.events]
        released = _sum_answers(epoch, live, written)
        _require_events(epoch, scans, released)
        return released
    if scans.kept is None:
        return ReleasedRows(segments=live)
    order = _make_order(epoch, scans)
    rows = {one.number: one.kept.rows for one in scans.answers if one.kept is not None}
    firsts = assign_first_positions(order.members, rows, epoch.order.next_position)
    runner = choose_runner(epoch.session)
    return _sum_answers(epoch, live, runner.run_events_job(scans.kept, order, firsts))


def _require_events(epoch: EpochContext, scans: TaskScans, released: ReleasedRows) -> None:
    """Refuse a decision by which the events are not what the tasks have written: a defect."""
    planned = sum(unit.count_rows().total() for unit in scans.units)
    written = scans.early_from, released.rows, scans.order.section, ()
    decided = epoch.order.next_position, planned, epoch.decision.section, epoch.decision.flagged
    if written != decided:
        cause = f"events were written as {written}, not {decided}"
        raise SPARK_FAILED(pipeline=epoch.spec.name, cause=cause)


def _make_order(epoch: EpochContext, scans: TaskScans) -> EventsOrder:
    slices = enumerate(scans.cut.slices)
    members = list_event_members(epoch.spec, slices, epoch.decision.flagged)
    kept = {
        answer.number: answer.kept.rows.total() if answer.kept is not None else 0
        for answer in scans.answers
    }
    folders, section = epoch.order.folders, epoch.decision.section
    spec = remove_settings(epoch.spec)
    return EventsOrder(spec, folders, epoch.store.url, section, members, kept)


def _sum_answers(
    epoch: EpochContext, untouched: tuple[FileRef, ...], answers: list[FileAnswer]
) -> ReleasedRows:
    """What all files together are; `untouched` are the segments that stay as they are."""
    files = [file for answer in answers for file in answer.files]
    events = tuple(ref for ref in files if ref.kind == _TABLE)
    waiting = tuple(ref for ref in files if ref.kind != _TABLE)
    counts, counted = SourceCounts(), {ref.key: (0, ref.rows) for ref in waiting}
    for answer in answers:
        note_footers(epoch.store, answer.footers)
        counted |= answer.waiting
        for source, rows in answer.counts.items():
            counts[source, "released"] += rows
    return ReleasedRows(
        results=events,
        segments=(*untouched, *waiting),
        written=waiting,
        counts=counts,
        maximum=max((a.newest for a in answers if a.newest is not None), default=None),
        flagged=sum(answer.flagged for answer in answers),
        waiting=counted,
    )


# In order


def _plan_release(epoch: EpochContext, scans: TaskScans) -> tuple[RangesOrder, tuple[FileRef, ...]]:
    """Return the order of a release job, and the segments that stay live as they are."""
    before, after = epoch.decision.release_before, epoch.decision.release_after
    live = epoch.live_segments(ORDER_KIND)
    kept = [ref for ref in live if has_rows_from_mark(ref, after)]
    small = [ref for ref in kept if ref.rows <= SMALL_SEGMENT_ROWS]
    # With the one that this epoch writes there would be more.
    merged = frozenset(ref.key for ref in small) if len(small) >= MANY_SEGMENTS else frozenset()
    leaving = {ref.key for ref in epoch.releasable_segments()}
    # Those of which a part has left are counted.
    parts = {
        ref.key
        for ref in live
        for mark in (before, after)
        if has_rows_from_mark(ref, mark) and not is_waiting_whole(ref, mark)
    }
    read = tuple(ref for ref in live if ref.key in leaving | parts | merged)
    weights = _gather_weights(epoch, scans, read)
    summaries = [answer.kept for answer in scans.answers if answer.kept is not None]
    size = sum(one.size for one in summaries) + sum(ref.bytes * _UNPACKED for ref in read)
    total = sum(weight for own in weights for _, weight in own)
    ranges = tuple(_divide_ranges(own, size / max(total, 1)) for own in weights)
    shares = _count_shares(epoch, size)
    order = RangesOrder(
        **vars(_make_order(epoch, scans)),
        before=before,
        after=after,
        position=epoch.order.next_position,
        ranges=ranges,
        segments=read,
        merged=merged,
        maps=1 if shares else max(len(read), 1) if scans.kept is None else scans.kept.units,
        shares=shares,
    )
    return order, tuple(ref for ref in kept if ref.key not in merged)


def _count_shares(epoch: EpochContext, size: int) -> int:
    """How many tasks share the targets of rows of so many bytes; 0: Spark moves the rows."""
    if size <= RANGE_BYTES:
        return 1
    tasks = count_tasks(epoch.session)
    if tasks is None or tasks > MOST_READERS or size > tasks * _SHARE_BYTES:
        return 0
    return tasks


def _gather_weights(
    epoch: EpochContext, scans: TaskScans, read: Iterable[FileRef]
) -> tuple[_Weights, _Weights, _Weights]:
    """Samples of late rows that leave at once, of rows that leave in order, and that stay."""
    late, leaving, staying = _Weights(), _Weights(), _Weights()
    decision = epoch.decision
    for answer in scans.answers:
        if (kept := answer.kept) is not None:
            late += _sample_rows(decision.section, kept.late_times, kept.late)
            others = _sample_rows(decision.section, kept.times, kept.rows.total() - kept.late)
            leaving += [one for one in others if one[0] < decision.release_after]
            staying += [one for one in others if one[0] >= decision.release_after]
    for ref in read:
        low, high = ref.min_time or 0, ref.max_time or 0
        step = (high - low) // _SEGMENT_SAMPLES + 1
        own = _sample_rows(ref.extra["section_max"], [*range(low, high + 1, step)], ref.rows)
        leaving += [one for one in own if one[0] < decision.release_after]
        staying += [one for one in own if one[0] >= decision.release_after]
    return late, leaving, staying


def _sample_rows(section: int, times: list[int], rows: int) -> _Weights:
    return [(ReleaseMark(section, time), rows / len(times)) for time in times]


def _divide_ranges(weights: _Weights, row_size: float) -> tuple[ReleaseMark, ...]:
    """Bounds between ranges of about the same size, `RANGE_BYTES` at most."""
    total = sum(rows for _, rows in weights)
    step = total / max(-(-total * row_size // RANGE_BYTES), 1)
    bounds, before = list[ReleaseMark](), 0.0
    for mark, rows in sorted(weights):
        is_new = not bounds or mark > bounds[-1]
        if is_new and before >= step * (len(bounds) + 1):
            bounds.append(mark)
        before += rows
    return tuple(bounds)
