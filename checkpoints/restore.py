"""Restores a checkpoint: a plan shows what is taken back, then one conditional PUT does it.

1. `plan_restore` reads and computes; nothing changes. The plan is valid only for the head of the
   log for which it was made.
2. `commit_restore`, under the lease: claim the checkpoint in `roots.json`, then put the fork record
   into the next slot of the current timeline. That PUT is the restore; two restores cannot both
   succeed.
3. The driver that runs next redoes everything else (tables, sinks, state) from the record. A crash
   after step 2 needs no repair. A crash before it leaves a claim, which becomes void when any
   record fills the slot.
"""

from collections import Counter
from enum import StrEnum
from typing import Any

from pydantic import Field

from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec

from .batch_notes import SinkPlan, SinkRewind, list_called_queries, plan_sinks
from .bucket_layout import BucketLayout, CheckpointId
from .checkpoint_catalog import CheckpointCatalog
from .errors import HEAD_MOVED, RESTORE_GAP, RESTORE_REGAINS, RESTORE_SINK, HeadMovedError
from .host_clock import SYSTEM_CLOCK
from .lease import Lease
from .manifest import Counters, ForkRecord
from .pins import RootsFile
from .pipeline_identity import refuse_copied_store
from .record_models import BucketRecord, FrozenModel
from .shared_documents import SharedDocument, change_document, read_document
from .slot_log import LogHead, Sealed, SlotLog, SlotTaken
from .store import Store


class RestorePlan(FrozenModel):
    """What a restore would do.

    Attributes:
        target: checkpoint to return to; None for the very beginning.
        timeline, slot, sha256: the head this plan is bound to.
        head: newest checkpoint of that head; None without one.
        epochs_rewound: epochs and merges of the current lineage that leave it, retired ones too.
        epochs_regained: epochs of an abandoned timeline that come back.
        rows: rows by disposition taken back (cumulative counters, head minus target); negative
            where the target has more.
        tables: rows that leave each table; those of `epochs_rewound`, without retired ones.
        windows: emitted results that are taken back, per window, without retired epochs.
        since: creation time of the target, microseconds UTC; None for the beginning.
        spec_changed: head and target were written by different specs; False without one of them.
        sinks: what happens to the sinks of a job's queries; empty for a pipeline.
        regained: queries of a job whose batches would come back, each with its newest one there,
            while a function has taken them out of the sink.
    """

    pipeline: str
    target: str | None
    timeline: int
    slot: int
    sha256: str | None
    head: str | None
    epochs_rewound: int
    epochs_regained: int
    rows: dict[str, int]
    tables: dict[str, int]
    windows: dict[str, int]
    since: int | None
    spec_changed: bool
    sinks: tuple[SinkPlan, ...] = ()
    regained: dict[str, int] = Field(default={})

    def require_sinks_follow(self) -> None:
        """Refuse a restore that a sink cannot follow.

        Raises:
            ConfigurationError: nothing takes later batches out of the sink, and it may not get them
                twice; or nothing brings back batches that a function has taken out.
        """
        for query, newest in self.regained.items():
            raise RESTORE_REGAINS(
                pipeline=self.pipeline, checkpoint=self.target, query=query, newest=newest
            )
        for one in self.sinks:
            if one.rewind is SinkRewind.REFUSED:
                raise RESTORE_SINK(
                    pipeline=self.pipeline, query=one.query, sink=one.sink, newest=one.newest
                )


