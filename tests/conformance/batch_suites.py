"""Suites that give all rows at once and compare the total: RisingWave, Arroyo, Nexmark."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.conformance.bench import Play, bench
from tests.conformance.result import CaseResult
from tests.conformance.vocabulary import MalformedCaseError, UnknownFeatureError
from tests.conformance.windows_common import (
    COLUMNS,
    WINDOW,
    DifferenceError,
    OutOfScopeError,
    decide_case,
    match,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MIN

_NEVER = {"idle_timeout": "never"}
_QUERY = "row numbers, top-n and other query operators (semantics.md section 8)"
_PER_KEY = (
    "sessions that only a later row of their key closes are per-key frontiers (semantics.md"
    " section 8)"
)
_JOIN = "joins (semantics.md section 8)"
_NO_WINDOW = "queries without event-time windows (semantics.md section 8)"
_ROWS_PER_EPOCH = 500  # nothing depends on the cut in these cases; fewer epochs are faster


def _pipeline(
    lag: int,
    window: Mapping[str, Any] | None,
    columns: Mapping[str, str] = COLUMNS,
    mode: str = "pass_through",
) -> PipelineSpec:
    source = {
        "path": "x",
        "schema": dict(columns),
        "event_time": "t",
        "lag": lag,
        "coalesce": _NEVER,
    }
    return PipelineSpec.model_validate(
        {
            "name": "case",
            "sources": {"events": source},
            "coalesce": _NEVER,
            "release": {"mode": mode},
            "windows": {} if window is None else {WINDOW: dict(window)},
        }
    )


_SECOND = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _ticks(text: str) -> int:
    """A time of day in the suite, which means UTC."""
    try:
        return (datetime.fromisoformat(text).replace(tzinfo=UTC) - _EPOCH) // timedelta(
            microseconds=1
        )
    except (TypeError, ValueError):
        raise MalformedCaseError(f"{text!r} is no time") from None


# RisingWave: durations are seconds, times are read as they are


def risingwave_eowc(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """One flush is one epoch; rows below the watermark are filtered out on arrival."""
    return decide_case(case["id"], lambda: _risingwave(case, engine))


def _risingwave(case: Mapping[str, Any], engine: str) -> None:
    emit = case.get("emit", "")
    if emit.startswith("row_number"):
        raise OutOfScopeError(_QUERY)
    if emit.startswith("per row"):
        raise OutOfScopeError(_PER_KEY)
    if emit and "window" in case:
        raise UnknownFeatureError(f"the adapter does not know emit {emit!r}")
    on = bench(_risingwave_pipeline(case), engine)
    total: list[dict[str, Any]] = []
    for number, step in enumerate(case["steps"]):
        if step["op"] == "insert":
            rows = [
                {"t": _ticks(r["time"]), "value": r["value"], "key": str(r.get("key"))}
                for r in step["rows"]
            ]
            _add(case, on.epoch({"events": rows}), total)
            continue
        wanted = [{"row": [_ticks(r[0]), *map(str, r[1:])]} for r in step["rows"]]
        match(f"step {number}", wanted, total)


def _risingwave_pipeline(case: Mapping[str, Any]) -> PipelineSpec:
    delay = case.get("watermark_delay_s")
    lag = (delay or 0) * _SECOND
    if "window" not in case:
        return _pipeline(lag, None, mode="commit")
    shape = case["window"]
    lengths = {"tumbling": ("size",), "sliding": ("size", "slide"), "session": ("gap",)}[
        shape["kind"]
    ]
    window: dict[str, Any] = {
        "kind": shape["kind"],
        **{name: shape[f"{name}_s"] * _SECOND for name in lengths},
    }
    if (
        shape.get("slide_s", shape.get("size_s")) != shape.get("size_s")
        and shape["kind"] == "tumbling"
    ):
        raise UnknownFeatureError(
            "the adapter does not know a tumbling window whose slide is not its size"
        )
    if (
        re.fullmatch(r"(sum|count|min|max|avg)\(value\)|count\(\*\)", case.get("aggregate", ""))
        is None
    ):
        raise UnknownFeatureError(
            f"the adapter does not know the aggregate {case.get('aggregate')!r}"
        )
    window["aggregates"] = {"value": case["aggregate"]}
    if _keyed(case):
        window["keys"] = ["key"]
    # Without a watermark the total so far is wanted: every window, as it is now.
    window |= {"emit": "complete", "lateness": "never"} if delay is None else {"late_unit": "event"}
    return _pipeline(lag, window)


def _keyed(case: Mapping[str, Any]) -> bool:
    """Expected rows are (start, value), or (start, key, value)."""
    widths = {
        len(row) for step in case["steps"] if step["op"] == "expect_total" for row in step["rows"]
    }
    if widths - {2, 3} or len(widths) > 1:
        raise UnknownFeatureError(
            f"the adapter does not know result rows of {sorted(widths)} columns"
        )
    return widths == {3}


def _add(case: Mapping[str, Any], play: Play, total: list[dict[str, Any]]) -> None:
    if "window" not in case:
        total += [{"row": [r["t"], str(r["value"])]} for r in play.events]
        return
    if "watermark_delay_s" not in case:
        total.clear()
    for r in play.windows[WINDOW]:
        keys = [r["key"]] if "key" in r else []
        total.append({"row": [r["window_start"], *keys, str(r["value"])]})


# Arroyo: one unit is one millisecond

_ARROYO_COLUMNS = (
    "window_start",
    "window_end",
    "start",
    "end",
    "key",
    "event_type",
    "count",
    "min",
    "max",
)
_ARROYO_AGGREGATES = ("count(*)", "count, min, max of counter")
_ARROYO_KEYS = {"cars": "event_type", "impulse": "0 if counter % 10 == 0 else counter"}


def arroyo(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """All of the input, then its end."""
    return decide_case(case["id"], lambda: _arroyo(header, case, engine))


def _arroyo(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> None:
    aggregate = case["aggregate"]
    if "join" in case["id"] or "join" in aggregate:
        raise OutOfScopeError(_JOIN)
    if "most_active" in case["id"] or "keep the row" in aggregate:
        raise OutOfScopeError(_QUERY)
    key = case.get("key")
    strange = [f"column {c!r}" for c in case["columns"] if c not in _ARROYO_COLUMNS]
    strange += [f"aggregate {aggregate!r}"] if aggregate not in _ARROYO_AGGREGATES else []
    strange += [f"key {key!r}"] if key not in (None, _ARROYO_KEYS[case["input"]]) else []
    if strange:
        raise UnknownFeatureError(f"the adapter does not know the {strange[0]}")
    if case["input"] not in header.get("inputs", {}):
        raise MalformedCaseError(f"the file's 'inputs' have no {case['input']!r}")
    rows = _cars(header) if case["input"] == "cars" else _impulse(header["inputs"]["impulse"])
    window = {
        **case["window"],
        "aggregates": {"count": "count(*)", "min": "min(value)", "max": "max(value)"},
    }
    if window["kind"] == "session":
        window |= {"session_touch": "separate"}
    if key is not None:
        window["keys"] = ["key"]
    given = _run(_pipeline(_arroyo_lag(case.get("watermark")), window), rows, engine)
    wanted = [{"row": [str(v) for v in row]} for row in case["rows"]]
    match("rows", wanted, [{"row": [str(_named(r, c)) for c in case["columns"]]} for r in given])


def _arroyo_lag(text: str | None) -> int:
    """The delay that the words of a case name; without any it is the suite's own, 0."""
    if text is None:
        return 0
    found = re.search(r"delay (\d+)", text)
    if found is None:
        raise UnknownFeatureError(f"the adapter does not know the watermark {text!r}")
    return int(found[1])


