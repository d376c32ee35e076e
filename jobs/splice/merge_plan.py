"""Plan a merge: compute its whole effect before anybody decides.

The impact report and the merge use the same plan:

1. Select the request's rows that are not merged yet, output by output.
2. Compute the window results that they change (`window_merge`).
3. Find the positions of the rows in the events table.
4. Compute what the inserted events do to the streams (`stream_merge`). A request that an attachment
   has collected goes into its stream by the same computation.

A plan reads only, and is refused if it cannot be exact (`docs/semantics.md`, section 6.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.splice_requests import SpliceRequest
from tidegate.jobs.engine.arrow_tables import convert_to_ticks, read_columns
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.sinks.output_tables import (
    IDENTITY_COLUMNS,
    SPLICE_COLUMN,
    build_table_schema,
    iterate_identities,
    make_request_schema,
)
from tidegate.jobs.sinks.table_scan import Ranges
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.time_units import format_instant, saturate_ticks

from .errors import NO_EVENTS, OTHER_SPEC, TOO_EARLY
from .stream_history import format_rewritten_rows
from .stream_merge import StreamEffect, StreamMerge
from .tables_at_head import (
    TablesAtHead,
    find_merge_segments,
    join_spans,
    select_rows_for_output,
    set_outputs,
)
from .window_merge import WindowChange, compute_window_changes


@dataclass
class MergePlan:
    """The effect of one request at one head of the log.

    Attributes:
        request: the request.
        head: the head; a merge seals the slot after it.
        rows: the rows to merge, with the outputs that they still miss in ``_outputs``.
        already: (row, output) pairs of the request that were merged before.
        first_position: current position of the first inserted row; rows before it do not move.
        changes: window -> results that change.
        tables: output -> rows to write, without provenance; none without rows.
        streams: what happens to the streams; None if nothing does.
        rows_read: rows that were read for the plan.
    """

    request: SpliceRequest
    head: LogHead
    rows: Any
    already: int = 0
    first_position: int | None = None
    changes: dict[str, list[WindowChange]] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    streams: StreamEffect | None = None
    rows_read: int = 0

    @property
    def events(self) -> Any:
        """Rows to insert, with the columns of the events table; None if there are none."""
        return self.tables.get(EVENTS)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to merge."""
        return int(self.rows.num_rows) == 0


def make_merge_plan(spec: PipelineSpec, log: SlotLog, request: SpliceRequest) -> MergePlan:
    """Compute the effect of a request at the head of the log.

    It does not look at the request's state.

    Raises:
        TooEarlyError: a driver could still take some of the rows, or change one of the results.
        ConfigurationError: the effect cannot be computed exactly, or the head was sealed with
            another spec, or there is none.
        PoisonError: the published results cannot be reproduced from the rows, or a reducer fails.
    """
    tables = TablesAtHead(spec, log)
    newest = tables.head.record
    if newest is None or newest.spec_digest != spec.digest():
        raise OTHER_SPEC(pipeline=spec.name)
    if not spec.outputs.events:
        raise NO_EVENTS(pipeline=spec.name)
    planner = _MergePlanner(tables, request)
    plan = planner.plan_into_stream() if request.origin == "attachment" else planner.plan()
    plan.rows_read = tables.rows_read
    return plan


