"""Read jobs in which Spark SQL evaluates what only Spark can; the one module that knows how.

That is an expression of `select`, `where`, a rule or an aggregate, or a cast, that DuckDB is not
proven to compute as Spark SQL does. A Python task reads the rows of its unit, Spark SQL evaluates
them, and a Python task of the same partition folds them.

One plan of Spark SQL takes objects that look alike. Where a cut has others as well, a shuffle
brings the rows of each unit together.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everyone knows

from tidegate.jobs.rows.batch_reading import (
    decode_in_batches,
    divide_unit,
    fold_in_batches,
    is_unit_stopped,
)
from tidegate.jobs.rows.column_casts import cast_to_declared, select_readable_columns
from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.dead_rows import IS_LETTER
from tidegate.jobs.rows.kept_rows import encode_kept_rows
from tidegate.jobs.rows.slice_reading import (
    POSITION_COLUMNS,
    PartsForm,
    PhysicalColumns,
    build_row_schema,
    group_similar_parts,
)
from tidegate.jobs.rows.task_report import TaskReport
from tidegate.jobs.rows.unit_reading import (
    ReadOrder,
    SimilarParts,
    UnitAnswer,
    find_source,
    list_parts,
    select_parts,
)
from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.duck_frame import combine_frames
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.sources.object_decoding import BAD_REASON

from .errors import SPARK_FAILED
from .frame_tasks import (
    ANSWER,
    KEPT,
    collect_answers,
    list_units,
    make_row,
    map_in_workers,
    start_tasks,
)
from .python_tasks import KeptRows, describe_task, keep_read_rows, log_readers, prepare_context

_BATCH_ROWS: Final = 65_536
_NO_PART: Final = -1
"""The place of a row in which a reader speaks; `BAD_REASON` is what it says."""
_pickle: Any = CPickleSerializer()
_Said = tuple[UnitAnswer, TaskReport]


@dataclass(frozen=True)
class _Folded:
    """What a second task says: of the rows, how many came, and what their readers said."""

    answer: UnitAnswer
    rows: int
    readers: list[_Said]


def run_expression_job(
    session: SparkSession,
    order: ReadOrder,
    units: list[ReadUnit],
    variables: Mapping[str, str] | None,
) -> tuple[list[UnitAnswer], KeptRows | None]:
    """Do what `python_tasks.run_read_job` does, with Spark SQL between reading and folding.

    Raises:
        PySparkException: a task failed, or an expression; or a Py4JJavaError.
        PoisonError: an answer did not arrive.
    """
    if not units:
        return [], None
    is_classic = hasattr(session, "sparkContext")
    if is_classic:
        prepare_context(session, variables)
    rows = _plan_pieces(session, order, units)
    with keep_read_rows(order, units, rows) as held:
        kept = held
        if held is not None and is_classic:
            pieces = rows.where(f"kind = '{KEPT}'").select("data").rdd
            kept = replace(held, pieces=pieces)
        return _join_answers(order, units, collect_answers(rows)), kept


def _group_parts(order: ReadOrder, units: list[ReadUnit]) -> dict[PartsForm, list[SimilarParts]]:
    """Return what each plan reads, by unit."""
    groups: dict[PartsForm, list[SimilarParts]] = defaultdict(list)
    for unit in units:
        similar = group_similar_parts(order.spec, unit.cut, [*enumerate(list_parts(unit))])
        for form, parts in similar.items():
            groups[form].append(select_parts(unit, tuple(place for place, _ in parts)))
    return groups


def _plan_pieces(session: SparkSession, order: ReadOrder, units: list[ReadUnit]) -> DataFrame:
    """What tasks keep and say of all units (`ROWS`), each in the partition of its place."""
    frames = [
        _select_evaluated_rows(session, order, columns, chosen)
        for (columns, _), chosen in _group_parts(order, units).items()
    ]
    rows: Any = combine_frames(*frames)
    places = {piece: place for place, unit in enumerate(units) for piece in unit.pieces}
    if len(frames) > 1:
        known = (str(places.get(piece, 0)) for piece in range(max(places) + 1))
        # An array is no part of the code that Spark generates.
        rows = rows.repartitionById(len(units), F.expr(f"array({', '.join(known)})[_m]"))
        if any(len(divide_unit(order.spec, unit)) > 1 for unit in units):
            rows = rows.sortWithinPartitions("_p", "_row")
    # A job that runs again must not find the rows of the first one.
    packed = [_pickle.dumps(unit) for unit in units]
    fold = partial(_fold_units, uuid4().hex, _pickle.dumps(order), packed, places)
    return map_in_workers(rows, fold)


def _select_evaluated_rows(
    session: SparkSession,
    order: ReadOrder,
    columns: PhysicalColumns,
    chosen: list[SimilarParts],
) -> DataFrame:
    """The rows of objects that look alike, cast, selected and judged."""
    source = order.spec.sources[find_source(chosen[0])]
    physical = {**dict(columns), BAD_REASON: "string"}
    schema = format_ddl(columns, POSITION_COLUMNS)
    schema += "" if BAD_REASON in dict(columns) else f", {BAD_REASON} string"
    # Only the driver can read the text of a type of Spark SQL.
    nested = {own: to_nested_type(own) for _, own in select_readable_columns(columns) if "<" in own}
    packed = [_pickle.dumps(one) for one in chosen]
    decode = partial(_decode_parts, _pickle.dumps(order), (columns, nested), packed)
    raw = map_in_workers(start_tasks(session, len(chosen)), decode, schema)
    rows: DataFrame = cast_to_declared(raw, source, physical)
    if arguments := list_spark_arguments(order.spec):
        rows = _add_arguments(rows, chosen, arguments)
    others = [quote_name(name) for name in rows.columns if name != "_json"]
    # The text of a row costs more than all else of it.
    return rows.selectExpr(*others, f"IF({IS_LETTER}, _json, NULL) AS _json")


def format_ddl(columns: PhysicalColumns, places: Iterable[tuple[str, str, Any]]) -> str:
    """The schema of the rows of objects, for Spark."""
    read = [*select_readable_columns(columns), *((name, own) for name, own, _ in places)]
    return ", ".join(f"{quote_name(name)} {own}" for name, own in read)


def to_nested_type(own: str) -> pa.DataType:
    """The Arrow type that Spark takes for a nested type."""
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import DataType

    return to_arrow_type(DataType.fromDDL(own), timestamp_utc=True)


def _add_arguments(
    rows: DataFrame, chosen: list[SimilarParts], arguments: dict[str, str]
) -> DataFrame:
    """Add what Spark SQL has to compute for the aggregates; nothing of rows that are no data."""
    sources = {
        number: piece.member.source
        for one in chosen
        for number, piece in zip(one.unit.pieces, one.unit.cut.slices, strict=True)
    }
    known = ", ".join(quote_text(sources.get(number, "")) for number in range(max(sources) + 1))
    placed = rows.selectExpr("*", f"array({known})[_m] AS _source")
    values = (
        f"IF(_dead IS NULL AND _kind = 'data', {sql}, NULL) AS {name}"
        for name, sql in arguments.items()
    )
    return placed.selectExpr("*", *values).drop("_source")


def _join_answers(
    order: ReadOrder, units: list[ReadUnit], found: list[_Folded]
) -> list[UnitAnswer]:
    """Put together what readers and folders say of each unit, and log the readers.

    Raises:
        PoisonError: an answer did not arrive, or rows were lost between the two.
    """
    folded = {one.answer.number: one for one in found}
    is_complete = folded.keys() == {unit.number for unit in units}
    tasks = list[dict[str, Any]]()
    answers = []
    for one in folded.values():
        answer = one.answer
        readers = one.readers
        is_complete = is_complete and one.rows == sum(read.rows for read, _ in readers)
        is_complete = is_complete and (_is_cut_short(answer) or answer.rows == one.rows)
        for read, report in readers:
            _add_reading(answer, read)
            tasks.append(describe_task(read, report) | {"task": len(tasks)})
        answers.append(answer)
    if not is_complete:
        raise SPARK_FAILED(pipeline=order.spec.name, cause="answers of tasks did not arrive")
    log_readers(order, tasks)
    return sorted(answers, key=lambda answer: answer.number)


def _is_cut_short(answer: UnitAnswer) -> bool:
    """Whether not all rows of a unit were looked at: it is read again, or refused."""
    barriers = (piece.survey.barrier for piece in answer.slices)
    return is_unit_stopped(answer) or any(barrier is not None for barrier in barriers)


def _add_reading(answer: UnitAnswer, read: UnitAnswer) -> None:
    """Add what a reader says of a unit."""
    answer.read_bytes += read.read_bytes
    answer.missing |= read.missing
    answer.corrupt += read.corrupt
    for source, schemas in read.unknown.items():
        answer.unknown[source] = answer.unknown.get(source, {}) | schemas
    answer.error = read.error or answer.error
    answer.left = read.left or answer.left


# The bodies of tasks


def _decode_parts(
    packed: bytes,
    form: tuple[PhysicalColumns, dict[str, pa.DataType]],
    chosen: list[bytes],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    order: ReadOrder = _pickle.loads(packed)
    columns, nested = form
    for number in list_units(batches):
        own: SimilarParts = _pickle.loads(chosen[number])
        schema = build_row_schema(columns, nested.__getitem__)
        if BAD_REASON not in schema.names:
            schema = schema.append(pa.field(BAD_REASON, pa.string()))
        for reading in decode_in_batches(order, own, columns, nested.__getitem__):
            said = _pickle.dumps((reading.answer, reading.report)).hex()
            if reading.kept is not None and reading.kept.num_rows:
                yield from reading.kept.combine_chunks().to_batches(_BATCH_ROWS)
        values = {"_m": own.unit.pieces[0], "_p": _NO_PART, BAD_REASON: said}
        yield pa.RecordBatch.from_pylist([values], schema)


def _fold_units(
    _job: str,
    packed: bytes,
    units: list[bytes],
    places: dict[int, int],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    order: ReadOrder = _pickle.loads(packed)
    rows = _ReadRows(batches)
    number = rows.find_piece()
    if number is None:  # a partition without a unit
        return
    place = places[number]
    unit: ReadUnit = _pickle.loads(units[place])
    for reading in fold_in_batches(order, unit, rows):
        answer = reading.answer
        for piece in () if reading.kept is None else encode_kept_rows(reading.kept):
            yield make_row(place, KEPT, piece.data.to_pybytes())
    for _ in rows:  # what no batch has asked for
        pass
    folded = _Folded(answer, rows.count, rows.readers)
    yield make_row(place, ANSWER, _pickle.dumps(folded))


class _ReadRows:
    """The rows that a second task gets; counts them, and takes out what readers say."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.count = 0
        self.readers = list[_Said]()

    def find_piece(self) -> int | None:
        """The number of one piece of the unit; None without any row."""
        first = next((batch for batch in self._batches if batch.num_rows), None)
        if first is None:
            return None
        self._batches = chain([first], self._batches)
        number: int = first["_m"][0].as_py()
        return number

    def __iter__(self) -> Iterator[pa.Table]:
        for batch in self._batches:
            is_said = pc.equal(batch["_p"], _NO_PART)
            texts = batch.filter(is_said)["_detail"].to_pylist()
            self.readers += [_pickle.loads(bytes.fromhex(text)) for text in texts]
            rows = batch.filter(pc.invert(is_said))
            self.count += rows.num_rows
            if rows.num_rows:
                yield pa.Table.from_batches([rows])
