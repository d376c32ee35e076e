"""Faults inside Spark's Python workers, as a test orders them; `sitecustomize` installs them.

Workers find the folder of a `TaskFaults` in their environment. They note each file that a task
writes, and obey the orders that lie there.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

FOLDER: Final = "TIDEGATE_TEST_TASK_FAULTS"
SLOW_WORKER: Final = "worker-0"
"""The folder of the worker that `slow_down` is about; its executors work below it."""
FOLDED: Final = "folded"
_AGAIN: Final = "again"
_SLOWNESS: Final = 10
_LEAST_DELAY: Final = 3.0  # seconds
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

    def environment(self) -> dict[str, str]:
        """Variables that install the faults in the workers of a cluster."""
        (self.folder / "site").mkdir(parents=True)
        program = "from tests.e2e.task_faults import install\n\ninstall()\n"
        (self.folder / "site" / "sitecustomize.py").write_text(program)
        path = f"{self.folder / 'site'}{os.pathsep}{_REPOSITORY}"
        return {FOLDER: str(self.folder), "PYTHONPATH": path}

    def kill_executor_after(self, kind: str) -> None:
        """The first task that writes a file of this kind from now on kills its executor.

        `FOLDED`: the first one that has folded a group of keys.
        """
        (self.folder / "part").write_text("")
        (self.folder / "part").rename(self._name_order(kind))

    def kill_executors_after(self, kind: str) -> None:
        """The same, and then each task that does so for the same slice."""
        (self.folder / _AGAIN).touch()
        self.kill_executor_after(kind)

    def stop_killing(self, kind: str) -> None:
        """Take back that order."""
        self._name_order(kind).unlink()

    def slow_down(self) -> None:
        """Let the tasks of one worker take ten times as long to write a file from now on."""
        (self.folder / "slow").touch()

    def count_repeated_tasks(self) -> int:
        """How many tasks have written files in more than one attempt."""
        attempts: dict[tuple[int, int], set[int]] = {}
        for one in self.read_written():
            attempts.setdefault((one.stage, one.partition), set()).add(one.task)
        return sum(len(found) > 1 for found in attempts.values())

    def has_killed(self, kind: str) -> bool:
        """Whether that has happened."""
        return self._name_order(kind).with_suffix(".done").exists()

    def read_written(self) -> list[WrittenFile]:
        """All files that tasks have written."""
        lines = self._written.read_text().splitlines() if self._written.exists() else []
        return [WrittenFile(**json.loads(line)) for line in lines]

    def delay(self, seconds: float) -> None:
        """Called by a worker that has written a file in so many seconds."""
        if SLOW_WORKER in Path.cwd().parts and (self.folder / "slow").exists():
            time.sleep(max(seconds * (_SLOWNESS - 1), _LEAST_DELAY))

    def count_shared_stages(self, kind: str) -> int:
        """How many stages have written files of this kind by more than one of their tasks."""
        tasks: dict[int, set[int]] = {}
        for one in self.read_written():
            if one.kind == kind:
                tasks.setdefault(one.stage, set()).add(one.partition)
        return sum(len(found) > 1 for found in tasks.values())

    def note(self, written: Iterable[tuple[str, str]]) -> None:
        """Called by a worker: note keys and kinds of files, and die if an order is about one."""
        from pyspark import TaskContext

        task = TaskContext.get()
        if task is None:
            return
        place = task.stageId(), task.partitionId(), task.taskAttemptId()
        files = [WrittenFile(key, kind, *place) for key, kind in written]
        with self._written.open("a") as out:
            out.writelines(json.dumps(asdict(one)) + "\n" for one in files)
        for one in files:
            self.obey(one.kind, task.partitionId())

    def obey(self, kind: str, partition: int | None = None) -> None:
        """Called by a worker: die with the executor if that is the order."""
        order, again = self._name_order(kind), self.folder / _AGAIN
        if again.exists() and again.read_text() not in ("", str(partition)):
            return  # only the slice that was the first
        try:
            order.rename(order.with_suffix(".done"))
        except FileNotFoundError:
            return
        if again.exists():
            again.write_text(str(partition))
            self.kill_executor_after(kind)
        above = psutil.Process().parents()
        next(one for one in above if one.name() == "java").kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def _name_order(self, kind: str) -> Path:
        return self.folder / f"kill-{kind.replace(':', '-')}.order"


def install() -> None:
    """Wrap the functions by which tasks write rows; nothing where no folder is named."""
    folder = os.environ.get(FOLDER)
    if folder is None or not any("pyspark" in part for part in psutil.Process().cmdline()):
        return
    from tidegate.jobs.rows import attempt_files, stored_partials
    from tidegate.jobs.streams.stream_state import DispatchFiles

    faults = TaskFaults(Path(folder))
    attempt_files.store_task_rows = _wrap_store(attempt_files.store_task_rows, faults)
    stored_partials.send_table = _wrap_send(stored_partials.send_table, faults)
    setattr(DispatchFiles, "flush", _wrap_flush(DispatchFiles.flush, faults))  # noqa: B010 - mypy


def _wrap_store(store: Callable[..., Any], faults: TaskFaults) -> Callable[..., Any]:
    def store_and_note(
        url: str, rows: Any, stem: str, kind: str, *more: Any, **named: Mapping[str, Any]
    ) -> Any:
        begun = time.monotonic()
        found = store(url, rows, stem, kind, *more, **named)
        seconds = time.monotonic() - begun
        faults.note([(found.key, kind)])
        faults.delay(seconds)
        return found

    return store_and_note


def _wrap_send(send: Callable[..., Any], faults: TaskFaults) -> Callable[..., Any]:
    def send_and_obey(store: Any, folders: Any, name: str, number: int, rows: Any) -> Any:
        found = send(store, folders, name, number, rows)
        if name.startswith("fold-"):
            faults.obey(FOLDED)
        return found

    return send_and_obey


def _wrap_flush(flush: Callable[[Any], None], faults: TaskFaults) -> Callable[[Any], None]:
    def flush_and_note(files: Any) -> None:
        known = [*files.segments, *(ref for refs in files.tables.values() for ref in refs)]
        written = [(ref.key, ref.kind) for ref in known if ref.key in files._unwritten]
        flush(files)
        faults.note(written)

    return flush_and_note
