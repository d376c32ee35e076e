"""Which rows were merged so far, told by the log alone: the newest sealed epoch carries one segment per merge.

A restore to before a merge takes its segment with it, so the request can be merged again; nothing has to be repaired.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.checkpoints.log import LogHead, SlotLog
from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.standing import SPLICE_KIND
from tidegate.jobs.sinks.schemas import build_table_schema
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.splice.base import read_data_file

__all__ = ["SPLICE_KIND", "RowIdentity", "MergedRows", "iterate_identities", "read_merged_rows", "make_request_schema", "find_merge_segments"]

RowIdentity = tuple[str, str, int]
"""(source, partition, seq): stays with a row wherever it goes."""


@dataclass(frozen=True)
class MergedRows:
    """All rows merged so far.

    Attributes:
        rows: with the columns of `make_request_schema`, oldest merge first.
        pairs: (row, output) that were merged.
    """

    rows: Any
    pairs: frozenset[tuple[RowIdentity, str]] = field(default_factory=frozenset)


def make_request_schema(spec: PipelineSpec) -> Any:
    """Columns of the rows of a request: the pipeline's own, where the row comes from, what it missed, where it should go."""
    user = [build_table_schema(spec, EVENTS).field(name) for name in spec.columns]
    return pa.schema(
        [
            *user,
            ("_source", pa.string()),
            ("_partition", pa.string()),
            ("_seq", pa.int64()),
            ("_reason", pa.string()),
            ("_section", pa.int64()),
            ("_outputs", pa.list_(pa.string())),
        ]
    )


def find_merge_segments(head: LogHead) -> dict[str, FileRef]:
    """Request id -> segment, of the merges on the current lineage."""
    segments = head.record.segments if head.record else []
    return {str(s.extra["request"]): s for s in segments if s.kind == SPLICE_KIND}


def read_merged_rows(spec: PipelineSpec, log: SlotLog, head: LogHead) -> MergedRows:
    """The rows merged on the lineage of this head."""
    segments = [s for s in find_merge_segments(head).values() if "stream" not in s.extra]  # rows of streams have columns of their own
    tables = [read_data_file(log, segment).select(make_request_schema(spec).names) for segment in segments]
    rows = pa.concat_tables(tables, promote_options="permissive") if tables else make_request_schema(spec).empty_table()
    outputs = rows["_outputs"].to_pylist()
    pairs = frozenset((who, name) for who, names in zip(iterate_identities(rows), outputs, strict=True) for name in names or ())
    return MergedRows(rows, pairs)


def iterate_identities(table: Any) -> Iterable[RowIdentity]:
    """The identity of each row."""
    return zip(*(table[name].to_pylist() for name in ("_source", "_partition", "_seq")), strict=True)
