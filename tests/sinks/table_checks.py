"""Published tables with an epoch in each commit, and interference at the moment of a commit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.sinks.conftest import World
from tests.sinks.flight_tables import make_world

from tidegate.jobs.sinks.table_follower import TableFollower


class InlinePool:
    """A pool that does one thing after the other, in the thread that asks."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        """Return the finished call."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given))
        except BaseException as error:
            done.set_exception(error)
        return done


def once(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    when: Callable[[TableFollower], bool],
    act: Callable[[], object],
) -> None:
    """Let someone else act at the moment between load and commit.

    Just before `Follower.target` runs.
    """
    original = getattr(TableFollower, target)
    done: list[bool] = []

    def interrupted(self: TableFollower, *args: Any, **more: Any) -> None:
        if not done and when(self):
            done.append(True)
            act()
        original(self, *args, **more)

    monkeypatch.setattr(TableFollower, target, interrupted)


def is_table(name: str) -> Callable[[TableFollower], bool]:
    """Whether a follower is that table."""
    return lambda follower: follower.table.name()[-1] == name


def filled(folder: Path, slots: int = 6, **outputs: Any) -> World:
    """A world with an epoch in each snapshot of its tables."""
    world = make_world(folder, **outputs)
    sink = world.sink()
    for _ in range(slots):
        world.seal(1, ("events",), rows=3)
        sink.follow(world.log)
    return world


def before_the_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen between the writing of merged files of `events` and their first commit."""
    original = TableFollower.replace_files

    def replace(self: TableFollower, *args: Any) -> None:
        if self.table.name()[-1] == "events":
            monkeypatch.setattr(TableFollower, "replace_files", original)
            act()
        original(self, *args)

    monkeypatch.setattr(TableFollower, "replace_files", replace)
