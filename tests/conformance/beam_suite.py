"""Apache Beam: the default trigger, and the trigger that closes a window after its on-time pane.

``Default`` is a window with its allowed lateness; ``AfterWatermark()`` alone is one with lateness 0
(it closes on time, however much lateness is allowed). Touching sessions stay separate; an element
is judged on its own window before it merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.conformance.bench import Bench, Play, bench
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import MalformedCaseError, UnknownFeatureError
from tests.conformance.windows_common import (
    COLUMNS,
    WINDOW,
    DifferenceError,
    OutOfScopeError,
    decide_case,
    match,
    pipeline,
    watermark,
)
from tidegate.errors import TidegateError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX

_TRIGGERS = (
    "count and processing-time triggers, and triggers composed of others (semantics.md section 8)"
)
_HOLDS = "Beam output-time holds (semantics.md section 8)"
_ONCE = "AfterWatermark()"
_REPEATED = ("Default", "Repeatedly(AfterWatermark())", "AfterWatermark(late=AfterCount(1))")
"""One on-time pane, then one for every bundle of late elements: three names of the same."""
_PARTIAL = ("expect_dropped_closed", "expect_window_empty", "expect_final_pane")
_COLUMNS = {"window", "values", "sum", "output_ts", "late", "early", "timing", "first", "final"}
_UNCOMPARED = {"index", "nonspeculative_index"}  # pane indexes: out of scope


def beam(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """One bundle is one epoch."""
    return decide_case(case["id"], lambda: _case(case, engine))


def _case(case: Mapping[str, Any], engine: str) -> None:
    if case["trigger"] not in (*_REPEATED, _ONCE):
        raise OutOfScopeError(f"{case['trigger']}: {_TRIGGERS}")
    if case.get("output_ts_rule", "OUTPUT_AT_EOW") not in ("OUTPUT_AT_EOW", "end_of_window"):
        raise OutOfScopeError(f"{case['output_ts_rule']}: {_HOLDS}")
    if case.get("closing") == "fire_always":
        raise UnknownFeatureError(
            "the adapter does not know closing: fire_always, a final pane with nothing new in it"
        )
    if "bundle_sizes" in case:
        for size in case["bundle_sizes"]:
            _bundles(case, size, engine)
    elif "must_be_rejected" in case:
        _control(case, engine)
    else:
        _Transcript(case, bench(_pipeline(case), engine)).play()


def _pipeline(case: Mapping[str, Any]) -> PipelineSpec:
    lateness = case["allowed_lateness"]
    window = {
        name: case["window"][name]
        for name in ("kind", "size", "slide", "gap", "offset")
        if name in case["window"]
    }
    if window["kind"] == "session":
        window |= {"session_touch": "separate", "session_late": "own"}
    window |= {
        "aggregates": {"values": "collect(text)", "sum": "sum(value)"},
        "lateness": (
            0 if case["trigger"] == _ONCE else "never" if lateness == "infinite" else lateness
        ),
        "revisions": "delta" if case["panes"] == "discarding" else "accumulate",
    }
    return pipeline({WINDOW: window}, regress="error", columns={**COLUMNS, "text": "string"})


def _control(case: Mapping[str, Any], engine: str) -> None:
    """A negative control: it passes when the comparison refuses it."""
    try:
        _Transcript(case, bench(_pipeline(case), engine)).play()
    except DifferenceError:
        return
    raise DifferenceError(f"negative control: {case['must_be_rejected']!r} should have been found")


def _row(time: int, value: Any) -> dict[str, Any]:
    return {"t": time, "text": str(value), "value": value if isinstance(value, int) else None}


class _Transcript:
    """A case in steps. Whatever was emitted must be expected before the next action."""

    def __init__(self, case: Mapping[str, Any], engine: Bench) -> None:
        self.case = case
        self.engine = engine
        self.given: list[dict[str, Any]] = []
        self.all: list[dict[str, Any]] = []
        self.dropped = 0

    def play(self) -> None:
        for number, step in enumerate(self.case["steps"]):
            self.step(f"step {number} ({step['op']})", step)
        if not self.loose:
            match("at the end", [], self.given)

    def step(self, where: str, step: Mapping[str, Any]) -> None:
        match step["op"]:
            case "events":
                times, values = step["ts"], self.values(step)
                if not isinstance(times, list) or len(times) != len(values):
                    raise MalformedCaseError(f"{where}: as many 'values' as 'ts' are expected")
                self.act(
                    where, {"events": [_row(t, v) for t, v in zip(times, values, strict=True)]}
                )
            case "watermark":
                self.watermark(where, step)
            case "expect":
                self.expect(where, step["rows"])
            case "expect_window_empty":
                match(where, [], [g for g in self.all if g["window"] == step["window"]])
            case "expect_dropped_closed":
                match(where, [{"dropped": step["total"]}], [{"dropped": self.dropped}])
            case "expect_final_pane":
                last = [g for g in self.all if g["window"] == step["window"]][-1:]
                match(where, [{"values": sorted(map(str, step["values"]))}], last)
            case op:
                raise UnknownFeatureError(f"{where}: the adapter does not know {op!r}")

    def values(self, step: Mapping[str, Any]) -> Sequence[Any]:
        values: Sequence[Any] = step.get("values", step["ts"])
        return values

    def watermark(self, where: str, step: Mapping[str, Any]) -> None:
        time = TICK_MAX if step["ts"] == "MAX" else step["ts"]
        if not step.get("error"):
            self.act(where, watermark(time))
            return
        try:
            self.engine.epoch(watermark(time))
        except TidegateError:
            return
        raise DifferenceError(f"{where}: the watermark went back and was accepted")

    def act(self, where: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        if not self.loose:
            match(f"{where}: before it", [], self.given)
        play = self.engine.epoch(rows)
        self.dropped += play.expired[WINDOW]
        shown = [_shown(self.case, play, r) for r in play.windows[WINDOW]]
        self.given += shown
        self.all += shown

    @property
    def loose(self) -> bool:
        """A case that counts drops, or looks at one window or pane only, does not list all that is
        emitted.
        """
        return any(step["op"] in _PARTIAL for step in self.case["steps"])

    def expect(self, where: str, rows: Sequence[Mapping[str, Any]]) -> None:
        wanted = []
        for row in rows:
            row = {name: value for name, value in row.items() if name not in _UNCOMPARED}
            strange = sorted(row.keys() - _COLUMNS)
            if strange:
                raise UnknownFeatureError(
                    f"{where}: the adapter does not know the column {strange[0]!r}"
                )
            if "values" in row:
                row["values"] = sorted(map(str, row["values"]))
            wanted.append(row)
        match(where, wanted, self.given)
        self.given.clear()


def _shown(case: Mapping[str, Any], play: Play, result: Mapping[str, Any]) -> dict[str, Any]:
    """A result in Beam's words."""
    start, end = result["window_start"], result["window_end"]
    lateness = case["allowed_lateness"]
    late = end <= play.before
    return {
        "window": [start, end],
        "values": sorted(result["values"]),
        "sum": result["sum"],
        "output_ts": end - 1,
        "late": late,
        "early": False,
        "timing": "late" if late else "on_time",
        "first": result["revision"] == 0,
        "final": lateness != "infinite" and end + lateness < play.after,
    }


def _bundles(case: Mapping[str, Any], size: int, engine: str) -> None:
    on = bench(_pipeline(case), engine)
    given: list[dict[str, Any]] = []

    def act(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        play = on.epoch(rows)
        given.extend(_shown(case, play, r) for r in play.windows[WINDOW])

    for bundle in _cut(case["data"], size):
        act({"events": [_row(t, v) for t, v in bundle]})
    act(watermark(TICK_MAX))
    for bundle in _cut(case["late_data"], size):
        act({"events": [_row(t, v) for t, v in bundle]})
    wanted = [
        {"window": w["window"], "values": sorted(pane)}
        for w in case["expect_panes_per_window"]
        for pane in w["panes"]
    ]
    match(f"bundle size {size}", wanted, given)


def _cut(data: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Bundles of `size` elements; a negative size takes the data backwards."""
    data, size = (data[::-1], -size) if size < 0 else (data, size)
    return [data[n : n + size] for n in range(0, len(data), size)]


SUITES = {"beam": beam}