class _MergePlanner:
    def __init__(self, tables: TablesAtHead, request: SpliceRequest) -> None:
        self._tables, self._spec, self._request = tables, tables.spec, request
        self._event_time = tables.spec.event_time_column

    def plan(self) -> MergePlan:
        """Plan a request for rows that missed the events table or windows."""
        spec, tables = self._spec, self._tables
        rows, already = self._select_unmerged_rows()
        plan = MergePlan(self._request, tables.head, rows, already)
        if plan.is_empty:
            return plan
        effects = compute_window_changes(tables, self._request.id, rows)
        plan.changes = {name: changes for name, (changes, _) in effects.items()}
        plan.tables = {name: table for name, (_, table) in effects.items() if table.num_rows}
        inserted = select_rows_for_output(rows, EVENTS)
        if inserted.num_rows:
            plan.tables[EVENTS], plan.first_position = self._make_inserted_events(inserted)
            # In pass_through mode the driver's next epoch dispatches the merged rows.
            if spec.streams and spec.release.mode is not ReleaseMode.PASS_THROUGH:
                self._add_stream_effect(plan, StreamMerge(tables).merge_into_events(plan.events))
        return plan

    def plan_into_stream(self) -> MergePlan:
        """Plan a request that an attachment has collected for its stream."""
        merge, request, head = StreamMerge(self._tables), self._request, self._tables.head
        rows = merge.history.read_collected_rows(request.id)
        if request.id in find_merge_segments(head) or rows.num_rows == 0:
            return MergePlan(request, head, rows.slice(0, 0), rows.num_rows)
        plan = MergePlan(request, head, rows)
        self._add_stream_effect(plan, merge.merge_into_stream(request.destination, request.id))
        return plan

    def _add_stream_effect(self, plan: MergePlan, effect: StreamEffect) -> None:
        plan.streams = effect
        for name, change in effect.changes.items():
            plan.tables[name] = format_rewritten_rows(change, plan.request.id)
        if effect.rejections is not None:
            plan.tables[REJECTIONS] = effect.rejections

    def _select_unmerged_rows(self) -> tuple[Any, int]:
        """Return the rows with the outputs that they miss, and the count of pairs merged before."""
        schema = make_request_schema(self._spec)
        rows = read_columns(self._tables.log.store, self._request.row_files(), schema)
        known, merged = {EVENTS, *self._spec.windows}, self._tables.merged.slots
        outputs, already = [], 0
        for who, names in zip(iterate_identities(rows), rows["_outputs"].to_pylist(), strict=True):
            missed = [n for n in names or () if n in known and (who, n) not in merged]
            already += len(names or ()) - len(missed)
            outputs.append(missed)
        return set_outputs(rows, outputs), already

    # The events table

    def _make_inserted_events(self, rows: Any) -> tuple[Any, int]:
        """Return the rows for the events table, in order, and the first position that changes."""
        sources = pa.array(list(self._spec.sources), pa.string())
        rank = pc.fill_null(pc.index_in(rows["_source"], value_set=sources), len(sources))
        order = [(n, "ascending") for n in (self._event_time, "_rank", "_partition", "_seq")]
        rows = rows.append_column("_rank", rank).sort_by(order).drop_columns(["_rank"])
        count = rows.num_rows
        times = convert_to_ticks(rows[self._event_time])
        if self._spec.release.mode is ReleaseMode.PASS_THROUGH:
            # Rows are in order of arrival, so merged rows are appended.
            first = self._tables.newest.next_position
            positions = list(range(first, first + count))
            sections = [self._tables.newest.section] * count
        else:
            sections = self._assign_sections(rows, times.to_pylist())
            marks = list(zip(sections, times.to_pylist(), strict=True))
            self._require_released(marks)
            positions = find_anchor_positions(self._tables, self._event_time, marks)
            first = min(positions) + 1
        schema = build_table_schema(self._spec, EVENTS)
        events = {
            **{name: rows[name].cast(schema.field(name).type) for name in self._spec.row_columns},
            "position": pa.array(positions, pa.int64()),
            "section": pa.array(sections, pa.int64()),
            "_late": pa.repeat(False, count),
            **{name: rows[name] for name in IDENTITY_COLUMNS},
            SPLICE_COLUMN: pa.repeat(self._request.id, count),
        }
        return pa.table(events), first

    def _assign_sections(self, rows: Any, times: Sequence[int]) -> list[int]:
        """Return the section of each row; for retired epochs it is found by the row's time."""
        sections = rows["_section"].to_pylist()
        unknown = [t for t, section in zip(times, sections, strict=True) if section is None]
        found = iter(find_sections(self._tables, self._event_time, unknown) if unknown else ())
        return [next(found) if section is None else section for section in sections]

    def _require_released(self, marks: Sequence[tuple[int, int]]) -> None:
        """Refuse rows that are not behind the newest released event: a driver may release them."""
        reached = ReleaseMark(*self._tables.newest.release_after)
        waiting = [time for section, time in marks if ReleaseMark(section, time) >= reached]
        if waiting:
            raise TOO_EARLY(
                pipeline=self._spec.name,
                request=self._request.id,
                why=f"{len(waiting)} rows, up to {format_instant(max(waiting))}, are not behind the"
                " newest released event",
            )


