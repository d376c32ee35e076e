"""What the moving parts of one epoch share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pyspark.sql import SparkSession

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import MoveOrder
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.eventtime.decision_types import Decision, ReleaseMark
from tidegate.jobs.rows.state_files import StateFiles, StateOrder
from tidegate.jobs.rows.topic_reading import remove_settings
from tidegate.jobs.spec.pipeline import PipelineSpec


@dataclass(frozen=True)
class EpochContext:
    """One epoch's work.

    Attributes:
        copies: a folder with local copies of state segments.
    """

    session: SparkSession
    spec: PipelineSpec
    store: Store
    order: MoveOrder
    copies: Path

    @property
    def decision(self) -> Decision:
        """What was decided about it."""
        return self.order.decision

    @cached_property
    def files(self) -> StateFiles:
        """Reads and writes state in the driver."""
        order = StateOrder(
            remove_settings(self.spec),
            self.decision,
            self.order.folders,
            self.store.url,
            self.order.segments,
        )
        return StateFiles(order, self.store, self.copies)

    def live_segments(self, kind: str) -> list[FileRef]:
        """Live segments of one kind before this epoch."""
        return self.files.order.live_segments(kind)

    def releasable_segments(self) -> list[FileRef]:
        """Order segments some of whose rows may leave now."""
        before = self.decision.release_before
        after = self.decision.release_after
        live = self.live_segments(ORDER_KIND) if before < after else []
        return [
            ref
            for ref in live
            if has_rows_from_mark(ref, before)
            and ReleaseMark(ref.extra["section_min"], ref.min_time or 0) < after
        ]


def has_rows_from_mark(ref: FileRef, mark: ReleaseMark) -> bool:
    """Whether an order segment may have rows at or above the mark.

    It has some for certain if its rows are of one section.
    """
    return ref.max_time is not None and ReleaseMark(ref.extra["section_max"], ref.max_time) >= mark
