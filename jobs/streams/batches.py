"""A reducer over one Arrow batch: rows in, one Arrow table per destination out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import duckdb
import pyarrow as pa

from tidegate.jobs.engine.columns import arrow_type
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.fold import Dispatch, Folded, FoldFailure, Reducer, States, fold_rows
from tidegate.jobs.streams.running import with_arguments

__all__ = ["FoldedBatch", "Folding", "Runner", "fold_batch", "fold_prepared", "prepared", "reducer_of", "sent_schema"]


@dataclass(frozen=True, slots=True)
class FoldedBatch:
    """What a batch gave.

    Attributes:
        sent: destination -> its columns, and ``_position`` (of the row it was made of) and ``_nth``, in their order.
        states: states of the keys that were met.
        failure: the row at which it stopped; nothing of it or behind it is in here.
    """

    sent: dict[str, Any] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    failure: FoldFailure | None = None


Runner = Callable[[Reducer, Any, States], FoldedBatch]
"""Runs a reducer over rows: columns of the stream, ``position``, ``stream_time`` (int64 ticks), ``_id``; sorted by position."""


def reducer_of(spec: PipelineSpec, name: str) -> Reducer:
    """What the spec says about a reducer, as it is run."""
    one = spec.reducers[name]
    columns = {to: dict(spec.graph.columns[to]) for to in one.to}
    aggregates = {column: (a.function.value, a.expression) for column, a in one.aggregates.items()}
    return Reducer(one.function, one.keys, one.initial, columns, one.recheck, aggregates)


@runtime_checkable
class Folding(Protocol):
    """A mover that can run reducers where it moves rows."""

    def folds(self) -> Runner:
        """The runner."""
        ...


def fold_batch(reducer: Reducer, rows: Any, states: States) -> FoldedBatch:
    """The runner in this process."""
    ready = prepared(reducer, rows)
    return ready if isinstance(ready, FoldedBatch) else fold_prepared(reducer, ready, states)


def prepared(reducer: Reducer, rows: Any) -> Any:
    """The rows with the arguments of running aggregates; a failed `FoldedBatch` if SQL cannot compute one."""
    if not reducer.aggregates:
        return rows
    try:
        return with_arguments(rows, reducer.aggregates)
    except duckdb.Error as error:
        first = rows.slice(0, 1).to_pylist()[0]
        message = str(error).strip().splitlines()[0]
        return FoldedBatch(
            _nothing(reducer), {}, FoldFailure(first["position"], first["_id"], f"in the batch from here on: {message}")
        )


def fold_prepared(reducer: Reducer, rows: Any, states: States) -> FoldedBatch:
    """Fold prepared rows: all of a batch, or of some keys of it. The one fold of driver and Spark tasks."""
    listed = rows.to_pylist()
    folded = fold_rows(reducer, listed, states)
    misfit = _misfit(reducer, folded, {row["position"]: row["_id"] for row in listed})
    if misfit is not None:
        before = fold_rows(reducer, [row for row in listed if row["position"] < misfit.position], states)
        folded = Folded(before.dispatches, before.states, misfit)
    sent = {to: _table(reducer, to, [d for d in folded.dispatches if d.to == to]) for to in reducer.columns}
    return FoldedBatch(sent, folded.states, folded.failure)


def sent_schema(columns: Mapping[str, str]) -> Any:
    """The schema of what is sent to a destination with these columns."""
    fields = {name: arrow_type(kind) for name, kind in columns.items()}
    return pa.schema({**fields, "_position": pa.int64(), "_nth": pa.int64()})


def _nothing(reducer: Reducer) -> dict[str, Any]:
    return {to: sent_schema(columns).empty_table() for to, columns in reducer.columns.items()}


def _table(reducer: Reducer, to: str, dispatches: Sequence[Dispatch]) -> Any:
    rows = [{**d.value, "_position": d.position, "_nth": d.nth} for d in dispatches]
    return pa.Table.from_pylist(rows, schema=sent_schema(reducer.columns[to]))


def _misfit(reducer: Reducer, folded: Folded, ids: Mapping[int, str]) -> FoldFailure | None:
    """The first dispatch whose values do not fit the columns of its destination."""
    try:
        for to in reducer.columns:
            _table(reducer, to, [d for d in folded.dispatches if d.to == to])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        for dispatch in folded.dispatches:
            try:
                _table(reducer, dispatch.to, [dispatch])
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                position = dispatch.position
                return FoldFailure(position, ids[position], f"a row for {dispatch.to} does not fit its columns: {error}")
    return None
