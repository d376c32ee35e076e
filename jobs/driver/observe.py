"""Who watches epochs and landings go by: the caller's progress, metrics, lineage, and a line in the log per sealed epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from tidegate.checkpoints.store import Store
from tidegate.jobs.driver.lineage import lineage_from_environment
from tidegate.jobs.driver.logs import stand
from tidegate.jobs.driver.metrics import DriverMetrics, LandingMetrics, provider_from_environment
from tidegate.jobs.engine.epoch import EpochReport
from tidegate.jobs.spec.errors import TidegateError
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["LAST_WORDS", "Observers", "observed_landing"]

_log = structlog.get_logger("tidegate.driver")

LAST_WORDS = 5.0  # seconds for each receiver at the end; what it has not taken by then is dropped

Watcher = Callable[[EpochReport, float], None]


class Observers:
    """Called after each epoch, in the loop's thread; nothing here may hold it up."""

    def __init__(self, spec: PipelineSpec, store: Store, facts: Callable[[], Mapping[str, Any]], progress: Watcher) -> None:
        self._watchers: list[Watcher] = [progress, _tell]
        self._closers: list[Callable[[], object]] = []
        provider = provider_from_environment(os.environ, spec.name)
        if provider is not None:
            self._watchers.append(DriverMetrics(provider.get_meter("tidegate"), spec.name, facts).epoch)
            self._closers.append(lambda: provider.shutdown(LAST_WORDS * 1e3))
        self._lineage = lineage_from_environment(os.environ, spec, store)
        if self._lineage is not None:
            self._watchers.append(self._lineage.epoch)
            self._closers.append(partial(self._lineage.close, LAST_WORDS))
        stand(pipeline=spec.name)

    def epoch(self, report: EpochReport, seconds: float) -> None:
        """Tell everybody."""
        for watcher in self._watchers:
            watcher(report, seconds)

    def failed(self, error: TidegateError) -> None:
        """Tell that the driver ends by an error; its state tells the metrics."""
        if self._lineage is not None:
            self._lineage.failed(error)

    def close(self) -> None:
        """Send what is still to be sent, to each receiver for at most `LAST_WORDS`."""
        for close in self._closers:
            try:
                close()
            except Exception as error:  # the SDK raises bare ones
                _log.warning("last_words_not_sent", why=str(error))
        stand(pipeline=None, epoch=None, attempt=None)


@contextmanager
def observed_landing(pipeline: str, source: str) -> Iterator[LandingMetrics]:
    """What the landing of a source tells; its last word is whether it was stopped or failed."""
    from opentelemetry.metrics import NoOpMeterProvider

    provider = provider_from_environment(os.environ, f"{pipeline}.{source}")
    metrics = LandingMetrics((provider or NoOpMeterProvider()).get_meter("tidegate"), pipeline, source)
    try:
        yield metrics
        metrics.state = "stopped"
    except BaseException:
        metrics.state = "failed"
        raise
    finally:
        if provider is not None:
            provider.shutdown(LAST_WORDS * 1e3)


def _tell(report: EpochReport, seconds: float) -> None:
    """Later lines carry the epoch that runs then, one beyond the sealed one; its attempt begins with its move."""
    manifest = report.manifest
    if manifest is None:
        return
    own = {"epoch": manifest.slot, "attempt": manifest.attempt, "timeline": manifest.timeline}
    _log.info("sealed", **own, checkpoint=str(manifest.id), rows=report.rows, seconds=round(seconds, 3))
    stand(epoch=manifest.slot + 1, attempt=None)
