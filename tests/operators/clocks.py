"""A clock on which something else happens while someone waits."""

from __future__ import annotations

from collections.abc import Callable

from tests.manual_clock import ManualClock


class World(ManualClock):
    """A clock on which something else happens whenever someone waits."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.meanwhile()
