"""Flink's window assigners.

Which windows an element belongs to, which definitions are refused, how sessions merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.conformance.bench import bench
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import UnknownFeatureError
from tests.conformance.windows_common import (
    END,
    WINDOW,
    DifferenceError,
    decide_case,
    match,
    pipeline,
    watermark,
)

_COUNT = {"aggregates": {"n": "count(*)"}}
_ARGUMENTS = {
    "tumbling": ("size", "offset"),
    "sliding": ("size", "slide", "offset"),
    "session": ("gap",),
}


def flink_window_assignment(
    header: Mapping[str, Any], case: Mapping[str, Any], engine: str
) -> CaseResult:
    """One case of any of the suite's four lists."""

    def play() -> None:
        if "args" in case:
            _refused(case)
        elif "add" in case:
            _merged_one_by_one(case, engine)
        elif "merged" in case:
            _merged(case, engine)
        else:
            _assigned(case, engine)

    return decide_case(case["id"], play)


def _assigned(case: Mapping[str, Any], engine: str) -> None:
    window = {
        name: value
        for name, value in case["window"].items()
        if name in ("kind", "size", "slide", "gap", "offset")
    }
    on = bench(pipeline({WINDOW: {**window, **_COUNT}}, preset="flink", inclusive=True), engine)
    results = (
        on.epoch({"events": [{"t": case["ts"]}]}).windows[WINDOW] + on.epoch(END).windows[WINDOW]
    )
    match("windows", [{"window": w} for w in case["windows"]], [_window(r) for r in results])


def _refused(case: Mapping[str, Any]) -> None:
    names = _ARGUMENTS[case["kind"]]
    if len(case["args"]) > len(names):
        raise UnknownFeatureError(
            f"{case['kind']} windows have {len(names)} arguments, not {len(case['args'])}"
        )
    window = dict(zip(names, case["args"], strict=False))
    try:
        pipeline({WINDOW: {"kind": case["kind"], **window, **_COUNT}}, preset="flink")
    except ValueError:
        return
    raise DifferenceError(f"{case['kind']} {window} was accepted")


def _merged(case: Mapping[str, Any], engine: str) -> None:
    on = bench(_sessions(), engine)
    results = on.epoch({"events": [_interval(w) for w in case["windows"]]}).windows[WINDOW]
    match("merged", [{"window": w} for w in case["merged"]], [_window(r) for r in results])


def _merged_one_by_one(case: Mapping[str, Any], engine: str) -> None:
    on = bench(_sessions(), engine)
    for number, step in enumerate(case["add"]):
        if "retire" in step:
            on.epoch(watermark(step["retire"][1]))
            continue
        results = on.epoch({"events": [_interval(step["w"])]}).windows[WINDOW]
        match(
            f"add {number} {step['w']}", [{"window": step["result"]}], [_window(r) for r in results]
        )
    # What is live at the end is what one more element changes: an empty one inside each live
    # window.
    points = [{"t": start, "until": start + 1} for start, _ in case["live"]]
    results = on.epoch({"events": points}).windows[WINDOW]
    match("live", [{"window": w} for w in case["live"]], [_window(r) for r in results])


def _sessions() -> Any:
    """The suite gives whole windows.

    Interval rows with the least gap, shown as soon as they change.
    """
    session = {"kind": "session", "gap": 1, "emit": "each_epoch", **_COUNT}
    return pipeline({WINDOW: session}, preset="flink")


def _interval(window: list[int]) -> dict[str, Any]:
    start, end = window
    return {
        "t": start,
        "until": max(end, start + 1),
    }  # an empty window is our shortest one: a point


def _window(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"window": [result["window_start"], result["window_end"]]}


SUITES = {"flink_window_assignment": flink_window_assignment}
