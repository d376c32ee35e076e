"""What `make bench-workers` reads out of Spark's event log."""

from __future__ import annotations

import json

from tests.bench.workers import Task, alone, laid_upon, tasks_of


def task(stage: int, begun: float, ended: float) -> Task:
    """A task that computed all the time."""
    return Task(stage, begun, ended, ended - begun, 0)


def test_tasks_within_a_time() -> None:
    """Only tasks that ran wholly within it, with their processor time and the bytes of their
    shuffle.
    """

    def ended(stage: int, begun: int, finished: int) -> dict[str, object]:
        metrics = {
            "Executor CPU Time": 250_000_000,
            "Shuffle Write Metrics": {"Shuffle Bytes Written": 7},
        }
        info = {"Launch Time": begun, "Finish Time": finished}
        return {
            "Event": "SparkListenerTaskEnd",
            "Stage ID": stage,
            "Task Info": info,
            "Task Metrics": metrics,
        }

    events = [
        {"Event": "SparkListenerJobStart"},
        ended(1, 500, 1500),
        ended(2, 2000, 3000),
        ended(3, 3500, 4500),
    ]
    assert tasks_of(map(json.dumps, events), 1.0, 4.0) == [Task(2, 2.0, 3.0, 0.25, 7)]


def test_the_driver_alone() -> None:
    """Tasks side by side count once; what lies between them, before and after is the driver's."""
    assert alone([task(1, 1.0, 3.0), task(1, 2.0, 4.0), task(2, 6.0, 7.0)], 0.0, 10.0) == 6.0
    assert alone([], 0.0, 2.0) == 2.0


def test_tasks_are_laid_upon_cores() -> None:
    """Stages follow each other; a stage takes as long as its fullest core."""
    tasks = [task(1, 0, 3), task(1, 0, 2), task(1, 0, 1), task(2, 0, 4)]
    assert [laid_upon(tasks, cores) for cores in (1, 2, 8)] == [10, 7, 7]
