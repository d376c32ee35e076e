"""Writes what an epoch of dispatching produces: tables of streams, and state for the next epoch.

Reducer states are segments: each epoch appends the keys it changed, and a reducer's small segments
are merged into one from time to time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import MoveOrder
from tidegate.jobs.streams.reducers import ReducerStates
from tidegate.jobs.streams.row_history import (
    compute_time_bounds,
    read_parquet_files,
    write_parquet_file,
)


class DispatchFiles:
    """The attempt's files, and the live segments as they change.

    Attributes:
        segments: the live ones, with those that this epoch has written.
        tables: table -> references of the files that this epoch has written.
    """

    def __init__(self, store: Store, order: MoveOrder, segments: Sequence[FileRef]) -> None:
        self._store, self._order = store, order
        self.segments = list(segments)
        self.tables: dict[str, tuple[FileRef, ...]] = {}

    def live_segments(self, kind: str) -> list[FileRef]:
        """Return the live segments of a kind."""
        return [ref for ref in self.segments if ref.kind == kind]

    def drop_segments(self, kind: str) -> None:
        """Drop all segments of a kind from the live ones."""
        self.segments = [ref for ref in self.segments if ref.kind != kind]

    def write_table(self, name: str, rows: Any, time: str | None) -> None:
        """Write this epoch's rows of a table; a second call for the table replaces the first.

        `time` is the column whose minimum and maximum go into the file's reference.
        """
        key = f"{self._order.folders.table_prefix(name)}part-0.parquet"
        bounds = compute_time_bounds(rows[time]) if time else (None, None)
        self.tables[name] = (write_parquet_file(self._store, key, rows, f"table:{name}", bounds),)

    def write_segment(
        self,
        kind: str,
        rows: Any,
        low: int | None = None,
        high: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a state segment; once per kind, because the kind and the attempt make its key.

        `low` and `high` are the least and greatest stamp, and `extra` goes into the reference.
        """
        key = self._order.folders.segment_key(kind)
        self.segments.append(write_parquet_file(self._store, key, rows, kind, (low, high), extra))


# Segments of one reducer: more than this are gathered, so that a restart reads a bounded number of
# files.
_MAX_SEGMENTS: Final = 4
_STATE_SCHEMA: Final = pa.schema({"key": pa.string(), "state": pa.string(), "seen": pa.int64()})


class ReducerStateStore:
    """Reads reducer states, and caches them by the immutable segments they came from."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[tuple[str, ...], ReducerStates]] = {}

    def load(self, name: str, segments: list[FileRef]) -> ReducerStates:
        """Return all states of a reducer; those of later segments win.

        The dictionary is the cache itself: callers must not change it.
        """
        keys = tuple(ref.key for ref in segments)
        known = self._known.get(name)
        if known is None or known[0] != keys:
            known = self._known[name] = (keys, read_reducer_states(self._store, segments))
        return known[1]

    def save(
        self,
        files: DispatchFiles,
        name: str,
        segments: list[FileRef],
        before: ReducerStates,
        changed: ReducerStates,
    ) -> None:
        """Write the states that a batch changed; nothing if it changed none.

        If the reducer has four segments or more, one with all states replaces them. `before` is not
        changed, because the epoch may not be sealed.
        """
        if not changed:
            return
        kind, after = f"reducer:{name}", {**before, **changed}
        # Each epoch adds a small segment; rewriting all states every time would cost more than
        # reading a few files at a restart.
        gather = len(segments) >= _MAX_SEGMENTS
        if gather:
            files.drop_segments(kind)
        files.write_segment(kind, build_states_table(after if gather else changed))
        self._known[name] = (tuple(ref.key for ref in files.live_segments(kind)), after)


def read_reducer_states(store: Store, segments: list[FileRef]) -> ReducerStates:
    """Return the states in some segments; those of later segments win."""
    rows = read_parquet_files(store, segments)
    return {
        r["key"]: (json.loads(r["state"]), r["seen"]) for r in (rows.to_pylist() if rows else [])
    }


def build_states_table(states: ReducerStates) -> Any:
    """Return the rows of a state segment."""
    rows = [
        {"key": key, "state": json.dumps(state), "seen": seen}
        for key, (state, seen) in states.items()
    ]
    return pa.Table.from_pylist(rows, schema=_STATE_SCHEMA)
