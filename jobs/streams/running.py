"""Running aggregates: the fold that a reducer without a function of its own runs. Nulls count for nothing, as in SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import duckdb

from tidegate.jobs.streams.types import Event

__all__ = ["argument_column_name", "make_running_fold", "add_argument_columns"]

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
        f'({"1" if expression == "*" else expression}) AS "{argument_column_name(name)}"' for name, (_, expression) in aggregates.items()
    )
    with duckdb.connect(config={"enable_external_access": "false"}) as session:
        session.execute("SET TimeZone = 'UTC'")
        session.register("origin", rows)
        found = session.sql(f"SELECT {chosen} FROM origin").to_arrow_table()  # noqa: S608 - from a validated spec
    for name in found.column_names:
        rows = rows.append_column(name, found[name])
    return rows


def make_running_fold(aggregates: Mapping[str, tuple[str, str]], keys: tuple[str, ...]) -> Callable[[Any, Event, int], Any]:
    """The fold: its state is the dispatched row without the keys."""

    def fold_event(state: Any, event: Event, _index: int) -> Any:
        before = state or {}
        after = {name: _apply_aggregate(kind, before.get(name), event[argument_column_name(name)]) for name, (kind, _) in aggregates.items()}
        return after, [{**{key: event[key] for key in keys}, **after}]

    return fold_event


def _apply_aggregate(kind: str, before: Any, value: Any) -> Any:
    if kind == "count":
        return (before or 0) + (value is not None)
    if value is None or before is None:
        return before if value is None else value
    return _AGGREGATE_STEPS[kind](before, value)
