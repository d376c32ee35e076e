"""How many cores a pipeline needs, from figures of its epochs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.jobs.engine.cluster_size import (
    ClusterSize,
    EpochFigures,
    JobFigures,
    collect_figures,
)


def make_manifest(slot: int, read: int) -> Manifest:
    """An epoch of two seconds; only what the figures are made of is set."""
    counters, timings = Counters(read=read), {"survey": 1.5, "seal": 0.5}
    return Manifest.model_construct(slot=slot, counters=counters, timings=timings)


def log_tasks(slot: int, job: str, cpu: Sequence[float], memory: int = 0) -> str:
    """A line of a driver's log; each task ran in a worker of its own."""
    own = {"parent": 1, "memory": memory}
    tasks = [{"cpu": one, "pid": pid, **own} for pid, one in enumerate(cpu)]
    return json.dumps({"event": "tasks_finished", "job": job, "slot": slot, "tasks": tasks})


def test_a_rate_grows_until_the_rest_of_an_epoch_is_what_counts() -> None:
    """One second of the driver, four of tasks, the longest of which takes half a second."""
    job = JobFigures(cpu=4.0, longest=0.5, workers=2)
    size = ClusterSize([EpochFigures(2, 1000, 3.0, [job])])
    assert size.serial == 1.0
    assert [size.predict_rate(cores) for cores in (1, 2, 4, 8, 64)] == pytest.approx(
        [1000 / 5, 1000 / 3, 1000 / 2, 1000 / 1.5, 1000 / 1.5]
    )
    assert size.choose_cores(200) == 1
    assert size.choose_cores(450) == 4
    assert size.choose_cores(667) is None


def test_figures_are_those_of_sealed_attempts() -> None:
    """The first epoch of a log starts the workers; an attempt that was repeated counts once."""
    manifests = [make_manifest(slot, 100 * slot) for slot in range(1, 5)]
    log = [
        log_tasks(2, "read", [9.0]),
        log_tasks(3, "read", [9.0]),
        "Traceback of a driver",
        log_tasks(3, "read", [0.4, 0.2], memory=300),
        log_tasks(3, "events", [0.1], memory=500),
        json.dumps({"event": "tasks_finished", "job": "inspect", "tasks": [{"cpu": 1.0}]}),
        log_tasks(9, "read", [1.0]),
    ]
    size = collect_figures(manifests, log)
    (epoch,) = size.epochs
    assert size.memory == 500
    assert (epoch.slot, epoch.rows, epoch.seconds) == (3, 100, 2.0)
    assert [(job.cpu, job.longest, job.workers) for job in epoch.jobs] == [
        (pytest.approx(0.6), 0.4, 2),
        (0.1, 0.1, 1),
    ]
    assert epoch.serial == pytest.approx(2.0 - 0.4 - 0.1)


def test_without_tasks_there_are_no_figures() -> None:
    """A pipeline whose rows Spark SQL reads."""
    assert collect_figures([make_manifest(1, 10), make_manifest(2, 20)], ["{}"]).epochs == []
