"""Window results computed from rows, in DuckDB: what a run would have given in which these rows had come in time.

No partial state is needed, so a window can be recomputed however long ago it was purged. Aggregates without an exact SQL
meaning (sketches, ``sql(...)`` in Spark's dialect) are refused, not approximated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.windows import Aggregate, AggregateFunction, WindowKind, WindowSpec

__all__ = ["WindowBounds", "open_database", "values_differ", "recompute_results", "require_exact_aggregates", "refuse_edge_windows", "build_time_expression"]

_TOLERANCE = 1e-9  # relative: Spark and DuckDB add doubles in different orders
_INEXACT_FUNCTIONS = (AggregateFunction.APPROX_DISTINCT, AggregateFunction.APPROX_QUANTILE, AggregateFunction.SQL)
_ROW_ORDER = "_et, _so, _partition, _seq"


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """One result to compute: key values and ``[start, end)``."""

    key: tuple[Any, ...]
    start: int
    end: int


@cache
def _connect_once() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()  # once a process: starting one costs as much as a small merge


@contextmanager
def open_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """A session of a DuckDB in memory, on UTC; its tables and relations are its own."""
    with closing(_connect_once().cursor()) as db:
        db.execute("set timezone = 'UTC'")
        yield db


def require_exact_aggregates(spec: PipelineSpec, name: str) -> None:
    """Refuse a window whose results cannot be computed exactly here.

    Raises:
        ConfigurationError: naming the aggregate.
    """
    for column, what in spec.windows[name].aggregates.items():
        if what.function in _INEXACT_FUNCTIONS:
            raise ConfigurationError(
                f"window {name} of {spec.name} has {column}: {what}, which only a run on Spark computes",
                code="splice.inexact_aggregate",
                pipeline=spec.name,
                kept="everything; nothing was merged",
                advice="merge into the other outputs (make the request with --output), or restore and run the rows again",
            )


def refuse_edge_windows(spec: PipelineSpec, name: str) -> None:
    """Refuse a window over edge events: what a row changes there reaches over every window since its start.

    Raises:
        ConfigurationError: naming the source that has them.
    """
    source = next((source for source, own in spec.sources.items() if own.edges is not None), None)
    if source is not None:
        raise ConfigurationError(
            f"window {name} of {spec.name} is over edge events ({source}): nothing can be merged into it",
            code="splice.edges",
            pipeline=spec.name,
            kept="everything; nothing was merged",
            advice="merge into the other outputs (make the request with --output), or restore, and run again with a larger lag",
        )


def build_time_expression(spec: PipelineSpec, field: str = "event_time") -> str:
    """SQL for the event time (or the end time) of a row in ticks; sources may call it differently."""
    columns = {name: getattr(source, field) for name, source in spec.sources.items()}
    distinct = set(columns.values())
    if len(distinct) == 1:
        only = distinct.pop()
        return f'epoch_us("{only}")' if only else "cast(null as bigint)"
    cases = " ".join(f"when '{name}' then epoch_us(\"{column}\")" for name, column in columns.items() if column)
    return f"case _source {cases} end"


def recompute_results(
    db: duckdb.DuckDBPyConnection, spec: PipelineSpec, name: str, rows: str, targets: Sequence[WindowBounds], schema: Any
) -> list[dict[str, Any]]:
    """The aggregates of each target over the rows of the relation `rows`; plus ``_rows``, how many contributed.

    Args:
        db: where the relation is.
        spec: the pipeline.
        name: the window.
        rows: a relation with the user's columns, identity, ``_et``, ``_end`` and ``_so``.
        targets: what to compute, in order.
        schema: types of the window's table.
    """
    window = spec.windows[name]
    fields = [schema.field(key) for key in window.keys]
    columns = {f"_k{i}": pa.array([t.key[i] for t in targets], f.type) for i, f in enumerate(fields)}
    places = {"_t": range(len(targets)), "_ts": [t.start for t in targets], "_te": [t.end for t in targets]}
    numbers = {k: pa.array(list(v), pa.int64()) for k, v in places.items()}
    db.register("targets", pa.table(columns | numbers))
    values = ", ".join(f'{_build_aggregate_expression(what)} as "{column}"' for column, what in window.aggregates.items())
    query = f"""
        with goals as (select *, {_build_key_expression([f"_k{i}" for i in range(len(fields))])} as _key from targets),
        pairs as ({_build_pairs_query(window, rows)})
        select _t, count(_seq) as _rows, {values}
        from goals left join pairs using (_key, _ts) group by _t order by _t"""
    try:
        found = db.sql(query).to_arrow_table()
    except duckdb.Error as error:
        raise _foreign_expression_error(spec, name, error) from error
    return list(_cast_aggregates(found, window, schema).to_pylist())


def values_differ(left: Any, right: Any) -> bool:
    """Whether two values are not the same; doubles within rounding are."""
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) != math.isnan(right)
        return not math.isclose(left, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) != len(right) or any(values_differ(a, b) for a, b in zip(left, right, strict=True))
    return bool(left != right)


def _build_pairs_query(window: WindowSpec, rows: str) -> str:
    """(row, start of a window that it belongs to); for sessions the start of the target that contains it."""
    quoted = [f'"{key}"' for key in window.keys]
    if window.kind is WindowKind.SESSION:
        return f"""select r.*, g._ts from (select *, {_build_key_expression(quoted)} as _key from {rows}) r
            asof join goals g on r._key = g._key and r._et >= g._ts where r._et < g._te"""
    size, period = window.size, window.period
    first, last = f"{_build_floor_expression(f'_et - {size}', window)} + {period}", _build_floor_expression("_end - 1", window)
    return f"select *, {_build_key_expression(quoted)} as _key, unnest(generate_series({first}, {last}, {period})) as _ts from {rows}"


def _build_floor_expression(ticks: str, window: WindowSpec) -> str:
    """The last window start at or before an instant, in whole numbers, also for negative times."""
    x = f"({ticks} - {window.offset})"
    return f"({x} - (({x} % {window.period}) + {window.period}) % {window.period} + {window.offset})"


def _build_key_expression(columns: Sequence[str]) -> str:
    """One text for all key columns; null is a key like any other."""
    parts = [f"coalesce('v' || cast({column} as varchar), 'n')" for column in columns]
    return " || chr(31) || ".join(parts) or "''"


def _build_aggregate_expression(what: Aggregate) -> str:
    x = what.expression
    match what.function:
        case AggregateFunction.COUNT:
            return "count(_seq)" if x == "*" else f"count({x})"
        case AggregateFunction.AVG:
            return f"avg(cast({x} as double))"
        case AggregateFunction.DISTINCT:
            return f"count(distinct {x})"
        case AggregateFunction.FIRST:
            return f"first({x} order by {_ROW_ORDER}) filter (where _seq is not null)"
        case AggregateFunction.LAST:
            return f"last({x} order by {_ROW_ORDER}) filter (where _seq is not null)"
        case AggregateFunction.COLLECT:
            return f"coalesce(list({x} order by {_ROW_ORDER}) filter (where ({x}) is not null), [])"
        case _:
            return f"{what.function.value}({x})"


def _cast_aggregates(found: Any, window: WindowSpec, schema: Any) -> Any:
    """Sums grow in DuckDB: back to the types of the table."""
    for place, name in enumerate(found.column_names):
        if name in window.aggregates and found.schema.field(name).type != schema.field(name).type:
            found = found.set_column(place, name, found[name].cast(schema.field(name).type))
    return found


def _foreign_expression_error(spec: PipelineSpec, name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"window {name} of {spec.name} cannot be recomputed: {str(error).splitlines()[0]}",
        code="splice.foreign_expression",
        pipeline=spec.name,
        kept="everything; nothing was merged",
        advice="only expressions that Spark and DuckDB both know can be merged into; restore and run the rows again otherwise",
    )
