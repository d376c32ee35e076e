"""Reducers for tests: found by import path, also in Spark's workers."""

from __future__ import annotations

import contextlib
import itertools
import socket
from pathlib import Path
from typing import Any

from tidegate.jobs.streams.stream_rows import Event

_dice = itertools.count()
broken: set[int] = set()  # values that `fragile` cannot take now


def running(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """Sensitive to order, index and every row: none, one or two rows."""
    after = state * 3 + event["v"] + index
    return after % 1009, [{"v": after % 97 + n} for n in range(after % 3)]


def totals(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """Meant for keys."""
    return state + event["v"], [{"v": state + index + event["v"]}]


def fragile(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """Counts, and stumbles over what is in `broken`."""
    if event["v"] in broken:
        raise ValueError(f"cannot take {event['v']}")
    return state + 1, [{"v": event["v"] * 100 + state}]


def dicing(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """Not deterministic."""
    return state, [{"v": next(_dice)}]


def writing(state: Any, event: Event, index: int) -> tuple[Any, list[Any]]:
    """Leaves a trace on the disk, and hides the error."""
    with contextlib.suppress(Exception):
        Path("/nowhere/at/all").write_text("trace")
    return state, []


def calling(state: Any, event: Event, index: int) -> tuple[Any, list[Any]]:
    """Calls someone."""
    with socket.socket() as line:
        line.connect(("127.0.0.1", 9))
    return state, []


def forgetful(state: Any, event: Event, index: int) -> tuple[Any, list[Any]]:
    """Its state is a tuple, which comes back from JSON as a list."""
    return (1, 2), []


def misfit(state: Any, event: Event, index: int) -> tuple[Any, list[Any]]:
    """The third row does not fit the column."""
    return state, [{"v": "three" if index == 2 else index}]


def stray(state: Any, event: Event, index: int) -> tuple[Any, list[Any]]:
    """Sends to a stream it does not write to."""
    return state, [("elsewhere", {"v": 1})]


def split(state: Any, event: Event, index: int) -> tuple[Any, list[Any]]:
    """Even values to one stream, odd ones to another."""
    return state, [("odd" if event["v"] % 2 else "even", {"v": event["v"]})]


def picky(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """Never takes a 13."""
    if event["v"] == 13:
        raise ValueError("not a 13")
    return state + 1, [{"v": state}]


def numbers(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """The running sum of column n."""
    return state + event["n"], [{"v": state + event["n"]}]


def plain(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """The running sum of column v."""
    return state + event["v"], [{"v": state + event["v"]}]


def until_three(state: int, event: Event, index: int) -> tuple[int, list[dict[str, int]]]:
    """Rows above three, as long as no three came; then only those above fifty."""
    after = 50 if event["v"] == 3 else state or 3
    return after, [{"v": event["v"]}] if event["v"] > after else []
