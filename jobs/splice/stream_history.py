"""The streams before a merge, read from the log and the tables.

A merge into streams is computed from a base on: the newest checkpoint before the insertion from
which the streams can be continued. See
`docs/decisions/0044-a-merge-rewrites-streams-from-the-first-changed-row.md`.

Rows of a stream are Arrow tables with the columns of `make_stream_columns`, in order of their
positions, with the slots in which they arrived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import conform_to_schema, replace_column, to_arrow_types
from tidegate.jobs.sinks.output_tables import (
    ARRIVAL_SLOT_COLUMN,
    IDENTITY_COLUMNS,
    SPLICE_COLUMN,
    find_rewrite_starts,
    select_current_rows,
)
from tidegate.jobs.spec.pipeline import CHECKPOINTS, EVENTS
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM
from tidegate.jobs.streams.row_history import list_stream_merges
from tidegate.jobs.streams.stream_rows import (
    PROVENANCE_FIELDS,
    read_arrivals,
    select_request_segments,
    sort_stably,
    to_event_rows,
)
from tidegate.jobs.streams.stream_state import DispatchState
from tidegate.time_units import TICK_MAX, TICK_MIN

from .errors import INCOMPLETE
from .tables_at_head import TablesAtHead

ARRIVAL_SLOT = "_turn"
"""Column with the slot in which a row arrived.

A merged row counts as arrived with the row before it, or with the first row if it is the first.
Until `fill_arrival_slots` has worked that out, the column holds the negative slot of its merge."""
NEVER = 2**62
"""The slot of what has not happened yet."""


@dataclass(frozen=True)
class StreamChange:
    """A stream from its first changed row on.

    Attributes:
        first: position of the first changed row.
        rows: the rows after the merge.
        old: the rows before the merge.
    """

    first: int
    rows: Any
    old: Any


def make_stream_columns(columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a stream's rows with their Arrow types; `columns` are the user's."""
    return {
        **to_arrow_types(columns),
        "position": pa.int64(),
        "stream_time": pa.int64(),
        **PROVENANCE_FIELDS,
        ARRIVAL_SLOT: pa.int64(),
    }


def add_arrival_slot(rows: Any, slot: int) -> Any:
    """Return rows that all arrived in one slot; negative: that all were merged in it."""
    return rows.append_column(ARRIVAL_SLOT, pa.repeat(slot, rows.num_rows))


def fill_arrival_slots(slots: Any) -> Any:
    """Replace the negative slots of merged rows; the result never decreases."""
    given = np.asarray(slots)
    arrived = given > 0
    front = int(np.argmax(arrived)) if arrived.any() else len(given)
    filled = np.where(arrived, given, TICK_MIN)
    # Merged rows in front of all others arrive with the first one, but not after their own merge.
    first = given[front] if front < len(given) else NEVER
    filled[:front] = np.minimum(first, -given[:front])
    return pa.array(np.maximum.accumulate(filled), pa.int64())


def order_stream_rows(parts: Sequence[Any], position: int) -> Any:
    """Return the rows of all parts by stamp, with positions from `position` and arrival slots.

    On ties the rows of earlier parts come first.
    """
    rows = pa.concat_tables(parts)
    rows = sort_stably(rows, rows["stream_time"])
    positions = pa.array(range(position, position + rows.num_rows), pa.int64())
    rows = replace_column(rows, "position", positions)
    return replace_column(rows, ARRIVAL_SLOT, fill_arrival_slots(rows[ARRIVAL_SLOT]))


def find_first_difference(old: Any, new: Any) -> int | None:
    """Return the number of the first row that differs between two tables; None if none does."""
    # Compared column by column without a loop over rows; null equals null here.
    shared = min(old.num_rows, new.num_rows)
    same = np.ones(shared, bool)
    for name in new.column_names:
        a, b = (table[name].slice(0, shared) for table in (old, new))
        both_null = pc.and_(pc.is_null(a), pc.is_null(b))
        same &= np.asarray(pc.or_(pc.fill_null(pc.equal(a, b), False), both_null))
    if not same.all():
        return int(np.argmin(same))
    return None if old.num_rows == new.num_rows else shared


