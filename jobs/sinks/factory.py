"""From a spec to its followers.

The Iceberg tables first, since another sink may have to be filled from them.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Sink
from tidegate.jobs.sinks.files_webhook import FilesSink, WebhookSink
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.kafka_exactly_once import ExactlyOnceKafkaSink
from tidegate.jobs.sinks.kafka_sink import KafkaSink
from tidegate.jobs.sinks.postgres_sink import PostgresSink
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import FilesSinkSpec, KafkaSinkSpec, PostgresSinkSpec, SinkSpec


def make_sinks(spec: PipelineSpec, store: Store, uid: str, workdir: Path) -> list[Sink]:
    """Every follower of a pipeline. Nothing is opened yet."""
    return [
        IcebergSink(spec, store, uid, workdir),
        *(_make_sink(n, given, spec, store, uid) for n, given in spec.sinks.items()),
    ]


def _make_sink(name: str, given: SinkSpec, spec: PipelineSpec, store: Store, uid: str) -> Sink:
    if isinstance(given, PostgresSinkSpec):
        return PostgresSink(name, given, spec, store, uid)
    if isinstance(given, FilesSinkSpec):
        return FilesSink(name, given, spec, store, uid)
    if isinstance(given, KafkaSinkSpec):
        exact = given.delivery == "exactly_once"
        return (
            ExactlyOnceKafkaSink(name, given, spec, store, uid)
            if exact
            else KafkaSink(name, given, spec, store, uid)
        )
    return WebhookSink(name, given, spec, store, uid)
