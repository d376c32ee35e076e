"""Step 2: what a cut holds, per member.

Only times and kinds are looked at: as they stand in the objects (some 80 ms for a million rows;
disorder, duplicates and the lateness sketch are counted for every row, whatever the size of the
cut), or, where values must be cast and may fail, by one Spark job.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from tidegate.errors import PoisonError
from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.engine.errors import RULE_FAILED as BROKEN_RULE
from tidegate.jobs.engine.interfaces import join_seq, split_seq
from tidegate.jobs.eventtime.decision_types import MemberSurvey, Survey
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.parquet_footers import read_parquet_table
from tidegate.jobs.spark.column_casts import cast_never_fails, quote_name
from tidegate.jobs.spark.cut_reader import (
    CutFrame,
    CutPart,
    Ints,
    SparkSessions,
    read_rows_at,
    unreadable_objects_error,
)
from tidegate.jobs.spark.file_writer import FETCH_ROWS, collect_to_driver
from tidegate.jobs.spark.member_scan import (
    BARRIER,
    DATA,
    DEAD,
    PUNCTUATION,
    MemberColumns,
    MemberScan,
    RowVerdict,
    scan_member,
)
from tidegate.jobs.spark.native_windows import FoldedSlice, WindowFold, fold_slice
from tidegate.jobs.spec.pipeline import BarrierColumns, PipelineSpec, SourceSpec
from tidegate.jobs.spec.row_rules import RULE_FAILED
from tidegate.time_units import TICK_MAX, TICK_MIN


@dataclass(frozen=True, slots=True)
class MemberScans:
    """A survey, and what scanning the members found for the move.

    Attributes:
        verdicts: index of the slice -> its rows that are not plain data.
        sketches: source -> lateness sketch of these rows.
        times: index of the slice -> event times of its rows, TICK_MAX for what is no data row;
            empty if only Spark knows them.
        folded: index of the slice -> its rows folded into windows; None where Spark SQL has to.
        frontier: what they were judged by.
    """

    survey: Survey
    verdicts: dict[int, list[RowVerdict]] = field(default_factory=dict)
    sketches: dict[str, Any] = field(default_factory=dict)
    times: dict[int, Any] = field(default_factory=dict)
    folded: dict[int, FoldedSlice] | None = None
    frontier: int = TICK_MIN


@dataclass(frozen=True, slots=True)
class _ScannedCut:
    """The slices with rows: what was found in each, and their columns if no cast was needed."""

    scans: dict[int, MemberScan]
    columns: dict[int, MemberColumns] = field(default_factory=dict)
    folded: dict[int, FoldedSlice] | None = None

    def list_times(self) -> dict[int, Any]:
        """Index of the slice -> event times, TICK_MAX for what is no data row."""
        # A data row of that time hides which rows are known.
        if any(scan.survey.max_time == TICK_MAX for scan in self.scans.values()):
            return {}
        return {
            i: np.where(rows.kinds == DATA, rows.times, TICK_MAX)
            for i, rows in self.columns.items()
        }


def survey_cut(
    staged: CutFrame,
    spec: PipelineSpec,
    state: Mapping[str, Any],
    folds: Mapping[str, WindowFold] | None = None,
) -> MemberScans:
    """Summarise a staged cut, and fold its rows into windows in the same pass.

    `now` and the like are the engine's to fill in. `folds` are of the window outputs that need no
    Spark SQL.

    Raises:
        PoisonError: a dead row of a source whose `on_bad` is ``fail``, or one that breaks a rule
            of severity ``fail``.
    """
    frontier = state.get("output", {}).get("value", TICK_MIN)
    found_rows = _scan_members(staged, spec, state, folds or {}, frontier)
    scans = found_rows.scans
    members = tuple(
        replace(
            scans[i].survey if i in scans else _survey_empty_member(spec, piece.member, state),
            pending=piece.pending,
            done=piece.done,
        )
        for i, piece in enumerate(staged.cut.slices)
    )
    for found in members:
        if found.dead:
            _refuse_bad_rows(staged, spec, found)
    verdicts = {i: scan.verdicts for i, scan in scans.items() if scan.verdicts}
    return MemberScans(
        Survey(now=0, members=members),
        verdicts,
        _merge_sketches(scans),
        found_rows.list_times(),
        found_rows.folded if folds else None,
        frontier,
    )


def _survey_empty_member(spec: PipelineSpec, member: Any, state: Mapping[str, Any]) -> MemberSurvey:
    none = np.zeros(0, dtype=np.int64)
    return scan_member(
        spec.sources[member.source],
        member,
        MemberColumns(none, none, none, none.astype(np.int8)),
        state,
    ).survey


def _merge_sketches(scans: dict[int, MemberScan]) -> dict[str, Any]:
    found: dict[str, dict[str, int]] = {}
    for scan in scans.values():
        buckets = found.setdefault(scan.survey.member.source, {})
        for bucket, rows in scan.sketch.items():
            buckets[bucket] = buckets.get(bucket, 0) + rows
    return {
        source: {"gamma": GAMMA, "buckets": buckets} for source, buckets in found.items() if buckets
    }


def _is_cast_safe(part: CutPart, source: SourceSpec) -> bool:
    physical = dict(part.columns)
    # Only Spark SQL knows what the rules of a source say of a row.
    return not source.rules and all(
        cast_never_fails(physical.get(name, "null"), own) for name, own in source.columns.items()
    )


def _scan_members(
    staged: CutFrame,
    spec: PipelineSpec,
    state: Mapping[str, Any],
    folds: Mapping[str, WindowFold],
    frontier: int,
) -> _ScannedCut:
    if not staged.parts:
        return _ScannedCut({}, folded={})
    sources = {i: spec.sources[piece.member.source] for i, piece in enumerate(staged.cut.slices)}
    if not all(_is_cast_safe(part, sources[part.member]) for part in staged.parts):
        columns = _read_cast_columns(staged, sources)
        return _ScannedCut(
            {i: _scan_slice(staged, sources, i, rows, state) for i, rows in columns.items()}
        )
    types = {name: kind for fold in folds.values() for name, kind in fold.inputs.items()}

    def scan_and_fold(index: int) -> tuple[MemberColumns, MemberScan, FoldedSlice | None]:
        own = [part for part in staged.parts if part.member == index]
        rows, inputs = _read_plain_columns(own, sources[index], types)
        found = _scan_slice(staged, sources, index, rows, state)
        if (
            found.verdicts or not folds or inputs is None
        ):  # rows that are set aside are moved by Spark SQL
            return rows, found, None
        data = rows.kinds == DATA
        source = staged.cut.slices[index].member.source
        return (
            rows,
            found,
            fold_slice(
                folds,
                source,
                inputs.filter(pa.array(data)) if inputs.num_columns and not data.all() else inputs,
                rows.times[data],
                frontier,
            ),
        )

    with ThreadPoolExecutor(4) as pool:  # Arrow, NumPy and DuckDB leave the other cores to others
        indexes = _list_slice_indexes(staged)
        found = dict(zip(indexes, pool.map(scan_and_fold, indexes), strict=True))
    folded = {i: own for i, (_, _, own) in found.items() if own is not None}
    return _ScannedCut(
        {i: own for i, (_, own, _) in found.items()},
        {i: own for i, (own, _, _) in found.items()},
        folded if len(folded) == len(found) else None,
    )


def _scan_slice(
    staged: CutFrame,
    sources: dict[int, SourceSpec],
    index: int,
    rows: MemberColumns,
    state: Mapping[str, Any],
) -> MemberScan:
    return scan_member(sources[index], staged.cut.slices[index].member, rows, state)


def _list_slice_indexes(staged: CutFrame) -> list[int]:
    return sorted({part.member for part in staged.parts})


def _read_plain_columns(
    parts: list[CutPart], source: SourceSpec, more: Mapping[str, pa.DataType]
) -> tuple[MemberColumns, pa.Table | None]:
    """Return times and kinds as the objects have them, and the columns `more` in these types.

    All of them fit the declared types; the columns are None where Arrow cannot cast a value.
    """
    marks = source.barriers
    wanted = [
        source.event_time,
        *([source.end_time] if source.end_time else []),
        *([marks.kind] if marks else []),
    ]
    wanted += [marks.id] if marks is not None and marks.id else []
    tables, seqs = [], []
    for part in parts:
        try:
            places = [OFFSET_COLUMN] if part.has_row_numbers else []
            table = part.slice_rows(
                read_parquet_table(part.path, [*dict.fromkeys((*wanted, *more)), *places])
            )
        except (pa.ArrowException, OSError) as error:
            raise unreadable_objects_error([part.key]) from error
        tables.append(table)
        seqs.append(join_seq(part.ordinal, 0) + part.row_numbers(table).to_numpy())
    marked = [table.select([*dict.fromkeys(wanted)]) for table in tables]
    rows = pa.concat_tables(marked, promote_options="permissive")
    times, absent = _convert_to_ticks(rows[source.event_time])
    kinds = (
        _encode_kinds(rows[marks.kind], marks)
        if marks is not None
        else np.zeros(times.size, dtype=np.int8)
    )
    ends = times + 1
    if source.end_time is not None:
        own, open_end = _convert_to_ticks(rows[source.end_time])
        kinds[(kinds == DATA) & ~absent & ~open_end & (own <= times)] = DEAD
        ends = np.where(open_end, ends, own)
    # A barrier row needs no time.
    kinds[absent & ((kinds == DATA) | (kinds == PUNCTUATION))] = DEAD
    if source.min_event_time is not None:
        kinds[(kinds == DATA) & (times < source.min_event_time)] = DEAD
    members = MemberColumns(
        np.concatenate(seqs), times, ends, kinds, _find_first_barrier(rows, kinds, marks)
    )
    return members, _cast_inputs(tables, more)


def _cast_inputs(tables: list[pa.Table], types: Mapping[str, pa.DataType]) -> pa.Table | None:
    """These columns of all objects in these types; None where Arrow cannot cast a value."""
    try:
        # Object by object: what one of them holds as a dictionary the next may hold as text.
        return pa.concat_tables(t.select(list(types)).cast(pa.schema(types)) for t in tables)
    except pa.ArrowException:
        return None


def _convert_to_ticks(column: Any) -> tuple[Any, Any]:
    """Ticks, and where there is none (their ticks are TICK_MIN)."""
    ticks = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return pc.fill_null(ticks, TICK_MIN).to_numpy(), pc.is_null(column).to_numpy()


def _encode_kinds(column: Any, marks: BarrierColumns) -> Any:
    """Kind codes of a text column, by its few distinct values."""
    column = column.cast(pa.string()).combine_chunks()
    codes = (
        column.dictionary_encode()
        if not isinstance(column, pa.ChunkedArray)
        else column.unify_dictionaries().chunk(0)
    )
    known = {marks.data: DATA, **dict.fromkeys(marks.types, BARRIER)}
    if marks.punctuation is not None:
        known.setdefault(marks.punctuation, PUNCTUATION)
    own = np.array(
        [*(known.get(value, DEAD) for value in codes.dictionary.to_pylist()), DATA], dtype=np.int8
    )
    return own[pc.fill_null(codes.indices, len(own) - 1).to_numpy(zero_copy_only=False)]


def _find_first_barrier(
    rows: pa.Table, kinds: Any, marks: BarrierColumns | None
) -> tuple[str, int | None] | None:
    found = np.flatnonzero(kinds == BARRIER)
    if marks is None or not found.size:
        return None
    number = rows[marks.id][int(found[0])].as_py() if marks.id else None
    return str(rows[marks.kind][int(found[0])].as_py()), number


def _read_cast_columns(
    staged: CutFrame, sources: dict[int, SourceSpec]
) -> dict[int, MemberColumns]:
    """Times and kinds after the casts: one Spark job."""
    assert staged.frame is not None  # noqa: S101 - there are parts
    marks = {i: source.barriers for i, source in sources.items() if source.barriers is not None}
    kind = _select_by_slice_sql({i: own.kind for i, own in marks.items()}, "string")
    number = _select_by_slice_sql({i: own.id for i, own in marks.items() if own.id}, "bigint")
    code = (
        f"CASE WHEN _dead IS NOT NULL THEN {DEAD} WHEN _kind = 'barrier' THEN {BARRIER} "
        + f"WHEN _kind = 'punctuation' THEN {PUNCTUATION} ELSE {DATA} END AS code"
    )
    # TICK_MIN itself cannot be written as a literal in SQL.
    ticks = [f"coalesce({c}, {TICK_MIN + 1}L - 1L) AS {c}" for c in ("_et", "_end")]
    rows = collect_to_driver(
        staged.frame.selectExpr("_m", "_seq", *ticks, code, f"{kind} AS type", f"{number} AS id")
    )
    rows = rows.sort_by([("_m", "ascending"), ("_seq", "ascending")])
    return {
        index: _build_member_columns(rows.filter(pc.equal(rows["_m"], index)))
        for index in _list_slice_indexes(staged)
    }


def _select_by_slice_sql(columns: dict[int, str], kind: str) -> str:
    """Each slice's own column: sources may name theirs differently."""
    slices: dict[str, list[str]] = {}
    for index, name in columns.items():
        slices.setdefault(name, []).append(str(index))
    cases = [
        f"WHEN _m IN ({', '.join(own)}) THEN CAST({quote_name(name)} AS {kind})"
        for name, own in slices.items()
    ]
    return f"CASE {' '.join(cases)} END" if cases else f"CAST(NULL AS {kind})"


