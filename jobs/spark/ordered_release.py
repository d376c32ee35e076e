"""The events output.

Rows leave sorted, with contiguous positions; the others wait in immutable segments.

A segment is never rewritten because part of it left: rows below `release_before` count as gone, and
the segment is dropped when all of them are. DuckDB sorts in the driver what fits there; a larger
release is cut into ranges of about equal size, which Spark's tasks sort.

One task sorts each range, and the range's first position is known beforehand. One pass over the
times alone counts the rows per narrow bucket, and neighbouring buckets are joined to ranges. A
second pass sends each row to the task of its range. Both passes run the same code in every epoch
(see `opaque_literal`). Spark would compile a job per range again, because its bounds are code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.engine.replay import count_waiting_rows
from tidegate.jobs.eventtime.decision_types import Decision, ReleaseMark
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame, combine_frames
from tidegate.jobs.rules.row_conditions import (
    ROW_ORDER,
    below_mark_sql,
    opaque_literal,
    quote_name,
    quote_text,
    time_below_sql,
)
from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from .cut_survey import MemberScans
from .epoch_context import (
    EpochContext,
    OutputFiles,
    WrittenFiles,
    collect_to_driver,
    has_rows_from_mark,
)

_RELEASE_SORT = ["_section", *ROW_ORDER]
_WAITING_COLUMNS = ("_section", "_tardy", "_et", "_so", "_source", "_partition", "_seq")
# The bits of `monotonically_increasing_id` that count rows in one partition.
_ROW_NUMBER_BITS = (1 << 33) - 1


@dataclass(frozen=True)
class ReleasedRows(OutputFiles):
    """What left, in the events table if one is kept, and what waits.

    Attributes:
        rows: how many left.
        maximum: greatest (section, event time) that left in order; None if none did.
        per_source: source -> rows that left.
        flagged: how many of them, the first ones, are late rows that left at once.
    """

    rows: int = 0
    maximum: ReleaseMark | None = None
    per_source: dict[str, int] = field(default_factory=dict)
    flagged: int = 0


def _select_accepted_rows(epoch: EpochContext, frame: Frame) -> Frame:
    """Return the rows that join the events output, with `_late`, `_tardy` and `_section`.

    Rows are adjusted where the late policy says so.
    """
    decision, policy = epoch.order.decision, epoch.spec.release.on_late
    bound = decision.late_bound
    late = time_below_sql("_et", bound)
    if policy is LatePolicy.ADJUST and late != "false":
        # The frontier has passed their start, so they begin at the frontier. A row that ended
        # before it cannot be moved and stays late.
        start = max(decision.frontier_before, bound)
        frame = adjust_start_times(frame, epoch.spec, f"({late}) AND _end > {start}L", f"{start}L")
        frame = frame.where(f"_moved OR NOT ({late})").drop("_moved")
    flagged = policy is LatePolicy.EMIT_FLAGGED
    if policy not in (LatePolicy.EMIT_FLAGGED, LatePolicy.ADJUST) and late != "false":
        frame = frame.where(f"NOT ({late})")
    own = [f"{late if flagged else 'false'} AS _late", f"{_tardy_sql(decision)} AS _tardy"]
    return frame.selectExpr("*", *own, f"{opaque_literal(decision.section, '_seq')} AS _section")


def _tardy_sql(decision: Decision) -> str:
    """Whether a row of this epoch stood before a tardy barrier.

    It leaves in order, but flagged (section 3.5).
    """
    names = ", ".join(quote_text(member) for member in decision.flagged)
    return f"concat(_source, '/', _partition) IN ({names})" if names else "false"


def adjust_start_times(frame: Frame, spec: PipelineSpec, condition: str, start: str) -> Frame:
    """Move the start of rows that meet the condition; `_moved` tells which.

    It changes `_et`, `_time` and the event-time column of the row's source. `condition` and `start`
    (ticks) are Spark SQL.
    """
    columns = list(spec.columns)
    times: dict[str, list[str]] = {}
    for name, source in spec.sources.items():
        # Sources may name their event-time columns differently; a row moves in its own source's.
        times.setdefault(source.event_time, []).append(quote_text(name))
    moved = frame.selectExpr("*", f"({condition}) AS _moved")
    others = [c for c in frame.columns if c not in columns and c not in ("_et", "_time")]
    own = [
        (
            f"IF(_moved AND _source IN ({', '.join(times[c])}), timestamp_micros({start}),"
            f" {quote_name(c)}) AS {quote_name(c)}"
            if c in times
            else quote_name(c)
        )
        for c in columns
    ]
    return moved.selectExpr(
        *own,
        *others,
        f"IF(_moved, {start}, _et) AS _et",
        f"IF(_moved, timestamp_micros({start}), _time) AS _time",
        "_moved",
    )


def release_rows(epoch: EpochContext) -> ReleasedRows:
    """Write the rows that leave, and the new segment of those that wait."""
    live, after = epoch.live_segments(ORDER_KIND), epoch.order.decision.release_after
    # Segments of which every row has left are dropped; the others stay as they are.
    kept = tuple(ref for ref in live if has_rows_from_mark(ref, after))
    if epoch.data is None and not epoch.releasable_segments():
        return ReleasedRows(segments=kept)
    rows = combine_frames(_select_cut_rows(epoch), _select_buffered_rows(epoch))
    release = _release_in_driver if epoch.fits_in_driver else _release_in_tasks
    events, waiting, flagged = release(epoch, rows)
    written = events.read_columns(["section", "position", epoch.spec.event_time_column, "_source"])
    segments = epoch.merge_small_segments(
        ORDER_KIND,
        [*kept, *waiting.refs],
        "_et",
        lambda rows: rows.where(f"NOT {below_mark_sql(after)}"),
    )
    return ReleasedRows(
        events,
        segments,
        waiting,
        events.rows,
        _find_released_max(epoch, written, flagged),
        _count_per_source(written),
        flagged,
    )


def count_released_rows(surveyed: MemberScans) -> ReleasedRows:
    """Count the rows that would leave, where no events table is kept: no file is written.

    These are all data rows that were not set aside, as the spec then has ``pass_through``.
    """
    leaving: Counter[str] = Counter()
    for index, member in enumerate(surveyed.survey.members):
        aside = sum(
            verdict.what in ("dropped", "cti_violation")
            for verdict in surveyed.verdicts.get(index, ())
        )
        leaving[member.member.source] += member.rows - aside
    return ReleasedRows(rows=leaving.total(), per_source=dict(leaving))


def count_buffered_rows(
    epoch: EpochContext, segments: tuple[FileRef, ...], mark: ReleaseMark
) -> int:
    """Rows at or above the mark in order segments; segments of other kinds do not count.

    Counted, where only part of a segment has left, in its rows.
    """
    total = 0
    for ref in segments:
        if ref.kind != ORDER_KIND or not has_rows_from_mark(ref, mark):
            continue
        if (
            ReleaseMark(ref.extra["section_min"], ref.min_time or 0) >= mark
            # Of several sections the least time may belong to any of them.
            and ref.extra["section_min"] == ref.extra["section_max"]
        ):
            total += ref.rows
            continue
        path = epoch.locate_segment(ref)
        table = pq.read_table(path, columns=["_section", "_et"], partitioning=None)
        total += count_waiting_rows(table["_section"], table["_et"], mark)
    return total


def _list_release_columns(epoch: EpochContext) -> list[str]:
    """What a release is made of: the columns of events, and beside them what they are sorted by."""
    own = ("_late", "_tardy", "_section", "_et", "_so", "_source", "_partition", "_seq", "_leaves")
    return [*epoch.row_columns, *own, "_p"]


def _select_cut_rows(epoch: EpochContext) -> Frame | None:
    if epoch.data is None:
        return None
    frame = _select_accepted_rows(epoch, epoch.data)
    at_once = epoch.spec.release.mode is ReleaseMode.PASS_THROUGH
    bound = epoch.order.decision.release_bound
    leaves = "true" if at_once else f"_late OR {time_below_sql('_et', bound)}"
    return frame.selectExpr("*", f"{leaves} AS _leaves").selectExpr(*_list_release_columns(epoch))


def _select_buffered_rows(epoch: EpochContext) -> Frame | None:
    """Rows that waited and leave now."""
    before, after = epoch.order.decision.release_before, epoch.order.decision.release_after
    frame = epoch.load_segments(epoch.releasable_segments())
    if frame is None:
        return None
    # Rows below `before` left in an earlier epoch, although their segment still holds them.
    rows = frame.where(f"NOT {below_mark_sql(before)} AND {below_mark_sql(after)}")
    own = [*epoch.columns_of_segment(frame), *_WAITING_COLUMNS]
    more = ["false AS _late", "true AS _leaves", "-1 AS _p"]
    return rows.selectExpr(*own, *more).selectExpr(*_list_release_columns(epoch))


def _build_sort_keys(epoch: EpochContext) -> list[str]:
    """Flagged late rows leave first; without ordering the others follow in order of arrival."""
    flagged = ["NOT _late"] if epoch.spec.release.on_late is LatePolicy.EMIT_FLAGGED else []
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        arrival = [f"IF(_late, {c}, NULL)" for c in ("_section", "_et")] if flagged else []
        return [*flagged, *arrival, "_so", "_partition", "_seq"]
    return [*flagged, *_RELEASE_SORT]


def _list_event_columns(epoch: EpochContext, position: str) -> list[str]:
    own = [f"{position} AS position", "_section AS section", "(_late OR _tardy) AS _late"]
    return [*map(quote_name, epoch.spec.row_columns), *own, *epoch.provenance_columns()]


def _list_waiting_columns(epoch: EpochContext) -> list[str]:
    return [*(quote_name(c) for c in epoch.spec.columns), *_WAITING_COLUMNS]


def _release_in_driver(epoch: EpochContext, rows: Frame) -> tuple[WrittenFiles, WrittenFiles, int]:
    """What leaves is sorted by Arrow: DuckDB takes several times as long for wide rows."""
    if not isinstance(rows, DuckFrame):
        rows = DuckFrame.from_table(collect_to_driver(rows))
    stays = rows.where("NOT _leaves").selectExpr(*_list_waiting_columns(epoch))
    waiting = _write_order_segment(epoch, stays.toArrow())
    columns, keys = _list_event_columns(epoch, "0L"), _build_sort_keys(epoch)
    order = [f"_key{i}" for i in range(len(keys))]
    named = [f"{sql} AS {name}" for sql, name in zip(keys, order, strict=True)]
    chosen = rows.where("_leaves").selectExpr(*columns, *named, "_late AS _first")
    leaving = chosen.toArrow()
    rows_in_order = pc.sort_indices(leaving, [(name, "ascending") for name in order])
    flagged = pc.sum(leaving["_first"]).as_py() or 0
    pieces = _take_pieces(
        leaving.drop_columns([*order, "_first"]), rows_in_order, epoch.order.next_position
    )
    events = epoch.writer.write_table(EVENTS, pieces, epoch.spec.event_time_column)
    return events, waiting, flagged


def _take_pieces(leaving: pa.Table, order: pa.Array, position: int) -> Iterator[pa.Table]:
    """Yield a file's rows at a time, so that one is written while the next is put in order."""
    place = leaving.column_names.index("position")
    for first, end in split_evenly(leaving.num_rows):
        numbers = pa.array(np.arange(position + first, position + end, dtype=np.int64))
        piece = leaving.take(order.slice(first, end - first))
        yield piece.set_column(place, "position", numbers)


