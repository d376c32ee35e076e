"""Which epochs the order buffer remembers for the residence of their rows (semantics.md section 3)."""

from __future__ import annotations

from tidegate.jobs.eventtime.decider_state import ReleaseOrder
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spec.event_time_options import OrderOptions


def test_an_epoch_leaves_no_entry_where_no_residence_ends() -> None:
    """Entries would never be removed, so each manifest would be larger than the one before."""
    order = ReleaseOrder(OrderOptions())
    order.note_read(5, 0, 10)
    assert order.entries == []


def test_an_epoch_leaves_an_entry_from_the_mark_of_the_release_on() -> None:
    """Rows below the mark are late or leave at once, so no residence of theirs is awaited."""
    order = ReleaseOrder(OrderOptions(build_window=1_000), released=ReleaseMark(1, 10))
    order.note_read(5, 0, 11)
    order.note_read(5, 1, 9)
    assert order.entries == []
    order.note_read(5, 1, 10)
    assert order.entries == [[5, 1, 10]]