def _build_member_columns(rows: pa.Table) -> MemberColumns:
    kinds = rows["code"].to_numpy().astype(np.int8)
    first = np.flatnonzero(kinds == BARRIER)
    barrier = None
    if first.size:
        barrier = (str(rows["type"][int(first[0])].as_py()), rows["id"][int(first[0])].as_py())
    return MemberColumns(
        rows["_seq"].to_numpy(), rows["_et"].to_numpy(), rows["_end"].to_numpy(), kinds, barrier
    )


def _refuse_bad_rows(staged: CutFrame, spec: PipelineSpec, found: MemberSurvey) -> None:
    """Raise for the first dead row that `on_bad` or a rule does not allow."""
    source = spec.sources[found.member.source]
    refused = ["_rule IS NULL"] if source.on_bad == "fail" else []
    if any(rule.severity == "fail" for rule in source.rules.values()):
        refused.append(f"_dead = '{RULE_FAILED}'")
    if not refused:
        return
    assert staged.frame is not None  # noqa: S101 - a dead row was counted in it
    member = next(i for i, piece in enumerate(staged.cut.slices) if piece.member == found.member)
    wanted = f"_dead IS NOT NULL AND _m = {member} AND ({' OR '.join(refused)})"
    if found.barrier is not None:  # rows behind it belong to another epoch
        wanted += f" AND _seq < {found.barrier.seq}"
    names = ("_dead", "_detail", "_json", "_seq", "_p", "_rule")
    first = staged.frame.where(wanted).orderBy("_seq").limit(1).select(*names)
    for row in collect_to_driver(first).to_pylist():
        place, number = staged.parts[row["_p"]].key, split_seq(row["_seq"])[1]
        if row["_rule"] is not None:
            raise BROKEN_RULE(
                pipeline=spec.name,
                row=number,
                where=place,
                rule=row["_rule"],
                source=found.member,
                predicate=source.rules[row["_rule"]].predicate,
                sample=row["_json"],
            )
        raise PoisonError(
            f"{found.dead} bad rows in {found.member}; the first is row {number} of {place}:"
            f" {row['_dead']} ({row['_detail']}): {row['_json']}",
            code=f"row.{row['_dead']}",  # the reason is part of it: alerts can tell them apart
            pipeline=spec.name,
            kept="everything sealed so far",
            advice="correct the row at its origin, or set on_bad: dead_letter",
        )


