"""What one task does with its unit of a cut: each row is read once.

The unit is surveyed, its rows are judged and folded into partial aggregates, and its late rows and
dead letters are written. What comes back is bounded: counts, partial aggregates, and references to
files. Refusals are part of the answer and no failures of the task, which Spark would try again.

Files carry the attempt's id and a random name. A task that runs twice writes other files, and only
those of the answer that Spark takes are named by the manifest.
"""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.errors import PoisonError, TidegateError, get_first_line
from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.file_footers import FileFooter
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.eventtime.decision_types import Member, MemberSurvey
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import (
    ENGINE_ERRORS,
    MEMORY_ERRORS,
    DuckFrame,
    Frame,
    combine_frames,
)
from tidegate.jobs.rules.worker_memory import require_room
from tidegate.jobs.sources.object_decoding import BAD_REASON
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind

from .attempt_files import open_task_store, store_task_rows
from .cut_division import ReadUnit
from .dead_rows import (
    count_conditions,
    count_dead_letters,
    find_refused_row,
    select_judged,
    show_dead_letters,
)
from .edge_folds import OPEN_EDGES, assign_unit_rows, fold_edges
from .errors import WORKER_MEMORY_FULL
from .event_files import EventsOrder, FileAnswer, list_event_members, write_read_events
from .judged_rows import JudgedRows, apply_verdicts, select_data_rows
from .kept_rows import KeptSummary, keep_event_rows, summarize_kept_rows
from .late_rows import (
    CountedRows,
    count_expired_pairs,
    count_late_rows,
    find_late_rows,
    find_refused_late_row,
    find_violations,
    show_late_rows,
    show_set_aside,
)
from .long_values import limit_rows
from .member_scan import MemberScan
from .message_schemas import Schemas
from .object_reading import count_read_bytes, make_part, open_part
from .session_folds import find_late_session_rows, fold_parts
from .slice_reading import CutPart, PhysicalColumns, read_parts, select_provenance
from .slice_scan import (
    keep_data_rows,
    make_no_rows,
    scan_evaluated_slice,
    scan_slice,
)
from .stored_partials import SENT_BYTES, StoredTable, decode_table, encode_table, store_table
from .task_report import TaskReport
from .topic_reading import UnknownSchemasError, read_topic_ranges

SliceScanner = Callable[[int], tuple[MemberScan, pa.Table]]
"""Gives what `scan_slice` returns of the slice at a place of a unit."""
OpenedObjects = dict[tuple[Member, str], CutPart]
"""Objects that a task has open: whose slice, and the key -> the object."""
NO_BOUND: Final = sys.maxsize
"""As `ReadOrder.sent_bytes`: nothing goes by way of the store."""


@dataclass(frozen=True)
class ReadOrder:
    """What all units of a cut have in common.

    Attributes:
        spec: the pipeline.
        frontier: before the epoch; rows are judged against it.
        late_bound, events_frontier: as `JudgedRows` has them.
        folders: where the attempt's files go.
        store: address of the pipeline's store.
        schemas: source -> schemas of its Avro or Protobuf messages, by number.
        gone: session window -> keys and parts whose rows are late, as an Arrow stream. If there are
            some, late rows are written and nothing else.
        sent_bytes: of partial aggregates in one answer; more of them go by way of the store, and so
            does what aggregates of Spark SQL keep: rows.
        by_spark: Spark SQL casts, selects and judges the rows, between two tasks.
        section: of the rows of the epoch.
    """

    spec: PipelineSpec
    frontier: int
    late_bound: int
    events_frontier: int
    folders: AttemptFolders
    store: str
    schemas: dict[str, Schemas] = field(default_factory=dict)
    gone: Mapping[str, bytes] = field(default_factory=dict)
    sent_bytes: int = SENT_BYTES
    by_spark: bool = False
    section: int = 0


@dataclass(frozen=True)
class SliceSummary:
    """What a slice holds.

    Attributes:
        index: of the slice in the cut.
        verdicts: verdict -> rows that are not plain data.
        sketch: of their lateness (`MemberScan`).
    """

    index: int
    survey: MemberSurvey
    verdicts: Counter[str]
    sketch: dict[str, int]


