"""A plugin of pytest: write what became of each test to a file, for `tests.ci.retry_failed`.

Load it with `-p tests.outcome_report --outcomes FILE`. The file is written when the run ends
orderly; a run that was killed leaves none.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.ci.time_limit import is_left_out

# What xdist gives a report that it makes itself, because the worker died.
_PHASE_OF_CRASH = "???"


@dataclass
class Outcomes:
    """One run of pytest."""

    python: str = ""
    folder: str = ""
    marker_expression: str = ""
    exit_status: int = 0
    passed: list[str] = field(default_factory=list)
    # Test -> text of its first failure.
    failed: dict[str, str] = field(default_factory=dict)
    unit: list[str] = field(default_factory=list)  # those that failed and are unit tests
    crashed: list[str] = field(default_factory=list)  # their worker died under them
    uncollected: list[str] = field(default_factory=list)  # files that could not be read
    left_out: list[str] = field(default_factory=list)  # the time of CI was over before they began
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Outcomes | None:
        """What a run wrote; nothing if it did not end orderly."""
        return cls(**json.loads(path.read_text("utf-8"))) if path.exists() else None


class OutcomeRecorder:
    """Collects the reports of one run, of its workers too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes = Outcomes()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read hides its tests."""
        if report.failed:
            self._outcomes.uncollected.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test: set-up, the test, or what follows it."""
        found, test = self._outcomes, report.nodeid
        found.seconds[test] = found.seconds.get(test, 0.0) + report.duration
        if report.failed:
            found.failed.setdefault(test, report.longreprtext)
            if "unit" in report.keywords and test not in found.unit:
                found.unit.append(test)
            if report.when == _PHASE_OF_CRASH:
                found.crashed.append(test)
        elif report.passed and report.when == "call":
            found.passed.append(test)
        elif is_left_out(report):
            found.left_out.append(test)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the file, whole or not at all."""
        found = self._outcomes
        found.python, found.folder = sys.executable, os.fspath(session.config.invocation_params.dir)
        found.marker_expression = session.config.option.markexpr
        found.exit_status = int(exitstatus)
        found.passed = [test for test in found.passed if test not in found.failed]
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(found)), "utf-8")
        draft.rename(self._path)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name the file."""
    parser.addoption("--outcomes", help="write what became of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that sees all reports, not in xdist's workers."""
    path = config.getoption("--outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeRecorder(Path(path)))
