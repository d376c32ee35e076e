"""Reads the planned offset ranges of topics in a task, with a client of its own process.

The options of the client may hold a password, so they are not part of a job. They reach the worker
as its environment, and so do the variables that they refer to. Executors that have keys of their
own, and those of Spark Connect, find these variables in the environment of their host.
"""

import json
import os
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.sources.kafka_client import RangeReader, translate_settings
from tidegate.jobs.sources.kafka_source import (
    OFFSET_COLUMN,
    build_consumer_settings,
    build_range_schema,
)
from tidegate.jobs.spec.operations import KafkaSinkSpec
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import resolve_address, resolve_environment_values
from tidegate.json_types import JsonObject

from .avro_messages import make_avro_decoder
from .json_messages import (
    PARTITION,
    PlainMessages,
    get_kafka_options,
    join_messages,
    parse_objects,
    plan_messages,
)
from .message_schemas import Schemas, find_unknown_schemas, split_header
from .odd_messages import PayloadDecoder, decode_json, decode_payloads, read_odd_messages
from .protobuf_messages import make_protobuf_decoder

_OPTIONS_PREFIX: Final = "TIDEGATE_KAFKA_OPTIONS_"
"""A pipeline's name follows. The value is source -> `kafka.options` of the spec, as JSON.

Pipelines of one Spark session share workers, and may have sources of the same name.
"""

_readers: dict[tuple[str, str], tuple[str, RangeReader]] = {}
"""Pipeline and source -> brokers, topic and settings, and the client of this process."""


@dataclass(frozen=True)
class TopicRange:
    """The rows of a planned range; `missing` are offsets without a message."""

    rows: pa.Table
    missing: int


class UnknownSchemasError(Exception):
    """Messages of a source were written with schemas of a registry that the task does not have."""

    def __init__(self, source: str, schemas: dict[int, str]) -> None:
        super().__init__(source, schemas)
        self.source, self.schemas = source, schemas


def build_settings_variables(spec: PipelineSpec, *, with_secrets: bool) -> dict[str, str]:
    """Return the variables in which tasks find the settings of a pipeline's topics.

    None without topics, and none for Spark Connect, which gives workers no variables.

    Args:
        spec: of the pipeline.
        with_secrets: also those that the options refer to. Otherwise the workers have them.

    Raises:
        ConfigurationError: a variable that the options name is not set.
    """
    topics = {name: source.kafka for name, source in spec.sources.items() if source.kafka}
    if spec.spark.uses_connect or not topics:
        return {}
    options = {name: kafka.options for name, kafka in topics.items()}
    found = {_OPTIONS_PREFIX + spec.name: json.dumps(options, sort_keys=True)}
    for kafka in topics.values():
        settings = build_consumer_settings(kafka)
        for option, value in kafka.options.items():
            if with_secrets and value.startswith("env:"):
                found[value.removeprefix("env:")] = settings[option]
    return found


def remove_settings(spec: PipelineSpec) -> PipelineSpec:
    """Return the spec without the settings of clients, for the plan of a job.

    Spark Connect needs the options there; they have no secrets in them (`require_readable_topics`).
    The driver alone asks registries.
    """
    hidden: JsonObject = {"registry_login": None}
    if not spec.spark.uses_connect:
        hidden["options"] = {}
    shown = {
        name: source.model_copy(update={"kafka": source.kafka.model_copy(update=hidden)})
        for name, source in spec.sources.items()
        if source.kafka is not None
    }
    return spec.model_copy(update={"sources": {**spec.sources, **shown}}) if shown else spec


def require_settings(spec: PipelineSpec) -> None:
    """Refuse an environment in which the settings of topics and sinks have no values.

    Raises:
        ConfigurationError: a variable that options or addresses name is not set.
    """
    for name, sink in spec.sinks.items():
        for field, address in sink.addresses.items():
            resolve_address(f"sinks.{name}.{field}", address, os.environ)
        options = sink.options if isinstance(sink, KafkaSinkSpec) else {}
        resolve_environment_values(f"sinks.{name}.options", options, os.environ)
    for name, source in spec.sources.items():
        if source.kafka is not None:
            _find_settings(spec, name)


def _find_settings(spec: PipelineSpec, name: str) -> dict[str, Any]:
    """Return the settings of a source's client as this process has them."""
    kafka = get_kafka_options(spec.sources[name])
    if not spec.spark.uses_connect:
        options = json.loads(os.environ[_OPTIONS_PREFIX + spec.name])[name]
        kafka = kafka.model_copy(update={"options": options})
    return translate_settings(build_consumer_settings(kafka))


