"""Edge events on Spark.

What is open is a segment of state, and what lasts joins the windows beside the other rows (decision
19).

1. The edges of the cut that are on time meet those that earlier epochs left open.
2. In its partition and under its keys each start ends at the first end behind it: one pass over the
  rows, from the back.
3. Starts without an end are the new segment. The others are intervals, which no later epoch needs.
4. Each window counts what has ended in all that is left of it, and what is open in the windows that
  close now.

Without edges in the cut the segment stays as it is, and where no window closes it is not even read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.jobs.rules.duck_frame import Frame, combine_frames
from tidegate.jobs.rules.row_conditions import (
    add_window_span,
    end_reached_sql,
    opaque_literal,
    quote_name,
    quote_text,
    time_below_sql,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import EdgeColumns
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN, saturate_ticks

from .epoch_context import FETCH_ROWS, EpochContext, OutputFiles, WrittenFiles

EDGES_KIND = "edges"
_ORIGIN_COLUMNS = ("_source", "_partition", "_seq", "_et")
_WINDOWS_PER_PART = 10_000
"""Windows of one edge that are laid out at a time.

A frontier that jumps far ahead must not cost memory.
"""


@dataclass(frozen=True)
class EpochEdges(OutputFiles):
    """The edges of one epoch; its state are the starts that are open.

    Attributes:
        open: where these lie here.
        ended: files with the starts whose end came in it, as `_until`; starts that are still open
            may be in them too, with a null there.
    """

    open: tuple[Path, ...] = ()
    ended: Sequence[Path] = ()


# Which rows are edges


def _collect_edge_columns(spec: PipelineSpec) -> dict[str, EdgeColumns]:
    return {name: source.edges for name, source in spec.sources.items() if source.edges is not None}


def _is_edge_sql(spec: PipelineSpec, *ends: str) -> str:
    """Whether a row is an edge of these sorts (`start`, `end`)."""
    cases = []
    for name, edges in _collect_edge_columns(spec).items():
        values = ", ".join(quote_text(getattr(edges, end)) for end in ends)
        cases.append(f"(_source = {quote_text(name)} AND {quote_name(edges.kind)} IN ({values}))")
    return f"coalesce({' OR '.join(cases)}, false)"


def drop_edges(spec: PipelineSpec, frame: Frame) -> Frame:
    """The rows that are no edges."""
    return (
        frame.where(f"NOT {_is_edge_sql(spec, 'start', 'end')}")
        if _collect_edge_columns(spec)
        else frame
    )


# What is open and what has ended


def pair_edges(epoch: EpochContext) -> EpochEdges:
    """Pair the starts and ends that are on time, and write what stays open as the new segment.

    A late edge changes nothing.
    """
    live = epoch.live_segments(EDGES_KIND) if _collect_edge_columns(epoch.spec) else []
    standing = EpochEdges(segments=tuple(live), open=tuple(map(epoch.locate_segment, live)))
    if epoch.data is None or not _collect_edge_columns(epoch.spec):
        return standing
    came = epoch.writer.write_scratch_files(
        epoch.collect_if_small(_select_punctual_edges(epoch, epoch.data), epoch.staged.rows)
    )
    if not came:
        return standing
    rows = sum(pq.read_metadata(path).num_rows for path in (*standing.open, *came))
    paired = epoch.collect_if_small(_match_starts_to_ends(epoch, standing.open, came, rows), rows)
    # Few rows are divided in the driver; both parts then need no second job.
    if isinstance(paired, pa.Table):
        is_open = pc.is_null(paired["_until"])
        ended = epoch.writer.write_scratch_files(paired.filter(pc.invert(is_open)))
        left: pa.Table | Frame = paired.filter(is_open).drop_columns(["_until"])
    else:
        # Once: both what is open and what has ended is read from there.
        ended = epoch.writer.write_scratch_files(paired)
        left = _load_edges(epoch, ended, "_until").where("_until IS NULL").drop("_until")
    written = epoch.writer.write_segment(EDGES_KIND, left, "_et")
    return EpochEdges(WrittenFiles(), written.refs, written, written.paths, ended)


def _select_punctual_edges(epoch: EpochContext, data: Frame) -> Frame:
    late = time_below_sql(epoch.decision.frontier_before)
    edges = data.where(f"{_is_edge_sql(epoch.spec, 'start', 'end')} AND NOT ({late})")
    return edges.selectExpr(
        *(quote_name(c) for c in epoch.spec.columns),
        *_ORIGIN_COLUMNS,
        f"{_is_edge_sql(epoch.spec, 'end')} AS _ends",
    )


def _match_starts_to_ends(
    epoch: EpochContext, live: Sequence[Path], came: Sequence[Path], rows: int
) -> Frame:
    """All starts with `_until`, when they end: null while they are open.

    One that would end before it began says nothing.
    """
    keys: dict[str, list[str]] = {}
    for name, edges in _collect_edge_columns(epoch.spec).items():
        for key in edges.keys:
            keys.setdefault(key, []).append(quote_text(name))
    own = [
        f"IF(_source IN ({', '.join(sources)}), {quote_name(key)}, NULL)"
        for key, sources in keys.items()
    ]
    group = ", ".join(["_source", "_partition", *own])
    behind = (
        f"PARTITION BY {group} ORDER BY _seq DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
    )
    frame = _load_edges(epoch, came, "_ends")
    if live:
        frame = _load_edges(epoch, live, "false AS _ends").unionByName(frame)
    if rows <= FETCH_ROWS:
        frame = frame.coalesce(1)  # no shuffle for few
    frame = frame.selectExpr("*", f"last(IF(_ends, _et, NULL), true) OVER ({behind}) AS _until")
    return frame.where("NOT _ends AND (_until IS NULL OR _until > _et)").drop("_ends")


def _load_edges(epoch: EpochContext, files: Sequence[Path], mark: str) -> Frame:
    """Edges that one epoch wrote, under today's spec.

    A column it did not have is null, a source that is gone has no edges.
    """
    frame = epoch.load_segments([], files)
    assert frame is not None  # noqa: S101 - called with files only
    sources = ", ".join(quote_text(name) for name in _collect_edge_columns(epoch.spec))
    return frame.where(f"_source IN ({sources})").selectExpr(
        *epoch.columns_of_segment(frame), *_ORIGIN_COLUMNS, mark
    )


# What they are in


def assign_intervals(
    epoch: EpochContext, window: WindowSpec, edges: EpochEdges
) -> tuple[Frame | None, int]:
    """Return the (edge, window) pairs of the epoch with `_ws`, `_we`, and a bound on the count.

    None and 0 if no interval has ended and no window closes over an open one.
    """
    before, after = epoch.decision.frontier_before, epoch.decision.frontier_after
    pairs, rows, until = None, 0, epoch.decision.open_edges_until
    # What is open is counted when a window closes, and not before: its end may still come.
    if edges.open and _closes_any_window(window, before, after):
        starts = _load_edges(epoch, edges.open, f"{opaque_literal(until, '_et')} AS _end")
        pairs = _expand_to_windows(window, starts, before).where(end_reached_sql("_we", after))
        rows += sum(pq.read_metadata(path).num_rows for path in edges.open)
    if edges.ended:
        ended = _load_edges(epoch, edges.ended, "_until AS _end").where("_end IS NOT NULL")
        pairs = combine_frames(pairs, _expand_to_windows(window, ended, before))
        rows += sum(pq.read_metadata(path).num_rows for path in edges.ended)
    if pairs is None:
        return None, 0
    places = {name: place for place, name in enumerate(epoch.spec.sources)}
    order = " ".join(
        f"WHEN {quote_text(name)} THEN {places[name]}" for name in _collect_edge_columns(epoch.spec)
    )
    pairs = pairs.selectExpr("*", f"CASE _source {order} END AS _so")
    return pairs, rows * _bound_windows_per_edge(epoch, window, edges, before, until)


def _expand_to_windows(window: WindowSpec, frame: Frame, before: int) -> Frame:
    """A row for each window that ``[_et, _end)`` overlaps and that is not closed yet.

    The results of the closed ones have it already.
    """
    columns = [quote_name(c) for c in frame.columns if c not in ("_et", "_end")]
    least = saturate_ticks(before - (window.size or 0))
    start = "_et" if least == TICK_MIN else f"greatest(_et, {opaque_literal(least, '_et')})"
    spans = add_window_span(
        window,
        frame.selectExpr(*columns, "_et AS _began", f"{start} AS _et", "_end").where("_et < _end"),
    )
    period = window.period or 1
    # Two explodes instead of one: a sequence of all windows at once is an array in memory. The
    # bound keeps `many * period` within int64.
    many = max(1, min(_WINDOWS_PER_PART, TICK_MAX // 4 // period))
    spans = spans.selectExpr("*", f"explode(sequence(_w0, _w1, {many * period}L)) AS _part")
    part = f"sequence(_part, least(_w1, _part + {(many - 1) * period}L), {period}L)"
    pairs = spans.selectExpr(*columns, "_began AS _et", f"explode({part}) AS _ws")
    return pairs.selectExpr("*", f"_ws + {window.size}L AS _we").where(
        f"NOT ({end_reached_sql('_we', before)})"
    )


def _closes_any_window(window: WindowSpec, before: int, after: int) -> bool:
    """Whether the end of any window lies in what F has passed."""
    if before >= after:
        return False
    if before == TICK_MIN or after == TICK_MAX:
        return True
    size, period = window.size or 0, window.period or 1
    return (after - size - window.offset) // period > (before - size - window.offset) // period


def _bound_windows_per_edge(
    epoch: EpochContext, window: WindowSpec, edges: EpochEdges, before: int, until: int
) -> int:
    """Windows that no edge is in more than."""
    size, period = window.size or 0, window.period or 1
    starts = [
        ref.min_time
        for ref in (*epoch.live_segments(EDGES_KIND), *edges.segments)
        if ref.min_time is not None
    ]
    starts += [] if epoch.low is None else [epoch.low]
    first = max(min(starts, default=until), before - size)
    last = max(until, TICK_MIN if epoch.high is None else epoch.high)
    return max(last - first, 0) // period + size // period + 2
