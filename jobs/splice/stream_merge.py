"""Compute what inserted rows do to a stream and to everything that depends on it.

The result is that of a run in which the rows had arrived in time. A stream follows from what
arrived at it, slot by slot, and an attachment is a fold over its origin by position
(`docs/decisions/0030-a-stream-is-computed-from-its-arrivals.md`). So a merge takes these steps
(`docs/decisions/0044-a-merge-rewrites-streams-from-the-first-changed-row.md`):

1. Start after the newest checkpoint before the first inserted row. From there on, rows are known
   with the slots in which they arrived.
2. Go through the streams in the order of the graph. Insert the rows at their positions; an inserted
   row counts as arrived with the row before it.
3. Run every attachment again whose origin changed. It takes the rows in the same slots as before.
4. Append what arrives at a stream again, slot by slot, by the same rule and with the recorded clock
   of each slot. Rows that were merged into the stream before are merged again.
5. A stream is rewritten from its first changed row on. Streams without a change, and all that
   depends on them only, are left alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.arrow_tables import conform_to_schema
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS, PipeSpec
from tidegate.jobs.streams.reducers import (
    SentRows,
    build_reducer,
    build_states_table,
    fold_batch,
)
from tidegate.jobs.streams.row_dispatch import run_pipe
from tidegate.jobs.streams.stream_rows import (
    address_rows,
    append_rows,
    build_arrival_schema,
    build_rejection_rows,
    compute_time_bounds,
    merge_by_stamp,
    read_arrivals,
    release_below,
    select_request_segments,
)
from tidegate.jobs.streams.stream_state import (
    DispatchState,
    StreamState,
    parse_since_slot,
    read_reducer_states,
)
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MIN

from .errors import ATTACHED_TWICE, REDUCER_FAILS
from .stream_history import (
    ARRIVAL_SLOT,
    NEVER,
    StreamChange,
    StreamHistory,
    add_arrival_slot,
    apply_caught_up_slots,
    find_caught_up_ranges,
    find_first_difference,
    make_stream_columns,
    order_stream_rows,
    slice_slot,
)
from .tables_at_head import TablesAtHead

SegmentContents = tuple[Any, int | None, int | None, JsonObject]
"""Rows of a state segment, their least and greatest stamp, and the `extra` of its reference."""


@dataclass
class StreamEffect:
    """What a merge does to the streams.

    Attributes:
        since: the first slot whose rows change.
        record: state of streams and attachments after the merge, for the manifest's notes.
        changes: stream -> its rows from the first change on.
        segments: kind -> the segment that replaces all segments of this kind; None: they are
            dropped.
        rejections: dispatches that are refused now and were not before; None if there are none.
    """

    since: int
    record: JsonObject
    changes: dict[str, StreamChange]
    segments: dict[str, SegmentContents | None]
    rejections: Any


@dataclass
class _DispatchedRows:
    """What one attachment dispatches.

    Attributes:
        arrivals: destination -> rows, with the slots in which they arrive.
        collected: rows of the attachment's splice request.
    """

    arrivals: SentRows = field(default_factory=dict)
    collected: Any = None


class StreamMerge:
    """The computation of one merge at one head of the log; of use for one merge only.

    Args:
        tables: the tables at that head.

    Attributes:
        history: the streams before the merge.
    """

    def __init__(self, tables: TablesAtHead) -> None:
        self._tables, self._spec, self._head = tables, tables.spec, tables.head
        self._graph, self._store = tables.spec.stream_graph, tables.log.store
        self.history = StreamHistory(tables)
        self._state = DispatchState.from_record(tables.newest.stream_state)
        self._changed: dict[str, Any] = {}  # stream -> its rows after the merge
        self._dispatched: dict[str, _DispatchedRows] = {}
        self._segments: dict[str, SegmentContents | None] = {}
        self._rejections: list[Any] = []

    def merge_into_events(self, inserted: Any) -> StreamEffect:
        """Compute the effect of rows that a merge inserts into the table of events.

        Raises:
            ConfigurationError: an attachment that reads them was attached more than once.
            PoisonError: a reducer or pipe fails.
        """
        since = self.history.find_slot_of_event(pc.min(inserted["position"]).as_py())
        self.history.select_base(since)
        events = self.history.insert_events(inserted)
        # `shift` counts the inserted rows, because the pipeline's own positions do not.
        state = self._state.stream_state(EVENTS_STREAM)
        last, count = events["stream_time"][-1].as_py(), inserted.num_rows
        self._changed[EVENTS_STREAM] = events
        self._state.streams[EVENTS_STREAM] = StreamState(
            state.next + count, max(last, state.last or last), state.shift + count
        )
        return self._compute_effect(since, EVENTS_STREAM)

    def merge_into_stream(self, stream: str, request: str) -> StreamEffect:
        """Compute the effect of a request that an attachment has collected; it must have rows.

        Raises:
            ConfigurationError: its backfill goes on, it is unknown, or an attachment that reads the
                stream was attached more than once.
            PoisonError: a reducer or pipe fails.
        """
        rows = self.history.read_collected_rows(request)
        stamps = pc.min_max(rows["_stamp"])
        low, high = stamps["min"].as_py(), stamps["max"].as_py()
        since = self.history.find_slot_before(stream, low)
        self.history.select_base(since)
        slot, state = self._head.next_slot, self._state.stream_state(stream)
        inserted = self.history.convert_collected_rows(stream, rows, slot)
        self._changed[stream] = order_stream_rows(
            [self.history.stream_rows(stream), inserted], self._first_position(stream)
        )
        self._state.streams[stream] = StreamState(
            state.next + rows.num_rows, max(high, high if state.last is None else state.last)
        )
        self._state.requests[request] = replace(self._state.requests[request], merged=slot)
        return self._compute_effect(since, stream)

    def _compute_effect(self, since: int, inserted_into: str) -> StreamEffect:
        changes, run_again = dict[str, StreamChange](), set[str]()
        for stream in self._graph.order:
            if stream != inserted_into:
                # None of its writers runs again, so its rows stay.
                if not run_again.intersection(self._graph.writers_of(stream)):
                    continue
                self._changed[stream] = self._rebuild_stream(stream)
            old, new = self.history.stream_rows(stream), self._changed[stream]
            first = find_first_difference(old, new)
            if first is None:
                # Computed again with the same result: readers of this stream need not run.
                del self._changed[stream]
                continue
            # The table of events is not rewritten: the merge adds rows to it.
            if stream != EVENTS_STREAM:
                position = self._first_position(stream) + first
                changes[stream] = StreamChange(position, new.slice(first), old.slice(first))
            for name in self._graph.readers_of(stream):
                if name in self._state.attachments:
                    run_again.add(name)
                    self._run_attachment(name)
        for name in run_again:
            self._update_attachment(name)
        record = self._state.to_record(self._graph)
        rejections = pa.concat_tables(self._rejections) if self._rejections else None
        return StreamEffect(since, record, changes, self._segments, rejections)

    def _first_position(self, stream: str) -> int:
        """Return the position of the first row after the base."""
        return self.history.base_state.stream_state(stream).next

    def _current_rows(self, stream: str) -> Any:
        """Return the rows of a stream after the merge, from the base on."""
        changed = self._changed.get(stream)
        return self.history.stream_rows(stream) if changed is None else changed

    # Attachments

    def _run_attachment(self, name: str) -> _DispatchedRows:
        """Return what an attachment dispatches when it reads its origin after the merge."""
        # One attachment may write to several streams; it runs once.
        if name in self._dispatched:
            return self._dispatched[name]
        spec, state = self._graph.attachments[name], self._state.attachments[name]
        if state.round > 1:
            # The state before the second round does not say which rows the first round took.
            raise ATTACHED_TWICE(pipeline=self._spec.name, attachment=name)
        rows, slots = self._current_rows(spec.origin), self._compute_taken_slots(name)
        rows, slots = rows.filter(pa.array(slots < NEVER)), slots[slots < NEVER]
        dispatched = _DispatchedRows()
        for destination, table in self._fold_rows(name, rows).items():
            arrivals, is_collected = address_rows(
                spec,
                state.dispatch_name(name),
                self._find_backfill_end(name),
                self._graph.columns[destination],
                table,
                rows,
            )
            # A dispatched row arrives in the slot in which its parent is taken.
            sources = np.searchsorted(
                rows["position"].to_numpy(), np.sort(table["_position"].to_numpy())
            )
            arrivals = arrivals.append_column(ARRIVAL_SLOT, pa.array(slots[sources], pa.int64()))
            dispatched.arrivals[destination] = arrivals.filter(pc.invert(is_collected))
            if spec.merge == "splice":
                collected = arrivals.filter(is_collected)
                dispatched.collected = collected.drop_columns([ARRIVAL_SLOT])
        self._dispatched[name] = dispatched
        return dispatched

    def _fold_rows(self, name: str, rows: Any) -> SentRows:
        """Run a pipe or reducer over rows; return destination -> dispatched rows."""
        spec = self._graph.attachments[name]
        if rows.num_rows == 0:
            return {}
        columns = self._graph.columns[spec.origin]
        rows = rows.select([*columns, "position", "stream_time", "_id"])
        if isinstance(spec, PipeSpec):
            sent, failure = run_pipe(spec, columns, rows)
        else:
            kind = f"reducer:{name}"
            segments = [s for s in self.history.base_segments if s.kind == kind]
            before = read_reducer_states(self._store, segments)
            batch = fold_batch(build_reducer(self._spec, name), rows, before)
            sent, failure = batch.sent, batch.failure
            states = {**before, **batch.states}
            self._segments[kind] = (build_states_table(states), None, None, {}) if states else None
        if failure is not None:
            raise REDUCER_FAILS(
                pipeline=self._spec.name, attachment=name, row=failure.row_id, text=failure.error
            )
        return sent

    def _find_backfill_end(self, name: str) -> int:
        """Return the position after the last row that arrived before the attachment was made."""
        if name in self.history.base_state.attachments:
            return self.history.base_state.attachments[name].head
        origin = self._graph.attachments[name].origin
        since = parse_since_slot(self._state.attachments[name].since)
        slots = self._current_rows(origin)[ARRIVAL_SLOT].to_numpy()
        return self._first_position(origin) + int(np.count_nonzero(slots < since))

    def _compute_taken_slots(self, name: str) -> Any:
        """Return, for each row of the origin after the merge, the slot in which it is taken.

        Rows that existed before keep their slots. An inserted row is taken when it arrives, but not
        before the rows in front of it.
        """
        state, origin = self._state.attachments[name], self._graph.attachments[name].origin
        old, new = self.history.stream_rows(origin), self._current_rows(origin)
        arrived, begin = old[ARRIVAL_SLOT].to_numpy(), self._first_position(origin)
        slots = apply_caught_up_slots(arrived, state.caught_up, state.cursor, begin)
        if new is not old:
            arrived = new[ARRIVAL_SLOT].to_numpy()
            index = pc.index_in(new["_id"], value_set=old["_id"].combine_chunks())
            existed = np.asarray(pc.is_valid(index))
            before = slots[np.asarray(pc.fill_null(index, 0))] if len(slots) else arrived
            slots = np.where(existed, before, arrived)
        if len(slots):
            slots = np.maximum.accumulate(np.maximum(slots, parse_since_slot(state.since)))
        if state.until is not None:
            slots = np.where(slots >= state.until, NEVER, slots)
        return slots

    def _update_attachment(self, name: str) -> None:
        """Set the attachment's state after the merge."""
        spec, state = self._graph.attachments[name], self._state.attachments[name]
        arrived = self._current_rows(spec.origin)[ARRIVAL_SLOT].to_numpy()
        taken, begin = self._compute_taken_slots(name), self._first_position(spec.origin)
        # Taken rows are a prefix, because slots never decrease along a stream.
        cursor = begin + int((taken < NEVER).sum())
        # Ranges before the base are kept; all others are found again.
        before = [(a, min(b, begin), slot) for a, b, slot in state.caught_up if a < begin]
        ranges = find_caught_up_ranges(arrived, taken, begin)
        fields: dict[str, Any] = {
            "cursor": cursor,
            "head": self._find_backfill_end(name),
            "caught_up": (*(before if self.history.base else ()), *ranges),
        }
        # The paused attachment stops at the same row, which may have another position now.
        if state.failure is not None:
            fields["failure"] = {**state.failure, "position": cursor}
        self._state.update_attachment(name, **fields)
        if spec.merge == "splice":
            request = self._state.attachments[name].request_id(name)
            rows = self._read_request_rows(name)
            low, high = compute_time_bounds(rows["_stamp"])
            self._state.requests[request] = replace(
                self._state.requests[request], rows=rows.num_rows, min_time=low, max_time=high
            )
            segment = (rows, low, high, {"request": request})
            self._segments[f"splice:{name}"] = segment if rows.num_rows else None

    # Splice requests of attachments

    def _read_request_rows(self, name: str) -> Any:
        """Return what an attachment has collected: up to the base from segments, then computed."""
        request = self._state.attachments[name].request_id(name)
        destination = self._graph.attachments[name].destinations[0]
        segments = select_request_segments(self.history.base_segments, name, request)
        stored = read_arrivals(self._store, segments, self._graph.columns[destination])
        collected = self._run_attachment(name).collected
        if collected is None:
            return stored
        return pa.concat_tables([stored, collected.select(stored.column_names).cast(stored.schema)])

    # Streams

    def _rebuild_stream(self, stream: str) -> Any:
        """Return the rows of a stream from all that arrives at it after the base."""
        arrow_schema = pa.schema(make_stream_columns(self._graph.columns[stream]))
        writers, merged = self._list_arrivals(stream), self._find_merged_rows(stream)
        state = self.history.base_state.stream_state(stream)
        last, parts = state.last, [arrow_schema.empty_table()]
        kind = f"buffer:{stream}"
        segments = [segment for segment in self.history.base_segments if segment.kind == kind]
        buffered = read_arrivals(self._store, segments, self._graph.columns[stream])
        for slot in self._list_active_slots(stream, writers, merged):
            rows, buffered = self._compute_appends(stream, slot, writers, buffered, last)
            accepted, refused = append_rows(rows, self.history.clocks[slot][0], last, 0)
            self._add_new_rejections(stream, refused)
            if accepted.num_rows:
                last = accepted["stream_time"][-1].as_py()
                parts.append(conform_to_schema(add_arrival_slot(accepted, slot), arrow_schema))
            for rows in merged.get(slot, ()):
                parts.append(rows)
                stamp = pc.max(rows["stream_time"]).as_py()
                last = stamp if last is None else max(last, stamp)
        # Positions are given last, because a merged row moves all rows behind it.
        rebuilt = order_stream_rows(parts, state.next)
        self._state.streams[stream] = StreamState(state.next + rebuilt.num_rows, last)
        if self._spec.streams[stream].buffer:
            self._segments[kind] = (buffered, None, None, {}) if buffered.num_rows else None
        return rebuilt

    def _list_arrivals(self, stream: str) -> list[Any]:
        """Return what each attachment sends to a stream, in the order in which they dispatch."""
        readers = [name for origin in self._graph.order for name in self._graph.readers_of(origin)]
        writers = [
            self._run_attachment(name)
            for name in readers
            if name in self._state.attachments and name in self._graph.writers_of(stream)
        ]
        return [sent.arrivals[stream] for sent in writers if stream in sent.arrivals]

    def _find_merged_rows(self, stream: str) -> dict[int, list[Any]]:
        """Return slot -> rows of requests that were merged into the stream after the base."""
        merged: dict[int, list[Any]] = {}
        for request_id, request in self._state.requests.items():
            slot, name = request.merged or 0, request.attachment
            if request.destination != stream or slot <= self.history.base:
                continue
            rows = (
                self._read_request_rows(name)
                if name in self._dispatched
                else self.history.read_collected_rows(request_id)
            )
            if rows.num_rows:
                converted = self.history.convert_collected_rows(stream, rows, slot)
                merged.setdefault(slot, []).append(converted)
        return merged

    def _list_active_slots(
        self, stream: str, writers: Sequence[Any], merged: Mapping[int, Any]
    ) -> list[int]:
        """Return the slots in which rows may be appended to a stream."""
        if self._spec.streams[stream].buffer:  # it may release rows in any slot
            return list(range(self.history.base + 1, self._head.slot + 1))
        arrivals = {int(slot) for rows in writers for slot in np.unique(rows[ARRIVAL_SLOT])}
        return sorted({*merged, *arrivals})

    def _compute_appends(
        self, stream: str, slot: int, writers: Sequence[Any], buffered: Any, last: int | None
    ) -> tuple[Any, Any]:
        """Return the rows to append in a slot, and the rows that a buffer still holds after it."""
        now, frontier = self.history.clocks[slot]
        empty = build_arrival_schema(self._graph.columns[stream]).empty_table()
        rows = merge_by_stamp([empty, *(slice_slot(table, slot) for table in writers)], now)
        if not self._spec.streams[stream].buffer:
            return rows, buffered
        is_behind = any(self._is_behind(name, slot) for name in self._graph.writers_of(stream))
        # A writer that is behind may still send any stamp, so nothing leaves the buffer.
        limit = TICK_MIN if is_behind else frontier
        return release_below(buffered, rows, now, limit, last)

    def _is_behind(self, name: str, slot: int) -> bool:
        """Return whether rows that could reach an attachment by `slot` are taken only later."""
        state = self._state.attachments.get(name)
        if state is None or slot < parse_since_slot(state.since):
            return False
        if state.until is not None and slot >= state.until:
            return False
        origin = self._graph.attachments[name].origin
        arrived = self._current_rows(origin)[ARRIVAL_SLOT].to_numpy()
        taken = self._compute_taken_slots(name)
        return bool(np.any((arrived <= slot) & (taken > slot))) or any(
            self._is_behind(writer, slot) for writer in self._graph.writers_of(origin)
        )

    def _add_new_rejections(self, stream: str, refused: Any) -> None:
        """Note the rejections that are not in their table yet.

        The table is a log of what was refused when, so rejections that a run in time would not have
        had stay there.
        """
        if refused.num_rows == 0:
            return
        rejections = build_rejection_rows(self._spec, stream, refused)
        columns = ["destination", "via", "row_id", "row"]
        logged = self._tables.read_rows(
            REJECTIONS, columns, {"_epoch": [(self.history.base + 1, None)]}
        )
        known = set(zip(*(logged[name].to_pylist() for name in columns), strict=True))
        found = zip(*(rejections[name].to_pylist() for name in columns), strict=True)
        is_new = [row not in known for row in found]
        if any(is_new):
            self._rejections.append(rejections.filter(pa.array(is_new)))
