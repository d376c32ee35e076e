"""Running a reducer over a batch of rows: state in, state and dispatches out.

1. Fold every row, in order of position, under `guard.pure`; the first row that fails ends the batch
  there.
2. Fold the first rows once more from the same state; whatever differs is a fold that is not
  deterministic.
3. States must be JSON and come back from it unchanged: they are, after every epoch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import duckdb
import pyarrow as pa

from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.dispatch_rules import Event
from tidegate.jobs.streams.side_effect_guard import refuse_side_effects

ReducerStates = dict[str, tuple[Any, int]]
"""Key (as JSON text) -> state, events seen."""

_NOT_DETERMINISTIC = "not deterministic: a second run over the same rows came out differently"


@dataclass(frozen=True, slots=True)
class Reducer:
    """What it takes to run one: JSON-ready.

    Attributes:
        columns: destination -> column -> type; a dispatch without a name goes to the first.
        aggregates: without a function: column -> (aggregate, SQL expression).
    """

    function: str | None
    keys: tuple[str, ...]
    initial: Any
    columns: Mapping[str, Mapping[str, str]]
    recheck: int = 0
    aggregates: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def load_fold(self) -> Callable[..., Any]:
        """What it runs."""
        return (
            make_running_fold(self.aggregates, self.keys)
            if self.function is None
            else load_fold_function(self.function)
        )


@dataclass(frozen=True, slots=True)
class DispatchedRow:
    """One dispatched row: made of the row at `position`, its `nth`."""

    position: int
    nth: int
    to: str
    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FoldFailure:
    """The row at which a reducer stopped, and why."""

    position: int
    row_id: str
    error: str


@dataclass(slots=True)
class FoldResult:
    """What a batch gave. With a failure: what its rows before the failing one gave."""

    dispatches: list[DispatchedRow] = field(default_factory=list)
    states: ReducerStates = field(default_factory=dict)
    failure: FoldFailure | None = None


def load_fold_function(path: str) -> Callable[..., Any]:
    """The function at ``package.module:function``.

    Raises:
        ConfigurationError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"no reducer at {path}: {error}",
            code="reducer.not_found",
            kept="everything sealed so far",
            advice="install its package where the driver runs, or mend the path",
        ) from error
    if not callable(found):
        raise ConfigurationError(f"{path} is not a function", code="reducer.not_found")
    return found  # type: ignore[no-any-return]


