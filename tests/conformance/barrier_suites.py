"""Adapters of the suites about barrier events.

Conventions are mapped, results are never computed here.
"""

from __future__ import annotations

from typing import Any, Final

from tests.conformance.feed import Barrier, Item, Point, Punctuation, Step, pipeline
from tests.conformance.frontier_suites import Suite, step_by_step
from tests.conformance.model_feed import ModelStep, feed_on
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import MalformedCaseError, UnknownFeatureError
from tidegate.errors import TidegateError
from tidegate.jobs.eventtime.barriers import Barriers, ClosedBarrier
from tidegate.jobs.eventtime.decision_types import BarrierOutcome, BarrierRow, MemberStatus
from tidegate.jobs.spec.event_time_options import BarrierOptions

Case = dict[str, Any]

REASONS: Final = {
    "cancelled": "checkpoint_declined_on_cancellation_barrier",
    "subsumed": "checkpoint_declined_subsumed",
}


# ---------------------------------------------------------------------- flink_barrier_alignment


def flink_barrier_alignment(header: Case, case: Case, engine: str) -> CaseResult:
    """One item is one signal; the decider's barriers settle after each."""
    task = _Alignment(case)
    result = step_by_step(case, task.differs)
    difference = task.facts_differ(case["final"]) if result.outcome == "passed" else None
    return CaseResult(case["id"], "failed", f"at the end: {difference}") if difference else result


class _Alignment:
    def __init__(self, case: Case) -> None:
        self.barriers = Barriers(BarrierOptions(identity="id", overtake="subsume"), None)
        self.barriers.roster = {
            str(channel): MemberStatus.ACTIVE.value for channel in range(case["channels"])
        }
        self.aborts_at_end = case.get("checkpoints_after_a_channel_ended") is False
        self.closed: list[ClosedBarrier] = []
        self.clock = 0

    def differs(self, step: Case) -> str | None:
        self.clock += 1
        self._signal(step["op"], str(step["channel"]), step.get("id"))
        self.barriers.close_ready(self.clock, ())
        self.closed += self.barriers.take_closed()
        return self.facts_differ(step.get("after", {}))

    def _signal(self, op: str, channel: str, id_: int | None) -> None:
        barriers = self.barriers
        if channel not in barriers.roster:
            raise MalformedCaseError(f"{op}: there is no channel {channel}")
        if op == "barrier":
            barriers.record_arrival(
                channel, BarrierRow(self.clock, "checkpoint", id_, 0), self.clock
            )
        elif op == "cancel" and id_ is not None:
            barriers.cancel_up_to(id_, self.clock)
        elif op == "end":
            if (
                self.aborts_at_end and barriers.open
            ):  # that configuration means: an ended channel declines what is pending
                barriers.abort(barriers.open[0]["id"], self.clock)
            barriers.roster = {**barriers.roster, channel: MemberStatus.DONE.value}

    def facts_differ(self, expected: Case) -> str | None:
        facts = self._facts()
        strange = sorted(expected.keys() - facts.keys())
        if strange:
            raise UnknownFeatureError(f"the adapter does not know the fact {strange[0]!r}")
        got = {name: facts[name] for name in expected}
        return None if got == expected else f"expected {expected}, got {got}"

    def _facts(self) -> Case:
        completed = [
            c.health.id for c in self.closed if c.health.outcome is BarrierOutcome.COMPLETE
        ]
        aborted = [c for c in self.closed if c.health.outcome is BarrierOutcome.ABORTED]
        return {
            "blocked": sorted(int(channel) for channel in self.barriers.blocked_members()),
            "latest_id": self.barriers.latest,
            "completed_upto": max(completed, default=0),
            "completed_ids": completed,
            "completed_checkpoints": len(completed),
            "aborted_checkpoints": len(aborted),
            "last_cancelled_id": aborted[-1].health.id if aborted else None,
            "cancel_reason": REASONS.get(aborted[-1].cause) if aborted else None,
            "pending": bool(self.barriers.open),
        }


# ---------------------------------------------------------------------- hazelcast_barrier_merge


