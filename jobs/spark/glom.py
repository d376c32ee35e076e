"""Glom: rows that leave in order are grouped into built events (semantics.md section 3.8), one row of the table ``built`` each.

The events of an epoch are written in order, so their times alone, read back, give the groups: where a group that starts at a row
ends is one binary search for all rows at once, and then one step per group. The group that still grows is one row of state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.columns import TIMESTAMP
from tidegate.jobs.eventtime.types import Mark
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.order import Released
from tidegate.jobs.spark.write import Written
from tidegate.jobs.spec.options import GlomOptions
from tidegate.jobs.spec.pipeline import BUILT
from tidegate.jobs.spec.time import saturate

__all__ = ["GLOM_KIND", "Glommed", "glom"]

GLOM_KIND: Final = "glom"
_STATE: Final = ("number", "section", "first_position", "rows", "first_time", "last_time", "offsets")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Glommed:
    """The built events of an epoch, and the state of the group that still grows."""

    built: Written
    state: Written
    segments: tuple[FileRef, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of rows; `offsets` is the sum of their times, each less the first."""

    number: int = 0
    section: int = 0
    first_position: int = 0
    rows: int = 0
    first_time: int = 0
    last_time: int = 0
    offsets: int = 0

    def stamp(self, policy: str) -> int:
        """Its time as the policy has it."""
        mean = self.first_time + self.offsets // max(self.rows, 1)
        return {"earliest": self.first_time, "latest": self.last_time, "mean": mean}[policy]

    def closed(self, options: GlomOptions, mark: Mark) -> bool:
        """Whether no row at or above the mark can join any more."""
        return self.rows >= options.max_rows or mark > Mark(self.section, saturate(self.first_time + options.dt))


def glom(epoch: Epoch, released: Released) -> Glommed:
    """Group what this epoch released in order; late rows, which leave at once, are in no group."""
    options, before = epoch.spec.release.glom, epoch.segments(GLOM_KIND)
    nothing = Written((), ())
    if options is None:
        return Glommed(nothing, nothing, ())
    group = _loaded(epoch, before)
    sections, times, position = _ordered(epoch, released)
    groups = list(_groups(group, sections, times, position, options))
    last = groups.pop()
    if last.rows and last.closed(options, epoch.order.decision.release_after):
        groups.append(last)
        last = _Group(last.number + 1)
    if last == group and before:
        return Glommed(nothing, nothing, tuple(before))
    state = epoch.writer.segment(GLOM_KIND, pa.table({name: [getattr(last, name)] for name in _STATE}), None)
    return Glommed(epoch.writer.table(BUILT, _table(epoch, groups, options), "stamp"), state, state.refs)


def _loaded(epoch: Epoch, segments: list[FileRef]) -> _Group:
    frame = epoch.load(segments)
    rows = [] if frame is None else frame.select(*_STATE).toArrow().to_pylist()
    return _Group(**rows[0]) if rows else _Group()


def _ordered(epoch: Epoch, released: Released) -> tuple[Ints, Ints, int]:
    """Section and time of the rows that left in order, and the position of the first."""
    first = epoch.order.next_position + released.flagged
    times = {source.event_time for source in epoch.spec.sources.values()}
    table = released.events.read(["position", "section", "_source", *times])
    if table is None:
        none = np.zeros(0, dtype=np.int64)
        return none, none, first
    place = table["position"].to_numpy() - epoch.order.next_position
    stamps = np.zeros(len(place), dtype=np.int64)
    sources = np.asarray(table["_source"].to_pylist()) if len(times) > 1 else None
    for name, source in epoch.spec.sources.items():
        own = table[source.event_time].cast(pa.int64()).to_numpy()
        stamps = own if sources is None else np.where(sources == name, own, stamps)
    order = np.argsort(place, kind="stable")[released.flagged :]
    return table["section"].to_numpy()[order], stamps[order], first


def _groups(group: _Group, sections: Ints, times: Ints, position: int, options: GlomOptions) -> Iterator[_Group]:
    """Every group in order, the one that grows last."""
    place = 0
    if group.rows and times.size:
        room = options.max_rows - group.rows
        own = times[: np.searchsorted(sections, group.section, "right")]  # none, if the section has ended
        place = min(room, int(np.searchsorted(own, group.first_time + options.dt, "right")))
        group = _grown(group, times[:place])
        if place == times.size:
            yield group
            return
    if group.rows:
        if not times.size:
            yield group
            return
        yield group
        group = _Group(group.number + 1)
    number, ends = group.number, _ends(sections, times, options)
    while place < times.size:
        end = int(ends[place])
        start = _Group(number, int(sections[place]), position + place, 0, int(times[place]))
        yield _grown(start, times[place:end])
        number, place = number + 1, end
    if not times.size:
        yield group


def _ends(sections: Ints, times: Ints, options: GlomOptions) -> Ints:
    """Per row, where a group that starts with it ends."""
    ends = np.minimum(np.arange(times.size, dtype=np.int64) + options.max_rows, times.size)
    for section in np.unique(sections):
        low, high = np.searchsorted(sections, section, "left"), np.searchsorted(sections, section, "right")
        own = times[low:high]
        ends[low:high] = np.minimum(np.minimum(ends[low:high], high), low + np.searchsorted(own, own + options.dt, "right"))
    return ends


def _grown(group: _Group, times: Ints) -> _Group:
    if not times.size:
        return group
    offsets = group.offsets + int((times - group.first_time).sum())
    rows, last = group.rows + times.size, int(times[-1])
    return _Group(group.number, group.section, group.first_position, rows, group.first_time, last, offsets)


def _table(epoch: Epoch, groups: list[_Group], options: GlomOptions) -> Any:
    def ints(name: str) -> Any:
        return pa.array([getattr(one, name) for one in groups], pa.int64())

    return pa.table(
        {
            "number": ints("number"),
            "stamp": pa.array([one.stamp(options.stamp) for one in groups], pa.int64()).cast(TIMESTAMP),
            **{name: ints(name) for name in ("section", "first_position", "rows")},
            **{name: ints(name).cast(TIMESTAMP) for name in ("first_time", "last_time")},
            "_timeline": pa.array([epoch.order.timeline] * len(groups), pa.int32()),
            "_epoch": pa.array([epoch.order.epoch] * len(groups), pa.int64()),
        }
    )
