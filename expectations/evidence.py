"""Gather what the checks look at: the tables up to one epoch, and the manifests that belong to it."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.desired import DesiredState, read_desired_state
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.log import LogHead, SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.verify import verify_checkpoint
from tidegate.expectations.summaries import Evidence
from tidegate.jobs.spec.pipeline import BARRIERS, CHECKPOINTS, DEAD_LETTERS, EVENTS, LATE, PipelineSpec

__all__ = ["TableReader", "gather_evidence"]


class TableReader(Protocol):
    """Reads one table."""

    def __call__(self, name: str, *, since: int = 0) -> pa.Table:
        """Its rows of epochs after `since`; empty, with its columns, before the first epoch."""
        ...


def gather_evidence(spec: PipelineSpec, store: Store, read: TableReader, *, clock: Clock = SYSTEM_CLOCK) -> Evidence:
    """Read everything once. The tables are cut at the newest epoch of the checkpoints table, so that they fit together.

    Raises:
        TransientError: the store or the catalog cannot be reached now.
    """
    log = SlotLog(store, spec.name)
    sealed = log.head()
    checkpoints = read(CHECKPOINTS)
    epoch = pc.max(checkpoints["_epoch"]).as_py() or 0
    head = _find_epoch_manifest(log, sealed, epoch)
    events_since = max(0, epoch - spec.quality.release_epochs)
    return Evidence(
        spec=spec,
        late=_cut_at_epoch(read(LATE), epoch),
        barriers=_cut_at_epoch(read(BARRIERS), epoch),
        checkpoints=checkpoints,
        dead_letters=_cut_at_epoch(read(DEAD_LETTERS), epoch),
        events=_cut_at_epoch(read(EVENTS, since=events_since), epoch),
        events_since=events_since,
        head=head,
        past=_find_epoch_manifest(log, sealed, epoch - spec.quality.recent),
        sealed=sealed.slot,
        now=clock.wall_ticks(),
        wanted=_is_checkpoint_due(store, spec.name, head),
        verified=str(verify_checkpoint(log, head.id, checksums=False).verdict) if head else "none",
    )


def _cut_at_epoch(table: pa.Table, epoch: int) -> pa.Table:
    return table.filter(pc.less_equal(table["_epoch"], epoch))


def _find_epoch_manifest(log: SlotLog, head: LogHead, epoch: int) -> Manifest | None:
    """The manifest of one epoch on the current lineage; None before the first, and for a retired one."""
    if head.record is not None and head.slot == epoch:
        return head.record
    filled = next(log.epochs_between(head.timeline, epoch, epoch), None) if epoch > 0 else None
    return filled.record if filled is not None and isinstance(filled.record, Manifest) else None


def _is_checkpoint_due(store: Store, pipeline: str, head: Manifest | None) -> bool:
    """It should run or is driven, and rows were waiting when the newest checkpoint was sealed: the next one is due.

    A stream with nothing to read seals nothing, however healthy it is.
    """
    lease = read_lease(store, pipeline)
    driven = lease is not None and lease.holder is not None
    running = driven or read_desired_state(store, pipeline).state is DesiredState.RUN
    return running and head is not None and any(part.get("pending") for part in head.cut.values())
