"""Offset ranges of a cut, fetched by Spark's connector and decoded once into local Parquet; from there on they are objects.

One job per source: a task reads one partition's range in order and writes it as one file. Survey, release and windows then read
columns of typed values, instead of fetching and parsing every message once for each of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.sources.decode import TEXT, WHY
from tidegate.jobs.sources.kafka import PLACE, unreachable
from tidegate.jobs.sources.kafka_admin import client_settings
from tidegate.jobs.spark.schema import arrow_of_declared, quote, spark_of_declared
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

__all__ = ["decoded", "stage_kafka"]

_log = structlog.get_logger("tidegate.driver")

_WHOLE: Final = r"\\A\\s*[+-]?[0-9]+\\s*\\z"
_ZONED: Final = r"(Z|z|[+-][0-9]{2}(:?[0-9]{2})?)\\z"
_UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
_HEADER: Final = 5  # a zero byte and four of the schema's id, in front of a registry's Avro


def stage_kafka(session: SparkSession, spec: PipelineSpec, cut: Cut, folder: Path) -> None:
    """Fetch the offset ranges of a cut into `folder`, under the names by which parts are looked up there.

    Raises:
        TransientError: the brokers could not be read.
    """
    ranges: dict[str, list[dict[str, Any]]] = {}
    for piece in cut.slices:
        ranges.setdefault(piece.member.source, []).extend(p for p in piece.parts if "kafka" in p)
    for source, parts in ranges.items():
        if parts:
            _stage(session, source, spec.sources[source], parts, folder)


def _stage(session: SparkSession, name: str, source: SourceSpec, parts: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fetched = Path(mkdtemp(prefix="kafka-", dir=folder))
    try:
        rows = decoded(_messages(session, source, parts), source)
        ordered = rows.sortWithinPartitions("_partition", PLACE)  # nothing to do for Spark but to know that it is so
        ordered.write.mode("overwrite").partitionBy("_partition").parquet(str(fetched))
        for part in parts:
            _keep(name, source, part, fetched, folder)
    except PySparkException as error:
        assert source.kafka is not None  # noqa: S101
        raise unreachable(source.kafka.servers, str(error).strip().splitlines()[0][:300]) from error
    finally:
        shutil.rmtree(fetched, ignore_errors=True)


def _messages(session: SparkSession, source: SourceSpec, parts: list[dict[str, Any]]) -> DataFrame:
    assert source.kafka is not None  # noqa: S101
    topic = source.kafka.topic
    offsets = [{str(p["kafka"]["partition"]): p["kafka"][end] for p in parts} for end in ("from", "to")]
    reader = session.read.format("kafka").option("assign", json.dumps({topic: [p["kafka"]["partition"] for p in parts]}))
    reader = reader.option("startingOffsets", json.dumps({topic: offsets[0]})).option(
        "endingOffsets", json.dumps({topic: offsets[1]})
    )
    for name, value in client_settings(source.kafka).items():
        reader = reader.option(f"kafka.{name}", value)
    return reader.option("includeHeaders", "true").option("failOnDataLoss", "true").load()


def _keep(name: str, source: SourceSpec, part: dict[str, Any], fetched: Path, folder: Path) -> None:
    """The part's rows as one file; an empty one when compaction left nothing."""
    files = sorted((fetched / f"_partition={part['kafka']['partition']}").glob("*.parquet"))
    target = folder / part["key"].replace("/", "~")
    if len(files) == 1:
        files[0].replace(target)
    else:
        tables = [pq.read_table(file, partitioning=None) for file in files]
        pq.write_table(pa.concat_tables(tables) if tables else _nothing(source), target)
    missing = part["kafka"]["to"] - part["kafka"]["from"] - pq.read_metadata(target).num_rows
    if missing:
        _log.info("offsets_missing", source=name, why="compacted, or markers of transactions", offsets=missing, **part["kafka"])


def _nothing(source: SourceSpec) -> pa.Table:
    own = {**{c: arrow_of_declared(k) for c, k in source.columns.items()}, WHY: pa.string(), TEXT: pa.string(), PLACE: pa.int64()}
    return pa.schema(list(own.items())).empty_table()


def decoded(messages: DataFrame, source: SourceSpec) -> DataFrame:
    """Messages as rows of the declared columns, each with its place in the partition, or why it could not be decoded."""
    kafka = source.kafka
    assert kafka is not None  # noqa: S101
    taken = _taken(source)
    payload = {name: kind for name, kind in source.columns.items() if name not in taken}
    fields, faults = _avro(messages, source, payload) if kafka.payload == "avro" else _json(messages, source, payload)
    frame, values, why = fields
    values = {**values, **taken}
    if kafka.tombstones == "dead_letter":
        why = f"CASE WHEN value IS NULL THEN 'a tombstone: the message has no value' ELSE {why} END"
    for condition, complaint in faults:
        why = f"coalesce({why}, CASE WHEN {condition} THEN {complaint} END)"
    frame = frame.withColumn("_w", F.expr(why))
    columns = [f"CASE WHEN _w IS NULL THEN {values[name]} END AS {quote(name)}" for name in source.columns]
    shown = "coalesce(CAST(value AS string), concat('key ', CAST(key AS string)))"
    return frame.selectExpr(
        *columns,
        f"_w AS {WHY}",
        f"CASE WHEN _w IS NOT NULL THEN {shown} END AS {TEXT}",
        f"pmod(offset, {1 << 32}L) AS {PLACE}",
        "partition AS _partition",
    )


