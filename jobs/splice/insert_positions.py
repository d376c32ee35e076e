"""Where merged rows stand in the events table (semantics.md section 6.

Inserted by stamp, existing rows first on ties).

The stored `position` of a row never changes. An inserted row stores the position of the row it
stands behind (-1: before the first) and the id of its request; its place among others inserted
there follows from its stamp. The current position is the rank in that order:
`tidegate.jobs.sinks.row_positions`. So a merge writes its own rows and nothing else, however long
the stream is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.spec.pipeline import EVENTS
from tidegate.jobs.splice.tables_at_head import Span, TablesAtHead, join_spans
from tidegate.time_units import TICK_MAX, TICK_MIN, saturate_ticks

_SEARCH_RADII = (
    1_000_000,
    60_000_000,
    3_600_000_000,
)  # ticks looked at around a row, one after the other, before the whole stream is
_ANCHOR_COLUMNS = ("position", "section", "_late", "_splice")

OrderedRows = tuple[Any, Any, Any]
"""Positions, sections and times of rows, in order of positions."""


def find_anchor_positions(
    tables: TablesAtHead, time: str, marks: Sequence[tuple[int, int]]
) -> list[int]:
    """The position behind which a row with each (section, time) stands.

    Args:
        tables: the tables at the head.
        time: the event time column.
        marks: of the rows to insert.
    """
    found: dict[tuple[int, int], int] = {}
    for reach in _SEARCH_RADII:
        left = sorted({mark for mark in marks if mark not in found})
        if not left:
            break
        rows = _read_ordered_rows(
            tables,
            time,
            join_spans([(saturate_ticks(t - reach), saturate_ticks(t + reach)) for _, t in left]),
        )
        found |= {
            mark: place
            for mark in left
            if (place := _find_near_anchor(rows, *mark, reach)) is not None
        }
    if len(found) < len({*marks}):
        rows = _read_ordered_rows(tables, time, [(TICK_MIN, TICK_MAX)])
        found |= {mark: _find_any_anchor(rows, *mark) for mark in marks if mark not in found}
    return [found[mark] for mark in marks]


def find_sections(tables: TablesAtHead, time: str, times: Sequence[int]) -> list[int]:
    """The section of rows whose own was forgotten.

    The first one that reaches beyond their time, else the last.
    """
    _, numbers, stamps = _read_ordered_rows(tables, time, [(TICK_MIN, TICK_MAX)])
    ends = [(int(n), int(stamps[numbers == n].max())) for n in np.unique(numbers)]
    return [next((n for n, end in ends if end > t), ends[-1][0] if ends else 0) for t in times]


def _read_ordered_rows(tables: TablesAtHead, time: str, spans: Sequence[Span]) -> OrderedRows:
    """Rows of the stream in order.

    Inserted rows and rows that were released late and flagged do not count as places.
    """
    rows = tables.read_rows(
        EVENTS, [*_ANCHOR_COLUMNS, time], time=time, spans=[] if spans[0][0] == TICK_MIN else spans
    )
    rows = rows.filter(
        pc.and_(pc.is_null(rows["_splice"]), pc.invert(pc.fill_null(rows["_late"], False)))
    )
    rows = rows.sort_by("position")
    stamps = rows[time].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return rows["position"].to_numpy(), rows["section"].to_numpy(), stamps.to_numpy()


def _find_near_anchor(rows: OrderedRows, section: int, time: int, reach: int) -> int | None:
    """Known only if a neighbour in the same section is less than `reach` away.

    Rows further off were not looked at.
    """
    positions, numbers, stamps = rows
    begin, end = np.searchsorted(numbers, [section, section + 1])
    place = begin + int(np.searchsorted(stamps[begin:end], time, side="right"))
    if place > begin and stamps[place - 1] >= time - reach:
        return int(positions[place - 1])
    if place < end and stamps[place] < time + reach:
        return int(positions[place]) - 1
    return None


def _find_any_anchor(rows: OrderedRows, section: int, time: int) -> int:
    positions, numbers, stamps = rows
    begin, end = np.searchsorted(numbers, [section, section + 1])
    place = begin + int(np.searchsorted(stamps[begin:end], time, side="right"))
    return int(positions[place - 1]) if place > 0 else -1
