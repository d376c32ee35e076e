"""Runs the kernel (`jobs.rows`) in Spark's Python tasks; the one module that knows how.

A job is an RDD with one partition for each unit of work. The address of the store is part of the
order; its keys reach the workers as their environment, which neither Spark's pages nor its event
log show.
"""

import gc
import os
import sys
import time
import zipimport
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import pyarrow as pa
import structlog
from pyspark.sql import SparkSession

from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.object_reading import InspectionAnswer, InspectionUnit, describe_unit
from tidegate.jobs.rows.unit_reading import ReadOrder, TaskReport, UnitAnswer, read_unit

from .spark_session import SparkSessions

_log = structlog.get_logger("tidegate.driver")
_STORE_VARIABLES = ("TIDEGATE_S3_", "AWS_")
"""How the names of the variables begin that stores are opened by."""


def run_read_job(
    sessions: SparkSessions,
    order: ReadOrder,
    units: list[ReadUnit],
    variables: Mapping[str, str] | None = None,
) -> list[UnitAnswer]:
    """Read each unit in a task, and return the answers in the order of the units.

    The workers have these variables in their environment, beside those of the store.

    Raises:
        Py4JJavaError: a task failed; or a PySparkException.
    """
    if not units:
        return []
    context = _prepare_context(sessions.full, variables)
    parts = context.parallelize(units, len(units))
    found = parts.mapPartitions(partial(_read_units, order)).collect()
    found.sort(key=lambda one: one[0].number)
    tasks = [_describe_task(*one) for one in found]
    _log.info("tasks_finished", job="read", slot=order.folders.attempt.slot, tasks=tasks)
    return [answer for answer, _ in found]


def run_inspection_job(
    sessions: SparkSessions, units: list[InspectionUnit]
) -> list[InspectionAnswer]:
    """Inspect the objects of each unit in a task, and return the answers in the order of the units.

    Raises:
        Py4JJavaError: a task failed; or a PySparkException.
    """
    context = _prepare_context(sessions.full)
    found = context.parallelize(units, len(units)).mapPartitions(_describe_units).collect()
    found.sort(key=lambda one: one[0].number)
    tasks = [_describe_task(*one) for one in found]
    _log.info("tasks_finished", job="inspect", tasks=tasks)
    return [answer for answer, _ in found]


def start_workers(
    session: SparkSession,
    variables: Mapping[str, str] | None = None,
    libraries: Sequence[str] = (),
) -> None:
    """Start as many workers as run at a time, and let them import the kernel and libraries."""
    context = _prepare_context(session, variables)
    tasks = context.defaultParallelism
    body = partial(_import_kernel, libraries)
    context.parallelize(range(tasks), tasks).mapPartitions(body).collect()


def _prepare_context(session: SparkSession, variables: Mapping[str, str] | None = None) -> Any:
    context = session.sparkContext
    own = {k: v for k, v in os.environ.items() if k.startswith(_STORE_VARIABLES)}
    context.environment.update({**own, **(variables or {})})
    return context


def _describe_task(answer: UnitAnswer | InspectionAnswer, report: TaskReport) -> dict[str, Any]:
    return {
        "task": answer.number,
        "rows": answer.rows,
        "bytes": answer.read_bytes,
        "pid": report.pid,
        "parent": report.parent,
        "cpu": round(report.cpu, 6),
    }


def _read_units(
    order: ReadOrder, units: Iterator[ReadUnit]
) -> Iterator[tuple[UnitAnswer, TaskReport]]:
    """The body of a task."""
    _prepare_worker()
    for unit in units:
        yield read_unit(order, unit)


def _describe_units(
    units: Iterator[InspectionUnit],
) -> Iterator[tuple[InspectionAnswer, TaskReport]]:
    """The body of a task that tells a plan what objects hold."""
    _prepare_worker()
    for unit in units:
        begun = time.process_time()
        yield describe_unit(unit), TaskReport.measure_since(begun)


def _import_kernel(libraries: Sequence[str], rows: Iterator[int]) -> Iterator[int]:
    """The body of a task that only starts its worker."""
    _prepare_worker()
    for name in libraries:
        import_module(name)
    yield from rows


def _keep_caches(self: zipimport.zipimporter) -> None:
    """Forget nothing."""


def _prepare_worker() -> None:
    """Make what a worker repeats for each task cheap; once in each."""
    if hasattr(sys, "_tidegate_settled"):
        return
    sys._tidegate_settled = True  # type: ignore[attr-defined]
    # PySpark forgets all imports before each task. Then the directories of its archives are read
    # again, which takes longer than a small task.
    zipimport.zipimporter.invalidate_caches = _keep_caches  # type: ignore[method-assign]
    pa.set_cpu_count(1)  # a task has one core
    gc.collect()
    gc.freeze()  # PySpark collects garbage after each task
