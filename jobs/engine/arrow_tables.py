"""Arrow tables: the types of declared columns, their columns, and tables as Parquet objects.

All engines, sinks and streams use them.
"""

import io
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.canonical_json import sha256_of_bytes, sha256_of_file
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.errors import get_first_line
from tidegate.json_types import JsonObject, read_data_file

from .errors import FILE_UNREADABLE

_WRONG_BYTES = "its bytes are not those that were written"
Row = dict[str, Any]
"""A row of an Arrow table as Python values: column -> value."""
RowView = Mapping[str, Any]
"""The same, for those who only read it."""
TimeBounds = tuple[int | None, int | None]
"""Least and greatest time of rows, in ticks; None if there are none."""
ARROW_TYPES: Final[dict[str, JsonObject]] = read_data_file(__package__, "arrow_types.toml")
"""Name of an Arrow type -> what is known of it; the file says what."""
TIMESTAMP_UTC: Final = pa.timestamp("us", tz="UTC")
_ARROW_TYPES = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP_UTC,
    "binary": pa.binary(),
}
_DECIMAL_PATTERN = re.compile(r"decimal\((\d+),\s*(\d+)\)\Z")


def to_arrow_type(declared: str) -> pa.DataType:
    """Return the Arrow type of a declared column type, such as `long` or `decimal(10, 2)`.

    Times are microseconds in UTC.

    Raises:
        KeyError: no column can be declared with this type.
    """
    decimal = _DECIMAL_PATTERN.match(declared)
    return pa.decimal128(int(decimal[1]), int(decimal[2])) if decimal else _ARROW_TYPES[declared]


def to_arrow_types(columns: Mapping[str, str]) -> dict[str, pa.DataType]:
    """Return the Arrow type of each declared column."""
    return {name: to_arrow_type(declared) for name, declared in columns.items()}


def replace_column(table: Any, name: str, values: Any) -> Any:
    """Return a table with other values in one column."""
    return table.set_column(table.column_names.index(name), name, values)


def conform_to_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the rows with exactly the columns of `schema`.

    A file written before a column was added reads as null there.
    """
    return pa.table(
        [get_column_or_nulls(rows, f.name, f.type).cast(f.type) for f in schema], schema
    )


def get_column_or_nulls(rows: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column, or as many nulls if there is none."""
    if name in rows.column_names:
        return rows[name]
    return pa.chunked_array([pa.nulls(rows.num_rows, kind)])


def convert_to_ticks(times: Any) -> Any:
    """Return an Arrow column of timestamps as int64 ticks; those without a zone count as UTC.

    Nulls stay null. Nanoseconds that are not whole ticks raise `pyarrow.ArrowInvalid`.
    """
    return times.cast(TIMESTAMP_UTC).cast(pa.int64())


def list_rows(table: Any) -> list[Row]:
    """Return the rows of a table as Python values; also those that Python's own types cannot hold.

    A time or date outside the years 1 to 9999 is a text in ISO form with a sign, and a byte of a
    text that is not UTF-8 is the replacement character.
    """
    try:
        return list(table.to_pylist())
    except (OverflowError, ValueError):
        columns = [[_to_python(value) for value in column] for column in table.columns]
        rows = zip(*columns, strict=True)
        return [dict(zip(table.column_names, row, strict=True)) for row in rows]


def _to_python(value: Any) -> Any:
    """Return an Arrow scalar as a Python value, or as a text where Python has no such value."""
    if value.is_valid and pa.types.is_list(value.type):
        return [_to_python(one) for one in value.values]
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes().decode("utf-8", "replace")
    except (OverflowError, ValueError):
        return _format_far_time(value)


def _format_far_time(value: Any) -> str:
    is_date = pa.types.is_date(value.type)
    number = value.cast(pa.int32() if is_date else pa.int64()).as_py()
    text = str(np.datetime64(number, "D" if is_date else value.type.unit))
    sign = "" if text.startswith("-") else "+"
    return f"{sign}{text}{'Z' if not is_date and value.type.tz else ''}"


def read_parquet_object(
    store: Store, key: str, sha256: str = "", columns: list[str] | None = None
) -> Any:
    """Return the rows of one object, which is read from the store whole, or some of their columns.

    With `sha256`, the checksum of what was written, a wrong byte is noticed wherever it is.

    Raises:
        NotFoundError: there is no such object.
        FileUnreadableError: it is damaged.
    """
    data = store.get(key).data
    if sha256 and sha256_of_bytes(data) != sha256:
        raise FILE_UNREADABLE(uri=store.uri(key), cause=_WRONG_BYTES)
    try:
        return pq.read_table(pa.BufferReader(data), columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise FILE_UNREADABLE(uri=store.uri(key), cause=get_first_line(error)) from error


def read_columns(store: Store, files: Iterable[FileRef], schema: Any) -> Any:
    """Return the columns of a schema from files; a column that is younger than a file is null."""
    rows = (
        conform_to_schema(read_parquet_object(store, file.key, file.sha256), schema)
        for file in files
    )
    return pa.concat_tables([schema.empty_table(), *rows])


def require_written_bytes(store: Store, file: FileRef, path: Path) -> None:
    """Refuse a local copy of a file whose bytes have changed; a file is read for this once.

    Raises:
        FileUnreadableError: it is damaged.
    """
    if file.sha256 and not _has_checksum(path, file.sha256):
        raise FILE_UNREADABLE(uri=store.uri(file.key), cause=_WRONG_BYTES)


@lru_cache(maxsize=2_000)
def _has_checksum(path: Path, sha256: str) -> bool:
    return sha256_of_file(path) == sha256


def encode_parquet(rows: Any) -> bytes:
    """Return rows as the bytes of a Parquet object."""
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="snappy")
    return buffer.getvalue()


def write_parquet_object(
    store: Store,
    key: str,
    rows: Any,
    kind: str,
    bounds: TimeBounds = (None, None),
    extra: Mapping[str, Any] | None = None,
) -> FileRef:
    """Write rows to the store, over what the key had, and return the reference for a manifest.

    `bounds` are the least and the greatest time in the rows, in ticks.
    """
    data = encode_parquet(rows)
    store.put(key, data)
    return describe_parquet_object(key, data, kind, bounds, extra)


def describe_parquet_object(
    key: str,
    data: bytes,
    kind: str,
    bounds: TimeBounds = (None, None),
    extra: Mapping[str, Any] | None = None,
) -> FileRef:
    """Return the reference for the bytes of an object; see `write_parquet_object`."""
    return FileRef(
        key=key,
        rows=pq.read_metadata(io.BytesIO(data)).num_rows,
        bytes=len(data),
        sha256=sha256_of_bytes(data),
        min_time=bounds[0],
        max_time=bounds[1],
        kind=kind,
        extra=dict(extra or {}),
    )
