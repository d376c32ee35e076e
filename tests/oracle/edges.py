"""Open edges of the oracle mover.

Kept from epoch to epoch until their end edge comes (semantics.md sections 1 and 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tests.oracle.rows import Row
from tests.oracle.tables import read_rows_of, user_schema, write_rows
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec

EDGES_KIND = "edges"
_HEAD = [
    ("_source", pa.string()),
    ("_partition", pa.string()),
    ("_seq", pa.int64()),
    ("_time", pa.int64()),
]


@dataclass
class EdgeBook:
    """The edges of one epoch.

    Attributes:
        open: start edges without an end, in the order of reading.
        closed: those whose end came in this epoch, as intervals.
    """

    spec: PipelineSpec
    open: list[Row] = field(default_factory=list)
    closed: list[Row] = field(default_factory=list)

    def take(self, rows: Iterable[Row], before: int) -> list[Row]:
        """Keep the edges among the epoch's rows.

        Gives back the other rows, and the edges that are late (time < F).
        """
        others = []
        for row in rows:
            edges = self.spec.sources[row.member.source].edges
            what = row.values.get(edges.kind) if edges is not None else None
            if edges is None or what not in (edges.start, edges.end) or row.time < before:
                others.append(row)
            elif what == edges.start:
                self.open.append(row)
            else:
                self._close(row, edges.keys)
        return others

    def _close(self, end: Row, keys: Sequence[str]) -> None:
        """Every open edge of the keys ends here.

        One that would end before it began says nothing.
        """

        def pairs(row: Row) -> bool:
            return row.member == end.member and all(
                row.values.get(k) == end.values.get(k) for k in keys
            )

        self.closed += [
            replace(row, end=end.time) for row in self.open if pairs(row) and row.time < end.time
        ]
        self.open = [row for row in self.open if not pairs(row)]


def save_edges(store: Store, key: str, spec: PipelineSpec, rows: Iterable[Row]) -> FileRef:
    """Write open edges as one segment."""
    entries = [{**row.values, **_place(row)} for row in rows]
    return write_rows(
        store,
        key,
        EDGES_KIND,
        pa.schema([*user_schema(spec), *_HEAD]),
        entries,
        [e["_time"] for e in entries],
    )


def load_edges(store: Store, spec: PipelineSpec, segments: Iterable[FileRef]) -> list[Row]:
    """The open edges that an earlier epoch left, under today's spec.

    Those of a source that is gone are gone with it.
    """
    rows = (_row(spec, entry) for segment in segments for entry in read_rows_of(store, segment))
    return [row for row in rows if row.member.source in spec.sources]


def _place(row: Row) -> dict[str, Any]:
    return {
        "_source": row.member.source,
        "_partition": row.member.partition,
        "_seq": row.seq,
        "_time": row.time,
    }


def _row(spec: PipelineSpec, entry: dict[str, Any]) -> Row:
    values = {name: entry.get(name) for name in spec.columns}
    member = Member(entry["_source"], entry["_partition"])
    return Row(member, entry["_seq"], entry["_time"], entry["_time"] + 1, values)
