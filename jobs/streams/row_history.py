"""Rows of a stream by position, from the sealed epochs of the current lineage.

What a backfill reads.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.sinks.row_positions import compute_current_positions
from tidegate.jobs.spec.stream_specs import EVENTS_STREAM
from tidegate.jobs.streams.stream_append import compute_running_max

PROVENANCE_FIELDS = {
    "_id": pa.string(),
    "_via": pa.string(),
    "_origin": pa.string(),
    "_origin_id": pa.string(),
}
"""Whose row it is: identity, the attachment that sent it, the stream and the row it was made of."""


class RowHistory(Protocol):
    """Where old rows come from."""

    def read_rows(self, stream: str, columns: Mapping[str, str], start: int, end: int) -> Any:
        """Rows ``start <= position < end``.

        Columns, ``position``, ``stream_time`` (int64 ticks), ``_id``; in order.
        """
        ...


class LogHistory:
    """Reads them from the files that the manifests name, as they stand after every merge.

    One GET for each epoch back to the first row asked for.

    Args:
        log: the pipeline's log.
        event_time: the column of the events.
        after: an epoch that is looked back from, for a replay of the next one; default: the newest.
    """

    def __init__(self, log: SlotLog, event_time: str, after: Manifest | None = None) -> None:
        self._log = log
        self._event_time = event_time
        self._after = after

    def read_rows(self, stream: str, columns: Mapping[str, str], start: int, end: int) -> Any:
        """The rows; retired epochs cannot be read.

        Raises:
            PoisonError: the rows are in epochs that were retired.
        """
        if start >= end:
            return pa.table({}, schema=_build_row_schema(columns))
        after = self._after
        head = LogHead(after.timeline, after.slot, after, None, None) if after else self._log.head()
        merges = {
            slot: extra for slot, extra in list_merges(head.record).items() if "from" in extra
        }
        if stream == EVENTS_STREAM:
            rows = self._read_event_rows(head, columns, start, end, merges)
        else:
            rows = self._read_stream_rows(head, stream, columns, start, end, merges)
        first = rows["position"][0].as_py() if rows.num_rows else start + 1
        if first > start:
            self._refuse_retired_rows(stream, start)
        return rows.slice(start - first, end - start)

    def _read_event_rows(
        self,
        head: LogHead,
        columns: Mapping[str, str],
        start: int,
        end: int,
        merges: Mapping[int, Any],
    ) -> Any:
        """Rows of the pipeline, and those that merges inserted between them."""
        inserted = self._read_inserted_events(head, merges)
        below = 0 if inserted is None else inserted.num_rows
        found = list(self._iter_event_epochs(head, max(start - below, 0), end))[::-1]
        table = read_parquet_files(
            self._log.store,
            [file for epoch, _ in found for file in epoch.files.get(EVENTS_STREAM, [])],
        )
        if table is None:
            return pa.table({}, schema=_build_row_schema(columns))
        if inserted is not None:
            low = pc.min(table["position"]).as_py()
            near = inserted.filter(pc.greater_equal(inserted["position"], low - 1))
            both = pa.concat_tables([table, near], promote_options="permissive")
            table = compute_current_positions(both, inserted, self._event_time)
        return to_event_rows(table, columns, self._event_time, found[0][1])

    def _read_inserted_events(self, head: LogHead, merges: Mapping[int, Any]) -> Any | None:
        """Events that merges inserted into the stream."""
        epochs = [
            filled.epoch
            for slot in merges
            for filled in self._log.epochs_between(head.timeline, slot, slot)
        ]
        return read_parquet_files(
            self._log.store,
            [file for epoch in epochs for file in epoch.files.get(EVENTS_STREAM, [])],
        )

    def _iter_event_epochs(
        self, head: LogHead, start: int, end: int
    ) -> Iterator[tuple[Manifest, int | None]]:
        """Epochs that may hold events with these positions, newest first, each with the stream's last time before it."""
        for older, newer in self._iter_epoch_pairs(head):
            first, last = _read_stream_end(older, EVENTS_STREAM)
            # A splice merged into ordered events has rows that stand between others and have no
            # position of their own.
            if first < min(end, _read_stream_end(newer, EVENTS_STREAM)[0]):
                yield newer, last
            if first <= start and (last is not None or first == 0):
                return

    def _read_stream_rows(
        self,
        head: LogHead,
        stream: str,
        columns: Mapping[str, str],
        start: int,
        end: int,
        merges: Mapping[int, Any],
    ) -> Any:
        """Newest first: what a merge wrote anew hides everything older from its first row on."""
        parts, limit = [], end
        for older, newer in self._iter_epoch_pairs(head):
            anew = merges.get(newer.slot, {}).get("rewrites", {}).get(stream)
            first = _read_stream_end(older, stream)[0] if anew is None else anew
            if newer.is_merge and anew is None:
                continue
            table = (
                read_parquet_files(self._log.store, newer.files.get(stream, []))
                if first < limit
                else None
            )
            if table is not None:
                rows = to_stream_rows(table, columns)
                parts.append(
                    rows.filter(
                        pc.and_(
                            pc.greater_equal(rows["position"], first),
                            pc.less(rows["position"], limit),
                        )
                    )
                )
            limit = min(limit, first)
            if limit <= start:
                break
        return (
            pa.concat_tables(parts[::-1])
            if parts
            else pa.table({}, schema=_build_row_schema(columns))
        )

    def _iter_epoch_pairs(self, head: LogHead) -> Iterator[tuple[Manifest | None, Manifest]]:
        """Each sealed epoch with the one before it, newest first.

        None before the first and where epochs were retired.
        """
        newer: Manifest | None = None
        for filled in self._log.iterate_ancestors(head.checkpoint):
            older = filled.record if isinstance(filled.record, Manifest) else None
            if newer is not None:
                yield older, newer
            newer = older
            if older is None:
                return
        if newer is not None:
            yield None, newer

    def _refuse_retired_rows(self, stream: str, start: int) -> Any:
        raise PoisonError(
            f"row {start} of {stream} lies in an epoch that was retired",
            code="streams.retired",
            kept="everything sealed so far",
            advice=(
                "raise checkpoint.retain before attaching to an old stream, or attach with"
                " positions that are still there"
            ),
        )


