"""The Mover on Spark SQL (design.md section 2, steps 2 and 4): general, any Spark SQL expression, any scale.

A small epoch costs a few Spark jobs of one task each; a large one reads each row once for each kind of output. Only the
DataFrame API that classic Spark and Spark Connect share is used; no row passes through Python objects.
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

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.counters import EpochCounters
from tidegate.jobs.engine.interfaces import Cut, Moved, MoveOrder
from tidegate.jobs.eventtime.types import Survey
from tidegate.jobs.spark.dead import write_dead
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.late import LateRows, write_late
from tidegate.jobs.spark.order import ORDER_KIND, Released, buffered, release
from tidegate.jobs.spark.read import CutFrame, open_cut
from tidegate.jobs.spark.session import open_session
from tidegate.jobs.spark.survey import survey_cut
from tidegate.jobs.spark.windows import WindowWork, work_window
from tidegate.jobs.spark.write import Writer, Written
from tidegate.jobs.spec.errors import PoisonError
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec

__all__ = ["SparkMover"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Staged:
    """A cut that was surveyed, kept for the move that follows."""

    frame: CutFrame
    survey: Survey
    folder: Path


class SparkMover:
    """Moves rows as decided, on Spark SQL.

    Args:
        store: where objects, segments and table files lie.
        spec: the pipeline.
        workdir: folder for scratch files and local copies of segments, on a disk that driver and executors share.
        session: a running session to use; by default one is started from ``spec.spark`` and stopped by `close`.
    """

    def __init__(self, store: Store, spec: PipelineSpec, workdir: Path, session: SparkSession | None = None) -> None:
        self._store = store
        self._spec = spec
        workdir.mkdir(parents=True, exist_ok=True)
        self._workdir = Path(mkdtemp(prefix="spark-", dir=workdir))
        self._own = session is None
        self._session = open_session(spec) if session is None else session
        self._staged: _Staged | None = None

    def survey(self, cut: Cut, state: Mapping[str, Any]) -> Survey:
        """Summarise the cut; `now` and the like are left to the engine."""
        self._forget()
        folder = Path(mkdtemp(prefix="epoch-", dir=self._workdir))
        frame = open_cut(self._session, self._spec, self._store, cut, folder)
        survey = self._guarded(frame, lambda: survey_cut(frame, self._spec, state))
        self._staged = _Staged(frame, survey, folder)
        return survey

    def move(self, order: MoveOrder) -> Moved:
        """Write released rows, late rows, window results, dead letters and new state segments."""
        if self._staged is None or self._staged.frame.cut != order.cut:
            self.survey(order.cut, order.state)
        staged = self._staged
        assert staged is not None  # noqa: S101 - set by survey
        try:
            return self._guarded(staged.frame, lambda: self._move(order, staged))
        finally:
            self._forget()

    def close(self) -> None:
        """Stop an own session and remove scratch files."""
        shutil.rmtree(self._workdir, ignore_errors=True)
        if self._own:
            self._session.stop()

    def _forget(self) -> None:
        if self._staged is not None:
            shutil.rmtree(self._staged.folder, ignore_errors=True)
            self._staged = None

    def _guarded(self, frame: CutFrame, work: Callable[[], _T]) -> _T:
        """Name the object when its pages turn out to be corrupt, and never show a Java stack to people."""
        try:
            return work()
        except PySparkException as error:
            first = str(error).strip().splitlines()[0][:500]
            raise frame.blame() or PoisonError(
                f"Spark could not compute this epoch: {first}",
                code="spark.failed",
                pipeline=self._spec.name,
                kept="everything sealed before this epoch",
                advice="check the spec's expressions against the rows",
            ) from error

    def _move(self, order: MoveOrder, staged: _Staged) -> Moved:
        epoch = self._epoch(order, staged)
        any_dead = any(member.dead for member in staged.survey.members)
        with ThreadPoolExecutor(4) as pool:  # the jobs are small: one alone would leave a core idle
            released = pool.submit(release, epoch)
            late = pool.submit(write_late, epoch)
            dead = pool.submit(write_dead, epoch) if any_dead else None
            windows = {name: pool.submit(work_window, epoch, name) for name in self._spec.windows}
        nothing: tuple[Written, dict[str, int]] = (Written((), ()), {})
        done = {name: work.result() for name, work in windows.items()}
        return _gathered(epoch, staged.survey, released.result(), late.result(), nothing if dead is None else dead.result(), done)

    def _epoch(self, order: MoveOrder, staged: _Staged) -> Epoch:
        members = staged.survey.members
        rows = sum(member.rows for member in members)
        data = staged.frame.frame if rows else None
        if data is not None and any(member.dead or member.barrier or member.punctuation is not None for member in members):
            data = data.where("_dead IS NULL AND _kind = 'data'")
        low = min((member.min_time for member in members if member.min_time is not None), default=None)
        writer = Writer(self._store, order.prefix, order.tag, staged.folder)
        return Epoch(
            self._session, self._spec, self._store, order, writer, staged.frame, data, low, self._workdir / "segments"
        )


def _gathered(
    epoch: Epoch,
    survey: Survey,
    released: Released,
    late: LateRows,
    dead: tuple[Written, dict[str, int]],
    windows: dict[str, WindowWork],
) -> Moved:
    tables = {EVENTS: released.events, LATE: late.written, DEAD_LETTERS: dead[0], **{n: w.results for n, w in windows.items()}}
    states = [released.written, *(work.written for work in windows.values())]
    segments = (*released.segments, *(ref for work in windows.values() for ref in work.segments))
    before = buffered(epoch, epoch.segments(ORDER_KIND), epoch.order.decision.release_before)
    after = buffered(epoch, _order_segments(segments), epoch.order.decision.release_after)
    return Moved(
        files={name: written.refs for name, written in tables.items() if written.refs},
        segments=segments,
        counters=_counters(survey, released, late, dead[1], windows, before, after),
        released_max=released.maximum,
        next_position=epoch.order.next_position + released.rows,
        buffered_rows=after,
        bytes_written=sum(written.bytes for written in (*tables.values(), *states)),
    )


def _order_segments(segments: tuple[FileRef, ...]) -> list[FileRef]:
    return [ref for ref in segments if ref.kind == ORDER_KIND]


def _counters(
    survey: Survey,
    released: Released,
    late: LateRows,
    dead: dict[str, int],
    windows: dict[str, WindowWork],
    before: int,
    after: int,
) -> EpochCounters:
    tally: dict[str, Counter[str]] = {}

    def count(source: str, disposition: str, rows: int) -> None:
        if rows:
            tally.setdefault(source, Counter())[disposition] += rows

    for member in survey.members:
        count(member.member.source, "read", member.rows + member.quarantined + member.dead)
    for source, rows in released.per_source.items():
        count(source, "released", rows)
    for source, rows in dead.items():
        count(source, "dead_lettered", rows)
    dropped: Counter[str] = Counter()
    by_output: Counter[str] = Counter()
    for (source, output, reason, gone), rows in late.counts.items():
        if output == EVENTS:
            count(source, "dropped" if gone else "rejected" if reason == "rejected" else "late", rows)
            dropped.update({reason: rows} if gone else {})
        else:
            count(source, f"{'dropped' if gone else 'late'}:{output}", rows)
        if not (gone and output == EVENTS):
            by_output[output] += rows
    total = {name: sum(counts[name] for counts in tally.values()) for name in ("read", "released", "late", "rejected", "dead_lettered")}
    return EpochCounters(
        **total,
        retained_before=before,
        retained=after,
        dropped=dict(dropped),
        late_by_output=dict(by_output),
        windows={name: work.results.rows for name, work in windows.items() if work.results.rows},
        per_source={source: dict(counts) for source, counts in sorted(tally.items())},
    )
