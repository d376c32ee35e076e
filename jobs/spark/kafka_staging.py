"""Offset ranges of a cut, fetched by Spark's connector and decoded once into local Parquet.

From there on they are objects.

One job per source: a task reads one partition's range in order and writes it as one file, unsorted,
since the connector gives a range to one task and in the order of its offsets. Survey, release and
windows then read columns of typed values, instead of fetching and parsing every message once for
each of them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from pyspark.sql import DataFrame, SparkSession

from tidegate.errors import TidegateError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.sources.errors import CHANGED_WHILE_READ, KAFKA_UNAVAILABLE
from tidegate.jobs.sources.kafka_source import (
    OFFSET_COLUMN,
    SchemaCache,
    build_consumer_settings,
    build_range_schema,
    open_schemas,
)
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import resolve_environment_value
from tidegate.json_types import JsonObject

from .cut_reader import arrow_to_frame
from .errors import (
    MESSAGES_UNREADABLE,
    REGISTERED_SCHEMA_UNUSABLE,
    SCHEMA_NOT_REGISTERED,
    WORKER_LOST,
)
from .json_decoding import MESSAGE_DDL, write_messages
from .kafka_payloads import PARTITION, UNKNOWN_SCHEMA, decode_messages, plan_plain_messages
from .spark_session import (
    SPARK_ERRORS,
    SparkSessions,
    detect_lost_executors,
    extract_cause,
    lines,
    runs_on_one_host,
)
from .staging import Staging

_log = structlog.get_logger("tidegate.driver")
_BROKER_ERROR_SIGNS = ("org.apache.kafka.", "[KAFKA_", "Cannot fetch record")
"""What is in a failed job's error when the connector's client failed it.

