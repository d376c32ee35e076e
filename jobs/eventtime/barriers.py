"""Barrier events: markers in the data that synchronise members (semantics.md section 3, 4 to 7).

A member that delivered its barrier waits at it until the barrier closes. Open barriers form a
queue, oldest first; only its head can close. `record_arrival`, `abort` and `cancel_up_to` record
what happened; `close_ready` closes what can be closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from tidegate.jobs.spec.event_time_options import BarrierOptions
from tidegate.json_types import JsonObject, JsonView

from .decision_types import (
    BarrierHealth,
    BarrierOutcome,
    BarrierRow,
    MemberStatus,
)
from .errors import BARRIER_WITHOUT_ID

MAX_MISSED_BARRIERS = 64
"""Closed barriers remembered per member for resynchronisation.

A source that never sends any must not grow the state.
"""


class BarrierArrival(TypedDict):
    """One member's barrier row.

    Attributes:
        at: pipeline clock of its arrival.
        seq: its position.
        time: its event time.
    """

    at: int
    seq: int
    time: int
    type: str


class OpenBarrier(TypedDict):
    """A barrier that at least one member has delivered.

    Attributes:
        opened: pipeline clock of the first arrival.
        arrivals: by member.
    """

    id: int
    opened: int
    arrivals: dict[str, BarrierArrival]


class MissedBarrier(TypedDict):
    """A closed barrier that a member has not delivered.

    Attributes:
        types: of the barrier rows that arrived.
        time: event time of the first that arrived.
        health: record of its `BarrierHealth`.
        ignored: a person aborted it, so the member's row of it is ignored; left out if not.
    """

    id: int
    types: list[str]
    time: int
    health: JsonObject
    ignored: NotRequired[bool]


@dataclass(frozen=True, slots=True)
class ClosedBarrier:
    """A barrier that closed, with the cause; or a closed one to which a tardy member was added.

    Attributes:
        cause: complete, missing, timeout, aborted, cancelled, subsumed; or tardy.
    """

    health: BarrierHealth
    cause: str


@dataclass(slots=True)
class Barriers:
    """All barriers of a pipeline: open ones, what members missed, what a person aborted.

    Attributes:
        options: identity, overtaking, alignment and the class of the timeout.
        timeout: ticks until the head of the queue times out; None: never.
        roster: member -> status of every member, as of this epoch; set by the caller.
        section: number of the current section.
        open: open barriers, oldest first.
        missed: member -> closed barriers it has not delivered, oldest first; with the identity
            ``id`` only incomplete ones.
        last_id: every id up to this one is closed or aborted, open ones excepted.
        latest: greatest id seen.
        last_closed: pipeline clock of the last close.
        aborted: ids above `last_id` that were aborted.
        cancelled: with ordinals, every number up to this one is aborted; None: none above
            `last_id`.
        closed: what `close_ready`, `record_arrival`, `abort` and `cancel_up_to` closed since the
            last `take_closed`.
    """

    options: BarrierOptions
    timeout: int | None
    roster: Mapping[str, str] = field(default_factory=dict)
    section: int = 0
    open: list[OpenBarrier] = field(default_factory=list)
    missed: dict[str, list[MissedBarrier]] = field(default_factory=dict)
    last_id: int | None = None
    latest: int | None = None
    last_closed: int | None = None
    aborted: list[int] = field(default_factory=list)
    cancelled: int | None = None
    closed: list[ClosedBarrier] = field(default_factory=list)

    @classmethod
    def from_dict(cls, options: BarrierOptions, timeout: int | None, data: JsonView) -> Barriers:
        """Read the form of `to_dict`, without a roster; later calls do not change the mapping."""
        copied = {
            "open": [
                OpenBarrier(id=b["id"], opened=b["opened"], arrivals=dict(b["arrivals"]))
                for b in data["open"]
            ],
            "missed": {m: list(v) for m, v in data["missed"].items()},
            "aborted": list(data["aborted"]),
        }
        return cls(options, timeout, **{**data, **copied})

    def to_dict(self) -> JsonObject:
        """Return the JSON-ready state; it shares its lists with this object."""
        names = ("section", "open", "missed", "last_id", "latest", "last_closed", "aborted")
        state = {name: getattr(self, name) for name in names}
        return state if self.cancelled is None else {**state, "cancelled": self.cancelled}

    # ------------------------------------------------------------------ questions

    def members_at_barrier(self) -> set[str]:
        """Return the members at an open barrier."""
        return {m for b in self.open for m in b["arrivals"]}

    def blocked_members(self) -> set[str]:
        """Return the members that must not be read.

        They are those at an open barrier; with the alignment ``pass``, only those at a second one.
        """
        # Under `pass` a member goes on behind its barrier, but a second one has to wait for the
        # first to close.
        if self.options.alignment == "block":
            return self.members_at_barrier()
        standing = Counter(member for barrier in self.open for member in barrier["arrivals"])
        return {member for member, count in standing.items() if count > 1}

    def timeout_at(self) -> int | None:
        """Return the first instant (pipeline clock) at which the oldest barrier is timed out.

        None without an open barrier or a timeout.
        """
        if not self.open or self.timeout is None:
            return None
        return self._waiting_since(self.open[0]) + self.timeout + 1

    def tardy_members(self) -> set[str]:
        """Return the members whose tardy barrier arrived since the last `take_closed`."""
        return {closed.health.tardy[-1] for closed in self.closed if closed.cause == "tardy"}

    def freed_members(self) -> set[str]:
        """Return the members whose oldest open barrier closed since the last `take_closed`."""
        # Under `pass` a member may stand at two barriers, and the second one may be aborted first.
        still: dict[str, int] = {}
        for barrier in self.open:
            for member, arrival in barrier["arrivals"].items():
                still[member] = min(arrival["seq"], still.get(member, arrival["seq"]))
        return {
            member
            for closed in self.closed
            if closed.cause != "tardy"
            for member, (_, seq, _) in closed.health.participants.items()
            if member not in still or seq < still[member]
        }

    def take_closed(self) -> list[ClosedBarrier]:
        """Return what closed since the last call, in order."""
        taken, self.closed = self.closed, []
        return taken

    # ------------------------------------------------------------------ signals

    def record_arrival(self, member: str, row: BarrierRow, clock: int) -> None:
        """Record a member's barrier row.

        If the barrier is past, or under ``subsume`` older than an open one, the row is ignored, or
        recorded as tardy.

        Raises:
            PoisonError: the row has no id, with the identity ``id``.
        """
        arrival: BarrierArrival = {
            "at": clock,
            "seq": row.seq,
            "time": row.event_time,
            "type": row.type,
        }
        if self.options.identity == "ordinal":
            self._arrive_by_ordinal(member, arrival)
        else:
            self._arrive_by_id(member, row, arrival)

    def abort(self, id_: int, clock: int, cause: str = "aborted") -> bool:
        """Abort one barrier, open or still to come.

        Return False if it was closed or aborted before.
        """
        found = self._find_open(id_)
        # It closed before: an abort now would close the same barrier twice.
        if found is None and self._is_past(id_):
            return False
        self.latest = _find_larger(self.latest, id_)
        if found is None:
            self.aborted = [*self.aborted, id_]
            self._record_closed(
                OpenBarrier(id=id_, opened=clock, arrivals={}), clock, BarrierOutcome.ABORTED, cause
            )
        else:
            self._close_barrier(found, clock, BarrierOutcome.ABORTED, cause, by_person=True)
        return True

    def cancel_up_to(self, id_: int, clock: int) -> None:
        """Abort every barrier up to this id; later arrivals of these ids are ignored.

        With the identity ``ordinal`` the numbers of those that are still to come are used up by
        the barrier rows that are ignored.
        """
        for barrier in [b for b in self.open if b["id"] < id_]:
            self._close_barrier(barrier, clock, BarrierOutcome.ABORTED, "subsumed", by_person=True)
        self.abort(id_, clock, "cancelled")
        if self.options.identity == "id":
            self._pass_ids_up_to(id_)
        elif id_ > (self.last_id or 0):
            self.cancelled = _find_larger(self.cancelled, id_)

    def close_ready(self, clock: int, pending: Collection[str]) -> None:
        """Close barriers from the head of the queue, as long as the head can be closed.

        Args:
            clock: pipeline clock of the epoch.
            pending: members that had rows left when the cut was planned. A barrier does not time
                out while it waits for one of those.
        """
        while self.open and self._close_head_if_ready(self.open[0], clock, pending):
            pass

    # ------------------------------------------------------------------ ids

    def _find_open(self, id_: int) -> OpenBarrier | None:
        return next((b for b in self.open if b["id"] == id_), None)

    def _is_past(self, id_: int) -> bool:
        """Closed or aborted: later arrivals of it are ignored."""
        passed = (self.last_id, self.cancelled)
        return id_ in self.aborted or any(p is not None and id_ <= p for p in passed)

    def _pass_ids_up_to(self, id_: int) -> None:
        """Every id up to this one is past, open ones excepted."""
        self.last_id = _find_larger(self.last_id, id_)
        self.aborted = [a for a in self.aborted if a > self.last_id]
        if self.cancelled is not None and self.cancelled <= self.last_id:
            self.cancelled = None

    # ------------------------------------------------------------------ arrival

    def _arrive_by_ordinal(self, member: str, arrival: BarrierArrival) -> None:
        """Identity ``ordinal``.

        The first open barrier without this member, or one that it missed (section 3.5).
        """
        candidate = next((b for b in self.open if member not in b["arrivals"]), None)
        chosen = _match_tardy_arrival(self.missed.get(member, ()), candidate, arrival)
        if chosen is not None:
            if chosen.get("ignored"):
                self._forget_missed(member, chosen["id"])
            else:
                self._record_tardy(member, chosen)
            return
        if candidate is not None:
            self._forget_missed(member, candidate["id"])  # older ones are missed for good
        else:
            number = max([self.last_id or 0, *(b["id"] for b in self.open)]) + 1
            if self._is_past(number):
                self._ignore_aborted_ordinal(number, member, arrival)
                return
            candidate = self._open_barrier(number, arrival["at"])
        candidate["arrivals"][member] = arrival

    def _ignore_aborted_ordinal(self, number: int, member: str, arrival: BarrierArrival) -> None:
        """The first arrival of an ordinal that was aborted beforehand.

        The others' barriers of it are ignored too.
        """
        barrier = OpenBarrier(id=number, opened=arrival["at"], arrivals={member: arrival})
        absent = [m for m, s in self.roster.items() if m != member and s != MemberStatus.DONE]
        self._remember_missing(
            self._build_health(barrier, arrival["at"], BarrierOutcome.ABORTED, absent),
            by_person=True,
        )
        self._pass_ids_up_to(number)

    def _arrive_by_id(self, member: str, row: BarrierRow, arrival: BarrierArrival) -> None:
        if row.id is None:
            raise BARRIER_WITHOUT_ID(member=member, seq=row.seq)
        self.latest = _find_larger(self.latest, row.id)
        missed = next((m for m in self.missed.get(member, ()) if m["id"] == row.id), None)
        if missed is not None:
            self._record_tardy(member, missed)
            return
        self._forget_missed(member, row.id)  # older ones are missed for good
        found = self._find_open(row.id)
        if found is None and self._is_past(row.id):
            return
        if self.options.overtake == "subsume" and not self._subsume_older(row.id, arrival["at"]):
            return
        found = found or self._open_barrier(row.id, arrival["at"])
        found["arrivals"].setdefault(member, arrival)

    def _subsume_older(self, id_: int, clock: int) -> bool:
        """Overtake ``subsume``: an older id is ignored, a newer one aborts what is open."""
        if any(b["id"] > id_ for b in self.open):
            return False
        for barrier in [b for b in self.open if b["id"] < id_]:
            self._close_barrier(barrier, clock, BarrierOutcome.ABORTED, "subsumed")
        return True

    def _open_barrier(self, id_: int, clock: int) -> OpenBarrier:
        barrier = OpenBarrier(id=id_, opened=clock, arrivals={})
        self.latest = _find_larger(self.latest, id_)
        self.open.append(barrier)
        self.open.sort(key=lambda b: b["id"])
        return barrier

    def _record_tardy(self, member: str, missed: MissedBarrier) -> None:
        """Record the tardy member with the barrier it missed; older ones are missed for good."""
        health = missed["health"]
        amended = {**health, "tardy": [*health["tardy"], member]}
        self._forget_missed(member, missed["id"])
        # The next tardy member of this barrier must not forget this one.
        for other, entries in self.missed.items():
            self.missed[other] = [
                MissedBarrier(**{**e, "health": amended}) if e["id"] == missed["id"] else e
                for e in entries
            ]
        self.closed.append(ClosedBarrier(BarrierHealth.from_record(amended), "tardy"))

    def _forget_missed(self, member: str, id_: int) -> None:
        """Forget the barriers up to this one that the member missed."""
        rest = [m for m in self.missed.pop(member, ()) if m["id"] > id_]
        if rest:
            self.missed[member] = rest

    # ------------------------------------------------------------------ closing

    def _waiting_since(self, barrier: OpenBarrier) -> int:
        return _find_larger(self.last_closed, barrier["opened"])

    def _close_head_if_ready(self, head: OpenBarrier, clock: int, pending: Collection[str]) -> bool:
        """Complete, or no member is left to wait for, or timed out (sections 3.4 and 3.5)."""
        # A member at a later barrier has passed this one without delivering it.
        skipped = {m for b in self.open[1:] for m in b["arrivals"]}
        absent = self._absent_members(head)
        awaited = [m for m in absent if self.roster[m] != MemberStatus.IDLE and m not in skipped]
        if awaited and (
            self.timeout is None
            or clock - self._waiting_since(head) <= self.timeout
            or any(m in pending for m in awaited)
        ):
            return False
        outcome, cause = BarrierOutcome.COMPLETE, "complete"
        if absent:
            aborts = self.options.on_timeout == "abort"
            outcome = BarrierOutcome.ABORTED if aborts else BarrierOutcome.INCOMPLETE
            cause = "timeout" if awaited else "missing"
        self._close_barrier(head, clock, outcome, cause)
        return True

    def _absent_members(self, barrier: OpenBarrier) -> list[str]:
        return [
            m
            for m, status in self.roster.items()
            if m not in barrier["arrivals"] and status != MemberStatus.DONE
        ]

    def _close_barrier(
        self,
        barrier: OpenBarrier,
        clock: int,
        outcome: BarrierOutcome,
        cause: str,
        *,
        by_person: bool = False,
    ) -> None:
        """Close an open barrier.

        It leaves the queue, its members flow again, the section grows (section 3.4). Later arrivals
        at one that a person aborted are ignored (section 3.6).
        """
        head = barrier is self.open[0]
        health = self._record_closed(barrier, clock, outcome, cause)
        self._remember_missing(health, by_person=by_person)
        self.open.remove(barrier)
        # Rows read from now on are ordered after all rows of the sections before.
        self.section += 1
        self.last_closed = clock
        # An ordinal has used up all numbers before it, and its own: its rows will not come again.
        if head or self.options.identity == "ordinal":
            self._pass_ids_up_to(barrier["id"])
        else:
            self.aborted = [*self.aborted, barrier["id"]]

    def _record_closed(
        self, barrier: OpenBarrier, clock: int, outcome: BarrierOutcome, cause: str
    ) -> BarrierHealth:
        health = self._build_health(
            barrier, clock, outcome, self._absent_members(barrier) if barrier["arrivals"] else ()
        )
        self.closed.append(ClosedBarrier(health, cause))
        return health

    def _build_health(
        self, barrier: OpenBarrier, clock: int, outcome: BarrierOutcome, absent: Iterable[str]
    ) -> BarrierHealth:
        # In the order of the roster, so that equal runs write equal bytes.
        present = barrier["arrivals"]
        arrivals = {m: present[m] for m in (*self.roster, *sorted(present)) if m in present}
        types = tuple(a["type"] for a in arrivals.values())
        return BarrierHealth(
            id=barrier["id"],
            outcome=outcome,
            types=types,
            homogeneous=len(set(types)) <= 1,
            participants={m: (a["at"], a["seq"], a["time"]) for m, a in arrivals.items()},
            missing=tuple(absent),
            ended=tuple(
                m for m, s in self.roster.items() if s == MemberStatus.DONE and m not in arrivals
            ),
            tardy=(),
            opened=barrier["opened"],
            closed=clock,
            section=self.section,
        )

    def _remember_missing(self, health: BarrierHealth, *, by_person: bool) -> None:
        """Its absent members may still deliver it; they must not be paired with the next one."""
        if self.options.identity == "id" and health.outcome is not BarrierOutcome.INCOMPLETE:
            return  # an aborted id is ignored by its number alone
        for member in health.missing:
            time = min(health.participants.values())[2]
            entry = MissedBarrier(
                id=health.id,
                types=sorted(set(health.types)),
                time=time,
                health=health.to_record(),
            )
            if by_person:
                entry["ignored"] = True
            self.missed[member] = [*self.missed.get(member, ()), entry][-MAX_MISSED_BARRIERS:]


def _find_larger(known: int | None, value: int) -> int:
    return value if known is None else max(known, value)


def _match_tardy_arrival(
    missed: Iterable[MissedBarrier], candidate: OpenBarrier | None, arrival: BarrierArrival
) -> MissedBarrier | None:
    """Which barrier a tardy member means.

    Same type, then nearest time, then oldest; None: the open one, or the next.
    """
    options: list[tuple[bool, int, int, MissedBarrier | None]] = [
        (arrival["type"] not in m["types"], abs(m["time"] - arrival["time"]), m["id"], m)
        for m in missed
        if candidate is None or m["id"] < candidate["id"]  # those behind it come later
    ]
    if candidate is not None:
        arrivals = candidate["arrivals"].values()
        first = min((a["at"], a["seq"], a["time"]) for a in arrivals)[2]
        types = {a["type"] for a in arrivals}
        options.append(
            (arrival["type"] not in types, abs(first - arrival["time"]), candidate["id"], None)
        )
    return min(options, key=lambda o: o[:3])[3] if options else None
