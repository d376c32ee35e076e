"""Reads the values of Avro records, by readers that are made once for each schema.

fastavro checks the schemas. It does not read the records, because it accepts damaged bytes. A
nested value is a list, or a tuple of names and values: a record leaves its nulls out, and a value
of a union of several types is a record with one field, `member0` for the first type. Numbers of two
sizes are one type.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Final

import fastavro
import numpy as np

from .errors import AVRO_NOT_A_RECORD, AVRO_REFUSED
from .text_values import check_whole_number

NESTED: Final = "nested"
_MOST_BITS: Final = 70
"""Of a number, with those that are no part of it."""
_MOST_LEVELS: Final = 200
"""Of a schema, as its JSON nests. How deep functions call each other differs between Pythons."""
_TIMES: Final = {
    ("int", "date"): ("date", 1),
    ("long", "timestamp-millis"): ("instant", 1_000),
    ("long", "timestamp-micros"): ("instant", 1),
    ("long", "local-timestamp-millis"): ("local", 1_000),
    ("long", "local-timestamp-micros"): ("local", 1),
}
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")


class AvroBytes:
    """The bytes of a message, and how far they are read.

    Raises:
        EOFError, LookupError, OverflowError: they are no such value.
    """

    __slots__ = ("_at", "_bytes")

    def __init__(self, body: bytes) -> None:
        self._bytes, self._at = body, 0

    def __len__(self) -> int:
        return len(self._bytes)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        begin = self._at
        self._at = end = begin + size
        if size < 0 or end > len(self._bytes):
            raise EOFError
        return self._bytes[begin:end]

    def read_long(self) -> int:
        """Return the next number."""
        body, at = self._bytes, self._at
        byte, place = body[at], 7
        found = byte & 0x7F
        while byte >= 0x80:
            if place == _MOST_BITS:
                raise OverflowError
            at += 1
            byte = body[at]
            found |= (byte & 0x7F) << place
            place += 7
        self._at = at + 1
        number = found >> 1 ^ -(found & 1)
        return _require_size(number, "long") if place == _MOST_BITS else number


Reader = Callable[[AvroBytes], Any]


@dataclass(frozen=True)
class AvroField:
    """How a field of a record is read.

    Attributes:
        kind: a primitive type, `decimal(6,2)`, `nested`, `date` (in days), `instant` or `local`
            (times in ticks).
        described: the name of the type in the schema.
    """

    name: str
    read: Reader
    kind: str
    described: str


@cache
def parse_avro_schema(schema: bytes) -> Sequence[AvroField]:
    """Return the fields of a record.

    Raises:
        ConfigurationError: the schema is none of a record, or nested too deep.
    """
    try:
        found = json.loads(schema)
        _ = [field["name"] for field in found["fields"]]
    except (ValueError, KeyError, TypeError) as error:
        raise AVRO_NOT_A_RECORD(schema=schema[:200], error=error) from error
    named: dict[str, Any] = {}
    try:
        _require_levels(found, _MOST_LEVELS)
        record: Any = fastavro.parse_schema(found, named)
        maker = _ReaderMaker(named)
        return [maker.make_field(field["name"], field["type"]) for field in record["fields"]]
    # fastavro lets the exceptions of damaged schemas through, of any kind.
    except Exception as error:
        raise AVRO_REFUSED(cause=repr(error)[:300]) from error


def _require_levels(value: Any, levels: int) -> None:
    """Refuse a JSON value that nests deeper."""
    if levels < 0:
        raise RecursionError(f"it nests more than {_MOST_LEVELS} levels deep")
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            _require_levels(inner, levels - 1)


class _ReaderMaker:
    """Makes readers of the types of a schema; `named` are those that it defines."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._records: dict[str, list[tuple[str, Reader]]] = {}

    def make_field(self, name: str, schema: Any) -> AvroField:
        """Return how a field of this type is read."""
        try:
            read, kind = self._make(schema)
        except TypeError:  # an attribute that is none
            read, kind = _refuse_value, NESTED
        return AvroField(name, read, kind, _describe_type(schema))

    def _make(self, schema: Any) -> tuple[Reader, str]:
        """The reader of a type, and the kind of its values."""
        if isinstance(schema, list):
            return self._make_union(schema)
        if isinstance(schema, str):
            schema = {"type": schema} if schema in _LEAVES else self._named[schema]
        own = schema["type"]
        if not isinstance(own, str) or own in self._named:
            return self._make(own)
        match own:
            case "record" | "error":
                return self._make_record(schema), NESTED
            case "array":
                read_item = self._make_nested(schema["items"])
                return lambda data: [read_item(data) for _ in _read_blocks(data)], NESTED
            case "map":
                return self._make_map(schema), NESTED
            case "enum":
                return lambda data: _read_choice(data, schema["symbols"]), "string"
        return _make_leaf(own, schema)

    def _make_nested(self, schema: Any) -> Reader:
        """The reader of a value within another one: times are texts."""
        return _write_times(*self._make(schema))

    def _make_record(self, schema: Any) -> Reader:
        if schema["name"] not in self._records:
            # Known before its fields, which may have the record in them.
            made = self._records[schema["name"]] = []
            made += [
                (field["name"], self._make_nested(field["type"])) for field in schema["fields"]
            ]
        fields = self._records[schema["name"]]

        def read_record(data: AvroBytes) -> tuple[tuple[str, Any], ...]:
            """Return names and values."""
            values = ((name, read(data)) for name, read in fields)
            return tuple((name, value) for name, value in values if value is not None)

        return read_record

    def _make_map(self, schema: Any) -> Reader:
        read_value = self._make_nested(schema["values"])

        def read_map(data: AvroBytes) -> tuple[tuple[str, Any], ...]:
            """Return names and values; of equal names, the last value."""
            items = ((_read_text(data), read_value(data)) for _ in _read_blocks(data))
            return tuple(dict(items).items())

        return read_map

    def _make_union(self, options: list[Any]) -> tuple[Reader, str]:
        others = [option for option in options if option != "null"]
        made = [self._make_member(option, others) for option in options]
        readers = [read for read, _ in made]
        kinds = [kind for _, kind in made if kind != "null"]
        return lambda data: _read_choice(data, readers)(data), next(iter(kinds), NESTED)

    def _make_member(self, option: Any, others: list[Any]) -> tuple[Reader, str]:
        read, kind = self._make(option)
        if option == "null" or len(others) == 1:
            return read, kind
        sizes = {other if isinstance(other, str) else "" for other in others}
        if sizes == {"int", "long"}:
            return read, "long"
        if sizes == {"float", "double"}:
            return lambda data: float(read(data)), "double"
        read_value = _write_times(read, kind)
        name = f"member{others.index(option)}"
        return lambda data: ((name, read_value(data)),), NESTED


