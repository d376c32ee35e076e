"""OpenTelemetry metrics of the driver and of a landing, if the environment names an OTLP endpoint.

Dashboards and alerts depend on the names (`infra/deploy/grafana`, `infra/deploy/alerts.yaml`).
Prometheus receives them by OTLP, directly or from a collector, with underscores for dots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tidegate.checkpoints.batch_notes import BatchNotes, QueryPosition
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.row_counts import ROW_EQUATION, ROW_NOTES, RowCounts
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.json_types import JsonObject, JsonView, read_data_file
from tidegate.time_units import TICK_MAX, TICK_MIN

from .status_reporter import read_member_frontiers

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Counter, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

METRICS: dict[str, JsonObject] = read_data_file(__package__, "metrics.toml")
"""Name of a metric -> its unit and description."""
DRIVER_STATES = (
    "starting", "running", "waiting", "draining", "stopped", "finished", "failed",
)  # fmt: skip
_DRIVER_COUNTERS = (
    *("tidegate.epochs", "tidegate.epochs.lost", "tidegate.barriers", "tidegate.windows.emitted"),
    *("tidegate.windows.overflowed", "tidegate.rows", "tidegate.rows.late"),
    *("tidegate.query.rows", "tidegate.query.dropped"),
)
_DRIVER_HISTOGRAMS = ("tidegate.epoch.duration", "tidegate.step.duration")
_LANDING_STATES = ("running", "stopped", "failed")
_TICKS_PER_SECOND = 1_000_000
_EXPORT_INTERVAL_MILLIS = 10_000

_Value = tuple[float, dict[str, str]]
"""A measurement and its attributes, without the pipeline."""
_ReadValues = Callable[[], Iterable[_Value]]


class DriverMetrics:
    """Feeds a meter from the reports of epochs and from the driver's status.

    Args:
        meter: of the OpenTelemetry SDK.
        pipeline: an attribute of every measurement.
        facts: returns the fields of the driver's status.
        clock: wall clock, for lags of frontiers.
        seconds: monotonic clock, for ages.
    """

    def __init__(
        self,
        meter: Meter,
        pipeline: str,
        facts: Callable[[], JsonView],
        clock: Clock = SYSTEM_CLOCK,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attributes = {"pipeline": pipeline}
        self._facts, self._clock, self._seconds = facts, clock, seconds
        # Ages are measured from here until the first epoch: a driver that never gets that far has
        # to show as well.
        self._sealed_at = self._loop_ended_at = seconds()
        self._seen_errors: set[tuple[str, str]] = set()  # class and code
        self._report: EpochReport | None = None
        self._frontier: int | None = None
        self._queries: dict[str, QueryPosition] = {}
        self._buffered = 0

        self._counters = _create_counters(meter, *_DRIVER_COUNTERS)
        self._histograms = {
            name: meter.create_histogram(name, **METRICS[name]) for name in _DRIVER_HISTOGRAMS
        }
        for name, read in self._define_gauges().items():
            _register_gauge(meter, self._attributes, name, read)

    def record_epoch(self, report: EpochReport, seconds: float) -> None:
        """Note the end of one round of the loop: `tidegate.loop.age` starts again from 0.

        A lost slot is counted. Only a sealed epoch is counted, with its seconds, steps, rows and
        barriers.
        """
        self._report, self._loop_ended_at = report, self._seconds()
        if report.lost:
            self._count("tidegate.epochs.lost", 1)
        if report.manifest is not None:
            self.record_sealed(report.manifest, seconds)
            for barrier in report.decision.barriers:
                if not barrier.tardy:  # such a row is about a barrier that closed before
                    self._count("tidegate.barriers", 1, outcome=barrier.outcome.value)
        self._frontier = report.decision.frontier_after

    def record_sealed(self, manifest: Manifest, seconds: float) -> None:
        """Count a sealed epoch, or a sealed batch of a job: seconds, steps and rows."""
        self._sealed_at = self._loop_ended_at = self._seconds()
        self._frontier = manifest.frontier_after
        self._count("tidegate.epochs", 1)
        self._histograms["tidegate.epoch.duration"].record(seconds, self._attributes)
        for step, took in manifest.timings.items():
            labels = {**self._attributes, "step": step}
            self._histograms["tidegate.step.duration"].record(took, labels)
        self._count_rows(manifest.epoch_counters)
        notes = BatchNotes.from_manifest(manifest)
        if notes is not None:
            self._queries = notes.queries
            query, at = notes.query, notes.queries[notes.query]
            for source in at.sources:
                self._count("tidegate.query.rows", source.rows, query=query, source=source.name)
            self._count("tidegate.query.dropped", at.dropped, query=query)

    def note_turn(self) -> None:
        """Note that there is nothing to do: `tidegate.loop.age` starts again from 0."""
        self._loop_ended_at = self._seconds()

    def _count(self, counter: str, number: int, **labels: str) -> None:
        self._counters[counter].add(number, {**self._attributes, **labels})

    def _count_rows(self, epoch: EpochCounters) -> None:
        self._buffered = epoch.retained
        for source, own in epoch.per_source.items():
            counts = RowCounts.of_source(own)
            count_rows = partial(self._count, "tidegate.rows", source=source)
            for disposition in (*ROW_EQUATION, *ROW_NOTES):
                if counts[disposition]:
                    count_rows(counts[disposition], disposition=disposition)
            for stream, rows in counts.count_stream_rejections().items():
                count_rows(rows, disposition="stream_rejected", stream=stream)
        late = RowCounts.of_sources(epoch.per_source).late_by_output
        for output, rows in late.items():
            self._count("tidegate.rows.late", rows, output=output)
        for window, rows in epoch.windows.items():
            self._count("tidegate.windows.emitted", rows, window=window)
        for window, rows in epoch.overflowed.items():
            self._count("tidegate.windows.overflowed", rows, window=window)

    def _define_gauges(self) -> dict[str, _ReadValues]:
        facts, read_fact = self._facts, self._make_fact_reader
        return {
            "tidegate.driver.state": lambda: _encode_state(DRIVER_STATES, facts()["state"]),
            "tidegate.driver.error": self._read_errors,
            "tidegate.loop.age": lambda: [(self._seconds() - self._loop_ended_at, {})],
            "tidegate.checkpoint.age": lambda: [(self._seconds() - self._sealed_at, {})],
            "tidegate.frontier.lag": lambda: self._compute_lags({"": self._frontier}, ""),
            "tidegate.member.frontier.lag": lambda: self._compute_lags(
                read_member_frontiers(self._report.decision) if self._report else {}, "member"
            ),
            "tidegate.barriers.blocked": lambda: [
                (len(self._report.decision.blocked) if self._report else 0, {})
            ],
            "tidegate.buffered.rows": lambda: [(self._buffered, {})],
            "tidegate.unpublished": lambda: [(facts().get("unpublished", 0), {})],
            "tidegate.sink.lag": read_fact("sinks", "sink"),
            "tidegate.publish.duration": read_fact("published_in", "sink"),
            "tidegate.source.lag": read_fact("lag", "member"),
            "tidegate.source.backlog": read_fact("backlog", "member"),
            "tidegate.source.silent": read_fact("silent", "source", 1 / _TICKS_PER_SECOND),
            "tidegate.source.stale": read_fact("stale", "source"),
            "tidegate.late_uploads": read_fact("late_uploads", "source"),
            "tidegate.query.backlog": lambda: [
                (source.backlog, {"query": name, "source": source.name})
                for name, at in self._queries.items()
                for source in at.sources
                if source.backlog is not None
            ],
            "tidegate.query.state.rows": self._make_query_reader("state_rows"),
            "tidegate.query.state.bytes": self._make_query_reader("state_bytes"),
            "tidegate.query.watermark.lag": lambda: self._compute_lags(
                {name: at.watermark for name, at in self._queries.items()}, "query"
            ),
            "tidegate.trouble": lambda: [(int(facts().get("trouble") is not None), {})],
        }

    def _make_fact_reader(self, fact: str, label: str, factor: float = 1) -> _ReadValues:
        """Return a reader of a fact that maps names to numbers; `label` is the names' attribute."""
        return lambda: [
            (factor * value, {label: name}) for name, value in self._facts().get(fact, {}).items()
        ]

    def _make_query_reader(self, fact: str) -> _ReadValues:
        return lambda: [(getattr(at, fact), {"query": name}) for name, at in self._queries.items()]

    def _read_errors(self) -> Iterable[_Value]:
        # An error that is over is reported as 0: a series that ends looks unchanged for minutes.
        facts = self._facts()
        current = {
            (str(error["class"]), str(error["code"]))
            for error in (facts.get("error"), facts.get("trouble"))
            if error
        }
        self._seen_errors |= current
        return [
            (int((kind, code) in current), {"class": kind, "code": code})
            for kind, code in sorted(self._seen_errors)
        ]

    def _compute_lags(self, frontiers: Mapping[str, int | None], label: str) -> list[_Value]:
        """Return no value before the first frontier, and none when the member has ended."""
        now = self._clock.wall_ticks()
        return [
            ((now - frontier) / _TICKS_PER_SECOND, {label: name} if label else {})
            for name, frontier in frontiers.items()
            if frontier is not None and TICK_MIN < frontier < TICK_MAX
        ]


