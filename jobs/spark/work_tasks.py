"""Work on rows of sealed epochs in Spark tasks: sinks, layouts and the compaction of tables."""

import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from pyspark.sql import SparkSession

from tidegate.jobs.engine.interfaces import RowWork
from tidegate.jobs.rows.attempt_files import open_task_store
from tidegate.jobs.rows.task_report import TaskReport

from .task_runner import choose_runner

_log = structlog.get_logger("tidegate.driver")


@dataclass(frozen=True)
class WorkAnswer:
    """What came of work: what it returned, or else what it raised, and what the task cost."""

    value: Any
    error: Exception | None
    report: TaskReport


def run_work_in_task(session: SparkSession, store: str, work: RowWork) -> WorkAnswer:
    """Have a task do work, and log the task.

    Args:
        session: of the pipeline.
        store: address of the pipeline's store.
        work: to do.

    Raises:
        Py4JJavaError: the task failed; or a PySparkException.
    """
    runner = choose_runner(session)
    [answer] = runner.run_small_job(session, partial(run_in_task, store), [work])
    report = answer.report
    task = {"task": 0, "pid": report.pid, "parent": report.parent, "cpu": round(report.cpu, 6)}
    _log.info("tasks_finished", job="work", tasks=[task])
    return answer  # type: ignore[no-any-return]


def run_in_task(store: str, works: Iterable[RowWork]) -> Iterator[WorkAnswer]:
    """The body of a task that does work; `store` is the address of the pipeline's store.

    Errors are answers: Spark would try a task that fails again, and hide what it raised.
    """
    for work in works:
        begun = time.process_time()
        value = None
        error = None
        try:
            value = work(open_task_store(store))
        except Exception as raised:
            error = _make_sendable(raised)
        yield WorkAnswer(value, error, TaskReport.measure_since(begun))


def _make_sendable(error: Exception) -> Exception:
    """Return the error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - written here
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
