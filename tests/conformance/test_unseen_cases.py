"""Cases as no shared suite has them: other numbers, other words, broken files.

Nothing may crash, and nothing may pass unread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.__main__ import main
from tests.conformance.result import CaseResult
from tests.conformance.runner import run, suites
from tests.conformance.vocabulary import KNOWN
from tests.conformance.window_cases import CASE

STEPS: list[dict[str, Any]] = CASE["steps"]  # type: ignore[assignment]


def event(ts: Any, value: Any = 1, key: Any = "k", **more: Any) -> dict[str, Any]:
    """One event of a window suite."""
    return {"op": "event", "key": key, "value": value, "ts": ts, **more}


def watermark(ts: int) -> dict[str, Any]:
    """One watermark."""
    return {"op": "watermark", "ts": ts}


def expect(*rows: tuple[Any, Any, list[int]]) -> dict[str, Any]:
    """The results since the last time."""
    return {"op": "expect", "rows": [{"key": k, "value": v, "window": w} for k, v, w in rows]}


def play(
    tmp_path: Path, suite: str, case: dict[str, Any], engine: str = "decider", **header: Any
) -> CaseResult:
    """The result of one case in a file of its own."""
    file = tmp_path / f"{suite}.json"
    file.write_text(json.dumps({"cases": [{"id": "own", **case}], **header}))
    return run([file], engine).files[0].results[0]


def own(**changes: Any) -> dict[str, Any]:
    """The own case of the window suites, changed."""
    return {**CASE, **changes}


TUMBLING = {"kind": "tumbling", "size": 10}
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "negative times and an offset": (
        "hazelcast_window",
        own(
            window={"kind": "tumbling", "size": 7, "offset": 3},
            steps=[
                event(-1),
                event(-5),
                event(2),
                event(3),
                watermark(3),
                expect(("k", 2, [-4, 3]), ("k", 1, [-11, -4])),
            ],
        ),
    ),
    "keys that are numbers or null": (
        "hazelcast_window",
        own(
            steps=[
                event(1, key=5),
                event(2, key=None),
                event(3, key=5),
                watermark(10),
                expect((5, 2, [0, 10]), (None, 1, [0, 10])),
            ]
        ),
    ),
    "values with a fraction": (
        "hazelcast_window",
        own(steps=[event(1, 0.5), event(2, 0.25), watermark(10), expect(("k", 0.75, [0, 10]))]),
    ),
    "only null values": (
        "hazelcast_window",
        own(steps=[event(1, None), watermark(10), expect(("k", None, [0, 10]))]),
    ),
    "gaps between sliding windows": (
        "hazelcast_window",
        own(
            window={"kind": "sliding", "size": 10, "slide": 15},
            steps=[
                event(1, 4),
                event(12, 2),
                event(16, 7),
                watermark(100),
                expect(("k", 4, [0, 10]), ("k", 7, [15, 25])),
            ],
        ),
    ),
    "the ends of time": (
        "hazelcast_window",
        own(
            steps=[
                event(2**63 - 1),
                event(-(2**63)),
                {"op": "end_of_input"},
                expect(("k", 1, [2**63 - 8, 2**63 - 1]), ("k", 1, [-(2**63), -(2**63) + 8])),
            ]
        ),
    ),
    "touching sessions as the case says": (
        "hazelcast_window",
        own(
            window={"kind": "session", "gap": 10},
            touching_sessions="merge",
            steps=[event(0), event(10), watermark(30), expect(("k", 2, [0, 20]))],
        ),
    ),
    "an offset in Beam's words": (
        "beam",
        {
            "window": {**TUMBLING, "offset": 5},
            "trigger": "Default",
            "panes": "accumulating",
            "allowed_lateness": 0,
            "steps": [
                {"op": "events", "ts": [1, 6]},
                {"op": "watermark", "ts": 20},
                {
                    "op": "expect",
                    "rows": [
                        {"window": [-5, 5], "values": [1]},
                        {"window": [5, 15], "values": [6]},
                    ],
                },
            ],
        },
    ),
    "a sum in Kafka's words": (
        "kafka_streams",
        {
            "window": TUMBLING,
            "grace": 5,
            "aggregate": "sum",
            "events": [
                {"key": "a", "ts": t, "value": v}
                for t, v in ((1, 3), (12, 4), (2, 5), (15, 1), (3, 9))
            ],
            "final": [{"key": "a", "window": [0, 10], "value": 8}],
            "dropped": [4],
        },
    ),
    "three inputs and a barrier of number 0": (
        "hazelcast_barrier_merge",
        {
            "inputs": 3,
            "guarantee": "exactly_once",
            "steps": [
                {"op": "add", "queue": 0, "items": [{"barrier": 0}, 5]},
                {"op": "add", "queue": 2, "items": [3, {"barrier": 0}]},
                {"op": "add", "queue": 1, "items": [{"barrier": 0}, "end"]},
                {"op": "drain", "out": [3, {"barrier": 0}, 5]},
            ],
        },
    ),
    "a frame below zero": (
        "hazelcast_source_watermark",
        {
            "config": {"lag": 3, "frame": 5, "idle_timeout": 0, "partitions": 1},
            "events": [-7, -1, 0],
            "out": [
                {"watermark": -10},
                {"event": -7},
                {"watermark": -5},
                {"event": -1},
                {"event": 0},
            ],
        },
    ),
    "times with a fraction before 1970": (
        "risingwave_eowc",
        {
            "window": {"kind": "sliding", "size_s": 20, "slide_s": 10},
            "watermark_delay_s": 5,
            "aggregate": "count(*)",
            "steps": [
                {"op": "insert", "rows": [{"time": "1969-12-31 23:59:50.5", "value": 1}]},
                {"op": "insert", "rows": [{"time": "1970-01-01 00:01:00", "value": 1}]},
                {
                    "op": "expect_total",
                    "rows": [["1969-12-31 23:59:40", 1], ["1969-12-31 23:59:50", 1]],
                },
            ],
        },
    ),
}


@pytest.mark.parametrize("engine", ["oracle", "decider"])
@pytest.mark.parametrize("what", sorted(GOOD))
def test_other_numbers_pass(what: str, engine: str, tmp_path: Path) -> None:
    """A right case with numbers that no shared case has passes on every engine."""
    result = play(tmp_path, *GOOD[what], engine)
    assert result.outcome == "passed", result.detail


UNKNOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "field": ("hazelcast_window", own(early_firings=3), "early_firings"),
    "kind of window": (
        "hazelcast_window",
        own(window={"kind": "cumulative", "size": 10}),
        "cumulative",
    ),
    "field of a window": ("hazelcast_window", own(window={**TUMBLING, "jitter": 1}), "jitter"),
    "aggregate": ("hazelcast_window", own(aggregate="median"), "median"),
    "panes": (
        "hazelcast_window",
        own(trigger={"on": "watermark_passes_window_end", "panes": "retracting"}),
        "retracting",
    ),
    "step": (
        "hazelcast_window",
        own(steps=[{"op": "advance_processing_time", "to": 4}]),
        "advance_processing_time",
    ),
    "field of a step": ("hazelcast_window", own(steps=[event(1, weight=3)]), "weight"),
    "column": (
        "hazelcast_window",
        own(
            steps=[
                *STEPS[:2],
                {"op": "expect", "rows": [{"key": "k", "value": 2, "window": [0, 10], "pane": 0}]},
            ]
        ),
        "pane",
    ),
    "size of a number": ("hazelcast_window", own(steps=[event(2**70)]), "64-bit"),
    "number of sources": (
        "spark_watermark",
        {"watermark_delay": [1, 2, 3], "policy": "min", "steps": []},
        "3 sources",
    ),
    "key": (
        "arroyo",
        {
            "input": "cars",
            "key": "driver_id",
            "window": TUMBLING,
            "aggregate": "count(*)",
            "columns": ["count"],
            "rows": [],
        },
        "driver_id",
    ),
    "operation": (
        "flink_valve",
        {"inputs": 2, "steps": [{"op": "reconfigure", "input": 0}]},
        "reconfigure",
    ),
    "fact": (
        "flink_barrier_alignment",
        {"channels": 2, "steps": [], "final": {"buffered_bytes": 4}},
        "buffered_bytes",
    ),
    "query": ("nexmark_small", {"id": "nexmark.q11", "rows": []}, "q11"),
}


@pytest.mark.parametrize("what", sorted(UNKNOWN))
def test_what_an_adapter_does_not_know_is_skipped_by_name(what: str, tmp_path: Path) -> None:
    """Leaving something out silently would compare something else."""
    suite, case, word = UNKNOWN[what]
    result = play(tmp_path, suite, case)
    assert (result.outcome, word in result.detail) == ("skipped", True), result


MALFORMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no steps": ("hazelcast_window", {k: v for k, v in CASE.items() if k != "steps"}, "no 'steps'"),
    "steps are no list": ("hazelcast_window", own(steps={}), "'steps' is no list"),
    "a step is a number": ("hazelcast_window", own(steps=[3]), "step 0"),
    "a time is text": ("hazelcast_window", own(steps=[event("noon")]), "'ts' is 'noon'"),
    "a time is null": ("hazelcast_window", own(steps=[event(None)]), "'ts' is None"),
    "a value is text": ("hazelcast_window", own(steps=[event(1, "text")]), "'text' is no number"),
    "no window": ("hazelcast_window", own(window=None), "the window"),
    "a window without a size": ("hazelcast_window", own(window={"kind": "tumbling"}), "no 'size'"),
    "a row is a number": (
        "hazelcast_window",
        own(steps=[{"op": "expect", "rows": [3]}]),
        "3 is no row",
    ),
    "an input that is not there": (
        "flink_valve",
        {"inputs": 1, "steps": [{"op": "idle", "input": 7}]},
        "no input '7'",
    ),
    "a time that is none": (
        "risingwave_eowc",
        {
            "window": {"kind": "tumbling", "size_s": 10},
            "aggregate": "sum(value)",
            "steps": [{"op": "insert", "rows": [{"time": "soon"}]}],
        },
        "'soon' is no time",
    ),
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
def test_a_malformed_case_fails_in_one_clear_line(what: str, tmp_path: Path) -> None:
    """It says what is wrong and where, without the name of an exception."""
    suite, case, words = MALFORMED[what]
    result = play(tmp_path, suite, case)
    assert result.outcome == "failed"
    assert result.detail.startswith("malformed: ")
    assert words in result.detail
    assert "\n" not in result.detail


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"cases": 3}', '{"cases": [3]}', "\xff", "[" * 200_000]
)
def test_a_broken_file_is_one_clear_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, nothing is run, and no traceback is shown."""
    file = tmp_path / "beam.json"
    file.write_bytes(text.encode("latin-1"))
    assert main([str(file)]) == 2
    error = capsys.readouterr().err
    assert "beam.json" in error.splitlines()[0]
    assert "Traceback" not in error


