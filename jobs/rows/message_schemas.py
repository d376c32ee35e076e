"""Schemas of messages that are not JSON: the driver has them, tasks get them by their numbers.

A message begins with the number of its schema if a registry's serializer wrote it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from tidegate.errors import ConfigurationError
from tidegate.jobs.sources.kafka_source import UnusableSchema, open_schema_registry
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import KafkaOptions

from .avro_records import parse_avro_schema
from .errors import REGISTERED_SCHEMA_UNUSABLE, SCHEMA_FILE_UNREADABLE, SCHEMA_NOT_REGISTERED
from .json_messages import get_kafka_options
from .odd_messages import DeadMessageError
from .protobuf_texts import find_message_index, load_message_class

Schemas = Mapping[int, bytes | UnusableSchema | None]
"""Number -> schema; None if the registry does not know it."""

HEADER_BYTES: Final = 5
"""A zero byte, and four of the schema's number."""


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


def read_schemas(spec: PipelineSpec) -> dict[str, Schemas]:
    """Return source -> the schemas of its messages, by number, as the driver has them.

    Of a registry these are those that were fetched so far. One for messages that bear no number has
    the number 0.

    Raises:
        ConfigurationError: a file or a folder cannot be read, or a file has no usable schema.
    """
    return {
        name: _list_schemas(source.kafka)
        for name, source in spec.sources.items()
        if source.kafka is not None and source.kafka.payload != "json"
    }


def _list_schemas(kafka: KafkaOptions) -> Schemas:
    registry = open_schema_registry(kafka)
    if registry is None:
        schema = read_schema_file(kafka)
        _require_usable_schema(kafka, schema)
        return {kafka.schema_id or 0: schema}
    found = {number: _check_schema(kafka, schema) for number, schema in registry.known.items()}
    if kafka.on_unknown_schema == "wait":
        return {number: one for number, one in found.items() if isinstance(one, bytes)}
    return found


def _check_schema(kafka: KafkaOptions, schema: bytes | UnusableSchema) -> bytes | UnusableSchema:
    if isinstance(schema, bytes):
        try:
            _require_usable_schema(kafka, schema)
        except ConfigurationError as error:
            return UnusableSchema(error.message)
    return schema


def _require_usable_schema(kafka: KafkaOptions, schema: bytes) -> None:
    """Refuse a schema that no message can be read with.

    Raises:
        ConfigurationError: it is one.
    """
    if kafka.payload == "avro":
        parse_avro_schema(schema)
        return
    assert kafka.message is not None  # noqa: S101 - the spec says so
    load_message_class(schema, kafka.message)
    if has_header(kafka):
        find_message_index(schema, kafka.message)


def fetch_schemas(
    spec: PipelineSpec,
    known: Mapping[str, Schemas],
    unknown: Mapping[str, Mapping[int, str]],
) -> dict[str, Schemas]:
    """Ask registries for schemas that tasks have met; return the schemas of all sources.

    Args:
        spec: the pipeline.
        known: what the tasks had.
        unknown: source -> number of a schema that they lacked -> the place of a message with it.

    Raises:
        TransientError: a registry does not answer, or a source waits for a schema that is not
            registered yet.
        ConfigurationError: a registry refuses the login, or a source waits for a schema that cannot
            be used.
    """
    found = dict(known)
    for name, places in unknown.items():
        kafka = get_kafka_options(spec.sources[name])
        registry = open_schema_registry(kafka)
        assert registry is not None  # noqa: S101 - see `find_unknown_schemas`
        registry.fetch_missing(set(places))
        fetched = _list_schemas(kafka)
        for number, place in places.items() if kafka.on_unknown_schema == "wait" else ():
            if number not in fetched:
                # A number that the registry knows will never name another schema: waiting does not
                # help.
                is_known = number in registry.known
                error = REGISTERED_SCHEMA_UNUSABLE if is_known else SCHEMA_NOT_REGISTERED
                place = f"{kafka.topic} {place}"
                raise error(source=name, number=number, registry=kafka.registry, place=place)
        found[name] = {**known[name], **dict.fromkeys(places), **fetched}
    return found


def find_unknown_schemas(
    batch: pa.RecordBatch, source: SourceSpec, schemas: Schemas
) -> dict[int, str]:
    """Return the schemas of messages of a registry that the task does not have.

    By their numbers, with the place of a message of each.
    """
    found: dict[int, str] = {}
    if get_kafka_options(source).registry is None:
        return found
    for row, value in enumerate(batch["value"].to_pylist()):
        number = _find_number(value)
        if number is not None and number not in schemas and number not in found:
            partition, offset = batch["partition"][row], batch["offset"][row]
            found[number] = f"partition {partition}, offset {offset}"
    return found


def has_header(kafka: KafkaOptions) -> bool:
    """Whether messages begin with the number of their schema."""
    return kafka.schema_id is not None or kafka.registry is not None


def _find_number(value: bytes | None) -> int | None:
    """The number of the schema of a message; None if it does not begin with one."""
    if value is None or len(value) <= HEADER_BYTES or value[0] != 0:
        return None
    return int.from_bytes(value[1:HEADER_BYTES], "big")


def split_header(value: bytes, schemas: Schemas, kafka: KafkaOptions) -> tuple[bytes, bytes]:
    """Return the payload of a message and its schema.

    Raises:
        DeadMessageError: the message names no schema that it can be read with.
    """
    if not has_header(kafka):
        return value, next(one for one in schemas.values() if isinstance(one, bytes))
    number = _find_number(value)
    if number is None:
        raise DeadMessageError("the message does not begin with the number of a schema")
    schema, words = schemas.get(number), f"the message was written with schema {number}, which"
    if schema is None:
        where = "spec" if kafka.registry is None else "registry"
        raise DeadMessageError(f"{words} the {where} does not know")
    if isinstance(schema, UnusableSchema):
        raise DeadMessageError(f"{words} cannot be used: {schema.why}")
    return value[HEADER_BYTES:], schema
