"""Rows of streams: read by position from the log, stamped when dispatched, and appended.

Backfills read the rows of their origin from the sealed epochs of the current lineage
(`LogHistory`), those of retired epochs from the published tables.

Who stamps a row, and which stamps a stream accepts: docs/semantics.md, section 6. Batches are
appended on Arrow columns without a loop. A row is rejected if its stamp is below the greatest time
before it, so rejected rows never raise that maximum. The stream's last time before each row is
therefore the running maximum over *all* rows before it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import (
    conform_to_schema,
    convert_to_ticks,
    list_rows,
    read_columns,
    read_parquet_object,
    replace_column,
    to_arrow_types,
)
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.sinks.output_tables import (
    IDENTITY_COLUMNS,
    build_table_schema,
    compute_current_positions,
)
from tidegate.jobs.sinks.table_scan import Ranges, select_in_ranges
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS, PipeSpec, ReducerSpec
from tidegate.jobs.spec.table_layout import ColumnTypes
from tidegate.time_units import TICK_MAX, TICK_MIN

from .errors import ROWS_RETIRED

PROVENANCE_FIELDS = {
    "_id": pa.string(),
    "_via": pa.string(),
    "_origin": pa.string(),
    "_origin_id": pa.string(),
}
"""Whose row it is: identity, the attachment that sent it, the stream and the row it was made of."""


_TIMES_AT_ONCE = 1_000_000
"""Rows of retired epochs of which the times are read together."""
PublishedReader = Callable[[str, int, int, Collection[str]], Any]
"""Returns rows of a published table: of this stream, from a position up to another, columns."""


@dataclass
class LogHistory:
    """Reads rows from the files that the manifests name, as they are after all merges.

    It reads one manifest for each epoch back to the first row asked for.

    Args:
        log: the pipeline's log.
        event_time: the event time column.
        after: the epoch before the one that is replayed; by default the newest.
        published: reads what is in no manifest any more; None: nothing does.
    """

    _log: SlotLog
    _event_time: str
    after: Manifest | None = None
    published: PublishedReader | None = None
    # Of the events. A backfill asks for one position after the other.
    _time_before: tuple[int, int | None] = (0, None)

    def read_rows(self, stream: str, columns: ColumnTypes, start: int, end: int) -> Any:
        """Return the rows ``start <= position < end``, in order; fewer if the stream ends before.

        They have the given columns, ``position``, ``stream_time`` (int64 ticks) and ``_id``.

        Raises:
            RowsRetiredError: some of the rows are in epochs that were retired, and in no table.
        """
        if start >= end:
            return build_row_schema(columns).empty_table()
        head = self._find_head()
        if stream == EVENTS_STREAM:
            rows = self._read_event_rows(head, columns, start, end)
        else:
            rows = self._read_stream_rows(head, stream, columns, start, end)
        first = rows["position"][0].as_py() if rows.num_rows else end
        if first > start:
            # The retired epochs end before `first`, because slots retire oldest first.
            older = self._read_published_rows(stream, columns, start, min(first, end))
            return pa.concat_tables([older, rows.slice(0, max(0, end - first))])
        return rows.slice(start - first, end - start)

    def read_last_time(self, start: int) -> int | None:
        """Return the greatest event time of the events from a position on.

        Manifests tell it. Of retired epochs the times are read, a part at a time.

        Raises:
            RowsRetiredError: some of the rows are in epochs that were retired, and in no table.
        """
        times: list[int] = []
        first, last = 0, None
        for epoch, before in self._iter_event_epochs(self._find_head(), start, TICK_MAX):
            last = before
            files = epoch.files.get(EVENTS_STREAM, [])
            times += [file.max_time for file in files if file.max_time is not None]
            if not epoch.is_merge:
                first = epoch.next_position - sum(file.rows for file in files)
        if last is None and first > start:
            if self.published is None:
                raise ROWS_RETIRED(stream=EVENTS_STREAM, row=start)
            last = self._read_time_before(first)
        return max((time for time in (*times, last) if time is not None), default=None)

    def _find_head(self) -> LogHead:
        after = self.after
        # A replay sees the log as it was before its epoch.
        return LogHead(after.timeline, after.slot, after, None, None) if after else self._log.head()

    def _read_published_rows(self, stream: str, columns: ColumnTypes, start: int, end: int) -> Any:
        """Return rows of retired epochs; every such epoch is in the tables."""
        if self.published is None:
            raise ROWS_RETIRED(stream=stream, row=start)
        events = stream == EVENTS_STREAM
        own = (self._event_time, *IDENTITY_COLUMNS) if events else ("stream_time", "_id")
        found = self.published(stream, start, end, (*columns, *own))
        if found.num_rows != end - start:
            raise ROWS_RETIRED(stream=stream, row=start)
        if not events:
            return to_stream_rows(found, columns)
        rows = to_event_rows(found, columns, self._event_time, self._read_time_before(start))
        self._time_before = end, rows["stream_time"][-1].as_py()
        return rows

    def _read_time_before(self, position: int) -> int | None:
        """Return the greatest event time of all events before a position."""
        if position and self.published is not None and self._time_before[0] != position:
            bounds = []
            for start in range(0, position, _TIMES_AT_ONCE):
                end = min(start + _TIMES_AT_ONCE, position)
                found = self.published(EVENTS_STREAM, start, end, (self._event_time,))
                bounds.append(compute_time_bounds(found[self._event_time])[1])
            known = (time for time in bounds if time is not None)
            self._time_before = position, max(known, default=None)
        return self._time_before[1] if position == self._time_before[0] else None

    def _read_event_rows(self, head: LogHead, columns: ColumnTypes, start: int, end: int) -> Any:
        """Return rows of the pipeline's epochs and the rows that merges inserted between them."""
        inserted = self._read_inserted_events(head)
        # An insertion moves later rows up by at most this much.
        shift = 0 if inserted is None else inserted.num_rows
        epochs = list(self._iter_event_epochs(head, max(start - shift, 0), end))[::-1]
        files = [file for epoch, _ in epochs for file in epoch.files.get(EVENTS_STREAM, [])]
        table = read_parquet_files(self._log.store, files)
        if table is None:
            return build_row_schema(columns).empty_table()
        if inserted is not None:
            low = pc.min(table["position"]).as_py()
            near = inserted.filter(pc.greater_equal(inserted["position"], low - 1))
            both = pa.concat_tables([table, near], promote_options="permissive")
            table = compute_current_positions(both, inserted, self._event_time)
        last = epochs[0][1]
        if last is None:  # the epoch before was retired, if there was one
            last = self._read_time_before(pc.min(table["position"]).as_py())
        return to_event_rows(table, columns, self._event_time, last)

    def _read_inserted_events(self, head: LogHead) -> Any | None:
        """Return the events that merges inserted into the stream; None if there are none."""
        epochs = [
            filled.epoch
            for slot in list_stream_merges(head)
            for filled in self._log.epochs_between(head.timeline, slot, slot)
        ]
        files = [file for epoch in epochs for file in epoch.files.get(EVENTS_STREAM, [])]
        return read_parquet_files(self._log.store, files)

    def _iter_event_epochs(
        self, head: LogHead, start: int, end: int
    ) -> Iterator[tuple[Manifest, int | None]]:
        """Yield epochs that may hold events with these positions, newest first.

        Each comes with the stream's last time before it.
        """
        for older, newer in self._iter_epoch_pairs(head):
            first, last = _read_stream_end(older, EVENTS_STREAM)
            # A merge into ordered events adds rows between others, without new positions.
            if first < min(end, _read_stream_end(newer, EVENTS_STREAM)[0]):
                yield newer, last
            if first <= start and (last is not None or first == 0):
                return

    def _read_stream_rows(
        self, head: LogHead, stream: str, columns: ColumnTypes, start: int, end: int
    ) -> Any:
        """Return rows of a stream, reading newest epochs first.

        What a merge rewrote hides everything older from its first row on.
        """
        merges, parts, limit = list_stream_merges(head), [], end
        for older, newer in self._iter_epoch_pairs(head):
            # A merge that did not rewrite this stream has files of other streams only.
            first = merges.get(newer.slot, {}).get("rewrites", {}).get(stream)
            if newer.is_merge and first is None:
                continue
            if first is None:
                first = _read_stream_end(older, stream)[0]
            files = newer.files.get(stream, []) if first < limit else []
            table = read_parquet_files(self._log.store, files)
            if table is not None:
                within: Ranges = {"position": [(first, limit - 1)]}
                parts.append(select_in_ranges(to_stream_rows(table, columns), within))
            limit = min(limit, first)
            if limit <= start:
                break
        if not parts:
            return build_row_schema(columns).empty_table()
        return pa.concat_tables(parts[::-1])

    def _iter_epoch_pairs(self, head: LogHead) -> Iterator[tuple[Manifest | None, Manifest]]:
        """Yield each sealed epoch with the one before it, newest first.

        The earlier one is None before the first epoch and where epochs were retired.
        """
        newer: Manifest | None = None
        for filled in self._log.iterate_ancestors(head.checkpoint):
            older = filled.record if isinstance(filled.record, Manifest) else None
            if newer is not None:
                yield older, newer
            newer = older
            # Retired: what is older cannot be read, and the caller names the rows that are missing.
            if older is None:
                return
        if newer is not None:
            yield None, newer


