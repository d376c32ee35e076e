"""Sorts a large release: in the driver if its rows need no cast and tasks run on its machine.

Spark takes each leaving row through its own row format, a shuffle and back. Arrow reads, NumPy
sorts and Arrow writes the same rows in a fraction of that time, and the survey has told which rows
leave. Anything else, and what is too large for the driver's memory, is sorted by Spark in ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import DataFrame

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.column_types import TIMESTAMP_UTC
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spark.column_casts import quote_text
from tidegate.jobs.spark.cut_reader import Ints, get_arrow_types, needs_no_cast, read_table_at
from tidegate.jobs.spark.epoch_context import EpochContext
from tidegate.jobs.spark.file_writer import collect_to_driver
from tidegate.jobs.spark.spark_session import runs_on_one_host
from tidegate.jobs.spark.sql_conditions import (
    compute_late_bound,
    compute_release_bound,
    opaque_literal,
)
from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.time_units import TICK_MAX, TICK_MIN

DRIVER_SORT_ROWS: Final = 4_000_000
DRIVER_SORT_BYTES: Final = 1 << 28
"""More rows, or more bytes of them, are not read into the driver, which then holds them twice."""

_Bools = NDArray[np.bool_]
_RowOrigin = tuple[int, str, str]  # place of the source in the spec, source, partition


@dataclass(frozen=True, slots=True)
class SortedRelease:
    """The rows of a release.

    Attributes:
        events: each makes the rows of one file, in order.
        waiting: the cut's rows that stay.
        flagged: how many of the events, the first ones, are late rows that leave at once.
    """

    events: Sequence[Callable[[], pa.Table]]
    waiting: pa.Table
    flagged: int


@dataclass(frozen=True, slots=True)
class _ReleaseRows:
    """Rows of one origin: their declared columns, and beside them what they are ordered by.

    Attributes:
        places: where rows may come from; `place` is an index into it.
    """

    columns: pa.Table
    places: list[_RowOrigin]
    place: Ints
    section: Ints
    times: Ints
    seqs: Ints
    late: _Bools
    tardy: _Bools
    leaves: _Bools


def sort_release(epoch: EpochContext) -> SortedRelease | None:
    """The rows that leave, in order, and those that stay; None where they are Spark's to move."""
    if epoch.spec.release.mode is ReleaseMode.PASS_THROUGH or not runs_on_one_host(
        epoch.spec.spark
    ):
        return None
    if (
        epoch.spec.release.on_late is LatePolicy.ADJUST
        and compute_late_bound(epoch.order.decision) > TICK_MIN
    ):
        return None
    # Counted before anything is read: what is too large is not read in vain.
    refs = epoch.releasable_segments()
    if epoch.surveyed_rows.row_count + sum(ref.rows for ref in refs) > DRIVER_SORT_ROWS:
        return None
    cut, buffer = _read_cut_rows(epoch), _read_buffered_rows(epoch, refs)
    if (
        cut is None
        or buffer is None
        or cut.columns.nbytes + buffer.columns.nbytes > DRIVER_SORT_BYTES
    ):
        return None
    rows = _concat_origins(cut, buffer)
    order = _sort_leaving_rows(rows)
    pieces = [
        partial(_build_events_table, epoch, rows, order[first:end], first)
        for first, end in split_evenly(order.size)
    ]
    return SortedRelease(
        pieces, _build_waiting_table(epoch, rows), int(np.count_nonzero(rows.late))
    )


