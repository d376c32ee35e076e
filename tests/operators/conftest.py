"""Fixtures of the Airflow side."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

Wait = Callable[..., None]


@pytest.fixture
def wait_until() -> Wait:
    """Wait for a condition on real processes; fails when it does not come true in time."""

    def wait(condition: Callable[[], object], seconds: float = 10.0, what: str = "the condition") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {seconds:.0f} s"
            time.sleep(0.05)

    return wait
