"""Moves the rows of one epoch through pipes and reducers into streams.

1. Take the rows that this epoch released. They are in `events` already, with positions.
2. Stream by stream, in the order of the graph: append what its writers sent, merged by stamp; log
   what the stream rejects.
3. Run the stream's readers over the rows they have not seen: first the backfill, up to the origin's
   end when they were attached, then new rows. A reducer that fails is paused at that row; the other
   attachments continue.
   A pipe selects rows by position range, time range, key values and an SQL predicate.
4. Write streams, rejections, reducer states, buffers and collected splices under the attempt's id.

It needs nothing but its work, the store and rows of earlier epochs, so it runs in any process.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.row_counts import name_stream_rejections
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import conform_to_schema, read_parquet_object, to_arrow_type
from tidegate.jobs.engine.file_footers import FileFooter
from tidegate.jobs.engine.interfaces import TableFiles
from tidegate.jobs.rules.duck_frame import compute_columns
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, REJECTIONS, PipeSpec, StreamGraph
from tidegate.jobs.spec.table_layout import ColumnTypes
from tidegate.time_units import TICK_MIN

from .errors import ROWS_INCOMPLETE, RowsRetiredError
from .reducers import (
    FoldedBatch,
    FoldFailure,
    Reducer,
    ReducerStates,
    SentRows,
    build_reducer,
    describe_batch_failure,
    fold_batch,
)
from .row_history import RowHistory
from .stream_rows import (
    address_rows,
    append_rows,
    build_arrival_schema,
    build_rejection_rows,
    find_root_source,
    merge_by_stamp,
    read_arrivals,
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

NamedReducerRunner = Callable[[str, Reducer, Any, ReducerStates], FoldedBatch]
"""Runs the reducer of this name over rows, and from these states.

