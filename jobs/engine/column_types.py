"""The Arrow types of the column types that a spec may declare, and columns of Arrow tables.

All engines, sinks and streams use them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

Row = dict[str, Any]
"""A row of an Arrow table as Python values: column -> value."""
RowView = Mapping[str, Any]
"""The same, for those who only read it."""
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
