"""The merge: one sealed slot, like any epoch, whose cut is empty and whose files are the effect of a splice request.

1. Compute the plan at the head, and compare its digest with the one that was approved.
2. Write the rows under an attempt of its own. A crash up to here leaves garbage only.
3. Fill the next slot with the manifest. This *is* the merge: followers publish it, a restore takes
  it back.
4. Note it in the request, which is a courtesy: whether a request is merged is told by the log.

It needs no lease. A driver that meets the slot filled reads it, and goes on after it: its own state
is carried over unchanged. A merge that loses the slot to a driver's epoch writes its files again
with the new number; the effect is the same, because what it touches is purged and no epoch can
change it. A restore or another merge in between makes it compute anew, and so does every epoch if
streams depend on the rows: then the merge asks the driver to hold for it, once it has lost a slot
or two.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate import __version__
from tidegate.checkpoints.bucket_layout import CheckpointId, generate_attempt_id
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    DriverRequest,
    RequestKind,
    acknowledge_request,
    submit_request,
)
from tidegate.checkpoints.epoch_notes import EpochCounters, EpochNotes, MergeSummary
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog, SlotTaken
from tidegate.checkpoints.splice_requests import (
    SpliceRequest,
    decide_splice_request,
    note_splice_event,
    read_splice_request,
)
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.engine.interfaces import skip_slice_record
from tidegate.jobs.engine.manifest_writer import ManifestAuthor, ManifestDraft
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.jobs.splice.impact import (
    Impact,
    digest_plan,
    digest_tables,
    make_impact_report,
    parse_digest_slot,
)
from tidegate.jobs.splice.merge_plan import MergePlan, make_merge_plan
from tidegate.jobs.splice.tables_at_head import find_merge_segments, read_data_file

CRASH_POINTS: Final = (
    "merge.start",
    "merge.planned",
    "merge.written",
    "merge.seal",
    "merge.sealed",
    "merge.noted",
)
"""Where a test may end the process, in order.

