"""``make matrices``: features against each other, a table for each pair.

Most holes of this project were where two features meet. Each table is one parametrized test: a
cell is the test with these two parameters. Ends with `N cells, N failed`.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import pytest


@dataclass(frozen=True)
class Matrix:
    """A table: which test, and which of its parameters are its rows and columns."""

    title: str
    test: str
    row: str
    column: str


MATRICES = (
    Matrix(
        "timers x outage: no timer expires because of it",
        "tests/engine/test_timers.py::test_a_long_outage_expires_no_timer",
        "timer",
        "outage",
    ),
    Matrix(
        "restore x retention: what is offered can be restored, nothing else",
        "tests/checkpoints/test_restore_matrix.py::test_what_is_offered_can_be_restored",
        "target",
        "retention",
    ),
    Matrix(
        "approval x identity: only another person approves",
        "tests/operators/test_approval_matrix.py::test_only_another_person_approves",
        "answer",
        "identity",
    ),
    Matrix(
        "streams x retention: a stream has the same rows, whatever was retired",
        "tests/streams/test_retention_matrix.py::test_a_stream_has_the_same_rows",
        "stream",
        "retention",
    ),
    Matrix(
        "presets x counters: every surface shows the same count",
        "tests/expectations/test_counter_matrix.py::test_every_surface_shows_the_same_count",
        "counter",
        "preset",
    ),
)


@dataclass(eq=False)  # pytest keeps plugins in a set
class Recorder:
    """A plugin of pytest that keeps the outcome of each cell.

    Attributes:
        outcomes: (test, its two parameters) -> whether it passed.
    """

    outcomes: dict[tuple[str, str, str], bool] = field(default_factory=dict)
    cells: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Note which parameters each test has."""
        for item in items:
            test = item.nodeid.partition("[")[0]
            matrix = next(one for one in MATRICES if one.test == test)
            values = item.callspec.params
            self.cells[item.nodeid] = test, str(values[matrix.row]), str(values[matrix.column])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the outcome; a cell whose set-up fails has failed."""
        cell = self.cells[report.nodeid]
        self.outcomes[cell] = self.outcomes.get(cell, True) and not report.failed


def print_matrix(matrix: Matrix, outcomes: dict[tuple[str, str, str], bool]) -> None:
    """Print one table."""
    cells = {
        (row, column): ok for (test, row, column), ok in outcomes.items() if test == matrix.test
    }
    rows, columns = (list(dict.fromkeys(cell[at] for cell in cells)) for at in (0, 1))
    width = max(map(len, rows), default=0)
    sys.stdout.write(f"\n{matrix.title}\n{'':{width}}  {'  '.join(columns)}\n")
    for row in rows:
        marks = [
            f"{'ok' if cells[row, column] else 'FAILED':{len(column)}}"
            if (row, column) in cells
            else f"{'-':{len(column)}}"
            for column in columns
        ]
        sys.stdout.write(f"{row:{width}}  {'  '.join(marks)}\n")


def main() -> int:
    """Run every cell and print the tables."""
    recorder = Recorder()
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--no-header", "-m", ""]
    told = StringIO()
    with redirect_stdout(told):
        code = pytest.main([*options, *(matrix.test for matrix in MATRICES)], plugins=[recorder])
    if code:
        sys.stdout.write(told.getvalue())
    for matrix in MATRICES:
        print_matrix(matrix, recorder.outcomes)
    failed = sum(not ok for ok in recorder.outcomes.values())
    sys.stdout.write(f"\n{len(recorder.outcomes)} cells, {failed} failed\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
