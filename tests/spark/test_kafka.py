"""Messages decoded by Spark: values, bad messages, tombstones, headers, keys. No broker: the frame has Kafka's columns."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from tidegate.jobs.spark.kafka import decoded
from tidegate.jobs.spec.pipeline import SourceSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

COLUMNS = {"at": "timestamp", "n": "long", "who": "string", "origin": "string", "sent": "timestamp", "price": "decimal(6,2)"}
KAFKA = {"key": "who", "headers": {"origin": "from"}, "timestamp": "sent"}
SCHEMA = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>"
)
SENT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def spec_of(**more: Any) -> SourceSpec:
    """The topic with these columns."""
    raw = {"kind": "kafka", "kafka": {"servers": "b:9092", "topic": "t", **KAFKA, **more.pop("kafka", {})}}
    return SourceSpec.model_validate({**raw, "schema": COLUMNS, "event_time": "at", "lag": "1s", **more})


def rows(session: SparkSession, values: list[str | None], **more: Any) -> list[dict[str, Any]]:
    """The decoded messages."""
    headers = [("from", bytearray(b"old")), ("from", bytearray(b"phone")), ("x", None)]
    data = [
        (bytearray(b"ann"), None if v is None else bytearray(v.encode()), "t", 0, n, SENT, headers) for n, v in enumerate(values)
    ]
    found = decoded(session.createDataFrame(data, SCHEMA), spec_of(**more)).collect()
    return [row.asDict() for row in found]


def test_messages(session: SparkSession) -> None:
    """Good ones have typed values with key, header and timestamp beside; bad ones have a reason, their text, and no values."""
    good = '{"at": "2026-03-01T10:00:00+01:00", "n": 7, "price": 1.5}'
    found = rows(
        session,
        [
            good,
            "not json",
            '["at"]',
            None,
            '{"at": "2026-03-01T10:00:00", "n": 1}',
            '{"at": "2026-03-01T10:00:00Z", "n": 1.5}',
            '{"at": "2026-03-01T10:00:00Z", "x": 1}',
            '{"n": 1}',
        ],
    )
    assert (found[0]["n"], found[0]["who"], found[0]["origin"], str(found[0]["price"]), found[0]["_why"]) == (
        7,
        "ann",
        "phone",
        "1.50",
        None,
    )
    assert [row["_why"] for row in found[1:]] == [
        "the message is not a JSON object",
        "the message is not a JSON object",
        "a tombstone: the message has no value",
        "at is no timestamp: 2026-03-01T10:00:00",
        "n is no long: 1.5",
        "not in the schema: x",
        None,
    ]
    assert found[1]["_text"] == "not json"
    assert found[3]["_text"] == "key ann"
    assert found[5]["n"] is None
    assert [row["_at"] for row in found] == list(range(8))


def test_options(session: SparkSession) -> None:
    """Unknown fields may be ignored, times may be numbers, names may have changed, tombstones may be rows."""
    found = rows(
        session,
        ['{"at": 1767225600500, "x": 1, "count": 3}', None],
        kafka={"tombstones": "row"},
        parse={"timestamps": "ms"},
        evolution={"added": "ignore", "renamed": {"count": "n"}},
    )
    assert [row["_why"] for row in found] == [None, None]
    assert (found[0]["at"].timestamp(), found[0]["n"]) == (1767225600.5, 3)
    assert (found[1]["n"], found[1]["who"], found[1]["sent"].timestamp()) == (None, "ann", SENT.timestamp())
