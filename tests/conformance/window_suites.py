"""Adapters of the suites about windows (by file stem), and of the two that share Flink's step
vocabulary.

Adapters map a suite's conventions to options and its rows to ours; they never compute a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.conformance import assignment_suite, batch_suites, beam_suite, kafka_suite, spark_suite
from tests.conformance.bench import Bench, Play, bench
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import MalformedCaseError, UnknownFeatureError
from tests.conformance.windows_common import (
    COLUMNS,
    END,
    WINDOW,
    OutOfScopeError,
    decide_case,
    match,
    pipeline,
    watermark,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX

Adapter = Callable[[Mapping[str, Any], Mapping[str, Any], str], CaseResult]

_COUNT = "count triggers (semantics.md section 8)"
_CUSTOM = "processing-time triggers, evictors and triggers of a user's own (semantics.md section 8)"
_GLOBAL = {"kind": "tumbling", "size": 2**62, "offset": -(2**61)}
"""One window for all times; a suite names no bounds of it."""


def _steps(
    header: Mapping[str, Any], case: Mapping[str, Any], engine: str, preset: str
) -> CaseResult:
    def play() -> None:
        spec = _pipeline(case, preset)
        _run(case, bench(spec, engine))

    return decide_case(case["id"], play)


def flink_window_operator(
    header: Mapping[str, Any], case: Mapping[str, Any], engine: str
) -> CaseResult:
    """Flink's window operator."""
    return _steps(header, case, engine, "flink")


def hazelcast_window(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """Hazelcast's window processors."""
    return _steps(header, case, engine, "hazelcast")


def _pipeline(case: Mapping[str, Any], preset: str) -> PipelineSpec:
    trigger, window = case["trigger"], case["window"]
    if trigger["on"] == "count":
        raise OutOfScopeError(_COUNT)
    if case.get("evictor"):
        raise OutOfScopeError(_CUSTOM)
    if trigger["on"] not in ("watermark_passes_window_end", "continuous_event_time"):
        raise OutOfScopeError(f"{trigger['on']}: {_CUSTOM}")
    shape: dict[str, Any] = (
        _GLOBAL
        if window["kind"] == "global"
        else {
            name: window[name]
            for name in ("kind", "size", "slide", "gap", "offset")
            if name in window
        }
    )
    if _by_element(window):
        shape["gap"] = 1  # the element's own gap becomes the length of an interval row, see _row
    if trigger.get("panes") not in ("accumulating", "discarding"):
        raise UnknownFeatureError(f"the adapter does not know panes {trigger.get('panes')!r}")
    spec = {
        **shape,
        "keys": ["key"],
        "aggregates": {"value": f"{case['aggregate']}(value)"},
        "lateness": "never" if case["allowed_lateness"] == "infinite" else case["allowed_lateness"],
        "revisions": "delta" if trigger["panes"] == "discarding" else "accumulate",
    }
    if trigger["on"] == "continuous_event_time":
        spec["fire_every"] = trigger.get("interval")
    if shape["kind"] == "session" and "touching_sessions" in case:
        spec["session_touch"] = case["touching_sessions"]
    values = [s["value"] for s in case["steps"] if s["op"] == "event"]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise MalformedCaseError(f"the value {value!r} is no number")
    columns = {
        **COLUMNS,
        "value": "double" if any(isinstance(value, float) for value in values) else "long",
    }
    return pipeline(
        {WINDOW: spec}, preset=preset, inclusive=case["watermark_means"] == "le", columns=columns
    )


def _by_element(window: Mapping[str, Any]) -> bool:
    return "gap_by_element" in window or "point_values" in window


def _row(window: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    row = {"t": step["ts"], "key": _key(step["key"]), "value": step["value"]}
    if not _by_element(window):
        if "gap" in step:
            raise UnknownFeatureError(
                "the adapter does not know a gap of one element where the window has one for all"
            )
        return row
    gap = step.get("gap", window.get("gap"))
    if not isinstance(gap, int):
        raise MalformedCaseError(
            f"the event at {step['ts']} has no 'gap', and neither has the window"
        )
    if gap == 0 or step["value"] in window.get("point_values", ()):
        return row  # an empty window is our shortest one: a point
    return {**row, "until": step["ts"] + gap}


def _key(value: Any) -> str | None:
    """Keys are text on the bench, whatever a suite writes."""
    return value if value is None else str(value)


def _run(case: Mapping[str, Any], engine: Bench) -> None:
    results: list[dict[str, Any]] = []
    late: list[dict[str, Any]] = []
    for number, step in enumerate(case["steps"]):
        where = f"step {number} ({step['op']})"
        match step["op"]:
            case "event":
                _gather(engine.epoch({"events": [_row(case["window"], step)]}), results, late)
            case "watermark":
                _gather(
                    engine.epoch(watermark(TICK_MAX if step["ts"] == "MAX" else step["ts"])),
                    results,
                    late,
                )
            case "end_of_input":
                _gather(engine.epoch(END), results, late)
            case "checkpoint_and_restore":
                engine.restore()
            case "expect":
                match_and_clear(
                    where, _expected(where, step["rows"], {"key", "value", "window"}), results
                )
            case "expect_late":
                match_and_clear(where, _expected(where, step["rows"], {"key", "value", "ts"}), late)
            case "end_expect_nothing_more":
                match_and_clear(where, [], results)


def _expected(
    where: str, rows: Sequence[Mapping[str, Any]], known: set[str]
) -> list[dict[str, Any]]:
    for row in rows:
        if not isinstance(row, Mapping):
            raise MalformedCaseError(f"{where}: {row!r} is no row")
        strange = sorted(row.keys() - known)
        if strange:
            raise UnknownFeatureError(
                f"{where}: the adapter does not know the column {strange[0]!r}"
            )
    return [{**row, "key": _key(row["key"])} if "key" in row else dict(row) for row in rows]


def _gather(play: Play, results: list[dict[str, Any]], late: list[dict[str, Any]]) -> None:
    results += [{**r, "window": _bounds(r)} for r in play.windows[WINDOW]]
    late += [{**r, "ts": r["t"]} for r in play.late if r["output"] == WINDOW]


def _bounds(result: Mapping[str, Any]) -> list[int] | None:
    start, end = result["window_start"], result["window_end"]
    return None if end - start == _GLOBAL["size"] else [start, end]


def match_and_clear(
    where: str, expected: Sequence[Mapping[str, Any]], given: list[dict[str, Any]]
) -> None:
    """Compare what was given since the last time, and forget it."""
    match(where, expected, given)
    given.clear()


SUITES: dict[str, Adapter] = {
    "flink_window_operator": flink_window_operator,
    "hazelcast_window": hazelcast_window,
    **assignment_suite.SUITES,
    **kafka_suite.SUITES,
    **beam_suite.SUITES,
    **spark_suite.SUITES,
    **batch_suites.SUITES,
}
"""File stem -> adapter."""
