"""OpenLineage: a run per sealed epoch, started and completed, sent to ``OPENLINEAGE_URL`` when that is set.

Datasets are named as OpenLineage's naming rules say, so that they are the same nodes in every
tool's graph: objects and Iceberg tables by where they lie (``s3://bucket`` and a path, or
``file``), topics by broker, PostgreSQL tables by server.

A side channel: events are sent by a thread of their own, and dropped with a word in the log when
nobody takes them.
"""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from tidegate import __version__
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.sinks.base_follower import expand_variables
from tidegate.jobs.sinks.iceberg_catalog import build_table_location
from tidegate.jobs.sources.input_view import locate_source
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.sinks import FilesSinkSpec, KafkaSinkSpec, PostgresSinkSpec, SinkSpec
from tidegate.time_units import format_instant

_log = structlog.get_logger("tidegate.driver")

_EVENT_SCHEMA: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
_STATISTICS_FACET: Final = "https://openlineage.io/spec/facets/1-0-2/OutputStatisticsOutputDatasetFacet.json#/$defs/OutputStatisticsOutputDatasetFacet"
_ERROR_FACET: Final = (
    "https://openlineage.io/spec/facets/1-0-1/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet"
)
_PRODUCER: Final = f"urn:tidegate:{__version__}"
_QUEUE_SIZE: Final = 200  # events; more than that and nobody is listening
_TIMEOUT: Final = 5.0  # seconds

Send = Callable[[bytes], None]


