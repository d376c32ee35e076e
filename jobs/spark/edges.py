"""Edge events on Spark: what is open is a segment of state, and what lasts joins the windows beside the other rows (decision 19).

1. The edges of the cut that are on time meet those that earlier epochs left open.
2. In its partition and under its keys each start ends at the first end behind it: one pass over the rows, from the back.
3. Starts without an end are the new segment. The others are intervals, which no later epoch needs.
4. Each window counts what has ended in all that is left of it, and what is open in the windows that close now.

Without edges in the cut the segment stays as it is, and where no window closes it is not even read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.spark.cast import text
from tidegate.jobs.spark.epoch import Epoch
from tidegate.jobs.spark.marks import below, passed, reached
from tidegate.jobs.spark.schema import quote, spark_of_declared
from tidegate.jobs.spark.spans import with_spans
from tidegate.jobs.spark.write import FETCH_ROWS, Written
from tidegate.jobs.spec.edges import EdgeColumns
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN, saturate
from tidegate.jobs.spec.windows import WindowSpec

__all__ = ["EDGES_KIND", "Edges", "lasting", "others", "take_edges"]

EDGES_KIND: Final = "edges"
_PLACE: Final = ("_source", "_partition", "_seq", "_et")
_AT_ONCE: Final = 10_000
"""Windows of one edge that are laid out at a time: a frontier that jumps far ahead must not cost memory."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of one epoch.

    Attributes:
        segments: starts that are open after it.
        written: those of them that it wrote.
        open: where they lie here.
        ended: files with the starts whose end came in it, as `_until`.
    """

    segments: tuple[FileRef, ...]
    written: Written
    open: tuple[Path, ...]
    ended: tuple[Path, ...] = ()


# Which rows are edges


def _columns(spec: PipelineSpec) -> dict[str, EdgeColumns]:
    return {name: source.edges for name, source in spec.sources.items() if source.edges is not None}


def _is(spec: PipelineSpec, *ends: str) -> str:
    """Whether a row is an edge of these sorts (`start`, `end`)."""
    cases = []
    for name, edges in _columns(spec).items():
        values = ", ".join(text(getattr(edges, end)) for end in ends)
        cases.append(f"(_source = {text(name)} AND {quote(edges.kind)} IN ({values}))")
    return f"coalesce({' OR '.join(cases)}, false)"


def others(spec: PipelineSpec, frame: DataFrame) -> DataFrame:
    """The rows that are no edges."""
    return frame.where(f"NOT {_is(spec, 'start', 'end')}") if _columns(spec) else frame


# What is open and what has ended


def take_edges(epoch: Epoch) -> Edges:
    """Pair the starts and ends that are on time; a late one changes nothing."""
    live = epoch.segments(EDGES_KIND) if _columns(epoch.spec) else []
    standing = Edges(tuple(live), Written((), ()), tuple(epoch.paths(live)))
    if epoch.data is None or not _columns(epoch.spec):
        return standing
    came = epoch.writer.local(epoch.result(_came(epoch, epoch.data), epoch.staged.rows))
    if not came:
        return standing
    rows = sum(pq.read_metadata(path).num_rows for path in (*standing.open, *came))
    paired = epoch.result(_paired(epoch, standing.open, came, rows), rows)
    if isinstance(paired, pa.Table):
        is_open = pc.is_null(paired["_until"])
        ended = epoch.writer.local(paired.filter(pc.invert(is_open)))
        left: pa.Table | DataFrame = paired.filter(is_open).drop_columns(["_until"])
    else:
        ended = epoch.writer.local(paired)  # once: both what is open and what has ended is read from there
        left = _starts(epoch, ended, "_until").where("_until IS NULL").drop("_until")
    written = epoch.writer.segment(EDGES_KIND, left, "_et")
    return Edges(written.refs, written, written.paths, ended)


def _came(epoch: Epoch, data: DataFrame) -> DataFrame:
    late = below("_et", epoch.order.decision.frontier_before)
    edges = data.where(f"{_is(epoch.spec, 'start', 'end')} AND NOT ({late})")
    return edges.selectExpr(*(quote(c) for c in epoch.spec.columns), *_PLACE, f"{_is(epoch.spec, 'end')} AS _ends")


def _paired(epoch: Epoch, live: Sequence[Path], came: Sequence[Path], rows: int) -> DataFrame:
    """All starts with `_until`, when they end: null while they are open. One that would end before it began says nothing."""
    keys: dict[str, list[str]] = {}
    for name, edges in _columns(epoch.spec).items():
        for key in edges.keys:
            keys.setdefault(key, []).append(text(name))
    own = [f"IF(_source IN ({', '.join(sources)}), {quote(key)}, NULL)" for key, sources in keys.items()]
    group = ", ".join(["_source", "_partition", *own])
    behind = f"PARTITION BY {group} ORDER BY _seq DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
    frame = _starts(epoch, came, "_ends")
    if live:
        frame = _starts(epoch, live, "false AS _ends").unionAll(frame)
    if rows <= FETCH_ROWS:
        frame = frame.coalesce(1)  # no shuffle for few
    frame = frame.selectExpr("*", f"last(IF(_ends, _et, NULL), true) OVER ({behind}) AS _until")
    return frame.where("NOT _ends AND (_until IS NULL OR _until > _et)").drop("_ends")


def _starts(epoch: Epoch, files: Sequence[Path], mark: str) -> DataFrame:
    """Edges that one epoch wrote, under today's spec: a column it did not have is null, a source that is gone has no edges."""
    frame = epoch.load([], list(files))
    assert frame is not None  # noqa: S101 - called with files only
    known, declared = set(frame.columns), epoch.spec.columns.items()
    columns = [quote(c) if c in known else f"CAST(NULL AS {spark_of_declared(t)}) AS {quote(c)}" for c, t in declared]
    sources = ", ".join(text(name) for name in _columns(epoch.spec))
    return frame.where(f"_source IN ({sources})").selectExpr(*columns, *_PLACE, mark)


