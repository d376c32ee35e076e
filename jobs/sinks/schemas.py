"""Columns of the output tables (Arrow). User columns keep the spec's names and types; times are microseconds in UTC."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from tidegate.jobs.engine.columns import TIMESTAMP_UTC, to_arrow_type
from tidegate.jobs.spec.pipeline import BARRIERS, BUILT, CHECKPOINTS, DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.streams import REJECTIONS
from tidegate.jobs.spec.windows import Aggregate, AggregateFunction, WindowSpec

__all__ = ["build_system_schema", "build_table_schema"]

_STRING_LIST: Final = pa.list_(pa.string())
_ORIGIN_COLUMNS: Final = {"_source": pa.string(), "_partition": pa.string(), "_seq": pa.int64()}
_EPOCH_COLUMNS: Final = {"_timeline": pa.int32(), "_epoch": pa.int64()}
_STREAM_COLUMNS: Final = {
    "position": pa.int64(),
    "stream_time": TIMESTAMP_UTC,
    **dict.fromkeys(("_id", "_via", "_origin", "_origin_id"), pa.string()),
}
_SYSTEM_COLUMNS: Final[dict[str, dict[str, Any]]] = {
    EVENTS: {"position": pa.int64(), "section": pa.int64(), "_late": pa.bool_(), **_ORIGIN_COLUMNS, **_EPOCH_COLUMNS},
    LATE: {
        "output": pa.string(),
        "reason": pa.string(),
        "lateness_us": pa.int64(),
        "frontier": TIMESTAMP_UTC,
        **_ORIGIN_COLUMNS,
        **_EPOCH_COLUMNS,
    },
    BUILT: {
        "number": pa.int64(),
        "stamp": TIMESTAMP_UTC,
        "section": pa.int64(),
        "first_position": pa.int64(),
        "rows": pa.int64(),
        "first_time": TIMESTAMP_UTC,
        "last_time": TIMESTAMP_UTC,
        **_EPOCH_COLUMNS,
    },
    DEAD_LETTERS: {
        "reason": pa.string(),
        "detail": pa.string(),
        "object": pa.string(),
        "etag": pa.string(),
        "row": pa.string(),
        **_ORIGIN_COLUMNS,
        **_EPOCH_COLUMNS,
    },
    REJECTIONS: {
        "stream": pa.string(),
        "row_id": pa.string(),
        "destination": pa.string(),
        "via": pa.string(),
        "stamp": TIMESTAMP_UTC,
        "last": TIMESTAMP_UTC,
        "reason": pa.string(),
        "row": pa.string(),
        **_EPOCH_COLUMNS,
    },
    BARRIERS: {
        "barrier_id": pa.int64(),
        "outcome": pa.string(),
        "types": _STRING_LIST,
        "homogeneous": pa.bool_(),
        "participants": pa.string(),
        "missing": _STRING_LIST,
        "ended": _STRING_LIST,
        "tardy": _STRING_LIST,
        "opened": TIMESTAMP_UTC,
        "closed": TIMESTAMP_UTC,
        "waited_us": pa.int64(),
        "section": pa.int64(),
        **_EPOCH_COLUMNS,
    },
    CHECKPOINTS: {
        "checkpoint_id": pa.string(),
        "slot": pa.int64(),
        "attempt": pa.string(),
        "sealed_at": TIMESTAMP_UTC,
        "recorded_now": TIMESTAMP_UTC,
        "frontier": TIMESTAMP_UTC,
        "final": pa.bool_(),
        **dict.fromkeys(
            (
                "rows_read",
                "rows_released",
                "rows_late",
                "rows_dropped",
                "rows_rejected",
                "rows_dead",
                "rows_retained",
                "windows_emitted",
                "bytes",
            ),
            pa.int64(),
        ),
        "epoch_ms": pa.float64(),
        "seal_ms": pa.float64(),
        "unpublished": pa.int64(),
        **_EPOCH_COLUMNS,
    },
}


def build_table_schema(spec: PipelineSpec, table: str) -> Any:
    """The Arrow schema of one output table. A window's aggregates over expressions get their likely type only."""
    if table in spec.windows:
        return pa.schema(_build_window_columns(spec, spec.windows[table]))
    if table in spec.streams:
        return pa.schema({**{name: to_arrow_type(kind) for name, kind in spec.stream_graph.columns[table].items()}, **_STREAM_COLUMNS, **_EPOCH_COLUMNS})
    user = {name: to_arrow_type(kind) for name, kind in spec.columns.items()} if table in (EVENTS, LATE) else {}
    return pa.schema({**user, **_SYSTEM_COLUMNS[table]})


def build_system_schema(table: str) -> Any:
    """tidegate's own columns of a table that is no window."""
    return pa.schema(_SYSTEM_COLUMNS[table])


def _build_window_columns(spec: PipelineSpec, window: WindowSpec) -> dict[str, Any]:
    return {
        **{key: _infer_column_type(spec, key) for key in window.keys},
        "window_start": TIMESTAMP_UTC,
        "window_end": TIMESTAMP_UTC,
        "revision": pa.int32(),
        "replaces": _STRING_LIST,
        **{name: _infer_aggregate_type(spec, aggregate) for name, aggregate in window.aggregates.items()},
        **_EPOCH_COLUMNS,
    }


def _infer_column_type(spec: PipelineSpec, name: str) -> Any:
    return pa.string() if name in ("_source", "_partition") else to_arrow_type(spec.columns.get(name, "double"))


def _infer_aggregate_type(spec: PipelineSpec, aggregate: Aggregate) -> Any:
    kind = _infer_column_type(spec, aggregate.expression)
    match aggregate.function:
        case AggregateFunction.COUNT | AggregateFunction.DISTINCT | AggregateFunction.APPROX_DISTINCT:
            return pa.int64()
        case AggregateFunction.AVG | AggregateFunction.APPROX_QUANTILE:
            return pa.float64()
        case AggregateFunction.COLLECT:
            return pa.list_(kind)
        case AggregateFunction.SUM if pa.types.is_integer(kind):
            return pa.int64()
        case AggregateFunction.SUM if pa.types.is_decimal(kind):
            return pa.decimal128(min(38, kind.precision + 10), kind.scale)
        case AggregateFunction.SUM:
            return pa.float64()
        case _:
            return kind
