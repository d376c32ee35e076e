"""Tumbling and sliding windows without Spark SQL: the rows of one slice, by NumPy and DuckDB.

Lateness is judged against the frontier before the epoch, which is known before its rows are read.
So a slice is surveyed and aggregated in one pass. What comes out has the columns, types and values
of the partial rows that `Aggregation.aggregate_rows` makes by Spark SQL.

Only windows whose results tests have shown to be equal in both engines are folded here;
`explain_spark_window` names the reason for every other one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.jobs.spark.aggregates import Aggregation
from tidegate.jobs.spark.cut_reader import Ints, get_arrow_types
from tidegate.jobs.spark.merge_in_driver import can_merge_in_driver
from tidegate.jobs.spark.sql_conditions import mask_reached_ends
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction, WindowKind, WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

SAFE_TICKS: Final = 1 << 61
"""Within this distance of 0 no sum or difference of times and sizes leaves int64."""

_SOURCE: Final = "_source"  # a key that is no column of the objects
_BARE: Final = re.compile(r"`([^`]+)`|([A-Za-z]\w*)")


@dataclass(frozen=True, slots=True)
class WindowFold:
    """How the rows of a slice become partial rows of one window output.

    Attributes:
        inputs: declared columns that the query reads, with their Arrow types.
        query: DuckDB SQL over the relation ``slice_rows``.
        schema: of the partial rows, without the epoch.
    """

    aggregation: Aggregation
    inputs: dict[str, pa.DataType]
    query: str
    schema: pa.Schema

    @property
    def window(self) -> WindowSpec:
        """The window that is folded."""
        return self.aggregation.window


@dataclass(frozen=True, slots=True)
class FoldedSlice:
    """One slice folded into windows.

    Attributes:
        partials: window output -> partial rows.
        late: window output -> places in the slice of the rows that are late for it.
        expired: window output -> pairs of a row and a window that was purged before it came.
    """

    partials: dict[str, pa.Table] = field(default_factory=dict)
    late: dict[str, Ints] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)


def explain_spark_window(spec: PipelineSpec, name: str) -> str | None:
    """Why a window output needs Spark SQL; None if it is folded natively."""
    window = spec.windows[name]
    if window.kind not in (WindowKind.TUMBLING, WindowKind.SLIDING):
        return f"{window.kind.value} windows"
    if window.on_late is LatePolicy.ADJUST:
        return "on_late: adjust"
    if window.fire_every is not None:
        return "fire_every"
    sources = spec.sources.values()
    if any(s.edges is not None or s.end_time is not None for s in sources):
        return "rows that last"
    if any(s.columns != spec.columns for s in sources):
        return "sources with schemas of their own"
    if max(abs(n or 0) for n in _list_spans(window)) > SAFE_TICKS >> 4:
        return "spans beyond the range that is safe in int64"
    known = {*spec.columns, _SOURCE}
    if any(key not in known for key in window.keys):
        return "keys that are no declared columns"
    return _explain_spark_aggregates(spec, name)


def _list_spans(window: WindowSpec) -> tuple[int | None, ...]:
    return window.size, window.period, window.offset, window.min_window_start


def _explain_spark_aggregates(spec: PipelineSpec, name: str) -> str | None:
    types = get_arrow_types(spec)
    for output, what in spec.windows[name].aggregates.items():
        column = _find_column(spec, what)
        if column is None and what.expression != "*":
            return f"{output}: an expression that is more than a column"
        if column is not None and not _is_exact(what, types[column]):
            return f"{output}: {what} over {types[column]}"
    schema = _build_partial_schema(spec, Aggregation(spec, name))
    return None if can_merge_in_driver(Aggregation(spec, name), schema) else "the kinds of its keys"


def _find_column(spec: PipelineSpec, what: Aggregate) -> str | None:
    """The declared column that an aggregate is over; None for anything else."""
    match = _BARE.fullmatch(what.expression)
    name = (match[1] or match[2]) if match else None
    return name if name in spec.columns else None


def _is_exact(what: Aggregate, kind: pa.DataType) -> bool:
    whole, real = pa.types.is_integer(kind), pa.types.is_floating(kind)
    match what.function:
        case AggregateFunction.COUNT:
            return True
        case AggregateFunction.SUM | AggregateFunction.AVG:
            return bool(whole or real)
        case AggregateFunction.MIN | AggregateFunction.MAX:
            return bool(whole or pa.types.is_date(kind) or pa.types.is_timestamp(kind))
        case _:
            return False


def plan_window_folds(spec: PipelineSpec) -> dict[str, WindowFold]:
    """The folds of the window outputs that need no Spark SQL."""
    return {
        name: _plan_fold(spec, name)
        for name in spec.windows
        if explain_spark_window(spec, name) is None
    }


def _plan_fold(spec: PipelineSpec, name: str) -> WindowFold:
    aggregation, types = Aggregation(spec, name), get_arrow_types(spec)
    window, keys = aggregation.window, aggregation.keys
    used = [key for key in window.keys if key != _SOURCE]
    used += [c for c in (_find_column(spec, w) for w in window.aggregates.values()) if c]
    partial, merge = {}, {}
    for index, what in enumerate(window.aggregates.values()):
        for state, (first, then) in _render_states(spec, what, index).items():
            partial[state], merge[state] = first, then
    named = [f"{_quote_column(key)} AS {name}" for key, name in zip(window.keys, keys, strict=True)]
    folded = [f"{sql} AS {state}" for state, sql in partial.items()]
    panes = (
        f"SELECT {', '.join(['_w0', '_w1', *named, *folded])} FROM slice_rows"  # noqa: S608
        f" GROUP BY {', '.join(['_w0', '_w1', *map(_quote_column, window.keys)])}"
    )
    columns = ["_ws", f"_ws + {window.size} AS _we", *keys]
    merged = [f"{sql} AS {state}" for state, sql in merge.items()]
    spread = f"SELECT unnest(range(_w0, _w1 + 1, {window.period})) AS _ws, * FROM ({panes})"  # noqa: S608
    query = (
        f"SELECT {', '.join([*columns, *merged])} FROM ({spread})"  # noqa: S608
        f" GROUP BY {', '.join(['_ws', *keys])}"
        if _has_several_windows(window)
        else f"SELECT {', '.join([*columns, *partial])} FROM (SELECT _w0 AS _ws, * FROM ({panes}))"  # noqa: S608
    )
    inputs = {column: types[column] for column in used}
    return WindowFold(aggregation, inputs, query, _build_partial_schema(spec, aggregation))


def _has_several_windows(window: WindowSpec) -> bool:
    """Whether a row may be in more than one window, or in none."""
    return window.size != window.period or window.min_window_start is not None


def _render_states(spec: PipelineSpec, what: Aggregate, index: int) -> dict[str, tuple[str, str]]:
    """State column -> (DuckDB SQL over rows, over state columns)."""
    state, column = f"_s{index}", _find_column(spec, what)
    x = "*" if column is None else _quote_column(column)
    total = f"CAST(sum({state}) AS BIGINT)"
    match what.function:
        case AggregateFunction.COUNT:
            return {state: (f"count({x})", total)}
        case AggregateFunction.AVG:
            mean = (f"sum(CAST({x} AS DOUBLE))", f"sum({state}_sum)")
            count = (f"count({x})", f"CAST(sum({state}_n) AS BIGINT)")
            return {f"{state}_sum": mean, f"{state}_n": count}
        case AggregateFunction.SUM if pa.types.is_floating(get_arrow_types(spec)[column or ""]):
            return {state: (f"sum(CAST({x} AS DOUBLE))", f"sum({state})")}
        case AggregateFunction.SUM:
            # DuckDB sums in 128 bits; the cast fails where Spark's sum overflows.
            return {state: (f"CAST(sum({x}) AS BIGINT)", total)}
        case other:
            return {state: (f"{other.value}({x})", f"{other.value}({state})")}


def _quote_column(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _build_partial_schema(spec: PipelineSpec, aggregation: Aggregation) -> pa.Schema:
    types, window = get_arrow_types(spec), aggregation.window
    fields: dict[str, pa.DataType] = {"_ws": pa.int64(), "_we": pa.int64()}
    for name, key in zip(aggregation.keys, window.keys, strict=True):
        fields[name] = types.get(key, pa.string())
    fields |= dict.fromkeys(("_on", "_up", "_n"), pa.int32())
    for output, what in window.aggregates.items():
        column = _find_column(spec, what)
        for state in aggregation.plans[output].partial:
            if what.function in (AggregateFunction.MIN, AggregateFunction.MAX) and column:
                fields[state] = types[column]
            elif what.function is AggregateFunction.COUNT or state.endswith("_n"):
                fields[state] = pa.int64()
            elif column and what.function is AggregateFunction.SUM:
                fields[state] = pa.int64() if pa.types.is_integer(types[column]) else pa.float64()
            else:
                fields[state] = pa.float64()
    return pa.schema(list(fields.items()))


# The rows of one slice


def fold_slice(
    folds: Mapping[str, WindowFold], source: str, rows: pa.Table, times: Ints, frontier: int
) -> FoldedSlice | None:
    """Fold the data rows of a slice into windows.

    Args:
        folds: window output -> its fold.
        source: name of the slice's source.
        rows: the inputs of all folds, of the data rows in order.
        times: their event times in ticks.
        frontier: the frontier before the epoch, in ticks.

    Returns:
        None if the rows need Spark SQL: times at the ends of their range, or a sum that overflows.
    """
    if times.size and max(-int(times.min()), int(times.max())) > SAFE_TICKS:
        return None
    found = FoldedSlice()
    try:
        for name, fold in folds.items():
            found.late[name], found.expired[name] = _find_late_rows(fold.window, times, frontier)
            found.partials[name] = _fold_rows(fold, source, rows, times, frontier, found.late[name])
    except (duckdb.Error, pa.ArrowException):
        return None  # Spark SQL computes it, or says what is wrong with it
    return found


def _find_late_rows(window: WindowSpec, times: Ints, frontier: int) -> tuple[Ints, int]:
    """Places of the rows that are late for the window, and pairs that had expired.

    The rules are those of `late_for_window_sql` and `expired_pairs_sql`.
    """
    # A window ends behind its rows, so only a row behind the frontier can be late.
    below = np.flatnonzero(times < frontier)
    first, last = _compute_spans(window, times[below])
    size, slide, covered = window.size or 0, window.period or 1, first <= last
    if window.late_unit == "event":
        late = covered
    else:
        start = first if window.late_unit == "first_window" else last
        late = covered & mask_reached_ends(start + size, frontier, window.lateness)
    if window.lateness is None or frontier <= TICK_MIN + size + window.lateness:
        return below[late], 0
    bound = TICK_MAX if frontier == TICK_MAX else frontier - size - window.lateness
    pairs = np.maximum((np.minimum(last, bound) - first + slide) // slide, 0)
    return below[late], int(pairs.sum())


def _compute_spans(window: WindowSpec, times: Ints) -> tuple[Ints, Ints]:
    """Starts of the first and the last window of rows that last one tick each."""
    size, slide, offset, least = (
        window.size or 0,
        window.period or 1,
        window.offset,
        window.min_window_start,
    )
    last = _floor_to_period(times - offset, slide) + offset
    if not _has_several_windows(window):
        return last, last
    first = _floor_to_period(times - (size + offset), slide) + slide + offset
    if least is not None:
        first = np.maximum(first, -((offset - least) // slide) * slide + offset)
    return first, last


def _floor_to_period(values: Ints, period: int) -> Ints:
    floored: Ints = values - np.mod(values, period)
    return floored


def _fold_rows(
    fold: WindowFold, source: str, rows: pa.Table, times: Ints, frontier: int, late: Ints
) -> pa.Table:
    first, last = _compute_spans(fold.window, times)
    keep: NDArray[np.bool_] = first <= last
    keep[late] = False
    table = pa.table(
        {
            "_w0": first,
            "_w1": last,
            _SOURCE: pa.repeat(pa.scalar(source), times.size),
            **{name: _convert_to_number(rows[name]) for name in fold.inputs},
        }
    )
    if not keep.all():
        table = table.filter(pa.array(keep))
    with _open_engine() as db:
        db.register("slice_rows", table)
        folded = db.sql(fold.query).to_arrow_table()
    return _add_marks(fold, folded, frontier)


def _convert_to_number(column: Any) -> Any:
    """Times as ticks: DuckDB needs no time zones then."""
    return column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


def _open_engine() -> duckdb.DuckDBPyConnection:
    return _start_engine().cursor()


@cache
def _start_engine() -> duckdb.DuckDBPyConnection:
    # One thread: sums of doubles depend on their order, and a replay must find the same. Slices
    # run beside each other.
    return duckdb.connect(config={"threads": 1, "enable_external_access": "false"})


def _add_marks(fold: WindowFold, folded: pa.Table, frontier: int) -> pa.Table:
    """Drop pairs with purged windows; say of the others whether they update a closed window."""
    ends = folded["_we"].to_numpy()
    purged = mask_reached_ends(ends, frontier, fold.window.lateness)
    update = mask_reached_ends(ends, frontier).astype(np.int32)
    marks = {
        "_on": pa.array(1 - update),
        "_up": pa.array(update),
        "_n": pa.array(np.ones(ends.size, dtype=np.int32)),
    }
    columns = {name: marks[name] if name in marks else folded[name] for name in fold.schema.names}
    table = pa.table(columns).cast(fold.schema)
    return table.filter(pa.array(~purged)) if purged.any() else table
