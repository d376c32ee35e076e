"""The Mover on Spark: Python tasks read and write the rows (docs/architecture.md, section 2).

Job 1 reads each row once. The driver decides from what its tasks say. Job 2 writes the events,
where job 1 has not (`early_events`).
State is merged in the driver while it is small, else by a job of its own.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import structlog
from pyspark.sql import SparkSession

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.store import ObjectInfo, Store
from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, RowWork, SurveyedCut
from tidegate.jobs.eventtime.decider import find_late_mark
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.rows.stored_partials import delete_tables
from tidegate.jobs.rows.topic_reading import remove_settings
from tidegate.jobs.rules.duck_frame import ENGINE_ERRORS
from tidegate.jobs.sinks.files_webhook import list_local_targets
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_inspection import InspectedObject
from tidegate.jobs.spec.operations import read_sink_variables
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.dispatcher import DispatchRunner
from tidegate.jobs.streams.row_history import LogHistory

from .early_events import EarlyEvents
from .epoch_context import EpochContext
from .epoch_outputs import EpochOutputs
from .errors import NO_PYTHON_WORKERS, SPARK_FAILED
from .late_sessions import read_late_rows
from .lost_workers import LostWorkers
from .python_tasks import KeptRows, StoreSample, build_topic_variables, have_executors_keys
from .shared_store import require_shared_store
from .spark_session import (
    SPARK_ERRORS,
    bound_results,
    detect_lost_executors,
    extract_cause,
    find_carried_error,
    open_session,
    runs_on_one_host,
    stop_session,
)
from .state_merging import StateMerging
from .stream_tasks import TaskDispatcher
from .task_epochs import TaskScans, describe_objects_in_tasks, require_frontier, survey_in_tasks
from .task_events import count_released_rows, release_in_tasks
from .task_runner import choose_runner
from .work_tasks import run_work_in_task

_log = structlog.get_logger("tidegate.driver")
_LIBRARIES_OF_SINKS = {"kafka": "confluent_kafka", "postgres": "psycopg"}  # by the kind of the sink


class SparkMover:
    """Moves rows as decided, by Spark's Python tasks.

    Attributes:
        session: the one that was given, or an own one.

    Args:
        store: where objects, segments and table files lie.
        spec: the pipeline.
        workdir: below it the mover makes a folder for local copies of segments, which `close`
            removes.
        session: a running session to use; by default one is started from ``spec.spark`` and stopped
            by `close`.

    Raises:
        ConfigurationError: Spark's Python workers cannot run tidegate, or do not see the store.
        TransientError: Spark lost its executors.
    """

    def __init__(
        self,
        store: Store,
        spec: PipelineSpec,
        workdir: Path,
        session: SparkSession | None = None,
    ) -> None:
        self._store = store
        self._spec = spec
        workdir.mkdir(parents=True, exist_ok=True)
        self._workdir = Path(mkdtemp(prefix="spark-", dir=workdir))
        # A session that was given belongs to the caller, who stops it.
        self._own = session is None
        self.session = self._start_session() if session is None else session
        require_shared_store(self.session, spec, store)
        # On one host they are the driver's own, and a replay there does not touch sinks.
        for path in [] if runs_on_one_host(spec.spark) else list_local_targets(spec):
            require_shared_store(self.session, spec, LocalStore(Path(path)))
        if isinstance(store, InputView):
            store.let_tasks_inspect(self._describe_in_tasks)
        self._lost = LostWorkers(spec.name)
        self._early = EarlyEvents(spec)
        self._kept: KeptRows | None = None  # what tasks keep of the newest survey
        self._merger = ThreadPoolExecutor(1, "merge")

    def survey(
        self,
        cut: Cut,
        state: Mapping[str, Any],
        folders: AttemptFolders,
        released_max: ReleaseMark | None = None,
        next_position: int | None = None,
    ) -> SurveyedCut:
        """Summarise the cut and keep its rows for `move`; gives up the rows of the last survey.

        Raises as `Mover.survey` does, and a TransientError if the store, brokers or executors fail.
        """
        self._discard_rows()
        with self._report_errors():
            found = survey_in_tasks(
                self.session,
                self._spec,
                self._store,
                cut,
                state,
                folders,
                find_late_mark(self._spec, state, released_max),
                self._early,
                next_position,
            )
        self._kept = found.kept
        return SurveyedCut(cut, found.survey, found)

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """Write released rows, late rows, window results, dead letters and new state segments.

        It gives up the rows of the survey, also if it fails: each survey can be moved once.
        """
        scans: TaskScans = surveyed.staged
        epoch = EpochContext(
            self.session, self._spec, self._store, order, self._workdir / "segments"
        )
        times = [one.min_time for one in scans.survey.members if one.min_time is not None]
        merging = StateMerging(epoch, scans.list_partials(), min(times, default=None))
        try:
            require_frontier(self._spec.name, scans, order)
            with self._report_errors():
                result = _write_outputs(epoch, scans, merging, self._merger)
            self._lost.forget(self._spec.name)
            self._early.note_epoch(scans.units, scans.answers)
            return result
        finally:
            delete_tables(self._store, merging.list_stored())
            self._discard_rows()

    def make_dispatch_runner(
        self, store: Store, history: LogHistory, here: DispatchRunner
    ) -> DispatchRunner:
        """Return what moves the rows of streams, in tasks.

        Args:
            store: where the streams are.
            history: locates rows of earlier epochs.
            here: dispatches epochs without rows.
        """
        return TaskDispatcher(self.session, self._spec, store, history, here)

    def run_work(self, work: RowWork) -> Any:
        """Do work on rows of sealed epochs in a task; any thread may call it.

        Raises what the work has raised, a PoisonError if the task failed, and a TransientError if
        executors were lost (a PoisonError again and again).
        """
        kind = threading.current_thread().name  # that of the sink
        with self._report_errors(kind):
            answer = run_work_in_task(self.session, self._store.url, work)
        self._lost.forget(kind)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def close(self) -> None:
        """Stop an own session and remove scratch files."""
        if isinstance(self._store, InputView):
            self._store.let_tasks_inspect(None)
        self._merger.shutdown()
        shutil.rmtree(self._workdir, ignore_errors=True)
        if self._own:
            stop_session(self.session)

    def _start_session(self) -> SparkSession:
        """Start a session and its workers, and require that these can run tidegate.

        A cluster may have hosts without it, for example of Spark's own image. Those of a Connect
        server may have no keys for the store.
        """
        spec = self._spec
        try:
            libraries = list_libraries(spec)
            session = open_session(bound_results(spec))
            key = BucketLayout(spec.name).lease_key
            variables = build_topic_variables(session, spec)
            if not (spec.spark.uses_connect or have_executors_keys(session)):
                variables |= read_sink_variables(spec, os.environ)
            sample = StoreSample(self._store.url, key, self._store.stat(key) is not None)
            runner = choose_runner(session)
            runner.start_workers(session, variables, libraries, sample, remove_settings(spec))
            return session
        except SPARK_ERRORS as error:
            lost = detect_lost_executors(spec.name, error, pipeline=spec.name)
            raise (
                find_carried_error(error)
                or lost
                or NO_PYTHON_WORKERS(pipeline=spec.name, cause=extract_cause(error))
            ) from error

    def _discard_rows(self) -> None:
        if self._kept is not None:
            self._kept.discard()
            self._kept = None

    @contextmanager
    def _report_errors(self, kind: str | None = None) -> Iterator[None]:
        """Turn the errors of Spark, DuckDB and Arrow into errors that hide their stacks.

        `kind` is that of the work, by default epochs.
        """
        try:
            yield
        except (*ENGINE_ERRORS, pa.ArrowException) as error:
            cause = get_first_line(error)
            raise SPARK_FAILED(pipeline=self._spec.name, cause=cause) from error
        except SPARK_ERRORS as error:
            raise self._lost.explain(kind or self._spec.name, error, SPARK_FAILED) from error

    def _describe_in_tasks(
        self, source: str, entries: Sequence[ObjectInfo], locate: Callable[[str], str]
    ) -> Sequence[InspectedObject | TidegateError]:
        kind = f"source {source}"
        with self._report_errors(kind):
            found = describe_objects_in_tasks(
                self.session, self._spec.sources[source], entries, locate
            )
        self._lost.forget(kind)
        return found


def list_libraries(spec: PipelineSpec) -> list[str]:
    """Return the modules, besides those of every pipeline, that workers must be able to import.

    Those of sinks only on a cluster: on one host the sink itself says what is not installed.
    """
    topics = [one.kafka for one in spec.sources.values() if one.kafka is not None]
    libraries = ["confluent_kafka"] if topics else []
    if any(kafka.payload == "protobuf" for kafka in topics):
        libraries.append("google.protobuf.message")
    if not runs_on_one_host(spec.spark):
        kinds = {sink.kind for sink in spec.sinks.values()}
        libraries += [name for kind, name in _LIBRARIES_OF_SINKS.items() if kind in kinds]
    return libraries


def _write_outputs(
    epoch: EpochContext, scans: TaskScans, merging: StateMerging, merger: ThreadPoolExecutor
) -> MoveResult:
    """Merge and write what tasks have made of the rows."""
    scans = read_late_rows(epoch.session, scans, merging.find_gone_parts())
    for answer in scans.answers:
        note_footers(epoch.store, answer.footers)
    late = scans.sum_late_rows(epoch.spec)
    merging.merge_edges()
    dead = scans.sum_dead_rows()
    if epoch.spec.outputs.events:
        # The driver merges while Spark's tasks write the events.
        merged = merger.submit(merging.merge_windows)
        try:
            released = release_in_tasks(epoch, scans)
        except Exception:
            # One cause is enough, but this one may be a defect and that one an outage.
            if (other := merged.exception()) is not None:
                _log.warning("windows_not_merged", cause=get_first_line(other))
            raise
        finally:
            wait([merged])
        windows = merged.result()
    else:
        released, windows = count_released_rows(scans), merging.merge_windows()
    outputs = EpochOutputs(scans, released, late, dead, merging.edges, windows)
    return outputs.to_result(epoch)
