"""What Kafka sinks write: a message per row, and one that tells of a restore."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.sinks.slots import SlotFollower
from tidegate.jobs.sinks.tables import to_json_lines
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.inputs import resolve_environment_value
from tidegate.jobs.spec.sinks import KafkaSinkSpec

__all__ = ["KafkaMessage", "build_row_messages", "build_restore_messages", "build_sink_client_settings", "message_too_large_error", "resolve_topic"]

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
    own = {n: resolve_environment_value(f"sinks.{sink}.options.{n}", v, os.environ) for n, v in given.options.items()}
    return {"bootstrap.servers": given.servers, **own}


def build_row_messages(sink: SlotFollower, given: KafkaSinkSpec, epoch: Manifest) -> Iterator[KafkaMessage]:
    """The rows of an epoch, table by table."""
    for table in sink.tables:
        headers = _build_headers(sink, {"tidegate-epoch": str(epoch.id), "tidegate-table": table})
        for rows in sink.read_epoch_rows(epoch, table):
            for line in to_json_lines(rows).splitlines():
                yield KafkaMessage(resolve_topic(given, table), _build_message_key(json.loads(line)), line, headers)


def message_too_large_error(sink: SlotFollower, said: str) -> ConfigurationError:
    """The error for a message that brokers or the client's own settings do not let through; no waiting mends it."""
    return ConfigurationError(
        f"sink {sink.name} of {sink.spec.name}: a row is too large a message: {said[:300]}",
        code="sink.too_large",
        pipeline=sink.spec.name,
        kept="everything sealed; this sink stays where it is",
        advice=f"raise max.message.bytes of the topic and, in sinks.{sink.name}.options, max.request.size (exactly_once: "
        "message.max.bytes); or leave the column out of the schema",
    )


def build_restore_messages(sink: SlotFollower, given: KafkaSinkSpec, notice: dict[str, Any]) -> Iterator[KafkaMessage]:
    """A restore, told to the readers of each topic."""
    headers = _build_headers(sink, {"tidegate-restore": json.dumps(notice)})
    for table in sink.tables:
        yield KafkaMessage(resolve_topic(given, table), None, None, headers)


def _build_headers(sink: SlotFollower, own: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in {"tidegate-uid": sink.uid, **own}.items()]


def _build_message_key(row: dict[str, Any]) -> str | None:
    return f"{row['_source']}/{row['_partition']}/{row['_seq']}" if row.get("_seq") is not None else None