def _named(result: Mapping[str, Any], column: str) -> Any:
    names = {"start": "window_start", "end": "window_end", "event_type": "key"}
    return result[names.get(column, column)]


def _cars(header: Mapping[str, Any]) -> list[dict[str, Any]]:
    path = Path(header["folder"]) / "data" / header["inputs"]["cars"].split()[0]
    with gzip.open(path, "rt", newline="") as file:
        return [
            {"t": int(r["event_time_ms"]), "key": r["event_type"], "value": 1}
            for r in csv.DictReader(file)
        ]


def _impulse(impulse: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "t": impulse["first_ts"] + n * impulse["step_ms"],
            "key": str(0 if n % 10 == 0 else n),
            "value": n,
        }
        for n in range(impulse["n"])
    ]


def _run(
    spec: PipelineSpec, rows: Sequence[Mapping[str, Any]], engine: str
) -> list[dict[str, Any]]:
    """All rows, then the end of the input; every row must count."""
    on = bench(spec, engine)
    plays = [
        on.epoch({"events": rows[n : n + _ROWS_PER_EPOCH]})
        for n in range(0, len(rows), _ROWS_PER_EPOCH)
    ]
    plays.append(on.epoch({}, end={"events"}))
    late = [r for play in plays for r in play.late]
    if late:
        raise DifferenceError(f"{len(late)} rows were late, the first at {late[0]['t']}")
    return [r for play in plays for r in play.windows[WINDOW]]


