"""Merges the state of an epoch: in the driver while it is small, else by a job of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
import structlog
from pyspark import TaskContext
from pyspark.serializers import CPickleSerializer

from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import conform_to_schema, to_arrow_type
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.rows.column_casts import declared_to_spark_type
from tidegate.jobs.rows.edge_folds import OPEN_EDGES, collect_edge_columns
from tidegate.jobs.rows.edge_merges import EDGES_KIND, closes_windows, list_edge_columns
from tidegate.jobs.rows.session_merges import SessionMerge
from tidegate.jobs.rows.state_files import MergedState
from tidegate.jobs.rows.state_merges import (
    MERGE_BYTES,
    MERGE_ROWS,
    MergeAnswer,
    MergeOrder,
    find_gone_parts_in_task,
    merge_edges_in_task,
    merge_windows_in_task,
    select_edges_in_task,
    select_rows_in_task,
    write_edges_in_task,
)
from tidegate.jobs.rows.stored_partials import StoredTable, decode_table, encode_table
from tidegate.jobs.rows.window_merges import WindowMerge
from tidegate.jobs.rules.aggregates import Aggregation, list_spark_arguments
from tidegate.jobs.rules.duck_frame import group_rows
from tidegate.jobs.rules.row_conditions import is_window_purged, quote_name
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from .epoch_context import EpochContext
from .errors import SPARK_FAILED
from .frame_tasks import map_in_workers
from .python_tasks import prepare_worker
from .spark_session import carry_error
from .task_runner import choose_runner

_log = structlog.get_logger("tidegate.driver")
_pickle: Any = CPickleSerializer()
_BATCH_ROWS: Final = 65_536
"""Rows that Spark SQL is given at a time."""
Parts = tuple[bytes | StoredTable, ...]
"""Partial aggregates of one window, unit by unit."""


@dataclass
class StateMerging:
    """Merges what tasks have made of the rows of an epoch into its state.

    Attributes:
        epoch: the epoch.
        parts: window, or `OPEN_EDGES` -> what the units have made, in the order of the cut.
        low: least event time of the epoch's rows; None without any.
        edges: what merging the edges did with their state.
    """

    epoch: EpochContext
    parts: dict[str, Parts]
    low: int | None = None
    edges: MergedState = field(default_factory=MergedState)
    _opened: dict[str, WindowMerge | SessionMerge] = field(default_factory=dict)

    def find_gone_parts(self) -> dict[str, pa.Table]:
        """Return session window -> keys and parts whose rows came after their session was purged.

        Windows without any are left out.
        """
        found, before = dict[str, pa.Table](), self.epoch.decision.frontier_before
        for name, window in self.epoch.spec.windows.items():
            # No session ends before the first row in it.
            if window.kind is not WindowKind.SESSION or self.low is None:
                continue
            if is_window_purged(window, self.low, before):
                gone = self._find_gone(name)
                if gone is not None:
                    found[name] = gone
        return found

    def _find_gone(self, name: str) -> pa.Table | None:
        buckets = self._count_buckets(name, f"window:{name}")
        if not buckets:
            merge = self._open_merge(name)
            assert isinstance(merge, SessionMerge)  # noqa: S101 - of a session window
            return merge.find_gone_parts()
        order = self._make_order(name, buckets)
        answers = self._run(find_gone_parts_in_task, order, range(buckets))
        tables = [decode_table(answer.gone) for answer in answers if answer.gone is not None]
        return pa.concat_tables(tables) if tables else None

    def merge_edges(self) -> None:
        """Pair the edges; what lasts becomes part of what the windows merge."""
        if not collect_edge_columns(self.epoch.spec):
            return
        live = self.epoch.live_segments(EDGES_KIND)
        if OPEN_EDGES not in self.parts and not (live and closes_windows(self.epoch.files.order)):
            self.edges = MergedState(segments=tuple(live))
            return
        # Edges are rows, which belong to tasks.
        buckets = max(self._count_buckets(OPEN_EDGES, EDGES_KIND), 1)
        order = self._make_order(OPEN_EDGES, buckets)
        if list_spark_arguments(self.epoch.spec):
            answers = self._check(self._merge_evaluated_edges(order))
        else:
            answers = self._run(merge_edges_in_task, order, range(buckets))
        self.edges = MergedState.join(answer.state for answer in answers)
        more = [pair for answer in answers for pair in answer.partials.items()]
        for name, part in more:
            self.parts[name] = (*self.parts.get(name, ()), part)

    def merge_windows(self) -> dict[str, MergedState]:
        """Merge all windows, as `merge_window` does."""
        return {name: self.merge_window(name) for name in self.epoch.spec.windows}

    def merge_window(self, name: str) -> MergedState:
        """Merge the state of a window, and write its results."""
        buckets = self._count_buckets(name, f"window:{name}")
        if not buckets:
            found = self._open_merge(name).write()
        else:
            order = self._make_order(name, buckets)
            answers = self._run(merge_windows_in_task, order, range(buckets))
            found = MergedState.join(answer.state for answer in answers if not answer.needs_sql)
            left = [answer.bucket for answer in answers if answer.needs_sql]
            if left:
                values = encode_table(self._compute_sql_values(order, left))
                again = self._run(merge_windows_in_task, replace(order, sql_values=values), left)
                found = MergedState.join([found, *(answer.state for answer in again)])
        if found.overflowed:
            _log.warning("sums_overflowed", window=name, results=found.overflowed)
        note_footers(self.epoch.store, found.footers)
        return found

    def list_stored(self) -> list[StoredTable]:
        """Return what lies in the store for this epoch only."""
        return [
            part for own in self.parts.values() for part in own if isinstance(part, StoredTable)
        ]

    def _open_merge(self, name: str) -> WindowMerge | SessionMerge:
        if name not in self._opened:
            self._opened[name] = self._make_order(name).open_merge(self.epoch.files)
        return self._opened[name]

    def _make_order(self, name: str, buckets: int = 1) -> MergeOrder:
        kind = EDGES_KIND if name == OPEN_EDGES else f"window:{name}"
        state = self.epoch.files.order
        own = replace(state, segments=tuple(state.live_segments(kind)), buckets=buckets)
        return MergeOrder(own, name, self.parts.get(name, ()))

    def _count_buckets(self, name: str, kind: str) -> int:
        """How many tasks merge a window, or the edges; 0: the driver does."""
        parts, live = self.parts.get(name, ()), self.epoch.live_segments(kind)
        stored = [part for part in parts if isinstance(part, StoredTable)]
        sent = [(part, decode_table(part)) for part in parts if isinstance(part, bytes)]
        rows = sum(one.rows for one in stored) + sum(ref.rows for ref in live)
        rows += sum(table.num_rows for _, table in sent)
        size = sum(one.bytes for one in stored) + sum(ref.bytes for ref in live)
        size += sum(max(len(part), _measure_texts(table)) for part, table in sent)
        windows = self.epoch.spec.windows
        affected = windows.values() if name == OPEN_EDGES else [windows[name]]
        keeps_rows = (parts or live) and any(window.keeps_rows for window in affected)
        rows += sum(map(self._count_gap_windows, affected, [rows] * len(windows)))
        # All windows together have one bound.
        most = MERGE_BYTES // max(len(windows), 1)
        if not keeps_rows and not stored and rows <= MERGE_ROWS and size <= most:
            return 0
        count: int = max(-(-rows // max(MERGE_ROWS, 1)), -(-size // MERGE_BYTES), 1)
        return count

    def _count_gap_windows(self, window: WindowSpec, keys: int) -> int:
        """Windows without rows that `zero_rows` may add, of at most so many keys."""
        before, after = self.epoch.decision.frontier_before, self.epoch.decision.frontier_after
        if not window.zero_rows or not TICK_MIN < before < after < TICK_MAX:
            return 0
        return keys * ((after - before) // (window.period or 1))

    def _run(
        self,
        body: Callable[[MergeOrder, Iterable[int]], Iterator[MergeAnswer]],
        order: MergeOrder,
        buckets: Sequence[int],
    ) -> list[MergeAnswer]:
        """Let a task for each of these buckets run this body; return as `_check` does."""
        sessions = self.epoch.sessions
        run = partial(_run_in_worker, body, order)
        return self._check(choose_runner(sessions.full).run_small_job(sessions, run, buckets))

    def _check(self, answers: list[MergeAnswer]) -> list[MergeAnswer]:
        """Log the tasks, and return their answers in the order of the buckets.

        Raises:
            TidegateError: what the first task that met an error says.
        """
        answers.sort(key=lambda answer: answer.bucket)
        tasks = [_describe_task(answer) for answer in answers]
        slot = self.epoch.order.folders.attempt.slot
        _log.info("tasks_finished", job="merge", slot=slot, tasks=tasks)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            if answer.left is not None:
                raise SPARK_FAILED(pipeline=self.epoch.spec.name, cause=answer.left)
        return answers

    # What only Spark computes

    def _merge_evaluated_edges(self, order: MergeOrder) -> list[MergeAnswer]:
        """As `merge_edges_in_task`, with what Spark SQL computes of edges between two tasks."""
        spec, tasks = self.epoch.spec, order.state.buckets
        kinds, packed = list_edge_columns(spec), _pickle.dumps(order)
        columns = (f"{sql} AS {name}" for name, sql in list_spark_arguments(spec).items())
        body = partial(_select_rows, select_edges_in_task, packed, range(tasks), kinds)
        starts = self.epoch.sessions.full.range(0, tasks, 1, tasks)
        paired = map_in_workers(starts, body, _format_ddl(kinds))
        evaluated = paired.selectExpr("*", *columns)
        answers = map_in_workers(evaluated, partial(_write_edges, packed), "data binary")
        return [_pickle.loads(row.data) for row in answers.collect()]

    def _compute_sql_values(self, order: MergeOrder, buckets: Sequence[int]) -> pa.Table:
        """The aggregates in Spark SQL of the results that are due, beside the group columns.

        A task for each bucket gives the rows of which they are computed.
        """
        spec, aggregation = self.epoch.spec, Aggregation(self.epoch.spec, order.name)
        kinds = _list_kept_columns(spec, aggregation)
        session, tasks = self.epoch.sessions.full, len(buckets)
        body = partial(_select_rows, select_rows_in_task, _pickle.dumps(order), buckets, kinds)
        rows = map_in_workers(session.range(0, tasks, 1, tasks), body, _format_ddl(kinds))
        values = {f"_sql_{output}": sql for output, sql in aggregation.sql_aggregates.items()}
        found: pa.Table = group_rows(rows, aggregation.group_columns, values).toArrow()
        return found


def _measure_texts(table: pa.Table) -> int:
    """Return the bytes of texts, lists and sketches: files have them nearly as large."""
    return sum(one.nbytes for one in table.columns if not pa.types.is_primitive(one.type))


def _list_kept_columns(spec: PipelineSpec, aggregation: Aggregation) -> dict[str, str]:
    """Column -> declared type, of the rows of `Aggregation.select_kept_rows`."""
    keys = zip(aggregation.keys, aggregation.window.keys, strict=True)
    kinds = {**spec.columns, "_source": "string"}
    return {"_ws": "long", "_we": "long", **{own: kinds[key] for own, key in keys}, **kinds}


def _format_ddl(kinds: dict[str, str]) -> str:
    return ", ".join(f"{quote_name(c)} {declared_to_spark_type(k)}" for c, k in kinds.items())


def _describe_task(answer: MergeAnswer) -> dict[str, Any]:
    assert answer.report is not None  # noqa: S101 - each task reports
    files = (*answer.state.results, *answer.state.written)
    return {
        "task": answer.bucket,
        "rows": sum(ref.rows for ref in files),
        "bytes": sum(ref.bytes for ref in files),
        **answer.report.describe(),
    }


# The bodies of tasks


def _run_in_worker(
    body: Callable[[MergeOrder, Iterable[int]], Iterator[MergeAnswer]],
    order: MergeOrder,
    buckets: Iterable[int],
) -> Iterator[MergeAnswer]:
    prepare_worker()
    yield from body(order, buckets)


def _select_rows(
    select: Callable[[MergeOrder, int], pa.Table | None],
    packed: bytes,
    buckets: Sequence[int],
    kinds: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    schema = pa.schema({name: to_arrow_type(kind) for name, kind in kinds.items()})
    for place in [one for batch in batches for one in batch["id"].to_pylist()]:
        try:
            rows = select(_pickle.loads(packed), buckets[place])
        except TidegateError as error:
            raise carry_error(error) from error
        if rows is not None:
            # Rows that were kept before a column was added have a null there.
            whole = conform_to_schema(rows, schema)
            yield from whole.combine_chunks().to_batches(_BATCH_ROWS)


def _write_edges(packed: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    task, found = TaskContext.get(), list(batches)
    assert task is not None  # noqa: S101 - the body of a task
    rows = pa.Table.from_batches(found) if found else None
    answer = write_edges_in_task(_pickle.loads(packed), task.partitionId(), rows)
    yield pa.record_batch({"data": pa.array([_pickle.dumps(answer)], pa.binary())})
