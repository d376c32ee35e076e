"""Tumbling and sliding windows: partial aggregates of the epoch's rows, merged with those of live segments when due.

State is append-only. A segment holds one row per (window, key) that the epoch touched: its partial aggregates, whether the
window was open then (``_on``), whether the row was an update of a closed one (``_up``), and in how many epochs it was touched
(``_n``). The number of earlier results follows from these, so nothing is written just because a window was emitted, and a
segment is dropped when every window in it is purged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.spark.aggregates import KEPT_ROWS, Plan, plan_of
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.marks import reached
from tidegate.jobs.spark.order import adjusted
from tidegate.jobs.spark.schema import quote
from tidegate.jobs.spark.write import Written
from tidegate.jobs.spec.options import LatePolicy
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN, saturate
from tidegate.jobs.spec.windows import AggregateFunction, WindowSpec

__all__ = ["WindowWork", "late_condition", "work_window"]

_MANY_SEGMENTS: Final = 16
"""More live segments than this are merged into one: every emission has to open them all."""


@dataclass(frozen=True, slots=True)
class WindowWork:
    """What one window output did in an epoch."""

    results: Written
    segments: tuple[FileRef, ...]
    written: Written


# Which windows a row belongs to


def with_spans(window: WindowSpec, frame: DataFrame) -> DataFrame:
    """Add `_w0` and `_w1`, the starts of a row's first and last window; rows that no window covers are gone."""
    size, slide, offset = window.size or 0, window.period or 1, window.offset
    first = f"{_floor(f'(_et - {size + offset}L)', slide)} + {slide + offset}L"
    if window.min_window_start is not None:
        least = window.min_window_start
        first = f"greatest({first}, {-((offset - least) // slide) * slide + offset}L)"
    last = f"{_floor(f'(_end - {1 + offset}L)', slide)} + {offset}L"
    tumbling_point = window.min_window_start is None and size == slide
    return frame.selectExpr("*", f"{first} AS _w0", f"{last} AS _w1").where("true" if tumbling_point else "_w0 <= _w1")


def _floor(value: str, period: int) -> str:
    return f"({value} - pmod({value}, {period}L))"


def late_verdict(window: WindowSpec, frontier: int) -> str:
    """Whether a row with `_w0`, `_w1` is late for the window output."""
    if window.late_unit == "event":
        return "false" if frontier <= TICK_MIN else "true" if frontier >= TICK_MAX else f"_et < {frontier}L"
    start = "_w0" if window.late_unit == "first_window" else "_w1"
    return purged(window, f"({start} + {window.size}L)", frontier)


def purged(window: WindowSpec, end: str, frontier: int) -> str:
    """Whether a window with this end is purged at the frontier."""
    return reached(end, frontier, lateness=window.lateness)


def late_condition(window: WindowSpec, frame: DataFrame, frontier: int) -> DataFrame:
    """The rows that are late for the window output and stay so."""
    late = late_verdict(window, frontier)
    if window.on_late is LatePolicy.ADJUST:
        late = f"{late} AND _end <= {frontier}L"
    return with_spans(window, frame).where(late)


def _accepted(epoch: Epoch, window: WindowSpec) -> DataFrame:
    """(row, window) pairs that join, with `_ws` and `_we`."""
    assert epoch.data is not None  # noqa: S101 - called with rows only
    frontier = epoch.order.decision.frontier_before
    frame = epoch.data
    late_possible = epoch.low is not None and epoch.low < frontier
    if late_possible and window.on_late is LatePolicy.ADJUST:
        judged = with_spans(window, frame)
        moved = adjusted(judged, epoch, f"{late_verdict(window, frontier)} AND _end > {frontier}L", frontier)
        frame = with_spans(window, moved.drop("_w0", "_w1")).where(f"_moved OR NOT ({late_verdict(window, frontier)})").drop("_moved")
    else:
        frame = with_spans(window, frame)
        if late_possible:
            frame = frame.where(f"NOT ({late_verdict(window, frontier)})")
    if window.size == window.period and all(s.end_time is None for s in epoch.spec.sources.values()):
        return frame.selectExpr("*", "_w0 AS _ws", f"_w0 + {window.size}L AS _we")
    pairs = frame.selectExpr("*", f"explode(sequence(_w0, _w1, {window.period}L)) AS _ws").selectExpr("*", f"_ws + {window.size}L AS _we")
    return pairs.where(f"NOT ({purged(window, '_we', frontier)})") if late_possible else pairs


