"""Built events (glom, docs/semantics.md, section 3.8), as one task makes them.

The task reads back times and sections of the events that the epoch has written in order. These
give the groups: where a group ends is a binary search. The group that still grows is one row of
state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.arrow_tables import convert_to_ticks, read_parquet_object
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.sinks.output_tables import build_system_schema
from tidegate.jobs.spec.event_time_options import GlomOptions
from tidegate.jobs.spec.pipeline import BUILT
from tidegate.time_units import saturate_ticks

from .attempt_files import open_task_store, store_task_rows
from .event_files import FileAnswer

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventGroup:
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


@dataclass(frozen=True)
class BuildOrder:
    """What the task of an epoch gets.

    Attributes:
        options: how rows are grouped.
        time: the column of the event time.
        folders: where the attempt's files go.
        store: address of the pipeline's store.
        events: files of the epoch, in the order of their positions.
        position: of the first row in them.
        flagged: how many rows, the first ones, are in no group: late ones that left at once.
        group: the one that grows.
        mark: rows below it have left.
    """

    options: GlomOptions
    time: str
    folders: AttemptFolders
    store: str
    events: tuple[FileRef, ...]
    position: int
    flagged: int
    group: EventGroup
    mark: ReleaseMark


@dataclass
class BuildAnswer(FileAnswer):
    """As `FileAnswer`, of the groups that have ended; `group` is the one that grows."""

    group: EventGroup = field(default_factory=EventGroup)


def write_built_events(order: BuildOrder) -> BuildAnswer:
    """Write the groups that end in an epoch."""
    answer = BuildAnswer(0)
    with answer.report_work():
        tables = [_describe_groups(order, groups) for groups in _group_files(order, answer)]
        built = pa.concat_tables(tables)
        if built.num_rows:
            stem = f"{order.folders.table_prefix(BUILT)}part-00000"
            kind = f"table:{BUILT}"
            found = answer.footers
            file = store_task_rows(order.store, built, stem, kind, "stamp", {}, found)
            answer.files += (file,)
    return answer


def _group_files(order: BuildOrder, answer: BuildAnswer) -> Iterator[list[EventGroup]]:
    """Yield the groups that end in each file, and then the last one if it has ended."""
    group = order.group
    position = order.position
    none = order.position + order.flagged
    for ref in order.events:
        store = open_task_store(order.store)
        rows = read_parquet_object(store, ref.key, ref.sha256, ["section", order.time])
        sections = rows["section"].to_numpy()
        times = convert_to_ticks(rows[order.time]).to_numpy()
        outside = min(max(none - position, 0), times.size)
        groups = list(
            split_into_groups(
                group, sections[outside:], times[outside:], position + outside, order.options
            )
        )
        group = groups.pop()
        position = position + times.size
        yield groups
    # The last group still grows, unless the mark has passed all that could join it.
    ends = bool(group.rows) and group.is_closed(order.options, order.mark)
    yield [group] if ends else []
    answer.group = EventGroup(group.number + 1) if ends else group


def split_into_groups(
    group: EventGroup, sections: Ints, times: Ints, position: int, options: GlomOptions
) -> Iterator[EventGroup]:
    """Every group of rows in order, the one that grows last.

    Args:
        group: that grew before these rows.
        sections: of the rows.
        times: of the rows.
        position: of the first of them.
        options: how they are grouped.
    """
    place = 0
    while True:
        if not group.rows and place < times.size:
            start = int(sections[place]), position + place, 0, int(times[place])
            group = EventGroup(group.number, *start)
        # Within a section times ascend, so a group's end is a search.
        own = times[place : np.searchsorted(sections, group.section, "right")]
        fitting = int(np.searchsorted(own, group.first_time + options.dt, "right"))
        # A group that was left open may have more rows than the spec allows since then.
        end = place + max(min(options.max_rows - group.rows, fitting), 0)
        group = _extend_group(group, times[place:end])
        yield group
        place = end
        if place >= times.size:
            return
        group = EventGroup(group.number + 1)


def _extend_group(group: EventGroup, times: Ints) -> EventGroup:
    if not times.size:
        return group
    # Distances from the first time: a sum of times themselves would overflow.
    offsets = group.offsets + int((times - group.first_time).sum())
    rows = group.rows + times.size
    return replace(group, rows=rows, last_time=int(times[-1]), offsets=offsets)


def _describe_groups(order: BuildOrder, groups: list[EventGroup]) -> pa.Table:
    """Rows of the table of built events."""
    attempt = order.folders.attempt
    policy = order.options.stamp
    columns: dict[str, list[int]] = {
        name: [getattr(one, name) for one in groups]
        for name in ("number", "section", "first_position", "rows", "first_time", "last_time")
    }
    columns["stamp"] = [one.choose_stamp(policy) for one in groups]
    columns["_timeline"] = [attempt.timeline] * len(groups)
    columns["_epoch"] = [attempt.slot] * len(groups)
    schema = build_system_schema(BUILT)
    return pa.table(
        {name: pa.array(columns[name], schema.field(name).type) for name in schema.names}
    )
