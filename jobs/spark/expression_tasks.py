"""Read jobs in which Spark SQL evaluates what only Spark can; the one module that knows how.

That is an expression of `select`, `where`, a rule or an aggregate, or a cast, that DuckDB is not
proven to compute as Spark SQL does, or messages of a topic that only Spark SQL decodes. A Python
task reads the rows or fetches the messages of its unit, Spark SQL evaluates them, and a Python task
of the same partition folds them.

One plan of Spark SQL takes objects that look alike. Where a cut has others as well, a shuffle
brings the rows of each unit together.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import structlog
from pyspark import Accumulator, StorageLevel, TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everyone knows

from tidegate.jobs.rows.column_casts import cast_to_declared, select_readable_columns
from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.dead_rows import IS_LETTER
from tidegate.jobs.rows.json_messages import get_kafka_options
from tidegate.jobs.rows.kept_rows import encode_kept_rows
from tidegate.jobs.rows.slice_reading import (
    POSITION_COLUMNS,
    PartsForm,
    PhysicalColumns,
    group_similar_parts,
)
from tidegate.jobs.rows.unit_reading import (
    ReadOrder,
    SimilarParts,
    TaskReport,
    UnitAnswer,
    UnitReading,
    decode_parts,
    find_source,
    fold_unit,
    list_parts,
    select_parts,
)
from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.duck_frame import combine_frames
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN, open_schema_registry
from tidegate.jobs.sources.object_decoding import BAD_REASON
from tidegate.jobs.spec.source_spec import SourceSpec

from .cut_reader import format_ddl, to_nested_type
from .errors import SPARK_FAILED
from .json_decoding import MESSAGE_DDL
from .kafka_payloads import decode_messages
from .python_tasks import KeptRows, describe_task, open_inbox, prepare_context, prepare_worker
from .spark_session import SparkSessions

_log = structlog.get_logger("tidegate.driver")
_BATCH_ROWS: Final = 65_536
_PLACES: Final = "_m int, _p int, _o bigint"
_PIECES: Final = "unit int, data binary"
"""The columns of `kept_rows.KeptPiece`."""


@dataclass(frozen=True)
class _Outlet:
    """Where the tasks of a job put their answers: under (step, number)."""

    job: str
    inbox: Accumulator[Any]

    def send(self, step: str, number: int, reading: UnitReading) -> None:
        """Send what a task found."""
        self.inbox.add([(self.job, ((step, number), (reading.answer, reading.report)))])


def run_expression_job(
    sessions: SparkSessions,
    order: ReadOrder,
    units: list[ReadUnit],
    variables: Mapping[str, str] | None = None,
) -> tuple[list[UnitAnswer], KeptRows | None]:
    """Do what `python_tasks.run_read_job` does, with Spark SQL between reading and folding.

    Raises:
        Py4JJavaError: a task failed, or an expression; or a PySparkException.
        PoisonError: an answer did not arrive.
    """
    if not units:
        return [], None
    context = prepare_context(sessions.full, variables)
    outlet = _Outlet(uuid4().hex, open_inbox(context))
    inbox: Any = outlet.inbox.value
    groups = _group_parts(order, units)
    keeps = order.spec.outputs.events and not order.gone
    inbox.expect(outlet.job)
    try:
        pieces = _plan_pieces(sessions.full, order, units, groups, outlet).rdd
        if keeps:
            pieces.persist(StorageLevel.MEMORY_AND_DISK)
        pieces._jrdd.count()
    finally:
        # A task that ran twice has answered twice.
        found = dict(inbox.take(outlet.job))
    kept = KeptRows(pieces, len(units)) if keeps else None
    answers = _join_answers(order, units, [one for own in groups.values() for one in own], found)
    return answers, kept


def _group_parts(order: ReadOrder, units: list[ReadUnit]) -> dict[PartsForm, list[SimilarParts]]:
    """Return what each plan reads, by unit."""
    groups: dict[PartsForm, list[SimilarParts]] = defaultdict(list)
    for unit in units:
        plain, undecoded = [], defaultdict(list)
        for place, part in enumerate(list_parts(unit)):
            source = unit.cut.slices[part.member].member.source
            if source in order.undecoded:
                undecoded[part.columns, source].append((place, part))
            else:
                plain.append((place, part))
        similar = group_similar_parts(order.spec, unit.cut, plain)
        for form, parts in [*similar.items(), *undecoded.items()]:
            groups[form].append(select_parts(unit, tuple(place for place, _ in parts)))
    return groups


def _plan_pieces(
    session: SparkSession,
    order: ReadOrder,
    units: list[ReadUnit],
    groups: dict[PartsForm, list[SimilarParts]],
    outlet: _Outlet,
) -> DataFrame:
    """The kept rows of all units, each in the partition of its place."""
    frames, first = [], 0
    for (columns, _), chosen in groups.items():
        frames.append(_select_evaluated_rows(session, order, columns, chosen, first, outlet))
        first += len(chosen)
    rows: Any = combine_frames(*frames)
    if len(frames) > 1:
        places = {index: place for place, unit in enumerate(units) for index in unit.indexes}
        known = (str(places.get(index, 0)) for index in range(max(places) + 1))
        # An array is no part of the code that Spark generates.
        rows = rows.repartitionById(len(units), F.expr(f"array({', '.join(known)})[_m]"))
    fold = partial(_fold_units, order, units, outlet)
    folded: DataFrame = rows.mapInArrow(fold, _PIECES)
    return folded


def _select_evaluated_rows(
    session: SparkSession,
    order: ReadOrder,
    columns: PhysicalColumns,
    chosen: list[SimilarParts],
    first: int,
    outlet: _Outlet,
) -> DataFrame:
    """The rows of objects that look alike, cast, selected and judged."""
    name = find_source(chosen[0])
    source = order.spec.sources[name]
    physical = {**dict(columns), BAD_REASON: "string"}
    schema = format_ddl(columns, POSITION_COLUMNS)
    schema += "" if BAD_REASON in dict(columns) else f", {BAD_REASON} string"
    if name in order.undecoded:
        schema = f"{MESSAGE_DDL}, {_PLACES}"
    # Only the driver can read the text of a type of Spark SQL.
    nested = {own: to_nested_type(own) for _, own in select_readable_columns(columns) if "<" in own}
    decode = partial(_decode_parts, order, (columns, nested), chosen, first, outlet)
    raw = session.range(0, len(chosen), 1, len(chosen)).mapInArrow(decode, schema)
    if name in order.undecoded:
        raw = _decode_messages(raw, source)
    rows: DataFrame = cast_to_declared(raw, source, physical)
    if arguments := list_spark_arguments(order.spec):
        rows = _add_arguments(rows, chosen, arguments)
    others = [quote_name(name) for name in rows.columns if name != "_json"]
    # The text of a row costs more than all else of it.
    return rows.selectExpr(*others, f"IF({IS_LETTER}, _json, NULL) AS _json")


def _decode_messages(messages: DataFrame, source: SourceSpec) -> DataFrame:
    """The rows of messages that tasks have fetched, with the columns of `POSITION_COLUMNS`."""
    registry = open_schema_registry(get_kafka_options(source))
    known = None if registry is None else registry.known
    rows = decode_messages(messages, source, known, ("_m", "_p", "_o"))
    return rows.withColumn("_row", F.col(OFFSET_COLUMN))


def _add_arguments(
    rows: DataFrame, chosen: list[SimilarParts], arguments: dict[str, str]
) -> DataFrame:
    """Add what Spark SQL has to compute for the aggregates; nothing of rows that are no data."""
    sources = {
        index: piece.member.source
        for one in chosen
        for index, piece in zip(one.unit.indexes, one.unit.cut.slices, strict=True)
    }
    known = ", ".join(quote_text(sources.get(index, "")) for index in range(max(sources) + 1))
    placed = rows.selectExpr("*", f"array({known})[_m] AS _source")
    values = (
        f"IF(_dead IS NULL AND _kind = 'data', {sql}, NULL) AS {name}"
        for name, sql in arguments.items()
    )
    return placed.selectExpr("*", *values).drop("_source")


def _join_answers(
    order: ReadOrder,
    units: list[ReadUnit],
    parts: list[SimilarParts],
    found: dict[tuple[str, int], tuple[UnitAnswer, TaskReport]],
) -> list[UnitAnswer]:
    """Put together what readers and folders say of each unit, and log the readers.

    Raises:
        PoisonError: an answer did not arrive, or rows were lost between the two.
    """
    tasks, read = [], defaultdict(list)
    is_complete = True
    for number, chosen in enumerate(parts):
        if ("read", number) in found:
            answer, report = found["read", number]
            read[chosen.unit.number].append(answer)
            tasks.append(describe_task(answer, report) | {"task": number})
        else:
            is_complete = False
    answers = []
    for unit in units:
        # Where no row was read there may be no task behind a shuffle.
        folded = found.get(("fold", unit.number))
        answer = fold_unit(order, unit, None).answer if folded is None else folded[0]
        is_complete = is_complete and _add_readings(answer, read[unit.number])
        answers.append(answer)
    if not is_complete:
        raise SPARK_FAILED(pipeline=order.spec.name, cause="answers of tasks did not arrive")
    job_name = "late" if order.gone else "read"
    _log.info("tasks_finished", job=job_name, slot=order.folders.attempt.slot, tasks=tasks)
    return answers


def _add_readings(answer: UnitAnswer, read: list[UnitAnswer]) -> bool:
    """Add what readers say of a unit; return whether all of their rows were folded."""
    is_stopped = bool(answer.error or answer.left)
    for one in read:
        answer.read_bytes += one.read_bytes
        answer.missing |= one.missing
        answer.corrupt += one.corrupt
        for source, schemas in one.unknown.items():
            answer.unknown[source] = answer.unknown.get(source, {}) | schemas
        answer.odd |= one.odd
        answer.error = one.error or answer.error
        answer.left = one.left or answer.left
    return is_stopped or answer.rows == sum(one.rows for one in read)


# The bodies of tasks


def _decode_parts(
    order: ReadOrder,
    form: tuple[PhysicalColumns, dict[str, pa.DataType]],
    chosen: list[SimilarParts],
    first: int,
    outlet: _Outlet,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    prepare_worker()
    for number in [one for batch in batches for one in batch["id"].to_pylist()]:
        columns, nested = form
        reading = decode_parts(order, chosen[number], columns, nested.__getitem__)
        outlet.send("read", first + number, reading)
        rows = reading.kept
        if rows is not None and rows.num_rows:
            yield from rows.combine_chunks().to_batches(_BATCH_ROWS)


def _fold_units(
    order: ReadOrder,
    units: list[ReadUnit],
    outlet: _Outlet,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    prepare_worker()
    task = TaskContext.get()
    assert task is not None  # noqa: S101 - the body of a task
    unit = units[task.partitionId()]
    found = list(batches)
    rows = pa.Table.from_batches(found) if found else None
    reading = fold_unit(order, unit, rows)
    outlet.send("fold", unit.number, reading)
    for piece in () if reading.kept is None else encode_kept_rows(unit.number, reading.kept):
        data = pa.array([piece.data.to_pybytes()], pa.binary())
        yield pa.record_batch({"unit": pa.array([piece.unit], pa.int32()), "data": data})
