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

__all__ = ["PublishedCut", "build_cut_key", "advance_published_cut", "read_published_cut", "replace_table_location"]


@dataclass(frozen=True, slots=True)
class PublishedCut:
    """One cut over all tables.

    Attributes:
        upto: every table holds slots 1 to `upto` of the lineage of `timeline`, and nothing else.
        tables: table -> address of its Iceberg metadata file; tables that never had a row may be missing.
    """

    uid: str
    timeline: int
    upto: int
    tables: dict[str, str] = field(default_factory=dict)


def build_cut_key(pipeline: str) -> str:
    """Key of the pointer."""
    return f"{pipeline}/iceberg/current.json"


def read_published_cut(store: Store, pipeline: str) -> PublishedCut | None:
    """The newest published cut, or None before the first."""
    found = _read_cut_with_etag(store, pipeline)
    return found[0] if found else None


def advance_published_cut(store: Store, pipeline: str, new: PublishedCut) -> None:
    """Move the pointer forward, unless somebody has moved it at least as far."""
    while True:
        found = _read_cut_with_etag(store, pipeline)
        try:
            if found is None:
                store.create(build_cut_key(pipeline), canonical_bytes(asdict(new)))
            elif found[0] != new and not _is_ahead(found[0], new):
                store.compare_and_swap(build_cut_key(pipeline), canonical_bytes(asdict(new)), found[1])
            return
        except PreconditionFailedError:
            continue


def replace_table_location(store: Store, pipeline: str, table: str, old: str, new: str) -> bool:
    """Name another metadata file with the same rows, if the pointer still names the one it was made from."""
    while True:
        found = _read_cut_with_etag(store, pipeline)
        if found is None or found[0].tables.get(table) != old:
            return False
        moved = replace(found[0], tables=found[0].tables | {table: new})
        try:
            store.compare_and_swap(build_cut_key(pipeline), canonical_bytes(asdict(moved)), found[1])
        except PreconditionFailedError:
            continue
        return True


def _is_ahead(there: PublishedCut, new: PublishedCut) -> bool:
    return there.uid == new.uid and (there.timeline, there.upto) > (new.timeline, new.upto)


def _read_cut_with_etag(store: Store, pipeline: str) -> tuple[PublishedCut, str] | None:
    try:
        stored = store.get(build_cut_key(pipeline))
    except NotFoundError:
        return None
    raw: dict[str, Any] = parse_json(stored.data)
    return PublishedCut(**raw), stored.etag