@dataclass
class UnitAnswer:
    """What a task says of its unit.

    Attributes:
        rows: all rows that were read.
        read_bytes: of the objects, and of the rows of topics.
        missing: key of a range of a topic -> offsets without a message.
        slices: in the order of the cut.
        partials: window -> partial aggregates without marks, as an Arrow stream or where that is;
            for `OPEN_EDGES` what `fold_edges` leaves.
        kept: the rows for the events; None without an events table.
        events: what was written of them, if the unit has `ReadUnit.positions` and all planned rows
            leave.
        late: what was late.
        late_refused: output -> error for its first late row under ``on_late: error``.
        dead: what conditions and casts stop.
        footers: of the files in `late` and `dead`, by key.
        dead_refused: error for the first dead row that `on_bad` or a rule does not allow.
        error: why nothing can be sealed; the rest says nothing then.
        corrupt: keys of objects that cannot be read; the rest says nothing then.
        unknown: source -> number of a schema of a registry that the task lacked -> the place of a
            message with it.
        left: why a task cannot compute the unit; the rest says nothing then.
        most_rows: how many rows a task may hold at once, if values are long and it was given more.
            Of a batch the rest says nothing then; the rows of a unit were read in smaller batches.
    """

    number: int
    rows: int = 0
    read_bytes: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    slices: list[SliceSummary] = field(default_factory=list)
    partials: dict[str, bytes | StoredTable] = field(default_factory=dict)
    kept: KeptSummary | None = None
    events: list[FileAnswer] = field(default_factory=list)
    late: CountedRows = field(default_factory=CountedRows)
    late_refused: dict[str, PoisonError] = field(default_factory=dict)
    dead: CountedRows = field(default_factory=CountedRows)
    footers: dict[str, FileFooter] = field(default_factory=dict)
    dead_refused: PoisonError | None = None
    error: TidegateError | None = None
    corrupt: tuple[str, ...] = ()
    unknown: dict[str, dict[int, str]] = field(default_factory=dict)
    left: str | None = None
    most_rows: int | None = None


@dataclass(frozen=True)
class UnitReading:
    """What came of a unit: `kept` are the rows for the events, None if there are none."""

    answer: UnitAnswer
    report: TaskReport
    kept: pa.Table | None


@dataclass(frozen=True)
class SimilarParts:
    """Objects of a unit that look alike.

    Attributes:
        unit: with these objects only.
        places: of each among all objects of the unit.
    """

    unit: ReadUnit
    places: tuple[int, ...]


def read_unit(order: ReadOrder, unit: ReadUnit, opened: OpenedObjects | None = None) -> UnitReading:
    """Read a unit at once, and report what it cost.

    `opened` are objects of the unit before it; those of this one replace them. If it is
    given, a unit whose values are long may be refused (`UnitAnswer.most_rows`).
    """

    def read(answer: UnitAnswer) -> pa.Table | None:
        """Read, judge and fold the rows."""
        parts = _open_parts(answer, order, unit, opened)
        names = {name for source in order.spec.sources.values() for name in source.columns}
        if opened is not None and _refuse_long_rows(answer, order, unit, limit_rows(parts, names)):
            return None
        scan = partial(scan_slice, order.spec, unit.cut, parts, state=unit.state)
        return _fill_answer(answer, order, unit, parts, scan)

    return run_task(order, unit, UnitAnswer(unit.number), read)