Up to ``merge.seal`` nothing has happened; from ``merge.sealed`` on all has.
"""
_LOSSES_BEFORE_HOLD = (
    2  # slots lost with all the work behind them, before the driver is asked to hold
)
_SHORTEST_HOLD = (
    30.0  # seconds: an epoch that is under way when the driver is asked, and the merge behind it
)
# Slots lost in a row: a driver seals at most a few a second, and writing the files again takes
# less.
_MAX_ATTEMPTS = 40

PointCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """What a merge did.

    Attributes:
        checkpoint: the sealed slot; None when there was nothing left to merge.
        promised: digest of the impact report; actual: of the rows that were sealed.
        again: the request had been merged before; nothing was done now.
        lost: slots that drivers sealed first.
    """

    checkpoint: str | None
    impact: Impact | None
    actual: str | None
    again: bool = False
    lost: int = 0
    seconds: float = 0.0

    @property
    def reported_digest(self) -> str | None:
        """Digest of the report."""
        return self.impact.digest if self.impact else None


def estimate_impact(
    spec: PipelineSpec, log: SlotLog, request: SpliceRequest
) -> tuple[MergePlan, Impact]:
    """The impact of a request at the head of the log."""
    begun = time.monotonic()
    plan = make_merge_plan(spec, log, request)
    return plan, make_impact_report(spec, plan, time.monotonic() - begun)


def find_merge_checkpoint(log: SlotLog, request_id: str, head: LogHead | None = None) -> str | None:
    """The checkpoint that merged a request, on the current lineage; None if none did."""
    segment = find_merge_segments(head or log.head()).get(request_id)
    return str(segment.extra["checkpoint"]) if segment else None


def merge_request(
    spec: PipelineSpec,
    log: SlotLog,
    request_id: str,
    *,
    who: str,
    why: str = "",
    digest: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    step: PointCallback = lambda _: None,
) -> MergeOutcome:
    """Merge an open request. Calling it again after a crash finishes or confirms it.

    Args:
        spec: the pipeline.
        log: its log.
        request_id: which request.
        who: stands in the request and in the manifest.
        why: likewise.
        digest: of the impact report that was approved; a different effect is refused. Default: what
            the request says.
        clock: for the times in documents.
        step: told about every point of `CRASH_POINTS`.

    Raises:
        ConfigurationError: the request is not open, too early, or its effect is not the approved
            one.
        PoisonError: the effect cannot be exact.
        TransientError: drivers kept sealing first; nothing was merged.
    """
    step("merge.start")
    begun = time.monotonic()
    done = _find_earlier_merge(spec, log, request_id, who=who, why=why, clock=clock)
    if done is not None:
        return done
    request = _open_request(log, spec, request_id, clock)
    plan, impact = estimate_impact(spec, log, request)
    _require_approved(spec, request, plan, impact, digest or request.approved_digest)
    step("merge.planned")
    with _SlotHold(log, request_id, who, clock) as hold:
        for lost in range(_MAX_ATTEMPTS):
            if plan.is_empty:
                _note_merge(log, spec, request_id, who, why, clock, None, impact.digest)
                return MergeOutcome(None, impact, None, lost=lost, seconds=time.monotonic() - begun)
            outcome = _MergeAttempt(
                spec, log, plan, who=who, why=why, clock=clock, step=step, impact=impact
            ).run()
            if isinstance(outcome, Manifest):
                step("merge.sealed")
                actual = _digest_sealed_rows(log, outcome, parse_digest_slot(impact.digest))
                _note_merge(log, spec, request_id, who, why, clock, outcome, actual)
                step("merge.noted")
                _require_reported_digest(spec, impact, actual)
                return MergeOutcome(
                    str(outcome.id), impact, actual, lost=lost, seconds=time.monotonic() - begun
                )
            head = log.head()
            if plan.streams is None and _has_only_epochs_between(plan.head, head):
                plan = replace(plan, head=head)
            else:
                done = _find_earlier_merge(spec, log, request_id, who=who, why=why, clock=clock)
                if done is not None:
                    return done
                if lost + 1 >= _LOSSES_BEFORE_HOLD:
                    hold.ask_driver((time.monotonic() - begun) / (lost + 1))
                plan, impact = estimate_impact(spec, log, request)
                _require_approved(spec, request, plan, impact, digest or request.approved_digest)
    raise TransientError(
        f"drivers of {spec.name} sealed first {_MAX_ATTEMPTS} times in a row",
        code="splice.contended",
        pipeline=spec.name,
        kept="the request; nothing was merged",
        advice="try again, or drain the driver first",
        retry_after=5.0,
    )


class _SlotHold:
    """Asks the driver to leave the next slot to the merge.

    At the end, however it ends, the driver goes on.
    """

    def __init__(self, log: SlotLog, splice: str, who: str, clock: Clock) -> None:
        self._log, self._splice, self._who, self._clock = log, splice, who, clock
        self._asked: DriverRequest | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            ack = Ack(
                id=self._asked.id,
                outcome=AckOutcome.APPLIED,
                detail="over",
                token=0,
                at=self._clock.wall_ticks(),
            )
            acknowledge_request(self._log.store, self._log.pipeline, ack)
            self._asked = None

    def ask_driver(self, seconds: float) -> None:
        """For so long as a merge that takes `seconds` may need.

        An earlier request that was too short is over.
        """
        self.__exit__()
        ttl = max(_SHORTEST_HOLD, 4 * seconds)
        self._asked = submit_request(
            self._log.store,
            self._log.pipeline,
            RequestKind.HOLD,
            who=self._who,
            name=self._splice,
            ttl=ttl,
            clock=self._clock,
        )


class _MergeAttempt:
    """Steps 2 and 3, once."""

    def __init__(
        self,
        spec: PipelineSpec,
        log: SlotLog,
        plan: MergePlan,
        *,
        who: str,
        why: str,
        clock: Clock,
        step: PointCallback,
        impact: Impact,
    ) -> None:
        assert plan.head.record is not None  # noqa: S101 - a plan needs an epoch
        self.spec, self.log, self.plan, self.impact = spec, log, plan, impact
        self.parent: Manifest = plan.head.record
        self.who, self.why, self.clock, self.step = who, why, clock, step
        self.id = CheckpointId(plan.head.timeline, plan.head.next_slot, generate_attempt_id())

    def run(self) -> Manifest | None:
        """The manifest that was sealed; None if the slot was lost."""
        files = {}
        if self.plan.events is not None:
            files[EVENTS] = [self._write_table(EVENTS, self.plan.events)]
        files |= {
            name: [self._write_table(name, table)]
            for name, table in self.plan.tables.items()
            if table.num_rows
        }
        segments = [*self._write_stream_segments(), self._write_merge_segment()]
        self.step("merge.written")
        manifest = self._make_manifest(files, segments)
        self.step("merge.seal")
        return None if isinstance(self.log.seal(manifest), SlotTaken) else manifest

    def _write_table(self, name: str, table: Any) -> FileRef:
        table = table.append_column(
            "_timeline", pa.array([self.id.timeline] * table.num_rows, pa.int32())
        )
        table = table.append_column("_epoch", pa.array([self.id.slot] * table.num_rows, pa.int64()))
        order = [c for c in build_table_schema(self.spec, name).names if c in table.column_names]
        table = table.select([*order, *(c for c in table.column_names if c not in order)])
        return self._put_parquet(
            f"{self.log.layout.table_prefix(name, self.id)}splice.parquet",
            f"table:{name}",
            table,
            table[self._time_column(name)],
        )

    def _time_column(self, name: str) -> str:
        """The column whose least and greatest values a file's reference carries."""
        if name in self.spec.streams:
            return "stream_time"
        own = {**dict.fromkeys(self.spec.windows, "window_end"), REJECTIONS: "stamp"}
        return own.get(name) or next(iter(self.spec.sources.values())).event_time

    def _write_merge_segment(self) -> FileRef:
        """What was merged by whom.

        Carried from epoch to epoch as long as the merge is on the lineage.
        """
        request, effect = self.plan.request, self.plan.streams
        stream = request.destination if request.origin == "attachment" else None
        time = self.plan.rows[
            "_stamp" if stream else next(iter(self.spec.sources.values())).event_time
        ]
        key = f"{self.log.layout.state_prefix(self.id)}splice.parquet"
        extra: dict[str, Any] = {"request": request.id, "checkpoint": str(self.id)} | (
            {"stream": stream} if stream else {}
        )
        if effect is not None:
            rewrites = {name: change.first for name, change in effect.changes.items()}
            extra |= {"from": effect.since, "rewrites": rewrites}
        return self._put_parquet(key, SPLICE_KIND, self.plan.rows, time).model_copy(
            update={"extra": extra}
        )

    def _write_stream_segments(self) -> list[FileRef]:
        """State segments of the streams.

        Those that the merge has computed again, and the others as they were.
        """
        again = self.plan.streams.segments if self.plan.streams else {}
        written = []
        for kind, segment in again.items():
            if segment is not None:
                rows, low, high, extra = segment
                key = f"{self.log.layout.state_prefix(self.id)}{kind.replace(':', '-')}.parquet"
                ref = self._put_parquet(key, kind, rows, pa.array([low, high], pa.int64()))
                written.append(ref.model_copy(update={"extra": extra}))
        return [*(s for s in self.parent.segments if s.kind not in again), *written]

    def _put_parquet(self, key: str, kind: str, table: Any, time: Any) -> FileRef:
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="snappy", coerce_timestamps="us")
        ticks = [
            t
            for t in time.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
            if t is not None
        ]
        data = buffer.getvalue()
        self.log.store.put(key, data)
        return FileRef(
            key=key,
            rows=table.num_rows,
            bytes=len(data),
            sha256=sha256_of_bytes(data),
            min_time=min(ticks, default=None),
            max_time=max(ticks, default=None),
            kind=kind,
        )

    def _make_manifest(
        self, files: Mapping[str, list[FileRef]], segments: list[FileRef]
    ) -> Manifest:
        """Return the parent's state, unchanged, with the merge's files.

        A driver continues after it as if it were its own epoch.
        """
        parent, written = self.parent, [s for s in segments if s not in self.parent.segments]
        before = Decision.from_record(parent.decision, parent.decider)
        draft = ManifestDraft(
            author=ManifestAuthor(parent.uid, f"splice:{self.who}"[:100], __version__),
            pipeline=parent.pipeline,
            spec_digest=parent.spec_digest,
            lease_token=parent.lease_token,
            head=self.plan.head,
            attempt=self.id,
            cut={member: skip_slice_record(part) for member, part in parent.cut.items()},
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
            segments=segments,
            files=files,
            notes=self._make_notes([ref for refs in [*files.values(), written] for ref in refs]),
            timings={"plan": self.impact.cost["seconds"]},
            created_at=self.clock.wall_ticks(),
        )
        return draft.to_manifest()

    def _make_notes(self, written: list[FileRef]) -> EpochNotes:
        plan, before, retained = self.plan, self.parent.epoch_notes, self.parent.counters.retained
        windows = {
            name: table.num_rows for name, table in plan.tables.items() if name in self.spec.windows
        }
        tables = {
            t.table: {"added": t.added, "changed": t.changed, "removed": t.removed}
            for t in self.impact.tables
        }
        return EpochNotes(
            counters=EpochCounters(retained_before=retained, retained=retained, windows=windows),
            next_position=before.next_position + self._count_appended_events(),
            released_max=before.released_max,
            sketches={},
            bytes_written=sum(ref.bytes for ref in written),
            streams=plan.streams.record if plan.streams else before.streams,
            savepoints=(),
            aborted=(),
            merge=MergeSummary(
                request=plan.request.id,
                rows=plan.rows.num_rows,
                digest=self.impact.digest,
                tables=tables,
                who=self.who,
                why=self.why,
            ),
        )

    def _count_appended_events(self) -> int:
        """Events that the merge adds at the end; with an ordered release it inserts them."""
        if self.plan.events is None or self.spec.release.mode is not ReleaseMode.PASS_THROUGH:
            return 0
        return int(self.plan.events.num_rows)


