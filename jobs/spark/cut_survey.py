"""Step 2: what a cut holds, per member.

Only times and kinds are looked at: as they stand in the objects (some 80 ms for a million rows;
disorder, duplicates and the lateness sketch are counted for every row, whatever the size of the
cut), or, where values must be cast and may fail, by one Spark job.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import PoisonError
from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.engine.errors import RULE_FAILED as BROKEN_RULE
from tidegate.jobs.engine.interfaces import join_seq, split_seq
from tidegate.jobs.eventtime.decision_types import MemberSurvey, Survey
from tidegate.jobs.rules.row_conditions import quote_name
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.parquet_footers import read_parquet_table
from tidegate.jobs.spark.column_casts import cast_never_fails
from tidegate.jobs.spark.cut_reader import (
    CutFrame,
    CutPart,
    unreadable_objects_error,
)
from tidegate.jobs.spark.file_writer import collect_to_driver
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
from tidegate.jobs.spec.pipeline import BarrierColumns, PipelineSpec, SourceSpec
from tidegate.jobs.spec.row_rules import RULE_FAILED
from tidegate.time_units import TICK_MIN

NATIVE_CELLS: Final = 64_000_000
"""Values of a cut, rows times columns, up to which the driver holds its rows: about 1 GB."""
_NATIVE_TIMES: Final = (-30_610_224_000_000_000, 253_402_300_800_000_000)
"""Years 1000 to 9999 in ticks: there both engines write times alike, and no sum leaves int64."""


@dataclass(frozen=True, slots=True)
class MemberScans:
    """A survey, and what scanning the members found for the move.

    Attributes:
        verdicts: index of the slice -> its rows that are not plain data.
        sketches: source -> lateness sketch of these rows.
        rows: the data rows with declared types, `_m`, `_seq`, `_et`, `_end`, and, if any has one,
            `_verdict` and `_mark`; None where Spark has to read them.
    """

    survey: Survey
    verdicts: dict[int, list[RowVerdict]] = field(default_factory=dict)
    sketches: dict[str, Any] = field(default_factory=dict)
    rows: pa.Table | None = None


def survey_cut(
    staged: CutFrame, spec: PipelineSpec, state: Mapping[str, Any], *, native: bool = False
) -> MemberScans:
    """Summarise a staged cut, and keep its rows for the move if `native`.

    `now` and the like are the engine's to fill in. It keeps no rows of more than `NATIVE_CELLS`
    values, none that need Spark's casts or have rules, and none of a cut with times outside the
    years 1000 to 9999.

    Raises:
        PoisonError: a dead row of a source whose `on_bad` is ``fail``, one that breaks a rule of
            severity ``fail``, or punctuation that goes back under ``regress: error``.
        CorruptObjectsError: an object cannot be read; a TransientError for a copy of offsets.
    """
    native = native and staged.rows * len(spec.columns) <= NATIVE_CELLS
    scans, tables = _scan_members(staged, spec, state, native=native)
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
    low, high = _NATIVE_TIMES
    times = [t for m in members for t in (m.min_time, m.max_time) if t is not None]
    safe = tables is not None and all(low <= time < high for time in times)
    rows = pa.concat_tables(tables, promote_options="default") if safe else None
    return MemberScans(Survey(now=0, members=members), verdicts, _merge_sketches(scans), rows)


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
    staged: CutFrame, spec: PipelineSpec, state: Mapping[str, Any], *, native: bool
) -> tuple[dict[int, MemberScan], list[pa.Table] | None]:
    """Index of each slice with rows -> what it holds; and the rows, None if Spark reads them."""
    sources = {i: spec.sources[piece.member.source] for i, piece in enumerate(staged.cut.slices)}
    indexes = sorted({part.member for part in staged.parts})

    def scan(index: int, rows: MemberColumns) -> MemberScan:
        """Scan one slice."""
        return scan_member(sources[index], staged.cut.slices[index].member, rows, state)

    if not all(_is_cast_safe(part, sources[part.member]) for part in staged.parts):
        columns = _read_cast_columns(staged, sources, indexes)
        return {i: scan(i, rows) for i, rows in columns.items()}, None
    types = pa.schema({c: to_arrow_type(t) for c, t in spec.columns.items()} if native else {})

    def read_and_scan(index: int) -> tuple[MemberScan, pa.Table | None]:
        """Read one slice and scan it."""
        own = [part for part in staged.parts if part.member == index]
        rows, table = _read_plain_columns(own, sources[index], types)
        found = scan(index, rows)
        return found, None if table is None else _add_row_places(index, table, rows, found)

    with ThreadPoolExecutor(4) as pool:  # Arrow and NumPy leave the other cores to others
        found = list(pool.map(read_and_scan, indexes))
    tables = [table for _, table in found if table is not None]
    scans = {i: own for i, (own, _) in zip(indexes, found, strict=True)}
    whole = native and len(tables) == len(found)
    return scans, [types.empty_table(), *tables] if whole else None


def _add_row_places(index: int, table: pa.Table, rows: MemberColumns, scan: MemberScan) -> pa.Table:
    """The data rows of a slice with their places, times and verdicts."""
    numbers = {"_seq": rows.seqs, "_et": rows.times, "_end": rows.ends}
    columns = {name: pa.array(values, pa.int64()) for name, values in numbers.items()}
    columns["_m"] = pa.repeat(pa.scalar(index, pa.int32()), table.num_rows)
    if scan.verdicts:
        known = {verdict.seq: verdict for verdict in scan.verdicts}
        found = [known.get(seq) for seq in rows.seqs.tolist()]
        columns["_verdict"] = pa.array([v and v.what for v in found], pa.string())
        columns["_mark"] = pa.array([v and v.mark for v in found], pa.int64())
    marked = pa.table({**{name: table[name] for name in table.column_names}, **columns})
    data = rows.kinds == DATA
    return marked if data.all() else marked.filter(pa.array(data))


def _read_plain_columns(
    parts: list[CutPart], source: SourceSpec, types: pa.Schema
) -> tuple[MemberColumns, pa.Table | None]:
    """Return times and kinds as the objects have them, and the rows with columns of these types.

    All of them fit the declared types; there are no rows without types, or where Arrow cannot cast
    a value.
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
                read_parquet_table(part.path, [*dict.fromkeys((*wanted, *types.names)), *places])
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
    return members, _cast_rows(tables, types)


def _cast_rows(tables: list[pa.Table], types: pa.Schema) -> pa.Table | None:
    """The columns of all objects in these types; None where there are none to read or to cast."""
    if not types.names:
        return None
    try:
        # Object by object: what one of them holds as a dictionary the next may hold as text.
        return pa.concat_tables(table.select(types.names).cast(types) for table in tables)
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
    staged: CutFrame, sources: dict[int, SourceSpec], indexes: list[int]
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
        index: _build_member_columns(rows.filter(pc.equal(rows["_m"], index))) for index in indexes
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
