"""What lies in a slot: a sealed epoch, a fork, or the stub of a retired epoch.

Frozen models, canonical JSON on the wire.

The chain: every record names the SHA-256 of the bytes before it on its lineage. An epoch names the
previous epoch, or, if it is the first of a timeline, the fork record that opened the timeline; a
fork names the head it ended and the checkpoint it returns to. A stub keeps the SHA-256 of the epoch
it replaces, so the chain can still be followed through it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.epoch_notes import EpochCounters, EpochNotes
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.time_units import TICK_MIN

FORMAT_VERSION = 1


class _RecordModel(BaseModel):
    # Unknown fields are refused: dropping what a newer writer meant would be silent; it has to
    # raise the format version.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants"
    )

    def to_bytes(self) -> bytes:
        """The canonical bytes of this record."""
        return canonical_bytes(self.model_dump(mode="json"))


class FileRef(_RecordModel):
    """One immutable data file.

    Attributes:
        key: key in the store of the pipeline.
        min_time: smallest event time in it, None when it has no rows or no time.
        kind: what it holds, for example ``order``, ``window:per_hour``, ``sessions:visits``,
            ``table:late``.
        extra: whatever the mover wants to find again.
    """

    key: str
    rows: int
    bytes: int
    sha256: str
    min_time: int | None = None
    max_time: int | None = None
    kind: str
    extra: dict[str, Any] = Field(default_factory=dict)


class Counters(_RecordModel):
    """The row equation of the events output, **cumulative** along the lineage up to and including this epoch.

    `retained` is what waits in order and commit buffers after the epoch. Cumulative, so that any
    two checkpoints of a lineage can be subtracted, and that a wrong epoch stays visible in all
    later ones.
    """

    read: int = 0
    released: int = 0
    late: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    rejected: int = 0
    dead_lettered: int = 0
    retained: int = 0
    per_source: dict[str, dict[str, int]] = Field(default_factory=dict)

    def accounted_rows(self) -> int:
        """Rows with a disposition."""
        return (
            self.released
            + self.late
            + sum(self.dropped.values())
            + self.rejected
            + self.dead_lettered
            + self.retained
        )

    def is_conserved(self) -> bool:
        """Whether every row read has exactly one disposition."""
        return self.read == self.accounted_rows()

    def add_epoch(self, epoch: EpochCounters) -> Counters:
        """Return the counters after one more epoch."""
        sources = sorted({*self.per_source, *epoch.per_source})
        return Counters(
            read=self.read + epoch.read,
            released=self.released + epoch.released,
            late=self.late + epoch.late,
            dropped=_add_counts(self.dropped, epoch.dropped),
            rejected=self.rejected + epoch.rejected,
            dead_lettered=self.dead_lettered + epoch.dead_lettered,
            retained=epoch.retained,
            per_source={
                name: _add_counts(self.per_source.get(name, {}), epoch.per_source.get(name, {}))
                for name in sources
            },
        )


def _add_counts(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in sorted({*left, *right})}


class _SlotRecordModel(_RecordModel):
    format_version: int = FORMAT_VERSION
    timeline: int
    slot: int


class Manifest(_SlotRecordModel):
    """A sealed epoch: everything needed to go on after it, and to check it.

    Attributes:
        uid: the pipeline's identity.
        parent: checkpoint id of the epoch this one continues; None for the first.
        parent_sha256: SHA-256 of the record before it in the chain (`Head.sha256`); None for the
            first.
        recorded_now: the pipeline clock of this epoch, microseconds UTC.
        cut: per source partition, where this epoch ends; opaque here.
        decider: the decider's state *after* the epoch; opaque here.
        decision: what was decided; opaque here.
        segments: the whole live state after the epoch.
        files: per table, what this epoch wrote.
        created_at: wall clock of the writer in microseconds UTC, for display and retention by age.
    """

    kind: Literal["epoch"] = "epoch"
    pipeline: str
    uid: str
    spec_digest: str
    code_version: str
    parent: str | None
    parent_sha256: str | None
    attempt: str
    lease_token: int
    driver: str
    recorded_now: int
    cut: dict[str, Any] = Field(default_factory=dict)
    decider: dict[str, Any] = Field(default_factory=dict)
    decision: dict[str, Any] = Field(default_factory=dict)
    barriers: list[dict[str, Any]] = Field(default_factory=list)
    requests: list[str] = Field(default_factory=list)
    counters: Counters = Field(default_factory=Counters)
    segments: list[FileRef] = Field(default_factory=list)
    files: dict[str, list[FileRef]] = Field(default_factory=dict)
    notes: dict[str, Any] = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)
    created_at: int

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's public name."""
        return CheckpointId(self.timeline, self.slot, self.attempt)

    # Typed reads of `decision` and `notes`. `Decision` (jobs.eventtime) and `EpochNotes` write
    # them; what a manifest does not have reads as "nothing yet".

    @property
    def frontier_before(self) -> int:
        """The output frontier before the epoch, in ticks; TICK_MIN: none yet."""
        return self._read_frontier("frontier_before")

    @property
    def frontier_after(self) -> int:
        """The output frontier after the epoch, in ticks; TICK_MIN: none yet, TICK_MAX: the end."""
        return self._read_frontier("frontier_after")

    def _read_frontier(self, key: str) -> int:
        frontier = self.decision.get(key)
        return TICK_MIN if frontier is None else int(frontier)

    @property
    def release_after(self) -> tuple[int, int]:
        """The (section, event time) below which all rows have left the order buffer."""
        section, time = self.decision.get("release_after", (0, TICK_MIN))
        return section, time

    @property
    def section(self) -> int:
        """Section of the rows that the epoch read."""
        return int(self.decision.get("section", 0))

    @property
    def frontier_holder(self) -> dict[str, Any] | None:
        """Which member holds the frontier back: ``member``, ``since``, ``why``; None: no member."""
        return self.decision.get("holder")

    @property
    def blocked_members(self) -> list[str]:
        """Members that wait at their open barrier."""
        return list(self.decision.get("blocked", ()))

    @property
    def epoch_notes(self) -> EpochNotes:
        """All notes, typed."""
        return EpochNotes.from_record(self.notes)

    @property
    def epoch_counters(self) -> EpochCounters:
        """Rows of this epoch by disposition."""
        return self.epoch_notes.counters

    @property
    def next_position(self) -> int:
        """Position of the next released event."""
        return self.epoch_notes.next_position

    @property
    def stream_state(self) -> dict[str, Any]:
        """State of the streams and attachments; `DispatchState.from_record` reads it."""
        return self.epoch_notes.streams

    @property
    def is_merge(self) -> bool:
        """Whether a merge of a splice request filled the slot, not an epoch of a driver."""
        return "splice" in self.notes

    def all_files(self) -> list[FileRef]:
        """Every object this checkpoint needs: live segments, then the files of its tables."""
        return [*self.segments, *(file for files in self.files.values() for file in files)]


