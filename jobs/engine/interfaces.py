"""The interfaces of the epoch protocol: Source, Mover, Store, Sink and Faults.

Rule: docs/architecture.md, section 2.

`Store` is `tidegate.checkpoints.store.Store`; the other three are here. The engine is written
against these only, so the same protocol runs on Spark and MinIO, and on plain Python and memory in
the simulation.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Protocol, runtime_checkable

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.eventtime.decision_types import (
    REFUSE_UNKNOWN,
    Decision,
    Member,
    ReleaseMark,
    Survey,
)
from tidegate.jobs.spec.event_time_options import OmittedIfNone
from tidegate.jobs.spec.pipeline import ReadLimits
from tidegate.json_types import JsonObject, JsonView

from .errors import UNKNOWN_FAULT_POINT

# Half of an int64: 4 billion rows in an object, 2 billion objects in a partition.
_ROW_BITS = 32
ROWS_PER_ORDINAL: Final = 1 << _ROW_BITS


def join_seq(ordinal: int, row: int) -> int:
    """Return the position of a row in an object source.

    The upper half is the ordinal of the row's object, the lower half the row's number in the
    object. The number has to be below `ROWS_PER_ORDINAL`, which is not checked here.

    >>> split_seq(join_seq(3, 17))
    (3, 17)
    """
    return ordinal << _ROW_BITS | row


def split_seq(seq: int) -> tuple[int, int]:
    """Return (ordinal, row) of a position; the inverse of `join_seq`."""
    return seq >> _ROW_BITS, seq & ROWS_PER_ORDINAL - 1


def _parse_member(value: str | Member) -> Member:
    return Member.parse(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class DeadObject:
    """An object, or the rest of one, that cannot be read. The object stays where it is.

    Also Kafka offsets that are gone: their key is that of the range, without ETag and size.

    Attributes:
        member: whose object it is.
        seq: position from which it cannot be read.
        size: bytes.
        reason: a name for programs; errors have the code ``object.<reason>``.
        detail: the reason for people.
        rows: rows that it would have given, at most; None if they cannot be counted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = REFUSE_UNKNOWN

    member: Annotated[Member, BeforeValidator(_parse_member), PlainSerializer(str)]
    seq: int
    key: str
    etag: str
    size: int
    reason: str
    detail: str
    rows: OmittedIfNone[int] = None


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one member that an epoch reads: rows with ``start <= seq < end``.

    Attributes:
        member: whose rows.
        start: first position, inclusive.
        end: last position, exclusive.
        parts: JSON-ready description of what to read, in the source's own terms (object keys with
            ETags, ordinals, row counts and physical schema; Kafka offsets). The manifest keeps it,
            so that the slice can be read again.
        resume: JSON-ready position after `end`, passed to `Source.plan` for the next epoch.
        pending: more was available behind `end` when the slice was planned.
        done: the member is bounded and `end` is its end.
        dead: objects in the slice that could not be read.
        begins: the source chose `start` just now and would choose another one next time, so the
            slice is sealed even if there is nothing to read.
        arrived: when the oldest object in the slice arrived, in ticks by the store's clock; None if
            the source does not know.
    """

    __pydantic_config__: ClassVar[ConfigDict] = REFUSE_UNKNOWN

    member: Member
    start: int
    end: int
    parts: tuple[JsonObject, ...] = ()
    resume: JsonObject = field(default_factory=dict)
    pending: bool = False
    done: bool = False
    dead: tuple[DeadObject, ...] = ()
    begins: bool = False
    arrived: OmittedIfNone[int] = None

    @property
    def is_empty(self) -> bool:
        """Whether the slice spans no position. It may still have dead objects."""
        return self.start == self.end

    def replace_corrupt_objects(self, corrupt: Collection[tuple[str, str]]) -> Slice:
        """Return the slice with corrupt objects as dead letters instead of rows to read.

        Args:
            corrupt: (key, ETag) of objects that cannot be read.
        """
        # With the ETag: an object that was replaced since then is read as usual.
        bad = [p for p in self.parts if (p.get("key"), p.get("etag")) in corrupt]
        if not bad:
            return self
        dead = [
            DeadObject(
                self.member,
                join_seq(p["ordinal"], p["row_start"]),
                p["key"],
                p["etag"],
                p["size"],
                "truncated",
                "the data pages cannot be read, although the footer can",
                p["row_end"] - p["row_start"],
            )
            for p in bad
        ]
        whole = sorted([*self.dead, *dead], key=lambda d: d.seq)
        return replace(self, parts=tuple(p for p in self.parts if p not in bad), dead=tuple(whole))

    def to_record(self) -> JsonObject:
        """Return the form in the manifest, without `begins`: enough to read the same rows again."""
        record: JsonObject = _SLICES.dump_python(self, mode="json", exclude={"member", "begins"})
        return record

    @classmethod
    def from_record(cls, member: Member, record: JsonView) -> Slice:
        """Read a slice of a sealed epoch."""
        return _SLICES.validate_python({**record, "member": member})


_SLICES = TypeAdapter(Slice)


def skip_slice_record(record: JsonView) -> JsonObject:
    """Return the record of a slice that reads nothing and begins where `record` ended.

    It keeps `resume`, `pending` and `done`.
    """
    kept = {name: value for name, value in record.items() if name != "arrived"}
    return {**kept, "start": record["end"], "parts": [], "dead": []}


@dataclass(frozen=True)
class Cut:
    """One point through every source, as the slices of all members that end there."""

    slices: tuple[Slice, ...]

    def to_record(self) -> dict[str, JsonObject]:
        """Return the form in the manifest: member -> slice."""
        return {str(part.member): part.to_record() for part in self.slices}

    @classmethod
    def from_record(cls, record: JsonView) -> Cut:
        """Read the cut of a sealed epoch."""
        parts = (Slice.from_record(Member.parse(name), part) for name, part in record.items())
        return cls(tuple(parts))

    @property
    def is_empty(self) -> bool:
        """Whether no slice spans a position or has dead objects."""
        return all(s.is_empty and not s.dead for s in self.slices)

    def with_slice(self, new: Slice) -> Cut:
        """Return the cut with `new` in the place of its member's slice; unchanged without one."""
        return replace(
            self, slices=tuple(new if s.member == new.member else s for s in self.slices)
        )


