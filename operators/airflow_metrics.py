"""What the Airflow side measures, by Airflow's own metrics.

They go where the site's `[metrics]` sends those, under its prefix.

The pipeline stands in the tags: OpenTelemetry, Datadog and StatsD with InfluxDB tags have them,
plain StatsD has none. What is called here is called in the event loop of the triggerer, or by a
task, and only notes: Airflow sends.
"""

from __future__ import annotations

from typing import Final

from airflow.sdk.observability import stats

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.operators.liveness import LivenessSample, StreamLiveness

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
_TICKS_PER_SECOND: Final = 1_000_000


def record_look(pipeline: str, seen: LivenessSample | None) -> None:
    """One look of a trigger; None when the store did not answer."""
    tags = {"pipeline": pipeline}
    stats.gauge("tidegate.stream.watched", 1, tags=tags)
    if seen is None:
        stats.incr("tidegate.stream.looks.unanswered", tags=tags)
        return
    stats.incr("tidegate.stream.looks", tags=tags)
    stats.gauge("tidegate.stream.heartbeat.age", seen.silent_for, tags=tags)
    sealed_at = (seen.status or {}).get("sealed_at")
    if sealed_at is not None:
        stats.gauge(
            "tidegate.stream.seal.age",
            (SYSTEM_CLOCK.wall_ticks() - sealed_at) / _TICKS_PER_SECOND,
            tags=tags,
        )


def record_stream_end(pipeline: str, state: StreamLiveness) -> None:
    """A trigger reports that its stream is not live any more."""
    stats.incr("tidegate.stream.ended", tags={"pipeline": pipeline, "state": state.value})


def record_unwatched(pipeline: str) -> None:
    """A trigger ends, whatever ended it.

    The ages would stand still from here on: they are of nobody's looking.
    """
    stats.gauge("tidegate.stream.watched", 0, tags={"pipeline": pipeline})


def record_launch(pipeline: str, *, replaces: bool) -> None:
    """A task started a driver."""
    why = "replacement" if replaces else "start"
    stats.incr("tidegate.driver.launched", tags={"pipeline": pipeline, "why": why})


def record_adoption(pipeline: str) -> None:
    """A task found its driver running."""
    stats.incr("tidegate.driver.adopted", tags={"pipeline": pipeline})
