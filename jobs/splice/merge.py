"""Merge a splice request into one sealed slot: the protocol, and one attempt at it.

A merge is a slot of the log like an epoch, with an empty cut and the effect of the request as its
files (`docs/decisions/0040-a-merge-is-one-sealed-slot.md`):

1. Compute the plan at the head of the log, and compare its digest with the approved one.
2. Write the files under a new attempt id. A crash up to here leaves garbage only.
3. Fill the next slot with the manifest. This commits the merge: followers publish it, and a restore
   takes it back.
4. Note the merge in the request's document. Only the log decides whether a request is merged, so a
   crash before this step needs no repair.

A merge needs no lease. A driver that finds the slot filled reads it and continues after it, with
its state unchanged. If a driver seals first, the merge writes its files again for the next slot:
its effect is the same, because no epoch can change windows that are purged. After a restore or
another merge the plan is computed again, and, if streams depend on the rows, after every epoch. To
end such a race, the merge then asks the driver to leave the next slot to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tidegate import __version__
from tidegate.checkpoints.bucket_layout import AttemptFolders, CheckpointId, generate_attempt_id
from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    RequestKind,
    acknowledge_request,
    submit_request,
)
from tidegate.checkpoints.epoch_notes import EpochCounters, EpochNotes, MergeSummary
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog, SlotTaken
from tidegate.checkpoints.splice_requests import (
    SpliceRequest,
    expire_splice_request,
    note_splice_event,
    read_splice_request,
)
from tidegate.jobs.engine.interfaces import skip_slice_record
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND, ManifestAuthor, ManifestDraft
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.jobs.streams.stream_rows import compute_time_bounds
from tidegate.jobs.streams.stream_state import DispatchFiles, add_attempt_columns

from .errors import CONTENDED, EFFECT_CHANGED, NOT_OPEN, UNEQUAL
from .impact import Impact, digest_plan, digest_tables, make_impact_report, parse_digest_slot
from .merge_plan import MergePlan, make_merge_plan
from .tables_at_head import find_merge_segments, read_data_file

# One loss is chance; from the second on the driver is faster than the merge can ever be.
_LOSSES_BEFORE_HOLD = 2  # slots lost before the driver is asked to hold
# Seconds: enough for the epoch that is under way, and for the merge after it.
_SHORTEST_HOLD = 30.0
# Slots lost in a row. A driver seals a few slots per second at most, and writing the files again
# takes less than that.
_MAX_ATTEMPTS = 40
PointCallback = Callable[[str], None]
"""Called with the name of each crash point."""


@dataclass(frozen=True)
class MergeOutcome:
    """What a merge did.

    Attributes:
        checkpoint: the sealed slot; None if nothing was left to merge.
        impact: the report of what was merged; None if an earlier call merged it.
        actual: digest of the rows that were sealed; None if none were, or their slot is retired.
        again: an earlier call had merged the request; this call did nothing.
        lost: slots that drivers sealed first.
        seconds: how long the merge took.
    """

    checkpoint: str | None
    impact: Impact | None
    actual: str | None
    again: bool = False
    lost: int = 0
    seconds: float = 0.0

    @property
    def reported_digest(self) -> str | None:
        """Digest of the impact report; None without one."""
        return self.impact.digest if self.impact else None


def estimate_impact(
    spec: PipelineSpec, log: SlotLog, request: SpliceRequest
) -> tuple[MergePlan, Impact]:
    """Compute the plan of a request at the head of the log, and its impact report.

    Raises as `make_merge_plan` does.
    """
    begun = time.monotonic()
    plan = make_merge_plan(spec, log, request)
    return plan, make_impact_report(spec, plan, time.monotonic() - begun)


def find_merge_checkpoint(log: SlotLog, request_id: str) -> str | None:
    """Return the checkpoint on the current lineage that merged a request; None if there is none."""
    segment = find_merge_segments(log.head()).get(request_id)
    return str(segment.extra["checkpoint"]) if segment else None


def merge_request(
    spec: PipelineSpec,
    log: SlotLog,
    request_id: str,
    decision: MergeDecision,
    step: PointCallback = lambda _: None,
) -> MergeOutcome:
    """Merge an open request. Called again after a crash, it finishes or confirms the merge.

    A request whose time is over becomes expired. If drivers win the slot twice, the newest is asked
    to hold.

    Args:
        spec: the pipeline.
        log: its log.
        request_id: which request.
        decision: who merges it, why, and which effect was approved.
        step: called with the name of each point at which a test may end the process.

    Raises:
        ConfigurationError: the request is unknown or not open, it is too early, the effect cannot
            be computed exactly, or is not the approved one.
        PoisonError: the published results do not follow from the rows, or a reducer fails. Or, with
            the code ``splice.unequal`` and after the merge: other rows were sealed than approved.
        TransientError: drivers kept sealing first, and nothing was merged; or the store did not
            answer.
    """
    step("merge.start")
    merger = _Merger(spec, log, request_id, decision, step)
    return merger.confirm_earlier_merge() or merger.merge()


@dataclass
class _Merger:
    """One call of `merge_request`."""

    spec: PipelineSpec
    log: SlotLog
    request_id: str
    decision: MergeDecision
    step: PointCallback
    begun: float = field(default_factory=time.monotonic)

    def confirm_earlier_merge(self) -> MergeOutcome | None:
        """Return what an earlier call sealed, and note it in the request; None if there is none."""
        checkpoint = find_merge_checkpoint(self.log, self.request_id)
        if checkpoint is None:
            return None
        sealed = self.log.open_checkpoint(CheckpointId.parse(checkpoint)).record
        # The segment in the newest manifest proves the merge, but its digest went with the retired
        # manifest.
        if not isinstance(sealed, Manifest):
            return MergeOutcome(checkpoint, None, None, again=True)
        merge = sealed.epoch_notes.splice
        assert merge is not None  # noqa: S101 - the checkpoint merged the request
        actual = _digest_sealed_rows(self.log, sealed, parse_digest_slot(merge.digest))
        request = read_splice_request(self.log.store, self.spec.name, self.request_id)
        # The earlier call crashed between the seal and the note.
        if request.state != "merged":
            self._note_merge(sealed, actual)
        return MergeOutcome(checkpoint, None, actual, again=True)

    def merge(self) -> MergeOutcome:
        """Plan, and seal until a slot is won."""
        request = self._read_open_request()
        plan, impact = self._plan_approved_effect(request)
        self.step("merge.planned")
        with ExitStack() as hold:
            for lost in range(_MAX_ATTEMPTS):
                outcome = self._try_slot(plan, impact)
                if outcome is not None:
                    seconds = time.monotonic() - self.begun
                    return replace(outcome, lost=lost, seconds=seconds)
                head = self.log.head()
                # Epochs change neither purged windows nor released events: the plan still fits.
                if plan.streams is None and _has_only_epochs_between(plan.head, head):
                    plan = replace(plan, head=head)
                    continue
                # Another process may have won the slot with the same request.
                earlier = self.confirm_earlier_merge()
                if earlier is not None:
                    return earlier
                if lost + 1 >= _LOSSES_BEFORE_HOLD:
                    self._hold_driver(hold, (time.monotonic() - self.begun) / (lost + 1))
                plan, impact = self._plan_approved_effect(request)
        raise CONTENDED(pipeline=self.spec.name, attempts=_MAX_ATTEMPTS)

    def _hold_driver(self, hold: ExitStack, seconds: float) -> None:
        """Ask the driver to leave the next slot to a try of `seconds`, until `hold` is closed."""
        # The driver obeys one hold at a time, and an earlier one may end before this try does.
        hold.close()
        asked = submit_request(
            self.log.store,
            self.log.pipeline,
            RequestKind.HOLD,
            who=self.decision.who,
            name=self.request_id,
            ttl=max(_SHORTEST_HOLD, 4 * seconds),
        )
        hold.callback(self._end_hold, asked.id)

    def _end_hold(self, asked: str) -> None:
        now = SYSTEM_CLOCK.wall_ticks()
        ack = Ack(id=asked, outcome=AckOutcome.APPLIED, detail="over", token=0, at=now)
        acknowledge_request(self.log.store, self.log.pipeline, ack)

    def _try_slot(self, plan: MergePlan, impact: Impact) -> MergeOutcome | None:
        """Seal the plan in the slot after its head; return None if a driver filled that slot."""
        # Everything was merged by other requests: nothing to seal, but the request is over.
        if plan.is_empty:
            self._note_merge(None, impact.digest)
            return MergeOutcome(None, impact, None)
        attempt = _MergeAttempt(self.spec, self.log, plan, impact, self.decision)
        sealed = attempt.seal(self.step)
        if sealed is None:
            return None
        self.step("merge.sealed")
        actual = _digest_sealed_rows(self.log, sealed, parse_digest_slot(impact.digest))
        self._note_merge(sealed, actual)
        self.step("merge.noted")
        # The slot is sealed, so this is an alarm and not a refusal: what was written is not what
        # was approved.
        if actual != impact.digest:
            raise UNEQUAL(pipeline=self.spec.name, request=self.request_id)
        return MergeOutcome(str(sealed.id), impact, actual)

    def _read_open_request(self) -> SpliceRequest:
        """Return the request if it may be merged; one that a restore took back is open again."""
        store, pipeline, now = self.log.store, self.spec.name, SYSTEM_CLOCK.wall_ticks()
        request = read_splice_request(store, pipeline, self.request_id)
        # No process closes requests on time: the first that reads one after its end notes that.
        if request.is_expired(now) and request.state != "expired":
            request = expire_splice_request(store, pipeline, self.request_id, now)
        if request.state in ("rejected", "expired"):
            why = request.decided_why or "no reason given"
            raise NOT_OPEN(pipeline=pipeline, request=self.request_id, state=request.state, why=why)
        return request

    def _plan_approved_effect(self, request: SpliceRequest) -> tuple[MergePlan, Impact]:
        """Compute the effect, and refuse it if another effect was approved."""
        plan, impact = estimate_impact(self.spec, self.log, request)
        approved = self.decision.digest or request.approved_digest
        if approved not in (None, impact.digest) and not _is_approved_so_far(str(approved), plan):
            raise EFFECT_CHANGED(pipeline=self.spec.name, request=request.id)
        return plan, impact

    def _note_merge(self, sealed: Manifest | None, actual: str) -> None:
        """Write into the request's document who merged it, and in which checkpoint."""
        who, why = self.decision.who, self.decision.why
        now = SYSTEM_CLOCK.wall_ticks()
        facts = {"checkpoint": str(sealed.id) if sealed else None, "actual": actual, "because": why}
        note_splice_event(
            self.log.store, self.spec.name, self.request_id, "merged", who=who, at=now,
            state="merged", decided_by=who, decided_why=why, decided_at=now, **facts,
        )  # fmt: skip