def test_more_cases_of_a_suite_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The beginning of a file's name is the suite."""
    file = tmp_path / "hazelcast_window_more.json"
    file.write_text(json.dumps({"cases": [CASE]}))
    assert run([file]).passed == 1


def test_what_is_not_compared_is_named(tmp_path: Path) -> None:
    """A case is not skipped for a figure that tidegate does not have, but the result says so."""
    step = {"op": "expect_metrics", "state_rows": 2}
    result = play(
        tmp_path,
        "spark_watermark",
        {"watermark_delay": 1, "steps": [{"op": "batch", "ts": [1]}, step]},
    )
    assert (result.outcome, result.detail) == ("passed", "not compared: state_rows")


def test_every_suite_has_a_vocabulary() -> None:
    """No adapter without the words it knows."""
    assert KNOWN.keys() == suites().keys()


def test_an_unknown_suite_is_skipped_by_name(tmp_path: Path) -> None:
    """Its cases are listed, and the other files are played."""
    strange, known = tmp_path / "samza.json", tmp_path / "hazelcast_window.json"
    strange.write_text(json.dumps({"cases": [{"id": "own.samza"}]}))
    known.write_text(
        json.dumps({"cases": [CASE], "further_cases": [{**CASE, "id": "own.further"}]})
    )
    report = run([strange, known])
    assert list(report.lines()) == [
        (
            "skipped: samza: own.samza: no adapter for a suite of this name: the beginning of the"
            " file's name is the suite"
        ),
        "2 passed, 0 failed, 1 skipped",
    ]
