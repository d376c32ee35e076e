"""Who holds the frontier back: the partition, since when, and each of the five reasons."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.feed import Barrier, Feed, Point, Punctuation, pipeline

NEVER: dict[str, Any] = {"coalesce": {"idle_timeout": "never"}}


def held(feed: Feed, now: int, take: dict[str, int] | None = None) -> tuple[str, int, str] | None:
    """Member, since and why after one epoch."""
    found = feed.step(now, take).decision.holder
    return None if found is None else (found["member"], found["since"], found["why"])


def test_no_data() -> None:
    """Without a timer there is nothing to wait for but data."""
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, **NEVER))
    feed.add("a", Point(10))
    assert held(feed, 100) == ("b/0", 100, "no data")


def test_an_idle_timer_that_is_running() -> None:
    """A silent member is waited for until its timer has run out.

    Then the other one is who holds F.
    """
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, coalesce={"idle_timeout": 50}))
    feed.add("a", Point(10))
    assert held(feed, 100) == ("b/0", 100, "idle timer running")
    feed.add("a", Point(20))
    assert held(feed, 149) == ("b/0", 100, "idle timer running")  # since it became who holds F
    feed.add("a", Point(30))
    assert held(feed, 151) == ("a/0", 151, "idle timer running")


@pytest.mark.parametrize(("partition", "output"), [("never", "50us"), ("50us", "never")])
def test_one_of_the_two_idle_timers_is_enough(partition: str, output: str) -> None:
    """The timer of the partitions and that of the source at the output are each worth waiting for."""
    source = {"lag": 0, "partition_by": "folder", "coalesce": {"idle_timeout": partition}}
    feed = Feed(pipeline(("a", "b"), source, coalesce={"idle_timeout": output}))
    feed.add("a", Point(10))
    assert held(feed, 100) == ("b/0", 100, "idle timer running")


def test_an_open_barrier() -> None:
    """A member at a barrier that the other one has not delivered is named, with the barrier."""
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, **NEVER))
    feed.add("a", Point(10), Barrier(11), Point(12))
    feed.add("b", Point(15))
    assert held(feed, 1) == ("a/0", 1, "open barrier")
    feed.add("b", Barrier(16))
    assert held(feed, 2) == ("a/0", 1, "buffered rows")
    assert held(feed, 3) == ("a/0", 1, "no data")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"punctuation": {"explicit": True}}, "no punctuation"),
        (
            {"punctuation": {"explicit": True}, "lag": 100},
            "no data",
        ),  # the lag moves its frontier as well
    ],
)
def test_no_punctuation(source: dict[str, Any], why: str) -> None:
    """An input that only punctuation could move, and that has sent none."""
    feed = Feed(pipeline(("a", "b"), source, **NEVER))
    feed.add("a", Point(10), Punctuation(10))
    feed.add("b", Point(10))
    assert held(feed, 1) == ("b/0", 1, why)


def test_an_input_that_has_sent_punctuation_is_not_without() -> None:
    """The least of those in force holds F; docs/semantics.md, section 4.4."""
    feed = Feed(pipeline(("a", "b"), {"punctuation": {"explicit": True}}, **NEVER))
    feed.add("a", Punctuation(10))
    feed.add("b", Punctuation(5))
    assert held(feed, 1) == ("b/0", 1, "no data")


def test_buffered_rows() -> None:
    """Rows that are there and were not read yet."""
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, **NEVER))
    feed.add("a", Point(10), Point(20))
    feed.add("b", Point(30))
    assert held(feed, 1, {"a": 1, "b": 1}) == ("a/0", 1, "buffered rows")


def test_no_member_holds_what_has_ended() -> None:
    """All input has ended: F is at infinity and no one is named."""
    feed = Feed(pipeline(("a",), {"lag": 0}, **NEVER))
    feed.end("a")
    assert held(feed, 1) is None


def test_a_member_that_catches_up_holds_nothing() -> None:
    """It is left out of F until it is not behind it (`revived: ignore`, section 1)."""
    feed = Feed(pipeline(("a", "b"), {"lag": 0}, coalesce={"idle_timeout": 50}))
    feed.add("a", Point(10))
    held(feed, 100)
    feed.add("a", Point(20))
    assert held(feed, 150) == ("a/0", 150, "idle timer running")
    feed.add("b", Point(5))
    assert held(feed, 160) == ("a/0", 150, "idle timer running")
