"""Runs the kernel (`jobs.rows`) in the Python tasks of a Spark Connect session.

Such a session has neither RDDs nor accumulators. A job is `mapInArrow` over a frame with one
partition for each unit of work, and what a task says and what it keeps are rows of one frame. The
orders are part of the plan, so they name no keys: the workers have those of the server's hosts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, cast
from uuid import uuid4

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType

from tidegate.errors import TransientError
from tidegate.jobs.rows.attempt_files import open_task_store
from tidegate.jobs.rows.batch_reading import read_in_batches
from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.event_files import (
    CutSummary,
    EventsOrder,
    FileAnswer,
    FirstPositions,
    RangesOrder,
    Shipped,
    cut_rows,
    write_share,
    write_targets,
    write_unit_events,
)
from tidegate.jobs.rows.kept_rows import KeptPiece, encode_kept_rows
from tidegate.jobs.rows.topic_reading import require_settings
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer
from tidegate.jobs.spec.pipeline import PipelineSpec

from .lost_workers import note_failed_unit
from .python_tasks import (
    KeptRows,
    StoreSample,
    import_libraries,
    keep_read_rows,
    prepare_worker,
    sort_file_answers,
    sort_unit_answers,
)
from .worker_versions import describe_versions

ROWS: Final = (
    StructType()
    .add("unit", IntegerType())  # or the target that a row is for
    .add("kind", StringType())
    .add("data", BinaryType())
)
"""What a task says and keeps."""
ANSWER: Final = "answer"
"""What a task says, pickled."""
KEPT: Final = "kept"
"""Rows that a read job keeps, or that wait in a segment, as an Arrow stream."""
_SUMMARY: Final = "summary"
"""What a task that cuts rows tells a target, pickled."""
_MANY: Final = 1024
"""Not less than the tasks that a server runs at a time."""
_pickle: Any = CPickleSerializer()
_Batches = Iterator[pa.RecordBatch]


def run_read_job(
    session: SparkSession,
    order: ReadOrder,
    units: list[ReadUnit],
    variables: Mapping[str, str] | None,
) -> tuple[list[UnitAnswer], KeptRows | None]:
    """Do what `python_tasks.run_read_job` does.

    Raises:
        PySparkException: a task failed, or the server is gone.
        PoisonError: an answer did not arrive.
    """
    assert not variables  # noqa: S101 - see `build_settings_variables`
    if not units:
        return [], None
    # A job that runs again must not find the rows of the first one.
    body = partial(_read_units, uuid4().hex, _pickle.dumps(order), _encode_units(units))
    rows = map_in_workers(start_tasks(session, len(units)), body)
    with keep_read_rows(order, units, rows) as kept, note_failed_unit(units):
        return sort_unit_answers(order, units, collect_answers(rows)), kept


def run_events_job(kept: KeptRows, order: EventsOrder, firsts: FirstPositions) -> list[FileAnswer]:
    """Write the kept rows of each unit, which begin at these positions."""
    body = partial(_write_unit_rows, _pickle.dumps((order, firsts)))
    files = map_in_workers(_select_pieces(kept), body)
    return sort_file_answers(order, collect_answers(files), kept.units)


def run_release_job(
    session: SparkSession, kept: KeptRows | None, order: RangesOrder
) -> list[FileAnswer]:
    """Write rows in order: by one task, or each target by one of its own."""
    rows = start_tasks(session, order.maps) if kept is None else _select_pieces(kept)
    packed = _pickle.dumps(order)
    if order.shares:
        files = map_in_workers(rows.coalesce(1), partial(_write_all, packed))
        return sort_file_answers(order, collect_answers(files), 1)
    shipped = map_in_workers(rows, partial(_cut_rows, packed))
    ranges = shipped.repartitionById(order.moved_to, "unit")
    files = map_in_workers(ranges, partial(_write_ranges, packed))
    return sort_file_answers(order, collect_answers(files), order.moved_to)


def run_small_job(
    session: SparkSession, body: Callable[[Iterable[Any]], Iterator[Any]], items: Sequence[Any]
) -> list[Any]:
    """Let a task for each item run this body, a function of a module, and return all answers.

    Raises:
        PySparkException: a task failed, or the server is gone.
    """
    run = partial(_run_body, body, _encode_units(items))
    return collect_answers(map_in_workers(start_tasks(session, len(items)), run))


def start_workers(
    session: SparkSession,
    variables: Mapping[str, str] | None = None,
    libraries: Sequence[str] = (),
    sample: StoreSample | None = None,
    spec: PipelineSpec | None = None,
) -> None:
    """Start as many workers as run at a time, and let them import the kernel and libraries.

    Raises:
        PySparkException: they have not tidegate or not the driver's packages, do not see the object
            of `sample`, or lack a variable of the topics of `spec`.
    """
    assert not variables  # noqa: S101 - as in `run_read_job`
    body = partial(_import_kernel, tuple(libraries), sample, spec)
    # Without a number of partitions there are as many as the server runs tasks at a time.
    map_in_workers(session.range(_MANY), body).collect()


def map_in_workers(
    rows: DataFrame, body: Callable[[_Batches], _Batches], schema: StructType | str = ROWS
) -> DataFrame:
    """Return what tasks make of rows; each worker has to have the driver's packages."""
    checked = partial(_run_with_driver_packages, describe_versions(), body)
    return rows.mapInArrow(checked, schema)