def list_stream_merges(head: LogHead) -> dict[int, dict[str, Any]]:
    """Return slot -> what its merge did, for the merges into streams on the lineage up to a slot.

    It is the `extra` of the merge's segment.
    """
    extras = [dict(s.extra) for s in head.segments if s.kind == SPLICE_KIND]
    return {
        CheckpointId.parse(str(extra["checkpoint"])).slot: extra
        for extra in extras
        # Merges without "from" touched windows or events only.
        if "from" in extra
    }


def read_parquet_files(store: Store, files: list[FileRef]) -> Any | None:
    """Return all rows of Parquet files in the store; None without files."""
    tables = [read_parquet_object(store, file.key, file.sha256) for file in files]
    return pa.concat_tables(tables, promote_options="default") if tables else None


def compute_time_bounds(times: Any) -> tuple[int | None, int | None]:
    """Return the least and the greatest of some times, in ticks; twice None if there are none."""
    bounds = pc.min_max(convert_to_ticks(times))
    return bounds["min"].as_py(), bounds["max"].as_py()


def to_event_rows(
    table: Any, columns: ColumnTypes, event_time: str, last: int | None, shift: int = 0
) -> Any:
    """Convert rows of the events table to rows of a stream.

    The identity is the provenance; the stream time is the running maximum of event time.

    Args:
        table: rows of the events table.
        columns: of the stream.
        event_time: the event time column.
        last: the stream's last time before these rows.
        shift: added to the positions: how many rows merges inserted before these.
    """
    table = table.sort_by("position")
    identity = pc.binary_join_element_wise(
        table["_source"], table["_partition"], table["_seq"].cast(pa.string()), "/"
    )
    time = compute_running_max(convert_to_ticks(table[event_time]), last)
    user = conform_to_schema(table, pa.schema(to_arrow_types(columns)))
    own = (pc.add(table["position"], shift), time, identity)
    return pa.table([*user.columns, *own], build_row_schema(columns))