def _write_order_segment(epoch: EpochContext, waiting: Any) -> WrittenFiles:
    section = epoch.order.decision.section  # rows of one epoch have one section
    return epoch.writer.write_segment(
        ORDER_KIND, waiting, "_et", {"section_min": section, "section_max": section}
    )


def _release_in_tasks(
    epoch: EpochContext, rows: DataFrame
) -> tuple[WrittenFiles, WrittenFiles, int]:
    """Sorted by ranges, one task each."""
    waiting, leaving = WrittenFiles(), rows.where("_leaves")
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        ranges = plan_ranges_by_arrival(leaving)
    else:
        stays = rows.where("NOT _leaves").selectExpr(*_list_waiting_columns(epoch))
        waiting = _write_order_segment(epoch, stays)
        ranges = plan_ranges_by_time(leaving, *_find_time_extent(epoch))
    if not ranges:
        return WrittenFiles(), waiting, 0
    starts = accumulate((piece.rows for piece in ranges[:-1]), initial=epoch.order.next_position)
    apart = leaving.selectExpr("*", f"{range_number_sql(ranges)} AS _range").repartitionById(
        len(ranges), F.col("_range")
    )
    in_range = f"(monotonically_increasing_id() & {_ROW_NUMBER_BITS}L)"
    position = f"array({', '.join(f'{start}L' for start in starts)})[_range] + {in_range}"
    events = apart.sortWithinPartitions(*map(F.expr, _build_sort_keys(epoch))).selectExpr(
        *_list_event_columns(epoch, position)
    )
    written = epoch.writer.write_table(EVENTS, events, epoch.spec.event_time_column)
    return written, waiting, sum(piece.rows for piece in ranges if piece.late)