# The positions of inserted rows.
#
# Rows are inserted by stamp, after existing rows with the same stamp (docs/semantics.md, section
# 6.4). The stored `position` of an existing row never changes. An inserted row stores the position
# of its anchor, the row that it follows, or -1 if it precedes all rows; its request's id tells it
# from the anchor. The current position is the rank in that order (jobs/sinks/output_tables.py). So
# a merge writes only its own rows, however long the stream is
# (docs/decisions/0041-stored-positions-never-change.md).

# Ticks around a row that are searched for its anchor, one after the other (1 s, 1 min, 1 h). If
# none of them contains it, the whole stream is read.
_SEARCH_RADII = (1_000_000, 60_000_000, 3_600_000_000, None)

OrderedRows = tuple[Any, Any, Any]
"""Positions, sections and times of rows, in order of positions."""


def find_anchor_positions(
    tables: TablesAtHead, time: str, marks: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the anchor position of each row to insert; -1 if it precedes all rows.

    Args:
        tables: the tables at the head.
        time: the event time column.
        marks: (section, time in ticks) of the rows.
    """
    anchors: dict[tuple[int, int], int] = {}
    for radius in _SEARCH_RADII:
        missing = sorted({mark for mark in marks if mark not in anchors})
        if not missing:
            break
        ranges: Ranges = {}
        if radius is not None:
            spans = [(saturate_ticks(t - radius), saturate_ticks(t + radius)) for _, t in missing]
            ranges = {time: join_spans(spans)}
        rows = _read_ordered_rows(tables, time, ranges)
        found = {mark: _find_anchor(rows, *mark, radius) for mark in missing}
        anchors |= {mark: anchor for mark, anchor in found.items() if anchor is not None}
    return [anchors[mark] for mark in marks]


def find_sections(tables: TablesAtHead, time: str, times: Sequence[int]) -> list[int]:
    """Return sections for rows whose epoch was retired, from their times.

    It is the first section that ends after the row's time, or the last one; 0 without events.
    """
    _, sections, stamps = _read_ordered_rows(tables, time)
    ends = [(int(n), int(stamps[sections == n].max())) for n in np.unique(sections)]
    return [next((n for n, end in ends if end > t), ends[-1][0] if ends else 0) for t in times]


def _read_ordered_rows(
    tables: TablesAtHead, time: str, ranges: Ranges | None = None
) -> OrderedRows:
    """Read the rows that can be anchors, in order; all of them without `ranges`.

    Inserted rows are no anchors, and neither are rows that were released late and flagged: they are
    not in the order of time.
    """
    columns = ["position", "section", "_late", SPLICE_COLUMN, time]
    rows = tables.read_rows(EVENTS, columns, ranges)
    is_late = pc.fill_null(rows["_late"], False)
    rows = rows.filter(pc.and_(pc.is_null(rows[SPLICE_COLUMN]), pc.invert(is_late)))
    rows = rows.sort_by("position")
    stamps = convert_to_ticks(rows[time])
    return rows["position"].to_numpy(), rows["section"].to_numpy(), stamps.to_numpy()


def _find_anchor(rows: OrderedRows, section: int, time: int, radius: int | None) -> int | None:
    """Return the anchor if a neighbour in the section is within the radius; otherwise None.

    Rows further away were not read, so without a near neighbour nothing follows. With the radius
    None all rows were read.
    """
    positions, sections, stamps = rows
    begin, end = np.searchsorted(sections, [section, section + 1])
    index = begin + int(np.searchsorted(stamps[begin:end], time, side="right"))
    if radius is None:
        return int(positions[index - 1]) if index > 0 else -1
    if index > begin and stamps[index - 1] >= time - radius:
        return int(positions[index - 1])
    if index < end and stamps[index] < time + radius:
        return int(positions[index]) - 1
    return None
