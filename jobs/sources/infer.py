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

from tidegate.jobs.sources.avro import read_avro
from tidegate.jobs.sources.decode import decompressed
from tidegate.jobs.sources.footers import read_parquet
from tidegate.jobs.spec.casts import text_form

__all__ = ["infer"]

_ROWS: Final = 10_000  # of text that are looked at
_TIME: Final = r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|z|[+-]\d{2}(:?\d{2})?)?"
_FORMS: Final = {
    "boolean": "true|false",
    "long": r"-?(0|[1-9][0-9]{0,17})",  # 01234 is a name of something, not a number
    "double": r"-?(0|[1-9][0-9]{0,14})([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "date": str(text_form("date")),
    "timestamp": _TIME,
}


def infer(key: str, data: bytes, form: str) -> dict[str, str]:
    """Column -> declared type; a column of a type that no spec has is a ``string``.

    Args:
        key: name of the object, whose ending tells its compression.
        data: its bytes.
        form: as `format` of a source.

    Raises:
        ValueError: there is no such object in these bytes, or no row in it.
    """
    data = decompressed(key, data)
    if form == "json":
        return _of_json(data)
    if form == "csv":
        return _of_csv(data)
    return {field.name: _declared(field.type) for field in _table(data, form).schema}


def _table(data: bytes, form: str) -> pa.Table:
    if form == "avro":
        return read_avro(data)
    if form == "parquet":
        return read_parquet(io.BytesIO(data))
    import pyarrow.orc as orc

    return orc.ORCFile(io.BytesIO(data)).read()


def _declared(kind: Any) -> str:
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


def _of_json(data: bytes) -> dict[str, str]:
    lines = (line for line in data.split(b"\n") if line.strip())
    values: dict[str, list[Any]] = {}
    for line in islice(lines, _ROWS):
        row = json.loads(line)
        if not isinstance(row, Mapping):
            raise ValueError(f"no JSON object: {line[:80]!r}")
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return _of_values({name: [_text(v) for v in column if v is not None] for name, column in values.items()})


def _text(value: Any) -> str:
    if isinstance(value, str):  # a number in quotes is text
        return value if re.fullmatch(f"{_TIME}|{_FORMS['date']}", value) else f"{value}~"
    return json.dumps(value)


def _of_csv(data: bytes) -> dict[str, str]:
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""))
    names = next((line for line in reader if line), [])
    rows = [row for row in islice(reader, _ROWS) if len(row) == len(names)]
    return _of_values({name: [row[place] for row in rows if row[place]] for place, name in enumerate(names)})


def _of_values(columns: Mapping[str, Iterable[str]]) -> dict[str, str]:
    if not columns:
        raise ValueError("there is no row in it")
    return {name: _narrowest(list(texts)) for name, texts in columns.items()}


def _narrowest(texts: list[str]) -> str:
    """The first type whose form all texts have."""
    fits = (kind for kind, form in _FORMS.items() if all(re.fullmatch(form, text) for text in texts))
    return next(fits, "string") if texts else "string"
