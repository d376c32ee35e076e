"""The row rules as DuckDB SQL over all rows of windows: for splices and the check of exactness.

The results are those of a run in which the rows had come in time. No partial state is needed, so a
window can be recomputed however long ago it was purged. Aggregates without an exact SQL meaning
(sketches, ``sql(...)`` in Spark's dialect) are null.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec

from .aggregates import build_recompute_sql
from .duck_frame import to_duckdb
from .row_conditions import first_window_start_sql, last_window_start_sql

SET_ASIDE_REASONS = ("max_jump", "cti_violation")
"""Reasons of rows that went to no output, whichever output the late table names."""
NEVER_READ_REASONS = "^(dead|file)"
"""Pattern for the reasons of rows that no run has read: corrected dead letters, rows of files."""


@dataclass(frozen=True)
class WindowBounds:
    """One result to compute: key values and ``[start, end)`` in ticks."""

    key: tuple[Any, ...]
    start: int
    end: int


def build_time_expression(spec: PipelineSpec, field: str = "event_time") -> str:
    """Return DuckDB SQL for the event time or `end_time` of a row, in ticks.

    Sources may give different names to the column. Null for a row whose source has no such column.
    """
    columns = {name: getattr(source, field) for name, source in spec.sources.items()}
    distinct = set(columns.values())
    if len(distinct) == 1:
        only = distinct.pop()
        return f'epoch_us("{only}")' if only else "cast(null as bigint)"
    cases = " ".join(
        f"when '{name}' then epoch_us(\"{column}\")" for name, column in columns.items() if column
    )
    return f"case _source {cases} end"


def build_starts_sql(window: WindowSpec) -> str:
    """Return DuckDB SQL for the starts of a row's windows in ticks; it gives one row per start.

    It is an expression for the list of a SELECT over rows with `_et` and `_end`. Only for tumbling
    and sliding windows.
    """
    first = first_window_start_sql(window)
    last = last_window_start_sql(window)
    return to_duckdb(f"explode(sequence({first}, {last}, {window.period}L))")


def build_recompute_columns(window: WindowSpec) -> list[str]:
    """Return DuckDB SQL for the aggregates of a window's rows; null for those not exact.

    Rows need `_seq`, which may be null only for a window without rows.
    """
    found = {name: build_recompute_sql(a) or "null" for name, a in window.aggregates.items()}
    return [f'{to_duckdb(sql)} as "{name}"' for name, sql in found.items()]


def recompute_results(
    db: duckdb.DuckDBPyConnection,
    window: WindowSpec,
    rows: str,
    targets: Sequence[WindowBounds],
    schema: Any,
) -> list[dict[str, Any]]:
    """Return the aggregates of each target, in order, over the rows of the relation `rows`.

    Each result also has ``_rows``, the number of rows in it. Aggregates that cannot be exact are
    None.

    Args:
        db: where the relation is.
        window: the window.
        rows: a relation with the user's columns, identity, ``_et``, ``_end`` and ``_so``.
        targets: what to compute, in order.
        schema: types of the window's table.

    Raises:
        duckdb.Error: DuckDB does not understand an expression of the window.
    """
    keys = [f"_k{i}" for i in range(len(window.keys))]
    # Keys get numbered names, because a key column may have the name of a column below.
    arrays = {
        key: pa.array([t.key[i] for t in targets], schema.field(window.keys[i]).type)
        for i, key in enumerate(keys)
    }
    arrays |= {
        "_t": pa.array(range(len(targets)), pa.int64()),
        "_ts": pa.array([t.start for t in targets], pa.int64()),
        "_te": pa.array([t.end for t in targets], pa.int64()),
    }
    db.register("targets", pa.table(arrays))
    values = ", ".join(build_recompute_columns(window))
    query = f"""
        with goals as (select *, {_build_key_expression(keys)} as _key from targets),
        pairs as ({_build_pairs_query(window, rows)})
        select _t, count(_seq) as _rows, {values}
        from goals left join pairs using (_key, _ts) group by _t order by _t"""
    results = db.sql(query).to_arrow_table()
    # Sums have a wider type in DuckDB than in the table.
    for number, column in enumerate(results.column_names):
        if column in window.aggregates:
            values = results[column].cast(schema.field(column).type)
            results = results.set_column(number, column, values)
    return list(results.to_pylist())


def _build_pairs_query(window: WindowSpec, rows: str) -> str:
    """Return SQL for (row, start of a window that the row belongs to).

    For sessions, the start is that of the target that contains the row.
    """
    key = _build_key_expression([f'"{key}"' for key in window.keys])
    if window.kind is WindowKind.SESSION:
        return f"""select r.*, g._ts from (select *, {key} as _key from {rows}) r
            asof join goals g on r._key = g._key and r._et >= g._ts where r._et < g._te"""
    return f"select *, {key} as _key, {build_starts_sql(window)} as _ts from {rows}"


def _build_key_expression(columns: Sequence[str]) -> str:
    """Return SQL for one value of all key columns; null is a key like any other.

    A struct, not a text: DuckDB compares its parts, so that no two keys look alike and -0.0 is 0.0.
    """
    return f"row({', '.join(columns) or '0'})"