The rows have the columns of the stream, ``position``, ``stream_time`` (int64 ticks) and ``_id``.
They are sorted by position.
"""


@dataclass(frozen=True)
class DispatchWork:
    """The rows of an epoch to dispatch.

    Attributes:
        spec: the pipeline; settings of its topics may be left out.
        folders: where the attempt's files go.
        now: the recorded time of the epoch, in ticks.
        frontier: after the epoch.
        state: of streams and attachments; people's requests are applied already.
        segments: live ones of reducers, buffers and collected splices.
        released: files of the events that the epoch released.
        start: position of the first of these events.
    """

    spec: PipelineSpec
    folders: AttemptFolders
    now: int
    frontier: int
    state: DispatchState
    segments: tuple[FileRef, ...]
    released: tuple[FileRef, ...]
    start: int


@dataclass(frozen=True)
class DispatchedRows:
    """What became of the rows of an epoch.

    Attributes:
        files: stream -> files.
        segments: the live ones after the epoch.
        state: of streams and attachments after it.
        footers: key of a file of a stream -> its footer.
        counts: source -> name of a count -> rows that streams rejected.
    """

    files: TableFiles
    segments: tuple[FileRef, ...]
    state: DispatchState
    footers: dict[str, FileFooter]
    counts: dict[str, dict[str, int]]


def run_pipe(
    pipe: PipeSpec, columns: ColumnTypes, rows: Any
) -> tuple[SentRows, FoldFailure | None]:
    """Return destination -> selected rows, with ``_position`` and ``_nth``.

    If the predicate fails on the data, no row is selected, and the failure names the first row of
    the batch: the caller pauses the pipe there. `columns` are those of the origin.
    """
    try:
        chosen = select_piped_rows(pipe, columns, rows)
    except (duckdb.Error, pa.ArrowException) as error:
        return {}, describe_batch_failure(rows, error)
    sent = chosen.select(list(columns)).append_column("_position", chosen["position"])
    nth = pa.repeat(0, chosen.num_rows)  # a pipe sends each row at most once
    return {pipe.to: sent.append_column("_nth", nth)}, None


def select_piped_rows(pipe: PipeSpec, columns: ColumnTypes, rows: Any) -> Any:
    """Return the rows that all conditions of a pipe select.

    Raises:
        duckdb.Error: the predicate cannot be read, or fails over the rows; or an ArrowException.
    """
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


def list_earlier_rows(work: DispatchWork) -> list[tuple[str, int, int]]:
    """Return the rows of earlier epochs that dispatching asks for: stream, first position, end."""
    asked = []
    for name, attachment in work.spec.stream_graph.attachments.items():
        state, origin = work.state.attachments.get(name), attachment.origin
        if state is None or state.status != "attached":
            continue
        is_event = origin == EVENTS_STREAM
        first = work.start if is_event else work.state.stream_state(origin).next
        end = min(first, state.cursor + attachment.rows_per_epoch)
        if state.cursor < end:
            asked.append((origin, state.cursor, end))
    return asked


def find_unknown_start(work: DispatchWork) -> int | None:
    """Return the position of the first event that the state of the streams does not know.

    The pipeline has run without streams, at first or in between. None if it has not.
    """
    state = work.state.stream_state(EVENTS_STREAM)
    return max(state.next - state.shift, 0) if state.next < work.start else None


def fold_here(_name: str, reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """Run a reducer in this process."""
    return fold_batch(reducer, rows, states)


@dataclass
class RowDispatch:
    """Dispatches one epoch; it is used once.

    Args:
        work: what to dispatch. It is not changed.
        store: where the files are.
        history: gives rows of earlier epochs.
        states: reads reducer states; it may serve one epoch after the other.
        run: runs reducers.
        suffix: ends the names of all files. A task that runs twice needs another one each time.
    """

    work: DispatchWork
    store: Store
    history: RowHistory
    states: ReducerStateStore
    run: NamedReducerRunner = fold_here
    suffix: str = ""
    # Of streams: the rows that this epoch appends, and the position of the first of them.
    _fresh: dict[str, Any] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    # Destination -> one table per writer.
    _sent: dict[str, list[Any]] = field(default_factory=dict)
    _rejections: list[Any] = field(default_factory=list)
    _counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spec = self.work.spec
        self._graph: StreamGraph = self._spec.stream_graph
        self._state = self.work.state.copy()
        segments = list(self.work.segments)
        self._files = DispatchFiles(self.store, self.work.folders, segments, self.suffix)

    def dispatch_rows(self) -> DispatchedRows:
        """Move the rows, and write the files. They are durable when this returns.

        A pipe or reducer that fails, or whose rows are retired, is paused in the result; nothing is
        raised for it.

        Raises:
            TransientError: rows of a stream are missing, or the store did not answer.
        """
        self._take_released_events()
        for stream in self._graph.order:
            if stream != EVENTS_STREAM:
                self._append_arrivals(stream)
            for name in self._graph.readers_of(stream):
                self._run_attachment(name)
        if self._rejections:
            rejections = pa.concat_tables(self._rejections)
            attempt = self.work.folders.attempt
            self._files.write_table(REJECTIONS, add_attempt_columns(rejections, attempt), None)
        self._files.flush()
        files = self._files
        return DispatchedRows(
            files.tables, tuple(files.segments), self._state, files.footers, self._counts
        )

    # 1. released rows

    def _take_released_events(self) -> None:
        columns = self._graph.columns[EVENTS_STREAM]
        state = self._state.stream_state(EVENTS_STREAM)
        start, shift = self.work.start, state.shift
        unknown = find_unknown_start(self.work)
        if unknown is not None:
            try:
                before = self.history.read_last_time(unknown)
                times = (time for time in (state.last, before) if time is not None)
                last = max(times, default=None)
            except RowsRetiredError:
                last = state.last  # no reader can see those rows, so nothing depends on their times
            state = StreamState(start, last, shift)
        released = self.work.released
        known = (state.last, *(file.max_time for file in released))
        last = max((time for time in known if time is not None), default=None)
        end = start + sum(file.rows for file in released)
        self._before[EVENTS_STREAM] = start
        self._state.streams[EVENTS_STREAM] = StreamState(end, last, shift)
        taken = min(end, self._find_taken_end())
        if start < taken:
            table = pa.concat_tables(
                [self._read_file_below(file, taken - shift) for file in released],
                promote_options="default",
            )
            event_time = self._spec.event_time_column
            rows = to_event_rows(table, columns, event_time, state.last, shift)
            self._fresh[EVENTS_STREAM] = rows

    def _find_taken_end(self) -> int:
        """Return the position from which on no attachment takes events in this epoch."""
        ends = [0]
        for name in self._graph.readers_of(EVENTS_STREAM):
            state = self._state.attachments.get(name)
            if state is not None and state.status == "attached":
                ends.append(state.cursor + self._graph.attachments[name].rows_per_epoch)
        return max(ends)

    def _read_file_below(self, file: FileRef, end: int) -> Any:
        """Return the rows of a file below a position, the only ones that stay in memory."""
        table = read_parquet_object(self.store, file.key, file.sha256)
        return table.filter(pc.less(table["position"], end))

    # 2. appending

    def _append_arrivals(self, stream: str) -> None:
        state, now = self._state.streams.setdefault(stream, StreamState()), self.work.now
        self._before[stream] = state.next
        columns = self._graph.columns[stream]
        empty = build_arrival_schema(columns).empty_table()
        arrived = merge_by_stamp([empty, *self._sent.pop(stream, [])], now)
        # Also without arrivals: the frontier may have passed rows that wait in the buffer.
        if self._spec.streams[stream].buffer:
            arrived = self._pass_through_buffer(stream, arrived, state.last)
        if arrived.num_rows == 0:
            return
        rows, rejected = append_rows(arrived, now, state.last, state.next)
        if rejected.num_rows:
            self._rejections.append(build_rejection_rows(self._spec, stream, rejected))
            sources = Counter(map(find_root_source, rejected["_origin_id"].to_pylist()))
            for source, count in sources.items():
                self._counts.setdefault(source, {})[name_stream_rejections(stream)] = count
        if rows.num_rows:
            last = rows["stream_time"][-1].as_py()
            self._state.streams[stream] = StreamState(state.next + rows.num_rows, last)
            self._fresh[stream] = rows.select([*columns, "position", "stream_time", "_id"])
            table = add_attempt_columns(rows, self.work.folders.attempt)
            table = conform_to_schema(table, build_table_schema(self._spec, stream))
            self._files.write_table(stream, table, "stream_time")

    def _pass_through_buffer(self, stream: str, arrived: Any, last: int | None) -> Any:
        """Put arrivals through the stream's ordering buffer; return the rows that leave it now.

        The buffer holds rows as long as a writer may still send older ones.
        """
        behind = any(self._is_writer_behind(name) for name in self._graph.writers_of(stream))
        # A writer that is behind may send any stamp, so nothing leaves.
        mark = TICK_MIN if behind else self.work.frontier
        kind = f"buffer:{stream}"
        held = read_arrivals(
            self.store, self._files.live_segments(kind), self._graph.columns[stream]
        )
        leaving, waiting = release_below(held, arrived, self.work.now, mark, last)
        if arrived.num_rows or leaving.num_rows:
            self._files.drop_segments(kind)
            if waiting.num_rows:
                self._files.write_segment(kind, waiting)
        return leaving

    def _is_writer_behind(self, name: str) -> bool:
        attachment = self._state.attachments.get(name)
        if attachment is None or attachment.status == "detached":
            return False
        origin = self._graph.attachments[name].origin
        end = self._state.stream_state(origin).next
        late = attachment.status == "paused" or attachment.cursor < end
        return late or any(
            self._is_writer_behind(further) for further in self._graph.writers_of(origin)
        )

    # 3. reading

    def _run_attachment(self, name: str) -> None:
        state, attachment = self._state.attachments.get(name), self._graph.attachments[name]
        if state is None or state.status != "attached":
            return
        origin = attachment.origin
        end = min(self._state.stream_state(origin).next, state.cursor + attachment.rows_per_epoch)
        if state.cursor >= end:
            return
        try:
            rows = self._read_origin_rows(origin, state.cursor, end)
        except RowsRetiredError as error:
            # The rest of the pipeline needs no such row, so it goes on.
            text = f"{error.message}; next: {error.advice}"
            self._state.pause(name, FoldFailure(state.cursor, "not read", text))
            return
        if isinstance(attachment, PipeSpec):
            sent, failure = run_pipe(attachment, self._graph.columns[origin], rows)
        else:
            states = self.states.load(self._files, name)
            batch = self.run(name, build_reducer(self._spec, name), rows, states)
            self.states.save(self._files, name, states, batch.states)
            sent, failure = batch.sent, batch.failure
        for to, table in sent.items():
            if table.num_rows:
                columns = self._graph.columns[to]
                via = state.dispatch_name(name)
                arrivals, collected = address_rows(
                    attachment, via, state.head, columns, table, rows
                )
                destination = attachment.destinations[0]
                self._add_to_request(name, destination, arrivals.filter(collected))
                self._sent.setdefault(to, []).append(arrivals.filter(pc.invert(collected)))
        cursor = end if failure is None else failure.position
        # A replay needs to know which rows were not taken in the epoch they came in.
        slot = self.work.folders.attempt.slot
        late = (state.cursor, min(cursor, self._before.get(origin, 0)), slot)
        caught_up = (*state.caught_up, late) if late[0] < late[1] else state.caught_up
        self._state.update_attachment(name, cursor=cursor, caught_up=caught_up)
        if failure is not None:
            self._state.pause(name, failure)
        self._state.complete_request(name)

    def _read_origin_rows(self, stream: str, start: int, end: int) -> Any:
        """Return rows of a stream from earlier epochs and from this one."""
        first, parts = self._before.get(stream, 0), []
        if start < first:
            columns = self._graph.columns[stream]
            parts.append(self.history.read_rows(stream, columns, start, min(end, first)))
        if end > first:
            parts.append(self._fresh[stream].slice(max(start - first, 0), end - max(start, first)))
        rows = pa.concat_tables(parts)
        # Positions have no gaps, so a difference means lost rows, and folding on would be wrong for
        # ever.
        if rows.num_rows != end - start:
            raise ROWS_INCOMPLETE(
                name=self._spec.name, stream=stream, start=start, end=end, rows=rows.num_rows
            )
        return rows

    def _add_to_request(self, name: str, destination: str, rows: Any) -> None:
        if rows.num_rows == 0:
            return
        request_id = self._state.attachments[name].request_id(name)
        # There is none if the attachment did not splice when it began.
        request = self._state.requests.get(request_id) or CollectedRequest(name, destination)
        low, high = rows["_stamp"][0].as_py(), rows["_stamp"][-1].as_py()
        self._state.requests[request_id] = replace(
            request,
            rows=request.rows + rows.num_rows,
            min_time=low if request.min_time is None else min(low, request.min_time),
            max_time=high if request.max_time is None else max(high, request.max_time),
        )
        self._files.write_segment(f"splice:{name}", rows, low, high, {"request": request_id})
