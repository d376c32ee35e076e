"""Adapters of the suites about frontiers and statuses.

Conventions are mapped, results are never computed here.

One suite unit is one tick. A suite's operation becomes one signal of a `Coalescer`, or one epoch of
the decider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pydantic import ValidationError

from tests.conformance.feed import Point, Step, pipeline
from tests.conformance.model_feed import ModelStep, feed_on
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import MalformedCaseError, UnknownFeatureError
from tidegate.errors import TidegateError
from tidegate.jobs.eventtime.frontiers import Coalescer, Signal
from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MIN

Suite = Callable[[dict[str, Any], dict[str, Any], str], CaseResult]
Case = dict[str, Any]

FLINK_VALVE: Final = CoalesceOptions(
    idle_timeout=None, revived="ignore", on_idle_punctuation="ignore", joins="hold"
)
HAZELCAST: Final = CoalesceOptions(
    idle_timeout=None, all_done="hold", revived="freeze", joins="hold"
)
MULTIPLEXER: Final = CoalesceOptions(
    idle_timeout=None, revived="freeze", joins="hold", no_members="silent"
)


def step_by_step(case: Case, differs: Callable[[Case], str | None]) -> CaseResult:
    """Run a case's steps until one differs."""
    for number, step in enumerate(case["steps"]):
        difference = differs(step)
        if difference is not None:
            return CaseResult(case["id"], "failed", f"step {number} {step}: {difference}")
    return CaseResult(case["id"], "passed")


def _unequal(expected: Any, got: Any) -> str | None:
    return None if expected == got else f"expected {expected}, got {got}"


# ---------------------------------------------------------------------- flink_valve


def flink_valve(header: Case, case: Case, engine: str) -> CaseResult:
    """Inputs of an operator; every signal settles at once."""
    valve = _coalescer(FLINK_VALVE, case["inputs"])
    out: list[Signal] = []

    def differs(step: Case) -> str | None:
        if step["op"] == "expect":
            got = [{"watermark": value} if kind == "watermark" else value for kind, value in out]
            out.clear()
            return _unequal(step["out"], got)
        name = str(step["input"])
        if step["op"] == "expect_input_state":
            state = valve.inputs[name]
            return _unequal(
                step.get("watermark", state["frontier"]), state["frontier"]
            ) or _unequal(step.get("aligned", state["aligned"]), state["aligned"])
        _signal(valve, step["op"], name, step.get("ts"))
        out.extend(valve.settle())
        return None

    return step_by_step(case, differs)


def _coalescer(options: CoalesceOptions, inputs: int, **more: Any) -> Coalescer:
    coalescer = Coalescer(options, **more)
    for number in range(inputs):
        coalescer.join(str(number))
    return coalescer


def _signal(coalescer: Coalescer, op: str, name: str, value: int | None) -> None:
    if name not in coalescer.inputs:
        raise MalformedCaseError(f"{op}: there is no input {name!r}")
    if op == "watermark" and value is not None:
        coalescer.signal_frontier(name, value)
    else:
        {
            "idle": coalescer.signal_idle,
            "active": coalescer.signal_active,
            "event": coalescer.signal_active,
            "done": coalescer.signal_done,
        }[op](name)


# ---------------------------------------------------------------------- hazelcast_coalescer


def hazelcast_coalescer(header: Case, case: Case, engine: str) -> CaseResult:
    """The suite's call returns one signal at a time: the rest waits for the next poll.

    It knows no `active` and no `done`.
    """
    coalescer = _coalescer(HAZELCAST, case["inputs"], regress="error")
    waiting: list[int | str] = []

    def differs(step: Case) -> str | None:
        if step["op"] == "expect_state":
            return _coalescer_state(coalescer, step)
        try:
            if step["op"] != "poll":
                _signal(coalescer, step["op"], str(step["input"]), step.get("ts"))
        except TidegateError as error:
            return (
                None
                if step.get("error", "no error") in str(error)
                else f"expected {step.get('error')}, got {error}"
            )
        if "error" in step:
            return f"expected the error {step['error']!r}, got none"
        waiting.extend(value for _, value in coalescer.settle() if value not in ("active", "done"))
        returned = waiting.pop(0) if waiting else None
        return _unequal(step["returns"], returned) if "returns" in step else None

    return step_by_step(case, differs)


