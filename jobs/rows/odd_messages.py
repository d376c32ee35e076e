"""Messages of topics one at a time: those that Arrow does not read many at once.

Each becomes a row with a value in each column, or a dead letter that says why.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import get_first_line
from tidegate.jobs.engine.interfaces import ROWS_PER_ORDINAL
from tidegate.jobs.spec.pipeline import SourceSpec

from .json_messages import (
    PlainMessages,
    convert_texts,
    find_odd_values,
    get_kafka_options,
    list_field_kinds,
    list_former_names,
    list_payload_columns,
)
from .row_texts import write_json
from .text_values import cast_text

PayloadDecoder = Callable[[bytes], Mapping[str, Any]]
"""Returns column -> value of a payload; raises `DeadMessageError`."""

_BLANKS = " \t\r\n"
_NO_OBJECT = "the message is not a JSON object"
_SERIALIZER_BYTES = 5
# Parsers of JSON on the JVM refuse more.
_MOST_DIGITS = 1_000
_MOST_LEVELS = 1_000
_MOST_NAME = 50_000
_FAULTS = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)


class DeadMessageError(ValueError):
    """A message is a dead letter; says why."""


@contextmanager
def _allow_levels() -> Iterator[None]:
    """Let Python read texts of so many levels: it counts them like calls."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10 * _MOST_LEVELS))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@_allow_levels()
def read_odd_messages(
    messages: pa.Table, plan: PlainMessages, source: SourceSpec, decode: PayloadDecoder
) -> pa.Table:
    """Return a row for each message, as `PlainMessages.columns` has it."""
    rows: list[Mapping[str, Any]] = []
    reasons: list[str | None] = []
    texts: list[str | None] = []
    times = messages["timestamp"].cast(pa.int64()).to_pylist()
    found = messages.drop_columns(["timestamp"]).to_pylist()
    for message, time in zip(found, times, strict=True):
        row: dict[str, Any] = {}
        reason: str | None = None
        try:
            row = _read_message(message, time, source, decode)
        except DeadMessageError as error:
            reason = str(error)
        except _FAULTS as error:
            reason = f"the message cannot be read: {get_first_line(error)}"
        rows.append(row)
        reasons.append(reason)
        texts.append(None if reason is None else _show_message(message, source))
    offsets = [message["offset"] % ROWS_PER_ORDINAL for message in found]
    own = list(plan.columns)[:-4]
    columns = [_build_column([row.get(field.name) for row in rows], field.type) for field in own]
    return pa.table([*columns, reasons, texts, offsets, messages["partition"]], plan.columns)


def decode_payloads(
    values: pa.Array, plan: PlainMessages, source: SourceSpec, decode: PayloadDecoder
) -> pa.Array:
    """Return payloads as structs of the fields; null where there is none, or one is odd.

    `decode` may leave texts that are still to be cast.
    """
    found = [_decode_plainly(value, decode) for value in values.to_pylist()]
    odd = np.array([row is None for row in found], dtype=bool)
    rows = [row or {} for row in found]
    columns = []
    for field, declared in zip(plan.fields, list_field_kinds(source).values(), strict=True):
        cells = [row.get(field.name) for row in rows]
        kinds = set(map(type, cells))
        texts = None
        if declared != "string" and str in kinds:
            texts = [cell if isinstance(cell, str) else None for cell in cells]
            cells = [None if isinstance(cell, str) else cell for cell in cells]
        column = _build_column(cells, field.type)
        if texts is not None:
            words = pa.array(texts, pa.string())
            cast = convert_texts(words, declared, plan.tick)
            column = pc.coalesce(column, cast)
            odd |= find_odd_values(words, cast)
        columns.append(column)
    return pa.StructArray.from_arrays(columns, fields=list(plan.fields), mask=pa.array(odd))


def _decode_plainly(value: bytes | None, decode: PayloadDecoder) -> Mapping[str, Any] | None:
    if value is None:
        return None
    try:
        return decode(value)
    except _FAULTS:
        return None


