"""What the checks of the newest epochs look at."""

from __future__ import annotations

from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.illness_record import read_illness
from tidegate.checkpoints.store import Store
from tidegate.expectations.evidence import Evidence
from tidegate.expectations.quality_run import TableReader, gather_slices
from tidegate.jobs.spec.pipeline import PipelineSpec


def gather_evidence(
    spec: PipelineSpec, store: Store, read: TableReader, *, clock: Clock
) -> Evidence:
    """Return it for a pipeline whose illness record is in the store."""
    record = read_illness(store, spec.name)
    newest = gather_slices(spec, store, read, record, clock).newest
    assert isinstance(newest, Evidence)
    return newest
