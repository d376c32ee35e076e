"""docs/track-record.md names a fixing commit and a test for each fault, and counts them."""

from __future__ import annotations

import re

import pytest

from tests.named_tests import ROOT, find_missing_tests

TEXT = (ROOT / "docs" / "track-record.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in TEXT.splitlines()
    if re.match(r"\| (?:[A-Z]-?\d+|[a-z]+-[A-Z]*\d+[a-z]?) ", line)
]


def test_ids_are_unique() -> None:
    """Each fault is listed once."""
    ids = [row[0] for row in ROWS]
    assert ROWS
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_fixed_fault_names_its_commit_and_its_test(row: list[str]) -> None:
    """The commit is a hash, and the test exists."""
    _, severity, _, commit, tests = row
    assert severity in {"S1", "S2", "S3", "S4"}
    if commit == "open":
        assert not tests
        return
    assert re.fullmatch(r"[0-9a-f]{7}", commit)
    named = re.findall("`(.+?)`", tests)
    assert named
    assert all("::" in test for test in named)
    assert find_missing_tests(named) == []


def test_the_last_line_counts() -> None:
    """`N of N fixed`, and the open ones by name."""
    still = [row[0] for row in ROWS if row[3] == "open"]
    expected = f"{len(ROWS) - len(still)} of {len(ROWS)} fixed"
    if still:
        expected += f"; open: {', '.join(still)}"
    assert TEXT.rstrip().splitlines()[-1] == expected
