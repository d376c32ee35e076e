"""Says which outputs the driver computes in DuckDB, and why Spark SQL has to compute the others.

Native is only what tests have shown to be equal in both engines (`make agreement`).
"""

from __future__ import annotations

from tidegate.jobs.spec.pipeline import PipelineSpec

from .aggregates import explain_spark_aggregate
from .expressions import explain_spark_sources

_LONGEST_SPAN = 1 << 55
"""In ticks, 1,100 years: with times of years of four digits, no sum leaves int64."""
_KEY_TYPES = ("int", "long", "string", "boolean", "date", "timestamp", "decimal", "binary")
"""Floats are no such keys: 0.0 and -0.0, and the many kinds of NaN, compare by own rules."""


_TABLE_COLUMNS = (
    *("position", "section", "output", "reason", "lateness_us", "frontier"),
    *("window_start", "window_end", "revision", "replaces"),
)


def can_name_columns(*names: str) -> bool:
    """Whether DuckDB tells these columns apart, and from those of the tables, without case."""
    lower = [name.lower() for name in (*names, *_TABLE_COLUMNS)]
    return len(set(lower)) == len(lower)


def explain_spark_rows(spec: PipelineSpec) -> str | None:
    """Why Spark SQL has to compute all outputs of a pipeline; None if it has not."""
    if not spec.spark.master.startswith("local"):
        return "rows are computed on the executors of a cluster"
    if not can_name_columns(*spec.row_columns) or not all(
        can_name_columns(*source.columns) for source in spec.sources.values()
    ):
        return "names of columns differ in upper and lower case only"
    return explain_spark_sources(spec)


def explain_spark_window(spec: PipelineSpec, name: str) -> str | None:
    """Why Spark SQL has to compute a window output; None if it has not.

    The reasons of `explain_spark_rows` hold beside these.
    """
    window = spec.windows[name]
    if window.zero_rows:
        return "zero_rows"
    if not can_name_columns(*window.keys, *window.aggregates):
        return "names of columns differ in upper and lower case only"
    if any(source.edges is not None for source in spec.sources.values()):
        return "edge events"
    spans = (window.size, window.period, window.gap, window.offset, window.min_window_start)
    if max(abs(span or 0) for span in spans) > _LONGEST_SPAN:
        return "spans beyond the range that is safe in int64"
    known = {**spec.columns, "_source": "string"}
    for key in window.keys:
        if known[key].partition("(")[0] not in _KEY_TYPES:
            return f"a key of type {known[key]}"
    found = (explain_spark_aggregate(what, spec.columns) for what in window.aggregates.values())
    return next((reason for reason in found if reason is not None), None)
