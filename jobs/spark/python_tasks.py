"""Runs the kernel (`jobs.rows`) in the Python tasks of a classic Spark session.

A job is an RDD with one partition for each unit of work. The address of the store is part of the
order; its keys reach the workers as their environment, which neither Spark's pages nor its event
log show. Executors that have keys of their own get none (`checkpoints.executor_keys`).
"""

import gc
import os
import sys
import time
import zipimport
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from threading import Lock
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import structlog
from pyspark import RDD, Accumulator, AccumulatorParam, SparkContext, StorageLevel, TaskContext
from pyspark.serializers import CPickleSerializer
from pyspark.sql import SparkSession

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.executor_keys import (
    EXECUTOR_VARIABLES,
    has_executor_keys,
    select_driver_variables,
)
from tidegate.checkpoints.manifest import FileRef
from tidegate.errors import TidegateError
from tidegate.jobs.rows.batch_reading import read_in_batches
from tidegate.jobs.rows.cut_division import ReadUnit, measure_unit
from tidegate.jobs.rows.event_files import (
    EventsOrder,
    FileAnswer,
    FirstPositions,
    RangesOrder,
    Shipped,
    cut_rows,
    write_share,
    write_targets,
    write_unit_events,
)
from tidegate.jobs.rows.kept_rows import KeptPiece, encode_kept_rows
from tidegate.jobs.rows.object_reading import InspectionAnswer, InspectionUnit, describe_unit
from tidegate.jobs.rows.task_report import TaskReport
from tidegate.jobs.rows.topic_reading import build_settings_variables, require_settings
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer
from tidegate.jobs.rules.worker_memory import watch_memory
from tidegate.jobs.spec.executor_memory import count_container_bytes
from tidegate.jobs.spec.pipeline import PipelineSpec

from .early_events import has_kept_rows
from .errors import SPARK_FAILED
from .lost_workers import note_failed_unit
from .spark_session import SPARK_ERRORS, carry_error
from .worker_versions import VERSIONS_VARIABLE, describe_versions, find_other_version

_log = structlog.get_logger("tidegate.driver")
_ALLOCATOR_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MIMALLOC_PURGE_DELAY": "60000",
}
"""Workers keep memory between tasks: to get it again costs as much as to sort the rows."""
CONTAINER_VARIABLE: Final = "TIDEGATE_CONTAINER_MEMORY"
"""Bytes of an executor's container on YARN, in the environment of workers.

In the driver's environment it says so instead of Spark's settings; 0: workers do not look."""
_MOST_IN_MEMORY: Final = 64 << 20
"""Bytes of an epoch's objects up to which their rows are kept in memory, in some four times as many
bytes.
"""
_environment_lock = Lock()
"""Held while the environment of a context's workers is replaced."""


@dataclass(frozen=True)
class StoreSample:
    """An object, by the address of its store, and whether the driver sees it."""

    store: str
    key: str
    is_there: bool


@dataclass(frozen=True)
class KeptRows:
    """The rows that the tasks of a read job keep in Spark's block manager.

    They are read again if their executor is lost.

    Attributes:
        pieces: an RDD of `KeptPiece`, or a frame with their columns.
        held: what Spark keeps: `pieces`, or the frame that they are a part of.
    """

    pieces: Any
    units: int
    held: Any

    def discard(self) -> None:
        """Give up the rows; those of a server that is gone are gone with it."""
        with suppress(*SPARK_ERRORS):
            self.held.unpersist()


def run_read_job(
    session: SparkSession,
    order: ReadOrder,
    units: list[ReadUnit],
    variables: Mapping[str, str] | None = None,
) -> tuple[list[UnitAnswer], KeptRows | None]:
    """Read each unit in a task; return the answers in the order of the units, and what is kept.

    The workers have these variables in their environment, beside those of the store.

    Raises:
        Py4JJavaError: a task failed; or a PySparkException.
        PoisonError: an answer did not arrive.
    """
    if not units:
        return [], None
    context = prepare_context(session, variables)
    job, inbox = uuid4().hex, open_inbox(context)
    inbox.value.expect(job)
    pieces = context.parallelize(units, len(units)).mapPartitions(
        partial(_run_in_worker, _read_units, order, job, inbox)
    )
    with keep_read_rows(order, units, pieces) as kept, note_failed_unit(units):
        try:
            # Counted in the JVM: what is kept does not pass through another worker.
            pieces._jrdd.count()
        finally:
            answers_of_tasks = inbox.value.take(job)
        return sort_unit_answers(order, units, answers_of_tasks), kept


