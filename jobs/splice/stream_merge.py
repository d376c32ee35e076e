"""What rows inserted into a stream do to it and to everything behind it.

Streams, states, requests, as if they had come in time.

A stream follows from what arrived at it, slot by slot (decision 30), and an attachment is a fold
over its origin by position. So:

1. Start after the newest checkpoint before the first inserted row; from there on rows are known
  with the slots they came in.
2. Stream by stream, in the order of the graph: put the rows into their places; an inserted row came
  with the row before it.
3. Whoever reads a stream that is another one now is run again, over the rows that it had taken,
  each in the slot in which it had taken it.
4. What arrives at a stream is appended again, slot by slot, by the rule and with the clock of then;
  what was merged into it before is merged again.
5. From its first row that is another one, a stream is written anew. Nothing before that row is
  written, and a stream without such a row is left alone, with all that is behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS, PipeSpec
from tidegate.jobs.splice.stream_history import (
    ARRIVAL_SLOT,
    NEVER,
    StreamChange,
    StreamHistory,
    add_arrival_slot,
    find_first_difference,
    make_stream_columns,
    order_stream_rows,
)
from tidegate.jobs.splice.tables_at_head import TablesAtHead
from tidegate.jobs.streams.dispatch_files import build_states_table, read_reducer_states
from tidegate.jobs.streams.dispatched_rows import (
    address_rows,
    build_arrival_schema,
    build_rejection_rows,
)
from tidegate.jobs.streams.pipe_filter import PipeFilter
from tidegate.jobs.streams.reducers import ReducerRunner, ReducerStates, build_reducer, fold_batch
from tidegate.jobs.streams.row_history import read_parquet_files
from tidegate.jobs.streams.stream_append import append_rows, merge_by_stamp, release_below
from tidegate.jobs.streams.stream_state import (
    AttachmentState,
    DispatchState,
    StreamState,
    parse_since_slot,
)
from tidegate.time_units import TICK_MIN


@dataclass
class StreamEffect:
    """What a merge does to the streams.

    Attributes:
        since: first slot whose rows are others now.
        record: where streams stand afterwards (`Manifest.stream_state`).
        segments: kind -> the segment that takes the place of all of this kind; None: there is none
            any more. With the segment go its least and greatest stamp and what else its reference
            says.
        rejections: dispatches that are refused now and were not before.
    """

    since: int
    record: dict[str, Any]
    changes: dict[str, StreamChange] = field(default_factory=dict)
    segments: dict[str, tuple[Any, int | None, int | None, dict[str, Any]] | None] = field(
        default_factory=dict
    )
    rejections: Any = None


@dataclass
class _DispatchedRows:
    """What one attachment dispatched.

    Attributes:
        to: destination -> arrivals, with the slot in which they arrive.
        collected: rows of its request.
    """

    to: dict[str, Any]
    collected: Any = None


class StreamMerge:
    """One computation at one head.

    Args:
        spec: the pipeline.
        log: its log.
        head: where it stands.
        tables: its tables there.
        run: how reducers are run.

    Attributes:
        past: the streams as they stand before the merge.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        log: SlotLog,
        head: LogHead,
        tables: TablesAtHead,
        run: ReducerRunner = fold_batch,
    ) -> None:
        assert head.record is not None  # noqa: S101 - there is something to merge into
        self._spec, self._graph, self._log, self._head, self._tables, self._run = (
            spec,
            spec.stream_graph,
            log,
            head,
            tables,
            run,
        )
        self.past = StreamHistory(spec, log, head, tables)
        self._state = DispatchState.from_record(head.record.stream_state)
        self._new: dict[str, Any] = {}
        self._sent: dict[str, _DispatchedRows] = {}
        self._segments: dict[str, Any] = {}
        self._rejections: list[Any] = []

    def merge_into_events(self, inserted: Any) -> StreamEffect:
        """The effect of rows that are inserted into the events: as they will stand in the table."""
        first = pc.min(inserted["position"]).as_py()
        since = self.past.slot_of_event(first)
        self.past.select_base(since)
        self._new[EVENTS_STREAM] = self.past.with_inserted_events(inserted)
        known = self._state.stream_state(EVENTS_STREAM)
        last = self._new[EVENTS_STREAM]["stream_time"][-1].as_py()
        count = inserted.num_rows
        self._state.streams[EVENTS_STREAM] = StreamState(
            known.next + count, max(last, known.last or last), known.shift + count
        )
        return self._compute_effect(since, EVENTS_STREAM)

    def merge_into_stream(self, stream: str, request: str) -> StreamEffect:
        """The effect of a request that an attachment has collected."""
        rows = self.past.read_collected_rows(request)
        low = pc.min(rows["_stamp"]).as_py()
        since = self.past.slot_before(stream, low)
        self.past.select_base(since)
        known, old = self._state.stream_state(stream), self.past.stream_rows(stream)
        lost = self.past.as_stream_rows(stream, rows, self._head.next_slot)
        self._new[stream] = order_stream_rows([old, lost], self.past.at.stream_state(stream).next)
        high = pc.max(rows["_stamp"]).as_py()
        self._state.streams[stream] = StreamState(
            known.next + rows.num_rows, max(high, high if known.last is None else known.last)
        )
        self._state.requests[request] = replace(
            self._state.requests[request], merged=self._head.next_slot
        )
        return self._compute_effect(since, stream)

    def _compute_effect(self, since: int, inserted_into: str) -> StreamEffect:
        effect, again = StreamEffect(since, {}), set[str]()
        for stream in self._graph.order:
            if stream != inserted_into:
                if not again.intersection(self._graph.writers_of(stream)):
                    continue
                self._new[stream] = self._rebuild_stream(stream)
            old, new = self.past.stream_rows(stream), self._new[stream]
            first = find_first_difference(old, new)
            if first is None:
                del self._new[stream]
                continue
            if stream != EVENTS_STREAM:
                begin = self.past.at.stream_state(stream).next
                effect.changes[stream] = StreamChange(
                    begin + first, new.slice(first), old.slice(first)
                )
            for name in self._graph.readers_of(stream):
                if name in self._state.attachments:
                    again.add(name)
                    self._run_attachment(name)
        return self._complete_effect(effect, again)

    def _complete_effect(self, effect: StreamEffect, again: set[str]) -> StreamEffect:
        for name in again:
            self._update_attachment(name)
        lagging = any(self._is_lagging(name) for name in self._graph.attachments)
        state = self._state
        effect.record = {
            **DispatchState(state.streams, state.attachments, state.requests, lagging).to_record(),
            "asked": [],
        }
        effect.segments = self._segments
        effect.rejections = pa.concat_tables(self._rejections) if self._rejections else None
        return effect

    def _is_lagging(self, name: str) -> bool:
        known = self._state.attachments.get(name)
        origin = self._graph.attachments[name].origin
        return (
            known is not None
            and known.status == "attached"
            and known.cursor < self._state.stream_state(origin).next
        )

    def _current_rows(self, stream: str) -> Any:
        return self._new[stream] if stream in self._new else self.past.stream_rows(stream)

    def _run_attachment(self, name: str) -> _DispatchedRows:
        """What an attachment dispatches over its origin as it will stand."""
        if name in self._sent:
            return self._sent[name]
        one, known = self._graph.attachments[name], self._state.attachments[name]
        if known.round > 1:
            raise self._attached_twice_error(name)
        rows, due = self._current_rows(one.origin), self._compute_due_slots(name)
        rows, due = rows.filter(pa.array(due < NEVER)), due[due < NEVER]
        sent = _DispatchedRows({})
        for to, table in self._fold_rows(name, rows).items():
            arrived, collected = address_rows(
                one,
                known.dispatch_name(name),
                self._backfill_end(name),
                self._graph.columns[to],
                table,
                rows,
            )
            places = np.searchsorted(
                rows["position"].to_numpy(), np.sort(table["_position"].to_numpy())
            )
            arrived = arrived.append_column(ARRIVAL_SLOT, pa.array(due[places], pa.int64()))
            sent.to[to] = arrived.filter(pc.invert(collected))
            if one.merge == "splice":
                sent.collected = arrived.filter(collected).drop_columns([ARRIVAL_SLOT])
        self._sent[name] = sent
        return sent

    def _fold_rows(self, name: str, rows: Any) -> dict[str, Any]:
        one = self._graph.attachments[name]
        if rows.num_rows == 0:
            return {}
        plain = rows.select([*self._graph.columns[one.origin], "position", "stream_time", "_id"])
        if isinstance(one, PipeSpec):
            sent, failure = PipeFilter(name, one, self._graph.columns[one.origin]).select_rows(
                plain
            )
        else:
            batch = self._run(build_reducer(self._spec, name), plain, self._read_states(name))
            sent, failure = batch.sent, batch.failure
            states = {**self._read_states(name), **batch.states}
            self._segments[f"reducer:{name}"] = (
                (build_states_table(states), None, None, {}) if states else None
            )
        if failure is not None:
            raise PoisonError(
                f"the merge would stop {name} at {failure.row_id}: {failure.error}",
                code="splice.reducer_fails",
                pipeline=self._spec.name,
                kept="everything as it was; the request is still open",
                advice="mend the reducer, or reject the request",
            )
        return sent

    def _read_states(self, name: str) -> ReducerStates:
        return read_reducer_states(
            self._log.store, [s for s in self.past.segments if s.kind == f"reducer:{name}"]
        )

    def _backfill_end(self, name: str) -> int:
        """Where its backfill ends: rows that had come before it was attached."""
        known, origin = self._state.attachments[name], self._graph.attachments[name].origin
        if name in self.past.at.attachments:
            return self.past.at.attachments[name].head
        before = (
            pc.sum(
                pc.less(
                    self._current_rows(origin)[ARRIVAL_SLOT], parse_since_slot(known.since)
                ).cast(pa.int64())
            ).as_py()
            or 0
        )
        return self.past.at.stream_state(origin).next + int(before)

    def _compute_due_slots(self, name: str) -> Any:
        """For each row of the origin as it will stand.

        The slot in which the attachment takes it.
        """
        known, origin = self._state.attachments[name], self._graph.attachments[name].origin
        old, new = self.past.stream_rows(origin), self._current_rows(origin)
        due = _apply_caught_up_slots(
            known, old[ARRIVAL_SLOT].to_numpy().copy(), self.past.at.stream_state(origin).next
        )
        if new is not old:
            found = pc.index_in(new["_id"], value_set=old["_id"].combine_chunks())
            there = np.asarray(pc.is_valid(found))
            places = np.asarray(pc.fill_null(found, 0))
            turns = new[ARRIVAL_SLOT].to_numpy()
            due = np.where(there, due[places], turns) if len(due) else turns.copy()
        due = (
            np.maximum.accumulate(np.maximum(due, parse_since_slot(known.since)))
            if len(due)
            else due
        )
        if known.until is not None:
            due = np.where(due >= known.until, NEVER, due)
        return due

    def _update_attachment(self, name: str) -> None:
        """Where an attachment stands afterwards."""
        one, known = self._graph.attachments[name], self._state.attachments[name]
        rows, due, begin = (
            self._current_rows(one.origin),
            self._compute_due_slots(name),
            self.past.at.stream_state(one.origin).next,
        )
        cursor = begin + int((due < NEVER).sum())
        late = (
            [(a, min(b, begin), slot) for a, b, slot in known.caught_up if a < begin]
            if self.past.base
            else []
        )
        fields: dict[str, Any] = {
            "cursor": cursor,
            "head": self._backfill_end(name),
            "caught_up": (
                *late,
                *_find_caught_up_ranges(rows[ARRIVAL_SLOT].to_numpy(), due, begin),
            ),
        }
        if known.failure is not None:
            fields["failure"] = {**known.failure, "position": cursor}
        self._state.update_attachment(name, **fields)
        if one.merge == "splice":
            self._update_request(name)

    def _update_request(self, name: str) -> None:
        """The rows of its request, which may be others now."""
        known = self._state.attachments[name]
        request, kind = known.request_id(name), f"splice:{name}"
        rows = self._read_request_rows(name)
        found = self._state.requests[request]
        ends = pc.min_max(rows["_stamp"]) if rows.num_rows else None
        low, high = (ends["min"].as_py(), ends["max"].as_py()) if ends is not None else (None, None)
        self._state.requests[request] = replace(
            found, rows=rows.num_rows, min_time=low, max_time=high
        )
        self._segments[kind] = (rows, low, high, {"request": request}) if rows.num_rows else None

    def _read_request_rows(self, name: str) -> Any:
        """What an attachment has collected, up to the base and from there on."""
        found = self._state.attachments[name].request_id(name)
        destination = self._graph.attachments[name].destinations[0]
        schema = build_arrival_schema(self._graph.columns[destination])
        before = [
            s
            for s in self.past.segments
            if s.kind == f"splice:{name}" and s.extra.get("request") == found
        ]
        stored, fresh = (
            read_parquet_files(self._log.store, before),
            self._run_attachment(name).collected,
        )
        parts = [
            part.select(schema.names).cast(schema) for part in (stored, fresh) if part is not None
        ]
        return pa.concat_tables([schema.empty_table(), *parts])

    def _rebuild_stream(self, stream: str) -> Any:
        """The rows of a stream from all that arrives at it."""
        known = self.past.at.stream_state(stream)
        columns = make_stream_columns(self._graph.columns[stream])
        named = [
            name for origin in self._graph.order for name in self._graph.readers_of(origin)
        ]  # as the dispatcher asks them
        mine = [
            self._run_attachment(n)
            for n in named
            if n in self._state.attachments and n in self._graph.writers_of(stream)
        ]
        writers = [sent.to[stream] for sent in mine if stream in sent.to]
        merged = self._find_merged_rows(stream)
        last, parts = known.last, [pa.schema(columns).empty_table()]
        held = self._read_buffered_rows(stream)
        for slot in self._list_active_slots(stream, writers, merged):
            rows, held = self._compute_arrivals(stream, slot, writers, held, last)
            accepted, refused = append_rows(rows, self.past.clock_at(slot)[0], last, 0)
            self._add_new_rejections(stream, refused)
            if accepted.num_rows:
                last = accepted["stream_time"][-1].as_py()
                parts.append(
                    add_arrival_slot(accepted, slot).select(list(columns)).cast(pa.schema(columns))
                )
            for lost in merged.get(slot, ()):
                parts.append(lost)
                stamps = [last, pc.max(lost["stream_time"]).as_py()]
                last = max((stamp for stamp in stamps if stamp is not None), default=None)
        new = order_stream_rows(parts, known.next)
        self._state.streams[stream] = StreamState(known.next + new.num_rows, last)
        if self._spec.streams[stream].buffer:
            self._segments[f"buffer:{stream}"] = (held, None, None, {}) if held.num_rows else None
        return new

    def _find_merged_rows(self, stream: str) -> dict[int, list[Any]]:
        """Slot -> rows of requests that were merged into the stream since the base."""
        found: dict[int, list[Any]] = {}
        for request, collected in self._state.requests.items():
            if collected.destination == stream and (collected.merged or 0) > self.past.base:
                name = collected.attachment
                rows = (
                    self._read_request_rows(name)
                    if name in self._sent
                    else self.past.read_collected_rows(request)
                )
                if rows.num_rows:
                    found.setdefault(collected.merged or 0, []).append(
                        self.past.as_stream_rows(stream, rows, collected.merged or 0)
                    )
        return found

    def _list_active_slots(
        self, stream: str, writers: Sequence[Any], merged: Mapping[int, Any]
    ) -> list[int]:
        """Slots in which something happens at a stream; at a buffer it may be any."""
        if self._spec.streams[stream].buffer:
            return list(range(self.past.base + 1, self._head.slot + 1))
        return sorted(
            {
                *merged,
                *(
                    int(slot)
                    for table in writers
                    for slot in np.unique(table[ARRIVAL_SLOT].to_numpy())
                ),
            }
        )

    def _read_buffered_rows(self, stream: str) -> Any:
        empty = build_arrival_schema(self._graph.columns[stream]).empty_table()
        held = read_parquet_files(
            self._log.store, [s for s in self.past.segments if s.kind == f"buffer:{stream}"]
        )
        return empty if held is None else held.cast(empty.schema)

    def _compute_arrivals(
        self, stream: str, slot: int, writers: Sequence[Any], held: Any, last: int | None
    ) -> tuple[Any, Any]:
        """What is appended in a slot, and what a buffer goes on holding."""
        now, frontier = self.past.clock_at(slot)
        empty = build_arrival_schema(self._graph.columns[stream]).empty_table()
        batches = [
            empty,
            *(_slice_slot(table, slot).drop_columns([ARRIVAL_SLOT]) for table in writers),
        ]
        rows = merge_by_stamp(batches, now)
        if not self._spec.streams[stream].buffer:
            return rows, held
        behind = any(self._is_behind(name, slot) for name in self._graph.writers_of(stream))
        rows, held = release_below(held, rows, now, TICK_MIN if behind else frontier)
        if rows.num_rows and last is not None:
            stamps = pc.max_element_wise(rows["_stamp"], pa.scalar(last, pa.int64()))
            rows = rows.set_column(rows.schema.get_field_index("_stamp"), "_stamp", stamps)
        return rows, held

    def _is_behind(self, name: str, slot: int) -> bool:
        """Whether rows of its origin that had come by this slot were taken only later."""
        known = self._state.attachments.get(name)
        if (
            known is None
            or slot < parse_since_slot(known.since)
            or (known.until is not None and slot >= known.until)
        ):
            return False
        origin = self._graph.attachments[name].origin
        came, due = (
            self._current_rows(origin)[ARRIVAL_SLOT].to_numpy(),
            self._compute_due_slots(name),
        )
        late = bool(np.any((came <= slot) & (due > slot)))
        return late or any(
            self._is_behind(further, slot) for further in self._graph.writers_of(origin)
        )

    def _add_new_rejections(self, stream: str, refused: Any) -> None:
        """Rejections that are not in the log yet.

        Those that are stay: it tells what was refused when.
        """
        if refused.num_rows == 0:
            return
        found = build_rejection_rows(self._spec, stream, refused, 0, 0).drop_columns(
            ["_timeline", "_epoch"]
        )
        columns = ["destination", "via", "row_id", "row"]
        known = self._tables.read_rows(
            REJECTIONS, columns, ranges={"_epoch": (self.past.base + 1, None)}
        )
        logged = set(zip(*(known[name].to_pylist() for name in columns), strict=True))
        fresh = [
            row not in logged
            for row in zip(*(found[name].to_pylist() for name in columns), strict=True)
        ]
        if any(fresh):
            self._rejections.append(found.filter(pa.array(fresh)))

    def _attached_twice_error(self, name: str) -> ConfigurationError:
        return ConfigurationError(
            f"{name} of {self._spec.name} was detached and attached again: what it dispatched"
            " before cannot be computed again",
            code="splice.attached_twice",
            pipeline=self._spec.name,
            kept="the request; nothing was merged",
            advice=(
                "give the attachment another name in the spec, or merge into the windows only:"
                " --output WINDOW"
            ),
        )


def _slice_slot(table: Any, slot: int) -> Any:
    """Rows of one slot; slots never go back."""
    turns = table[ARRIVAL_SLOT].to_numpy()
    begin, end = np.searchsorted(turns, [slot, slot + 1])
    return table.slice(begin, end - begin)


def _apply_caught_up_slots(known: AttachmentState, due: Any, begin: int) -> Any:
    """The slots in which rows were taken that came in these; what was not taken yet never."""
    for start, end, slot in known.caught_up:
        low, high = max(start - begin, 0), max(end - begin, 0)
        due[low:high] = np.maximum(due[low:high], slot)
    due[max(known.cursor - begin, 0) :] = NEVER
    return due


def _find_caught_up_ranges(came: Any, due: Any, begin: int) -> list[tuple[int, int, int]]:
    """`AttachmentState.caught_up` from the slots in which rows came and were taken."""
    found: list[tuple[int, int, int]] = []
    late = (due > came) & (due < NEVER)
    for place in np.flatnonzero(late):
        position, slot = begin + int(place), int(due[place])
        if found and found[-1][1:] == (position, slot):
            found[-1] = (found[-1][0], position + 1, slot)
        else:
            found.append((position, position + 1, slot))
    return found
