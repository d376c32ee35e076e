"""A reducer over one Arrow batch: rows in, one Arrow table per destination out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import duckdb
import pyarrow as pa

from tidegate.jobs.engine.columns import to_arrow_type
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.fold import DispatchedRow, FoldResult, FoldFailure, Reducer, ReducerStates, fold_rows
from tidegate.jobs.streams.running import add_argument_columns

__all__ = ["FoldedBatch", "FoldingMover", "ReducerRunner", "fold_batch", "fold_prepared_rows", "prepare_arguments", "build_reducer", "build_dispatch_schema"]


@dataclass(frozen=True, slots=True)
class FoldedBatch:
    """What a batch gave.

    Attributes:
        sent: destination -> its columns, and ``_position`` (of the row it was made of) and ``_nth``, in their order.
        states: states of the keys that were met.
        failure: the row at which it stopped; nothing of it or behind it is in here.
    """

    sent: dict[str, Any] = field(default_factory=dict)
    states: ReducerStates = field(default_factory=dict)
    failure: FoldFailure | None = None


ReducerRunner = Callable[[Reducer, Any, ReducerStates], FoldedBatch]
"""Runs a reducer over rows: columns of the stream, ``position``, ``stream_time`` (int64 ticks), ``_id``; sorted by position."""


def build_reducer(spec: PipelineSpec, name: str) -> Reducer:
    """What the spec says about a reducer, as it is run."""
    one = spec.reducers[name]
    columns = {to: dict(spec.stream_graph.columns[to]) for to in one.to}
    aggregates = {column: (a.function.value, a.expression) for column, a in one.aggregates.items()}
    return Reducer(one.function, one.keys, one.initial, columns, one.recheck, aggregates)


@runtime_checkable
class FoldingMover(Protocol):
    """A mover that can run reducers where it moves rows."""

    def fold_runner(self) -> ReducerRunner:
        """The runner."""
        ...


def fold_batch(reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """The runner in this process."""
    ready = prepare_arguments(reducer, rows)
    return ready if isinstance(ready, FoldedBatch) else fold_prepared_rows(reducer, ready, states)


def prepare_arguments(reducer: Reducer, rows: Any) -> Any:
    """The rows with the arguments of running aggregates; a failed `FoldedBatch` if SQL cannot compute one."""
    if not reducer.aggregates:
        return rows
    try:
        return add_argument_columns(rows, reducer.aggregates)
    except duckdb.Error as error:
        first = rows.slice(0, 1).to_pylist()[0]
        message = str(error).strip().splitlines()[0]
        return FoldedBatch(
            _make_empty_dispatches(reducer), {}, FoldFailure(first["position"], first["_id"], f"in the batch from here on: {message}")
        )


def fold_prepared_rows(reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """Fold prepared rows: all of a batch, or of some keys of it. The one fold of driver and Spark tasks."""
    listed = rows.to_pylist()
    folded = fold_rows(reducer, listed, states)
    misfit = _find_misfit(reducer, folded, {row["position"]: row["_id"] for row in listed})
    if misfit is not None:
        before = fold_rows(reducer, [row for row in listed if row["position"] < misfit.position], states)
        folded = FoldResult(before.dispatches, before.states, misfit)
    sent = {to: _build_dispatch_table(reducer, to, [d for d in folded.dispatches if d.to == to]) for to in reducer.columns}
    return FoldedBatch(sent, folded.states, folded.failure)


def build_dispatch_schema(columns: Mapping[str, str]) -> Any:
    """The schema of what is sent to a destination with these columns."""
    fields = {name: to_arrow_type(kind) for name, kind in columns.items()}
    return pa.schema({**fields, "_position": pa.int64(), "_nth": pa.int64()})


def _make_empty_dispatches(reducer: Reducer) -> dict[str, Any]:
    return {to: build_dispatch_schema(columns).empty_table() for to, columns in reducer.columns.items()}


def _build_dispatch_table(reducer: Reducer, to: str, dispatches: Sequence[DispatchedRow]) -> Any:
    rows = [{**d.value, "_position": d.position, "_nth": d.nth} for d in dispatches]
    return pa.Table.from_pylist(rows, schema=build_dispatch_schema(reducer.columns[to]))


def _find_misfit(reducer: Reducer, folded: FoldResult, ids: Mapping[int, str]) -> FoldFailure | None:
    """The first dispatch whose values do not fit the columns of its destination."""
    try:
        for to in reducer.columns:
            _build_dispatch_table(reducer, to, [d for d in folded.dispatches if d.to == to])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        for dispatch in folded.dispatches:
            try:
                _build_dispatch_table(reducer, dispatch.to, [dispatch])
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                position = dispatch.position
                return FoldFailure(position, ids[position], f"a row for {dispatch.to} does not fit its columns: {error}")
    return None