def make_epoch_events(
    spec: PipelineSpec, store: Store, manifest: Manifest, seconds: float, namespace: str
) -> list[dict[str, Any]]:
    """The run of one epoch: what it read, what it adds to.

    The run's id follows from uid and checkpoint.

    Args:
        spec: the pipeline.
        store: its store.
        manifest: of the epoch.
        seconds: that it took.
        namespace: of the job.
    """
    run = str(uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{manifest.uid}:{manifest.id}"))
    inputs = [_name_source_dataset(name, source, store) for name, source in spec.sources.items()]
    outputs = [
        {**place, "outputFacets": {"outputStatistics": _make_statistics_facet(files)}}
        for table, files in manifest.files.items()
        for place in _name_output_datasets(spec, store, table)
    ]
    begun = manifest.created_at - round(seconds * 1e6)
    return [
        {
            **_make_run_event("START", begun, run, namespace, spec.name),
            "inputs": inputs,
            "outputs": [],
        },
        {
            **_make_run_event("COMPLETE", manifest.created_at, run, namespace, spec.name),
            "inputs": inputs,
            "outputs": outputs,
        },
    ]


def make_failure_events(
    spec: PipelineSpec, error: TidegateError, namespace: str
) -> list[dict[str, Any]]:
    """A driver that ended by an error, as a run of its own: no epoch is there to name it."""
    run, now = str(uuid.uuid4()), SYSTEM_CLOCK.wall_ticks()
    facet = {
        "_producer": _PRODUCER,
        "_schemaURL": _ERROR_FACET,
        "message": error.message,
        "programmingLanguage": "Python",
    }
    failed = _make_run_event("FAIL", now, run, namespace, spec.name)
    failed["run"]["facets"] = {"errorMessage": facet}
    return [_make_run_event("START", now, run, namespace, spec.name), failed]


def _make_run_event(kind: str, at: int, run: str, namespace: str, job: str) -> dict[str, Any]:
    return {
        "eventType": kind,
        "eventTime": format_instant(at),
        "run": {"runId": run},
        "job": {"namespace": namespace, "name": job},
        "producer": _PRODUCER,
        "schemaURL": _EVENT_SCHEMA,
    }


def _make_statistics_facet(files: Sequence[FileRef]) -> dict[str, Any]:
    rows, size = sum(file.rows for file in files), sum(file.bytes for file in files)
    return {"_producer": _PRODUCER, "_schemaURL": _STATISTICS_FACET, "rowCount": rows, "size": size}


def _name_source_dataset(name: str, source: SourceSpec, store: Store) -> dict[str, str]:
    if source.kafka is not None:
        return _name_topic_dataset(source.kafka.servers, source.kafka.topic)
    home, prefix = locate_source(name, source, store)
    return _name_folder_dataset(home.uri(prefix) if prefix else home.url)


def _name_output_datasets(spec: PipelineSpec, store: Store, table: str) -> list[dict[str, str]]:
    """Where rows of a table go: to its Iceberg table, and by each sink that follows it."""
    sinks = [
        given for given in spec.sinks.items() if given[1].tables is None or table in given[1].tables
    ]
    return [
        _name_folder_dataset(build_table_location(spec, store, table)),
        *(_name_sink_dataset(spec, name, given, table) for name, given in sinks),
    ]


def _name_sink_dataset(
    spec: PipelineSpec, name: str, given: SinkSpec, table: str
) -> dict[str, str]:
    """Secrets stand in addresses: of a server's, only host, port and database are told."""
    if isinstance(given, KafkaSinkSpec):
        return _name_topic_dataset(given.servers, given.topic.replace("{table}", table))
    if isinstance(given, FilesSinkSpec):
        return _name_folder_dataset(f"{expand_variables(given.path, name).rstrip('/')}/{table}")
    at = urlsplit(expand_variables(given.url, name))
    if isinstance(given, PostgresSinkSpec):
        database = f"{at.path.strip('/')}.{given.namespace or spec.name}.{table}"
        return {"namespace": f"postgres://{at.hostname}:{at.port or 5432}", "name": database}
    return {
        "namespace": f"{at.scheme}://{at.hostname}" + (f":{at.port}" if at.port else ""),
        "name": f"{name}/{table}",
    }


def _name_topic_dataset(servers: str, topic: str) -> dict[str, str]:
    return {"namespace": f"kafka://{servers.split(',')[0].strip()}", "name": topic}


def _name_folder_dataset(uri: str) -> dict[str, str]:
    """A folder.

    >>> _name_folder_dataset("s3://bucket/a/b/")
    {'namespace': 's3://bucket', 'name': 'a/b'}
    >>> _name_folder_dataset("/data/a")
    {'namespace': 'file', 'name': '/data/a'}
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return {"namespace": "file", "name": str(Path(parts.path).absolute())}
    return {"namespace": f"{parts.scheme}://{parts.netloc}", "name": parts.path.strip("/") or "/"}


class OpenLineageSender:
    """Sends the events of a pipeline's sealed epochs, and of its failure."""

    def __init__(self, spec: PipelineSpec, store: Store, namespace: str, send: Send) -> None:
        self._spec, self._store, self._namespace, self._send = spec, store, namespace, send
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_QUEUE_SIZE)
        self._thread = threading.Thread(
            target=self._send_queued, name="tidegate-lineage", daemon=True
        )
        self._thread.start()

    def on_epoch(self, report: EpochReport, seconds: float) -> None:
        """Hand over the events of a sealed epoch."""
        if report.manifest is None:
            return
        try:
            self._enqueue_events(
                make_epoch_events(
                    self._spec, self._store, report.manifest, seconds, self._namespace
                )
            )
        except (
            TidegateError,
            ValueError,
        ) as error:  # an address that no rule for names knows ends no epoch
            _log.warning("lineage_not_sent", why=str(error))

    def on_failure(self, error: TidegateError) -> None:
        """Hand over how the driver ended."""
        self._enqueue_events(make_failure_events(self._spec, error, self._namespace))

    def close(self, timeout: float) -> None:
        """Send what waits, for so many seconds at most, and end."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("lineage_dropped", why="nobody took the last events in time")

    def _enqueue_events(self, events: list[dict[str, Any]]) -> None:
        try:
            for event in events:
                self._waiting.put_nowait(json.dumps(event).encode())
        except queue.Full:
            _log.warning("lineage_dropped", why="the events before it are still waiting")

    def _send_queued(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                self._send(body)
            except (OSError, ValueError) as error:
                _log.warning("lineage_not_sent", why=str(error))


def create_lineage_sender(
    environment: Mapping[str, str], spec: PipelineSpec, store: Store
) -> OpenLineageSender | None:
    """Lineage to ``OPENLINEAGE_URL`` (``OPENLINEAGE_API_KEY``, ``OPENLINEAGE_NAMESPACE``).

    None unless that is set.
    """
    url = environment.get("OPENLINEAGE_URL")
    if not url or not url.startswith(("http://", "https://")):
        return None
    headers = {"Content-Type": "application/json"}
    if key := environment.get("OPENLINEAGE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    address = url.rstrip("/") + "/" + environment.get("OPENLINEAGE_ENDPOINT", "api/v1/lineage")

    def post_event(body: bytes) -> None:
        request = urllib.request.Request(address, body, headers, method="POST")  # noqa: S310 - http(s) only, see above
        with urllib.request.urlopen(request, timeout=_TIMEOUT):  # noqa: S310
            pass

    return OpenLineageSender(
        spec, store, environment.get("OPENLINEAGE_NAMESPACE", "tidegate"), post_event
    )