def _write_times(read: Reader, kind: str) -> Reader:
    """A reader whose times are texts."""
    is_time = kind in ("date", "instant", "local")
    return (lambda data: write_time(read(data), kind)) if is_time else read


def _make_leaf(own: str, schema: Any) -> tuple[Reader, str]:
    size = schema.get("size")
    read: Reader = _LEAVES.get(own) or (lambda data: data.take(size))
    logical, precision = schema.get("logicalType"), schema.get("precision")
    if (own, logical) in _TIMES:
        kind, ticks = _TIMES[own, logical]
        return lambda data: _require_size(read(data) * ticks, "long"), kind
    # Without digits a decimal is what its bytes are.
    if own in ("bytes", "fixed") and logical == "decimal" and precision:
        scale = schema.get("scale", 0)
        return lambda data: _make_decimal(
            read(data), precision, scale
        ), f"decimal({precision},{scale})"
    return read, "bytes" if own == "fixed" else own


def _read_text(data: AvroBytes) -> str:
    return data.take(data.read_long()).decode("utf-8", "surrogateescape")


def _read_choice(data: AvroBytes, options: Sequence[Any]) -> Any:
    place = data.read_long()
    if place < 0:
        raise LookupError(place)
    return options[place]


def _read_blocks(data: AvroBytes) -> Iterator[None]:
    """Yield once for each item of an array or a map."""
    while count := data.read_long():
        if count < 0:
            data.read_long()  # the bytes of the block
            count = -count
        if count > len(data):  # of items without a byte
            raise EOFError
        for _ in range(count):
            yield


def _refuse_value(_: AvroBytes) -> None:
    raise ValueError


_LEAVES: Final[dict[str, Reader]] = {
    "null": lambda _: None,
    "boolean": lambda data: data.take(1) == b"\1",
    "int": lambda data: _require_size(data.read_long(), "int"),
    "long": AvroBytes.read_long,
    "float": lambda data: np.float32(_FLOAT.unpack(data.take(4))[0]),
    "double": lambda data: _DOUBLE.unpack(data.take(8))[0],
    "bytes": lambda data: data.take(data.read_long()),
    "string": _read_text,
}


def _require_size(number: int, kind: str) -> int:
    if check_whole_number(number, kind) is None:
        raise OverflowError
    return number


def _make_decimal(value: bytes, precision: int, scale: int) -> Decimal:
    if not value:
        raise ValueError("a decimal without a digit")
    number = int.from_bytes(value, "big", signed=True)
    if len(str(abs(number))) > precision:
        raise ValueError("a decimal with too many digits")
    # Of a text: arithmetic rounds to the digits of a context.
    return Decimal(f"{number}E{-scale}")


def write_time(value: int | None, kind: str) -> str | None:
    """Return a date or a time as text."""
    if value is None:
        return None
    if kind == "date":
        return str(np.datetime64(value, "D"))
    text = str(np.datetime64(value // 1_000, "ms"))
    return text if kind == "local" else f"{text}Z"


def _describe_type(schema: Any) -> str:
    """The name of a type as its schema has it."""
    if isinstance(schema, list):
        names = dict.fromkeys(_describe_type(one) for one in schema if one != "null")
        return " or ".join(names)
    if isinstance(schema, str):
        return schema
    return _describe_type(schema.get("logicalType") or schema["type"])
