"""The files of the events table, and of rows that wait, as tasks write them.

The rows are those that the tasks of a first job kept (`kept_rows`), and, for an ordered release,
those of live order segments. Positions are contiguous over all files.

- *Without an order* a task writes the rows of its unit; the driver knows from the first job at
  which position each slice begins. Where it knows that before, the tasks of the first job write.
- *In order* rows are divided into ranges of (section, event time), the targets: late rows that
  leave at once, rows that leave in order, and rows that stay. Either tasks cut rows, which Spark
  moves to the tasks of their targets, or each task reads all rows and writes its share of the
  targets. A task that cuts rows tells every target how many rows it has for lower ones, so each
  target knows its first position.
"""

import io
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import (
    TIMESTAMP_UTC,
    get_column_or_nulls,
    read_parquet_object,
    to_arrow_type,
)
from tidegate.jobs.engine.file_footers import FileFooter
from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.sources.byte_streams import ScratchFile
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec

from .attempt_files import open_task_store, store_task_rows
from .cut_division import ReadUnit
from .errors import KEPT_ROWS_LOST
from .kept_rows import KeptPiece, decode_rows, encode_in_pieces, slice_rows
from .task_report import TaskReport

RANGE_BYTES: Final = 32 << 20
"""Bytes of rows, as Arrow has them, that one task sorts; more only of rows of the same time."""
_CUT_BYTES: Final = 8 << 20
"""Bytes of kept rows that a task cuts at a time."""
FILE_BYTES: Final = 32 << 20
"""Bytes of kept rows that a task writes as one file."""
_HELD_BYTES: Final = 4 * RANGE_BYTES
"""Bytes of rows for several targets that a task holds; the rows of more are in a file."""
MOST_MOVED: Final = 256
"""To so many tasks Spark moves rows at most: more targets share them.

For so many its shuffle writes each piece to a file as it comes
(`spark.shuffle.sort.bypassMergeThreshold`); for more it would fill the heap first.
"""
_KEYS: Final = ("_section", "_tardy", "_et", "_so", "_source", "_partition", "_seq")
_NAMES: Final = pa.dictionary(pa.int32(), pa.string())
_Ints = NDArray[np.int64]
FirstPositions = dict[int, dict[int, int]]
"""Number of a unit -> index of a slice -> position of the first row of both."""


@dataclass(frozen=True)
class EventMember:
    """Whose rows a slice has: `place` is that of the source in the spec.

    `tardy` says whether they stood before a tardy barrier.
    """

    source: str
    partition: str
    place: int
    tardy: bool


@dataclass(frozen=True)
class EventsOrder:
    """What all tasks that write the events of an epoch have in common.

    Attributes:
        spec: the pipeline.
        folders: where the attempt's files go.
        store: address of the pipeline's store.
        section: of the rows of the epoch.
        members: index of a slice -> whose rows they are.
        kept: unit -> rows that its task has kept; not of those that are written at once.
    """

    spec: PipelineSpec
    folders: AttemptFolders
    store: str
    section: int
    members: dict[int, EventMember]
    kept: dict[int, int]


@dataclass(frozen=True)
class RangesOrder(EventsOrder):
    """As `EventsOrder`, for a release in order.

    Attributes:
        before, after: rows of segments from `before` on have not left, those below `after` leave.
        position: of the first row that leaves.
        ranges: upper bounds, exclusive, of all targets but the last of each sort: late rows that
            leave at once, rows that leave in order, rows that stay.
        segments: those of which rows leave or are counted.
        merged: keys of segments whose rows that stay are written again.
        maps: how many tasks divide the segments among them.
        shares: how many tasks read all rows; 0: Spark moves the rows to `moved_to` tasks.
    """

    before: ReleaseMark
    after: ReleaseMark
    position: int
    ranges: tuple[tuple[ReleaseMark, ...], ...]
    segments: tuple[FileRef, ...]
    merged: frozenset[str]
    maps: int
    shares: int

    @property
    def firsts(self) -> list[int]:
        """The first target of each sort, and the number of all."""
        return [0, *np.cumsum([len(bounds) + 1 for bounds in self.ranges]).tolist()]

    @property
    def moved_to(self) -> int:
        """To how many tasks Spark moves rows: a task has every so many-th target."""
        return min(self.firsts[-1], MOST_MOVED)


