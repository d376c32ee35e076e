"""Runs a reducer over a batch of rows: state in, state and dispatches out.

1. Fold every row, in order of position, under `refuse_side_effects`. The first row that fails ends
   the batch there.
2. Fold the first rows once more from the same state. A fold whose second run differs is not
   deterministic.
3. States must be JSON and must not change by a JSON round trip, because they make one with every
   epoch.

See `docs/decisions/0032-folds-have-no-side-effects-and-json-states.md`.
"""

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import duckdb
import pyarrow as pa

from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import Row, RowView, list_rows, to_arrow_types
from tidegate.jobs.rules.duck_frame import compute_columns
from tidegate.jobs.spec.pipeline import PipelineSpec

from .errors import REDUCER_NOT_CALLABLE, REDUCER_NOT_FOUND
from .stream_rows import Event

RunningAggregates = Mapping[str, tuple[str, str]]
"""Column -> function and SQL expression of an aggregate."""
ReducerStates = dict[str, tuple[Any, int]]
"""Key (as JSON text) -> state, events seen."""

_DispatchedRow = tuple[str, Row]  # a destination, and a row for it with ``_position`` and ``_nth``
SentRows = dict[str, Any]
"""Destination -> table of dispatched rows."""

STATE_SCHEMA: Final = pa.schema({"key": pa.string(), "state": pa.string(), "seen": pa.int64()})

_NOT_DETERMINISTIC = "not deterministic: a second run over the same rows came out differently"


@dataclass(frozen=True)
class Reducer:
    """All that is needed to run a reducer, JSON-ready.

    Attributes:
        function: ``package.module:function``; None: it has `aggregates` instead.
        keys: columns; each key has a state of its own. Without any, all rows have one.
        initial: state before the first row of a key.
        columns: destination -> column -> type; a dispatch without a name goes to the first.
        recheck: rows at the head of a batch that are folded twice, to find folds that are not
            deterministic.
        aggregates: for a reducer without a function: column -> (aggregate, SQL expression).
    """

    function: str | None
    keys: tuple[str, ...]
    initial: Any
    columns: Mapping[str, Mapping[str, str]]
    recheck: int = 0
    aggregates: RunningAggregates = field(default_factory=dict)

    def load_fold(self) -> Callable[..., Any]:
        """Return the function that the spec names, or one made from its running aggregates.

        Raises:
            ConfigurationError: there is no such function.
        """
        return (
            make_running_fold(self.aggregates, self.keys)
            if self.function is None
            else load_fold_function(self.function)
        )


@dataclass(frozen=True)
class FoldFailure:
    """The row at which a reducer stopped, and why."""

    position: int
    row_id: str
    error: str


@dataclass(slots=True)
class FoldResult:
    """The result of a batch; after a failure, the result of the rows before the failing one."""

    dispatches: list[_DispatchedRow] = field(default_factory=list)
    states: ReducerStates = field(default_factory=dict)
    failure: FoldFailure | None = None


