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


def test_an_epoch_leaves_no_second_entry_for_one_time() -> None:
    """The older entry expires first, so a source that repeats its time does not make the state grow.

    A time of another section is another one.
    """
    order = ReleaseOrder(OrderOptions(build_window=1_000))
    order.note_read(5, 0, 10)
    order.note_read(6, 0, 10)
    assert order.entries == [[5, 0, 10]]
    order.note_read(7, 1, 10)
    assert order.entries == [[5, 0, 10], [7, 1, 10]]


def test_entries_below_the_mark_of_the_release_are_forgotten() -> None:
    """By section and time, whenever they were read: what has left awaits no residence."""
    order = ReleaseOrder(OrderOptions(build_window=1_000))
    for entry in ((0, 0, 20), (5, 1, 9), (5, 1, 10), (0, 2, 1)):
        order.note_read(*entry)
    order.release(ReleaseMark(1, 10))
    assert order.entries == [[5, 1, 10], [0, 2, 1]]
