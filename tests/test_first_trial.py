"""tests/first_trial.yaml names what hindered a new user and the tests that fail if it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.named_tests import find_missing_tests

ENTRIES: list[dict[str, Any]] = YAML(typ="safe").load(
    Path(__file__).with_name("first_trial.yaml").read_text("utf-8")
)


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["id"] for entry in ENTRIES])
def test_a_friction_has_its_tests_or_a_reason(entry: dict[str, Any]) -> None:
    """Each named test exists; what is deliberate has one sentence instead."""
    proof = "reason" if "reason" in entry else "tests"
    assert set(entry) == {"id", "friction", proof}
    assert entry["friction"].endswith(".")
    if proof == "reason":
        assert entry["reason"].endswith(".")
        return
    assert entry["tests"]
    assert all("::" in name for name in entry["tests"])
    assert find_missing_tests(entry["tests"]) == []


def test_no_friction_was_left_out() -> None:
    """The numbers are in order and without a gap, so that an entry cannot vanish unnoticed."""
    assert [entry["id"] for entry in ENTRIES] == [f"U{n}" for n in range(1, len(ENTRIES) + 1)]
    assert len({entry["friction"] for entry in ENTRIES}) == len(ENTRIES)
