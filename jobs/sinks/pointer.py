"""`<pipeline>/iceberg/current.json`: one consistent cut over all tables, by the names of their Iceberg metadata files.

Readers start here and need no catalog. Whoever publishes moves it forward; it never goes back on a lineage, and whatever it names
is exact, because a table's content is a function of its mark on the log alone: also two publishers with catalogs of their own
name equal rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tidegate.checkpoints.canonical import canonical_bytes, parse_json
from tidegate.checkpoints.store import NotFoundError, PreconditionFailedError, Store

__all__ = ["Current", "current_key", "move_current", "read_current", "replace_table"]


@dataclass(frozen=True, slots=True)
class Current:
    """One cut over all tables.

    Attributes:
        upto: every table holds slots 1 to `upto` of the lineage of `timeline`, and nothing else.
        tables: table -> address of its Iceberg metadata file; tables that never had a row may be missing.
    """

    uid: str
    timeline: int
    upto: int
    tables: dict[str, str] = field(default_factory=dict)


def current_key(pipeline: str) -> str:
    """Key of the pointer."""
    return f"{pipeline}/iceberg/current.json"


def read_current(store: Store, pipeline: str) -> Current | None:
    """The newest published cut, or None before the first."""
    found = _read(store, pipeline)
    return found[0] if found else None


def move_current(store: Store, pipeline: str, new: Current) -> None:
    """Move the pointer forward, unless somebody has moved it at least as far."""
    while True:
        found = _read(store, pipeline)
        try:
            if found is None:
                store.create(current_key(pipeline), canonical_bytes(asdict(new)))
            elif found[0] != new and not _ahead(found[0], new):
                store.swap(current_key(pipeline), canonical_bytes(asdict(new)), found[1])
            return
        except PreconditionFailedError:
            continue


def replace_table(store: Store, pipeline: str, table: str, old: str, new: str) -> bool:
    """Name another metadata file with the same rows, if the pointer still names the one it was made from."""
    while True:
        found = _read(store, pipeline)
        if found is None or found[0].tables.get(table) != old:
            return False
        moved = replace(found[0], tables=found[0].tables | {table: new})
        try:
            store.swap(current_key(pipeline), canonical_bytes(asdict(moved)), found[1])
        except PreconditionFailedError:
            continue
        return True


def _ahead(there: Current, new: Current) -> bool:
    return there.uid == new.uid and (there.timeline, there.upto) > (new.timeline, new.upto)


def _read(store: Store, pipeline: str) -> tuple[Current, str] | None:
    try:
        stored = store.get(current_key(pipeline))
    except NotFoundError:
        return None
    raw: dict[str, Any] = parse_json(stored.data)
    return Current(**raw), stored.etag
