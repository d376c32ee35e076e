"""Avro messages as rows.

A value fits its declared type, or its message is reported; nothing is cut, rounded or nulled.
"""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.rows.topic_messages import rows
from tidegate.errors import ConfigurationError
from tidegate.jobs.rows.avro_records import parse_avro_schema
from tidegate.jobs.sources.kafka_source import UnusableSchema

AT = datetime(2026, 3, 1, 10, tzinfo=UTC)
MILLIS = int(AT.timestamp()) * 1000
PLAIN: dict[str, Any] = {
    "key": None,
    "headers": {},
    "timestamp": None,
    "payload": "avro",
    "registry": "http://127.0.0.1:9",
}


def encoded(value: Any) -> bytes:
    """A value in Avro's binary form."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return encoded(len(raw)) + raw
    left, found = (value << 1) ^ (value >> 63), bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def record(kind: Any) -> bytes:
    """The schema of a record with one field `v`."""
    return json.dumps(
        {"type": "record", "name": "R", "fields": [{"name": "v", "type": kind}]}
    ).encode()


def read(declared: str, values: list[tuple[Any, Any]], **more: Any) -> list[tuple[Any, str | None]]:
    """(value, what is wrong) of each (type, value), declared as one type.

    Each has a schema of its own.
    """
    known = {n: record(kind) for n, (kind, _) in enumerate(values)}
    messages = [
        b"\0" + n.to_bytes(4, "big") + encoded(value) for n, (_, value) in enumerate(values)
    ]
    columns = {"at": "timestamp", "v": declared}
    beside = {**PLAIN, "timestamp": "at"}
    found = rows(messages, known, kafka=beside, schema=columns, **more)
    return [(row["v"], row["_why"]) for row in found]


def logical(name: str) -> dict[str, str]:
    """A long that the schema calls a time."""
    return {"type": "long", "logicalType": name}


def test_numbers_fit_or_are_reported() -> None:
    """The rule of objects (docs/decisions/0010) is the rule of messages.

    Nothing is rounded, cut or made null.
    """
    values = [
        ("double", 2.0),
        ("double", 1.5),
        ("long", 1 << 40),
        ("string", "12"),
        ("string", "abc"),
        (["null", "long"], 1),
    ]
    assert read("long", [*values[:5]]) == [
        (2, None),
        (None, "v is double, declared long: 1.5"),
        (1 << 40, None),
        (12, None),
        (None, "v is string, declared long: abc"),
    ]
    assert read("int", [("long", 1 << 40), ("long", 7)]) == [
        (None, f"v is long, declared int: {1 << 40}"),
        (7, None),
    ]
    assert read("double", [("long", (1 << 53) + 1)]) == [
        (None, f"v is long, declared double: {(1 << 53) + 1}")
    ]
    assert read("string", [("string", b"\xff"), ("string", "x")]) == [
        (None, "v is string, declared string: \ufffd"),
        ("x", None),
    ]


def test_times_fit_or_are_reported() -> None:
    """A plain number is not a time unless the source says its unit.

    A local one needs the source's zone.
    """
    times = [
        (logical("timestamp-millis"), MILLIS),
        ("long", MILLIS),
        ("string", "2026-03-01T11:00:00+01:00"),
    ]
    instants = [(value and value.astimezone(UTC), why) for value, why in read("timestamp", times)]
    assert instants == [
        (AT, None),
        (None, f"v is long, declared timestamp: {MILLIS}"),
        (AT, None),
    ]
    with_unit = read("timestamp", times[:2], parse={"timestamps": "ms"})
    assert [(value.astimezone(UTC), why) for value, why in with_unit] == [(AT, None)] * 2, (
        "the schema's own time has its unit"
    )
    local = [(logical("local-timestamp-millis"), MILLIS)]
    assert (
        read("timestamp", local)[0][1]
        == "v is local-timestamp-millis, declared timestamp: 2026-03-01T10:00:00.000"
    )
    ((value, why),) = read("timestamp", local, timezone="America/New_York")
    assert (value.astimezone(UTC), why) == (AT.replace(hour=15), None)


def test_a_damaged_record_is_reported() -> None:
    """Also where the event time comes from beside it."""
    found = rows(
        [b"\0\0\0\0\x01\x01", b"\0\0\0\0\x01" + encoded(1.5)],
        {1: record("double")},
        kafka={**PLAIN, "timestamp": "at"},
        schema={"at": "timestamp", "v": "double"},
    )
    assert [(row["v"], row["_why"]) for row in found] == [
        (None, "the message is not a record of the schema"),
        (1.5, None),
    ]


def test_schemas_that_cannot_be_used() -> None:
    """Each makes dead letters of its own messages, which say why, and of no others."""
    schemas: dict[int, bytes | UnusableSchema | None] = {
        1: record("long"),
        2: UnusableSchema("it refers to other schemas"),
        3: None,
    }
    found = rows(
        [b"\0\0\0\0" + bytes([number]) + encoded(7) for number in schemas],
        schemas,
        kafka={**PLAIN, "timestamp": "at"},
        schema={"at": "timestamp", "v": "long"},
    )
    assert [(row["v"], row["_why"]) for row in found] == [
        (7, None),
        (
            None,
            "the message was written with schema 2, which cannot be used: it refers to other"
            " schemas",
        ),
        (None, "the message was written with schema 3, which the registry does not know"),
    ]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [(b'"string"', "no Avro record schema"), (record("nonsense"), "cannot be used: ")],
)
def test_what_is_no_schema(schema: bytes, reason: str) -> None:
    """It is refused when it is read."""
    with pytest.raises(ConfigurationError, match=reason):
        parse_avro_schema(schema)


def test_types_with_attributes_that_are_none() -> None:
    """A decimal without digits is its bytes, and what cannot be read costs no more than messages."""
    kinds: list[tuple[Any, Any]] = [
        ({"type": "bytes", "logicalType": "decimal"}, b"ab"),
        ({"type": "string", "logicalType": "date"}, "x"),
        ({"type": "int", "logicalType": ["x"]}, 1),
    ]
    assert read("binary", kinds) == [
        (b"ab", None),
        (b"x", None),
        (None, "the message is not a record of the schema"),
    ]


def test_a_schema_that_contains_itself() -> None:
    """Its values are JSON texts."""
    schema = record(["null", "R"])
    plain = {**PLAIN, "timestamp": "at"}
    bodies = [b"\2\2\0", b"\2\0", b"\0", b"\2" * 30_000]
    messages = [b"\0\0\0\0\1" + body for body in bodies]
    found = rows(messages, {1: schema}, kafka=plain, schema={"at": "timestamp", "v": "string"})
    dead = "the message is not a record of the schema"
    assert [(row["v"], row["_why"]) for row in found] == [
        ('{"v":{}}', None),
        ("{}", None),
        (None, dead),
        (None, dead),
    ]
