"""Streams in Spark tasks.

One task dispatches the rows of an epoch through the whole graph of pipes and reducers. The driver
tells it which files have the rows, and gets their state and the references of new files.

A large batch of a reducer with keys is first folded by several tasks:

1. The task that dispatches meets the batch, and ends. It keeps what reducers before this one gave.
2. A job with a task for each group of keys: each task dispatches up to the reducer without writing
   anything, and folds the rows of its group.
3. The least row at which any group stopped is where the whole batch stops. If there is one, the
   rows before it are folded again: nothing of that row or behind it may be in the result, whatever
   its key.
4. The task that dispatches runs again, with the result of the groups.

Keys are folded independently of each other, and each in order of positions; so the result is that
of one fold. All tasks must come to the same rows before the reducer: they compare a digest. If it
differs, as by a predicate with chance in it, the reducer is paused at the first row of its batch.
"""

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkFiles, TaskContext
from pyspark.sql import SparkSession

from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.engine.file_footers import note_footers
from tidegate.jobs.rows.attempt_files import open_task_store
from tidegate.jobs.rows.stored_partials import (
    StoredTable,
    decode_table,
    delete_left_tables,
    delete_tables,
    send_table,
)
from tidegate.jobs.rows.task_report import TaskReport
from tidegate.jobs.rows.topic_reading import remove_settings
from tidegate.jobs.rules.duck_frame import compute_columns
from tidegate.jobs.rules.row_conditions import quote_name
from tidegate.jobs.sinks.published_tables import read_positions
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.user_code import collect_module_code, link_other_files
from tidegate.jobs.streams.dispatcher import DispatchRunner
from tidegate.jobs.streams.reducers import (
    FoldedBatch,
    FoldFailure,
    Reducer,
    ReducerStates,
    build_states_table,
    fold_batch,
    fold_prepared_rows,
    load_fold_function,
    parse_states_table,
    prepare_arguments,
)
from tidegate.jobs.streams.row_dispatch import (
    DispatchedRows,
    DispatchWork,
    RowDispatch,
    find_unknown_start,
    list_earlier_rows,
)
from tidegate.jobs.streams.row_history import (
    HistoryReader,
    LocatedHistory,
    LocatedRows,
    LocatedTime,
    LogHistory,
)
from tidegate.jobs.streams.stream_state import ReducerStateStore

from .errors import REDUCER_NOT_ON_HOSTS, STREAMS_FAILED
from .lost_workers import LostWorkers
from .python_tasks import count_tasks, describe_writer, log_tasks
from .spark_session import SPARK_ERRORS, runs_on_one_host
from .task_runner import choose_runner

MIN_GROUPED_ROWS: Final = 50_000
"""Rows of a batch from which groups of keys pay: starting two more jobs costs about what one core
folds in half a second."""
_MOST_GROUPS: Final = 32
"""Each group sends up to 64 KiB for each destination, and Spark bounds the sum."""
_UNKNOWN_TASKS: Final = 4  # Spark Connect does not say how many tasks run at a time
_OTHER_ROWS: Final = (
    "not deterministic: the rows that it is given came out differently in another task,"
    " so a predicate or a reducer before it depends on more than its rows"
)
_FOLDS: Final = "fold-"  # begins the names of what groups have sent
_STATES = ":states"  # beside destinations, whose names have no colon


_Digest = tuple[int, int]
"""How many rows, and a hash of all."""
_Tables = dict[str, bytes | StoredTable]


@dataclass(frozen=True)
class _FoldedGroups:
    """What the groups of a batch gave.

    Attributes:
        tables: for each group, destination -> what it has sent, and its states.
        failure: where the batch stops.
        digest: of the rows of the batch; None if the groups have seen different ones.
    """

    tables: list[_Tables]
    failure: FoldFailure | None
    digest: _Digest | None

    def read_batch(self, store: Store) -> FoldedBatch:
        """Return the batch as one fold would have given it."""
        sent: dict[str, list[Any]] = {}
        states: ReducerStates = {}
        for group in self.tables:
            for name, packed in group.items():
                data = packed if isinstance(packed, bytes) else store.get(packed.key).data
                table = decode_table(data)
                if name == _STATES:
                    states |= parse_states_table(table)
                else:
                    sent.setdefault(name, []).append(table)
        order = [("_position", "ascending"), ("_nth", "ascending")]
        merged = {to: pa.concat_tables(parts).sort_by(order) for to, parts in sent.items()}
        return FoldedBatch(merged, states, self.failure)


@dataclass(frozen=True)
class _Group:
    """One group of the keys of a reducer's batch; `before` is the position at which it ends."""

    name: str
    number: int
    groups: int
    before: int | None


