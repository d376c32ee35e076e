"""The Mover on Spark SQL (docs/architecture.md, section 2).

General, any Spark SQL expression, any scale.

A small epoch costs a few Spark jobs of one task each; a large one reads each row once for each kind
of output. Only the DataFrame API that classic Spark and Spark Connect share is used; no row passes
through Python objects.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import structlog
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.store import ObjectInfo, Store
from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, SurveyedCut
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.rows.edge_folds import OPEN_EDGES, collect_edge_columns, select_punctual_edges
from tidegate.jobs.rows.judged_rows import apply_verdicts, select_data_rows
from tidegate.jobs.rows.session_folds import is_folded_by_parts
from tidegate.jobs.rows.topic_reading import build_settings_variable, remove_settings
from tidegate.jobs.rules.duck_frame import ENGINE_ERRORS, Frame
from tidegate.jobs.rules.native_support import explain_spark_rows, explain_spark_window
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_inspection import InspectedObject
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.streams.reducers import ReducerRunner, fold_batch

from .cut_reader import CutFrame, arrow_to_frame, open_cut
from .cut_survey import NATIVE_CELLS, MemberScans, survey_cut
from .edge_events import EpochEdges, choose_edge_engine, pair_edges
from .epoch_context import EpochContext, FileWriter, OutputFiles
from .epoch_outputs import EpochOutputs
from .errors import SPARK_FAILED
from .late_and_dead_rows import write_dead_letters, write_late_rows
from .late_sessions import read_late_rows
from .ordered_release import count_released_rows, release_rows
from .python_tasks import StoreSample
from .reducer_tasks import SparkReducerRunner
from .session_windows import TaskItems, process_sessions
from .shared_store import require_shared_store
from .spark_session import (
    SPARK_ERRORS,
    SparkSessions,
    bound_results,
    detect_large_results,
    detect_lost_executors,
    extract_cause,
    open_session,
    runs_on_one_host,
)
from .staging import BucketStaging, Staging, open_staging
from .task_epochs import TaskScans, describe_objects_in_tasks, require_frontier, survey_in_tasks
from .task_events import release_in_tasks
from .task_runner import choose_runner
from .tumbling_sliding_windows import process_partials, process_window

if TYPE_CHECKING:
    from .kafka_staging import KafkaStager

_log = structlog.get_logger("tidegate.driver")


class SparkMover:
    """Moves rows as decided, on Spark SQL.

    Args:
        store: where objects, segments and table files lie.
        spec: the pipeline.
        workdir: below it the mover makes a folder for scratch files and local copies of segments,
            which `close` removes; see staging.py for how tasks see it.
        session: a running session to use; by default one is started from ``spec.spark`` and stopped
            by `close`.
        native: compute outputs in the driver where `jobs.rules.native_support` gives no reason
            against it. Tests compare both ways.

    Raises:
        ConfigurationError: Spark's tasks do not see the folder, or cannot read the bucket.
    """

    def __init__(
        self,
        store: Store,
        spec: PipelineSpec,
        workdir: Path,
        session: SparkSession | None = None,
        *,
        native: bool = True,
    ) -> None:
        self._store = store
        self._spec = spec
        workdir.mkdir(parents=True, exist_ok=True)
        self._workdir = Path(mkdtemp(prefix="spark-", dir=workdir))
        # A session that was given belongs to the caller, who stops it.
        self._own = session is None
        # Where tasks read the rows, neither the driver nor (but for some cuts) Spark SQL does.
        self._in_tasks = native
        asked = bound_results(spec) if self._in_tasks else spec
        self._sessions = SparkSessions(lambda: open_session(asked) if session is None else session)
        self._staging = open_staging(self._sessions, spec, store, self._workdir)
        # The driver computes beside its tasks: with a cluster the rows belong on the executors.
        self._native = native and runs_on_one_host(spec.spark) and explain_spark_rows(spec) is None
        # A pipeline that needs no Spark SQL does not wait for a JVM; rare epochs start one.
        if not self._native or self._in_tasks or self._list_spark_windows():
            _ = self._sessions.full
        if self._in_tasks and self._own:
            self._in_tasks = self._has_python_workers()
        if self._in_tasks:
            require_shared_store(self._sessions, spec, store)
        if self._in_tasks and isinstance(store, InputView):
            store.let_tasks_inspect(self._describe_in_tasks)
        self._cut_folder: Path | None = None  # scratch files of the newest survey
        self._kept: TaskScans | None = None  # what tasks keep of it
        self._kafka = _open_kafka_stager(self._sessions, spec, self._staging)

    @property
    def session(self) -> SparkSession:
        """The session that was given, or an own one, which is started at the first use."""
        return self._sessions.full

    def survey(
        self,
        cut: Cut,
        state: Mapping[str, Any],
        folders: AttemptFolders,
        released_max: ReleaseMark | None = None,
    ) -> SurveyedCut:
        """Summarise the cut and keep its rows for `move`; removes the rows of the last survey.

        Raises as `Mover.survey` does, and a TransientError if the store, brokers or executors fail.
        """
        self._discard_cut_folder()
        folder = self._cut_folder = Path(mkdtemp(prefix="epoch-", dir=self._workdir))
        if self._in_tasks:
            self._kept = found = self._survey_in_tasks(cut, state, folders, released_max)
            return SurveyedCut(cut, found.survey, found)
        if self._kafka is not None:
            self._kafka.stage_ranges(cut, folder / "objects")
        frame = open_cut(self._sessions, self._spec, self._store, cut, folder, self._staging)
        with self._report_errors(frame):
            native = self._native and not self._in_tasks
            scans = survey_cut(frame, self._spec, state, native=native)
        return SurveyedCut(cut, scans.survey, scans)

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """Write released rows, late rows, window results, dead letters and new state segments.

        It removes the rows of the survey, also if it fails: each survey can be moved once.
        """
        scans: MemberScans | TaskScans = surveyed.staged
        try:
            if isinstance(scans, TaskScans):
                return self._move_folded(order, scans)
            with self._report_errors(scans.staged):
                return self._move_scanned(order, scans)
        finally:
            self._discard_cut_folder()

    def fold_runner(self) -> ReducerRunner:
        """Return what runs reducers: tasks, if they see the scratch folder, else this process.

        Tasks get only large batches of reducers with keys.
        """
        # With staging in the bucket, tasks on other hosts cannot see the files of the driver.
        if isinstance(self._staging, BucketStaging):
            return fold_batch
        return SparkReducerRunner(self._sessions, self._workdir)

    def close(self) -> None:
        """Stop an own session, close connections and remove scratch files."""
        if isinstance(self._store, InputView):
            self._store.let_tasks_inspect(None)
        if self._kafka is not None:
            self._kafka.close()
        self._staging.discard(self._workdir)
        shutil.rmtree(self._workdir, ignore_errors=True)
        if self._own and self._sessions.is_started:
            self._sessions.full.stop()

    def _has_python_workers(self) -> bool:
        """Start the workers, and say whether they can run tidegate.

        A cluster may have hosts without it, for example of Spark's own image. Those of a Connect
        server may have no keys for the store.
        """
        try:
            variables = build_settings_variable(self._spec)
            topics = [one.kafka for one in self._spec.sources.values() if one.kafka is not None]
            libraries = ["confluent_kafka"] if topics else []
            if any(kafka.payload == "protobuf" for kafka in topics):
                libraries.append("google.protobuf.message")
            session, key = self._sessions.full, BucketLayout(self._spec.name).lease_key
            sample = StoreSample(self._store.url, key, self._store.stat(key) is not None)
            runner = choose_runner(session)
            runner.start_workers(session, variables, libraries, sample, remove_settings(self._spec))
        except SPARK_ERRORS as error:
            _log.warning(
                "python_tasks_unavailable", pipeline=self._spec.name, cause=extract_cause(error)
            )
            return False
        return True

    def _discard_cut_folder(self) -> None:
        if self._kept is not None:
            self._kept.discard()
            self._kept = None
        if self._cut_folder is not None:
            self._staging.discard(self._cut_folder)
            shutil.rmtree(self._cut_folder, ignore_errors=True)
            self._cut_folder = None

    @contextmanager
    def _report_errors(self, frame: CutFrame | None) -> Iterator[None]:
        """Turn Spark's errors into errors that name the corrupt object and hide Java stacks."""
        try:
            yield
        except SPARK_ERRORS as error:
            raise (
                (frame and frame.find_corruption())
                or self._staging.find_outage()
                or detect_large_results(self._spec.name, error)
                or detect_lost_executors(self._spec.name, error, pipeline=self._spec.name)
                or SPARK_FAILED(pipeline=self._spec.name, cause=extract_cause(error))
            ) from error

    def _survey_in_tasks(
        self,
        cut: Cut,
        state: Mapping[str, Any],
        folders: AttemptFolders,
        released_max: ReleaseMark | None,
    ) -> TaskScans:
        """Read a cut by Python tasks."""
        with self._report_errors(None):
            return survey_in_tasks(
                self._sessions, self._spec, self._store, cut, state, folders, released_max
            )

    def _describe_in_tasks(
        self, source: str, entries: Sequence[ObjectInfo], locate: Callable[[str], str]
    ) -> Sequence[InspectedObject | TidegateError]:
        with self._report_errors(None):
            return describe_objects_in_tasks(
                self._sessions, self._spec.sources[source], entries, locate
            )

    def _move_folded(self, order: MoveOrder, scans: TaskScans) -> MoveResult:
        """Merge and write what tasks have made of the rows."""
        assert self._cut_folder is not None  # noqa: S101 - `survey` has made it
        require_frontier(self._spec.name, scans, order)
        staged = CutFrame(order.cut, (), lambda: None, 0, self._cut_folder)
        with self._report_errors(staged):
            epoch = self._make_empty_context(order, staged)
            partials = {name: scans.join_partials(name) for name in self._spec.windows}
            items = {
                name: TaskItems.merge(epoch, name, partials[name])
                for name, window in self._spec.windows.items()
                if is_folded_by_parts(window)
            }
            scans = read_late_rows(epoch, scans, items)
            for answer in scans.answers:
                note_footers(self._store, answer.footers)
            late = scans.sum_late_rows(self._spec)
            came = scans.join_partials(OPEN_EDGES)
            edge_epoch = choose_edge_engine(epoch, 0 if came is None else came.num_rows)
            edges = pair_edges(edge_epoch, came)
            windows = {
                name: items[name].process()
                if name in items
                else process_partials(epoch, name, partials[name], edge_epoch, edges)
                for name in self._spec.windows
            }
            dead = scans.sum_dead_rows()
            released = (
                release_in_tasks(epoch, scans)
                if self._spec.outputs.events
                else count_released_rows(scans)
            )
            return EpochOutputs(scans, released, late, dead, edges, windows).to_result(epoch)

    def _make_empty_context(self, order: MoveOrder, staged: CutFrame) -> EpochContext:
        """What an epoch needs whose rows are with tasks."""
        return EpochContext(
            self._sessions,
            self._spec,
            self._store,
            order,
            FileWriter(self._store, order.folders, staged.scratch, self._staging),
            staged,
            data=None,
            aside=None,
            low=None,
            high=None,
            segment_folder=self._workdir / "segments",
            native=self._native and not self._list_spark_outputs(order),
        )

    def _move_scanned(self, order: MoveOrder, scans: MemberScans) -> MoveResult:
        if scans.rows is not None:
            try:
                return self._move_outputs(order, scans, native=True)
            except ENGINE_ERRORS as error:
                # Spark SQL computes it, or says what is wrong with the rows.
                _log.info("native_epoch_left_to_spark", cause=get_first_line(error))
        return self._move_outputs(order, scans, native=False)

    def _move_outputs(self, order: MoveOrder, scans: MemberScans, *, native: bool) -> MoveResult:
        epoch = on_spark = self._make_context(order, scans, native=native)
        left_out = self._list_spark_outputs(order) if native else set()
        if left_out or (native and any(s.edges is not None for s in self._spec.sources.values())):
            on_spark = self._make_context(order, scans, native=False)

        def choose_context(output: str) -> EpochContext:
            """Return the context in which an output is computed."""
            return on_spark if output in left_out else epoch

        with ThreadPoolExecutor(4) as pool:  # the jobs are small: one alone would leave a core idle
            released = (
                pool.submit(release_rows, choose_context(EVENTS))
                if self._spec.outputs.events
                else pool.submit(count_released_rows, scans)
            )
            late = pool.submit(write_late_rows, epoch, choose_context)
            dead = pool.submit(write_dead_letters, epoch, scans)
            # In this thread, because every window needs it, while the pool already works on the
            # rest.
            edges = pair_edges(on_spark, _collect_edges(on_spark))
            windows = {
                name: pool.submit(_process_window_output, choose_context(name), name, edges)
                for name in self._spec.windows
            }
        return EpochOutputs(
            scans,
            released.result(),
            late.result(),
            dead.result(),
            edges,
            {name: work.result() for name, work in windows.items()},
        ).to_result(epoch)

    def _list_spark_windows(self) -> list[str]:
        return [n for n in self._spec.windows if explain_spark_window(self._spec, n) is not None]

    def _list_spark_outputs(self, order: MoveOrder) -> set[str]:
        """The outputs of a native epoch that need Spark SQL: by the rules, or for their state."""
        rows: Counter[str] = Counter()
        for ref in order.segments:
            rows[ref.kind] += ref.rows
        most = NATIVE_CELLS // len(self._spec.columns)
        large = {kind.removeprefix("window:") for kind, size in rows.items() if size > most}
        waiting = {EVENTS} if ORDER_KIND in large else set()
        return waiting | set(self._list_spark_windows()) | (large & self._spec.windows.keys())

    def _make_context(self, order: MoveOrder, scans: MemberScans, *, native: bool) -> EpochContext:
        members, staged = scans.survey.members, scans.staged
        frame = None
        if any(member.rows + member.quarantined for member in members):
            frame = _read_judged_rows(scans, self._spec, native=native)
        data, aside = apply_verdicts(frame, self._spec)
        times = [(m.min_time, m.max_time) for m in members]
        return EpochContext(
            self._sessions,
            self._spec,
            self._store,
            order,
            FileWriter(self._store, order.folders, staged.scratch, self._staging),
            staged,
            data,
            aside,
            min((low for low, _ in times if low is not None), default=None),
            max((high for _, high in times if high is not None), default=None),
            self._workdir / "segments",
            native,
        )


