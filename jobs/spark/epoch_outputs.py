"""What the parts of a move have written, joined into the result and the counters of the epoch.

Built events (glom, docs/semantics.md, section 3.8) are made here too, from the events that the
epoch has written in order. Their times alone, read back, give the groups: where a group ends is a
binary search. The group that still grows is one row of state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.row_counts import (
    LATE_ROWS,
    TARDY,
    name_late_counts,
)
from tidegate.jobs.engine.interfaces import MoveResult
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.rows.late_rows import LateCounts, SourceCounts
from tidegate.jobs.sinks.output_tables import build_system_schema
from tidegate.jobs.spec.event_time_options import GlomOptions
from tidegate.jobs.spec.pipeline import BUILT, DEAD_LETTERS, EVENTS, LATE
from tidegate.jobs.spec.row_rules import FILTERED, RULE_QUARANTINED
from tidegate.time_units import saturate_ticks

from .cut_survey import EpochScans
from .edge_events import EpochEdges
from .epoch_context import EpochContext, OutputFiles
from .late_and_dead_rows import CountedRows
from .ordered_release import ReleasedRows, count_buffered_rows

# Counts of an epoch that are sums over its sources.
_TOTALS = ("read", "released", "late", "rejected", "dead_lettered", RULE_QUARANTINED, FILTERED)


@dataclass(frozen=True)
class EpochOutputs:
    """The outputs of one epoch.

    Attributes:
        scans: what the survey found.
        released: the events that left, and the order buffer.
        late: rows of the late table.
        dead: rows of the dead-letter table, and rows that break rules.
        edges: open edge events.
        windows: window -> its results and state.
    """

    scans: EpochScans
    released: ReleasedRows
    late: CountedRows
    dead: CountedRows
    edges: EpochEdges
    windows: dict[str, OutputFiles]

    def to_result(self, epoch: EpochContext) -> MoveResult:
        """Build the events that `glom` asks for and return the result of the move."""
        released, built = self.released, build_events(epoch, self.released)
        stateful = (released, built, self.edges, *self.windows.values())
        tables = {
            EVENTS: released.results,
            BUILT: built.results,
            LATE: self.late.written,
            DEAD_LETTERS: self.dead.written,
            **{name: window.results for name, window in self.windows.items()},
        }
        # Segments that the epoch took over are not counted: they cost it no write.
        states = [output.written for output in stateful]
        segments = tuple(ref for output in stateful for ref in output.segments)
        # Counted from the segments and not from the rows moved: the balance of the counters checks
        # one against the other.
        decision = epoch.decision
        known = released.waiting.items()
        before, after = (
            count_buffered_rows(epoch, own, mark, {key: rows[place] for key, rows in known})
            for place, (own, mark) in enumerate(
                (
                    (epoch.order.segments, decision.release_before),
                    (segments, decision.release_after),
                )
            )
        )
        return MoveResult(
            files={name: written.refs for name, written in tables.items() if written.refs},
            segments=segments,
            counters=self.counters(before, after, decision.flagged),
            released_max=released.maximum,
            next_position=epoch.order.next_position + released.rows,
            sketches=self.scans.sketches,
            bytes_written=sum(written.bytes for written in (*tables.values(), *states)),
        )

    def counters(
        self, buffered_before: int, buffered_after: int, flagged: Collection[str] = ()
    ) -> EpochCounters:
        """Count each row by what became of it.

        Args:
            buffered_before: rows in the order buffer before the epoch.
            buffered_after: rows in it after the epoch.
            flagged: members whose rows of this epoch stood in front of a tardy barrier.
        """
        rows, late = SourceCounts(), self.late.late + self.dead.late
        self._count_surveyed(rows, late, flagged)
        for counted in (self.released.counts, self.dead.counts, self.late.counts):
            rows.update(counted)
        dropped, late_by_output = Counter[str](), Counter[str]()
        for (source, output, reason, is_dropped), missed in late.items():
            for name in name_late_counts(output, reason, dropped=is_dropped):
                rows[source, name] += missed
            if is_dropped and output == EVENTS:
                dropped[reason] += missed
            else:
                late_by_output[output] += missed
        per_source, totals = dict[str, dict[str, int]](), Counter[str]()
        for (source, name), number in sorted(rows.items()):
            if number:  # zeros stay out of the manifest; a count below zero is shown as it is
                per_source.setdefault(source, {})[name] = number
                totals[name] += number
        results = Counter({name: window.results.rows for name, window in self.windows.items()})
        overflowed = Counter({name: window.overflowed for name, window in self.windows.items()})
        return EpochCounters(
            **{name: totals[name] for name in _TOTALS},
            retained_before=buffered_before,
            retained=buffered_after,
            dropped=dict(+dropped),
            late_by_output=dict(+late_by_output),
            windows=dict(+results),
            overflowed=dict(+overflowed),
            per_source=per_source,
        )

    def _count_surveyed(
        self, rows: SourceCounts, late: LateCounts, flagged: Collection[str]
    ) -> None:
        verdicts = self.scans.count_verdicts()
        for index, member in enumerate(self.scans.survey.members):
            source = member.member.source
            rows[source, "read"] += member.rows + member.quarantined + member.dead
            dropped = verdicts[index, "dropped"]
            late[source, EVENTS, "cti_violation", True] += dropped
            rows[source, LATE_ROWS] += dropped
            if str(member.member) in flagged:
                aside = dropped + verdicts[index, "cti_violation"]
                rows[source, TARDY] += member.rows - aside


GLOM_KIND = "glom"
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _EventGroup:
    """A group of rows; `offsets` is the sum of their times, each less the first."""

    number: int = 0
    section: int = 0
    first_position: int = 0
    rows: int = 0
    first_time: int = 0
    last_time: int = 0
    offsets: int = 0

    def choose_stamp(self, policy: str) -> int:
        """Its time as the policy has it."""
        mean = self.first_time + self.offsets // max(self.rows, 1)
        return {"earliest": self.first_time, "latest": self.last_time, "mean": mean}[policy]

    def is_closed(self, options: GlomOptions, mark: ReleaseMark) -> bool:
        """Whether no row at or above the mark can join any more."""
        return self.rows >= options.max_rows or mark > ReleaseMark(
            self.section, saturate_ticks(self.first_time + options.dt)
        )


def build_events(epoch: EpochContext, released: ReleasedRows) -> OutputFiles:
    """Group what this epoch released in order; late rows, which leave at once, are in no group.

    Without ``release.glom`` nothing is written, and no state stays.
    """
    options, before = epoch.spec.release.glom, epoch.live_segments(GLOM_KIND)
    if options is None:
        return OutputFiles()
    group = _load_open_group(epoch, before)
    sections, times, position = _read_released_times(epoch, released)
    groups = list(_split_into_groups(group, sections, times, position, options))
    # The last group still grows, unless the mark has passed all that could join it.
    last = groups.pop()
    if last.rows and last.is_closed(options, epoch.decision.release_after):
        groups.append(last)
        last = _EventGroup(last.number + 1)
    if last == group and before:
        return OutputFiles(segments=tuple(before))
    state = epoch.writer.write_segment(GLOM_KIND, pa.Table.from_pylist([asdict(last)]), None)
    table = _build_group_table(epoch, groups, options)
    return OutputFiles(epoch.writer.write_table(BUILT, table, "stamp"), state.refs, state)


def _load_open_group(epoch: EpochContext, segments: list[FileRef]) -> _EventGroup:
    if not segments:
        return _EventGroup()
    rows = epoch.read_segments(map(epoch.locate_segment, segments))
    return _EventGroup(**rows.to_pylist()[0])


def _read_released_times(epoch: EpochContext, released: ReleasedRows) -> tuple[Ints, Ints, int]:
    """Section and time of the rows that left in order, and the position of the first."""
    first = epoch.order.next_position + released.flagged
    time = epoch.spec.event_time_column
    table = released.results.read_columns(["position", "section", time])
    if table is None:
        none = np.zeros(0, dtype=np.int64)
        return none, none, first
    place = table["position"].to_numpy() - epoch.order.next_position
    stamps = table[time].cast(pa.int64()).to_numpy()
    # The files of a large release are read in any order; flagged late rows have the first
    # positions.
    order = np.argsort(place, kind="stable")[released.flagged :]
    return table["section"].to_numpy()[order], stamps[order], first


def _split_into_groups(
    group: _EventGroup, sections: Ints, times: Ints, position: int, options: GlomOptions
) -> Iterator[_EventGroup]:
    """Every group in order, the one that grows last."""
    place = 0
    while True:
        if not group.rows and place < times.size:
            start = int(sections[place]), position + place, 0, int(times[place])
            group = _EventGroup(group.number, *start)
        # Within a section times ascend, so a group's end is a search.
        own = times[place : np.searchsorted(sections, group.section, "right")]
        fitting = int(np.searchsorted(own, group.first_time + options.dt, "right"))
        end = place + min(options.max_rows - group.rows, fitting)
        yield (group := _extend_group(group, times[place:end]))
        place = end
        if place >= times.size:
            return
        group = _EventGroup(group.number + 1)


def _extend_group(group: _EventGroup, times: Ints) -> _EventGroup:
    if not times.size:
        return group
    # Distances from the first time: a sum of times themselves would overflow.
    offsets = group.offsets + int((times - group.first_time).sum())
    rows = group.rows + times.size
    return replace(group, rows=rows, last_time=int(times[-1]), offsets=offsets)


def _build_group_table(epoch: EpochContext, groups: list[_EventGroup], options: GlomOptions) -> Any:
    own = {"_timeline": epoch.order.timeline, "_epoch": epoch.order.epoch}
    rows = [asdict(one) | {"stamp": one.choose_stamp(options.stamp)} | own for one in groups]
    return pa.Table.from_pylist(rows, build_system_schema(BUILT))
