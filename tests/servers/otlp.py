"""A collector: takes metrics by OTLP over HTTP, and says what Prometheus would make of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

_UNITS = {"s": "_seconds"}  # an annotation in braces is not a unit


class Sample(NamedTuple):
    """One value as it came.

    The attributes of its resource and its own, and a number (the count of a histogram).
    """

    name: str
    attributes: dict[str, str]
    value: float


class Collector:
    """What came so far.

    Attributes:
        url: for ``OTEL_EXPORTER_OTLP_ENDPOINT``.
        requests: as they came.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[ExportMetricsServiceRequest] = []

    @property
    def samples(self) -> list[Sample]:
        """Oldest first, under the names Prometheus gives to series."""
        return [
            sample
            for request in list(self.requests)
            for metric in _metrics(request)
            for sample in _samples(metric)
        ]

    @property
    def names(self) -> set[str]:
        """Of all series."""
        return {sample.name for sample in self.samples}

    def last(self, name: str, **attributes: str) -> float | None:
        """The newest value of a series with these attributes among others."""
        found = (
            s.value
            for s in reversed(self.samples)
            if s.name == name and attributes.items() <= s.attributes.items()
        )
        return next(found, None)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics", self.path
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _metrics(request: ExportMetricsServiceRequest) -> Iterator[Any]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def _samples(metric: Any) -> Iterator[Sample]:
    flat = metric.name.replace(".", "_")
    unit = _UNITS.get(metric.unit, "")
    name = flat if flat.endswith(unit) else flat + unit
    kind = metric.WhichOneof("data")
    total = "_total" if kind == "sum" and metric.sum.is_monotonic else ""
    for point in getattr(metric, kind).data_points:
        attributes = {a.key: a.value.string_value for a in point.attributes}
        if kind in ("histogram", "exponential_histogram"):
            yield from (
                Sample(f"{name}_{part}", attributes, float(point.count))
                for part in ("bucket", "sum", "count")
            )
        else:
            yield Sample(name + total, attributes, point.as_double or float(point.as_int))
