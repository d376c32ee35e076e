"""What the moving parts of one epoch share: its rows and state, and the writer of its files.

Tables and state segments are local Parquet files first, and are then uploaded. Few rows come to the
driver as Arrow and are one file; many are written by Spark's tasks, into the scratch folder as they
see it. Rows, times and counts are taken from what was written, so that they cannot disagree with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.jobs.engine.arrow_tables import require_written_bytes
from tidegate.jobs.engine.interfaces import MoveOrder
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.eventtime.decision_types import Decision, ReleaseMark
from tidegate.jobs.rows.attempt_files import store_file, write_parquet_file
from tidegate.jobs.rows.column_casts import declared_to_spark_type
from tidegate.jobs.rows.judged_rows import JudgedRows
from tidegate.jobs.rows.slice_reading import ensure_local_file
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame, combine_frames
from tidegate.jobs.rules.row_conditions import quote_name
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .cut_reader import CutFrame, arrow_to_frame
from .spark_session import SparkSessions
from .staging import Staging

_log = structlog.get_logger("tidegate.driver")

FETCH_ROWS: Final = 100_000
"""Results of up to this many rows are written by the driver.

Below a second of Arrow, and one file instead of several.
"""


def collect_to_driver(frame: Frame) -> pa.Table:
    """The rows of a small result, from one task.

    For few rows a shuffle costs more than all the work.
    """
    return frame.coalesce(1).toArrow()


@dataclass(frozen=True)
class WrittenFiles:
    """One table's or segment's files: `paths` here, and `refs` in the store, in one order."""

    refs: tuple[FileRef, ...] = ()
    paths: tuple[Path, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(ref.rows for ref in self.refs)

    @property
    def bytes(self) -> int:
        """Bytes in all files."""
        return sum(ref.bytes for ref in self.refs)

    def __add__(self, other: WrittenFiles) -> WrittenFiles:
        return WrittenFiles(self.refs + other.refs, self.paths + other.paths)

    def read_columns(self, columns: list[str]) -> pa.Table | None:
        """Some columns of what was written; None when nothing was."""
        if not self.paths:
            return None
        return pa.concat_tables(
            pq.read_table(path, columns=columns, partitioning=None) for path in self.paths
        )


@dataclass
class FileWriter:
    """Writes one attempt's files, those of tasks by way of its `staging`.

    Safe to use from several threads.
    """

    _store: Store
    _folders: AttemptFolders
    _scratch: Path
    staging: Staging
    _numbers: Iterator[int] = field(default_factory=count)

    def write_table(
        self, name: str, rows: pa.Table | DataFrame | Iterator[pa.Table], time: str | None
    ) -> WrittenFiles:
        """Write rows of an output table; no file without rows, one for each of several tables.

        `time` is the column whose least and greatest values, in ticks, each reference carries.
        """
        return self._write_and_upload(
            f"{self._folders.table_prefix(name)}part", f"table:{name}", rows, time, {}
        )

    def write_segment(
        self,
        kind: str,
        rows: pa.Table | DataFrame,
        time: str | None,
        extra: JsonObject | None = None,
    ) -> WrittenFiles:
        """Write rows of state as segments: none without rows, several if tasks write many.

        Each reference carries `extra`, and the least and greatest values of the column `time`.
        """
        return self._write_and_upload(
            self._folders.segment_stem(kind), kind, rows, time, extra or {}
        )

    def _write_and_upload(
        self, stem: str, kind: str, rows: Any, time: str | None, extra: JsonObject
    ) -> WrittenFiles:
        files = self.write_scratch_files(rows)
        named = [(path, f"{stem}-{next(self._numbers):05d}.parquet") for path in files]

        def upload(named: tuple[Path, str]) -> FileRef:
            """Upload a file and describe it."""
            return store_file(self._store, *named, kind, time, extra)

        return WrittenFiles(tuple(map_in_threads(upload, named, 4)), tuple(files))

    def write_scratch_files(self, rows: pa.Table | DataFrame | Iterator[pa.Table]) -> list[Path]:
        """Write files on the scratch disk, for this epoch only; none when there are no rows."""
        if isinstance(rows, pa.Table):
            return self._write_by_driver(rows)
        if isinstance(rows, Iterator):
            written = map_in_threads(self._write_by_driver, rows, 2)
            return [path for paths in written for path in paths]
        return self._write_by_tasks(rows)

    def _write_by_driver(self, rows: pa.Table) -> list[Path]:
        if rows.num_rows == 0:
            return []
        path = self._scratch / f"{uuid4().hex}.parquet"
        write_parquet_file(rows, path)
        return [path]

    def _write_by_tasks(self, rows: DataFrame) -> list[Path]:
        parts = self.staging.write_rows(rows, self._scratch / uuid4().hex)
        sizes = {path: pq.read_metadata(path).num_rows for path in parts}
        filled = [path for path in parts if sizes[path]]
        # The number of shuffle partitions must not multiply small objects.
        if len(filled) > 1 and sum(sizes.values()) <= FETCH_ROWS:
            return self._write_by_driver(
                pa.concat_tables(pq.read_table(path, partitioning=None) for path in filled)
            )
        return filled


MANY_SEGMENTS = 16  # more small live segments of one kind are merged
# Larger segments are left alone: to rewrite them again and again costs more than to open them.
SMALL_SEGMENT_ROWS = 200_000


@dataclass(frozen=True)
class EpochContext:
    """One epoch's work.

    Attributes:
        staged: its cut.
        data: the cut's data rows that are not set aside; None if the cut has no data rows. May be
            empty if all are set aside.
        aside: the rows that are set aside, with `_verdict` and `_mark`. None if the survey judged
            no row; it may be empty.
        low, high: least and greatest event time that the survey found, in ticks, before rows are
            set aside or adjusted; rows of `max_jump` do not count. None if it found none.
        segment_folder: of local copies of state segments.
        native: `data`, `aside` and state are rows in the driver (`DuckFrame`), not in Spark.
    """

    sessions: SparkSessions
    spec: PipelineSpec
    store: Store
    order: MoveOrder
    writer: FileWriter
    staged: CutFrame
    data: Frame | None
    aside: Frame | None
    low: int | None
    high: int | None
    segment_folder: Path
    native: bool = False

    @property
    def decision(self) -> Decision:
        """What was decided about it."""
        return self.order.decision

    @property
    def fits_in_driver(self) -> bool:
        """Whether results as large as the cut, and the order buffer, may come to the driver.

        If `native` always; else if both have at most `FETCH_ROWS` rows together.
        """
        if self.native:
            return True
        waiting = sum(ref.rows for ref in self.live_segments(ORDER_KIND))
        return self.staged.rows + waiting <= FETCH_ROWS

    def live_segments(self, kind: str) -> list[FileRef]:
        """Live segments of one kind before this epoch."""
        return [ref for ref in self.order.segments if ref.kind == kind]

    def releasable_segments(self) -> list[FileRef]:
        """Order segments some of whose rows may leave now."""
        before, after = self.decision.release_before, self.decision.release_after
        live = self.live_segments(ORDER_KIND) if before < after else []
        return [
            ref
            for ref in live
            if has_rows_from_mark(ref, before)
            and ReleaseMark(ref.extra["section_min"], ref.min_time or 0) < after
        ]

    def collect_if_small(self, frame: Frame, rows: int) -> Any:
        """A result of at most `rows` rows as the writer takes it.

        An Arrow table if `native` or if `rows` is at most `FETCH_ROWS`, else the frame itself.
        """
        return collect_to_driver(frame) if self.native or rows <= FETCH_ROWS else frame

    def to_frame(self, table: pa.Table) -> Frame:
        """Rows of the driver as a frame of the engine that state is in."""
        if self.native:
            return DuckFrame.from_table(table)
        return arrow_to_frame(self.sessions.session_for(table.num_rows), table).coalesce(1)

    def load_segments(self, refs: list[FileRef], fresh: Iterable[Path] = ()) -> Frame | None:
        """State segments (and `fresh`, local files just written) as one frame; None without any."""
        files = {self.locate_segment(ref): ref.key for ref in refs} | dict.fromkeys(fresh)
        paths = list(files)
        if not paths:
            return None
        if self.native:
            return self.to_frame(self.read_segments(paths))
        footers = [pq.read_metadata(path) for path in paths]
        rows = sum(footer.num_rows for footer in footers)
        # Few rows are read in the driver: a scan that opens every file in a task takes longer.
        if rows <= FETCH_ROWS:
            return self.to_frame(self.read_segments(paths))
        # Segments from before and after a column was added; otherwise one footer is enough.
        differ = len({tuple(footer.schema.names) for footer in footers}) > 1
        return self.sessions.full.read.option("mergeSchema", str(differ).lower()).parquet(
            *(self.writer.staging.expose_file(path, key) for path, key in files.items())
        )

    def load_partials(
        self, aggregation: Aggregation, refs: list[FileRef], fresh: Iterable[Path] = ()
    ) -> Frame | None:
        """As `load_segments`, for partial aggregates: state columns as the present spec names them.

        They are numbered by the places of the aggregates, which segments name in `extra`.
        """
        own = tuple(aggregation.plans)
        groups: dict[tuple[str, ...], list[FileRef]] = {own: []}
        for ref in refs:
            groups.setdefault(tuple(ref.extra["aggregates"]), []).append(ref)
        rows = None
        for names, group in groups.items():
            frame = self.load_segments(group, fresh if names == own else ())
            if frame is not None:
                rows = combine_frames(rows, aggregation.rename_states(frame, list(names)))
        return rows

    def columns_of_segment(self, frame: Frame) -> list[str]:
        """The declared columns of rows in segments, as Spark SQL.

        Null where a segment is older than a column.
        """
        return [
            quote_name(name)
            if name in frame.columns
            else f"CAST(NULL AS {declared_to_spark_type(kind)}) AS {quote_name(name)}"
            for name, kind in self.spec.columns.items()
        ]

    @staticmethod
    def read_segments(paths: Iterable[Path]) -> pa.Table:
        """The rows of at least one local file of state segments."""
        return pa.concat_tables(
            (pq.read_table(path, partitioning=None) for path in paths),
            promote_options="permissive",
        )

    def merge_small_segments(
        self,
        kind: str,
        live: list[FileRef],
        column: str,
        select: Callable[[Frame], Frame],
        aggregation: Aggregation | None = None,
    ) -> tuple[FileRef, ...]:
        """Merge small state segments of one kind if there are many, so that an epoch opens few.

        Small is one of at most 200,000 rows, and many are more than 16 of these.

        Sessions need this not: their segment is written again in every epoch.

        Args:
            kind: kind of the segments.
            live: all of them.
            column: the time by which the new segment has bounds.
            select: drops the rows that have left, and merges those that belong together.
            aggregation: whose partial aggregates they hold; None for other rows.

        Returns:
            The segments that are live then.
        """
        small = [ref for ref in live if ref.rows <= SMALL_SEGMENT_ROWS]
        if len(small) <= MANY_SEGMENTS:
            return tuple(live)
        ends = [("section_min", min), ("section_max", max)] if kind == ORDER_KIND else []
        extra = {name: choose(ref.extra[name] for ref in small) for name, choose in ends}
        count = sum(ref.rows for ref in small)
        if aggregation is None:
            frame = self.load_segments(small)
        else:
            frame, extra = self.load_partials(aggregation, small), aggregation.segment_extra
        rows = self.collect_if_small(select(frame), count)
        large = [ref for ref in live if ref.rows > SMALL_SEGMENT_ROWS]
        return (*large, *self.writer.write_segment(kind, rows, column, extra).refs)

    def write_results(
        self, aggregation: Aggregation, merged: Frame, revision: str, most: int
    ) -> OutputFiles:
        """Write results of a window, at most so many, and count those that lack a sum.

        Args:
            aggregation: of the window.
            merged: its merged state, a row per result.
            revision: SQL over them.
            most: as in `collect_if_small`.
        """
        provenance = self.provenance_columns(beside="_we")[3:]
        results = aggregation.build_results(merged, revision, provenance)
        rows, name = self.collect_if_small(results, most), aggregation.name
        if aggregation.overflow is None:
            return OutputFiles(self.writer.write_table(name, rows, "window_end"))
        observed = Observation()
        if isinstance(rows, pa.Table):
            lost = pc.sum(rows["_overflow"]).as_py() or 0
            rows = rows.drop_columns("_overflow")
        else:
            # Tasks count them while they write.
            rows = rows.observe(observed, F.count_if("_overflow").alias("lost")).drop("_overflow")
            lost = None
        written = self.writer.write_table(name, rows, "window_end")
        if lost is None:
            # Without a row Spark may drop the count with the rest of its plan.
            lost = observed.get["lost"] if written.rows else 0
        if lost:
            _log.warning("sums_overflowed", window=name, results=lost)
        return OutputFiles(written, overflowed=lost)

    def locate_segment(self, ref: FileRef) -> Path:
        """The local file of a state segment; fetched if the store has none.

        Raises:
            FileUnreadableError: it is damaged.
        """
        path = ensure_local_file(self.store, ref.key, self.segment_folder)
        # Parquet has no checksum: a wrong byte may be another row, which no later check would find.
        require_written_bytes(self.store, ref, path)
        return path

    @property
    def judged(self) -> JudgedRows:
        """The rows of the epoch, and what they are judged against."""
        decision = self.decision
        return JudgedRows(
            self.spec,
            self.data,
            self.aside,
            self.low,
            decision.frontier_before,
            self.order.timeline,
            self.order.epoch,
            decision.late_bound,
            decision.events_frontier,
        )

    @property
    def row_columns(self) -> list[str]:
        """See `JudgedRows`."""
        return self.judged.row_columns

    def provenance_columns(self, beside: str = "_seq") -> list[str]:
        """See `JudgedRows`."""
        return self.judged.provenance_columns(beside)


def has_rows_from_mark(ref: FileRef, mark: ReleaseMark) -> bool:
    """Whether an order segment may have rows at or above the mark.

    It has some for certain if its rows are of one section.
    """
    return ref.max_time is not None and ReleaseMark(ref.extra["section_max"], ref.max_time) >= mark


@dataclass(frozen=True)
class OutputFiles:
    """What one output did in an epoch.

    Attributes:
        results: files of the output's table.
        segments: the state that is live after the epoch.
        written: files of state from this epoch's rows.
        overflowed: results that lack a sum, because their column does not hold it.
    """

    results: WrittenFiles = WrittenFiles()
    segments: tuple[FileRef, ...] = ()
    written: WrittenFiles = WrittenFiles()
    overflowed: int = field(default=0, kw_only=True)