def hazelcast_barrier_merge(header: Case, case: Case, engine: str) -> CaseResult:
    """A drain reads one item per epoch, queue after queue.

    An ordered merge reads all there is in one epoch.

    How much one drain takes is up to the engine: what consecutive drains give is compared together.
    The suite's labels of progress say how a cooperative processor was scheduled and have no
    counterpart here.
    """
    merge = _Merge(case, engine)
    wanted: list[Any] = []
    for number, step in enumerate([*case["steps"], {"op": "end of case"}]):
        if step["op"] == "drain":
            wanted.append(step)
            continue
        difference = merge.drain(wanted) if wanted else None
        if difference is not None:
            return CaseResult(case["id"], "failed", f"before step {number}: {difference}")
        wanted = []
        if step["op"] == "add":
            if not 0 <= step["queue"] < case["inputs"]:
                raise MalformedCaseError(f"step {number}: there is no queue {step['queue']}")
            merge.add(step["queue"], step["items"])
    return CaseResult(case["id"], "passed")


class _Merge:
    def __init__(self, case: Case, engine: str) -> None:
        self.ordered = case.get("ordered", False)
        self.names = tuple(f"q{number}" for number in range(case["inputs"]))
        self.feed = feed_on(
            engine,
            _ordered(self.names) if self.ordered else _inbound(self.names, case["guarantee"]),
        )

    def add(self, queue: int, items: list[Any]) -> None:
        name = self.names[queue]
        self.feed.add(name, *(self._item(i) for i in items if i != "end"))
        if "end" in items:
            self.feed.end(name)

    def _item(self, item: Any) -> Item:
        if isinstance(item, int):
            return Point(item)
        if (
            not isinstance(item, dict)
            or len(item) != 1
            or not item.keys() <= {"barrier", "watermark"}
        ):
            raise UnknownFeatureError(f"the adapter does not know the item {item!r}")
        return Barrier(id=item["barrier"]) if "barrier" in item else Punctuation(item["watermark"])

    def drain(self, wanted: list[Case]) -> str | None:
        error = next((w["error"] for w in wanted if "error" in w), None)
        try:
            got = self._drain_ordered() if self.ordered else self._drain_all()
        except TidegateError as refused:
            return None if error is not None else f"refused: {refused}"
        if error is not None:
            return f"expected the error {error!r}, got {got}"
        expected = [item for w in wanted for item in w["out"]]
        return None if got == expected else f"expected {expected}, got {got}"

    def _drain_ordered(self) -> list[Any]:
        return [p.time for p in self.feed.step(0).released]

    def _drain_all(self) -> list[Any]:
        got: list[Any] = []
        progress = True
        while progress:
            progress = False
            for name in self.names:
                while self.feed.waiting(name) and not self.feed.blocked(name):
                    got += self._out(self.feed.step(0, {name: 1}))
                    progress = True
            got += self._out(self.feed.step(0, {}))
        return got

    def _out(self, step: Step | ModelStep) -> list[Any]:
        barriers = [{"barrier": id_} for id_ in step.completed]
        watermarks = [{"watermark": value} for kind, value in step.emitted if kind == "watermark"]
        return [*(p.time for p in step.released), *watermarks, *barriers]


def _inbound(names: tuple[str, ...], guarantee: str) -> Any:
    return pipeline(
        names,
        {"punctuation": {"explicit": True}},
        coalesce={"idle_timeout": None, "all_done": "hold", "revived": "freeze", "joins": "hold"},
        release={"mode": "pass_through"},
        barriers={
            "identity": "id",
            "alignment": "pass" if guarantee == "at_least_once" else "block",
        },
    )


def _ordered(names: tuple[str, ...]) -> Any:
    """The suite's inputs are declared in order.

    A row below its predecessor breaks the punctuation after it.

    A delay of one tick takes back the shift of an inclusive source: equal stamps are in order.
    """
    source = {
        "lag": 0,
        "frontier": "inclusive",
        "punctuation": {"every_events": 1, "delay": 1, "on_violation": "error"},
    }
    return pipeline(names, source, coalesce={"idle_timeout": None}, release={"on_late": "error"})


SUITES: Final[dict[str, Suite]] = {
    "flink_barrier_alignment": flink_barrier_alignment,
    "hazelcast_barrier_merge": hazelcast_barrier_merge,
}