@contextmanager
def keep_read_rows(order: ReadOrder, units: list[ReadUnit], rows: Any) -> Iterator[KeptRows | None]:
    """Let Spark keep the rows of a read job, an RDD or a frame, if a second job needs them.

    If the first one fails they are given up: a server would hold them until it ends.
    """
    if not has_kept_rows(order, units):
        yield None
        return
    # Of a large epoch Spark would fill the heap of each executor with them first, and of the
    # driver's JVM if it has no others.
    is_small = sum(map(measure_unit, units)) <= _MOST_IN_MEMORY
    rows.persist(StorageLevel.MEMORY_AND_DISK if is_small else StorageLevel.DISK_ONLY)
    kept = KeptRows(rows, len(units), rows)
    try:
        yield kept
    except BaseException:
        kept.discard()
        raise


def sort_unit_answers(
    order: ReadOrder, units: list[ReadUnit], answers: list[tuple[UnitAnswer, TaskReport]]
) -> list[UnitAnswer]:
    """Return what tasks say of units in the order of these, and log the tasks.

    Raises:
        PoisonError: an answer did not arrive.
    """
    # A task that ran twice has answered twice.
    found = {answer.number: (answer, report) for answer, report in answers}
    if len(found) < len(units):
        raise SPARK_FAILED(pipeline=order.spec.name, cause="answers of tasks did not arrive")
    log_readers(order, [describe_task(*found[unit.number]) for unit in units])
    return [found[unit.number][0] for unit in units]


def run_events_job(kept: KeptRows, order: EventsOrder, firsts: FirstPositions) -> list[FileAnswer]:
    """Write the kept rows of each unit, which begin at these positions."""
    write = partial(_run_in_worker, _write_unit_rows, order, firsts)
    return _collect_files(order, kept.pieces.mapPartitionsWithIndex(write))


def run_release_job(
    session: SparkSession, kept: KeptRows | None, order: RangesOrder
) -> list[FileAnswer]:
    """Write rows in order: each target by a task of its own, or by the tasks that share them."""
    context = prepare_context(session)
    rows = context.parallelize([], order.maps) if kept is None else kept.pieces
    if order.shares:
        write = partial(_run_in_worker, write_share, order)
        shares = context.union([rows.coalesce(1)] * order.shares)
        return _collect_files(order, shares.mapPartitionsWithIndex(write))
    shipped = rows.mapPartitionsWithIndex(partial(_run_in_worker, cut_rows, order))
    ranges = _move_to_tasks(shipped, order.moved_to)
    write = partial(_run_in_worker, write_targets, order)
    return _collect_files(order, ranges.mapPartitions(write))


def _move_to_tasks(shipped: Any, tasks: int) -> Any:
    """As `RDD.partitionBy` does it, but a task that cuts rows holds none for others.

    PySpark would gather a thousand pieces of them, half a gigabyte, before it sends any.
    """
    if not isinstance(shipped, RDD):  # of a `LocalSession`
        return shipped.partitionBy(tasks, int)
    context: Any = shipped.context
    packed: Any = shipped.mapPartitions(_encode_pairs)
    packed._bypass_serializer = True  # what it yields are bytes in the form of Spark's pairs
    pairs = context._jvm.PairwiseRDD(packed._jrdd.rdd()).asJavaPairRDD()
    partitioner = context._jvm.PythonPartitioner(tasks, 0)
    moved = context._jvm.PythonRDD.valueOfPair(pairs.partitionBy(partitioner))
    return RDD(moved, context, CPickleSerializer())


def count_tasks(session: SparkSession) -> int | None:
    """How many tasks run at a time; None: Spark Connect does not say."""
    return session.sparkContext.defaultParallelism if hasattr(session, "sparkContext") else None


