"""Avro messages of a topic as rows, in a task."""

from collections.abc import Mapping

import pyarrow as pa

from tidegate.jobs.spec.pipeline import SourceSpec

from .avro_records import convert_records, plan_records
from .json_messages import PlainMessages, get_kafka_options, join_messages, plan_messages
from .message_schemas import explain_header, select_bodies, split_dead_messages

_MORE_KINDS = frozenset({"float", "binary"})
"""Declared types that JSON has no plain form for."""


def plan_avro_messages(source: SourceSpec) -> PlainMessages | None:
    """Return how tasks read a topic of Avro messages; None if Spark SQL has to."""
    kafka = get_kafka_options(source)
    two_ways = kafka.registry is not None and kafka.schema_id is not None
    if kafka.payload != "avro" or two_ways:
        return None
    return plan_messages(source, _MORE_KINDS)


def read_avro_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Mapping[int, bytes]
) -> tuple[list[pa.Table], pa.Table]:
    """Return the rows of messages, and the messages that Spark SQL has to read.

    Raises:
        pa.ArrowException: Spark SQL has to read all of them.
    """
    kafka = get_kafka_options(source)
    if kafka.registry is None and not schemas:
        raise pa.ArrowInvalid("a schema that only Spark SQL reads")
    values = batch["value"].to_pylist()
    reasons = [explain_header(value, source, schemas) for value in values]
    structs = [pa.nulls(1, pa.struct(plan.fields))]
    places = [0] * len(values)
    end = 1
    for number, schema in schemas.items():
        records = plan_records(schema)
        assert records is not None  # noqa: S101 - see `is_readable_schema`
        bodies = select_bodies(values, reasons, number, kafka)
        decoded = {place: records.read_record(body) for place, body in bodies.items()}
        for place, record in decoded.items():
            if record is None:
                reasons[place] = "the message is not a record of the schema"
            else:
                places[place], end = end, end + 1
        good = [record for record in decoded.values() if record is not None]
        structs.append(convert_records(records, good, plan.fields, source))
    letters, is_good = split_dead_messages(batch, reasons, plan)
    found = pa.concat_arrays(structs).take(pa.array(places, pa.int64()))
    rows, others = join_messages(batch.filter(is_good), found.filter(is_good), plan)
    return [letters, rows], others
