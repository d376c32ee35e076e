"""Dispatches one epoch's released rows through pipes and reducers into streams.

1. Take the rows that this epoch released. They are in `events` already, with positions.
2. Attach, detach and resume what the spec or a user asks for.
3. Stream by stream, in the order of the graph: append what its writers sent, merged by stamp; log
   what the stream rejects.
4. Run the stream's readers over the rows they have not seen: first the backfill, up to the origin's
   end when they were attached, then new rows. A reducer that fails is paused at that row; the other
   attachments continue.
   A pipe selects rows by position range, time range, key values and an SQL predicate.
5. Write streams, rejections, reducer states, buffers and collected splices under the attempt's id.
   Sealing the epoch commits all of it at once; an epoch that is not sealed leaves only garbage.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.row_counts import name_stream_rejections
from tidegate.checkpoints.store import Store
from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import conform_to_schema, to_arrow_type, to_arrow_types
from tidegate.jobs.engine.interfaces import DispatchResult, MoveOrder, MoveResult
from tidegate.jobs.engine.manifest_writer import DISPATCHER_KINDS
from tidegate.jobs.rules.duck_frame import compute_columns
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS, PipeSpec, ReducerSpec
from tidegate.jobs.spec.table_layout import ColumnTypes
from tidegate.json_types import JsonView
from tidegate.time_units import TICK_MIN

from .errors import BAD_EXPRESSION, BAD_PREDICATE, ROWS_INCOMPLETE, RowsRetiredError
from .reducers import (
    FoldFailure,
    ReducerRunner,
    SentRows,
    add_argument_columns,
    build_reducer,
    describe_batch_failure,
    fold_batch,
)
from .stream_rows import (
    LogHistory,
    address_rows,
    append_rows,
    build_arrival_schema,
    build_rejection_rows,
    build_row_schema,
    find_root_source,
    merge_by_stamp,
    read_arrivals,
    read_parquet_files,
    release_below,
    to_event_rows,
)
from .stream_state import (
    CollectedRequest,
    DispatchFiles,
    DispatchState,
    ReducerStateStore,
    StreamState,
    add_attempt_columns,
)


def run_pipe(
    pipe: PipeSpec, columns: ColumnTypes, rows: Any
) -> tuple[SentRows, FoldFailure | None]:
    """Return destination -> selected rows, with ``_position`` and ``_nth``.

    If the predicate fails on the data, no row is selected, and the failure names the first row of
    the batch: the caller pauses the pipe there. `columns` are those of the origin.
    """
    try:
        chosen = _select_rows(pipe, columns, rows)
    except (duckdb.Error, pa.ArrowException) as error:
        return {}, describe_batch_failure(rows, error)
    sent = chosen.select(list(columns)).append_column("_position", chosen["position"])
    nth = pa.repeat(0, chosen.num_rows)  # a pipe sends each row at most once
    return {pipe.to: sent.append_column("_nth", nth)}, None


def _select_rows(pipe: PipeSpec, columns: ColumnTypes, rows: Any) -> Any:
    condition = pc.scalar(True)
    if pipe.where is not None:
        # Null counts as false.
        chosen = f"coalesce(CAST(({pipe.where}) AS BOOLEAN), false) AS chosen"
        rows = rows.filter(compute_columns(rows, chosen)["chosen"])
    for column, (low, high) in (("position", pipe.positions), ("stream_time", pipe.times)):
        if low is not None:
            condition &= pc.field(column) >= low
        if high is not None:
            condition &= pc.field(column) < high
    for column, values in pipe.keys.items():
        kind = to_arrow_type(columns[column])
        condition &= pc.field(column).isin(pa.array(values, kind))
    return rows.filter(condition)


@dataclass(slots=True)
class _DispatchEpoch:
    """The working state of one epoch.

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
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def now(self) -> int:
        """The recorded time of the epoch, in ticks."""
        return self.order.decision.wall


