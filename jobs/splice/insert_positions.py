"""Find the positions of merged rows in the events table.

Rows are inserted by stamp, after existing rows with the same stamp (`docs/semantics.md`, section
6.4). The stored `position` of an existing row never changes. An inserted row stores the position of
its anchor, the row that it follows, or -1 if it precedes all rows; its request's id tells it from
the anchor. The current position is the rank in that order (`tidegate.jobs.sinks.row_positions`). So
a merge writes only its own rows, however long the stream is
(`docs/decisions/0041-stored-positions-never-change.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.sinks.row_positions import SPLICE_COLUMN
from tidegate.jobs.spec.pipeline import EVENTS
from tidegate.jobs.splice.tables_at_head import Span, TablesAtHead, join_spans
from tidegate.time_units import saturate_ticks

# Ticks around a row that are searched for its anchor, one after the other (1 s, 1 min, 1 h). If
# none of them contains it, the whole stream is read.
_SEARCH_RADII = (1_000_000, 60_000_000, 3_600_000_000)

OrderedRows = tuple[Any, Any, Any]
"""Positions, sections and times of rows, in order of positions."""


def find_anchor_positions(
    tables: TablesAtHead, time: str, marks: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the anchor position of each row to insert.

    Args:
        tables: the tables at the head.
        time: the event time column.
        marks: (section, time) of the rows.
    """
    anchors: dict[tuple[int, int], int] = {}
    for radius in _SEARCH_RADII:
        missing = sorted({mark for mark in marks if mark not in anchors})
        if not missing:
            break
        spans = [(saturate_ticks(t - radius), saturate_ticks(t + radius)) for _, t in missing]
        rows = _read_ordered_rows(tables, time, join_spans(spans))
        for mark in missing:
            anchor = _find_near_anchor(rows, *mark, radius)
            if anchor is not None:
                anchors[mark] = anchor
    if any(mark not in anchors for mark in marks):
        rows = _read_ordered_rows(tables, time, [])
        anchors |= {mark: _find_any_anchor(rows, *mark) for mark in marks if mark not in anchors}
    return [anchors[mark] for mark in marks]


def find_sections(tables: TablesAtHead, time: str, times: Sequence[int]) -> list[int]:
    """Return sections for rows whose epoch was retired, from their times.

    It is the first section that ends after the row's time, or the last one.
    """
    _, sections, stamps = _read_ordered_rows(tables, time, [])
    ends = [(int(n), int(stamps[sections == n].max())) for n in np.unique(sections)]
    return [next((n for n, end in ends if end > t), ends[-1][0] if ends else 0) for t in times]


def _read_ordered_rows(tables: TablesAtHead, time: str, spans: Sequence[Span]) -> OrderedRows:
    """Read the rows that can be anchors, in order; all of them without `spans`.

    Inserted rows are no anchors, and neither are rows that were released late and flagged: they are
    not in the order of time.
    """
    columns = ["position", "section", "_late", SPLICE_COLUMN, time]
    rows = tables.read_rows(EVENTS, columns, time=time, spans=spans)
    is_late = pc.fill_null(rows["_late"], False)
    rows = rows.filter(pc.and_(pc.is_null(rows[SPLICE_COLUMN]), pc.invert(is_late)))
    rows = rows.sort_by("position")
    stamps = rows[time].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return rows["position"].to_numpy(), rows["section"].to_numpy(), stamps.to_numpy()


def _find_insert_index(rows: OrderedRows, section: int, time: int) -> tuple[int, int, int]:
    """Return begin and end of a section, and the index in it after all rows up to `time`."""
    _, sections, stamps = rows
    begin, end = np.searchsorted(sections, [section, section + 1])
    return begin, end, begin + int(np.searchsorted(stamps[begin:end], time, side="right"))


def _find_near_anchor(rows: OrderedRows, section: int, time: int, radius: int) -> int | None:
    """Return the anchor if a neighbour in the section is within the radius; otherwise None.

    Rows further away were not read, so without a near neighbour nothing follows.
    """
    positions, _, stamps = rows
    begin, end, index = _find_insert_index(rows, section, time)
    if index > begin and stamps[index - 1] >= time - radius:
        return int(positions[index - 1])
    if index < end and stamps[index] < time + radius:
        return int(positions[index]) - 1
    return None


def _find_any_anchor(rows: OrderedRows, section: int, time: int) -> int:
    _, _, index = _find_insert_index(rows, section, time)
    return int(rows[0][index - 1]) if index > 0 else -1
