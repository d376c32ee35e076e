"""The redo log: timelines of numbered slots, each filled once.

A filled slot *is* the commit; nothing else commits anything.

Why the current timeline is well defined: whoever fills slot n+1 of a timeline has read an epoch in
slot n of it (or opened it). So slots are filled without gaps, nothing ever follows a fork record in
its timeline, and a timeline is left by at most one fork. Forks therefore form one chain from
timeline 0, and the id of the next timeline is the current one's plus one: two restores that race
may well choose the same id, but they need the same slot, and the slot is filled once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import (
    ForkRecord,
    Manifest,
    RetiredEpoch,
    SlotRecord,
    parse_record,
)
from tidegate.checkpoints.store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
    StoredObject,
    StoreUnavailableError,
)
from tidegate.errors import ConfigurationError, PoisonError, TransientError

# Seconds; five lease lifetimes: after that somebody else drives, and the slot decides without us.
SEAL_BUDGET = 30.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = (
    0.05,
    2.0,
)  # seconds between tries, doubling, jittered

Record = TypeVar("Record", Manifest, ForkRecord)


@dataclass(frozen=True, slots=True)
class SlotContents:
    """One filled slot.

    Attributes:
        sha256: what the next record of the chain names: of the bytes, or for a stub of the bytes it
            replaced.
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
        raise PoisonError(
            f"{self.key} holds no manifest but a {self.record.kind}",
            code="log.no_manifest",
            advice="retired checkpoints cannot be opened; choose one of: tidegate checkpoints list",
        )


