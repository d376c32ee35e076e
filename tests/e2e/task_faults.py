"""Faults inside Spark's Python workers, as a test orders them; `sitecustomize` installs them.

Workers find the folder of a `TaskFaults` in their environment. They note each file that a task
writes, and obey the orders that lie there.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

FOLDER: Final = "TIDEGATE_TEST_TASK_FAULTS"
SLOW_WORKER: Final = "TIDEGATE_TEST_SLOW_WORKER"
"""Set for the standalone worker whose tasks an order makes slow."""
_REPOSITORY: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class WrittenFile:
    """A file that a task has written; whether the manifest names it is another question."""

    key: str
    kind: str
    stage: int
    partition: int
    task: int
    """Unique to each attempt of each task."""


class TaskFaults:
    """Orders for workers, and what they have written.

    Args:
        folder: of the orders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = folder / "written.jsonl"
        self._started = folder / "started"
        self._slowness = folder / "slowness"

    def environment(self) -> dict[str, str]:
        """Variables that install the faults in the workers of a cluster."""
        (self.folder / "site").mkdir(parents=True)
        program = "from tests.e2e.task_faults import install\n\ninstall()\n"
        (self.folder / "site" / "sitecustomize.py").write_text(program)
        path = f"{self.folder / 'site'}{os.pathsep}{_REPOSITORY}"
        return {FOLDER: str(self.folder), "PYTHONPATH": path}

    def kill_executor_after(self, kind: str) -> None:
        """The first task that writes a file of this kind from now on kills its executor."""
        (self.folder / "part").write_text("")
        (self.folder / "part").rename(self._name_order(kind))

    def has_killed(self, kind: str) -> bool:
        """Whether that has happened."""
        return self._name_order(kind).with_suffix(".done").exists()

    def slow_down(self, factor: float) -> None:
        """Tasks of the slow worker take so many times as long from now on."""
        self._slowness.write_text(str(factor))

    def read_written(self) -> list[WrittenFile]:
        """All files that tasks have written."""
        lines = self._written.read_text().splitlines() if self._written.exists() else []
        return [WrittenFile(**json.loads(line)) for line in lines]

    def note_start(self) -> None:
        """Called by a worker: note a task that begins to read."""
        from pyspark import TaskContext

        if (task := TaskContext.get()) is not None:
            with self._started.open("a") as out:
                print(task.stageId(), task.partitionId(), task.taskAttemptId(), file=out)

    def count_repeated_tasks(self) -> int:
        """How many tasks have begun to read more than once."""
        lines = self._started.read_text().splitlines() if self._started.exists() else []
        tasks = Counter(line.rpartition(" ")[0] for line in set(lines))
        return sum(attempts > 1 for attempts in tasks.values())

    def note(self, written: WrittenFile) -> None:
        """Called by a worker: note a file, and die with the executor if that is the order."""
        with self._written.open("a") as out:
            out.write(json.dumps(asdict(written)) + "\n")
        order = self._name_order(written.kind)
        try:
            order.rename(order.with_suffix(".done"))
        except FileNotFoundError:
            return
        above = psutil.Process().parents()
        next(one for one in above if one.name() == "java").kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def read_slowness(self) -> float:
        """By how much the tasks of this worker are slow; 1 without an order."""
        if SLOW_WORKER not in os.environ or not self._slowness.exists():
            return 1.0
        return float(self._slowness.read_text())

    def _name_order(self, kind: str) -> Path:
        return self.folder / f"kill-{kind.replace(':', '-')}.order"


def install() -> None:
    """Wrap the functions by which tasks read and store rows; nothing where no folder is named."""
    folder = os.environ.get(FOLDER)
    if folder is None or not any("pyspark" in part for part in psutil.Process().cmdline()):
        return
    from tidegate.jobs.rows import attempt_files

    faults = TaskFaults(Path(folder))
    attempt_files.store_task_rows = _wrap(attempt_files.store_task_rows, faults)
    # Later: it imports the modules that take the function above by its name.
    from tidegate.jobs.rows import batch_reading

    batch_reading.read_in_batches = _slow_down(batch_reading.read_in_batches, faults)


def _wrap(store: Callable[..., Any], faults: TaskFaults) -> Callable[..., Any]:
    def store_and_note(
        url: str, rows: Any, stem: str, kind: str, *more: Any, **named: Mapping[str, Any]
    ) -> Any:
        from pyspark import TaskContext

        task = TaskContext.get()
        began = time.monotonic()
        found = store(url, rows, stem, kind, *more, **named)
        if task is not None:
            place = task.stageId(), task.partitionId(), task.taskAttemptId()
            faults.note(WrittenFile(found.key, kind, *place))
        time.sleep((faults.read_slowness() - 1.0) * (time.monotonic() - began))
        return found

    return store_and_note


def _slow_down(read: Callable[..., Iterator[Any]], faults: TaskFaults) -> Callable[..., Any]:
    def read_slowly(*order: Any) -> Iterator[Any]:
        began = time.monotonic()
        faults.note_start()
        found = list(read(*order))
        # A read of a few objects is short; a task takes about a second.
        seconds = max(time.monotonic() - began, 1.0)
        time.sleep((faults.read_slowness() - 1.0) * seconds)
        yield from found

    return read_slowly
