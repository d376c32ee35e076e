"""Spark Structured Streaming.

One micro-batch, with the batches without data that follow it, is one epoch.

Output modes: ``append`` is a window that is emitted when it closes, ``update`` shows what changed,
``complete`` shows everything and forgets nothing. A restarted query keeps the global watermark and
forgets every source's own: each source ends and a new one takes its place, which starts with a
watermark of 0, as all sources do there.
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
)
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.spec.pipeline import PipelineSpec

_NEVER = {"idle_timeout": "never"}
_NAMES = ("first", "second")
_EMIT = {"append": "close", "update": "each_epoch", "complete": "complete"}


def spark_watermark(header: Mapping[str, Any], case: Mapping[str, Any], engine: str) -> CaseResult:
    """One batch is one epoch."""
    return decide_case(case["id"], lambda: _case(case, engine))


def _case(case: Mapping[str, Any], engine: str) -> None:
    if "outer_window" in case:
        raise OutOfScopeError("windows of windows (semantics.md section 8)")
    if "window_join" in case["id"]:
        raise OutOfScopeError("joins (semantics.md section 8)")
    _known(case)
    if case.get("must_be_rejected"):
        _refused(case)
        return
    _Batches(case, bench(_pipeline(case), engine)).play()


_COLUMNS = {"window_start", "window_end", "start", "end", "duration", "key", "count"}


def _known(case: Mapping[str, Any]) -> None:
    strange = [c for c in case.get("columns", ()) if c not in _COLUMNS]
    if strange:
        raise UnknownFeatureError(f"the adapter does not know the column {strange[0]!r}")
    delays = case.get("watermark_delay", 0)
    if isinstance(delays, list) and len(delays) > len(_NAMES):
        raise UnknownFeatureError(f"the adapter does not know {len(delays)} sources")
    if (
        case.get("window", {}).get("kind") == "session"
        and case.get("mode") == "update"
        and not case.get("must_be_rejected")
    ):
        raise UnknownFeatureError(
            "the adapter does not know sessions whose updates do not say what they replace"
        )
    if "window" in case and "mode" not in case:
        raise MalformedCaseError("a case with a window has no 'mode'")
    if "window" in case and not case.get("must_be_rejected") and "columns" not in case:
        raise MalformedCaseError("a case with a window has no 'columns'")


def _refused(case: Mapping[str, Any]) -> None:
    try:
        _pipeline(case)
    except TidegateError:
        return
    raise DifferenceError("the pipeline was accepted")


def _pipeline(case: Mapping[str, Any]) -> PipelineSpec:
    delays = case.get("watermark_delay", 0)
    delays = delays if isinstance(delays, list) else [delays]
    lives = sum(step["op"] == "restart" for step in case["steps"]) + 1
    sources = {
        f"{name}-{life}": _source(delay)
        for life in range(lives)
        for name, delay in zip(_NAMES, delays, strict=False)
    }
    return PipelineSpec.model_validate(
        {
            "name": "case",
            "sources": sources,
            "coalesce": {
                **_NEVER,
                "coalesce": case.get("policy", "min"),
                "members": "discovered",
                "joins": "hold",
                "all_done": "hold",
            },
            "release": {"mode": "pass_through"},
            "windows": {WINDOW: _window(case)} if "window" in case else {},
        }
    )


def _source(delay: int) -> dict[str, Any]:
    return {
        "path": "x",
        "schema": COLUMNS,
        "event_time": "t",
        "lag": delay,
        "barriers": {"kind": "kind", "punctuation": "watermark"},
        "punctuation": {"explicit": True},
        "coalesce": _NEVER,
    }


def _window(case: Mapping[str, Any]) -> dict[str, Any]:
    window, mode = dict(case["window"]), case["mode"]
    if window["kind"] == "session":
        if mode == "update":
            raise ConfigurationError(
                "no option gives sessions whose updates do not say what they replace",
                code="conformance.no_mapping",
            )
        # Sessions that touch merge in Spark, whether a case says so or not.
        window |= {
            "session_touch": case.get("touching_sessions", "merge"),
            "session_late": "own",
            "session_close": "at_end",
        }
    if "key" in case["columns"]:
        window["keys"] = ["key"]
    lateness = {"lateness": "never"} if mode == "complete" else {}
    return {**window, "aggregates": {"count": "count(*)"}, "emit": _EMIT[mode], **lateness}


def _events(where: str, step: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    events: Sequence[Mapping[str, Any]] = step.get("events") or [
        {"ts": t} for t in step.get("ts", ())
    ]
    for event in events:
        strange = sorted(event.keys() - {"ts", "key"})
        if strange:
            raise UnknownFeatureError(
                f"{where}: the adapter does not know the column {strange[0]!r}"
            )
    return events


class _Batches:
    """A case in steps."""

    def __init__(self, case: Mapping[str, Any], engine: Bench) -> None:
        self.case = case
        self.engine = engine
        self.given: list[list[Any]] = []
        self.since_clear: list[list[Any]] = []
        self.last: Play | None = None
        self.names = (
            _NAMES[: len(case["watermark_delay"])]
            if isinstance(case.get("watermark_delay"), list)
            else _NAMES[:1]
        )
        self.life = 0
        self.start()

    def start(self) -> None:
        """Every source of this life starts with a watermark of 0."""
        self.engine.epoch(
            {f"{name}-{self.life}": [{"t": 0, "kind": "watermark"}] for name in self.names}
        )

    def restart(self) -> None:
        self.engine.restore()
        self.engine.epoch({}, end={f"{name}-{self.life}" for name in self.names})
        self.life += 1
        self.start()

    def play(self) -> None:
        for number, step in enumerate(self.case["steps"]):
            self.step(f"step {number} ({step['op']})", step)

    def step(self, where: str, step: Mapping[str, Any]) -> None:
        match step["op"]:
            case "batch":
                self.batch({"first": _events(where, step)})
            case "batches":
                self.batch({name: [{"ts": t} for t in step[name]] for name in _NAMES})
                if "then_watermark" in step:
                    self.check(where, "watermark", step["then_watermark"], self.watermark)
            case "expect_watermark":
                self.check(where, "watermark", step["value"], self.watermark)
            case "expect_new":
                self.rows(where, step["rows"], self.given)
            case "expect_all_since_clear":
                self.rows(where, step["rows"], self.since_clear, keep=True)
            case "restart":
                self.restart()
                self.given.clear()
                if "sink was cleared" in step.get("note", ""):
                    self.since_clear.clear()
            case "note":
                pass
            case _:
                self.metrics(where, step)

    def batch(self, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        sources = {
            f"{name}-{self.life}": [{"t": r["ts"], "key": r.get("key")} for r in given]
            for name, given in rows.items()
        }
        self.last = self.engine.epoch(sources)
        shown = [self.shown(r) for r in self.last.windows.get(WINDOW, ())]
        self.given += shown
        self.since_clear += shown

    def shown(self, result: Mapping[str, Any]) -> list[Any]:
        start, end = result["window_start"], result["window_end"]
        names = {"window_start": start, "start": start, "end": end, "duration": end - start}
        return [names.get(c, result.get(c)) for c in self.case["columns"]]

    def rows(
        self, where: str, expected: Sequence[Any], given: list[list[Any]], *, keep: bool = False
    ) -> None:
        match(where, [{"row": row} for row in expected], [{"row": row} for row in given])
        if not keep:
            given.clear()

    def metrics(self, where: str, step: Mapping[str, Any]) -> None:
        """Numbers about a batch.

        Sizes of Spark's own state and its event time statistics have no counterpart.
        """
        if "dropped_by_watermark" in step:
            late = [r for r in self.last.late if r["output"] == WINDOW] if self.last else []
            self.check(where, "dropped", step["dropped_by_watermark"], len(late))
        if "watermark_before_batch" in step and self.last:
            self.check(
                where, "watermark before", step["watermark_before_batch"], max(0, self.last.before)
            )

    @property
    def watermark(self) -> int:
        return max(0, self.last.after) if self.last else 0

    def check(self, where: str, what: str, expected: int, given: int) -> None:
        if expected != given:
            raise DifferenceError(f"{where}: {what} {expected} expected, got {given}")


SUITES = {"spark_watermark": spark_watermark}
