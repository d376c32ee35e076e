"""The list of known flaky tests, and how long a test may be on it."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.ci.flaky_tests import (
    FlakyListError,
    KnownTest,
    count_runs,
    judge_known_tests,
    read_commit_times,
    read_known_tests,
)

T = "tests"  # paths that are cited whole exist
START = datetime(2026, 11, 28, 9, 0, tzinfo=UTC)


def list_hours(*hours: float) -> list[datetime]:
    """Times after the start."""
    return [START + timedelta(hours=hour) for hour in hours]


@pytest.mark.parametrize(
    ("hours", "runs"),
    [
        ((), 0),
        ((-5, 0), 0),  # before the entry
        ((1,), 1),
        ((1, 2, 3.9), 1),  # one push
        ((4, 1), 2),  # in any order
        ((1, 2, 3, 4, 5, 6), 2),  # a long day is more than one push
    ],
)
def test_commits_within_three_hours_are_one_run(hours: tuple[float, ...], runs: int) -> None:
    """Each push is one run of CI."""
    assert count_runs(list_hours(*hours), START) == runs


def test_a_test_that_is_not_repaired_after_ten_runs_is_named() -> None:
    """The eleventh run fails."""
    known = [KnownTest(f"{T}/test_a.py::test_shaky", START, "a port")]
    ten = list_hours(*range(1, 101, 10))
    assert judge_known_tests(known, ten) == []
    assert judge_known_tests(known, [*ten, *list_hours(101)]) == [
        f"flaky for more than 10 runs: {T}/test_a.py::test_shaky: repair it (a port)"
    ]


def write_list(root: Path, text: str) -> Path:
    """A list beside one test."""
    (root / "tests").mkdir()
    (root / T / "test_a.py").write_text("def test_shaky(number): pass\n")
    path = root / T / "flaky.toml"
    path.write_text(text)
    return path


def test_an_entry_has_a_name_a_time_and_a_suspicion(tmp_path: Path) -> None:
    """Parameters belong to the name."""
    entry = f'name = "{T}/test_a.py::test_shaky[1]"\nsince = 2026-11-28T09:00:00Z\n'
    path = write_list(tmp_path, f'[[test]]\n{entry}suspicion = "a port"\n')
    assert read_known_tests(path) == [KnownTest(f"{T}/test_a.py::test_shaky[1]", START, "a port")]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (f'name = "{T}/test_a.py::test_shaky"', "each test has"),
        (f'name = "{T}/test_a.py::test_shaky"\nsince = 2026-11-28\nsuspicion = "x"', "a time"),
        (f'name = "{T}/test_b.py::test_b"\nsince = 2026-11-28T09:00:00Z\nsuspicion = "x"', "file"),
        (f'name = "{T}/test_a.py::test_b"\nsince = 2026-11-28T09:00:00Z\nsuspicion = "x"', "test"),
    ],
)
def test_an_entry_that_says_too_little_is_refused(tmp_path: Path, entry: str, problem: str) -> None:
    """A name that no test has would never be repaired."""
    path = write_list(tmp_path, f"[[test]]\n{entry}\n")
    with pytest.raises(FlakyListError, match=problem):
        read_known_tests(path)


def test_the_list_of_this_repository_can_be_read() -> None:
    """Its entries name tests that exist."""
    read_known_tests(Path(__file__).parents[1] / "flaky.toml")


def run_git(folder: Path, *arguments: str) -> None:
    """As a person with a name."""
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True)


def test_runs_are_counted_in_the_whole_history_only(tmp_path: Path) -> None:
    """A shallow clone would count too few."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    run_git(whole, "init", "-q")
    for message in ("one", "two"):
        run_git(whole, "commit", "-q", "--allow-empty", "-m", message)
    assert len(read_commit_times(whole)) == 2
    run_git(tmp_path, "clone", "-q", "--depth", "1", f"file://{whole}", str(part))
    with pytest.raises(FlakyListError, match="clone all"):
        read_commit_times(part)