@dataclass
class FileAnswer:
    """What a task says of the files that it should write.

    Attributes:
        number: of the unit or the target.
        files: none if there are no rows for it, more than one only of a large unit.
        footers: by key; of a file of a table.
        counts: source -> rows that left.
        newest: greatest (section, event time) that left in order.
        flagged: late rows that left at once.
        waiting: key of a segment -> its rows from `before` and from `after` on.
        report: None until the task is through with it.
        error: why nothing can be sealed; the rest says nothing then.
    """

    number: int
    files: tuple[FileRef, ...] = ()
    footers: dict[str, FileFooter] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    newest: ReleaseMark | None = None
    flagged: int = 0
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    report: TaskReport | None = None
    error: TidegateError | None = None

    @contextmanager
    def report_work(self) -> Iterator[None]:
        """Note what the work of a task has cost, and the error that stops it."""
        begun = time.process_time()
        try:
            yield
        except TidegateError as error:
            self.error = error
        self.report = TaskReport.measure_since(begun)


# Without an order


def list_event_members(
    spec: PipelineSpec, slices: Iterable[tuple[int, Slice]], flagged: Collection[str] = ()
) -> dict[int, EventMember]:
    """Return index of a slice -> whose rows it has; `flagged` are members at a tardy barrier."""
    places = {name: place for place, name in enumerate(spec.sources)}
    return {
        index: EventMember(*piece.member, places[piece.member.source], str(piece.member) in flagged)
        for index, piece in slices
    }


def assign_first_positions(
    members: Mapping[int, EventMember], rows: Mapping[int, Counter[int]], position: int
) -> FirstPositions:
    """Give rows contiguous positions: by source and partition, then in the order of the cut.

    Args:
        members: index of a slice -> whose rows it has.
        rows: number of a unit -> index of a slice -> rows of both that leave.
        position: of the first row.
    """
    # Units that share a slice follow each other.
    pieces = sorted(
        (members[index].place, members[index].partition, unit, index)
        for unit, counts in rows.items()
        for index in counts
    )
    firsts: FirstPositions = defaultdict(dict)
    for *_, unit, index in pieces:
        firsts[unit][index] = position
        position += rows[unit][index]
    return firsts


def write_read_events(order: EventsOrder, unit: ReadUnit, kept: pa.Table) -> FileAnswer:
    """Write rows that were just read, at the positions that were planned for them."""
    assert unit.positions is not None  # noqa: S101 - see `ReadUnit`
    answer, following = FileAnswer(unit.number), dict(unit.positions)
    for rows in slice_rows(kept, FILE_BYTES):
        table = _add_members(order, rows.combine_chunks())
        _write_events(answer, order, *_assign_positions(table, following))
    return answer


def write_unit_events(
    order: EventsOrder, firsts: FirstPositions, unit: int, pieces: Iterable[KeptPiece]
) -> FileAnswer:
    """Write the rows of a unit."""
    answer, found, following = FileAnswer(unit), 0, dict(firsts.get(unit, {}))
    with answer.report_work():
        for rows in _join_kept_rows(pieces, FILE_BYTES):
            found += rows.num_rows
            table = _add_members(order, rows)
            _write_events(answer, order, *_assign_positions(table, following))
        _require_all_rows(order, found, order.kept[unit])
    return answer


def _require_all_rows(order: EventsOrder, found: int, kept: int) -> None:
    """Refuse rows that were lost with an executor and could not be read again.

    Raises:
        TransientError: some are missing.
    """
    if found != kept:
        raise KEPT_ROWS_LOST(pipeline=order.spec.name, found=found, kept=kept)


def _assign_positions(rows: pa.Table, following: dict[int, int]) -> tuple[pa.Table, _Ints]:
    """The rows of slices in the order of their positions, and these.

    `following` has the position of the next row of each slice, and is brought up to date.
    """
    slices = rows["_slice"].to_numpy()
    starts = np.flatnonzero(np.diff(slices, prepend=-1))
    sizes = np.diff(starts, append=slices.size)
    shifts = np.empty(starts.size, np.int64)
    for place, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        index = int(slices[start])
        shifts[place] = following[index] - start
        following[index] += size
    positions = np.arange(slices.size) + np.repeat(shifts, sizes)
    if (positions[1:] < positions[:-1]).any():
        places = np.argsort(positions)
        rows, positions = rows.take(pa.array(places)), positions[places]
    return rows, positions


# In order


@dataclass(frozen=True)
class CutSummary:
    """What a task that cuts rows tells every target.

    Attributes:
        before: its rows for lower targets.
        taken: rows that it got from the tasks of the first job.
        waiting: as in `FileAnswer`.
        error: why it has not cut all.
    """

    before: int
    taken: int
    waiting: dict[str, tuple[int, int]]
    error: TidegateError | None


