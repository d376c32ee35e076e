"""The rows of a cut after the survey, and what is asked of them: which windows they join.

Rows are judged against the frontier before the epoch, which is known before the epoch begins.
"""

from dataclasses import dataclass
from typing import Any

from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rules.aggregates import list_spark_arguments
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame
from tidegate.jobs.rules.row_conditions import (
    add_window_span,
    late_for_window_sql,
    quote_name,
    quote_text,
    window_purged_sql,
    write_ticks,
)
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import WindowSpec

from .slice_reading import select_provenance


@dataclass(frozen=True)
class JudgedRows:
    """Rows that the survey has judged.

    Attributes:
        data: the data rows that are not set aside; None if there are no data rows. May be empty if
            all are set aside.
        aside: the rows that are set aside, with `_verdict` and `_mark`. None if the survey judged
            no row; it may be empty.
        low: least event time that the survey found, in ticks, before rows are set aside or
            adjusted; None if it found none.
        frontier: before the epoch.
        timeline, slot: of the epoch.
        late_bound: rows below it are late for the events output (`Decision.late_bound`).
        events_frontier: what these have missed (`Decision.events_frontier`).
    """

    spec: PipelineSpec
    data: Any
    aside: Frame | None
    low: int | None
    frontier: int
    timeline: int
    slot: int
    late_bound: int
    events_frontier: int

    def has_rows_below(self, bound: int) -> bool:
        """Whether the survey found an event time below a bound."""
        return self.low is not None and self.low < bound

    @property
    def row_columns(self) -> list[str]:
        """The columns of `PipelineSpec.row_columns`, as Spark SQL over a row with `_et`."""
        added = self.spec.row_columns.keys() - self.spec.columns.keys()
        times = [f"timestamp_micros(_et) AS {name}" for name in added]
        return [*(quote_name(name) for name in self.spec.columns), *times]

    def provenance_columns(self) -> list[str]:
        """Where an output row comes from, and which epoch wrote it, as Spark SQL."""
        own = [
            f"CAST({self.timeline} AS int) AS _timeline",
            f"{self.slot}L AS _epoch",
        ]
        return ["_source", "_partition", "_seq", *own]


def select_data_rows(spec: PipelineSpec, cut: Cut, rows: Any) -> Frame:
    """The data rows of an Arrow table of `slice_scan.scan_slice`, with their provenance."""
    more = ("_verdict", "_mark", *list_spark_arguments(spec))
    own = [name for name in more if name in rows.column_names]
    columns = *select_provenance(spec, cut), "_m", "_seq", "_et", "_end", *own
    return DuckFrame.from_table(rows).selectExpr(*columns)


def apply_verdicts(frame: Frame | None, spec: PipelineSpec) -> tuple[Frame | None, Frame | None]:
    """The rows that go on, and those that the survey set aside (None when there are none)."""
    if frame is None or "_verdict" not in frame.columns:
        return frame, None
    going = frame.where("_verdict IS NULL OR _verdict = 'adjust'")
    going = adjust_late_rows(going, spec, "_verdict IS NOT NULL", "_mark")
    going = going.drop("_verdict", "_mark")
    return going, frame.where("_verdict IS NOT NULL AND _verdict <> 'adjust'")


def adjust_late_rows(frame: Frame, spec: PipelineSpec, late: str, start: str) -> Frame:
    """Move the start of late rows; those that end before the new start are left out.

    It changes `_et` and the event-time column of the row's source. `late`, the condition,
    and `start` (ticks) are Spark SQL.
    """
    times: dict[str, list[str]] = {}
    for name, source in spec.sources.items():
        # Sources may name their event-time columns differently; a row moves in its own source's.
        times.setdefault(source.event_time, []).append(quote_text(name))
    moves = [f"IF(_moved, {start}, _et) AS _et"]
    for name, sources in times.items():
        column = quote_name(name)
        known = ", ".join(sources)
        is_own = f"_moved AND _source IN ({known})"
        moves.append(f"IF({is_own}, timestamp_micros({start}), {column}) AS {column}")
    judged = frame.selectExpr("*", f"({late}) AS _was")
    moved = judged.selectExpr("*", f"_was AND _end > {start} AS _moved")
    moved = moved.where("_moved OR NOT _was")
    replaced = ", ".join(moves)
    return moved.selectExpr(f"* EXCLUDE (_was, _moved) REPLACE ({replaced})")


def apply_late_policy(judged: JudgedRows, window: WindowSpec, late: str) -> Frame:
    """The data rows; those late for a window are left out, or moved to the frontier if they can.

    `late`, the condition, is Spark SQL.
    """
    rows = judged.data
    if window.on_late is not LatePolicy.ADJUST:
        # Also where no row is late: the code is the same in every epoch.
        return rows.where(f"NOT ({late})")
    if not judged.has_rows_below(judged.frontier):
        return rows
    return adjust_late_rows(rows, judged.spec, late, write_ticks(judged.frontier))


def assign_rows_to_windows(judged: JudgedRows, window: WindowSpec) -> Frame:
    """(row, window) pairs that join, with `_ws` and `_we` in ticks.

    Late rows are left out; ``on_late: adjust`` moves late rows that it can.
    """
    late = late_for_window_sql(window, judged.frontier)
    frame = add_window_span(window, apply_late_policy(judged, window, late))
    has_edges = any(source.end_time is not None for source in judged.spec.sources.values())
    if window.size == window.period and not has_edges:
        return frame.selectExpr("*", "_w0 AS _ws", f"_w0 + {window.size}L AS _we")
    pairs = frame.selectExpr("*", f"explode(sequence(_w0, _w1, {window.period}L)) AS _ws")
    pairs = pairs.selectExpr("*", f"_ws + {window.size}L AS _we")
    return pairs.where(f"NOT ({window_purged_sql(window, '_we', judged.frontier)})")
