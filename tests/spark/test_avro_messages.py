"""Avro messages decoded by Spark.

A value fits its declared type, or its message is reported; nothing is cut, rounded or nulled.
"""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.kafka_topics import rows
from tidegate.jobs.sources.kafka_source import UnusableSchema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

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


def read(
    session: SparkSession, declared: str, values: list[tuple[Any, Any]], **more: Any
) -> list[tuple[Any, str | None]]:
    """(value, what is wrong) of each (type, value), declared as one type.

    Each has a schema of its own.
    """
    known = {n: record(kind) for n, (kind, _) in enumerate(values)}
    messages = [
        b"\0" + n.to_bytes(4, "big") + encoded(value) for n, (_, value) in enumerate(values)
    ]
    columns = {"at": "timestamp", "v": declared}
    beside = {**PLAIN, "timestamp": "at"}
    found = rows(session, messages, known, kafka=beside, schema=columns, **more)
    return [(row["v"], row["_why"]) for row in found]


def logical(name: str) -> dict[str, str]:
    """A long that the schema calls a time."""
    return {"type": "long", "logicalType": name}


def test_numbers_fit_or_are_reported(avro: SparkSession) -> None:
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
    assert read(avro, "long", [*values[:5]]) == [
        (2, None),
        (None, "v is double, declared long: 1.5"),
        (1 << 40, None),
        (12, None),
        (None, "v is string, declared long: abc"),
    ]
    assert read(avro, "int", [("long", 1 << 40), ("long", 7)]) == [
        (None, f"v is bigint, declared int: {1 << 40}"),
        (7, None),
    ]
    assert read(avro, "double", [("long", (1 << 53) + 1)]) == [
        (None, f"v is bigint, declared double: {(1 << 53) + 1}")
    ]
    assert read(avro, "string", [("string", b"\xff"), ("string", "x")]) == [
        (None, "v is string, declared string: \ufffd"),
        ("x", None),
    ]


def test_times_fit_or_are_reported(avro: SparkSession) -> None:
    """A plain number is not a time unless the source says its unit.

    A local one needs the source's zone.
    """
    times = [
        (logical("timestamp-millis"), MILLIS),
        ("long", MILLIS),
        ("string", "2026-03-01T11:00:00+01:00"),
    ]
    instants = [
        (value and value.astimezone(UTC), why) for value, why in read(avro, "timestamp", times)
    ]
    assert instants == [
        (AT, None),
        (None, f"v is bigint, declared timestamp: {MILLIS}"),
        (AT, None),
    ]
    with_unit = read(avro, "timestamp", times[:2], parse={"timestamps": "ms"})
    assert [(value.astimezone(UTC), why) for value, why in with_unit] == [(AT, None)] * 2, (
        "the schema's own time has its unit"
    )
    local = [(logical("local-timestamp-millis"), MILLIS)]
    assert (
        read(avro, "timestamp", local)[0][1]
        == "v is timestamp_ntz, declared timestamp: 2026-03-01 10:00:00"
    )
    ((value, why),) = read(avro, "timestamp", local, timezone="America/New_York")
    assert (value.astimezone(UTC), why) == (AT.replace(hour=15), None)


def test_a_damaged_record_is_reported(avro: SparkSession) -> None:
    """Also where the event time comes from beside it."""
    found = rows(
        avro,
        [b"\0\0\0\0\x01\x01", b"\0\0\0\0\x01" + encoded(1.5)],
        {1: record("double")},
        kafka={**PLAIN, "timestamp": "at"},
        schema={"at": "timestamp", "v": "double"},
    )
    assert [(row["v"], row["_why"]) for row in found] == [
        (None, "the message is not a record of the schema"),
        (1.5, None),
    ]


def test_schemas_that_cannot_be_used(avro: SparkSession) -> None:
    """Each makes dead letters of its own messages, which say why, and of no others."""
    known: dict[int, bytes | UnusableSchema] = {
        1: record("long"),
        2: UnusableSchema("it refers to other schemas"),
        3: b'"string"',
        4: record("nonsense"),
    }
    found = rows(
        avro,
        [b"\0\0\0\0" + bytes([number]) + encoded(7) for number in known],
        known,
        kafka={**PLAIN, "timestamp": "at"},
        schema={"at": "timestamp", "v": "long"},
    )
    assert [(row["v"], row["_schema"]) for row in found] == [
        (7, None),
        (None, 2),
        (None, 3),
        (None, 4),
    ]
    begins = [
        f"the message was written with schema {number}, which cannot be used: "
        for number in (2, 3, 4)
    ]
    reasons = [
        "it refers to other schemas",
        "no Avro record schema",
        "Spark cannot read the Avro schema",
    ]
    for row, begin, reason in zip(found[1:], begins, reasons, strict=True):
        assert row["_why"].startswith(begin + reason), row["_why"]
