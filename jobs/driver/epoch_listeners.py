"""Listeners of epochs and landings: progress, metrics, lineage, and one log line per epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError
from tidegate.jobs.driver.log_output import bind_log_context
from tidegate.jobs.driver.openlineage_events import create_lineage_sender
from tidegate.jobs.driver.otel_metrics import DriverMetrics, LandingMetrics, create_meter_provider
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.spec.pipeline import PipelineSpec

_log = structlog.get_logger("tidegate.driver")

# Seconds for each receiver at the end. What it has not taken by then is dropped.
FLUSH_TIMEOUT = 5.0

EpochListener = Callable[[EpochReport, float], None]


class EpochListeners:
    """Calls all listeners after each round of the loop, sealed or not, on the loop's thread.

    So a listener must not block: metrics and lineage are sent by threads of their own. The
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
        self._listeners: list[EpochListener] = [progress, _log_sealed_epoch]
        metrics, self._closers = open_metrics(spec.name, facts)
        if metrics is not None:
            self._listeners.append(metrics.record_epoch)
        self._lineage = create_lineage_sender(os.environ, spec, store)
        if self._lineage is not None:
            self._listeners.append(self._lineage.on_epoch)
            self._closers.append(partial(self._lineage.close, FLUSH_TIMEOUT))
        bind_log_context(pipeline=spec.name)

    def on_epoch(self, report: EpochReport, seconds: float) -> None:
        """Call every listener; an exception of one is passed on, and ends the calls."""
        for listener in self._listeners:
            listener(report, seconds)

    def on_failure(self, error: TidegateError) -> None:
        """Send the error that ends the driver as lineage. Metrics read it from the status."""
        if self._lineage is not None:
            self._lineage.on_failure(error)

    def close(self) -> None:
        """Send what is still queued, to each receiver for at most `FLUSH_TIMEOUT`; never raises."""
        close_receivers(self._closers)
        bind_log_context(pipeline=None, epoch=None, attempt=None)


def open_metrics(
    name: str, facts: Callable[[], Mapping[str, Any]]
) -> tuple[DriverMetrics | None, list[Callable[[], object]]]:
    """Return the metrics of a pipeline or job if the environment names a receiver, and their end.

    Args:
        name: of the pipeline or job.
        facts: returns the fields of the driver's status.
    """
    provider = create_meter_provider(os.environ, name)
    if provider is None:
        return None, []
    metrics = DriverMetrics(provider.get_meter("tidegate"), name, facts)
    return metrics, [lambda: provider.shutdown(FLUSH_TIMEOUT * 1e3)]


def close_receivers(closers: Iterable[Callable[[], object]]) -> None:
    """Send what is still queued; a failure is logged."""
    for close in closers:
        try:
            close()
        except Exception as error:  # OpenTelemetry's SDK raises bare exceptions
            _log.warning("last_words_not_sent", why=str(error))


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


def _log_sealed_epoch(report: EpochReport, seconds: float) -> None:
    manifest = report.manifest
    if manifest is None:
        return
    ids = {"epoch": manifest.slot, "attempt": manifest.attempt, "timeline": manifest.timeline}
    _log.info(
        "sealed", **ids, checkpoint=str(manifest.id), rows=report.rows, seconds=round(seconds, 3)
    )
    # From here on lines belong to the next epoch. Its attempt has no name before its move.
    bind_log_context(epoch=manifest.slot + 1, attempt=None)
