"""Defines the columns of the output tables (Arrow) and the positions of their rows.

User columns keep the spec's names and types; times are microseconds in UTC. The driver writes the
rows of `barriers`, `checkpoints` and of dead objects itself, without Spark; the code is here too.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import PreconditionFailedError, Store
from tidegate.jobs.engine.arrow_tables import (
    TIMESTAMP_UTC,
    Row,
    TimeBounds,
    describe_parquet_object,
    encode_parquet,
    replace_column,
    to_arrow_type,
    to_arrow_types,
)
from tidegate.jobs.engine.interfaces import DeadObject, MoveOrder, TableFiles
from tidegate.jobs.eventtime.decision_types import BarrierHealth, Decision
from tidegate.jobs.rules.aggregates import infer_result_type
from tidegate.jobs.spec.pipeline import (
    BARRIERS,
    CHECKPOINTS,
    DEAD_LETTERS,
    EVENTS,
    LATE,
    PipelineSpec,
)
from tidegate.jobs.spec.table_layout import OWN_COLUMNS
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

RowIdentity = tuple[str, str, int]
"""Source, partition and seq: an input row keeps them in every output."""
IDENTITY_COLUMNS = ("_source", "_partition", "_seq")

SPLICE_COLUMN = "_splice"
"""Column with the request that inserted a row, or had it written again.

A table has it from its first merge on.
"""

ARRIVAL_SLOT_COLUMN = "_came"
"""Column of streams.

The slot in which a row came that a merge inserted or wrote again; `_epoch` is the merge's.
"""

_STRING_LIST = pa.list_(pa.string())
_EPOCH_COLUMNS = {"_timeline": pa.int32(), "_epoch": pa.int64()}


def build_table_schema(spec: PipelineSpec, table: str) -> Any:
    """Return the Arrow schema of one output table, without the columns that merges add.

    For a window's aggregates over expressions it holds only the likely type.
    """
    if table in spec.windows:
        return pa.schema(_build_window_columns(spec, spec.windows[table]))
    if table in spec.streams:
        columns = to_arrow_types(spec.stream_graph.columns[table])
        return pa.schema(columns | _build_own_columns("<stream>"))
    user = to_arrow_types(spec.row_columns) if table in (EVENTS, LATE) else {}
    return pa.schema({**user, **_build_own_columns(table)})


def make_request_schema(spec: PipelineSpec) -> Any:
    """Return the columns of a splice request's rows.

    They are the user's columns, the identity, why the row is requested, its section, and the
    outputs that it should go to.
    """
    own = {
        "_source": pa.string(),
        "_partition": pa.string(),
        "_seq": pa.int64(),
        "_reason": pa.string(),
        "_section": pa.int64(),
        "_outputs": _STRING_LIST,
    }
    return pa.schema(to_arrow_types(spec.row_columns) | own)


def build_system_schema(table: str) -> Any:
    """Return tidegate's columns of a table that is neither a window nor a stream."""
    return pa.schema(_build_own_columns(table))


def _build_own_columns(table: str) -> dict[str, Any]:
    own = {
        # Users cannot declare lists, so `to_arrow_type` does not know them.
        name: _STRING_LIST if kind == "strings" else to_arrow_type(kind)
        for name, kind in OWN_COLUMNS[table].items()
    }
    return own | _EPOCH_COLUMNS


def _build_window_columns(spec: PipelineSpec, window: WindowSpec) -> dict[str, Any]:
    return {
        **{key: _infer_column_type(spec, key) for key in window.keys},
        "window_start": TIMESTAMP_UTC,
        "window_end": TIMESTAMP_UTC,
        "revision": pa.int32(),
        "replaces": _STRING_LIST,
        **{
            name: infer_result_type(aggregate, _infer_column_type(spec, aggregate.expression))
            for name, aggregate in window.aggregates.items()
        },
        **_EPOCH_COLUMNS,
    }


def _infer_column_type(spec: PipelineSpec, name: str) -> Any:
    return (
        pa.string()
        if name in ("_source", "_partition")
        else to_arrow_type(spec.columns.get(name, "double"))
    )


