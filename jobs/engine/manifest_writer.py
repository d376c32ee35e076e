"""Makes the manifests of epochs and of merges, and reads the state that a driver resumes from.

One writer serves both, so that both decide about every field. It also adds to an epoch's counters
what follows from the planned cut rather than from the rows read. A driver continues after the
newest epoch from that epoch's manifest alone (`ResumeState`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.epoch_notes import EpochCounters, EpochNotes
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.row_counts import (
    COLUMNS_LEFT_OUT,
    DEAD_OBJECT_ROWS,
    DEAD_OBJECTS,
    NULLS_FILLED,
    PerSource,
    merge_counts,
)
from tidegate.checkpoints.slot_log import LogHead
from tidegate.jobs.eventtime.decider import create_initial_state
from tidegate.jobs.eventtime.decision_types import Decision, ReleaseMark
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .interfaces import Cut, Slice, skip_slice_record


@dataclass(frozen=True)
class ManifestAuthor:
    """Who writes manifests: the pipeline's uid, the driver's name and the version of tidegate."""

    uid: str
    driver: str
    code_version: str


@dataclass(frozen=True, kw_only=True)
class ManifestDraft:
    """What an epoch or a merge puts into its manifest.

    No field has a default, and a merge does not copy its parent: with a new field, mypy asks both
    writers for a value.

    Attributes:
        head: the head of the log that the manifest continues.
        attempt: the slot to fill and the attempt that fills it.
        cut: member -> record of its slice (`Slice.to_record`).
        survey: what the decider was given (`Survey.to_record`); None for a merge.
        requests: ids of the operators' requests that are applied.
        segments: the whole live state after it, merged rows included.
        files: table -> files written.
        counters: rows by disposition, cumulative along the lineage.
        timings: step -> seconds.
        created_at: wall clock, in microseconds UTC.
    """

    author: ManifestAuthor
    pipeline: str
    spec_digest: str
    lease_token: int
    head: LogHead
    attempt: CheckpointId
    cut: JsonObject
    survey: JsonObject | None
    decision: Decision
    requests: Sequence[str]
    counters: Counters
    segments: Sequence[FileRef]
    files: Mapping[str, Sequence[FileRef]]
    notes: EpochNotes
    timings: Mapping[str, float]
    created_at: int

    def to_manifest(self) -> Manifest:
        """Return the manifest; tables without files are left out."""
        # The decision is in three fields: what was decided, the state after it, which the next
        # epoch starts from, and the clock, which readers want without opening the decision.
        head, decision = self.head, self.decision.to_record()
        return Manifest(
            pipeline=self.pipeline,
            uid=self.author.uid,
            spec_digest=self.spec_digest,
            code_version=self.author.code_version,
            timeline=self.attempt.timeline,
            slot=self.attempt.slot,
            parent=str(head.checkpoint) if head.checkpoint else None,
            parent_sha256=head.sha256,
            attempt=self.attempt.attempt,
            lease_token=self.lease_token,
            driver=self.author.driver,
            recorded_now=self.decision.wall,
            cut=self.cut,
            survey=self.survey,
            decider=self.decision.after,
            decision=decision,
            barriers=decision["barriers"],
            requests=list(self.requests),
            counters=self.counters,
            segments=list(self.segments),
            files={table: list(files) for table, files in sorted(self.files.items()) if files},
            notes=self.notes.model_dump(mode="json"),
            timings=dict(self.timings),
            created_at=self.created_at,
        )


def add_cut_counts(
    spec: PipelineSpec, cut: Cut, moved: EpochCounters, dispatched: PerSource
) -> EpochCounters:
    """Return the mover's counters with those of objects, columns and rows that streams rejected.

    Args:
        spec: the pipeline.
        cut: what the epoch read.
        moved: the mover's counters.
        dispatched: source -> name of a count -> rows that streams rejected.
    """
    found: dict[str, Counter[str]] = {}
    for part in cut.slices:
        for name, count in _count_slice(spec, part):
            if count:
                found.setdefault(part.member.source, Counter())[name] += count
    return replace(
        moved,
        dead_objects=sum(counts[DEAD_OBJECTS] for counts in found.values()),
        per_source=merge_counts(moved.per_source, found, dispatched),
    )


# Decoded copies have them beside the columns of the source (`object_decoding`, `kafka_source`).
_COLUMNS_OF_DECODERS = {"_why", "_text", "_at"}


def _count_slice(spec: PipelineSpec, part: Slice) -> Iterator[tuple[str, int]]:
    declared = spec.sources[part.member.source].columns
    yield DEAD_OBJECTS, len(part.dead)
    yield DEAD_OBJECT_ROWS, sum(dead.rows or 0 for dead in part.dead)
    for read in part.parts:
        # Sources of the tests describe their parts without columns.
        found = read.get("columns", declared).keys() - _COLUMNS_OF_DECODERS
        rows = read["row_end"] - read["row_start"]
        yield NULLS_FILLED, rows if declared.keys() - found else 0
        yield COLUMNS_LEFT_OUT, rows if found - declared.keys() else 0


ORDER_KIND = "order"  # rows that wait for their release
SPLICE_KIND = "splice"
"""Kind of the segments that name merged rows.

Carried from epoch to epoch, and none of a mover's business.
"""

DISPATCHER_KINDS = ("reducer:", "buffer:", "splice:")
"""How the kinds of the dispatcher's segments begin."""


@dataclass(frozen=True)
class ResumeState:
    """The state after the newest sealed epoch or merge.

    Attributes:
        head: the end of the log.
        decider: the decider's state.
        resume: member -> position from which its source continues; also members that are gone.
        segments: live state segments of the mover and the dispatcher.
        spliced: segments of merged splice requests, kept as they are.
        counters: rows by disposition, cumulative.
        next_position: position of the next released event.
        released_max: greatest (section, event_time) released so far.
        streams: state of streams and attachments; only the dispatcher reads it.
        run: the newest run that an epoch belongs to; 0 before the first.
    """

    head: LogHead
    decider: JsonObject
    resume: dict[str, JsonObject]
    segments: tuple[FileRef, ...]
    counters: Counters
    next_position: int = 0
    released_max: ReleaseMark | None = None
    streams: JsonObject = field(default_factory=dict)
    spliced: tuple[FileRef, ...] = ()
    run: int = 0

    @classmethod
    def from_head(cls, head: LogHead, spec: PipelineSpec) -> ResumeState:
        """Return the state after the head of the log.

        The initial state if no epoch was sealed yet, and after a restore to the beginning: then the
        head has no record.
        """
        manifest = head.record
        if manifest is None:
            return cls(head, create_initial_state(spec), {}, (), Counters())
        notes = manifest.epoch_notes
        return cls(
            head=head,
            decider=manifest.decider,
            resume={member: part["resume"] for member, part in manifest.cut.items()},
            # Movers rewrite and drop segments as they need; merged rows must outlive that, so they
            # are kept apart from the mover's segments and never pass through it.
            segments=tuple(s for s in manifest.segments if s.kind != SPLICE_KIND),
            spliced=tuple(s for s in manifest.segments if s.kind == SPLICE_KIND),
            counters=manifest.counters,
            next_position=notes.next_position,
            released_max=ReleaseMark(*notes.released_max) if notes.released_max else None,
            streams=notes.streams,
            run=notes.run,
        )

    def list_gone_members(self) -> JsonObject:
        """Return a slice record of each member so far, so that none is read twice if it returns.

        The records of members that are there replace these.
        """
        manifest = self.head.record
        if manifest is None:
            return {}
        return {
            member: {**skip_slice_record(part), "pending": False}
            for member, part in manifest.cut.items()
        }
