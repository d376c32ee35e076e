"""Glom: rows that leave in order are grouped into built events (semantics.md section 3.8), one row
of the table ``built`` each.

A row within dt of the group's *first* row joins it, as long as there is room and it is of the same
section. A group is built when no later row can join: the next one does not, it is full, or the
release mark has passed its reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from tests.oracle.tables import read_rows_of, write_rows
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spec.event_time_options import GlomOptions

GLOM_KIND = "glom"


class Left(NamedTuple):
    """A row that left in order."""

    section: int
    time: int
    position: int


@dataclass(frozen=True, slots=True)
class Group:
    """A built event while it grows; `times` is empty before its first row."""

    number: int = 0
    section: int = 0
    position: int = 0
    times: tuple[int, ...] = ()

    def takes(self, row: Left, options: GlomOptions) -> bool:
        """Whether the row joins."""
        near = self.section == row.section and row.time - self.times[0] <= options.dt
        return near and len(self.times) < options.max_rows

    def closed(self, options: GlomOptions, mark: ReleaseMark) -> bool:
        """Whether no row at or above the mark can join any more."""
        return len(self.times) >= options.max_rows or mark > ReleaseMark(
            self.section, self.times[0] + options.dt
        )

    def row(self, options: GlomOptions) -> dict[str, Any]:
        """The built event as readers see it."""
        stamps = {
            "earliest": self.times[0],
            "latest": self.times[-1],
            "mean": sum(self.times) // len(self.times),
        }
        return {
            "number": self.number,
            "stamp": stamps[options.stamp],
            "section": self.section,
            "first_position": self.position,
            "rows": len(self.times),
            "first_time": self.times[0],
            "last_time": self.times[-1],
        }


def build(
    group: Group, rows: Iterable[Left], options: GlomOptions, mark: ReleaseMark
) -> tuple[list[Group], Group]:
    """Let rows join in order.

    Returns the groups that are built, and the one that still grows (or is to begin).
    """
    done: list[Group] = []
    for row in rows:
        if group.times and not group.takes(row, options):
            done.append(group)
            group = Group(group.number + 1)
        if not group.times:
            group = Group(group.number, row.section, row.position)
        group = replace(group, times=(*group.times, row.time))
    if group.times and group.closed(options, mark):
        done.append(group)
        group = Group(group.number + 1)
    return done, group


def built_schema() -> Any:
    """Columns of the built events."""
    numbers = [(name, pa.int64()) for name in ("section", "first_position", "rows")]
    times = [("first_time", TIMESTAMP_UTC), ("last_time", TIMESTAMP_UTC)]
    return pa.schema(
        [
            ("number", pa.int64()),
            ("stamp", TIMESTAMP_UTC),
            *numbers,
            *times,
            ("_timeline", pa.int32()),
            ("_epoch", pa.int64()),
        ]
    )


_STATE = pa.schema(
    [
        *((name, pa.int64()) for name in ("number", "section", "position")),
        ("times", pa.list_(pa.int64())),
    ]
)


def save_group(store: Store, key: str, group: Group) -> FileRef:
    """Write the group that still grows as a segment."""
    row = {
        "number": group.number,
        "section": group.section,
        "position": group.position,
        "times": list(group.times),
    }
    return write_rows(store, key, GLOM_KIND, _STATE, [row])


def load_group(store: Store, segments: Iterable[FileRef]) -> Group:
    """The group that grows; there is at most one such segment."""
    for segment in segments:
        for row in read_rows_of(store, segment):
            return Group(row["number"], row["section"], row["position"], tuple(row["times"]))
    return Group()
