"""Protobuf messages of a topic as rows, in a task.

The fields that are wanted become a plain JSON object, which is parsed as a message of a JSON topic.
So both have one rule for what a text is as a value of a declared type.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import ConfigurationError
from tidegate.jobs.sources.kafka_source import open_schema_registry
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
from .protobuf_texts import decode_to_texts, find_message_index, require_message

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
    two_ways = kafka.registry is not None and kafka.schema_id is not None
    if kafka.payload != "protobuf" or two_ways or decimals:
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


def read_schemas(spec: PipelineSpec) -> dict[str, dict[int, bytes]]:
    """Return source -> the schemas of its Protobuf messages, by number, as the driver has them.

    Of a registry these are the ones that were fetched so far and can be used. One for messages that
    bear no number has the number 0.

    Raises:
        ConfigurationError: a file or a folder cannot be read.
    """
    topics = {name: source.kafka for name, source in spec.sources.items() if source.kafka}
    return {
        name: _list_schemas(kafka) for name, kafka in topics.items() if kafka.payload == "protobuf"
    }


def _list_schemas(kafka: KafkaOptions) -> dict[int, bytes]:
    registry = open_schema_registry(kafka)
    if registry is None:
        return {kafka.schema_id or 0: read_schema_file(kafka)}
    return {
        number: schema
        for number, schema in registry.known.items()
        if isinstance(schema, bytes) and _is_usable(schema, kafka)
    }


def _is_usable(schema: bytes, kafka: KafkaOptions) -> bool:
    assert kafka.message is not None  # noqa: S101 - the spec says so
    try:
        require_message(schema, kafka.message)
    except ConfigurationError:
        return False
    return True


def fetch_schemas(spec: PipelineSpec, unknown: Mapping[str, Collection[int]]) -> bool:
    """Ask registries for schemas that tasks have met; return whether one of them exists.

    Raises:
        TransientError: a registry does not answer.
        ConfigurationError: it refuses the login.
    """
    found = False
    for name, numbers in unknown.items():
        registry = open_schema_registry(get_kafka_options(spec.sources[name]))
        found |= registry is not None and registry.fetch_missing(set(numbers))
    return found


def find_unknown_schemas(
    batch: pa.RecordBatch, source: SourceSpec, schemas: Mapping[int, bytes]
) -> set[int]:
    """Return the numbers of schemas that messages of a registry have, and the task has not."""
    if get_kafka_options(source).registry is None:
        return set()
    numbers = map(_find_number, batch["value"].to_pylist())
    return {number for number in numbers if number is not None} - schemas.keys()


def read_protobuf_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[pa.Table], pa.Table]:
    """Return the rows of messages, and the messages that Spark SQL has to read.

    Raises:
        ConfigurationError: a schema cannot be used.
    """
    values, keys = batch["value"].to_pylist(), batch["key"].to_pylist()
    objects, reasons = _write_objects(values, source, schemas)
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
    values: Sequence[bytes | None], source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[bytes | None], list[str | None]]:
    """For each message its fields as a JSON object, and why it is a dead letter.

    Neither, where only Spark SQL can tell.
    """
    kafka = get_kafka_options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    kinds, has_header = list_field_kinds(source), _has_header(kafka)
    objects: list[bytes | None] = [None] * len(values)
    reasons = [_explain_header(value, source, schemas) for value in values]
    for number, schema in schemas.items():
        bodies = {
            place: value[_HEADER_BYTES:] if has_header else value
            for place, value in enumerate(values)
            if value is not None
            and reasons[place] is None
            and (not has_header or _find_number(value) == number)
        }
        index = find_message_index(schema, kafka.message) if has_header else None
        found = decode_to_texts(schema, kafka.message, [*kinds], index, bodies.values())
        for place, (*texts, fault) in zip(bodies, found, strict=True):
            reasons[place] = fault
            told = dict(zip(kinds, texts, strict=True))
            objects[place] = _write_object(told, source) if fault is None else None
    return objects, reasons


def _has_header(kafka: KafkaOptions) -> bool:
    return kafka.schema_id is not None or kafka.registry is not None


def _find_number(value: bytes | None) -> int | None:
    """The number of the schema of a message; None if it does not begin with one."""
    if value is None or len(value) <= _HEADER_BYTES or value[0] != 0:
        return None
    return int.from_bytes(value[1:_HEADER_BYTES], "big")


def _explain_header(
    value: bytes | None, source: SourceSpec, schemas: Mapping[int, bytes]
) -> str | None:
    if value is None:
        return explain_tombstone(source)
    if not _has_header(get_kafka_options(source)):
        return None
    number = _find_number(value)
    if number is None:
        return "the message does not begin with the number of a schema"
    if number in schemas:
        return None
    return f"the message was written with schema {number}, which the spec does not know"


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
