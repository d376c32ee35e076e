"""Sealed epochs without rows or files, for tests that need a log with a history and nothing in it."""

from __future__ import annotations

from typing import Any

from tidegate.checkpoints.bucket_layout import generate_attempt_id
from tidegate.checkpoints.manifest import Counters, Manifest, RetiredEpoch
from tidegate.checkpoints.slot_log import SlotLog


def seal_epoch(log: SlotLog, **fields: Any) -> None:
    """Fill the next slot of pipeline `p` with an epoch.

    Its counters say ten rows a slot unless `fields` say otherwise.
    """
    head = log.head()
    rows = 10 * head.next_slot
    manifest = Manifest(
        timeline=head.timeline,
        slot=head.next_slot,
        pipeline="p",
        uid="u",
        code_version="c",
        parent=str(head.checkpoint) if head.checkpoint else None,
        parent_sha256=head.sha256,
        attempt=generate_attempt_id(),
        lease_token=1,
        driver="d",
        recorded_now=0,
        created_at=0,
        **{"spec_digest": "s", "counters": Counters(read=rows, released=rows), **fields},
    )
    log.seal(manifest)


def checkpoint_id(log: SlotLog, slot: int) -> str:
    """The id of the epoch in a slot of the first timeline."""
    filled = log.read_slot(0, slot)
    assert filled is not None
    return str(filled.epoch.id)


def retire_epoch(log: SlotLog, slot: int) -> None:
    """Replace the manifest in a slot of the first timeline by its stub, as retention does."""
    filled = log.read_slot(0, slot)
    assert filled is not None
    epoch = filled.epoch
    stub = RetiredEpoch(
        timeline=0,
        slot=slot,
        attempt=epoch.attempt,
        parent=epoch.parent,
        parent_sha256=epoch.parent_sha256,
        original_sha256=filled.sha256,
        created_at=epoch.created_at,
        retired_at=0,
    )
    log.store.compare_and_swap(filled.key, stub.to_bytes(), filled.etag)
