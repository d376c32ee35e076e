"""Run tests, and what failed once more, each test alone: `python -m tests.ci.retry_failed`.

CI judges the change, not the noise of its machine. A test that fails beside others and passes alone
is called flaky and printed. A run forgives three of them; of the unit tier it forgives none. What
is not a test that failed is never forgiven: a file that cannot be read, a worker that died, a run
that ended without a report.

Tests that have not begun when the time of CI is over are left out and counted.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.ci.flaky_tests import MAX_FLAKY
from tests.ci.run_record import FlakyTest, RunRecord
from tests.outcome_report import Outcomes

# Stands in the command for the options that make pytest write its report.
PLACEHOLDER: Final = "{report}"
# More failures than this are no noise, and each of them may take minutes.
_MOST_TRIES: Final = 10
_TESTS_FAILED: Final = 1  # exit status of pytest


class TestRunError(Exception):
    """A run failed in a way that trying again cannot excuse."""

    __test__ = False  # pytest would collect it by its name


def run_part(command: Sequence[str], record: RunRecord, until: float | None = None) -> bool:
    """Run the tests of one part of CI.

    Args:
        command: what runs pytest.
        record: of this run of CI.
        until: Unix time in seconds at which no more tests begin; `None` runs all.

    Returns:
        Whether those that ran have passed, some of them at the second try.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        filled = fill_placeholder(command, outcomes, until)
        status = subprocess.run(filled, check=False).returncode
        found = Outcomes.read(outcomes)
    try:
        first = check_first_run(status, found)
    except TestRunError as error:
        print(f"ci: {error}")
        return False
    record.add_durations(first.seconds)
    record.add_left_out(first.left_out)
    return not first.failed or _try_again(first, record)


def fill_placeholder(
    command: Sequence[str], outcomes: Path, until: float | None = None
) -> list[str]:
    """The command with the options for pytest's report and for the time of CI."""
    options = f"-p tests.outcome_report --outcomes {shlex.quote(str(outcomes))}"
    if until is not None:
        # First, because the other one imports it: pytest warns of plugins that are imported already.
        options = f"-p tests.ci.time_limit --begin-until {until} {options}"
    return [
        part
        for argument in command
        for part in (
            shlex.split(options)
            if argument == PLACEHOLDER
            else [argument.replace(PLACEHOLDER, options)]
        )
    ]


def check_first_run(status: int, found: Outcomes | None) -> Outcomes:
    """What the tests of a part did.

    Args:
        status: exit status of the command.
        found: pytest's report.

    Raises:
        TestRunError: the report is missing, or does not say why the command failed.
    """
    if found is None:
        raise TestRunError(f"the tests ended with status {status} and without a report")
    if found.uncollected:
        raise TestRunError(f"could not be read: {', '.join(found.uncollected)}")
    if found.crashed:
        raise TestRunError(f"a worker died in: {', '.join(found.crashed)}")
    if found.failed and found.exit_status != _TESTS_FAILED:
        raise TestRunError(f"pytest was interrupted (its status is {found.exit_status})")
    if (status == 0) == bool(found.failed):
        raise TestRunError(f"status {status} with {len(found.failed)} failed tests")
    if not found.passed and not found.failed and not found.left_out:
        raise TestRunError("no test ran")
    return found


def _try_again(first: Outcomes, record: RunRecord) -> bool:
    if len(first.failed) > _MOST_TRIES:
        print(f"ci: {len(first.failed)} tests failed; more than {_MOST_TRIES} are not tried again")
        return False
    failed_twice = []
    for name, text in first.failed.items():
        print(f"\nci: once more, alone: {name}", flush=True)
        if _passes_alone(name, first):
            flaky = FlakyTest(name, is_unit=name in first.unit, text=text)
            record.add_flaky_test(flaky)
            print(f"flaky: {name}\nIts first failure:\n{text}")
        else:
            failed_twice.append(name)
    for name in failed_twice:
        print(f"ci: failed twice: {name}")
    problems = judge_flaky_tests(record.read_flaky_tests())
    for problem in problems:
        print(f"ci: {problem}")
    return not failed_twice and not problems


def _passes_alone(name: str, first: Outcomes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.json"
        pytest = [first.python, "-m", "pytest", "-n0", "-q", PLACEHOLDER]
        command = fill_placeholder([*pytest, "-m", first.marker_expression, name], outcomes)
        status = subprocess.run(command, cwd=first.folder, check=False).returncode
        second = Outcomes.read(outcomes)
    # A test that is skipped now has not passed.
    return status == 0 and second is not None and second.passed == [name]


def judge_flaky_tests(found: Sequence[FlakyTest]) -> list[str]:
    """Why the flaky tests of a run fail it; nothing if they are forgiven."""
    problems = [
        f"a unit test may not be flaky: {test.name}: repair it" for test in found if test.is_unit
    ]
    if len(found) > MAX_FLAKY:
        problems.append(f"{len(found)} tests of this run were flaky; {MAX_FLAKY} may be")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code says whether the part passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True, help="folder of this run of CI")
    parser.add_argument("--until", type=float, help="Unix time at which no more tests begin")
    parser.add_argument("command", nargs="+", help="what runs pytest; {report} stands for options")
    asked = parser.parse_args(arguments)
    return 0 if run_part(asked.command, RunRecord(asked.record), asked.until) else 1


if __name__ == "__main__":
    sys.exit(main())