def read_topic_ranges(
    spec: PipelineSpec, cut: Cut, schemas: Mapping[str, Schemas] | None = None
) -> dict[str, TopicRange]:
    """Return key of a part -> its rows, of all ranges of topics in a cut.

    `schemas` are those of sources with Avro or Protobuf messages, by number.

    Raises:
        TransientError: the brokers do not answer, or messages of a range were removed.
        ConfigurationError: the brokers refuse this client.
        UnknownSchemasError: schemas are missing in `schemas`.
    """
    found: dict[str, TopicRange] = {}
    for name, parts in _group_ranges(cut).items():
        found |= _read_source(spec, name, parts, (schemas or {}).get(name, {}))
    return found


def _group_ranges(cut: Cut) -> dict[str, list[JsonObject]]:
    """Source -> its planned ranges."""
    ranges: dict[str, list[JsonObject]] = {}
    for piece in cut.slices:
        for part in piece.parts:
            if "kafka" in part:
                ranges.setdefault(piece.member.source, []).append(part)
    return ranges


def _fetch_batches(
    spec: PipelineSpec, name: str, parts: list[JsonObject]
) -> Generator[pa.RecordBatch]:
    places = {p["kafka"]["partition"]: (p["kafka"]["from"], p["kafka"]["to"]) for p in parts}
    reader = _open_reader(spec, name)
    try:
        with closing(reader.read_ranges(places)) as batches:
            yield from batches
    except BaseException:
        # The next attempt opens a new client: this one may hold addresses of dead brokers.
        close_reader(spec.name, name)
        raise


def _read_source(
    spec: PipelineSpec, name: str, parts: list[JsonObject], schemas: Schemas
) -> dict[str, TopicRange]:
    source = spec.sources[name]
    plan = plan_messages(source)
    tables, unknown = [plan.columns.empty_table()], dict[int, str]()
    with closing(_fetch_batches(spec, name, parts)) as batches:
        for batch in batches:
            unknown |= find_unknown_schemas(batch, source, schemas)
            if not unknown:
                tables += read_messages(batch, plan, source, schemas)
    if unknown:
        raise UnknownSchemasError(name, unknown)
    rows = pa.concat_tables(tables)
    return {part["key"]: _select_range(rows, source, part) for part in parts}


def read_messages(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Schemas
) -> list[pa.Table]:
    """The rows of messages: of plain ones many at a time, of others one by one."""
    plain, others = plan.columns.empty_table(), pa.Table.from_batches([batch])
    # No value that the checks did not foresee ends a task.
    with suppress(ValueError, pa.ArrowException):
        if plan.is_plain:
            found = _read_plain(batch, plan, source, schemas)
            plain, others = join_messages(batch, found, plan)
    return [plain, read_odd_messages(others, plan, source, _make_decoder(source, schemas))]


def _read_plain(
    batch: pa.RecordBatch, plan: PlainMessages, source: SourceSpec, schemas: Schemas
) -> pa.Array:
    """Payloads as structs of the fields; null where one is odd."""
    if get_kafka_options(source).payload == "json":
        return parse_objects(batch["value"], plan)
    decode = _make_decoder(source, schemas, keeps_texts=True)
    return decode_payloads(batch["value"], plan, source, decode)


def _make_decoder(
    source: SourceSpec, schemas: Schemas, *, keeps_texts: bool = False
) -> PayloadDecoder:
    kafka = get_kafka_options(source)
    if kafka.payload == "json":
        return partial(decode_json, source=source)
    make = make_avro_decoder if kafka.payload == "avro" else make_protobuf_decoder
    decode = make(source, keeps_texts=keeps_texts)
    return lambda value: decode(*split_header(value, schemas, kafka))


def _select_range(rows: pa.Table, source: SourceSpec, part: JsonObject) -> TopicRange:
    place = part["kafka"]
    own = rows.filter(pc.equal(rows[PARTITION], place["partition"]))
    own = own.select(build_range_schema(source).names).sort_by(OFFSET_COLUMN).combine_chunks()
    return TopicRange(own, place["to"] - place["from"] - own.num_rows)


def _open_reader(spec: PipelineSpec, name: str) -> RangeReader:
    """The client of a source; this process keeps one for each until its settings change."""
    kafka = get_kafka_options(spec.sources[name])
    settings = _find_settings(spec, name)
    asked = json.dumps([kafka.servers, kafka.topic, settings])
    place = spec.name, name
    known = _readers.get(place)
    if known is not None and known[0] == asked:
        return known[1]
    close_reader(*place)
    reader = RangeReader(name, kafka, settings)
    _readers[place] = asked, reader
    return reader


def close_reader(pipeline: str, name: str) -> None:
    """Close the connections of a pipeline's source in this process."""
    if (pipeline, name) in _readers:
        _readers.pop((pipeline, name))[1].close()
