"""A part of `make changes`: what a plan says is what a deploy does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.spec.change_matrix import (
    TABLE_ROWS,
    Around,
    Bases,
    Outcome,
    imports_from,
    read_table,
)
from tests.spec.changed_fields import BASE, FieldChange, find_change, merge

from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import PipelineSpec


def test_each_row_of_the_table_has_a_change() -> None:
    """A new row of the docs fails here until the matrix has a change for it."""
    rows = [change for change, _ in read_table()]
    assert rows
    assert [one for one in rows if not any(one.startswith(r.row) for r in TABLE_ROWS)] == []
    assert [r.row for r in TABLE_ROWS if not any(one.startswith(r.row) for one in rows)] == []


@pytest.mark.parametrize("around", Around)
@pytest.mark.parametrize(
    ("field", "verdict"),
    [
        ("windows.*.size", Outcome.REFUSED),
        ("sources.*.lag", Outcome.APPLIED),
        ("description", Outcome.APPLIED),
        ("outputs.compact", Outcome.APPLIED),
    ],
)
def test_a_plan_says_what_a_deploy_does(
    tmp_path: Path, field: str, verdict: Outcome, around: Around
) -> None:
    """Also of fields on which no state depends, which the digest of a spec leaves out."""
    change = find_change(PipelineSpec, field)
    assert change is not None
    with imports_from(str(tmp_path)):
        cell = Bases(tmp_path).run_cell(change, around)
    assert cell.differences == ()
    waits = around is Around.CRASHED
    waits = waits or (around is Around.FAILS and verdict is Outcome.APPLIED)
    assert cell.outcome is (Outcome.WAITING if waits else verdict)


def test_a_change_that_no_plan_judges_differs(tmp_path: Path) -> None:
    """Otherwise a bad value in the table of values would pass as a refused change."""
    bad = FieldChange("sources.*.lag", BASE, merge(BASE, {"sources": {"a": {"lag": "x"}}}))
    with imports_from(str(tmp_path)):
        bases = Bases(tmp_path)
        cell = bases.run_cell(bad, Around.STOPPED)
        known = bases.run_cell(replace(bad, is_valid=False), Around.STOPPED)
    assert cell.differences == ("no plan judges the file, because it is invalid",)
    assert known.differences == ()


def test_a_job_has_no_value_for_fields_of_windows() -> None:
    """These are refused in every job, so the matrix has a refusal for them."""
    for field in ("supervision.announce", "checkpoint.idle_epochs"):
        ours, theirs = find_change(JobSpec, field), find_change(PipelineSpec, field)
        assert ours is not None
        assert theirs is not None
        assert (ours.is_valid, theirs.is_valid) == (False, True)
