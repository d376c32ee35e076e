"""What a case runs is what a driver runs, and what it expects is compared with every row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cases.shop import (
    EXPECTED,
    JSON,
    ON_TIME,
    RETURNS,
    ROWS,
    check_case,
    make_spec,
    write_case,
)
from tidegate.errors import ConfigurationError
from tidegate.jobs.cases.case_check import open_runner
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.window_specs import WindowSpec

PAGE = Path(__file__).parents[2] / "docs" / "pipeline-tests.md"
PRESETS = Path(__file__).parents[2] / "docs" / "examples" / "presets"
END = "  - wait: 40s\n  - end\n"
PATH = "path: s3://shop/orders/"
SOURCES = {
    "json": JSON,
    "milliseconds": f"{JSON}\n    parse: {{timestamps: ms}}",
    "csv": f"{PATH}\n    format: csv\n    parse: {{delimiter: ';', header: false, 'null': '-'}}",
    "parquet": PATH,
    "topic": "kind: kafka\n    kafka: {servers: 'none:1', topic: t}",
}


@pytest.mark.parametrize("source", SOURCES)
def test_rows_reach_every_kind_of_source(tmp_path: Path, source: str) -> None:
    """As text, as Parquet, or instead of a topic; their address is never opened."""
    path = write_case(tmp_path, ON_TIME, "  - end\n", EXPECTED)
    assert check_case(path, make_spec(SOURCES[source])).problems == []


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_restart_changes_nothing(tmp_path: Path, place: int) -> None:
    """Between rows, before and after a silence."""
    steps = [*re.split(r"(?=  - rows)", ON_TIME)[1:], *END.splitlines(keepends=True)]
    steps.insert(place, "  - restart\n")
    assert check_case(write_case(tmp_path, *steps, EXPECTED)).problems == []


def test_the_case_in_the_documents_passes(tmp_path: Path) -> None:
    """As it is printed there, and a wrong value is shown as it is printed there."""
    text = re.search(r"```yaml\n(description.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    case = tmp_path / "late.yaml"
    case.write_text(text[1])
    assert check_case(case).problems == []
    case.write_text(text[1].replace("orders: 2, amount: 4", "orders: 3, amount: 4"))
    (problem,) = check_case(case).problems
    shown = re.search(r"late\.yaml:18: (table per_minute.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    line = next(n for n, one in enumerate(text[1].splitlines(), 1) if "per_minute:" in one)
    expected = [row.strip() for row in shown[1].strip().splitlines()]
    assert [row.strip() for row in problem.splitlines()] == [
        f"{case}:{line}: {expected[0]}",
        *expected[1:],
    ]


def test_what_differs_is_named_with_its_line(tmp_path: Path) -> None:
    """Rows, counters, and errors that do not come."""
    path = write_case(
        tmp_path,
        "  - rows: {orders: [{placed: 2026-01-01T12:00:05Z, amount: 5}, {shop: '1'}]}\n",
        "  - end\n",
        "expect:\n  error: row.rule_failed\n  tables:\n",
        "    dead_letters: []\n    events:\n",
        "      - {placed: 2026-01-01T12:00:05Z, shop: null, amount: 5.0}\n",
        "  counters: {read: 3, dead_lettered: 1}\n",
    )
    problems = check_case(path).problems
    assert [one.splitlines()[0] for one in problems] == [
        f"{path}:1: the run was to end with row.rule_failed; it did not",
        f"{path}:8: table dead_letters: 1 not expected",
        f"{path}:11: counter read is 2; expected 3",
    ]
    assert problems[1].splitlines()[2].strip().startswith("+ no_event_time")


def test_an_error_can_be_expected(tmp_path: Path) -> None:
    """By its code; any other, and one that is not expected, fails the case."""
    spec = make_spec(f"{JSON}\n    on_bad: fail")
    rows = "  - rows: {orders: [{shop: a}]}\n"
    (problem,) = check_case(write_case(tmp_path, rows, "expect: {}\n"), spec).problems
    code = re.search(r"the run ended with ([\w.]+): ", problem)
    assert code is not None
    expected = f"expect: {{error: {code[1]}}}\n"
    assert check_case(write_case(tmp_path, rows, expected), spec).verdict == "passed"


def test_an_expected_value_has_to_fit(tmp_path: Path) -> None:
    """The types of aggregates are known when the case has run."""
    path = write_case(
        tmp_path, ROWS, "  - end\nexpect:\n  tables:\n    per_minute: [{orders: many}]\n"
    )
    result = check_case(path)
    assert result.verdict == "bad"
    assert result.problems[0] == f"{path}:15: orders: 'many' is not of type int64"


def test_files_partitions_punctuation_and_silences(tmp_path: Path) -> None:
    """Objects as they are, CSV beside the case, two partitions of which one is silent."""
    (tmp_path / "rows.csv").write_text("placed,shop\n2026-01-01T12:00:01Z,a\n")
    (tmp_path / "raw.jsonl").write_text(
        json.dumps({"placed": "2026-01-01T12:03:00Z", "shop": "b", "more": 1}) + "\n{broken\n"
    )
    path = write_case(
        tmp_path,
        "  - rows: {returns/eu: {file: rows.csv}, orders: {object: raw.jsonl}}\n",
        "  - rows: {returns/us: [{placed: 2026-01-01T12:02:30Z, shop: c}]}\n",
        "  - wait: 45s\n",
        "expect:\n  tables:\n    per_minute: [{window_start: 2026-01-01T12:00:00Z, shop: a}]\n",
        "  counters: {dead_lettered: 1, returns: {read: 2}}\n",
    )
    assert check_case(path, make_spec(more=RETURNS)).problems == []


def test_a_record_replaces_the_expectation_alone(tmp_path: Path) -> None:
    """It keeps the tables, columns and counters, and what is before and behind."""
    steps = "# why\n" + ROWS + END
    path = write_case(tmp_path, steps)
    assert "--record writes what happens" in check_case(path).problems[0]
    assert check_case(path, is_recorded=True).verdict == "recorded"
    first = path.read_text()
    assert "reason: late_window}" in first
    assert check_case(path).verdict == "passed"
    chosen = "expect:\n  tables:\n    per_minute:\n      - {orders: 9}\n  counters: {late: 0}\n"
    path = write_case(tmp_path, steps, chosen, "description: 'at the end'\n")
    check_case(path, is_recorded=True)
    counted = "      - {orders: 1}\n      - {orders: 2}\n  counters:\n    late: 1\n"
    expected = f"{steps}expect:\n  tables:\n    per_minute:\n{counted}description: 'at the end'\n"
    assert path.read_text().endswith(expected)


def test_a_pipeline_that_needs_spark_is_refused_with_the_reason() -> None:
    """Before anything runs."""
    spec = load_spec(PRESETS / "hazelcast.yaml")
    window = spec.windows["recent"].model_dump(mode="json")
    own = WindowSpec.model_validate({**window, "aggregates": {"top": "max(abs(celsius))"}})
    with (
        pytest.raises(
            ConfigurationError, match=r"need Spark: window recent: max\(abs\(celsius\)\)"
        ),
        open_runner(spec.model_copy(update={"windows": {"recent": own}})),
    ):
        pass


@pytest.mark.parametrize("preset", ["flink", "nscldaq", "pipet", "wire"])
def test_the_example_of_a_preset_is_a_case(preset: str) -> None:
    """With the results of a run on Spark; `tests/spec/test_preset_examples.py` compares those."""
    case = PRESETS / "cases" / preset / "input.yaml"
    assert check_case(case, load_spec(PRESETS / f"{preset}.yaml")).problems == []


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("preset", ["flink", "hazelcast"])
def test_the_same_cases_run_on_spark(preset: str) -> None:
    """Also of a pipeline that Python tasks cannot compute yet."""
    case = PRESETS / "cases" / preset / "input.yaml"
    with open_runner(load_spec(PRESETS / f"{preset}.yaml"), on_spark=True) as runner:
        assert runner.check_case(case).problems == []
