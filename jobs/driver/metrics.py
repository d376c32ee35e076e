"""What the driver measures of itself, as OpenTelemetry metrics; made only when ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.

The names are a promise to dashboards and alerts (infra/deploy/grafana, infra/deploy/alerts.yaml). Prometheus gets them from a
collector, or from an OTLP-receiving Prometheus itself, with dots as underscores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.jobs.engine.epoch import EpochReport
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

__all__ = ["NAMES", "DriverMetrics", "metrics_from_environment"]

NAMES: Final = {
    "tidegate.epochs": "epochs sealed by this driver",
    "tidegate.epochs.lost": "epochs whose slot another driver or a restore filled",
    "tidegate.epoch.duration": "from plan to sealed",
    "tidegate.step.duration": "one step of an epoch; `seal_before` is the seal of the epoch before",
    "tidegate.rows": "rows by disposition and source",
    "tidegate.rows.late": "late rows by output",
    "tidegate.windows.emitted": "window results by window, revisions included",
    "tidegate.barriers": "closed barriers by outcome",
    "tidegate.barriers.blocked": "members standing at an open barrier",
    "tidegate.frontier.lag": "how far the output frontier is behind the clock",
    "tidegate.member.frontier.lag": "the same, per member",
    "tidegate.checkpoint.age": "since the newest checkpoint of this driver (or its start)",
    "tidegate.buffered.rows": "rows in the order buffer",
    "tidegate.unpublished": "epochs sealed but not in the tables",
    "tidegate.sink.lag": "epochs that a sink has not applied",
    "tidegate.source.lag": "messages of a partition behind the last planned slice",
    "tidegate.late_uploads": "objects found behind a greater name, by source",
    "tidegate.trouble": "1 while publishing is in trouble",
}
_SECONDS: Final = "s"
_ITEMS: Final = "{item}"  # an annotation: a unit of "1" would become the suffix _ratio in Prometheus
_TICKS: Final = 1_000_000
_EVERY_MILLIS: Final = 10_000


class DriverMetrics:
    """Feeds a meter from the driver's reports.

    Args:
        meter: of the SDK.
        pipeline: stands on every measurement.
        beside: what the status knows beside the epochs (unpublished, sinks, lag, ...).
        clock: pipeline time.
        seconds: monotonic.
    """

    def __init__(
        self,
        meter: Meter,
        pipeline: str,
        beside: Callable[[], Mapping[str, Any]],
        clock: Clock = SYSTEM_CLOCK,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = {"pipeline": pipeline}
        self._beside, self._clock, self._seconds = beside, clock, seconds
        self._sealed_at = seconds()
        self._report: EpochReport | None = None
        self._buffered = 0

        def counter(name: str, unit: str = _ITEMS) -> Any:
            return meter.create_counter(name, unit, NAMES[name])

        self._epochs, self._lost = counter("tidegate.epochs"), counter("tidegate.epochs.lost")
        self._rows, self._late = counter("tidegate.rows"), counter("tidegate.rows.late")
        self._windows, self._barriers = counter("tidegate.windows.emitted"), counter("tidegate.barriers")
        durations = ("tidegate.epoch.duration", "tidegate.step.duration")
        self._epoch_seconds, self._step_seconds = (meter.create_histogram(n, _SECONDS, NAMES[n]) for n in durations)
        for name, unit, read in self._gauges():
            meter.create_observable_gauge(name, [self._observer(read)], unit, NAMES[name])

    def epoch(self, report: EpochReport, seconds: float) -> None:
        """Count one turn of the loop."""
        self._report = report
        if report.lost:
            self._lost.add(1, self._own)
        if report.manifest is None:
            return
        self._sealed_at = self._seconds()
        self._epochs.add(1, self._own)
        self._epoch_seconds.record(seconds, self._own)
        for step, took in report.manifest.timings.items():
            self._step_seconds.record(took, {**self._own, "step": step})
        self._count(report.manifest.notes["epoch"])
        for barrier in report.decision.barriers:
            self._barriers.add(1, {**self._own, "outcome": str(barrier.outcome.value)})

    def _count(self, epoch: Mapping[str, Any]) -> None:
        self._buffered = epoch["retained"]
        for source, places in epoch["per_source"].items():
            for place, rows in places.items():
                if ":" not in place:  # lateness per window stands in late_by_output
                    self._rows.add(rows, {**self._own, "source": source, "disposition": place})
        for output, rows in epoch["late_by_output"].items():
            self._late.add(rows, {**self._own, "output": output})
        for window, rows in epoch["windows"].items():
            self._windows.add(rows, {**self._own, "window": window})

    def _gauges(self) -> list[tuple[str, str, Callable[[], Iterable[tuple[float, dict[str, str]]]]]]:
        facts = self._beside
        return [
            ("tidegate.frontier.lag", _SECONDS, self._frontier),
            ("tidegate.member.frontier.lag", _SECONDS, self._members),
            ("tidegate.barriers.blocked", _ITEMS, lambda: [(len(self._report.decision.blocked) if self._report else 0, {})]),
            ("tidegate.checkpoint.age", _SECONDS, lambda: [(self._seconds() - self._sealed_at, {})]),
            ("tidegate.buffered.rows", _ITEMS, lambda: [(self._buffered, {})]),
            ("tidegate.unpublished", _ITEMS, lambda: [(facts()["unpublished"], {})]),
            ("tidegate.sink.lag", _ITEMS, lambda: [(n, {"sink": s}) for s, n in facts().get("sinks", {}).items()]),
            ("tidegate.source.lag", _ITEMS, lambda: [(n, {"member": m}) for m, n in facts().get("lag", {}).items()]),
            ("tidegate.late_uploads", _ITEMS, lambda: [(n, {"source": s}) for s, n in facts().get("late_uploads", {}).items()]),
            ("tidegate.trouble", _ITEMS, lambda: [(int(facts().get("trouble") is not None), {})]),
        ]

    def _observer(
        self, read: Callable[[], Iterable[tuple[float, dict[str, str]]]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        return lambda _options: [Observation(value, {**self._own, **more}) for value, more in read()]

    def _frontier(self) -> Iterable[tuple[float, dict[str, str]]]:
        return [] if self._report is None else self._behind({"": self._report.decision.frontier_after}, "")

    def _members(self) -> Iterable[tuple[float, dict[str, str]]]:
        if self._report is None:
            return []
        sources = self._report.decision.after.get("sources", {})
        return self._behind({m: known["frontier"] for s in sources.values() for m, known in s["inputs"].items()}, "member")

    def _behind(self, frontiers: Mapping[str, int | None], label: str) -> list[tuple[float, dict[str, str]]]:
        """No value before the first frontier, and none after the last."""
        now = self._clock.ticks()
        real = {name: f for name, f in frontiers.items() if f is not None and TICK_MIN < f < TICK_MAX}
        return [((now - f) / _TICKS, {label: name} if label else {}) for name, f in real.items()]


def metrics_from_environment(
    environment: Mapping[str, str], pipeline: str, beside: Callable[[], Mapping[str, Any]]
) -> tuple[DriverMetrics, MeterProvider] | None:
    """Metrics sent by OTLP over HTTP every ten seconds; None unless an endpoint is named. Shut the provider down at the end."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    if not any(environment.get(name) for name in names) or environment.get("OTEL_SDK_DISABLED") == "true":
        return None
    # Late: a second of imports that most drivers need not pay.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    reader = PeriodicExportingMetricReader(OTLPMetricExporter(), export_interval_millis=_EVERY_MILLIS)
    resource = Resource.create({"service.name": "tidegate", "service.instance.id": pipeline})
    provider = MeterProvider([reader], resource=resource)
    return DriverMetrics(provider.get_meter("tidegate"), pipeline, beside), provider
