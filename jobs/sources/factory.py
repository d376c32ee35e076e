"""Builds the sources of a pipeline from its spec."""

from collections.abc import Mapping
from typing import Any

from tidegate.jobs.engine.interfaces import Source
from tidegate.jobs.spec.pipeline import PipelineSpec

from .arrival_log import BucketNotifications, listen_for_objects
from .input_view import InputView
from .kafka_source import KafkaSource, open_topic_offsets
from .object_source import ObjectSource


class PipelineSources:
    """The sources of a running pipeline, in `all`, and their figures for the status.

    Sources that use notifications start to listen at once.

    Args:
        spec: the pipeline.
        view: the pipeline's store, as sources and movers see it.
        ends_input: each source of objects ends after those that it holds now.
    """

    def __init__(self, spec: PipelineSpec, view: InputView, *, ends_input: bool = False) -> None:
        self._ends_input = ends_input
        self._notifications: list[BucketNotifications] = []
        self.all: list[Source] = [self._open_source(spec, name, view) for name in spec.sources]

    def _open_source(self, spec: PipelineSpec, name: str, view: InputView) -> Source:
        source = spec.sources[name]
        if source.kafka is not None:
            return KafkaSource(name, source, open_topic_offsets(source.kafka))
        notices = None
        if source.discovery.order == "arrival" and source.discovery.notifications:
            notices = listen_for_objects(*view.locate_source(name))
            self._notifications += [notices] if notices is not None else []
        opened = ObjectSource(name, source, view, pipeline=spec.name, notices=notices)
        opened.ends_input = self._ends_input
        return opened

    def open_logs(self) -> None:
        """Read the arrival logs, which takes minutes after tens of millions of objects."""
        for source in self.all:
            if isinstance(source, ObjectSource):
                source.open_logs()

    def collect_status(self) -> Mapping[str, Any]:
        """Return `lag` (messages) and `backlog` (objects) by member, and `late_uploads` by source.

        The first two are those behind the last planned slice. Sources without late uploads are left
        out of the third.
        """
        lag: dict[str, int] = {}
        backlog: dict[str, int] = {}
        late_uploads: dict[str, int] = {}
        for source in self.all:
            if isinstance(source, KafkaSource):
                lag |= source.lag
            elif isinstance(source, ObjectSource):
                backlog |= source.backlog
                if source.late_uploads:
                    late_uploads[source.name] = source.late_uploads
        return {"lag": lag, "backlog": backlog, "late_uploads": late_uploads}

    def close(self) -> None:
        """Stop listening for notifications."""
        for notifications in self._notifications:
            notifications.close()