# Nexmark: bids of 26 seconds, one unit is one millisecond

_RANKS = ((TICK_MIN, 10_000), (10_000, 1_000_000), (1_000_000, 2**62))
_BID_COLUMNS = {
    "t": "timestamp",
    "auction": "long",
    "price": "long",
    "best": "string",
    "bidder": "long",
    **{f"{what}{n}": "long" for what in ("price", "bidder", "auction") for n in (1, 2, 3)},
}


def nexmark_small(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """Queries 7, 15 and 17 are event-time windows over bids."""
    return decide_case(case["id"], lambda: _nexmark(header, case, engine))


def _nexmark(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> None:
    query = case["id"].removeprefix("nexmark.")
    if query in ("q5", "q18", "q19"):
        raise OutOfScopeError(_QUERY)
    if query in ("q8",):
        raise OutOfScopeError(_JOIN)
    if query in _WITHOUT_WINDOWS:
        raise OutOfScopeError(_NO_WINDOW)
    if query not in _NEXMARK:
        raise UnknownFeatureError(f"the adapter does not know the query {query!r}")
    window, shown = _NEXMARK[query]
    bids = header["tables"]["bid"]
    rows = [_bid(dict(zip(bids["columns"], row, strict=True))) for row in bids["rows"]]
    given = [shown(r) for r in _run(_pipeline(0, window, _BID_COLUMNS), rows, engine)]
    wanted = [{"row": [_number(v) for v in row.split()]} for row in case["rows"]]
    match("rows", wanted, [{"row": [_number(v) for v in row]} for row in given])


def _number(value: Any) -> Any:
    """Numbers to 12 digits: the suite prints decimals, we give doubles."""
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return value


def _bid(bid: Mapping[str, Any]) -> dict[str, Any]:
    """A bid with the expressions of the queries as columns.

    The engine `oracle` aggregates plain columns.
    """
    row = {name: bid[name] for name in ("auction", "price", "bidder")}
    best = f"{bid['price']:012d} {bid['auction']} {bid['bidder']} {bid['date_time']}"
    row |= {"t": _ticks(bid["date_time"]) // 1000, "best": best}
    for n, (low, high) in enumerate(_RANKS, 1):
        inside = low <= bid["price"] < high
        row |= {
            f"{what}{n}": bid[what] if inside else None for what in ("price", "bidder", "auction")
        }
    return row


_DAY = {"kind": "tumbling", "size": 86_400_000}
_COUNTS = {"bids": "count(*)", **{f"bids{n}": f"count(price{n})" for n in (1, 2, 3)}}
_Q15 = {
    **_COUNTS,
    **{
        f"{what}s{n}": f"distinct({what}{n})"
        for what in ("bidder", "auction")
        for n in ("", 1, 2, 3)
    },
}
_Q17 = {
    **_COUNTS,
    "low": "min(price)",
    "high": "max(price)",
    "mean": "avg(price)",
    "total": "sum(price)",
}


def _day(result: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(result["window_start"] / 1000, UTC).date().isoformat()


def _best(result: Mapping[str, Any]) -> list[str]:
    price, auction, bidder, *time = result["best"].split()
    return [auction, str(int(price)), bidder, *time]


_WITHOUT_WINDOWS = {
    f"q{n}" for n in (0, 1, 2, 3, 4, 6, 9, 10, 13, 14, 20, 21, 22, *range(101, 107))
}

_NEXMARK: Mapping[str, Any] = {
    "q7": ({"kind": "tumbling", "size": 10_000, "aggregates": {"best": "max(best)"}}, _best),
    "q15": ({**_DAY, "aggregates": _Q15}, lambda r: [_day(r), *(r[name] for name in _Q15)]),
    "q17": (
        {**_DAY, "keys": ["auction"], "aggregates": _Q17},
        lambda r: [r["auction"], _day(r), *(r[name] for name in _Q17)],
    ),
}

SUITES = {"risingwave_eowc": risingwave_eowc, "arroyo": arroyo, "nexmark_small": nexmark_small}
