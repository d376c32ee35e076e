"""Merges the state of an epoch: in the driver while it is small, else by a job of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from pyspark import TaskContext
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame

from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import conform_to_schema, to_arrow_type
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.rows.column_casts import declared_to_spark_type
from tidegate.jobs.rows.edge_folds import OPEN_EDGES, collect_edge_columns
from tidegate.jobs.rows.edge_merges import EDGES_KIND, closes_windows, list_edge_columns
from tidegate.jobs.rows.state_files import MergedState, StateFiles
from tidegate.jobs.rows.state_merges import (
    MERGE_BYTES,
    MERGE_ROWS,
    Merge,
    MergeAnswer,
    MergeOrder,
    find_gone_parts,
    fold_edges,
    merge_buckets,
    merge_edges,
    merge_window,
    select_edges,
    select_kept_rows,
)
from tidegate.jobs.rows.stored_partials import StoredTable, decode_table, encode_table
from tidegate.jobs.rules.aggregates import Aggregation, list_spark_arguments
from tidegate.jobs.rules.duck_frame import group_rows
from tidegate.jobs.rules.row_conditions import is_window_purged, quote_name
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from .epoch_context import EpochContext
from .errors import SPARK_FAILED
from .frame_tasks import collect_answers, list_units, make_answers, map_in_workers, start_tasks
from .python_tasks import describe_writer, log_tasks
from .spark_session import carry_error
from .task_runner import choose_runner

_log = structlog.get_logger("tidegate.driver")
_pickle: Any = CPickleSerializer()
_BATCH_ROWS: Final = 65_536
"""Rows that Spark SQL is given at a time."""
Parts = tuple[bytes | StoredTable, ...]
"""Partial aggregates of one window, unit by unit."""
Select = Callable[[MergeOrder, StateFiles], pa.Table | None]
"""Gives the rows of a bucket to Spark SQL."""


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

    def find_gone_parts(self) -> dict[str, pa.Table]:
        """Return session window -> keys and parts whose rows came after their session was purged.

        Windows without any are left out.
        """
        found = dict[str, pa.Table]()
        before = self.epoch.decision.frontier_before
        for name, window in self.epoch.spec.windows.items():
            # No session ends before the first row in it.
            if window.kind is not WindowKind.SESSION or self.low is None:
                continue
            if is_window_purged(window, self.low, before):
                answers = self._merge(find_gone_parts, self._make_order(name))
                gone = [decode_table(one.gone) for one in answers if one.gone is not None]
                if gone:
                    found[name] = pa.concat_tables(gone)
        return found

    def merge_edges(self) -> None:
        """Pair the edges; what lasts becomes part of what the windows merge."""
        if not collect_edge_columns(self.epoch.spec):
            return
        order = self._make_order(OPEN_EDGES)
        live = order.state.segments
        if not order.parts and not (live and closes_windows(order.state)):
            self.edges = MergedState(segments=live)
            return
        # Edges are rows, which belong to tasks.
        if not order.state.buckets:
            order = _set_buckets(order, 1)
        if list_spark_arguments(self.epoch.spec):
            answers = self._check(self._merge_evaluated_edges(order))
        else:
            answers = self._merge(merge_edges, order)
        self.edges = MergedState.join(answer.state for answer in answers)
        more = [pair for answer in answers for pair in answer.partials.items()]
        for name, part in more:
            self.parts[name] = (*self.parts.get(name, ()), part)

    def merge_windows(self) -> dict[str, MergedState]:
        """Merge all windows, as `merge_window` does."""
        return {name: self.merge_window(name) for name in self.epoch.spec.windows}

    def merge_window(self, name: str) -> MergedState:
        """Merge the state of a window, and write its results."""
        order = self._make_order(name)
        answers = self._merge(merge_window, order)
        left = [answer.bucket for answer in answers if answer.needs_sql]
        if left:
            values = encode_table(self._compute_sql_values(order, left))
            again = replace(order, sql_values=values)
            answers = [answer for answer in answers if not answer.needs_sql]
            answers += self._merge_in_tasks(merge_window, again, left)
        found = MergedState.join(answer.state for answer in answers)
        if found.overflowed:
            _log.warning("sums_overflowed", window=name, results=found.overflowed)
        note_footers(self.epoch.store, found.footers)
        return found

    def list_stored(self) -> list[StoredTable]:
        """Return what lies in the store for this epoch only."""
        return [
            part for own in self.parts.values() for part in own if isinstance(part, StoredTable)
        ]

    def _make_order(self, name: str) -> MergeOrder:
        """The order for a window, or for the edges; without buckets: the driver merges them."""
        kind = EDGES_KIND if name == OPEN_EDGES else f"window:{name}"
        live = tuple(self.epoch.live_segments(kind))
        buckets = self._count_buckets(name, kind)
        state = replace(self.epoch.files.order, segments=live, buckets=buckets)
        return MergeOrder(state, name, self.parts.get(name, ()))

    def _count_buckets(self, name: str, kind: str) -> int:
        """How many tasks merge a window, or the edges; 0: the driver does."""
        parts = self.parts.get(name, ())
        live = self.epoch.live_segments(kind)
        stored = [part for part in parts if isinstance(part, StoredTable)]
        sent = [(part, decode_table(part)) for part in parts if isinstance(part, bytes)]
        rows = sum(one.rows for one in stored) + sum(ref.rows for ref in live)
        rows += sum(table.num_rows for _, table in sent)
        size = sum(one.bytes for one in stored) + sum(ref.bytes for ref in live)
        size += sum(max(len(part), _measure_texts(table)) for part, table in sent)
        windows = self.epoch.spec.windows
        affected = windows.values() if name == OPEN_EDGES else [windows[name]]
        keeps_rows = (parts or live) and any(window.keeps_rows for window in affected)
        starts = [
            start
            for _, table in sent
            if "_ws" in table.column_names
            for start in pc.min_max(table["_ws"]).as_py().values()
            if start is not None
        ]
        rows += sum(self._count_gap_windows(window, rows, starts) for window in affected)
        # All windows together have one bound.
        most = MERGE_BYTES // max(len(windows), 1)
        if not keeps_rows and not stored and rows <= MERGE_ROWS and size <= most:
            return 0
        count: int = max(-(-rows // max(MERGE_ROWS, 1)), -(-size // MERGE_BYTES), 1)
        return count

    def _count_gap_windows(self, window: WindowSpec, keys: int, starts: list[int]) -> int:
        """Windows without rows that `zero_rows` may add, of at most so many keys.

        `starts` of windows with rows bound the epochs before and behind which there is no frontier.
        """
        before = self.epoch.decision.frontier_before
        after = self.epoch.decision.frontier_after
        if before == TICK_MIN:
            before = min(starts, default=after)
        if after == TICK_MAX:
            after = max(starts, default=before)
        if not window.zero_rows or after <= before:
            return 0
        return keys * ((after - before) // (window.period or 1))

    def _merge(self, merge: Merge, order: MergeOrder) -> list[MergeAnswer]:
        """Merge all buckets: here without any, else as `_merge_in_tasks` does."""
        if order.state.buckets:
            return self._merge_in_tasks(merge, order, range(order.state.buckets))
        answer = MergeAnswer(0)
        merge(_set_buckets(order, 1), self.epoch.files, answer)
        return [answer]

    def _merge_in_tasks(
        self, merge: Merge, order: MergeOrder, buckets: Sequence[int]
    ) -> list[MergeAnswer]:
        """Let a task merge each of these buckets; return as `_check` does."""
        session = self.epoch.session
        run = partial(merge_buckets, merge, order)
        return self._check(choose_runner(session).run_small_job(session, run, buckets))

    def _check(self, answers: list[MergeAnswer]) -> list[MergeAnswer]:
        """Log the tasks, and return their answers in the order of the buckets.

        Raises:
            TidegateError: what the first task that met an error says.
        """
        answers.sort(key=lambda answer: answer.bucket)
        tasks = [
            describe_writer(one.bucket, (*one.state.results, *one.state.written), one.report)
            for one in answers
        ]
        log_tasks("merge", self.epoch.order.folders, tasks)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            if answer.left is not None:
                raise SPARK_FAILED(pipeline=self.epoch.spec.name, cause=answer.left)
        return answers

    # What only Spark computes

    def _merge_evaluated_edges(self, order: MergeOrder) -> list[MergeAnswer]:
        """As `merge_edges`, with what Spark SQL computes of edges between two tasks."""
        spec = self.epoch.spec
        buckets = range(order.state.buckets)
        columns = (f"{sql} AS {name}" for name, sql in list_spark_arguments(spec).items())
        paired = self._select_rows(select_edges, order, buckets, list_edge_columns(spec))
        fold = partial(_fold_edges, _pickle.dumps(order))
        return collect_answers(map_in_workers(paired.selectExpr("*", *columns), fold))

    def _compute_sql_values(self, order: MergeOrder, buckets: Sequence[int]) -> pa.Table:
        """The aggregates in Spark SQL of the results that are due, beside the group columns.

        A task for each bucket gives the rows of which they are computed.
        """
        spec = self.epoch.spec
        aggregation = Aggregation(self.epoch.spec, order.name)
        known = {**spec.columns, "_source": "string"}
        keys = zip(aggregation.keys, aggregation.window.keys, strict=True)
        kinds = {"_ws": "long", "_we": "long", **{own: known[key] for own, key in keys}, **known}
        rows = self._select_rows(select_kept_rows, order, buckets, kinds)
        values = {f"_sql_{output}": sql for output, sql in aggregation.sql_aggregates.items()}
        return group_rows(rows, aggregation.group_columns, values).toArrow()

    def _select_rows(
        self, select: Select, order: MergeOrder, buckets: Sequence[int], kinds: dict[str, str]
    ) -> DataFrame:
        """The rows that a task selects for each bucket; `kinds` are their columns."""
        columns = (f"{quote_name(c)} {declared_to_spark_type(k)}" for c, k in kinds.items())
        body = partial(_select_in_worker, select, _pickle.dumps(order), buckets, kinds)
        starts = start_tasks(self.epoch.session, len(buckets))
        return map_in_workers(starts, body, ", ".join(columns))


def _set_buckets(order: MergeOrder, buckets: int) -> MergeOrder:
    return replace(order, state=replace(order.state, buckets=buckets))


def _measure_texts(table: pa.Table) -> int:
    """Return the bytes of texts, lists and sketches: files have them nearly as large."""
    return sum(one.nbytes for one in table.columns if not pa.types.is_primitive(one.type))


# The bodies of tasks


def _select_in_worker(
    select: Select,
    packed: bytes,
    buckets: Sequence[int],
    kinds: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    order: MergeOrder = _pickle.loads(packed)
    schema = pa.schema({name: to_arrow_type(kind) for name, kind in kinds.items()})
    for place in list_units(batches):
        own = order.select_bucket(buckets[place])
        try:
            rows = select(own, own.open_files())
        except TidegateError as error:
            raise carry_error(error) from error
        if rows is not None:
            # Rows that were kept before a column was added have a null there.
            whole = conform_to_schema(rows, schema)
            yield from whole.combine_chunks().to_batches(_BATCH_ROWS)


def _fold_edges(packed: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    task: Any = TaskContext.get()
    found = list(batches)
    rows = pa.Table.from_batches(found) if found else None
    fold = partial(fold_edges, rows)
    return make_answers(merge_buckets(fold, _pickle.loads(packed), [task.partitionId()]))
