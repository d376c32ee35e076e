"""A plugin of pytest: leave out the tests that have not begun when the time of CI is over.

Load it with `-p tests.ci.time_limit --begin-until SECONDS`. A run that is ended from outside gives
no verdict at all; one that leaves tests out says how many and passes judgement on the others.
"""

from __future__ import annotations

import time
from typing import Final

import pytest

REASON: Final = "the time of CI was over"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the time."""
    parser.addoption("--begin-until", type=float, help="a Unix time in seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test, before it starts servers, if its time is over."""
    until: float | None = item.config.getoption("--begin-until")
    if until is not None and time.time() >= until:
        pytest.skip(REASON)


def is_left_out(report: pytest.TestReport) -> bool:
    """Whether a test was skipped because the time was over."""
    return report.skipped and isinstance(report.longrepr, tuple) and REASON in report.longrepr[2]
