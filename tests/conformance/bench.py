"""One pipeline on the bench.

Rows in, results out, one epoch at a time, on the engine that is being tried.

``oracle`` is the event-at-a-time model, ``decider`` the real decider with the oracle mover on
a store in memory, ``spark`` the real decider with the Spark mover.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.conformance.spark_bench import SparkRoom, open_room
from tests.oracle.memory_source import MemorySource
from tests.oracle.model import Model, Offer
from tests.oracle.mover import OracleMover
from tests.oracle.tables import read_rows_of
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.manifest import FileRef
from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, Slice
from tidegate.jobs.eventtime.decider import create_initial_state, decide, list_blocked_members
from tidegate.jobs.eventtime.decision_types import Decision, Member, ReleaseMark
from tidegate.jobs.spec.pipeline import PipelineSpec

ENGINES = ("oracle", "decider", "spark")

Values = Mapping[str, Any]

_ROOMS: list[SparkRoom] = []  # the one that is open, if any


@dataclass
class Play:
    """What one epoch gave.

    Attributes:
        windows: window -> results.
        late: late rows: their columns, `output`, `reason`, `_source`, `_partition`, `_seq`.
        events: released rows in order, with `section`, `_late` and provenance.
        expired: window -> (row, window) pairs that came after the purge.
        before: F before the epoch.
        after: F after it.
    """

    before: int
    after: int
    windows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    late: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    expired: Counter[str] = field(default_factory=Counter)


class Bench(Protocol):
    """One engine with one pipeline."""

    def epoch(self, rows: Mapping[str, Sequence[Values]], end: Collection[str] = ()) -> Play:
        """Let rows arrive, source by source, and read them in one epoch.

        Sources in `end` end with it.

        Raises:
            TidegateError: the pipeline refuses the rows.
        """
        ...

    def restore(self) -> None:
        """Stop, and go on from what a checkpoint holds."""
        ...


@contextmanager
def benches(engine: str) -> Iterator[None]:
    """What an engine needs for all cases of a run: a Spark session, or nothing."""
    if engine != "spark":
        yield
        return
    with open_room() as room:
        _ROOMS.append(room)
        try:
            yield
        finally:
            _ROOMS.remove(room)


def bench(spec: PipelineSpec, engine: str) -> Bench:
    """A bench for an engine by name; ``spark`` only within `benches`.

    Raises:
        ConfigurationError: there is no such engine.
    """
    if engine == "oracle":
        return ModelBench(spec)
    if engine == "decider":
        return DeciderBench(spec)
    if engine == "spark" and _ROOMS:
        return SparkSide(spec, _ROOMS[-1])
    raise ConfigurationError(
        f"no engine {engine!r}",
        code="conformance.engine",
        advice=f"choose one of {', '.join(ENGINES)}",
    )


class ModelBench:
    """The event-at-a-time model."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.model = Model(spec)
        self.spec = spec
        self.sequence = dict.fromkeys(spec.sources, 0)
        self.now = 0

    def epoch(self, rows: Mapping[str, Sequence[Values]], end: Collection[str] = ()) -> Play:
        """One epoch of the model."""
        offers = {}
        for name in self.spec.sources:
            first, given = self.sequence[name], rows.get(name, ())
            self.sequence[name] += len(given)
            offers[Member(name)] = Offer(list(enumerate(given, first)), done=name in end)
        self.now += 1
        outcome = self.model.epoch(self.now, offers)
        play = Play(outcome.before, outcome.after, outcome.windows, expired=outcome.expired)
        for row, output, reason in outcome.late:
            play.late.append(
                {**row.values, "output": output, "reason": reason, **_place(row.member, row.seq)}
            )
        for section, row, flagged in outcome.released:
            play.events.append(
                {**row.values, "section": section, "_late": flagged, **_place(row.member, row.seq)}
            )
        return play

    def restore(self) -> None:
        """A copy has what a checkpoint would hold."""
        self.model = copy.deepcopy(self.model)