def _read_judged_rows(scans: MemberScans, spec: PipelineSpec, *, native: bool) -> Frame | None:
    """The data rows of a cut, with `_verdict` and `_mark` if the survey judged any of them."""
    if native:
        assert scans.rows is not None  # noqa: S101 - asked for by the caller
        return select_data_rows(spec, scans.staged.cut, scans.rows)
    found = scans.staged.frame
    if found is None:
        return None
    if any(
        member.dead or member.barrier or member.punctuation is not None
        for member in scans.survey.members
    ):
        found = found.where("_dead IS NULL AND _kind = 'data'")
    if not scans.verdicts.num_rows:
        return found
    # One partition: a broadcast collects it anyway, and each further one would cost a task.
    verdicts = arrow_to_frame(found.sparkSession, scans.verdicts).coalesce(1)
    return found.join(F.broadcast(verdicts), F.expr("_m = _vm AND _seq = _vseq"), "left").drop(
        "_vm", "_vseq"
    )


def _collect_edges(epoch: EpochContext) -> Any:
    """The edges of an epoch that are on time; None without any."""
    if epoch.data is None or not collect_edge_columns(epoch.spec):
        return None
    return epoch.collect_if_small(select_punctual_edges(epoch.judged), epoch.staged.rows)


def _process_window_output(epoch: EpochContext, name: str, edges: EpochEdges) -> OutputFiles:
    # Beside edges the spec refuses these.
    if is_folded_by_parts(epoch.spec.windows[name]):
        return process_sessions(epoch, name)
    return process_window(epoch, name, edges)


def _open_kafka_stager(
    sessions: SparkSessions, spec: PipelineSpec, staging: Staging
) -> KafkaStager | None:
    """What fetches ranges of topics; None without a topic."""
    if all(source.kafka is None for source in spec.sources.values()):
        return None
    # Imported late: few pipelines need it.
    from .kafka_staging import KafkaStager

    return KafkaStager(sessions, spec, staging)
