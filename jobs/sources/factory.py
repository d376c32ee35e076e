"""From the spec's sources to the objects that read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Source
from tidegate.jobs.sources.arrival_log import BucketNotifications, listen_for_objects
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.kafka_admin import JvmTopicOffsets
from tidegate.jobs.sources.kafka_source import KafkaSource
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec


class PipelineSources:
    """The sources of a running pipeline, and what they know beside their rows.

    Args:
        spec: the pipeline.
        store: its store; where notifications come from.
        view: the same store, as sources and movers see it.
    """

    def __init__(self, spec: PipelineSpec, store: Store, view: InputView) -> None:
        self._notices: list[BucketNotifications] = []
        self.all: list[Source] = [
            self._open_source(spec, name, store, view) for name in spec.sources
        ]

    def _open_source(self, spec: PipelineSpec, name: str, store: Store, view: InputView) -> Source:
        source = spec.sources[name]
        if source.kafka is not None:
            return KafkaSource(name, source, JvmTopicOffsets(source.kafka))
        notices = None
        if source.discovery.order == "arrival" and source.discovery.notifications:
            notices = listen_for_objects(*view.locate_source(name))
            self._notices += [notices] if notices is not None else []
        return ObjectSource(name, source, view, pipeline=spec.name, notices=notices)

    def collect_status(self) -> Mapping[str, Any]:
        """For the status: messages and objects that wait, by member, and late uploads."""
        lag = {
            member: rows
            for source in self.all
            if isinstance(source, KafkaSource)
            for member, rows in source.lag.items()
        }
        backlog = {
            member: n
            for source in self.all
            if isinstance(source, ObjectSource)
            for member, n in source.backlog.items()
        }
        late = {
            source.name: source.late_uploads
            for source in self.all
            if isinstance(source, ObjectSource)
        }
        return {
            "lag": lag,
            "backlog": backlog,
            "late_uploads": {name: count for name, count in late.items() if count},
        }

    def close(self) -> None:
        """Stop listening."""
        for notices in self._notices:
            notices.close()
