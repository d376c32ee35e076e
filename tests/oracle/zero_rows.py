"""Opt-in results for empty windows between the first and the last window of a key.

Per key the gaps not yet passed by F are kept as ranges of window starts, so waiting costs O(1)
whatever the gap's length. They are kept forever: a gap ends only when the key's next row comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tests.oracle.tables import read_rows_of, user_schema, write_rows
from tests.oracle.window_state import Key
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.pipeline import PipelineSpec


@dataclass
class Gaps:
    """Starts of windows between a key's first and last window that F has not passed yet, as ``[low,
    high)`` ranges.
    """

    first: int
    last: int
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def reach(self, start: int, period: int) -> None:
        """A row of the key fell into the window that starts here."""
        if start < self.first:
            self.ranges.append((start + period, self.first))
            self.first = start
        elif start > self.last:
            self.ranges.append((self.last + period, start))
            self.last = start

    def passed(self, period: int, closed: Callable[[int], bool]) -> list[int]:
        """Take out the starts of windows that are closed now."""
        out: list[int] = []
        kept = []
        for low, high in self.ranges:
            while low < high and closed(low):
                out.append(low)
                low += period
            if low < high:
                kept.append((low, high))
        self.ranges = kept
        return out


_HEAD = [
    ("_first", pa.int64()),
    ("_last", pa.int64()),
    ("_ranges", pa.list_(pa.int64())),
    ("_source", pa.string()),
]


def save_gaps(
    store: Store,
    key: str,
    kind: str,
    spec: PipelineSpec,
    names: Sequence[str],
    gaps: dict[Key, Gaps],
) -> FileRef:
    """Write the gaps of all keys as one segment."""
    rows = [
        {
            **dict(zip(names, window_key, strict=True)),
            "_first": gap.first,
            "_last": gap.last,
            "_ranges": [bound for bounds in gap.ranges for bound in bounds],
        }
        for window_key, gap in gaps.items()
    ]
    return write_rows(store, key, kind, pa.schema([*user_schema(spec), *_HEAD]), rows, gaps=True)


def load_gaps(store: Store, segments: Iterable[FileRef], names: Sequence[str]) -> dict[Key, Gaps]:
    """The gaps of all keys; there is at most one such segment."""
    return {
        tuple(row[n] for n in names): _gaps(row)
        for segment in segments
        for row in read_rows_of(store, segment)
    }


def _gaps(row: dict[str, Any]) -> Gaps:
    flat = row["_ranges"]
    return Gaps(row["_first"], row["_last"], list(zip(flat[::2], flat[1::2], strict=True)))
