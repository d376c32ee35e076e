"""Messages of a topic, decoded by the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tidegate.jobs.engine.arrow_tables import list_rows
from tidegate.jobs.rows.json_messages import (
    PlainMessages,
    join_messages,
    parse_objects,
    plan_messages,
)
from tidegate.jobs.rows.message_schemas import Schemas
from tidegate.jobs.rows.topic_reading import read_messages
from tidegate.jobs.sources.kafka_client import MESSAGE_SCHEMA
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.spec.pipeline import SourceSpec

COLUMNS = {
    "at": "timestamp",
    "n": "long",
    "who": "string",
    "origin": "string",
    "sent": "timestamp",
    "price": "decimal(6,2)",
}
KAFKA = {"key": "who", "headers": {"origin": "from"}, "timestamp": "sent"}
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


def make_batch(
    values: Sequence[str | bytes | None],
    *,
    key: bytes | None = b"ann",
    header: bytes | Sequence[bytes] = b"phone",
    sent: datetime | None = SENT,
) -> pa.RecordBatch:
    """Messages as a client reads them; all have one value of the header, or each its own."""
    ends = [header] * len(values) if isinstance(header, bytes) else header
    messages = [
        {
            "key": key,
            "value": value.encode() if isinstance(value, str) else value,
            "partition": 0,
            "offset": place,
            "timestamp": sent,
            "headers": [
                {"key": name, "value": own}
                for name, own in (("from", b"old"), ("from", end), ("x", None))
            ],
        }
        for place, (value, end) in enumerate(zip(values, ends, strict=True))
    ]
    return pa.RecordBatch.from_pylist(messages, MESSAGE_SCHEMA)


def rows(
    values: Sequence[str | bytes | None],
    schemas: Schemas | None = None,
    *,
    one_by_one: bool = False,
    key: bytes | None = b"ann",
    header: bytes | Sequence[bytes] = b"phone",
    sent: datetime | None = SENT,
    **more: Any,
) -> list[dict[str, Any]]:
    """The decoded messages; plain ones are read many at a time unless `one_by_one`."""
    source = spec_of(**more)
    plan = plan_messages(source)
    plan = replace(plan, is_plain=plan.is_plain and not one_by_one)
    batch = make_batch(values, key=key, header=header, sent=sent)
    tables = read_messages(batch, plan, source, schemas or {})
    return list_rows(pa.concat_tables(tables).sort_by(OFFSET_COLUMN))


def split_messages(batch: pa.RecordBatch, plan: PlainMessages) -> tuple[pa.Table, pa.Table]:
    """The rows of plain JSON messages, and the other messages."""
    return join_messages(batch, parse_objects(batch["value"], plan), plan)


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
