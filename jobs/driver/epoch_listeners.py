"""Listeners of epochs, launches and landings: progress, metrics, lineage, a log line per epoch."""

from __future__ import annotations

import os
import queue
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import structlog

from tidegate import __version__
from tidegate.checkpoints.batch_notes import BatchNotes, QueryPosition
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.sinks.base_follower import resolve_sink_address
from tidegate.jobs.sinks.iceberg_catalog import build_table_location
from tidegate.jobs.sources.input_view import locate_source
from tidegate.jobs.spec.operations import FilesSinkSpec, KafkaSinkSpec, PostgresSinkSpec, SinkSpec
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.time_units import format_instant

from .log_output import bind_log_context
from .otel_metrics import DriverMetrics, LandingMetrics, create_meter_provider

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

_log = structlog.get_logger("tidegate.driver")

# Seconds for each receiver at the end. What it has not taken by then is dropped.
FLUSH_TIMEOUT = 5.0

EpochListener = Callable[[EpochReport, float], None]


class Receivers:
    """The receivers of metrics and lineage that the environment names, if it names any.

    Args:
        name: of the pipeline or job.
        facts: returns the fields of the driver's status.

    Attributes:
        metrics: None without a receiver.
        lineage: None without a receiver.
    """

    def __init__(self, name: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._provider = provider = create_meter_provider(os.environ, name)
        self.metrics = (
            DriverMetrics(provider.get_meter("tidegate"), name, facts) if provider else None
        )
        self.lineage = create_lineage_sender(os.environ)

    def on_end(self, error: TidegateError | None) -> None:
        """Send as lineage how the run has ended. Metrics read it from the status."""

    def close(self) -> None:
        """Send what is still queued, to each receiver for at most `FLUSH_TIMEOUT`; never raises."""
        try:
            if self._provider is not None:
                self._provider.shutdown(FLUSH_TIMEOUT * 1e3)
        except Exception as error:  # OpenTelemetry's SDK raises bare exceptions
            _log.warning("last_words_not_sent", why=str(error))
        if self.lineage is not None:
            self.lineage.close(FLUSH_TIMEOUT)

    def _send_lineage(self, make_events: Callable[[str], list[RunEvent]]) -> None:
        """Send what a function makes for the namespace of the jobs in the events."""
        if self.lineage is not None:
            self.lineage.send(partial(make_events, self.lineage.namespace))


class EpochListeners(Receivers):
    """What follows each round of the loop, sealed or not, on the loop's thread.

    So nothing here must block: metrics and lineage are sent by threads of their own. The
    pipeline's name is in all log lines of the process until `close`.

    Args:
        spec: the pipeline.
        store: its store.
        facts: returns the fields of the driver's status.
        progress: the caller's listener.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        store: Store,
        facts: Callable[[], Mapping[str, Any]],
        progress: EpochListener,
    ) -> None:
        super().__init__(spec.name, facts)
        self._spec, self._store, self._progress = spec, store, progress
        bind_log_context(pipeline=spec.name)

    def on_epoch(self, report: EpochReport, seconds: float) -> None:
        """Call every listener; an exception of one is passed on, and ends the calls."""
        self._progress(report, seconds)
        if (manifest := report.manifest) is not None:
            _log.info(
                "sealed",
                epoch=manifest.slot,
                attempt=manifest.attempt,
                timeline=manifest.timeline,
                checkpoint=str(manifest.id),
                rows=report.rows,
                seconds=round(seconds, 3),
            )
            # From here on lines belong to the next epoch. Its attempt has no name before its move.
            bind_log_context(epoch=manifest.slot + 1, attempt=None)
        if self.metrics is not None:
            self.metrics.record_epoch(report, seconds)
        if manifest is not None:
            self._send_lineage(
                lambda space: make_epoch_events(self._spec, self._store, manifest, seconds, space)
            )

    def on_end(self, error: TidegateError | None) -> None:
        """Send the error that ends the driver as lineage. Metrics read it from the status."""
        if error is not None:
            self._send_lineage(lambda space: make_failure_events(self._spec, error, space))

    def close(self) -> None:
        """As `Receivers.close`; later log lines are without the pipeline."""
        super().close()
        bind_log_context(pipeline=None, epoch=None, attempt=None)


class LaunchListeners(Receivers):
    """What follows the launch of a job: one run of lineage, with what each query reads and writes.

    The run starts with the launch, runs with each sealed batch, and completes or fails with the
    launch.

    Args:
        job: name of the job.
        facts: returns the fields of the driver's status.
        uid: the identity of the job.
        token: of the launch's lease. The run has the same id whenever it is sent.
    """

    def __init__(
        self, job: str, facts: Callable[[], Mapping[str, Any]], uid: str, token: int
    ) -> None:
        super().__init__(job, facts)
        self._job = job
        self._run = str(uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{uid}:launch {token}"))
        self._send_state("START")

    def record_batch(self, manifest: Manifest, seconds: float) -> None:
        """Count a sealed batch, and send the datasets of its query, with the rows of each source.

        Args:
            manifest: of the batch.
            seconds: how long the batch took.
        """
        if self.metrics is not None:
            self.metrics.record_sealed(manifest, seconds)
        notes = BatchNotes.from_manifest(manifest)
        if notes is not None:
            at = notes.queries[notes.query]
            self._send_lineage(lambda space: [self._make_batch_event(at, manifest, space)])

    def on_end(self, error: TidegateError | None) -> None:
        """Send how the launch has ended; also a stop completes it."""
        self._send_state("COMPLETE" if error is None else "FAIL", error)

    def _send_state(self, kind: str, error: TidegateError | None = None) -> None:
        own = (kind, SYSTEM_CLOCK.wall_ticks(), self._run)
        self._send_lineage(lambda space: [make_lineage_event(*own, space, self._job, error)])

    def _make_batch_event(self, at: QueryPosition, manifest: Manifest, namespace: str) -> RunEvent:
        from openlineage.client.event_v2 import InputDataset, OutputDataset
        from openlineage.client.facet_v2 import InputDatasetFacet
        from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

        own = (manifest.created_at, self._run, namespace, self._job)
        event = make_lineage_event("RUNNING", *own)
        event.inputs = []
        for source in at.sources:
            names, facets = name_spark_datasets(source.name), dict[str, InputDatasetFacet]()
            if len(names) == 1:  # Spark counts the rows of all topics of a source together
                facets["inputStatistics"] = statistics.InputStatisticsInputDatasetFacet(
                    source.rows, producer=PRODUCER
                )
            event.inputs += [InputDataset(*name, inputFacets=facets) for name in names]
        event.outputs = [OutputDataset(*name) for name in name_spark_datasets(at.sink)]
        return event


@contextmanager
def measure_landing(pipeline: str, source: str) -> Iterator[LandingMetrics]:
    """Yield the metrics of a landing; its last state is stopped, or failed after an exception."""
    from opentelemetry.metrics import NoOpMeterProvider

    provider = create_meter_provider(os.environ, f"{pipeline}.{source}")
    meter = (provider or NoOpMeterProvider()).get_meter("tidegate")
    metrics = LandingMetrics(meter, pipeline, source)
    try:
        yield metrics
        metrics.state = "stopped"
    except BaseException:
        metrics.state = "failed"
        raise
    finally:
        if provider is not None:
            provider.shutdown(FLUSH_TIMEOUT * 1e3)


# OpenLineage events, sent to ``OPENLINEAGE_URL`` if that is set: one run per sealed epoch of a
# pipeline, and one per launch of a job.
#
# Datasets are named by OpenLineage's naming rules, so that they are the same nodes in the graph of
# every tool: objects and Iceberg tables by where they are (``s3://bucket`` and a path, or
# ``file``), topics by broker, PostgreSQL tables by server. Those of jobs are named where Spark's
# description says enough: files and topics. Others have the namespace ``spark`` and Spark's
# description as their name.
#
# Lineage never holds up an epoch. A thread of its own sends the events; events that the receiver
# does not take in time are dropped with a warning.

PRODUCER = f"urn:tidegate:{__version__}"
_QUEUE_SIZE = 200  # events; a receiver that is further behind does not listen
_TIMEOUT = 5.0  # seconds

_TOPICS = re.compile(r"Kafka\w*\[Subscribe\[(.+)\]\]")
_PLACE = re.compile(r"\w+\[((?:/|\w+:/).*)\]|(\w+://.*)")
_OBJECT_HASH = re.compile(r"@[0-9a-f]+")  # Java's, another one in each launch
DatasetName = tuple[str, str]
"""Namespace and name of a dataset."""


class EventTransport(Protocol):
    """Sends events; OpenLineage's `HttpTransport` does."""

    def emit(self, event: RunEvent) -> object:
        """Send one event; raises OSError or ValueError if that fails."""


def make_epoch_events(
    spec: PipelineSpec, store: Store, manifest: Manifest, seconds: float, namespace: str
) -> list[RunEvent]:
    """Return start and completion of the run of one epoch.

    All sources of the spec are inputs. Outputs are the tables with files of it, and those tables in
    the sinks.

    The run's id follows from the pipeline's uid and the checkpoint: the same epoch has the same id
    whenever it is sent.

    Args:
        spec: the pipeline.
        store: its store.
        manifest: of the epoch.
        seconds: how long the epoch took.
        namespace: of the job.

    Raises:
        ConfigurationError, ValueError: the address of a source or a sink cannot be read.
    """
    from openlineage.client.event_v2 import InputDataset, OutputDataset

    run = str(uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{manifest.uid}:{manifest.id}"))
    inputs = [
        InputDataset(*_name_source_dataset(name, source, store))
        for name, source in spec.sources.items()
    ]
    outputs = [
        OutputDataset(*name, outputFacets={"outputStatistics": _make_statistics(files)})
        for table, files in manifest.files.items()
        for name in _name_output_datasets(spec, store, table)
    ]
    begun = manifest.created_at - round(seconds * 1e6)
    started = make_lineage_event("START", begun, run, namespace, spec.name)
    completed = make_lineage_event("COMPLETE", manifest.created_at, run, namespace, spec.name)
    started.inputs = completed.inputs = inputs
    completed.outputs = outputs
    return [started, completed]


def make_failure_events(spec: PipelineSpec, error: TidegateError, namespace: str) -> list[RunEvent]:
    """Return the events of a run that failed: a driver's end does not belong to any epoch."""
    own = (SYSTEM_CLOCK.wall_ticks(), str(uuid.uuid4()), namespace, spec.name)
    return [make_lineage_event("START", *own), make_lineage_event("FAIL", *own, error)]


def make_lineage_event(
    kind: str, at: int, run: str, namespace: str, job: str, error: TidegateError | None = None
) -> RunEvent:
    """Return an event without datasets.

    Args:
        kind: START, RUNNING, COMPLETE or FAIL.
        at: ticks.
        run: a UUID.
        namespace: of the job.
        job: name of the pipeline or job.
        error: why the run failed, if it did.
    """
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import error_message_run

    event = RunEvent(
        eventType=RunState[kind],
        eventTime=format_instant(at),
        run=Run(run),
        job=Job(namespace, job),
        producer=PRODUCER,
    )
    if error is not None:
        facet = error_message_run.ErrorMessageRunFacet(error.message, "Python", producer=PRODUCER)
        event.run.facets = {"errorMessage": facet}
    return event


def _make_statistics(files: Sequence[FileRef]) -> Any:
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    rows, size = sum(file.rows for file in files), sum(file.bytes for file in files)
    return statistics.OutputStatisticsOutputDatasetFacet(rows, size, producer=PRODUCER)


def _name_source_dataset(name: str, source: SourceSpec, store: Store) -> DatasetName:
    if source.kafka is not None:
        return _name_topic_dataset(source.kafka.servers, source.kafka.topic)
    home, prefix = locate_source(name, source, store)
    return name_folder_dataset(home.uri(prefix) if prefix else home.url)


def _name_output_datasets(spec: PipelineSpec, store: Store, table: str) -> list[DatasetName]:
    """Name where rows of a table go: its Iceberg table, and a dataset of each sink that has it."""
    return [
        name_folder_dataset(build_table_location(spec, store, table)),
        *(
            _name_sink_dataset(spec, name, sink, table)
            for name, sink in spec.sinks.items()
            if sink.tables is None or table in sink.tables
        ),
    ]


def _name_sink_dataset(spec: PipelineSpec, name: str, sink: SinkSpec, table: str) -> DatasetName:
    # Addresses contain secrets. Of a server's address only host, port and database are used.
    if isinstance(sink, KafkaSinkSpec):
        return _name_topic_dataset(sink.servers, sink.topic.replace("{table}", table))
    if isinstance(sink, FilesSinkSpec):
        folder = resolve_sink_address(name, "path", sink.path)
        return name_folder_dataset(f"{folder.rstrip('/')}/{table}")
    url = urlsplit(resolve_sink_address(name, "url", sink.url))
    if isinstance(sink, PostgresSinkSpec):
        database = f"{url.path.strip('/')}.{sink.namespace or spec.name}.{table}"
        return f"postgres://{url.hostname}:{url.port or 5432}", database
    port = f":{url.port}" if url.port else ""
    return f"{url.scheme}://{url.hostname}{port}", f"{name}/{table}"


def _name_topic_dataset(servers: str, topic: str) -> DatasetName:
    return f"kafka://{servers.split(',')[0].strip()}", topic


def name_folder_dataset(uri: str) -> DatasetName:
    """Name a folder.

    >>> name_folder_dataset("s3://bucket/a/b/")
    ('s3://bucket', 'a/b')
    >>> name_folder_dataset("/data/a")
    ('file', '/data/a')
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return "file", str(Path(parts.path).absolute())
    return f"{parts.scheme}://{parts.netloc}", parts.path.strip("/") or "/"


def name_spark_datasets(description: str) -> list[DatasetName]:
    """Return namespace and name of what Spark's description of a source or sink names.

    The address of a topic, which tidegate writes for a Kafka sink, is a description as well.

    >>> name_spark_datasets("FileStreamSource[file:/data/in]")
    [('file', '/data/in')]
    >>> name_spark_datasets("DeltaSink[s3a://lake/out]")
    [('s3://lake', 'out')]
    >>> name_spark_datasets("kafka://broker:9092/orders")
    [('kafka://broker:9092', 'orders')]
    >>> name_spark_datasets("KafkaV2[Subscribe[a, b]]")
    [('kafka', 'a'), ('kafka', 'b')]
    >>> name_spark_datasets("ForeachBatchSink")
    [('spark', 'ForeachBatchSink')]
    """
    if topics := _TOPICS.fullmatch(description):
        return [("kafka", topic.strip()) for topic in topics[1].split(",")]
    if place := _PLACE.fullmatch(description):
        return [name_folder_dataset((place[1] or place[2]).replace("s3a://", "s3://"))]
    return [("spark", _OBJECT_HASH.sub("", description))]


class OpenLineageSender:
    """Queues events, and sends them in a thread of its own.

    Attributes:
        namespace: of the jobs in the events.
    """

    def __init__(self, namespace: str, transport: EventTransport) -> None:
        self.namespace, self._transport = namespace, transport
        self._queue: queue.Queue[RunEvent | None] = queue.Queue(_QUEUE_SIZE)
        self._thread = threading.Thread(
            target=self._send_queued, name="tidegate-lineage", daemon=True
        )
        self._thread.start()

    def send(self, make_events: Callable[[], Iterable[RunEvent]]) -> None:
        """Queue events; what cannot be made or does not fit is dropped with a warning."""
        try:
            for event in make_events():
                self._queue.put_nowait(event)
        except (TidegateError, ValueError) as error:
            # An address that does not fit the naming rules must not end the driver.
            _log.warning("lineage_not_sent", why=str(error))
        except queue.Full:
            _log.warning("lineage_dropped", why="the events before it are still waiting")

    def close(self, timeout: float) -> None:
        """Send what is queued, for at most `timeout` seconds, and end."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("lineage_dropped", why="the receiver did not take the last events in time")

    def _send_queued(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._transport.emit(event)
            # Any error: without this thread the events of all later epochs would be dropped.
            except Exception as error:
                _log.warning("lineage_not_sent", why=str(error) or type(error).__name__)


def create_lineage_sender(environment: Mapping[str, str]) -> OpenLineageSender | None:
    """Return a sender to ``OPENLINEAGE_URL``; None unless that is an HTTP address.

    ``OPENLINEAGE_API_KEY``, ``OPENLINEAGE_NAMESPACE`` and ``OPENLINEAGE_ENDPOINT`` are read too.
    """
    url = environment.get("OPENLINEAGE_URL")
    if not url or not url.startswith(("http://", "https://")):
        return None
    # Late: its imports take a second, and most drivers do not send lineage.
    from openlineage.client.transport.http import HttpConfig, HttpTransport

    config: dict[str, Any] = {"url": url.rstrip("/") + "/", "timeout": _TIMEOUT}
    config["retry"] = {"total": 0}
    if endpoint := environment.get("OPENLINEAGE_ENDPOINT"):
        config["endpoint"] = endpoint
    if key := environment.get("OPENLINEAGE_API_KEY"):
        config["auth"] = {"type": "api_key", "api_key": key}
    namespace = environment.get("OPENLINEAGE_NAMESPACE", "tidegate")
    return OpenLineageSender(namespace, HttpTransport(HttpConfig.from_dict(config)))
