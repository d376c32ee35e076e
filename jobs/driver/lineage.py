"""OpenLineage: a run per sealed epoch, started and completed, sent to ``OPENLINEAGE_URL`` when that is set.

Datasets are named as OpenLineage's naming rules say, so that they are the same nodes in every tool's graph: objects and Iceberg
tables by where they lie (``s3://bucket`` and a path, or ``file``), topics by broker, PostgreSQL tables by server.

A side channel: events are sent by a thread of their own, and dropped with a word in the log when nobody takes them.
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
from tidegate.checkpoints.clock import SYSTEM_CLOCK
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch import EpochReport
from tidegate.jobs.sinks.catalog import table_location
from tidegate.jobs.sinks.slots import expand
from tidegate.jobs.sources.view import home_of
from tidegate.jobs.spec.errors import TidegateError
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.sinks import FilesSinkSpec, KafkaSinkSpec, PostgresSinkSpec, SinkSpec
from tidegate.jobs.spec.time import format_instant

__all__ = ["Lineage", "events_of", "failure_of", "lineage_from_environment"]

_log = structlog.get_logger("tidegate.driver")

_SCHEMA: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
_STATISTICS: Final = (
    "https://openlineage.io/spec/facets/1-0-2/OutputStatisticsOutputDatasetFacet.json#/$defs/OutputStatisticsOutputDatasetFacet"
)
_ERROR: Final = "https://openlineage.io/spec/facets/1-0-1/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet"
_PRODUCER: Final = f"urn:tidegate:{__version__}"
_WAITING: Final = 200  # events; more than that and nobody is listening
_TIMEOUT: Final = 5.0  # seconds

Send = Callable[[bytes], None]


def events_of(spec: PipelineSpec, store: Store, manifest: Manifest, seconds: float, namespace: str) -> list[dict[str, Any]]:
    """The run of one epoch: what it read, what it adds to. The run's id follows from uid and checkpoint.

    Args:
        spec: the pipeline.
        store: its store.
        manifest: of the epoch.
        seconds: that it took.
        namespace: of the job.
    """
    run = str(uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{manifest.uid}:{manifest.id}"))
    inputs = [_source(name, source, store) for name, source in spec.sources.items()]
    outputs = [
        {**place, "outputFacets": {"outputStatistics": _counted(files)}}
        for table, files in manifest.files.items()
        for place in _places(spec, store, table)
    ]
    begun = manifest.created_at - round(seconds * 1e6)
    return [
        {**_event("START", begun, run, namespace, spec.name), "inputs": inputs, "outputs": []},
        {**_event("COMPLETE", manifest.created_at, run, namespace, spec.name), "inputs": inputs, "outputs": outputs},
    ]


def failure_of(spec: PipelineSpec, error: TidegateError, namespace: str) -> list[dict[str, Any]]:
    """A driver that ended by an error, as a run of its own: no epoch is there to name it."""
    run, now = str(uuid.uuid4()), SYSTEM_CLOCK.ticks()
    facet = {"_producer": _PRODUCER, "_schemaURL": _ERROR, "message": error.message, "programmingLanguage": "Python"}
    failed = _event("FAIL", now, run, namespace, spec.name)
    failed["run"]["facets"] = {"errorMessage": facet}
    return [_event("START", now, run, namespace, spec.name), failed]


def _event(kind: str, at: int, run: str, namespace: str, job: str) -> dict[str, Any]:
    return {
        "eventType": kind,
        "eventTime": format_instant(at),
        "run": {"runId": run},
        "job": {"namespace": namespace, "name": job},
        "producer": _PRODUCER,
        "schemaURL": _SCHEMA,
    }


def _counted(files: Sequence[FileRef]) -> dict[str, Any]:
    rows, size = sum(file.rows for file in files), sum(file.bytes for file in files)
    return {"_producer": _PRODUCER, "_schemaURL": _STATISTICS, "rowCount": rows, "size": size}


def _source(name: str, source: SourceSpec, store: Store) -> dict[str, str]:
    if source.kafka is not None:
        return _topic(source.kafka.servers, source.kafka.topic)
    home, prefix = home_of(name, source, store)
    return _address(home.uri(prefix) if prefix else home.url)


def _places(spec: PipelineSpec, store: Store, table: str) -> list[dict[str, str]]:
    """Where rows of a table go: to its Iceberg table, and by each sink that follows it."""
    sinks = [given for given in spec.sinks.items() if given[1].tables is None or table in given[1].tables]
    return [_address(table_location(spec, store, table)), *(_sink(spec, name, given, table) for name, given in sinks)]


def _sink(spec: PipelineSpec, name: str, given: SinkSpec, table: str) -> dict[str, str]:
    """Secrets stand in addresses: of a server's, only host, port and database are told."""
    if isinstance(given, KafkaSinkSpec):
        return _topic(given.servers, given.topic.replace("{table}", table))
    if isinstance(given, FilesSinkSpec):
        return _address(f"{expand(given.path, name).rstrip('/')}/{table}")
    at = urlsplit(expand(given.url, name))
    if isinstance(given, PostgresSinkSpec):
        database = f"{at.path.strip('/')}.{given.namespace or spec.name}.{table}"
        return {"namespace": f"postgres://{at.hostname}:{at.port or 5432}", "name": database}
    return {"namespace": f"{at.scheme}://{at.hostname}" + (f":{at.port}" if at.port else ""), "name": f"{name}/{table}"}


