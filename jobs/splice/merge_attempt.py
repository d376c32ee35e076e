"""One attempt at a merge: write the files of a plan, and seal them in the slot after its head."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate import __version__
from tidegate.checkpoints.bucket_layout import AttemptFolders, CheckpointId, generate_attempt_id
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.epoch_notes import EpochCounters, EpochNotes, MergeSummary
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import SlotLog, SlotTaken
from tidegate.jobs.engine.interfaces import skip_slice_record
from tidegate.jobs.engine.manifest_writer import ManifestAuthor, ManifestDraft
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.jobs.splice.impact import Impact
from tidegate.jobs.splice.merge_plan import MergePlan

PointCallback = Callable[[str], None]
"""Called with the name of each crash point."""


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """The decision to merge a request.

    Attributes:
        who: who decided; written into the request and the manifest.
        why: the reason; written into both as well.
        digest: digest of the impact report that was approved. Another effect is refused. Unless
            given, the digest in the request counts.
        clock: for the times in documents.
    """

    who: str
    why: str = ""
    digest: str | None = None
    clock: Clock = SYSTEM_CLOCK


def seal_merge(
    spec: PipelineSpec,
    log: SlotLog,
    plan: MergePlan,
    impact: Impact,
    decision: MergeDecision,
    step: PointCallback,
) -> Manifest | None:
    """Write the plan's files and seal them; return None if the slot was filled by another process.

    Args:
        spec: the pipeline.
        log: its log.
        plan: what to write, and after which head.
        impact: the report of the plan.
        decision: who merges and why.
        step: called at the crash points of a merge.
    """
    attempt = _MergeAttempt(spec, log, plan)
    files, segments = attempt.write_files()
    step("merge.written")
    manifest = attempt.make_manifest(files, segments, impact, decision)
    step("merge.seal")
    return None if isinstance(log.seal(manifest), SlotTaken) else manifest


class _MergeAttempt:
    def __init__(self, spec: PipelineSpec, log: SlotLog, plan: MergePlan) -> None:
        assert plan.head.record is not None  # noqa: S101 - a plan needs an epoch
        self._spec, self._log, self._plan = spec, log, plan
        self._parent: Manifest = plan.head.record
        self._id = CheckpointId(plan.head.timeline, plan.head.next_slot, generate_attempt_id())

    def write_files(self) -> tuple[dict[str, list[FileRef]], list[FileRef]]:
        """Write the tables' new rows and the new segments; return the manifest's references."""
        plan = self._plan
        tables = {} if plan.events is None else {EVENTS: plan.events}
        tables |= {name: table for name, table in plan.tables.items() if table.num_rows}
        files = {name: [self._write_table(name, table)] for name, table in tables.items()}
        return files, [*self._write_stream_segments(), self._write_merge_segment()]

    def _write_table(self, name: str, table: Any) -> FileRef:
        count = table.num_rows
        table = table.append_column("_timeline", pa.array([self._id.timeline] * count, pa.int32()))
        table = table.append_column("_epoch", pa.array([self._id.slot] * count, pa.int64()))
        order = [c for c in build_table_schema(self._spec, name).names if c in table.column_names]
        table = table.select([*order, *(c for c in table.column_names if c not in order)])
        key = f"{self._log.layout.table_prefix(name, self._id)}splice.parquet"
        return self._put_parquet(key, f"table:{name}", table, table[self._time_column(name)])

    def _time_column(self, table: str) -> str:
        """Return the column whose least and greatest values go into the file's reference."""
        if table in self._spec.streams:
            return "stream_time"
        if table in self._spec.windows:
            return "window_end"
        return "stamp" if table == REJECTIONS else self._event_time

    @property
    def _event_time(self) -> str:
        return self._spec.event_time_column

    def _write_merge_segment(self) -> FileRef:
        """Write the rows that were merged, with the request and the checkpoint.

        All later epochs of the lineage carry this segment, so the newest manifest alone says which
        requests are merged.
        """
        request, effect = self._plan.request, self._plan.streams
        extra: dict[str, Any] = {"request": request.id, "checkpoint": str(self._id)}
        time_column = self._event_time
        if request.origin == "attachment":
            extra["stream"], time_column = request.destination, "_stamp"
        if effect is not None:
            rewrites = {name: change.first for name, change in effect.changes.items()}
            extra |= {"from": effect.since, "rewrites": rewrites}
        rows, key = self._plan.rows, f"{self._log.layout.state_prefix(self._id)}splice.parquet"
        ref = self._put_parquet(key, SPLICE_KIND, rows, rows[time_column])
        return ref.model_copy(update={"extra": extra})

    def _write_stream_segments(self) -> list[FileRef]:
        """Write the state of streams that changed; return it with the parent's other segments."""
        changed = self._plan.streams.segments if self._plan.streams else {}
        written = []
        for kind, segment in changed.items():
            if segment is not None:
                rows, low, high, extra = segment
                key = AttemptFolders(self._log.layout, self._id).segment_key(kind)
                ref = self._put_parquet(key, kind, rows, pa.array([low, high], pa.int64()))
                written.append(ref.model_copy(update={"extra": extra}))
        return [*(s for s in self._parent.segments if s.kind not in changed), *written]

    def _put_parquet(self, key: str, kind: str, table: Any, times: Any) -> FileRef:
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="snappy", coerce_timestamps="us")
        ticks = times.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).drop_null().to_pylist()
        data = buffer.getvalue()
        self._log.store.put(key, data)
        return FileRef(
            key=key,
            rows=table.num_rows,
            bytes=len(data),
            sha256=sha256_of_bytes(data),
            min_time=min(ticks, default=None),
            max_time=max(ticks, default=None),
            kind=kind,
        )

    def make_manifest(
        self,
        files: Mapping[str, list[FileRef]],
        segments: list[FileRef],
        impact: Impact,
        decision: MergeDecision,
    ) -> Manifest:
        """Return the parent's state, unchanged, with the merge's files.

        A driver continues after it as if it were its own epoch.
        """
        parent, written = self._parent, [s for s in segments if s not in self._parent.segments]
        before = Decision.from_record(parent.decision, parent.decider)
        draft = ManifestDraft(
            author=ManifestAuthor(parent.uid, f"splice:{decision.who}"[:100], __version__),
            pipeline=parent.pipeline,
            spec_digest=parent.spec_digest,
            lease_token=parent.lease_token,
            head=self._plan.head,
            attempt=self._id,
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
            notes=self._make_notes(
                [ref for refs in [*files.values(), written] for ref in refs], impact, decision
            ),
            timings={"plan": impact.cost["seconds"]},
            created_at=decision.clock.wall_ticks(),
        )
        return draft.to_manifest()

    def _make_notes(
        self, written: list[FileRef], impact: Impact, decision: MergeDecision
    ) -> EpochNotes:
        plan, before, retained = (
            self._plan,
            self._parent.epoch_notes,
            self._parent.counters.retained,
        )
        windows = {
            name: table.num_rows
            for name, table in plan.tables.items()
            if name in self._spec.windows
        }
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
            counters=EpochCounters(retained_before=retained, retained=retained, windows=windows),
            next_position=before.next_position + self._count_appended_events(),
            released_max=before.released_max,
            sketches={},
            bytes_written=sum(ref.bytes for ref in written),
            streams=plan.streams.record if plan.streams else before.streams,
            savepoints=(),
            aborted=(),
            merge=merge,
        )

    def _count_appended_events(self) -> int:
        """Count the events that the merge adds at the end; ordered releases insert them instead."""
        if self._plan.events is None or self._spec.release.mode is not ReleaseMode.PASS_THROUGH:
            return 0
        return int(self._plan.events.num_rows)
