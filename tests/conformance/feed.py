"""Hand-made queues in front of the decider.

Cuts them, surveys the cuts, lets it decide and does what it says.

A mover for points in time only: enough for cases about frontiers, order and barriers, without a
store or files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.oracle.rows import RawRow, read_rows
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.errors import PoisonError
from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.eventtime.decider import create_initial_state, decide, list_blocked_members
from tidegate.jobs.eventtime.decision_types import (
    BarrierOutcome,
    Decision,
    Member,
    MemberSurvey,
    ReleaseMark,
    Survey,
)
from tidegate.jobs.spec.event_time_options import LatePolicy, ReleaseMode
from tidegate.jobs.spec.pipeline import PipelineSpec

BARRIER_TYPES: Final = ("run", "begin", "end", "run1", "run2")


@dataclass(frozen=True, slots=True)
class Point:
    """A data row."""

    time: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier row."""

    time: int = 0
    type: str = "run"
    id: int | None = None


@dataclass(frozen=True, slots=True)
class Punctuation:
    """A punctuation row.

    No later row of its member is below this time (an inclusive source: nor at it).
    """

    time: int


Item = Point | Barrier | Punctuation


@dataclass(frozen=True, slots=True)
class Step:
    """What one epoch did.

    Attributes:
        decision: what was decided.
        released: points that left, flagged late ones first, then in order.
        late: points that went to the late table.
        order: section, time, rank of the source, partition and position of what left in order.
    """

    decision: Decision
    released: list[Point]
    late: list[Point]
    order: list[tuple[int, int, int, str, int]] = field(default_factory=list)

    @property
    def times(self) -> list[int]:
        """Event times of what left."""
        return [point.time for point in self.released]

    @property
    def frontier_after(self) -> int:
        """F after the epoch."""
        return self.decision.frontier_after

    @property
    def emitted(self) -> tuple[tuple[str, int | str], ...]:
        """Signals in order."""
        return self.decision.emitted

    @property
    def statuses(self) -> Mapping[str, str]:
        """Status of each member."""
        return self.decision.statuses

    @property
    def completed(self) -> tuple[int | None, ...]:
        """Ids of the barriers that closed complete."""
        return tuple(b.id for b in self.decision.barriers if b.outcome is BarrierOutcome.COMPLETE)


def pipeline(
    names: tuple[str, ...],
    source: dict[str, Any] | None = None,
    *,
    preset: str = "tidegate",
    **sections: Any,
) -> PipelineSpec:
    """A spec with these sources, all alike; one suite unit is one tick."""
    columns = {"t": "timestamp", "kind": "string", "id": "long", "name": "string"}
    marks = {"kind": "kind", "types": BARRIER_TYPES, "id": "id", "punctuation": "punctuation"}
    common = {"schema": columns, "event_time": "t", "barriers": marks, **(source or {})}
    sources = {name: {"path": name, **common} for name in names}
    return PipelineSpec.model_validate(
        {"name": "feed", "preset": preset, "sources": sources, **sections}
    )


@dataclass
class Queue:
    """Items that have not been read, and the position of the first."""

    items: deque[Item] = field(default_factory=deque)
    seq: int = 0
    ended: bool = False


class Queues:
    """Named queues that a case fills and its readers empty."""

    def __init__(self, spec: PipelineSpec, *, empty: bool = False) -> None:
        self.spec = spec
        self._queues: dict[Member, Queue] = (
            {} if empty else {Member(name): Queue() for name in spec.sources}
        )
        self._run_start = True

    def add(self, source: str, *items: Item, partition: str = "0") -> None:
        """Items arrive behind the others; a queue not known before appears."""
        self._queues.setdefault(Member(source, partition), Queue()).items.extend(items)

    def end(self, source: str, partition: str = "0") -> None:
        """Nothing more will arrive."""
        self._queues.setdefault(Member(source, partition), Queue()).ended = True

    def remove(self, source: str, partition: str = "0") -> None:
        """The queue disappears."""
        del self._queues[Member(source, partition)]

    def waiting(self, source: str, partition: str = "0") -> bool:
        """Whether items have not been read yet."""
        return bool(self._queues[Member(source, partition)].items)