def list_merges(record: Manifest | None) -> dict[int, dict[str, Any]]:
    """Slot -> what its merge did, of all merges that an epoch stands on."""
    found = [dict(s.extra) for s in (record.segments if record else ()) if s.kind == SPLICE_KIND]
    return {CheckpointId.parse(str(extra["checkpoint"])).slot: extra for extra in found}


def read_parquet_files(store: Store, files: list[FileRef]) -> Any | None:
    """All rows of Parquet files in the store; None without files."""
    tables = [
        pq.read_table(io.BytesIO(store.get(file.key).data), partitioning=None) for file in files
    ]
    return pa.concat_tables(tables, promote_options="default") if tables else None


def to_event_rows(
    table: Any, columns: Mapping[str, str], event_time: str, last: int | None, shift: int = 0
) -> Any:
    """Rows of the events table as rows of a stream.

    Identity from provenance, time the running maximum of event time.

    `shift`: rows that merges inserted before these.
    """
    table = table.sort_by("position")
    identity = pc.binary_join_element_wise(
        table["_source"], table["_partition"], table["_seq"].cast(pa.string()), "/"
    )
    time = compute_running_max(
        table[event_time].cast(pa.timestamp("us", "UTC")).cast(pa.int64()), last
    )
    values = {name: table[name].cast(to_arrow_type(kind)) for name, kind in columns.items()}
    places = pc.add(table["position"], shift)
    return pa.table(
        {**values, "position": places, "stream_time": time, "_id": identity},
        schema=_build_row_schema(columns),
    )


def to_stream_rows(table: Any, columns: Mapping[str, str]) -> Any:
    """Rows of a stream's own table; what only marks the end of what a merge left is no row."""
    table = table.filter(pc.is_valid(table["_id"])).sort_by("position")
    time = table["stream_time"].cast(pa.int64())
    picked = {name: table[name] for name in (*columns, "position", "_id")}
    return pa.table({**picked, "stream_time": time}).select(
        [f.name for f in _build_row_schema(columns)]
    )


def _build_row_schema(columns: Mapping[str, str]) -> Any:
    fields = {name: to_arrow_type(kind) for name, kind in columns.items()}
    return pa.schema(
        {**fields, "position": pa.int64(), "stream_time": pa.int64(), "_id": pa.string()}
    )


def _read_stream_end(epoch: Manifest | None, stream: str) -> tuple[int, int | None]:
    """Next position and last time of a stream after an epoch.

    No time is known of epochs whose spec had no streams.
    """
    known = epoch.stream_state.get("streams", {}).get(stream) if epoch else None
    if stream != EVENTS_STREAM:
        return (known["next"], known["last"]) if known else (0, None)
    position = epoch.next_position if epoch else 0
    return position, (
        known["last"] if known and known["next"] - known.get("shift", 0) == position else None
    )
