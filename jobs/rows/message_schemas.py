"""Schemas of messages that are not JSON: the driver has them, tasks get them by their numbers.

A message begins with the number of its schema if a registry's serializer wrote it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import ConfigurationError
from tidegate.jobs.sources.kafka_source import open_schema_registry
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import KafkaOptions

from .avro_records import is_readable_schema
from .dead_messages import explain_tombstone, show_dead_messages, show_key
from .errors import SCHEMA_FILE_UNREADABLE
from .json_messages import PlainMessages, get_kafka_options
from .protobuf_texts import require_message

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


def read_schemas(spec: PipelineSpec) -> dict[str, dict[int, bytes]]:
    """Return source -> the schemas of its messages, by number, as the driver has them.

    These are the ones that tasks can use, of a registry those that were fetched so far. One for
    messages that bear no number has the number 0.

    Raises:
        ConfigurationError: a file or a folder cannot be read.
    """
    topics = [name for name, source in spec.sources.items() if source.kafka is not None]
    return {
        name: _list_schemas(spec.sources[name])
        for name in topics
        if get_kafka_options(spec.sources[name]).payload != "json"
    }


def _list_schemas(source: SourceSpec) -> dict[int, bytes]:
    kafka = get_kafka_options(source)
    registry = open_schema_registry(kafka)
    if registry is None:
        schema = read_schema_file(kafka)
        # Tasks say themselves what is wrong with a Protobuf schema.
        usable = kafka.payload == "protobuf" or is_readable_schema(schema, source)
        return {kafka.schema_id or 0: schema} if usable else {}
    return {
        number: schema
        for number, schema in registry.known.items()
        if isinstance(schema, bytes) and _is_usable(schema, source)
    }


def _is_usable(schema: bytes, source: SourceSpec) -> bool:
    kafka = get_kafka_options(source)
    if kafka.payload == "avro":
        return is_readable_schema(schema, source)
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


def explain_header(
    value: bytes | None, source: SourceSpec, schemas: Mapping[int, bytes]
) -> str | None:
    """Why a message is a dead letter before its payload is looked at; None if it is not."""
    if value is None:
        return explain_tombstone(source)
    if not has_header(get_kafka_options(source)):
        return None
    number = _find_number(value)
    if number is None:
        return "the message does not begin with the number of a schema"
    if number in schemas:
        return None
    return f"the message was written with schema {number}, which the spec does not know"


def select_bodies(
    values: Collection[bytes | None], reasons: list[str | None], number: int, kafka: KafkaOptions
) -> dict[int, bytes]:
    """Place -> payload, of the messages of a schema for which there is no reason."""
    is_marked = has_header(kafka)
    return {
        place: value[HEADER_BYTES:] if is_marked else value
        for place, (value, reason) in enumerate(zip(values, reasons, strict=True))
        if value is not None and reason is None and (not is_marked or _find_number(value) == number)
    }


def split_dead_messages(
    batch: pa.RecordBatch, reasons: list[str | None], plan: PlainMessages
) -> tuple[pa.Table, pa.Array]:
    """Rows without values for messages with a reason, and which messages have none."""
    is_dead = pa.array([reason is not None for reason in reasons], pa.bool_())
    dead = pa.Table.from_batches([batch.filter(is_dead)])
    texts = [
        show_key(key) if value is None else f"0x{value.hex().upper()}"
        for value, key in zip(dead["value"].to_pylist(), dead["key"].to_pylist(), strict=True)
    ]
    letters = show_dead_messages(dead, list(filter(None, reasons)), texts, plan)
    return letters, pc.invert(is_dead)
