"""The metrics that Airflow's side sends; docs/observability.md says what they measure."""

from __future__ import annotations

from typing import Final

STREAM_METRICS: Final = frozenset(
    f"tidegate.{name}"
    for name in (
        "stream.watched",
        "stream.looks",
        "stream.looks.unanswered",
        "stream.heartbeat.age",
        "stream.seal.age",
        "stream.ended",
        "driver.launched",
        "driver.adopted",
    )
)