@dataclass
class StreamDispatcher:
    """Dispatches one epoch after another; keeps only caches between them.

    Args:
        history: gives rows of earlier epochs, for backfills and for attachments that were paused.
        run: how reducers are run; by default in this process.

    Raises:
        ConfigurationError: a reducer's function does not exist, or a pipe's predicate or an
            aggregate's expression cannot be read.
    """

    _spec: PipelineSpec
    _store: Store
    _history: LogHistory
    _run: ReducerRunner = fold_batch

    def __post_init__(self) -> None:
        self._graph = self._spec.stream_graph
        self._event_time = self._spec.event_time_column
        self._states = ReducerStateStore(self._store)
        for name, pipe in self._spec.pipes.items():
            self._require_valid_predicate(name, pipe)
        for name, reducer in self._spec.reducers.items():
            # Load every function now: a wrong path must end the start, not an epoch hours later.
            build_reducer(self._spec, name).load_fold()
            self._require_valid_aggregates(name, reducer)

    def dispatch_rows(
        self,
        order: MoveOrder,
        moved: MoveResult,
        before: JsonView,
        asked: Sequence[tuple[str, str]] = (),
    ) -> DispatchResult:
        """Dispatch what an epoch released.

        A pipe or reducer that fails, or whose rows are retired, is paused in the result; nothing is
        raised for it. Requests in `asked` that do not fit, or name nothing of the spec, are passed
        over.

        Args:
            order: the epoch's order, with all live segments.
            moved: the result of the mover.
            before: ``notes["streams"]`` of the previous epoch.
            asked: (attach | detach | resume, name), in order.

        Raises:
            TransientError: rows of a stream are missing, or the store did not answer.
        """
        segments = [ref for ref in order.segments if ref.kind.startswith(DISPATCHER_KINDS)]
        files = DispatchFiles(self._store, order.folders, segments)
        epoch = _DispatchEpoch(order, DispatchState.from_record(before), files)
        self._take_released_events(epoch, moved)
        self._apply_attachments(epoch, asked)
        for stream in self._graph.order:
            if stream != EVENTS_STREAM:
                self._append_arrivals(epoch, stream)
            for name in self._graph.readers_of(stream):
                self._run_attachment(epoch, name)
        if epoch.rejections:
            rejections = pa.concat_tables(epoch.rejections)
            attempt = order.folders.attempt
            epoch.files.write_table(REJECTIONS, add_attempt_columns(rejections, attempt), None)
        record = epoch.state.to_record(self._graph, asked)
        return DispatchResult(epoch.files.tables, tuple(epoch.files.segments), record, epoch.counts)

    # 1. released rows

    def _take_released_events(self, epoch: _DispatchEpoch, moved: MoveResult) -> None:
        columns = self._graph.columns[EVENTS_STREAM]
        state = epoch.state.stream_state(EVENTS_STREAM)
        shift = state.shift
        start = epoch.order.next_position + shift
        if state.next < start:  # the pipeline has run without streams, at first or in between
            try:
                before = self._history.read_last_time(max(state.next - shift, 0))
                times = (time for time in (state.last, before) if time is not None)
                last = max(times, default=None)
            except RowsRetiredError:
                last = state.last  # no reader can see those rows, so nothing depends on their times
            state = StreamState(start, last, shift)
        table = read_parquet_files(self._store, list(moved.files.get(EVENTS_STREAM, ())))
        epoch.before[EVENTS_STREAM] = start
        epoch.state.streams[EVENTS_STREAM] = state
        if table is not None and table.num_rows:
            rows = to_event_rows(table, columns, self._event_time, state.last, shift)
            epoch.fresh[EVENTS_STREAM] = rows
            epoch.state.streams[EVENTS_STREAM] = StreamState(
                start + rows.num_rows, rows["stream_time"][-1].as_py(), shift
            )

    # 2. attachments

    def _apply_attachments(self, epoch: _DispatchEpoch, asked: Sequence[tuple[str, str]]) -> None:
        """Attach what the spec attaches from the start, then do what users asked for."""
        state = epoch.state
        started = [
            ("attach", n)
            for n, attachment in self._graph.attachments.items()
            if attachment.attach == "at_start" and n not in state.attachments
        ]
        for verb, name in (*started, *asked):
            current = state.attachments.get(name)
            # The spec may have lost an attachment since the request was written.
            if name not in self._graph.attachments:
                continue
            if verb == "attach" and (current is None or current.status == "detached"):
                self._attach_at_head(epoch, name)
            elif verb == "detach" and current is not None:
                until = epoch.order.epoch if current.until is None else current.until
                state.update_attachment(name, status="detached", until=until)
                self._complete_request(epoch, name)
            elif verb == "resume" and current is not None and current.status == "paused":
                state.update_attachment(name, status="attached", failure=None)

    def _attach_at_head(self, epoch: _DispatchEpoch, name: str) -> None:
        attachment = self._graph.attachments[name]
        epoch.files.drop_segments(f"reducer:{name}")  # a second round starts from the initial state
        origin = attachment.origin
        # Rows of this epoch are not backfill: they came in the same epoch as the attachment.
        head = epoch.before.get(origin, epoch.state.stream_state(origin).next)
        epoch.state.attach(name, head, f"{epoch.order.timeline}-{epoch.order.epoch:06d}")
        if attachment.merge == "splice":
            request = epoch.state.attachments[name].request_id(name)
            epoch.state.requests[request] = CollectedRequest(name, attachment.destinations[0])
            self._complete_request(epoch, name)

    def _complete_request(self, epoch: _DispatchEpoch, name: str) -> None:
        """Close the splice request of an attachment whose backfill is over or that was detached."""
        attachment = epoch.state.attachments[name]
        request = epoch.state.requests.get(attachment.request_id(name))
        complete = attachment.cursor >= attachment.head or attachment.status == "detached"
        if request is not None and request.open and complete:
            epoch.state.requests[attachment.request_id(name)] = replace(request, open=False)

    # 3. appending

    def _append_arrivals(self, epoch: _DispatchEpoch, stream: str) -> None:
        state = epoch.state.streams.setdefault(stream, StreamState())
        epoch.before[stream] = state.next
        columns = self._graph.columns[stream]
        empty = build_arrival_schema(columns).empty_table()
        arrived = merge_by_stamp([empty, *epoch.sent.pop(stream, [])], epoch.now)
        # Also without arrivals: the frontier may have passed rows that wait in the buffer.
        if self._spec.streams[stream].buffer:
            arrived = self._pass_through_buffer(epoch, stream, arrived, state.last)
        if arrived.num_rows == 0:
            return
        rows, rejected = append_rows(arrived, epoch.now, state.last, state.next)
        if rejected.num_rows:
            epoch.rejections.append(build_rejection_rows(self._spec, stream, rejected))
            sources = Counter(map(find_root_source, rejected["_origin_id"].to_pylist()))
            for source, count in sources.items():
                epoch.counts.setdefault(source, {})[name_stream_rejections(stream)] = count
        if rows.num_rows:
            last = rows["stream_time"][-1].as_py()
            epoch.state.streams[stream] = StreamState(state.next + rows.num_rows, last)
            epoch.fresh[stream] = rows.select([*columns, "position", "stream_time", "_id"])
            table = add_attempt_columns(rows, epoch.order.folders.attempt)
            table = conform_to_schema(table, build_table_schema(self._spec, stream))
            epoch.files.write_table(stream, table, "stream_time")

    def _pass_through_buffer(
        self, epoch: _DispatchEpoch, stream: str, arrived: Any, last: int | None
    ) -> Any:
        """Put arrivals through the stream's ordering buffer; return the rows that leave it now.

        The buffer holds rows as long as a writer may still send older ones.
        """
        behind = any(self._is_writer_behind(epoch, name) for name in self._graph.writers_of(stream))
        # A writer that is behind may send any stamp, so nothing leaves.
        mark = TICK_MIN if behind else epoch.order.decision.frontier_after
        kind = f"buffer:{stream}"
        held = read_arrivals(
            self._store, epoch.files.live_segments(kind), self._graph.columns[stream]
        )
        leaving, waiting = release_below(held, arrived, epoch.now, mark, last)
        if arrived.num_rows or leaving.num_rows:
            epoch.files.drop_segments(kind)
            if waiting.num_rows:
                epoch.files.write_segment(kind, waiting)
        return leaving

    def _is_writer_behind(self, epoch: _DispatchEpoch, name: str) -> bool:
        attachment = epoch.state.attachments.get(name)
        if attachment is None or attachment.status == "detached":
            return False
        origin = self._graph.attachments[name].origin
        end = epoch.state.stream_state(origin).next
        late = attachment.status == "paused" or attachment.cursor < end
        return late or any(
            self._is_writer_behind(epoch, further) for further in self._graph.writers_of(origin)
        )

    # 4. reading

    def _run_attachment(self, epoch: _DispatchEpoch, name: str) -> None:
        state, attachment = epoch.state.attachments.get(name), self._graph.attachments[name]
        if state is None or state.status != "attached":
            return
        origin = attachment.origin
        end = min(epoch.state.stream_state(origin).next, state.cursor + attachment.rows_per_epoch)
        if state.cursor >= end:
            return
        try:
            rows = self._read_origin_rows(epoch, origin, state.cursor, end)
        except RowsRetiredError as error:
            # The rest of the pipeline needs no such row, so it goes on.
            text = f"{error.message}; next: {error.advice}"
            epoch.state.pause(name, FoldFailure(state.cursor, "not read", text))
            return
        if isinstance(attachment, PipeSpec):
            sent, failure = run_pipe(attachment, self._graph.columns[origin], rows)
        else:
            states = self._states.load(epoch.files, name)
            batch = self._run(build_reducer(self._spec, name), rows, states)
            self._states.save(epoch.files, name, states, batch.states)
            sent, failure = batch.sent, batch.failure
        for to, table in sent.items():
            if table.num_rows:
                columns = self._graph.columns[to]
                via = state.dispatch_name(name)
                arrivals, collected = address_rows(
                    attachment, via, state.head, columns, table, rows
                )
                self._add_to_request(epoch, name, arrivals.filter(collected))
                epoch.sent.setdefault(to, []).append(arrivals.filter(pc.invert(collected)))
        cursor = end if failure is None else failure.position
        # A replay needs to know which rows were not taken in the epoch they came in.
        late = (state.cursor, min(cursor, epoch.before.get(origin, 0)), epoch.order.epoch)
        caught_up = (*state.caught_up, late) if late[0] < late[1] else state.caught_up
        epoch.state.update_attachment(name, cursor=cursor, caught_up=caught_up)
        if failure is not None:
            epoch.state.pause(name, failure)
        self._complete_request(epoch, name)

    def _read_origin_rows(self, epoch: _DispatchEpoch, stream: str, start: int, end: int) -> Any:
        """Return rows of a stream from earlier epochs and from this one."""
        first, parts = epoch.before.get(stream, 0), []
        if start < first:
            parts.append(
                self._history.read_rows(stream, self._graph.columns[stream], start, min(end, first))
            )
        if end > first:
            parts.append(epoch.fresh[stream].slice(max(start - first, 0), end - max(start, first)))
        rows = pa.concat_tables(parts)
        # Positions have no gaps, so a difference means lost rows, and folding on would be wrong for
        # ever.
        if rows.num_rows != end - start:
            raise ROWS_INCOMPLETE(
                name=self._spec.name, stream=stream, start=start, end=end, rows=rows.num_rows
            )
        return rows

    def _require_valid_predicate(self, name: str, pipe: PipeSpec) -> None:
        """Raise if the predicate cannot be read: that must end the start, not an epoch."""
        columns = self._graph.columns[pipe.origin]
        try:
            _select_rows(pipe, columns, build_row_schema(columns).empty_table())
        except (duckdb.Error, pa.ArrowException) as error:
            raise BAD_PREDICATE(
                pipe=name, cause=get_first_line(error), columns=", ".join(columns)
            ) from error

    def _require_valid_aggregates(self, name: str, reducer: ReducerSpec) -> None:
        """Raise if an expression of the reducer's aggregates cannot be read."""
        if not reducer.aggregates:
            return
        columns = self._graph.columns[reducer.origin]
        empty = pa.schema(to_arrow_types(columns)).empty_table()
        try:
            add_argument_columns(empty, build_reducer(self._spec, name).aggregates)
        except duckdb.Error as error:
            raise BAD_EXPRESSION(
                reducer=name, cause=get_first_line(error), columns=", ".join(columns)
            ) from error

    def _add_to_request(self, epoch: _DispatchEpoch, name: str, rows: Any) -> None:
        if rows.num_rows == 0:
            return
        request_id = epoch.state.attachments[name].request_id(name)
        request = epoch.state.requests[request_id]
        low, high = rows["_stamp"][0].as_py(), rows["_stamp"][-1].as_py()
        epoch.state.requests[request_id] = replace(
            request,
            rows=request.rows + rows.num_rows,
            min_time=low if request.min_time is None else min(low, request.min_time),
            max_time=high if request.max_time is None else max(high, request.max_time),
        )
        epoch.files.write_segment(f"splice:{name}", rows, low, high, {"request": request_id})
