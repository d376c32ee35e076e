"""Edge events: pairs starts with ends, and lays out what lasts over windows.

A task pairs the edges of its unit. What it leaves to the driver are the starts without an end, and
of each partition and keys the first end, which closes what earlier epochs left open. A partition's
rows of one epoch are in one unit.
"""

from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame
from tidegate.jobs.rules.row_conditions import (
    add_window_span,
    end_reached_sql,
    expand_spans,
    quote_name,
    quote_text,
    time_below_sql,
    write_ticks,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import EdgeColumns
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MIN, saturate_ticks

from .judged_rows import JudgedRows, assign_rows_to_windows

OPEN_EDGES: Final = ":edges"
"""Among the partial aggregates of windows; no window has such a name."""
ORIGIN_COLUMNS = ("_source", "_partition", "_seq", "_et")


def collect_edge_columns(spec: PipelineSpec) -> dict[str, EdgeColumns]:
    """Source -> its columns of edges, for those that have edges."""
    return {name: source.edges for name, source in spec.sources.items() if source.edges is not None}


def _is_edge_sql(spec: PipelineSpec, *ends: str) -> str:
    """Whether a row is an edge of these sorts (`start`, `end`)."""
    cases = []
    for name, edges in collect_edge_columns(spec).items():
        values = ", ".join(quote_text(getattr(edges, end)) for end in ends)
        source = quote_text(name)
        kind = quote_name(edges.kind)
        cases.append(f"(_source = {source} AND {kind} IN ({values}))")
    return f"coalesce({' OR '.join(cases)}, false)"


def select_punctual_edges(judged: JudgedRows) -> Frame:
    """The edges that are on time, with `_ends`: a late edge changes nothing. There must be rows."""
    spec = judged.spec
    late = time_below_sql(judged.frontier)
    edges = judged.data.where(f"{_is_edge_sql(spec, 'start', 'end')} AND NOT ({late})")
    return edges.selectExpr(
        *map(quote_name, spec.columns),
        *list_spark_arguments(spec),
        *ORIGIN_COLUMNS,
        f"{_is_edge_sql(spec, 'end')} AS _ends",
    )


def list_pairing_columns(spec: PipelineSpec) -> list[str]:
    """What a start and its end have in common, as Spark SQL over edges."""
    keys: dict[str, list[str]] = {}
    for name, own in collect_edge_columns(spec).items():
        for key in own.keys:
            keys.setdefault(key, []).append(quote_text(name))
    pairing = [
        f"IF(_source IN ({', '.join(sources)}), {quote_name(key)}, NULL)"
        for key, sources in keys.items()
    ]
    return ["_source", "_partition", *pairing]


def match_starts_to_ends(spec: PipelineSpec, edges: Frame) -> Frame:
    """Add `_until`, when an edge ends: null while it is open. `_first` are first ends of keys."""
    group = f"PARTITION BY {', '.join(list_pairing_columns(spec))}"
    # Behind an edge are those before it in the reverse order, which costs one pass.
    behind = f"{group} ORDER BY _seq DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
    end = "IF(_ends, named_struct('at', _seq, 'time', _et), NULL)"
    first = f"min(IF(_ends, _seq, NULL)) OVER ({group})"
    found = edges.selectExpr("*", f"{end} AS _end_here").selectExpr(
        "*", f"min(_end_here) OVER ({behind}) AS _end_behind", f"{first} AS _first_end"
    )
    return found.selectExpr(
        "* EXCLUDE (_end_here, _end_behind, _first_end)",
        "_end_behind.time AS _until",
        "coalesce(_ends AND _seq = _first_end, false) AS _first",
    )


def fold_edges(judged: JudgedRows) -> tuple[pa.Table | None, pa.Table | None]:
    """Pair the edges of a unit.

    Returns:
        The starts that ended, with `_end`, and the edges that are left; None without any.
    """
    if judged.data is None or not collect_edge_columns(judged.spec):
        return None, None
    edges = select_punctual_edges(judged).toArrow()
    if not edges.num_rows:
        return None, None
    matched = match_starts_to_ends(judged.spec, DuckFrame.from_table(edges)).toArrow()
    is_open = pc.is_null(matched["_until"])
    starts = pc.invert(matched["_ends"])
    ended = matched.filter(pc.and_(starts, pc.invert(is_open)))
    left = matched.filter(pc.or_(pc.and_(starts, is_open), matched["_first"]))
    ended = ended.rename_columns({"_until": "_end"}).drop_columns(["_ends", "_first"])
    return ended, left.drop_columns(["_until", "_first"])


def assign_unit_rows(judged: JudgedRows, window: WindowSpec, ended: pa.Table | None) -> Frame:
    """(row, window) pairs of a unit: of its points, and of the edges that have ended in it."""
    points = judged
    if collect_edge_columns(judged.spec):
        is_point = f"NOT {_is_edge_sql(judged.spec, 'start', 'end')}"
        points = replace(judged, data=judged.data.where(is_point))
    pairs = assign_rows_to_windows(points, window)
    if ended is None or not ended.num_rows:
        return pairs
    lasting = expand_to_windows(window, DuckFrame.from_table(ended), judged.frontier)
    lasting = lasting.selectExpr("*", number_sources_sql(judged.spec))
    return lasting.unionByName(pairs.selectExpr(*map(quote_name, lasting.columns)))


def number_sources_sql(spec: PipelineSpec) -> str:
    """`_so` of edges, as Spark SQL."""
    places = {name: place for place, name in enumerate(spec.sources)}
    order = " ".join(
        f"WHEN {quote_text(name)} THEN {places[name]}" for name in collect_edge_columns(spec)
    )
    return f"CASE _source {order} END AS _so"


def expand_to_windows(window: WindowSpec, frame: Frame, before: int) -> Frame:
    """A row for each window that ``[_et, _end)`` overlaps and that is not closed yet.

    The results of the closed ones have it already.
    """
    least = saturate_ticks(before - (window.size or 0))
    start = "_et" if least == TICK_MIN else f"greatest(_et, {write_ticks(least)})"
    lasting = frame.where("_et < _end")
    lasting = lasting.selectExpr(f"* REPLACE ({start} AS _et)", "_et AS _began")
    spans = add_window_span(window, lasting)
    spans = spans.selectExpr("* EXCLUDE (_et, _end, _began)", "_began AS _et")
    return expand_spans(window, spans).where(f"NOT ({end_reached_sql('_we', before)})")
