"""Keeps the bucket in order beside the epochs.

Index filled up, small files merged, old checkpoints retired, garbage deleted.

In a thread of its own. Whatever it does is safe beside any driver, and a failure is only logged:
the next round tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from tidegate.checkpoints.pipeline_identity import refuse_copied_store
from tidegate.checkpoints.retention import HOUR, Retention, RetentionPolicy, SweepReport
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.jobs.sinks.iceberg_catalog import has_shared_catalog
from tidegate.jobs.sinks.published_tables import (
    find_published_slot,
    have_followers_rewound,
    list_referenced_files,
)
from tidegate.jobs.sinks.table_compaction import (
    CompactionResult,
    compact_tables,
    delete_orphan_files,
)
from tidegate.jobs.spec.pipeline import PipelineSpec

_LOOK_EVERY = 60.0  # seconds between looks at the head: one LIST and one GET
_INDEX_AFTER = (
    250  # slots; half a page: whoever lists then reads at most so many manifests by itself
)

_log = structlog.get_logger("tidegate.driver")


def make_retention(spec: PipelineSpec, log: SlotLog, keep_for: float | None = None) -> Retention:
    """Retention as the spec has it, with everything that follows the log taken into account.

    Args:
        spec: the pipeline.
        log: its log.
        keep_for: seconds for which every checkpoint stays; default: the spec's
            ``checkpoint.retain_for``.
    """
    return Retention(
        log,
        RetentionPolicy(
            keep_last=spec.checkpoint.retain,
            keep_for=spec.checkpoint.retain_for / 1e6 if keep_for is None else keep_for,
        ),
        external=lambda: list_referenced_files(spec, log.store),
        published_upto=lambda: find_published_slot(spec, log),
        rewound=lambda: have_followers_rewound(spec, log),
    )


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What a run did.

    Attributes:
        swept: checkpoints retired and files deleted.
        compacted: table -> its data files before and after.
        left: why nothing was compacted, or not to the end.
    """

    swept: SweepReport
    compacted: Mapping[str, CompactionResult] = field(default_factory=dict)
    compaction_obstacle: str = ""


def maintain_bucket(
    spec: PipelineSpec, log: SlotLog, keep_for: float | None = None, *, dry_run: bool = False
) -> MaintenanceReport:
    """Compact the tables, then retire and delete.

    A catalog that is away costs the compaction, not the retention.

    Args:
        spec: the pipeline.
        log: its log.
        keep_for: see `make_retention`.
        dry_run: only say what would be retired and deleted; nothing is compacted.

    Raises:
        ConfigurationError: the store is a copy, whose tables are the original's.
    """
    refuse_copied_store(log.store, spec.name)
    compacted, left = {}, ""
    if spec.outputs.compact and not has_shared_catalog(spec, log.store):
        left = (
            "each driver keeps a catalog of its own here; set outputs.catalog to one that all share"
        )
    elif not dry_run:
        try:
            compacted = compact_tables(spec, log.store)
        except (
            TidegateError
        ) as error:  # also without the catalog's credentials, which retention does not need
            left = error.message
    swept = make_retention(spec, log, keep_for).run(dry_run=dry_run)
    unnamed = delete_orphan_files(spec, log.store, grace=HOUR, dry_run=dry_run)
    more = {
        "deleted": (*swept.deleted, *(entry.key for entry in unnamed)),
        "deleted_bytes": swept.deleted_bytes + sum(entry.size for entry in unnamed),
    }
    return MaintenanceReport(swept.model_copy(update=more), compacted, left)


class Housekeeper:
    """Looks every minute.

    Refreshes the index when many slots are new, runs retention every ``checkpoint.maintain_every``.
    """

    def __init__(
        self, spec: PipelineSpec, log: SlotLog, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec, self._pipeline_log, self._monotonic = spec, log, monotonic
        self._indexed: tuple[int, int] = (0, 0)
        self._retained = monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run_rounds, name="tidegate-housekeeping", daemon=True
        )

    def start(self) -> Housekeeper:
        """Begin."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; a round under way may go on for a moment, and can be cut short by the end of the process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def run_round(self) -> None:
        """One round."""
        try:
            self._refresh_index()
            self._maintain_if_due()
        except TidegateError as error:
            _log.warning("housekeeping_failed", code=error.code, error=error.message)

    def _refresh_index(self) -> None:
        head = self._pipeline_log.head()
        timeline, slot = self._indexed
        if head.timeline != timeline or head.slot - slot >= _INDEX_AFTER:
            SlotIndex(self._pipeline_log, workers=2).refresh()  # two: the epochs go first
            self._indexed = (head.timeline, head.slot)

    def _maintain_if_due(self) -> None:
        every = self._spec.checkpoint.maintain_every
        if every is None or self._monotonic() - self._retained < every / 1e6:
            return
        self._retained = self._monotonic()
        done = maintain_bucket(self._spec, self._pipeline_log)
        if done.swept.retired or done.swept.deleted:
            _log.info(
                "retention",
                retired=len(done.swept.retired),
                deleted=len(done.swept.deleted),
                bytes=done.swept.deleted_bytes,
            )
        for table, files in done.compacted.items():
            if files.before != files.after:
                _log.info(
                    "compaction", table=table, files_before=files.before, files_after=files.after
                )
        if done.compaction_obstacle:
            _log.info("compaction_left", why=done.compaction_obstacle)

    def _run_rounds(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            self.run_round()