def _coalescer_state(coalescer: Coalescer, step: Case) -> str | None:
    value = coalescer.value if coalescer.value > TICK_MIN else None
    return _unequal(
        (step["top_observed"], step["coalesced"]), (coalescer.latest_time_frontier(), value)
    )


# ---------------------------------------------------------------------- flink_source_multiplexer


def flink_source_multiplexer(header: Case, case: Case, engine: str) -> CaseResult:
    """Splits of one source.

    A deferred signal is noted at once and settles with the next periodic or immediate one.
    """
    if case["id"].endswith("lowerImmediateUpdateOnSameOutputDoesNotEmitCombinedUpdate"):
        return CaseResult(
            case["id"],
            "skipped",
            "the multiplexer's lowerImmediateUpdate quirk is out of scope (section 8)",
        )
    coalescer, reports = Coalescer(MULTIPLEXER), 0

    def differs(step: Case) -> str | None:
        nonlocal reports
        op, name = step["op"], step.get("output", "")
        if op == "expect":
            return _multiplexed(coalescer, reports, step)
        if op == "unregister":
            return _unequal(step.get("returns", known := coalescer.remove(name)), known)
        if op == "register":
            coalescer.join(name)
        elif op != "periodic":
            _signal(coalescer, op, name, step.get("ts"))
        if op == "periodic" or step.get("mode") == "immediate":
            reports += len(coalescer.settle())
        return None

    return step_by_step(case, differs)


def _multiplexed(coalescer: Coalescer, reports: int, step: Case) -> str | None:
    value = coalescer.value if coalescer.value > TICK_MIN else None
    got = {"watermark": value, "idle": coalescer.status == "idle", "reports": reports}
    expected = {key: want for key, want in step.items() if key != "op"}
    return _unequal(expected, {key: got[key] for key in expected})


# ---------------------------------------------------------------------- hazelcast_source_watermark


def hazelcast_source_watermark(header: Case, case: Case, engine: str) -> CaseResult:
    """One source with partitions, one epoch per event or tick.

    A watermark precedes the event that caused it.
    """
    source = _Partitions(case["config"], engine)
    if "steps" in case:
        return step_by_step(case, source.differs)
    out = [signal for ts in case["events"] for signal in source.epoch(0, 0, ts)]
    difference = _unequal(case["out"], out)
    return CaseResult(case["id"], "failed" if difference else "passed", difference or "")


class _Partitions:
    def __init__(self, config: Case, engine: str) -> None:
        if not isinstance(config, dict):
            raise MalformedCaseError(f"'config' is no object: {config!r}")
        strange = sorted(
            config.keys() - {"lag", "constant_watermark", "frame", "idle_timeout", "partitions"}
        )
        if strange:
            raise UnknownFeatureError(f"the adapter does not know {strange[0]!r} in 'config'")
        self.feed = feed_on(engine, _source_spec(config), empty=True)
        self.wall = config.get("constant_watermark")
        self.lag = config.get("lag", 0)
        self.partitions = 0
        self.add(config["partitions"])
        if self.partitions:
            self.feed.step(
                self.wall or 0
            )  # the suite's clock starts at 0, when the partitions join

    def add(self, count: int) -> None:
        for _ in range(count):
            self.feed.add("s", partition=str(self.partitions))
            self.partitions += 1

    def epoch(self, now: int, partition: int | None = None, ts: int | None = None) -> list[Any]:
        if ts is not None:
            self.feed.add("s", Point(ts), partition=str(partition))
        step = self.feed.step(now if self.wall is None else self.wall)
        return [*_emitted(step), *({"event": p.time} for p in step.released)]

    def differs(self, step: Case) -> str | None:
        if step["op"] == "add_partitions":
            self.add(step["n"])
            return None
        if step["op"] == "restore_watermark":  # state in which the partition has seen as much
            self.epoch(0, step["partition"], step["ts"] + self.lag)
            return None
        if step["op"] == "remove_partition":
            self.feed.remove("s", str(step["partition"]))
        partition, ts = step.get("partition"), step.get("ts")
        if partition is not None and step["op"] == "event" and not 0 <= partition < self.partitions:
            raise MalformedCaseError(f"there is no partition {partition}")
        return _unequal(step["out"], self.epoch(step["now_ms"], partition, ts))


