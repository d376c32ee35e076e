"""The output tables as the *log* has them at one head.

What readers see already, and the files of slots not published yet.

A merge must not depend on how far some publisher got. Reads are pruned by event time through
Iceberg's own file statistics.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.jobs.engine.resume_state import SPLICE_KIND
from tidegate.jobs.sinks.iceberg_catalog import build_io_properties
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    PublishedCut,
    read_published_cut,
)
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.published_tables import translate_read_errors, use_plain_types
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec

Span = tuple[int, int]
"""Ticks, half open."""

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_SPANS = 8  # in one scan: more make a filter that costs more than the rows it saves


@dataclass
class TablesAtHead:
    """The tables at one head of the log.

    Attributes:
        rows_read: rows that left the store so far; the cost that an impact report names.
        published: slot up to which the tables are published.
    """

    spec: PipelineSpec
    log: SlotLog
    head: LogHead
    rows_read: int = 0

    def __post_init__(self) -> None:
        current = read_published_cut(self.log.store, self.spec.name) or PublishedCut("", 0, 0)
        way, mark = (
            CurrentLineage(self.log, self.head),
            FollowerPosition(current.timeline, current.upto),
        )
        self._current = current
        self.published = way.last_shared_slot(mark) if way.is_in_log(mark) else 0

    def read_rows(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        *,
        time: str | None = None,
        spans: Sequence[Span] = (),
        ranges: Mapping[str, tuple[int, int | None]] | None = None,
    ) -> Any:
        """Rows of one table; with `spans` only those whose `time` column lies in one of them.

        `ranges`: column -> from, to (inclusive; None: no end), of whole numbers.

        Raises:
            TransientError: the store cannot be reached.
        """
        ranges = ranges or {}
        wide = (
            None
            if columns is None
            else sorted({*columns, "_epoch", *ranges, *([time] if time else [])})
        )
        parts = [
            *self._read_published(table, wide, time, spans, ranges),
            *self._read_unpublished(table, wide),
        ]
        schema = build_table_schema(self.spec, table)
        found = (
            pa.concat_tables(parts, promote_options="permissive") if parts else schema.empty_table()
        )
        if time is not None and spans:
            found = found.filter(_mask_within_spans(found[time], spans))
        for name, (low, high) in ranges.items():
            inside = pc.greater_equal(found[name], low)
            found = found.filter(
                inside if high is None else pc.and_(inside, pc.less_equal(found[name], high))
            )
        for name in [*(columns or schema.names), "_epoch"]:
            if name not in found.column_names:
                kind = schema.field(name).type if name in schema.names else pa.string()
                found = found.append_column(name, pa.nulls(found.num_rows, kind))
        self.rows_read += found.num_rows
        return found.select(list(columns)) if columns else found

    @cached_property
    def _unpublished_epochs(self) -> list[Manifest]:
        return [
            filled.epoch
            for filled in self.log.epochs_between(
                self.head.timeline, self.published + 1, self.head.slot
            )
        ]

    def _read_published(
        self,
        table: str,
        columns: list[str] | None,
        time: str | None,
        spans: Sequence[Span],
        ranges: Mapping[str, tuple[int, int | None]],
    ) -> list[Any]:
        """Rows of slots that are in the published table; an abandoned timeline's are left out."""
        from pyiceberg.table import StaticTable

        location = self._current.tables.get(table)
        if location is None or self.published == 0:
            return []
        with translate_read_errors(self.spec, table):
            opened = StaticTable.from_metadata(location, build_io_properties(self.log.store))
            known = {field.name for field in opened.schema().fields}
            wanted = tuple(c for c in columns if c in known) if columns else ("*",)
            rows = f"_epoch <= {self.published}" + (
                f" and ({_format_span_filter(time, spans)})" if time and spans else ""
            )
            for name, (low, high) in ranges.items():
                rows += f" and {name} >= {low}" + ("" if high is None else f" and {name} <= {high}")
            return [
                use_plain_types(opened.scan(row_filter=rows, selected_fields=wanted).to_arrow())
            ]

    def _read_unpublished(self, table: str, columns: list[str] | None) -> list[Any]:
        """Rows of sealed slots that no publisher brought to the table yet."""
        files = [
            file
            for epoch in self._unpublished_epochs
            for file in epoch.files.get(table, [])
            if file.rows
        ]
        return [_select_columns(read_data_file(self.log, file), columns) for file in files]


def read_data_file(log: SlotLog, file: FileRef) -> Any:
    """One data file."""
    return use_plain_types(pq.read_table(io.BytesIO(log.store.get(file.key).data)))


def join_spans(spans: Sequence[Span]) -> list[Span]:
    """At most a few spans that cover all of these.

    Touching ones are joined, then those with the smallest gaps.
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    while len(joined) > _MOST_SPANS:
        nearest = min(range(len(joined) - 1), key=lambda n: joined[n + 1][0] - joined[n][1])
        joined[nearest : nearest + 2] = [(joined[nearest][0], joined[nearest + 1][1])]
    return joined


def _select_columns(table: Any, columns: list[str] | None) -> Any:
    return table.select([c for c in columns if c in table.column_names]) if columns else table


def _mask_within_spans(column: Any, spans: Sequence[Span]) -> Any:
    ticks = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    found = pa.array([False] * len(ticks), pa.bool_())
    for start, end in spans:
        found = pc.or_(found, pc.and_(pc.greater_equal(ticks, start), pc.less(ticks, end)))
    return found


def _format_span_filter(time: str, spans: Sequence[Span]) -> str:
    """The spans as an Iceberg filter; bounds outside the years that it can write are left out."""
    return " or ".join(
        f"({' and '.join(_format_span_bounds(time, span)) or f'{time} is not null'})"
        for span in spans
    )


def _format_span_bounds(time: str, span: Span) -> list[str]:
    found = []
    for operator, ticks in ((">=", span[0]), ("<", span[1])):
        try:
            found.append(
                f"{time} {operator}"
                f" '{(_UNIX_EPOCH + timedelta(microseconds=ticks)).isoformat(timespec='microseconds')}'"
            )
        except OverflowError:
            continue
    return found


# Which rows were merged so far, told by the log alone: the newest sealed epoch carries one segment
# per merge.
#
# A restore to before a merge takes its segment with it, so the request can be merged again; nothing
# has to be repaired.

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
    """Columns of the rows of a request.

    The pipeline's own, where the row comes from, what it missed, where it should go.
    """
    user = [build_table_schema(spec, EVENTS).field(name) for name in spec.row_columns]
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
    segments = [
        s for s in find_merge_segments(head).values() if "stream" not in s.extra
    ]  # rows of streams have columns of their own
    tables = [
        read_data_file(log, segment).select(make_request_schema(spec).names) for segment in segments
    ]
    rows = (
        pa.concat_tables(tables, promote_options="permissive")
        if tables
        else make_request_schema(spec).empty_table()
    )
    outputs = rows["_outputs"].to_pylist()
    pairs = frozenset(
        (who, name)
        for who, names in zip(iterate_identities(rows), outputs, strict=True)
        for name in names or ()
    )
    return MergedRows(rows, pairs)


def iterate_identities(table: Any) -> Iterable[RowIdentity]:
    """The identity of each row."""
    return zip(
        *(table[name].to_pylist() for name in ("_source", "_partition", "_seq")), strict=True
    )