class Feed(Queues):
    """Queues, order buffer and the decider's state.

    Args:
        spec: the pipeline; its sources' queues exist from the start unless `empty`.
        empty: start without members; they appear with `add`.
    """

    def __init__(self, spec: PipelineSpec, *, empty: bool = False) -> None:
        super().__init__(spec, empty=empty)
        self.state = create_initial_state(spec)
        self._rank = {name: number for number, name in enumerate(spec.sources)}
        self._buffer: list[tuple[int, int, int, str, int, Point]] = []
        self._released_max: ReleaseMark | None = None

    def blocked(self, source: str, partition: str = "0") -> bool:
        """Whether the queue waits at an open barrier."""
        return Member(source, partition) in list_blocked_members(self.state)

    @property
    def buffered(self) -> list[int]:
        """Event times of the rows in the order buffer."""
        return sorted(entry[1] for entry in self._buffer)

    @property
    def names_buffered(self) -> list[str]:
        """Names of the points in the order buffer."""
        return [entry[5].name for entry in self._buffer]

    def step(
        self,
        now: int,
        take: Mapping[str, int] | None = None,
        *,
        watch: Callable[[Survey], None] | None = None,
        **more: Any,
    ) -> Step:
        """One epoch: everything that may be read, or at most `take` items of a source (0 for those
        not named).

        `watch` is shown the survey; `more` are further fields of it.
        """
        standing = list_blocked_members(self.state)
        read: list[tuple[Member, int, Point]] = []
        surveys = []
        for member in sorted(self._queues, key=lambda m: (self._rank[m.source], m.partition)):
            limit = (
                0 if member in standing else None if take is None else take.get(member.source, 0)
            )
            surveys.append(self._read(member, limit, read))
        survey = Survey(
            now,
            tuple(surveys),
            buffered_rows=len(self._buffer),
            released_max=self._released_max,
            run_start=self._run_start,
            **more,
        )
        if watch is not None:
            watch(survey)
        decision = decide(self.spec, self.state, survey)
        self._run_start = False
        # As the next epoch reads it from the manifest.
        self.state = parse_json(canonical_bytes(decision.after))
        return self._move(decision, read)

    def _read(
        self, member: Member, limit: int | None, read: list[tuple[Member, int, Point]]
    ) -> MemberSurvey:
        queue = self._queues[member]
        raws: list[RawRow] = []
        while queue.items and (limit is None or len(raws) < limit):
            item = queue.items.popleft()
            raws.append(as_row(queue.seq, item))
            queue.seq += 1
            if isinstance(item, Barrier):
                break
        start, pending = queue.seq - len(raws), bool(queue.items)
        part = Slice(member, start, queue.seq, pending=pending, done=queue.ended and not pending)
        found = read_rows(self.spec.sources[member.source], part, raws, self.state)
        if found.violations and self.spec.release.on_late is LatePolicy.ERROR:
            row, mark = found.violations[0]
            raise PoisonError(
                f"{member} row {row.seq}: {row.time} is below the punctuation {mark}",
                code="row.late",
            )
        read += [(member, row.seq, Point(row.time, row.values["name"])) for row in found.data]
        return found.survey

    def _move(self, decision: Decision, read: list[tuple[Member, int, Point]]) -> Step:
        """Judge what was read, then release: the rules of the events output."""
        flagged: list[Point] = []
        late: list[Point] = []
        fresh: list[tuple[int, int, int, str, int, Point]] = []
        for member, seq, point in read:
            if _is_late(decision, point.time):
                (flagged if self.spec.release.on_late is LatePolicy.EMIT_FLAGGED else late).append(
                    point
                )
            else:
                fresh.append(
                    (
                        decision.section,
                        point.time,
                        self._rank[member.source],
                        member.partition,
                        seq,
                        point,
                    )
                )
        if self.spec.release.mode is ReleaseMode.PASS_THROUGH:
            return Step(decision, [entry[5] for entry in fresh], late)
        self._buffer = sorted([*self._buffer, *fresh], key=lambda e: e[:5])
        leaving = [e for e in self._buffer if (e[0], e[1]) < decision.release_after]
        self._buffer = self._buffer[len(leaving) :]
        if leaving:
            newest = ReleaseMark(leaving[-1][0], leaving[-1][1])
            self._released_max = (
                newest if self._released_max is None else max(newest, self._released_max)
            )
        return Step(decision, [*flagged, *(e[5] for e in leaving)], late, [e[:5] for e in leaving])


def _is_late(decision: Decision, time: int) -> bool:
    mark = decision.order_late
    if mark is None:
        return False
    return time < mark.time if decision.order_late_by_time else (decision.section, time) < mark


def as_row(seq: int, item: Item) -> RawRow:
    """An item as its source would give it."""
    values: dict[str, Any] = {"t": item.time, "kind": "data", "id": None, "name": ""}
    if isinstance(item, Barrier):
        values |= {"kind": item.type, "id": item.id}
    elif isinstance(item, Punctuation):
        values |= {"kind": "punctuation"}
    else:
        values |= {"name": item.name}
    return RawRow(seq, values)
