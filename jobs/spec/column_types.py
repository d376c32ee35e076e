"""Types of the columns of a pipeline's tables, as far as its spec tells them.

A table keeps the type that a column had when it was first written. So a column can be used again
only with that type, whichever spec wrote it.
"""

import re
from collections.abc import Sequence
from typing import Final

from .pipeline import EVENTS, PipelineSpec
from .table_layout import ColumnTypes
from .window_specs import Aggregate, AggregateFunction

COLUMN_NAME: Final = re.compile(r"`([^`]+)`|([A-Za-z]\w*)")
"""A column in Spark SQL: its name is one of the groups."""
DUCKDB_TYPES: Final = {"long": "bigint", "timestamp": "timestamptz", "binary": "blob"}
"""Declared type and DuckDB's name of it, where they differ."""
_ARITHMETIC = re.compile(r"(?:`[^`]+`|[A-Za-z]\w*|\d{1,9}|[\s+*()-])+")
_COUNTS = (
    AggregateFunction.COUNT,
    AggregateFunction.APPROX_DISTINCT,
    AggregateFunction.DISTINCT,
)
_DOUBLES = (AggregateFunction.AVG, AggregateFunction.APPROX_QUANTILE)
_SAME_TYPE = (
    AggregateFunction.MIN,
    AggregateFunction.MAX,
    AggregateFunction.FIRST,
    AggregateFunction.LAST,
)
_SUM_TYPES = {"int": "long", "long": "long", "float": "double", "double": "double"}


def derive_table_types(spec: PipelineSpec) -> dict[str, dict[str, str]]:
    """Return table -> column -> type, for the tables whose columns the user chooses.

    The late table has the columns of the events table. Where the spec does not tell the type of an
    aggregate, it is replaced by the text of the aggregate: the same text over the same columns has
    the same type.
    """
    tables = {EVENTS: dict(spec.row_columns)}
    for name, window in spec.windows.items():
        keys = {key: spec.columns.get(key, "string") for key in window.keys}
        results = {
            column: derive_aggregate_type(one, spec.columns)
            for column, one in window.aggregates.items()
        }
        tables[name] = {**keys, **results}
    columns = spec.stream_graph.columns
    return tables | {name: dict(columns[name]) for name in spec.streams}


def derive_aggregate_type(aggregate: Aggregate, columns: ColumnTypes) -> str:
    """Return the type of an aggregate's column, or the aggregate where it is not known."""
    function, kind = aggregate.function, infer_argument_type(aggregate, columns)
    if function in _COUNTS:
        return "long"
    if function in _DOUBLES:
        return "double"
    if kind is None:
        return str(aggregate)
    if function in _SAME_TYPE:
        return kind
    if function is AggregateFunction.SUM:
        return _SUM_TYPES.get(kind, f"sum({kind})")
    return f"{function.value}({kind})"


def infer_argument_type(aggregate: Aggregate, columns: ColumnTypes) -> str | None:
    """Return the declared type of an aggregate's argument; None if only Spark SQL knows it.

    Known are columns, and sums and products of numeric columns and whole numbers. Their results,
    and the errors of those that overflow, are the same in both engines.
    """
    match = COLUMN_NAME.fullmatch(aggregate.expression)
    if match:
        return columns.get(match[1] or match[2])
    if not _ARITHMETIC.fullmatch(aggregate.expression):
        return None
    kinds = {columns.get(a or b) for a, b in COLUMN_NAME.findall(aggregate.expression)}
    if not kinds or not kinds <= {"int", "long", "double"}:
        return None
    return next(kind for kind in ("double", "long", "int") if kind in kinds)


def collect_recorded_types(specs: Sequence[PipelineSpec]) -> dict[tuple[str, str], set[str]]:
    """Return (table, column) -> the types that these specs give it."""
    recorded: dict[tuple[str, str], set[str]] = {}
    for spec in specs:
        for table, columns in derive_table_types(spec).items():
            for column, kind in columns.items():
                recorded.setdefault((table, column), set()).add(kind)
    return recorded