def format_rewritten_rows(change: StreamChange, request: str) -> Any:
    """Return the rows of a change as the merge writes them into the stream's table.

    If the change leaves no rows, one row without `_id` marks where the stream ends now.
    """
    rows = change.rows
    if rows.num_rows == 0:
        values = {name: [None] for name in rows.column_names} | {"position": [change.first]}
        rows = pa.table(values, schema=rows.schema)
    times = rows["stream_time"].cast(pa.timestamp("us", tz="UTC"))
    rows = replace_column(rows, "stream_time", times).rename_columns(
        [ARRIVAL_SLOT_COLUMN if name == ARRIVAL_SLOT else name for name in rows.column_names]
    )
    return rows.append_column(SPLICE_COLUMN, pa.repeat(request, rows.num_rows))


def slice_slot(rows: Any, slot: int) -> Any:
    """Return the rows that arrived in a slot, of rows sorted by it, without that column."""
    slots = rows[ARRIVAL_SLOT].to_numpy()
    begin, end = np.searchsorted(slots, [slot, slot + 1])
    return rows.slice(begin, end - begin).drop_columns([ARRIVAL_SLOT])


def apply_caught_up_slots(
    slots: Any, caught_up: Sequence[tuple[int, int, int]], cursor: int, begin: int
) -> Any:
    """Return the slots in which an attachment took rows, from the slots in which they arrived.

    `NEVER` for rows from `cursor` on.

    Args:
        slots: the slot in which each row arrived.
        caught_up: `AttachmentState.caught_up`: rows that were taken later than they arrived.
        cursor: position of the first row that was not taken yet.
        begin: position of the first of `slots`.
    """
    taken = slots.copy()
    for start, end, slot in caught_up:
        low, high = max(start - begin, 0), max(end - begin, 0)
        taken[low:high] = np.maximum(taken[low:high], slot)
    taken[max(cursor - begin, 0) :] = NEVER
    return taken


def find_caught_up_ranges(arrived: Any, taken: Any, begin: int) -> list[tuple[int, int, int]]:
    """Return `AttachmentState.caught_up` for rows from `begin` on; the inverse of the above."""
    ranges: list[tuple[int, int, int]] = []
    for index in np.flatnonzero((taken > arrived) & (taken < NEVER)):
        position, slot = begin + int(index), int(taken[index])
        if ranges and ranges[-1][1:] == (position, slot):
            ranges[-1] = (ranges[-1][0], position + 1, slot)
        else:
            ranges.append((position, position + 1, slot))
    return ranges


# Checkpoints that are tried as a base. If none fits, the merge is computed from the first row on.
_MAX_BASE_CANDIDATES = 50


