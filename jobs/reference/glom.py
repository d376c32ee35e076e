"""Glom: group ordered rows into built events (semantics.md section 3.8)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.jobs.reference.rows import Row
from tidegate.jobs.spec.options import GlomOptions

__all__ = ["Built", "glom"]


@dataclass(frozen=True)
class Built:
    """A built event: its stamp and the rows in it."""

    time: int
    rows: tuple[Row, ...]


def glom(rows: Iterable[Row], options: GlomOptions) -> list[Built]:
    """Group rows, given in order: a row within dt of the group's *first* row joins it, as long as there is room."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and row.time - groups[-1][0].time <= options.dt and len(groups[-1]) < options.max_rows:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [Built(_stamp([row.time for row in group], options.stamp), tuple(group)) for group in groups]


def _stamp(times: list[int], policy: str) -> int:
    if policy == "mean":
        return sum(times) // len(times)
    return times[-1] if policy == "latest" else times[0]
