"""What streams did in commit e3dab94, by its own names: the test says what should hold."""

from __future__ import annotations

from typing import Any

import pytest
from tests.streams.support import World, streams_spec

from tidegate.jobs.streams.stream_rows import LogHistory


def test_core_c13(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is added reads no row of the history: it needs the last time alone."""
    world = World(streams_spec(release={"mode": "pass_through"}))
    for second in range(1, 7):
        world.epoch((second, second))
    read: list[int] = []
    read_rows = LogHistory.read_rows

    def note_rows(history: LogHistory, *range_: Any) -> Any:
        rows = read_rows(history, *range_)
        read.append(rows.num_rows)
        return rows

    monkeypatch.setattr(LogHistory, "read_rows", note_rows)
    streams = {"copy": {"schema": {"v": "long"}}}
    world.driver(spec=streams_spec(release={"mode": "pass_through"}, streams=streams))
    world.epoch((7, 7))
    assert sum(read) == 0
