"""Summarises one slice of a cut, and gives its rows.

Times, kinds and conditions are looked at: by NumPy where a missing event time is all that can be
special, else by DuckDB (some 0.2 s for a million rows; the lateness sketch counts every row).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame
from tidegate.jobs.rules.row_conditions import quote_name
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.object_decoding import BAD_REASON
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.json_types import JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN, TIME_BOUND

from .column_casts import cast_never_fails
from .dead_rows import JUDGED, add_faults
from .member_scan import (
    BARRIER,
    DATA,
    DEAD,
    PUNCTUATION,
    MemberColumns,
    MemberScan,
    MemberScanner,
)
from .slice_reading import CutPart, add_positions, read_slice

MOST_CELLS: Final = 8_000_000
"""Values, rows times columns, up to which one process holds rows: some 200 MB in a worker."""


def scan_slice(
    spec: PipelineSpec,
    cut: Cut,
    parts: Sequence[CutPart],
    index: int,
    state: JsonView,
) -> tuple[MemberScan, pa.Table]:
    """Read one slice and scan it.

    Args:
        spec: the pipeline.
        cut: what the slice is in.
        parts: of all slices of the cut; DuckDB is proven to cast their columns (`is_cast_proven`).
        index: of the slice, which has parts.
        state: the decider's state before the epoch.

    Returns:
        What it holds, and all of its rows with `_m`, `_seq`, `_et`, `_end`, `_code`, the columns of
        the spec, `JUDGED` if the source has conditions, and `FAULTS` if there are dead letters.
        Rows that are not plain data have `_verdict` and `_mark`.
    """
    source = spec.sources[cut.slices[index].member.source]
    flat = {name for name, kind in source.columns.items() if "<" not in kind}
    frame, tables = read_slice(spec, cut, parts, index, flat | {BAD_REASON, OFFSET_COLUMN})
    fits = all(has_fitting_columns(part, source) for part in parts if part.member == index)
    # Columns that stay as they were read need no copy by DuckDB, which keeps the order.
    kept = fits and not source.select and len(tables) == 1
    own = [] if kept else list(map(quote_name, spec.columns))
    own += JUDGED if source.has_conditions else ()
    if fits and len(tables) == 1 and has_plain_points(source, tables[0]):
        rows = select_plain_points(tables[0], source.event_time)
    else:
        rows = select_surveyed(frame, source, own).toArrow()
    for name, kind in spec.columns.items() if kept else ():
        rows = rows.append_column(name, tables[0][name].cast(to_arrow_type(kind)))
    rows = sort_rows(rows)
    found = scan_rows(spec, cut, index, rows, state)
    return found, add_faults(add_verdicts(rows, found.verdicts), frame, parts)


def scan_evaluated_slice(
    spec: PipelineSpec, cut: Cut, index: int, state: JsonView, evaluated: pa.Table
) -> tuple[MemberScan, pa.Table]:
    """Scan the rows of one slice that Spark SQL has cast, selected and judged.

    Args:
        spec: the pipeline.
        cut: what the slice is in.
        index: of the slice.
        state: the decider's state before the epoch.
        evaluated: its rows with the columns of `column_casts.cast_to_declared` and of
            `list_spark_arguments`; `_json` is needed of dead letters only.

    Returns:
        What `scan_slice` returns.
    """
    if not evaluated.num_rows:
        rows = make_no_rows(spec)
        return scan_rows(spec, cut, index, rows, state), rows
    source = spec.sources[cut.slices[index].member.source]
    arguments = tuple(list_spark_arguments(spec))
    frame = add_positions(DuckFrame.from_table(evaluated), spec, cut, arguments)
    own = [*map(quote_name, spec.columns), *arguments]
    own += JUDGED if source.has_conditions else ()
    rows = sort_rows(select_surveyed(frame, source, own).toArrow())
    found = scan_rows(spec, cut, index, rows, state)
    return found, add_faults(add_verdicts(rows, found.verdicts), frame, None)


def scan_rows(
    spec: PipelineSpec, cut: Cut, index: int, rows: pa.Table, state: JsonView
) -> MemberScan:
    """Scan the rows of one slice; there may be none."""
    columns = build_member_columns(rows)
    return MemberScanner(spec, cut.slices[index].member, columns, state).scan()


def keep_data_rows(rows: pa.Table) -> pa.Table:
    """The data rows among the rows of slices."""
    data = pc.equal(rows["_code"], DATA)
    return rows if pc.all(data, min_count=0).as_py() else rows.filter(data)


def make_no_rows(spec: PipelineSpec) -> pa.Table:
    """The table of `scan_slice` without rows."""
    kinds = {name: to_arrow_type(kind) for name, kind in spec.columns.items()}
    kinds |= dict.fromkeys(("_m", "_code"), pa.int32())
    kinds |= dict.fromkeys(("_seq", "_et", "_end"), pa.int64())
    return pa.schema(kinds).empty_table()


def has_fitting_columns(part: CutPart, source: SourceSpec) -> bool:
    """Whether no value of an object can be bad by its type."""
    physical = dict(part.columns)
    return all(
        cast_never_fails(physical.get(name, "null"), own) for name, own in source.columns.items()
    )


def has_plain_points(source: SourceSpec, rows: pa.Table) -> bool:
    """Whether a row without an event time is all that can be wrong or special in these rows.

    `has_fitting_columns` holds for them.
    """
    options = (source.end_time, source.barriers, source.min_event_time)
    is_special = any(option is not None for option in options)
    if is_special or source.has_conditions or source.select or BAD_REASON in rows.column_names:
        return False
    ends = pc.min_max(rows[source.event_time].cast(pa.int64())).as_py().values()
    return all(end is None or abs(end) <= TIME_BOUND for end in ends)


def select_plain_points(rows: pa.Table, event_time: str) -> pa.Table:
    """What `select_surveyed` gives of plain points, in a quarter of DuckDB's time."""
    times = rows[event_time].cast(pa.int64())
    ticks = pc.fill_null(times, TICK_MIN).to_numpy()
    code = pc.if_else(pc.is_null(times), pa.scalar(DEAD, pa.int32()), pa.scalar(DATA, pa.int32()))
    ends = np.minimum(ticks, TICK_MAX - 1) + 1
    seqs = pc.add(pc.shift_left(rows["_o"], 32), rows["_row"])
    return pa.table({"_m": rows["_m"], "_seq": seqs, "_et": ticks, "_end": ends, "_code": code})