def _read_cut_rows(epoch: EpochContext) -> _ReleaseRows | None:
    """The cut's rows but those that are late and stay behind.

    None if they are not known, need a cast or are too large.
    """
    decision, flags = epoch.order.decision, epoch.spec.release.on_late is LatePolicy.EMIT_FLAGGED
    bound, times = (
        compute_late_bound(decision),
        {} if epoch.data is None else epoch.surveyed_rows.times,
    )
    if epoch.data is not None and not (times and needs_no_cast(epoch.spec, epoch.staged)):
        return None
    joins = {
        index: np.flatnonzero((own < TICK_MAX) & (flags | (own >= bound)))
        for index, own in times.items()
    }
    columns, member, seqs = read_table_at(epoch.spec, epoch.staged, joins, DRIVER_SORT_BYTES)
    found = np.concatenate(
        [np.zeros(0, dtype=np.int64), *(times[index][joins[index]] for index in sorted(joins))]
    )
    if columns.num_rows != found.size:  # too large
        return None
    members, order = [piece.member for piece in epoch.staged.cut.slices], list(epoch.spec.sources)
    late = flags & (found < bound)
    return _ReleaseRows(
        columns,
        [(order.index(m.source), m.source, m.partition) for m in members],
        member,
        np.full(found.size, decision.section, dtype=np.int64),
        found,
        seqs,
        late,
        np.array([str(m) in decision.flagged for m in members], dtype=bool)[member],
        late | (found < compute_release_bound(decision)),
    )


def _read_buffered_rows(epoch: EpochContext, refs: list[FileRef]) -> _ReleaseRows | None:
    """The rows that waited and leave now.

    None if a segment holds other types than the declared ones, or too much.
    """
    before, after = epoch.order.decision.release_before, epoch.order.decision.release_after
    types, tables = get_arrow_types(epoch.spec), []
    inner = dict.fromkeys(("_section", "_et", "_seq"), pa.int64()) | dict.fromkeys(
        ("_source", "_partition"), pa.string()
    )
    schema = pa.schema({**types, **inner, "_so": pa.int32(), "_tardy": pa.bool_()})
    size = 0
    for table in _iterate_row_groups(epoch.locate_segments(refs)):
        # Segments of older versions do not have the column.
        if "_tardy" not in table.column_names:
            table = table.append_column("_tardy", pa.repeat(False, table.num_rows))
        if any(
            name not in table.column_names or table.schema.field(name).type != kind
            for name, kind in types.items()
        ):
            return None
        # Row group by row group: only rows that leave stay in memory.
        own = _mask_below_mark(after, table["_section"].to_numpy(), table["_et"].to_numpy())
        own &= ~_mask_below_mark(before, table["_section"].to_numpy(), table["_et"].to_numpy())
        tables.append(table.select(schema.names).cast(schema).filter(pa.array(own)))
        size += tables[-1].nbytes
        if size > DRIVER_SORT_BYTES:
            return None
    rows = pa.concat_tables([schema.empty_table(), *tables])
    places, place = _index_origins(rows)
    everything = np.full(rows.num_rows, True)
    section, times, seqs = (rows[name].to_numpy() for name in ("_section", "_et", "_seq"))
    tardy = pc.fill_null(rows["_tardy"], False).to_numpy()
    return _ReleaseRows(
        rows.select(list(types)),
        places,
        place,
        section,
        times,
        seqs,
        ~everything,
        tardy,
        everything,
    )


def _iterate_row_groups(paths: Iterable[Path]) -> Iterator[pa.Table]:
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)


def _index_origins(rows: pa.Table) -> tuple[list[_RowOrigin], Ints]:
    """The distinct places of buffered rows, and each row's."""
    encoded = [
        rows[name].combine_chunks().dictionary_encode() for name in ("_source", "_partition")
    ]
    codes = np.stack([rows["_so"].to_numpy(), *(column.indices.to_numpy() for column in encoded)])
    distinct, place = np.unique(codes, axis=1, return_inverse=True)
    texts = [column.dictionary.to_pylist() for column in encoded]
    return [
        (int(so), texts[0][source], texts[1][partition]) for so, source, partition in distinct.T
    ], place.reshape(-1)


def _mask_below_mark(mark: ReleaseMark, section: Ints, times: Ints) -> _Bools:
    """`below_mark_sql`, of values that the driver has."""
    before = np.full(times.size, True) if mark.time >= TICK_MAX else times < mark.time
    found: _Bools = (section < mark.section) | ((section == mark.section) & before)
    return found


