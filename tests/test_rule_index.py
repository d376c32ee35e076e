"""docs/rules.md names every rule and the tests that prove it: neither may be missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidegate.jobs.spec.event_time_options import (
    BarrierOptions,
    CoalesceOptions,
    FrontierOptions,
    OrderOptions,
    PunctuationOptions,
)
from tidegate.jobs.spec.window_specs import WindowSpec

TESTS = Path(__file__).parent
INDEX = TESTS.parent / "docs" / "rules.md"
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in INDEX.read_text().splitlines()
    if line.startswith("| ")
][1:]
LABELS = {row[0] for row in ROWS}
SECTIONS = {
    *(f"3.{n}" for n in range(1, 9)),
    *(f"4.{n}" for n in range(1, 5)),
    "5",
    *(f"6.{n}" for n in range(1, 9)),
    "8",
    *(f"9.{n}" for n in range(1, 11)),
}
# Options that the index lists under another name, or that say nothing about event time.
OTHER_NAMES = {
    "mode": "1 epoch", "glom": "3.8", "max_buffered_rows": None, "max_ahead": None, "wall_clock": "2 wall_clock.cap",
    "identity": "2 barrier_identity", "timeout": "2 barrier_timeout", "on_timeout": "2 barrier_timeout",
    "overtake": "2 barrier_overtake", "punctuation": "4.1", "explicit": "4.1", "every_events": "2 punctuation.every",
    "every_span": "2 punctuation.every", "delay": "4.2", "align": "2 punctuation.align", "import_from": "2 punctuation.import",
    "regress": "2 punctuation.regress", "on_violation": "4.1", "advance_to_end": "4.2", "kind": "5", "size": "5", "slide": "5",
    "gap": "5", "offset": "5", "keys": "5", "aggregates": "5", "lateness": "2 allowed_lateness", "zero_rows": "5",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_tests_of_a_rule_exist(row: list[str]) -> None:
    """Each test that the index names is in its file, and a property's docstring says which one
    it is.
    """
    named = row[2].split()
    assert named, f"rule {row[0]} has no test"
    for name in named:
        file, _, function = name.removeprefix("tests/").partition("::")
        file = re.sub(r"^reference/", "oracle/", file)  # the folder's old name
        found = re.search(rf'def {function}\(.*?"""(.*?)"""', (TESTS / file).read_text(), re.DOTALL)
        assert found is not None, f"{name} does not exist"
        if row[0].startswith("9."):
            assert f"Property {row[0][2:]}" in found[1], f"{name} does not say which property it is"


def test_no_rule_is_left_out() -> None:
    """Every numbered rule and every option of a spec is in the index."""
    assert SECTIONS <= LABELS, SECTIONS - LABELS
    models = (
        BarrierOptions,
        CoalesceOptions,
        FrontierOptions,
        OrderOptions,
        PunctuationOptions,
        WindowSpec,
    )
    options = {name for model in models for name in model.model_fields}
    missing = {
        name for name in options if OTHER_NAMES.get(name, f"2 {name}") not in {*LABELS, None}
    }
    assert not missing
