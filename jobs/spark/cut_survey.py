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

from tidegate.errors import get_first_line
from tidegate.jobs.advise.lag_advice import GAMMA
from tidegate.jobs.eventtime.decision_types import MemberSurvey, Survey
from tidegate.jobs.rows.dead_rows import (
    FAULTS,
    find_refused_row,
    make_refusal,
    refused_row_sql,
    select_judged,
)
from tidegate.jobs.rows.member_scan import VERDICT_SCHEMA, MemberScan
from tidegate.jobs.rows.slice_scan import (
    MOST_CELLS,
    has_safe_times,
    is_proven,
    keep_data_rows,
    make_no_rows,
    scan_rows,
    scan_slice,
    select_surveyed,
    sort_rows,
)
from tidegate.jobs.rules.duck_frame import ENGINE_ERRORS
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject, JsonView

from .cut_reader import CutFrame
from .epoch_context import collect_to_driver

NATIVE_CELLS: Final = MOST_CELLS
NATIVE_BYTES: Final = 8 * NATIVE_CELLS
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
        judged: beside them, the rows of `select_judged`.
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
    values or `NATIVE_BYTES`, none that need Spark's casts, and none of a cut with times outside
    the years 1000 to 9999.

    Raises:
        PoisonError: a dead row of a source whose `on_bad` is ``fail``, one that breaks a rule of
            severity ``fail``, or punctuation that goes back under ``regress: error``.
        CorruptObjectsError: an object cannot be read; a TransientError for a copy of offsets.
    """
    native = native and has_room_in_driver(staged.rows, spec) and staged.bytes <= NATIVE_BYTES
    scans, tables = _scan_members(staged, spec, state, native=native)
    members = tuple(
        replace(scans[i].survey, pending=piece.pending, done=piece.done)
        for i, piece in enumerate(staged.cut.slices)
    )
    rows = None
    if tables is not None:
        rows = pa.concat_tables(tables or [make_no_rows(spec)], promote_options="default")
    judged = None if rows is None else select_judged(rows)
    for index, found in enumerate(members):
        if judged is None:
            _refuse_bad_rows(staged, spec, index, found)
        elif error := find_refused_row(spec, staged.parts, index, found, judged):
            raise error
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
    width = max(source.width for source in spec.sources.values())
    return rows * width <= NATIVE_CELLS


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
    if all(is_proven(part, sources[part.member], native=native) for part in staged.parts):
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


def _refuse_bad_rows(staged: CutFrame, spec: PipelineSpec, index: int, found: MemberSurvey) -> None:
    """Raise for the first dead row that `on_bad` or a rule does not allow."""
    refused = refused_row_sql(spec, index, found)
    if refused is None:
        return
    assert staged.frame is not None  # noqa: S101 - a dead row was counted in it
    rows = staged.frame.where(refused).orderBy("_seq").limit(1).select("_seq", *FAULTS)
    for row in collect_to_driver(rows).to_pylist():
        raise make_refusal(spec, staged.parts, found, row)