class Source(Protocol):
    """A source that can be read by range.

    The driver calls it between epochs only. A source keeps no state of its own.
    """

    name: str

    def list_members(self) -> Sequence[Member]:
        """Return the partitions that exist now. Called once per epoch."""
        ...

    def plan(
        self,
        member: Member,
        resume: JsonView | None,
        limits: ReadLimits,
        *,
        blocked: bool = False,
    ) -> Slice:
        """Return the next slice from `resume` (None: the beginning), at most `limits`.

        With `blocked` the slice is empty and only says whether rows are `pending`. Unreadable
        objects are part of the slice and named in `dead`.

        Raises:
            TransientError: the source cannot be reached now.
            TidegateError: the source cannot go on from `resume`, for example because Kafka has
                deleted these offsets (``on_gap: fail``).
        """
        ...

    def trim(self, part: Slice, end: int) -> Slice:
        """Return the slice cut short at `end` (exclusive), with `pending` and `resume` to match."""
        ...

    def find_changed_objects(self, part: Slice) -> Sequence[DeadObject]:
        """Return which objects of a planned slice are missing or changed since they were planned.

        Called after the rows were read and before they are sealed.

        Raises:
            TransientError: the source cannot be reached now.
        """
        ...


@dataclass(frozen=True)
class SurveyedCut:
    """A cut with its survey: `Mover.survey` makes it, `Mover.move` takes it.

    Attributes:
        cut: what was surveyed.
        survey: its summary, for the decider.
        staged: what the mover keeps for `move`, for example the rows that it has read and judged.
            Only the mover that made it knows its type. It is valid until the next `survey`.
    """

    cut: Cut
    survey: Survey
    staged: Any