def load_fold_function(path: str) -> Callable[..., Any]:
    """Import and return the function at ``package.module:function``.

    Raises:
        ConfigurationError: there is no such function. Other errors of the module pass through.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise REDUCER_NOT_FOUND(path=path, cause=error) from error
    if not callable(function):
        raise REDUCER_NOT_CALLABLE(path=path)
    return function  # type: ignore[no-any-return]


def encode_row_key(row: RowView, keys: Sequence[str]) -> str:
    """Return the key of a row as JSON text; without key columns all rows have the same key."""
    return json.dumps([row[key] for key in keys], default=str)


def _fold_once(
    function: Callable[..., Any],
    reducer: Reducer,
    rows: Sequence[RowView],
    states: ReducerStates,
) -> FoldResult:
    folded, copies, keys = FoldResult(), dict[str, Any](), dict[tuple[Any, ...], str]()
    names = [
        name
        for name in (rows[0] if rows else ())
        if name not in ("position", "stream_time") and not name.startswith("_")
    ]
    with refuse_side_effects() as raise_refused:
        for row in rows:
            values = tuple(row[name] for name in reducer.keys)
            # JSON of the same few keys is made once, not once per row.
            if values not in keys:
                keys[values] = encode_row_key(row, reducer.keys)
            key = keys[values]
            state, seen = folded.states.get(key) or states.get(key) or (reducer.initial, 0)
            # A fold may change its argument, so it gets a copy that nothing else uses.
            argument = copies[key] if key in copies else _copy_through_json(state)
            event = Event(row["_id"], row["stream_time"], {name: row[name] for name in names})
            try:
                after, items = function(argument, event, seen if reducer.keys else row["position"])
                sent = [
                    _parse_dispatch(reducer, row["position"], nth, item)
                    for nth, item in enumerate(items)
                ]
                copies[key] = _copy_through_json(after)
                raise_refused()
            # A fold is user code: whatever it raises pauses this reducer, and only this one.
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                folded.failure = FoldFailure(row["position"], row["_id"], cause)
                return folded
            folded.dispatches += sent
            folded.states[key] = (after, seen + 1)
    return folded


def _parse_dispatch(reducer: Reducer, position: int, nth: int, item: Any) -> _DispatchedRow:
    """Return the `nth` row that the fold has emitted for the row at a position."""
    to, value = item if isinstance(item, tuple) else (next(iter(reducer.columns)), item)
    if to not in reducer.columns:
        raise ValueError(
            f"dispatches to {to!r}, which is not among its destinations"
            f" ({', '.join(reducer.columns)})"
        )
    unknown = [name for name in value if name not in reducer.columns[to]]
    if unknown:
        raise ValueError(
            f"dispatches a column {unknown[0]!r} that {to} has not"
            f" ({', '.join(reducer.columns[to])})"
        )
    return to, {**value, "_position": position, "_nth": nth}


def _copy_through_json(state: Any) -> Any:
    """Return a copy of the state as the checkpoint would give it back.

    Raises:
        TypeError: the copy differs from the state.
    """
    if state is None or type(state) in (bool, int, str):
        return state
    copied = json.loads(json.dumps(state))
    if copied != state:
        raise TypeError(f"the state is not JSON: {state!r} would come back as {copied!r}")
    return copied


def _find_first_difference(
    sample: Sequence[RowView], first: FoldResult, second: FoldResult, *, whole: bool
) -> FoldFailure | None:
    """Return the batch's failure: the first run's, or the first row whose second run differs."""
    stopped = [f.failure.position for f in (first, second) if f.failure]
    sent, again = _group_by_row(first.dispatches), _group_by_row(second.dispatches)
    for row in sample:
        here = row["position"]
        if here in stopped:
            agree = second.failure is None or stopped == [here, here]
            return first.failure if agree else FoldFailure(here, row["_id"], _NOT_DETERMINISTIC)
        # Compared as text, because NaN is not equal to itself.
        if repr(sent.get(here)) != repr(again.get(here)):
            return FoldFailure(here, row["_id"], _NOT_DETERMINISTIC)
    if whole and sample and repr(first.states) != repr(second.states):
        return FoldFailure(sample[-1]["position"], sample[-1]["_id"], _NOT_DETERMINISTIC)
    return first.failure


def _group_by_row(dispatches: Iterable[_DispatchedRow]) -> dict[int, list[_DispatchedRow]]:
    groups: dict[int, list[_DispatchedRow]] = {}
    for dispatch in dispatches:
        groups.setdefault(dispatch[1]["_position"], []).append(dispatch)
    return groups


# Running aggregates: the fold of a reducer without a function. Nulls are ignored, as in SQL.

# Over two values that are not null; `_apply_aggregate` deals with nulls.
_AGGREGATE_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda before, value: before + value,
    "min": min,
    "max": max,
    "first": lambda before, _value: before,
    "last": lambda _before, value: value,
}


def add_argument_columns(rows: Any, aggregates: RunningAggregates) -> Any:
    """Add a column for the argument of each aggregate (function, SQL expression).

    Its name is that of the aggregate with brackets, as no column of a stream has it.

    Raises:
        duckdb.Error: an expression fails over the rows.
    """
    chosen = ", ".join(
        f'({"1" if expression == "*" else expression}) AS "{name}()"'
        for name, (_, expression) in aggregates.items()
    )
    arguments = compute_columns(rows, chosen)
    for name in arguments.column_names:
        rows = rows.append_column(name, arguments[name])
    return rows


def make_running_fold(
    aggregates: RunningAggregates, keys: tuple[str, ...]
) -> Callable[[Any, Event, int], Any]:
    """Return the fold of a reducer that has aggregates instead of a function.

    Its state is the dispatched row without the keys.
    """

    def fold_event(state: Any, event: Event, _index: int) -> Any:
        """Return the aggregates after one event, as the state and as the row to dispatch."""
        before = state or {}
        after = {
            name: _apply_aggregate(kind, before.get(name), event[f"{name}()"])
            for name, (kind, _) in aggregates.items()
        }
        return after, [{**{key: event[key] for key in keys}, **after}]

    return fold_event


def _apply_aggregate(kind: str, before: Any, value: Any) -> Any:
    # A count is the only aggregate with a value before the first non-null argument.
    if kind == "count":
        return (before or 0) + (value is not None)
    if value is None or before is None:
        return before if value is None else value
    return _AGGREGATE_STEPS[kind](before, value)


# A reducer over one Arrow batch: rows in, one Arrow table per destination out.


@dataclass(frozen=True)
class FoldedBatch:
    """The result of a batch, as Arrow tables.

    Attributes:
        sent: destination -> its columns, ``_position`` (of the row it was made of) and ``_nth``, in
            their order.
        states: states of the keys in the batch.
        failure: the row at which it stopped; nothing of that row or later ones is included.
    """

    sent: SentRows = field(default_factory=dict)
    states: ReducerStates = field(default_factory=dict)
    failure: FoldFailure | None = None


def build_reducer(spec: PipelineSpec, name: str) -> Reducer:
    """Return the reducer that the spec describes, ready to run."""
    reducer = spec.reducers[name]
    columns = {to: dict(spec.stream_graph.columns[to]) for to in reducer.to}
    aggregates = {
        column: (aggregate.function.value, aggregate.expression)
        for column, aggregate in reducer.aggregates.items()
    }
    return Reducer(
        reducer.function, reducer.keys, reducer.initial, columns, reducer.recheck, aggregates
    )


def fold_batch(reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """Run a reducer in this process; a failure is in the result, and not raised.

    Raises:
        ConfigurationError: its function does not exist.
    """
    ready = prepare_arguments(reducer, rows)
    return ready if isinstance(ready, FoldedBatch) else fold_prepared_rows(reducer, ready, states)


def prepare_arguments(reducer: Reducer, rows: Any) -> Any:
    """Return the rows with the arguments of running aggregates.

    Returns a failed `FoldedBatch` without any row's result if SQL cannot compute one.
    """
    if not reducer.aggregates:
        return rows
    try:
        return add_argument_columns(rows, reducer.aggregates)
    except duckdb.Error as error:
        return FoldedBatch(
            _build_dispatch_tables(reducer, []), {}, describe_batch_failure(rows, error)
        )


def describe_batch_failure(rows: Any, error: Exception) -> FoldFailure:
    """Return the failure of a batch over which SQL fails: it stops at its first row."""
    first = list_rows(rows.slice(0, 1))[0]
    cause = f"in the batch from here on: {get_first_line(error)}"
    return FoldFailure(first["position"], first["_id"], cause)


def fold_prepared_rows(reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """Fold prepared rows: all of a batch, or those of some keys.

    `states` are those before the first row, and
    are not changed. The result has the states of the keys in these rows only.
    """
    function, listed = reducer.load_fold(), list_rows(rows)

    def fold_before(failure: FoldFailure) -> FoldResult:
        """Return the result of the rows before the one that fails."""
        before = [row for row in listed if row["position"] < failure.position]
        return replace(_fold_once(function, reducer, before, states), failure=failure)

    folded = _fold_once(function, reducer, listed, states)
    # Only the head of the batch: a second run of all rows would double the cost.
    sample = listed[: reducer.recheck]
    again = _fold_once(function, reducer, sample, states)
    failure = _find_first_difference(sample, folded, again, whole=len(sample) == len(listed))
    if failure is not None:
        # The first run may have gone on beyond the failing row, so its states are of no use.
        folded = fold_before(failure)
    try:
        sent = _build_dispatch_tables(reducer, folded.dispatches)
    except _MISFIT_ERRORS:
        # A dispatched value that does not fit its column fails its row, as an error of the fold
        # does.
        misfit = _find_misfit(reducer, folded.dispatches, {r["position"]: r["_id"] for r in listed})
        if misfit is None:
            raise
        folded = fold_before(misfit)
        sent = _build_dispatch_tables(reducer, folded.dispatches)
    return FoldedBatch(sent, folded.states, folded.failure)


_MISFIT_ERRORS = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)


def _build_dispatch_tables(reducer: Reducer, dispatches: Sequence[_DispatchedRow]) -> SentRows:
    """Return destination -> the rows sent to it, with ``_position`` and ``_nth``."""
    tables = {}
    for to, columns in reducer.columns.items():
        own = {"_position": pa.int64(), "_nth": pa.int64()}
        schema = pa.schema(to_arrow_types(columns) | own)
        rows = [row for its, row in dispatches if its == to]
        tables[to] = pa.Table.from_pylist(rows, schema=schema)
    return tables


def _find_misfit(
    reducer: Reducer, dispatches: Iterable[_DispatchedRow], ids: Mapping[int, str]
) -> FoldFailure | None:
    """Return the first dispatch whose values do not fit the columns of its destination."""
    for dispatch in dispatches:
        try:
            _build_dispatch_tables(reducer, [dispatch])
        except _MISFIT_ERRORS as error:
            to, row = dispatch
            cause = f"a row for {to} does not fit its columns: {error}"
            return FoldFailure(row["_position"], ids[row["_position"]], cause)
    return None


def build_states_table(states: ReducerStates) -> Any:
    """Return states as rows."""
    rows = [
        {"key": key, "state": json.dumps(state), "seen": seen}
        for key, (state, seen) in states.items()
    ]
    return pa.Table.from_pylist(rows, schema=STATE_SCHEMA)


def parse_states_table(table: Any) -> ReducerStates:
    """Return the states in some rows; those of later rows win."""
    return {row["key"]: (json.loads(row["state"]), row["seen"]) for row in table.to_pylist()}


# The guard against side effects: any run may be a replay, and a replay must not change anything
# outside the fold (docs/decisions/0032-folds-have-no-side-effects-and-json-states.md).

_REFUSED_EVENTS = frozenset(
    {
        "socket.connect",
        "socket.sendto",
        "socket.bind",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.putenv",
    }
)
_thread_state = threading.local()
_install_lock = threading.Lock()


class SideEffectError(Exception):
    """A fold tried a side effect.

    Its author has to move that to a reader of the dispatched rows.
    """


def _require_nothing_refused() -> None:
    # The refusal is kept besides the exception, because a fold may catch every exception.
    refused, _thread_state.refused = _thread_state.refused, None
    if refused is not None:
        raise SideEffectError(refused)


@contextmanager
def refuse_side_effects() -> Iterator[Callable[[], None]]:
    """Refuse to write or delete files, use sockets and start processes in this thread.

    These raise `SideEffectError`, but not for files in ``__pycache__``. It yields a function that
    raises what was refused since its last call, even if the fold swallowed the error. Blocks can be
    nested: the end of the inner one restores what the outer one had.
    """
    with _install_lock:
        _install_audit_hook()
    before = getattr(_thread_state, "on", False), getattr(_thread_state, "refused", None)
    _thread_state.refused = None
    _thread_state.on = True
    try:
        yield _require_nothing_refused
    finally:
        _thread_state.on, _thread_state.refused = before


@cache
def _install_audit_hook() -> None:
    # A hook can never be removed again, so it checks the thread's flag first.
    sys.addaudithook(_refuse_audit_event)


def _refuse_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_thread_state, "on", False):
        return
    # An import inside the fold may write the interpreter's cache.
    if arguments and "__pycache__" in str(arguments[0]):
        return
    if event in _REFUSED_EVENTS or (event == "open" and _opens_for_writing(arguments)):
        _thread_state.refused = f"{event} {arguments[0] if arguments else ''}".strip()
        raise SideEffectError(_thread_state.refused)


def _opens_for_writing(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if isinstance(path, int):  # a file descriptor: opening it was checked before
        return False
    named = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return named or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
