"""Progress lines of long steps, each with the seconds since the first."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Takes one line of plain text.
Progress = Callable[[str], None]


class TimedProgress:
    """Writes lines of progress, with the seconds since this object was made in front."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._began = progress, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._began

    def __call__(self, line: str) -> None:
        """Pass one line on."""
        self._progress(f"[{self.elapsed:5.1f} s] {line}")