_Decoded = tuple[tuple[DataFrame, dict[str, str], str], list[tuple[str, str]]]
"""(frame, column -> expression of its value, expression of what is wrong with the message), and faults of single values."""


def _taken(source: SourceSpec) -> dict[str, str]:
    """Columns that come from beside the payload."""
    kafka = source.kafka
    assert kafka is not None  # noqa: S101
    found = {kafka.key: "CAST(key AS string)"} if kafka.key else {}
    if kafka.timestamp:
        found[kafka.timestamp] = "timestamp"
    for column, header in kafka.headers.items():
        wanted = header.replace("'", "\\'")
        found[column] = f"CAST(try_element_at(filter(headers, h -> h.key = '{wanted}'), -1).value AS string)"
    return {name: f"CAST({value} AS {spark_of_declared(source.columns[name])})" for name, value in found.items()}


def _json(messages: DataFrame, source: SourceSpec, payload: dict[str, str]) -> _Decoded:
    """A JSON object per message: every field is taken as text first, so that one bad value is told from a bad message."""
    old = {new: before for before, new in source.evolution.renamed.items()}
    names = [*payload, *old.values()]
    schema = ", ".join(f"{quote(name)} string" for name in names)
    frame = messages.withColumn("_s", F.expr("CAST(value AS string)"))
    frame = frame.withColumn("_j", F.expr(f"from_json(_s, '{schema}')")).withColumn("_k", F.expr("json_object_keys(_s)"))
    why = "CASE WHEN value IS NOT NULL AND _k IS NULL THEN 'the message is not a JSON object' END"
    if source.evolution.added == "dead_letter":
        known = ", ".join("'" + name.replace("'", "\\'") + "'" for name in names)
        strange = f"array_except(_k, array({known}))"
        why = (
            f"coalesce({why}, CASE WHEN size({strange}) > 0 THEN concat('not in the schema: ', array_join({strange}, ', ')) END)"
        )
    values, faults = {}, []
    for name, kind in payload.items():
        raw = f"coalesce(_j.{quote(name)}, _j.{quote(old[name])})" if name in old else f"_j.{quote(name)}"
        values[name] = _cast(raw, kind, source)
        faults += [] if kind == "string" else [_fault(name, kind, raw, values[name])]
    return (frame, values, why), faults


def _fault(name: str, kind: str, raw: str, value: str) -> tuple[str, str]:
    return f"{raw} IS NOT NULL AND {value} IS NULL", f"concat('{name} is no {kind}: ', {raw})"


def _cast(raw: str, kind: str, source: SourceSpec) -> str:
    target = spark_of_declared(kind)
    if kind == "string":
        return raw
    if kind == "binary":
        return f"try_to_binary({raw}, 'base64')"
    if kind in ("int", "long"):
        return f"CASE WHEN {raw} RLIKE '{_WHOLE}' THEN try_cast({raw} AS {target}) END"
    if kind != "timestamp":
        return f"try_cast({raw} AS {target})"
    if source.parse.timestamps != "iso":
        return f"timestamp_micros(CAST(round(try_cast({raw} AS decimal(30,6)) * {_UNITS[source.parse.timestamps]}) AS bigint))"
    naive = "NULL" if source.timezone is None else f"to_utc_timestamp(try_cast({raw} AS timestamp), '{source.timezone}')"
    return f"CASE WHEN {raw} RLIKE '{_ZONED}' THEN try_cast({raw} AS timestamp) ELSE {naive} END"


def _avro(messages: DataFrame, source: SourceSpec, payload: dict[str, str]) -> _Decoded:
    from pyspark.sql.avro.functions import from_avro

    kafka = source.kafka
    assert kafka is not None  # noqa: S101
    assert kafka.schema_file is not None  # noqa: S101
    try:
        schema = Path(kafka.schema_file).read_text(encoding="utf-8")
        held = [field["name"] for field in json.loads(schema)["fields"]]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"kafka.schema_file {kafka.schema_file} is no Avro record schema: {error}", code="kafka.bad_schema"
        ) from error
    body, why = "value", "CAST(NULL AS string)"
    if kafka.schema_id is not None:
        body = f"substring(value, {_HEADER + 1})"
        number = "conv(hex(substring(value, 2, 4)), 16, 10)"
        marked = f"length(value) > {_HEADER} AND hex(substring(value, 1, 1)) = '00' AND {number} = '{kafka.schema_id}'"
        why = f"""CASE WHEN value IS NOT NULL AND NOT ({marked}) THEN
            concat('the message was not written with schema {kafka.schema_id}, but ', coalesce({number}, 'none')) END"""
    frame = messages.withColumn("_b", F.expr(f"CASE WHEN {why} IS NULL THEN {body} END"))
    frame = frame.withColumn("_j", from_avro("_b", schema, {"mode": "PERMISSIVE"}))
    # A record that cannot be read comes as nulls: the event time, which no good record lacks, tells.
    old = {new: before for before, new in source.evolution.renamed.items()}
    fields = {name: name if name in held else old.get(name, name) for name in payload}
    values = {
        name: f"try_cast(_j.{quote(field)} AS {spark_of_declared(payload[name])})" if field in held else "NULL"
        for name, field in fields.items()
    }
    if source.event_time in fields:
        lost = f"_b IS NOT NULL AND _j.{quote(fields[source.event_time])} IS NULL"
        why = f"coalesce({why}, CASE WHEN {lost} THEN 'the message is not a record of the schema, or has no event time' END)"
    return (frame, values, why), []