Shipped = tuple[int, pa.Buffer | CutSummary]
"""A target, and what is for it: rows as an Arrow stream, or the summary of a task.

Rows of a segment name their members. Rows that a task kept have the number of a slice instead.
"""


def write_share(
    order: RangesOrder, share: int, pieces: Iterable[KeptPiece]
) -> Iterator[FileAnswer]:
    """Write every `shares`-th target, from all kept rows and all segments."""
    own = range(share, order.firsts[-1], order.shares)
    yield from write_targets(order, _cut_rows(order, order.segments, pieces, own))


def cut_rows(order: RangesOrder, task: int, pieces: Iterable[KeptPiece]) -> Iterator[Shipped]:
    """Cut kept rows, and those of this task's part of the segments, by their targets."""
    segments = order.segments[task :: order.maps]
    yield from _cut_rows(order, segments, pieces, range(order.firsts[-1]))


def _cut_rows(
    order: RangesOrder, segments: Iterable[FileRef], pieces: Iterable[KeptPiece], own: range
) -> Iterator[Shipped]:
    """Cut rows, and yield those of these targets."""
    counts, taken, error = np.zeros(order.firsts[-1], np.int64), 0, None
    waiting: dict[str, tuple[int, int]] = {}

    def ship_rows(rows: pa.Table) -> Iterator[Shipped]:
        """Yield rows for their targets, and count all."""
        targets = _find_targets(order, rows)
        counts[:] += np.bincount(targets, minlength=counts.size)
        for target, part in _divide_rows(rows, targets, own):
            for data in encode_in_pieces(part):
                yield target, data

    for rows in _join_kept_rows(pieces, _CUT_BYTES):
        taken += rows.num_rows
        yield from ship_rows(rows)
    try:
        for ref in segments:
            rows, waiting[ref.key] = _read_segment(order, ref)
            yield from ship_rows(rows)
    except TidegateError as failure:
        error = failure
    before = (np.cumsum(counts) - counts).tolist()
    for target in own:
        yield target, CutSummary(before[target], taken, waiting, error)


def _join_kept_rows(pieces: Iterable[KeptPiece], most: int) -> Iterator[pa.Table]:
    """Yield kept rows as tables of about so many bytes: small ones take as long to cut."""
    tables, size = list[pa.Table](), 0
    for piece in pieces:
        tables.append(decode_rows(piece.data))
        size += len(piece.data)
        if size >= most:
            yield pa.concat_tables(tables).combine_chunks()
            tables, size = [], 0
    if tables:
        yield pa.concat_tables(tables).combine_chunks()


def write_targets(order: RangesOrder, shipped: Iterable[Shipped]) -> Iterator[FileAnswer]:
    """Write each target whose rows and summaries are here."""
    summaries: dict[int, list[CutSummary]] = defaultdict(list)
    with closing(_TargetPieces()) as pieces:
        for target, item in shipped:
            if isinstance(item, CutSummary):
                summaries[target].append(item)
            else:
                pieces.add(target, item)
        for target in sorted(summaries):
            answer = FileAnswer(target)
            with answer.report_work():
                _write_target(answer, order, pieces.take(target), summaries[target])
            yield answer


