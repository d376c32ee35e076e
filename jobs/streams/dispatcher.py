"""One epoch of dispatching, on Arrow columns.

What the pipeline released goes through pipes and reducers into streams.

1. Take the rows that this epoch released: they are appended to `events` already, with positions.
2. Attach, detach and resume what the spec or a person asks for.
3. Stream by stream, in the order of the graph: append what its writers sent, merged by stamp; log
  what it rejects.
4. Run the stream's readers over the rows they have not seen: backfill up to where the origin stood
  when they were attached, then head. A reducer that fails is paused at that row; nobody else
  notices.
5. Write streams, rejections, reducer states, buffers and collected splices under the attempt's own
  id. Sealing the epoch commits all of it at once, and an epoch that is not sealed leaves garbage
  only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.engine.interfaces import DispatchResult, MoveOrder, MoveResult
from tidegate.jobs.engine.resume_state import DISPATCHER_KINDS
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS, PipeSpec, ReducerSpec
from tidegate.jobs.streams.dispatch_files import DispatchFiles, ReducerStateStore
from tidegate.jobs.streams.dispatched_rows import (
    address_rows,
    build_arrival_schema,
    build_rejection_rows,
)
from tidegate.jobs.streams.pipe_filter import PipeFilter
from tidegate.jobs.streams.reducers import (
    FoldedBatch,
    FoldFailure,
    ReducerRunner,
    add_argument_columns,
    build_reducer,
    fold_batch,
)
from tidegate.jobs.streams.row_history import RowHistory, read_parquet_files, to_event_rows
from tidegate.jobs.streams.stream_append import append_rows, merge_by_stamp, release_below
from tidegate.jobs.streams.stream_state import (
    AttachmentState,
    CollectedRequest,
    DispatchState,
    StreamState,
)


@dataclass(slots=True)
class _DispatchEpoch:
    """What one epoch knows and gathers.

    Attributes:
        fresh: stream -> rows appended in this epoch.
        before: stream -> position of its first such row.
        sent: destination -> one table per writer.
    """

    order: MoveOrder
    state: DispatchState
    files: DispatchFiles
    fresh: dict[str, Any] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    sent: dict[str, list[Any]] = field(default_factory=dict)
    rejections: list[Any] = field(default_factory=list)

    @property
    def now(self) -> int:
        return self.order.decision.now


class StreamDispatcher:
    """Dispatches one epoch after the other. Keeps nothing between them but caches.

    Args:
        history: gives rows of earlier epochs, for backfills and for attachments that were paused.
        run: how reducers are run; default: in this process.

    Raises:
        ConfigurationError: a reducer's function or a pipe's predicate does not exist or cannot be
            read.
    """

    def __init__(
        self, spec: PipelineSpec, store: Store, history: RowHistory, run: ReducerRunner = fold_batch
    ) -> None:
        self._spec, self._graph, self._store, self._history, self._run = (
            spec,
            spec.stream_graph,
            store,
            history,
            run,
        )
        self._event_time = next(iter(spec.sources.values())).event_time
        self._states = ReducerStateStore(store)
        columns = self._graph.columns
        self._selections = {
            name: PipeFilter(name, pipe, columns[pipe.origin]) for name, pipe in spec.pipes.items()
        }
        for name, reducer in spec.reducers.items():
            build_reducer(self._spec, name).load_fold()
            self._require_valid_sql(name, reducer)

    def dispatch_rows(
        self,
        order: MoveOrder,
        moved: MoveResult,
        before: Mapping[str, Any],
        asked: Sequence[tuple[str, str]] = (),
    ) -> DispatchResult:
        """Dispatch what an epoch released.

        Args:
            order: the epoch's order, with all live segments.
            moved: what the mover did.
            before: ``notes["streams"]`` of the epoch before.
            asked: (attach | detach | resume, name), in order.
        """
        mine = [ref for ref in order.segments if ref.kind.startswith(DISPATCHER_KINDS)]
        epoch = _DispatchEpoch(
            order, DispatchState.from_record(before), DispatchFiles(self._store, order, mine)
        )
        self._take_released_events(epoch, moved)
        self._apply_attachments(epoch, asked)
        for stream in self._graph.order:
            if stream != EVENTS_STREAM:
                self._append_arrivals(epoch, stream)
            for name in self._graph.readers_of(stream):
                self._run_attachment(epoch, name)
        if epoch.rejections:
            epoch.files.write_table(REJECTIONS, pa.concat_tables(epoch.rejections), None)
        lagging = any(self._is_lagging(epoch.state, name) for name in self._graph.attachments)
        record = {
            **DispatchState(
                epoch.state.streams, epoch.state.attachments, epoch.state.requests, lagging
            ).to_record()
        }
        return DispatchResult(
            epoch.files.tables,
            tuple(epoch.files.segments),
            {**record, "asked": [list(one) for one in asked]},
        )

    # 1. what was released

    def _take_released_events(self, epoch: _DispatchEpoch, moved: MoveResult) -> None:
        columns, known = self._graph.columns[EVENTS_STREAM], epoch.state.stream_state(EVENTS_STREAM)
        shift = known.shift
        start = epoch.order.next_position + shift
        if known.next < start:  # the pipeline has run without streams, at first or in between
            old = self._history.read_rows(EVENTS_STREAM, columns, known.next, start)
            known = StreamState(start, old["stream_time"][-1].as_py(), shift)
        table = read_parquet_files(self._store, list(moved.files.get(EVENTS_STREAM, ())))
        epoch.before[EVENTS_STREAM] = start
        epoch.state.streams[EVENTS_STREAM] = known
        if table is not None and table.num_rows:
            rows = to_event_rows(table, columns, self._event_time, known.last, shift)
            epoch.fresh[EVENTS_STREAM] = rows
            epoch.state.streams[EVENTS_STREAM] = StreamState(
                start + rows.num_rows, rows["stream_time"][-1].as_py(), shift
            )

    # 2. who is attached

    def _apply_attachments(self, epoch: _DispatchEpoch, asked: Sequence[tuple[str, str]]) -> None:
        """Attach what the spec wants from the start, then do what people asked for."""
        state = epoch.state
        started = [
            ("attach", n)
            for n, one in self._graph.attachments.items()
            if one.attach == "at_start" and n not in state.attachments
        ]
        for verb, name in (*started, *asked):
            known = state.attachments.get(name)
            if name not in self._graph.attachments:
                continue
            if verb == "attach" and (known is None or known.status == "detached"):
                self._attach_at_head(epoch, name)
            elif verb == "detach" and known is not None:
                state.update_attachment(
                    name,
                    status="detached",
                    until=epoch.order.epoch if known.until is None else known.until,
                )
                self._complete_request(epoch, name)
            elif verb == "resume" and known is not None and known.status == "paused":
                state.update_attachment(name, status="attached", failure=None)

    def _attach_at_head(self, epoch: _DispatchEpoch, name: str) -> None:
        one = self._graph.attachments[name]
        epoch.files.drop_segments(f"reducer:{name}")
        there = epoch.before.get(one.origin, epoch.state.stream_state(one.origin).next)
        epoch.state.attach(name, there, f"{epoch.order.timeline}-{epoch.order.epoch:06d}")
        if one.merge == "splice":
            request = epoch.state.attachments[name].request_id(name)
            epoch.state.requests[request] = CollectedRequest(name, one.destinations[0])
            self._complete_request(epoch, name)

    def _complete_request(self, epoch: _DispatchEpoch, name: str) -> None:
        """A request is complete when the backfill is over, or its attachment is gone."""
        known = epoch.state.attachments[name]
        found = epoch.state.requests.get(known.request_id(name))
        if (
            found is not None
            and found.open
            and (known.cursor >= known.head or known.status == "detached")
        ):
            epoch.state.requests[known.request_id(name)] = replace(found, open=False)

    def _is_lagging(self, state: DispatchState, name: str) -> bool:
        known = state.attachments.get(name)
        origin = self._graph.attachments[name].origin
        return (
            known is not None
            and known.status == "attached"
            and known.cursor < state.stream_state(origin).next
        )

    # 3. appending

    def _append_arrivals(self, epoch: _DispatchEpoch, stream: str) -> None:
        known = epoch.state.stream_state(stream)
        epoch.before[stream] = known.next
        writers = epoch.sent.pop(stream, [])
        arrived = (
            merge_by_stamp(writers, epoch.now)
            if writers
            else _make_empty_arrivals(self._graph.columns[stream])
        )
        if self._spec.streams[stream].buffer:
            arrived = self._pass_through_buffer(epoch, stream, arrived, known.last)
        if arrived.num_rows == 0:
            epoch.state.streams[stream] = known
            return
        rows, refused = append_rows(arrived, epoch.now, known.last, known.next)
        if refused.num_rows:
            epoch.rejections.append(
                build_rejection_rows(
                    self._spec, stream, refused, epoch.order.timeline, epoch.order.epoch
                )
            )
        if rows.num_rows:
            last = rows["stream_time"][-1].as_py()
            epoch.state.streams[stream] = StreamState(known.next + rows.num_rows, last)
            epoch.fresh[stream] = rows.select(
                [*self._graph.columns[stream], "position", "stream_time", "_id"]
            )
            epoch.files.write_table(
                stream,
                _to_stream_table(rows, epoch.order, build_table_schema(self._spec, stream)),
                "stream_time",
            )

    def _pass_through_buffer(
        self, epoch: _DispatchEpoch, stream: str, arrived: Any, last: int | None
    ) -> Any:
        """The ordered stage: what leaves it now.

        It holds while a writer may still send rows from further back.
        """
        behind = any(self._is_writer_behind(epoch, name) for name in self._graph.writers_of(stream))
        mark = -(2**63) if behind else epoch.order.decision.frontier_after
        kind = f"buffer:{stream}"
        before = epoch.files.live_segments(kind)
        held = read_parquet_files(self._store, before)
        empty = _make_empty_arrivals(self._graph.columns[stream])
        leaving, waiting = release_below(
            empty if held is None else held.cast(empty.schema), arrived, epoch.now, mark
        )
        if arrived.num_rows or leaving.num_rows:
            epoch.files.drop_segments(kind)
            if waiting.num_rows:
                epoch.files.write_segment(kind, waiting)
        if leaving.num_rows and last is not None:
            stamps = pc.max_element_wise(leaving["_stamp"], pa.scalar(last, pa.int64()))
            leaving = leaving.set_column(leaving.schema.get_field_index("_stamp"), "_stamp", stamps)
        return leaving

    def _is_writer_behind(self, epoch: _DispatchEpoch, name: str) -> bool:
        known = epoch.state.attachments.get(name)
        if known is None or known.status == "detached":
            return False
        origin = self._graph.attachments[name].origin
        late = known.status == "paused" or known.cursor < epoch.state.stream_state(origin).next
        return late or any(
            self._is_writer_behind(epoch, further) for further in self._graph.writers_of(origin)
        )

    # 4. reading

    def _run_attachment(self, epoch: _DispatchEpoch, name: str) -> None:
        known, one = epoch.state.attachments.get(name), self._graph.attachments[name]
        if known is None or known.status != "attached":
            return
        end = min(epoch.state.stream_state(one.origin).next, known.cursor + one.rows_per_epoch)
        if known.cursor >= end:
            return
        rows = self._read_origin_rows(epoch, one.origin, known.cursor, end)
        sent, failure = self._run_pipe_or_reducer(epoch, name, one, rows)
        for to, table in sent.items():
            self._send_rows(epoch, name, one, known, to, table, rows)
        cursor = end if failure is None else failure.position
        late = (known.cursor, min(cursor, epoch.before.get(one.origin, 0)), epoch.order.epoch)
        caught_up = (*known.caught_up, late) if late[0] < late[1] else known.caught_up
        epoch.state.update_attachment(name, cursor=cursor, caught_up=caught_up)
        if failure is not None:
            what = {"position": failure.position, "id": failure.row_id, "error": failure.error}
            epoch.state.update_attachment(name, status="paused", failure=what)
        self._complete_request(epoch, name)

    def _read_origin_rows(self, epoch: _DispatchEpoch, stream: str, start: int, end: int) -> Any:
        """Rows of a stream, of earlier epochs and of this one."""
        first, parts = epoch.before.get(stream, 0), []
        if start < first:
            parts.append(
                self._history.read_rows(stream, self._graph.columns[stream], start, min(end, first))
            )
        if end > first:
            parts.append(epoch.fresh[stream].slice(max(start - first, 0), end - max(start, first)))
        rows = pa.concat_tables(parts)
        if rows.num_rows != end - start:
            raise TransientError(
                f"{self._spec.name}: {stream} should hold rows {start} to {end}, and"
                f" {rows.num_rows} of them were found",
                code="streams.incomplete",
                kept="everything sealed so far",
                advice=(
                    "the epoch is planned again by itself; if this stays, look at the tables:"
                    " tidegate checkpoints verify"
                ),
            )
        return rows

    def _run_pipe_or_reducer(
        self, epoch: _DispatchEpoch, name: str, one: PipeSpec | ReducerSpec, rows: Any
    ) -> tuple[dict[str, Any], FoldFailure | None]:
        """Destination -> rows to dispatch, with the ``_position`` of the row they were made of and their ``_nth``."""
        if isinstance(one, PipeSpec):
            return self._selections[name].select_rows(rows)
        segments = epoch.files.live_segments(f"reducer:{name}")
        states = self._states.load(name, segments)
        batch: FoldedBatch = self._run(build_reducer(self._spec, name), rows, states)
        self._states.save(epoch.files, name, segments, states, batch.states)
        return batch.sent, batch.failure

    def _require_valid_sql(self, name: str, one: ReducerSpec) -> None:
        """The expressions of its aggregates can be read."""
        if not one.aggregates:
            return
        fields = {
            column: to_arrow_type(kind) for column, kind in self._graph.columns[one.origin].items()
        }
        try:
            add_argument_columns(
                pa.schema(fields).empty_table(), build_reducer(self._spec, name).aggregates
            )
        except duckdb.Error as error:
            raise ConfigurationError(
                f"reducers.{name}.aggregates: {str(error).strip().splitlines()[0]}",
                code="reducer.bad_expression",
                kept="nothing was started or changed",
                advice=f"expressions are SQL over {', '.join(fields)}",
            ) from error

    def _send_rows(
        self,
        epoch: _DispatchEpoch,
        name: str,
        one: PipeSpec | ReducerSpec,
        known: AttachmentState,
        to: str,
        table: Any,
        rows: Any,
    ) -> None:
        """Give dispatched rows their identity and stamp, and put them on their way.

        To the destination, or into the request.
        """
        if table.num_rows == 0:
            return
        sent, collected = address_rows(
            one, known.dispatch_name(name), known.head, self._graph.columns[to], table, rows
        )
        self._add_to_request(epoch, name, known, sent.filter(collected))
        sent = sent.filter(pc.invert(collected))
        epoch.sent.setdefault(to, []).append(sent)

    def _add_to_request(
        self, epoch: _DispatchEpoch, name: str, known: AttachmentState, rows: Any
    ) -> None:
        if rows.num_rows == 0:
            return
        found = epoch.state.requests[known.request_id(name)]
        low, high = rows["_stamp"][0].as_py(), rows["_stamp"][-1].as_py()
        epoch.state.requests[known.request_id(name)] = replace(
            found,
            rows=found.rows + rows.num_rows,
            min_time=low if found.min_time is None else min(low, found.min_time),
            max_time=high if found.max_time is None else max(high, found.max_time),
        )
        epoch.files.write_segment(
            f"splice:{name}", rows, low, high, {"request": known.request_id(name)}
        )


def _make_empty_arrivals(columns: Mapping[str, str]) -> Any:
    """No arrivals for a stream with these columns."""
    return build_arrival_schema(columns).empty_table()


def _to_stream_table(rows: Any, order: MoveOrder, schema: Any) -> Any:
    """Rows as they stand in the stream's table."""
    count = rows.num_rows
    rows = rows.append_column("_timeline", pa.array([order.timeline] * count, pa.int32()))
    rows = rows.append_column("_epoch", pa.array([order.epoch] * count, pa.int64()))
    return rows.select(schema.names).cast(schema)
