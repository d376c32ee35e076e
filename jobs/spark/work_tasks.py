"""Work on rows of sealed epochs in Spark tasks: sinks, layouts and the compaction of tables."""

import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from tidegate.jobs.engine.interfaces import RowWork
from tidegate.jobs.rows.attempt_files import open_task_store
from tidegate.jobs.rows.task_report import TaskReport

from .python_tasks import prepare_worker
from .spark_session import SparkSessions
from .task_runner import choose_runner

_log = structlog.get_logger("tidegate.driver")


@dataclass(frozen=True)
class WorkAnswer:
    """What came of a piece of work.

    Attributes:
        number: of the work.
        value: what it returned.
        error: what it raised, if it did.
        report: what the task cost.
    """

    number: int
    value: Any
    error: Exception | None
    report: TaskReport


def run_work_in_tasks(
    sessions: SparkSessions, store: str, works: Sequence[RowWork]
) -> list[WorkAnswer]:
    """Have a task do each piece of work, and log the tasks.

    Args:
        sessions: of the pipeline.
        store: address of the pipeline's store.
        works: the work; none needs no job.

    Raises:
        Py4JJavaError: a task failed; or a PySparkException.
    """
    if not works:
        return []
    run = partial(run_in_task, store)
    runner = choose_runner(sessions.full)
    answers: list[WorkAnswer] = runner.run_small_job(sessions, run, list(enumerate(works)))
    answers.sort(key=lambda one: one.number)
    tasks = [
        {
            "task": one.number,
            "pid": one.report.pid,
            "parent": one.report.parent,
            "cpu": round(one.report.cpu, 6),
        }
        for one in answers
    ]
    _log.info("tasks_finished", job="work", tasks=tasks)
    return answers


def run_in_task(store: str, orders: Iterable[tuple[int, RowWork]]) -> Iterator[WorkAnswer]:
    """The body of a task that does work; `store` is the address of the pipeline's store.

    Errors are answers: Spark would try a task that fails again, and hide what it raised.
    """
    prepare_worker()
    for number, work in orders:
        begun, value, error = time.process_time(), None, None
        try:
            value = work(open_task_store(store))
        except Exception as raised:
            # One that cannot be sent fails the task.
            pickle.loads(pickle.dumps(raised))  # noqa: S301 - written here
            error = raised
        yield WorkAnswer(number, value, error, TaskReport.measure_since(begun))
