"""The Mover on Spark SQL (docs/architecture.md, section 2).

General, any Spark SQL expression, any scale.

A small epoch costs a few Spark jobs of one task each; a large one reads each row once for each kind
of output. Only the DataFrame API that classic Spark and Spark Connect share is used; no row passes
through Python objects.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, SurveyedCut
from tidegate.jobs.spark.cut_reader import CutFrame, SparkSessions, open_cut
from tidegate.jobs.spark.cut_survey import MemberScans, SurveyedRows, survey_cut
from tidegate.jobs.spark.edge_events import EpochEdges, pair_edges
from tidegate.jobs.spark.epoch_context import EpochContext, WindowOutput
from tidegate.jobs.spark.epoch_outputs import EpochOutputs
from tidegate.jobs.spark.errors import SPARK_FAILED
from tidegate.jobs.spark.file_writer import FileWriter
from tidegate.jobs.spark.late_and_dead_rows import (
    DeadRows,
    LateRows,
    write_dead_letters,
    write_judged_late_rows,
    write_late_rows,
)
from tidegate.jobs.spark.native_epoch import (
    is_fully_native,
    merge_folded_slices,
    write_folded_late_rows,
)
from tidegate.jobs.spark.native_windows import plan_window_folds
from tidegate.jobs.spark.ordered_release import (
    ReleasedRows,
    adjust_start_times,
    count_released_rows,
    release_rows,
)
from tidegate.jobs.spark.reducer_tasks import SparkReducerRunner
from tidegate.jobs.spark.session_windows import process_sessions
from tidegate.jobs.spark.spark_session import (
    SPARK_ERRORS,
    detect_lost_executors,
    extract_cause,
    open_quick_session,
    open_session,
    runs_on_one_host,
)
from tidegate.jobs.spark.staging import DiskStaging, open_staging
from tidegate.jobs.spark.tumbling_sliding_windows import process_window
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind
from tidegate.jobs.streams.reducers import ReducerRunner, fold_batch

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _StagedCut:
    """What `survey` keeps for `move`: the rows, their scans and the folder with their files."""

    frame: CutFrame
    scans: MemberScans
    folder: Path


class SparkMover:
    """Moves rows as decided, on Spark SQL.

    Args:
        store: where objects, segments and table files lie.
        spec: the pipeline.
        workdir: folder for scratch files and local copies of segments; see staging.py for how tasks
            see it.
        session: a running session to use; by default one is started from ``spec.spark`` and stopped
            by `close`.
        native: fold windows without Spark SQL where `explain_spark_window` gives no reason against
            it. Tests compare both ways.

    Attributes:
        session: the session that was given or started.
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
        self.session = open_session(spec) if session is None else session
        self._sessions = SparkSessions(open_quick_session(self.session), self.session)
        self._staging = open_staging(
            (self.session, self._sessions.quick), spec, store, self._workdir
        )
        # The driver folds beside its tasks: with a cluster the rows belong on the executors.
        self._folds = plan_window_folds(spec) if native and runs_on_one_host(spec.spark) else {}
        self._cut_folder: Path | None = None  # scratch files of the newest survey

    def survey(self, cut: Cut, state: Mapping[str, Any]) -> SurveyedCut:
        """Summarise the cut and keep its rows for `move`; removes the rows of the last survey."""
        self._discard_cut_folder()
        folder = self._cut_folder = Path(mkdtemp(prefix="epoch-", dir=self._workdir))
        frame = open_cut(self._sessions, self._spec, self._store, cut, folder, self._staging)
        scans = self._run_reporting_errors(
            frame, lambda: survey_cut(frame, self._spec, state, self._folds)
        )
        return SurveyedCut(cut, scans.survey, _StagedCut(frame, scans, folder))

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """Write released rows, late rows, window results, dead letters and new state segments."""
        staged: _StagedCut = surveyed.staged
        try:
            return self._run_reporting_errors(
                staged.frame, lambda: self._move_staged(order, staged)
            )
        finally:
            self._discard_cut_folder()

    def fold_runner(self) -> ReducerRunner:
        """Run keyed reducers in tasks, if a batch is large and tasks see the scratch folder."""
        # With staging in the bucket, tasks on other hosts cannot see the files of the driver.
        shared = isinstance(self._staging, DiskStaging)
        return SparkReducerRunner(self.session, self._workdir) if shared else fold_batch

    def close(self) -> None:
        """Stop an own session and remove scratch files."""
        self._staging.discard(self._workdir)
        shutil.rmtree(self._workdir, ignore_errors=True)
        if self._own:
            self.session.stop()

    def _discard_cut_folder(self) -> None:
        if self._cut_folder is not None:
            self._staging.discard(self._cut_folder)
            shutil.rmtree(self._cut_folder, ignore_errors=True)
            self._cut_folder = None

    def _run_reporting_errors(self, frame: CutFrame, work: Callable[[], _T]) -> _T:
        """Turn Spark's errors into errors that name the corrupt object and hide Java stacks."""
        try:
            return work()
        except SPARK_ERRORS as error:
            raise (
                frame.find_corruption()
                or self._staging.find_outage()
                or detect_lost_executors(self._spec.name, error, pipeline=self._spec.name)
                or SPARK_FAILED(pipeline=self._spec.name, cause=extract_cause(error))
            ) from error

    def _move_staged(self, order: MoveOrder, staged: _StagedCut) -> MoveResult:
        epoch = self._make_epoch_context(order, staged)
        any_dead = any(member.dead for member in staged.scans.survey.members) or any(
            source.rules for source in self._spec.sources.values()
        )
        with ThreadPoolExecutor(4) as pool:  # the jobs are small: one alone would leave a core idle
            released = pool.submit(_release_and_write_late, epoch, staged.scans)
            dead = pool.submit(write_dead_letters, epoch) if any_dead else None
            # In this thread, because every window needs it, while the pool already works on the
            # rest.
            edges = pair_edges(epoch)
            windows = {
                name: pool.submit(_process_window_output, epoch, name, edges)
                for name in self._spec.windows
            }
        rows, late = released.result()
        return EpochOutputs(
            self._spec,
            staged.scans,
            rows,
            late,
            DeadRows() if dead is None else dead.result(),
            edges,
            {name: work.result() for name, work in windows.items()},
        ).to_result(epoch)

    def _make_epoch_context(self, order: MoveOrder, staged: _StagedCut) -> EpochContext:
        members = staged.scans.survey.members
        partials = merge_folded_slices(self._folds, staged.scans, order.decision, order.epoch)
        native = is_fully_native(self._spec, staged.scans, partials)
        data, aside = (
            _apply_verdicts(staged, self._spec)
            if not native and any(member.rows + member.quarantined for member in members)
            else (None, None)
        )
        low = min(
            (member.min_time for member in members if member.min_time is not None), default=None
        )
        high = max(
            (member.max_time for member in members if member.max_time is not None), default=None
        )
        writer = FileWriter(self._store, order.folders, staged.folder, self._staging)
        kept = self._workdir / "segments"
        known = SurveyedRows(
            self._sessions, self._spec, staged.frame, staged.scans.times if aside is None else {}
        )
        return EpochContext(
            self._sessions,
            self._spec,
            self._store,
            order,
            writer,
            staged.frame,
            data,
            aside,
            known,
            low,
            high,
            kept,
            partials,
            native,
        )


