"""Avro messages: schemas, and values of all types."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from io import BytesIO
from typing import Any

import fastavro

AT = int(datetime(2026, 3, 1, 10, tzinfo=UTC).timestamp())
TIME = {"type": "long", "logicalType": "timestamp-millis"}
NUMBERED = {"headers": {}, "timestamp": "at", "payload": "avro", "registry": "http://127.0.0.1:9"}


def make_schema(**fields: Any) -> bytes:
    """A record of these fields."""
    named = [{"name": name, "type": kind} for name, kind in fields.items()]
    return json.dumps({"type": "record", "name": "R", "fields": named}).encode()


def encode(schema: bytes, **values: Any) -> bytes:
    """A record without its schema."""
    physical = json.loads(schema, object_hook=drop_logical_type)
    found = BytesIO()
    fastavro.schemaless_writer(found, fastavro.parse_schema(physical), values)
    return found.getvalue()


def drop_logical_type(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a physical type."""
    return {name: held for name, held in attributes.items() if name != "logicalType"}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A type that means more than its bytes."""
    return {"type": kind, "logicalType": name, **more}


DECIMAL = logical("bytes", "decimal", precision=6, scale=2)
ENUM = {"type": "enum", "name": "E", "symbols": ["BUY", "SELL"]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
VALUES: list[tuple[Any, Any]] = [
    *(("boolean", True), ("int", 7), ("int", -(2**31)), ("long", 7), ("long", 2**31)),
    *(("long", 2**53 + 1), ("long", -(2**63)), ("float", 0.1), ("double", 0.1), ("double", 2.0)),
    *(("double", float("nan")), ("double", -0.0), ("double", float("inf")), ("bytes", b"\xff\0")),
    *((FIXED, b"ab"), (ENUM, "SELL"), (["null", ENUM], "BUY"), (["null", "long"], None)),
    *((["long", "null"], 7), (["string"], "x"), (["long", "string"], 7), (DECIMAL, b"\x05\x00")),
    *((DECIMAL, b"\xff"), (DECIMAL, b""), (DECIMAL, b"\x7f\xff\xff\xff"), (DECIMAL, b"\0\0\x05")),
    *((logical("int", "date"), 20_000), (logical("int", "date"), -500_000)),
    *((logical("int", "date"), 2**31 - 1), (TIME, AT * 1000 + 1), (TIME, -(10**14))),
    *((TIME, 2**62), (logical("long", "timestamp-micros"), AT * 10**6 + 1)),
    *((logical("long", "local-timestamp-millis"), AT * 1000), (logical("int", "time-millis"), 7)),
    *((logical("string", "uuid"), "2f1c9e0e-6b51-4d0e-8f1c-0d5d2a2f7b11"),),
    *(({"type": "array", "items": "int"}, [1]), ({"type": "map", "values": "long"}, {"a": 1})),
    *(("string", text) for text in ("", "7", " 7", "007", "-0", "+7", "7.5", "1.50", "1e3", "x")),
    *(("string", text) for text in ("2147483648", "99999", "9" * 40, "0." + "1" * 40, "true")),
    *(("string", text) for text in ("2026-03-01", "2026-02-30", "2026-03-01T10:00:00Z", "٧")),
]


RICH = make_schema(
    n=["null", "long"],
    e=["null", ENUM],
    s="string",
    many={"type": "array", "items": "int"},
    by={"type": "map", "values": ["null", "string"]},
    b="boolean",
    inner={"type": "record", "name": "I", "fields": [{"name": "x", "type": ["null", "int"]}]},
)
