"""Avro object container files as Arrow tables: records of values, in plain Python.

There is no Avro reader among the packages that tidegate already needs, and the format is small. A
record's fields may be any primitive or logical type, an enum, a fixed, or a union of one of these
with null; anything nested is read and kept as JSON text. About 100,000 small rows a second: for
topics and tables rather than for bulk loads, which are better off in Parquet.
"""

from __future__ import annotations

import base64
import json
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

_MAGIC: Final = b"Obj\x01"
_SYNC_BYTES: Final = 16
_MAX_NUMBER_BITS: Final = 70  # bits of a number, by seven a byte
_Reader = Callable[["Cursor"], Any]


class AvroError(ValueError):
    """The bytes are not Avro, or end too early, or use a codec or type that is not supported.

    Its object is a dead letter.
    """


class Cursor:
    """A place in some bytes."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def read_bytes(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise AvroError("the data ends within a value")
        piece, self.at = self.data[self.at : end], end
        return piece

    def read_number(self) -> int:
        """A zigzag variable-length integer."""
        shift = result = 0
        data, at = self.data, self.at
        try:
            while shift < _MAX_NUMBER_BITS:
                byte = data[at]
                at += 1
                result |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
            else:
                raise AvroError("a number has more than 64 bits")
        except IndexError:
            raise AvroError("the data ends within a number") from None
        self.at = at
        return (result >> 1) ^ -(result & 1)

    def read_item_count(self) -> int:
        """A number of things to come, each of a byte at least.

        What is damaged must not be taken for billions of nothings.
        """
        count = self.read_number()
        if abs(count) > len(self.data) - self.at:
            raise AvroError(f"the data ends before {abs(count)} values")
        return count

    def read_prefixed_bytes(self) -> bytes:
        """Bytes preceded by their length."""
        return self.read_bytes(self.read_number())


def read_avro_file(data: bytes) -> pa.Table:
    """All rows of an object container file.

    Raises:
        AvroError: see there.
    """
    cursor = Cursor(data)
    if cursor.read_bytes(4) != _MAGIC:
        raise AvroError(f"the object begins with {data[:4]!r}, not with {_MAGIC!r}")
    header = _build_map_reader(lambda c: c.read_prefixed_bytes())(cursor)
    sync = cursor.read_bytes(_SYNC_BYTES)
    names, readers, types = _read_container_schema(header)
    inflate = _select_codec(header.get("avro.codec", b"null").decode("utf-8", "replace"))
    columns: list[list[Any]] = [[] for _ in names]
    try:
        while cursor.at < len(data):
            rows, block = cursor.read_number(), Cursor(inflate(cursor.read_prefixed_bytes()))
            if cursor.read_bytes(_SYNC_BYTES) != sync:
                raise AvroError("a block does not end with the file's sync marker")
            if not 0 <= rows <= len(block.data):  # a row without any bytes has no event time either
                raise AvroError(f"a block of {len(block.data)} bytes has {rows} rows")
            for _ in range(rows):
                for column, read in zip(columns, readers, strict=True):
                    column.append(read(block))
        return pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=names)
    except (
        ArithmeticError,
        RecursionError,
        TypeError,
    ) as error:  # numbers too large for their type, and records without an end
        raise AvroError(f"a value does not fit its type: {error}") from error


def _read_container_schema(
    header: dict[str, bytes],
) -> tuple[list[str], list[_Reader], list[pa.DataType]]:
    if "avro.schema" not in header:
        raise AvroError("the header has no schema")
    try:
        return build_record_reader(json.loads(header["avro.schema"]))
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise (
            error
            if isinstance(error, AvroError)
            else AvroError(f"the header's schema cannot be read: {error!r}")
        ) from error


def build_record_reader(schema: Any) -> tuple[list[str], list[_Reader], list[pa.DataType]]:
    """Names, readers and Arrow types of a record's fields."""
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise AvroError("the schema is not a record")
    named: dict[str, Any] = {}
    built = [
        (field["name"], *_build_field_reader(field["type"], named)) for field in schema["fields"]
    ]
    return [n for n, _, _ in built], [r for _, r, _ in built], [t for _, _, t in built]


def read_avro_record(schema: Any, data: bytes) -> dict[str, Any]:
    """One record without a container, as it stands in a message."""
    names, readers, _ = build_record_reader(schema)
    cursor = Cursor(data)
    return {name: read(cursor) for name, read in zip(names, readers, strict=True)}


def _build_field_reader(schema: Any, named: dict[str, Any]) -> tuple[_Reader, pa.DataType]:
    """A reader and its Arrow type; what has no flat type is read as JSON text."""
    read, kind = _build_type_reader(schema, named)
    if kind is not None:
        return read, kind
    return (
        lambda c: (
            None
            if (value := read(c)) is None
            else json.dumps(value, default=_encode_as_text, separators=(",", ":"))
        ),
        pa.string(),
    )


def _encode_as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _build_type_reader(schema: Any, named: dict[str, Any]) -> tuple[_Reader, pa.DataType | None]:
    if isinstance(schema, list):
        return _build_union_reader(schema, named)
    if isinstance(schema, str):
        if schema in named:
            return (lambda c: named[schema][0](c)), named[schema][1]
        return _get_primitive_reader(schema)
    if isinstance(schema["type"], dict | list):
        return _build_type_reader(schema["type"], named)
    if logical := _build_logical_reader(schema):
        return logical
    return _build_complex_reader(schema, named)


