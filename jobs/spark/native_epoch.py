"""What the driver does with slices that were folded into windows while they were surveyed.

The slices' partial rows are merged, and the few late rows are read again and written. If the
decision judges rows by another frontier than the fold did, or rows are set aside, or sums may
overflow, Spark SQL does the work instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from tidegate.jobs.engine.column_types import TIMESTAMP_UTC
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.spark.cut_reader import Ints, read_table_at
from tidegate.jobs.spark.cut_survey import MemberScans
from tidegate.jobs.spark.epoch_context import EpochContext
from tidegate.jobs.spark.file_writer import FETCH_ROWS
from tidegate.jobs.spark.late_and_dead_rows import LateRows, write_known_late_rows
from tidegate.jobs.spark.merge_in_driver import merge_partial_rows
from tidegate.jobs.spark.native_windows import WindowFold
from tidegate.jobs.spec.pipeline import EVENT_TIME, PipelineSpec
from tidegate.time_units import TICK_MAX

_SLICE_FLAGS = dict.fromkeys(("_on", "_up", "_n"), "max")


def merge_folded_slices(
    folds: Mapping[str, WindowFold], scans: MemberScans, decision: Decision, slot: int
) -> dict[str, pa.Table]:
    """Window output -> partial rows of the epoch; those that Spark SQL has to fold are missing."""
    if scans.folded is None or scans.frontier != decision.frontier_before:
        return {}
    merged = {}
    for name, fold in folds.items():
        pieces = [folded.partials[name] for folded in scans.folded.values()]
        # Also one slice goes this way: its sums are checked like those of many.
        rows = pa.concat_tables([fold.schema.empty_table(), *pieces])
        table = merge_partial_rows(fold.aggregation, rows, _SLICE_FLAGS)
        if table is not None:
            epochs = pa.repeat(pa.scalar(slot, pa.int64()), table.num_rows)
            place = table.column_names.index("_n") + 1
            merged[name] = table.add_column(place, "_epoch", epochs)
    return merged


def is_fully_native(
    spec: PipelineSpec, scans: MemberScans, partials: Mapping[str, pa.Table]
) -> bool:
    """Whether nothing of an epoch but dead letters needs its rows as a DataFrame."""
    if spec.outputs.events or scans.folded is None or partials.keys() != spec.windows.keys():
        return False
    late = sum(places.size for own in scans.folded.values() for places in own.late.values())
    return late <= FETCH_ROWS


def write_folded_late_rows(epoch: EpochContext, scans: MemberScans) -> LateRows:
    """Write the rows that were late for a window.

    Raises:
        PoisonError: a late row under ``on_late: error``, named.
    """
    expired: Counter[tuple[str, str]] = Counter()
    rows = {}
    for name in epoch.spec.windows:
        places = {}
        for index, folded in (scans.folded or {}).items():
            source = epoch.order.cut.slices[index].member.source
            expired[source, name] += folded.expired[name]
            if folded.late[name].size:
                # Places among all rows of the slice, from places among its data rows.
                places[index] = np.flatnonzero(scans.times[index] != TICK_MAX)[folded.late[name]]
        if places:
            times = np.concatenate([scans.times[index][own] for index, own in places.items()])
            rows[name] = _read_late_rows(epoch, places, times)
    return write_known_late_rows(epoch, rows, +expired)


def _read_late_rows(epoch: EpochContext, places: Mapping[int, Ints], times: Ints) -> pa.Table:
    """The rows at these places, in order of the slices, with their times and provenance."""
    rows, indexes, seqs = read_table_at(epoch.spec, epoch.staged, places, limit=1 << 62)
    members = [epoch.order.cut.slices[index].member for index in indexes]
    ticks, size = pa.array(times, pa.int64()), rows.num_rows
    own = {EVENT_TIME: ticks.cast(TIMESTAMP_UTC)}
    columns = {
        name: rows[name] if name in epoch.spec.columns else own[name]
        for name in epoch.spec.row_columns
    }
    columns |= {
        "_et": ticks,
        "_source": pa.array([member.source for member in members], pa.string()),
        "_partition": pa.array([member.partition for member in members], pa.string()),
        "_seq": pa.array(seqs, pa.int64()),
        "_timeline": pa.repeat(pa.scalar(epoch.order.timeline, pa.int32()), size),
        "_epoch": pa.repeat(pa.scalar(epoch.order.epoch, pa.int64()), size),
    }
    return pa.table(columns)
