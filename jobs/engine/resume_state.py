"""The state from which a driver continues after the newest epoch; read from its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidegate.checkpoints.manifest import Counters, FileRef
from tidegate.checkpoints.slot_log import LogHead
from tidegate.jobs.eventtime.decider import create_initial_state
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spec.pipeline import PipelineSpec

ORDER_KIND = "order"  # rows that wait for their release
SPLICE_KIND = "splice"
"""Kind of the segments that name merged rows.

Carried from epoch to epoch, and none of a mover's business.
"""

DISPATCHER_KINDS = ("reducer:", "buffer:", "splice:")
"""How the kinds of the dispatcher's segments begin."""


@dataclass(frozen=True, slots=True)
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
        buffered_rows: rows in the order buffer.
        streams: state of streams and attachments; only the dispatcher reads it.
        run: the newest run that an epoch belongs to; 0 before the first.
    """

    head: LogHead
    decider: dict[str, Any]
    resume: dict[str, dict[str, Any]]
    segments: tuple[FileRef, ...]
    counters: Counters
    next_position: int = 0
    released_max: ReleaseMark | None = None
    buffered_rows: int = 0
    streams: dict[str, Any] = field(default_factory=dict)
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
            buffered_rows=manifest.counters.retained,
            streams=notes.streams,
            run=notes.run,
        )