def _is_approved_so_far(approved: str, plan: MergePlan) -> bool:
    """Return whether the effect was approved for all rows that existed at the approval.

    Streams keep growing, so the digest of a merge into streams names a slot and covers only the
    rows up to it.
    """
    slot = parse_digest_slot(approved)
    return slot is not None and plan.streams is not None and digest_plan(plan, slot) == approved


def _has_only_epochs_between(before: LogHead, after: LogHead) -> bool:
    """Return whether no restore and no other merge came between two heads."""
    return (
        before.timeline == after.timeline
        and find_merge_segments(before).keys() == find_merge_segments(after).keys()
    )


def _digest_sealed_rows(log: SlotLog, manifest: Manifest, upto: int | None) -> str:
    """Return the digest of the rows that were sealed, read back from the store."""
    tables = {
        name: pa.concat_tables([read_data_file(log, ref) for ref in refs])
        for name, refs in manifest.files.items()
    }
    return digest_tables(tables, upto)


# One attempt: the files of a plan, written and sealed in the slot after its head.


@dataclass(frozen=True)
class MergeDecision:
    """The decision to merge a request.

    Attributes:
        who: who decided; written into the request and the manifest.
        why: the reason; written into both as well.
        digest: digest of the impact report that was approved. Another effect is refused. Unless
            given, the digest in the request counts; with neither, any effect is merged.
    """

    who: str
    why: str = ""
    digest: str | None = None