@dataclass(frozen=True)
class _StreamOrder:
    """What a task needs to dispatch.

    Attributes:
        store: address of the pipeline's store.
        located, last_time, time_before: of earlier epochs (`LocatedHistory`, `HistoryReader`).
        code: the reducers' modules, as the driver has imported them, by their paths.
        folders: where they and other files lie, if the task sees the driver's disk.
        least: rows of a batch that groups fold.
        grouped: reducer -> what was folded already.
        group: the task folds this group and does nothing else.
    """

    work: DispatchWork
    store: str
    located: tuple[LocatedRows, ...]
    last_time: LocatedTime | None
    time_before: tuple[int, int | None]
    code: Mapping[str, bytes]
    folders: tuple[Path, ...]
    least: int
    grouped: Mapping[str, _FoldedGroups] = field(default_factory=dict)
    group: _Group | None = None


@dataclass
class _StreamAnswer:
    """What a task says of an epoch's rows.

    Attributes:
        number: of its group.
        large: the reducer whose batch is for groups, and the rows of the batch.
        folded: what its group gave, or the reducers before the large one.
    """

    number: int = 0
    report: TaskReport | None = None
    done: DispatchedRows | None = None
    large: tuple[str, int] | None = None
    folded: dict[str, _FoldedGroups] = field(default_factory=dict)
    time_before: tuple[int, int | None] = (0, None)
    error: TidegateError | None = None


