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
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.jobs.rows.edge_folds import (
    ORIGIN_COLUMNS,
    collect_edge_columns,
    expand_to_windows,
    match_starts_to_ends,
    number_sources_sql,
)
from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.duck_frame import Frame, combine_frames
from tidegate.jobs.rules.row_conditions import end_reached_sql, opaque_literal, quote_text
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from .epoch_context import FETCH_ROWS, EpochContext, OutputFiles, WrittenFiles

EDGES_KIND = "edges"


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


# What is open and what has ended


def choose_edge_engine(epoch: EpochContext, rows: int) -> EpochContext:
    """With few edges, the driver pairs and lays out what tasks have left: a job takes longer."""
    rows += sum(ref.rows for ref in epoch.live_segments(EDGES_KIND))
    here = rows <= FETCH_ROWS and not list_spark_arguments(epoch.spec)
    return replace(epoch, native=True) if here else epoch


def pair_edges(epoch: EpochContext, came: pa.Table | Frame | None) -> EpochEdges:
    """Pair the starts and ends that are on time, and write what stays open as the new segment.

    `came` are those of the epoch, as `select_punctual_edges` gives them; None: there are none.
    """
    live = epoch.live_segments(EDGES_KIND) if collect_edge_columns(epoch.spec) else []
    standing = EpochEdges(segments=tuple(live), open=tuple(map(epoch.locate_segment, live)))
    files = [] if came is None else epoch.writer.write_scratch_files(came)
    if not files:
        return standing
    rows = sum(pq.read_metadata(path).num_rows for path in (*standing.open, *files))
    paired = epoch.collect_if_small(_match_starts_to_ends(epoch, standing.open, files, rows), rows)
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


def _match_starts_to_ends(
    epoch: EpochContext, live: Sequence[Path], came: Sequence[Path], rows: int
) -> Frame:
    """All starts with `_until`, when they end: null while they are open.

    One that would end before it began says nothing.
    """
    frame = _load_edges(epoch, came, "_ends")
    if live:
        frame = _load_edges(epoch, live, "false AS _ends").unionByName(frame)
    if rows <= FETCH_ROWS:
        frame = frame.coalesce(1)  # no shuffle for few
    matched = match_starts_to_ends(epoch.spec, frame)
    return matched.where("NOT _ends AND (_until IS NULL OR _until > _et)").drop("_ends", "_first")


def _load_edges(epoch: EpochContext, files: Sequence[Path], mark: str) -> Frame:
    """Edges that one epoch wrote, under today's spec.

    A column it did not have is null, a source that is gone has no edges.
    """
    frame = epoch.load_segments([], files)
    assert frame is not None  # noqa: S101 - called with files only
    sources = ", ".join(quote_text(name) for name in collect_edge_columns(epoch.spec))
    return frame.where(f"_source IN ({sources})").selectExpr(
        *epoch.columns_of_segment(frame), *ORIGIN_COLUMNS, mark
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
        pairs = expand_to_windows(window, starts, before).where(end_reached_sql("_we", after))
        rows += sum(pq.read_metadata(path).num_rows for path in edges.open)
    if edges.ended:
        ended = _load_edges(epoch, edges.ended, "_until AS _end").where("_end IS NOT NULL")
        pairs = combine_frames(pairs, expand_to_windows(window, ended, before))
        rows += sum(pq.read_metadata(path).num_rows for path in edges.ended)
    if pairs is None:
        return None, 0
    pairs = pairs.selectExpr("*", number_sources_sql(epoch.spec))
    return pairs, rows * _bound_windows_per_edge(epoch, window, edges, before, until)


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
