"""Physical columns in the types that rows are judged in, and what is wrong with single values.

A text that is not UTF-8 and a time beyond microseconds cost their row: everything behind this
module can hold all other values.
"""

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

NOT_UTF8 = "is not UTF-8"
_BEYOND = "is a time that no column holds"


def may_be_odd(arrow: str, declared: str | None) -> bool:
    """Whether a value may be wrong although the type of its column fits the declared one."""
    is_text = declared == "string" and arrow in ("string", "large_string", "string_view")
    return is_text or (
        declared == "timestamp" and arrow.startswith(("timestamp[ms", "timestamp[s"))
    )


def convert_rows(rows: pa.Table, schema: pa.Schema, declared: Collection[str]) -> tuple[Any, Any]:
    """Convert the columns of some rows.

    Args:
        rows: as an object has them.
        schema: the columns to return, with the types that they should have.
        declared: the columns whose values make a row bad.

    Returns:
        The columns, and what is wrong with each row; None if nothing is wrong with any.
    """
    columns, reasons = [], None
    for field in schema:
        values, is_bad, complaint = _convert_column(rows[field.name], field.type)
        columns.append(values)
        if is_bad is not None and field.name in declared:
            own = pc.if_else(is_bad, f"{field.name} {complaint}", pa.scalar(None, pa.string()))
            reasons = own if reasons is None else pc.coalesce(reasons, own)
    return columns, reasons


def _convert_column(column: Any, kind: pa.DataType) -> tuple[Any, Any, str]:
    """Return values of a type, which of them stand for another one, and why; None: no value."""
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(column.type):
        return *_convert_times(column, kind), _BEYOND
    values = column.cast(kind)
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return *(_repair_texts(values) if kind == pa.string() else _drop_invalid(values)), NOT_UTF8
    return values, None, ""


def _convert_times(column: Any, kind: pa.DataType) -> tuple[Any, Any]:
    try:
        return column.cast(kind), None
    except pa.ArrowInvalid:
        values = column.cast(kind, safe=False)
    # A number that has overflowed does not come back.
    is_bad = pc.fill_null(pc.not_equal(values.cast(column.type, safe=False), column), False)
    return pc.if_else(is_bad, pa.scalar(None, kind), values), is_bad


def _repair_texts(column: Any) -> tuple[Any, Any]:
    """Replace bytes that are no text by the character for them."""
    raw = column.cast(pa.binary())
    texts = [None if one is None else one.decode("utf-8", "replace") for one in raw.to_pylist()]
    values = pa.chunked_array([pa.array(texts, pa.string())])
    return values, pc.fill_null(pc.not_equal(values.cast(pa.binary()), raw), False)


def _drop_invalid(column: Any) -> tuple[Any, Any]:
    """Make nested values null that hold a text which is none."""
    is_bad = pa.array([not _is_valid(column.slice(row, 1)) for row in range(len(column))])
    good = pc.if_else(is_bad, None, pa.array(range(len(column))))
    return column.take(good), is_bad


def _is_valid(column: Any) -> bool:
    try:
        pa.array(column.to_pylist(), column.type)
    except UnicodeDecodeError:
        return False
    return True
