"""Running a reducer over a batch of rows: state in, state and dispatches out.

1. Fold every row, in order of position, under `guard.pure`; the first row that fails ends the batch there.
2. Fold the first rows once more from the same state; whatever differs is a fold that is not deterministic.
3. States must be JSON and come back from it unchanged: they are, after every epoch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.streams.guard import refuse_side_effects
from tidegate.jobs.streams.running import make_running_fold
from tidegate.jobs.streams.types import Event

__all__ = ["DispatchedRow", "FoldFailure", "FoldResult", "Reducer", "ReducerStates", "fold_rows", "encode_row_key", "load_fold_function"]

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
        return make_running_fold(self.aggregates, self.keys) if self.function is None else load_fold_function(self.function)


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


def fold_rows(reducer: Reducer, rows: Sequence[Mapping[str, Any]], states: ReducerStates) -> FoldResult:
    """Fold rows (columns of the stream, and ``position``, ``stream_time`` in ticks, ``_id``) in order of position.

    `states` are those before the first row, and stay as they are.
    """
    function = reducer.load_fold()
    folded = _fold_once(function, reducer, rows, states)
    sample = rows[: reducer.recheck]
    failure = _find_first_difference(sample, folded, _fold_once(function, reducer, sample, states), whole=len(sample) == len(rows))
    if failure is None:
        return folded
    before = _fold_once(function, reducer, [row for row in rows if row["position"] < failure.position], states)
    return FoldResult(before.dispatches, before.states, failure)


def _fold_once(function: Callable[..., Any], reducer: Reducer, rows: Sequence[Mapping[str, Any]], states: ReducerStates) -> FoldResult:
    folded, fresh, keys = FoldResult(), dict[str, Any](), dict[tuple[Any, ...], str]()
    names = [name for name in (rows[0] if rows else ()) if name not in ("position", "stream_time") and not name.startswith("_")]
    with refuse_side_effects() as guard:
        for row in rows:
            values = tuple(row[name] for name in reducer.keys)
            key = keys[values] if values in keys else keys.setdefault(values, encode_row_key(row, reducer.keys))
            state, seen = folded.states.get(key) or states.get(key) or (reducer.initial, 0)
            # A fold may change the state it was given: what it gets is nobody else's.
            given = fresh[key] if key in fresh else _copy_through_json(state)
            event = Event(row["_id"], row["stream_time"], {name: row[name] for name in names})
            try:
                after, items = function(given, event, seen if reducer.keys else row["position"])
                sent = [_parse_dispatch(reducer, row["position"], nth, item) for nth, item in enumerate(items)]
                fresh[key] = _copy_through_json(after)
                guard.raise_refused()
            except Exception as error:  # a fold is a stranger's code: whatever it raises pauses it, and only it
                folded.failure = FoldFailure(row["position"], row["_id"], f"{type(error).__name__}: {error}")
                return folded
            folded.dispatches += sent
            folded.states[key] = (after, seen + 1)
    return folded


def _parse_dispatch(reducer: Reducer, position: int, nth: int, item: Any) -> DispatchedRow:
    to, value = item if isinstance(item, tuple) else (next(iter(reducer.columns)), item)
    if to not in reducer.columns:
        raise ValueError(f"dispatches to {to!r}, which is not among its destinations ({', '.join(reducer.columns)})")
    strange = [name for name in value if name not in reducer.columns[to]]
    if strange:
        raise ValueError(f"dispatches a column {strange[0]!r} that {to} has not ({', '.join(reducer.columns[to])})")
    return DispatchedRow(position, nth, to, dict(value))


def _copy_through_json(state: Any) -> Any:
    """A copy of the state as it would come back from the checkpoint, which must be the state itself."""
    if state is None or type(state) in (bool, int, str):
        return state
    copied = json.loads(json.dumps(state))
    if copied != state:
        raise TypeError(f"the state is not JSON: {state!r} would come back as {copied!r}")
    return copied


def _find_first_difference(sample: Sequence[Mapping[str, Any]], first: FoldResult, second: FoldResult, *, whole: bool) -> FoldFailure | None:
    """The failure of a batch: its own, or the first row whose second run came out differently."""
    stopped = [f.failure.position for f in (first, second) if f.failure]
    sent, again = _group_by_row(first.dispatches), _group_by_row(second.dispatches)
    for row in sample:
        here = row["position"]
        if here in stopped and stopped != [here, here]:
            return first.failure if first.failure and not second.failure else FoldFailure(here, row["_id"], _NOT_DETERMINISTIC)
        if here in stopped:
            return first.failure
        if repr(sent.get(here)) != repr(again.get(here)):
            return FoldFailure(here, row["_id"], _NOT_DETERMINISTIC)
    if whole and sample and repr(first.states) != repr(second.states):
        return FoldFailure(sample[-1]["position"], sample[-1]["_id"], _NOT_DETERMINISTIC)
    return first.failure


def _group_by_row(dispatches: Iterable[DispatchedRow]) -> dict[int, list[tuple[str, Mapping[str, Any]]]]:
    found: dict[int, list[tuple[str, Mapping[str, Any]]]] = {}
    for one in dispatches:
        found.setdefault(one.position, []).append((one.to, one.value))
    return found
