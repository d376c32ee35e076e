"""Writes into Kafka topics, at least once.

Key: ``<source>/<partition>/<seq>`` for rows with provenance, otherwise none. Value: the row as
JSON. Headers: ``tidegate-epoch`` (the checkpoint id), ``tidegate-uid``, ``tidegate-table``. A
reader that remembers the pairs (epoch, key) it has seen gets each row once. A message without a
value and with a ``tidegate-restore`` header announces a restore, and says which epochs still count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.jobs.sinks.base_follower import SlotFollower
from tidegate.jobs.sinks.errors import MESSAGE_TOO_LARGE, SINK_UNAVAILABLE
from tidegate.jobs.sinks.files_webhook import AtLeastOnceSink
from tidegate.jobs.sinks.published_tables import to_json_lines
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import KafkaSinkSpec
from tidegate.jobs.spec.source_options import resolve_environment_value

# The driver holds the messages of one Spark job as Python objects.
_MESSAGES_PER_JOB: Final = 50_000
_MESSAGE_SCHEMA: Final = pa.schema(
    {
        "topic": pa.string(),
        "key": pa.string(),
        "value": pa.string(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)
SendMessages = Callable[[pa.Table, dict[str, str]], None]
"""Writes messages with the client's settings; returns when the broker has them."""


class KafkaSink(AtLeastOnceSink):
    """Sends a message per row to the topic of its table."""

    def __init__(
        self,
        name: str,
        given: KafkaSinkSpec,
        spec: PipelineSpec,
        store: Store,
        uid: str,
        send: SendMessages | None = None,
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self.start, self._given, self._send = given.start, given, send or _send_with_spark

    def _deliver_epoch(self, epoch: Manifest) -> None:
        self._send_by_topic(build_row_messages(self, self._given, epoch))

    def _announce_restore(self, notice: dict[str, Any]) -> None:
        self._send_by_topic(build_restore_messages(self, self._given, notice))

    def _send_by_topic(self, messages: Iterable[KafkaMessage]) -> None:
        settings = build_sink_client_settings(self._given, self.name)
        for topic, of_topic in groupby(messages, lambda message: message.topic):
            while chunk := list(islice(of_topic, _MESSAGES_PER_JOB)):
                self._send_chunk(topic, chunk, settings)

    def _send_chunk(
        self, topic: str, messages: list[KafkaMessage], settings: dict[str, str]
    ) -> None:
        rows = [
            m._asdict() | {"headers": [{"key": k, "value": v} for k, v in m.headers]}
            for m in messages
        ]
        try:
            self._send(pa.Table.from_pylist(rows, schema=_MESSAGE_SCHEMA), settings)
        # Spark wraps the client's exceptions in types of its own, which differ between versions.
        except Exception as error:
            if "RecordTooLargeException" in str(error):
                raise message_too_large_error(
                    self, _find_exception_line(error, "RecordTooLargeException")
                ) from error
            first_line = str(error).strip().splitlines()[0]
            raise SINK_UNAVAILABLE(
                pipeline=self.spec.name,
                sink=self.name,
                cause=f"Kafka does not take {topic}: {first_line[:300]}",
                remedy="bring the brokers back, or correct the sink's options",
            ) from error


def _find_exception_line(error: Exception, name: str) -> str:
    """Return the line of the message that names an exception of the Kafka client."""
    return next(line.strip() for line in str(error).splitlines() if name in line)


def _send_with_spark(messages: pa.Table, settings: dict[str, str]) -> None:
    from pyspark.sql import SparkSession

    frame = SparkSession.builder.getOrCreate().createDataFrame(messages)  # the driver's own session
    writer = frame.write.format("kafka").option("includeHeaders", "true")
    for name, value in settings.items():
        writer = writer.option(f"kafka.{name}", value)
    writer.save()


# Messages, shared with the exactly-once sink.

_TABLE_PLACEHOLDER: Final = "{table}"


class KafkaMessage(NamedTuple):
    """A record for a topic."""

    topic: str
    key: str | None
    value: str | None
    headers: list[tuple[str, bytes]]


def resolve_topic(given: KafkaSinkSpec, table: str) -> str:
    """Return the topic of a table's rows."""
    return given.topic.replace(_TABLE_PLACEHOLDER, table)


def build_sink_client_settings(given: KafkaSinkSpec, sink: str) -> dict[str, str]:
    """Return the client's settings, with ``env:NAME`` values read from the environment."""
    options = {
        name: resolve_environment_value(f"sinks.{sink}.options.{name}", value, os.environ)
        for name, value in given.options.items()
    }
    return {"bootstrap.servers": given.servers, **options}


def build_row_messages(
    sink: SlotFollower, given: KafkaSinkSpec, epoch: Manifest
) -> Iterator[KafkaMessage]:
    """Yield a message for each row of an epoch, table by table."""
    for table in sink.tables:
        headers = _build_headers(sink, {"tidegate-epoch": str(epoch.id), "tidegate-table": table})
        for rows in sink.read_epoch_rows(epoch, table):
            for line in to_json_lines(rows).splitlines():
                yield KafkaMessage(
                    resolve_topic(given, table), _build_message_key(json.loads(line)), line, headers
                )


def message_too_large_error(sink: SlotFollower, cause: str) -> ConfigurationError:
    """Return the error for a message that the broker or the client's settings refuse.

    Trying again does not help.
    """
    return MESSAGE_TOO_LARGE(pipeline=sink.spec.name, sink=sink.name, cause=cause[:300])


def build_restore_messages(
    sink: SlotFollower, given: KafkaSinkSpec, notice: dict[str, Any]
) -> Iterator[KafkaMessage]:
    """Yield a message for each topic that announces a restore."""
    headers = _build_headers(sink, {"tidegate-restore": json.dumps(notice)})
    for table in sink.tables:
        yield KafkaMessage(resolve_topic(given, table), None, None, headers)


def _build_headers(sink: SlotFollower, headers: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in {"tidegate-uid": sink.uid, **headers}.items()]


def _build_message_key(row: dict[str, Any]) -> str | None:
    return (
        f"{row['_source']}/{row['_partition']}/{row['_seq']}"
        if row.get("_seq") is not None
        else None
    )
