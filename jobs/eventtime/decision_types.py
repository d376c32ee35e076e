"""The decider's input (surveys) and output (decisions): frozen, JSON-ready data without I/O.

Positions (`seq`) are int64 and grow within a partition. Times are ticks. All intervals are
half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from tidegate.json_types import JsonObject, JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN, saturate_ticks

from .pipeline_clock import read_pipeline_time

REFUSE_UNKNOWN: Final = ConfigDict(extra="forbid")
"""For what manifests hold: dropping a field would lose what a newer writer meant."""


class Member(NamedTuple):
    """One partition of one source."""

    source: str
    partition: str = "0"

    def __str__(self) -> str:
        return f"{self.source}/{self.partition}"

    @classmethod
    def parse(cls, text: str) -> Member:
        """Read the form that `str` gives."""
        # Only the first slash separates: folders as partitions may contain others.
        source, _, partition = text.partition("/")
        return cls(source, partition)


class ReleaseMark(NamedTuple):
    """A point in the ordered release: section first, then event time.

    Every row below a mark of the release has left. As `released_max` it is that of a row that left.
    """

    section: int
    time: int

    def bound_section(self, section: int) -> int:
        """Return the mark as a bound in ticks on the event time of rows of one section.

        `TICK_MAX` for a section before the mark's, `TICK_MIN` for one behind it.
        """
        if section == self.section:
            return self.time
        return TICK_MAX if section < self.section else TICK_MIN


FIRST_RELEASE_MARK: Final = ReleaseMark(0, TICK_MIN)


class MemberStatus(StrEnum):
    """Status of a member (semantics.md section 1)."""

    ACTIVE = "active"
    IDLE = "idle"
    DONE = "done"


class BarrierOutcome(StrEnum):
    """How a barrier event closed (semantics.md section 3.7)."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """A barrier event as the data of one partition has it."""

    seq: int
    type: str
    id: int | None
    event_time: int


@dataclass(frozen=True, slots=True)
class MemberSurvey:
    """What an epoch's cut contains of one member.

    The cut of a member ends with its first barrier row, if it has one: rows behind it are pending,
    not read.

    Attributes:
        member: whose slice this is.
        rows: data rows read, without dead letters and quarantined rows, barriers and punctuation.
        min_time: least event time of those rows; None without rows.
        max_time: greatest event time of those rows.
        barrier: the barrier row that ends the slice.
        punctuation: greatest explicit or generated punctuation after this cut, as an exclusive
            frontier.
        punctuation_state: what the generator carries to the next cut; `current` is the punctuation.
        pending: more rows were available behind the slice when the cut was planned.
        done: the member is bounded and read to its end.
        quarantined: rows set aside by max_jump.
        dead: rows that went to the dead letters.
        violations: rows that broke their own member's punctuation.
        regressions: punctuation rows below the current one.
        newest_kept: greatest event time of the rows without those that broke punctuation, and of
            adjusted rows as they are then; TICK_MIN: there is none; None: it is `max_time`.
        newest_end: greatest exclusive end of those rows; TICK_MIN without such rows, and unless
            `OrderOptions.limits_adjusted_rows`.
    """

    member: Member
    rows: int = 0
    min_time: int | None = None
    max_time: int | None = None
    barrier: BarrierRow | None = None
    punctuation: int | None = None
    punctuation_state: dict[str, int] | None = None
    pending: bool = False
    done: bool = False
    quarantined: int = 0
    dead: int = 0
    violations: int = 0
    regressions: int = 0
    newest_kept: int | None = None
    newest_end: int = TICK_MIN

    @property
    def max_kept_time(self) -> int | None:
        """Greatest event time of the rows that go on; None without such rows."""
        if self.newest_kept is None:
            return self.max_time
        return None if self.newest_kept == TICK_MIN else self.newest_kept

    def to_record(self) -> list[Any]:
        """Return what the manifest keeps: rows, their times, and the rest if there is any.

        Short, because a manifest may hold ten thousand. The slice and the decider's state hold the
        other fields, as far as the decider reads them.
        """
        rare = {
            name: value
            for name in _RARE_FIELDS
            if (value := getattr(self, name)) != getattr(_NOTHING, name)
        }
        if self.barrier is not None:
            rare["barrier"] = list(astuple(self.barrier))
        times = [self.rows, self.min_time, self.max_time] if self.rows or rare else []
        return [*times, rare] if rare else times

    @classmethod
    def from_record(cls, member: Member, record: Sequence[Any]) -> MemberSurvey:
        """Inverse of `to_record`; a member that is not in the manifest brought nothing."""
        if not record:
            return cls(member)
        rare = dict(record[3]) if len(record) > 3 else {}
        barrier = rare.pop("barrier", None)
        marker = None if barrier is None else BarrierRow(*barrier)
        rows, least, greatest = record[:3]
        return cls(member, rows, least, greatest, barrier=marker, **rare)


_RARE_FIELDS = ("quarantined", "dead", "violations", "regressions", "newest_kept", "newest_end")
_NOTHING = MemberSurvey(Member(""))


@dataclass(frozen=True)
class Survey:
    """The summary of one epoch's cut.

    Attributes:
        now: wall clock after the rows were surveyed, ticks. The decider turns it into the pipeline
            clock.
        members: one entry for every live member, also those with nothing to read.
        buffered_rows: rows in the order buffer before this epoch.
        released_max: greatest (section, event_time) released by all epochs before this one.
        aborts: barrier ids that people asked to abort (requests applied in this epoch).
        cancels: barrier ids up to which people asked to abort all.
        ctis: (source, time) of the punctuation that people sent.
        run_start: this is the first epoch of a run (startup grace counts per run).
        worked: ticks that drivers have worked since the epoch before; None: not known, so all the
            time since then counts as one gap.
    """

    now: int
    members: tuple[MemberSurvey, ...]
    buffered_rows: int = 0
    released_max: ReleaseMark | None = None
    aborts: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    ctis: tuple[tuple[str, int], ...] = ()
    run_start: bool = False
    worked: int | None = None

    def to_record(self) -> JsonObject:
        """Return what the manifest keeps, beside what it holds anyway."""
        members = {str(one.member): record for one in self.members if (record := one.to_record())}
        return {"members": members, **({"aborts": list(self.aborts)} if self.aborts else {})}


@dataclass(frozen=True, slots=True)
class BarrierHealth:
    """One row of the barriers table: a closed barrier, or the same one with a tardy member.

    Attributes:
        id: barrier id, or its ordinal.
        outcome: how it closed.
        types: type per participant, in source order.
        homogeneous: all types equal.
        participants: member -> (arrival on the pipeline clock, seq, event time).
        missing: members that had neither arrived nor ended; empty if none had arrived.
        ended: done members that did not deliver it: they satisfy every barrier.
        tardy: members whose barrier came after the close, the newest last; empty at the close.
        opened: pipeline clock of the first arrival; of the abort if none had arrived.
        closed: pipeline clock of the close.
        section: the section it closed; an abort before the first arrival closes none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = REFUSE_UNKNOWN

    id: int
    outcome: BarrierOutcome
    types: tuple[str, ...]
    homogeneous: bool
    participants: dict[str, tuple[int, int, int]]
    missing: tuple[str, ...]
    ended: tuple[str, ...]
    tardy: tuple[str, ...]
    opened: int
    closed: int
    section: int

    @property
    def wait_ticks(self) -> int:
        """Ticks from the first arrival to the close."""
        return self.closed - self.opened

    def to_record(self) -> JsonObject:
        """Return the JSON-ready form."""
        record: JsonObject = _BARRIERS.dump_python(self, mode="json")
        return record

    @classmethod
    def from_record(cls, record: JsonView) -> BarrierHealth:
        """Read a barrier of a sealed epoch."""
        return _BARRIERS.validate_python(record)