class LandingMetrics:
    """Feeds a meter from a landing query.

    Args:
        meter: of the OpenTelemetry SDK.
        pipeline, source: attributes of every measurement.

    Attributes:
        state: running, stopped or failed.
    """

    def __init__(self, meter: Meter, pipeline: str, source: str) -> None:
        self._attributes = {"pipeline": pipeline, "source": source}
        self._landed_at = time.monotonic()
        self.state = "running"
        names = ("tidegate.landing.rows", "tidegate.landing.batches", "tidegate.landing.restarts")
        self._rows, self._batches, self._restarts = _create_counters(meter, *names).values()
        register = partial(_register_gauge, meter, self._attributes)
        register("tidegate.landing.batch.age", lambda: [(time.monotonic() - self._landed_at, {})])
        register("tidegate.landing.state", lambda: _encode_state(_LANDING_STATES, self.state))

    def record_batch(self, rows: int) -> None:
        """Count a batch that was written; its age starts again from 0."""
        self._landed_at = time.monotonic()
        self._rows.add(rows, self._attributes)
        self._batches.add(1, self._attributes)

    def record_restart(self) -> None:
        """Count a query that failed and is started again."""
        self._restarts.add(1, self._attributes)


def _create_counters(meter: Meter, *names: str) -> dict[str, Counter]:
    return {name: meter.create_counter(name, **METRICS[name]) for name in names}