@dataclass
class _MergeAttempt:
    """One attempt to seal a plan in the slot after its head."""

    _spec: PipelineSpec
    _log: SlotLog
    _plan: MergePlan
    _impact: Impact
    _decision: MergeDecision

    def __post_init__(self) -> None:
        head = self._plan.head
        assert head.record is not None  # noqa: S101 - a plan needs an epoch
        self._parent: Manifest = head.record
        self._id = CheckpointId(head.timeline, head.next_slot, generate_attempt_id())
        folders = AttemptFolders(self._log.layout, self._id)
        self._files = DispatchFiles(self._log.store, folders, [*self._parent.segments])

    def seal(self, step: PointCallback) -> Manifest | None:
        """Write the plan's files and seal them; return None if another process filled the slot.

        The request's document is not changed. `step` is called at the crash points of a merge.
        """
        for name, table in self._plan.tables.items():
            table = add_attempt_columns(table, self._id)
            # In the order of the table's schema, then the columns that only merges write.
            known = build_table_schema(self._spec, name).names
            order = sorted(table.column_names, key=[*known, *table.column_names].index)
            self._files.write_table(name, table.select(order), self._time_column(name), "splice")
        changed = self._plan.streams.segments if self._plan.streams else {}
        for kind, segment in changed.items():
            self._files.drop_segments(kind)
            if segment is not None:
                self._files.write_segment(kind, *segment)
        # All later epochs of the lineage carry this segment, so the newest manifest alone says
        # which requests are merged.
        request, effect, rows = self._plan.request, self._plan.streams, self._plan.rows
        extra: dict[str, Any] = {"request": request.id, "checkpoint": str(self._id)}
        time_column = self._spec.event_time_column
        if request.origin == "attachment":
            extra["stream"], time_column = request.destination, "_stamp"
        if effect is not None:
            rewrites = {name: change.first for name, change in effect.changes.items()}
            extra |= {"from": effect.since, "rewrites": rewrites}
        bounds = compute_time_bounds(rows[time_column])
        self._files.write_segment(SPLICE_KIND, rows, *bounds, extra)
        self._files.flush()
        step("merge.written")
        manifest = self._make_manifest()
        step("merge.seal")
        return None if isinstance(self._log.seal(manifest), SlotTaken) else manifest

    def _time_column(self, table: str) -> str:
        """Return the column whose least and greatest values go into the file's reference."""
        if table in self._spec.streams:
            return "stream_time"
        if table in self._spec.windows:
            return "window_end"
        return "stamp" if table == REJECTIONS else self._spec.event_time_column

    def _make_manifest(self) -> Manifest:
        """Return the parent's state, unchanged, with the merge's files.

        A driver continues after it as if it were its own epoch.
        """
        parent = self._parent
        # A merge decides nothing: frontier and release stay where the parent left them, and what
        # the parent emitted is not emitted again.
        before = Decision.from_record(parent.decision, parent.decider)
        draft = ManifestDraft(
            author=ManifestAuthor(parent.uid, f"splice:{self._decision.who}"[:100], __version__),
            pipeline=parent.pipeline,
            spec_digest=parent.spec_digest,
            lease_token=parent.lease_token,
            head=self._plan.head,
            attempt=self._id,
            cut={member: skip_slice_record(part) for member, part in parent.cut.items()},
            survey=None,
            decision=replace(
                before,
                frontier_before=before.frontier_after,
                release_before=before.release_after,
                barriers=(),
                emitted=(),
                recorded=(),
                changed=False,
            ),
            # A driver looks in its head for requests that were applied, but not acknowledged.
            requests=parent.requests,
            counters=parent.counters,
            segments=self._files.segments,
            files=self._files.tables,
            notes=self._make_notes(),
            timings={"plan": self._impact.cost["seconds"]},
            created_at=SYSTEM_CLOCK.wall_ticks(),
        )
        return draft.to_manifest()

    def _make_notes(self) -> EpochNotes:
        plan, impact, decision = self._plan, self._impact, self._decision
        before, retained = self._parent.epoch_notes, self._parent.counters.retained
        windows = {name: len(changes) for name, changes in plan.changes.items()}
        # Ordered releases insert events: these store the position of another row, so the next free
        # position does not move.
        is_appended = self._spec.release.mode is ReleaseMode.PASS_THROUGH
        appended = plan.events.num_rows if is_appended and plan.events is not None else 0
        segments = [ref for ref in self._files.segments if ref not in self._parent.segments]
        written = [ref for refs in [*self._files.tables.values(), segments] for ref in refs]
        merge = MergeSummary(
            request=plan.request.id,
            rows=plan.rows.num_rows,
            digest=impact.digest,
            tables={
                t.table: {"added": t.added, "changed": t.changed, "removed": t.removed}
                for t in impact.tables
            },
            who=decision.who,
            why=decision.why,
        )
        return EpochNotes(
            epoch=EpochCounters(retained_before=retained, retained=retained, windows=windows),
            next_position=before.next_position + appended,
            released_max=before.released_max,
            sketches={},
            bytes_written=sum(ref.bytes for ref in written),
            streams=plan.streams.record if plan.streams else before.streams,
            savepoints=(),
            aborted=(),
            splice=merge,
            run=before.run,
        )
