"""Builds the sources of a pipeline from its spec."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final, TypeVar

from tidegate.jobs.engine.interfaces import Source
from tidegate.jobs.spec.pipeline import PipelineSpec

from .arrival_log import BucketNotifications, listen_for_objects
from .input_view import InputView
from .kafka_source import KafkaSource, open_topic_offsets
from .object_source import ObjectSource

T = TypeVar("T")
R = TypeVar("R")
_PLANNED_AT_A_TIME: Final = 4


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
        # Its threads stay: Spark's JVM keeps one for each that has started a job.
        self._pool = ThreadPoolExecutor(_PLANNED_AT_A_TIME, "sources")
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

    def map_side_by_side(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return what `call` returns for each source, when all calls have ended.

        Calls wait for stores and brokers most of the time, so some are made at a time. The first
        error, in the order of the items, is raised.
        """
        if len(items) < 2:
            return [call(item) for item in items]
        calls = [self._pool.submit(call, item) for item in items]
        wait(calls)
        return [own.result() for own in calls]

    def close(self) -> None:
        """Stop listening for notifications, and end the threads of plans."""
        self._pool.shutdown(cancel_futures=True)
        for notifications in self._notifications:
            notifications.close()
