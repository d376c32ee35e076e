"""Rows of streams from earlier epochs, for backfills and for attachments that were paused.

1. The driver locates rows (`LogHistory`): it reads the manifests of the current lineage, and finds
   the files that have them. What the log says of a stream is small, and has no rows.
2. Whoever dispatches reads them (`HistoryReader`): the files, as they are after all merges. The
   rows of retired epochs are in no manifest any more. They come from the published tables.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.sinks.output_tables import IDENTITY_COLUMNS, compute_current_positions
from tidegate.jobs.sinks.table_scan import Ranges, select_in_ranges
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM
from tidegate.jobs.spec.table_layout import ColumnTypes
from tidegate.time_units import TICK_MAX

from .errors import ROWS_RETIRED
from .stream_rows import (
    build_row_schema,
    compute_time_bounds,
    read_parquet_files,
    to_event_rows,
    to_stream_rows,
)

_TIMES_AT_ONCE = 1_000_000
"""Rows of retired epochs of which the times are read together."""
PublishedReader = Callable[[str, int, int, Collection[str]], Any]
"""Returns rows of a published table: of this stream, from a position up to another, columns."""


@dataclass(frozen=True, slots=True)
class LocatedFiles:
    """Files of one epoch; those of their rows count that have ``first <= position < end``."""

    files: tuple[FileRef, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """Where the rows ``start <= position < end`` of a stream are.

    Attributes:
        parts: what sealed epochs have of them, oldest first. Rows before these are retired.
        inserted: files of the events that merges inserted into the stream.
        last: of events: the stream's last time before the first part; None if it is retired.
    """

    stream: str
    start: int
    end: int
    parts: tuple[LocatedFiles, ...] = ()
    inserted: tuple[FileRef, ...] = ()
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LocatedTime:
    """Where the greatest event time of the events from a position on is known from.

    Attributes:
        start: the position.
        known: the greatest time that manifests name; None if they name none.
        retired: if rows from `start` on are retired, the times of all rows before this position
            have to be read; else None.
    """

    start: int
    known: int | None
    retired: int | None = None


class RowHistory(Protocol):
    """Gives rows of earlier epochs to those who dispatch."""

    def read_rows(self, stream: str, columns: ColumnTypes, start: int, end: int) -> Any:
        """Return the rows ``start <= position < end``, in order; fewer if the stream ends before.

        They have the given columns, ``position``, ``stream_time`` (int64 ticks) and ``_id``.

        Raises:
            RowsRetiredError: some of the rows are in epochs that were retired, and in no table.
        """
        ...

    def read_last_time(self, start: int) -> int | None:
        """Return the greatest event time of the events from a position on.

        Raises:
            RowsRetiredError: some of the rows are in epochs that were retired, and in no table.
        """
        ...


@dataclass
class HistoryReader:
    """Reads rows that were located.

    Args:
        store: where the files are.
        event_time: the event time column.
        published: reads what is in no manifest any more; None: nothing does.
        time_before: (position, greatest event time of all events before it), once it was read. A
            backfill asks for one position after the other.
    """

    _store: Store
    _event_time: str
    published: PublishedReader | None = None
    time_before: tuple[int, int | None] = (0, None)

    def read_rows(self, located: LocatedRows, columns: ColumnTypes) -> Any:
        """Return what `RowHistory.read_rows` promises."""
        start, end = located.start, located.end
        if start >= end:
            return build_row_schema(columns).empty_table()
        is_event = located.stream == EVENTS_STREAM
        read = self._read_event_rows if is_event else self._read_stream_rows
        rows = read(located, columns)
        first = rows["position"][0].as_py() if rows.num_rows else end
        if first > start:
            # The retired epochs end before `first`, because slots retire oldest first.
            older = self._read_published_rows(located.stream, columns, start, min(first, end))
            return pa.concat_tables([older, rows.slice(0, max(0, end - first))])
        return rows.slice(start - first, end - start)

    def read_last_time(self, located: LocatedTime) -> int | None:
        """Return what `RowHistory.read_last_time` promises. Times are read a part at a time."""
        if located.retired is None:
            return located.known
        if self.published is None:
            raise ROWS_RETIRED(stream=EVENTS_STREAM, row=located.start)
        times = (located.known, self._read_time_before(located.retired))
        return max((time for time in times if time is not None), default=None)

    def _read_published_rows(self, stream: str, columns: ColumnTypes, start: int, end: int) -> Any:
        """Return rows of retired epochs; every such epoch is in the tables."""
        if self.published is None:
            raise ROWS_RETIRED(stream=stream, row=start)
        events = stream == EVENTS_STREAM
        own = (self._event_time, *IDENTITY_COLUMNS) if events else ("stream_time", "_id")
        found = self.published(stream, start, end, (*columns, *own))
        if found.num_rows != end - start:
            raise ROWS_RETIRED(stream=stream, row=start)
        if not events:
            return to_stream_rows(found, columns)
        rows = to_event_rows(found, columns, self._event_time, self._read_time_before(start))
        self.time_before = end, rows["stream_time"][-1].as_py()
        return rows

    def _read_time_before(self, position: int) -> int | None:
        """Return the greatest event time of all events before a position."""
        if position and self.published is not None and self.time_before[0] != position:
            bounds = []
            for start in range(0, position, _TIMES_AT_ONCE):
                end = min(start + _TIMES_AT_ONCE, position)
                found = self.published(EVENTS_STREAM, start, end, (self._event_time,))
                bounds.append(compute_time_bounds(found[self._event_time])[1])
            known = (time for time in bounds if time is not None)
            self.time_before = position, max(known, default=None)
        return self.time_before[1] if position == self.time_before[0] else None

    def _read_event_rows(self, located: LocatedRows, columns: ColumnTypes) -> Any:
        """Return rows of the pipeline's epochs and the rows that merges inserted between them."""
        inserted = read_parquet_files(self._store, located.inserted)
        files = [file for part in located.parts for file in part.files]
        table = read_parquet_files(self._store, files)
        if table is None:
            return build_row_schema(columns).empty_table()
        if inserted is not None:
            low = pc.min(table["position"]).as_py()
            near = inserted.filter(pc.greater_equal(inserted["position"], low - 1))
            both = pa.concat_tables([table, near], promote_options="permissive")
            table = compute_current_positions(both, inserted, self._event_time)
        last = located.last
        if last is None:  # the epoch before was retired, if there was one
            last = self._read_time_before(pc.min(table["position"]).as_py())
        return to_event_rows(table, columns, self._event_time, last)

    def _read_stream_rows(self, located: LocatedRows, columns: ColumnTypes) -> Any:
        parts = [build_row_schema(columns).empty_table()]
        for part in located.parts:
            table = read_parquet_files(self._store, part.files)
            within: Ranges = {"position": [(part.first, part.end - 1)]}
            parts.append(select_in_ranges(to_stream_rows(table, columns), within))
        return pa.concat_tables(parts)


