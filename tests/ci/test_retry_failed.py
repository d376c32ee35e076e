"""A failed test runs once more, alone; planted tests in a folder of their own, run by pytest."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.ci.retry_failed import check_first_run, judge_flaky_tests, run_part
from tests.ci.run_record import FlakyTest, RunRecord
from tests.outcome_report import Outcomes

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "{report}"]
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.{marker}
@pytest.mark.parametrize("number", range({tests}))
def test_once(number):
    seen = Path(__file__).with_name(f"seen{{number}}")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")

def test_calm():
    pass
"""
NEEDS_SERVER = """
import pytest

@pytest.fixture(scope="module")
def server():
    raise OSError("no server")

def test_server(server):
    pass
"""


class PlantedTests:
    """A folder with tests, and the record of a run of CI over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = RunRecord(folder)
        markers = "markers =\n  unit: x\n  e2e: x\n  slow: x\n"
        (folder / "pytest.ini").write_text(
            f'[pytest]\naddopts = -m "not slow"\nfilterwarnings = error\n{markers}'
        )

    def write(self, text: str) -> None:
        """The only file of tests."""
        (self.folder / "test_planted.py").write_text(text)

    def run(self, *options: str, until: float | None = None) -> bool:
        """As a part of CI; whether it passed."""
        return run_part([*PYTEST, *options], self.record, until)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlantedTests:
    # Without the plugins of the environment pytest starts in a fraction of the time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return PlantedTests(tmp_path)


def test_what_fails_once_is_named_and_forgiven(
    planted: PlantedTests, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the marker expression of the first run, or a slow test would not run again."""
    planted.write(FAILS_ONCE.format(marker="slow", tests=1))
    assert planted.run("-m", "slow")
    shown = capfd.readouterr().out
    assert "flaky: test_planted.py::test_once[0]\nIts first failure:\n" in shown
    assert "AssertionError: the first time" in shown.partition("flaky: ")[2]
    assert [test.name for test in planted.record.read_flaky_tests()] == [
        "test_planted.py::test_once[0]"
    ]


def test_what_fails_twice_fails_the_part(
    planted: PlantedTests, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is named once more after the output of the second try."""
    planted.write("def test_wrong():\n    assert 1 == 2\n")
    assert not planted.run()
    assert capfd.readouterr().out.endswith("ci: failed twice: test_planted.py::test_wrong\n")


def test_three_are_forgiven_in_a_run_and_a_fourth_is_not(
    planted: PlantedTests, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parts of a run count together."""
    planted.write(FAILS_ONCE.format(marker="e2e", tests=3))
    assert planted.run()
    planted.write(FAILS_ONCE.format(marker="e2e", tests=4))
    assert not planted.run()
    assert "4 tests of this run were flaky; 3 may be" in capfd.readouterr().out


def test_a_unit_test_has_no_excuse(
    planted: PlantedTests, capfd: pytest.CaptureFixture[str]
) -> None:
    """It fails the part although it passes alone."""
    planted.write(FAILS_ONCE.format(marker="unit", tests=1))
    assert not planted.run()
    shown = capfd.readouterr().out
    assert "ci: a unit test may not be flaky: test_planted.py::test_once[0]" in shown


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_has_not_begun_in_time_is_left_out(planted: PlantedTests, workers: str) -> None:
    """Its servers are not started either; the part passes."""
    planted.write(NEEDS_SERVER)
    assert planted.run("-n", workers, until=time.time() - 1)
    assert planted.record.read_left_out() == ["test_planted.py::test_server"]
    assert not planted.run("-n", workers, until=time.time() + 3600), "there is time, and no server"


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("import nothing_of_that_name\n", (), "could not be read: test_planted.py"),
        ("import os\ndef test_end(): os._exit(1)\n", (), "status 1 and without a report"),
        ("import os\ndef test_end(): os._exit(1)\n", ("-n", "1"), "a worker died in: "),
        ("def test_stop(): raise KeyboardInterrupt\n", (), "status 2 with 0 failed tests"),
        ("", (), "status 5 with 0 failed tests"),
        ("def test_good(): pass\n", ("--unknown",), "status 4 and without a report"),
    ],
    ids=["unreadable", "exit", "worker", "interrupted", "no test", "usage"],
)
def test_what_is_not_a_failed_test_fails_the_part(
    planted: PlantedTests,
    capfd: pytest.CaptureFixture[str],
    text: str,
    options: tuple[str, ...],
    expected: str,
) -> None:
    """Nothing of it is tried again, and nothing vanishes."""
    planted.write(text)
    assert not planted.run(*options)
    shown = capfd.readouterr().out
    assert "once more" not in shown
    assert expected in shown


def test_more_failures_than_noise_explains_are_not_tried_again(
    planted: PlantedTests, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each may take minutes, and CI's time is limited."""
    planted.write(FAILS_ONCE.format(marker="e2e", tests=11))
    assert not planted.run()
    assert "11 tests failed; more than 10 are not tried again" in capfd.readouterr().out


def test_a_test_that_is_skipped_the_second_time_has_not_passed(planted: PlantedTests) -> None:
    """It has failed."""
    text = FAILS_ONCE.format(marker="e2e", tests=1)
    planted.write(
        text.replace("    if not seen", '    seen.exists() and pytest.skip("")\n    if not seen')
    )
    assert not planted.run()


def test_a_failure_after_the_test_counts_as_one(planted: PlantedTests) -> None:
    """What a fixture does in the end belongs to the test."""
    planted.write(
        "import pytest\n@pytest.fixture\ndef thing():\n    yield\n    raise OSError\n"
        "def test_good(thing): pass\n"
    )
    assert not planted.run()


def test_a_command_that_fails_after_good_tests_fails_the_part() -> None:
    """A program beside pytest, such as make, may fail as well."""
    found = Outcomes(passed=["test_a.py::test_good"])
    assert check_first_run(0, found) is found
    with pytest.raises(Exception, match="status 2 with 0 failed tests"):
        check_first_run(2, found)


def test_three_flaky_tests_are_no_problem() -> None:
    """Unless one is a unit test."""
    found = [FlakyTest(f"test_a.py::test_{number}", is_unit=False, text="") for number in range(3)]
    assert judge_flaky_tests(found) == []
    assert judge_flaky_tests([*found, found[0]]) == ["4 tests of this run were flaky; 3 may be"]
