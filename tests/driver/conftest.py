"""Fixtures of the driver's tests."""

from __future__ import annotations

import pytest

from tidegate.jobs.driver import epoch_loop


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run asks its sinks every 10 ms."""
    monkeypatch.setattr(epoch_loop, "_SINK_POLL_INTERVAL", 0.01)
