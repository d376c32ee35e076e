"""Avro messages of a topic as rows, many at a time, in a task."""

import pyarrow as pa

from tidegate.jobs.spec.pipeline import SourceSpec

from .avro_records import convert_records, plan_records
from .json_messages import PlainMessages, get_kafka_options, join_messages
from .message_schemas import Schemas, select_bodies


def split_avro_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Schemas
) -> tuple[pa.Table, pa.Table]:
    """Return the rows of plain messages, and the other messages.

    Raises:
        ValueError, pa.ArrowException: a message spoils the others.
    """
    values = batch["value"].to_pylist()
    structs = [pa.nulls(1, pa.struct(plan.fields))]
    places = [0] * len(values)
    end = 1
    for number, schema in schemas.items():
        records = plan_records(schema, source) if isinstance(schema, bytes) else None
        if records is None:
            continue
        found = []
        for place, body in select_bodies(values, number, get_kafka_options(source)).items():
            if (record := records.read_record(body)) is not None:
                found.append(record)
                places[place], end = end, end + 1
        structs.append(convert_records(records, found, plan.fields, source))
    fields = pa.concat_arrays(structs).take(pa.array(places, pa.int64()))
    return join_messages(batch, fields, plan)
