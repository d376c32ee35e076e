"""Kafka Streams.

Stream time is the highest time seen, grace is the lag, sessions have inclusive ends.

Two windows run side by side: ``updates`` shows every change, ``final`` a window when it closes.
Kafka's session ``[first, last]`` with gap g is ours ``[first, last + g + 1)``; hopping windows
never start before 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tests.conformance.bench import Play, bench
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import UnknownFeatureError
from tests.conformance.windows_common import (
    COLUMNS,
    DifferenceError,
    OutOfScopeError,
    decide_case,
    match,
)
from tidegate.jobs.spec.pipeline import PipelineSpec

_NEVER = {"idle_timeout": "never"}
_FOLD = re.compile(r'fold: start "([^"]*)", append "\+value"')


def kafka_streams(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """One event is one epoch."""
    return decide_case(case["id"], lambda: _play(case, engine))


def _play(case: Mapping[str, Any], engine: str) -> None:
    if "steps" in case:  # `next` and `buffered` of a partition group
        raise OutOfScopeError(
            "Kafka partition_group keeps in-source disorder; we sort (semantics.md section 8)"
        )
    on = bench(_pipeline(case), engine)
    plays = [
        on.epoch({"events": [_row(number, event)]}) for number, event in enumerate(case["events"])
    ]
    if "updates" in case:
        given = [row for play in plays for row in _updates(case, play)]
        _in_order("updates", case["updates"], given)
    if "final" in case:
        match(
            "final",
            case["final"],
            [_shown(case, r) for play in plays for r in play.windows["final"]],
        )
    if "dropped" in case:
        dropped = sorted(r["_seq"] for play in plays for r in play.late if r["output"] == "final")
        match("dropped", [{"dropped": case["dropped"]}], [{"dropped": dropped}])
    if "dropped_window_assignments" in case:
        pairs = sum(play.expired["final"] for play in plays)
        match("dropped", [{"pairs": case["dropped_window_assignments"]}], [{"pairs": pairs}])
    if "sessions" in case:
        ended = on.epoch({}, end={"events"})
        match("sessions", case["sessions"], _standing(case, [*plays, ended]))


def _pipeline(case: Mapping[str, Any]) -> PipelineSpec:
    window = dict(case["window"])
    if window["kind"] == "session":
        # A closed session stays in Kafka's store and may still merge, while a record is judged by
        # its own time.
        window |= {
            "gap": window["gap"] + 1,
            "session_touch": "separate",
            "session_late": "event",
            "lateness": window["gap"],
        }
    else:
        window["min_window_start"] = 0
    window |= {"keys": ["key"], "aggregates": {"value": _aggregate(case["aggregate"])}}
    events = {
        "path": "x",
        "schema": {**COLUMNS, "text": "string"},
        "event_time": "t",
        "lag": case["grace"],
        "coalesce": _NEVER,
    }
    return PipelineSpec.model_validate(
        {
            "name": "case",
            "sources": {"events": events},
            "coalesce": _NEVER,
            "release": {"mode": "pass_through"},
            "windows": {"updates": {**window, "emit": "each_epoch"}, "final": window},
        }
    )


def _aggregate(text: str) -> str:
    """Counts and numbers are ours as well.

    A fold of texts is played on what was collected, see `_value`.
    """
    if text == "count":
        return "count(*)"
    if text in ("sum", "min", "max"):
        return f"{text}(value)"
    if _FOLD.match(text) is None:
        raise UnknownFeatureError(f"the adapter does not know the aggregate {text!r}")
    return "collect(text)"


def _standing(case: Mapping[str, Any], plays: Sequence[Play]) -> list[dict[str, Any]]:
    """Sessions as readers see them in the end: without those that a later result replaced."""
    rows: list[dict[str, Any]] = []
    for result in (r for play in plays for r in play.windows["final"]):
        gone = [*_replaced(case, result), _shown(case, result)["window"]]
        rows = [row for row in rows if row["key"] != result["key"] or row["window"] not in gone]
        rows.append(_shown(case, result))
    return rows


def _row(number: int, event: Mapping[str, Any]) -> dict[str, Any]:
    # The fold goes by arrival, our collect by time: the arrival number in front lets _value show it
    # in Kafka's order.
    value = event.get("value", "")
    key = event["key"] if event["key"] is None else str(event["key"])
    return {
        "t": event["ts"],
        "key": key,
        "text": f"{number:06d}{value}",
        "value": value if isinstance(value, int) else None,
    }


def _shown(case: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    start, end = result["window_start"], result["window_end"]
    if case["window"]["kind"] == "session":
        end -= case["window"]["gap"] + 1
    return {"key": result["key"], "window": [start, end], "value": _value(case, result["value"])}


def _value(case: Mapping[str, Any], value: Any) -> Any:
    fold = _FOLD.match(case["aggregate"])
    return value if fold is None else fold[1] + "".join(f"+{text[6:]}" for text in sorted(value))


def _updates(case: Mapping[str, Any], play: Play) -> list[dict[str, Any]]:
    """Updates of one event; Kafka shows a session that grew as a retraction and a new one."""
    shown = []
    for result in sorted(play.windows["updates"], key=lambda r: r["window_start"]):
        row = _shown(case, result)
        if case["window"]["kind"] == "session" and result["revision"] > 0:
            shown += [
                {**row, "window": bounds, "value": None} for bounds in _replaced(case, result)
            ]
        shown.append(row)
    return shown


def _replaced(case: Mapping[str, Any], result: Mapping[str, Any]) -> list[list[int]]:
    if not result["replaces"]:
        return [_shown(case, result)["window"]]
    return [
        [start, end - case["window"]["gap"] - 1] for start, end in map(_bounds, result["replaces"])
    ]


def _bounds(text: str) -> tuple[int, int]:
    start, end = (datetime.fromisoformat(part) for part in text.split("/"))
    return round(start.timestamp() * 1_000_000), round(end.timestamp() * 1_000_000)


def _in_order(
    where: str, expected: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> None:
    for number, (want, got) in enumerate(zip(expected, given, strict=False)):
        match(f"{where} {number}", [want], [got])
    if len(expected) != len(given):
        raise DifferenceError(f"{where}: expected {len(expected)} rows, got {len(given)}")


SUITES = {"kafka_streams": kafka_streams}
