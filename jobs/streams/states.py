"""Reducer states as segments: each epoch appends the keys it changed; small segments are gathered into one."""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa

from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.streams.files import Files
from tidegate.jobs.streams.fold import States
from tidegate.jobs.streams.history import read_files

__all__ = ["StateStore", "states_of", "states_table"]

_MANY: Final = 4  # segments of one reducer: more than this are gathered, so that a restart reads a bounded number of files
_SCHEMA: Final = pa.schema({"key": pa.string(), "state": pa.string(), "seen": pa.int64()})


class StateStore:
    """Reads states, and remembers them by the immutable segments they came from."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[tuple[str, ...], States]] = {}

    def of(self, name: str, segments: list[FileRef]) -> States:
        """All states of a reducer; a later segment's win."""
        keys = tuple(ref.key for ref in segments)
        known = self._known.get(name)
        if known is None or known[0] != keys:
            known = self._known[name] = (keys, states_of(self._store, segments))
        return known[1]

    def save(self, files: Files, name: str, segments: list[FileRef], before: States, changed: States) -> None:
        """Write what a batch changed. The states before stay as they are: the epoch may not be sealed."""
        if not changed:
            return
        kind, after = f"reducer:{name}", {**before, **changed}
        gather = len(segments) >= _MANY
        if gather:
            files.drop(kind)
        files.segment(kind, states_table(after if gather else changed))
        self._known[name] = (tuple(ref.key for ref in files.live(kind)), after)


def states_of(store: Store, segments: list[FileRef]) -> States:
    """The states in some segments; a later one's win."""
    rows = read_files(store, segments)
    return {r["key"]: (json.loads(r["state"]), r["seen"]) for r in (rows.to_pylist() if rows else [])}


def states_table(states: States) -> Any:
    """Rows of a segment."""
    rows = [{"key": key, "state": json.dumps(state), "seen": seen} for key, (state, seen) in states.items()]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)
