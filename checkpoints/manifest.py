"""The records in the slots: a sealed epoch, a fork, or the stub of a retired epoch.

The records form a chain: each names the SHA-256 of the bytes of the record before it. An epoch
names the previous epoch, or, as the first of a timeline, the fork that opened the timeline. A fork
names the head that it ended and the checkpoint to which it returns. A stub keeps the SHA-256 of the
epoch that it replaces, so the chain can still be followed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict, ValidationError

from tidegate.jobs.spec.event_time_options import OmittedIfEmpty, OmittedIfNone
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MIN

from .bucket_layout import CheckpointId
from .canonical_json import parse_json
from .epoch_notes import (
    COUNTED_ROWS,
    EpochCounters,
    EpochNotes,
    count_accounted_rows,
)
from .errors import (
    BAD_TRANSITION,
    RECORD_MALFORMED,
    RECORD_OF_NEWER_FORMAT,
)
from .record_models import BucketRecord
from .row_counts import merge_counts

FORMAT_VERSION = 2
"""Of epochs. Version 2 added `Manifest.survey`, `Counters.rule_quarantined` and `.filtered`."""

SINKS_FORMAT_VERSION = 3
"""Of forks that name what the sinks of a job owe; the newest format that can be read."""


class _RecordModel(BucketRecord):
    # A writer with new fields has to raise the format version.
    model_config = ConfigDict(strict=True, ser_json_inf_nan="constants")


class FileRef(_RecordModel):
    """One immutable data file.

    Attributes:
        key: key in the store of the pipeline.
        sha256: of its bytes; empty if the server has made a copy that no process has read. Then
            `extra` has its `etag`.
        min_time, max_time: smallest and largest event time in the file, in ticks; None if it has no
            rows or no time.
        kind: what the file holds, for example ``order``, ``window:per_hour``, ``sessions:visits``,
            ``table:late``.
        extra: fields of the writer.
    """

    key: str
    rows: int
    bytes: int
    sha256: str
    min_time: int | None = None
    max_time: int | None = None
    kind: str
    extra: JsonObject = {}


class Counters(_RecordModel):
    """Rows of the events output by disposition, cumulative along the lineage up to this epoch.

    Cumulative counts let any two checkpoints of a lineage be subtracted, and a wrong epoch stays
    visible in all later ones. `retained` counts the rows that wait in buffers after the epoch.

    Attributes:
        dropped: reason -> rows.
        per_source: source -> name of a count (`row_counts`) -> rows.
    """

    read: int = 0
    released: int = 0
    late: int = 0
    dropped: dict[str, int] = {}
    rejected: int = 0
    dead_lettered: int = 0
    # Left out when zero, so that manifests without it keep their bytes.
    rule_quarantined: OmittedIfEmpty[int] = 0
    filtered: OmittedIfEmpty[int] = 0
    retained: int = 0
    per_source: dict[str, dict[str, int]] = {}

    def accounted_rows(self) -> int:
        """Return the number of rows with a disposition up to this epoch, `retained` included.

        It equals `read`, or rows were lost or doubled.
        """
        return count_accounted_rows(self)

    def is_conserved(self) -> bool:
        """Return whether every row that was read has exactly one disposition."""
        return self.read == self.accounted_rows()

    def add_epoch(self, epoch: EpochCounters) -> Counters:
        """Return the counters after one more epoch."""
        counts = {name: getattr(self, name) + getattr(epoch, name) for name in COUNTED_ROWS}
        dropped = Counter(self.dropped)
        dropped.update(epoch.dropped)
        return Counters(
            read=self.read + epoch.read,
            dropped=dict(dropped),
            retained=epoch.retained,
            per_source=merge_counts(self.per_source, epoch.per_source),
            **counts,
        )


class _SlotRecordModel(_RecordModel):
    # Forks and stubs are as they were: a version that knows no format 2 can go on after a fork.
    format_version: int = 1
    timeline: int
    slot: int


@dataclass(frozen=True, slots=True)
class OpenBarrierState:
    """A barrier event that some members have delivered and others have not.

    Attributes:
        id: what `tidegate abort-barrier` needs.
        age: ticks of the pipeline clock since the first arrival.
        arrived: members that wait at it.
        awaited: active members that have not delivered it.
    """

    id: int
    age: int
    arrived: tuple[str, ...]
    awaited: tuple[str, ...]


class Manifest(_SlotRecordModel):
    """A sealed epoch, merge or batch of a job: what is needed to go on after it and to check it.

    `cut`, `decider`, `decision` and `notes` are written and defined elsewhere (`Slice`, `Decision`,
    `EpochNotes`, `BatchNotes`); the properties below read parts of them.

    Attributes:
        uid: the pipeline's identity.
        spec_digest: digest of the spec that wrote it.
        code_version: version of tidegate that wrote it.
        parent: checkpoint id of the epoch that this one continues; None for the first.
        parent_sha256: SHA-256 of the record before it (`LogHead.sha256`); None for the first.
        recorded_now: the recorded wall clock of this epoch, microseconds UTC.
        cut: source partition -> slice that the epoch read.
        survey: what the decider knew of the rows (`Survey.to_record`); None in merges, in
            batches of jobs, and in manifests of format 1.
        decider: the decider's state after the epoch.
        decision: what the decider decided.
        barriers: the barriers that closed in this epoch.
        requests: ids of the requests to the driver that it applied; a merge repeats its parent's.
        counters: rows since the beginning of the lineage.
        segments: the whole live state after the epoch.
        files: table -> files that this epoch wrote.
        timings: step -> seconds.
        created_at: wall clock of the writer in microseconds UTC, for display and retention by age.
    """

    kind: Literal["epoch"] = "epoch"
    format_version: int = FORMAT_VERSION
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
    cut: JsonObject = {}
    survey: OmittedIfNone[JsonObject] = None
    decider: JsonObject = {}
    decision: JsonObject = {}
    barriers: list[JsonObject] = []
    requests: list[str] = []
    counters: Counters = Counters()
    segments: list[FileRef] = []
    files: dict[str, list[FileRef]] = {}
    notes: JsonObject = {}
    timings: dict[str, float] = {}
    created_at: int

    @property
    def id(self) -> CheckpointId:
        """The public name of the checkpoint."""
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
    def frontier_holder(self) -> JsonObject | None:
        """Which member holds the frontier back: ``member``, ``since``, ``why``; None: no member."""
        return self.decision.get("holder")

    @property
    def blocked_members(self) -> list[str]:
        """Members that wait at their open barrier."""
        return list(self.decision.get("blocked", ()))

    @property
    def open_barriers(self) -> list[OpenBarrierState]:
        """The barriers that are open after the epoch, oldest first; only the first can close."""
        statuses = self.decision.get("statuses") or {}
        return [
            OpenBarrierState(
                id=barrier["id"],
                age=self.decider["clock"] - barrier["opened"],
                arrived=tuple(sorted(barrier["arrivals"])),
                awaited=tuple(
                    sorted(
                        name
                        for name, status in statuses.items()
                        if status == "active" and name not in barrier["arrivals"]
                    )
                ),
            )
            for barrier in (self.decider.get("barriers") or {}).get("open", ())
        ]

    def find_barrier_deadline(self, timeout: int | None) -> int | None:
        """Return when the oldest open barrier times out; the others wait for their turn.

        In ticks of the wall clock (docs/semantics.md, section 3.5).

        Args:
            timeout: of the spec, in ticks; None for never.
        """
        barriers = self.decider.get("barriers") or {}
        if timeout is None or not barriers.get("open"):
            return None
        opened = barriers["open"][0]["opened"]
        since = max(opened, barriers.get("last_closed") or opened)
        return self.to_wall_time(since + timeout)

    def to_wall_time(self, clock: int) -> int:
        """Return when the pipeline's clock shows an instant, in ticks of the wall clock.

        Exact if no outage between that instant and this epoch holds the pipeline's clock back.
        """
        return int(self.created_at + clock - self.decider["clock"])

    @property
    def newest_times(self) -> dict[str, int]:
        """Member -> largest event time it has shown, in ticks; members that have shown any."""
        members = self.decider.get("members") or {}
        return {name: one["seen"] for name, one in members.items() if one["seen"] is not None}

    def find_oldest_arrivals(self) -> dict[str, int]:
        """Return source -> when the oldest object that the epoch read arrived, in ticks."""
        oldest: dict[str, int] = {}
        for member, part in self.cut.items():
            if (arrived := part.get("arrived")) is not None:
                source = member.partition("/")[0]
                oldest[source] = min(arrived, oldest.get(source, arrived))
        return oldest

    @property
    def epoch_notes(self) -> EpochNotes:
        """All notes, typed."""
        return EpochNotes.from_record(self.notes)

    @property
    def epoch_counters(self) -> EpochCounters:
        """Rows of this epoch by disposition."""
        return self.epoch_notes.epoch

    @property
    def next_position(self) -> int:
        """Position of the next released event."""
        return self.epoch_notes.next_position

    @property
    def stream_state(self) -> JsonObject:
        """State of the streams and attachments; `DispatchState.from_record` reads it."""
        return self.epoch_notes.streams

    @property
    def is_merge(self) -> bool:
        """Whether a merge of a splice request filled the slot, not an epoch of a driver."""
        return "splice" in self.notes

    def all_files(self) -> list[FileRef]:
        """Return the live segments, then the table files that this epoch wrote.

        Table files of earlier epochs are in their own manifests.
        """
        return [*self.segments, *(file for files in self.files.values() for file in files)]


class ForkRecord(_SlotRecordModel):
    """A restore: the timeline of this slot ends here, and `new_timeline` continues `fork_slot`.

    Attributes:
        parent_sha256: SHA-256 of the head that this record ends; None if the timeline was empty.
        at: when it was restored, wall-clock microseconds UTC.
        recover_to: the restored checkpoint; None for the beginning (`fork_slot` 0).
        recover_to_sha256: SHA-256 of that epoch, so that the restored state is part of the chain.
        sinks: what the restore owes to the sink of each query of a job (`SinkPlan`). A fork is
            never retired, so the debt outlives the batches that were left.
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
    sinks: OmittedIfEmpty[list[JsonObject]] = []