def encode_row_key(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The key of a row as JSON text; one and the same for a fold without keys."""
    return json.dumps([row[key] for key in keys], default=str)


def fold_rows(
    reducer: Reducer, rows: Sequence[Mapping[str, Any]], states: ReducerStates
) -> FoldResult:
    """Fold rows (columns of the stream, and ``position``, ``stream_time`` in ticks, ``_id``) in order of position.

    `states` are those before the first row, and stay as they are.
    """
    function = reducer.load_fold()
    folded = _fold_once(function, reducer, rows, states)
    sample = rows[: reducer.recheck]
    failure = _find_first_difference(
        sample,
        folded,
        _fold_once(function, reducer, sample, states),
        whole=len(sample) == len(rows),
    )
    if failure is None:
        return folded
    before = _fold_once(
        function, reducer, [row for row in rows if row["position"] < failure.position], states
    )
    return FoldResult(before.dispatches, before.states, failure)


def _fold_once(
    function: Callable[..., Any],
    reducer: Reducer,
    rows: Sequence[Mapping[str, Any]],
    states: ReducerStates,
) -> FoldResult:
    folded, fresh, keys = FoldResult(), dict[str, Any](), dict[tuple[Any, ...], str]()
    names = [
        name
        for name in (rows[0] if rows else ())
        if name not in ("position", "stream_time") and not name.startswith("_")
    ]
    with refuse_side_effects() as guard:
        for row in rows:
            values = tuple(row[name] for name in reducer.keys)
            key = (
                keys[values]
                if values in keys
                else keys.setdefault(values, encode_row_key(row, reducer.keys))
            )
            state, seen = folded.states.get(key) or states.get(key) or (reducer.initial, 0)
            # A fold may change the state it was given: what it gets is nobody else's.
            given = fresh[key] if key in fresh else _copy_through_json(state)
            event = Event(row["_id"], row["stream_time"], {name: row[name] for name in names})
            try:
                after, items = function(given, event, seen if reducer.keys else row["position"])
                sent = [
                    _parse_dispatch(reducer, row["position"], nth, item)
                    for nth, item in enumerate(items)
                ]
                fresh[key] = _copy_through_json(after)
                guard.raise_refused()
            except (
                Exception
            ) as error:  # a fold is a stranger's code: whatever it raises pauses it, and only it
                folded.failure = FoldFailure(
                    row["position"], row["_id"], f"{type(error).__name__}: {error}"
                )
                return folded
            folded.dispatches += sent
            folded.states[key] = (after, seen + 1)
    return folded


def _parse_dispatch(reducer: Reducer, position: int, nth: int, item: Any) -> DispatchedRow:
    to, value = item if isinstance(item, tuple) else (next(iter(reducer.columns)), item)
    if to not in reducer.columns:
        raise ValueError(
            f"dispatches to {to!r}, which is not among its destinations"
            f" ({', '.join(reducer.columns)})"
        )
    strange = [name for name in value if name not in reducer.columns[to]]
    if strange:
        raise ValueError(
            f"dispatches a column {strange[0]!r} that {to} has not"
            f" ({', '.join(reducer.columns[to])})"
        )
    return DispatchedRow(position, nth, to, dict(value))


def _copy_through_json(state: Any) -> Any:
    """A copy of the state as it would come back from the checkpoint, which must be the state itself."""
    if state is None or type(state) in (bool, int, str):
        return state
    copied = json.loads(json.dumps(state))
    if copied != state:
        raise TypeError(f"the state is not JSON: {state!r} would come back as {copied!r}")
    return copied


def _find_first_difference(
    sample: Sequence[Mapping[str, Any]], first: FoldResult, second: FoldResult, *, whole: bool
) -> FoldFailure | None:
    """The failure of a batch: its own, or the first row whose second run came out differently."""
    stopped = [f.failure.position for f in (first, second) if f.failure]
    sent, again = _group_by_row(first.dispatches), _group_by_row(second.dispatches)
    for row in sample:
        here = row["position"]
        if here in stopped and stopped != [here, here]:
            return (
                first.failure
                if first.failure and not second.failure
                else FoldFailure(here, row["_id"], _NOT_DETERMINISTIC)
            )
        if here in stopped:
            return first.failure
        if repr(sent.get(here)) != repr(again.get(here)):
            return FoldFailure(here, row["_id"], _NOT_DETERMINISTIC)
    if whole and sample and repr(first.states) != repr(second.states):
        return FoldFailure(sample[-1]["position"], sample[-1]["_id"], _NOT_DETERMINISTIC)
    return first.failure


def _group_by_row(
    dispatches: Iterable[DispatchedRow],
) -> dict[int, list[tuple[str, Mapping[str, Any]]]]:
    found: dict[int, list[tuple[str, Mapping[str, Any]]]] = {}
    for one in dispatches:
        found.setdefault(one.position, []).append((one.to, one.value))
    return found


# Running aggregates: the fold that a reducer without a function of its own runs. Nulls count for
# nothing, as in SQL.

_AGGREGATE_STEPS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": lambda before, value: before + value,
    "min": min,
    "max": max,
    "first": lambda before, _value: before,
    "last": lambda _before, value: value,
}


def argument_column_name(name: str) -> str:
    """The column that holds an aggregate's argument; no column of a stream is called so."""
    return f"{name}()"


def add_argument_columns(rows: Any, aggregates: Mapping[str, tuple[str, str]]) -> Any:
    """The rows, with a column for the argument of each aggregate (function, SQL expression).

    Raises:
        duckdb.Error: an expression fails over the rows.
    """
    chosen = ", ".join(
        f'({"1" if expression == "*" else expression}) AS "{argument_column_name(name)}"'
        for name, (_, expression) in aggregates.items()
    )
    with duckdb.connect(config={"enable_external_access": "false"}) as session:
        session.execute("SET TimeZone = 'UTC'")
        session.register("origin", rows)
        found = session.sql(f"SELECT {chosen} FROM origin").to_arrow_table()  # noqa: S608 - from a validated spec
    for name in found.column_names:
        rows = rows.append_column(name, found[name])
    return rows


def make_running_fold(
    aggregates: Mapping[str, tuple[str, str]], keys: tuple[str, ...]
) -> Callable[[Any, Event, int], Any]:
    """The fold: its state is the dispatched row without the keys."""

    def fold_event(state: Any, event: Event, _index: int) -> Any:
        before = state or {}
        after = {
            name: _apply_aggregate(kind, before.get(name), event[argument_column_name(name)])
            for name, (kind, _) in aggregates.items()
        }
        return after, [{**{key: event[key] for key in keys}, **after}]

    return fold_event


def _apply_aggregate(kind: str, before: Any, value: Any) -> Any:
    if kind == "count":
        return (before or 0) + (value is not None)
    if value is None or before is None:
        return before if value is None else value
    return _AGGREGATE_STEPS[kind](before, value)


# A reducer over one Arrow batch: rows in, one Arrow table per destination out.


@dataclass(frozen=True, slots=True)
class FoldedBatch:
    """What a batch gave.

    Attributes:
        sent: destination -> its columns, and ``_position`` (of the row it was made of) and
            ``_nth``, in their order.
        states: states of the keys that were met.
        failure: the row at which it stopped; nothing of it or behind it is in here.
    """

    sent: dict[str, Any] = field(default_factory=dict)
    states: ReducerStates = field(default_factory=dict)
    failure: FoldFailure | None = None


ReducerRunner = Callable[[Reducer, Any, ReducerStates], FoldedBatch]
"""Runs a reducer over rows.

Columns of the stream, ``position``, ``stream_time`` (int64 ticks), ``_id``; sorted by position.
"""


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
    """The rows with the arguments of running aggregates.

    A failed `FoldedBatch` if SQL cannot compute one.
    """
    if not reducer.aggregates:
        return rows
    try:
        return add_argument_columns(rows, reducer.aggregates)
    except duckdb.Error as error:
        first = rows.slice(0, 1).to_pylist()[0]
        message = str(error).strip().splitlines()[0]
        return FoldedBatch(
            _make_empty_dispatches(reducer),
            {},
            FoldFailure(first["position"], first["_id"], f"in the batch from here on: {message}"),
        )


def fold_prepared_rows(reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """Fold prepared rows: all of a batch, or of some keys of it.

    The one fold of driver and Spark tasks.
    """
    listed = rows.to_pylist()
    folded = fold_rows(reducer, listed, states)
    misfit = _find_misfit(reducer, folded, {row["position"]: row["_id"] for row in listed})
    if misfit is not None:
        before = fold_rows(
            reducer, [row for row in listed if row["position"] < misfit.position], states
        )
        folded = FoldResult(before.dispatches, before.states, misfit)
    sent = {
        to: _build_dispatch_table(reducer, to, [d for d in folded.dispatches if d.to == to])
        for to in reducer.columns
    }
    return FoldedBatch(sent, folded.states, folded.failure)


def build_dispatch_schema(columns: Mapping[str, str]) -> Any:
    """The schema of what is sent to a destination with these columns."""
    fields = {name: to_arrow_type(kind) for name, kind in columns.items()}
    return pa.schema({**fields, "_position": pa.int64(), "_nth": pa.int64()})


def _make_empty_dispatches(reducer: Reducer) -> dict[str, Any]:
    return {
        to: build_dispatch_schema(columns).empty_table() for to, columns in reducer.columns.items()
    }


def _build_dispatch_table(reducer: Reducer, to: str, dispatches: Sequence[DispatchedRow]) -> Any:
    rows = [{**d.value, "_position": d.position, "_nth": d.nth} for d in dispatches]
    return pa.Table.from_pylist(rows, schema=build_dispatch_schema(reducer.columns[to]))


def _find_misfit(
    reducer: Reducer, folded: FoldResult, ids: Mapping[int, str]
) -> FoldFailure | None:
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
                return FoldFailure(
                    position,
                    ids[position],
                    f"a row for {dispatch.to} does not fit its columns: {error}",
                )
    return None
