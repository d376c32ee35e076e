"""Arrow schemas of the output tables and state segments, and how rows become Parquet files and come
back.

Inside the oracle mover timestamps are ticks; only here do they turn into timestamps and back.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC, to_arrow_type
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction, WindowSpec

_PLACE = [("_source", pa.string()), ("_partition", pa.string()), ("_seq", pa.int64())]
_EPOCH = [("_timeline", pa.int32()), ("_epoch", pa.int64())]


def user_schema(spec: PipelineSpec) -> list[tuple[str, Any]]:
    """The columns of rows: those of the spec, and `_event_time` if sources disagree."""
    return [(name, to_arrow_type(kind)) for name, kind in spec.row_columns.items()]


def events_schema(spec: PipelineSpec) -> Any:
    """Columns of the events table."""
    own = [("position", pa.int64()), ("section", pa.int64()), ("_late", pa.bool_())]
    return pa.schema([*user_schema(spec), *own, *_PLACE, *_EPOCH])


def late_schema(spec: PipelineSpec) -> Any:
    """Columns of the late table."""
    own = [
        ("output", pa.string()),
        ("reason", pa.string()),
        ("lateness_us", pa.int64()),
        ("frontier", TIMESTAMP_UTC),
    ]
    return pa.schema([*user_schema(spec), *own, *_PLACE, *_EPOCH])


def dead_schema() -> Any:
    """Columns of the dead letters."""
    names = ("reason", "detail", "object", "etag", "row")
    return pa.schema([*((name, pa.string()) for name in names), *_PLACE, *_EPOCH])


def window_schema(spec: PipelineSpec, window: WindowSpec) -> Any:
    """Columns of a window's results."""
    keys = [
        (k, pa.string() if k == "_source" else to_arrow_type(spec.columns[k])) for k in window.keys
    ]
    own = [
        ("window_start", TIMESTAMP_UTC),
        ("window_end", TIMESTAMP_UTC),
        ("revision", pa.int32()),
        ("replaces", pa.list_(pa.string())),
    ]
    values = [(name, _aggregate_type(spec, a)) for name, a in window.aggregates.items()]
    return pa.schema([*keys, *own, *values, *_EPOCH])


def _aggregate_type(spec: PipelineSpec, aggregate: Aggregate) -> Any:
    kind = (
        pa.string()
        if aggregate.expression == "_source"
        else to_arrow_type(spec.columns.get(aggregate.expression, "long"))
    )
    match aggregate.function:
        case (
            AggregateFunction.COUNT | AggregateFunction.DISTINCT | AggregateFunction.APPROX_DISTINCT
        ):
            return pa.int64()
        case AggregateFunction.AVG | AggregateFunction.APPROX_QUANTILE:
            return pa.float64()
        case AggregateFunction.COLLECT:
            return pa.list_(kind)
        case AggregateFunction.SUM:
            return _sum_type(kind)
        case _:
            return kind


def _sum_type(kind: Any) -> Any:
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    return pa.float64() if pa.types.is_floating(kind) else pa.int64()


def write_rows(
    store: Store,
    key: str,
    kind: str,
    schema: Any,
    rows: Sequence[Mapping[str, Any]],
    times: Iterable[int] = (),
    **extra: Any,
) -> FileRef:
    """Write rows as one Parquet object. `times` gives the file's min and max time."""
    arrays = [_array([row.get(field.name) for row in rows], field.type) for field in schema]
    buffer = io.BytesIO()
    pq.write_table(
        pa.table(arrays, schema=schema), buffer, compression="snappy", coerce_timestamps="us"
    )
    data, known = buffer.getvalue(), list(times)
    store.put(key, data)
    return FileRef(
        key=key,
        rows=len(rows),
        bytes=len(data),
        sha256=sha256_of_bytes(data),
        min_time=min(known, default=None),
        max_time=max(known, default=None),
        kind=kind,
        extra=extra,
    )


def _array(values: list[Any], kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_list(kind) and pa.types.is_timestamp(kind.value_type):
        return pa.array(values, pa.list_(pa.int64())).cast(kind)
    return pa.array(values, kind)


def from_arrow(column: Any) -> list[Any]:
    """Python values of an Arrow column; timestamps as ticks."""
    if pa.types.is_timestamp(column.type):
        return list(column.cast(TIMESTAMP_UTC).cast(pa.int64()).to_pylist())
    return list(column.to_pylist())


def read_rows_of(store: Store, ref: FileRef) -> list[dict[str, Any]]:
    """The rows of a file that `write_rows` wrote."""
    table = pq.read_table(io.BytesIO(store.get(ref.key).data))
    columns = {name: from_arrow(table.column(name)) for name in table.column_names}
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
