"""Read jobs of Spark Connect in which Spark SQL evaluates what only Spark can.

They do what those of `expression_tasks` do in a classic session. A server has no accumulator, so a
task that decodes puts its answer into the store. The task that folds the rows fetches it there and
adds it to its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.serializers import CPickleSerializer

from tidegate.checkpoints.store import NotFoundError, map_in_threads
from tidegate.errors import TransientError
from tidegate.jobs.rows.attempt_files import open_task_store
from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer, UnitReading, fold_unit

from .errors import EXECUTORS_LOST
from .expression_tasks import group_parts, join_answers, plan_rows
from .frame_tasks import make_unit_rows, run_keeping_job
from .python_tasks import KeptRows, prepare_worker
from .spark_session import SparkSessions

_pickle: Any = CPickleSerializer()
_DECODED: Final = "read"
"""The step of a task that decodes, as `join_answers` has it."""


@dataclass(frozen=True)
class _StoreOutlet:
    """Where the tasks of a job put what they say of decoding."""

    url: str
    stem: str

    def locate(self, number: int) -> str:
        """Key of an answer."""
        return f"{self.stem}-{number:05d}"

    def send(self, _step: str, number: int, reading: UnitReading) -> None:
        """Put what a task found; one that runs twice finds the same."""
        packed = _pickle.dumps((reading.answer, reading.report))
        with suppress(TransientError):  # the driver misses it
            open_task_store(self.url).put(self.locate(number), packed)

    def fetch(self, number: int) -> Any:
        """Return an answer; None if it is not there."""
        try:
            return _pickle.loads(open_task_store(self.url).get(self.locate(number)).data)
        except (NotFoundError, TransientError):
            return None


def run_expression_job(
    sessions: SparkSessions,
    order: ReadOrder,
    units: list[ReadUnit],
    variables: Mapping[str, str] | None = None,
) -> tuple[list[UnitAnswer], KeptRows | None]:
    """Do what `expression_tasks.run_expression_job` does.

    Raises:
        PySparkException: a task failed, or an expression; or the server is gone.
        TransientError: answers did not arrive.
    """
    assert not variables  # noqa: S101 - see `build_settings_variable`
    if not units:
        return [], None
    outlet = _StoreOutlet(order.store, order.folders.segment_stem(f"answers-{uuid4().hex[:12]}"))
    groups = group_parts(order, units)
    parts = [one for own in groups.values() for one in own]
    owners = [(chosen.unit.number, number) for number, chosen in enumerate(parts)]
    body = partial(_fold_units, order, units, outlet, owners)
    frame = plan_rows(sessions.full, order, units, groups, outlet)

    def sort_answers(answers: list[dict[tuple[str, int], Any]]) -> list[UnitAnswer]:
        """Put together what all tasks say."""
        found = {step: answer for own in answers for step, answer in own.items()}
        if any((_DECODED, number) not in found for number in range(len(parts))):
            sign = "answers of tasks did not arrive"
            raise EXECUTORS_LOST(pipeline=order.spec.name, what=order.spec.name, sign=sign)
        return join_answers(order, units, parts, found)

    try:
        return run_keeping_job(frame, body, order, units, sort_answers)
    finally:
        with suppress(TransientError):  # what no manifest names is swept
            keys = [outlet.locate(number) for number in range(len(parts))]
            map_in_threads(open_task_store(order.store).delete, keys, 4)


def _fold_units(
    order: ReadOrder,
    units: list[ReadUnit],
    outlet: _StoreOutlet,
    owners: list[tuple[int, int]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The body of a task that folds the rows of its unit."""
    prepare_worker()
    task = TaskContext.get()
    assert task is not None  # noqa: S101 - the body of a task
    place = task.partitionId()
    unit, read = units[place], list(batches)
    reading = fold_unit(order, unit, pa.Table.from_batches(read) if read else None)
    found: dict[tuple[str, int], Any] = {("fold", unit.number): (reading.answer, reading.report)}
    for owner, number in owners:
        answer = outlet.fetch(number) if owner == unit.number else None
        if answer is not None:
            found[_DECODED, number] = answer
    yield from make_unit_rows(place, unit, found, reading.kept)
