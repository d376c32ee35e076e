"""What the Airflow side measures, sent by Airflow's own metrics.

The metrics go where the site's `[metrics]` settings send Airflow's, under its prefix. The pipeline
is in the tags: OpenTelemetry, Datadog and StatsD with InfluxDB tags have them, plain StatsD has
none. Triggers call these functions in the triggerer's event loop, so they only record values.
"""

from __future__ import annotations

from typing import Final

from airflow.sdk.observability import stats

from tidegate.checkpoints.pipeline_overview import PipelineState
from tidegate.operators.liveness import LivenessSample

METRIC_DESCRIPTIONS: Final = {
    "tidegate.stream.watched": "1 while a trigger of this triggerer watches the stream",
    "tidegate.stream.looks": "looks at lease and status that the store answered",
    "tidegate.stream.looks.unanswered": "looks that it did not",
    "tidegate.stream.heartbeat.age": (
        "seconds the lease has not been renewed, on the watcher's clock"
    ),
    "tidegate.stream.seal.age": (
        "seconds since the newest checkpoint was sealed, by the clocks of driver and watcher"
    ),
    "tidegate.stream.ended": "streams found not to be live, by state",
    "tidegate.driver.launched": (
        "drivers started, by why: start, or replacement of one that is gone"
    ),
    "tidegate.driver.adopted": "drivers that ran already when their task began",
}


def record_look(pipeline: str, seen: LivenessSample | None) -> None:
    """Record one look of a trigger; None when the store did not answer."""
    tags = {"pipeline": pipeline}
    stats.gauge("tidegate.stream.watched", 1, tags=tags)
    if seen is None:
        stats.incr("tidegate.stream.looks.unanswered", tags=tags)
        return
    stats.incr("tidegate.stream.looks", tags=tags)
    stats.gauge("tidegate.stream.heartbeat.age", seen.silent_for, tags=tags)
    sealed_at = seen.driver.last_facts.get("sealed_at")
    if sealed_at is not None:
        seal_age = (seen.driver.read_at - sealed_at) / 1_000_000
        stats.gauge("tidegate.stream.seal.age", seal_age, tags=tags)


def record_stream_end(pipeline: str, state: PipelineState) -> None:
    """Record that a stream is no longer live."""
    tags = {"pipeline": pipeline, "state": state.word_for("event")}
    stats.incr("tidegate.stream.ended", tags=tags)


def record_unwatched(pipeline: str) -> None:
    """Mark the stream as unwatched, so that dashboards ignore its last age gauges."""
    stats.gauge("tidegate.stream.watched", 0, tags={"pipeline": pipeline})


def record_launch(pipeline: str, *, replaces: bool) -> None:
    """Record that a task started a driver."""
    why = "replacement" if replaces else "start"
    stats.incr("tidegate.driver.launched", tags={"pipeline": pipeline, "why": why})


def record_adoption(pipeline: str) -> None:
    """Record that a task found its driver running."""
    stats.incr("tidegate.driver.adopted", tags={"pipeline": pipeline})