def _build_union_reader(
    schema: list[Any], named: dict[str, Any]
) -> tuple[_Reader, pa.DataType | None]:
    options = [_build_type_reader(option, named) for option in schema]
    kinds = {
        str(kind): kind
        for option, (_, kind) in zip(schema, options, strict=True)
        if option != "null"
    }
    readers = [read for read, _ in options]

    def read_union(cursor: Cursor) -> Any:
        place = cursor.read_number()
        if not 0 <= place < len(readers):
            raise AvroError(f"a union has no option {place}")
        return readers[place](cursor)

    return read_union, next(iter(kinds.values())) if len(kinds) == 1 else None


def _get_primitive_reader(name: str) -> tuple[_Reader, pa.DataType]:
    if name not in _PRIMITIVES:
        raise AvroError(f"unknown type {name!r}")
    return _PRIMITIVES[name]


_PRIMITIVES: Final[dict[str, tuple[_Reader, pa.DataType]]] = {
    "null": (lambda _: None, pa.string()),
    "boolean": (lambda c: c.read_bytes(1) != b"\0", pa.bool_()),
    "int": (Cursor.read_number, pa.int32()),
    "long": (Cursor.read_number, pa.int64()),
    "float": (lambda c: struct.unpack("<f", c.read_bytes(4))[0], pa.float32()),
    "double": (lambda c: struct.unpack("<d", c.read_bytes(8))[0], pa.float64()),
    "bytes": (Cursor.read_prefixed_bytes, pa.binary()),
    "string": (lambda c: c.read_prefixed_bytes().decode("utf-8"), pa.string()),
}
_TIME_TYPES: Final[dict[str, pa.DataType]] = {
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("ns", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
    "date": pa.date32(),
}


def _build_logical_reader(schema: dict[str, Any]) -> tuple[_Reader, pa.DataType] | None:
    logical = schema.get("logicalType")
    if logical in _TIME_TYPES and schema["type"] in ("int", "long"):
        return Cursor.read_number, _TIME_TYPES[logical]
    if logical == "decimal":
        return _build_decimal_reader(schema)
    return None


def _build_decimal_reader(schema: dict[str, Any]) -> tuple[_Reader, pa.DataType]:
    from decimal import Decimal

    precision, scale = schema["precision"], schema.get("scale", 0)
    size = schema.get("size")

    def read_decimal(cursor: Cursor) -> Decimal:
        raw = cursor.read_prefixed_bytes() if size is None else cursor.read_bytes(size)
        return Decimal(int.from_bytes(raw, "big", signed=True)).scaleb(-scale)

    return read_decimal, pa.decimal128(precision, scale)


def _build_complex_reader(
    schema: dict[str, Any], named: dict[str, Any]
) -> tuple[_Reader, pa.DataType | None]:
    kind = schema["type"]
    built: tuple[_Reader, pa.DataType | None]
    if kind == "enum":
        built = _build_enum_reader(schema["symbols"]), pa.string()
    elif kind == "fixed":
        size = schema["size"]
        built = (lambda c: c.read_bytes(size)), pa.binary()
    elif kind == "array":
        built = _build_array_reader(_build_type_reader(schema["items"], named)[0]), None
    elif kind == "map":
        built = _build_map_reader(_build_type_reader(schema["values"], named)[0]), None
    elif kind == "record":
        return _build_nested_reader(schema, named), None
    else:
        return _get_primitive_reader(kind)
    if "name" in schema:
        named[schema["name"]] = built
    return built


def _build_enum_reader(symbols: list[str]) -> _Reader:
    def read_enum(cursor: Cursor) -> str:
        place = cursor.read_number()
        if not 0 <= place < len(symbols):
            raise AvroError(f"an enum has no symbol {place}")
        return symbols[place]

    return read_enum


def _build_nested_reader(schema: dict[str, Any], named: dict[str, Any]) -> _Reader:
    fields: list[tuple[str, _Reader]] = []

    def read_fields(cursor: Cursor) -> dict[str, Any]:
        return {name: reader(cursor) for name, reader in fields}

    named[schema["name"]] = (read_fields, None)  # before its fields: a record may hold itself
    fields += [
        (field["name"], _build_type_reader(field["type"], named)[0]) for field in schema["fields"]
    ]
    return read_fields


def _read_block_counts(cursor: Cursor) -> Any:
    """The counts of an array's or map's blocks."""
    while count := cursor.read_item_count():
        if count < 0:  # followed by the block's size in bytes, for readers that skip
            cursor.read_number()
        yield abs(count)


def _build_array_reader(read: _Reader) -> _Reader:
    return lambda cursor: [
        read(cursor) for count in _read_block_counts(cursor) for _ in range(count)
    ]


def _build_map_reader(read: _Reader) -> Callable[[Cursor], dict[str, Any]]:
    return lambda cursor: {
        cursor.read_prefixed_bytes().decode(): read(cursor)
        for count in _read_block_counts(cursor)
        for _ in range(count)
    }


def _select_codec(name: str) -> Callable[[bytes], bytes]:
    """How a block is inflated."""
    if name == "null":
        return lambda data: data
    if name == "deflate":
        return lambda data: zlib.decompress(data, -15)
    if (
        name == "snappy"
    ):  # the last four bytes are a checksum of the inflated data; the length stands in front
        return _inflate_snappy
    if name == "xz":
        return lzma.decompress
    if name == "zstandard":
        return _inflate_zstandard
    if name == "bzip2":
        import bz2

        return bz2.decompress
    raise AvroError(f"unknown codec {name!r}")


def _inflate_snappy(data: bytes) -> bytes:
    size = shift = 0
    for byte in data:
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    inflated: bytes = pa.decompress(data[:-4], decompressed_size=size, codec="snappy", asbytes=True)
    if zlib.crc32(inflated) != int.from_bytes(data[-4:], "big"):
        raise AvroError("a block's checksum is wrong")
    return inflated


def _inflate_zstandard(data: bytes) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
        return bytes(stream.read())