_BARRIERS = TypeAdapter(BarrierHealth)


@dataclass(frozen=True)
class LateMark:
    """Against what the rows of an epoch are judged; the attributes are those of `Decision`."""

    frontier: int
    section: int
    order_late: ReleaseMark | None
    by_time: bool

    @property
    def missed(self) -> int:
        """See `Decision.events_frontier`."""
        return self.frontier if self.order_late is None else self.order_late.time

    @property
    def bound(self) -> int:
        """See `Decision.late_bound`."""
        if self.order_late is None:
            return TICK_MIN
        return self.missed if self.by_time else self.order_late.bound_section(self.section)


@dataclass(frozen=True)
class Decision:
    """What one cut means.

    Everything a mover needs besides the rows; recorded in the manifest for replay.

    Attributes:
        now: the pipeline clock of this epoch.
        frontier_before: output frontier F before the epoch (exclusive, ticks; TICK_MIN: none yet).
            Rows are judged against it, and windows by it.
        frontier_after: F after the epoch (TICK_MAX: +inf).
        member_punctuation: member -> punctuation frontier before the epoch, for violations.
        section: section of every row read in this epoch.
        order_late: rows below this are late for the events output; None: no row can be.
        order_late_by_time: compare only event_time with `order_late.time`, not the section.
        release_before: rows in the order buffer at or above this mark have not left yet.
        release_after: rows below this mark leave in this epoch, in order.
        barriers: barriers that closed in this epoch.
        blocked: members that wait at an open barrier and are not read (`Barriers.blocked_members`).
        flagged: members whose rows of this epoch came before a tardy barrier: they leave flagged
            (`_late`), section 3.5.
        statuses: member -> status; members of sources that the output does not have yet are left
            out.
        emitted: what the output emitted, at most one of each: ("watermark", F), ("status", "idle");
            for conformance and metrics.
        recorded: what timers, barriers and requests did, as dicts with a ``kind``.
        holder: who holds the frontier back: {"member", "since", "why"}; None if no member does.
        changed: an epoch without rows is still worth sealing.
        after: the decider's state after this epoch, JSON-ready.
    """

    __pydantic_config__: ClassVar[ConfigDict] = REFUSE_UNKNOWN

    now: int
    frontier_before: int
    frontier_after: int
    section: int
    order_late: ReleaseMark | None
    order_late_by_time: bool
    release_before: ReleaseMark
    release_after: ReleaseMark
    member_punctuation: dict[str, int] = field(default_factory=dict)
    barriers: tuple[BarrierHealth, ...] = ()
    blocked: tuple[str, ...] = ()
    flagged: tuple[str, ...] = ()
    statuses: dict[str, str] = field(default_factory=dict)
    emitted: tuple[tuple[str, int | str], ...] = ()
    recorded: tuple[JsonObject, ...] = ()
    holder: JsonObject | None = None
    changed: bool = False
    after: JsonObject = field(default_factory=dict)

    @property
    def wall(self) -> int:
        """The recorded wall clock of this epoch, for stamps and for people; timers run on `now`."""
        # A state of a version with one clock has no wall clock of its own.
        time = read_pipeline_time(self.after)
        return self.now if time is None else time.wall

    @property
    def late_mark(self) -> LateMark:
        """Against what the rows of this epoch are judged."""
        return LateMark(
            self.frontier_before, self.section, self.order_late, self.order_late_by_time
        )

    @property
    def events_frontier(self) -> int:
        """The event time of `order_late`; F before the epoch without one.

        At an open barrier it may be above F.
        """
        return self.late_mark.missed

    @property
    def late_bound(self) -> int:
        """Rows of this epoch with an event time below this are late for the events output.

        In ticks; `TICK_MIN` if none can be late.
        """
        return self.late_mark.bound

    @property
    def release_bound(self) -> int:
        """Rows of this epoch with an event time below this leave at once."""
        return self.release_after.bound_section(self.section)

    @property
    def open_edges_until(self) -> int:
        """The time up to which an edge without an end counts.

        F; if F is +inf, one tick after the newest time read, because there is no last window.
        """
        # The usual case; only at the end of all sources there is no finite frontier.
        if self.frontier_after != TICK_MAX:
            return self.frontier_after
        seen = [
            member["seen"]
            for member in self.after.get("members", {}).values()
            if member["seen"] is not None
        ]
        return saturate_ticks(max(seen, default=TICK_MIN) + 1)

    def to_record(self) -> JsonObject:
        """Return the form in the manifest, without `after`, which has its own field there."""
        record: JsonObject = _DECISIONS.dump_python(self, mode="json", exclude={"after"})
        return record

    @classmethod
    def from_record(cls, record: JsonView, after: JsonObject) -> Decision:
        """Read the decision of a sealed epoch; `after` is the decider's state after it."""
        return _DECISIONS.validate_python({**record, "after": after})


_DECISIONS = TypeAdapter(Decision)
