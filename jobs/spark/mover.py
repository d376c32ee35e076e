"""The Mover on Spark SQL (docs/architecture.md, section 2).

General, any Spark SQL expression, any scale.

A small epoch costs a few Spark jobs of one task each; a large one reads each row once for each kind
of output. Only the DataFrame API that classic Spark and Spark Connect share is used; no row passes
through Python objects.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, SurveyedCut
from tidegate.jobs.spark.cut_reader import CutFrame, SparkSessions, open_cut
from tidegate.jobs.spark.cut_survey import MemberScans, survey_cut
from tidegate.jobs.spark.edge_events import EpochEdges, pair_edges
from tidegate.jobs.spark.epoch_context import ORDER_KIND, EpochContext, WindowOutput
from tidegate.jobs.spark.event_building import build_events
from tidegate.jobs.spark.file_writer import FileWriter, WrittenFiles
from tidegate.jobs.spark.late_and_dead_rows import (
    LateRows,
    write_dead_letters,
    write_judged_late_rows,
    write_late_rows,
)
from tidegate.jobs.spark.ordered_release import (
    ReleasedRows,
    adjust_start_times,
    count_buffered_rows,
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
)
from tidegate.jobs.spark.staging import DiskStaging, open_staging
from tidegate.jobs.spark.surveyed_rows import SurveyedRows
from tidegate.jobs.spark.tumbling_sliding_windows import process_window
from tidegate.jobs.spec.pipeline import BUILT, DEAD_LETTERS, EVENTS, LATE, PipelineSpec
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
    """

    def __init__(
        self, store: Store, spec: PipelineSpec, workdir: Path, session: SparkSession | None = None
    ) -> None:
        self._store = store
        self._spec = spec
        workdir.mkdir(parents=True, exist_ok=True)
        self._workdir = Path(mkdtemp(prefix="spark-", dir=workdir))
        self._own = session is None
        self._session = open_session(spec) if session is None else session
        self._sessions = SparkSessions(open_quick_session(self._session), self._session)
        self._staging = open_staging(
            (self._session, self._sessions.quick), spec, store, self._workdir
        )
        self._cut_folder: Path | None = None  # scratch files of the newest survey

    def survey(self, cut: Cut, state: Mapping[str, Any]) -> SurveyedCut:
        """Summarise the cut and keep its rows for `move`; removes the rows of the last survey."""
        self._discard_cut_folder()
        folder = self._cut_folder = Path(mkdtemp(prefix="epoch-", dir=self._workdir))
        frame = open_cut(self._sessions, self._spec, self._store, cut, folder, self._staging)
        scans = self._run_reporting_errors(frame, lambda: survey_cut(frame, self._spec, state))
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
        shared = isinstance(self._staging, DiskStaging)
        return SparkReducerRunner(self._session, self._workdir) if shared else fold_batch

    def close(self) -> None:
        """Stop an own session and remove scratch files."""
        self._staging.discard(self._workdir)
        shutil.rmtree(self._workdir, ignore_errors=True)
        if self._own:
            self._session.stop()

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
            failed = PoisonError(
                f"Spark could not compute this epoch: {extract_cause(error)}",
                code="spark.failed",
                pipeline=self._spec.name,
                kept="everything sealed before this epoch",
                advice="check the spec's expressions against the rows",
            )
            raise (
                frame.find_corruption()
                or self._staging.find_outage()
                or detect_lost_executors(self._spec.name, error)
                or failed
            ) from error

    def _move_staged(self, order: MoveOrder, staged: _StagedCut) -> MoveResult:
        epoch = self._make_epoch_context(order, staged)
        any_dead = any(member.dead for member in staged.scans.survey.members)
        with ThreadPoolExecutor(4) as pool:  # the jobs are small: one alone would leave a core idle
            released = pool.submit(_release_and_write_late, epoch, staged.scans)
            dead = pool.submit(write_dead_letters, epoch) if any_dead else None
            edges = pair_edges(epoch)
            windows = {
                name: pool.submit(_process_window_output, epoch, name, edges)
                for name in self._spec.windows
            }
        nothing: tuple[WrittenFiles, dict[str, int]] = (WrittenFiles((), ()), {})
        done = {name: work.result() for name, work in windows.items()}
        return _assemble_moved(
            epoch,
            staged.scans,
            *released.result(),
            nothing if dead is None else dead.result(),
            edges,
            done,
        )

    def _make_epoch_context(self, order: MoveOrder, staged: _StagedCut) -> EpochContext:
        members = staged.scans.survey.members
        data, aside = (
            _apply_verdicts(staged, self._spec)
            if any(member.rows + member.quarantined for member in members)
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
        return count_released_rows(scans), write_late_rows(epoch)
    released, judged = release_rows(epoch)
    return released, (
        write_late_rows(epoch) if judged is None else write_judged_late_rows(epoch, judged)
    )


def _assemble_moved(
    epoch: EpochContext,
    scans: MemberScans,
    released: ReleasedRows,
    late: LateRows,
    dead: tuple[WrittenFiles, dict[str, int]],
    edges: EpochEdges,
    windows: dict[str, WindowOutput],
) -> MoveResult:
    glommed = build_events(epoch, released)
    tables = {
        EVENTS: released.events,
        BUILT: glommed.built,
        LATE: late.written,
        DEAD_LETTERS: dead[0],
        **{n: w.results for n, w in windows.items()},
    }
    states = [
        released.written,
        glommed.state,
        edges.written,
        *(work.written for work in windows.values()),
    ]
    own = (ref for work in windows.values() for ref in work.segments)
    segments = (*released.segments, *glommed.segments, *edges.segments, *own)
    before = count_buffered_rows(
        epoch, epoch.live_segments(ORDER_KIND), epoch.order.decision.release_before
    )
    after = count_buffered_rows(
        epoch, _filter_order_segments(segments), epoch.order.decision.release_after
    )
    return MoveResult(
        files={name: written.refs for name, written in tables.items() if written.refs},
        segments=segments,
        counters=_build_epoch_counters(scans, released, late, dead[1], windows, before, after),
        released_max=released.maximum,
        next_position=epoch.order.next_position + released.rows,
        buffered_rows=after,
        sketches=scans.sketches,
        bytes_written=sum(written.bytes for written in (*tables.values(), *states)),
    )


def _filter_order_segments(segments: tuple[FileRef, ...]) -> list[FileRef]:
    return [ref for ref in segments if ref.kind == ORDER_KIND]


def _build_epoch_counters(
    scans: MemberScans,
    released: ReleasedRows,
    late: LateRows,
    dead: dict[str, int],
    windows: dict[str, WindowOutput],
    before: int,
    after: int,
) -> EpochCounters:
    tally: dict[str, Counter[str]] = {}

    def count_rows(source: str, disposition: str, rows: int) -> None:
        if rows:
            tally.setdefault(source, Counter())[disposition] += rows

    for member in scans.survey.members:
        count_rows(member.member.source, "read", member.rows + member.quarantined + member.dead)
    for source, rows in released.per_source.items():
        count_rows(source, "released", rows)
    named = {(source, "dead_lettered"): rows for source, rows in dead.items()}
    named |= {
        (source, f"expired:{output}"): pairs for (source, output), pairs in late.expired.items()
    }
    for (source, disposition), rows in named.items():
        count_rows(source, disposition, rows)
    dropped: Counter[str] = Counter()
    for index, verdicts in scans.verdicts.items():
        rows = sum(verdict.what == "dropped" for verdict in verdicts)
        count_rows(scans.survey.members[index].member.source, "dropped", rows)
        dropped.update({"cti_violation": rows} if rows else {})
    by_output: Counter[str] = Counter()
    for (source, output, reason, gone), rows in late.counts.items():
        if output == EVENTS:
            count_rows(
                source, "dropped" if gone else "rejected" if reason == "rejected" else "late", rows
            )
            dropped.update({reason: rows} if gone else {})
        else:
            count_rows(source, f"{'dropped' if gone else 'late'}:{output}", rows)
        if not (gone and output == EVENTS):
            by_output[output] += rows
    total = {
        name: sum(counts[name] for counts in tally.values())
        for name in ("read", "released", "late", "rejected", "dead_lettered")
    }
    return EpochCounters(
        **total,
        retained_before=before,
        retained=after,
        dropped=dict(dropped),
        late_by_output=dict(by_output),
        windows={name: work.results.rows for name, work in windows.items() if work.results.rows},
        per_source={source: dict(counts) for source, counts in sorted(tally.items())},
    )
