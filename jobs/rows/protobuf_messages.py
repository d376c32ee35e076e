"""Protobuf messages of a topic as rows, in a task.

The fields that are wanted become texts, as Spark SQL gets them from the same library.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from tidegate.jobs.spec.pipeline import SourceSpec

from .json_messages import (
    PlainMessages,
    convert_texts,
    get_kafka_options,
    join_messages,
    list_field_kinds,
    plan_messages,
)
from .message_schemas import explain_header, has_header, select_bodies, split_dead_messages
from .protobuf_texts import decode_to_texts, find_message_index


def plan_protobuf_messages(source: SourceSpec) -> PlainMessages | None:
    """Return how tasks read a topic of Protobuf messages; None if Spark SQL has to."""
    kafka = get_kafka_options(source)
    two_ways = kafka.registry is not None and kafka.schema_id is not None
    return None if kafka.payload != "protobuf" or two_ways else plan_messages(source)


def read_protobuf_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[pa.Table], pa.Table]:
    """Return the rows of messages, and the messages that Spark SQL has to read.

    Raises:
        ConfigurationError: a schema cannot be used.
        pa.ArrowException: Spark SQL has to read all of them.
    """
    texts, reasons = _decode_texts(batch["value"].to_pylist(), source, schemas)
    letters, is_good = split_dead_messages(batch, reasons, plan)
    odd = np.array([own is None for own in texts], dtype=bool)
    columns = []
    for place, declared in enumerate(list_field_kinds(source).values()):
        words = pa.array([own and own[place] for own in texts], pa.string())
        column, strange = convert_texts(words, declared, plan.tick)
        columns.append(column)
        odd |= strange
    found = pa.StructArray.from_arrays(columns, fields=list(plan.fields), mask=pa.array(odd))
    rows, others = join_messages(batch.filter(is_good), found.filter(is_good), plan)
    return [letters, rows], others


def _decode_texts(
    values: Sequence[bytes | None], source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[list[str | None] | None], list[str | None]]:
    """For each message the texts of its fields, and why it is a dead letter.

    Neither, where only Spark SQL can tell.
    """
    kafka = get_kafka_options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    names = [*list_field_kinds(source)]
    found: list[list[str | None] | None] = [None] * len(values)
    reasons = [explain_header(value, source, schemas) for value in values]
    for number, schema in schemas.items():
        bodies = select_bodies(values, reasons, number, kafka)
        index = find_message_index(schema, kafka.message) if has_header(kafka) else None
        decoded = decode_to_texts(schema, kafka.message, names, index, bodies.values())
        for place, (*texts, fault) in zip(bodies, decoded, strict=True):
            reasons[place] = fault
            found[place] = texts if fault is None else None
    return found, reasons
