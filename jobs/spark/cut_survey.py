"""Step 2: what a cut holds, per member.

Times, kinds and conditions are looked at: by NumPy where a missing event time is all that can be
special, else by DuckDB (some 0.2 s for a million rows; the lateness sketch counts every row,
whatever the size of the cut), or, where a value may not fit its type, by one Spark job.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from tidegate.errors import PoisonError, get_first_line
from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.engine.errors import RULE_FAILED as BROKEN_RULE
from tidegate.jobs.engine.interfaces import split_seq
from tidegate.jobs.eventtime.decision_types import MemberSurvey, Survey
from tidegate.jobs.rows.member_scan import DEAD, VERDICT_SCHEMA, MemberScan
from tidegate.jobs.rows.slice_scan import (
    JUDGED,
    MOST_CELLS,
    SHOWN,
    has_safe_times,
    is_plain,
    keep_data_rows,
    make_no_rows,
    scan_rows,
    scan_slice,
    select_surveyed,
    sort_rows,
)
from tidegate.jobs.rules.duck_frame import ENGINE_ERRORS
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.row_rules import FILTERED, RULE_DROPPED, RULE_FAILED
from tidegate.json_types import JsonObject, JsonView

from .cut_reader import CutFrame
from .epoch_context import collect_to_driver

NATIVE_CELLS: Final = MOST_CELLS
"""Values of a cut up to which the driver holds its rows."""
_log = structlog.get_logger("tidegate.driver")


class EpochScans(Protocol):
    """What the outputs of an epoch need to know of its survey; see `MemberScans`."""

    @property
    def survey(self) -> Survey:
        """The survey."""

    @property
    def sketches(self) -> JsonObject:
        """Source -> lateness sketch."""

    @property
    def judged(self) -> pa.Table | None:
        """The rows that are not plain data; None: only Spark knows them."""

    def count_verdicts(self) -> Counter[tuple[int, str]]:
        """Return (index of a slice, verdict) -> rows."""


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
        rows = pa.concat_tables(tables or [make_no_rows(spec)], promote_options="default")
    judged = None if rows is None else _select_judged(rows)
    for found in members:
        if found.dead and has_dead_letters(judged):
            refuse_bad_rows(staged, spec, found)
    verdicts = [VERDICT_SCHEMA.append(pa.field("_vm", pa.int32())).empty_table()]
    for index, scan in scans.items():
        places = pa.array([index] * scan.verdicts.num_rows, pa.int32())
        verdicts.append(scan.verdicts.append_column("_vm", places))
    if rows is not None and all(has_safe_times(m.min_time, m.max_time) for m in members):
        rows = keep_data_rows(rows)
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


def _select_judged(rows: pa.Table) -> pa.Table:
    found = pc.equal(rows["_code"], DEAD)
    if "_warned" in rows.column_names:
        found = pc.or_(found, pc.fill_null(pc.not_equal(rows["_warned"], ""), False))
    named = ("_m", "_seq", *JUDGED, *SHOWN)
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
        return scan_slice(spec, staged.cut, staged.parts, index, state, native=native)

    def scan(index: int, rows: pa.Table) -> MemberScan:
        """Scan one slice."""
        return scan_rows(spec, staged.cut, index, rows, state)

    # Most members of a large topic may be idle, but also those may carry punctuation.
    no_rows, filled = make_no_rows(spec), set(indexes)
    empty = {i: scan(i, no_rows) for i in sources if i not in filled}
    if all(is_plain(part, sources[part.member], native=native) for part in staged.parts):
        try:
            with ThreadPoolExecutor(4) as pool:  # Arrow and DuckDB leave the other cores to others
                found = dict(zip(indexes, pool.map(read, indexes), strict=True))
            scans = {i: own for i, (own, _) in found.items()}
            return empty | scans, [table for _, table in found.values()] if native else None
        except (*ENGINE_ERRORS, pa.ArrowInvalid) as error:
            # Spark SQL reads them, or says what is wrong with the rows.
            _log.info("survey_left_to_spark", cause=get_first_line(error))
    rows = sort_rows(collect_to_driver(select_surveyed(staged.frame, sources, [])))
    return empty | {i: scan(i, rows.filter(pc.equal(rows["_m"], i))) for i in indexes}, None


def refuse_bad_rows(staged: CutFrame, spec: PipelineSpec, found: MemberSurvey) -> None:
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