def _topic(servers: str, topic: str) -> dict[str, str]:
    return {"namespace": f"kafka://{servers.split(',')[0].strip()}", "name": topic}


def _address(uri: str) -> dict[str, str]:
    """A folder.

    >>> _address("s3://bucket/a/b/")
    {'namespace': 's3://bucket', 'name': 'a/b'}
    >>> _address("/data/a")
    {'namespace': 'file', 'name': '/data/a'}
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return {"namespace": "file", "name": str(Path(parts.path).absolute())}
    return {"namespace": f"{parts.scheme}://{parts.netloc}", "name": parts.path.strip("/") or "/"}


class Lineage:
    """Sends the events of a pipeline's sealed epochs, and of its failure."""

    def __init__(self, spec: PipelineSpec, store: Store, namespace: str, send: Send) -> None:
        self._spec, self._store, self._namespace, self._send = spec, store, namespace, send
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="tidegate-lineage", daemon=True)
        self._thread.start()

    def epoch(self, report: EpochReport, seconds: float) -> None:
        """Hand over the events of a sealed epoch."""
        if report.manifest is None:
            return
        try:
            self._hand_over(events_of(self._spec, self._store, report.manifest, seconds, self._namespace))
        except (TidegateError, ValueError) as error:  # an address that no rule for names knows ends no epoch
            _log.warning("lineage_not_sent", why=str(error))

    def failed(self, error: TidegateError) -> None:
        """Hand over how the driver ended."""
        self._hand_over(failure_of(self._spec, error, self._namespace))

    def close(self, timeout: float) -> None:
        """Send what waits, for so many seconds at most, and end."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("lineage_dropped", why="nobody took the last events in time")

    def _hand_over(self, events: list[dict[str, Any]]) -> None:
        try:
            for event in events:
                self._waiting.put_nowait(json.dumps(event).encode())
        except queue.Full:
            _log.warning("lineage_dropped", why="the events before it are still waiting")

    def _run(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                self._send(body)
            except (OSError, ValueError) as error:
                _log.warning("lineage_not_sent", why=str(error))


def lineage_from_environment(environment: Mapping[str, str], spec: PipelineSpec, store: Store) -> Lineage | None:
    """Lineage to ``OPENLINEAGE_URL`` (``OPENLINEAGE_API_KEY``, ``OPENLINEAGE_NAMESPACE``); None unless that is set."""
    url = environment.get("OPENLINEAGE_URL")
    if not url or not url.startswith(("http://", "https://")):
        return None
    headers = {"Content-Type": "application/json"}
    if key := environment.get("OPENLINEAGE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    address = url.rstrip("/") + "/" + environment.get("OPENLINEAGE_ENDPOINT", "api/v1/lineage")

    def send(body: bytes) -> None:
        request = urllib.request.Request(address, body, headers, method="POST")  # noqa: S310 - http(s) only, see above
        with urllib.request.urlopen(request, timeout=_TIMEOUT):  # noqa: S310
            pass

    return Lineage(spec, store, environment.get("OPENLINEAGE_NAMESPACE", "tidegate"), send)
