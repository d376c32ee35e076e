"""Step 2: what a cut holds, per member, in at most one Spark job.

Most cuts need none: when every object's footer vouches for its rows (types that cannot fail, no null times, data rows only),
row counts and the least and greatest times stand there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812

from tidegate.jobs.eventtime.types import BarrierRow, MemberSurvey, Survey
from tidegate.jobs.spark.read import CutFrame, Part
from tidegate.jobs.spark.schema import cast_never_fails, quote
from tidegate.jobs.spark.write import fetch
from tidegate.jobs.spec.errors import PoisonError
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

__all__ = ["survey_cut"]

_TO_MICROS: Final = {"MILLIS": 1000, "MICROS": 1}


@dataclass(frozen=True, slots=True)
class _Bounds:
    rows: int
    low: int | None
    high: int | None


def survey_cut(staged: CutFrame, spec: PipelineSpec, state: Mapping[str, Any]) -> Survey:
    """Summarise a staged cut; `now` and the like are the engine's to fill in.

    Raises:
        PoisonError: a dead row of a source whose `on_bad` is ``fail``.
    """
    found = _from_footers(staged, spec)
    if found is None:
        found = _from_rows(staged, spec)
    members = tuple(
        replace(found.get(index, MemberSurvey(piece.member)), member=piece.member, pending=piece.pending, done=piece.done)
        for index, piece in enumerate(staged.cut.slices)
    )
    for piece in members:
        if piece.dead and spec.sources[piece.member.source].on_bad == "fail":
            raise _refused(staged, spec, piece)
    return Survey(now=0, members=members)


def _from_footers(staged: CutFrame, spec: PipelineSpec) -> dict[int, MemberSurvey] | None:
    found: dict[int, MemberSurvey] = {}
    for part in staged.parts:
        member = staged.cut.slices[part.member].member
        bounds = _vouched(part, spec.sources[member.source])
        if bounds is None:
            return None
        before = found.get(part.member, MemberSurvey(member))
        found[part.member] = replace(
            before,
            rows=before.rows + bounds.rows,
            min_time=_least(before.min_time, bounds.low),
            max_time=_greatest(before.max_time, bounds.high),
        )
    return found


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _greatest(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else max(a, b)


def _vouched(part: Part, source: SourceSpec) -> _Bounds | None:
    """Rows and times of an object by its footer alone; None when only its rows can tell."""
    physical = dict(part.columns)
    plain = source.max_jump is None and source.punctuation is None and part.whole
    if not plain or any(not cast_never_fails(physical.get(name, "null"), own) for name, own in source.columns.items()):
        return None
    footer = pq.read_metadata(part.path)
    place = {footer.schema.column(i).path: i for i in range(len(footer.schema))}
    low = high = None
    for group in (footer.row_group(i) for i in range(footer.num_row_groups)):
        if source.barriers is not None and not _only_data(group.column(place[source.barriers.kind]), source.barriers.data):
            return None
        times = _times(group.column(place[source.event_time]))
        if times is None:
            return None
        low, high = _least(low, times[0]), _greatest(high, times[1])
    if source.min_event_time is not None and low is not None and low < source.min_event_time:
        return None
    return _Bounds(footer.num_rows, low, high)


def _only_data(column: Any, data: str) -> bool:
    found = column.statistics
    if found is None or not found.has_null_count:
        return False
    return bool(found.null_count == column.num_values or (found.has_min_max and found.min == found.max == data))


def _times(column: Any) -> tuple[int, int] | None:
    found = column.statistics
    if found is None or not found.has_min_max or not found.has_null_count or found.null_count:
        return None
    text = str(found.logical_type).upper()  # Timestamp(isAdjustedToUTC=true, timeUnit=microseconds, ...)
    unit = 1 if "MICROSECONDS" in text else 1000 if "MILLISECONDS" in text else None
    return None if unit is None else (found.min_raw * unit, found.max_raw * unit)


def _from_rows(staged: CutFrame, spec: PipelineSpec) -> dict[int, MemberSurvey]:
    if staged.frame is None:
        return {}
    barriers = next((s.barriers for s in spec.sources.values() if s.barriers is not None), None)
    kind = "CAST(NULL AS string)" if barriers is None else f"CAST({quote(barriers.kind)} AS string)"
    number = "CAST(NULL AS bigint)" if barriers is None or barriers.id is None else f"CAST({quote(barriers.id)} AS bigint)"
    alive = "_dead IS NULL AND _kind"
    summary = staged.frame.groupBy("_m").agg(
        F.expr(f"count_if({alive} = 'data')").alias("rows"),
        F.expr(f"min(_et) FILTER (WHERE {alive} = 'data')").alias("low"),
        F.expr(f"max(_et) FILTER (WHERE {alive} = 'data')").alias("high"),
        F.expr("count_if(_dead IS NOT NULL)").alias("dead"),
        F.expr(f"min(struct(_seq, {kind} AS type, {number} AS id, _et)) FILTER (WHERE {alive} = 'barrier')").alias("barrier"),
    )
    return {row["_m"]: _member(row, staged) for row in fetch(summary).to_pylist()}


def _member(row: dict[str, Any], staged: CutFrame) -> MemberSurvey:
    barrier = row["barrier"]
    return MemberSurvey(
        member=staged.cut.slices[row["_m"]].member,
        rows=row["rows"],
        min_time=row["low"],
        max_time=row["high"],
        dead=row["dead"],
        barrier=None if barrier is None else BarrierRow(barrier["_seq"], barrier["type"], barrier["id"], barrier["_et"]),
    )


def _refused(staged: CutFrame, spec: PipelineSpec, piece: MemberSurvey) -> PoisonError:
    assert staged.frame is not None  # noqa: S101 - a dead row was counted in it
    first = staged.frame.where(f"_dead IS NOT NULL AND _source = '{piece.member.source}'").orderBy("_seq").limit(1)
    row = fetch(first.select("_dead", "_detail", "_json", "_seq", "_p")).to_pylist()[0]
    return PoisonError(
        f"{piece.dead} bad rows in {piece.member}; the first is row {row['_seq'] & 0xFFFFFFFF} of {staged.parts[row['_p']].key}: "
        f"{row['_dead']} ({row['_detail']}): {row['_json']}",
        code="row.refused",
        pipeline=spec.name,
        kept="everything sealed before this cut",
        advice="mend the object, or set the source's on_bad to dead_letter",
    )
