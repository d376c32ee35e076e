"""A sink into Kafka topics, at least once.

Every message carries its epoch in a header, and says which row it is.

Key: ``<source>/<partition>/<seq>`` for rows with provenance, else none. Value: the row as JSON.
Headers: ``tidegate-epoch`` (the checkpoint id), ``tidegate-uid``, ``tidegate-table``. A reader that
keeps the set of (epoch, key) it has seen has each row once; one that is told of a restore (a
message without a value and with a ``tidegate-restore`` header) knows which epochs count no more.
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
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sinks.base_follower import SlotFollower
from tidegate.jobs.sinks.files_webhook import AtLeastOnceSink
from tidegate.jobs.sinks.published_tables import to_json_lines
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import KafkaSinkSpec
from tidegate.jobs.spec.source_options import resolve_environment_value

_MESSAGES_PER_JOB: Final = 50_000  # messages of one Spark job, which the driver holds as objects
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
    """`<topic>` with ``{table}`` replaced, a message per row."""

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
        for topic, some in groupby(messages, lambda message: message.topic):
            while chunk := list(islice(some, _MESSAGES_PER_JOB)):
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
        except Exception as error:  # whatever Spark wraps around what the client says
            if "RecordTooLargeException" in str(error):
                raise message_too_large_error(
                    self, _find_exception_line(error, "RecordTooLargeException")
                ) from error
            raise TransientError(
                f"sink {self.name} of {self.spec.name}: Kafka does not take {topic}:"
                f" {str(error).strip().splitlines()[0][:300]}",
                code="sink.unavailable",
                pipeline=self.spec.name,
                kept="everything sealed; the sink catches up later",
                advice=(
                    "bring the brokers back, or mend the sink's options; tidegate tries again by"
                    " itself"
                ),
                retry_after=1.0,
            ) from error


def _find_exception_line(error: Exception, name: str) -> str:
    """The line that names an exception of the client's."""
    return next(line.strip() for line in str(error).splitlines() if name in line)


def _send_with_spark(messages: pa.Table, settings: dict[str, str]) -> None:
    from pyspark.sql import SparkSession

    frame = SparkSession.builder.getOrCreate().createDataFrame(messages)  # the driver's own session
    writer = frame.write.format("kafka").option("includeHeaders", "true")
    for name, value in settings.items():
        writer = writer.option(f"kafka.{name}", value)
    writer.save()


# What Kafka sinks write: a message per row, and one that tells of a restore.

_TABLE_PLACEHOLDER: Final = "{table}"


class KafkaMessage(NamedTuple):
    """A record for a topic."""

    topic: str
    key: str | None
    value: str | None
    headers: list[tuple[str, bytes]]


def resolve_topic(given: KafkaSinkSpec, table: str) -> str:
    """Where a table's rows go."""
    return given.topic.replace(_TABLE_PLACEHOLDER, table)


def build_sink_client_settings(given: KafkaSinkSpec, sink: str) -> dict[str, str]:
    """The client's settings, with what is named ``env:NAME`` read from the environment."""
    own = {
        n: resolve_environment_value(f"sinks.{sink}.options.{n}", v, os.environ)
        for n, v in given.options.items()
    }
    return {"bootstrap.servers": given.servers, **own}


def build_row_messages(
    sink: SlotFollower, given: KafkaSinkSpec, epoch: Manifest
) -> Iterator[KafkaMessage]:
    """The rows of an epoch, table by table."""
    for table in sink.tables:
        headers = _build_headers(sink, {"tidegate-epoch": str(epoch.id), "tidegate-table": table})
        for rows in sink.read_epoch_rows(epoch, table):
            for line in to_json_lines(rows).splitlines():
                yield KafkaMessage(
                    resolve_topic(given, table), _build_message_key(json.loads(line)), line, headers
                )


def message_too_large_error(sink: SlotFollower, said: str) -> ConfigurationError:
    """The error for a message that brokers or the client's own settings do not let through.

    No waiting mends it.
    """
    return ConfigurationError(
        f"sink {sink.name} of {sink.spec.name}: a row is too large a message: {said[:300]}",
        code="sink.too_large",
        pipeline=sink.spec.name,
        kept="everything sealed; this sink stays where it is",
        advice=(
            f"raise max.message.bytes of the topic and, in sinks.{sink.name}.options,"
            " max.request.size (exactly_once: message.max.bytes); or leave the column out of the"
            " schema"
        ),
    )


def build_restore_messages(
    sink: SlotFollower, given: KafkaSinkSpec, notice: dict[str, Any]
) -> Iterator[KafkaMessage]:
    """A restore, told to the readers of each topic."""
    headers = _build_headers(sink, {"tidegate-restore": json.dumps(notice)})
    for table in sink.tables:
        yield KafkaMessage(resolve_topic(given, table), None, None, headers)


def _build_headers(sink: SlotFollower, own: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in {"tidegate-uid": sink.uid, **own}.items()]


def _build_message_key(row: dict[str, Any]) -> str | None:
    return (
        f"{row['_source']}/{row['_partition']}/{row['_seq']}"
        if row.get("_seq") is not None
        else None
    )
