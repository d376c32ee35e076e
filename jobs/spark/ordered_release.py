"""The events output.

Rows leave sorted, with contiguous positions; the others wait in immutable segments.

A segment is never rewritten because part of it left: rows below `release_before` count as gone, and
the segment is dropped when all of them are. DuckDB sorts in the driver what fits there; a larger
release is cut into ranges of about equal size, which Spark's tasks sort.

One task sorts each range, and the range's first position is known beforehand. One pass over the
times alone counts the rows per narrow bucket, and neighbouring buckets are joined to ranges. A
second pass sends each row to the task of its range.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.arrow_tables import Row
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.engine.replay import count_waiting_rows
from tidegate.jobs.eventtime.decision_types import Decision, ReleaseMark
from tidegate.jobs.rows.kept_rows import select_accepted_rows
from tidegate.jobs.rows.late_rows import SourceCounts
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
from tidegate.jobs.spec.pipeline import EVENTS

from .cut_survey import EpochScans
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
        counts: (source, `released`) -> rows that left.
        maximum: greatest (section, event time) that left in order; None if none did.
        flagged: how many rows, the first ones, are late rows that left at once.
        waiting: key of a segment -> its rows that waited before and after the epoch, where tasks
            have counted them.
    """

    counts: SourceCounts = field(default_factory=Counter)
    maximum: ReleaseMark | None = None
    flagged: int = 0
    waiting: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many left."""
        return self.counts.total()


def _tardy_sql(decision: Decision) -> str:
    """Whether a row of this epoch stood before a tardy barrier.

    It leaves in order, but flagged (section 3.5).
    """
    names = ", ".join(quote_text(member) for member in decision.flagged)
    return f"concat(_source, '/', _partition) IN ({names})" if names else "false"


def release_rows(epoch: EpochContext) -> ReleasedRows:
    """Write the rows that leave, and the new segment of those that wait."""
    live, after = epoch.live_segments(ORDER_KIND), epoch.decision.release_after
    # Segments of which every row has left are dropped; the others stay as they are.
    kept = tuple(ref for ref in live if has_rows_from_mark(ref, after))
    if epoch.data is None and not epoch.releasable_segments():
        return ReleasedRows(segments=kept)
    rows = combine_frames(_select_cut_rows(epoch), _select_buffered_rows(epoch))
    assert rows is not None  # noqa: S101 - one of them has a frame
    release = _release_in_driver if epoch.fits_in_driver else _release_in_tasks
    events, waiting, flagged = release(epoch, rows)
    written = events.read_columns(["section", "position", epoch.spec.event_time_column, "_source"])
    segments = epoch.merge_small_segments(
        ORDER_KIND,
        [*kept, *waiting.refs],
        "_et",
        lambda rows: rows.where(f"NOT {below_mark_sql(after)}"),
    )
    found = [] if written is None else pc.value_counts(written["_source"]).to_pylist()
    return ReleasedRows(
        events,
        segments,
        waiting,
        Counter({(one["values"], "released"): one["counts"] for one in found}),
        _find_released_max(epoch, written, flagged),
        flagged,
    )


def count_released_rows(surveyed: EpochScans) -> ReleasedRows:
    """Count the rows that would leave, where no events table is kept: no file is written.

    These are all data rows that were not set aside, as the spec then has ``pass_through``.
    """
    leaving, verdicts = SourceCounts(), surveyed.count_verdicts()
    for index, member in enumerate(surveyed.survey.members):
        aside = verdicts[index, "dropped"] + verdicts[index, "cti_violation"]
        leaving[member.member.source, "released"] += member.rows - aside
    return ReleasedRows(counts=leaving)


def count_buffered_rows(
    epoch: EpochContext,
    segments: tuple[FileRef, ...],
    mark: ReleaseMark,
    known: Mapping[str, int],
) -> int:
    """Rows at or above the mark in order segments; segments of other kinds do not count.

    Counted, where only part of a segment has left, in its rows; `known` has what tasks counted.
    """
    total = 0
    for ref in segments:
        if ref.kind != ORDER_KIND or not has_rows_from_mark(ref, mark):
            continue
        if is_waiting_whole(ref, mark):
            total += ref.rows
        elif ref.key in known:
            total += known[ref.key]
        else:
            path = epoch.locate_segment(ref)
            table = pq.read_table(path, columns=["_section", "_et"], partitioning=None)
            total += count_waiting_rows(table["_section"], table["_et"], mark)
    return total


def is_waiting_whole(ref: FileRef, mark: ReleaseMark) -> bool:
    """Whether all rows of an order segment are known to be at or above the mark."""
    # Of several sections the least time may belong to any of them.
    return ref.extra["section_min"] == ref.extra["section_max"] and (
        ReleaseMark(ref.extra["section_min"], ref.min_time or 0) >= mark
    )


def _list_release_columns(epoch: EpochContext) -> list[str]:
    """What a release is made of: the columns of events, and beside them what they are sorted by."""
    own = ("_late", "_tardy", "_section", "_et", "_so", "_source", "_partition", "_seq", "_leaves")
    return [*epoch.row_columns, *own, "_p"]


def _select_cut_rows(epoch: EpochContext) -> Frame | None:
    if epoch.data is None:
        return None
    tardy = f"{_tardy_sql(epoch.decision)} AS _tardy"
    section = f"{opaque_literal(epoch.decision.section, '_seq')} AS _section"
    frame = select_accepted_rows(epoch.judged).selectExpr("*", tardy, section)
    at_once = epoch.spec.release.mode is ReleaseMode.PASS_THROUGH
    bound = epoch.decision.release_bound
    leaves = "true" if at_once else f"_late OR {time_below_sql(bound)}"
    return frame.selectExpr("*", f"{leaves} AS _leaves").selectExpr(*_list_release_columns(epoch))


def _select_buffered_rows(epoch: EpochContext) -> Frame | None:
    """Rows that waited and leave now."""
    before, after = epoch.decision.release_before, epoch.decision.release_after
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
    section = epoch.decision.section  # rows of one epoch have one section
    return epoch.writer.write_segment(
        ORDER_KIND, waiting, "_et", {"section_min": section, "section_max": section}
    )


def _release_in_tasks(
    epoch: EpochContext, rows: DataFrame
) -> tuple[WrittenFiles, WrittenFiles, int]:
    """Sorted by ranges, one task each."""
    waiting, leaving = WrittenFiles(), rows.where("_leaves")
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH:
        # All late rows are one range, and so are the rows of one object, whatever their number.
        places = ["IF(_late, 0, _so)", "IF(_late, '', _partition)", "IF(_late, 0, _p)"]
    else:
        stays = rows.where("NOT _leaves").selectExpr(*_list_waiting_columns(epoch))
        waiting = _write_order_segment(epoch, stays)
        places = ["_section", _time_bucket_sql(epoch)]
    names = [f"_c{i}" for i in range(len(places) + 1)]
    named = zip(["_late", *places], names, strict=True)
    keyed = leaving.selectExpr("*", *(f"{sql} AS {name}" for sql, name in named))
    counts = collect_to_driver(keyed.groupBy(*names).count()).to_pylist()
    if not counts:
        return WrittenFiles(), waiting, 0
    ranges = _join_neighbours(counts, epoch.order.next_position)
    bounds = pa.Table.from_pylist(counts).drop_columns(["count"])
    # As in `opaque_literal`: what changes from epoch to epoch is not part of the code.
    beside = F.broadcast(rows.sparkSession.createDataFrame(bounds).coalesce(1))
    apart = keyed.join(beside, names).repartitionById(ranges, F.expr("CAST(_range AS int)"))
    position = f"_start + (monotonically_increasing_id() & {_ROW_NUMBER_BITS}L)"
    events = apart.sortWithinPartitions(*map(F.expr, _build_sort_keys(epoch))).selectExpr(
        *_list_event_columns(epoch, position)
    )
    written = epoch.writer.write_table(EVENTS, events, epoch.spec.event_time_column)
    return written, waiting, sum(row["count"] for row in counts if row["_c0"])


def _time_bucket_sql(epoch: EpochContext) -> str:
    """Which of 4096 parts of the times that may leave a row is in; adjusted rows are at F."""
    live = epoch.live_segments(ORDER_KIND)
    ends = [time for ref in live for time in (ref.min_time, ref.max_time) if time is not None]
    ends += [time for time in (epoch.low, epoch.high) if time is not None]
    low, high = min(ends, default=0), max(ends, default=0)
    width = (high - low) // _TIME_BUCKETS + 1
    place = f"(_et - {opaque_literal(low, '_et')}) div {opaque_literal(width, '_et')}"
    return f"CAST(least(greatest({place}, 0L), {_TIME_BUCKETS - 1}L) AS int)"


def _join_neighbours(counts: list[Row], position: int) -> int:
    """Sort counts of rows, late ones first, and put neighbours into ranges while they stay small.

    Rows of one range agree in all columns but the last. A count alone may have more than
    `RANGE_ROWS`. Each count gets the number of its range and the position of the range's first row.

    Args:
        counts: rows with `_c0` (whether the counted rows are late), further columns, and `count`.
        position: of the first row of all.

    Returns:
        The number of ranges.
    """
    counts.sort(key=lambda row: (not row["_c0"], *row.values()))
    size, start, ranges = 0, position, 0
    group: list[Any] = []
    for row in counts:
        here = [*row.values()][:-2]
        if here != group or size + row["count"] > RANGE_ROWS:
            size, start, group, ranges = 0, position, here, ranges + 1
        size, position = size + row["count"], position + row["count"]
        row |= {"_range": ranges - 1, "_start": start}
    return ranges


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


RANGE_ROWS = 400_000
"""Rows that one task sorts.

A few hundred megabytes at most, and several ranges for the cores of an epoch of millions.
"""
_TIME_BUCKETS = 4096


def split_evenly(rows: int) -> list[tuple[int, int]]:
    """Return (first, end) of the fewest pieces of about equal size, none above `RANGE_ROWS`."""
    pieces = -(-rows // RANGE_ROWS)
    return [(rows * piece // pieces, rows * (piece + 1) // pieces) for piece in range(pieces)]