def _apply_verdicts(
    staged: _StagedCut, spec: PipelineSpec
) -> tuple[DataFrame | None, DataFrame | None]:
    """The data rows that go on, and those that the survey set aside (None when there are none)."""
    frame, scans = staged.frame.frame, staged.scans
    if frame is None:
        return None, None
    if any(
        member.dead or member.barrier or member.punctuation is not None
        for member in scans.survey.members
    ):
        frame = frame.where("_dead IS NULL AND _kind = 'data'")
    rows = [(i, v.seq, v.what, v.mark) for i, verdicts in scans.verdicts.items() for v in verdicts]
    if not rows:
        return frame, None
    columns = list(zip(*rows, strict=True))
    kinds = {"_vm": pa.int32(), "_vseq": pa.int64(), "_verdict": pa.string(), "_mark": pa.int64()}
    table = pa.table(
        {
            name: pa.array(values, kind)
            for (name, kind), values in zip(kinds.items(), columns, strict=True)
        }
    )
    # One partition: a broadcast collects it anyway, and each further one would cost a task.
    verdicts = frame.sparkSession.createDataFrame(table).coalesce(1)
    judged = frame.join(F.broadcast(verdicts), F.expr("_m = _vm AND _seq = _vseq"), "left").drop(
        "_vm", "_vseq"
    )
    going = judged.where("_verdict IS NULL OR _verdict = 'adjust'")
    going = adjust_start_times(going, spec, "_verdict IS NOT NULL", "_mark").drop(
        "_moved", "_verdict", "_mark"
    )
    return going, judged.where("_verdict IS NOT NULL AND _verdict <> 'adjust'")


def _process_window_output(epoch: EpochContext, name: str, edges: EpochEdges) -> WindowOutput:
    window = epoch.spec.windows[name]
    merging = (
        window.kind is WindowKind.SESSION or window.fire_every is not None
    )  # beside edges the spec refuses both
    return process_sessions(epoch, name) if merging else process_window(epoch, name, edges)


def _release_and_write_late(
    epoch: EpochContext, scans: MemberScans
) -> tuple[ReleasedRows, LateRows]:
    if not epoch.spec.outputs.events:
        late = write_folded_late_rows(epoch, scans) if epoch.native else write_late_rows(epoch)
        return count_released_rows(scans), late
    released, judged = release_rows(epoch)
    return released, (
        write_late_rows(epoch) if judged is None else write_judged_late_rows(epoch, judged)
    )