# Partial aggregates and their merging


class _Aggregation:
    """The Spark SQL of one window's aggregates."""

    def __init__(self, epoch: Epoch, name: str) -> None:
        self.window = epoch.spec.windows[name]
        self.keys = [f"_k{i}" for i in range(len(self.window.keys))]
        self.plans: dict[str, Plan] = {
            output: plan_of(what, i, list(epoch.spec.columns)) for i, (output, what) in enumerate(self.window.aggregates.items())
        }
        self.partials = {k: v for plan in self.plans.values() for k, v in plan.partial.items()}
        self.merges = {k: v for plan in self.plans.values() for k, v in plan.merge.items()}

    @property
    def group(self) -> list[str]:
        """What identifies a window's result."""
        return ["_ws", "_we", *self.keys]

    def partial(self, rows: DataFrame, before: int, slot: int) -> DataFrame:
        """One row per window and key of these rows."""
        keys = [f"{quote(key)} AS {name}" for name, key in zip(self.keys, self.window.keys, strict=True)]
        touched = rows.selectExpr("*", *keys).groupBy(*self.group).agg(*(F.expr(v).alias(k) for k, v in self.partials.items()))
        update = f"CAST({reached('_we', before)} AS int)"
        marks = [f"1 - {update} AS _on", f"{update} AS _up", "1 AS _n", f"CAST({slot} AS bigint) AS _epoch"]
        return touched.selectExpr(*self.group, *marks, *self.partials)

    def merge(self, rows: DataFrame, *, flags: dict[str, str], use: str | None = None) -> DataFrame:
        """Merge partial rows; only those that `use` selects count for the aggregates, all count for the flags."""
        types = {field.name: field.dataType.simpleString() for field in rows.schema}
        if use is not None:
            state = [f"IF({use}, {name}, NULL) AS {name}" for name in self.partials]
            rows = rows.selectExpr(*(c for c in rows.columns if c not in self.partials), *state)
        marks = {"_on": "max(_on)", "_up": "CAST(sum(_up) AS int)", "_n": "CAST(sum(_n) AS int)", "_epoch": "min(_epoch)", **flags}
        merged = rows.groupBy(*self.group).agg(*(F.expr(v).alias(k) for k, v in {**marks, **self.merges}.items()))
        casts = {name for plan in self.plans.values() if plan.same_type for name in plan.partial}
        state = [f"CAST({name} AS {types[name]}) AS {name}" if name in casts else name for name in self.partials]
        return merged.selectExpr(*self.group, *marks, *state)

    def results(self, merged: DataFrame, revision: str, epoch: Epoch) -> DataFrame:
        """Result rows as readers see them."""
        sql = {o: a for o, a in self.window.aggregates.items() if a.function is AggregateFunction.SQL}
        if sql:
            merged = self._with_sql(merged, sql)
        values = [f"{'_sql_' + output if output in sql else plan.final} AS {quote(output)}" for output, plan in self.plans.items()]
        own = ["timestamp_micros(_ws) AS window_start", "timestamp_micros(_we) AS window_end", f"CAST({revision} AS int) AS revision"]
        keys = [f"{name} AS {quote(key)}" for name, key in zip(self.keys, self.window.keys, strict=True)]
        replaces = "_replaces AS replaces" if "_replaces" in merged.columns else "CAST(NULL AS array<string>) AS replaces"
        return merged.selectExpr(*keys, *own, replaces, *values, *epoch.provenance()[3:])

    def _with_sql(self, merged: DataFrame, sql: dict[str, Any]) -> DataFrame:
        """Any SQL aggregate: over the kept rows, laid out again."""
        rows = merged.selectExpr(*self.group, f"explode(array_sort({KEPT_ROWS})) AS _row").selectExpr(*self.group, "_row.v.*")
        found = rows.groupBy(*self.group).agg(*(F.expr(a.expression).alias(f"_sql_{o}") for o, a in sql.items()))
        renamed = found.selectExpr(*(f"{c} AS _j{c}" for c in self.group), *(f"_sql_{o}" for o in sql))
        same = reduce(lambda a, b: a & b, (F.expr(f"{c} <=> _j{c}") for c in self.group))
        return merged.join(renamed, same, "left")


# One epoch of one window output


