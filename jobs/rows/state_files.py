"""The state of an epoch as those who merge it see it: segments that they read, files they write.

The driver merges few rows itself. Of many, each task of a job merges those of a bucket of keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import read_parquet_object, require_written_bytes
from tidegate.jobs.engine.file_footers import FileFooter
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, combine_frames
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .attempt_files import store_rows
from .slice_reading import ensure_local_file

MANY_SEGMENTS: Final = 16
"""So many small live segments of one kind are merged, so that an epoch opens few."""
SMALL_SEGMENT_ROWS: Final = 200_000
"""Larger segments are left alone: to rewrite them again and again costs more than to open them."""


@dataclass(frozen=True)
class StateOrder:
    """What an epoch's state is merged by; tasks get it as well.

    Attributes:
        spec: the pipeline.
        decision: about the epoch.
        folders: where the attempt's files go.
        store: address of the pipeline's store.
        segments: that are live before the epoch.
        bucket: which keys are merged, ...
        buckets: ... of so many buckets; 1: all keys.
    """

    spec: PipelineSpec
    decision: Decision
    folders: AttemptFolders
    store: str
    segments: tuple[FileRef, ...]
    bucket: int = 0
    buckets: int = 1

    @property
    def epoch(self) -> int:
        """The slot, written to ``_epoch`` of every output row."""
        return self.folders.attempt.slot

    def live_segments(self, kind: str) -> list[FileRef]:
        """Live segments of one kind before this epoch."""
        return [ref for ref in self.segments if ref.kind == kind]

    def select_bucket(self, rows: pa.Table, columns: Iterable[str]) -> pa.Table:
        """Return the rows whose values in these columns are in the bucket, in their order."""
        names = ", ".join(columns)
        if self.buckets == 1 or not rows.num_rows:
            return rows
        if not names:
            return rows if self.bucket == 0 else rows.slice(0, 0)
        chosen = f"hash({names}) % {self.buckets} = {self.bucket}"
        return DuckFrame.from_table(rows).where(chosen).toArrow()


@dataclass(frozen=True)
class MergedState:
    """What one output did with its state in an epoch, or in a bucket of it.

    Attributes:
        results: files of the output's table.
        segments: the state that is live after the epoch.
        written: files of state from this epoch's rows.
        overflowed: results that lack a sum, because their column does not hold it.
        footers: of all files, by key.
    """

    results: tuple[FileRef, ...] = ()
    segments: tuple[FileRef, ...] = ()
    written: tuple[FileRef, ...] = ()
    overflowed: int = 0
    footers: dict[str, FileFooter] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Iterable[MergedState]) -> MergedState:
        """Return what all buckets of an output did; a segment that several name is live once."""
        found = list(parts)
        segments = {ref.key: ref for one in found for ref in one.segments}
        footers = {key: footer for one in found for key, footer in one.footers.items()}
        return cls(
            tuple(ref for one in found for ref in one.results),
            tuple(segments.values()),
            tuple(ref for one in found for ref in one.written),
            sum(one.overflowed for one in found),
            footers,
        )


@dataclass(frozen=True)
class StateFiles:
    """Reads segments and writes files of an epoch.

    Attributes:
        order: what is merged.
        store: where the files are.
        copies: a folder that keeps copies of segments for later epochs; None keeps none.
        footers: of the files that were written, by key.
        opened: what is merged, by window.
    """

    order: StateOrder
    store: Store
    copies: Path | None = None
    footers: dict[str, FileFooter] = field(default_factory=dict)
    opened: dict[str, Any] = field(default_factory=dict)

    def read_segment(self, ref: FileRef) -> pa.Table:
        """Return the rows of a segment.

        Raises:
            FileUnreadableError: it is damaged.
            TransientError: the store does not answer.
        """
        if self.copies is None:
            return read_parquet_object(self.store, ref.key, ref.sha256)
        path = ensure_local_file(self.store, ref.key, self.copies)
        # Parquet has no checksum: a wrong byte may be another row, which no later check would find.
        require_written_bytes(self.store, ref, path)
        return pq.read_table(path, partitioning=None)

    def load_segments(self, refs: list[FileRef], keys: list[str]) -> DuckFrame | None:
        """The rows of segments that are in the bucket by these columns; None without a segment."""
        tables = [self.order.select_bucket(self.read_segment(ref), keys) for ref in refs]
        if not tables:
            return None
        return DuckFrame.from_table(pa.concat_tables(tables, promote_options="permissive"))

    def load_partials(self, aggregation: Aggregation, refs: list[FileRef]) -> Any:
        """As `load_segments`, for partial aggregates: state columns as the present spec names them.

        They are numbered by the places of the aggregates, which segments name in `extra`.
        """
        groups: dict[tuple[str, ...], list[FileRef]] = {}
        for ref in refs:
            groups.setdefault(tuple(ref.extra["aggregates"]), []).append(ref)
        rows = None
        for outputs, group in groups.items():
            frame = self.load_segments(group, aggregation.bucket_columns)
            rows = combine_frames(rows, aggregation.rename_states(frame, list(outputs)))
        return rows

    def write_segment(
        self, kind: str, rows: pa.Table, time: str | None, extra: JsonObject
    ) -> tuple[FileRef, ...]:
        """Write rows of state as a segment; none without rows.

        Its reference carries `extra`, and the least and greatest values of the column `time`.
        """
        return self._write(self.order.folders.segment_stem(kind), kind, rows, time, extra)

    def write_results(self, name: str, rows: pa.Table) -> tuple[FileRef, ...]:
        """Write results of a window as a file of its table; none without rows."""
        stem = f"{self.order.folders.table_prefix(name)}part"
        return self._write(stem, f"table:{name}", rows, "window_end", {})

    def _write(
        self, stem: str, kind: str, rows: pa.Table, time: str | None, extra: JsonObject
    ) -> tuple[FileRef, ...]:
        if not rows.num_rows:
            return ()
        own = f"{stem}-{self.order.bucket:05d}"
        return (store_rows(self.store, rows, own, kind, time, extra, self.footers),)