def _concat_origins(cut: _ReleaseRows, buffer: _ReleaseRows) -> _ReleaseRows:
    """Both origins as one, each column in one piece, so that rows can be taken from it fast."""
    columns = pa.concat_tables([cut.columns, buffer.columns]).combine_chunks()
    place = np.concatenate([cut.place, buffer.place + len(cut.places)])

    def concat_field(own: Callable[[_ReleaseRows], Any]) -> Any:
        """Return one field of both origins."""
        return np.concatenate([own(cut), own(buffer)])

    return _ReleaseRows(
        columns,
        [*cut.places, *buffer.places],
        place,
        concat_field(lambda rows: rows.section),
        concat_field(lambda rows: rows.times),
        concat_field(lambda rows: rows.seqs),
        concat_field(lambda rows: rows.late),
        concat_field(lambda rows: rows.tardy),
        concat_field(lambda rows: rows.leaves),
    )


def _sort_leaving_rows(rows: _ReleaseRows) -> Ints:
    """The rows that leave.

    Flagged late ones first, then by section, event time, source order, partition and position.
    """
    going = np.flatnonzero(rows.leaves)
    ranks = {
        pair: rank
        for rank, pair in enumerate(sorted({(so, partition) for so, _, partition in rows.places}))
    }
    rank = np.array([ranks[so, partition] for so, _, partition in rows.places], dtype=np.int64)[
        rows.place[going]
    ]
    keys = [rows.seqs[going], rank, rows.times[going], rows.section[going], ~rows.late[going]]
    order: Ints = going[np.lexsort(keys)]
    return order


def _build_events_table(
    epoch: EpochContext, rows: _ReleaseRows, chosen: Ints, first: int
) -> pa.Table:
    """Some rows of the events table.

    The position of the first of them is `first` behind the epoch's.
    """
    begin, size = epoch.order.next_position + first, chosen.size
    columns = {
        **_build_event_times(epoch, rows, chosen),
        "position": pa.array(np.arange(begin, begin + size, dtype=np.int64)),
        "section": pa.array(rows.section[chosen]),
        "_late": pa.array(rows.late[chosen] | rows.tardy[chosen]),
        **_build_provenance(rows, chosen),
        "_timeline": pa.repeat(pa.scalar(epoch.order.timeline, pa.int32()), size),
        "_epoch": pa.repeat(pa.scalar(epoch.order.epoch, pa.int64()), size),
    }
    return _take_with_columns(rows, chosen, columns)


def _build_event_times(epoch: EpochContext, rows: _ReleaseRows, chosen: Ints) -> dict[str, Any]:
    """The columns that `PipelineSpec.row_columns` has beyond the schema."""
    added = epoch.spec.row_columns.keys() - epoch.spec.columns.keys()
    return {name: pa.array(rows.times[chosen]).cast(TIMESTAMP_UTC) for name in added}


def _build_waiting_table(epoch: EpochContext, rows: _ReleaseRows) -> pa.Table:
    """The rows that stay, as a segment has them."""
    chosen = np.flatnonzero(~rows.leaves)
    so = np.array([so for so, _, _ in rows.places], dtype=np.int32)
    columns = {
        "_section": pa.array(rows.section[chosen]),
        "_tardy": pa.array(rows.tardy[chosen]),
        "_et": pa.array(rows.times[chosen]),
        "_so": pa.array(so[rows.place[chosen]]),
        **_build_provenance(rows, chosen),
    }
    return _take_with_columns(rows, chosen, columns)


def _build_provenance(rows: _ReleaseRows, chosen: Ints) -> dict[str, Any]:
    place = pa.array(rows.place[chosen])
    source = pa.array([source for _, source, _ in rows.places], pa.string()).take(place)
    partition = pa.array([partition for _, _, partition in rows.places], pa.string()).take(place)
    return {"_source": source, "_partition": partition, "_seq": pa.array(rows.seqs[chosen])}


def _take_with_columns(rows: _ReleaseRows, chosen: Ints, more: Mapping[str, Any]) -> pa.Table:
    taken = rows.columns.take(pa.array(chosen))
    return pa.table({**{name: taken[name] for name in taken.column_names}, **more})