def _register_gauge(
    meter: Meter, attributes: Mapping[str, str], name: str, read: _ReadValues
) -> None:
    from opentelemetry.metrics import Observation

    def observe_values(_options: CallbackOptions) -> Iterable[Observation]:
        """Return the values of this moment; the exporter asks for them."""
        return [Observation(value, {**attributes, **more}) for value, more in read()]

    meter.create_observable_gauge(name, [observe_values], **METRICS[name])


def _encode_state(states: Iterable[str], now: str) -> list[_Value]:
    """Return 1 for the current state and 0 for all others, so that the end of a state shows."""
    return [(int(state == now), {"state": state}) for state in states]


def create_meter_provider(environment: Mapping[str, str], instance: str) -> MeterProvider | None:
    """Return a provider that sends by OTLP over HTTP every ten seconds; None without an endpoint.

    ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`` names it. None also
    if ``OTEL_SDK_DISABLED`` is ``true``. The caller shuts the provider down at the end.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    if not any(map(environment.get, names)) or environment.get("OTEL_SDK_DISABLED") == "true":
        return None
    # Late: these imports take a second, and most drivers do not need them.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(), export_interval_millis=_EXPORT_INTERVAL_MILLIS
    )
    return MeterProvider(
        [reader],
        resource=Resource.create({"service.name": "tidegate", "service.instance.id": instance}),
    )
