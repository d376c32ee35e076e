"""What the moving parts of one epoch share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import MoveOrder
from tidegate.jobs.eventtime.types import Mark
from tidegate.jobs.spark.known import Known
from tidegate.jobs.spark.marks import passed
from tidegate.jobs.spark.read import CutFrame, Sessions, frame_of, local_copy
from tidegate.jobs.spark.write import FETCH_ROWS, Writer, Written, fetch
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["ORDER_KIND", "Epoch", "WindowWork", "standing"]

ORDER_KIND = "order"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's work.

    Attributes:
        staged: its cut.
        data: the cut's data rows that are not set aside; None when there are none.
        aside: the rows that are set aside, with `_verdict` and `_mark`; None when there are none.
        known: those of `data` between two times, where they are known and nothing is set aside.
        low: least event time of those rows, None when there are none.
        high: greatest event time of those rows.
        kept: folder of local copies of state segments.
    """

    sessions: Sessions
    spec: PipelineSpec
    store: Store
    order: MoveOrder
    writer: Writer
    staged: CutFrame
    data: DataFrame | None
    aside: DataFrame | None
    known: Known
    low: int | None
    high: int | None
    kept: Path

    @property
    def small(self) -> bool:
        """Whether results as large as the cut, and the order buffer, may come to the driver."""
        return self.staged.rows + sum(ref.rows for ref in self.segments(ORDER_KIND)) <= FETCH_ROWS

    def segments(self, kind: str) -> list[FileRef]:
        """Live segments of one kind before this epoch."""
        return [ref for ref in self.order.segments if ref.kind == kind]

    def touched(self) -> list[FileRef]:
        """Order segments some of whose rows may leave now."""
        before, after = self.order.decision.release_before, self.order.decision.release_after
        live = self.segments(ORDER_KIND) if before < after else []
        return [ref for ref in live if standing(ref, before) and Mark(ref.extra["section_min"], ref.min_time or 0) < after]

    def result(self, frame: DataFrame, rows: int) -> pa.Table | DataFrame:
        """A result of at most `rows` rows as the writer takes it: fetched when small."""
        return fetch(frame) if rows <= FETCH_ROWS else frame

    def load(self, refs: list[FileRef], fresh: list[Path] | None = None) -> DataFrame | None:
        """State segments (and files just written) as one DataFrame; None when there are none."""
        files = dict(zip(self.paths(refs), (ref.key for ref in refs), strict=True)) | dict.fromkeys(fresh or [])
        paths = list(files)
        if not paths:
            return None
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
        if rows <= FETCH_ROWS:
            table = pa.concat_tables((pq.read_table(path, partitioning=None) for path in paths), promote_options="permissive")
            return frame_of(self.sessions.of(rows), table).coalesce(1)
        return self.sessions.full.read.option("mergeSchema", "false").parquet(
            *(self.writer.staging.shown(path, key) for path, key in files.items())
        )

    def paths(self, refs: list[FileRef]) -> list[Path]:
        """State segments as files."""
        return [local_copy(self.store, ref.key, self.kept) for ref in refs]

    def provenance(self, beside: str = "_seq") -> list[str]:
        """The provenance columns of an output row, as Spark SQL; `beside` is a bigint of it that is never null."""
        own = [f"CAST({self.order.timeline} AS int) AS _timeline", f"{passed(self.order.epoch, beside)} AS _epoch"]
        return ["_source", "_partition", "_seq", *own]


def standing(ref: FileRef, mark: Mark) -> bool:
    """Whether an order segment has rows at or above the mark."""
    return ref.max_time is not None and Mark(ref.extra["section_max"], ref.max_time) >= mark


@dataclass(frozen=True, slots=True)
class WindowWork:
    """What one window output did in an epoch."""

    results: Written
    segments: tuple[FileRef, ...]
    written: Written