def decode_parts(
    order: ReadOrder,
    chosen: SimilarParts,
    columns: PhysicalColumns,
    to_nested_type: Callable[[str], pa.DataType],
    opened: OpenedObjects | None = None,
) -> UnitReading:
    """Read the rows of objects for Spark SQL; `kept` are all of them, None if that fails.

    They have a `BAD_REASON`, and their `_m` is the number of their piece (`ReadUnit`). `opened` is
    as in `read_unit`, and the other arguments are as `read_parts` has them.
    """
    unit = chosen.unit

    def read(answer: UnitAnswer) -> pa.Table | None:
        """Read the rows."""
        parts = _open_parts(answer, order, unit, opened)
        if opened is not None and _refuse_long_rows(answer, order, unit, limit_rows(parts)):
            return None
        source = order.spec.sources[find_source(chosen)]
        numbered = list(zip(chosen.places, parts, strict=True))
        rows = read_parts(columns, numbered, source, to_nested_type)
        if BAD_REASON not in rows.column_names:
            rows = rows.append_column(BAD_REASON, pa.nulls(rows.num_rows, pa.string()))
        answer.rows = rows.num_rows
        pieces = np.array(unit.pieces, np.int32)[rows["_m"].to_numpy()]
        return replace_column(rows, "_m", pa.array(pieces))

    return run_task(order, unit, UnitAnswer(unit.number), read)


def find_source(chosen: SimilarParts) -> str:
    """Return whose objects these are; of several alike, the first source."""
    return next(piece.member.source for piece in chosen.unit.cut.slices if piece.parts)


def fold_unit(order: ReadOrder, unit: ReadUnit, rows: pa.Table | None) -> UnitReading:
    """Judge and fold the rows of a unit that Spark SQL has evaluated; None if there are none.

    They have the columns of `column_casts.cast_to_declared`, and are those of `decode_parts`.
    """

    def scan(place: int) -> tuple[MemberScan, pa.Table]:
        """Scan the rows of one slice."""
        own = make_no_rows(order.spec)
        if rows is not None:
            own = rows.filter(pc.equal(rows["_m"], unit.pieces[place]))
            own = replace_column(own, "_m", pa.array(np.full(own.num_rows, place, np.int32)))
        return scan_evaluated_slice(order.spec, unit.cut, place, unit.state, own)

    def fold(answer: UnitAnswer) -> pa.Table | None:
        """Judge and fold the rows."""
        return _fill_answer(answer, order, unit, list_parts(unit), scan)

    return run_task(order, unit, UnitAnswer(unit.number), fold)


def list_parts(unit: ReadUnit) -> list[CutPart]:
    """Return the objects of a unit without their rows."""
    unopened = io.BytesIO()
    return [
        make_part(place, part, unopened)
        for place, piece in enumerate(unit.cut.slices)
        for part in piece.parts
    ]


def select_parts(unit: ReadUnit, places: tuple[int, ...]) -> SimilarParts:
    """Return the objects at these places among all of a unit."""
    number, slices = count(), []
    for piece in unit.cut.slices:
        own = tuple(part for part in piece.parts if next(number) in places)
        slices.append(replace(piece, parts=own))
    return SimilarParts(replace(unit, cut=Cut(tuple(slices))), places)


def run_task(
    order: ReadOrder,
    unit: ReadUnit,
    answer: UnitAnswer,
    body: Callable[[UnitAnswer], pa.Table | None],
) -> UnitReading:
    """Let `body` fill the answer; what stops it is part of the answer."""
    begun, kept = time.process_time(), None
    try:
        kept = body(answer)
    except CorruptObjectsError as error:
        answer.corrupt = error.keys
    except TidegateError as error:
        answer.error = error
    except MEMORY_ERRORS as error:
        answer.error = WORKER_MEMORY_FULL(
            pipeline=order.spec.name, unit=unit.describe(), cause=get_first_line(error)
        )
    except UnknownSchemasError as error:
        answer.unknown = {error.source: error.schemas}
        answer.left = "messages with schemas that the tasks do not have"
    except (*ENGINE_ERRORS, pa.ArrowInvalid) as error:
        answer.left = get_first_line(error)
    return UnitReading(answer, TaskReport.measure_since(begun), kept)