def plan_restore(
    log: SlotLog,
    target: CheckpointId | None,
    *,
    catalog: CheckpointCatalog | None = None,
    spec: SupervisedSpec | None = None,
) -> RestorePlan:
    """Return what a restore of `target` (None: the beginning) would take back.

    Writes nothing except pages of the slot index. Does not refuse a condemned target, or a sink
    that cannot follow; `commit_restore` does.

    Args:
        log: of the pipeline or job.
        target: the checkpoint; None for the beginning.
        catalog: of that log.
        spec: the present one. What a job's says about its sinks counts before what the newest
            batches have noted; None: only that is known.

    Raises:
        ConfigurationError: `target` was never completed, or an epoch that the restore would apply
            again was retired or condemned by retention.
        PoisonError: `target` was retired.
    """
    catalog = catalog or CheckpointCatalog(log)
    head = log.head()
    manifest = log.open_checkpoint(target).epoch if target else None
    if target is not None:
        _require_no_gap(catalog, target)
    shared = log.find_parting(target) if target else 0
    # What the lineage has after the place where the ways to the head and to the target part.
    rewound, tables, windows = 0, Counter[str](), Counter[str]()
    for part in log.lineage(head.timeline):
        first = max(part.first, shared + 1)
        last = head.slot if part.last is None else part.last
        for row in catalog.index.iterate_summaries(part.timeline, first=first, last=last):
            if row.kind != "fork":
                rewound += 1
                tables.update(row.tables)
                windows.update(row.windows)
    counters = head.record.counters if head.record else Counters()
    regained = (manifest.slot if manifest else 0) - shared
    return RestorePlan(
        pipeline=log.pipeline,
        target=str(target) if target else None,
        timeline=head.timeline,
        slot=head.slot,
        sha256=head.sha256,
        head=str(head.checkpoint) if head.checkpoint else None,
        epochs_rewound=rewound,
        epochs_regained=regained,
        rows=_count_rows_taken_back(counters, manifest.counters if manifest else Counters()),
        tables=dict(sorted(tables.items())),
        windows=dict(sorted(windows.items())),
        since=manifest.created_at if manifest else None,
        spec_changed=(
            head.record is not None
            and manifest is not None
            and head.record.spec_digest != manifest.spec_digest
        ),
        sinks=plan_sinks(
            head.record, manifest, spec.repeatable if isinstance(spec, JobSpec) else ()
        ),
        regained=list_called_queries(manifest) if regained > 0 else {},
    )


def commit_restore(
    log: SlotLog, lease: Lease, plan: RestorePlan, *, request_id: str, who: str, why: str
) -> Sealed:
    """Carry out a plan. The caller holds the lease before, during and after.

    Raises:
        HeadMovedError: the head of the log is not the one of the plan.
        ConfigurationError: the store is a copy, the target is condemned, an epoch on the way to it
            was retired, or a sink of a job cannot follow.
        PoisonError: the target was retired meanwhile.
        LeaseLostError: another process took the lease.
        SealUndecidedError: the store did not answer; call again with the same `request_id` and
            plan. What fills the slot decides.
    """
    plan.require_sinks_follow()
    refuse_copied_store(log.store, log.pipeline)
    # Without the lease, a driver could seal between the check of the head and the fork record.
    lease.ensure_held()
    # An earlier call whose answer was lost may have won the slot.
    filled = log.read_slot(plan.timeline, plan.slot + 1)
    if (
        filled is not None
        and isinstance(filled.record, ForkRecord)
        and filled.record.request_id == request_id
    ):
        return Sealed(plan.timeline, plan.slot + 1, filled.sha256, filled.etag)
    head, target = log.head(), CheckpointId.parse(plan.target) if plan.target else None
    if (head.timeline, head.slot, head.sha256) != (plan.timeline, plan.slot, plan.sha256):
        raise _head_moved_error(plan, head)
    if target is not None:
        RootsFile(log.store, log.pipeline).claim(
            request_id, target, timeline=head.timeline, slot=head.next_slot, who=who
        )
        # Retention spares the way to a claimed checkpoint. It may have retired a part before, or
        # have condemned one whose stub is not in place yet.
        _require_no_gap(CheckpointCatalog(log), target)
    lease.ensure_held()
    # Retention may remove the batches that are left before a launch has brought the sinks back.
    owed = [one.model_dump(mode="json") for one in plan.sinks]
    outcome = log.fork(head, target, request_id=request_id, who=who, why=why, sinks=owed)
    if isinstance(outcome, SlotTaken):
        raise _head_moved_error(plan, log.head())
    return outcome


def _require_no_gap(catalog: CheckpointCatalog, target: CheckpointId) -> None:
    gap = catalog.find_gap(target)
    if gap is not None:
        raise RESTORE_GAP(pipeline=catalog.log.pipeline, checkpoint=target, slot=gap)


