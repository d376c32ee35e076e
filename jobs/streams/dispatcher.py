"""Has the rows that epochs release dispatched through pipes and reducers into streams.

Per epoch, the driver attaches, detaches and resumes what the spec or a user asks for. The rows are
moved by a `DispatchRunner` (`row_dispatch.py` says how): on Spark in a task. Sealing the epoch
commits all files at once. An epoch that is not sealed leaves only garbage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import duckdb
import pyarrow as pa

from tidegate.checkpoints.store import Store
from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import to_arrow_types
from tidegate.jobs.engine.interfaces import DispatchResult, MoveOrder, MoveResult
from tidegate.jobs.engine.manifest_writer import DISPATCHER_KINDS
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM, PipeSpec, ReducerSpec
from tidegate.json_types import JsonView

from .errors import BAD_EXPRESSION, BAD_PREDICATE
from .reducers import add_argument_columns, build_reducer
from .row_dispatch import (
    DispatchedRows,
    DispatchWork,
    RowDispatch,
    select_piped_rows,
)
from .row_history import LogHistory, RowHistory
from .stream_rows import build_row_schema
from .stream_state import CollectedRequest, DispatchState, ReducerStateStore

DispatchRunner = Callable[[DispatchWork], DispatchedRows]
"""Moves the rows of an epoch; it raises what `RowDispatch.dispatch_rows` does."""


@runtime_checkable
class DispatchingMover(Protocol):
    """A mover that can dispatch rows where it moves them."""

    def make_dispatch_runner(
        self, store: Store, history: LogHistory, here: DispatchRunner
    ) -> DispatchRunner:
        """Return the runner; `here` is that of this process, for epochs without rows."""
        ...


def make_local_runner(store: Store, history: RowHistory) -> DispatchRunner:
    """Return a runner that moves rows in this process, and caches reducer states."""
    states = ReducerStateStore(store)

    def dispatch(work: DispatchWork) -> DispatchedRows:
        """Move the rows of an epoch."""
        return RowDispatch(work, store, history, states).dispatch_rows()

    return dispatch


@dataclass
class StreamDispatcher:
    """Dispatches one epoch after another.

    Args:
        spec: the pipeline.
        run: moves the rows.

    Raises:
        ConfigurationError: a reducer's function does not exist, or a pipe's predicate or an
            aggregate's expression cannot be read.
    """

    _spec: PipelineSpec
    run: DispatchRunner

    def __post_init__(self) -> None:
        self._graph = self._spec.stream_graph
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
        state = DispatchState.from_record(before)
        work = DispatchWork(
            spec=self._spec,
            folders=order.folders,
            now=order.decision.wall,
            frontier=order.decision.frontier_after,
            state=state,
            segments=tuple(r for r in order.segments if r.kind.startswith(DISPATCHER_KINDS)),
            released=tuple(moved.files.get(EVENTS_STREAM, ())),
            start=order.next_position + state.stream_state(EVENTS_STREAM).shift,
        )
        begun = self._apply_attachments(work, asked)
        # A second round starts from the initial state.
        forgotten = {f"reducer:{name}" for name in begun}
        segments = tuple(ref for ref in work.segments if ref.kind not in forgotten)
        done = self.run(replace(work, segments=segments))
        record = done.state.to_record(self._graph, asked)
        return DispatchResult(done.files, done.segments, record, done.counts)

    def _apply_attachments(self, work: DispatchWork, asked: Sequence[tuple[str, str]]) -> list[str]:
        """Attach what the spec attaches from the start, then do what users asked for.

        Returns:
            What was attached.
        """
        state, begun = work.state, list[str]()
        slot = work.folders.attempt.slot
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
                self._attach_at_head(work, name)
                begun.append(name)
            elif verb == "detach" and current is not None:
                until = slot if current.until is None else current.until
                state.update_attachment(name, status="detached", until=until)
                state.complete_request(name)
            elif verb == "resume" and current is not None and current.status == "paused":
                state.update_attachment(name, status="attached", failure=None)
        return begun

    def _attach_at_head(self, work: DispatchWork, name: str) -> None:
        attachment, state = self._graph.attachments[name], work.state
        origin, attempt = attachment.origin, work.folders.attempt
        # Rows of this epoch are not backfill: they came in the same epoch as the attachment.
        head = work.start if origin == EVENTS_STREAM else state.stream_state(origin).next
        state.attach(name, head, f"{attempt.timeline}-{attempt.slot:06d}")
        if attachment.merge == "splice":
            request = state.attachments[name].request_id(name)
            state.requests[request] = CollectedRequest(name, attachment.destinations[0])
            state.complete_request(name)

    def _require_valid_predicate(self, name: str, pipe: PipeSpec) -> None:
        """Raise if the predicate cannot be read: that must end the start, not an epoch."""
        columns = self._graph.columns[pipe.origin]
        try:
            select_piped_rows(pipe, columns, build_row_schema(columns).empty_table())
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
