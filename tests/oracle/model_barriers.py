"""Barrier events of the event-at-a-time model (semantics.md section 3, 4 to 7), written apart from
`jobs/eventtime`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tidegate.jobs.eventtime.decision_types import BarrierRow
from tidegate.jobs.spec.event_time_options import BarrierOptions


@dataclass
class ClosedBarrier:
    """A barrier that closed: who took part, who did not, who came too late."""

    id: int
    outcome: str
    types: dict[str, str]
    missing: list[str]
    ended: list[str]
    section: int
    time: int
    tardy: list[str] = field(default_factory=list)
    ignored: bool = False  # a person aborted it: later arrivals are ignored


@dataclass
class _Open:
    id: int
    opened: int
    rows: dict[str, BarrierRow] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)


@dataclass
class ModelBarriers:
    """Open barriers, oldest first, and those that members missed."""

    options: BarrierOptions
    timeout: int | None
    section: int = 0
    open: list[_Open] = field(default_factory=list)
    closed: list[ClosedBarrier] = field(default_factory=list)
    missed: dict[str, list[ClosedBarrier]] = field(default_factory=dict)
    passed: int | None = None  # every id up to this one is past, open ones excepted
    gone: set[int] = field(default_factory=set)  # greater ids that were aborted
    cancelled: int | None = None  # with ordinals, every number up to this one was aborted
    last_close: int | None = None
    came_late: set[str] = field(
        default_factory=set
    )  # members whose tardy barrier came in this epoch

    def list_blocked_members(self) -> set[str]:
        """Members at an open barrier."""
        return {name for barrier in self.open for name in barrier.rows}

    def open_for(self, name: str) -> int:
        """Open barriers that the member waits at."""
        return sum(name in barrier.rows for barrier in self.open)

    def arrive(self, name: str, row: BarrierRow, clock: int, roster: dict[str, str]) -> None:
        """A member's barrier row."""
        missed = self.missed.pop(name, [])
        if self.options.identity == "id" and row.id is not None:
            self._arrive_as(row.id, name, row, clock, missed, roster)
            return
        first = next((b for b in self.open if name not in b.rows), None)
        meant = self._resync(row, [m for m in missed if first is None or m.id < first.id], first)
        if meant is not None:
            if not meant.ignored:
                meant.tardy.append(name)
                self.came_late.add(name)
                self._tell(meant)
            self.missed[name] = [m for m in missed if m.id > meant.id]
            return
        if first is None:
            number = max([self.passed or 0, *(b.id for b in self.open)]) + 1
            if self._is_past(number):
                self._ignore(number, name, row, roster)
                return
            first = self._begin(number, clock)
        self.missed[name] = [m for m in missed if m.id > first.id]
        first.rows[name], first.arrived[name] = row, clock

    def abort(self, number: int, clock: int, roster: dict[str, str]) -> None:
        """A person aborts a barrier: the open one of this id, or one that is still to come."""
        found = next((b for b in self.open if b.id == number), None)
        if found is not None:
            self._close(found, clock, roster, "aborted", ignored=True)
        elif not self._is_past(number):
            self.gone.add(number)
            ended = [n for n, s in roster.items() if s == "done"]
            self.closed.append(ClosedBarrier(number, "aborted", {}, [], ended, self.section, 0))

    def cancel(self, number: int, clock: int, roster: dict[str, str]) -> None:
        """A person aborts every barrier up to this number, open or still to come."""
        for older in [b for b in self.open if b.id < number]:
            self._close(older, clock, roster, "aborted", ignored=True)
        self.abort(number, clock, roster)
        if self.options.identity == "id":
            self._pass(number)
        else:
            # Barrier rows of these numbers may still come, and use them up.
            self.cancelled = max(self.cancelled or number, number)

    def settle(self, clock: int, roster: dict[str, str], pending: set[str]) -> None:
        """Close the oldest barrier as long as it can be closed.

        `roster` is member -> active, idle or done.
        """
        while self.open and self._can_close(self.open[0], clock, roster, pending):
            self._close(self.open[0], clock, roster)

    def _can_close(
        self, head: _Open, clock: int, roster: dict[str, str], pending: set[str]
    ) -> bool:
        beyond = {name for later in self.open[1:] for name in later.rows}
        waiting = [
            n for n, s in roster.items() if n not in head.rows and s == "active" and n not in beyond
        ]
        if not waiting:
            return True
        since = head.opened if self.last_close is None else max(head.opened, self.last_close)
        overdue = self.timeout is not None and clock - since > self.timeout
        return overdue and not pending & set(waiting)

    def _close(
        self,
        barrier: _Open,
        clock: int,
        roster: dict[str, str],
        outcome: str | None = None,
        *,
        ignored: bool = False,
    ) -> None:
        missing = [n for n, s in roster.items() if n not in barrier.rows and s != "done"]
        timed_out = "incomplete" if self.options.on_timeout == "incomplete" else "aborted"
        outcome = outcome or (timed_out if missing else "complete")
        first = min(
            barrier.rows,
            key=lambda n: (barrier.arrived[n], barrier.rows[n].seq, barrier.rows[n].event_time),
        )
        closed = ClosedBarrier(
            id=barrier.id,
            outcome=outcome,
            types={n: r.type for n, r in barrier.rows.items()},
            missing=missing,
            ended=[n for n, s in roster.items() if n not in barrier.rows and s == "done"],
            section=self.section,
            time=barrier.rows[first].event_time,
            ignored=ignored,
        )
        self._tell(closed)
        if self.options.identity == "ordinal" or outcome == "incomplete":
            for name in missing:
                self.missed.setdefault(name, []).append(closed)
        if barrier is self.open[0] or self.options.identity == "ordinal":
            self._pass(barrier.id)
        else:
            self.gone.add(barrier.id)
        self.open.remove(barrier)
        self.section += 1
        self.last_close = clock

    def _tell(self, barrier: ClosedBarrier) -> None:
        """Say what is known of a closed barrier now; members that come later are reported again."""
        self.closed.append(replace(barrier, tardy=list(barrier.tardy)))

    def _pass(self, number: int) -> None:
        self.passed = number if self.passed is None else max(self.passed, number)
        self.gone = {g for g in self.gone if g > self.passed}

    def _is_past(self, number: int) -> bool:
        limits = (self.passed, self.cancelled)
        return number in self.gone or any(m is not None and number <= m for m in limits)

    def _ignore(self, number: int, name: str, row: BarrierRow, roster: dict[str, str]) -> None:
        """The first arrival of an ordinal that was aborted beforehand.

        No one waits, and the others' are ignored as well.
        """
        missing = [n for n, s in roster.items() if n != name and s != "done"]
        ended = [n for n, s in roster.items() if n != name and s == "done"]
        closed = ClosedBarrier(
            number,
            "aborted",
            {name: row.type},
            missing,
            ended,
            self.section,
            row.event_time,
            ignored=True,
        )
        for other in missing:
            self.missed.setdefault(other, []).append(closed)
        self._pass(number)

    def _begin(self, number: int, clock: int) -> _Open:
        self.open.append(_Open(number, clock))
        self.open.sort(key=lambda b: b.id)
        return next(b for b in self.open if b.id == number)

    def _arrive_as(
        self,
        number: int,
        name: str,
        row: BarrierRow,
        clock: int,
        missed: list[ClosedBarrier],
        roster: dict[str, str],
    ) -> None:
        meant = next((m for m in missed if m.id == number), None)
        self.missed[name] = [m for m in missed if m.id > number]
        if meant is not None:
            meant.tardy.append(name)
            self.came_late.add(name)
            self._tell(meant)
            return
        found = next((b for b in self.open if b.id == number), None)
        if found is None and self._is_past(number):
            return
        if self.options.overtake == "subsume":
            if any(b.id > number for b in self.open):
                return
            for older in [b for b in self.open if b.id < number]:
                self._close(older, clock, roster, "aborted")
        found = found or self._begin(number, clock)
        if name not in found.rows:
            found.rows[name], found.arrived[name] = row, clock

    def _resync(
        self, row: BarrierRow, missed: list[ClosedBarrier], first: _Open | None
    ) -> ClosedBarrier | None:
        """The closed barrier a tardy member means.

        Same type, then nearest time, then oldest; None: the open or a new one.
        """
        ranked = [
            (row.type not in m.types.values(), abs(m.time - row.event_time), m.id, m)
            for m in missed
        ]
        best = min(ranked, key=lambda r: r[:3], default=None)
        if best is None:
            return None
        if first is not None:
            opener = min(
                first.rows,
                key=lambda n: (first.arrived[n], first.rows[n].seq, first.rows[n].event_time),
            )
            other = row.type not in {r.type for r in first.rows.values()}
            if (other, abs(first.rows[opener].event_time - row.event_time), first.id) < best[:3]:
                return None
        return best[3]
