"""Finds what the versions of the tables name, and deletes the files that no reader needs any more.

Every commit of a table leaves a metadata file, a manifest list and some manifests, and expired
snapshots leave theirs. Iceberg's own cleaning (`write.metadata.delete-after-commit.enabled`) counts
versions; at two seconds per epoch it would delete the file of the readers' pointer within a minute.
Here time counts. A file is kept while one of these versions names it:

* the version of the readers' pointer;
* a version that the pointer named within the grace. Maintenance notes what the pointer names, at
  most once per grace, and keeps every note until the next one is as old as the grace. Readers may
  have opened a noted version, or one between two notes; such a one consists of files that a note
  names, and of files that are younger than the older note.

A publisher writes its files before it commits them, and may sleep in between. Its files can never
enter the table any more when

* for a merged file: its commit bound is below the table's sequence number (see `table_files`);
* for a metadata file: it is older than the manifest list of the pointer's snapshot. Who wrote it
  had loaded the table before that snapshot was committed, and every commit asserts that main did
  not move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from pyiceberg.table import StaticTable
from pyiceberg.table.snapshots import Snapshot

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.store import NotFoundError, ObjectInfo, Store
from tidegate.jobs.sinks.iceberg_catalog import build_io_properties
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.published_tables import translate_read_errors
from tidegate.jobs.sinks.table_files import (
    MERGED_FOLDER,
    get_newest_sequence_number,
    parse_commit_bound,
)
from tidegate.jobs.spec.pipeline import PipelineSpec

# Bounds the memory of the first run over a bucket in which nothing was ever deleted; an hour of
# epochs of two seconds leaves some 15,000 files.
_MAX_FILES_PER_RUN = 100_000


def note_table_versions(
    spec: PipelineSpec,
    store: Store,
    *,
    grace: float,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> float:
    """Note which versions of the tables readers may open from now on.

    Args:
        spec: the pipeline.
        store: its store.
        grace: seconds for which a reader may use a version that the pointer does not name any more.
        dry_run: note nothing.
        clock: gives the time of the note.

    Returns:
        The seconds for which a file must be kept that no version names. That is the age of the
        newest note that is as old as the grace, infinite without such a note, and the grace itself
        if no table was published yet.
    """
    now = clock.wall_ticks() / 1_000_000
    current = read_published_cut(store, spec.name)
    if current is None:
        return grace
    notes = _read_notes(spec, store)
    settled = [note for note in notes if now - note["at"] >= grace]
    if not dry_run and (not notes or now - notes[-1]["at"] >= grace):
        kept = [*settled[-1:], {"at": now, "tables": current.tables}]
        store.put(BucketLayout(spec.name).table_versions_key, canonical_bytes({"notes": kept}))
    return now - settled[-1]["at"] if settled else math.inf


def list_referenced_files(spec: PipelineSpec, store: Store) -> set[str]:
    """Return the addresses of all files that the published and the noted versions name.

    Garbage collection must keep them.

    Raises:
        TransientError: something could not be read, so the set would be incomplete.
    """
    current = read_published_cut(store, spec.name)
    notes = _read_notes(spec, store)
    found: set[str] = set()
    for table, location in current.tables.items() if current else ():
        with translate_read_errors(spec, table):
            found |= _collect_named_files(_open_versions(store, table, location, notes))
    return found


def delete_orphan_files(
    spec: PipelineSpec,
    store: Store,
    *,
    grace: float,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> list[ObjectInfo]:
    """Delete metadata and merged files that no version names and that none can name any more.

    Args:
        spec: the pipeline.
        store: its store.
        grace: seconds for which such a file is kept; see `note_table_versions`.
        dry_run: only list them.
        clock: gives the age of a file.

    Returns:
        The deleted files, at most `_MAX_FILES_PER_RUN`.

    Raises:
        TransientError: a version could not be read; nothing was deleted.
    """
    current = read_published_cut(store, spec.name)
    if current is None:
        return []
    oldest = clock.wall_ticks() / 1_000_000 - grace
    notes = _read_notes(spec, store)
    found = (
        entry
        for table, location in current.tables.items()
        for entry in _list_orphan_files(spec, store, table, location, notes, grace)
        if entry.modified is None or entry.modified <= oldest
    )
    orphans = list(islice(found, _MAX_FILES_PER_RUN))
    for entry in orphans if not dry_run else ():
        store.delete(entry.key)
    return orphans


def _list_orphan_files(
    spec: PipelineSpec,
    store: Store,
    table: str,
    location: str,
    notes: list[dict[str, Any]],
    grace: float,
) -> Iterator[ObjectInfo]:
    # The versions are read before the listings: what is added between the two is too young, or has
    # a bound above this version's sequence number.
    with translate_read_errors(spec, table):
        versions = _open_versions(store, table, location, notes)
        named = _collect_named_files(versions)
    metadata = versions[location].metadata
    number = get_newest_sequence_number(metadata)
    folder = BucketLayout(spec.name).iceberg_table_folder(table)
    for entry in store.list_objects(f"{folder}/{MERGED_FOLDER}/"):
        bound = parse_commit_bound(entry.key)
        if bound is not None and bound < number and store.uri(entry.key) not in named:
            yield entry
    snapshot = metadata.current_snapshot()
    address = snapshot.manifest_list if snapshot else ""
    # A catalog may have put the table elsewhere, or write its address in another form. What it
    # names cannot be recognized then.
    if not address.startswith(store.uri(f"{folder}/metadata/")):
        return
    newest = store.stat(address.removeprefix(store.uri("")).lstrip("/"))
    if newest is None or newest.modified is None:
        return
    for entry in store.list_objects(f"{folder}/metadata/"):
        # The grace between the two times also covers a store whose clock was set back.
        old = entry.modified is not None and entry.modified < newest.modified - grace
        if old and store.uri(entry.key) not in named:
            yield entry


def _open_versions(
    store: Store, table: str, location: str, notes: list[dict[str, Any]]
) -> dict[str, StaticTable]:
    """Return the version at a location, and those that were noted, by their locations."""
    properties = build_io_properties(store)
    versions = {location: StaticTable.from_metadata(location, properties)}
    for noted in {note["tables"][table] for note in notes if table in note["tables"]} - {location}:
        # A table that was rebuilt since then has lost its versions; nobody reads them any more.
        with suppress(FileNotFoundError):
            versions[noted] = StaticTable.from_metadata(noted, properties)
    return versions


def _collect_named_files(versions: dict[str, StaticTable]) -> set[str]:
    """Return the addresses of the versions and of every file that their snapshots name."""
    named = set(versions)
    snapshots: dict[str, Snapshot] = {}
    for version in versions.values():
        snapshots |= {snapshot.manifest_list: snapshot for snapshot in version.metadata.snapshots}
        statistics = (*version.metadata.statistics, *version.metadata.partition_statistics)
        named |= {one.statistics_path for one in statistics}  # written by other engines
        files = version.io
    manifests = {m.manifest_path: m for s in snapshots.values() for m in s.manifests(files)}
    named |= snapshots.keys() | manifests.keys()
    for manifest in manifests.values():
        named |= {e.data_file.file_path for e in manifest.fetch_manifest_entry(files)}
    return named


def _read_notes(spec: PipelineSpec, store: Store) -> list[dict[str, Any]]:
    """Return what the pointer named and when (seconds since 1970), oldest first."""
    try:
        stored = store.get(BucketLayout(spec.name).table_versions_key)
    except NotFoundError:
        return []
    notes: list[dict[str, Any]] = parse_json(stored.data)["notes"]
    return notes