def to_stream_rows(table: Any, columns: ColumnTypes) -> Any:
    """Convert rows of a stream's table to rows of the stream, sorted by position.

    Rows without `_id` are left out. A merge that leaves a stream without rows writes one such row,
    which marks where the stream ends.
    """
    rows = table.filter(pc.is_valid(table["_id"])).sort_by("position")
    return conform_to_schema(rows, build_row_schema(columns))


def build_row_schema(columns: ColumnTypes) -> Any:
    """Return the schema of rows of a stream with these columns, as attachments read them."""
    own = {"position": pa.int64(), "stream_time": pa.int64(), "_id": pa.string()}
    return pa.schema(to_arrow_types(columns) | own)


def _read_stream_end(epoch: Manifest | None, stream: str) -> tuple[int, int | None]:
    """Return the next position and the last time of a stream after an epoch.

    The time is None for epochs whose spec had no streams.
    """
    state = epoch.stream_state.get("streams", {}).get(stream) if epoch else None
    if stream != EVENTS_STREAM:
        return (state["next"], state["last"]) if state else (0, None)
    position = epoch.next_position if epoch else 0
    # The pipeline may have run without streams: then the recorded state is older than the epoch.
    if state is None or state["next"] - state.get("shift", 0) != position:
        return position, None
    return position, state["last"]


