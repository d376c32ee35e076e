"""Proposes a schema for a source from one of its objects (`tidegate infer`).

Nothing else uses the proposal: what counts is the schema that the user writes into the spec.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from tidegate.jobs.sources.object_decoding import decompress_object, read_typed_object
from tidegate.jobs.spec.cast_rules import build_text_pattern

_MAX_SAMPLE_ROWS: Final = 10_000  # of JSON or CSV
_TIMESTAMP_PATTERN: Final = (
    r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|z|[+-]\d{2}(:?\d{2})?)?"
)
# In order of preference.
_TYPE_PATTERNS: Final = {
    "boolean": "true|false",
    "long": r"-?(0|[1-9][0-9]{0,17})",  # 01234 is a code of something, not a number
    "double": r"-?(0|[1-9][0-9]{0,14})([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "date": str(build_text_pattern("date")),
    "timestamp": _TIMESTAMP_PATTERN,
}


def infer_columns(key: str, data: bytes, form: str) -> dict[str, str]:
    """Return column -> declared type; a type that a spec cannot declare becomes ``string``.

    Args:
        key: the object's name, whose ending announces its compression.
        data: the object's bytes.
        form: a `format` of a source.

    Raises:
        ValueError: the bytes are not an object of this format, or it has no rows.
    """
    data = decompress_object(key, data)
    if form == "json":
        return _infer_from_json(data)
    if form == "csv":
        return _infer_from_csv(data)
    return {
        field.name: _to_declared_type(field.type) for field in read_typed_object(data, form).schema
    }


def _to_declared_type(arrow_type: Any) -> str:
    types = pa.types
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_decimal(arrow_type) and 0 <= arrow_type.scale <= arrow_type.precision <= 38:
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    tests = {
        "boolean": types.is_boolean(arrow_type),
        "int": arrow_type in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()),
        "long": types.is_integer(arrow_type) and arrow_type != pa.uint64(),
        "float": types.is_float32(arrow_type),
        "double": types.is_float64(arrow_type),
        "date": types.is_date32(arrow_type),
        "timestamp": types.is_timestamp(arrow_type),
        "binary": types.is_binary(arrow_type) or types.is_large_binary(arrow_type),
    }
    return next((name for name, fits in tests.items() if fits), "string")


def _infer_from_json(data: bytes) -> dict[str, str]:
    lines = (line for line in data.split(b"\n") if line.strip())
    texts: dict[str, list[str]] = {}
    for line in islice(lines, _MAX_SAMPLE_ROWS):
        row = json.loads(line)
        if not isinstance(row, Mapping):
            raise ValueError(f"no JSON object: {line[:80]!r}")
        for name, value in row.items():
            column = texts.setdefault(name, [])
            if value is not None:
                column.append(_to_pattern_text(value))
    return _infer_from_texts(texts)


def _to_pattern_text(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    # A number or a boolean in quotes is text; times have no other form in JSON.
    is_time = re.fullmatch(f"{_TIMESTAMP_PATTERN}|{_TYPE_PATTERNS['date']}", value)
    return value if is_time else f"{value}~"


def _infer_from_csv(data: bytes) -> dict[str, str]:
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""))
    names = next((line for line in reader if line), [])
    rows = [row for row in islice(reader, _MAX_SAMPLE_ROWS) if len(row) == len(names)]
    return _infer_from_texts(
        {name: [row[n] for row in rows if row[n]] for n, name in enumerate(names)}
    )


def _infer_from_texts(columns: Mapping[str, Iterable[str]]) -> dict[str, str]:
    if not columns:
        raise ValueError("there is no row in it")
    return {name: _choose_type(list(texts)) for name, texts in columns.items()}


def _choose_type(texts: list[str]) -> str:
    """Return the first type whose form all texts have."""
    fits = (
        kind
        for kind, pattern in _TYPE_PATTERNS.items()
        if all(re.fullmatch(pattern, text) for text in texts)
    )
    return next(fits, "string") if texts else "string"
