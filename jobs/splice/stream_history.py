"""Streams as the log and the tables have them, from the checkpoint on from which a merge is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.sinks.row_positions import (
    ARRIVAL_SLOT_COLUMN,
    SPLICE_COLUMN,
    find_rewrite_starts,
    select_current_rows,
)
from tidegate.jobs.spec.pipeline import CHECKPOINTS, PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM
from tidegate.jobs.splice.tables_at_head import TablesAtHead
from tidegate.jobs.streams.dispatched_rows import build_arrival_schema
from tidegate.jobs.streams.row_history import PROVENANCE_FIELDS, list_merges, read_parquet_files
from tidegate.jobs.streams.stream_append import compute_running_max
from tidegate.jobs.streams.stream_state import DispatchState
from tidegate.time_units import TICK_MAX, TICK_MIN

# Checkpoints looked at for one to start from; without one everything is computed from the first row
# on.
_MAX_BASE_CANDIDATES: Final = 50


class StreamHistory:
    """What there was, seen from one head.

    Args:
        spec: the pipeline.
        log: its log.
        head: where it stands.
        tables: its tables there.

    Attributes:
        base: slot of the checkpoint that the computation starts from; 0: it starts from the first
            row.
        at: the streams at the base.
        segments: segments of the base.
    """

    def __init__(
        self, spec: PipelineSpec, log: SlotLog, head: LogHead, tables: TablesAtHead
    ) -> None:
        assert head.record is not None  # noqa: S101 - there is something to merge into
        self._spec, self._graph, self._log, self._head, self._tables = (
            spec,
            spec.stream_graph,
            log,
            head,
            tables,
        )
        self._record: Manifest = head.record
        self._event_time = spec.event_time_column
        self._merges = {
            slot: extra for slot, extra in list_merges(head.record).items() if "from" in extra
        }
        self._state = DispatchState.from_record(head.record.stream_state)
        self.base, self.at = 0, DispatchState()
        self.segments: Sequence[FileRef] = ()
        self._rows: dict[str, Any] = {}
        self._clocks: dict[int, tuple[int, int]] = {}

    def select_base(self, since: int) -> None:
        """Take the newest usable checkpoint before a slot as the base."""
        for slot in range(since - 1, max(0, since - 1 - _MAX_BASE_CANDIDATES), -1):
            found = self._open_usable_checkpoint(slot)
            if found is not None:
                self.base, self.segments = slot, found.segments
                self.at = DispatchState.from_record(found.stream_state)
                return

    def _open_usable_checkpoint(self, slot: int) -> Manifest | None:
        """The checkpoint of a slot, if no later merge changed what it says, and nobody had fallen behind there."""
        if any(extra["from"] <= slot < merge for merge, extra in self._merges.items()):
            return None
        try:
            found = next(self._log.epochs_between(self._head.timeline, slot, slot)).epoch
        except (StopIteration, TidegateError):
            return None  # retired
        state = DispatchState.from_record(found.stream_state)
        for name, known in self._state.attachments.items():
            there = state.attachments.get(name)
            origin = (
                self._graph.attachments[name].origin if name in self._graph.attachments else None
            )
            if there is None or there.since != known.since:
                return None
            if (
                origin is not None
                and there.cursor != state.stream_state(origin).next
                and there.status != "detached"
            ):
                return None
        return found

    def slot_of_event(self, position: int) -> int:
        """The slot in which the event at a position came."""
        if position < 0:
            return 1
        found = self._tables.read_rows(
            "events",
            ["position", SPLICE_COLUMN, "_epoch"],
            ranges={"position": (position, position)},
        )
        found = found.filter(pc.is_null(found[SPLICE_COLUMN]))
        return int(found["_epoch"][0].as_py()) if found.num_rows else 1

    def slot_before(self, stream: str, stamp: int) -> int:
        """The slot in which the row came that a row with this stamp stands behind."""
        rows = self._read_stream(stream, 0)
        number = int(np.searchsorted(rows["stream_time"].to_numpy(), stamp, side="right"))
        return int(rows[ARRIVAL_SLOT][number - 1].as_py()) if number else 1

    def clock_at(self, slot: int) -> tuple[int, int]:
        """The recorded now and the frontier after an epoch."""
        if not self._clocks:
            self._clocks = self._read_clocks()
        return self._clocks[slot]

    def _read_clocks(self) -> dict[int, tuple[int, int]]:
        """From the table of checkpoints, which outlives the checkpoints.

        What is not published yet from the log.
        """
        columns = ["slot", "recorded_now", "frontier", "final"]
        found = self._tables.read_rows(
            CHECKPOINTS, columns, ranges={"_epoch": (self.base + 1, None)}
        )
        times = [found[name].cast(pa.int64()).to_pylist() for name in columns[1:3]]
        clocks = {}
        for slot, now, frontier, final in zip(
            found["slot"].to_pylist(), *times, found["final"].to_pylist(), strict=True
        ):
            clocks[slot] = (now, TICK_MAX if final else TICK_MIN if frontier is None else frontier)
        begin = max(self._tables.published, self.base) + 1
        for filled in self._log.epochs_between(self._head.timeline, begin, self._head.slot):
            epoch = filled.epoch
            clocks[epoch.slot] = (epoch.recorded_now, epoch.frontier_after)
        return clocks

    def stream_rows(self, stream: str) -> Any:
        """A stream as it stands, from the base on."""
        if stream not in self._rows:
            self._rows[stream] = (
                self._convert_events(self._read_reached_events())
                if stream == EVENTS_STREAM
                else self._read_stream(stream, self.base)
            )
        return self._rows[stream]

    def with_inserted_events(self, inserted: Any) -> Any:
        """The events as a stream, with rows among them that a merge in the next slot inserts."""
        kept = self._read_reached_events()
        numbered = inserted.append_column(
            "_epoch", pa.array([self._head.next_slot] * inserted.num_rows, pa.int64())
        )
        return self._convert_events(
            pa.concat_tables(
                [kept, numbered.select(kept.column_names)], promote_options="permissive"
            )
        )

    def _read_stream(self, stream: str, base: int) -> Any:
        columns = make_stream_columns(self._graph.columns[stream])
        stored = [name for name in columns if name != ARRIVAL_SLOT]
        rows = self._tables.read_rows(
            stream,
            [*stored, "_epoch", SPLICE_COLUMN, ARRIVAL_SLOT_COLUMN],
            ranges={"_epoch": (base + 1, None)},
        )
        rows = select_current_rows(
            rows, find_rewrite_starts(rows.filter(pc.is_valid(rows[SPLICE_COLUMN])))
        )
        turn = pc.coalesce(rows[ARRIVAL_SLOT_COLUMN].cast(pa.int64()), rows["_epoch"])
        plain = {
            name: rows[name].cast(kind) for name, kind in columns.items() if name != ARRIVAL_SLOT
        }
        return pa.table({**plain, ARRIVAL_SLOT: turn}, schema=pa.schema(columns))

    def _read_reached_events(self) -> Any:
        """Events from the base on; merges that did not reach the streams are no part of them."""
        columns = [
            *self._graph.columns[EVENTS_STREAM],
            self._event_time,
            "position",
            "_source",
            "_partition",
            "_seq",
            SPLICE_COLUMN,
            "_epoch",
        ]
        rows = self._tables.read_rows(
            "events", list(dict.fromkeys(columns)), ranges={"_epoch": (self.base + 1, None)}
        )
        reached = pa.array([str(extra["request"]) for extra in self._merges.values()], pa.string())
        return rows.filter(
            pc.or_(pc.is_null(rows[SPLICE_COLUMN]), pc.is_in(rows[SPLICE_COLUMN], reached))
        )

    def _convert_events(self, raw: Any) -> Any:
        """Rows of the events table, inserted ones in their places."""
        inserted = pc.is_valid(raw[SPLICE_COLUMN])
        raw = raw.append_column("_behind", inserted.cast(pa.int8()))
        order = ("position", "_behind", self._event_time, "_epoch", "_source", "_partition", "_seq")
        raw = raw.sort_by([(name, "ascending") for name in order])
        turn = pc.if_else(pc.equal(raw["_behind"], 0), raw["_epoch"], pc.negate(raw["_epoch"]))
        known, count = self.at.stream_state(EVENTS_STREAM), raw.num_rows
        identity = pc.binary_join_element_wise(
            raw["_source"], raw["_partition"], raw["_seq"].cast(pa.string()), "/"
        )
        none = pa.nulls(count, pa.string())
        values = {
            name: raw[name].cast(to_arrow_type(kind))
            for name, kind in self._graph.columns[EVENTS_STREAM].items()
        }
        return pa.table(
            {
                **values,
                "position": pa.array(range(known.next, known.next + count), pa.int64()),
                "stream_time": compute_running_max(
                    raw[self._event_time].cast(pa.timestamp("us", "UTC")).cast(pa.int64()),
                    known.last,
                ),
                "_id": identity,
                **dict.fromkeys(("_via", "_origin", "_origin_id"), none),
                ARRIVAL_SLOT: fill_arrival_slots(turn),
            },
            schema=pa.schema(make_stream_columns(self._graph.columns[EVENTS_STREAM])),
        )

    def read_collected_rows(self, request: str) -> Any:
        """The rows of a request, as the log has them: a merge before it may have changed them."""
        found = self._state.requests.get(request)
        if found is None or found.open:
            why = (
                "is not complete yet: its backfill goes on"
                if found
                else "is not known to the newest checkpoint"
            )
            raise ConfigurationError(
                f"splice request {request} of {self._spec.name} {why}",
                code="splice.incomplete",
                pipeline=self._spec.name,
                kept="the request; nothing was merged",
                advice=f"see: tidegate splice list {self._spec.name}",
            )
        kind = f"splice:{found.attachment}"
        files = [
            s for s in self._record.segments if s.kind == kind and s.extra.get("request") == request
        ]
        rows = read_parquet_files(self._log.store, files)
        schema = build_arrival_schema(self._graph.columns[found.destination])
        return schema.empty_table() if rows is None else rows.select(schema.names).cast(schema)

    def as_stream_rows(self, stream: str, rows: Any, merged: int) -> Any:
        """Collected rows as rows of the stream, by stamp."""
        columns = make_stream_columns(self._graph.columns[stream])
        rows = rows.take(pa.array(np.argsort(rows["_stamp"].to_numpy(), kind="stable")))
        place = {"position": pa.nulls(rows.num_rows, pa.int64()), "stream_time": rows["_stamp"]}
        named = {
            name: place[name] if name in place else rows[name]
            for name in columns
            if name != ARRIVAL_SLOT
        }
        return (
            add_arrival_slot(pa.table(named), -merged)
            .select(list(columns))
            .cast(pa.schema(columns))
        )


# Rows of a stream with the slots in which they came: what a merge computes on.

ARRIVAL_SLOT: Final = "_turn"
"""The slot in which a row came.

