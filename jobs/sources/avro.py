"""Reads Avro object container files as Arrow tables; fastavro decodes the records.

A field of a primitive or logical type, an enum, a fixed, or a union of one of these with null
becomes a column of that type. Anything nested becomes JSON text. Before fastavro sees a schema, it
is reduced to physical types: fastavro's logical types lose values (a decimal is rounded to its
precision, a timestamp loses its nanoseconds and cannot be later than the year 9999).
"""

import base64
import io
import json
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

import fastavro
import pyarrow as pa
from fastavro import _read_py as pure_fastavro

from tidegate.errors import TidegateError
from tidegate.jobs.rules.worker_memory import require_room
from tidegate.json_types import JsonObject

from .byte_streams import ByteStream, StreamPart, decompress_snappy, open_compressed

_MAGIC = b"Obj\x01"
# A default that does not fit its type must not make a file unreadable: it is never used here.
_IGNORED_ATTRIBUTES = frozenset({"aliases", "default", "doc", "order"})

_PRIMITIVES: dict[str, pa.DataType] = {
    "null": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_TIME_TYPES: dict[str, pa.DataType] = {
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("ns", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
    "date": pa.date32(),
}


_Reduced = tuple[Any, pa.DataType | None]  # a physical schema, and its Arrow type


def _record(name: str, fields: JsonObject) -> JsonObject:
    declared = [{"name": field, "type": schema} for field, schema in fields.items()]
    return {"type": "record", "name": name, "fields": declared}


_SYNC_BYTES = 16
_SYNC = {"type": "fixed", "name": "Sync", "size": _SYNC_BYTES}
_HEADER = fastavro.parse_schema(
    _record("Header", {"meta": {"type": "map", "values": "bytes"}, "sync": _SYNC})
)
_MOST_VALUE_BYTES: Final = 32 << 20
"""Of one value in a stream."""
_ROWS_AT_ONCE: Final = 100
# Of one table. Until it is made, rows are Python's, which takes far more memory than their bytes.
_MOST_ROWS: Final = 128 << 10
_MOST_VALUES: Final = 1 << 20
_SNAPPY = "snappy"
# Codecs of Avro, and their names in `byte_streams`.
_CODECS = {
    "null": None,
    "deflate": "deflate",
    _SNAPPY: _SNAPPY,
    "xz": "xz",
    "zstandard": "zstd",
    "bzip2": "bzip2",
}


class AvroError(ValueError):
    """The bytes are not Avro, are damaged, or use a codec or type that is not supported.

    The object becomes a dead letter.
    """


def iterate_avro_tables(
    stream: ByteStream, chunk_bytes: int, note: Callable[[int, int], None] = lambda *_: None
) -> Iterator[pa.Table]:
    """Yield the rows of an object container file, about so many bytes of them at a time, or fewer.

    There is at least one table. Only blocks with snappy are held whole if they are larger.

    Args:
        stream: the file.
        chunk_bytes: of rows.
        note: is given the number of the first row of each block, and where the block begins.

    Raises:
        AvroError: the file cannot be read.
    """
    values = _Values(stream)
    start = values.read(len(_MAGIC))
    if start != _MAGIC:
        raise AvroError(f"the object begins with {start!r}, not with {_MAGIC!r}")
    try:
        yield from _iterate_container(values, chunk_bytes, note)
    except (AvroError, TidegateError, MemoryError):
        raise
    except Exception as error:  # fastavro lets the exceptions of damaged bytes through, of any kind
        raise AvroError(f"the data is damaged: {type(error).__name__}: {error}") from error


def _iterate_container(
    stream: Any, chunk_bytes: int, note: Callable[[int, int], None]
) -> Iterator[pa.Table]:
    header: Any = fastavro.schemaless_reader(stream, _HEADER, None)
    meta = header["meta"]
    if "avro.schema" not in meta:
        raise AvroError("the header has no schema")
    # Chosen before any block is read: an unsupported codec makes the object a dead letter.
    codec = meta.get("avro.codec", b"null").decode("utf-8", "replace")
    if codec not in _CODECS:
        raise AvroError(f"unknown codec {codec!r}")
    record = _RecordSchema(json.loads(meta["avro.schema"], object_hook=_drop_ignored))
    most = max(min(_MOST_VALUES // record.width, _MOST_ROWS), 1)
    rows: list[dict[str, Any]] = []
    held = total = 0
    for start, count, values in _iterate_blocks(stream, codec, header["sync"], chunk_bytes):
        note(total, start)
        total += count
        begun = 0
        # A block that is held may well be decoded in larger steps.
        step = min(_ROWS_AT_ONCE, most) if isinstance(values, io.BytesIO) else 1
        for number in range(0, count, step):
            rows += record.read_rows(values, min(step, count - number))
            position = values.tell()
            # fastavro believes any count. A row without a byte has no event time either.
            if number > position:
                raise AvroError(f"a block of {count} rows ends after {position} bytes")
            if held + position - begun >= chunk_bytes or len(rows) > most - step:
                yield record.to_table(rows)
                rows, held, begun = [], 0, position
        held += values.tell() - begun
    yield record.to_table(rows)


def _iterate_blocks(
    stream: "_Values", codec: str, sync: bytes, chunk_bytes: int
) -> Iterator[tuple[int, int, Any]]:
    """Yield of each block where it begins, its number of rows, and what they are read from.

    A block of up to `chunk_bytes` is checked before its rows are read, a larger one after that.
    """
    while True:
        start = stream.tell()
        count = _read_number(stream)
        if count is None:
            return
        size = _read_number(stream)
        if size is None or size < 0 or count < 0:
            raise AvroError(f"a block of {size} bytes has {count} rows")
        block = StreamPart(stream, size)
        is_small = size <= chunk_bytes
        if is_small or codec == _SNAPPY:
            require_room(size)
            packed = block.readall()
            if codec == _SNAPPY:
                data = _decompress_snappy(packed)
            else:
                data = open_compressed(_CODECS[codec], io.BytesIO(packed)).read()
            _check_end(block, stream, sync)
            if count > len(data):
                raise AvroError(f"a block of {len(data)} bytes has {count} rows")
            yield start, count, io.BytesIO(data)
        else:
            yield start, count, _Values(open_compressed(_CODECS[codec], block))
            while block.read(chunk_bytes):
                pass
            _check_end(block, stream, sync)


def _check_end(block: StreamPart, stream: ByteStream, sync: bytes) -> None:
    # The marker is random per file, so a block of a cut or joined file is noticed.
    if block.left or stream.read(_SYNC_BYTES) != sync:
        raise AvroError("a block does not end with the file's sync marker")


def _read_number(stream: ByteStream) -> int | None:
    """Return the next number, in seven bits a byte, the lowest first; None at the end."""
    value = shift = 0
    while byte := stream.read(1):
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return (value >> 1) ^ -(value & 1)
        shift += 7
    if shift:
        raise AvroError("a number is cut off")
    return None


class _Values:
    """What values are read from; a damaged length is refused, which may ask for any number."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream, self._position = stream, 0

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _MOST_VALUE_BYTES:
            raise AvroError(f"a value has {size} bytes")
        data = self._stream.read(size)
        self._position += len(data)
        return data

    def tell(self) -> int:
        return self._position


def _drop_ignored(attributes: JsonObject) -> JsonObject:
    return {k: v for k, v in attributes.items() if k not in _IGNORED_ATTRIBUTES}


class _RecordSchema:
    """The schema of a file's rows, reduced to physical types, and the Arrow type of each field."""

    def __init__(self, schema: Any) -> None:
        parsed: Any = fastavro.parse_schema(schema)  # resolves namespaces
        if not isinstance(parsed, dict) or parsed["type"] != "record":
            raise AvroError("the schema is not a record")
        # Name -> what a later reference to it reduces to.
        self._named: dict[str, _Reduced] = {}
        self._has_references = False
        record, self._types = self._reduce_record(parsed)
        self._physical = fastavro.parse_schema(record)

    def read_rows(self, values: Any, count: int) -> list[dict[str, Any]]:
        """Return the next rows."""
        # A record that contains itself may be nested 20,000 deep. fastavro's compiled reader then
        # overflows the stack and kills the driver; its Python twin raises RecursionError.
        reader = pure_fastavro if self._has_references else fastavro
        return [reader.schemaless_reader(values, self._physical, None) for _ in range(count)]

    @property
    def width(self) -> int:
        """The number of values in a row, at least one."""
        return max(len(self._types), 1)

    def to_table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """Return the rows as a table; nested values become JSON text."""
        columns = {}
        for name, arrow_type in self._types.items():
            values = [row[name] for row in rows]
            if arrow_type is None:
                values = [one if one is None else _encode_as_json(one) for one in values]
            columns[name] = pa.array(values, arrow_type or pa.string())
        return pa.table(columns)

    def _reduce(self, schema: Any) -> _Reduced:
        """Return the physical schema and its Arrow type, which is None for nested values."""
        if isinstance(schema, list):
            options = [self._reduce(option) for option in schema]
            types = {arrow_type for option, arrow_type in options if option != "null"}
            return [option for option, _ in options], types.pop() if len(types) == 1 else None
        if isinstance(schema, str):
            if schema not in self._named:
                return schema, _PRIMITIVES[schema]
            self._has_references = True
            return self._named[schema]
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self._reduce(kind)
        if kind in ("int", "long") and schema.get("logicalType") in _TIME_TYPES:
            return kind, _TIME_TYPES[schema["logicalType"]]
        if kind == "bytes":
            attributes, arrow_type = _reduce_decimal(schema)
            return {**attributes, "type": kind}, arrow_type
        return (kind, _PRIMITIVES[kind]) if kind in _PRIMITIVES else self._reduce_complex(schema)

    def _reduce_complex(self, schema: JsonObject) -> _Reduced:
        match schema:
            case {"type": "record"}:
                return self._reduce_record(schema)[0], None
            case {"type": "array", "items": items}:
                reduced = self._reduce(items)[0]
                if _takes_no_bytes(reduced):  # a damaged count would fill the memory with nulls
                    reduced = {"type": "int", "logicalType": _ENUM, "labels": []}
                return {"type": "array", "items": reduced}, None
            case {"type": "map", "values": values}:
                return {"type": "map", "values": self._reduce(values)[0]}, None
            case {"type": "enum", "name": name, "symbols": symbols}:
                # fastavro takes a symbol from the end of the list for a negative number.
                number = {"type": "int", "logicalType": _ENUM, "labels": symbols}
                self._named[name] = (number, pa.string())
                return self._named[name]
            case {"type": "fixed", "name": name, "size": size}:
                attributes, arrow_type = _reduce_decimal(schema)
                self._named[name] = (name, arrow_type)
                return {**attributes, "type": "fixed", "name": name, "size": size}, arrow_type
        raise AvroError(f"unknown type {schema['type']!r}")

    def _reduce_record(
        self, schema: JsonObject
    ) -> tuple[JsonObject, dict[str, pa.DataType | None]]:
        self._named[schema["name"]] = (schema["name"], None)  # first, as it may contain itself
        reduced = {field["name"]: self._reduce(field["type"]) for field in schema["fields"]}
        record = _record(schema["name"], {name: kind for name, (kind, _) in reduced.items()})
        return record, {name: arrow_type for name, (_, arrow_type) in reduced.items()}


def _reduce_decimal(schema: JsonObject) -> tuple[JsonObject, pa.DataType]:
    """Return the attributes that keep a decimal of bytes exact; none for plain bytes."""
    if schema.get("logicalType") != "decimal":
        return {}, pa.binary()
    scale = schema.get("scale", 0)
    arrow_type = pa.decimal128(schema["precision"], scale)
    return {"logicalType": _DECIMAL, "digits_after_point": scale}, arrow_type


def _takes_no_bytes(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return bool(schema == "null")
    fields = [field["type"] for field in schema.get("fields", [{"type": None}])]
    return schema.get("size") == 0 or all(map(_takes_no_bytes, fields))


def _read_enum(number: int, schema: Any, _: Any = None) -> str:
    if not 0 <= number < len(schema["labels"]):
        raise AvroError(f"an enum has no symbol {number}")
    return str(schema["labels"][number])


def _read_decimal(data: bytes, schema: Any, _: Any = None) -> Decimal:
    unscaled = int.from_bytes(data, "big", signed=True)
    # Of a text: arithmetic rounds to the digits of a context.
    return Decimal(f"{unscaled}E{-schema['digits_after_point']}")


# fastavro's documented registry of custom logical types. It is global, hence the prefix.
_ENUM = "tidegate-enum"
_DECIMAL = "tidegate-decimal"
fastavro.read.LOGICAL_READERS |= {
    f"int-{_ENUM}": _read_enum,
    f"bytes-{_DECIMAL}": _read_decimal,
    f"fixed-{_DECIMAL}": _read_decimal,
}


def _encode_as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


# Of nested values.
_encode_as_json = json.JSONEncoder(default=_encode_as_text, separators=(",", ":")).encode


def _decompress_snappy(data: bytes) -> bytes:
    """Decompress a block that ends with a checksum of the result."""
    result = decompress_snappy(data[:-4])
    if zlib.crc32(result) != int.from_bytes(data[-4:], "big"):
        raise AvroError("a block's checksum is wrong")
    return result