def _find_earlier_merge(
    spec: PipelineSpec, log: SlotLog, request_id: str, *, who: str, why: str, clock: Clock
) -> MergeOutcome | None:
    """What an earlier call sealed, if one did; its note is made up for."""
    checkpoint = find_merge_checkpoint(log, request_id)
    if checkpoint is None:
        return None
    found = log.open_checkpoint(CheckpointId.parse(checkpoint)).record
    request = read_splice_request(log.store, spec.name, request_id)
    actual = None
    if isinstance(found, Manifest):
        merge = found.epoch_notes.merge
        assert merge is not None  # noqa: S101 - the checkpoint merged the request
        actual = _digest_sealed_rows(log, found, parse_digest_slot(merge.digest))
        if request.state != "merged":
            _note_merge(log, spec, request_id, who, why, clock, found, actual)
    return MergeOutcome(checkpoint, None, actual, again=True)


def _open_request(log: SlotLog, spec: PipelineSpec, request_id: str, clock: Clock) -> SpliceRequest:
    """The request, if somebody may still merge it. One that a restore took back is open again."""
    request = read_splice_request(log.store, spec.name, request_id)
    if request.is_expired(clock.wall_ticks()) and request.state != "expired":
        request = decide_splice_request(
            log.store,
            spec.name,
            request_id,
            "expired",
            who="clock",
            why="nobody decided in time",
            at=clock.wall_ticks(),
        )
    if request.state in ("rejected", "expired"):
        raise ConfigurationError(
            f"splice request {request_id} of {spec.name} is {request.state}"
            f" ({request.decided_why or 'no reason given'})",
            code="splice.not_open",
            pipeline=spec.name,
            kept="everything; nothing was merged",
            advice="make a new request from the same rows",
        )
    return request


