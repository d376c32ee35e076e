"""Housekeeping of the bucket: index, compaction of tables, retention, garbage, daily scrub.

It runs in a thread of the driver, or by command. Every step is safe while any driver seals. A
failure is logged and shown in the status, and the next round tries again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, PeriodicThread
from tidegate.checkpoints.pipeline_identity import refuse_copied_store
from tidegate.checkpoints.retention import Retention, RetentionPolicy, SweepReport
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import (
    SCRUB_EVERY,
    Verification,
    condemn_if_damaged,
    count_scrub_shares,
    is_scrub_due,
    note_scrub,
    scrub_checkpoints,
    select_for_scrub,
)
from tidegate.errors import TidegateError
from tidegate.jobs.engine.interfaces import WorkRunner
from tidegate.jobs.sinks.published_tables import find_published_slot, have_followers_rewound
from tidegate.jobs.sinks.table_maintenance import (
    CompactionResult,
    compact_tables,
    delete_orphan_files,
    list_referenced_files,
    note_table_versions,
)
from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec

from .error_classification import log_background_failure

_SCRUB_SECONDS = 20.0  # of each look, so that index and retention are not kept waiting
_SCRUB_LOOK_EVERY = 3600.0  # seconds between two looks whether a scrub is due
_HOUR = 3600.0  # seconds
_LOOK_EVERY = 60.0  # seconds between two reads of the head: one LIST and one GET
# Slots, half an index page. A reader of the log never has to read more manifests than this.
_INDEX_AFTER = 250

_log = structlog.get_logger("tidegate.driver")


def make_retention(
    spec: SupervisedSpec, log: SlotLog, keep_for: float | None = None, grace: float = _HOUR
) -> Retention:
    """Return the retention of the spec, which also keeps what followers of the log still need.

    Args:
        spec: the pipeline, or the job.
        log: its log.
        keep_for: seconds for which every checkpoint is kept; the spec's ``checkpoint.retain_for``
            unless given.
        grace: seconds for which an unreferenced file is kept.
    """
    seconds = spec.checkpoint.retain_for / 1e6 if keep_for is None else keep_for
    policy = RetentionPolicy(keep_last=spec.checkpoint.retain, keep_for=seconds, grace=grace)
    if isinstance(spec, JobSpec):  # no table names its objects, and nothing follows its log
        return Retention(log, policy, external=list)
    return Retention(
        log,
        policy,
        external=lambda: list_referenced_files(spec, log.store),
        published_upto=lambda: find_published_slot(spec, log),
        rewound=lambda: have_followers_rewound(spec, log),
    )


@dataclass(frozen=True)
class MaintenanceReport:
    """What one round of maintenance did.

    Attributes:
        swept: checkpoints retired and files deleted, orphans of the tables included.
        compacted: table -> the number of its data files before and after.
        compaction_obstacle: why compaction failed; empty if it did not, or was not tried.
    """

    swept: SweepReport
    compacted: Mapping[str, CompactionResult] = field(default_factory=dict)
    compaction_obstacle: str = ""


def maintain_bucket(
    spec: SupervisedSpec,
    log: SlotLog,
    keep_for: float | None = None,
    *,
    dry_run: bool = False,
    run: WorkRunner | None = None,
) -> MaintenanceReport:
    """Compact the tables, then retire checkpoints and delete files.

    If compaction fails, for example because the catalog does not answer, the rest is done. A job
    has no tables.

    Args:
        spec: the pipeline, or the job.
        log: its log.
        keep_for: see `make_retention`.
        dry_run: only report what would be retired and deleted; nothing is compacted.
        run: moves the rows of tables; unless given, this process does.

    Raises:
        ConfigurationError: the store is a copy, and its tables belong to the original.
    """
    refuse_copied_store(log.store, spec.name)
    if isinstance(spec, JobSpec):
        return MaintenanceReport(make_retention(spec, log, keep_for).run(dry_run=dry_run))
    compacted, obstacle = {}, ""
    if not dry_run:
        try:
            compacted = compact_tables(spec, log.store, run)
        except TidegateError as error:
            # Retention goes on: it needs no catalog, so missing credentials do not matter to it.
            obstacle = error.message
    grace = note_table_versions(spec, log.store, grace=_HOUR, dry_run=dry_run)
    swept = make_retention(spec, log, keep_for, grace).run(dry_run=dry_run)
    orphans = delete_orphan_files(spec, log.store, grace=grace, dry_run=dry_run)
    totals = {
        "deleted": (*swept.deleted, *(entry.key for entry in orphans)),
        "deleted_bytes": swept.deleted_bytes + sum(entry.size for entry in orphans),
    }
    return MaintenanceReport(swept.model_copy(update=totals), compacted, obstacle)


class Housekeeper(PeriodicThread):
    """Refreshes the index when many slots are new, and maintains and scrubs the bucket when due.

    The thread looks every minute. ``checkpoint.maintain_every`` says how often to maintain, first
    that long after the start; None: never. A scrub is due once a day.

    Attributes:
        trouble: why the last round failed; None if it did not.
    """

    def __init__(
        self,
        spec: SupervisedSpec,
        log: SlotLog,
        monotonic: Callable[[], float] = time.monotonic,
        run: WorkRunner | None = None,
    ) -> None:
        super().__init__("tidegate-housekeeping", self.run_round, _LOOK_EVERY)
        self._spec, self._slot_log, self._monotonic = spec, log, monotonic
        self._run = run  # moves the rows of tables
        self._indexed: tuple[int, int] = (0, 0)  # timeline and slot of the last refresh
        self._maintained_at = self._scrub_read_at = monotonic()
        self._scrub: Iterator[Verification] | None = None  # the scrub that is under way
        self.trouble: TidegateError | None = None

    def run_round(self) -> None:
        """Do what is due now; a failure is logged and noted as `trouble`."""
        try:
            self._refresh_index()
            self._maintain_if_due()
            self._scrub_if_due()
            self.trouble = None
        # Whatever it is, the thread must live on: no other thread does its work for this driver.
        except Exception as error:
            self.trouble = log_background_failure("housekeeping_failed", "housekeeping", error)

    def _refresh_index(self) -> None:
        head = self._slot_log.head()
        timeline, slot = self._indexed
        if head.timeline != timeline or head.slot - slot >= _INDEX_AFTER:
            # Two workers only, to leave the store to the epochs.
            SlotIndex(self._slot_log, workers=2).refresh()
            self._indexed = (head.timeline, head.slot)

    def _maintain_if_due(self) -> None:
        every = self._spec.checkpoint.maintain_every
        if every is None or self._monotonic() - self._maintained_at < every / 1e6:
            return
        self._maintained_at = self._monotonic()
        report = maintain_bucket(self._spec, self._slot_log, run=self._run)
        swept = report.swept
        if swept.retired or swept.deleted:
            _log.info(
                "retention",
                retired=len(swept.retired),
                deleted=len(swept.deleted),
                bytes=swept.deleted_bytes,
            )
        for table, files in report.compacted.items():
            if files.before != files.after:
                _log.info(
                    "compaction", table=table, files_before=files.before, files_after=files.after
                )
        if report.compaction_obstacle:
            _log.info("compaction_left", why=report.compaction_obstacle)

    def _scrub_if_due(self) -> None:
        """Read checkpoints for some seconds if the last scrub is a day old."""
        begun, now = self._monotonic(), SYSTEM_CLOCK.wall_ticks()
        if self._scrub is None:
            if begun - self._scrub_read_at < _SCRUB_LOOK_EVERY:
                return
            self._scrub_read_at = begun
            if not is_scrub_due(self._slot_log, now):
                return
            shares = count_scrub_shares(self._spec.checkpoint.retain_for)
            chosen = select_for_scrub(self._slot_log, shares, now // SCRUB_EVERY)
            self._scrub = scrub_checkpoints(self._slot_log, chosen, workers=2)
        for result in self._scrub:
            first = result.evidence
            if condemn_if_damaged(self._slot_log, result) and first is not None:
                _log.error(
                    "checkpoint_damaged",
                    checkpoint=result.checkpoint,
                    problem=first.problem.value,
                    key=first.key,
                    advice="it is not restored any more; see: tidegate checkpoints verify",
                )
            if self._monotonic() - begun >= _SCRUB_SECONDS:
                return
        self._scrub = None
        note_scrub(self._slot_log, now)
