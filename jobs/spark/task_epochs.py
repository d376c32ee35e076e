"""Epochs whose rows are read by Spark's Python tasks only.

Job 1 reads each row once. The driver merges partial aggregates, and writes merged results.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from pyspark.sql import SparkSession

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.store import ObjectInfo, Store
from tidegate.errors import TidegateError
from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut, MoveOrder
from tidegate.jobs.eventtime.decision_types import (
    LateMark,
    MemberSurvey,
    Survey,
)
from tidegate.jobs.rows.batch_reading import merge_shares
from tidegate.jobs.rows.cut_division import ReadUnit, divide_cut
from tidegate.jobs.rows.late_rows import CountedRows
from tidegate.jobs.rows.message_schemas import fetch_schemas, read_schemas
from tidegate.jobs.rows.object_reading import FoundObject, divide_objects
from tidegate.jobs.rows.slice_scan import make_no_rows, scan_rows
from tidegate.jobs.rows.stored_partials import SENT_BYTES, StoredTable, delete_objects
from tidegate.jobs.rows.task_support import explain_spark_expressions
from tidegate.jobs.rows.topic_reading import remove_settings
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer
from tidegate.jobs.sources.object_inspection import InspectedObject
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec, SourceSpec
from tidegate.json_types import JsonObject

from .early_events import EarlyEvents, have_left, have_positions, keep_rows
from .errors import SPARK_FAILED
from .expression_tasks import run_expression_job
from .python_tasks import (
    KeptRows,
    build_topic_variables,
    describe_units,
    sort_inspections,
)
from .task_runner import choose_runner

_log = structlog.get_logger("tidegate.driver")


@dataclass(frozen=True)
class TaskScans:
    """What tasks found in a cut, and did with its rows.

    Attributes:
        order: of the tasks.
        units: what each task has read, in the order of the cut.
        answers: of the units.
        sketches: source -> lateness sketch.
        kept: the rows for the events; None without an events table or rows, or if the tasks have
            written them.
        early_from: position of the first event, if the tasks have written the events.
    """

    cut: Cut
    survey: Survey
    order: ReadOrder
    units: list[ReadUnit]
    answers: list[UnitAnswer]
    sketches: JsonObject
    kept: KeptRows | None
    early_from: int | None = None

    def count_verdicts(self) -> Counter[tuple[int, str]]:
        """Return (index of a slice, verdict) -> rows."""
        found = Counter[tuple[int, str]]()
        for answer in self.answers:
            for piece in answer.slices:
                for verdict, rows in piece.verdicts.items():
                    found[piece.index, verdict] += rows
        return found

    def sum_late_rows(self, spec: PipelineSpec) -> CountedRows:
        """The late rows of all units.

        Raises:
            PoisonError: a row is late under ``on_late: error``: the first one.
        """
        for output in (EVENTS, *spec.windows):
            for answer in self.answers:
                if output in answer.late_refused:
                    raise answer.late_refused[output]
        return sum((answer.late for answer in self.answers), CountedRows())

    def sum_dead_rows(self) -> CountedRows:
        """The dead rows of all units, and what conditions say of rows."""
        return sum((answer.dead for answer in self.answers), CountedRows())

    def list_partials(self) -> dict[str, tuple[bytes | StoredTable, ...]]:
        """Window -> what `UnitAnswer.partials` have for it, in the order of the cut."""
        found: dict[str, tuple[bytes | StoredTable, ...]] = {}
        for answer in self.answers:
            for name, part in answer.partials.items():
                found[name] = (*found.get(name, ()), part)
        return found


def survey_in_tasks(
    session: SparkSession,
    spec: PipelineSpec,
    store: Store,
    cut: Cut,
    state: Mapping[str, Any],
    folders: AttemptFolders,
    mark: LateMark,
    early: EarlyEvents,
    next_position: int | None,
) -> TaskScans:
    """Read a cut by tasks, whose rows are judged against `mark`.

    `next_position` is as in `Mover.survey`.

    Raises:
        CorruptObjectsError: objects cannot be read.
        PoisonError: punctuation that goes back under ``regress: error``, or the first dead row
            that `on_bad` or a rule does not allow.
        TransientError: the store does not answer, or an object has changed.
    """
    units = early.plan_positions(divide_cut(spec, cut, state, store), next_position)
    order: ReadOrder | None = _make_read_order(spec, store, mark, folders, units)
    kept = None
    try:
        while order is not None:
            _drop_rows(kept)
            used = order
            answers, kept = read_units(session, spec, used, units)
            order = _find_better_order(spec, used, answers)
            if order is None:
                check_answers(spec, answers)
                if have_positions(units) and not have_left(units, answers):
                    early.note_epoch(units, answers)
                    units, order = keep_rows(units), used
            if order is not None:
                _delete_files(store, answers)
    except TidegateError:
        _drop_rows(kept)
        raise
    _log_missing_offsets(units, answers)
    # A slice without rows says something as well: its member may have punctuation.
    known: dict[int, MemberSurvey] = {}
    sketches: dict[str, Counter[str]] = {}
    for answer in answers:
        for piece in answer.slices:
            first = known.get(piece.index)
            known[piece.index] = merge_shares(first, piece.survey) if first else piece.survey
            # A row counts with the rows before it, and the other shares have not read these.
            if first is None:
                sketches.setdefault(piece.survey.member.source, Counter()).update(piece.sketch)
    none = make_no_rows(spec)
    members = tuple(
        replace(
            known[i] if i in known else scan_rows(spec, cut, i, none, state).survey,
            pending=piece.pending,
            done=piece.done,
        )
        for i, piece in enumerate(cut.slices)
    )
    found = {
        source: {"gamma": GAMMA, "buckets": dict(buckets)}
        for source, buckets in sketches.items()
        if buckets
    }
    survey = Survey(now=0, members=members)
    early_from = next_position if have_positions(units) else None
    return TaskScans(cut, survey, used, units, answers, found, kept, early_from)


def read_units(
    session: SparkSession, spec: PipelineSpec, order: ReadOrder, units: list[ReadUnit]
) -> tuple[list[UnitAnswer], KeptRows | None]:
    """Read units by the job that can evaluate their rows; see `run_read_job`."""
    run_job = run_expression_job if order.by_spark else choose_runner(session).run_read_job
    return run_job(session, order, units, build_topic_variables(session, spec))


def _make_read_order(
    spec: PipelineSpec, store: Store, mark: LateMark, folders: AttemptFolders, units: list[ReadUnit]
) -> ReadOrder:
    """What the rows of the next epoch are judged against, and where files go."""
    return ReadOrder(
        remove_settings(spec),
        mark.frontier,
        mark.bound,
        mark.missed,
        folders,
        store.url,
        read_schemas(spec),
        sent_bytes=SENT_BYTES // max(len(units), 1),
        by_spark=explain_spark_expressions(spec, units) is not None,
        section=mark.section,
    )


def _find_better_order(
    spec: PipelineSpec, order: ReadOrder, answers: list[UnitAnswer]
) -> ReadOrder | None:
    """An order by which tasks compute what they could not; None if there is none.

    Registries are asked for the schemas that tasks lacked. Spark SQL evaluates the rows if DuckDB
    could not.

    Raises:
        TransientError: a registry does not answer, or a schema is not registered yet.
        ConfigurationError: a registry refuses the driver, or a schema cannot be used.
    """
    unknown: dict[str, dict[int, str]] = {}
    for answer in answers:
        for source, schemas in answer.unknown.items():
            unknown[source] = unknown.get(source, {}) | schemas
    if unknown:
        return replace(order, schemas=fetch_schemas(spec, order.schemas, unknown))
    left = next((answer.left for answer in answers if answer.left is not None), None)
    if left is None or order.by_spark or _find_error(answers) is not None:
        return None
    _log.info("rows_evaluated_by_spark_sql", cause=left)
    return replace(order, by_spark=True)


def _delete_files(store: Store, answers: list[UnitAnswer]) -> None:
    """Delete what tasks have written whose rows are read once more."""
    stored = [part for answer in answers for part in answer.partials.values()]
    keys = [part.key for part in stored if isinstance(part, StoredTable)]
    for answer in answers:
        events = [ref for written in answer.events for ref in written.files]
        keys += [ref.key for ref in (*answer.late.written, *answer.dead.written, *events)]
    delete_objects(store, keys)


def _drop_rows(kept: KeptRows | None) -> None:
    if kept is not None:
        kept.discard()


def _log_missing_offsets(units: list[ReadUnit], answers: list[UnitAnswer]) -> None:
    """Compaction and transactions leave offsets without a message. They are logged, not refused."""
    missing = {key: count for answer in answers for key, count in answer.missing.items()}
    for piece in (one for unit in units for one in unit.cut.slices):
        for part in piece.parts:
            if part["key"] in missing:
                _log.info(
                    "offsets_missing",
                    source=piece.member.source,
                    why="compacted, or markers of transactions",
                    offsets=missing[part["key"]],
                    **part["kafka"],
                )


def describe_objects_in_tasks(
    session: SparkSession,
    source: SourceSpec,
    entries: Sequence[ObjectInfo],
    locate: Callable[[str], str],
) -> list[InspectedObject | TidegateError]:
    """Let tasks say what objects hold: each one, or why the store did not give it."""
    objects = [FoundObject(one.key, locate(one.key), one.size) for one in entries]
    runner = choose_runner(session)
    answers = runner.run_small_job(session, describe_units, divide_objects(source, objects))
    return [found for answer in sort_inspections(answers) for found in answer.found]


def require_frontier(pipeline: str, scans: TaskScans, order: MoveOrder) -> None:
    """Refuse a decision for which the rows were judged by another frontier: a defect."""
    judged = scans.order.frontier, scans.order.late_bound, scans.order.events_frontier
    mark = order.decision.late_mark
    decided = mark.frontier, mark.bound, mark.missed
    if judged != decided:
        raise SPARK_FAILED(pipeline=pipeline, cause=f"rows were judged by {judged}, not {decided}")


def check_answers(spec: PipelineSpec, answers: list[UnitAnswer]) -> None:
    """Raise what stops the epoch.

    Raises:
        TidegateError: what the first task that met an error says.
        PoisonError: a task could not compute its rows, or the first dead row is not allowed.
    """
    error = _find_error(answers)
    if error is not None:
        raise error
    for answer in answers:
        if answer.left is not None:
            raise SPARK_FAILED(pipeline=spec.name, cause=answer.left)
    for answer in answers:
        if answer.dead_refused is not None:
            raise answer.dead_refused


def _find_error(answers: list[UnitAnswer]) -> TidegateError | None:
    """Why nothing of these rows can be sealed, whoever computes them."""
    corrupt = [key for answer in answers for key in answer.corrupt]
    if corrupt:
        return CorruptObjectsError.for_keys(list(dict.fromkeys(corrupt)))
    return next((answer.error for answer in answers if answer.error is not None), None)