def _collect_files(order: EventsOrder, rows: Any) -> list[FileAnswer]:
    return sort_file_answers(order, rows.collect(), rows.getNumPartitions())


def sort_file_answers(
    order: EventsOrder, answers: list[FileAnswer], written_by: int
) -> list[FileAnswer]:
    """Return what so many tasks say of files in the order of these, and log the tasks.

    Raises:
        TidegateError: what the first task that met an error says.
    """
    answers = sorted(answers, key=lambda one: one.number)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    log_files("events", order.folders, answers, written_by)
    return answers


def log_files(
    job: str, folders: AttemptFolders, answers: Sequence[FileAnswer], written_by: int = 1
) -> None:
    """Log the tasks of a job, which have written files."""
    written_by = min(written_by, len(answers))
    # Of fewer tasks than files each has written its share (`write_share`).
    tasks = list[dict[str, Any]]()
    for task in range(written_by):
        own = answers[task::written_by]
        reports = [answer.report for answer in own if answer.report is not None]
        files = [file for answer in own for file in answer.files]
        tasks.append(describe_writer(task, files, TaskReport.sum_up(reports)))
    log_tasks(job, folders, tasks)


def log_readers(order: ReadOrder, tasks: list[dict[str, Any]]) -> None:
    """Log the tasks of a read job."""
    log_tasks("late" if order.gone else "read", order.folders, tasks)


def log_tasks(job: str, folders: AttemptFolders, tasks: list[dict[str, Any]]) -> None:
    """Log the tasks of a job of an epoch."""
    _log.info("tasks_finished", job=job, slot=folders.attempt.slot, tasks=tasks)


def run_small_job(
    session: SparkSession, body: Callable[[Iterable[Any]], Iterator[Any]], items: Sequence[Any]
) -> list[Any]:
    """Let a task for each item run this body, a function of a module, and return all answers.

    Raises:
        Py4JJavaError: a task failed; or a PySparkException.
    """
    tasks = prepare_context(session).parallelize(items, len(items))
    answers: list[Any] = tasks.mapPartitions(partial(_run_in_worker, body)).collect()
    return answers


def sort_inspections(found: list[tuple[InspectionAnswer, TaskReport]]) -> list[InspectionAnswer]:
    """Return what tasks say of objects in the order of their units, and log the tasks."""
    found = sorted(found, key=lambda one: one[0].number)
    tasks = [describe_task(*one) for one in found]
    _log.info("tasks_finished", job="inspect", tasks=tasks)
    return [answer for answer, _ in found]


def start_workers(
    session: SparkSession,
    variables: Mapping[str, str] | None = None,
    libraries: Sequence[str] = (),
    sample: StoreSample | None = None,
    spec: PipelineSpec | None = None,
) -> None:
    """Start as many workers as run at a time, and let them import the kernel and libraries.

    They see the store of this process, so `sample` is not looked at. The variables of the topics of
    `spec` are theirs where they have keys of their own.

    Raises:
        ConfigurationError: a worker has other packages than the driver.
        Py4JJavaError: a worker cannot run tidegate; or a PySparkException.
    """
    context = prepare_context(session, variables)
    tasks = context.defaultParallelism
    body = partial(_import_kernel, libraries, spec if have_executors_keys(session) else None)
    for other in context.parallelize(range(tasks), tasks).mapPartitions(body).collect():
        raise other


def prepare_context(session: SparkSession, variables: Mapping[str, str] | None = None) -> Any:
    """Return the context, whose workers get the variables of the store, and these.

    Keys of the store are not among them where executors have their own.
    """
    context = session.sparkContext
    own = select_driver_variables(os.environ, with_keys=not have_executors_keys(session))
    given = {k: os.environ.get(k, v) for k, v in _ALLOCATOR_VARIABLES.items()}
    known = {VERSIONS_VARIABLE: describe_versions(), **_describe_container(context)}
    variables = {**given, **own, **known, **(variables or {})}
    with _environment_lock:
        # Replaced, not changed: PySpark may be reading it for a job of another thread.
        context.environment = {**context.environment, **variables}
    return context


