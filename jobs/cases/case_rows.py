"""Values and rows as a case writes them: YAML, or CSV in a text or a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from tidegate.jobs.engine.arrow_tables import encode_parquet, to_arrow_type
from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.time_units import Instant, format_instant

_INSTANTS: TypeAdapter[int] = TypeAdapter(Instant)
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class CaseRow:
    """One row of a case.

    Attributes:
        values: column -> value; texts, numbers and truth values as YAML has them, texts in CSV.
        place: file and line.
    """

    values: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class RowsInput:
    """What one partition of a source gets at once: rows, or a file as an object.

    Attributes:
        rows: of an object that the case makes.
        file: an object as the source reads it.
    """

    rows: Sequence[CaseRow] = field(default=())
    file: Path | None = None


def read_csv_rows(text: str, where: str, first_line: int) -> list[CaseRow]:
    """Read CSV with a header, whose line has the number `first_line`; an empty value is null.

    Raises:
        ValueError: a row has more values than the header, or is not CSV; the message has its file
            and line.
    """
    reader = csv.DictReader(io.StringIO(text))
    rows = []
    try:
        for values in reader:
            place = f"{where}:{first_line + reader.line_num - 1}"
            if None in values or None in values.values():
                raise ValueError(f"{place}: the row has not as many values as the header")
            rows.append(CaseRow({name: value or None for name, value in values.items()}, place))
    except csv.Error as error:
        # Of the line that it could not read.
        raise ValueError(f"{where}:{first_line + reader.line_num}: {error}") from error
    return rows


def convert_value(value: Any, kind: pa.DataType) -> Any:
    """Return a value of a case as Arrow takes it for a type; instants are ticks.

    Raises:
        ValueError: its type is another one; the message says what a value looks like.
    """
    if value is None:
        return None
    if pa.types.is_timestamp(kind):
        return convert_instant(value)
    if pa.types.is_list(kind) and isinstance(value, list):
        return [convert_value(one, kind.value_type) for one in value]
    try:
        return _convert_plain(value, kind)
    except (ValueError, InvalidOperation, TypeError, KeyError):
        quote = "; put it in quotes" if pa.types.is_string(kind) else ""
        raise ValueError(f"{value!r} is not of type {kind}{quote}") from None


def convert_instant(value: Any) -> int:
    """Return a time of a case in ticks; without an offset it is UTC.

    Raises:
        ValueError: it is not a time in ISO form.
    """
    try:
        return _INSTANTS.validate_python(value if isinstance(value, str) else None)
    except ValidationError:
        raise ValueError(f"{value!r} is not a time; write it as 2026-01-01T12:00:00Z") from None


def _convert_plain(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return value if isinstance(value, bool) else _TRUTH[value]
    if isinstance(value, bool):
        raise TypeError
    if pa.types.is_integer(kind):
        if isinstance(value, float):
            raise TypeError
        return int(value)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_decimal(kind):
        return Decimal(str(value))
    if not isinstance(value, str):
        raise TypeError
    if pa.types.is_date(kind):
        return date.fromisoformat(value)
    return bytes.fromhex(value) if pa.types.is_binary(kind) else value


def format_value(value: Any, kind: pa.DataType) -> str:
    """Return a value of `convert_value` as a case writes it in YAML."""
    if value is None:
        return "null"
    if pa.types.is_timestamp(kind):
        return format_instant(value)
    if isinstance(value, list):
        return f"[{', '.join(format_value(one, kind.value_type) for one in value)}]"
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quote_text(value)
    return str(value)


def quote_text(value: str) -> str:
    """Return a text as YAML: in quotes, unless it is a plain word."""
    is_plain = value.replace("_", "a").replace("-", "a").isalnum() and value[:1].isalpha()
    words = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
    return value if is_plain and value.lower() not in words else json.dumps(value)


def has_text_rows(source: SourceSpec) -> bool:
    """Whether a case writes the rows of a source as text, as the source has them."""
    if source.kafka is not None:
        return source.kafka.payload == "json"
    return source.table is None and source.format in ("json", "csv")


def encode_rows(source: SourceSpec, rows: Sequence[CaseRow]) -> tuple[str, bytes]:
    """Return the ending of the name, and the bytes of an object with these rows.

    Raises:
        ValueError: a value is not of the type of its column; the message has its file and line.
    """
    if not has_text_rows(source):
        return "parquet", _encode_typed(source, rows)
    values = [_convert_texts(source, row) for row in rows]
    if source.format == "csv" and source.kafka is None:
        return "csv", _encode_csv(source, values)
    return "jsonl", "".join(json.dumps(row) + "\n" for row in values).encode()


def _encode_typed(source: SourceSpec, rows: Sequence[CaseRow]) -> bytes:
    columns = {}
    for name, declared in source.columns.items():
        if "<" in declared:  # arrays and structs
            columns[name] = pa.array([row.values.get(name) for row in rows])
            continue
        kind = to_arrow_type(declared)
        columns[name] = pa.array([_convert_in_row(row, name, kind) for row in rows], kind)
    return encode_parquet(pa.table(columns))


def _convert_in_row(row: CaseRow, name: str, kind: pa.DataType) -> Any:
    try:
        return convert_value(row.values.get(name), kind)
    except ValueError as error:
        raise ValueError(f"{row.place}: {name}: {error}") from None


def _convert_texts(source: SourceSpec, row: CaseRow) -> dict[str, Any]:
    """Return the values of a row as its source has them in text; those that do not fit stay.

    A row may be wrong on purpose, so that it becomes a dead letter.
    """
    found = dict(row.values)
    for name, value in found.items():
        declared = source.columns.get(name, "string")
        if isinstance(value, str) and declared not in ("string", "binary"):
            found[name] = _convert_text(source, value, declared)
    return found


def _convert_text(source: SourceSpec, value: str, declared: str) -> Any:
    unit = source.parse.timestamps
    try:
        if declared == "timestamp" and unit != "iso":
            ticks, size = convert_instant(value), TICKS_PER_UNIT[unit]
            return ticks // size if ticks % size == 0 else ticks / size
        if declared in ("int", "long", "float", "double", "boolean"):
            return convert_value(value, to_arrow_type(declared))
    except ValueError:
        return value
    return value


def _encode_csv(source: SourceSpec, rows: Sequence[Mapping[str, Any]]) -> bytes:
    text, parse = io.StringIO(), source.parse
    writer = csv.writer(text, delimiter=parse.delimiter, quotechar=parse.quote)
    if parse.header:
        writer.writerow(source.columns)
    for row in rows:
        writer.writerow(_format_csv_row(row, source.columns, parse.null))
    return text.getvalue().encode()


def _format_csv_row(row: Mapping[str, Any], columns: Mapping[str, str], null: str) -> Iterator[str]:
    for name in columns:
        value = row.get(name)
        if isinstance(value, bool):
            yield str(value).lower()
        else:
            yield null if value is None else str(value)
