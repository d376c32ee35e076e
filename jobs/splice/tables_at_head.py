"""The output tables at one head of the log, and the rows that merges have inserted up to it.

A table at the head is what readers see, plus the files of slots that are not published yet. So a
merge does not depend on how far a publisher got. Reads are pruned by event time with Iceberg's file
statistics.

Which rows are merged follows from the log alone: the newest manifest carries one segment per merge
on its lineage. A restore to before a merge drops its segment, and the request can be merged again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.jobs.engine.arrow_tables import read_columns, read_parquet_object, replace_column
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    PublishedCut,
    read_published_cut,
)
from tidegate.jobs.sinks.output_tables import (
    RowIdentity,
    build_checkpoint_rows,
    build_table_schema,
    iterate_identities,
    make_request_schema,
)
from tidegate.jobs.sinks.published_tables import translate_read_errors, use_plain_types
from tidegate.jobs.sinks.table_scan import Range, Ranges, TableScan, select_in_ranges
from tidegate.jobs.spec.pipeline import CHECKPOINTS, PipelineSpec

Span = tuple[int, int]
"""From and to in ticks, half open."""

_MAX_EPOCHS = 100  # whose manifests are kept
_MAX_RANGES = 8  # per scan: a longer filter costs more than the rows it saves


@dataclass
class TablesAtHead:
    """The tables at the head that the log has now.

    Attributes:
        head: that head.
        rows_read: rows that were returned so far; an impact report names them as cost.
        published: the slot of the head's lineage up to which the tables are published; 0: none.
    """

    spec: PipelineSpec
    log: SlotLog
    rows_read: int = 0

    def __post_init__(self) -> None:
        self.head = self.log.head()
        self._open_scan = cache(partial(TableScan, self.log.store))
        self._epochs: dict[int, Manifest | None] = {}
        self._cut = read_published_cut(self.log.store, self.spec.name) or PublishedCut()
        # After a restore the tables may show a timeline that was left; only the slots that it
        # shares with the current lineage count.
        lineage = CurrentLineage(self.log, self.head)
        self.published = lineage.count_applied_slots(self._cut.position)

    def read_rows(
        self, table: str, columns: Sequence[str] | None = None, ranges: Ranges | None = None
    ) -> Any:
        """Return rows of a table, in no fixed order; all revisions of windows are among them.

        Args:
            table: name of the table.
            columns: what to read; all columns unless given. A column that the table does not have
                yet is null.
            ranges: only rows whose values are within them.

        Raises:
            TransientError: the store cannot be reached, or a table cannot be read just now.
        """
        wanted = ranges or {}
        needed = None if columns is None else sorted({*columns, "_epoch", *wanted})
        parts = [
            *self._read_published(table, needed, wanted),
            *self._read_unpublished(table, needed, wanted),
        ]
        schema = build_table_schema(self.spec, table)
        rows = (
            pa.concat_tables(parts, promote_options="permissive") if parts else schema.empty_table()
        )
        # Files of older specs lack columns that were added since.
        for name in [*(columns or schema.names), "_epoch"]:
            if name not in rows.column_names:
                kind = schema.field(name).type if name in schema.names else pa.string()
                rows = rows.append_column(name, pa.nulls(rows.num_rows, kind))
        self.rows_read += rows.num_rows
        return rows.select(list(columns)) if columns else rows

    @property
    def newest(self) -> Manifest:
        """The epoch at the head; only for a pipeline that has sealed one."""
        assert self.head.record is not None  # noqa: S101 - there is something to merge into
        return self.head.record

    def find_epoch(self, slot: int) -> Manifest | None:
        """Return the epoch of a slot on the head's lineage; None if it is retired or a restore."""
        if slot not in self._epochs:
            filled = next(self.log.epochs_between(self.head.timeline, slot, slot), None)
            record = filled.record if filled else None
            self._epochs[slot] = record if isinstance(record, Manifest) else None
            # A request may have rows of thousands of epochs.
            if len(self._epochs) > _MAX_EPOCHS:
                self._epochs.pop(next(iter(self._epochs)))
        return self._epochs[slot]

    @cached_property
    def merged(self) -> MergedRows:
        """The rows merged on the lineage of the head, except those merged into streams."""
        schema = make_request_schema(self.spec)
        rows, slots = [schema.empty_table()], dict[tuple[RowIdentity, str], int]()
        for segment in find_merge_segments(self.head).values():
            # Rows of streams have other columns.
            if "stream" in segment.extra:
                continue
            table = read_columns(self.log.store, [segment], schema)
            slot = CheckpointId.parse(str(segment.extra["checkpoint"])).slot
            slots |= dict.fromkeys(iterate_output_pairs(table), slot)
            rows.append(table)
        return MergedRows(pa.concat_tables(rows, promote_options="permissive"), slots)

    def find_commit_time(self, table: str, slot: int) -> int | None:
        """Return when a slot's rows came into a table, in ticks; None if that is not kept."""
        with translate_read_errors(self.spec, table):
            scan = self._open_table(table)
            return scan.find_commit_time(slot) if scan and slot <= self.published else None

    def _open_table(self, table: str) -> TableScan | None:
        """Open the published part of a table; None if there is none."""
        location = self._cut.tables.get(table)
        if location is None or self.published == 0:
            return None
        return self._open_scan(location)

    def _read_published(self, table: str, columns: list[str] | None, wanted: Ranges) -> list[Any]:
        """Read the published part of a table; rows of abandoned timelines are not in it."""
        with translate_read_errors(self.spec, table):
            scan = self._open_table(table)
            if scan is None:
                return []
            # Later rows in the tables belong to abandoned timelines, or come from the log below.
            published = scan.read(columns, wanted)
            return [select_in_ranges(published, {"_epoch": [(None, self.published)]})]

    def _read_unpublished(self, table: str, columns: list[str] | None, wanted: Ranges) -> list[Any]:
        """Read the rows of sealed slots that are not published yet."""
        tables = [
            read_data_file(self.log, file)
            for epoch in self._unpublished_epochs
            for file in epoch.files.get(table, [])
            if file.rows
        ]
        # The publisher makes these rows from the manifests.
        if table == CHECKPOINTS:
            tables = [build_checkpoint_rows(self._unpublished_epochs)]
        return [select_in_ranges(_select_columns(rows, columns), wanted) for rows in tables]

    @cached_property
    def _unpublished_epochs(self) -> list[Manifest]:
        slots = self.log.epochs_between(self.head.timeline, self.published + 1, self.head.slot)
        return [filled.epoch for filled in slots]