# The few rows of a cut between two times, read by the driver. What can be late stands below the
# frontier, what waits for it above, and the survey has seen the time of every row. So it is known
# which rows these are, and only their row groups are read again, without a Spark job over the cut.
# Their columns are cast and judged by the same Spark SQL.


class SurveyedRows:
    """Rows of one cut, by their times.

    Attributes:
        times: index of the slice -> event times of its rows in order, TICK_MAX for what is no data
            row; empty if not known.
    """

    def __init__(
        self,
        sessions: SparkSessions,
        spec: PipelineSpec,
        staged: CutFrame,
        times: Mapping[int, Ints],
    ) -> None:
        self._sessions, self._spec, self._staged, self.times = sessions, spec, staged, times
        self._found: dict[tuple[int, int], DataFrame | None] = {}

    @property
    def row_count(self) -> int:
        """Rows of the cut whose times are known."""
        return sum(times.size for times in self.times.values())

    def fits_in_driver(self, low: int, high: int) -> bool:
        """Return whether the driver may read the rows with ``low <= time < high`` without a job."""
        if self._staged.in_driver or not self.times:
            return False
        return sum(found.size for found in self._find_positions(low, high).values()) <= FETCH_ROWS

    def read_rows(self, low: int, high: int) -> DataFrame | None:
        """The rows; None when there are none."""
        if (low, high) not in self._found:
            self._found[low, high] = read_rows_at(
                self._sessions, self._spec, self._staged, self._find_positions(low, high)
            )
        return self._found[low, high]

    def _find_positions(self, low: int, high: int) -> dict[int, Ints]:
        return {
            index: np.flatnonzero((times >= low) & (times < high))
            for index, times in self.times.items()
        }
