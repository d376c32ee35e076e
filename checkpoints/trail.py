"""The history of a restore that was asked for in Airflow: who, when, why, from, to, who approved, what came of it.

The fork record in the log stays the proof of the restore itself; this keeps what stands around it, refusals included. One
document per request, changed by compare-and-swap, kept for ever.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.layout import BucketLayout, require_name
from tidegate.checkpoints.store import Store

__all__ = ["RestoreAuditEntry", "RestoreAudit", "RestoreEvent", "record_restore_event", "read_restore_audits"]


class RestoreEvent(StrEnum):
    """What happened."""

    ASKED = "asked"
    APPROVED = "approved"
    REJECTED = "rejected"
    REFUSED = "refused"  # by us: approved by the one who asked, or the stream had moved on
    RESTORED = "restored"
    FAILED = "failed"


class RestoreAuditEntry(BaseModel):
    """One thing that happened; `at` is wall-clock microseconds, for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: RestoreEvent
    who: str
    at: int
    detail: str = ""


class RestoreAudit(SharedDocument):
    """The bytes of `trail/<request>.json`.

    Attributes:
        request: id of the Airflow run.
        target: checkpoint to go back to.
        head: newest checkpoint when it was asked for.
    """

    request: str
    target: str = ""
    head: str = ""
    why: str = ""
    steps: tuple[RestoreAuditEntry, ...] = ()


def record_restore_event(
    store: Store,
    pipeline: str,
    request: str,
    what: RestoreEvent,
    *,
    who: str,
    detail: str = "",
    target: str | None = None,
    head: str | None = None,
    why: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> RestoreAudit:
    """Add a step; one that is there already (a task was tried again) is not added twice. The first step names the target."""

    def add_entry(before: RestoreAudit) -> RestoreAudit:
        if any((s.what, s.who) == (what, who) for s in before.steps):
            return before
        facts = {"target": target or before.target, "head": before.head or head or "", "why": before.why or why}
        return before.model_copy(update={**facts, "steps": (*before.steps, RestoreAuditEntry(what=what, who=who, at=at, detail=detail))})

    at = clock.wall_ticks()
    return change_document(store, _build_audit_key(pipeline, request), RestoreAudit(request=request), add_entry)


def read_restore_audits(store: Store, pipeline: str, most: int = 50) -> list[RestoreAudit]:
    """The newest trails, newest first."""
    keys = [entry.key for entry in store.list_objects(BucketLayout(pipeline).restore_audit_prefix)]
    found = [trail for trail, _ in (read_document(store, key, RestoreAudit) for key in keys[-4 * most :]) if trail is not None and trail.steps]
    return sorted(found, key=lambda trail: trail.steps[0].at, reverse=True)[:most]


def _build_audit_key(pipeline: str, request: str) -> str:
    return f"{BucketLayout(pipeline).restore_audit_prefix}{require_name(request, 'request id')}.json"