def _find_time_extent(epoch: EpochContext) -> tuple[int, int]:
    """Bounds of the event times that may leave; adjusted rows are at F."""
    live = epoch.live_segments(ORDER_KIND)
    ends = [time for ref in live for time in (ref.min_time, ref.max_time) if time is not None]
    ends += [time for time in (epoch.low, epoch.high) if time is not None]
    return (min(ends), max(ends)) if ends else (0, 0)


def _find_released_max(
    epoch: EpochContext, table: pa.Table | None, flagged: int
) -> ReleaseMark | None:
    """Greatest (section, event time) that left, late rows that left at once apart.

    Those are the first ones.
    """
    if table is None:
        return None
    first = epoch.order.next_position + flagged
    table = table.filter(pc.greater_equal(table["position"], first))
    if table.num_rows == 0:
        return None
    section = pc.max(table["section"])
    newest = table.filter(pc.equal(table["section"], section))
    times = newest[epoch.spec.event_time_column].cast(pa.int64())
    return ReleaseMark(section.as_py(), pc.max(times).as_py())


def _count_per_source(table: pa.Table | None) -> dict[str, int]:
    if table is None:
        return {}
    return {
        item["values"]: item["counts"] for item in pc.value_counts(table["_source"]).to_pylist()
    }


RANGE_ROWS: Final = 400_000
"""Rows that one task sorts.

A few hundred megabytes at most, and several ranges for the cores of an epoch of millions.
"""
_TIME_BUCKETS = 4096
_RANGE_COUNT_STEP = 8


