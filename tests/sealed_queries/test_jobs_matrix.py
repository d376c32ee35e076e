"""Scripts of each kind, disturbed in each way, with a real Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sealed_queries import jobs_matrix
from tests.sealed_queries.jobs_matrix import CASES, DISTURBANCES, Cell, Matrix, run_matrix
from tests.sealed_queries.rig import KilledJob

# No moment of these decides how the run goes on: whatever was sealed before, the driver is gone.
_A_TENTH = (
    ("f arguments and packages", "kill driver"),
    ("f arguments and packages", "restore and gc"),
    ("g checkpoint taken over", "kill driver"),
    ("h ends of scripts", "kill JVM"),
    ("h ends of scripts", "kill driver"),
    ("h ends of scripts", "restore and gc"),
    ("h ends of scripts", "two restores"),
)


def test_the_matrix_counts_what_it_could_not_run() -> None:
    """A cell that cannot be did not run, and its reason is printed."""
    case = "a join of two streams"
    matrix = Matrix({(case, "kill driver"): "equal"})
    assert matrix.is_good
    matrix.outcomes[case, "clock back"] = "cannot be"
    matrix.reasons.append("a, clock back: why")
    assert matrix.is_good
    *_, reason, total = matrix.lines()
    left = len(CASES) * len(DISTURBANCES) - 2
    assert reason == "a, clock back: why"
    assert total == f"1 cells, 0 differences, 1 cannot be, {left} left out"


@pytest.mark.parametrize("outcomes", [{}, {("h", "kill JVM"): "cannot be"}])
def test_a_matrix_that_ran_nothing_is_not_good(outcomes: dict[Cell, str]) -> None:
    """A run without a cell shows nothing."""
    assert not Matrix(outcomes).is_good


@pytest.mark.parametrize("outcome", ["differs", "broken"])
def test_one_bad_cell_is_enough(outcome: str) -> None:
    """The other cells do not hide it."""
    assert not Matrix({("h", "kill JVM"): "equal", ("h", "kill driver"): outcome}).is_good


def test_a_case_that_cannot_begin_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of its cells is, and the cases behind it are run nevertheless."""

    def fail(*_given: object) -> None:
        raise OSError("no server")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(KilledJob, "launch", fail)
    matrix = run_matrix([("f arguments and packages", kind) for kind in DISTURBANCES], seed=1)
    assert set(matrix.outcomes.values()) == {"broken"}
    assert len(matrix.outcomes) == len(DISTURBANCES)


def test_a_record_spares_what_was_equal_on_the_same_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other outcomes, and those of other commits, are not taken over."""

    def fail(*_given: object) -> None:
        raise OSError("no server")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(KilledJob, "launch", fail)
    monkeypatch.setattr(jobs_matrix, "_describe_commit", lambda: "now")
    case, kinds = "f arguments and packages", [*DISTURBANCES][:4]
    outcomes = [("now", "equal"), ("now", "broken"), ("before", "equal")]
    record = tmp_path / "record"
    rows = [(commit, case, kind, end) for kind, (commit, end) in zip(kinds, outcomes, strict=False)]
    record.write_text("".join("\t".join(row) + "\n" for row in rows))
    matrix = run_matrix([(case, kind) for kind in kinds], seed=1, record=record)
    assert [matrix.outcomes[case, kind] for kind in kinds] == ["equal", *["broken"] * 3]
    monkeypatch.setattr(KilledJob, "launch", lambda *_given: pytest.fail("it was launched"))
    assert run_matrix([(case, kinds[0])], seed=1, record=record).is_good


def test_ci_runs_a_tenth_of_the_cells() -> None:
    """`make jobs-proof` runs all of them."""
    assert len(_A_TENTH) >= len(CASES) * len(DISTURBANCES) / 10


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", sorted({case for case, _ in _A_TENTH}))
def test_some_cells_are_equal(case: str) -> None:
    """The sinks of disturbed jobs hold the rows of undisturbed ones."""
    matrix = run_matrix([cell for cell in _A_TENTH if cell[0] == case], seed=1)
    assert matrix.is_good, "\n".join(matrix.lines())
