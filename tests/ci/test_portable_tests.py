"""What runs with another Python and against the wheel."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
# Programs of CI; and tests of servers, whose tiers do not run there.
_NOT_THERE = {"ci", "e2e", "spark"}


def read_list() -> list[str]:
    """The files, without comments."""
    lines = (TESTS / "ci/portable_tests.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_each_room_has_a_file_on_the_list() -> None:
    """A new room has to choose one."""
    rooms = {path.parent.name for path in TESTS.glob("*/test_*.py")} - _NOT_THERE
    assert {Path(name).parent.name for name in read_list()} - {"tests"} == rooms


def test_each_file_of_the_list_exists_once() -> None:
    """A file that was renamed would be missed without a word."""
    found = read_list()
    assert [name for name in found if not (TESTS.parent / name).is_file()] == []
    assert len(found) == len(set(found))