def compute_running_max(times: Any, last: int | None) -> Any:
    """Return the running maximum of int64 times, starting at `last`."""
    return pc.cumulative_max(combine_chunks(times), start=TICK_MIN if last is None else last)


def combine_chunks(column: Any) -> Any:
    """Return a column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def merge_by_stamp(writers: Sequence[Any], now: int) -> Any:
    """Merge the batches of one or more writers by stamp; each writer's rows keep their order.

    On ties the rows of earlier writers come first. Every batch has a column ``_stamp`` (null: the
    destination stamps the row, here with `now`).
    """
    filled = [table for table in writers if table.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else writers[0]
    merged = pa.concat_tables(filled)
    # Sorting by the running maximum keeps each writer's order. Rows are concatenated by writer, so
    # ties go to the earlier writer.
    high = [compute_running_max(_resolve_stamps(table, now), None) for table in filled]
    return sort_stably(merged, pa.concat_arrays(high))


def sort_stably(rows: Any, keys: Any) -> Any:
    """Return the rows in order of their keys; rows with equal keys keep their order."""
    return rows.take(pa.array(np.argsort(keys, kind="stable")))


def _resolve_stamps(rows: Any, now: int) -> Any:
    """Return the stamp of each row; `now` for rows without one."""
    return pc.fill_null(combine_chunks(rows["_stamp"]), now)


def append_rows(rows: Any, now: int, last: int | None, position: int) -> tuple[Any, Any]:
    """Append rows in their order, the first accepted one at `position`.

    A row without a stamp gets `now`, or `last` if that is greater, and is never rejected.

    Returns:
        The accepted rows, with ``position`` and ``stream_time``, and the rejected rows, with
        ``_last``.
    """
    high = compute_running_max(_resolve_stamps(rows, now), last)
    before = (
        pa.concat_arrays([pa.array([TICK_MIN if last is None else last], pa.int64()), high[:-1]])
        if len(high)
        else high
    )
    stamp = combine_chunks(rows["_stamp"])
    fits = pc.fill_null(pc.greater_equal(stamp, before), True)
    accepted = rows.append_column("stream_time", high).filter(fits)
    numbers = pa.array(range(position, position + accepted.num_rows), pa.int64())
    return accepted.append_column("position", numbers), rows.append_column("_last", before).filter(
        pc.invert(fits)
    )


def release_below(held: Any, batch: Any, now: int, mark: int, last: int | None) -> tuple[Any, Any]:
    """Split a buffer and new arrivals at the time `mark`.

    What leaves is never rejected: a row below `last`, the time of the stream, gets that stamp.

    Returns:
        The rows below the mark, in order, and the rows that keep waiting; both with their stamps.
    """
    rows = pa.concat_tables([held, replace_column(batch, "_stamp", _resolve_stamps(batch, now))])
    rows = sort_stably(rows, rows["_stamp"])
    below = pc.less(combine_chunks(rows["_stamp"]), mark)
    leaving, waiting = rows.filter(below), rows.filter(pc.invert(below))
    if last is not None:
        stamps = pc.max_element_wise(leaving["_stamp"], pa.scalar(last, pa.int64()))
        leaving = replace_column(leaving, "_stamp", stamps)
    return leaving, waiting


@dataclass(frozen=True, slots=True)
class Event:
    """The row as a fold sees it: ``event["amount"]``, ``event.time``.

    It has neither clock nor position, because both may change. `time` is its stream time in ticks.
    """

    id: str
    time: int
    value: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        return self.value[column]


def build_arrival_schema(columns: ColumnTypes) -> Any:
    """Return the schema of arrivals at a stream with these columns.

    A row without a stamp is stamped by its destination.
    """
    return pa.schema({**to_arrow_types(columns), "_stamp": pa.int64(), **PROVENANCE_FIELDS})


def read_arrivals(store: Store, files: Iterable[FileRef], columns: ColumnTypes) -> Any:
    """Return stored arrivals at a stream with these columns; none without files."""
    return read_columns(store, files, build_arrival_schema(columns))


def select_request_segments(
    segments: Iterable[FileRef], attachment: str, request_id: str
) -> list[FileRef]:
    """Return the segments with the rows that an attachment has collected for a request."""
    return [
        segment
        for segment in segments
        if segment.kind == f"splice:{attachment}" and segment.extra.get("request") == request_id
    ]


def address_rows(
    one: PipeSpec | ReducerSpec,
    via: str,
    head: int,
    columns: ColumnTypes,
    table: Any,
    rows: Any,
) -> tuple[Any, Any]:
    """Return dispatched rows as they arrive, and a mask of those that the splice request collects.

    The id of a row is made of `via`, the id of its parent and its `_nth`. The mask selects the
    backfill if the attachment has `merge: splice`, and nothing otherwise.

    Args:
        one: the attachment.
        via: its name in identities.
        head: position where its backfill ends.
        columns: of the destination.
        table: the rows, with ``_position`` and ``_nth``.
        rows: the rows they were made of, without gaps in their positions.
    """
    table = table.sort_by([("_position", "ascending"), ("_nth", "ascending")])
    parents = rows.select(["stream_time", "_id"]).take(
        pc.subtract(table["_position"], rows["position"][0])
    )
    is_spliced, backfill = one.merge == "splice", pc.less(table["_position"], head)
    # What is merged later keeps the time of its parent; backfill that is appended cannot.
    inherited = pc.if_else(backfill, is_spliced, one.inherit)
    parent = pc.binary_join_element_wise(pa.scalar(via), parents["_id"], ":")
    identity = pc.binary_join_element_wise(parent, table["_nth"].cast(pa.string()), "#")
    meta = {
        "_stamp": pc.if_else(inherited, parents["stream_time"], pa.scalar(None, pa.int64())),
        "_id": identity,
        "_via": pa.repeat(via, table.num_rows),
        "_origin": pa.repeat(one.origin, table.num_rows),
        "_origin_id": parents["_id"],
    }
    sent = pa.table(
        {**{c: table[c] for c in columns}, **meta}, schema=build_arrival_schema(columns)
    )
    return sent, backfill if is_spliced else pc.less(table["_position"], 0)


def find_root_source(identity: str) -> str:
    """Return the source of the event from which a row was made, by one or several attachments.

    The identity of an event is ``source/partition/seq``. Each attachment that makes a row of
    another writes its name and a colon in front.
    """
    return identity.partition("/")[0].rpartition(":")[2]


def build_rejection_rows(spec: PipelineSpec, stream: str, refused: Any) -> Any:
    """Return rows of the table `rejections`, without provenance, for rejected arrivals."""
    columns = spec.stream_graph.columns[stream]
    rows = [
        {
            "stream": row["_origin"],
            "row_id": row["_origin_id"],
            "destination": stream,
            "via": row["_via"],
            "stamp": row["_stamp"],
            "last": row["_last"],
            "reason": f"stamp is below the last of {stream}",
            "row": json.dumps({c: row[c] for c in columns}, default=str, sort_keys=True),
        }
        for row in list_rows(refused)
    ]
    provenance = ("_timeline", "_epoch")
    own = [f for f in build_table_schema(spec, REJECTIONS) if f.name not in provenance]
    # Arrow takes ticks for times.
    return pa.Table.from_pylist(rows, pa.schema(own))