class DeciderBench:
    """The real decider and the oracle mover: survey, trim, decide, move, as the engine does."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.store = MemoryStore()
        self.sources = {name: MemorySource(name) for name in spec.sources}
        self.mover = OracleMover(self.store, spec, self.sources)
        self.state = create_initial_state(spec)
        self.resume: dict[Member, dict[str, Any]] = {}
        self.segments: tuple[FileRef, ...] = ()
        self.released: ReleaseMark | None = None
        self.position = 0
        self.buffered = 0
        self.epochs = 0
        self.now = 0

    def epoch(self, rows: Mapping[str, Sequence[Values]], end: Collection[str] = ()) -> Play:
        """One epoch over everything that has arrived."""
        for name, given in rows.items():
            self.sources[name].append(*given)
        for name in end:
            self.sources[name].end()
        self.now += 1
        waiting = list_blocked_members(self.state)
        slices = []
        for name, source in self.sources.items():
            for member in source.list_members():
                limits = self.spec.sources[name].limits
                slices.append(
                    source.plan(member, self.resume.get(member), limits, blocked=member in waiting)
                )
        decision, moved, _ = self.run(Cut(tuple(slices)), self.now)
        return _played(self.spec, decision, moved, self.table)

    def run(self, cut: Cut, now: int, **facts: Any) -> tuple[Decision, MoveResult, Cut]:
        """One epoch over a given cut, which is trimmed at barriers; `facts` go into the survey."""
        for found in self.mover.survey(cut, self.state).survey.members:
            part = next(s for s in cut.slices if s.member == found.member)
            if found.barrier is not None and found.barrier.seq + 1 < part.end:
                cut = cut.with_slice(
                    self.sources[found.member.source].trim(part, found.barrier.seq + 1)
                )
        surveyed = self.mover.survey(cut, self.state)
        survey = replace(
            surveyed.survey, now=now, buffered_rows=self.buffered, released_max=self.released
        )
        survey = replace(survey, **facts)
        decision = decide(self.spec, self.state, survey)
        self.epochs += 1
        moved = self.mover.move(
            MoveOrder(
                cut,
                decision,
                self.segments,
                AttemptFolders(BucketLayout("bench"), CheckpointId(0, self.epochs, "be0c4a")),
                self.position,
            ),
            surveyed,
        )
        if not moved.counters.is_conserved():
            raise AssertionError(f"rows do not add up: {moved.counters}")
        self._take(cut.slices, decision, moved)
        return decision, moved, cut

    def restore(self) -> None:
        """State through JSON, as a manifest holds it; a new mover on the same store."""
        self.state = json.loads(json.dumps(self.state))
        self.mover = OracleMover(self.store, self.spec, self.sources)

    def table(self, moved: MoveResult, name: str) -> list[dict[str, Any]]:
        """Rows that an epoch wrote to a table."""
        return [row for ref in moved.files.get(name, ()) for row in read_rows_of(self.store, ref)]

    def _take(self, slices: Sequence[Slice], decision: Decision, moved: MoveResult) -> None:
        self.state = decision.after
        self.resume |= {part.member: part.resume for part in slices}
        self.segments, self.position, self.buffered = (
            moved.segments,
            moved.next_position,
            moved.counters.retained,
        )
        if moved.released_max is not None:
            self.released = (
                moved.released_max
                if self.released is None
                else max(self.released, moved.released_max)
            )


class SparkSide:
    """The Spark mover, in the words of a bench."""

    def __init__(self, spec: PipelineSpec, room: SparkRoom) -> None:
        self.spec = spec
        self.real = room.bench(spec)

    def epoch(self, rows: Mapping[str, Sequence[Values]], end: Collection[str] = ()) -> Play:
        """One epoch over everything that has arrived."""
        decision, moved = self.real.epoch(rows, end)
        return _played(self.spec, decision, moved, self.real.table)

    def restore(self) -> None:
        """State through JSON, and a new mover."""
        self.real.restore()


def _played(
    spec: PipelineSpec,
    decision: Decision,
    moved: MoveResult,
    table: Callable[[MoveResult, str], list[dict[str, Any]]],
) -> Play:
    play = Play(decision.frontier_before, decision.frontier_after)
    play.windows = {name: table(moved, name) for name in spec.windows}
    play.late, play.events = table(moved, "late"), table(moved, "events")
    for counts in moved.counters.per_source.values():
        play.expired += Counter(
            {k.partition(":")[2]: n for k, n in counts.items() if k.startswith("expired:")}
        )
    return play


def _place(member: Member, seq: int) -> dict[str, Any]:
    return {"_source": member.source, "_partition": member.partition, "_seq": seq}
