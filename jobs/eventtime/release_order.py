"""Ordered release: up to which mark buffered rows leave (semantics.md section 3, 1 to 3).

The mover keeps the order buffer itself. This module keeps only marks and, for the build window, one
entry per epoch that read rows: when it read, in which section, and its largest time. An entry that
is not larger than an older one adds nothing, so the list grows in age and in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate.jobs.eventtime.decision_types import FIRST_RELEASE_MARK, ReleaseMark
from tidegate.jobs.eventtime.pipeline_clock import has_expired
from tidegate.jobs.spec.event_time_options import OrderOptions


@dataclass(slots=True)
class ReleaseOrder:
    """Marks and residence of the order buffer.

    Attributes:
        options: see `OrderOptions`.
        released: every row below this mark has left.
        reach: the mark that follows from frontiers alone: no row in order can still come below it.
        entries: ``[read_at, section, max_time]`` per epoch, oldest first.
        grace_from: pipeline clock of the first event of this run; None before it.
        grace_over: the start-up grace of this run has passed.
    """

    options: OrderOptions
    released: ReleaseMark = FIRST_RELEASE_MARK
    reach: ReleaseMark = FIRST_RELEASE_MARK
    entries: list[list[int]] = field(default_factory=list)
    grace_from: int | None = None
    grace_over: bool = False

    @classmethod
    def from_dict(cls, options: OrderOptions, data: Mapping[str, Any]) -> ReleaseOrder:
        """Read the form of `to_dict`."""
        marks = ReleaseMark(*data["released"]), ReleaseMark(*data["reach"])
        return cls(options, *marks, list(data["entries"]), data["grace_from"], data["grace_over"])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready state."""
        return {
            "released": list(self.released),
            "reach": list(self.reach),
            "entries": self.entries,
            "grace_from": self.grace_from,
            "grace_over": self.grace_over,
        }

    def start_run(self) -> None:
        """Begin a new run: its start-up grace starts again."""
        self.grace_from, self.grace_over = None, False

    def in_grace(self, clock: int, *, events: bool) -> bool:
        """Advance the start-up grace to `clock` and return whether it still holds everything back.

        To be called once per epoch. The grace starts with the run's first epoch that has read
        something (`events`), and everything is held before that, too. Without `startup_grace`
        nothing is held.
        """
        if self.grace_over or self.options.startup_grace == 0:
            return False
        if self.grace_from is None and events:
            self.grace_from = clock
        self.grace_over = self.grace_from is not None and has_expired(
            clock, self.grace_from, self.options.startup_grace
        )
        return not self.grace_over

    def note_read(self, clock: int, section: int, max_time: int) -> None:
        """Note that this epoch read rows up to `max_time`; does nothing without a build window."""
        if self.options.build_window is None or (section, max_time) < self.released:
            # Nothing will ever expire, so the list must not grow; or the row is late or leaves at
            # once, and does not stay.
            return
        if not self.entries or (section, max_time) > (self.entries[-1][1], self.entries[-1][2]):
            self.entries.append([clock, section, max_time])

    def latest_expired_time(self, clock: int, section: int, awaited: int | None) -> int | None:
        """Return the largest time in the section whose residence has expired.

        None if there is none.

        Args:
            clock: pipeline clock.
            section: the current section.
            awaited: least frontier of members that still had rows to read; no row at or above it
                expires.
        """
        times = [
            time
            for read_at, of, time in self.entries
            if of == section
            and has_expired(clock, read_at, self.options.build_window)
            and (awaited is None or time < awaited)
        ]
        return max(times, default=None)

    def release(self, mark: ReleaseMark) -> ReleaseMark:
        """Raise the released mark to `mark`, never lower it, and return the released mark.

        Forget entries below it.
        """
        self.reach = max(self.reach, mark)
        self.released = max(self.released, mark)
        self.entries = [e for e in self.entries if (e[1], e[2]) >= self.released]
        return self.released

    def next_timer(self) -> int | None:
        """Return when the grace or the next residence ends, on the pipeline clock.

        None: no timer runs.
        """
        if self.grace_from is not None and not self.grace_over:
            return self.grace_from + self.options.startup_grace
        if self.options.build_window is None or not self.entries:
            return None
        return self.entries[0][0] + self.options.build_window

    def expire_up_to(self, mark: ReleaseMark) -> None:
        """Release the rows up to and including the mark; `reach` stays.

        Their residence has expired, so no frontier is needed.
        """
        self.released = max(self.released, ReleaseMark(mark.section, mark.time + 1))
