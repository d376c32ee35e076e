"""Rows as JSON texts, as `to_json` of Spark SQL writes them: nulls of a row are left out.

Of a double, Spark may write one more digit, which means the same number.
"""

import base64
import math
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Texts = list[str | None]
"""A JSON text for each value; None for null."""

_SHORT: Final = {
    '"': '\\"',
    "\\": r"\\",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
}
_ESCAPES: Final = str.maketrans({chr(i): f"\\u{i:04X}" for i in range(32)} | _SHORT)
_LEAST_PLAIN: Final = 1e-3
_LEAST_SCIENTIFIC: Final = 1e7


def write_row_texts(rows: pa.Table) -> list[str]:
    """Return each row as a JSON object."""
    texts = [_write_values(column.combine_chunks()) for column in rows.columns]
    return _write_objects(rows.column_names, texts, rows.num_rows)


def write_json(value: Any) -> str:
    """Return a value of a message as JSON; an object is a tuple of names and values."""
    if isinstance(value, np.float32):
        return _write_double(float(value), repr(float(str(value))))
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _quote_text(value)
        case bytes():
            return f'"{base64.b64encode(value).decode()}"'
        case float():
            return _write_double(value, repr(value))
        case list():
            return f"[{','.join(map(write_json, value))}]"
        case tuple():
            pairs = (f"{_quote_text(name)}:{write_json(one)}" for name, one in value)
            return f"{{{','.join(pairs)}}}"
    return str(value) if isinstance(value, int | Decimal) else _quote_text(str(value))


def _write_objects(names: list[str], columns: list[Texts], rows: int) -> list[str]:
    if not columns:
        return ["{}"] * rows
    members = [_name_values(name, texts) for name, texts in zip(names, columns, strict=True)]
    return [f"{{{','.join(filter(None, row))}}}" for row in zip(*members, strict=True)]


def _name_values(name: str, texts: Texts) -> Texts:
    head = f"{_quote_text(name)}:"
    return [None if text is None else head + text for text in texts]


def _write_values(values: pa.Array) -> Texts:
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _write_values(values.dictionary_decode())
    if pa.types.is_struct(kind):
        children = [_write_values(child) for child in values.flatten()]
        names = [own.name for own in kind]
        texts = _write_objects(names, children, len(values))
        known = values.is_valid().to_pylist()
        return [text if valid else None for text, valid in zip(texts, known, strict=True)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_write_list(item.values) if item.is_valid else None for item in values]
    plain = _list_plain_values(values)
    return [None if value is None else write_json(value) for value in plain]


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _write_list(items: pa.Array) -> str:
    texts = ("null" if text is None else text for text in _write_values(items))
    return f"[{','.join(texts)}]"


def _list_plain_values(values: pa.Array) -> list[Any]:
    """Values for `write_json`; times are texts, because Python has no years beyond 9999."""
    kind = values.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        values = values.cast(pa.int64())
    elif pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        values = _write_times(values.cast(pa.int64()), kind.unit, "ms", zone)
    elif pa.types.is_date32(kind):
        values = _write_times(values.cast(pa.int32()), "D", "D", "")
    elif pa.types.is_float16(kind):
        values = values.cast(pa.float64())
    elif _is_text(kind):
        # A text of Arrow may have bytes that are no UTF-8.
        binary = values.cast(pa.large_binary())
        raw = binary.to_pylist()
        return [None if value is None else value.decode(errors="replace") for value in raw]
    plain: list[Any] = values.to_pylist()
    if pa.types.is_float32(kind):
        return [None if value is None else np.float32(value) for value in plain]
    return plain


def _write_times(ticks: pa.Array, unit: str, shown: str, zone: str) -> pa.Array:
    numbers = pc.fill_null(ticks, 0).to_numpy(zero_copy_only=False).astype(f"datetime64[{unit}]")
    texts = np.datetime_as_string(numbers.astype(f"datetime64[{shown}]"))
    found = [text + zone for text in texts.tolist()]
    return pc.if_else(ticks.is_valid(), pa.array(found, pa.string()), pa.scalar(None, pa.string()))


def _quote_text(value: str) -> str:
    return f'"{value.translate(_ESCAPES)}"'


def _write_double(value: float, digits: str) -> str:
    """Java's text of a double, of the shortest digits."""
    if not math.isfinite(value):
        return {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}[str(value)]
    size = abs(value)
    if size == 0 or _LEAST_PLAIN <= size < _LEAST_SCIENTIFIC:
        return digits
    sign = "-" if value < 0 else ""
    whole, _, exponent = digits.removeprefix("-").partition("e")
    front, _, fraction = whole.partition(".")
    power = int(exponent or 0) + len(front) - 1
    digits = (front + fraction).rstrip("0")
    cut = len(digits) - len(digits.lstrip("0"))
    digits = digits[cut:]
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{power - cut}"