def _open_parts(
    answer: UnitAnswer,
    order: ReadOrder,
    unit: ReadUnit,
    opened: OpenedObjects | None = None,
) -> list[CutPart]:
    """Open the objects and read the ranges of topics; say how many bytes they have."""
    known = {} if opened is None else dict(opened)
    held: OpenedObjects = {} if opened is None else opened
    held.clear()
    ranges = read_topic_ranges(order.spec, unit.cut, order.schemas)
    parts, read_bytes = list[CutPart](), 0
    for index, piece in enumerate(unit.cut.slices):
        source = order.spec.sources[piece.member.source]
        for part in piece.parts:
            key = part["key"]
            # Of two sources of one folder each has decoded its own rows of an object.
            name = piece.member, key
            if key in ranges:
                rows = ranges[key].rows
                found = make_part(index, part, rows)
                read_bytes += rows.nbytes
            elif name in known:
                found = make_part(index, part, known[name].path, known[name].reader)
                read_bytes += count_read_bytes(part, source, is_open=True)
            else:
                found = open_part(index, part, unit.uris[key], source)
                read_bytes += count_read_bytes(part, source, is_open=False)
            parts.append(found)
            held[name] = found
    answer.read_bytes = read_bytes
    answer.missing = {key: found.missing for key, found in ranges.items() if found.missing}
    return parts


def _refuse_long_rows(
    answer: UnitAnswer, order: ReadOrder, unit: ReadUnit, most: int | None
) -> bool:
    """Say how many rows a task may hold, if it is given more."""
    answer.most_rows = most
    if most is None:
        return False
    # The batches that are read instead count what they read; it leaves what is held already.
    answer.read_bytes -= sum(
        count_read_bytes(part, order.spec.sources[piece.member.source], is_open=True)
        for piece in unit.cut.slices
        for part in piece.parts
    )
    return True


def _fill_answer(
    answer: UnitAnswer, order: ReadOrder, unit: ReadUnit, parts: list[CutPart], scan: SliceScanner
) -> pa.Table | None:
    """Judge and fold the rows; return those that are kept for the events.

    Those of a unit with `ReadUnit.positions` are not: they are written, if all of them leave.
    """
    tables, judged, is_whole = [], [], True
    for place, (index, piece) in enumerate(unit.list_slices()):
        require_room()
        found, rows = scan(place)
        answer.rows += rows.num_rows
        answer.slices.append(_describe_slice(index, found))
        barrier = found.survey.barrier
        is_whole = is_whole and (barrier is None or barrier.seq + 1 >= piece.end)
        tables.append(keep_data_rows(rows))
        judged.append(select_judged(rows))
        refused = find_refused_row(order.spec, parts, found.survey, judged[-1])
        answer.dead_refused = answer.dead_refused or refused
    # A slice that ends behind its first barrier row is planned and read again.
    if not is_whole or answer.dead_refused is not None:
        return None
    require_room()
    rows = pa.concat_tables(tables, promote_options="default")
    epoch = _judge_rows(answer, order, unit, rows)
    _write_late_rows(answer, order, epoch)
    if order.gone:
        return None
    _write_dead_letters(answer, order, unit, pa.concat_tables(judged), parts, epoch)
    _fold_rows(answer, order, epoch)
    if epoch.data is None or not order.spec.outputs.events:
        return None
    kept = keep_event_rows(epoch, unit, rows)
    is_ordered = order.spec.release.mode is not ReleaseMode.PASS_THROUGH
    answer.kept = summarize_kept_rows(kept, with_times=is_ordered)
    if unit.positions is None:
        return kept
    if unit.positions and answer.kept.rows == unit.count_rows():
        require_room()
        members = list_event_members(order.spec, unit.list_slices())
        events = EventsOrder(order.spec, order.folders, order.store, order.section, members, {})
        answer.events.append(write_read_events(events, unit, kept))
    return None


def _describe_slice(index: int, found: MemberScan) -> SliceSummary:
    verdicts = Counter(found.verdicts["_verdict"].to_pylist())
    return SliceSummary(index, found.survey, verdicts, found.sketch)


def _judge_rows(answer: UnitAnswer, order: ReadOrder, unit: ReadUnit, rows: pa.Table) -> JudgedRows:
    frame = select_data_rows(order.spec, unit.cut, rows) if rows.num_rows else None
    data, aside = apply_verdicts(frame, order.spec)
    times = [s.survey.min_time for s in answer.slices if s.survey.min_time is not None]
    return JudgedRows(
        order.spec,
        data,
        aside,
        min(times, default=None),
        order.frontier,
        order.folders.attempt.timeline,
        order.folders.attempt.slot,
        order.late_bound,
        order.events_frontier,
    )


