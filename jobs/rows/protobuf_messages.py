"""Protobuf messages of a topic as rows, in a task.

The fields that are wanted become texts, and these are cast like texts of JSON.
"""

import numpy as np
import pyarrow as pa

from tidegate.jobs.spec.pipeline import SourceSpec

from .json_messages import (
    PlainMessages,
    convert_texts,
    get_kafka_options,
    join_messages,
    list_field_kinds,
)
from .message_schemas import Schemas, has_header, select_bodies
from .odd_messages import DeadMessageError, cast_fields
from .protobuf_texts import decode_to_texts, find_message_index


def split_protobuf_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Schemas
) -> tuple[pa.Table, pa.Table]:
    """Return the rows of plain messages, and the other messages.

    Raises:
        pa.ArrowException: a message spoils the others.
    """
    values = batch["value"].to_pylist()
    texts: list[list[str | None] | None] = [None] * len(values)
    for number, schema in schemas.items():
        if isinstance(schema, bytes):
            bodies = select_bodies(values, number, get_kafka_options(source))
            decoded = _decode_bodies([*bodies.values()], schema, source)
            for place, (*own, fault) in zip(bodies, decoded, strict=True):
                texts[place] = own if fault is None else None
    odd = np.array([own is None for own in texts], dtype=bool)
    columns = []
    for place, declared in enumerate(list_field_kinds(source).values()):
        words = pa.array([own and own[place] for own in texts], pa.string())
        column, strange = convert_texts(words, declared, plan.tick)
        columns.append(column)
        odd |= strange
    found = pa.StructArray.from_arrays(columns, fields=list(plan.fields), mask=pa.array(odd))
    return join_messages(batch, found, plan)


def decode_protobuf(body: bytes, schema: bytes, source: SourceSpec) -> dict[str, object]:
    """Return column -> value of a message.

    Raises:
        DeadMessageError: the bytes are no message of the schema, or a value does not fit.
    """
    ((*texts, fault),) = _decode_bodies([body], schema, source)
    if fault is not None:
        raise DeadMessageError(fault)
    return cast_fields(dict(zip(list_field_kinds(source), texts, strict=True)), source)


def _decode_bodies(
    bodies: list[bytes], schema: bytes, source: SourceSpec
) -> list[list[str | None]]:
    kafka = get_kafka_options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    index = find_message_index(schema, kafka.message) if has_header(kafka) else None
    return decode_to_texts(schema, kafka.message, [*list_field_kinds(source)], index, bodies)
