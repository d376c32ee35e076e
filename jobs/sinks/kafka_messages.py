"""What Kafka sinks write: a message per row, and one that tells of a restore."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.sinks.slots import SlotFollower
from tidegate.jobs.sinks.tables import json_lines
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.inputs import environment_value
from tidegate.jobs.spec.sinks import KafkaSinkSpec

__all__ = ["Message", "messages_of", "notices_of", "settings_of", "too_large", "topic_of"]

_TABLE: Final = "{table}"


class Message(NamedTuple):
    """A record for a topic."""

    topic: str
    key: str | None
    value: str | None
    headers: list[tuple[str, bytes]]


def topic_of(given: KafkaSinkSpec, table: str) -> str:
    """Where a table's rows go."""
    return given.topic.replace(_TABLE, table)


def settings_of(given: KafkaSinkSpec, sink: str) -> dict[str, str]:
    """The client's settings, with what is named ``env:NAME`` read from the environment."""
    own = {n: environment_value(f"sinks.{sink}.options.{n}", v, os.environ) for n, v in given.options.items()}
    return {"bootstrap.servers": given.servers, **own}


def messages_of(sink: SlotFollower, given: KafkaSinkSpec, epoch: Manifest) -> Iterator[Message]:
    """The rows of an epoch, table by table."""
    for table in sink.tables:
        headers = _headers(sink, {"tidegate-epoch": str(epoch.id), "tidegate-table": table})
        for rows in sink.rows_of(epoch, table):
            for line in json_lines(rows).splitlines():
                yield Message(topic_of(given, table), _key(json.loads(line)), line, headers)


def too_large(sink: SlotFollower, said: str) -> ConfigurationError:
    """The error for a message that brokers or the client's own settings do not let through; no waiting mends it."""
    return ConfigurationError(
        f"sink {sink.name} of {sink.spec.name}: a row is too large a message: {said[:300]}",
        code="sink.too_large",
        pipeline=sink.spec.name,
        kept="everything sealed; this sink stays where it is",
        advice=f"raise max.message.bytes of the topic and, in sinks.{sink.name}.options, max.request.size (exactly_once: "
        "message.max.bytes); or leave the column out of the schema",
    )


def notices_of(sink: SlotFollower, given: KafkaSinkSpec, notice: dict[str, Any]) -> Iterator[Message]:
    """A restore, told to the readers of each topic."""
    headers = _headers(sink, {"tidegate-restore": json.dumps(notice)})
    for table in sink.tables:
        yield Message(topic_of(given, table), None, None, headers)


def _headers(sink: SlotFollower, own: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in {"tidegate-uid": sink.uid, **own}.items()]


def _key(row: dict[str, Any]) -> str | None:
    return f"{row['_source']}/{row['_partition']}/{row['_seq']}" if row.get("_seq") is not None else None
