"""A sink into Kafka topics, at least once: every message carries its epoch in a header, and says which row it is.

Key: ``<source>/<partition>/<seq>`` for rows with provenance, else none. Value: the row as JSON. Headers: ``tidegate-epoch`` (the
checkpoint id), ``tidegate-uid``, ``tidegate-table``. A reader that keeps the set of (epoch, key) it has seen has each row once;
one that is told of a restore (a message without a value and with a ``tidegate-restore`` header) knows which epochs count no more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.standard import StandardSink
from tidegate.jobs.sinks.tables import json_lines
from tidegate.jobs.spec.errors import TransientError
from tidegate.jobs.spec.inputs import environment_value
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import KafkaSinkSpec

__all__ = ["KafkaSink"]

_MESSAGES = pa.schema(
    {
        "topic": pa.string(),
        "key": pa.string(),
        "value": pa.string(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)
Send = Callable[[pa.Table, dict[str, str]], None]
"""Writes messages with the client's settings; returns when the broker has them."""


class KafkaSink(StandardSink):
    """`<topic>` with ``{table}`` replaced, a message per row."""

    def __init__(
        self, name: str, given: KafkaSinkSpec, spec: PipelineSpec, store: Store, uid: str, send: Send | None = None
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self.start, self._given, self._send = given.start, given, send or _by_spark

    def _deliver(self, epoch: Manifest) -> None:
        for table in self.tables:
            headers = self._headers({"tidegate-epoch": str(epoch.id), "tidegate-table": table})
            for rows in self.rows_of(epoch, table):
                values = json_lines(rows).splitlines()
                self._write(table, [_key(json.loads(value)) for value in values], values, headers)

    def _tell_restore(self, notice: dict[str, Any]) -> None:
        for table in self.tables:
            self._write(table, [None], [None], self._headers({"tidegate-restore": json.dumps(notice)}))

    def _headers(self, own: dict[str, str]) -> list[dict[str, Any]]:
        return [{"key": key, "value": value.encode()} for key, value in {"tidegate-uid": self.uid, **own}.items()]

    def _write(self, table: str, keys: list[str | None], values: list[Any], headers: list[dict[str, Any]]) -> None:
        topic = self._given.topic.replace("{table}", table)
        columns = {"topic": [topic] * len(values), "key": keys, "value": values, "headers": [headers] * len(values)}
        options = {n: environment_value(f"sinks.{self.name}.options.{n}", v, os.environ) for n, v in self._given.options.items()}
        try:
            self._send(pa.table(columns, schema=_MESSAGES), {"bootstrap.servers": self._given.servers, **options})
        except Exception as error:  # whatever Spark wraps around what the client says
            raise TransientError(
                f"sink {self.name} of {self.spec.name}: Kafka does not take {topic}: {str(error).strip().splitlines()[0][:300]}",
                code="sink.unavailable",
                pipeline=self.spec.name,
                kept="everything sealed; the sink catches up later",
                advice="bring the brokers back, or mend the sink's options; tidegate tries again by itself",
                retry_after=1.0,
            ) from error


def _key(row: dict[str, Any]) -> str | None:
    return f"{row['_source']}/{row['_partition']}/{row['_seq']}" if row.get("_seq") is not None else None


def _by_spark(messages: pa.Table, settings: dict[str, str]) -> None:
    from pyspark.sql import SparkSession

    frame = SparkSession.builder.getOrCreate().createDataFrame(messages)  # the driver's own session
    writer = frame.write.format("kafka").option("includeHeaders", "true")
    for name, value in settings.items():
        writer = writer.option(f"kafka.{name}", value)
    writer.save()
