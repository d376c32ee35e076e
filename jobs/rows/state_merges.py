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
from .session_merges import SessionMerge
from .state_files import MergedState, StateFiles, StateOrder
from .stored_partials import StoredTable, decode_table, encode_table, send_table
from .task_report import TaskReport
from .window_merges import WindowMerge

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

    def open_files(self) -> StateFiles:
        """Return files of the order's state, for a task."""
        return StateFiles(self.state, open_task_store(self.state.store))

    def open_merge(self, files: StateFiles) -> WindowMerge | SessionMerge:
        """Return the merge of the window, with files of the order's state."""
        if self.name not in files.opened:
            aggregation = Aggregation(self.state.spec, self.name)
            merge = SessionMerge if aggregation.window.is_folded_by_parts else WindowMerge
            parts = self.load_parts(files, aggregation.bucket_columns)
            files.opened[self.name] = merge(files, aggregation, parts)
        found: WindowMerge | SessionMerge = files.opened[self.name]
        return found

    def load_parts(self, files: StateFiles, columns: list[str]) -> pa.Table | None:
        """Return what the units have made for the bucket, in their order; None of nothing.

        Which bucket a row is in follows from these columns.
        """
        tables = list[pa.Table]()
        for part in self.parts:
            packed = part if isinstance(part, bytes) else files.store.get(part.key).data
            table = self.state.select_bucket(decode_table(packed), columns)
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


Merge = Callable[[MergeOrder, StateFiles, MergeAnswer], None]
"""Merges a bucket, and fills an answer."""


def merge_window(order: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
    """Write the state and the results of a window."""
    merge = order.open_merge(files)
    files.opened.pop(order.name)  # the tables of a merge shall be gone with it
    values = None if order.sql_values is None else decode_table(order.sql_values)
    answer.needs_sql = merge.window.keeps_rows and values is None and merge.due is not None
    if not answer.needs_sql:
        answer.state = merge.write(values)


def find_gone_parts(order: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
    """Say which keys and parts of a session window are late."""
    merge = order.open_merge(files)
    gone = merge.find_gone_parts() if isinstance(merge, SessionMerge) else None
    answer.gone = None if gone is None else encode_table(gone)


def merge_edges(order: MergeOrder, files: StateFiles, answer: MergeAnswer) -> None:
    """Pair edges and fold what lasts."""
    fold_edges(select_edges(order, files), order, files, answer)


def fold_edges(
    paired: pa.Table | None, order: MergeOrder, files: StateFiles, answer: MergeAnswer
) -> None:
    """Fold the paired edges of a bucket, to which Spark SQL may have added what it computes."""
    answer.state, partials = write_edges(files, paired, is_changed=bool(order.parts))
    for name, rows in partials.items():
        part = send_table(files.store, order.state.folders, name, answer.bucket, rows)
        answer.partials[name] = part


def select_edges(order: MergeOrder, files: StateFiles) -> pa.Table | None:
    """Return the paired edges of a bucket; None without any."""
    came = order.load_parts(files, list_pairing_columns(order.state.spec))
    return pair_edges(files, came)


def select_kept_rows(order: MergeOrder, files: StateFiles) -> pa.Table | None:
    """Return the kept rows of the due results of a bucket, for Spark SQL; None without any."""
    merge = order.open_merge(files)
    files.opened.pop(order.name)
    return None if merge.due is None else merge.aggregation.select_kept_rows(merge.due.merged)


def merge_buckets(merge: Merge, order: MergeOrder, buckets: Iterable[int]) -> Iterator[MergeAnswer]:
    """Merge buckets in a task; what stops it is part of the answer."""
    for bucket in buckets:
        begun = time.process_time()
        answer = MergeAnswer(bucket)
        own = order.select_bucket(bucket)
        files = own.open_files()
        try:
            merge(own, files, answer)
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
        files.opened.clear()
        answer.report = TaskReport.measure_since(begun)
        yield answer