# The small tables that the driver writes itself, without Spark: barriers, dead objects,
# checkpoints.


@dataclass(frozen=True)
class DriverTables:
    """Writes the rows that the driver itself produces: closed barriers and dead objects."""

    _store: Store

    def write(self, order: MoveOrder) -> TableFiles:
        """Write the rows into the attempt's folders.

        Returns:
            Table -> files; tables without rows are left out.
        """
        dead = [d for part in order.cut.slices for d in part.dead]
        found = {
            BARRIERS: build_barrier_rows(order.decision, order.timeline, order.epoch),
            DEAD_LETTERS: build_dead_object_rows(dead, order.timeline, order.epoch),
        }
        return {
            table: (
                write_parquet_once(
                    self._store, f"{order.folders.table_prefix(table)}driver.parquet", rows
                ),
            )
            for table, rows in found.items()
            if rows.num_rows
        }


def build_barrier_rows(decision: Decision, timeline: int, epoch: int) -> Any:
    """Return one row per barrier that closed in the epoch; `opened`, `closed` are by wall clock."""
    return _build_system_table(
        BARRIERS,
        [
            {
                **_barrier_to_row(barrier, decision.wall - decision.now),
                "_timeline": timeline,
                "_epoch": epoch,
            }
            for barrier in decision.barriers
        ],
    )


def build_dead_object_rows(dead: Iterable[DeadObject], timeline: int, epoch: int) -> Any:
    """Return one dead letter per object that could not be read."""
    rows = [
        {
            "reason": d.reason,
            "detail": d.detail,
            "object": d.key,
            "etag": d.etag,
            "_source": d.member.source,
            "_partition": d.member.partition,
            "_seq": d.seq,
            "_timeline": timeline,
            "_epoch": epoch,
        }
        for d in dead
    ]
    return _build_system_table(DEAD_LETTERS, rows)


def build_checkpoint_rows(manifests: Sequence[Manifest]) -> Any:
    """Return one row per sealed epoch, from its manifest alone.

    The columns `rows_…` count this epoch only, but `rows_retained` all rows that wait after it.
    """
    return _build_system_table(CHECKPOINTS, [_checkpoint_to_row(m) for m in manifests])


def write_parquet_once(
    store: Store, key: str, rows: Any, kind: str = "", bounds: TimeBounds = (None, None)
) -> FileRef:
    """Write rows as one Parquet object under a key whose content is always the same.

    If the key exists already, the existing object is kept and described. By default the kind is
    that of the table that the folder above the attempt's names.
    """
    # In memory: these tables have a few rows per epoch.
    data = encode_parquet(rows)
    try:
        store.create(key, data)
    except PreconditionFailedError:
        data = store.get(key).data
    return describe_parquet_object(key, data, kind or f"table:{key.split('/')[-3]}", bounds)


def _barrier_to_row(barrier: BarrierHealth, behind: int) -> Row:
    # People compare these times with others, so they are moved to the wall clock by as much as the
    # pipeline clock is behind. The time waited stays as it was counted.
    participants = {
        member: {"arrived": arrived + behind, "seq": seq, "event_time": time}
        for member, (arrived, seq, time) in barrier.participants.items()
    }
    return {
        "barrier_id": barrier.id,
        "outcome": barrier.outcome.value,
        "types": list(barrier.types),
        "homogeneous": barrier.homogeneous,
        "participants": json.dumps(participants, sort_keys=True),
        "missing": list(barrier.missing),
        "ended": list(barrier.ended),
        "tardy": list(barrier.tardy),
        "opened": barrier.opened + behind,
        "closed": barrier.closed + behind,
        "waited_us": barrier.wait_ticks,
        "section": barrier.section,
    }