class StreamHistory:
    """The streams at one head of the log, and at the base of the computation.

    Args:
        tables: the tables at that head.

    Attributes:
        base: slot of the base checkpoint; 0: the computation begins with the first row.
        base_state: streams and attachments at the base.
        base_segments: segments of the base.
    """

    def __init__(self, tables: TablesAtHead) -> None:
        self._tables, self._log, self._head = tables, tables.log, tables.head
        self._graph = tables.spec.stream_graph
        self._event_time = tables.spec.event_time_column
        self._merges = list_stream_merges(tables.head)
        self._state = DispatchState.from_record(tables.newest.stream_state)
        self.base, self.base_state = 0, DispatchState()
        self.base_segments: Sequence[FileRef] = ()
        self._rows: dict[str, Any] = {}

    def select_base(self, since: int) -> None:
        """Use the newest fitting checkpoint before slot `since` as the base.

        It looks at 50 slots; if none fits, the base stays 0, the beginning.
        """
        # Newest first: the later the base, the fewer rows are computed again.
        for slot in range(since - 1, max(0, since - 1 - _MAX_BASE_CANDIDATES), -1):
            manifest = self._open_base_candidate(slot)
            if manifest is not None:
                self.base, self.base_segments = slot, manifest.segments
                self.base_state = DispatchState.from_record(manifest.stream_state)
                return

    def _open_base_candidate(self, slot: int) -> Manifest | None:
        """Return the manifest of a slot if the computation can begin after it.

        No later merge may have changed what the manifest says, and no attachment may have been
        behind its origin.
        """
        if any(extra["from"] <= slot < merge for merge, extra in self._merges.items()):
            return None
        try:
            manifest = self._tables.find_epoch(slot)
        # An older base costs time but is as exact, so a manifest that cannot be read is passed
        # over.
        except TidegateError:
            return None
        if manifest is None:
            return None
        state = DispatchState.from_record(manifest.stream_state)
        fits = (
            self._was_caught_up(name, attachment.since, state)
            for name, attachment in self._state.attachments.items()
        )
        return manifest if all(fits) else None

    def _was_caught_up(self, name: str, since: str, state: DispatchState) -> bool:
        """Return whether an attachment existed in a state, and had taken all rows of its origin."""
        attachment = state.attachments.get(name)
        if attachment is None or attachment.since != since:
            return False
        # An attachment that the spec no longer has, or that is detached, takes no rows any more.
        if name not in self._graph.attachments or attachment.status == "detached":
            return True
        origin = self._graph.attachments[name].origin
        return attachment.cursor == state.stream_state(origin).next

    def find_slot_of_event(self, position: int) -> int:
        """Return the slot in which the event with a stored position was released.

        1 if there is none, also for the position -1 before all events.
        """
        # The rows are inserted before all others.
        if position < 0:
            return 1
        events = self._tables.read_rows(
            EVENTS, ["position", SPLICE_COLUMN, "_epoch"], {"position": [(position, position)]}
        )
        events = events.filter(pc.is_null(events[SPLICE_COLUMN]))
        return int(events["_epoch"][0].as_py()) if events.num_rows else 1

    def find_slot_before(self, stream: str, stamp: int) -> int:
        """Return the arrival slot of the row after which a row with this stamp is inserted.

        1 if it precedes all rows.
        """
        # All rows: the base is chosen from the answer.
        rows = self._read_stream(stream, 0)
        index = int(np.searchsorted(rows["stream_time"].to_numpy(), stamp, side="right"))
        return int(rows[ARRIVAL_SLOT][index - 1].as_py()) if index else 1

    @cached_property
    def clocks(self) -> dict[int, tuple[int, int]]:
        """The recorded time of each slot after the base and the frontier after it, in ticks.

        Their table outlives retired manifests. Read on first use: `select_base` decides how far
        back they are needed.
        """
        rows = self._tables.read_rows(
            CHECKPOINTS,
            ["slot", "recorded_now", "frontier", "final"],
            {"_epoch": [(self.base + 1, None)]},
        )
        columns = (column.cast(pa.int64()).to_pylist() for column in rows.columns)
        return {
            slot: (now, TICK_MAX if is_final else TICK_MIN if frontier is None else frontier)
            for slot, now, frontier, is_final in zip(*columns, strict=True)
        }

    def stream_rows(self, stream: str) -> Any:
        """Return the rows of a stream before the merge, from the base on."""
        if stream not in self._rows:
            self._rows[stream] = (
                self._convert_events(self._read_stream_events())
                if stream == EVENTS_STREAM
                else self._read_stream(stream, self.base)
            )
        return self._rows[stream]

    def insert_events(self, inserted: Any) -> Any:
        """Return the events stream with rows that a merge in the next slot inserts."""
        events = self._read_stream_events()
        slots = pa.repeat(self._head.next_slot, inserted.num_rows)
        inserted = inserted.append_column("_epoch", slots).select(events.column_names)
        return self._convert_events(
            pa.concat_tables([events, inserted], promote_options="permissive")
        )

    def _read_stream(self, stream: str, base: int) -> Any:
        """Read the newest versions of a stream's rows that arrived after slot `base`."""
        columns = make_stream_columns(self._graph.columns[stream])
        stored = [name for name in columns if name != ARRIVAL_SLOT]
        rows = self._tables.read_rows(
            stream,
            [*stored, "_epoch", SPLICE_COLUMN, ARRIVAL_SLOT_COLUMN],
            {"_epoch": [(base + 1, None)]},
        )
        rewritten = rows.filter(pc.is_valid(rows[SPLICE_COLUMN]))
        rows = select_current_rows(rows, find_rewrite_starts(rewritten))
        # A rewritten row carries the slot in which it first arrived; `_epoch` is then the slot of
        # the rewrite.
        slots = pc.coalesce(rows[ARRIVAL_SLOT_COLUMN].cast(pa.int64()), rows["_epoch"])
        return conform_to_schema(rows.append_column(ARRIVAL_SLOT, slots), pa.schema(columns))

    def _read_stream_events(self) -> Any:
        """Read the events after the base; of merged rows only those that reached the streams."""
        columns = [
            *self._graph.columns[EVENTS_STREAM],
            self._event_time,
            "position",
            *IDENTITY_COLUMNS,
            SPLICE_COLUMN,
            "_epoch",
        ]
        rows = self._tables.read_rows(
            EVENTS, list(dict.fromkeys(columns)), {"_epoch": [(self.base + 1, None)]}
        )
        requests = pa.array([str(extra["request"]) for extra in self._merges.values()], pa.string())
        return rows.filter(
            pc.or_(pc.is_null(rows[SPLICE_COLUMN]), pc.is_in(rows[SPLICE_COLUMN], requests))
        )

    def _convert_events(self, events: Any) -> Any:
        """Return rows of the events table as rows of a stream, inserted ones at their positions."""
        inserted = pc.is_valid(events[SPLICE_COLUMN])
        events = events.append_column("_inserted", inserted.cast(pa.int8()))
        # An inserted row has the position of the row before it. This order is the one of
        # docs/decisions/0041-stored-positions-never-change.md.
        order = ("position", "_inserted", self._event_time, "_epoch", *IDENTITY_COLUMNS)
        events = events.sort_by([(name, "ascending") for name in order])
        # Negative for inserted rows, as `fill_arrival_slots` expects it.
        slots = pc.if_else(
            pc.equal(events["_inserted"], 0), events["_epoch"], pc.negate(events["_epoch"])
        )
        state, count = self.base_state.stream_state(EVENTS_STREAM), events.num_rows
        positions = pa.array(range(state.next, state.next + count), pa.int64())
        user_columns = self._graph.columns[EVENTS_STREAM]
        rows = to_event_rows(
            replace_column(events, "position", positions),
            user_columns,
            self._event_time,
            state.last,
        )
        more = dict.fromkeys(("_via", "_origin", "_origin_id"), pa.nulls(count, pa.string()))
        more[ARRIVAL_SLOT] = fill_arrival_slots(slots)
        columns = dict(zip(rows.column_names, rows.columns, strict=True)) | more
        return pa.table(columns, schema=pa.schema(make_stream_columns(user_columns)))

    def read_collected_rows(self, request_id: str) -> Any:
        """Return the rows that an attachment has collected for a request.

        They come from the newest manifest, because an earlier merge may have changed them.

        Raises:
            ConfigurationError: the backfill of the attachment is not complete yet, or the newest
                manifest does not know the request.
        """
        request = self._state.requests.get(request_id)
        # While a backfill runs, more rows may join the request, and its approval would not cover
        # them.
        if request is None or request.open:
            why = (
                "is not complete yet: its backfill goes on"
                if request
                else "is not known to the newest checkpoint"
            )
            raise INCOMPLETE(pipeline=self._tables.spec.name, request=request_id, why=why)
        files = select_request_segments(
            self._tables.newest.segments, request.attachment, request_id
        )
        return read_arrivals(self._log.store, files, self._graph.columns[request.destination])

    def convert_collected_rows(self, stream: str, rows: Any, slot: int) -> Any:
        """Return collected rows as rows of the stream that were merged in `slot`, by stamp."""
        schema = pa.schema(make_stream_columns(self._graph.columns[stream]))
        rows = sort_stably(rows, rows["_stamp"])
        rows = rows.append_column("stream_time", rows["_stamp"])
        # They have no positions yet: those are given to all rows of the stream together.
        return conform_to_schema(add_arrival_slot(rows, -slot), schema)
