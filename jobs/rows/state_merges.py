"""What merges state: the driver for few rows, else tasks, each for a bucket of keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import ENGINE_ERRORS, MEMORY_ERRORS

from .attempt_files import open_task_store
from .edge_folds import list_pairing_columns
from .edge_merges import pair_edges, write_edges
from .errors import WORKER_MEMORY_FULL
from .session_folds import is_folded_by_parts
from .session_merges import SessionMerge
from .state_files import MergedState, StateFiles, StateOrder
from .stored_partials import StoredTable, decode_table, encode_table, send_table
from .task_report import TaskReport
from .window_merges import WindowMerge, list_bucket_columns

MERGE_ROWS: Final = 500_000
"""Partial rows of a window that the driver merges, in a few tenths of a second."""
MERGE_BYTES: Final = 8 << 20
"""Bytes of them, compressed, that the driver merges, of all windows of a pipeline.

They are read and written: results and state can be twice as large together, the driver's 16 MiB.
"""


@dataclass(frozen=True)
class MergeOrder:
    """What is merged of one window, or of the edges.

    Attributes:
        state: of the epoch; of a bucket, or with the number of buckets.
        name: of the window; `OPEN_EDGES` for edges.
        parts: what units have made of their rows, in the order of the cut.
        sql_values: as `WindowMerge.write` has them, as an Arrow stream; None without any.
    """

    state: StateOrder
    name: str
    parts: tuple[bytes | StoredTable, ...] = ()
    sql_values: bytes | None = None

    def select_bucket(self, bucket: int) -> MergeOrder:
        """Return the order for one of the buckets."""
        return replace(self, state=replace(self.state, bucket=bucket))

    def open_merge(self, files: StateFiles) -> WindowMerge | SessionMerge:
        """Return the merge of the window, with files of the order's state."""
        aggregation = Aggregation(self.state.spec, self.name)
        if is_folded_by_parts(aggregation.window):
            return SessionMerge(files, aggregation, self.load_parts(files, aggregation.keys))
        columns = list_bucket_columns(aggregation)
        return WindowMerge(files, aggregation, self.load_parts(files, columns))

    def load_parts(self, files: StateFiles, columns: Iterable[str]) -> pa.Table | None:
        """Return what the units have made for the bucket, in their order; None of nothing.

        Which bucket a row is in follows from these columns.
        """
        names, tables = list(columns), list[pa.Table]()
        for part in self.parts:
            packed = part if isinstance(part, bytes) else files.store.get(part.key).data
            table = self.state.select_bucket(decode_table(packed), names)
            # Engines may order columns in different ways.
            if tables:
                table = table.select(tables[0].column_names).cast(tables[0].schema)
            tables.append(table)
        return pa.concat_tables(tables) if tables else None


@dataclass
class MergeAnswer:
    """What a task says of its bucket.

    Attributes:
        bucket: its number.
        state: what was written.
        gone: session windows: keys and parts whose session is purged, as an Arrow stream.
        partials: edges: window -> partial aggregates of what lasts.
        needs_sql: nothing was written: the results have aggregates that only Spark computes.
        error: why nothing can be sealed.
        left: why DuckDB cannot compute it.
        report: what the task cost.
    """

    bucket: int
    state: MergedState = field(default_factory=MergedState)
    gone: bytes | None = None
    partials: dict[str, bytes | StoredTable] = field(default_factory=dict)
    needs_sql: bool = False
    error: TidegateError | None = None
    left: str | None = None
    report: TaskReport | None = None


def merge_windows_in_task(order: MergeOrder, buckets: Iterable[int]) -> Iterator[MergeAnswer]:
    """Merge buckets of a window, and write their state and results."""

    def merge(own: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
        """Merge a bucket."""
        merge = own.open_merge(files)
        values = None if own.sql_values is None else decode_table(own.sql_values)
        keeps_rows = merge.aggregation.window.keeps_rows
        if keeps_rows and values is None and merge.due is not None:
            answer.needs_sql = True
        else:
            answer.state = merge.write(values)

    return _merge_buckets(order, buckets, merge)


def find_gone_parts_in_task(order: MergeOrder, buckets: Iterable[int]) -> Iterator[MergeAnswer]:
    """Say which keys and parts of a session window are late."""

    def find(own: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
        """Look at a bucket."""
        merge = own.open_merge(files)
        assert isinstance(merge, SessionMerge)  # noqa: S101 - the caller asks for no other
        gone = merge.find_gone_parts()
        answer.gone = None if gone is None else encode_table(gone)

    return _merge_buckets(order, buckets, find)


def merge_edges_in_task(order: MergeOrder, buckets: Iterable[int]) -> Iterator[MergeAnswer]:
    """Pair edges and fold what lasts."""

    def merge(own: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
        """Pair the edges of a bucket."""
        _write_edges(own, files, answer, pair_edges(files, _load_edges(own, files)))

    return _merge_buckets(order, buckets, merge)


def select_edges_in_task(order: MergeOrder, bucket: int) -> pa.Table | None:
    """Return the paired edges of a bucket, for Spark SQL; None without any."""
    own = order.select_bucket(bucket)
    files = StateFiles(own.state, open_task_store(own.state.store))
    return pair_edges(files, _load_edges(own, files))


def write_edges_in_task(order: MergeOrder, bucket: int, rows: pa.Table | None) -> MergeAnswer:
    """Fold the paired edges of a bucket, to which Spark SQL has added what it computes."""

    def write(own: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
        """Write the edges of a bucket."""
        _write_edges(own, files, answer, rows)

    return next(_merge_buckets(order, [bucket], write))


def _load_edges(order: MergeOrder, files: StateFiles) -> pa.Table | None:
    """The edges of the bucket that units have left; None without any."""
    return order.load_parts(files, list_pairing_columns(order.state.spec))


def _write_edges(
    order: MergeOrder, files: StateFiles, answer: MergeAnswer, paired: pa.Table | None
) -> None:
    merged = write_edges(files, paired, is_changed=bool(order.parts))
    answer.state = MergedState((), merged.segments, merged.written, footers=merged.footers)
    for name, rows in merged.partials.items():
        part = send_table(files.store, order.state.folders, name, answer.bucket, rows)
        answer.partials[name] = part


def select_rows_in_task(order: MergeOrder, bucket: int) -> pa.Table | None:
    """Return the kept rows of the due results of a bucket, for Spark SQL; None without any."""
    own = order.select_bucket(bucket)
    merge = own.open_merge(StateFiles(own.state, open_task_store(own.state.store)))
    return None if merge.due is None else merge.aggregation.select_kept_rows(merge.due.merged)


def _merge_buckets(
    order: MergeOrder,
    buckets: Iterable[int],
    body: Callable[[MergeOrder, StateFiles, MergeAnswer], None],
) -> Iterator[MergeAnswer]:
    """Let `body` fill an answer for each bucket; what stops it is part of the answer."""
    for bucket in buckets:
        begun, answer = time.process_time(), MergeAnswer(bucket)
        own = order.select_bucket(bucket)
        try:
            body(own, StateFiles(own.state, open_task_store(own.state.store)), answer)
        except TidegateError as error:
            answer.error = error
        except MEMORY_ERRORS as error:
            answer.error = WORKER_MEMORY_FULL(
                pipeline=order.state.spec.name,
                unit=f"the state of {order.name}",
                cause=get_first_line(error),
            )
        except (*ENGINE_ERRORS, pa.ArrowException) as error:
            answer.left = get_first_line(error)
        answer.report = TaskReport.measure_since(begun)
        yield answer
