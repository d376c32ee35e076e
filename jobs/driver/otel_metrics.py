"""What driver and landing measure of themselves, by OpenTelemetry.

Made only when ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.

The names are a promise to dashboards and alerts (infra/deploy/grafana, infra/deploy/alerts.yaml).
Prometheus gets them from a collector, or from an OTLP-receiving Prometheus itself, with dots as
underscores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.time_units import TICK_MAX, TICK_MIN

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

METRICS: Final = {
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
    "tidegate.source.backlog": (
        "objects known behind the last planned slice; in the order of keys at most one"
    ),
    "tidegate.source.silent": (
        "how long a source has been without a word, once that is longer than"
        " supervision.silent_after"
    ),
    "tidegate.publish.duration": "the last publishing of a sink, waiting for it included",
    "tidegate.trouble": "1 while publishing is in trouble",
    "tidegate.loop.age": (
        "since the driver last came to the end of an epoch or found nothing to do (or its start)"
    ),
    "tidegate.driver.state": "1 for the state it is in, 0 for the others",
    "tidegate.driver.error": (
        "1 while it is in trouble of this class and code, 0 when it has got past it"
    ),
    "tidegate.landing.rows": "rows landed by this process",
    "tidegate.landing.batches": "batches landed by this process; those without rows land nothing",
    "tidegate.landing.restarts": "queries that failed and were started again",
    "tidegate.landing.batch.age": "since this process landed a batch (or its start)",
    "tidegate.landing.state": "1 for the state the landing is in, 0 for the others",
}
DRIVER_STATES: Final = (
    "starting",
    "running",
    "waiting",
    "draining",
    "stopped",
    "finished",
    "failed",
)
_SECONDS: Final = "s"
_ITEMS: Final = (
    "{item}"  # an annotation: a unit of "1" would become the suffix _ratio in Prometheus
)
_TICKS_PER_SECOND: Final = 1_000_000
_EXPORT_INTERVAL_MILLIS: Final = 10_000

_Value = tuple[float, dict[str, str]]  # and what stands on it beside the pipeline


class DriverMetrics:
    """Feeds a meter from the driver's reports.

    Args:
        meter: of the SDK.
        pipeline: stands on every measurement.
        facts: what the driver's status knows now.
        clock: pipeline time.
        seconds: monotonic.
    """

    def __init__(
        self,
        meter: Meter,
        pipeline: str,
        facts: Callable[[], Mapping[str, Any]],
        clock: Clock = SYSTEM_CLOCK,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = {"pipeline": pipeline}
        self._facts, self._clock, self._seconds = facts, clock, seconds
        self._sealed_at = self._turned_at = seconds()
        self._errors: set[tuple[str, str]] = set()
        self._report: EpochReport | None = None
        self._buffered = 0

        def create_counter(name: str, unit: str = _ITEMS) -> Any:
            return meter.create_counter(name, unit, METRICS[name])

        self._epochs, self._lost = (
            create_counter("tidegate.epochs"),
            create_counter("tidegate.epochs.lost"),
        )
        self._rows, self._late = (
            create_counter("tidegate.rows"),
            create_counter("tidegate.rows.late"),
        )
        self._windows, self._barriers = (
            create_counter("tidegate.windows.emitted"),
            create_counter("tidegate.barriers"),
        )
        durations = ("tidegate.epoch.duration", "tidegate.step.duration")
        self._epoch_seconds, self._step_seconds = (
            meter.create_histogram(n, _SECONDS, METRICS[n]) for n in durations
        )
        for name, unit, read in self._define_gauges():
            _register_gauge(meter, self._own, name, unit, read)

    def record_epoch(self, report: EpochReport, seconds: float) -> None:
        """Count one turn of the loop."""
        self._report, self._turned_at = report, self._seconds()
        if report.lost:
            self._lost.add(1, self._own)
        if report.manifest is None:
            return
        self._sealed_at = self._seconds()
        self._epochs.add(1, self._own)
        self._epoch_seconds.record(seconds, self._own)
        for step, took in report.manifest.timings.items():
            self._step_seconds.record(took, {**self._own, "step": step})
        self._count_rows(report.manifest.epoch_counters)
        for barrier in report.decision.barriers:
            self._barriers.add(1, {**self._own, "outcome": str(barrier.outcome.value)})

    def _count_rows(self, epoch: EpochCounters) -> None:
        self._buffered = epoch.retained
        for source, places in epoch.per_source.items():
            for place, rows in places.items():
                if ":" not in place:  # lateness per window stands in late_by_output
                    self._rows.add(rows, {**self._own, "source": source, "disposition": place})
        for output, rows in epoch.late_by_output.items():
            self._late.add(rows, {**self._own, "output": output})
        for window, rows in epoch.windows.items():
            self._windows.add(rows, {**self._own, "window": window})

    def _define_gauges(self) -> list[tuple[str, str, Callable[[], Iterable[_Value]]]]:
        return [
            (
                "tidegate.driver.state",
                _ITEMS,
                lambda: _encode_state(DRIVER_STATES, self._facts()["state"]),
            ),
            ("tidegate.driver.error", _ITEMS, self._read_errors),
            ("tidegate.loop.age", _SECONDS, lambda: [(self._seconds() - self._turned_at, {})]),
            ("tidegate.frontier.lag", _SECONDS, self._read_frontier_lag),
            ("tidegate.member.frontier.lag", _SECONDS, self._read_member_lags),
            (
                "tidegate.barriers.blocked",
                _ITEMS,
                lambda: [(len(self._report.decision.blocked) if self._report else 0, {})],
            ),
            (
                "tidegate.checkpoint.age",
                _SECONDS,
                lambda: [(self._seconds() - self._sealed_at, {})],
            ),
            ("tidegate.buffered.rows", _ITEMS, lambda: [(self._buffered, {})]),
            ("tidegate.unpublished", _ITEMS, lambda: [(self._facts().get("unpublished", 0), {})]),
            ("tidegate.sink.lag", _ITEMS, self._make_fact_reader("sinks", "sink")),
            ("tidegate.publish.duration", _SECONDS, self._make_fact_reader("published_in", "sink")),
            ("tidegate.source.lag", _ITEMS, self._make_fact_reader("lag", "member")),
            ("tidegate.source.backlog", _ITEMS, self._make_fact_reader("backlog", "member")),
            (
                "tidegate.source.silent",
                _SECONDS,
                lambda: [
                    (t / _TICKS_PER_SECOND, at)
                    for t, at in self._make_fact_reader("silent", "source")()
                ],
            ),
            ("tidegate.late_uploads", _ITEMS, self._make_fact_reader("late_uploads", "source")),
            (
                "tidegate.trouble",
                _ITEMS,
                lambda: [(int(self._facts().get("trouble") is not None), {})],
            ),
        ]

    def _make_fact_reader(self, fact: str, label: str) -> Callable[[], list[_Value]]:
        """A fact that is a mapping of numbers, by the names in it."""
        return lambda: [
            (value, {label: name}) for name, value in self._facts().get(fact, {}).items()
        ]

    def _read_errors(self) -> Iterable[_Value]:
        """What was once is told as over: a series that only ends looks the same for minutes."""
        found = (self._facts().get("error"), self._facts().get("trouble"))
        now = {(str(error["class"]), str(error["code"])) for error in found if error}
        self._errors |= now
        return [
            (int(one in now), {"class": one[0], "code": one[1]}) for one in sorted(self._errors)
        ]

    def _read_frontier_lag(self) -> Iterable[_Value]:
        return (
            []
            if self._report is None
            else self._compute_lags({"": self._report.decision.frontier_after}, "")
        )

    def _read_member_lags(self) -> Iterable[_Value]:
        if self._report is None:
            return []
        sources = self._report.decision.after.get("sources", {})
        return self._compute_lags(
            {m: known["frontier"] for s in sources.values() for m, known in s["inputs"].items()},
            "member",
        )

    def _compute_lags(self, frontiers: Mapping[str, int | None], label: str) -> list[_Value]:
        """No value before the first frontier, and none after the last."""
        now = self._clock.wall_ticks()
        real = {
            name: f for name, f in frontiers.items() if f is not None and TICK_MIN < f < TICK_MAX
        }
        return [
            ((now - f) / _TICKS_PER_SECOND, {label: name} if label else {})
            for name, f in real.items()
        ]


class LandingMetrics:
    """Feeds a meter from a landing query.

    Args:
        meter: of the SDK.
        pipeline: stands on every measurement, and
        source: so does this.
        seconds: monotonic.

    Attributes:
        state: running, stopped or failed.
    """

    def __init__(
        self,
        meter: Meter,
        pipeline: str,
        source: str,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = {"pipeline": pipeline, "source": source}
        self._seconds, self._landed_at = seconds, seconds()
        self.state = "running"
        names = ("tidegate.landing.rows", "tidegate.landing.batches", "tidegate.landing.restarts")
        self._rows, self._batches, self._restarts = (
            meter.create_counter(name, _ITEMS, METRICS[name]) for name in names
        )
        _register_gauge(
            meter,
            self._own,
            "tidegate.landing.batch.age",
            _SECONDS,
            lambda: [(self._seconds() - self._landed_at, {})],
        )
        states = ("running", "stopped", "failed")
        _register_gauge(
            meter,
            self._own,
            "tidegate.landing.state",
            _ITEMS,
            lambda: _encode_state(states, self.state),
        )

    def record_batch(self, rows: int) -> None:
        """A batch lies in the bucket."""
        self._landed_at = self._seconds()
        self._rows.add(rows, self._own)
        self._batches.add(1, self._own)

    def record_restart(self) -> None:
        """A query failed and is started again."""
        self._restarts.add(1, self._own)


def _register_gauge(
    meter: Meter, own: Mapping[str, str], name: str, unit: str, read: Callable[[], Iterable[_Value]]
) -> None:
    from opentelemetry.metrics import Observation

    def observe_values(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, {**own, **more}) for value, more in read()]

    meter.create_observable_gauge(name, [observe_values], unit, METRICS[name])


def _encode_state(states: Iterable[str], now: str) -> list[_Value]:
    """All states, so that the one that was is told as over."""
    return [(int(state == now), {"state": state}) for state in states]


def create_meter_provider(environment: Mapping[str, str], instance: str) -> MeterProvider | None:
    """Sends by OTLP over HTTP every ten seconds; None unless an endpoint is named.

    Shut it down at the end.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    if (
        not any(environment.get(name) for name in names)
        or environment.get("OTEL_SDK_DISABLED") == "true"
    ):
        return None
    # Late: a second of imports that most drivers need not pay.
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
