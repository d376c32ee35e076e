"""Who watches epochs and landings go by.

The caller's progress, metrics, lineage, and a line in the log per sealed epoch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
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

FLUSH_TIMEOUT = (
    5.0  # seconds for each receiver at the end; what it has not taken by then is dropped
)

EpochListener = Callable[[EpochReport, float], None]


class EpochListeners:
    """Called after each epoch, in the loop's thread; nothing here may hold it up."""

    def __init__(
        self,
        spec: PipelineSpec,
        store: Store,
        facts: Callable[[], Mapping[str, Any]],
        progress: EpochListener,
    ) -> None:
        self._watchers: list[EpochListener] = [progress, _log_sealed_epoch]
        self._closers: list[Callable[[], object]] = []
        provider = create_meter_provider(os.environ, spec.name)
        if provider is not None:
            self._watchers.append(
                DriverMetrics(provider.get_meter("tidegate"), spec.name, facts).record_epoch
            )
            self._closers.append(lambda: provider.shutdown(FLUSH_TIMEOUT * 1e3))
        self._lineage = create_lineage_sender(os.environ, spec, store)
        if self._lineage is not None:
            self._watchers.append(self._lineage.on_epoch)
            self._closers.append(partial(self._lineage.close, FLUSH_TIMEOUT))
        bind_log_context(pipeline=spec.name)

    def on_epoch(self, report: EpochReport, seconds: float) -> None:
        """Tell everybody."""
        for watcher in self._watchers:
            watcher(report, seconds)

    def on_failure(self, error: TidegateError) -> None:
        """Tell that the driver ends by an error; its state tells the metrics."""
        if self._lineage is not None:
            self._lineage.on_failure(error)

    def close(self) -> None:
        """Send what is still to be sent, to each receiver for at most `FLUSH_TIMEOUT`."""
        for close in self._closers:
            try:
                close()
            except Exception as error:  # the SDK raises bare ones
                _log.warning("last_words_not_sent", why=str(error))
        bind_log_context(pipeline=None, epoch=None, attempt=None)


@contextmanager
def measure_landing(pipeline: str, source: str) -> Iterator[LandingMetrics]:
    """What the landing of a source tells; its last word is whether it was stopped or failed."""
    from opentelemetry.metrics import NoOpMeterProvider

    provider = create_meter_provider(os.environ, f"{pipeline}.{source}")
    metrics = LandingMetrics(
        (provider or NoOpMeterProvider()).get_meter("tidegate"), pipeline, source
    )
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
    """Later lines carry the epoch that runs then, one beyond the sealed one.

    Its attempt begins with its move.
    """
    manifest = report.manifest
    if manifest is None:
        return
    own = {"epoch": manifest.slot, "attempt": manifest.attempt, "timeline": manifest.timeline}
    _log.info(
        "sealed", **own, checkpoint=str(manifest.id), rows=report.rows, seconds=round(seconds, 3)
    )
    bind_log_context(epoch=manifest.slot + 1, attempt=None)
