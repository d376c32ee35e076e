"""Messages of a topic, decoded by Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tidegate.jobs.rows.json_messages import plan_plain_messages, split_messages
from tidegate.jobs.sources.kafka_client import MESSAGE_SCHEMA
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN, UnusableSchema
from tidegate.jobs.spark.kafka_payloads import MESSAGE_DDL, decode_messages
from tidegate.jobs.spec.pipeline import SourceSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = {
    "at": "timestamp",
    "n": "long",
    "who": "string",
    "origin": "string",
    "sent": "timestamp",
    "price": "decimal(6,2)",
}
KAFKA = {"key": "who", "headers": {"origin": "from"}, "timestamp": "sent"}
SCHEMA = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>"
)
SENT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def spec_of(**more: Any) -> SourceSpec:
    """The topic with these columns."""
    raw = {
        "kind": "kafka",
        "kafka": {"servers": "b:9092", "topic": "t", **KAFKA, **more.pop("kafka", {})},
    }
    return SourceSpec.model_validate(
        {**raw, "schema": COLUMNS, "event_time": "at", "lag": "1s", **more}
    )


def rows(
    session: SparkSession,
    values: Sequence[str | bytes | None],
    known: Mapping[int, bytes | UnusableSchema] | None = None,
    *,
    key: bytes = b"ann",
    header: bytes | Sequence[bytes] = b"phone",
    sent: datetime | None = SENT,
    plain: bool = False,
    **more: Any,
) -> list[dict[str, Any]]:
    """The decoded messages; with `plain` those that Arrow parses are not decoded by Spark.

    All messages have one value of the header, or each has its own.
    """
    ends = [header] * len(values) if isinstance(header, bytes) else header
    data = [
        (
            bytearray(key),
            v if v is None else bytearray(v.encode() if isinstance(v, str) else v),
            "t",
            0,
            n,
            sent,
            [("from", bytearray(b"old")), ("from", bytearray(end)), ("x", None)],
        )
        for n, (v, end) in enumerate(zip(values, ends, strict=True))
    ]
    messages = session.createDataFrame(data, SCHEMA)
    source = spec_of(**more)
    parsed = None
    if plain:
        plan = plan_plain_messages(source)
        assert plan is not None
        whole = messages.select(*MESSAGE_SCHEMA.names).toArrow().combine_chunks()
        parsed, others = split_messages(whole.to_batches()[0], plan)
        messages = session.createDataFrame(others.combine_chunks(), MESSAGE_DDL)
    found = decode_messages(messages, source, known).collect()
    if parsed is not None and parsed.num_rows:
        found += session.createDataFrame(parsed.combine_chunks()).collect()
    return [row.asDict() for row in sorted(found, key=lambda row: int(row[OFFSET_COLUMN]))]


FIELD = FieldDescriptorProto


def proto() -> bytes:
    """Messages shop.Other {n = 1.

    Text} and shop.Click {at = 1: a time, n = 2: a number, price = 3: text, kind = 4: an enum}.
    """
    file = FileDescriptorProto(
        name="shop.proto",
        package="shop",
        syntax="proto3",
        dependency=["google/protobuf/timestamp.proto"],
    )
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="BUY", number=0)
    kind.value.add(name="SELL", number=1)
    file.message_type.add(name="Other").field.add(
        name="n", number=1, type=FIELD.TYPE_STRING, label=1
    )
    click = file.message_type.add(name="Click")
    click.field.add(
        name="at",
        number=1,
        type=FIELD.TYPE_MESSAGE,
        type_name=".google.protobuf.Timestamp",
        label=1,
    )
    click.field.add(name="n", number=2, type=FIELD.TYPE_SINT64, label=1)
    click.field.add(name="price", number=3, type=FIELD.TYPE_STRING, label=1)
    click.field.add(name="kind", number=4, type=FIELD.TYPE_ENUM, type_name=".shop.Kind", label=1)
    return bytes(FileDescriptorSet(file=[file]).SerializeToString())
