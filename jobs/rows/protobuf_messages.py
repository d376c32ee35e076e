"""Protobuf messages of a topic as rows, in a task.

The fields that are wanted become a plain JSON object, which is parsed as a message of a JSON topic.
So both have one rule for what a text is as a value of a declared type.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from tidegate.jobs.spec.pipeline import SourceSpec

from .json_messages import (
    PlainMessages,
    get_kafka_options,
    list_field_kinds,
    plan_messages,
    split_messages,
)
from .message_schemas import explain_header, has_header, select_bodies, split_dead_messages
from .protobuf_texts import decode_to_texts, find_message_index

_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_TRUTHS: Final = ("true", "false")


def plan_protobuf_messages(source: SourceSpec) -> PlainMessages | None:
    """Return how tasks read a topic of Protobuf messages; None if Spark SQL has to.

    A decimal of a JSON message was a double before, one of these messages is a text.
    """
    kafka = get_kafka_options(source)
    decimals = any(kind.startswith("decimal") for kind in source.columns.values())
    two_ways = kafka.registry is not None and kafka.schema_id is not None
    if kafka.payload != "protobuf" or two_ways or decimals:
        return None
    return plan_messages(source)


def read_protobuf_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[pa.Table], pa.Table]:
    """Return the rows of messages, and the messages that Spark SQL has to read.

    Raises:
        ConfigurationError: a schema cannot be used.
    """
    objects, reasons = _write_objects(batch["value"].to_pylist(), source, schemas)
    letters, good = split_dead_messages(batch, reasons, plan)
    place = batch.schema.get_field_index("value")
    told = batch.set_column(place, "value", pa.array(objects, batch.schema.field(place).type))
    rows, others = split_messages(told.filter(good), plan)
    return [letters, rows], others


def _write_objects(
    values: Sequence[bytes | None], source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[bytes | None], list[str | None]]:
    """For each message its fields as a JSON object, and why it is a dead letter.

    Neither, where only Spark SQL can tell.
    """
    kafka = get_kafka_options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    kinds = list_field_kinds(source)
    objects: list[bytes | None] = [None] * len(values)
    reasons = [explain_header(value, source, schemas) for value in values]
    for number, schema in schemas.items():
        bodies = select_bodies(values, reasons, number, kafka)
        index = find_message_index(schema, kafka.message) if has_header(kafka) else None
        found = decode_to_texts(schema, kafka.message, [*kinds], index, bodies.values())
        for place, (*texts, fault) in zip(bodies, found, strict=True):
            reasons[place] = fault
            told = dict(zip(kinds, texts, strict=True))
            objects[place] = _write_object(told, source) if fault is None else None
    return objects, reasons


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
