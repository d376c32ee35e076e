"""A schema for a spec, from one object: a proposal, which holds once it stands in the spec."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from tidegate.jobs.sources.avro import read_avro_file
from tidegate.jobs.sources.object_decoding import decompress_object
from tidegate.jobs.sources.parquet_footers import read_parquet_table
from tidegate.jobs.spec.cast_rules import build_text_pattern

_MAX_SAMPLE_ROWS: Final = 10_000  # of text that are looked at
_TIMESTAMP_PATTERN: Final = (
    r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|z|[+-]\d{2}(:?\d{2})?)?"
)
_TYPE_PATTERNS: Final = {
    "boolean": "true|false",
    "long": r"-?(0|[1-9][0-9]{0,17})",  # 01234 is a name of something, not a number
    "double": r"-?(0|[1-9][0-9]{0,14})([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "date": str(build_text_pattern("date")),
    "timestamp": _TIMESTAMP_PATTERN,
}


def infer_columns(key: str, data: bytes, form: str) -> dict[str, str]:
    """Column -> declared type; a column of a type that no spec has is a ``string``.

    Args:
        key: name of the object, whose ending tells its compression.
        data: its bytes.
        form: as `format` of a source.

    Raises:
        ValueError: there is no such object in these bytes, or no row in it.
    """
    data = decompress_object(key, data)
    if form == "json":
        return _infer_from_json(data)
    if form == "csv":
        return _infer_from_csv(data)
    return {
        field.name: _to_declared_type(field.type) for field in _read_typed_object(data, form).schema
    }


def _read_typed_object(data: bytes, form: str) -> pa.Table:
    if form == "avro":
        return read_avro_file(data)
    if form == "parquet":
        return read_parquet_table(io.BytesIO(data))
    import pyarrow.orc as orc

    return orc.ORCFile(io.BytesIO(data)).read()


def _to_declared_type(kind: Any) -> str:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_decimal(kind) and 0 <= kind.scale <= kind.precision <= 38:
        return f"decimal({kind.precision},{kind.scale})"
    tests = {
        "boolean": types.is_boolean(kind),
        "int": kind in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()),
        "long": types.is_integer(kind) and kind != pa.uint64(),
        "float": types.is_float32(kind),
        "double": types.is_float64(kind),
        "date": types.is_date32(kind),
        "timestamp": types.is_timestamp(kind),
        "binary": types.is_binary(kind) or types.is_large_binary(kind),
    }
    return next((name for name, fits in tests.items() if fits), "string")


def _infer_from_json(data: bytes) -> dict[str, str]:
    lines = (line for line in data.split(b"\n") if line.strip())
    values: dict[str, list[Any]] = {}
    for line in islice(lines, _MAX_SAMPLE_ROWS):
        row = json.loads(line)
        if not isinstance(row, Mapping):
            raise ValueError(f"no JSON object: {line[:80]!r}")
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return _infer_from_texts(
        {
            name: [_to_pattern_text(v) for v in column if v is not None]
            for name, column in values.items()
        }
    )


def _to_pattern_text(value: Any) -> str:
    if isinstance(value, str):  # a number in quotes is text
        return (
            value
            if re.fullmatch(f"{_TIMESTAMP_PATTERN}|{_TYPE_PATTERNS['date']}", value)
            else f"{value}~"
        )
    return json.dumps(value)


def _infer_from_csv(data: bytes) -> dict[str, str]:
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""))
    names = next((line for line in reader if line), [])
    rows = [row for row in islice(reader, _MAX_SAMPLE_ROWS) if len(row) == len(names)]
    return _infer_from_texts(
        {name: [row[place] for row in rows if row[place]] for place, name in enumerate(names)}
    )


def _infer_from_texts(columns: Mapping[str, Iterable[str]]) -> dict[str, str]:
    if not columns:
        raise ValueError("there is no row in it")
    return {name: _choose_narrowest_type(list(texts)) for name, texts in columns.items()}


def _choose_narrowest_type(texts: list[str]) -> str:
    """The first type whose form all texts have."""
    fits = (
        kind
        for kind, form in _TYPE_PATTERNS.items()
        if all(re.fullmatch(form, text) for text in texts)
    )
    return next(fits, "string") if texts else "string"