def start_tasks(session: SparkSession, tasks: int) -> DataFrame:
    """A frame with one row, and no data, for each of so many tasks."""
    rows = session.range(0, tasks, 1, tasks)
    return rows.selectExpr("CAST(id AS int) AS unit", f"'{ANSWER}' AS kind", "X'' AS data")


def _select_pieces(kept: KeptRows) -> DataFrame:
    """The rows that tasks keep; answers without their data say which unit has none."""
    data = f"IF(kind = '{KEPT}', data, X'') AS data"
    rows: DataFrame = kept.pieces.selectExpr("unit", "kind", data)
    return rows


def collect_answers(rows: DataFrame) -> list[Any]:
    """What tasks say; nothing else of the frame leaves Spark."""
    answers = rows.where(f"kind = '{ANSWER}'").select("data")
    return [_pickle.loads(row.data) for row in answers.collect()]


def _encode_units(units: Sequence[Any]) -> list[bytes]:
    """Units as a plan carries them: a task unpacks only its own."""
    return [_pickle.dumps(unit) for unit in units]


# The bodies of tasks


def _run_with_driver_packages(
    versions: str, body: Callable[[_Batches], _Batches], batches: _Batches
) -> _Batches:
    prepare_worker(versions)
    yield from body(batches)


def _read_units(_job: str, packed: bytes, units: list[bytes], batches: _Batches) -> _Batches:
    order: ReadOrder = _pickle.loads(packed)
    for place in list_units(batches):
        unit: ReadUnit = _pickle.loads(units[place])
        for reading in read_in_batches(order, unit):
            last = reading.answer, reading.report
            if reading.kept is not None:
                for piece in encode_kept_rows(reading.kept):
                    yield make_row(place, KEPT, piece.data.to_pybytes())
        yield make_row(place, ANSWER, _pickle.dumps(last))


def _write_unit_rows(packed: bytes, batches: _Batches) -> _Batches:
    order, firsts = _pickle.loads(packed)
    for unit, pieces in _group_pieces(batches):
        yield from make_answers([write_unit_events(order, firsts, unit, pieces)])


def _cut_rows(packed: bytes, batches: _Batches) -> _Batches:
    order: RangesOrder = _pickle.loads(packed)
    for unit, pieces in _group_pieces(batches):
        for target, item in cut_rows(order, unit, pieces):
            if isinstance(item, CutSummary):
                yield make_row(target, _SUMMARY, _pickle.dumps(item))
            else:
                yield make_row(target, KEPT, item.to_pybytes())


def _write_ranges(packed: bytes, batches: _Batches) -> _Batches:
    yield from make_answers(write_targets(_pickle.loads(packed), _read_shipped(batches)))


def _write_all(packed: bytes, batches: _Batches) -> _Batches:
    order: RangesOrder = _pickle.loads(packed)
    pieces = chain.from_iterable(own for _, own in _group_pieces(batches))
    yield from make_answers(write_share(order, 0, pieces))


def _run_body(
    body: Callable[[Iterable[Any]], Iterator[Any]], items: list[bytes], batches: _Batches
) -> _Batches:
    own = [_pickle.loads(items[place]) for place in list_units(batches)]
    yield from make_answers(body(own))


def _import_kernel(
    libraries: Sequence[str],
    sample: StoreSample | None,
    spec: PipelineSpec | None,
    batches: _Batches,
) -> _Batches:
    for _ in batches:  # a worker whose input is not read is lost
        pass
    import_libraries(libraries)
    if sample is not None:
        _require_sample(sample)
    if spec is not None:
        require_settings(spec)
    yield from ()


def _require_sample(sample: StoreSample) -> None:
    """Refuse a host that does not see what the driver sees.

    Raises:
        TidegateError: the store refuses the host's keys, or it has none.
        FileNotFoundError: the object is not there: it is another store.
    """
    store = open_task_store(sample.store)
    try:
        found = store.stat(sample.key)
    except TransientError:
        return  # says nothing about keys
    if sample.is_there and found is None:
        raise FileNotFoundError(f"{sample.key} is not in {sample.store} as this host sees it")


def list_units(batches: _Batches) -> list[int]:
    """The units of a task, whose whole input is read."""
    return [unit for batch in batches for unit in batch["unit"].to_pylist()]


def _group_pieces(batches: _Batches) -> Iterator[tuple[int, Iterator[KeptPiece]]]:
    """Yield the units of a task, each with what was kept of it; the whole input is read."""
    for unit, rows in groupby(_read_rows(batches), itemgetter(0)):
        yield unit, (KeptPiece(data) for _, kind, data in rows if kind == KEPT)


def _read_shipped(batches: _Batches) -> Iterator[Shipped]:
    for target, kind, data in _read_rows(batches):
        if kind == _SUMMARY:
            yield target, cast(CutSummary, _pickle.loads(data))
        else:
            yield target, data


def _read_rows(batches: _Batches) -> Iterator[tuple[int, str, pa.Buffer]]:
    for batch in batches:
        for row in range(batch.num_rows):
            unit = batch["unit"][row].as_py()
            kind = batch["kind"][row].as_py()
            yield unit, kind, batch["data"][row].as_buffer()


def make_answers(answers: Iterable[Any]) -> _Batches:
    """Rows with what a task says."""
    return (make_row(0, ANSWER, _pickle.dumps(answer)) for answer in answers)


def make_row(unit: int, kind: str, data: bytes) -> pa.RecordBatch:
    """A row of `ROWS`."""
    columns = pa.array([unit], pa.int32()), pa.array([kind]), pa.array([data], pa.binary())
    return pa.record_batch(dict(zip(ROWS.names, columns, strict=True)))
