"""The scan of one member's slice, on columns of numbers: no JVM is needed."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.member_scan import MemberColumns, MemberScan, MemberScanner
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX, TICK_MIN


def scan(
    *rows: tuple[int, int], release: dict[str, object] | None = None, **source: object
) -> MemberScan:
    """The scan of data rows: times and ends."""
    own = {"path": "x", "schema": {"t": "timestamp", "u": "timestamp"}, "event_time": "t", **source}
    raw = {"name": "p", "sources": {"a": {"end_time": "u", **own}}, "release": release or {}}
    times, ends = np.array(rows, dtype=np.int64).T
    columns = MemberColumns(np.arange(len(rows)), times, ends, np.zeros(len(rows), dtype=np.int8))
    return MemberScanner(PipelineSpec.model_validate(raw), Member("a"), columns, {}).scan()


@pytest.mark.parametrize(
    ("first", "delay", "mark"), [(TICK_MIN + 1, 5, None), (TICK_MAX - 1, -5, TICK_MAX)]
)
def test_punctuation_of_an_extreme_time_stays_an_instant(
    first: int, delay: int, mark: int | None
) -> None:
    """A stamp that does not fit is the first or the last instant: it never turns round.

    docs/semantics.md, sections 4.2 and 9.10.
    """
    punctuation = {"every_events": 1, "delay": delay, "on_violation": "drop"}
    found = scan((first, first + 1), punctuation=punctuation)
    assert found.survey.punctuation == mark


@pytest.mark.parametrize(("window", "end"), [(5, 40), ("off", TICK_MIN)])
def test_the_greatest_end_is_kept_where_a_moved_row_needs_it(window: object, end: int) -> None:
    """Of the rows that go on, with a build window and `on_late: adjust` only.

    docs/semantics.md, section 2 (build_window and on_late).
    """
    release = {"build_window": window, "on_late": "adjust"}
    found = scan((20, 25), (15, 40), (10, 12), lag=0, release=release)
    assert found.survey.newest_end == end
