"""A sink into Kafka topics, at least once: every message carries its epoch in a header, and says which row it is.

Key: ``<source>/<partition>/<seq>`` for rows with provenance, else none. Value: the row as JSON. Headers: ``tidegate-epoch`` (the
checkpoint id), ``tidegate-uid``, ``tidegate-table``. A reader that keeps the set of (epoch, key) it has seen has each row once;
one that is told of a restore (a message without a value and with a ``tidegate-restore`` header) knows which epochs count no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, islice
from typing import Any, Final

import pyarrow as pa

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.kafka_messages import KafkaMessage, build_row_messages, build_restore_messages, build_sink_client_settings, message_too_large_error
from tidegate.jobs.sinks.standard import AtLeastOnceSink
from tidegate.jobs.spec.errors import TransientError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import KafkaSinkSpec

__all__ = ["KafkaSink"]

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
        self, name: str, given: KafkaSinkSpec, spec: PipelineSpec, store: Store, uid: str, send: SendMessages | None = None
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

    def _send_chunk(self, topic: str, messages: list[KafkaMessage], settings: dict[str, str]) -> None:
        rows = [m._asdict() | {"headers": [{"key": k, "value": v} for k, v in m.headers]} for m in messages]
        try:
            self._send(pa.Table.from_pylist(rows, schema=_MESSAGE_SCHEMA), settings)
        except Exception as error:  # whatever Spark wraps around what the client says
            if "RecordTooLargeException" in str(error):
                raise message_too_large_error(self, _find_exception_line(error, "RecordTooLargeException")) from error
            raise TransientError(
                f"sink {self.name} of {self.spec.name}: Kafka does not take {topic}: {str(error).strip().splitlines()[0][:300]}",
                code="sink.unavailable",
                pipeline=self.spec.name,
                kept="everything sealed; the sink catches up later",
                advice="bring the brokers back, or mend the sink's options; tidegate tries again by itself",
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
