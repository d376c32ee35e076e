"""The suites of `cases/` on the model and on decider plus mover, and the runner around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.runner import ON_PARTS, run
from tests.conformance.window_cases import CASE, COUNTED, WRONG
from tests.conformance.window_suites import SUITES
from tidegate.errors import ConfigurationError

CASES = Path(__file__).parent / "cases"


FEEDS = ("flink_watermark_generator", "hazelcast_barrier_merge", "hazelcast_source_watermark")
"""Suites without windows that whole epochs can play, and so the model as well."""


@pytest.mark.parametrize("engine", ["oracle", "decider"])
@pytest.mark.parametrize("suite", sorted([*SUITES, *FEEDS]))
def test_suite_passes(suite: str, engine: str) -> None:
    """Every case passes, or is skipped with the reason that docs/semantics.md, section 8, gives."""
    report = run([CASES / f"{suite}.json"], engine)
    assert not report.failed, "\n".join(report.lines(skips=False))
    assert report.passed
    assert all(
        "section 8" in r.detail for f in report.files for r in f.results if r.outcome == "skipped"
    )


@pytest.mark.parametrize("suite", sorted(ON_PARTS))
def test_suite_on_parts_passes(suite: str) -> None:
    """Every case whose steps are signals to one part of the decider passes on that part."""
    report = run([CASES / f"{suite}.json"])
    assert not report.failed, "\n".join(report.lines(skips=False))
    assert report.passed


def test_every_case_file_is_described() -> None:
    """Each file of cases states suite, origin and licence, and has its line in the README."""
    readme = (CASES / "README.md").read_text()
    for file in CASES.glob("*.json"):
        header = json.loads(file.read_text())
        assert header["suite"]
        assert f"| `{file.name}` |" in readme
        assert header["origin"] in readme
        assert header["licence"] in readme


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A case file with one right case, one wrong and one out of scope."""
    file = tmp_path / "hazelcast_window.json"
    file.write_text(json.dumps({"suite": "own", "cases": [CASE, WRONG, COUNTED]}))
    return file


def test_a_wrong_case_is_named_with_its_first_differing_step(own_file: Path) -> None:
    """One line per failing and skipped case, then the sum; the first differing step is named."""
    failed, skipped, total = run([own_file], "oracle").lines()
    assert failed.startswith("failed: hazelcast_window: own.wrong: step 2 (expect): not expected")
    assert skipped.startswith("skipped: hazelcast_window: own.counted: count triggers")
    assert total == "1 passed, 1 failed, 1 skipped"


def test_the_command_exits_with_one_if_a_case_failed(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 on failures, JSON on request, 2 for a file no one knows."""
    assert main([str(own_file), "--engine", "oracle", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert main([str(own_file.with_name("nobody.json"))]) == 2


def test_unknown_suite_lists_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When no file has an adapter, the error names the suites that have one."""
    (tmp_path / "odd.json").write_text('{"cases": []}')
    assert main([str(tmp_path / "odd.json")]) == 2
    assert "flink_valve" in capsys.readouterr().err


def test_a_file_without_cases_is_refused(tmp_path: Path) -> None:
    """A file that is not a case file is a configuration error that names it."""
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
    result = run([file], "oracle").files[0].results[0]
    assert (result.outcome, "decider" in result.detail) == ("skipped", True)
    with pytest.raises(ConfigurationError, match="flink"):
        run([file], "flink")