# What they are in


def lasting(epoch: Epoch, window: WindowSpec, edges: Edges) -> tuple[DataFrame, int] | None:
    """(edge, window) pairs that count in this epoch, with `_ws` and `_we`, and a number that they are not more than."""
    before, after = epoch.order.decision.frontier_before, epoch.order.decision.frontier_after
    frames, rows, until = [], 0, epoch.order.decision.open_until
    if edges.open and _closes_any(window, before, after):
        starts = _starts(epoch, edges.open, f"{passed(until, '_et')} AS _end")
        frames.append(_pairs(window, starts, before).where(reached("_we", after)))
        rows += sum(pq.read_metadata(path).num_rows for path in edges.open)
    if edges.ended:
        ended = _starts(epoch, edges.ended, "_until AS _end").where("_end IS NOT NULL")
        frames.append(_pairs(window, ended, before))
        rows += sum(pq.read_metadata(path).num_rows for path in edges.ended)
    if not frames:
        return None
    places = {name: place for place, name in enumerate(epoch.spec.sources)}
    order = " ".join(f"WHEN {text(name)} THEN {places[name]}" for name in _columns(epoch.spec))
    pairs = reduce(DataFrame.unionAll, frames).selectExpr("*", f"CASE _source {order} END AS _so")
    return pairs, rows * _most(epoch, window, edges, before, until)


def _pairs(window: WindowSpec, frame: DataFrame, before: int) -> DataFrame:
    """A row for each window that ``[_et, _end)`` overlaps and that is not closed yet: the closed ones were told with it."""
    columns = [quote(c) for c in frame.columns if c not in ("_et", "_end")]
    least = saturate(before - (window.size or 0))
    start = "_et" if least == TICK_MIN else f"greatest(_et, {passed(least, '_et')})"
    spans = with_spans(window, frame.selectExpr(*columns, "_et AS _began", f"{start} AS _et", "_end").where("_et < _end"))
    period = window.period or 1
    many = max(1, min(_AT_ONCE, TICK_MAX // 4 // period))
    spans = spans.selectExpr("*", f"explode(sequence(_w0, _w1, {many * period}L)) AS _part")
    part = f"sequence(_part, least(_w1, _part + {(many - 1) * period}L), {period}L)"
    pairs = spans.selectExpr(*columns, "_began AS _et", f"explode({part}) AS _ws")
    return pairs.selectExpr("*", f"_ws + {window.size}L AS _we").where(f"NOT ({reached('_we', before)})")


def _closes_any(window: WindowSpec, before: int, after: int) -> bool:
    """Whether the end of any window lies in what F has passed."""
    if before >= after:
        return False
    if before == TICK_MIN or after == TICK_MAX:
        return True
    size, period = window.size or 0, window.period or 1
    return (after - size - window.offset) // period > (before - size - window.offset) // period


def _most(epoch: Epoch, window: WindowSpec, edges: Edges, before: int, until: int) -> int:
    """Windows that no edge is in more than."""
    size, period = window.size or 0, window.period or 1
    starts = [ref.min_time for ref in (*epoch.segments(EDGES_KIND), *edges.segments) if ref.min_time is not None]
    starts += [] if epoch.low is None else [epoch.low]
    first = max(min(starts, default=until), before - size)
    last = max(until, TICK_MIN if epoch.high is None else epoch.high)
    return max(last - first, 0) // period + size // period + 2