@dataclass(frozen=True)
class LocatedHistory:
    """A `RowHistory` of what was located before."""

    reader: HistoryReader
    _rows: tuple[LocatedRows, ...]
    _last_time: LocatedTime | None

    def read_rows(self, stream: str, columns: ColumnTypes, start: int, end: int) -> Any:
        """Read rows; see `RowHistory`."""
        asked = (stream, start, end)
        located = next(one for one in self._rows if (one.stream, one.start, one.end) == asked)
        return self.reader.read_rows(located, columns)

    def read_last_time(self, start: int) -> int | None:
        """Read a time; see `RowHistory`."""
        assert self._last_time is not None  # noqa: S101 - see `find_unknown_start`
        assert self._last_time.start == start  # noqa: S101
        return self.reader.read_last_time(self._last_time)


@dataclass
class LogHistory:
    """Locates rows by the manifests, one for each epoch back to the first row asked for.

    Args:
        log: the pipeline's log.
        event_time: the event time column.
        after: the epoch before the one that is replayed; by default the newest.
        published: reads what is in no manifest any more; None: nothing does.

    Attributes:
        reader: reads what was located, for a caller that dispatches in this process.
    """

    _log: SlotLog
    _event_time: str
    after: Manifest | None = None
    published: PublishedReader | None = None

    def __post_init__(self) -> None:
        self.reader = HistoryReader(self._log.store, self._event_time, self.published)

    def read_rows(self, stream: str, columns: ColumnTypes, start: int, end: int) -> Any:
        """Locate and read rows; see `RowHistory`."""
        return self.reader.read_rows(self.locate_rows(stream, start, end), columns)

    def read_last_time(self, start: int) -> int | None:
        """Locate and read a time; see `RowHistory`."""
        return self.reader.read_last_time(self.locate_last_time(start))

    def locate_rows(self, stream: str, start: int, end: int) -> LocatedRows:
        """Return where the rows ``start <= position < end`` are."""
        if start >= end:
            return LocatedRows(stream, start, end)
        head = self._find_head()
        if stream == EVENTS_STREAM:
            return self._locate_events(head, start, end)
        return LocatedRows(stream, start, end, self._locate_stream_files(head, stream, start, end))

    def locate_last_time(self, start: int) -> LocatedTime:
        """Return where the greatest event time of the events from a position on is known from."""
        times: list[int] = []
        first, last = 0, None
        for epoch, before in self._iter_event_epochs(self._find_head(), start, TICK_MAX):
            last = before
            files = epoch.files.get(EVENTS_STREAM, [])
            times += [file.max_time for file in files if file.max_time is not None]
            if not epoch.is_merge:
                first = epoch.next_position - sum(file.rows for file in files)
        retired = first if last is None and first > start else None
        known = max((time for time in (*times, last) if time is not None), default=None)
        return LocatedTime(start, known, retired)

    def _find_head(self) -> LogHead:
        after = self.after
        # A replay sees the log as it was before its epoch.
        return LogHead(after.timeline, after.slot, after, None, None) if after else self._log.head()

    def _locate_events(self, head: LogHead, start: int, end: int) -> LocatedRows:
        inserted = self._list_inserted_files(head)
        # An insertion moves later rows up by at most this much.
        shift = sum(file.rows for file in inserted)
        epochs = list(self._iter_event_epochs(head, max(start - shift, 0), end))[::-1]
        files = [epoch.files.get(EVENTS_STREAM, []) for epoch, _ in epochs]
        parts = tuple(LocatedFiles(tuple(own), start, end) for own in files if own)
        last = epochs[0][1] if epochs else None
        return LocatedRows(EVENTS_STREAM, start, end, parts, tuple(inserted), last)

    def _list_inserted_files(self, head: LogHead) -> list[FileRef]:
        """Return the files of the events that merges inserted into the stream."""
        epochs = [
            filled.epoch
            for slot in list_stream_merges(head)
            for filled in self._log.epochs_between(head.timeline, slot, slot)
        ]
        return [file for epoch in epochs for file in epoch.files.get(EVENTS_STREAM, [])]

    def _iter_event_epochs(
        self, head: LogHead, start: int, end: int
    ) -> Iterator[tuple[Manifest, int | None]]:
        """Yield epochs that may hold events with these positions, newest first.

        Each comes with the stream's last time before it.
        """
        for older, newer in self._iter_epoch_pairs(head):
            first, last = _read_stream_end(older, EVENTS_STREAM)
            # A merge into ordered events adds rows between others, without new positions.
            if first < min(end, _read_stream_end(newer, EVENTS_STREAM)[0]):
                yield newer, last
            if first <= start and (last is not None or first == 0):
                return

    def _locate_stream_files(
        self, head: LogHead, stream: str, start: int, end: int
    ) -> tuple[LocatedFiles, ...]:
        """Return the files of a stream's rows, oldest first.

        What a merge rewrote hides everything older from its first row on.
        """
        merges, limit = list_stream_merges(head), end
        parts: list[LocatedFiles] = []
        for older, newer in self._iter_epoch_pairs(head):
            # A merge that did not rewrite this stream has files of other streams only.
            first = merges.get(newer.slot, {}).get("rewrites", {}).get(stream)
            if newer.is_merge and first is None:
                continue
            if first is None:
                first = _read_stream_end(older, stream)[0]
            files = newer.files.get(stream, []) if first < limit else []
            if files:
                parts.append(LocatedFiles(tuple(files), first, limit))
            limit = min(limit, first)
            if limit <= start:
                break
        return tuple(reversed(parts))

    def _iter_epoch_pairs(self, head: LogHead) -> Iterator[tuple[Manifest | None, Manifest]]:
        """Yield each sealed epoch with the one before it, newest first.

        The earlier one is None before the first epoch and where epochs were retired.
        """
        newer: Manifest | None = None
        for filled in self._log.iterate_ancestors(head.checkpoint):
            older = filled.record if isinstance(filled.record, Manifest) else None
            if newer is not None:
                yield older, newer
            newer = older
            # Retired: what is older cannot be read, and the caller names the rows that are missing.
            if older is None:
                return
        if newer is not None:
            yield None, newer


def list_stream_merges(head: LogHead) -> Mapping[int, dict[str, Any]]:
    """Return slot -> what its merge did, for the merges into streams on the lineage up to a slot.

    It is the `extra` of the merge's segment.
    """
    extras = [dict(s.extra) for s in head.segments if s.kind == SPLICE_KIND]
    return {
        CheckpointId.parse(str(extra["checkpoint"])).slot: extra
        for extra in extras
        # Merges without "from" touched windows or events only.
        if "from" in extra
    }


def _read_stream_end(epoch: Manifest | None, stream: str) -> tuple[int, int | None]:
    """Return the next position and the last time of a stream after an epoch.

    The time is None for epochs whose spec had no streams.
    """
    state = epoch.stream_state.get("streams", {}).get(stream) if epoch else None
    if stream != EVENTS_STREAM:
        return (state["next"], state["last"]) if state else (0, None)
    position = epoch.next_position if epoch else 0
    # The pipeline may have run without streams: then the recorded state is older than the epoch.
    if state is None or state["next"] - state.get("shift", 0) != position:
        return position, None
    return position, state["last"]