def _build_column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The values of a column; times are ticks, and dates are days."""
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pa.array(values, kind)


def _read_message(
    message: Mapping[str, Any], time: int | None, source: SourceSpec, decode: PayloadDecoder
) -> dict[str, Any]:
    kafka = get_kafka_options(source)
    value = message["value"]
    if value is None and kafka.tombstones == "dead_letter":
        raise DeadMessageError("a tombstone: the message has no value")
    row = {} if value is None else dict(decode(value))
    if kafka.timestamp:
        if time is None:
            raise DeadMessageError("the timestamp of the message is more than a column holds")
        row[kafka.timestamp] = time
    if kafka.key:
        row[kafka.key] = _read_bytes(message["key"], kafka.key, source)
    for name, header in kafka.headers.items():
        headers = {one["key"]: one["value"] for one in message["headers"] or ()}
        row[name] = _read_bytes(headers.get(header), name, source)
    return row


def _read_bytes(raw: bytes | None, name: str, source: SourceSpec) -> Any:
    """The value of a key or a header."""
    if raw is None or source.columns[name] == "binary":
        return raw
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise DeadMessageError(f"{name} is not UTF-8: 0x{raw.hex().upper()}") from None
    return _cast_column(text, name, source)


def _cast_column(text: str, name: str, source: SourceSpec) -> Any:
    value = cast_text(text, source.columns[name], source)
    if value is None:
        raise DeadMessageError(f"{name} is no {source.columns[name]}: {text}")
    return value


def cast_fields(fields: Mapping[str, str | None], source: SourceSpec) -> dict[str, Any]:
    """Return column -> value of the texts of a payload's fields.

    Raises:
        DeadMessageError: one does not fit.
    """
    former = list_former_names(source)
    row = {}
    for name in list_payload_columns(source):
        text = fields.get(name)
        text = fields.get(former[name]) if text is None and name in former else text
        row[name] = None if text is None else _cast_column(text, name, source)
    return row


def _show_message(message: Mapping[str, Any], source: SourceSpec) -> str | None:
    """The text of a message in its dead letter."""
    value, key = message["value"], message["key"]
    if value is None:
        return None if key is None else f"key {key.decode('utf-8', 'replace')}"
    if get_kafka_options(source).payload != "json":
        return f"0x{value.hex().upper()}"
    text: str = value.decode("utf-8", "replace")
    return text


# JSON


def decode_json(value: bytes, source: SourceSpec) -> dict[str, Any]:
    """Return column -> value of a JSON message; of two equal fields, the last one counts.

    Raises:
        DeadMessageError: it is not an object, has a field that the schema lacks, or a value that
            does not fit.
    """
    found = dict(_parse_object(value))
    strange = [name for name in found if name not in list_field_kinds(source)]
    if strange and source.evolution.added == "dead_letter":
        raise DeadMessageError(f"not in the schema: {', '.join(map(_replace_halves, strange))}")
    texts = {name: _write_text(one) for name, one in found.items()}
    return cast_fields(texts, source)


def _parse_object(value: bytes) -> tuple[tuple[str, Any], ...]:
    try:
        text = value.decode().lstrip(_BLANKS)
    except UnicodeDecodeError:
        raise DeadMessageError("the message is not UTF-8") from None
    if value[:1] == b"\0" and value[_SERIALIZER_BYTES : _SERIALIZER_BYTES + 1] == b"{":
        number = int.from_bytes(value[1:_SERIALIZER_BYTES], "big")
        raise DeadMessageError(
            f"{_NO_OBJECT}: it begins with the 5 bytes of a serializer that uses a schema registry,"
            f" schema {number}; payload: json reads JSON without them"
        )
    if not text.startswith("{") or _count_levels(text) > _MOST_LEVELS:
        raise DeadMessageError(_NO_OBJECT)
    try:
        # What follows the object is ignored.
        found: tuple[tuple[str, Any], ...] = _DECODER.raw_decode(text)[0]
    except ValueError:
        raise DeadMessageError(_NO_OBJECT) from None
    return found


def _count_levels(text: str) -> int:
    """How deep the object at the beginning of a text is nested, if that is in question."""
    depth = deepest = text.count("{") + text.count("[")
    if deepest <= _MOST_LEVELS:
        return deepest
    depth = deepest = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "{[") - (token[0] in "}]")
        deepest = max(deepest, depth)
        if depth == 0:
            break
    return deepest


def _write_text(value: Any) -> str | None:
    """A value in a column of text; what is not a text becomes JSON."""
    if value is None:
        return None
    return _replace_halves(value if isinstance(value, str) else write_json(value))


def _replace_halves(text: str) -> str:
    """Replace escapes of half a character by question marks."""
    return text.encode("utf-8", "replace").decode()


def _read_pairs(pairs: list[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    if any(len(name) > _MOST_NAME for name, _ in pairs):
        raise ValueError("a name is too long")
    return tuple(pairs)


def _check_digits(text: str) -> str:
    if sum(map(str.isdigit, text)) > _MOST_DIGITS:
        raise ValueError("a number is too long")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_read_pairs,
    parse_int=lambda text: int(_check_digits(text)),
    parse_float=lambda text: float(_check_digits(text)),
    parse_constant=_refuse_constant,
)