def _fold_rows(answer: UnitAnswer, order: ReadOrder, judged: JudgedRows) -> None:
    if judged.data is not None:
        ended, left = fold_edges(judged)
        if left is not None:
            answer.partials[OPEN_EDGES] = encode_table(left)
        for name, window in order.spec.windows.items():
            aggregation = Aggregation(order.spec, name, is_evaluated=True)
            folded = (
                fold_parts(judged, aggregation)
                if window.is_folded_by_parts
                else aggregation.fold_rows(assign_unit_rows(judged, window, ended))
            )
            answer.partials[name] = encode_table(folded.toArrow())
    send_partials(answer, order)


def send_partials(answer: UnitAnswer, order: ReadOrder) -> None:
    """Send large partial aggregates by way of the store."""
    packed = {name: one for name, one in answer.partials.items() if isinstance(one, bytes)}
    is_large = sum(map(len, packed.values())) > order.sent_bytes
    for name, table in packed.items():
        window = order.spec.windows.get(name)
        # The driver sees no rows, nor copies of them.
        keeps_rows = order.sent_bytes != NO_BOUND and window is not None and window.keeps_rows
        if is_large or keeps_rows:
            store = open_task_store(order.store)
            number = answer.number
            answer.partials[name] = store_table(store, order.folders, name, number, table)


def _write_late_rows(answer: UnitAnswer, order: ReadOrder, judged: JudgedRows) -> None:
    found = {EVENTS: find_late_rows(judged, EVENTS)}
    for name, window in order.spec.windows.items():
        found[name] = (
            _find_late_session_rows(order, judged, name)
            if window.kind is WindowKind.SESSION
            else find_late_rows(judged, name)
        )
    for output, rows in [(EVENTS, find_violations(judged)), *found.items()]:
        refused = find_refused_late_row(judged, rows, output)
        if refused is not None:
            answer.late_refused.setdefault(output, refused)
    shown = (show_late_rows(judged, o, r) for o, r in found.items() if r is not None)
    frame = combine_frames(show_set_aside(judged), *shown)
    if frame is None or answer.late_refused:
        return
    table = frame.toArrow()
    late, counts = count_late_rows(table)
    counts += count_expired_pairs(judged)
    kept = table.filter(pc.invert(table["_dropped"])).drop_columns(["_dropped"])
    files = _write_table(answer, order, LATE, kept, order.spec.event_time_column)
    answer.late = CountedRows(files, late, counts)


def _find_late_session_rows(order: ReadOrder, judged: JudgedRows, name: str) -> Frame | None:
    packed = order.gone.get(name)
    gone = None if packed is None else DuckFrame.from_table(decode_table(packed))
    return find_late_session_rows(judged, Aggregation(order.spec, name), gone)


def _write_dead_letters(
    answer: UnitAnswer,
    order: ReadOrder,
    unit: ReadUnit,
    rows: pa.Table,
    parts: list[CutPart],
    epoch: JudgedRows,
) -> None:
    if not rows.num_rows:
        return
    frame = DuckFrame.from_table(rows)
    late, counts = count_conditions(order.spec, unit.cut, frame)
    origin = select_provenance(order.spec, unit.cut)[len(order.spec.columns) :]
    placed = frame.selectExpr("*", *origin)
    letters = show_dead_letters(placed, parts, epoch.provenance_columns()).toArrow()
    counts += count_dead_letters(letters)
    files = _write_table(answer, order, DEAD_LETTERS, letters, None)
    answer.dead = CountedRows(files, late, counts)


def _write_table(
    answer: UnitAnswer, order: ReadOrder, table: str, rows: pa.Table, time: str | None
) -> tuple[FileRef, ...]:
    """Write a file of an output table, none without rows; `time` as in `store_rows`."""
    if not rows.num_rows:
        return ()
    stem = f"{order.folders.table_prefix(table)}part-{answer.number:05d}"
    kind = f"table:{table}"
    return (store_task_rows(order.store, rows, stem, kind, time, {}, answer.footers),)