@dataclass(frozen=True)
class MoveOrder:
    """One epoch's work for a mover.

    Attributes:
        cut: what to read.
        decision: what it means.
        segments: live state segments before the epoch, those of the dispatcher included.
        folders: where this attempt's files go.
        next_position: position of the next released event.
    """

    cut: Cut
    decision: Decision
    segments: tuple[FileRef, ...]
    folders: AttemptFolders
    next_position: int

    @property
    def timeline(self) -> int:
        """The timeline, written to ``_timeline`` of every output row."""
        return self.folders.attempt.timeline

    @property
    def epoch(self) -> int:
        """The slot, written to ``_epoch`` of every output row."""
        return self.folders.attempt.slot


TableFiles = dict[str, tuple[FileRef, ...]]
"""Table -> files written."""


def join_table_files(*parts: TableFiles) -> TableFiles:
    """Return the files of each table in all parts."""
    files: TableFiles = {}
    for part in parts:
        for table, refs in part.items():
            files[table] = (*files.get(table, ()), *refs)
    return files


@dataclass(frozen=True)
class MoveResult:
    """What a mover did.

    Files are durable in the store when this is returned; nothing is visible to readers yet.

    Attributes:
        files: table -> files written by this epoch.
        segments: all live segments of the mover after the epoch (kept, new, compacted). The engine
            adds those of the dispatcher.
        counters: rows by disposition, in total and per source; they conserve.
        released_max: greatest (section, event_time) released in this epoch; None if nothing left.
        next_position: position after the last released event.
        sketches: source -> lateness sketch of this epoch's rows (JSON-ready).
        bytes_written: data bytes put into the store.
        streams: state of the streams after the epoch; filled in by the engine from
            `DispatchResult.record`.
    """

    files: TableFiles
    segments: tuple[FileRef, ...]
    counters: EpochCounters
    released_max: ReleaseMark | None
    next_position: int
    sketches: JsonObject = field(default_factory=dict)
    bytes_written: int = 0
    streams: JsonObject = field(default_factory=dict)


class Mover(Protocol):
    """Reads, writes and aggregates rows as the decision says.

    The product has one implementation, on Spark. The tests compare it on every input with the
    oracle mover in tests/oracle, which is written in plain Python.
    """

    def survey(
        self,
        cut: Cut,
        state: JsonView,
        folders: AttemptFolders,
        released_max: ReleaseMark | None = None,
        next_position: int | None = None,
    ) -> SurveyedCut:
        """Summarise the cut: fill in the survey's `members`. The engine fills in everything else.

        The mover may write files of the attempt already, into its `folders`. Only those count that
        `move` then returns.

        A slice whose first barrier row is not its last row is reported with that barrier; the
        engine trims the slice to end behind the barrier and surveys again. `state` is the decider's
        state before the epoch: punctuation carried over and `max_jump` need it. `released_max` is
        as in `Survey`: in an exact order rows below it are late. `next_position` is as in
        `MoveOrder`; with it the mover may write events already.

        Raises:
            PoisonError: a row that `on_bad: fail` refuses, named.
            BrokenRuleError: a row breaks a rule of severity ``fail``.
            CorruptObjectsError: objects that turn out unreadable only now; `move` may raise it as
                well.
        """
        ...

    def move(self, order: MoveOrder, surveyed: SurveyedCut) -> MoveResult:
        """Write released rows, late rows, window results, dead letters and new state segments.

        `surveyed` is the result of this mover's last `survey`, and has the same cut as `order`,
        whose folders it was given.

        Raises:
            PoisonError: a late row under ``on_late: error``, among others.
            CorruptObjectsError: as in `survey`.
        """
        ...

    def close(self) -> None:
        """End the mover's session with its engine."""
        ...


RowWork = Callable[[Store], Any]
"""Reads or writes rows of sealed epochs, given the pipeline's store.

It can be pickled, and so can what it returns, which is small.
"""
WorkRunner = Callable[[RowWork], Any]
"""Does work, and returns what it returned; raises what it raised."""


@runtime_checkable
class WorkingMover(Protocol):
    """A mover that also does other work on rows where it moves them."""

    def run_work(self, work: RowWork) -> Any:
        """Do work, as `WorkRunner` says; any thread may call it."""
        ...


def run_work_here(store: Store, work: RowWork) -> Any:
    """Do work in this process."""
    return work(store)


