"""The row rules as DuckDB SQL over all rows of windows: for splices and the check of exactness."""

from __future__ import annotations

from tidegate.jobs.rules.aggregates import build_recompute_sql
from tidegate.jobs.rules.duck_frame import to_duckdb
from tidegate.jobs.rules.row_conditions import first_window_start_sql, last_window_start_sql
from tidegate.jobs.spec.window_specs import WindowSpec


def build_starts_sql(window: WindowSpec) -> str:
    """Return SQL for the starts of a row's windows, one row each, of rows with `_et` and `_end`.

    Only for tumbling and sliding windows.
    """
    first, last = first_window_start_sql(window), last_window_start_sql(window)
    return to_duckdb(f"explode(sequence({first}, {last}, {window.period}L))")


def build_recompute_columns(window: WindowSpec) -> list[str]:
    """Return SQL for the aggregates of a window's rows; null for those that are not exact.

    Rows need `_seq`, which may be null only for a window without rows.
    """
    found = {name: build_recompute_sql(a) or "null" for name, a in window.aggregates.items()}
    return [f'{to_duckdb(sql)} as "{name}"' for name, sql in found.items()]