@dataclass(frozen=True)
class SortRange:
    """Rows that follow each other in the output.

    A condition that selects them, how many they are, and if they are late ones.
    """

    condition: str
    rows: int
    late: bool = False


def range_number_sql(ranges: Sequence[SortRange]) -> str:
    """The number of a row's range, from 0, as Spark SQL; null for a row in none."""
    spare = [_MATCHES_NOTHING] * (
        -len(ranges) % _RANGE_COUNT_STEP
    )  # a few ranges more or less are the same code
    cases = " ".join(
        f"WHEN {condition} THEN {i}"
        for i, condition in enumerate([*(piece.condition for piece in ranges), *spare])
    )
    return f"CASE {cases} END"


def split_evenly(rows: int) -> list[tuple[int, int]]:
    """Return (first, end) of the fewest pieces of about equal size, none above `RANGE_ROWS`."""
    pieces = -(-rows // RANGE_ROWS)
    return [(rows * piece // pieces, rows * (piece + 1) // pieces) for piece in range(pieces)]


def plan_ranges_by_time(leaving: DataFrame, low: int, high: int) -> list[SortRange]:
    """Ranges by (flagged late first, section, event time); a Spark job counts their rows.

    A range has more than `RANGE_ROWS` if a single bucket, one of 4096 between the times, has more.

    Args:
        leaving: the rows, with `_late`, `_section` and `_et`.
        low: event time in ticks from which the rows are divided; earlier ones are in the first
            bucket.
        high: event time in ticks up to which; later ones are in the last bucket.
    """
    width = (high - low) // _TIME_BUCKETS + 1
    bucket = (
        f"CAST(least(greatest((_et - {opaque_literal(low, '_et')}) div"
        f" {opaque_literal(width, '_et')}, 0L), {_TIME_BUCKETS - 1}L) AS int)"
    )

    def select_range(late: bool, section: int, first: int, last: int) -> str:
        """The rows of these buckets."""
        begin = low + first * width if first else TICK_MIN
        end = low + (last + 1) * width if last < _TIME_BUCKETS - 1 else TICK_MAX
        return _within_range_sql(late, section, begin, end)

    return _plan_ranges(leaving, ["_late", "_section", bucket], select_range)


def plan_ranges_by_arrival(leaving: DataFrame) -> list[SortRange]:
    """Ranges by (flagged late first, source order, partition, object); a Spark job counts rows.

    Late rows are one range, whatever their number, and so are the rows of one object: a range may
    have more than `RANGE_ROWS`.
    """

    def select_range(late: bool, source: int, partition: str, first: int, last: int) -> str:
        """All late rows, or the rows of these objects."""
        own = f"_so = {source} AND _partition = {quote_text(partition)}"
        return "_late" if late else f"NOT _late AND {own} AND _p >= {first} AND _p <= {last}"

    places = ["IF(_late, 0, _so)", "IF(_late, '', _partition)", "IF(_late, 0, _p)"]
    return _plan_ranges(leaving, ["_late", *places], select_range)


def _plan_ranges(
    leaving: DataFrame, order: Sequence[str], select_range: Callable[..., str]
) -> list[SortRange]:
    """Ranges of neighbours by the last column of an order; rows of one range agree in the others.

    `select_range` gives the condition of a range, of what its rows agree in, and of the least and
    greatest value of the last column. The first column is `_late`.
    """
    names = [f"_c{i}" for i in range(len(order))]
    columns = [f"{sql} AS {name}" for name, sql in zip(names, order, strict=True)]
    counts = collect_to_driver(leaving.selectExpr(*columns).groupBy(*names).count()).to_pylist()
    # Late rows are first.
    ordered = sorted((not late, late, *others) for late, *others in map(dict.values, counts))
    return [
        SortRange(select_range(*group, first, last), size, group[0])
        for group, rows in groupby(ordered, key=lambda row: row[1:-2])
        for first, last, size in _join_neighbours(row[-2:] for row in rows)
    ]


def _join_neighbours(counts: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int, int]]:
    """Neighbours joined while they stay small: (first, last, rows)."""
    found: list[tuple[int, int, int]] = []
    for place, rows in counts:
        if found and found[-1][2] + rows <= RANGE_ROWS:
            first, _, size = found[-1]
            found[-1] = (first, place, size + rows)
        else:
            found.append((place, place, rows))
    return found


def _within_range_sql(late: bool, section: int, begin: int, end: int) -> str:
    """``begin <= _et < end``; a time of TICK_MAX itself is in the range that ends there."""
    place = f"_late = {str(late).lower()} AND _section = {opaque_literal(section, '_et')}"
    above = f"(_et < {opaque_literal(end, '_et')} OR {opaque_literal(end, '_et')} = {TICK_MAX}L)"
    return f"({place} AND _et >= {opaque_literal(begin, '_et')} AND {above})"


_MATCHES_NOTHING = _within_range_sql(False, -1, TICK_MAX, TICK_MIN)
