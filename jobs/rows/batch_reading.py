"""Reads a unit that has more values than a task holds at once, or long ones, in batches.

A batch continues where the one before it ended, as an epoch continues the one before it. So rows
are judged as if they were read at once. The batches follow from the cut, and their partial
aggregates are merged in its order: a replay gives the same sums of doubles.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.engine.interfaces import Cut, Slice
from tidegate.jobs.eventtime.decision_types import MemberSurvey
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MIN

from .cut_division import ReadUnit
from .edge_folds import OPEN_EDGES
from .kept_rows import KeptSummary
from .session_folds import merge_parts
from .slice_reading import PhysicalColumns
from .slice_scan import MOST_CELLS
from .stored_partials import decode_table, encode_table
from .task_report import TaskReport
from .unit_reading import (
    NO_BOUND,
    OpenedObjects,
    ReadOrder,
    SimilarParts,
    SliceSummary,
    UnitAnswer,
    UnitReading,
    decode_parts,
    fold_unit,
    read_unit,
    run_task,
    send_partials,
)

_Compute = Callable[[ReadOrder, ReadUnit], UnitReading]


def read_in_batches(order: ReadOrder, unit: ReadUnit) -> Iterator[UnitReading]:
    """Yield what came of each batch; the answer of the last reading is that of the whole unit.

    A unit that a task holds at once is one batch.
    """
    opened = OpenedObjects()
    return _compute_batches(order, unit, lambda own, batch: read_unit(own, batch, opened))


def decode_in_batches(
    order: ReadOrder,
    chosen: SimilarParts,
    columns: PhysicalColumns,
    to_nested_type: Callable[[str], pa.DataType],
) -> Iterator[UnitReading]:
    """Yield what `decode_parts` gives of each batch; the last answer is that of all batches."""
    total, opened = UnitAnswer(chosen.unit.number), OpenedObjects()
    places = dict(zip(_list_part_names(chosen.unit), chosen.places, strict=True))
    begun = time.process_time()
    batches = deque(divide_unit(order.spec, chosen.unit))
    while batches:
        batch = batches.popleft()
        own = SimilarParts(batch, tuple(places[name] for name in _list_part_names(batch)))
        reading = decode_parts(order, own, columns, to_nested_type, opened)
        if reading.answer.most_rows is not None:
            _divide_further(batches, batch, reading.answer, total)
            continue
        unknown = total.unknown
        _add_answer(total, reading.answer)
        for source, schemas in unknown.items():
            total.unknown[source] = schemas | total.unknown.get(source, {})
        yield UnitReading(total, TaskReport.measure_since(begun), reading.kept)
        if reading.kept is None:
            break


def fold_in_batches(
    order: ReadOrder, unit: ReadUnit, tables: Iterable[pa.Table]
) -> Iterator[UnitReading]:
    """As `read_in_batches`, of rows that Spark SQL has evaluated (see `fold_unit`).

    The rows are in the order of the unit if it has several batches.
    """
    rows = _EvaluatedRows(unit, iter(tables))
    return _compute_batches(order, unit, lambda own, batch: fold_unit(own, batch, rows.take(batch)))


class _EvaluatedRows:
    """The rows of a unit, which are taken batch by batch."""

    def __init__(self, unit: ReadUnit, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._left: list[pa.Table] = []
        self._places = {name: place for place, name in enumerate(_list_part_names(unit))}
        self._ends = [part["row_end"] for piece in unit.cut.slices for part in piece.parts]

    def take(self, batch: ReadUnit) -> pa.Table | None:
        """The rows of a batch, of which no row was taken; those before it are dropped."""
        places = [self._places[name] for name in _list_part_names(batch)]
        parts = [part for piece in batch.cut.slices for part in piece.parts]
        start = _find_position(places[0], 0 if "kafka" in parts[0] else parts[0]["row_start"])
        is_divided = parts[-1]["row_end"] < self._ends[places[-1]]
        end = (
            _find_position(places[-1], parts[-1]["row_end"])
            if is_divided
            else _find_position(places[-1] + 1, 0)
        )
        numbers = np.full(len(self._places), -1, np.int32)
        numbers[places] = np.arange(len(places))
        found = []
        for rows in chain(self._left, self._tables):
            at = (rows["_p"].to_numpy().astype(np.int64) << 32) + rows["_row"].to_numpy()
            own = rows.filter(pa.array((at >= start) & (at < end)))
            found.append(replace_column(own, "_p", pa.array(numbers[own["_p"].to_numpy()])))
            if (at >= end).any():
                self._left = [rows.filter(pa.array(at >= end))]
                break
        else:
            self._left = []
        return pa.concat_tables(found) if found else None


def _list_part_names(unit: ReadUnit) -> list[tuple[int, str]]:
    """The slice and the key of each part of a unit."""
    return [(index, part["key"]) for index, piece in unit.list_slices() for part in piece.parts]


def _find_position(place: int, row: int) -> int:
    return (place << 32) + row


def _compute_batches(order: ReadOrder, unit: ReadUnit, compute: _Compute) -> Iterator[UnitReading]:
    """Yield what `compute` makes of each batch; see `read_in_batches`."""
    begun = time.process_time()
    total = UnitAnswer(unit.number)
    batches = deque(divide_unit(order.spec, unit))
    if len(batches) == 1:
        reading = compute(order, batches.popleft())
        if reading.answer.most_rows is None:
            yield reading
            return
        _divide_further(batches, unit, reading.answer, total)
    partials: dict[str, list[bytes]] = {}
    # What one batch finds is sent with all others.
    unbound = replace(order, sent_bytes=NO_BOUND)
    surveys: dict[int, MemberSurvey] = {}
    while batches:
        batch = batches.popleft()
        (index,) = batch.indexes
        survey = surveys.get(index)
        if survey is not None and survey.barrier is not None:
            continue  # what follows a barrier row belongs to another epoch
        reading = compute(unbound, _add_earlier_state(batch, survey))
        if reading.answer.most_rows is not None:
            _divide_further(batches, batch, reading.answer, total)
            continue
        _add_answer(total, reading.answer)
        for name, packed in reading.answer.partials.items():
            assert isinstance(packed, bytes)  # noqa: S101 - not bound yet
            partials.setdefault(name, []).append(packed)
        surveys |= {one.index: one.survey for one in total.slices}
        yield UnitReading(total, reading.report, reading.kept)
        if is_unit_stopped(total):
            break
    run_task(order, unit, total, partial(_merge_answer, order, partials))
    yield UnitReading(total, TaskReport.measure_since(begun), None)


def divide_unit(spec: PipelineSpec, unit: ReadUnit) -> list[ReadUnit]:
    """Return a unit as batches of at most `MOST_CELLS` values, each of one slice.

    Offsets of a topic are never divided.
    """
    if unit.count_cells(spec) <= MOST_CELLS:
        return [unit]
    return _divide_slices(
        unit, lambda piece: max(MOST_CELLS // spec.sources[piece.member.source].width, 1)
    )


def _divide_further(
    batches: deque[ReadUnit], batch: ReadUnit, refusal: UnitAnswer, total: UnitAnswer
) -> None:
    """Put smaller batches in the place of one that was refused because of long values.

    Their events are not written at once: each of them would have a file of its own.
    """
    most = refusal.most_rows
    assert most is not None  # noqa: S101 - the caller has looked
    if batch.positions is not None:
        batch = replace(batch, positions={})
    batches.extendleft(reversed(_divide_slices(batch, lambda _: most)))
    total.read_bytes += refusal.read_bytes
    total.most_rows = most


def _divide_slices(unit: ReadUnit, count_most: Callable[[Slice], int]) -> list[ReadUnit]:
    """Return a unit as batches of one slice, each of at most so many rows of it."""
    found = list[ReadUnit]()
    for index, number, piece in zip(unit.indexes, unit.pieces, unit.cut.slices, strict=True):
        positions = unit.positions and {index: unit.positions[index]}
        for parts in _divide_parts(piece.parts, count_most(piece)):
            cut = Cut((replace(piece, parts=parts),))
            batch = replace(unit, indexes=(index,), pieces=(number,), cut=cut, positions=positions)
            found.append(batch)
            if positions:
                positions = {index: positions[index] + batch.count_rows()[index]}
    return found


def _divide_parts(parts: tuple[JsonObject, ...], most: int) -> Iterator[tuple[JsonObject, ...]]:
    """Yield the parts of a slice in groups of at most so many rows."""
    group: list[JsonObject] = []
    room = most
    for part in parts:
        start = part["row_start"]
        while start < part["row_end"]:
            rows = part["row_end"] - start
            if OFFSET_COLUMN not in part["columns"]:
                rows = min(rows, room)
            group.append({**part, "row_start": start, "row_end": start + rows})
            start, room = start + rows, room - rows
            if room <= 0:
                yield tuple(group)
                group, room = [], most
    if group:
        yield tuple(group)


def _add_earlier_state(batch: ReadUnit, survey: MemberSurvey | None) -> ReadUnit:
    """Give a batch what the rows of its slice before it have left behind."""
    if survey is None:
        return batch
    members: dict[str, Any] = batch.state["members"]
    name = str(survey.member)
    own = {**(members[name] or {}), "generator": survey.punctuation_state}
    return replace(batch, state={**batch.state, "members": {**members, name: own}})


def is_unit_stopped(answer: UnitAnswer) -> bool:
    """Whether nothing of a unit is used, so that its other rows need not be read."""
    stops = answer.error, answer.left, answer.dead_refused
    return any(one is not None for one in stops) or bool(answer.corrupt or answer.unknown)


def _add_answer(total: UnitAnswer, answer: UnitAnswer) -> None:
    """Add what a batch says, but for its partial aggregates."""
    total.rows += answer.rows
    total.read_bytes += answer.read_bytes
    total.missing |= answer.missing
    for one in answer.slices:
        _add_slice(total, one)
    if answer.kept is not None:
        total.kept = answer.kept if total.kept is None else _add_kept(total.kept, answer.kept)
    total.events += answer.events
    total.late += answer.late
    total.late_refused = answer.late_refused | total.late_refused
    total.dead += answer.dead
    total.footers |= answer.footers
    total.dead_refused = answer.dead_refused
    total.error, total.left = answer.error, answer.left
    total.corrupt, total.unknown = answer.corrupt, answer.unknown


def _add_slice(total: UnitAnswer, more: SliceSummary) -> None:
    for place, known in enumerate(total.slices):
        if known.index == more.index:
            survey = merge_surveys(known.survey, more.survey)
            sketch = {
                bucket: known.sketch.get(bucket, 0) + more.sketch.get(bucket, 0)
                for bucket in known.sketch | more.sketch
            }
            verdicts = known.verdicts + more.verdicts
            total.slices[place] = SliceSummary(more.index, survey, verdicts, sketch)
            return
    total.slices.append(more)


def merge_shares(first: MemberSurvey, second: MemberSurvey) -> MemberSurvey:
    """Return the survey of two shares of a slice, which were read without each other."""
    filled = [one for one in (first, second) if one.rows]
    # Without rows a share leaves behind what was there before the epoch.
    state = (filled or [second])[-1].punctuation_state
    if len(filled) > 1:
        assert first.punctuation_state is not None  # noqa: S101 - it has rows
        assert state is not None  # noqa: S101
        state = {**state, "newest": max(state["newest"], first.punctuation_state["newest"])}
    return replace(merge_surveys(first, second), punctuation_state=state)


def merge_surveys(first: MemberSurvey, second: MemberSurvey) -> MemberSurvey:
    """Return the survey of rows and of those that follow them, read with what these left behind."""
    times = [
        time for one in (first, second) for time in (one.min_time, one.max_time) if time is not None
    ]
    newest = max(times, default=None)
    kept = [time for one in (first, second) if (time := one.max_kept_time) is not None]
    newest_kept = max(kept, default=TICK_MIN)
    marks = [one.punctuation for one in (first, second) if one.punctuation is not None]
    return MemberSurvey(
        member=first.member,
        rows=first.rows + second.rows,
        min_time=min(times, default=None),
        max_time=newest,
        barrier=first.barrier or second.barrier,
        punctuation=max(marks, default=None),
        punctuation_state=second.punctuation_state,
        quarantined=first.quarantined + second.quarantined,
        dead=first.dead + second.dead,
        violations=first.violations + second.violations,
        regressions=first.regressions + second.regressions,
        newest_kept=None if newest is None or newest == newest_kept else newest_kept,
        newest_end=max(first.newest_end, second.newest_end),
    )


def _add_kept(first: KeptSummary, second: KeptSummary) -> KeptSummary:
    return KeptSummary(
        first.rows + second.rows,
        first.size + second.size,
        first.late + second.late,
        first.times + second.times,
        first.late_times + second.late_times,
    )


def _merge_answer(
    order: ReadOrder, partials: Mapping[str, Sequence[bytes]], answer: UnitAnswer
) -> None:
    """Merge the partial aggregates of all batches, in their order."""
    if is_unit_stopped(answer):
        return
    for name, packed in partials.items():
        rows = pa.concat_tables(map(decode_table, packed))
        merged = rows if name == OPEN_EDGES else _merge_partials(order.spec, name, rows)
        answer.partials[name] = encode_table(merged)
    send_partials(answer, order)


def _merge_partials(spec: PipelineSpec, name: str, rows: pa.Table) -> pa.Table:
    aggregation = Aggregation(spec, name)
    frame = DuckFrame.from_table(rows)
    if aggregation.window.is_folded_by_parts:
        return merge_parts(frame, aggregation).toArrow()
    return aggregation.merge_same_windows(frame).toArrow()
