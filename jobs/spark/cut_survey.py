"""Step 2: what a cut holds, per member.

Times, kinds and conditions are looked at: by NumPy where a missing event time is all that can be
special, else by DuckDB (some 0.2 s for a million rows; the lateness sketch counts every row,
whatever the size of the cut), or, where a value may not fit its type, by one Spark job.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from tidegate.errors import PoisonError, get_first_line
from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.engine.errors import RULE_FAILED as BROKEN_RULE
from tidegate.jobs.engine.interfaces import split_seq
from tidegate.jobs.eventtime.decision_types import MemberSurvey, Survey
from tidegate.jobs.rules.duck_frame import ENGINE_ERRORS, Frame
from tidegate.jobs.rules.row_conditions import quote_name
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.object_decoding import BAD_REASON, BAD_TEXT
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.row_rules import FILTERED, RULE_DROPPED, RULE_FAILED
from tidegate.json_types import JsonObject, JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN

from .column_casts import cast_never_fails
from .cut_reader import (
    CutFrame,
    CutPart,
    read_in_driver,
)
from .epoch_context import collect_to_driver
from .member_scan import (
    BARRIER,
    DATA,
    DEAD,
    PUNCTUATION,
    VERDICT_SCHEMA,
    MemberColumns,
    MemberScan,
    MemberScanner,
)

NATIVE_CELLS: Final = 64_000_000
"""Values of a cut, rows times columns, up to which the driver holds its rows: about 1 GB."""
_NATIVE_TIMES = (-30_610_224_000_000_000, 253_402_300_800_000_000)
"""Years 1000 to 9999 in ticks: there both engines write times alike, and no sum leaves int64."""
_JUDGED = ("_dead", "_rule", "_warned")
_SHOWN = ("_dead", "_detail", "_json", "_p")
_log = structlog.get_logger("tidegate.driver")


@dataclass(frozen=True)
class MemberScans:
    """A survey, and what scanning the members found for the move.

    Attributes:
        staged: the cut.
        verdicts: the rows that are not plain data (`VERDICT_SCHEMA`), with `_vm`, the index of
            their slice.
        sketches: source -> lateness sketch of these rows.
        rows: the data rows with the columns of the spec, `_m`, `_seq`, `_et`, `_end`, and, if any
            has one, `_verdict` and `_mark`; None where Spark has to read them.
        judged: beside them, the rows that are dead, filtered, or break a rule, with `_m`, `_seq`,
            `_p`, `_dead`, `_detail`, `_json`, `_rule` and `_warned`. `_json` is null where only
            Spark knows it.
    """

    staged: CutFrame
    survey: Survey
    verdicts: pa.Table
    sketches: JsonObject
    rows: pa.Table | None
    judged: pa.Table | None

    def count_verdicts(self) -> Counter[tuple[int, str]]:
        """Return (index of a slice, verdict) -> rows."""
        columns = (self.verdicts[name].to_pylist() for name in ("_vm", "_verdict"))
        return Counter(zip(*columns, strict=True))


def survey_cut(
    staged: CutFrame, spec: PipelineSpec, state: JsonView, *, native: bool = False
) -> MemberScans:
    """Summarise a staged cut, and keep its rows for the move if `native`.

    `now` and the like are the engine's to fill in. It keeps no rows of more than `NATIVE_CELLS`
    values, none that need Spark's casts, and none of a cut with times outside the years 1000 to
    9999.

    Raises:
        PoisonError: a dead row of a source whose `on_bad` is ``fail``, one that breaks a rule of
            severity ``fail``, or punctuation that goes back under ``regress: error``.
        CorruptObjectsError: an object cannot be read; a TransientError for a copy of offsets.
    """
    native = native and has_room_in_driver(staged.rows, spec)
    scans, tables = _scan_members(staged, spec, state, native=native)
    members = tuple(
        replace(scans[i].survey, pending=piece.pending, done=piece.done)
        for i, piece in enumerate(staged.cut.slices)
    )
    rows = None
    if tables is not None:
        rows = pa.concat_tables(tables or [_make_no_rows(spec)], promote_options="default")
    judged = None if rows is None else _select_judged(rows)
    for found in members:
        if found.dead and has_dead_letters(judged):
            _refuse_bad_rows(staged, spec, found)
    verdicts = [VERDICT_SCHEMA.append(pa.field("_vm", pa.int32())).empty_table()]
    for index, scan in scans.items():
        places = pa.array([index] * scan.verdicts.num_rows, pa.int32())
        verdicts.append(scan.verdicts.append_column("_vm", places))
    low, high = _NATIVE_TIMES
    times = [t for m in members for t in (m.min_time, m.max_time) if t is not None]
    if rows is not None and all(low <= time < high for time in times):
        data = pc.equal(rows["_code"], DATA)
        rows = rows if pc.all(data, min_count=0).as_py() else rows.filter(data)
    else:
        rows = judged = None
    survey = Survey(now=0, members=members)
    sketches = _merge_sketches(scans)
    return MemberScans(staged, survey, pa.concat_tables(verdicts), sketches, rows, judged)


def has_room_in_driver(rows: int, spec: PipelineSpec) -> bool:
    """Whether the driver may hold so many rows, with the columns that are read or selected."""
    sources = spec.sources.values()
    width = max(len(names) for one in sources for names in (one.columns, one.row_columns))
    return rows * width <= NATIVE_CELLS


def _make_no_rows(spec: PipelineSpec) -> pa.Table:
    kinds = {name: to_arrow_type(kind) for name, kind in spec.columns.items()}
    kinds |= dict.fromkeys(("_m", "_code"), pa.int32())
    kinds |= dict.fromkeys(("_seq", "_et", "_end"), pa.int64())
    return pa.schema(kinds).empty_table()


def _select_judged(rows: pa.Table) -> pa.Table:
    found = pc.equal(rows["_code"], DEAD)
    if "_warned" in rows.column_names:
        found = pc.or_(found, pc.fill_null(pc.not_equal(rows["_warned"], ""), False))
    named = ("_m", "_seq", *_JUDGED, *_SHOWN)
    judged = rows.select([n for n in rows.column_names if n in named]).filter(found)
    for name in set(named) - set(judged.column_names):
        judged = judged.append_column(name, pa.nulls(judged.num_rows, pa.string()))
    return judged


def select_dead_letters(judged: pa.Table) -> pa.Table:
    """The rows that are dead letters, or stop the epoch; the reason is null where it is unknown."""
    counted = pc.is_in(judged["_dead"], pa.array([FILTERED, RULE_DROPPED]))
    passed = pc.and_(pc.is_null(judged["_dead"]), pc.is_valid(judged["_warned"]))
    return judged.filter(pc.invert(pc.or_(counted, passed)))


def has_dead_letters(judged: pa.Table | None) -> bool:
    """Whether some of the rows may be dead letters, or stop the epoch; None: it is not known."""
    return judged is None or select_dead_letters(judged).num_rows > 0


def _merge_sketches(scans: dict[int, MemberScan]) -> JsonObject:
    found: dict[str, Counter[str]] = {}
    for scan in scans.values():
        found.setdefault(scan.survey.member.source, Counter()).update(scan.sketch)
    return {
        source: {"gamma": GAMMA, "buckets": dict(buckets)}
        for source, buckets in found.items()
        if buckets
    }


def _scan_members(
    staged: CutFrame, spec: PipelineSpec, state: JsonView, *, native: bool
) -> tuple[dict[int, MemberScan], list[pa.Table] | None]:
    """Index of each slice -> what it holds; and the rows, None if Spark reads them.

    The rows are all that is in the slices; dead rows among them have the reason in `_dead`.
    """
    sources = {i: spec.sources[piece.member.source] for i, piece in enumerate(staged.cut.slices)}
    indexes = sorted({part.member for part in staged.parts})

    def read(index: int) -> tuple[MemberScan, pa.Table]:
        """Read one slice and scan it."""
        source = sources[index]
        flat = {name for name, kind in source.columns.items() if "<" not in kind}
        names = (flat if native else _name_marks(source)) | {BAD_REASON, OFFSET_COLUMN}
        shown = native and _is_decoded(staged, index, source)
        names |= {BAD_TEXT} if shown else set()
        frame, tables = read_in_driver(staged, spec, index, names)
        # Columns that stay as they were read need no copy by DuckDB, which keeps the order.
        kept = native and not source.select and len(tables) == 1
        own = list(map(quote_name, spec.columns)) if native and not kept else []
        own += _JUDGED if native and source.has_conditions else ()
        own += [name for name in _SHOWN if shown and name not in own]
        if len(tables) == 1 and _has_plain_points(source, tables[0]):
            rows = _select_plain_points(tables[0], source.event_time)
        else:
            rows = _select_surveyed(frame, {index: source}, own).toArrow()
        for name, kind in spec.columns.items() if kept else ():
            rows = rows.append_column(name, tables[0][name].cast(to_arrow_type(kind)))
        rows = _sort_rows(rows)
        found = scan(index, rows)
        return found, _add_verdicts(rows, found.verdicts)

    def scan(index: int, rows: pa.Table) -> MemberScan:
        """Scan one slice."""
        columns = _build_member_columns(rows) if rows.num_rows else none
        member = staged.cut.slices[index].member
        return MemberScanner(spec, member, columns, state).scan()

    # Most members of a large topic may be idle, but also those may carry punctuation.
    no_rows, filled = _make_no_rows(spec), set(indexes)
    none = _build_member_columns(no_rows)
    empty = {i: scan(i, no_rows) for i in sources if i not in filled}
    if all(_is_plain(part, sources[part.member], native=native) for part in staged.parts):
        try:
            with ThreadPoolExecutor(4) as pool:  # Arrow and DuckDB leave the other cores to others
                found = dict(zip(indexes, pool.map(read, indexes), strict=True))
            scans = {i: own for i, (own, _) in found.items()}
            return empty | scans, [table for _, table in found.values()] if native else None
        except (*ENGINE_ERRORS, pa.ArrowInvalid) as error:
            # Spark SQL reads them, or says what is wrong with the rows.
            _log.info("survey_left_to_spark", cause=get_first_line(error))
    rows = _sort_rows(collect_to_driver(_select_surveyed(staged.frame, sources, [])))
    return empty | {i: scan(i, rows.filter(pc.equal(rows["_m"], i))) for i in indexes}, None


def _is_plain(part: CutPart, source: SourceSpec, *, native: bool) -> bool:
    """Whether no value of an object can be bad, and the driver may judge its rows."""
    physical = dict(part.columns)
    # Whole rows of a cut that is too large for the driver are left to Spark SQL.
    return (native or not (source.has_conditions or source.select)) and all(
        cast_never_fails(physical.get(name, "null"), own) for name, own in source.columns.items()
    )


def _is_decoded(staged: CutFrame, member: int, source: SourceSpec) -> bool:
    """Whether all objects of a slice are decoded copies that have the declared columns only."""
    known = {*source.columns, BAD_REASON, BAD_TEXT, OFFSET_COLUMN}
    columns = [{name for name, _ in p.columns} for p in staged.parts if p.member == member]
    return all(BAD_TEXT in own and own <= known for own in columns)


def _has_plain_points(source: SourceSpec, rows: pa.Table) -> bool:
    """Whether a row without an event time is all that can be wrong or special in these rows.

    `_is_plain` holds for them.
    """
    options = (source.end_time, source.barriers, source.min_event_time)
    return all(option is None for option in options) and not (
        source.has_conditions or source.select or BAD_REASON in rows.column_names
    )


def _select_plain_points(rows: pa.Table, event_time: str) -> pa.Table:
    """What `_select_surveyed` gives of plain points, in a quarter of DuckDB's time."""
    times = rows[event_time].cast(pa.int64())
    ticks = pc.fill_null(times, TICK_MIN).to_numpy()
    code = pc.if_else(pc.is_null(times), pa.scalar(DEAD, pa.int32()), pa.scalar(DATA, pa.int32()))
    ends = np.minimum(ticks, TICK_MAX - 1) + 1
    seqs = pc.add(pc.shift_left(rows["_o"], 32), rows["_row"])
    return pa.table({"_m": rows["_m"], "_seq": seqs, "_et": ticks, "_end": ends, "_code": code})