def work_window(epoch: Epoch, name: str) -> WindowWork:
    """Fold the epoch's rows into the window's state and write the results that are due."""
    decision, window = epoch.order.decision, epoch.spec.windows[name]
    kind, aggregation = f"window:{name}", _Aggregation(epoch, name)
    live = epoch.segments(kind)
    fresh: pa.Table | DataFrame | None = None
    written = Written((), ())
    if epoch.data is not None:
        fresh = epoch.result(aggregation.partial(_accepted(epoch, window), decision.frontier_before, epoch.order.epoch), epoch.staged.rows)
        written = _segment(epoch, kind, fresh)
    results = _emit(epoch, name, aggregation, live, written)
    segments = [ref for ref in (*live, *written.refs) if not _purged(window, ref.max_time, decision.frontier_after)]
    return WindowWork(results, tuple(segments), written)


def _segment(epoch: Epoch, kind: str, rows: pa.Table | DataFrame) -> Written:
    return epoch.writer.segment(kind, rows, "_we")


def _purged(window: WindowSpec, end: int | None, frontier: int) -> bool:
    if end is None or (window.lateness is not None and frontier == TICK_MAX):
        return True
    return window.lateness is not None and saturate(end + window.lateness) <= frontier


def _closed(end: int, frontier: int) -> bool:
    return frontier == TICK_MAX or end <= frontier


def _emit(epoch: Epoch, name: str, aggregation: _Aggregation, live: list[FileRef], fresh: Written) -> Written:
    """Merge what is due, at most one result per window."""
    window, before, after = aggregation.window, epoch.order.decision.frontier_before, epoch.order.decision.frontier_after
    ends = [ref.min_time for ref in fresh.refs if ref.min_time is not None]
    needed = [ref for ref in live if _may_be_due(window, ref, ends, before, after)]
    if not needed and not _any_due(window, ends, after):
        return Written((), ())
    rows = _state(epoch, needed, fresh)
    if rows is None:
        return Written((), ())
    rows = rows.where(f"NOT ({purged(window, '_we', before)})").where(_range(window, ends, before, after))
    due, revision = _due(window, before, after)
    use = f"_new OR NOT ({reached('_we', before)})" if window.revisions == "delta" and window.emit == "close" else None
    if window.revisions == "delta" and window.emit != "close":
        use = "_new"
    merged = aggregation.merge(rows, flags={"_new": "max(_new)"}, use=use).where(due)
    results = aggregation.results(merged, revision.replace("{epoch}", str(epoch.order.epoch)), epoch)
    size = sum(ref.rows for ref in (*needed, *fresh.refs))
    return epoch.writer.table(name, epoch.result(results, size), "window_end")


def _state(epoch: Epoch, needed: list[FileRef], fresh: Written) -> DataFrame | None:
    frames = []
    old = epoch.load(needed)
    if old is not None:
        frames.append(old.selectExpr("*", "false AS _new"))
    new = epoch.load([], list(fresh.paths))
    if new is not None:
        frames.append(new.selectExpr("*", "true AS _new"))
    return reduce(DataFrame.unionByName, frames) if frames else None


def _due(window: WindowSpec, before: int, after: int) -> tuple[str, str]:
    """(which merged windows have a result now, the number of their earlier results)."""
    match window.emit:
        case "each_epoch":
            return "_new", "_n - 1"
        case "complete":
            return "true", "{epoch}L - _epoch"
        case _:
            return f"({reached('_we', after)}) AND (_new OR NOT ({reached('_we', before)}))", "_on + _up - 1"


def _range(window: WindowSpec, ends: list[int], before: int, after: int) -> str:
    """Windows outside this range have no result now; Parquet skips them."""
    if window.emit == "complete":
        return "true"
    touched = f"_we >= {min(ends)}L" if ends else "false"
    if window.emit == "each_epoch":
        return touched
    return f"({reached('_we', after)}) AND ({touched} OR NOT ({reached('_we', before)}))"


def _may_be_due(window: WindowSpec, ref: FileRef, ends: list[int], before: int, after: int) -> bool:
    if ref.min_time is None or ref.max_time is None or _purged(window, ref.max_time, before):
        return False
    if window.emit == "complete":
        return True
    touched = bool(ends) and ref.max_time >= min(ends)
    if window.emit == "each_epoch":
        return touched
    return _closed(ref.min_time, after) and (touched or not _closed(ref.max_time, before))


def _any_due(window: WindowSpec, ends: list[int], after: int) -> bool:
    return any(window.emit != "close" or _closed(end, after) for end in ends)
