"""The current position of every event: the rank in the stream with all merged rows in their places.

A row of an epoch keeps its stored position p for ever. A merged row (`_splice` names its request) stores the position of the
row it stands behind; among rows inserted there the stamp decides, then the merge, then the origin. In SQL:

    select row_number() over (order by position, _splice is not null, <event time>, _epoch, _source, _partition, _seq) - 1
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["SPLICED", "current_positions"]

SPLICED = "_splice"
"""Column of the events table with the request that inserted a row; the table has it from its first merge on."""


def current_positions(events: Any, inserted: Any, time: str) -> Any:
    """The events with their current positions, in order.

    Args:
        events: any rows of the table, with their stored positions and `_splice`.
        inserted: *all* inserted rows of the cut that is read, with the columns that order them.
        time: the event time column.
    """
    order = ["position", time, "_epoch", "_source", "_partition", "_seq"]
    inserted = inserted.sort_by([(name, "ascending") for name in order])
    anchors = inserted["position"].to_numpy()
    stored = events["position"].to_numpy()
    current = stored + np.searchsorted(anchors, stored, side="left")
    mask = np.asarray(pc.is_valid(events[SPLICED]))
    rank = {who: number for number, who in enumerate(_who(inserted))}
    current[mask] = [
        stored + 1 + rank[who] for stored, who in zip(stored[mask], _who(events.filter(pa.array(mask))), strict=True)
    ]
    return events.set_column(events.column_names.index("position"), "position", pa.array(current, pa.int64())).sort_by("position")


def _who(table: Any) -> zip[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in ("_source", "_partition", "_seq")), strict=True)
