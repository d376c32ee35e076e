"""Computes the current position of every event: its rank in the stream after all merges.

A row of an epoch keeps its stored position forever. A merged row (`_splice` names its request)
stores the position of the row that it follows. Rows inserted at the same position are ordered by
event time, then merge, then origin. In SQL:

    select row_number() over (order by position, _splice is not null, <event time>, _epoch, _source,
    _partition, _seq) - 1

A merge rewrites a *stream* behind the events from its first changed row on: the new rows have
`_splice`, and hide whatever older slots wrote at their positions and after. A row without `_id`
only marks the end of the stream.

See `docs/decisions/0041-stored-positions-never-change.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

RowIdentity = tuple[str, str, int]
"""Source, partition and seq: an input row keeps them in every output."""
IDENTITY_COLUMNS = ("_source", "_partition", "_seq")

SPLICE_COLUMN = "_splice"
"""Column with the request that inserted a row, or had it written again.

A table has it from its first merge on.
"""

ARRIVAL_SLOT_COLUMN = "_came"
"""Column of streams.

The slot in which a row came that a merge inserted or wrote again; `_epoch` is the merge's.
"""


def compute_current_positions(events: Any, inserted: Any, time: str) -> Any:
    """Return the events with their current positions, in order.

    Args:
        events: any rows of the table, with stored `position`, `_splice`, `_source`, `_partition`
            and `_seq`.
        inserted: *all* inserted rows of the cut that is read, with the columns that order them.
        time: the event time column.
    """
    order = ["position", time, "_epoch", *IDENTITY_COLUMNS]
    inserted = inserted.sort_by([(name, "ascending") for name in order])
    # An inserted row is behind the row whose position it stores, so it moves all rows behind that.
    anchors = inserted["position"].to_numpy()
    stored = events["position"].to_numpy()
    current = stored + np.searchsorted(anchors, stored, side="left")
    mask = np.asarray(pc.is_valid(events[SPLICE_COLUMN]))
    # Several rows may be inserted behind one position; their rank tells them apart.
    rank = {who: number for number, who in enumerate(iterate_identities(inserted))}
    current[mask] = [
        stored + 1 + rank[who]
        for stored, who in zip(
            stored[mask], iterate_identities(events.filter(pa.array(mask))), strict=True
        )
    ]
    return events.set_column(
        events.column_names.index("position"), "position", pa.array(current, pa.int64())
    ).sort_by("position")


def find_rewrite_starts(written: Any) -> dict[int, int]:
    """Return, for each merge's slot, the position of the first row that the merge rewrote.

    `written` holds all rewritten rows of a stream.
    """
    found = written.group_by("_epoch", use_threads=False).aggregate([("position", "min")])
    return dict(zip(found["_epoch"].to_pylist(), found["position_min"].to_pylist(), strict=True))


def select_current_rows(rows: Any, starts: Mapping[int, int]) -> Any:
    """Return the rows of a stream that no later merge replaced, in order.

    The rows need `_id`, `_epoch` and `position`; `starts` is that of `find_rewrite_starts`.
    """
    # A row without an id only marks the end of the stream.
    keep = pc.is_valid(rows["_id"])
    for slot, first in starts.items():
        keep = pc.and_(
            keep, pc.or_(pc.greater_equal(rows["_epoch"], slot), pc.less(rows["position"], first))
        )
    return rows.filter(keep).sort_by("position")


def iterate_identities(table: Any) -> Iterator[RowIdentity]:
    """Return the identity of each row, in order, to be read once."""
    return zip(*(table[name].to_pylist() for name in IDENTITY_COLUMNS), strict=True)
