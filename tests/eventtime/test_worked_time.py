"""How a driver counts the time that it has worked (semantics.md, section 1, recorded decisions)."""

from __future__ import annotations

import pytest

from tidegate.jobs.eventtime.pipeline_clock import WorkedTime


def test_time_between_epochs_of_one_driver_counts_in_full() -> None:
    """However far apart they are: each reading adds what the lease's clock has moved by.

    A head that this driver sealed starts the count again, and loses no tick.
    """
    worked = WorkedTime(max_gap=10)
    worked.begin(sealed_here=False)
    worked.count(100, 0)
    worked.begin(sealed_here=True)
    assert [worked.count(reading, 999) for reading in (150, 151, 151)] == [50, 51, 51]
    worked.begin(sealed_here=True)
    assert worked.count(154, 999) == 3


@pytest.mark.parametrize(("since_head", "counted"), [(-5, 0), (9, 9), (10, 10), (11, 10)])
def test_time_since_the_epoch_of_another_driver_is_a_gap(since_head: int, counted: int) -> None:
    """It counts at most the longest step, and nothing where a wall clock was set back.

    What this driver had worked before that epoch is in it already.
    """
    worked = WorkedTime(max_gap=10)
    assert worked.count(100, since_head) == counted
    worked.count(500, 0)
    worked.begin(sealed_here=False)
    assert worked.count(600, since_head) == counted


def test_only_the_time_up_to_the_next_good_attempt_is_a_gap() -> None:
    """An attempt that failed makes a gap of the stretch around it, and of no later one."""
    worked = WorkedTime(max_gap=10)
    assert worked.count(100, 0) == 0
    worked.interrupt()
    worked.interrupt()
    assert [worked.count(reading, 0) for reading in (150, 190)] == [10, 50]
    worked.interrupt()
    assert worked.count(194, 0) == 54