def _source_spec(config: Case) -> PipelineSpec:
    timeout = config["idle_timeout"] or None
    levels = {"joins": "hold", "revived": "freeze", "all_done": "hold"}
    source: dict[str, Any] = {
        "partition_by": "folder",
        "frame": config["frame"],
        "coalesce": {**levels, "idle_timeout": timeout},
    }
    source |= (
        {"wall_clock": {"lag": 0}} if "constant_watermark" in config else {"lag": config["lag"]}
    )
    return pipeline(
        ("s",), source, coalesce={**levels, "idle_timeout": None}, release={"mode": "pass_through"}
    )


def _emitted(step: Step | ModelStep) -> list[Any]:
    """The suite knows no `active` and no `done`."""
    signals = [
        {"watermark": value} if kind == "watermark" else value for kind, value in step.emitted
    ]
    return [s for s in signals if s not in ("active", "done")]


# ---------------------------------------------------------------------- flink_watermark_generator


def flink_watermark_generator(header: Case, case: Case, engine: str) -> CaseResult:
    """Watermarks there are inclusive (one tick below F).

    A member is idle there once *more* than the timeout has passed.
    """
    if "bound" in case:
        feed = feed_on(
            engine, pipeline(("s",), {"lag": case["bound"]}, release={"mode": "pass_through"})
        )
        feed.add("s", *(Point(ts) for ts in case["events"]))
        steps = [feed.step(0) for _ in range(1 + case.get("probe_twice", False))]
        got = [_inclusive(step) for step in steps]
        difference = _unequal([case["watermark"]] * len(got), got)
        return CaseResult(case["id"], "failed" if difference else "passed", difference or "")
    try:
        CoalesceOptions(idle_timeout=case["timeout"])
    except ValidationError:
        return CaseResult(
            case["id"],
            "passed" if case.get("error") else "failed",
            "" if case.get("error") else "timeout refused",
        )
    if case.get("error"):
        return CaseResult(case["id"], "failed", "the timeout was not refused")
    return _idleness(case, engine)


def _inclusive(step: Step | ModelStep) -> int | str:
    frontier = step.frontier_after
    return "MIN" if frontier == TICK_MIN else frontier - 1


def _idleness(case: Case, engine: str) -> CaseResult:
    """A check is an epoch.

    What was active since the last one is read with it, so the idle clock starts at the check.
    """
    spec = pipeline(
        ("s",),
        {"lag": 0},
        coalesce={"idle_timeout": case["timeout"] + 1},
        release={"mode": "pass_through"},
    )
    feed, now = feed_on(engine, spec), 0

    def differs(step: Case) -> str | None:
        nonlocal now
        if step["op"] == "advance":
            now += step["ms"]
        elif step["op"] == "activity":
            feed.add("s", Point(0))
        else:
            status = feed.step(now).statuses["s/0"]
            return _unequal(step.get("idle", status == "idle"), status == "idle")
        return None

    return step_by_step(case, differs)


SUITES: Final[dict[str, Suite]] = {
    "flink_valve": flink_valve,
    "hazelcast_coalescer": hazelcast_coalescer,
    "flink_source_multiplexer": flink_source_multiplexer,
    "hazelcast_source_watermark": hazelcast_source_watermark,
    "flink_watermark_generator": flink_watermark_generator,
}