A merged row came with the row before it, in front of all with the first one that was there.

Before that is worked out it is the negative slot of the merge."""
NEVER: Final = 2**62
"""The slot of what has not happened yet."""


@dataclass(frozen=True)
class StreamChange:
    """A stream from its first changed row on.

    Attributes:
        first: position of that row.
        rows: the rows as they will stand; with the columns of `make_stream_columns`.
        old: the rows that stood there.
    """

    first: int
    rows: Any
    old: Any


def make_stream_columns(columns: Mapping[str, str]) -> dict[str, Any]:
    """Columns of the rows of a stream, with their types."""
    user = {name: to_arrow_type(kind) for name, kind in columns.items()}
    return {
        **user,
        "position": pa.int64(),
        "stream_time": pa.int64(),
        **PROVENANCE_FIELDS,
        ARRIVAL_SLOT: pa.int64(),
    }


def add_arrival_slot(rows: Any, turn: int) -> Any:
    """Rows that came in one slot; negative: were merged in one."""
    return rows.append_column(ARRIVAL_SLOT, pa.array([turn] * rows.num_rows, pa.int64()))


def fill_arrival_slots(turns: Any) -> Any:
    """Slots of all rows in order: those of merged ones are worked out; they never go back."""
    plain = np.asarray(turns)
    known = plain > 0
    front = int(np.argmax(known)) if known.any() else len(plain)
    filled = np.where(known, plain, TICK_MIN)
    filled[:front] = np.minimum(plain[front] if front < len(plain) else NEVER, -plain[:front])
    return (
        pa.array(np.maximum.accumulate(filled), pa.int64())
        if len(filled)
        else pa.array([], pa.int64())
    )


def order_stream_rows(parts: Sequence[Any], position: int) -> Any:
    """Rows of a stream by stamp, those that stand further in front first on ties, with positions and slots."""
    rows = pa.concat_tables(parts)
    rows = rows.take(pa.array(np.argsort(rows["stream_time"].to_numpy(), kind="stable")))
    rows = _replace_column(
        rows, "position", pa.array(range(position, position + rows.num_rows), pa.int64())
    )
    return _replace_column(rows, ARRIVAL_SLOT, fill_arrival_slots(rows[ARRIVAL_SLOT]))


def find_first_difference(old: Any, new: Any) -> int | None:
    """Number of the first row that is not the same in both; None if all are."""
    shared = min(old.num_rows, new.num_rows)
    same = np.ones(shared, bool)
    for name in new.column_names:
        a, b = (t[name].slice(0, shared) for t in (old, new))
        neither = pc.and_(pc.is_null(a), pc.is_null(b))
        same &= np.asarray(pc.or_(pc.fill_null(pc.equal(a, b), False), neither))
    if not same.all():
        return int(np.argmin(same))
    return None if old.num_rows == new.num_rows else shared


def format_rewritten_rows(change: StreamChange, request: str) -> Any:
    """Rows of a stream as a merge writes them.

    Where none is left, one without `_id` says where the stream ends now.
    """
    rows = change.rows
    if rows.num_rows == 0:
        values = {name: [None] for name in rows.column_names} | {"position": [change.first]}
        rows = pa.table(values, schema=rows.schema)
    times = rows["stream_time"].cast(pa.timestamp("us", tz="UTC"))
    rows = _replace_column(rows, "stream_time", times).rename_columns(
        [ARRIVAL_SLOT_COLUMN if n == ARRIVAL_SLOT else n for n in rows.column_names]
    )
    return rows.append_column(SPLICE_COLUMN, pa.array([request] * rows.num_rows, pa.string()))


def _replace_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), name, values)
