"""The shared window suites on the model and on decider plus mover, and the runner around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.runner import run
from tests.conformance.window_suites import SUITES
from tidegate.errors import ConfigurationError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "conformance"

CASE = {
    "id": "own.tumbling",
    "window": {"kind": "tumbling", "size": 10},
    "aggregate": "sum",
    "trigger": {"on": "watermark_passes_window_end", "panes": "accumulating"},
    "allowed_lateness": 0,
    "watermark_means": "lt",
    "steps": [
        {"op": "event", "key": "k", "value": 2, "ts": 3},
        {"op": "watermark", "ts": 10},
        {"op": "expect", "rows": [{"key": "k", "value": 2, "window": [0, 10]}]},
        {"op": "end_expect_nothing_more"},
    ],
}
WRONG = {**CASE, "id": "own.wrong", "steps": [*CASE["steps"][:2], {"op": "expect", "rows": []}]}  # type: ignore[index]
COUNTED = {**CASE, "id": "own.counted", "trigger": {"on": "count", "n": 2, "panes": "accumulating"}}


FEEDS = ("flink_watermark_generator", "hazelcast_barrier_merge", "hazelcast_source_watermark")
"""Suites without windows that whole epochs can play, and so the model as well."""


@pytest.mark.parametrize("engine", ["reference", "decider"])
@pytest.mark.parametrize("suite", sorted([*SUITES, *FEEDS]))
def test_shared_suite(suite: str, engine: str) -> None:
    """Every case of a shared suite passes, or is skipped with the reason that semantics.md section 8 gives."""
    file = SHARED / f"{suite}.json"
    if not file.exists():
        pytest.skip("../shared/conformance is not there: the shared suites were not run")
    report = run([file], engine)
    assert not report.failed, "\n".join(report.lines(skips=False))
    assert report.passed
    assert all(
        "section 8" in r.detail for f in report.files for r in f.results if r.outcome == "skipped"
    )


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A case file with one right case, one wrong and one out of scope."""
    file = tmp_path / "hazelcast_window.json"
    file.write_text(json.dumps({"suite": "own", "cases": [CASE, WRONG, COUNTED]}))
    return file


def test_a_wrong_case_is_named_with_its_first_differing_step(own_file: Path) -> None:
    """One line per failing and skipped case, then the sum; the first differing step is named."""
    failed, skipped, total = run([own_file], "reference").lines()
    assert failed.startswith("failed: hazelcast_window: own.wrong: step 2 (expect): not expected")
    assert skipped.startswith("skipped: hazelcast_window: own.counted: count triggers")
    assert total == "1 passed, 1 failed, 1 skipped"


def test_the_command_exits_with_one_if_a_case_failed(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 on failures, JSON on request, 2 for a file nobody knows."""
    assert main([str(own_file), "--engine", "reference", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert main([str(own_file.with_name("nobody.json"))]) == 2


def test_a_file_without_cases_is_refused(tmp_path: Path) -> None:
    """A file that is no case file is a configuration error that names it."""
    file = tmp_path / "beam.json"
    file.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"beam\.json"):
        run([file])


def test_an_engine_without_an_adapter_never_passes(tmp_path: Path) -> None:
    """A suite that only the decider can play is skipped with that reason on the model.

    An unknown engine is refused.
    """
    file = tmp_path / "flink_valve.json"
    file.write_text(json.dumps({"cases": [{"id": "own.valve"}]}))
    result = run([file], "reference").files[0].results[0]
    assert (result.outcome, "decider" in result.detail) == ("skipped", True)
    with pytest.raises(ConfigurationError, match="flink"):
        run([file], "flink")