@lru_cache(maxsize=1)
def _describe_container(context: Any) -> dict[str, str]:
    """The memory of YARN's containers, for workers."""
    given = os.environ.get(CONTAINER_VARIABLE)
    if given is not None or getattr(context, "master", "") != "yarn":
        return {} if given is None else {CONTAINER_VARIABLE: given}
    found = count_container_bytes(dict(context.getConf().getAll()))
    return {} if found is None else {CONTAINER_VARIABLE: str(found)}


def build_topic_variables(session: SparkSession, spec: PipelineSpec) -> dict[str, str]:
    """Return the variables of a pipeline's topics for workers, as `run_read_job` takes them.

    Raises:
        ConfigurationError: a variable that the options of a topic name is not set.
    """
    return build_settings_variables(spec, with_secrets=not have_executors_keys(session))


def have_executors_keys(session: SparkSession) -> bool:
    """Whether executors have keys of their own; the first call of a session asks them.

    Through Spark Connect they are not asked, and the answer is no.

    Raises:
        Py4JJavaError: they run no Python; or a PySparkException.
    """
    if not hasattr(session, "sparkContext"):
        return False
    return _find_executor_keys(session.sparkContext)


@lru_cache(maxsize=1)
def _find_executor_keys(context: Any) -> bool:
    if getattr(context, "master", "local").startswith("local"):
        return has_executor_keys(os.environ)
    names = EXECUTOR_VARIABLES

    def tell(_: Iterable[int]) -> Iterator[bool]:  # pickled whole: it runs where tidegate is not
        yield any(os.environ.get(name) for name in names)

    tasks = context.defaultParallelism
    # One is enough: a host without keys shall fail, not get those of the driver.
    return any(context.parallelize(range(tasks), tasks).mapPartitions(tell).collect())


def describe_task(answer: UnitAnswer | InspectionAnswer, report: TaskReport) -> dict[str, Any]:
    """Return what the log says of a task."""
    return {
        "task": answer.number,
        "rows": answer.rows,
        "bytes": answer.read_bytes,
        **report.describe(),
    }


def describe_writer(
    task: int, files: Sequence[FileRef], report: TaskReport | None
) -> dict[str, Any]:
    """Return what the log says of a task that has written these files."""
    assert report is not None  # noqa: S101 - each task reports
    return {
        "task": task,
        "rows": sum(file.rows for file in files),
        "bytes": sum(file.bytes for file in files),
        **report.describe(),
    }


class _Inbox:
    """What the tasks of the driver's jobs have answered; several jobs may run at a time.

    A thread of PySpark adds answers meanwhile, so nothing here replaces what another thread holds.
    """

    def __init__(self) -> None:
        self._answers: dict[str, list[Any]] = {}

    def expect(self, job: str) -> None:
        """Take answers of this job from now on."""
        self._answers[job] = []

    def add(self, answers: list[tuple[str, Any]]) -> None:
        """Note the answers of jobs that are expected, not of those that have ended."""
        for job, answer in answers:
            if (found := self._answers.get(job)) is not None:
                found.append(answer)

    def take(self, job: str) -> list[Any]:
        """Return the answers of a job, and expect no more."""
        return self._answers.pop(job)


class _Gathered(AccumulatorParam[Any]):
    """Lists of answers in the tasks, the inbox in the driver."""

    def zero(self, value: Any) -> list[Any]:
        """Return what a task begins with: no answers."""
        return []

    def addInPlace(self, value1: Any, value2: list[Any]) -> Any:  # noqa: N802
        """Add the answers to a task's list, or to the inbox."""
        if isinstance(value1, _Inbox):
            value1.add(value2)
            return value1
        return value1 + value2


@lru_cache(maxsize=1)
def open_inbox(context: SparkContext) -> Accumulator[Any]:
    """The accumulator of a context. PySpark forgets none, so one serves all jobs."""
    return context.accumulator(_Inbox(), _Gathered())


# The bodies of tasks


def _run_in_worker(body: Callable[..., Iterable[Any]], *given: Any) -> Iterator[Any]:
    prepare_worker()
    yield from body(*given)