# A large release that Spark sorts is cut into ranges of about equal size. One task sorts each
# range, and the range's first position is known beforehand. One pass over the times alone counts
# the rows per narrow bucket, and neighbouring buckets are joined to ranges. A second pass sends
# each row to the task of its range. Both passes run the same code in every epoch (see
# `opaque_literal`). A job per range, with bounds in its code that let Parquet skip row groups,
# would be compiled anew.

RANGE_ROWS: Final = 400_000
"""Rows that one task sorts.

A few hundred megabytes at most, and several ranges for the cores of an epoch of millions.
"""
_TIME_BUCKETS: Final = 4096
_RANGE_COUNT_STEP: Final = 8


@dataclass(frozen=True, slots=True)
class SortRange:
    """Rows that follow each other in the output.

    A condition that selects them, how many they are, and if they are late ones.
    """

    condition: str
    rows: int
    late: bool = False


def range_number_sql(ranges: Sequence[SortRange]) -> str:
    """The number of a row's range, as Spark SQL."""
    spare = [_MATCHES_NOTHING] * (
        -len(ranges) % _RANGE_COUNT_STEP
    )  # a few ranges more or less are the same code
    cases = " ".join(
        f"WHEN {condition} THEN {i}"
        for i, condition in enumerate([*(piece.condition for piece in ranges), *spare])
    )
    return f"CASE {cases} END"


def split_evenly(rows: int) -> list[tuple[int, int]]:
    """Return the bounds of the fewest pieces of about equal size, none larger than a range."""
    pieces = -(-rows // RANGE_ROWS)
    return [(rows * piece // pieces, rows * (piece + 1) // pieces) for piece in range(pieces)]


def plan_ranges_by_time(leaving: DataFrame, low: int, high: int) -> list[SortRange]:
    """Ranges by (flagged late first, section, event time).

    Args:
        leaving: the rows, with `_late`, `_section` and `_et`.
        low: no row is below; rows at or above `high` fall into the last bucket.
        high: see `low`.
    """
    width = (high - low) // _TIME_BUCKETS + 1
    bucket = (
        f"CAST(least(greatest((_et - {opaque_literal(low, '_et')}) div"
        f" {opaque_literal(width, '_et')}, 0L), {_TIME_BUCKETS - 1}L) AS int)"
    )
    counts = collect_to_driver(
        leaving.selectExpr("_late", "_section", f"{bucket} AS _b")
        .groupBy("_late", "_section", "_b")
        .count()
    ).to_pylist()
    ordered = sorted(counts, key=lambda row: (not row["_late"], row["_section"], row["_b"]))
    found = []
    for (late, section), rows in groupby(ordered, key=lambda row: (row["_late"], row["_section"])):
        for first, last, size in _join_neighbours((row["_b"], row["count"]) for row in rows):
            begin = low + first * width if first else TICK_MIN
            end = low + (last + 1) * width if last < _TIME_BUCKETS - 1 else TICK_MAX
            found.append(SortRange(_within_range_sql(late, section, begin, end), size, late))
    return found


def plan_ranges_by_arrival(leaving: DataFrame) -> list[SortRange]:
    """Ranges by (flagged late first, source order, partition, object)."""
    group = ["_late", "_so", "_partition", "_p"]
    counts = collect_to_driver(leaving.groupBy(*group).count()).to_pylist()
    late = sum(row["count"] for row in counts if row["_late"])
    found = [SortRange("_late", late, late=True)] if late else []
    ordered = sorted(
        (row for row in counts if not row["_late"]),
        key=lambda row: (row["_so"], row["_partition"], row["_p"]),
    )
    for (place, partition), rows in groupby(
        ordered, key=lambda row: (row["_so"], row["_partition"])
    ):
        own = f"NOT _late AND _so = {place} AND _partition = {quote_text(partition)}"
        for first, last, size in _join_neighbours((row["_p"], row["count"]) for row in rows):
            found.append(SortRange(f"{own} AND _p >= {first} AND _p <= {last}", size))
    return found


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


_MATCHES_NOTHING: Final = _within_range_sql(False, -1, TICK_MAX, TICK_MIN)
