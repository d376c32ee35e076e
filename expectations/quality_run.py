"""One quality run, from tables to the result in the bucket."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.verify import verify_checkpoint
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import (
    BARRIERS,
    CHECKPOINTS,
    DEAD_LETTERS,
    EVENTS,
    LATE,
    PipelineSpec,
)
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.json_types import JsonObject

from . import data_docs
from .evidence import LATE_COLUMNS, Evidence, event_columns
from .gx_runner import CheckResult, load_great_expectations, run_suites
from .job_batches import JobEvidence, gather_batches
from .suite_files import list_checked_tables, load_suites

SCHEMA_VERSION = 1
_MANIFESTS_READ = 200  # one GET each; a `recent_time` of a day may hold many more epochs
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def check_quality(
    spec: PipelineSpec | JobSpec,
    store: Store,
    *,
    read: TableReader | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> JsonObject:
    """Run every suite, put result and Data Docs into the store, and return the result.

    The result's ``verdict`` is ``pass``, ``warn`` or ``fail``; ``checkpoint`` is the newest one
    that was looked at (None before the first), so that ``recover_to: latest_healthy`` can tell
    which checkpoints were found healthy; ``key`` and ``docs`` are store keys.

    Raises:
        ConfigurationError: a suite is wrong, or a check cannot be computed.
        TransientError: the store or the catalog cannot be reached now.
    """
    # Its import is a part of the process's start, not of the check.
    load_great_expectations()
    begun = time.monotonic()
    evidence: Evidence | JobEvidence
    if isinstance(spec, JobSpec):
        evidence = gather_batches(spec, store, clock)
    else:
        read = read or _make_table_reader(spec, store)
        evidence = gather_evidence(spec, store, read, clock=clock)
    run = run_suites(evidence)
    at = _UNIX_EPOCH + timedelta(microseconds=evidence.now)
    name, quality = at.strftime("%Y%m%dT%H%M%S.%fZ"), BucketLayout(spec.name).quality_prefix
    head = evidence.head
    result: JsonObject = {
        "schema_version": SCHEMA_VERSION,
        "kind": "quality",
        "id": name,
        "key": f"{quality}results/{name}.json",
        "docs": f"{quality}docs/{name}/index.html",
        "pipeline": spec.name,
        "at": at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "checkpoint": str(head.id) if head else None,
        "timeline": head.timeline if head else None,
        "epoch": head.slot if head else None,
        "recent_since": evidence.recent_since,
        "verdict": run.verdict,
        "failed": [_dump_check(c) for c in run.failed_checks],
        "checks": [_dump_check(c) for c in run.checks],
        "seconds": round(time.monotonic() - begun, 3),
    }
    data_docs.publish_data_docs(store, result, run)
    return result


def _dump_check(check: CheckResult) -> JsonObject:
    listed = {name: list(getattr(check, name)) for name in ("offenders", "sample")}
    epochs = list(check.epochs) if check.epochs else None
    return asdict(check) | listed | {"epochs": epochs, "page": check.page_name}


def _make_table_reader(spec: PipelineSpec, store: Store) -> TableReader:
    # Arrow and DuckDB take a second to import.
    from tidegate.jobs.sinks.published_tables import RowSelection, scan_table

    # The two tables that may be large are read without the user's columns.
    narrow = {EVENTS: event_columns(spec), LATE: LATE_COLUMNS}

    def read_run_rows(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        # What was merged in later is not the run's doing: the checks judge the run.
        columns = None if whole else narrow.get(name)
        selection = RowSelection(since=since, columns=columns, spliced=False)
        return scan_table(spec, store, name, selection)

    return read_run_rows


# Gather what the checks look at: the tables up to one epoch, and the manifests that belong to it.


class TableReader(Protocol):
    """Reads one output table."""

    def __call__(self, name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        """Its rows of epochs after `since`; empty, with its columns, before the first epoch.

        Without `whole`, columns that no built-in check needs may be left out.
        """
        ...


def gather_evidence(
    spec: PipelineSpec, store: Store, read: TableReader, *, clock: Clock = SYSTEM_CLOCK
) -> Evidence:
    """Read all tables and manifests that the checks need.

    The tables are cut at the newest epoch of the checkpoints table, so that they fit together.

    Raises:
        ConfigurationError: a suite is wrong.
        TransientError: the store or the catalog cannot be reached now.
    """
    log = SlotLog(store, spec.name)
    sealed = log.head()
    checkpoints = read(CHECKPOINTS)
    epoch = pc.max(checkpoints["_epoch"]).as_py() or 0
    head = _find_epoch_manifest(log, sealed, epoch)
    events_since = max(0, epoch - spec.quality.release_epochs)
    now = clock.wall_ticks()
    recent_since, past = _find_recent_start(log, sealed, checkpoints, spec, now)

    def read_cut(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        table = read(name, since=since, whole=whole)
        return table.filter(pc.less_equal(table["_epoch"], epoch))

    return Evidence(
        spec=spec,
        late=read_cut(LATE),
        barriers=read_cut(BARRIERS),
        checkpoints=checkpoints,
        dead_letters=read_cut(DEAD_LETTERS),
        events=read_cut(EVENTS, since=events_since),
        events_since=events_since,
        head=head,
        recent_since=recent_since,
        past=past,
        manifests=_read_recent_manifests(log, sealed, recent_since, epoch),
        rejections=read_cut(REJECTIONS) if spec.streams else None,
        tables={
            name: read_cut(name, since=recent_since, whole=True)
            for name in list_checked_tables(load_suites(spec))
        },
        sealed=sealed.slot,
        now=now,
        wanted=_is_checkpoint_due(store, spec.name, head),
        verified=str(verify_checkpoint(log, head.id, checksums=False).verdict) if head else "none",
    )


def _find_recent_start(
    log: SlotLog, head: LogHead, checkpoints: pa.Table, spec: PipelineSpec, now: int
) -> tuple[int, Manifest | None]:
    """The epoch after which epochs are recent, with its manifest.

    If that epoch was retired, the oldest manifest that is left begins the recent epochs.
    """
    newest = pc.max(checkpoints["_epoch"]).as_py() or 0
    if spec.quality.recent_time is None:
        first = max(0, newest - spec.quality.recent)
    else:
        sealed_at = checkpoints["sealed_at"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        old = checkpoints.filter(pc.less_equal(sealed_at, now - spec.quality.recent_time))
        first = pc.max(old["_epoch"]).as_py() or 0
    if first == 0:
        return 0, None
    # Retirement goes from old to new, so that a bisection finds its end.
    find_manifest = partial(_find_epoch_manifest, log, head)
    older = range(first, newest)
    first += bisect_left(older, True, key=lambda epoch: find_manifest(epoch) is not None)
    return first, find_manifest(first)


def _read_recent_manifests(
    log: SlotLog, head: LogHead, since: int, epoch: int
) -> tuple[Manifest, ...]:
    first = max(since, epoch - _MANIFESTS_READ) + 1
    slots = log.epochs_between(head.timeline, first, epoch)
    return tuple(slot.record for slot in slots if isinstance(slot.record, Manifest))


def _find_epoch_manifest(log: SlotLog, head: LogHead, epoch: int) -> Manifest | None:
    """The manifest of one epoch on the current lineage.

    None before the first, and for a retired one.
    """
    if head.record is not None and head.slot == epoch:
        return head.record
    filled = next(log.epochs_between(head.timeline, epoch, epoch), None) if epoch > 0 else None
    return filled.record if filled is not None and isinstance(filled.record, Manifest) else None


def _is_checkpoint_due(store: Store, pipeline: str, head: Manifest | None) -> bool:
    """It should run or is driven, and rows were waiting when the newest checkpoint was sealed.

    The next one is due.

    A stream with nothing to read seals nothing, however healthy it is.
    """
    lease = read_lease(store, pipeline)
    driven = lease is not None and lease.holder is not None
    running = driven or read_desired_state(store, pipeline).state is DesiredState.RUN
    return running and head is not None and any(part.get("pending") for part in head.cut.values())