class _TargetPieces:
    """The pieces of the targets of a task: more than `_HELD_BYTES` go to a file.

    The only target of a task is held whole, as it is sorted.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[pa.Buffer]] = defaultdict(list)
        self._size = 0
        self._file: ScratchFile | None = None
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._error: TidegateError | None = None

    def add(self, target: int, piece: pa.Buffer) -> None:
        """Keep a piece; an error of the file is raised when pieces are taken."""
        self._held[target].append(piece)
        self._size += len(piece)
        if self._size > _HELD_BYTES and len(self._held) > 1:
            try:
                self._write_held()
            except TidegateError as error:
                self._error = error
            self._held.clear()
            self._size = 0

    def take(self, target: int) -> list[pa.Buffer]:
        """Return the pieces of a target, and keep them no longer.

        Raises:
            TransientError: the file could not be written.
        """
        if self._error is not None:
            raise self._error
        found = self._held.pop(target, [])
        for start, size in self._places.pop(target, ()):
            assert self._file is not None  # noqa: S101 - it has places
            self._file.seek(start)
            found.append(pa.py_buffer(self._file.read(size)))
        return found

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()

    def _write_held(self) -> None:
        self._file = self._file or ScratchFile()
        start = self._file.seek(0, io.SEEK_END)
        for target, pieces in self._held.items():
            for piece in pieces:
                size = self._file.write(piece)
                self._places[target].append((start, size))
                start += size


def _write_target(
    answer: FileAnswer,
    order: RangesOrder,
    pieces: list[pa.Buffer],
    summaries: list[CutSummary],
) -> None:
    for one in summaries:
        answer.waiting |= one.waiting
        if one.error is not None:
            raise one.error
    taken = sum(one.taken for one in summaries)
    _require_all_rows(order, taken, sum(order.kept.values()))
    if not pieces:
        return
    rows = sort_rows_in_order(_join_pieces(order, pieces))
    if answer.number >= order.firsts[2]:
        _write_waiting(answer, order, rows)
        return
    first = sum(one.before for one in summaries) + order.position
    _write_events(answer, order, rows, np.arange(first, first + rows.num_rows))


def _join_pieces(order: RangesOrder, pieces: list[pa.Buffer]) -> pa.Table:
    """All rows of a target, with their members."""
    found = [decode_rows(piece) for piece in pieces]
    kept = [rows for rows in found if "_slice" in rows.column_names]
    tables = [rows for rows in found if "_slice" not in rows.column_names]
    if kept:
        named = _add_members(order, pa.concat_tables(kept))
        tables.append(named.select([*order.spec.columns, *_KEYS, "_late"]))
    return pa.concat_tables(tables)


def _divide_rows(
    rows: pa.Table, targets: NDArray[np.int64], own: range
) -> Iterator[tuple[int, pa.Table]]:
    """Yield some of the targets, with the rows for each."""
    kind = np.int16 if own.stop <= 1 << 15 else np.int64  # two bytes are sorted in linear time
    places = np.argsort(targets.astype(kind), kind="stable")
    ends = np.cumsum(np.bincount(targets, minlength=own.stop))
    for target in own:
        start = ends[target - 1] if target else 0
        if ends[target] - start == rows.num_rows > 0:
            yield target, rows
        elif ends[target] > start:
            yield target, rows.take(pa.array(places[start : ends[target]]))


def _find_targets(order: RangesOrder, rows: pa.Table) -> NDArray[np.int64]:
    times, late = rows["_et"].to_numpy(), rows["_late"].to_numpy()
    late_bounds, leaving_bounds, staying_bounds = order.ranges
    # The rows that leave end where those begin that stay.
    bounds = (*leaving_bounds, order.after, *staying_bounds)
    # Rows that a task kept are of the epoch's section.
    waited = "_section" in rows.column_names
    sections = rows["_section"].to_numpy() if waited else np.full(1, order.section)
    targets = np.zeros(rows.num_rows, np.int64)
    for section in np.unique(sections).tolist():
        own = sections == section if waited else np.ones(rows.num_rows, bool)
        for first, marks, chosen in ((0, late_bounds, late), (order.firsts[1], bounds, ~late)):
            ends = np.array([mark.bound_section(section) for mark in marks], np.int64)
            targets[own & chosen] = first + np.searchsorted(ends, times[own & chosen], side="right")
    return targets


def sort_rows_in_order(rows: pa.Table) -> pa.Table:
    """Rows by section, event time, source, partition and position."""
    rows = rows.unify_dictionaries().combine_chunks()
    partitions = rows["_partition"].chunk(0)
    names = partitions.dictionary.to_pylist()
    ranks = {name: rank for rank, name in enumerate(sorted(set(names)))}
    rank = np.array([ranks[name] for name in names], np.int64)[partitions.indices.to_numpy()]
    members = rows["_so"].to_numpy().astype(np.int64) * len(ranks) + rank
    keys = [rows["_seq"].to_numpy(), members, rows["_et"].to_numpy(), rows["_section"].to_numpy()]
    # A key that is the same in all rows costs as much as others.
    keys = [key for key in keys if (key != key[0]).any()]
    return rows.take(pa.array(np.lexsort(keys))) if keys else rows


def _read_segment(order: RangesOrder, ref: FileRef) -> tuple[pa.Table, tuple[int, int]]:
    """The rows of a segment that have a target, and its counts of `FileAnswer.waiting`.

    Raises:
        FileUnreadableError: it is damaged.
        TransientError: the store does not answer.
    """
    read = read_parquet_object(open_task_store(order.store), ref.key, ref.sha256)
    sections, times = read["_section"].to_numpy(), read["_et"].to_numpy()
    here, below = (_find_rows_from(sections, times, mark) for mark in (order.before, order.after))
    # Rows below `before` left in an earlier epoch, although their segment still holds them.
    chosen = here if ref.key in order.merged else here & ~below
    chosen_rows = _conform_segment(order.spec, read.filter(pa.array(chosen)))
    return chosen_rows, (int(here.sum()), int(below.sum()))


def _find_rows_from(sections: _Ints, times: _Ints, mark: ReleaseMark) -> NDArray[np.bool_]:
    same = (sections == mark.section) & (times >= mark.time)
    found: NDArray[np.bool_] = (sections > mark.section) | same
    return found


def _conform_segment(spec: PipelineSpec, read: pa.Table) -> pa.Table:
    """Rows of a segment as those of a unit; a column that is younger is null."""
    columns = {
        name: get_column_or_nulls(read, name, to_arrow_type(kind))
        for name, kind in spec.columns.items()
    }
    columns |= {name: read[name] for name in _KEYS}
    columns |= {name: read[name].dictionary_encode() for name in ("_source", "_partition")}
    return pa.table({**columns, "_late": np.zeros(read.num_rows, bool)})


# The rows of both


def _add_members(order: EventsOrder, rows: pa.Table) -> pa.Table:
    """Name the members of rows that tasks have kept."""
    indexes = sorted(order.members)
    members = [order.members[index] for index in indexes]
    codes = np.searchsorted(indexes, rows["_slice"].to_numpy()).astype(np.int32)
    columns = {
        "_section": np.full(rows.num_rows, order.section, np.int64),
        "_tardy": np.array([one.tardy for one in members])[codes],
        "_so": np.array([one.place for one in members], np.int32)[codes],
        "_source": pa.array([one.source for one in members], _NAMES).take(pa.array(codes)),
        "_partition": pa.array([one.partition for one in members], _NAMES).take(pa.array(codes)),
    }
    return pa.table({**dict(zip(rows.column_names, rows.columns, strict=True)), **columns})


def _write_events(answer: FileAnswer, order: EventsOrder, rows: pa.Table, positions: _Ints) -> None:
    late = rows["_late"].to_numpy()
    columns = {name: rows[name] for name in order.spec.columns}
    for name in order.spec.row_columns.keys() - order.spec.columns.keys():
        columns[name] = rows["_et"].cast(TIMESTAMP_UTC)
    attempt = order.folders.attempt
    columns |= {
        "position": positions,
        "section": rows["_section"],
        "_late": pa.array(late | rows["_tardy"].to_numpy()),
        "_source": rows["_source"].cast(pa.string()),
        "_partition": rows["_partition"].cast(pa.string()),
        "_seq": rows["_seq"],
        "_timeline": np.full(rows.num_rows, attempt.timeline, np.int32),
        "_epoch": np.full(rows.num_rows, attempt.slot, np.int64),
    }
    stem = f"{order.folders.table_prefix(EVENTS)}part-{answer.number:05d}"
    time_column = order.spec.event_time_column
    kind = f"table:{EVENTS}"
    file = store_task_rows(
        order.store, pa.table(columns), stem, kind, time_column, {}, answer.footers
    )
    answer.files += (file,)
    for one in pc.value_counts(columns["_source"]).to_pylist():
        answer.counts[one["values"]] += one["counts"]
    answer.flagged += int(late.sum())
    newest = _find_newest(rows.filter(pa.array(~late)) if late.any() else rows)
    answer.newest = max(filter(None, (answer.newest, newest)), default=None)


def _find_newest(rows: pa.Table) -> ReleaseMark | None:
    if not rows.num_rows:
        return None
    sections, times = rows["_section"].to_numpy(), rows["_et"].to_numpy()
    section = int(sections.max())
    return ReleaseMark(section, int(times[sections == section].max()))


def _write_waiting(answer: FileAnswer, order: RangesOrder, rows: pa.Table) -> None:
    sections = rows["_section"]
    extra = {"section_min": sections[0].as_py(), "section_max": sections[-1].as_py()}
    columns = {name: rows[name] for name in (*order.spec.columns, *_KEYS)}
    columns |= {name: rows[name].cast(pa.string()) for name in ("_source", "_partition")}
    stem = f"{order.folders.segment_stem(ORDER_KIND)}-{answer.number:05d}"
    table = pa.table(columns)
    answer.files += (store_task_rows(order.store, table, stem, ORDER_KIND, "_et", extra),)
