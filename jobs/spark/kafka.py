"""Offset ranges of a cut, fetched by Spark's connector and decoded once into local Parquet; from there on they are objects.

One job per source: a task reads one partition's range in order and writes it as one file, unsorted, since the connector gives a
range to one task and in the order of its offsets. Survey, release and windows then read columns of typed values, instead of
fetching and parsing every message once for each of them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from pyspark.sql import DataFrame, SparkSession

from tidegate.jobs.engine.columns import arrow_type
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.sources.decode import TEXT, WHY
from tidegate.jobs.sources.kafka import PLACE, changed, unreachable
from tidegate.jobs.sources.kafka_admin import client_settings
from tidegate.jobs.sources.registry import Schemas, opened
from tidegate.jobs.spark.failures import SPARK_FAILED, executors_lost, lines, said
from tidegate.jobs.spark.payloads import PARTITION, STRANGER, decoded
from tidegate.jobs.spark.staging import Staging
from tidegate.jobs.spec.errors import ConfigurationError, PoisonError, TidegateError, TransientError
from tidegate.jobs.spec.inputs import environment_value
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

__all__ = ["stage_kafka"]

_log = structlog.get_logger("tidegate.driver")
_BROKERS: Final = ("org.apache.kafka.", "[KAFKA_", "Cannot fetch record")
"""What stands in a failed job's error when the connector's client failed it; stack frames do not count."""
_GONE: Final = ("KAFKA_DATA_LOSS", "OffsetOutOfRangeException")


def stage_kafka(session: SparkSession, spec: PipelineSpec, cut: Cut, folder: Path, staging: Staging) -> None:
    """Fetch the offset ranges of a cut into `folder`, under the names by which parts are looked up there.

    Raises:
        TransientError: the brokers could not be read, or have no longer what was planned.
        ConfigurationError: a schema cannot be used, and messages are not to be dead letters for it.
    """
    ranges: dict[str, list[dict[str, Any]]] = {}
    for piece in cut.slices:
        ranges.setdefault(piece.member.source, []).extend(p for p in piece.parts if "kafka" in p)
    for source, parts in ranges.items():
        if parts:
            _stage(session, spec, source, parts, folder, staging)


def _stage(
    session: SparkSession, spec: PipelineSpec, name: str, parts: list[dict[str, Any]], folder: Path, staging: Staging
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = spec.sources[name]
    schemas, messages = _schemas(source), _messages(session, source, parts, group=f"tidegate-{spec.name}-{name}")
    fetched = Path(mkdtemp(prefix="kafka-", dir=folder))
    try:
        found = _fetch(messages, source, fetched / "first", schemas, staging)
        strangers = _strangers(found) if schemas is not None else {}
        if schemas is not None and schemas.learn(set(strangers)):  # fetched once more for each schema's first appearance
            found = _fetch(messages, source, fetched / "again", schemas, staging)
            strangers = _strangers(found)
        if schemas is not None and strangers and source.kafka is not None and source.kafka.on_unknown_schema == "wait":
            raise _unknown(name, source, strangers, schemas)
        files = _by_partition(found)
        for part in parts:
            _keep(name, source, part, files.get(part["kafka"]["partition"], []), folder)
    except SPARK_FAILED as error:
        raise _told(name, source, error) from error
    finally:
        staging.forget(fetched)
        shutil.rmtree(fetched, ignore_errors=True)


def _told(name: str, source: SourceSpec, error: Exception) -> TidegateError:
    """A failed job's error in our words. What neither the topic nor its brokers failed is not waited for as if they had.

    A full disk is found behind it by who tells errors to people (jobs/driver/troubles.py).
    """
    assert source.kafka is not None  # noqa: S101
    found = lines(error)
    if any(mark in line for line in found for mark in _GONE):
        return changed(name, f"messages of {source.kafka.topic} were removed")
    brokers = [line for line in found if any(mark in line for mark in _BROKERS)]
    if brokers:
        return unreachable(source.kafka.servers, brokers[-1][:300])
    return executors_lost(f"source {name}", error) or PoisonError(
        f"source {name}: Spark could not read its messages: {said(error)}",
        code="spark.failed",
        kept="everything sealed so far",
        advice="mend what it names; if it names nothing of yours, it is a defect",
    )


def _fetch(messages: DataFrame, source: SourceSpec, folder: Path, schemas: Schemas | None, staging: Staging) -> list[Path]:
    return staging.write(decoded(messages, source, schemas.known if schemas is not None else None), folder)


def _schemas(source: SourceSpec) -> Schemas | None:
    kafka = source.kafka
    if kafka is None or kafka.registry is None:
        return None
    login = kafka.registry_login
    return opened(kafka.registry, kafka.payload, login and environment_value("kafka.registry_login", login, os.environ))


def _by_partition(files: list[Path]) -> dict[int, list[Path]]:
    """Partition -> the files of its range; those without a row are left out."""
    found: dict[int, list[Path]] = {}
    for file in files:
        first = next(pq.ParquetFile(file).iter_batches(batch_size=1, columns=[PARTITION]), None)
        if first is not None and first.num_rows:
            found.setdefault(first[PARTITION][0].as_py(), []).append(file)
    return found


def _strangers(fetched: list[Path]) -> dict[int, str]:
    """Numbers of schemas that are not known, and where the first message of each stands."""
    found: dict[int, str] = {}
    for partition, files in sorted(_by_partition(fetched).items()):
        for file in files:
            rows = pq.read_table(file, columns=[STRANGER, PLACE])
            unknown = rows.filter(pc.is_valid(rows[STRANGER]))
            for number, place in zip(unknown[STRANGER].to_pylist(), unknown[PLACE].to_pylist(), strict=True):
                found.setdefault(number, f"partition {partition}, offset {place}")
    return found


def _unknown(name: str, source: SourceSpec, strangers: dict[int, str], schemas: Schemas) -> TidegateError:
    assert source.kafka is not None  # noqa: S101
    number, place = next(iter(strangers.items()))
    if number in schemas.known:  # it will never be another one
        return ConfigurationError(
            f"source {name}: schema {number} of {source.kafka.registry} cannot be used ({source.kafka.topic} {place})",
            code="kafka.bad_schema",
            kept="everything sealed so far; the message stays in its topic",
            advice="set kafka.on_unknown_schema: dead_letter to go on: the dead letters say what is wrong with the schema",
        )
    return TransientError(
        f"source {name}: schema {number} is not known to the registry {source.kafka.registry} ({source.kafka.topic} {place})",
        code="kafka.unknown_schema",
        kept="everything sealed so far; the message stays in its topic",
        advice="register the schema, and the driver goes on by itself; or set kafka.on_unknown_schema: dead_letter",
        retry_after=5.0,
    )


def _messages(session: SparkSession, source: SourceSpec, parts: list[dict[str, Any]], *, group: str) -> DataFrame:
    """The messages of some ranges.

    Nothing is ever committed to the group: executors keep consumers by its name, and connect for each partition in each epoch
    without one. A consumer asks for what comes next before the connector asks it for offsets; on one connection the second
    answer waits for the first, so at the end of each partition for `fetch.max.wait.ms`, half a second by default.
    """
    assert source.kafka is not None  # noqa: S101
    topic = source.kafka.topic
    offsets = [{str(p["kafka"]["partition"]): p["kafka"][end] for p in parts} for end in ("from", "to")]
    reader = session.read.format("kafka").option("assign", json.dumps({topic: [p["kafka"]["partition"] for p in parts]}))
    reader = reader.option("startingOffsets", json.dumps({topic: offsets[0]})).option(
        "endingOffsets", json.dumps({topic: offsets[1]})
    )
    for name, value in {"group.id": group, "fetch.max.wait.ms": "1", **client_settings(source.kafka)}.items():
        reader = reader.option(f"kafka.{name}", value)
    wanted = "true" if source.kafka.headers else "false"
    return reader.option("includeHeaders", wanted).option("failOnDataLoss", "true").load()


def _keep(name: str, source: SourceSpec, part: dict[str, Any], files: list[Path], folder: Path) -> None:
    """The part's rows as one file; an empty one when compaction left nothing."""
    target = folder / part["key"].replace("/", "~")
    if len(files) == 1:
        files[0].replace(target)
    else:
        tables = [pq.read_table(file) for file in files]
        pq.write_table(pa.concat_tables(tables) if tables else _nothing(source), target)
    missing = part["kafka"]["to"] - part["kafka"]["from"] - pq.read_metadata(target).num_rows
    if missing:
        _log.info("offsets_missing", source=name, why="compacted, or markers of transactions", offsets=missing, **part["kafka"])


def _nothing(source: SourceSpec) -> pa.Table:
    own = {**{c: arrow_type(k) for c, k in source.columns.items()}, WHY: pa.string(), TEXT: pa.string(), PLACE: pa.int64()}
    return pa.schema(list(own.items())).empty_table()
