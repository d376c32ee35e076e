"""OpenLineage: one finished run per sealed epoch, sent to ``OPENLINEAGE_URL`` when that is set.

A side channel: events are sent by a thread of their own, and dropped with a word in the log when nobody takes them.
"""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog

from tidegate import __version__
from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.engine.epoch import EpochReport
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.time import format_instant

__all__ = ["Lineage", "event_of", "lineage_from_environment"]

_log = structlog.get_logger("tidegate.driver")

_SCHEMA: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/definitions/RunEvent"
_STATISTICS: Final = "https://openlineage.io/spec/facets/1-0-2/OutputStatisticsOutputDatasetFacet.json"
_PRODUCER: Final = f"urn:tidegate:{__version__}"
_WAITING: Final = 100  # events; more than that and nobody is listening
_TIMEOUT: Final = 5.0  # seconds

Send = Callable[[bytes], None]


def event_of(spec: PipelineSpec, manifest: Manifest, namespace: str) -> dict[str, Any]:
    """The run of one epoch: what it read, which tables it added to. The run's id follows from uid and checkpoint."""
    outputs = [
        {
            "namespace": namespace,
            "name": f"{spec.outputs.namespace or spec.name}.{table}",
            "outputFacets": {
                "outputStatistics": {
                    "_producer": _PRODUCER,
                    "_schemaURL": _STATISTICS,
                    "rowCount": sum(file.rows for file in files),
                    "size": sum(file.bytes for file in files),
                }
            },
        }
        for table, files in manifest.files.items()
    ]
    return {
        "eventType": "COMPLETE",
        "eventTime": format_instant(manifest.created_at),
        "run": {"runId": str(uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{manifest.uid}:{manifest.id}"))},
        "job": {"namespace": namespace, "name": spec.name},
        "inputs": [{"namespace": namespace, "name": _place(spec, name)} for name in spec.sources],
        "outputs": outputs,
        "producer": _PRODUCER,
        "schemaURL": _SCHEMA,
    }


def _place(spec: PipelineSpec, name: str) -> str:
    source = spec.sources[name]
    return f"kafka/{source.kafka.topic}" if source.kafka is not None else source.path.strip("/")


class Lineage:
    """Sends an event per sealed epoch."""

    def __init__(self, spec: PipelineSpec, namespace: str, send: Send) -> None:
        self._spec, self._namespace, self._send = spec, namespace, send
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="tidegate-lineage", daemon=True)
        self._thread.start()

    def epoch(self, report: EpochReport, _seconds: float) -> None:
        """Hand over the event of a sealed epoch."""
        if report.manifest is None:
            return
        try:
            self._waiting.put_nowait(json.dumps(event_of(self._spec, report.manifest, self._namespace)).encode())
        except queue.Full:
            _log.warning("lineage_dropped", checkpoint=str(report.manifest.id), why="the events before it are still waiting")

    def close(self, timeout: float) -> None:
        """Send what waits, for so many seconds at most, and end."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("lineage_dropped", why="nobody took the last events in time")

    def _run(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                self._send(body)
            except (OSError, ValueError) as error:
                _log.warning("lineage_not_sent", why=str(error))


def lineage_from_environment(environment: Mapping[str, str], spec: PipelineSpec) -> Lineage | None:
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

    return Lineage(spec, environment.get("OPENLINEAGE_NAMESPACE", "tidegate"), send)
