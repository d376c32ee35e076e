"""Reducers in Spark tasks.

The rows of a batch by groups of keys, each group folded by a task with the states of its keys.

1. The driver gives every key a group, and puts rows and states of each group into a file on the
  disk that driver and executors share.
2. One Spark job, a task per group: the task runs the same fold as the driver would, and writes its
    result into another file.
3. The least row at which any group stopped is where the whole batch stops. If there is one, the
  rows before it are folded again: nothing of that row or behind it may be in the result, whatever
  its key.

Keys are folded independently of each other, and each in order of positions; so the result is that
of the driver's fold.
"""

import pickle
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.reducers import (
    FoldedBatch,
    Reducer,
    ReducerStates,
    encode_row_key,
    fold_batch,
    fold_prepared_rows,
    prepare_arguments,
)

from .errors import NO_SHARED_DISK, REDUCER_FAILED
from .spark_session import (
    SPARK_ERRORS,
    SparkSessions,
    detect_lost_executors,
    runs_on_one_host,
)

_PROBE_FILE = "probe.txt"
MIN_JOB_ROWS = 50_000
"""Rows from which a job pays.

Starting tasks with Python in them costs about what one core folds in half a second.
"""


@dataclass
class SparkReducerRunner:
    """The runner of reducers on Spark.

    A reducer without keys is one sequence, which no second core can help with: it is folded in the
    driver, and so is a batch that is too small for a job.

    Args:
        sessions: where the tasks run.
        workdir: a folder on a disk that driver and executors share.
        least: rows of a batch from which it is given to tasks.
        groups: tasks of a job; 0: as many as the session runs at a time, at least 2 (4 with Spark
            Connect).
    """

    sessions: SparkSessions
    workdir: Path
    least: int = MIN_JOB_ROWS
    groups: int = 0

    def __call__(self, reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
        """Fold a batch, with the result of `fold_batch`.

        Raises:
            PoisonError: Spark could not run the job.
            TransientError: the job lost its executors or their Python.
        """
        if not reducer.keys or rows.num_rows < self.least:
            return fold_batch(reducer, rows, states)
        self.groups = self.groups or _count_parallel_tasks(self.sessions.full)
        ready = prepare_arguments(reducer, rows)
        if isinstance(ready, FoldedBatch):
            return ready
        stopped = None
        while True:
            fold = self._run_fold_job if ready.num_rows else fold_prepared_rows
            folded = fold(reducer, ready, states)
            if folded.failure is None:
                return FoldedBatch(folded.sent, folded.states, stopped)
            # Groups do not know of each other's failures, so the rows before the first one are
            # folded again. Fewer rows may fail earlier only if a reducer is not deterministic.
            stopped = folded.failure
            ready = ready.filter(pc.less(ready["position"], stopped.position))

    def _run_fold_job(self, reducer: Reducer, rows: Any, states: ReducerStates) -> FoldedBatch:
        folder = Path(mkdtemp(prefix="fold-", dir=self.workdir))
        try:
            _write_group_files(folder, reducer, rows, states, self.groups)
            work = _make_fold_task(str(folder), reducer)
            tasks = self.sessions.full.range(0, self.groups, 1, self.groups)
            tasks.mapInArrow(work, "id long").collect()
            return _merge_group_results(reducer, folder)
        except SPARK_ERRORS as error:
            cause = str(error).strip().splitlines()[-1][:500]
            lost = detect_lost_executors("a reducer", error)
            raise lost or REDUCER_FAILED(cause=cause) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_shared_disk(sessions: SparkSessions, spec: PipelineSpec, folder: Path) -> bool:
    """Whether tasks see a folder of the driver.

    On a cluster that is so with ``staging: disk``, which is proven by a task.

    Raises:
        ConfigurationError: it is not so.
    """
    if runs_on_one_host(spec.spark):
        return True
    if spec.spark.staging != "disk":
        return False
    probe = folder / _PROBE_FILE
    probe.write_text("seen\n", encoding="ascii")
    try:
        seen = sessions.full.read.text(str(probe)).count() == 1
    except SPARK_ERRORS:
        seen = False
    if not seen:
        raise NO_SHARED_DISK(pipeline=spec.name, folder=folder)
    return True


def _count_parallel_tasks(session: SparkSession) -> int:
    """How many tasks run at a time; Spark Connect does not say."""
    return (
        4
        if not hasattr(session, "_jsparkSession")
        else max(2, session.sparkContext.defaultParallelism)
    )


def _write_group_files(
    folder: Path, reducer: Reducer, rows: Any, states: ReducerStates, groups: int
) -> None:
    """Write rows and states of every group; a group without rows has no files."""
    texts, numbers = _encode_keys(rows, reducer.keys)
    # Python's own hash differs between processes.
    group_of = np.array([zlib.crc32(text.encode()) % groups for text in texts])
    of_row = group_of[numbers]
    for group in range(groups):
        mine = rows.filter(pa.array(of_row == group))
        if mine.num_rows:
            known = {
                text: states[text]
                for text, g in zip(texts, group_of, strict=True)
                if g == group and text in states
            }
            (folder / f"rows-{group}").write_bytes(pickle.dumps((mine, known)))


def _encode_keys(rows: Any, keys: tuple[str, ...]) -> tuple[list[str], Any]:
    """The distinct keys as texts, and for each row the number of its key.

    Equal values are one key, as they are in the fold.
    """
    codes = np.zeros(rows.num_rows, np.int64)
    for name in keys:
        column = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        # Renumbered after each column, so that the product of many columns stays within int64.
        codes = codes * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        codes = np.unique(codes, return_inverse=True)[1]
    _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
    named: dict[tuple[Any, ...], str] = {}
    # Equal values may have different texts (0.0 and -0.0): the first one names the key.
    order = np.argsort(first)
    texts = [""] * len(first)
    for number, row in zip(
        order, rows.select(list(keys)).take(pa.array(first[order])).to_pylist(), strict=True
    ):
        texts[number] = named.setdefault(tuple(row.values()), encode_row_key(row, keys))
    return texts, numbers


def _make_fold_task(folder: str, reducer: Reducer) -> Any:
    """What a task does with the numbers of its groups.

    It finds the modules that the driver finds.
    """
    places = list(sys.path)

    def fold_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Fold the groups whose numbers arrive."""
        # A worker does not inherit the driver's path, on which the reducer's module is.
        sys.path.extend(place for place in places if place not in sys.path)
        for batch in batches:
            for group in batch["id"].to_pylist():
                _fold_group(Path(folder), group, reducer)
            yield batch

    return fold_groups


def _fold_group(folder: Path, group: int, reducer: Reducer) -> None:
    source = folder / f"rows-{group}"
    if source.exists():
        rows, states = pickle.loads(source.read_bytes())  # noqa: S301 - of this driver
        # Spark may run a task twice at the same time; neither may write into the other's file.
        written = folder / uuid4().hex
        written.write_bytes(pickle.dumps(fold_prepared_rows(reducer, rows, states)))
        written.replace(folder / f"folded-{group}")


def _merge_group_results(reducer: Reducer, folder: Path) -> FoldedBatch:
    """What the groups gave, as one batch.

    With a failure it is not of use, because others went on behind it.
    """
    done: list[FoldedBatch] = [
        # Not those that the disk lists, which may lag: no group must be left out.
        pickle.loads((folder / f"folded-{group}").read_bytes())  # noqa: S301 - of our tasks
        for group in sorted(file.name.removeprefix("rows-") for file in folder.glob("rows-*"))
    ]
    stopped = [batch.failure for batch in done if batch.failure is not None]
    if stopped:
        return FoldedBatch(failure=min(stopped, key=lambda failure: failure.position))
    order = [("_position", "ascending"), ("_nth", "ascending")]
    sent = {
        to: pa.concat_tables([batch.sent[to] for batch in done]).sort_by(order)
        for to in reducer.columns
    }
    states: ReducerStates = {}
    for batch in done:
        states |= batch.states
    return FoldedBatch(sent, states)
