"""The log of a pipeline: timelines of numbered slots, each of which is filled once.

A filled slot is the commit of an epoch, a merge or a restore. Nothing else commits anything.

The current timeline is well defined. The writer of slot n+1 has read an epoch in slot n of the same
timeline, or has opened the timeline. So slots are filled without gaps, no record follows a fork in
its timeline, and at most one fork leaves a timeline. The forks form one chain from timeline 0, and
the next timeline has the number of the current one plus one. Two restores that race may choose the
same number, but both need the same slot.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tidegate.errors import TransientError
from tidegate.json_types import JsonObject

from .bucket_layout import BucketLayout, CheckpointId
from .canonical_json import sha256_of_bytes
from .errors import (
    COUNTERS_NOT_CONSERVED,
    NO_MANIFEST,
    RECORD_MISPLACED,
    SEAL_UNDECIDED,
    UNKNOWN_CHECKPOINT,
)
from .errors import SealUndecidedError as SealUndecidedError
from .host_clock import SYSTEM_CLOCK, Clock
from .manifest import (
    SINKS_FORMAT_VERSION,
    FileRef,
    ForkRecord,
    Manifest,
    RetiredEpoch,
    SlotRecord,
    parse_record,
)
from .store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
    StoredObject,
    StoreUnavailableError,
)

# Seconds, five times the TTL of a lease. After that another process drives, and the slot decides.
SEAL_BUDGET = 30.0
_FIRST_PAUSE_SECONDS = 0.05  # between two tries; it doubles, with jitter
_LONGEST_PAUSE_SECONDS = 2.0
_MOST_STEPS = 16  # from one slot to the next, before all are listed again

Record = TypeVar("Record", Manifest, ForkRecord)


@dataclass(frozen=True, slots=True)
class SlotContents:
    """One filled slot.

    Attributes:
        record: a manifest, a fork, or the stub of a retired epoch.
        sha256: the hash that the next record of the chain names: of the bytes, or, for a stub, of
            the bytes that it replaced.
    """

    record: SlotRecord
    sha256: str
    etag: str
    key: str

    @property
    def epoch(self) -> Manifest:
        """The manifest.

        Raises:
            PoisonError: the epoch was retired, or the slot holds a fork.
        """
        if isinstance(self.record, Manifest):
            return self.record
        raise NO_MANIFEST(key=self.key, kind=self.record.kind)


@dataclass(frozen=True)
class LogHead:
    """The end of the log.

    Attributes:
        timeline: the current timeline.
        slot: the last slot on its lineage; 0 before the first epoch.
        record: the epoch or merge in that slot; None before the first. After a restore it is in an
            older timeline.
        sha256: what the next record has to name as `parent_sha256`.
        etag: of the object from which `sha256` was taken.
        fork: the restore that opened this timeline, while no epoch has followed it.
    """

    timeline: int
    slot: int
    record: Manifest | None
    sha256: str | None
    etag: str | None
    fork: ForkRecord | None = None

    @property
    def checkpoint(self) -> CheckpointId | None:
        """The newest complete checkpoint on the lineage: the `parent` of the next epoch."""
        return self.record.id if self.record else None

    @property
    def segments(self) -> list[FileRef]:
        """The live segments; none before the first epoch."""
        return self.record.segments if self.record else []

    @property
    def next_slot(self) -> int:
        """The slot of the next record."""
        return self.slot + 1


@dataclass(frozen=True)
class Sealed:
    """The record fills the slot: the epoch is complete, or the restore has happened."""

    timeline: int
    slot: int
    sha256: str
    etag: str


@dataclass(frozen=True)
class SlotTaken:
    """Another record fills the slot: the attempt is aborted.

    The caller leaves the files to garbage collection, reads the head again, and goes on or stops.
    """

    other: SlotRecord
    sha256: str
    etag: str


@dataclass(frozen=True)
class LineageSegment:
    """Slots `first` to `last` (None: open end) of one timeline, as a part of a lineage."""

    timeline: int
    first: int
    last: int | None

    def contains(self, slot: int) -> bool:
        """Return whether `slot` belongs to this segment."""
        return self.first <= slot and (self.last is None or slot <= self.last)

    def covers(self, timeline: int, slot: int) -> bool:
        """Return whether a slot of a timeline belongs to this segment."""
        return self.timeline == timeline and self.contains(slot)


_OpenedFork = tuple[ForkRecord, SlotContents]


class SlotLog:
    """Reads and extends the log of one pipeline. Safe to use from several threads.

    Args:
        store: the bucket.
        pipeline: its name.
        clock: measures the waits of `seal` and gives the time of a restore.
        seal_budget: seconds for which `seal` tries.
        jitter: returns a number from 0 to 1, by which pauses vary.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        seal_budget: float = SEAL_BUDGET,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.layout = BucketLayout(pipeline)
        self.pipeline = pipeline
        self._clock = clock
        self._seal_budget = seal_budget
        self._jitter = jitter
        # Forks never change, so each is read once.
        self._forks: tuple[_OpenedFork, ...] = ()
        # Valid while a LIST shows the same ETag: a stub may replace the epoch.
        self._newest: SlotContents | None = None
        self._lists_etags = True  # until a LIST shows that the store is a folder

    def head(self) -> LogHead:
        """Read the end of the log: one LIST of one key, and one GET if the record is new.

        Each restore that this object has not read yet costs two more requests; while no epoch has
        followed a restore, the restored checkpoint is read each time.

        Raises:
            PoisonError: the record cannot be read.
            ConfigurationError: a newer tidegate wrote it.
        """
        while True:
            # The number of forks is the number of the newest timeline that is known here; a fork in
            # its newest slot opens the next one.
            timeline = len(self._forks)
            newest = self.newest_record(timeline)
            if newest is None:
                return self._head_after_fork()
            if not isinstance(newest.record, ForkRecord):
                epoch = newest.epoch
                return LogHead(timeline, epoch.slot, epoch, newest.sha256, newest.etag)
            self._forks = (*self._forks[:timeline], (newest.record, newest))

    def newest_record(self, timeline: int) -> SlotContents | None:
        """Return the newest record of one timeline; None while it is empty.

        Raises as `read_slot`.
        """
        newest = self._newest
        if not self._lists_etags and newest is not None and newest.record.timeline == timeline:
            newest = self._newest = self._read_on(newest)
            if newest is not None:
                return newest
        entry = next(self.store.list_objects(self.layout.slots_prefix(timeline), limit=1), None)
        if entry is None:
            return None
        self._lists_etags = bool(entry.etag)
        # The listing already says whether the record is the one that was read last, so an unchanged
        # head costs no GET.
        if newest is None or not entry.etag or (newest.key, newest.etag) != (entry.key, entry.etag):
            newest = self._newest = self._parse_slot(self.store.get(entry.key))
        return newest

    def _read_on(self, known: SlotContents) -> SlotContents | None:
        """Return the newest record, found from one that is known; None if it is far away.

        Slots have no gaps. A folder would sort the names of all its slots to list one.
        """
        timeline, slot = known.record.timeline, known.record.slot
        for following in range(slot + 1, slot + _MOST_STEPS):
            found = self.read_slot(timeline, following)
            if found is None:
                # Read again, as after a LIST without ETags: its file may be damaged by now.
                return self.read_slot(timeline, following - 1)
        return None

    def read_slot(self, timeline: int, slot: int) -> SlotContents | None:
        """Return the contents of one slot; None while it is empty.

        Raises:
            PoisonError: the object is not a record, or is that of another slot.
            ConfigurationError: a newer tidegate wrote it.
            ValueError: there is no slot with this number.
        """
        try:
            return self._parse_slot(self.store.get(self.layout.slot_key(timeline, slot)))
        except NotFoundError:
            return None

    def open_checkpoint(self, checkpoint: CheckpointId) -> SlotContents:
        """Return the slot of one complete checkpoint, or of the stub if it was retired.

        Raises:
            ConfigurationError: no such checkpoint was ever completed.
        """
        filled = self.read_slot(checkpoint.timeline, checkpoint.slot)
        if (
            filled is None
            or isinstance(filled.record, ForkRecord)
            or filled.record.id != checkpoint
        ):
            raise UNKNOWN_CHECKPOINT(pipeline=self.pipeline, checkpoint=checkpoint)
        return filled

    def seal(self, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
        """Fill the record's slot, and return only when it is known which record fills it.

        1. Send the bytes on the condition that the slot is empty. The answer 200 seals the record.
        2. After a 412, a lost answer or no connection, read the slot and compare the bytes.
        3. If the slot is empty, send the same bytes again, until the budget is used up.

        The caller has just checked its lease. After a `SealUndecidedError` it may call this again
        with the same record.

        Raises:
            SealUndecidedError: the store did not answer in time; it is not known what fills the
                slot.
            PoisonError: the manifest's counters do not add up; nothing was sent.
        """
        self._refuse_unconserved_rows(record)
        # Made once: every further attempt must send the very same bytes, or it would be unknown
        # from another record.
        data = record.to_bytes()
        key = self.layout.slot_key(record.timeline, record.slot)
        deadline = self._clock.monotonic() + self._seal_budget
        pause = _FIRST_PAUSE_SECONDS
        while True:
            etag = self._send_record(key, data)
            if etag is not None:
                return Sealed(record.timeline, record.slot, sha256_of_bytes(data), etag)
            filled = self._read_back_slot(key)
            if filled is not None:
                return self._decide_outcome(record, sha256_of_bytes(data), filled)
            if self._clock.monotonic() + pause > deadline:
                raise SEAL_UNDECIDED(
                    pipeline=self.pipeline, uri=self.store.uri(key), seconds=self._seal_budget
                )
            # Random, so that processes that lost the same server do not come back together.
            self._clock.sleep(pause * (0.5 + self._jitter() / 2))
            pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause)

    def fork(
        self,
        head: LogHead,
        recover_to: CheckpointId | None,
        *,
        request_id: str,
        who: str,
        why: str,
        at: int | None = None,
        sinks: Sequence[JsonObject] = (),
    ) -> Sealed | SlotTaken:
        """Restore: end the current timeline after `head`, and open the next after `recover_to`.

        Returns and raises as `seal`, and raises besides as below. Condemned checkpoints are not
        refused; `commit_restore` refuses them.

        Args:
            head: the head of the log; another head loses the slot.
            recover_to: the checkpoint to return to; None for the beginning.
            request_id: recorded in the log, like `who` and `why`.
            who: the person or program that restores.
            why: the reason.
            at: microseconds UTC; default: now.
            sinks: what the restore owes to the sinks of a job.

        Raises:
            ConfigurationError: `recover_to` was never completed.
            PoisonError: it was retired.
        """
        # Raises before anything is written.
        target = self.open_checkpoint(recover_to) if recover_to else None
        record = ForkRecord(
            format_version=SINKS_FORMAT_VERSION if sinks else 1,
            timeline=head.timeline,
            slot=head.next_slot,
            new_timeline=head.timeline + 1,
            fork_slot=target.epoch.slot if target else 0,
            parent_sha256=head.sha256,
            request_id=request_id,
            who=who,
            why=why,
            at=self._clock.wall_ticks() if at is None else at,
            recover_to=str(recover_to) if recover_to else None,
            recover_to_sha256=target.sha256 if target else None,
            sinks=list(sinks),
        )
        return self.seal(record)

    def list_forks(self) -> list[ForkRecord]:
        """Return all restores, oldest first; the first one opened timeline 1."""
        self.head()
        return [fork for fork, _ in self._forks]

    def lineage(self, timeline: int) -> list[LineageSegment]:
        """Return the segments with the epochs of a timeline's history, oldest first.

        The last segment is in the timeline itself.
        """
        return _build_lineage(timeline, self.list_forks())

    def find_parting(self, target: CheckpointId) -> int:
        """Return the last slot that the current lineage and that of `target` share; 0 if none."""
        head = self.head()
        here = self.lineage(head.timeline)
        there = [s for s in self.lineage(target.timeline) if s.first <= target.slot]
        # A timeline has the same segments before it in every lineage, so both share all before the
        # last segment that both have.
        ends = [
            (left.last, right.last, target.slot, head.slot)
            for left, right in zip(here, there, strict=False)
            if left.timeline == right.timeline
        ]
        return min(end for end in ends[-1] if end is not None) if ends else 0

    def epochs_between(self, timeline: int, first: int, last: int) -> Iterator[SlotContents]:
        """Yield the slots `first` to `last` on the lineage of a timeline; ends at an empty slot.

        Of a retired epoch it yields the stub.
        """
        segments = self.lineage(timeline)
        for slot in range(first, last + 1):
            owner = next((s.timeline for s in segments if s.contains(slot)), None)
            filled = self.read_slot(owner, slot) if owner is not None else None
            if filled is None:
                return
            yield filled

    def iterate_ancestors(self, start: CheckpointId | None) -> Iterator[SlotContents]:
        """Yield epochs and stubs from `start` back to the first, across forks; one GET each.

        Nothing for None.

        Raises:
            ConfigurationError: an epoch on the way, or `start`, was never completed.
        """
        while start is not None:
            filled = self.open_checkpoint(start)
            yield filled
            record = filled.record
            parent = None if isinstance(record, ForkRecord) else record.parent
            start = CheckpointId.parse(parent) if parent else None

    def _head_after_fork(self) -> LogHead:
        """Return the head of a timeline in which nothing was sealed yet."""
        if not self._forks:
            return LogHead(0, 0, None, None, None)
        fork, opened = self._forks[-1]
        epoch = (
            self.open_checkpoint(CheckpointId.parse(fork.recover_to)).epoch
            if fork.recover_to
            else None
        )
        return LogHead(fork.new_timeline, fork.fork_slot, epoch, opened.sha256, opened.etag, fork)

    def _send_record(self, key: str, data: bytes) -> str | None:
        """Send one PUT; None if only the slot can tell the outcome."""
        try:
            return self.store.create(key, data)
        except (PreconditionFailedError, OutcomeUnknownError, StoreUnavailableError):
            return None

    def _read_back_slot(self, key: str) -> SlotContents | None:
        try:
            return self._parse_slot(self.store.get(key))
        except (NotFoundError, TransientError):
            return None  # empty or without an answer: in both cases the bytes are sent again

    def _decide_outcome(
        self, record: Manifest | ForkRecord, mine: str, filled: SlotContents
    ) -> Sealed | SlotTaken:
        """Compare the content: equal bytes, or their stub, are this record."""
        if filled.sha256 == mine:
            return Sealed(record.timeline, record.slot, mine, filled.etag)
        return SlotTaken(filled.record, filled.sha256, filled.etag)

    def _parse_slot(self, stored: StoredObject) -> SlotContents:
        record = parse_record(stored.data, self.store.uri(stored.key))
        # A copied or moved object would otherwise be taken for an epoch of another slot.
        if self.layout.slot_key(record.timeline, record.slot) != stored.key:
            raise RECORD_MISPLACED(
                pipeline=self.pipeline,
                uri=self.store.uri(stored.key),
                slot=record.slot,
                timeline=record.timeline,
            )
        # The next record of the chain names the hash of the epoch, not that of its stub.
        if isinstance(record, RetiredEpoch):
            sha256 = record.original_sha256
        else:
            sha256 = sha256_of_bytes(stored.data)
        return SlotContents(record, sha256, stored.etag, stored.key)

    def _refuse_unconserved_rows(self, record: Manifest | ForkRecord) -> None:
        if isinstance(record, Manifest) and not record.counters.is_conserved():
            raise COUNTERS_NOT_CONSERVED(
                pipeline=self.pipeline,
                checkpoint=record.id,
                read=record.counters.read,
                accounted=record.counters.accounted_rows(),
            )


def _build_lineage(timeline: int, forks: list[ForkRecord]) -> list[LineageSegment]:
    last = forks[timeline].slot - 1 if timeline < len(forks) else None
    first = forks[timeline - 1].fork_slot + 1 if timeline else 1
    segments = [LineageSegment(timeline, first, last)]
    # From the newest timeline back to the oldest: each fork says where its timeline begins.
    while timeline and (recover_to := forks[timeline - 1].recover_to):
        fork_slot = forks[timeline - 1].fork_slot
        timeline = CheckpointId.parse(recover_to).timeline
        first = forks[timeline - 1].fork_slot + 1 if timeline else 1
        # The target is an epoch of its timeline: it is neither before its first slot nor behind the
        # fork that ended it.
        segments.append(LineageSegment(timeline, first, fork_slot))
    return segments[::-1]