def read_data_file(log: SlotLog, file: FileRef) -> Any:
    """Return the rows of one data file, which is read from the store whole."""
    return use_plain_types(read_parquet_object(log.store, file.key))


def join_spans(spans: Sequence[Span]) -> list[Range]:
    """Return at most 8 ranges (`_MAX_RANGES`), sorted, that cover spans.

    Spans that touch are joined first, then those with the smallest gaps.
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    # The smallest gap costs the fewest rows that are read without need.
    while len(joined) > _MAX_RANGES:
        nearest = min(range(len(joined) - 1), key=lambda n: joined[n + 1][0] - joined[n][1])
        joined[nearest : nearest + 2] = [(joined[nearest][0], joined[nearest + 1][1])]
    return [(start, end - 1) for start, end in joined]


def _select_columns(table: Any, columns: list[str] | None) -> Any:
    return table.select([c for c in columns if c in table.column_names]) if columns else table


@dataclass(frozen=True)
class MergedRows:
    """All rows that merges have inserted on one lineage into events and windows.

    Attributes:
        rows: with the columns of `make_request_schema`, oldest merge first.
        slots: (row, output) -> the slot that merged the row into the output.
    """

    rows: Any
    slots: Mapping[tuple[RowIdentity, str], int]


def find_merge_segments(head: LogHead) -> dict[str, FileRef]:
    """Return request id -> segment of the merges on the lineage of a head, oldest first."""
    return {str(s.extra["request"]): s for s in head.segments if s.kind == SPLICE_KIND}


def iterate_output_pairs(rows: Any) -> Iterator[tuple[RowIdentity, str]]:
    """Yield (row, output) for each output of each row of a request."""
    for who, names in zip(iterate_identities(rows), rows["_outputs"].to_pylist(), strict=True):
        for name in names or ():
            yield who, name


def select_rows_for_output(rows: Any, output: str) -> Any:
    """Return the rows of a request that go to an output."""
    mask = [output in (names or ()) for names in rows["_outputs"].to_pylist()]
    return rows.filter(pa.array(mask, pa.bool_()))


def set_outputs(rows: Any, outputs: Sequence[Sequence[str]]) -> Any:
    """Return the rows with other outputs; rows without any output are dropped."""
    column = pa.array(outputs, pa.list_(pa.string()))
    rows = replace_column(rows, "_outputs", column)
    return rows.filter(pc.greater(pc.list_value_length(rows["_outputs"]), 0))
