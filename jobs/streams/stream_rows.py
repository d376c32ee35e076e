"""Rows of streams: made of released events, stamped when dispatched, and appended.

Who stamps a row, and which stamps a stream accepts: docs/semantics.md, section 6. Batches are
appended on Arrow columns without a loop. A row is rejected if its stamp is below the greatest time
before it, so rejected rows never raise that maximum. The stream's last time before each row is
therefore the running maximum over *all* rows before it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import (
    conform_to_schema,
    convert_to_ticks,
    list_rows,
    read_columns,
    read_parquet_object,
    replace_column,
    to_arrow_types,
)
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS, PipeSpec, ReducerSpec
from tidegate.jobs.spec.table_layout import ColumnTypes
from tidegate.time_units import TICK_MIN

PROVENANCE_FIELDS = {
    "_id": pa.string(),
    "_via": pa.string(),
    "_origin": pa.string(),
    "_origin_id": pa.string(),
}
"""Whose row it is: identity, the attachment that sent it, the stream and the row it was made of."""


def read_parquet_files(store: Store, files: Iterable[FileRef]) -> Any | None:
    """Return all rows of Parquet files in the store; None without files."""
    tables = [read_parquet_object(store, file.key, file.sha256) for file in files]
    return pa.concat_tables(tables, promote_options="default") if tables else None


def compute_time_bounds(times: Any) -> tuple[int | None, int | None]:
    """Return the least and the greatest of some times, in ticks; twice None if there are none."""
    bounds = pc.min_max(convert_to_ticks(times))
    return bounds["min"].as_py(), bounds["max"].as_py()


def to_event_rows(
    table: Any, columns: ColumnTypes, event_time: str, last: int | None, shift: int = 0
) -> Any:
    """Convert rows of the events table to rows of a stream.

    The identity is the provenance; the stream time is the running maximum of event time.

    Args:
        table: rows of the events table.
        columns: of the stream.
        event_time: the event time column.
        last: the stream's last time before these rows.
        shift: added to the positions: how many rows merges inserted before these.
    """
    table = table.sort_by("position")
    identity = pc.binary_join_element_wise(
        table["_source"], table["_partition"], table["_seq"].cast(pa.string()), "/"
    )
    time = compute_running_max(convert_to_ticks(table[event_time]), last)
    user = conform_to_schema(table, pa.schema(to_arrow_types(columns)))
    own = (pc.add(table["position"], shift), time, identity)
    return pa.table([*user.columns, *own], build_row_schema(columns))


def to_stream_rows(table: Any, columns: ColumnTypes) -> Any:
    """Convert rows of a stream's table to rows of the stream, sorted by position.

    Rows without `_id` are left out. A merge that leaves a stream without rows writes one such row,
    which marks where the stream ends.
    """
    rows = table.filter(pc.is_valid(table["_id"])).sort_by("position")
    return conform_to_schema(rows, build_row_schema(columns))


def build_row_schema(columns: ColumnTypes) -> Any:
    """Return the schema of rows of a stream with these columns, as attachments read them."""
    own = {"position": pa.int64(), "stream_time": pa.int64(), "_id": pa.string()}
    return pa.schema(to_arrow_types(columns) | own)


def compute_running_max(times: Any, last: int | None) -> Any:
    """Return the running maximum of int64 times, starting at `last`."""
    return pc.cumulative_max(combine_chunks(times), start=TICK_MIN if last is None else last)


def combine_chunks(column: Any) -> Any:
    """Return a column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def merge_by_stamp(writers: Sequence[Any], now: int) -> Any:
    """Merge the batches of one or more writers by stamp; each writer's rows keep their order.

    On ties the rows of earlier writers come first. Every batch has a column ``_stamp`` (null: the
    destination stamps the row, here with `now`).
    """
    filled = [table for table in writers if table.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else writers[0]
    merged = pa.concat_tables(filled)
    # Sorting by the running maximum keeps each writer's order. Rows are concatenated by writer, so
    # ties go to the earlier writer.
    high = [compute_running_max(_resolve_stamps(table, now), None) for table in filled]
    return sort_stably(merged, pa.concat_arrays(high))


def sort_stably(rows: Any, keys: Any) -> Any:
    """Return the rows in order of their keys; rows with equal keys keep their order."""
    return rows.take(pa.array(np.argsort(keys, kind="stable")))


def _resolve_stamps(rows: Any, now: int) -> Any:
    """Return the stamp of each row; `now` for rows without one."""
    return pc.fill_null(combine_chunks(rows["_stamp"]), now)


def append_rows(rows: Any, now: int, last: int | None, position: int) -> tuple[Any, Any]:
    """Append rows in their order, the first accepted one at `position`.

    A row without a stamp gets `now`, or `last` if that is greater, and is never rejected.

    Returns:
        The accepted rows, with ``position`` and ``stream_time``, and the rejected rows, with
        ``_last``.
    """
    high = compute_running_max(_resolve_stamps(rows, now), last)
    before = (
        pa.concat_arrays([pa.array([TICK_MIN if last is None else last], pa.int64()), high[:-1]])
        if len(high)
        else high
    )
    stamp = combine_chunks(rows["_stamp"])
    fits = pc.fill_null(pc.greater_equal(stamp, before), True)
    accepted = rows.append_column("stream_time", high).filter(fits)
    numbers = pa.array(range(position, position + accepted.num_rows), pa.int64())
    return accepted.append_column("position", numbers), rows.append_column("_last", before).filter(
        pc.invert(fits)
    )


def release_below(held: Any, batch: Any, now: int, mark: int, last: int | None) -> tuple[Any, Any]:
    """Split a buffer and new arrivals at the time `mark`.

    What leaves is never rejected: a row below `last`, the time of the stream, gets that stamp.

    Returns:
        The rows below the mark, in order, and the rows that keep waiting; both with their stamps.
    """
    rows = pa.concat_tables([held, replace_column(batch, "_stamp", _resolve_stamps(batch, now))])
    rows = sort_stably(rows, rows["_stamp"])
    below = pc.less(combine_chunks(rows["_stamp"]), mark)
    leaving, waiting = rows.filter(below), rows.filter(pc.invert(below))
    if last is not None:
        stamps = pc.max_element_wise(leaving["_stamp"], pa.scalar(last, pa.int64()))
        leaving = replace_column(leaving, "_stamp", stamps)
    return leaving, waiting


@dataclass(frozen=True, slots=True)
class Event:
    """The row as a fold sees it: ``event["amount"]``, ``event.time``.

    It has neither clock nor position, because both may change. `time` is its stream time in ticks.
    """

    id: str
    time: int
    value: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        return self.value[column]


def build_arrival_schema(columns: ColumnTypes) -> Any:
    """Return the schema of arrivals at a stream with these columns.

    A row without a stamp is stamped by its destination.
    """
    return pa.schema({**to_arrow_types(columns), "_stamp": pa.int64(), **PROVENANCE_FIELDS})


def read_arrivals(store: Store, files: Iterable[FileRef], columns: ColumnTypes) -> Any:
    """Return stored arrivals at a stream with these columns; none without files."""
    return read_columns(store, files, build_arrival_schema(columns))


def select_request_segments(
    segments: Iterable[FileRef], attachment: str, request_id: str
) -> list[FileRef]:
    """Return the segments with the rows that an attachment has collected for a request."""
    return [
        segment
        for segment in segments
        if segment.kind == f"splice:{attachment}" and segment.extra.get("request") == request_id
    ]


def address_rows(
    one: PipeSpec | ReducerSpec,
    via: str,
    head: int,
    columns: ColumnTypes,
    table: Any,
    rows: Any,
) -> tuple[Any, Any]:
    """Return dispatched rows as they arrive, and a mask of those that the splice request collects.

    The id of a row is made of `via`, the id of its parent and its `_nth`. The mask selects the
    backfill if the attachment has `merge: splice`, and nothing otherwise.

    Args:
        one: the attachment.
        via: its name in identities.
        head: position where its backfill ends.
        columns: of the destination.
        table: the rows, with ``_position`` and ``_nth``.
        rows: the rows they were made of, without gaps in their positions.
    """
    table = table.sort_by([("_position", "ascending"), ("_nth", "ascending")])
    parents = rows.select(["stream_time", "_id"]).take(
        pc.subtract(table["_position"], rows["position"][0])
    )
    is_spliced, backfill = one.merge == "splice", pc.less(table["_position"], head)
    # What is merged later keeps the time of its parent; backfill that is appended cannot.
    inherited = pc.if_else(backfill, is_spliced, one.inherit)
    parent = pc.binary_join_element_wise(pa.scalar(via), parents["_id"], ":")
    identity = pc.binary_join_element_wise(parent, table["_nth"].cast(pa.string()), "#")
    meta = {
        "_stamp": pc.if_else(inherited, parents["stream_time"], pa.scalar(None, pa.int64())),
        "_id": identity,
        "_via": pa.repeat(via, table.num_rows),
        "_origin": pa.repeat(one.origin, table.num_rows),
        "_origin_id": parents["_id"],
    }
    sent = pa.table(
        {**{c: table[c] for c in columns}, **meta}, schema=build_arrival_schema(columns)
    )
    return sent, backfill if is_spliced else pc.less(table["_position"], 0)


def find_root_source(identity: str) -> str:
    """Return the source of the event from which a row was made, by one or several attachments.

    The identity of an event is ``source/partition/seq``. Each attachment that makes a row of
    another writes its name and a colon in front.
    """
    return identity.partition("/")[0].rpartition(":")[2]


def build_rejection_rows(spec: PipelineSpec, stream: str, refused: Any) -> Any:
    """Return rows of the table `rejections`, without provenance, for rejected arrivals."""
    columns = spec.stream_graph.columns[stream]
    rows = [
        {
            "stream": row["_origin"],
            "row_id": row["_origin_id"],
            "destination": stream,
            "via": row["_via"],
            "stamp": row["_stamp"],
            "last": row["_last"],
            "reason": f"stamp is below the last of {stream}",
            "row": json.dumps({c: row[c] for c in columns}, default=str, sort_keys=True),
        }
        for row in list_rows(refused)
    ]
    provenance = ("_timeline", "_epoch")
    own = [f for f in build_table_schema(spec, REJECTIONS) if f.name not in provenance]
    # Arrow takes ticks for times.
    return pa.Table.from_pylist(rows, pa.schema(own))