class RetiredEpoch(_SlotRecordModel):
    """What remains of a retired epoch: enough to decide an attempt and to follow the chain.

    Attributes:
        original_sha256: SHA-256 of the manifest that it replaced.
        created_at, retired_at: wall-clock microseconds UTC.
    """

    kind: Literal["stub"] = "stub"
    attempt: str
    parent: str | None
    parent_sha256: str | None
    original_sha256: str
    created_at: int
    retired_at: int

    @property
    def id(self) -> CheckpointId:
        """The name of the retired checkpoint."""
        return CheckpointId(self.timeline, self.slot, self.attempt)


SlotRecord = Manifest | ForkRecord | RetiredEpoch
_RECORD_TYPES: dict[str, type[Manifest] | type[ForkRecord] | type[RetiredEpoch]] = {
    "epoch": Manifest,
    "fork": ForkRecord,
    "stub": RetiredEpoch,
}


def parse_record(data: bytes, where: str = "a slot") -> SlotRecord:
    """Read the bytes of a slot; errors call the place `where`.

    Raises:
        ConfigurationError: a newer tidegate wrote it.
        PoisonError: the bytes are not a record.
    """
    try:
        raw = parse_json(data)
        version, kind = raw["format_version"], _RECORD_TYPES.get(raw["kind"])
    except (ValueError, KeyError, TypeError) as error:
        raise RECORD_MALFORMED(where=where, cause=repr(error)) from error
    if not isinstance(version, int) or version > SINKS_FORMAT_VERSION:
        raise RECORD_OF_NEWER_FORMAT(where=where, version=version, newest=SINKS_FORMAT_VERSION)
    if kind is None:
        raise RECORD_MALFORMED(where=where, cause=f"unknown kind {raw['kind']!r}")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        cause = f"{error.error_count()} bad fields, first: {error.errors()[0]['loc']}"
        raise RECORD_MALFORMED(where=where, cause=cause) from error


class CheckpointState(StrEnum):
    """The states of an attempt to seal an epoch. Only a COMPLETE one can be restored."""

    TRIGGERED = "triggered"  # step 1: the cut is chosen
    SNAPSHOT = "snapshot"  # step 4: Spark is writing what the decision asks for
    PERSISTED = "persisted"  # step 4 done: every file is durable
    ACKNOWLEDGED = "acknowledged"  # step 5: the PUT was sent; the slot decides
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
    """The state of one attempt, which moves only along the allowed edges.

    After ACKNOWLEDGED, only the content of the slot may abort the attempt (`slot_holds_other`). An
    empty slot is not enough, because the PUT may still arrive.
    """

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.state = CheckpointState.TRIGGERED

    def move_to(self, state: CheckpointState, *, slot_holds_other: bool = False) -> None:
        """Enter the next state.

        Raises:
            PoisonError: the edge is not allowed; a defect of the caller.
        """
        sent = self.state is CheckpointState.ACKNOWLEDGED
        if state not in _ALLOWED_NEXT[self.state] or (
            sent and state is CheckpointState.ABORTED and not slot_holds_other
        ):
            raise BAD_TRANSITION(checkpoint=self.checkpoint, before=self.state, after=state)
        self.state = state