@dataclass(frozen=True, slots=True)
class LogHead:
    """Where the log stands.

    Attributes:
        timeline: the current timeline.
        slot: the last position on its lineage (0 before the first epoch); the next slot to fill is
            `slot + 1`.
        record: the epoch at that position; None before the first. After a restore it lies in an
            older timeline.
        sha256: what the next record must give as `parent_sha256`.
        etag: of the object `sha256` was taken from.
        fork: the restore that opened this timeline, as long as nothing was sealed after it.
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
    def next_slot(self) -> int:
        """The slot the next record goes into."""
        return self.slot + 1


@dataclass(frozen=True, slots=True)
class Sealed:
    """My record fills the slot: the epoch is COMPLETE, or the restore happened."""

    timeline: int
    slot: int
    sha256: str
    etag: str


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """Another record fills the slot: this attempt is ABORTED.

    Leave its files to GC, reload the head, go on or stop.
    """

    other: SlotRecord
    sha256: str
    etag: str


@dataclass(frozen=True, slots=True)
class LineageSegment:
    """Slots `first` to `last` (None: open end) of one timeline, as a part of a lineage."""

    timeline: int
    first: int
    last: int | None

    def contains(self, slot: int) -> bool:
        """Whether `slot` lies in this stretch."""
        return self.first <= slot and (self.last is None or slot <= self.last)


_OpenedFork = tuple[ForkRecord, SlotContents]


class SealUndecidedError(OutcomeUnknownError):
    """The budget ended while the slot gave no answer.

    The attempt's fate stays open: what fills its slot decides it.
    """


class SlotLog:
    """Reads and extends the log of one pipeline. Safe to use from several threads."""

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
        self._forks: tuple[
            _OpenedFork, ...
        ] = ()  # forks are immutable: what was once followed needs no second look
        self._newest: SlotContents | None = (
            # Read already, as long as a listing names the same bytes: a stub may take its place.
            None
        )

    def head(self) -> LogHead:
        """Where the log stands now.

        One LIST of one key, and one GET if it names a record that was not read last time.
        """
        while True:
            timeline = len(self._forks)
            newest = self.newest_record(timeline)
            if newest is None:
                return self._head_after_fork()
            if not isinstance(newest.record, ForkRecord):
                epoch = newest.epoch
                return LogHead(timeline, epoch.slot, epoch, newest.sha256, newest.etag)
            self._forks = (*self._forks[:timeline], (newest.record, newest))

    def newest_record(self, timeline: int) -> SlotContents | None:
        """The newest record of one timeline, or None while it is empty."""
        entry = next(self.store.list_objects(self.layout.slots_prefix(timeline), limit=1), None)
        if entry is None:
            return None
        known = self._newest
        if known is None or not entry.etag or (known.key, known.etag) != (entry.key, entry.etag):
            known = self._newest = self._parse_slot(self.store.get(entry.key))
        return known

    def read_slot(self, timeline: int, slot: int) -> SlotContents | None:
        """What fills one slot, or None while it is empty."""
        try:
            return self._parse_slot(self.store.get(self.layout.slot_key(timeline, slot)))
        except NotFoundError:
            return None

    def open_checkpoint(self, checkpoint: CheckpointId) -> SlotContents:
        """The slot of one complete checkpoint.

        Raises:
            ConfigurationError: no such checkpoint was ever completed.
        """
        filled = self.read_slot(checkpoint.timeline, checkpoint.slot)
        if (
            filled is None
            or isinstance(filled.record, ForkRecord)
            or filled.record.id != checkpoint
        ):
            raise ConfigurationError(
                f"{checkpoint} is not a completed checkpoint of {self.pipeline}",
                code="checkpoint.unknown",
                pipeline=self.pipeline,
                advice="see: tidegate checkpoints list",
            )
        return filled

    def seal(self, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
        """Fill the record's slot with it, and stay until it is known who fills it.

        1. Send the bytes, on the condition that the slot is empty. An answer 200 seals.
        2. On a 412, a lost answer or an absent store, read the slot back and compare: mine,
          another's, or empty.
        3. Empty: send the same bytes again, until the slot answers or the budget ends.

        The caller has checked its lease just before. May be called again with the same record after
        a `SealUndecidedError`.

        Raises:
            SealUndecidedError: nobody answered in time; the fate is open.
            PoisonError: the manifest's counters do not add up; nothing was sent.
        """
        self._refuse_unconserved_rows(record)
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
                raise self._seal_undecided_error(key)
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
    ) -> Sealed | SlotTaken:
        """Restore: end the current timeline after `head` and open the next one after `recover_to` (None: the beginning).

        Raises:
            ConfigurationError: `recover_to` was never completed.
            PoisonError: it was retired.
        """
        target = self.open_checkpoint(recover_to) if recover_to else None
        record = ForkRecord(
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
        )
        return self.seal(record)

    def list_forks(self) -> list[ForkRecord]:
        """All restores so far, oldest first; the n-th opened timeline n + 1."""
        self.head()
        return [fork for fork, _ in self._forks]

    def lineage(self, timeline: int) -> list[LineageSegment]:
        """Where the epochs of a timeline's history lie, oldest first.

        The last stretch is its own.
        """
        return _build_lineage(timeline, self.list_forks())

    def epochs_between(self, timeline: int, first: int, last: int) -> Iterator[SlotContents]:
        """The epochs at positions `first` to `last` on the lineage of a timeline, in order.

        Ends early at an empty slot.
        """
        stretches = self.lineage(timeline)
        for slot in range(first, last + 1):
            home = next((s.timeline for s in stretches if s.contains(slot)), None)
            filled = self.read_slot(home, slot) if home is not None else None
            if filled is None:
                return
            yield filled

    def iterate_ancestors(self, start: CheckpointId | None) -> Iterator[SlotContents]:
        """Epochs and stubs from `start` back to the first, across forks, one GET each."""
        while start is not None:
            filled = self.open_checkpoint(start)
            yield filled
            record = filled.record
            parent = None if isinstance(record, ForkRecord) else record.parent
            start = CheckpointId.parse(parent) if parent else None

    def _head_after_fork(self) -> LogHead:
        """The head of a timeline in which nothing was sealed yet."""
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
        """One PUT. None means: the slot has to be asked."""
        try:
            return self.store.create(key, data)
        except (PreconditionFailedError, OutcomeUnknownError, StoreUnavailableError):
            return None

    def _read_back_slot(self, key: str) -> SlotContents | None:
        try:
            return self._parse_slot(self.store.get(key))
        except (NotFoundError, TransientError):
            return None  # empty, or no answer: either way the same bytes are sent again

    def _decide_outcome(
        self, record: Manifest | ForkRecord, mine: str, filled: SlotContents
    ) -> Sealed | SlotTaken:
        """Content decides.

        Equal bytes (or the stub of equal bytes) are mine, whoever's request brought them there.
        """
        if filled.sha256 == mine:
            return Sealed(record.timeline, record.slot, mine, filled.etag)
        return SlotTaken(filled.record, filled.sha256, filled.etag)

    def _parse_slot(self, stored: StoredObject) -> SlotContents:
        record = parse_record(stored.data, self.store.uri(stored.key))
        if self.layout.slot_key(record.timeline, record.slot) != stored.key:
            raise PoisonError(
                f"{self.store.uri(stored.key)} holds the record of slot {record.slot} of timeline"
                f" {record.timeline}",
                code="log.misplaced",
                pipeline=self.pipeline,
                advice="somebody copied objects by hand; restore the bucket from a backup",
            )
        sha256 = (
            record.original_sha256
            if isinstance(record, RetiredEpoch)
            else sha256_of_bytes(stored.data)
        )
        return SlotContents(record, sha256, stored.etag, stored.key)

    def _refuse_unconserved_rows(self, record: Manifest | ForkRecord) -> None:
        if isinstance(record, Manifest) and not record.counters.is_conserved():
            raise PoisonError(
                f"epoch {record.id} read {record.counters.read} rows but accounts for"
                f" {record.counters.accounted_rows()}",
                code="manifest.not_conserved",
                pipeline=self.pipeline,
                kept="the previous checkpoint; this epoch was not sealed",
                advice="report this with the manifest in the message; it is a defect of tidegate",
            )

    def _seal_undecided_error(self, key: str) -> SealUndecidedError:
        return SealUndecidedError(
            f"{self.store.uri(key)} gave no answer for {self._seal_budget:.0f} s; whether the epoch"
            " is sealed is not known",
            code="log.seal_undecided",
            pipeline=self.pipeline,
            kept="all files of the attempt; the slot decides",
            advice="check the store; the next driver goes on from whatever fills the slot",
            retry_after=5.0,
        )


def _build_lineage(timeline: int, forks: list[ForkRecord]) -> list[LineageSegment]:
    last = forks[timeline].slot - 1 if timeline < len(forks) else None
    if timeline == 0:
        return [LineageSegment(0, 1, last)]
    opened = forks[timeline - 1]
    below = (
        _build_lineage(CheckpointId.parse(opened.recover_to).timeline, forks)
        if opened.recover_to
        else []
    )
    kept = [
        LineageSegment(s.timeline, s.first, _find_earlier_end(s.last, opened.fork_slot))
        for s in below
    ]
    return [
        *(s for s in kept if s.contains(s.first)),
        LineageSegment(timeline, opened.fork_slot + 1, last),
    ]


def _find_earlier_end(last: int | None, bound: int) -> int:
    return bound if last is None else min(last, bound)