class ForkRecord(_SlotRecordModel):
    """A restore: the timeline of this slot ends here; `new_timeline` goes on after `fork_slot`.

    Attributes:
        parent_sha256: SHA-256 of the head this record ends (None when the timeline had nothing).
        recover_to: checkpoint id restored; None for the very beginning (`fork_slot` 0).
        recover_to_sha256: SHA-256 of that epoch, so the restored state is part of the chain.
    """

    kind: Literal["fork"] = "fork"
    new_timeline: int
    fork_slot: int
    parent_sha256: str | None
    request_id: str
    who: str
    why: str
    at: int
    recover_to: str | None
    recover_to_sha256: str | None


class RetiredEpoch(_SlotRecordModel):
    """What stays of a retired epoch: enough to decide an attempt's fate and to follow the chain."""

    kind: Literal["stub"] = "stub"
    attempt: str
    parent: str | None
    parent_sha256: str | None
    original_sha256: str
    created_at: int
    retired_at: int

    @property
    def id(self) -> CheckpointId:
        """Name of the retired checkpoint."""
        return CheckpointId(self.timeline, self.slot, self.attempt)


SlotRecord = Manifest | ForkRecord | RetiredEpoch
_RECORD_TYPES: dict[str, type[Manifest] | type[ForkRecord] | type[RetiredEpoch]] = {
    "epoch": Manifest,
    "fork": ForkRecord,
    "stub": RetiredEpoch,
}


