"""Hand-made queues in front of the event-at-a-time model, for cases about frontiers, order and
barriers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.conformance.feed import Barrier, Feed, Point, Queues, as_row
from tests.oracle.model import Model, Offer
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec


@dataclass(frozen=True, slots=True)
class ModelStep:
    """What one epoch of the model did, in the words of `Step`."""

    released: list[Point]
    frontier_after: int
    emitted: tuple[tuple[str, int | str], ...]
    statuses: Mapping[str, str]
    completed: tuple[int | None, ...]


class ModelFeed(Queues):
    """Queues in front of the model. Arguments and calls as those of `Feed`."""

    def __init__(self, spec: PipelineSpec, *, empty: bool = False) -> None:
        super().__init__(spec, empty=empty)
        self.model = Model(spec)

    def blocked(self, source: str, partition: str = "0") -> bool:
        """Whether the queue waits at an open barrier."""
        allowed = 0 if self.spec.barriers.alignment == "block" else 1
        return self.model.barriers.open_for(str(Member(source, partition))) > allowed

    def step(self, now: int, take: Mapping[str, int] | None = None) -> ModelStep:
        """One epoch: everything that may be read, or at most `take` items of a source (0 for those
        not named).
        """
        before = self.model.output.status
        offers = {
            member: self._offer(member, None if take is None else take.get(member.source, 0))
            for member in self._queues
        }
        outcome = self.model.epoch(now, offers, run_start=self._run_start)
        self._run_start = False
        for member, queue in self._queues.items():
            for _ in range(outcome.consumed.get(str(member), 0)):
                queue.items.popleft()
                queue.seq += 1
        after = self.model.output.status
        signals: list[tuple[str, int | str]] = (
            [("watermark", outcome.after)] if outcome.after != outcome.before else []
        )
        signals += [("status", after)] if after != before else []
        return ModelStep(
            [Point(row.time, row.values["name"]) for _, row, _ in outcome.released],
            outcome.after,
            tuple(signals),
            outcome.statuses,
            tuple(b.id for b in outcome.barriers if b.outcome == "complete"),
        )

    def _offer(self, member: Member, limit: int | None) -> Offer:
        queue = self._queues[member]
        given = list(queue.items)[:limit]
        until = next(
            (n for n, item in enumerate(given, 1) if isinstance(item, Barrier)), len(given)
        )
        whole = until == len(queue.items)
        rows = [
            (queue.seq + n, as_row(queue.seq + n, item).values)
            for n, item in enumerate(given[:until])
        ]
        return Offer(rows, not whole, whole and queue.ended)


AnyFeed = Feed | ModelFeed


def feed_on(engine: str, spec: PipelineSpec, *, empty: bool = False) -> AnyFeed:
    """Queues in front of an engine."""
    return ModelFeed(spec, empty=empty) if engine == "oracle" else Feed(spec, empty=empty)
