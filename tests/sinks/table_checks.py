"""Whether a published table holds every row of the log once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidegate.jobs.sinks.table_follower import TableFollower


def once(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    when: Callable[[TableFollower], bool],
    act: Callable[[], object],
) -> None:
    """Let somebody else act at the moment between load and commit.

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
