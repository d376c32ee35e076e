"""Pipelines over a topic, their messages and cuts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tests.spark.agreement import COLUMNS
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.rows.protobuf_texts import load_message_class
from tidegate.jobs.sources.kafka_source import KafkaSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

WINDOW = {"kind": "tumbling", "size": "10s", "keys": ["k"], "aggregates": {"n": "count(*)"}}
OFF = {"release": {"mode": "pass_through"}, "outputs": {"events": False}}


def topic_spec(
    servers: str,
    *,
    kafka: dict[str, Any] | None = None,
    events: dict[str, Any] = OFF,
    **source: Any,
) -> PipelineSpec:
    """A pipeline over a topic; `events` are the options of its release and outputs."""
    options: dict[str, Any] = {"servers": servers, "topic": "t", **(kafka or {})}
    types = {**COLUMNS, **dict.fromkeys(options.get("headers", {}), "string")}
    types |= {"who": "string"} if "key" in options else {}
    base = {"schema": types, "event_time": "t", "lag": "5s"}
    sources = {"a": {"kind": "kafka", "kafka": options, **base, **source}}
    raw = {"name": "p", "sources": sources, "windows": {"w": WINDOW}, **events}
    return PipelineSpec.model_validate(raw)


def message(second: int, **more: Any) -> bytes:
    """A good message, unless `more` says otherwise."""
    time = f"2026-03-01T10:00:{second:02d}Z"
    return json.dumps({"t": time, "k": "x", "n": second, "v": 0.5, **more}).encode()


FIELD = FieldDescriptorProto


def make_schema(**fields: int) -> bytes:
    """A descriptor set with shop.Row, of these fields beside `t`, which is a time."""
    file = FileDescriptorProto(name="row.proto", package="shop", syntax="proto2")
    file.dependency.append("google/protobuf/timestamp.proto")
    row = file.message_type.add(name="Row")
    time = ".google.protobuf.Timestamp"
    row.field.add(name="t", number=1, type=FIELD.TYPE_MESSAGE, type_name=time, label=1)
    for number, (name, kind) in enumerate(fields.items(), start=2):
        row.field.add(name=name, number=number, type=kind, label=1)
    return bytes(FileDescriptorSet(file=[file]).SerializeToString())


def encode_row(schema: bytes, second: int, nanos: int = 0, **values: Any) -> bytes:
    """A message shop.Row with these values."""
    made = load_message_class(schema, "shop.Row")
    time = int(datetime(2026, 3, 1, 10, tzinfo=UTC).timestamp()) + second
    found: bytes = made(t={"seconds": time, "nanos": nanos}, **values).SerializeToString()
    return found


class FixedOffsets:
    """Implements `TopicOffsets` with these bounds."""

    def __init__(self, bounds: dict[int, tuple[int, int]]) -> None:
        self._bounds = bounds

    def read_offsets(self, *, settled: bool = True) -> dict[int, tuple[int, int]]:
        """Return them."""
        return self._bounds

    def read_topic_id(self) -> str | None:
        """Return no id."""
        return None


def plan_cut(spec: PipelineSpec, bounds: dict[int, tuple[int, int]]) -> Cut:
    """The cut over these offsets."""
    source = KafkaSource("a", spec.sources["a"], FixedOffsets(bounds))
    slices: list[Slice] = [source.plan(m, None, ReadLimits()) for m in source.list_members()]
    return Cut(tuple(slices))
