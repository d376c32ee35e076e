"""How many cores of executors a pipeline needs, from what its own epochs took.

The tasks of each job of Spark are laid upon so many cores; the rest of an epoch stays as it was.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tidegate.checkpoints.manifest import Manifest
from tidegate.json_types import JsonView

MOST_CORES: Final = 64
ASSUMPTIONS: Final = (
    "epochs stay as large as those measured",
    "every core is as fast as those that ran, and tasks divide evenly among cores",
    "time in which a task waits, such as for the store, is counted as the driver's",
    "what Python workers of one host share, such as code, is counted in the memory of each",
    "what Spark SQL evaluates between two Python tasks is counted as the driver's too",
)


@dataclass(frozen=True)
class JobFigures:
    """What the tasks of one job took.

    Attributes:
        cpu: seconds of processor time of all tasks.
        longest: of the longest one.
        workers: how many Python workers ran them.
        memory: the most bytes that one of these has held so far; 0 if the log does not say it.
    """

    cpu: float
    longest: float
    workers: int
    memory: int = 0

    def lay_upon(self, cores: int) -> float:
        """Return the least number of seconds that the tasks take on so many cores."""
        return max(self.longest, self.cpu / cores)


@dataclass
class EpochFigures:
    """What an epoch took: rows that it read, seconds, and the jobs of its tasks."""

    slot: int
    rows: int
    seconds: float
    jobs: list[JobFigures] = field(default_factory=list)

    @property
    def serial(self) -> float:
        """Seconds that no number of cores shortens."""
        return max(self.seconds - sum(job.lay_upon(job.workers) for job in self.jobs), 0.0)


@dataclass(frozen=True)
class ClusterSize:
    """Figures of epochs, and what follows from them."""

    epochs: Sequence[EpochFigures]

    @property
    def rows(self) -> int:
        """Rows of all epochs."""
        return sum(epoch.rows for epoch in self.epochs)

    @property
    def serial(self) -> float:
        """Seconds of all epochs that no number of cores shortens."""
        return sum(epoch.serial for epoch in self.epochs)

    @property
    def cpu(self) -> float:
        """Seconds of processor time of all tasks."""
        return sum(job.cpu for epoch in self.epochs for job in epoch.jobs)

    @property
    def memory(self) -> int:
        """The most bytes that a Python worker has held; 0 if the log does not say it."""
        return max((job.memory for epoch in self.epochs for job in epoch.jobs), default=0)

    def predict_rate(self, cores: int) -> float:
        """Return the rows per second with so many cores of executors."""
        tasks = sum(job.lay_upon(cores) for epoch in self.epochs for job in epoch.jobs)
        return self.rows / max(self.serial + tasks, 1e-6)

    def choose_cores(self, rate: float) -> int | None:
        """Return the least number of cores for so many rows per second; None if there is none."""
        numbers = range(1, MOST_CORES + 1)
        return next((cores for cores in numbers if self.predict_rate(cores) >= rate), None)


def collect_figures(manifests: Iterable[Manifest], log: Iterable[str]) -> ClusterSize:
    """Join sealed epochs with what a driver's log says of their tasks.

    Epochs without rows, and those of which the log has no tasks, are left out. So is the first one
    of the log, in which workers start.

    Args:
        manifests: of neighbouring epochs, in their order.
        log: lines of JSON.
    """
    jobs = _read_jobs(log)
    epochs = []
    before: Manifest | None = None
    for manifest in manifests:
        if before is not None and manifest.slot in jobs:
            rows = manifest.counters.read - before.counters.read
            seconds = sum(manifest.timings.values())
            if rows > 0:
                epochs.append(EpochFigures(manifest.slot, rows, seconds, jobs[manifest.slot]))
        before = manifest
    return ClusterSize([epoch for epoch in epochs if epoch.slot > min(jobs)])


def _read_jobs(log: Iterable[str]) -> dict[int, list[JobFigures]]:
    """Slot -> the jobs of its newest attempt. The attempt begins with its job `read`."""
    found: dict[int, list[JobFigures]] = defaultdict(list)
    for line in log:
        if '"tasks_finished"' not in line:
            continue
        with suppress(ValueError, KeyError):
            event = json.loads(line)
            if "slot" not in event or not event["tasks"]:
                continue
            if event["job"] == "read":
                found[event["slot"]] = []
            found[event["slot"]].append(_sum_tasks(event["tasks"]))
    return found


def _sum_tasks(tasks: Sequence[JsonView]) -> JobFigures:
    cpu = [float(task["cpu"]) for task in tasks]
    workers = {(task["parent"], task["pid"]) for task in tasks}
    memory = max(int(task.get("memory", 0)) for task in tasks)
    return JobFigures(sum(cpu), max(cpu), len(workers), memory)
