"""Columns of the output tables (Arrow). User columns keep the spec's names and types; times are microseconds in UTC."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from tidegate.jobs.engine.columns import TIMESTAMP, arrow_type
from tidegate.jobs.spec.pipeline import BARRIERS, BUILT, CHECKPOINTS, DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.streams import REJECTIONS
from tidegate.jobs.spec.windows import Aggregate, AggregateFunction, WindowSpec

__all__ = ["own_schema", "table_schema"]

_TEXTS: Final = pa.list_(pa.string())
_ORIGIN: Final = {"_source": pa.string(), "_partition": pa.string(), "_seq": pa.int64()}
_EPOCH: Final = {"_timeline": pa.int32(), "_epoch": pa.int64()}
_STREAM: Final = {
    "position": pa.int64(),
    "stream_time": TIMESTAMP,
    **dict.fromkeys(("_id", "_via", "_origin", "_origin_id"), pa.string()),
}
_OWN: Final[dict[str, dict[str, Any]]] = {
    EVENTS: {"position": pa.int64(), "section": pa.int64(), "_late": pa.bool_(), **_ORIGIN, **_EPOCH},
    LATE: {
        "output": pa.string(),
        "reason": pa.string(),
        "lateness_us": pa.int64(),
        "frontier": TIMESTAMP,
        **_ORIGIN,
        **_EPOCH,
    },
    BUILT: {
        "number": pa.int64(),
        "stamp": TIMESTAMP,
        "section": pa.int64(),
        "first_position": pa.int64(),
        "rows": pa.int64(),
        "first_time": TIMESTAMP,
        "last_time": TIMESTAMP,
        **_EPOCH,
    },
    DEAD_LETTERS: {
        "reason": pa.string(),
        "detail": pa.string(),
        "object": pa.string(),
        "etag": pa.string(),
        "row": pa.string(),
        **_ORIGIN,
        **_EPOCH,
    },
    REJECTIONS: {
        "stream": pa.string(),
        "row_id": pa.string(),
        "destination": pa.string(),
        "via": pa.string(),
        "stamp": TIMESTAMP,
        "last": TIMESTAMP,
        "reason": pa.string(),
        "row": pa.string(),
        **_EPOCH,
    },
    BARRIERS: {
        "barrier_id": pa.int64(),
        "outcome": pa.string(),
        "types": _TEXTS,
        "homogeneous": pa.bool_(),
        "participants": pa.string(),
        "missing": _TEXTS,
        "ended": _TEXTS,
        "tardy": _TEXTS,
        "opened": TIMESTAMP,
        "closed": TIMESTAMP,
        "waited_us": pa.int64(),
        "section": pa.int64(),
        **_EPOCH,
    },
    CHECKPOINTS: {
        "checkpoint_id": pa.string(),
        "slot": pa.int64(),
        "attempt": pa.string(),
        "sealed_at": TIMESTAMP,
        "recorded_now": TIMESTAMP,
        "frontier": TIMESTAMP,
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
        **_EPOCH,
    },
}


def table_schema(spec: PipelineSpec, table: str) -> Any:
    """The Arrow schema of one output table. A window's aggregates over expressions get their likely type only."""
    if table in spec.windows:
        return pa.schema(_window(spec, spec.windows[table]))
    if table in spec.streams:
        return pa.schema({**{name: arrow_type(kind) for name, kind in spec.graph.columns[table].items()}, **_STREAM, **_EPOCH})
    user = {name: arrow_type(kind) for name, kind in spec.columns.items()} if table in (EVENTS, LATE) else {}
    return pa.schema({**user, **_OWN[table]})


def own_schema(table: str) -> Any:
    """tidegate's own columns of a table that is no window."""
    return pa.schema(_OWN[table])


def _window(spec: PipelineSpec, window: WindowSpec) -> dict[str, Any]:
    return {
        **{key: _column(spec, key) for key in window.keys},
        "window_start": TIMESTAMP,
        "window_end": TIMESTAMP,
        "revision": pa.int32(),
        "replaces": _TEXTS,
        **{name: _aggregate(spec, aggregate) for name, aggregate in window.aggregates.items()},
        **_EPOCH,
    }


def _column(spec: PipelineSpec, name: str) -> Any:
    return pa.string() if name in ("_source", "_partition") else arrow_type(spec.columns.get(name, "double"))


def _aggregate(spec: PipelineSpec, aggregate: Aggregate) -> Any:
    kind = _column(spec, aggregate.expression)
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