def _count_rows_taken_back(head: Counters, target: Counters) -> dict[str, int]:
    names = ("read", "released", "late", "rejected", "dead_lettered", "retained")
    rows = {name: getattr(head, name) - getattr(target, name) for name in names}
    rows["dead_lettered"] += head.rule_quarantined - target.rule_quarantined  # in the same table
    if filtered := head.filtered - target.filtered:
        rows["filtered"] = filtered
    return rows | {"dropped": sum(head.dropped.values()) - sum(target.dropped.values())}


def _head_moved_error(plan: RestorePlan, head: LogHead) -> HeadMovedError:
    return HEAD_MOVED(
        pipeline=plan.pipeline,
        slot=plan.slot,
        timeline=plan.timeline,
        head_slot=head.slot,
        head_timeline=head.timeline,
    )


# The history of a restore that was asked for in Airflow: who, when, why, from, to, who approved,
# what came of it.
#
# The fork record in the log is the proof of the restore itself; this keeps what happened around
# it, refusals included. One document per request, changed by compare-and-swap, never deleted.


class RestoreEvent(StrEnum):
    """A step in the history of a restore."""

    ASKED = "asked"
    APPROVED = "approved"
    REJECTED = "rejected"
    REFUSED = "refused"  # by us: approved by the one who asked, or the stream had moved on
    RESTORED = "restored"
    FAILED = "failed"


class RestoreAuditEntry(BucketRecord):
    """One step of a restore; `at` is wall-clock microseconds, for display."""

    what: RestoreEvent
    who: str
    at: int
    detail: str = ""


class RestoreAudit(SharedDocument):
    """The history of one restore that was asked for in Airflow.

    The content of `trail/<request>.json`.

    Attributes:
        request: id of the Airflow run.
        target: checkpoint to go back to.
        head: newest checkpoint when the restore was asked for.
        bound: timeline and slot of the head for which an approval is valid; None without approval.
        desired: state that was desired before the restore, for a second try of the task.
        steps: oldest first.
    """

    request: str
    target: str = ""
    head: str = ""
    why: str = ""
    bound: tuple[int, int] | None = None
    desired: str = ""
    steps: tuple[RestoreAuditEntry, ...] = ()


def record_restore_event(
    store: Store,
    pipeline: str,
    request: str,
    what: RestoreEvent,
    *,
    who: str,
    detail: str = "",
    **facts: Any,
) -> RestoreAudit:
    """Add a step to the history of a restore, and return the history.

    A step by the same person is added once, however often a task is tried. `facts` are fields of
    `RestoreAudit`: a given `target` or `desired` replaces the earlier one; `head`, `why` and
    `bound` stay as they were first given.
    """

    def add_entry(before: RestoreAudit) -> RestoreAudit:
        known = any((s.what, s.who) == (what, who) for s in before.steps)
        entry = RestoreAuditEntry(what=what, who=who, at=at, detail=detail)
        new = {
            name: value
            for name, value in facts.items()
            if value and (name in ("target", "desired") or not getattr(before, name))
        }
        steps = before.steps if known else (*before.steps, entry)
        return before.model_copy(update={**new, "steps": steps})

    at = SYSTEM_CLOCK.wall_ticks()
    return change_document(
        store,
        BucketLayout(pipeline).restore_audit_key(request),
        RestoreAudit(request=request),
        add_entry,
    )


_MOST_AUDITS = 50  # that the page shows


def read_restore_audits(store: Store, pipeline: str) -> list[RestoreAudit]:
    """Return the newest 50 histories of restores, newest first by their first step."""
    # Ids of runs sort by time only roughly, so more histories are read than are asked for.
    keys = [entry.key for entry in store.list_objects(BucketLayout(pipeline).restore_audit_prefix)]
    recent = keys[-4 * _MOST_AUDITS :]
    found = [
        trail
        for trail, _ in (read_document(store, key, RestoreAudit) for key in recent)
        if trail is not None and trail.steps
    ]
    return sorted(found, key=lambda trail: trail.steps[0].at, reverse=True)[:_MOST_AUDITS]