def _require_approved(
    spec: PipelineSpec,
    request: SpliceRequest,
    plan: MergePlan,
    impact: Impact,
    approved: str | None,
) -> None:
    if (
        approved is not None
        and approved != impact.digest
        and not _is_approved_so_far(approved, plan)
    ):
        raise ConfigurationError(
            f"the effect of splice request {request.id} of {spec.name} is not the one that was"
            " approved: another merge or a restore came between",
            code="splice.effect_changed",
            pipeline=spec.name,
            kept="everything; nothing was merged",
            advice=f"look at it again: tidegate splice show {spec.name} {request.id}",
        )


def _is_approved_so_far(approved: str, plan: MergePlan) -> bool:
    """Whether the effect on all that was there when somebody approved is the one that was approved.

    Streams go on meanwhile.
    """
    slot = parse_digest_slot(approved)
    return slot is not None and plan.streams is not None and digest_plan(plan, slot) == approved


def _has_only_epochs_between(before: LogHead, after: LogHead) -> bool:
    """Whether only epochs came between: no restore, and no other merge."""
    return (
        before.timeline == after.timeline
        and find_merge_segments(before).keys() == find_merge_segments(after).keys()
    )


def _digest_sealed_rows(log: SlotLog, manifest: Manifest, upto: int | None) -> str:
    """Digest of the rows that were sealed, read back from the store."""
    tables = {
        name: pa.concat_tables([read_data_file(log, ref) for ref in refs])
        for name, refs in manifest.files.items()
    }
    return digest_tables(tables, upto)


def _note_merge(
    log: SlotLog,
    spec: PipelineSpec,
    request_id: str,
    who: str,
    why: str,
    clock: Clock,
    sealed: Manifest | None,
    actual: str,
) -> None:
    now = clock.wall_ticks()
    more = {"checkpoint": str(sealed.id) if sealed else None, "actual": actual, "because": why}
    note_splice_event(
        log.store, spec.name, request_id, "merged", who=who, at=now,
        state="merged", decided_by=who, decided_why=why, decided_at=now, **more,
    )  # fmt: skip


def _require_reported_digest(spec: PipelineSpec, impact: Impact, actual: str) -> None:
    if actual != impact.digest:
        raise PoisonError(
            f"the merge of splice request {impact.request} of {spec.name} sealed other rows than"
            " its report said",
            code="splice.unequal",
            pipeline=spec.name,
            kept="the checkpoint before the merge, which can be restored",
            advice="report this message; it is a defect of tidegate",
        )
