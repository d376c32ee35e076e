"""Gives dispatched rows their identity and stamp, and describes rows that a stream rejected.

Who stamps a row, and which stamps a stream accepts: docs/semantics.md, section 6.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS, PipeSpec, ReducerSpec
from tidegate.jobs.streams.row_history import PROVENANCE_FIELDS, read_parquet_files


def inherits_stamp(inherit: bool, merge: MergeMode, phase: DispatchPhase) -> bool:
    """Return whether a dispatched row carries its parent's stamp, not one of its destination.

    | inherit | merge  | backfill    | head        |
    |---------|--------|-------------|-------------|
    | yes     | concat | destination | parent      |
    | yes     | splice | parent      | parent      |
    | no      | concat | destination | destination |
    | no      | splice | parent      | destination |
    """
    return inherit if phase is DispatchPhase.HEAD else merge is MergeMode.SPLICE


def compute_stream_time(last: int | None, now: int, stamp: int | None) -> int | None:
    """Return the stream time of an append, or None if it is rejected.

    Without a stamp it is ``max(now, last)``. A stamp is accepted if it is not below `last`.

    >>> compute_stream_time(100, 0, 90), compute_stream_time(100, 0, 100)
    (None, 100)
    >>> compute_stream_time(100, 95, None), compute_stream_time(100, 130, None)
    (100, 130)
    """
    if stamp is None:
        return now if last is None else max(now, last)
    return stamp if last is None or stamp >= last else None


class MergeMode(StrEnum):
    """What an attachment does with the rows that were there before it."""

    CONCAT = "concat"  # appends them
    # Collects them in one request, which the owner of the destination merges or rejects.
    SPLICE = "splice"


class DispatchPhase(StrEnum):
    """Whether a row of the origin was there before the attachment."""

    BACKFILL = "backfill"  # the row was there when the attachment was made
    HEAD = "head"  # it came later


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


def build_arrival_schema(columns: Mapping[str, str]) -> Any:
    """Return the schema of arrivals at a stream with these columns.

    A row without a stamp is stamped by its destination.
    """
    fields = {name: to_arrow_type(kind) for name, kind in columns.items()}
    return pa.schema({**fields, "_stamp": pa.int64(), **PROVENANCE_FIELDS})


def read_arrivals(store: Store, files: Iterable[FileRef], columns: Mapping[str, str]) -> Any:
    """Return stored arrivals at a stream with these columns; none without files."""
    schema = build_arrival_schema(columns)
    rows = read_parquet_files(store, list(files))
    return schema.empty_table() if rows is None else rows.select(schema.names).cast(schema)


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
    columns: Mapping[str, str],
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
    # The rule of `inherits_stamp`, for a whole column at once.
    backfill = pc.less(table["_position"], head)
    merge = MergeMode(one.merge)
    inherited = pc.if_else(
        backfill,
        inherits_stamp(one.inherit, merge, DispatchPhase.BACKFILL),
        inherits_stamp(one.inherit, merge, DispatchPhase.HEAD),
    )
    identity = pc.binary_join_element_wise(
        pc.binary_join_element_wise(pa.scalar(via), parents["_id"], ":"),
        table["_nth"].cast(pa.string()),
        "#",
    )
    meta = {
        "_stamp": pc.if_else(inherited, parents["stream_time"], pa.scalar(None, pa.int64())),
        "_id": identity,
        "_via": pa.array([via] * table.num_rows, pa.string()),
        "_origin": pa.array([one.origin] * table.num_rows, pa.string()),
        "_origin_id": parents["_id"],
    }
    sent = pa.table(
        {**{c: table[c] for c in columns}, **meta}, schema=build_arrival_schema(columns)
    )
    return sent, backfill if merge is MergeMode.SPLICE else pc.less(table["_position"], 0)


def find_root_source(identity: str) -> str:
    """Return the source of the event from which a row was made, by one or several attachments.

    The identity of an event is ``source/partition/seq``. Each attachment that makes a row of
    another writes its name and a colon in front.
    """
    return identity.partition("/")[0].rpartition(":")[2]


def build_rejection_rows(
    spec: PipelineSpec, stream: str, refused: Any, timeline: int, epoch: int
) -> Any:
    """Return rows of the table `rejections` for arrivals that a stream has rejected."""
    rows = []
    for row in refused.to_pylist():
        value = {name: row[name] for name in spec.stream_graph.columns[stream]}
        rows.append(
            {
                "stream": row["_origin"],
                "row_id": row["_origin_id"],
                "destination": stream,
                "via": row["_via"],
                "stamp": row["_stamp"],
                "last": row["_last"],
                "reason": f"stamp is below the last of {stream}",
                "row": json.dumps(value, default=str, sort_keys=True),
                "_timeline": timeline,
                "_epoch": epoch,
            }
        )
    # Times are ticks here, so the table is made with integers and then cast.
    schema = build_table_schema(spec, REJECTIONS)
    plain = pa.schema(
        [pa.field(f.name, pa.int64()) if pa.types.is_timestamp(f.type) else f for f in schema]
    )
    return pa.Table.from_pylist(rows, schema=plain).cast(schema)