def _read_units(
    order: ReadOrder, job: str, inbox: Accumulator[Any], units: Iterator[ReadUnit]
) -> Iterator[KeptPiece]:
    for unit in units:
        for reading in read_in_batches(order, unit):
            last = reading.answer, reading.report
            if reading.kept is not None:
                yield from encode_kept_rows(reading.kept)
        inbox.add([(job, last)])


def _write_unit_rows(
    order: EventsOrder, firsts: FirstPositions, unit: int, pieces: Iterator[KeptPiece]
) -> Iterator[FileAnswer]:
    yield write_unit_events(order, firsts, unit, pieces)


def _encode_pairs(shipped: Iterable[Shipped]) -> Iterator[bytes]:
    pickle: Any = CPickleSerializer()
    for target, item in shipped:
        yield target.to_bytes(8, "big")  # as `pyspark.serializers.pack_long` has it
        yield pickle.dumps((target, item))


def describe_units(
    units: Iterable[InspectionUnit],
) -> Iterator[tuple[InspectionAnswer, TaskReport]]:
    """The body of a task that tells a plan what objects hold."""
    for unit in units:
        begun = time.process_time()
        yield describe_unit(unit), TaskReport.measure_since(begun)


def _import_kernel(
    libraries: Sequence[str], spec: PipelineSpec | None, _rows: Iterator[int]
) -> Iterator[TidegateError]:
    """The body of a task that starts its worker, and looks for the variables of topics.

    Packages that are not the driver's are its answer: a failure Spark would try again elsewhere.
    """
    if (other := find_other_version(os.environ.get(VERSIONS_VARIABLE))) is not None:
        yield other
        return
    import_libraries(libraries)
    if spec is not None:
        require_settings(spec)


def import_libraries(libraries: Sequence[str]) -> None:
    """Make a worker ready for its first task."""
    prepare_worker()
    for name in libraries:
        import_module(name)


def _keep_caches(self: zipimport.zipimporter) -> None:
    """Forget nothing."""


def prepare_worker(versions: str | None = None) -> None:
    """Require the driver's packages in a worker, and make cheap what it repeats for each task.

    The latter once in each worker. The process of a `LocalSession` runs tasks itself, and stays as
    it is.

    Args:
        versions: of the driver (`describe_versions`), by default those in the environment.

    Raises:
        RuntimeError: a package is not the driver's (`carry_error`). The worker may have joined
            later than `start_workers`.
    """
    if TaskContext.get() is None:
        return
    wanted = versions or os.environ.get(VERSIONS_VARIABLE)
    if wanted != describe_versions() and (other := find_other_version(wanted)) is not None:
        raise carry_error(other)
    if hasattr(sys, "_tidegate_settled"):
        return
    sys._tidegate_settled = True  # type: ignore[attr-defined]
    container = os.environ.get(CONTAINER_VARIABLE, "")
    watch_memory(int(container) if container.isdecimal() else None)
    # PySpark forgets all imports before each task. Then the directories of its archives are read
    # again, which takes longer than a small task.
    zipimport.zipimporter.invalidate_caches = _keep_caches  # type: ignore[method-assign]
    pa.set_cpu_count(1)  # a task has one core
    gc.collect()
    gc.freeze()  # PySpark collects garbage after each task
    daemon: Any = sys.modules["__main__"]
    if hasattr(daemon, "manager"):  # of `pyspark.daemon`, which calls `worker` for each task
        daemon.worker = end_with_jvm(daemon.worker)


def end_with_jvm(run_worker: Callable[[Any, bool], int]) -> Callable[[Any, bool], int]:
    """Let a worker end without a word where the JVM it would answer to has gone.

    PySpark shows a traceback of a broken pipe in the driver's log, if a worker that waits for a
    task sees the end of the JVM before the signal to end.
    """

    def run_quietly(sock: Any, authenticated: bool) -> int:
        """Return the exit code of a task, 1 without a JVM."""
        try:
            return run_worker(sock, authenticated)
        except BrokenPipeError:
            return 1

    return run_quietly
