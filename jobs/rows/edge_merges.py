"""Edge events over epochs: what is open is a segment of state.

1. The edges that units leave meet those that earlier epochs left open.
2. In its partition and under its keys each start ends at the first end behind it: one pass over the
  rows, from the back.
3. Starts without an end are the new segment. The others are intervals, which no later epoch needs.
4. Each window counts what has ended in all that is left of it, and what is open in the windows that
  close now.

Without edges in the cut the segment stays as it is, and where no window closes it is not even read.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.eventtime.decision_types import Decision
from tidegate.jobs.rules.aggregates import Aggregation
from tidegate.jobs.rules.duck_frame import DuckFrame, combine_frames
from tidegate.jobs.rules.row_conditions import (
    end_reached_sql,
    quote_name,
    quote_text,
    write_ticks,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from .column_casts import declared_to_spark_type
from .edge_folds import (
    ORIGIN_COLUMNS,
    collect_edge_columns,
    expand_to_windows,
    list_pairing_columns,
    match_starts_to_ends,
    number_sources_sql,
)
from .state_files import MergedState, StateFiles, StateOrder

EDGES_KIND: Final = "edges"


def pair_edges(files: StateFiles, came: pa.Table | None) -> pa.Table | None:
    """Return the starts of the bucket with `_until`, when they end: null while they are open.

    None if there are none. `came` is what the units of the epoch leave in the bucket, as of
    `fold_edges`; None: they leave nothing in any bucket.
    """
    spec = files.order.spec
    standing = _load_open_edges(files)
    if came is None and standing is not None:
        return standing.append_column("_until", pa.nulls(standing.num_rows, pa.int64()))
    if came is None:
        return None
    edges = _select_edges(spec, came, "_ends")
    if standing is not None:
        edges = DuckFrame.from_table(standing).selectExpr("*", "false AS _ends").unionByName(edges)
    matched = match_starts_to_ends(spec, edges)
    # A start that would end before it began says nothing.
    starts = matched.where("NOT _ends AND (_until IS NULL OR _until > _et)")
    return starts.drop("_ends", "_first").toArrow()


def write_edges(
    files: StateFiles, paired: pa.Table | None, *, is_changed: bool
) -> tuple[MergedState, dict[str, pa.Table]]:
    """Write the starts that are open, and lay out what lasts over windows.

    Args:
        files: of the state.
        paired: what `pair_edges` gives, with the columns of `list_spark_arguments` if there are
            some.
        is_changed: the units of the epoch have left edges, so that every bucket is written again.

    Returns:
        What became of the state, and window -> partial aggregates without marks of what lasts in
        it.
    """
    live = () if is_changed else tuple(files.order.live_segments(EDGES_KIND))
    if paired is None:
        return MergedState(segments=live), {}
    is_open = pc.is_null(paired["_until"])
    left = paired.filter(is_open).drop_columns(["_until"])
    ended = paired.filter(pc.invert(is_open))
    partials = _fold_intervals(files, ended, left)
    if not is_changed:
        return MergedState(segments=live), partials
    kept = left.select([*files.order.spec.columns, *ORIGIN_COLUMNS])
    written = files.write_segment(EDGES_KIND, kept, "_et", {})
    return MergedState((), written, written, footers=files.footers), partials


def list_edge_columns(spec: PipelineSpec) -> dict[str, str]:
    """Column -> declared type, of the rows of `pair_edges`."""
    texts = dict.fromkeys(ORIGIN_COLUMNS[:2], "string")
    numbers = ORIGIN_COLUMNS[2:]
    return {**spec.columns, **texts, **dict.fromkeys((*numbers, "_until"), "long")}


def closes_windows(order: StateOrder) -> bool:
    """Whether windows may close in the epoch; then what is open counts in them."""
    before = order.decision.frontier_before
    after = order.decision.frontier_after
    windows = order.spec.windows.values()
    return any(_closes_any_window(window, before, after) for window in windows)


def _load_open_edges(files: StateFiles) -> pa.Table | None:
    """The edges in the bucket that earlier epochs left open; None without a segment."""
    order = files.order
    tables = list[pa.Table]()
    for ref in order.live_segments(EDGES_KIND):
        edges = _select_edges(order.spec, files.read_segment(ref)).toArrow()
        tables.append(order.select_bucket(edges, list_pairing_columns(order.spec)))
    return pa.concat_tables(tables) if tables else None


def _select_edges(spec: PipelineSpec, rows: pa.Table, *more: str) -> DuckFrame:
    """Edges that one epoch wrote, under today's spec.

    A column it did not have is null, a source that is gone has no edges.
    """
    sources = ", ".join(quote_text(name) for name in collect_edge_columns(spec))
    columns = [
        quote_name(name)
        if name in rows.column_names
        else f"CAST(NULL AS {declared_to_spark_type(kind)}) AS {quote_name(name)}"
        for name, kind in spec.columns.items()
    ]
    frame = DuckFrame.from_table(rows).where(f"_source IN ({sources})")
    return frame.selectExpr(*columns, *ORIGIN_COLUMNS, *more)


# What they are in


def _fold_intervals(files: StateFiles, ended: pa.Table, left: pa.Table) -> dict[str, pa.Table]:
    """The partial aggregates of what has ended, and of what is open in windows that close now."""
    spec = files.order.spec
    partials = {}
    for name, window in spec.windows.items():
        pairs = _assign_intervals(window, ended, left, files.order.decision)
        if pairs is None:
            continue
        aggregation = Aggregation(spec, name, is_evaluated=True)
        rows = pairs.selectExpr("*", number_sources_sql(spec))
        folded = aggregation.fold_rows(rows).toArrow()
        if folded.num_rows:
            partials[name] = folded
    return partials


def _assign_intervals(
    window: WindowSpec, ended: pa.Table, left: pa.Table, decision: Decision
) -> Any:
    """The (edge, window) pairs of the epoch with `_ws` and `_we`; None without any."""
    before = decision.frontier_before
    after = decision.frontier_after
    pairs = None
    # What is open is counted when a window closes, and not before: its end may still come.
    if left.num_rows and _closes_any_window(window, before, after):
        until = f"{write_ticks(decision.open_edges_until)} AS _end"
        starts = DuckFrame.from_table(left).selectExpr("*", until)
        pairs = expand_to_windows(window, starts, before).where(end_reached_sql("_we", after))
    if ended.num_rows:
        lasting = DuckFrame.from_table(ended.rename_columns({"_until": "_end"}))
        pairs = combine_frames(pairs, expand_to_windows(window, lasting, before))
    return pairs


def _closes_any_window(window: WindowSpec, before: int, after: int) -> bool:
    """Whether the end of any window lies in what F has passed."""
    if before >= after:
        return False
    if before == TICK_MIN or after == TICK_MAX:
        return True
    size = window.size or 0
    period = window.period or 1
    return (after - size - window.offset) // period > (before - size - window.offset) // period
