"""What a run has left behind: the driver's log, Spark's event log, requests and processes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.rows_on_spark.processes import Seen
from tests.rows_on_spark.requests import Request, StorePlace


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task in Spark's event log."""

    stage: int
    finished: float
    """Seconds since 1970."""
    size: int
    """Bytes that it sent to the driver."""


@dataclass
class SparkLog:
    """What Spark's event log says."""

    settings: dict[str, str] = field(default_factory=dict)
    tasks: list[TaskResult] = field(default_factory=list)

    def count_tasks(self) -> list[int]:
        """The number of tasks of each stage."""
        stages = [task.stage for task in self.tasks]
        return [stages.count(stage) for stage in sorted(set(stages))]


def read_event_log(lines: Iterable[str]) -> SparkLog:
    """Read the settings and the tasks out of an event log."""
    found = SparkLog()
    for line in lines:
        event = json.loads(line)
        if event["Event"] == "SparkListenerEnvironmentUpdate":
            found.settings |= event.get("Spark Properties", {})
        if event["Event"] == "SparkListenerTaskEnd":
            metrics = event.get("Task Metrics") or {}
            finished = event["Task Info"]["Finish Time"] / 1e3
            size = metrics.get("Result Size", 0)
            found.tasks.append(TaskResult(event["Stage ID"], finished, size))
    return found


def read_event_logs(folder: Path) -> SparkLog:
    """Read all event logs of a folder; their checksums are hidden files beside them."""
    found = SparkLog()
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        with path.open() as lines:
            one = read_event_log(lines)
        found.settings |= one.settings
        found.tasks += one.tasks
    return found


def read_driver_log(text: str) -> list[dict[str, Any]]:
    """The events of a driver's log; its other lines are left out."""
    lines = (line for line in text.splitlines() if line.startswith("{") and line.endswith("}"))
    return [json.loads(line) for line in lines]


@dataclass
class Evidence:
    """All that the checks look at."""

    place: StorePlace
    requests: list[Request]
    members: list[Seen]
    driver_log: list[dict[str, Any]]
    spark: SparkLog
    exit_code: int = 0
    tables: dict[str, int] = field(default_factory=dict)
    """Rows of each output table, as its readers have them."""

    def list_events(self, name: str) -> list[dict[str, Any]]:
        """The driver's events of this name."""
        return [event for event in self.driver_log if event.get("event") == name]

    @property
    def read_rows(self) -> int:
        """Rows of all sealed epochs."""
        return sum(event["rows"] for event in self.list_events("sealed"))

    @property
    def seal_times(self) -> list[float]:
        """When each epoch was sealed, in seconds since 1970."""
        stamps = [event.get("timestamp") for event in self.list_events("sealed")]
        return [datetime.fromisoformat(stamp).timestamp() for stamp in stamps if stamp]