def _checkpoint_to_row(manifest: Manifest) -> Row:
    epoch, frontier = manifest.epoch_counters, manifest.frontier_after
    seal = manifest.timings.get("seal_before")  # no manifest can hold the time of its own seal
    return {
        "checkpoint_id": str(manifest.id),
        "slot": manifest.slot,
        "attempt": manifest.attempt,
        "sealed_at": manifest.created_at,
        "recorded_now": manifest.recorded_now,
        "frontier": frontier if TICK_MIN < frontier < TICK_MAX else None,
        "final": frontier >= TICK_MAX,
        "rows_read": epoch.read,
        "rows_released": epoch.released,
        "rows_late": epoch.late,
        "rows_dropped": sum(epoch.dropped.values()) + epoch.filtered,
        "rows_rejected": epoch.rejected,
        "rows_dead": epoch.dead_lettered + epoch.rule_quarantined,
        "rows_retained": manifest.counters.retained,
        "windows_emitted": sum(epoch.windows.values()),
        "bytes": manifest.epoch_notes.bytes_written,
        "epoch_ms": 1000 * sum(manifest.timings.values()),
        "seal_ms": None if seal is None else 1000 * seal,
        "unpublished": None,  # not known when an epoch is sealed; the column stays for its readers
        "_timeline": manifest.timeline,
        "_epoch": manifest.slot,
    }


def _build_system_table(name: str, rows: list[Row]) -> Any:
    return pa.Table.from_pylist(rows, build_system_schema(name))


# The current position of every event is its rank in the stream after all merges.
#
# A row of an epoch keeps its stored position forever. A merged row (`_splice` names its request)
# stores the position of the row that it follows. Rows inserted at the same position are ordered by
# event time, then merge, then origin. In SQL:
#
#     select row_number() over (order by position, _splice is not null, <event time>, _epoch,
#     _source, _partition, _seq) - 1
#
# A merge rewrites a *stream* behind the events from its first changed row on: the new rows have
# `_splice`, and hide whatever older slots wrote at their positions and after. A row without `_id`
# only marks the end of the stream.
#
# See `docs/decisions/0041-stored-positions-never-change.md`.


def compute_current_positions(events: Any, inserted: Any, time: str) -> Any:
    """Return the events with their current positions, in order.

    Args:
        events: any rows of the table, with stored `position`, `_splice`, `_source`, `_partition`
            and `_seq`.
        inserted: *all* inserted rows of the cut that is read, with the columns that order them.
        time: the event time column.
    """
    order = ["position", time, "_epoch", *IDENTITY_COLUMNS]
    inserted = inserted.sort_by([(name, "ascending") for name in order])
    # An inserted row is behind the row whose position it stores, so it moves all rows behind that.
    anchors = inserted["position"].to_numpy()
    stored = events["position"].to_numpy()
    current = stored + np.searchsorted(anchors, stored, side="left")
    mask = np.asarray(pc.is_valid(events[SPLICE_COLUMN]))
    # Several rows may be inserted behind one position; their rank tells them apart.
    rank = {who: number for number, who in enumerate(iterate_identities(inserted))}
    current[mask] = [
        stored + 1 + rank[who]
        for stored, who in zip(
            stored[mask], iterate_identities(events.filter(pa.array(mask))), strict=True
        )
    ]
    return replace_column(events, "position", pa.array(current, pa.int64())).sort_by("position")


def find_rewrite_starts(written: Any) -> dict[int, int]:
    """Return, for each merge's slot, the position of the first row that the merge rewrote.

    `written` holds all rewritten rows of a stream.
    """
    found = written.group_by("_epoch", use_threads=False).aggregate([("position", "min")])
    return dict(zip(found["_epoch"].to_pylist(), found["position_min"].to_pylist(), strict=True))


def select_current_rows(rows: Any, starts: Mapping[int, int]) -> Any:
    """Return the rows of a stream that no later merge replaced, in order.

    The rows need `_id`, `_epoch` and `position`; `starts` is that of `find_rewrite_starts`.
    """
    # A row without an id only marks the end of the stream.
    keep = pc.is_valid(rows["_id"])
    for slot, first in starts.items():
        keep = pc.and_(
            keep, pc.or_(pc.greater_equal(rows["_epoch"], slot), pc.less(rows["position"], first))
        )
    return rows.filter(keep).sort_by("position")


def iterate_identities(table: Any) -> Iterator[RowIdentity]:
    """Return the identity of each row, in order, to be read once."""
    return zip(*(table[name].to_pylist() for name in IDENTITY_COLUMNS), strict=True)