Stack frames do not count.
"""
_DATA_LOSS_SIGNS = ("KAFKA_DATA_LOSS", "OffsetOutOfRangeException")


def stage_kafka_ranges(
    sessions: SparkSessions, spec: PipelineSpec, cut: Cut, folder: Path, staging: Staging
) -> None:
    """Fetch the offset ranges of a cut with Spark and decode the messages into typed Parquet files.

    Each part of a slice (one range of one Kafka partition) becomes one file in `folder`, named by
    the part's key with ``~`` for ``/``. Tasks write through `staging`, which also works without a
    shared disk.

    Raises:
        TransientError: the brokers, the registry or a worker failed, the planned messages were
            removed, or a schema is not registered yet and the source waits for it.
        ConfigurationError: a registered schema cannot be used, and such messages are not dead
            letters.
        PoisonError: Spark could not read the messages for another reason.
    """
    ranges: dict[str, list[JsonObject]] = {}
    for piece in cut.slices:
        ranges.setdefault(piece.member.source, []).extend(p for p in piece.parts if "kafka" in p)
    for source, parts in ranges.items():
        if parts:
            _stage_kafka_source(sessions, spec, source, parts, folder, staging)


def _stage_kafka_source(
    sessions: SparkSessions,
    spec: PipelineSpec,
    name: str,
    parts: list[JsonObject],
    folder: Path,
    staging: Staging,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = spec.sources[name]
    rows = sum(part["kafka"]["to"] - part["kafka"]["from"] for part in parts)
    session, in_driver = sessions.session_for(rows), sessions.is_small(rows)
    schemas, messages = (
        _open_schema_registry(source),
        _read_messages(session, source, parts, group=f"tidegate-{spec.name}-{name}"),
    )
    fetched = Path(mkdtemp(prefix="kafka-", dir=folder))
    # The Python of other hosts may lack Arrow. Few rows are not worth a worker.
    plain = plan_plain_messages(source) if in_driver or runs_on_one_host(spec.spark) else None

    def fetch(place: str) -> list[Path]:
        """Fetch the ranges, and decode them with the schemas known so far."""
        if plain is not None:
            write_messages(messages, plain, fetched, in_driver=in_driver)
            found = sorted(fetched.glob("plain-*.parquet"))
            others = _read_others(session, fetched, in_driver=in_driver)
            if others is not None:
                found += staging.write_rows(decode_messages(others, source), fetched / place)
            return found
        known = schemas.known if schemas is not None else None
        return staging.write_rows(decode_messages(messages, source, known), fetched / place)

    try:
        found = fetch("first")
        strangers = _find_unknown_schemas(found) if schemas is not None else {}
        # The range is fetched once more for the first appearance of a schema.
        if schemas is not None and schemas.fetch_missing(set(strangers)):
            found = fetch("again")
            strangers = _find_unknown_schemas(found)
        if (
            schemas is not None
            and strangers
            and source.kafka is not None
            and source.kafka.on_unknown_schema == "wait"
        ):
            raise _unknown_schema_error(name, source, strangers, schemas)
        files = _group_by_partition(found)
        for part in parts:
            _store_part_file(name, source, part, files.get(part["kafka"]["partition"], []), folder)
    except SPARK_ERRORS as error:
        raise _translate_job_error(name, source, error) from error
    finally:
        staging.discard(fetched)
        shutil.rmtree(fetched, ignore_errors=True)


def _read_others(session: SparkSession, folder: Path, *, in_driver: bool) -> DataFrame | None:
    """The messages that `write_messages` left to Spark; None if there are none."""
    files = sorted(map(str, folder.glob("other-*.parquet")))
    if not files:
        return None
    if not in_driver:
        return session.read.parquet(*files)
    return arrow_to_frame(session, pa.concat_tables(map(pq.read_table, files)), MESSAGE_DDL)


def _translate_job_error(name: str, source: SourceSpec, error: Exception) -> TidegateError:
    """A failed job's error in our words.

    What neither the topic nor its brokers failed is not waited for as if they had.

    A full disk is found behind it by who tells errors to people
    (jobs/driver/error_classification.py).
    """
    assert source.kafka is not None  # noqa: S101
    found = lines(error)
    # Retention removed what was planned; the next plan begins at what the topic still has.
    if any(mark in line for line in found for mark in _DATA_LOSS_SIGNS):
        what = f"messages of {source.kafka.topic} were removed"
        return CHANGED_WHILE_READ(source=name, what=what)
    brokers = [line for line in found if any(mark in line for mark in _BROKER_ERROR_SIGNS)]
    if brokers:
        return KAFKA_UNAVAILABLE(servers=source.kafka.servers, detail=brokers[-1][:300])
    return detect_lost_executors(f"source {name}", error, WORKER_LOST) or MESSAGES_UNREADABLE(
        source=name, cause=extract_cause(error)
    )


def _open_schema_registry(source: SourceSpec) -> SchemaCache | None:
    kafka = source.kafka
    if kafka is None or kafka.registry is None:
        return None
    # The cache belongs to the process: a number always names the same schema.
    login = kafka.registry_login
    return open_schemas(
        kafka.registry,
        kafka.payload,
        login and resolve_environment_value("kafka.registry_login", login, os.environ),
    )


def _group_by_partition(files: list[Path]) -> dict[int, list[Path]]:
    """Partition -> the files of its range; those without a row are left out."""
    found: dict[int, list[Path]] = {}
    for file in files:
        first = next(pq.ParquetFile(file).iter_batches(batch_size=1, columns=[PARTITION]), None)
        if first is not None and first.num_rows:
            found.setdefault(first[PARTITION][0].as_py(), []).append(file)
    return found


def _find_unknown_schemas(fetched: list[Path]) -> dict[int, str]:
    """Numbers of schemas that are not known, and where the first message of each is."""
    found: dict[int, str] = {}
    for partition, files in sorted(_group_by_partition(fetched).items()):
        for file in files:
            rows = pq.read_table(file, columns=[UNKNOWN_SCHEMA, OFFSET_COLUMN])
            unknown = rows.filter(pc.is_valid(rows[UNKNOWN_SCHEMA]))
            for number, place in zip(
                unknown[UNKNOWN_SCHEMA].to_pylist(), unknown[OFFSET_COLUMN].to_pylist(), strict=True
            ):
                found.setdefault(number, f"partition {partition}, offset {place}")
    return found


def _unknown_schema_error(
    name: str, source: SourceSpec, strangers: dict[int, str], schemas: SchemaCache
) -> TidegateError:
    assert source.kafka is not None  # noqa: S101
    number, place = next(iter(strangers.items()))
    # A number that the registry knows will never name another schema: waiting does not help.
    error = REGISTERED_SCHEMA_UNUSABLE if number in schemas.known else SCHEMA_NOT_REGISTERED
    return error(
        source=name,
        number=number,
        registry=source.kafka.registry,
        place=f"{source.kafka.topic} {place}",
    )


def _read_messages(
    session: SparkSession, source: SourceSpec, parts: list[JsonObject], *, group: str
) -> DataFrame:
    """The messages of some ranges.

    Nothing is ever committed to the group: executors keep consumers by its name, and connect for
    each partition in each epoch without one. A consumer asks for what comes next before the
    connector asks it for offsets; on one connection the second answer waits for the first, so at
    the end of each partition for `fetch.max.wait.ms`, half a second by default.
    """
    assert source.kafka is not None  # noqa: S101
    topic = source.kafka.topic
    offsets = [
        {str(p["kafka"]["partition"]): p["kafka"][end] for p in parts} for end in ("from", "to")
    ]
    consumer = {"group.id": group, "fetch.max.wait.ms": "1"}
    consumer |= build_consumer_settings(source.kafka)
    options = {
        "assign": json.dumps({topic: [p["kafka"]["partition"] for p in parts]}),
        "startingOffsets": json.dumps({topic: offsets[0]}),
        "endingOffsets": json.dumps({topic: offsets[1]}),
        "includeHeaders": "true" if source.kafka.headers else "false",
        "failOnDataLoss": "true",
        **{f"kafka.{name}": value for name, value in consumer.items()},
    }
    return session.read.format("kafka").options(**options).load()


def _store_part_file(
    name: str, source: SourceSpec, part: JsonObject, files: list[Path], folder: Path
) -> None:
    """The part's rows as one file; an empty one when compaction left nothing."""
    target = folder / part["key"].replace("/", "~")
    if len(files) == 1:
        files[0].replace(target)
    else:
        # Plain messages and others are in files of their own.
        tables = [build_range_schema(source).empty_table(), *map(pq.read_table, files)]
        rows = pa.concat_tables(tables, promote_options="default")
        pq.write_table(rows.sort_by(OFFSET_COLUMN), target)
    # Offsets are not contiguous in compacted topics and behind transactions. It is logged, not
    # refused.
    missing = part["kafka"]["to"] - part["kafka"]["from"] - pq.read_metadata(target).num_rows
    if missing:
        _log.info(
            "offsets_missing",
            source=name,
            why="compacted, or markers of transactions",
            offsets=missing,
            **part["kafka"],
        )
