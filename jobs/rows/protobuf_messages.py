"""Protobuf messages of a topic as rows, in a task.

The fields that are wanted become a plain JSON object, which is parsed as a message of a JSON topic.
So both have one rule for what a text is as a value of a declared type.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import KafkaOptions

from .dead_messages import explain_tombstone, show_dead_messages, show_key
from .errors import SCHEMA_FILE_UNREADABLE
from .json_messages import (
    PlainMessages,
    get_kafka_options,
    list_field_kinds,
    plan_messages,
    split_messages,
)
from .protobuf_texts import decode_to_texts, find_message_index

_HEADER_BYTES: Final = 5
"""A zero byte, and four of the schema's number."""
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_TRUTHS: Final = ("true", "false")


def plan_protobuf_messages(source: SourceSpec) -> PlainMessages | None:
    """Return how tasks read a topic of Protobuf messages; None if Spark SQL has to.

    A decimal of a JSON message was a double before, one of these messages is a text.
    """
    kafka = get_kafka_options(source)
    decimals = any(kind.startswith("decimal") for kind in source.columns.values())
    if kafka.payload != "protobuf" or kafka.registry is not None or decimals:
        return None
    return plan_messages(source)


def read_schema_file(kafka: KafkaOptions) -> bytes:
    """Return the schema of a topic without a registry.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    assert kafka.schema_file is not None  # noqa: S101 - the spec says so
    try:
        return Path(kafka.schema_file).read_bytes()
    except OSError as error:
        raise SCHEMA_FILE_UNREADABLE(file=kafka.schema_file, cause=error.strerror) from error


def read_schemas(spec: PipelineSpec) -> dict[str, bytes]:
    """Return source -> the schema of its Protobuf messages, from the driver's disk.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    topics = {name: source.kafka for name, source in spec.sources.items() if source.kafka}
    return {
        name: read_schema_file(kafka)
        for name, kafka in topics.items()
        if kafka.payload == "protobuf"
    }


def read_protobuf_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schema: bytes
) -> tuple[list[pa.Table], pa.Table]:
    """Return the rows of messages, and the messages that Spark SQL has to read.

    Raises:
        ConfigurationError: the schema cannot be used.
    """
    values, keys = batch["value"].to_pylist(), batch["key"].to_pylist()
    objects, reasons = _write_objects(values, source, schema)
    is_dead = pa.array([reason is not None for reason in reasons], pa.bool_())
    dead = pa.Table.from_batches([batch.filter(is_dead)])
    texts = [
        show_key(key) if value is None else f"0x{value.hex().upper()}"
        for value, key, reason in zip(values, keys, reasons, strict=True)
        if reason is not None
    ]
    letters = show_dead_messages(dead, list(filter(None, reasons)), texts, plan)
    place = batch.schema.get_field_index("value")
    told = batch.set_column(place, "value", pa.array(objects, batch.schema.field(place).type))
    rows, others = split_messages(told.filter(pc.invert(is_dead)), plan)
    return [letters, rows], others


def _write_objects(
    values: Sequence[bytes | None], source: SourceSpec, schema: bytes
) -> tuple[list[bytes | None], list[str | None]]:
    """For each message its fields as a JSON object, and why it is a dead letter.

    Neither, where only Spark SQL can tell.
    """
    kafka = get_kafka_options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    kinds = list_field_kinds(source)
    index = None if kafka.schema_id is None else find_message_index(schema, kafka.message)
    headers = [_explain_header(value, source) for value in values]
    bodies = [
        None if value is None or reason is not None else _cut_header(value, kafka)
        for value, reason in zip(values, headers, strict=True)
    ]
    objects: list[bytes | None] = []
    reasons: list[str | None] = []
    found = decode_to_texts(schema, kafka.message, [*kinds], index, bodies)
    for body, header, (*texts, fault) in zip(bodies, headers, found, strict=True):
        reason = header or fault
        is_read = body is not None and reason is None
        told = dict(zip(kinds, texts, strict=True))
        objects.append(_write_object(told, source) if is_read else None)
        reasons.append(reason)
    return objects, reasons


def _explain_header(value: bytes | None, source: SourceSpec) -> str | None:
    expected = get_kafka_options(source).schema_id
    if value is None:
        return explain_tombstone(source)
    if expected is None:
        return None
    if len(value) <= _HEADER_BYTES or value[0] != 0:
        return "the message does not begin with the number of a schema"
    number = int.from_bytes(value[1:_HEADER_BYTES], "big")
    if number == expected:
        return None
    return f"the message was written with schema {number}, which the spec does not know"


def _cut_header(value: bytes, kafka: KafkaOptions) -> bytes:
    return value if kafka.schema_id is None else value[_HEADER_BYTES:]


def _write_object(texts: dict[str, str | None], source: SourceSpec) -> bytes | None:
    """A plain JSON object; None if a text is not the plain form of its type."""
    kinds = list_field_kinds(source)
    tokens = []
    for name, text in texts.items():
        if text is None:
            continue
        kind = kinds[name]
        is_number = kind in ("int", "long", "double")
        is_number = is_number or (kind == "timestamp" and source.parse.timestamps != "iso")
        if is_number and _NUMBER.fullmatch(text) is None:
            return None
        if kind == "boolean" and text not in _TRUTHS:
            return None
        told = text if is_number or kind == "boolean" else json.dumps(text, ensure_ascii=False)
        tokens.append(f"{json.dumps(name)}:{told}")
    return f"{{{','.join(tokens)}}}".encode()