def sort_rows(rows: pa.Table) -> pa.Table:
    """Rows in the order of their positions."""
    seqs = rows["_seq"].to_numpy()
    return rows if (seqs[1:] > seqs[:-1]).all() else rows.sort_by("_seq")


def add_verdicts(rows: pa.Table, verdicts: pa.Table) -> pa.Table:
    """Add `_verdict` and `_mark` to the rows of a slice, if any of them has a verdict."""
    if verdicts.num_rows:
        places = pc.index_in(rows["_seq"], value_set=verdicts["_vseq"])
        for name in ("_verdict", "_mark"):
            rows = rows.append_column(name, verdicts[name].take(places))
    return rows


def select_surveyed(frame: Frame, source: SourceSpec, more: list[str]) -> Frame:
    """Places, times and kinds of the rows of a slice, and `more`; types of barriers if it has."""
    code = (
        f"CASE WHEN _dead IS NOT NULL THEN {DEAD} WHEN _kind = 'barrier' THEN {BARRIER} "
        + f"WHEN _kind = 'punctuation' THEN {PUNCTUATION} ELSE {DATA} END AS _code"
    )
    # TICK_MIN itself cannot be written as a literal in SQL.
    ticks = [f"coalesce({c}, {TICK_MIN + 1}L - 1L) AS {c}" for c in ("_et", "_end")]
    types: list[str] = []
    # Columns of nulls cost as much as others.
    if (marks := source.barriers) is not None:
        number = quote_name(marks.id) if marks.id else "NULL"
        types.append(f"CAST({quote_name(marks.kind)} AS string) AS _type")
        types.append(f"CAST({number} AS bigint) AS _id")
    return frame.selectExpr("_m", "_seq", *ticks, code, *types, *more)


def build_member_columns(rows: pa.Table) -> MemberColumns:
    """The rows as `MemberScanner` takes them."""
    kinds = rows["_code"].to_numpy().astype(np.int8)
    first = np.flatnonzero(kinds == BARRIER)
    barrier = None
    if first.size:
        at = int(first[0])
        barrier = (str(rows["_type"][at].as_py()), rows["_id"][at].as_py())
    return MemberColumns(
        rows["_seq"].to_numpy(), rows["_et"].to_numpy(), rows["_end"].to_numpy(), kinds, barrier
    )
