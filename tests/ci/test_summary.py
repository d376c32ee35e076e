"""The last lines of a run of CI."""

from __future__ import annotations

from pathlib import Path

from tests.ci.run_record import FlakyTest, RunRecord
from tests.ci.summary import describe_run


def test_a_quiet_run_names_its_parts_and_its_ten_slowest_tests(tmp_path: Path) -> None:
    """The slowest of all parts come first; nothing is warned of."""
    record = RunRecord(tmp_path)
    record.add_durations({f"test_a.py::test_{number}": float(number) for number in range(8)})
    record.add_durations({f"test_b.py::test_{number}": number + 0.5 for number in range(8)})
    (tmp_path / "parts.tsv").write_text("lint\t9\ntests\t780\n")
    lines = list(describe_run(record, 2400))
    assert lines[:3] == ["the time of each part:", "       9 s  lint", "     780 s  tests"]
    assert lines[4:6] == ["     7.5 s  test_b.py::test_7", "     7.0 s  test_a.py::test_7"]
    assert len(lines) == 3 + 1 + 10 + 1
    assert lines[-1] == "flaky tests: 0, at most 3 are forgiven"


def test_a_slow_run_is_warned_of_and_flaky_tests_are_named(tmp_path: Path) -> None:
    """Above 13 minutes for the tests, 18 for those end to end, 40 for all of it."""
    record = RunRecord(tmp_path)
    record.add_flaky_test(FlakyTest("test_a.py::test_shaky", is_unit=False, text="a port"))
    (tmp_path / "parts.tsv").write_text("tests\t781\nend to end\t1081\n")
    assert list(describe_run(record, 2401))[-5:] == [
        "warning: tests took more than 13 min",
        "warning: end to end took more than 18 min",
        "warning: everything took more than 40 min",
        "flaky: test_a.py::test_shaky",
        "flaky tests: 1, at most 3 are forgiven",
    ]


def test_tests_without_time_are_counted_by_file(tmp_path: Path) -> None:
    """Of all parts together."""
    record = RunRecord(tmp_path)
    record.add_left_out(["test_a.py::test_0", "test_a.py::test_1"])
    record.add_left_out(["test_b.py::test_0"])
    assert list(describe_run(record, 1))[-4:-1] == [
        "NOT RUN, because the time of CI was over: 3 tests",
        "       2    test_a.py",
        "       1    test_b.py",
    ]


def test_a_run_that_ended_at_once_has_a_summary(tmp_path: Path) -> None:
    """Such as one without an environment."""
    assert (
        list(describe_run(RunRecord(tmp_path), 1))[-1] == "flaky tests: 0, at most 3 are forgiven"
    )
