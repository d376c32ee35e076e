"""Rows of a splice request from outside the pipeline: cast to its types, or read from a file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.jobs.spec.pipeline import EVENT_TIME, EVENTS, PipelineSpec
from tidegate.jobs.splice.errors import BAD_FILE, BAD_VALUE, NO_EVENT_TIME, NO_FILE
from tidegate.jobs.splice.tables_at_head import make_request_schema
from tidegate.jobs.splice.window_recompute import build_time_expression, open_database
from tidegate.time_units import format_instant


def cast_rows(spec: PipelineSpec, raw: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows with the columns of a request, meant for all outputs.

    Texts are cast value by value; integers in a timestamp column are ticks.

    Raises:
        ConfigurationError: naming the first value that cannot be cast, or a row without event time.
    """
    schema = make_request_schema(spec)
    outputs = {"_outputs": [EVENTS, *spec.windows]}
    arrays = [_cast_column([{**row, **outputs}.get(f.name) for row in raw], f) for f in schema]
    rows = pa.table(arrays, schema=schema)
    with open_database() as db:
        db.register("typed", rows)
        time = build_time_expression(spec)
        facts = db.execute(f"select _source, _partition, _seq, {time} from typed").fetchall()
    missing = [identity for *identity, ticks in facts if ticks is None]
    if missing:
        first = "/".join(map(str, missing[0]))
        raise NO_EVENT_TIME(pipeline=spec.name, count=len(missing), first=first)
    if EVENT_TIME in schema.names:  # the one column for sources with different columns
        instants = pa.array([fact[-1] for fact in facts], pa.int64())
        times = instants.cast(schema.field(EVENT_TIME).type)
        rows = rows.set_column(schema.names.index(EVENT_TIME), EVENT_TIME, times)
    return rows


def _cast_column(values: list[Any], field: Any) -> Any:
    if pa.types.is_list(field.type):
        return pa.array(values, field.type)
    is_time = pa.types.is_timestamp(field.type)
    texts = [
        format_instant(v) if is_time and isinstance(v, int) else _format_value(v) for v in values
    ]
    try:
        with open_database() as db:
            db.register("texts", pa.table({"v": pa.array(texts, pa.string())}))
            kind = _name_sql_type(field.type)
            table = db.sql(f"select cast(v as {kind}) as v from texts").to_arrow_table()
            return table["v"].cast(field.type).combine_chunks()
    except Exception as error:
        raise BAD_VALUE(column=field.name, text=str(error).splitlines()[0]) from error


def _format_value(value: Any) -> str | None:
    if value is None:
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _name_sql_type(kind: Any) -> str:
    names = {
        pa.string(): "varchar", pa.bool_(): "boolean", pa.int32(): "integer", pa.int64(): "bigint",
        pa.float32(): "float", pa.float64(): "double", pa.date32(): "date", pa.binary(): "blob",
    }  # fmt: skip
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    return names.get(kind) or f"decimal({kind.precision},{kind.scale})"


def read_file_bytes(path: Path) -> bytes:
    """Return the contents of a file.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise NO_FILE(path=path, text=error.strerror) from error


def parse_file_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Return the rows of a Parquet, CSV or JSON-lines file.

    Raises:
        ConfigurationError: the data does not fit the file's extension.
    """
    import pyarrow.csv
    import pyarrow.json

    readers: dict[str, Any] = {
        ".parquet": pq.read_table,
        ".csv": pyarrow.csv.read_csv,
        ".json": pyarrow.json.read_json,
        ".jsonl": pyarrow.json.read_json,
    }
    try:
        return list(readers[path.suffix](io.BytesIO(data)).to_pylist())
    except (KeyError, pa.ArrowException) as error:
        raise BAD_FILE(path=path, kind=path.suffix or "a table", text=error) from error