def _name_marks(source: SourceSpec) -> set[str]:
    """The columns that say when and of which kind a row is."""
    marks = source.barriers
    names = (source.event_time, source.end_time, marks and marks.kind, marks and marks.id)
    return {name for name in names if name}


def _sort_rows(rows: pa.Table) -> pa.Table:
    seqs = rows["_seq"].to_numpy()
    return rows if (seqs[1:] > seqs[:-1]).all() else rows.sort_by("_seq")


def _add_verdicts(rows: pa.Table, verdicts: pa.Table) -> pa.Table:
    if verdicts.num_rows:
        places = pc.index_in(rows["_seq"], value_set=verdicts["_vseq"])
        for name in ("_verdict", "_mark"):
            rows = rows.append_column(name, verdicts[name].take(places))
    return rows


def _select_surveyed(frame: Frame, sources: dict[int, SourceSpec], more: list[str]) -> Frame:
    """Places, times and kinds of the rows of slices, and `more`; types of barriers if any has."""
    marks = {i: source.barriers for i, source in sources.items() if source.barriers is not None}
    kind = _select_by_slice_sql({i: own.kind for i, own in marks.items()}, "string")
    number = _select_by_slice_sql({i: own.id for i, own in marks.items() if own.id}, "bigint")
    code = (
        f"CASE WHEN _dead IS NOT NULL THEN {DEAD} WHEN _kind = 'barrier' THEN {BARRIER} "
        + f"WHEN _kind = 'punctuation' THEN {PUNCTUATION} ELSE {DATA} END AS _code"
    )
    # TICK_MIN itself cannot be written as a literal in SQL.
    ticks = [f"coalesce({c}, {TICK_MIN + 1}L - 1L) AS {c}" for c in ("_et", "_end")]
    # Columns of nulls cost as much as others.
    types = (f"{kind} AS _type", f"{number} AS _id") if marks else ()
    return frame.selectExpr("_m", "_seq", *ticks, code, *types, *more)


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
    kinds = rows["_code"].to_numpy().astype(np.int8)
    first = np.flatnonzero(kinds == BARRIER)
    barrier = None
    if first.size:
        at = int(first[0])
        barrier = (str(rows["_type"][at].as_py()), rows["_id"][at].as_py())
    return MemberColumns(
        rows["_seq"].to_numpy(), rows["_et"].to_numpy(), rows["_end"].to_numpy(), kinds, barrier
    )


def _refuse_bad_rows(staged: CutFrame, spec: PipelineSpec, found: MemberSurvey) -> None:
    """Raise for the first dead row that `on_bad` or a rule does not allow."""
    source = spec.sources[found.member.source]
    refused = [f"_rule IS NULL AND _dead <> '{FILTERED}'"] if source.on_bad == "fail" else []
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
            f"bad rows in {found.member}; the first is row {number} of {place}:"
            f" {row['_dead']} ({row['_detail']}): {row['_json']}",
            code=f"row.{row['_dead']}",  # the reason is part of it: alerts can tell them apart
            pipeline=spec.name,
            kept="everything sealed so far",
            advice="correct the row at its origin, or set on_bad: dead_letter",
        )
