"""Avro messages one at a time: what fastavro and Arrow do not read many at once.

Nested values are JSON texts, in which a record leaves its nulls out. A value of a union of several
types is a record with one field, `member0` for the first type; numbers of two sizes are one type.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Final

import fastavro
import numpy as np

from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.row_rules import EXACT_BITS, accepts_family, build_text_pattern

from .errors import AVRO_NOT_A_RECORD, AVRO_REFUSED
from .json_messages import list_former_names, list_payload_columns
from .odd_messages import DeadMessageError
from .row_texts import write_json
from .text_values import (
    TICKS_PER_DAY,
    cast_text,
    check_whole_number,
    find_instant,
    read_decimal_digits,
    round_decimal,
    to_float32,
)

_NO_RECORD: Final = "the message is not a record of the schema"
_MOST_BYTES_OF_A_NUMBER: Final = 10
_PRIMITIVES: Final = frozenset(
    {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
)
_TICKS: Final = {"millis": 1_000, "micros": 1}
_FAMILIES: Final = {bool: "bool", int: "int", float: "float", np.float32: "float"} | {
    Decimal: "decimal",
    str: "string",
    bytes: "binary",
}


@dataclass(frozen=True)
class _Moment:
    """A time: an instant, or a local one."""

    ticks: int
    is_local: bool

    def __str__(self) -> str:
        text = str(np.datetime64(self.ticks // 1_000, "ms"))
        return text if self.is_local else f"{text}Z"


@dataclass(frozen=True)
class _Day:
    """A date as days since 1970."""

    days: int

    def __str__(self) -> str:
        return str(np.datetime64(self.days, "D"))


@dataclass(frozen=True)
class AvroSchema:
    """A schema as fastavro has parsed it; `named` are the types that it defines."""

    record: Any
    named: Mapping[str, Any]


@cache
def parse_avro_schema(schema: bytes) -> AvroSchema:
    """Return the schema of a record.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        found = json.loads(schema)
        _ = [field["name"] for field in found["fields"]]
    except (ValueError, KeyError, TypeError) as error:
        raise AVRO_NOT_A_RECORD(schema=schema[:200], error=error) from error
    named: dict[str, Any] = {}
    try:
        return AvroSchema(fastavro.parse_schema(found, named), named)
    # fastavro lets the exceptions of damaged schemas through, of any kind.
    except Exception as error:
        raise AVRO_REFUSED(cause=repr(error)[:300]) from error


def decode_avro(body: bytes, schema: bytes, source: SourceSpec) -> dict[str, Any]:
    """Return column -> value of a record; what is behind it is ignored.

    Raises:
        DeadMessageError: the bytes are no record, or a value does not fit.
    """
    parsed = parse_avro_schema(schema)
    try:
        record = _BodyReader(body, parsed.named).read_fields(parsed.record)
    # Of damaged bytes, or of a type whose attributes are none.
    except (ArithmeticError, EOFError, LookupError, RecursionError, TypeError, ValueError):
        raise DeadMessageError(_NO_RECORD) from None
    if all(value is None for value, _ in record.values()):
        raise DeadMessageError(_NO_RECORD)
    former = list_former_names(source)
    row = {}
    for name, declared in list_payload_columns(source).items():
        field = name if name in record else former.get(name, name)
        value, own = record.get(field, (None, ""))
        row[name] = None if value is None else _convert_value(value, declared, source)
        if value is not None and row[name] is None:
            shown = _show_value(value)
            raise DeadMessageError(f"{name} is {own}, declared {declared}: {shown}")
    return row