@dataclass
class TaskDispatcher:
    """Moves the rows of epochs through the graph of a pipeline's streams, in tasks.

    An epoch without rows for it needs no task.

    Args:
        session: where the tasks run.
        spec: the pipeline.
        store: its store.
        history: locates rows of earlier epochs.
        here: dispatches an epoch without rows.
        least: rows of a batch that groups fold.
        groups: how many; 0: one for so many rows, at most as many as run at a time.

    Raises:
        ConfigurationError: tasks cannot import a reducer.
    """

    session: SparkSession
    spec: PipelineSpec
    store: Store
    history: LogHistory
    here: DispatchRunner
    least: int = MIN_GROUPED_ROWS
    groups: int = 0

    def __post_init__(self) -> None:
        self._lost = LostWorkers(self.spec.name)
        functions = [one.function for one in self.spec.reducers.values() if one.function]
        modules = {function.partition(":")[0] for function in functions}
        self._code, folders = collect_module_code(modules)
        self._folders = tuple(folders) if runs_on_one_host(self.spec.spark) else ()
        if functions:
            self._require_reducers(functions)

    def __call__(self, work: DispatchWork) -> DispatchedRows:
        """Dispatch an epoch.

        Raises:
            PoisonError: Spark could not run a task.
            TransientError: the job lost its executors; or as `RowDispatch.dispatch_rows`.
        """
        located = [self.history.locate_rows(*rows) for rows in list_earlier_rows(work)]
        waiting = any(ref.kind.startswith("buffer:") for ref in work.segments)
        start = find_unknown_start(work)
        if not (work.released or located or waiting) and start is None:
            return self.here(work)
        order = _StreamOrder(
            work=replace(work, spec=remove_settings(work.spec)),
            store=self.store.url,
            located=tuple(located),
            last_time=None if start is None else self.history.locate_last_time(start),
            time_before=self.history.reader.time_before,
            code=self._code,
            folders=self._folders,
            least=self.least,
        )
        try:
            [answer] = self._run_job("streams", [order])
            while answer.large is not None:
                name, rows = answer.large
                order = replace(order, grouped={**order.grouped, **answer.folded})
                folded = self._fold_in_groups(order, name, rows)
                order = replace(order, grouped={**order.grouped, name: folded})
                [answer] = self._run_job("streams", [order])
        except Exception:
            # What the tasks of a failed job have stored is in no answer.
            delete_left_tables(self.store, work.folders, _FOLDS)
            raise
        finally:
            for one in order.grouped.values():
                self._delete_stored(one.tables)
        self._lost.forget("the streams")
        self.history.reader.time_before = answer.time_before
        assert answer.done is not None  # noqa: S101 - it was not large
        note_footers(self.store, answer.done.footers)
        return answer.done

    def _fold_in_groups(self, order: _StreamOrder, name: str, rows: int) -> _FoldedGroups:
        """Have the batch of a reducer, of so many rows, folded by groups of keys."""
        at_a_time = max(2, count_tasks(self.session) or _UNKNOWN_TASKS)
        groups = self.groups or min(at_a_time, rows // MIN_GROUPED_ROWS + 1, _MOST_GROUPS)
        stopped: FoldFailure | None = None
        while True:
            before = None if stopped is None else stopped.position
            orders = [
                replace(order, group=_Group(name, number, groups, before))
                for number in range(groups)
            ]
            answers = self._run_job("fold", orders)
            # Rows that came out differently may have left nothing to fold.
            nothing = _FoldedGroups([{}], None, None)
            parts = [answer.folded.get(name, nothing) for answer in answers]
            failures = [one.failure for one in parts if one.failure is not None]
            tables = [own for one in parts for own in one.tables]
            if not failures:
                digests = {one.digest for one in parts}
                digest = digests.pop() if len(digests) == 1 else None
                return _FoldedGroups(tables, stopped, digest)
            self._delete_stored(tables)
            # Groups do not know of each other's failures, so the rows before the first one are
            # folded again. Fewer rows may fail earlier only if a reducer is not deterministic.
            stopped = min(failures, key=lambda failure: failure.position)

    def _run_job(self, job: str, orders: list[_StreamOrder]) -> list[_StreamAnswer]:
        """Return what a task for each order answers, group by group, and log the tasks."""
        answers = self._run_tasks(move_rows_in_task, orders)
        answers.sort(key=lambda answer: answer.number)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        tasks = list[dict[str, Any]]()
        for answer in answers:
            files = answer.done.files.values() if answer.done else ()
            written = [ref for own in files for ref in own]
            tasks.append(describe_writer(answer.number, written, answer.report))
        log_tasks(job, orders[0].work.folders, tasks)
        return answers

    def _run_tasks(self, body: Callable[..., Any], items: list[Any]) -> list[Any]:
        runner = choose_runner(self.session)
        try:
            return runner.run_small_job(self.session, body, items)
        except SPARK_ERRORS as error:
            raise self._lost.explain("the streams", error, STREAMS_FAILED) from error

    def _require_reducers(self, functions: list[str]) -> None:
        """Have a task import the reducers, so that one that it cannot import ends the start."""
        load = partial(load_in_task, self._code, self._folders)
        for function, cause in self._run_tasks(load, [functions]):
            raise REDUCER_NOT_ON_HOSTS(pipeline=self.spec.name, function=function, cause=cause)

    def _delete_stored(self, tables: list[_Tables]) -> None:
        found = [table for group in tables for table in group.values()]
        delete_tables(self.store, [one for one in found if isinstance(one, StoredTable)])


# The bodies of tasks


class _TaskEnded(Exception):  # noqa: N818 - not an error: the answer has what the task was for
    """The task met the batch of its group, or one that is for groups."""


def load_in_task(
    code: Mapping[str, bytes], folders: tuple[Path, ...], orders: Iterable[list[str]]
) -> Iterator[tuple[str, str]]:
    """The body of a task that imports functions: each that it cannot import, and why not."""
    _allow_code(code, folders)
    for function in [function for order in orders for function in order]:
        try:
            load_fold_function(function)
        # The module is user code, which may raise anything.
        except Exception as error:
            yield function, get_first_line(error)


def move_rows_in_task(orders: Iterable[_StreamOrder]) -> Iterator[_StreamAnswer]:
    """The body of a task that dispatches the rows of an epoch, or folds a group of a batch."""
    for order in orders:
        begun = time.process_time()
        answer = _StreamAnswer()
        if order.group is not None:
            answer.number = order.group.number
        try:
            _allow_code(order.code, order.folders)
            _move_rows(order, answer)
        except _TaskEnded:
            pass
        except TidegateError as error:
            answer.error = error
        answer.report = TaskReport.measure_since(begun)
        yield answer


def _move_rows(order: _StreamOrder, answer: _StreamAnswer) -> None:
    spec = order.work.spec
    store = open_task_store(order.store)
    published = partial(read_positions, spec, store)
    reader = HistoryReader(store, spec.event_time_column, published, order.time_before)
    history = LocatedHistory(reader, order.located, order.last_time)
    states = _open_states(order.store, spec.name)
    folder = _BatchFolder(order, answer, store)
    suffix = f"-{uuid4().hex[:12]}"
    dispatch = RowDispatch(order.work, store, history, states, folder.fold_batch, suffix)
    answer.done = dispatch.dispatch_rows()
    answer.time_before = reader.time_before


@cache
def _open_states(url: str, _pipeline: str) -> ReducerStateStore:
    """The reducer states that this process has read last."""
    return ReducerStateStore(open_task_store(url))


@dataclass(frozen=True)
class _BatchFolder:
    """Folds the batches that a task meets; its answer gets what groups have to know.

    Attributes:
        met: reducer -> its batch, and what came of it.
    """

    order: _StreamOrder
    answer: _StreamAnswer
    store: Store
    met: dict[str, tuple[Any, FoldedBatch]] = field(default_factory=dict)

    def fold_batch(
        self, name: str, reducer: Reducer, rows: Any, states: ReducerStates
    ) -> FoldedBatch:
        """Fold a batch, unless it is for groups or was folded already."""
        group = self.order.group
        if group is not None and name == group.name:
            batch = _fold_group(group, reducer, rows, states)
            self._note_batch(name, rows, batch)
            raise _TaskEnded
        if name in self.order.grouped:
            return self._read_groups(self.order.grouped[name], rows)
        # Without keys it is one sequence, which no second task can help with.
        if group is None and reducer.keys and rows.num_rows >= self.order.least:
            self.answer.large = name, rows.num_rows
            for earlier, found in self.met.items():
                self._note_batch(earlier, *found)
            raise _TaskEnded
        batch = fold_batch(reducer, rows, states)
        self.met[name] = rows, batch
        return batch

    def _read_groups(self, groups: _FoldedGroups, rows: Any) -> FoldedBatch:
        if groups.digest == _compute_digest(rows):
            return groups.read_batch(self.store)
        first = rows.slice(0, 1).to_pylist()[0]
        failure = FoldFailure(first["position"], first["_id"], _OTHER_ROWS)
        return FoldedBatch(failure=failure)

    def _note_batch(self, name: str, rows: Any, batch: FoldedBatch) -> None:
        """Answer with what a batch gave; large tables go by way of the store."""
        tables = {**batch.sent, _STATES: build_states_table(batch.states)}
        folders = self.order.work.folders
        stem = f"{_FOLDS}{name}"
        sent = {
            to: send_table(self.store, folders, stem, self.answer.number, table)
            for to, table in tables.items()
        }
        self.answer.folded[name] = _FoldedGroups(
            tables=[sent],
            failure=batch.failure,
            digest=_compute_digest(rows),
        )


def _fold_group(group: _Group, reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
    """Fold the rows of one group; reducers before it are folded already."""
    if group.before is not None:
        rows = rows.filter(pc.less(rows["position"], group.before))
    if not rows.num_rows:
        return FoldedBatch()
    ready = prepare_arguments(reducer, rows)
    if isinstance(ready, FoldedBatch):
        return ready
    numbers = assign_key_numbers(rows, reducer) % group.groups
    own = ready.filter(pa.array(numbers == group.number))
    return fold_prepared_rows(reducer, own, states)


def _compute_digest(rows: Any) -> _Digest:
    """Return the digest of the rows of a batch."""
    names = ", ".join(map(quote_name, rows.column_names))
    columns = compute_columns(rows, f"hash({names}) AS h")
    hashes = columns["h"].to_numpy()
    return rows.num_rows, int(np.bitwise_xor.reduce(hashes, initial=0))


def assign_key_numbers(rows: Any, reducer: Reducer) -> Any:
    """Return the number of each row's key, an int64 array.

    Values that are one key for the fold are one here: 0.0 and -0.0 are equal, and NaN has one text.
    """
    codes = np.zeros(rows.num_rows, np.int64)
    for name in reducer.keys:
        column = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        # Renumbered after each column, so that the product of many columns stays within int64.
        codes = codes * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        codes = np.unique(codes, return_inverse=True)[1]
    _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
    known: dict[tuple[Any, ...], int] = {}
    distinct = rows.select(list(reducer.keys)).take(pa.array(first)).to_pylist()
    keys = [tuple(None if v != v else (v,) for v in row.values()) for row in distinct]
    number_of = np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
    return number_of[numbers]


def _allow_code(code: Mapping[str, bytes], folders: tuple[Path, ...]) -> None:
    """Let the reducers' modules be imported in this worker, before others of their names."""
    if code and TaskContext.get() is not None:
        place = _write_code(tuple(sorted(code.items())), folders)
        if place not in sys.path:
            sys.path.insert(0, place)


@cache
def _write_code(code: tuple[tuple[str, bytes], ...], folders: tuple[Path, ...]) -> str:
    """Return a folder with these modules, and links to the other files of some folders.

    It lies among the files of the executor's application, and is the same for all its workers.
    Modules that were not sent are not linked, so that they hide none that is installed.
    """
    root = Path(SparkFiles.getRootDirectory())
    digest = hashlib.sha256(repr((code, folders)).encode()).hexdigest()
    place = root / f"tidegate-code-{digest[:16]}"
    if place.is_dir():
        return str(place)
    written = Path(mkdtemp(prefix="tidegate-", dir=root))
    for name, data in code:
        file = written / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    for folder in folders:
        link_other_files(folder, written, with_modules=False)
    try:
        written.rename(place)
    except OSError:  # another worker was first
        shutil.rmtree(written, ignore_errors=True)
    return str(place)
