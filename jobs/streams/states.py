"""Reducer states as segments: each epoch appends the keys it changed; small segments are gathered into one."""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.streams.files import DispatchFiles
from tidegate.jobs.streams.fold import ReducerStates
from tidegate.jobs.streams.history import read_parquet_files

__all__ = ["ReducerStateStore", "read_reducer_states", "build_states_table"]

_MAX_SEGMENTS: Final = 4  # segments of one reducer: more than this are gathered, so that a restart reads a bounded number of files
_STATE_SCHEMA: Final = pa.schema({"key": pa.string(), "state": pa.string(), "seen": pa.int64()})


class ReducerStateStore:
    """Reads states, and remembers them by the immutable segments they came from."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[tuple[str, ...], ReducerStates]] = {}

    def load(self, name: str, segments: list[FileRef]) -> ReducerStates:
        """All states of a reducer; a later segment's win."""
        keys = tuple(ref.key for ref in segments)
        known = self._known.get(name)
        if known is None or known[0] != keys:
            known = self._known[name] = (keys, read_reducer_states(self._store, segments))
        return known[1]

    def save(self, files: DispatchFiles, name: str, segments: list[FileRef], before: ReducerStates, changed: ReducerStates) -> None:
        """Write what a batch changed. The states before stay as they are: the epoch may not be sealed."""
        if not changed:
            return
        kind, after = f"reducer:{name}", {**before, **changed}
        gather = len(segments) >= _MAX_SEGMENTS
        if gather:
            files.drop_segments(kind)
        files.write_segment(kind, build_states_table(after if gather else changed))
        self._known[name] = (tuple(ref.key for ref in files.live_segments(kind)), after)


def read_reducer_states(store: Store, segments: list[FileRef]) -> ReducerStates:
    """The states in some segments; a later one's win."""
    rows = read_parquet_files(store, segments)
    return {r["key"]: (json.loads(r["state"]), r["seen"]) for r in (rows.to_pylist() if rows else [])}


def build_states_table(states: ReducerStates) -> Any:
    """Rows of a segment."""
    rows = [{"key": key, "state": json.dumps(state), "seen": seen} for key, (state, seen) in states.items()]
    return pa.Table.from_pylist(rows, schema=_STATE_SCHEMA)
