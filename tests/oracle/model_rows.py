"""What the event-at-a-time model makes of one member's rows.

Data, barrier, punctuation, dead letter, quarantine, violation.

Written apart from `rows` on purpose: the two are compared with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tests.oracle.rows import Row
from tidegate.errors import PoisonError
from tidegate.jobs.eventtime.decision_types import BarrierRow, Member
from tidegate.jobs.spec.pipeline import BarrierColumns, SourceSpec
from tidegate.time_units import TICK_MAX, TICK_MIN


class Verdict(NamedTuple):
    """What one row is."""

    what: Literal["data", "dead", "max_jump", "cti_violation", "dropped", "barrier", "punctuation"]
    row: Row | None = None
    barrier: BarrierRow | None = None
    reason: str = ""


@dataclass
class ModelMember:
    """One member and what it remembers of its rows.

    Attributes:
        newest: largest event time so far.
        punctuation: its frontier by punctuation.
        count: rows since punctuation was generated last.
        base: newest row when it was generated last (the first row before that).
        seen: largest time that counts for F_i, that is before the open barrier.
        promised: punctuation that counts for F_i.
        active_at: pipeline clock of the last activity.
        pending: rows were left when the cut was planned.
        before_barrier: position of a barrier row -> newest time and punctuation before it.
    """

    member: Member
    source: SourceSpec
    active_at: int
    newest: int | None = None
    punctuation: int | None = None
    count: int = 0
    base: int | None = None
    seen: int | None = None
    promised: int | None = None
    pending: bool = False
    done: bool = False
    before_barrier: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)

    def read(self, seq: int, values: Mapping[str, Any], clock: int | None) -> Verdict:
        """Judge one row; `clock` is the pipeline clock before this epoch."""
        source, time = self.source, values.get(self.source.event_time)
        kind = values.get(source.barriers.kind) if source.barriers else None
        if source.barriers and kind is not None and kind != source.barriers.data:
            return self._signal(source.barriers, seq, values, time)
        if time is None:
            return Verdict("dead", reason="no_event_time")
        if source.min_event_time is not None and time < source.min_event_time:
            return Verdict("dead", reason="before_min_event_time")
        end = values.get(source.end_time) if source.end_time else None
        if end is not None and end <= time:
            return Verdict("dead", reason="bad_value")
        row = Row(self.member, seq, time, time + 1 if end is None else end, dict(values))
        if self._too_far(time, clock):
            return Verdict("max_jump", row)
        self._floor_stamp(time)
        self.newest = time if self.newest is None else max(self.newest, time)
        verdict = self._against_punctuation(row)
        self._stamp_after()
        return verdict

    def frontier(self, now: int, newest_read: int | None, *, clocked: bool) -> int | None:
        """F_i: the largest of what heuristic, punctuation and wall clock promise."""
        source, known = self.source, [self.promised]
        more = 1 if source.frontier == "inclusive" else 0
        if source.lag is not None and self.seen is not None:
            known.append(self.seen - source.lag + more)
        if (
            clocked
            and source.wall_clock is not None
            and (newest_read is not None or not source.wall_clock.cap)
        ):
            wall = now - source.wall_clock.lag + more
            known.append(
                min(wall, newest_read)
                if source.wall_clock.cap and newest_read is not None
                else wall
            )
        return max((min(max(k, TICK_MIN), TICK_MAX) for k in known if k is not None), default=None)

    def _signal(
        self, marks: BarrierColumns, seq: int, values: Mapping[str, Any], time: int | None
    ) -> Verdict:
        kind = values[marks.kind]
        if kind in marks.types:
            number = values.get(marks.id) if marks.id else None
            return Verdict(
                "barrier",
                barrier=BarrierRow(seq, kind, number, (self.newest or 0) if time is None else time),
            )
        if kind != marks.punctuation or time is None:
            return Verdict("dead", reason="bad_value")
        stamp = time + (1 if self.source.frontier == "inclusive" else 0)
        options = self.source.punctuation
        if (
            self.punctuation is not None
            and stamp < self.punctuation
            and options is not None
            and options.regress == "error"
        ):
            raise PoisonError(f"punctuation of {self.member} went back", code="punctuation.regress")
        self._promise(stamp)
        return Verdict("punctuation")

    def _too_far(self, time: int, clock: int | None) -> bool:
        jump = self.source.max_jump
        if jump is None or clock is None or time - clock <= jump:
            return False
        return self.newest is None or time - self.newest > jump

    def _floor_stamp(self, time: int) -> None:
        options = self.source.punctuation
        if (
            options
            and options.align == "floor"
            and options.every_span
            and (self.newest is None or time > self.newest)
        ):
            behind = time - options.delay
            self._promise(min(time, behind - behind % options.every_span))

    def _stamp_after(self) -> None:
        options = self.source.punctuation
        if (
            not options
            or options.align == "floor"
            or not options.is_generated
            or self.newest is None
        ):
            return
        self.count += 1
        if self.base is None:
            self.base = self.newest
        full = options.every_events is not None and self.count >= options.every_events
        if full or (
            options.every_span is not None and self.newest - self.base >= options.every_span
        ):
            self.count, self.base = 0, self.newest
            self._promise(
                self.newest - options.delay + (1 if self.source.frontier == "inclusive" else 0)
            )

    def _promise(self, stamp: int) -> None:
        stamp = max(TICK_MIN, min(TICK_MAX, stamp))
        if self.punctuation is None or stamp > self.punctuation:
            self.punctuation = stamp

    def _against_punctuation(self, row: Row) -> Verdict:
        mark = self.punctuation
        if mark is None or row.time >= mark:
            return Verdict("data", row)
        policy = self.source.punctuation.on_violation if self.source.punctuation else "error"
        if policy == "adjust" and row.end > mark:
            return Verdict(
                "data",
                Row(
                    row.member, row.seq, mark, row.end, {**row.values, self.source.event_time: mark}
                ),
            )
        return Verdict(
            "cti_violation" if policy == "error" else "dropped", row, reason="cti_violation"
        )