@dataclass(frozen=True)
class DispatchResult:
    """What an epoch sent to streams.

    As with `MoveResult`, the files are durable and no reader sees them yet.

    Attributes:
        files: stream -> files.
        segments: all live segments of the dispatcher after the epoch; movers do not use them.
        record: where the next epoch starts (``notes["streams"]``). If it has `lagging`, the next
            epoch runs even without rows.
        counts: source -> name of a count -> rows that streams rejected.
    """

    files: TableFiles
    segments: tuple[FileRef, ...]
    record: JsonObject
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


class RowDispatcher(Protocol):
    """Sends what an epoch released through pipes and reducers into streams.

    The engine calls it right after `Mover.move`.
    """

    def dispatch_rows(
        self,
        order: MoveOrder,
        moved: MoveResult,
        before: JsonView,
        asked: Sequence[tuple[str, str]] = (),
    ) -> DispatchResult:
        """Dispatch one epoch.

        Args:
            order: the mover's order.
            moved: the mover's result.
            before: the record of the epoch before (`DispatchResult.record`).
            asked: what people want of attachments: (attach | detach | resume, name).

        Raises:
            PoisonError: rows that a backfill of an attachment needs cannot be read any more.
        """
        ...


class Sink(Protocol):
    """A follower of the log: applies sealed epochs and merges in slot order, each exactly once."""

    name: str

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Bring the sink to the head of the current timeline; after a restore, rewind it first.

        Without `flush` a group of slots that is not full yet (``outputs.publish_every``) may wait.

        Returns:
            The number of slots applied.

        Raises:
            FencedError: the sink is on a timeline outside this log's lineage.
            TransientError: the sink cannot be reached now; call again.
            ConfigurationError: it belongs to another pipeline, or refuses the credentials.
            PoisonError: an epoch that it needs was retired, or a row does not fit.
        """
        ...

    def lag(self, log: SlotLog) -> int:
        """Return how many sealed slots the sink has not applied yet; raises as `follow` does."""
        ...


EPOCH_POINTS = (
    "plan",
    "survey",
    "decide",
    "move.start",
    "move.done",
    "seal.start",
    "seal.sent",
    "publish.start",
    "publish.done",
    "report",
)
"""In the order of the epoch.

``seal.sent``: the slot is filled, but this process does not know it yet.
"""

LANDING_POINTS = ("land.written",)
"""Of a landing query: the object is there, and Spark's checkpoint does not know."""


class Faults(Protocol):
    """Receives every fault point that the engine passes."""

    def reach(self, point: str) -> None:
        """Note that `point` was reached; may kill the process or raise instead of returning."""
        ...


class NoFaults:
    """In production, a fault point does nothing."""

    def reach(self, point: str) -> None:
        """Do nothing."""


class KillAtPoint:
    """Kills its own process with SIGKILL when it reaches a point for the n-th time.

    No handler runs, no `finally`, and no buffer is flushed.

    Args:
        point: one of `EPOCH_POINTS` and `LANDING_POINTS`.
        nth: counted from 1.

    Raises:
        ConfigurationError: there is no such point, or `nth` is below 1.
    """

    def __init__(self, point: str, nth: int = 1) -> None:
        if point not in (*EPOCH_POINTS, *LANDING_POINTS) or nth < 1:
            points = ", ".join((*EPOCH_POINTS, *LANDING_POINTS))
            raise UNKNOWN_FAULT_POINT(point=point, nth=nth, points=points)
        self._point, self._nth, self._seen = point, nth, Counter[str]()

    def reach(self, point: str) -> None:
        """Count the point, and kill the process at the n-th time."""
        self._seen[point] += 1
        if point == self._point and self._seen[point] == self._nth:
            # Not sys.exit: the point of the test is that nothing of this process runs any more.
            os.kill(os.getpid(), signal.SIGKILL)


def read_faults_from_environment() -> Faults:
    """Return the fault that the variable ``TIDEGATE_FAULT`` describes; `NoFaults` without it.

    ``POINT`` alone, or with anything but digits behind the colon, means the first time.

    Raises:
        ConfigurationError: there is no such point, or the number is 0.
    """
    text = os.environ.get("TIDEGATE_FAULT", "")
    if not text:
        return NoFaults()
    point, _, nth = text.partition(":")
    return KillAtPoint(point, int(nth) if nth.isdigit() else 1)