class _BodyReader:
    """Reads the values of one message.

    Raises:
        EOFError, OverflowError, ValueError: the bytes are no such value.
    """

    def __init__(self, body: bytes, named: Mapping[str, Any]) -> None:
        self._body, self._at, self._named = body, 0, named

    def read_fields(self, record: Any) -> dict[str, tuple[Any, str]]:
        """Return field -> value and the name of its type."""
        return {
            field["name"]: (self._read(field["type"]), _describe_type(field["type"]))
            for field in record["fields"]
        }

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._body):
            raise EOFError
        taken, self._at = self._body[self._at : end], end
        return taken

    def _read_long(self) -> int:
        found = 0
        for place in range(_MOST_BYTES_OF_A_NUMBER):
            (byte,) = self._take(1)
            found |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return _require_size(found >> 1 ^ -(found & 1), "long")
        raise OverflowError

    def _read(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return self._read_union(schema)
        if isinstance(schema, str):
            schema = {"type": schema} if schema in _PRIMITIVES else self._named[schema]
        kind = schema["type"]
        if not isinstance(kind, str) or kind in self._named:
            return self._read(kind)
        match kind:
            case "record" | "error":
                fields = ((f["name"], self._read(f["type"])) for f in schema["fields"])
                return tuple((name, value) for name, value in fields if value is not None)
            case "array":
                return [self._read(schema["items"]) for _ in self._read_blocks()]
            case "map":
                items = (
                    (self._read("string"), self._read(schema["values"]))
                    for _ in self._read_blocks()
                )
                return tuple(dict(items).items())
            case "enum":
                return schema["symbols"][_require_place(self._read_long(), schema["symbols"])]
        convert = _LOGICAL.get((kind, schema.get("logicalType")), _keep_value)
        return convert(self._read_leaf(kind, schema), schema)

    def _read_union(self, options: list[Any]) -> Any:
        chosen = options[_require_place(self._read_long(), options)]
        value = self._read(chosen)
        others = [option for option in options if option != "null"]
        sizes = {option if isinstance(option, str) else "" for option in others}
        if chosen == "null" or len(others) == 1 or sizes == {"int", "long"}:
            return value
        if sizes == {"float", "double"}:
            return float(value)
        return ((f"member{others.index(chosen)}", value),)

    def _read_blocks(self) -> Any:
        """Yield once for each item of an array or a map."""
        while count := self._read_long():
            if count < 0:
                self._read_long()  # the bytes of the block
                count = -count
            if count > len(self._body):  # of items without a byte
                raise EOFError
            for _ in range(count):
                yield None

    def _read_leaf(self, kind: str, schema: Any) -> Any:
        match kind:
            case "null":
                return None
            case "boolean":
                return self._take(1) == b"\1"
            case "int":
                return _require_size(self._read_long(), "int")
            case "long":
                return self._read_long()
            case "float":
                return np.float32(struct.unpack("<f", self._take(4))[0])
            case "double":
                return struct.unpack("<d", self._take(8))[0]
            case "fixed":
                return self._take(schema["size"])
            case "bytes":
                return self._take(self._read_long())
        return self._take(self._read_long()).decode("utf-8", "surrogateescape")


def _require_size(number: int, kind: str) -> int:
    if check_whole_number(number, kind) is None:
        raise OverflowError
    return number


def _require_place(place: int, options: list[Any]) -> int:
    if not 0 <= place < len(options):
        raise ValueError(place)
    return place


def _keep_value(value: Any, _: Any) -> Any:
    return value


def _make_moment(value: int, schema: Any) -> _Moment:
    name: str = schema["logicalType"]
    ticks = value * _TICKS[name.rpartition("-")[2]]
    return _Moment(_require_size(ticks, "long"), name.startswith("local-"))


def make_decimal(value: bytes, precision: int, scale: int) -> Decimal:
    """Return the number that these bytes are.

    Raises:
        ValueError: it has no digits, or too many.
    """
    if not value:
        raise ValueError("a decimal without a digit")
    number = int.from_bytes(value, "big", signed=True)
    # Of a tuple: arithmetic rounds to the digits of a context.
    digits = tuple(map(int, str(abs(number))))
    if len(digits) > precision:
        raise ValueError("a decimal with too many digits")
    return Decimal((int(number < 0), digits, -scale))


def _convert_decimal(value: bytes, schema: Any) -> Any:
    precision = schema.get("precision")
    # Without digits the type is what its bytes are.
    return make_decimal(value, precision, schema.get("scale", 0)) if precision else value


_LOGICAL: Final[dict[tuple[str, str | None], Callable[[Any, Any], Any]]] = {
    ("int", "date"): lambda value, _: _Day(value),
    ("bytes", "decimal"): _convert_decimal,
    ("fixed", "decimal"): _convert_decimal,
    **dict.fromkeys(
        [
            *(("long", "timestamp-millis"), ("long", "timestamp-micros")),
            *(("long", "local-timestamp-millis"), ("long", "local-timestamp-micros")),
        ],
        _make_moment,
    ),
}


def _describe_type(schema: Any) -> str:
    """The name of a type as its schema has it."""
    if isinstance(schema, list):
        names = dict.fromkeys(_describe_type(one) for one in schema if one != "null")
        return " or ".join(names)
    if isinstance(schema, str):
        return schema
    own = schema.get("logicalType") or schema["type"]
    return _describe_type(own)


def _show_value(value: Any) -> str:
    """A value as text; bytes that are none are replaced."""
    match value:
        case str():
            text = value
        case bytes():
            return value.decode("utf-8", "replace")
        case Decimal():
            return format(value, "f")
        case _Moment() | _Day():
            return str(value)
        case float() | bool():
            return write_json(value).strip('"')
        case _:
            text = write_json(value)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# A value of a schema as one of a declared type; None if it does not fit


def _convert_value(value: Any, declared: str, source: SourceSpec) -> Any:
    family = _FAMILIES.get(type(value), "")
    if declared == "timestamp":
        return _convert_time(value, family, source)
    if isinstance(value, str):
        return _convert_text(value, declared, source)
    if isinstance(value, list | tuple):
        return _show_value(value) if declared == "string" else None
    if isinstance(value, _Moment):
        return value.ticks // TICKS_PER_DAY if declared == "date" else None
    if isinstance(value, _Day):
        return {"date": value.days, "string": str(value)}.get(declared)
    if not accepts_family(declared, family):
        return None
    if declared.startswith("decimal"):
        return _convert_to_decimal(value, declared)
    return _CONVERTERS[declared](value)


def _convert_time(value: Any, family: str, source: SourceSpec) -> Any:
    if isinstance(value, _Moment):
        if not value.is_local:
            return value.ticks
        return None if source.timezone is None else find_instant(value.ticks, source.timezone)
    # A text, or a number that the schema does not call a time: as in JSON.
    is_number = family in ("int", "float", "decimal") and source.parse.timestamps in TICKS_PER_UNIT
    if family == "string" or is_number:
        text = str(float(value)) if family == "float" else str(value)
        return cast_text(text, "timestamp", source)
    return None


def _convert_text(value: str, declared: str, source: SourceSpec) -> Any:
    """A text in the plain form of a type."""
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        return None
    if declared == "binary":
        return raw
    form = build_text_pattern(declared)
    is_plain = form is None or re.fullmatch(form, value)
    return cast_text(value, declared, source) if is_plain else None


def _convert_to_decimal(value: Any, declared: str) -> Decimal | None:
    own = value if isinstance(value, Decimal | int) else str(float(value))
    try:
        found = round_decimal(Decimal(own), *read_decimal_digits(declared))
    except ValueError:
        return None
    if found is None:
        return None
    back = found if isinstance(value, Decimal | int) else type(value)(found)
    return found if back == value else None


def _convert_to_whole(declared: str) -> Callable[[Any], int | None]:
    def convert(value: Any) -> int | None:
        """Return the number; None if it has a fraction or is too large."""
        try:
            number: int = int(value)
        except (OverflowError, ValueError):  # no number, or an infinity
            return None
        return None if number != value else check_whole_number(number, declared)

    return convert


def _convert_to_double(value: Any) -> float | None:
    if type(value) is int and abs(value) > 1 << EXACT_BITS["double"]:
        return None
    return float(value)


def _convert_to_float(value: Any) -> Any:
    if type(value) is int and abs(value) > 1 << EXACT_BITS["float"]:
        return None
    return to_float32(float(value))


_CONVERTERS: Final[dict[str, Callable[[Any], Any]]] = {
    "string": _show_value,
    "boolean": bool,
    "int": _convert_to_whole("int"),
    "long": _convert_to_whole("long"),
    "float": _convert_to_float,
    "double": _convert_to_double,
    "binary": bytes,
}