def parse_record(data: bytes, where: str = "a slot") -> SlotRecord:
    """Read the bytes of a slot.

    Args:
        data: the bytes as they lie in the bucket.
        where: named in errors.

    Raises:
        ConfigurationError: a newer tidegate wrote it.
        PoisonError: the bytes are not a record.
    """
    try:
        raw = parse_json(data)
        version, kind = raw["format_version"], _RECORD_TYPES.get(raw["kind"])
    except (ValueError, KeyError, TypeError) as error:
        raise _malformed_record_error(where, repr(error)) from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ConfigurationError(
            f"{where} was written in format {version}; this tidegate reads up to {FORMAT_VERSION}",
            code="manifest.newer_format",
            kept="the checkpoint, untouched",
            advice="run the tidegate version that wrote it, or a newer one",
        )
    if kind is None:
        raise _malformed_record_error(where, f"unknown kind {raw['kind']!r}")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _malformed_record_error(
            where, f"{error.error_count()} bad fields, first: {error.errors()[0]['loc']}"
        ) from error


def _malformed_record_error(where: str, cause: str) -> PoisonError:
    return PoisonError(
        f"{where} is not a readable record: {cause}",
        code="manifest.malformed",
        kept="all other checkpoints",
        advice="look at it with: tidegate checkpoints verify; then restore an earlier one",
    )


# The life of one checkpoint attempt, as an enum with a guard instead of booleans.


class CheckpointState(StrEnum):
    """Where an attempt stands. Only COMPLETE can be restored."""

    TRIGGERED = "triggered"  # step 1: the cut is chosen
    SNAPSHOT = "snapshot"  # step 4: Spark is writing what the decision asks for
    PERSISTED = "persisted"  # step 4 done: every file is durable
    ACKNOWLEDGED = "acknowledged"  # step 5: the PUT was sent; its fate is what fills the slot
    COMPLETE = "complete"  # this attempt fills the slot
    ABORTED = "aborted"  # the PUT was never sent, or another attempt fills the slot


_ALLOWED_NEXT = {
    CheckpointState.TRIGGERED: {CheckpointState.SNAPSHOT, CheckpointState.ABORTED},
    CheckpointState.SNAPSHOT: {CheckpointState.PERSISTED, CheckpointState.ABORTED},
    CheckpointState.PERSISTED: {CheckpointState.ACKNOWLEDGED, CheckpointState.ABORTED},
    CheckpointState.ACKNOWLEDGED: {CheckpointState.COMPLETE, CheckpointState.ABORTED},
    CheckpointState.COMPLETE: set[CheckpointState](),
    CheckpointState.ABORTED: set[CheckpointState](),
}


class AttemptLifecycle:
    """The guard: one attempt's state, which only moves along the allowed edges.

    From ACKNOWLEDGED on, only evidence from the slot may move it: pass `slot_holds_other=True` to
    abort, because an attempt whose PUT was sent is never aborted on absence.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.state = CheckpointState.TRIGGERED

    def move_to(self, state: CheckpointState, *, slot_holds_other: bool = False) -> None:
        """Move on.

        Raises:
            PoisonError: the edge is not allowed; a defect of the caller.
        """
        sent = self.state is CheckpointState.ACKNOWLEDGED
        if state not in _ALLOWED_NEXT[self.state] or (
            sent and state is CheckpointState.ABORTED and not slot_holds_other
        ):
            raise PoisonError(
                f"checkpoint {self.checkpoint} cannot go from {self.state} to {state}",
                code="checkpoint.bad_transition",
            )
        self.state = state

    @property
    def is_decided(self) -> bool:
        """Whether the fate is known."""
        return not _ALLOWED_NEXT[self.state]
