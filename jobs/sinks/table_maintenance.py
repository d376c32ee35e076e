"""Maintains the tables: merges small files of older epochs, and deletes files that are not read.

Merging

1. **Plan** on main: files of one partition and of similar size, whose slots are not among the
   newest ones, so that most restores still drop whole files. Similar size means that a row is
   rewritten a few times in its life, not in each run. Files of an earlier partitioning are planned
   whatever their size, and are rearranged to the current one.
2. **Write** the merged files, under names that carry a commit bound (see `table_files`).
3. **Commit** them in place of their parts, on the then current main, in one snapshot that changes
   no row. If another publisher committed meanwhile, check whether main still has all the parts and
   try again; if it has not (a restore removed some), give up.
4. **Point** readers to the new metadata, if the pointer still names the metadata that it was made
   from; otherwise the next publisher does.

A crash after any step leaves unreferenced files only.

Deleting

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

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pyarrow as pa
import structlog
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationException
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.store import NotFoundError, ObjectInfo, Store
from tidegate.errors import get_first_line
from tidegate.jobs.engine.interfaces import WorkRunner, run_work_here
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .errors import COMPACTION_UNAVAILABLE, POINTER_LOST
from .file_arrangement import merge_data_files
from .iceberg_catalog import (
    build_io_properties,
    list_outage_errors,
    open_catalog,
    resolve_namespace,
)
from .lineage_position import PublishedCut, read_published_cut, replace_table_location
from .published_tables import translate_read_errors
from .table_files import (
    MERGED_FOLDER,
    LiveDataFile,
    PartitionValues,
    PhysicalLayout,
    get_newest_sequence_number,
    parse_commit_bound,
)
from .table_follower import TableFollower

_NEWEST_SLOTS_KEPT = 100  # newest slots whose files stay as they are
_MIN_FILES_PER_MERGE = 8  # files of similar size that are worth a new one
_LOWEST_LEVEL_BYTES = 64_000  # smaller files count as files of one size
_MERGES_PER_COMMIT = 16  # merged files in one commit: bounds what a conflict costs
_MAX_MERGES_PER_RUN = 256  # merged files per table and run, so that a run over a long history ends
_COMMIT_ATTEMPTS = 5

_log = structlog.get_logger("tidegate.compaction")


@dataclass(frozen=True)
class CompactionResult:
    """Data files of main before and after; both are 0 if `skipped` says why nothing was done."""

    before: int
    after: int
    skipped: str = ""


def compact_tables(
    spec: PipelineSpec, store: Store, run: WorkRunner | None = None
) -> dict[str, CompactionResult]:
    """Merge small files of every published table; rows, positions and restores are unaffected.

    Publishers may run at the same time. One run merges at most 256 groups of files per table.

    Args:
        spec: the pipeline.
        store: its store.
        run: moves the rows; unless given, this process does.

    Returns:
        Table -> result; tables that need nothing have equal numbers. Empty if the spec switches
        compaction off or nothing was published.

    Raises:
        TransientError: the catalog or the store cannot be reached; finished merges stay.
    """
    # What was never published has no table.
    current = read_published_cut(store, spec.name)
    if current is None or not spec.outputs.compact:
        return {}
    run = run or partial(run_work_here, store)
    outages: tuple[type[Exception], ...] = (ImportError, *list_outage_errors())
    try:
        with closing(open_catalog(spec, store, durable=True)) as catalog:
            return {
                table: _TableCompactor(spec, store, catalog, current, table, run).compact()
                for table in current.tables
                if table in spec.table_names
            }
    except outages as error:
        raise COMPACTION_UNAVAILABLE(pipeline=spec.name, cause=get_first_line(error)) from error


_FileGroup = list[LiveDataFile]  # files that become one file per partition


@dataclass(eq=False, repr=False)
class _TableCompactor:
    """One table in one run."""

    _spec: PipelineSpec
    _store: Store
    _catalog: Catalog
    _current: PublishedCut
    _name: str
    _run: WorkRunner

    def __post_init__(self) -> None:
        self._target = self._spec.outputs.file_mb * 1_000_000

    def compact(self) -> CompactionResult:
        """Plan, write, commit and point."""
        try:
            follower = self._load_follower()
            if follower.owner_uid() != self._current.uid:
                return CompactionResult(0, 0, "another pipeline publishes into it")
            files, arrangement = follower.live_files(), follower.current_layout()
        except NoSuchTableError:
            return CompactionResult(0, 0, "the catalog does not have it")
        except ValueError as error:  # only other engines can cause it
            return CompactionResult(0, 0, str(error))
        groups = list(self._plan_groups(follower, files))
        try:
            done = self._merge_groups(follower, groups, arrangement)
        except pa.ArrowInvalid as error:  # the other tables, and retention, must go on
            why = f"a data file is damaged: {get_first_line(error)}"
            _log.warning("compaction_left", table=self._name, why=why)
            return CompactionResult(len(files), len(files), why)
        return CompactionResult(len(files), len(files) + done)

    def _load_follower(self) -> TableFollower:
        return TableFollower(
            self._catalog.load_table((resolve_namespace(self._spec), self._name)),
            self._current.uid,
        )

    def _plan_groups(
        self, follower: TableFollower, files: Iterable[LiveDataFile]
    ) -> Iterator[_FileGroup]:
        """Step 1: yield groups of files to merge."""
        # Newest slots stay as they are: most restores go back a few epochs, and then drop whole
        # files.
        mark = follower.newest_position()
        upto = (mark.upto if mark else 0) - _NEWEST_SLOTS_KEPT
        groups: dict[tuple[int, str, int], list[LiveDataFile]] = {}
        present = follower.table.metadata.default_spec_id
        for one in files:
            if one.last is None or one.last > upto:
                continue
            size, number = one.file.file_size_in_bytes, one.file.spec_id
            # Files of an earlier partitioning are rewritten, whatever their size.
            level = _compute_size_level(size) if number == present else 0
            if number != present or size < self._target / 2:
                groups.setdefault((number, str(one.file.partition), level), []).append(one)
        for (number, _, _), members in groups.items():
            fewest = _MIN_FILES_PER_MERGE if number == present else 1
            yield from self._split_into_groups(
                sorted(members, key=lambda one: (one.first or 0, one.file.file_path)), fewest
            )

    def _split_into_groups(self, members: list[LiveDataFile], fewest: int) -> Iterator[_FileGroup]:
        batch: _FileGroup = []
        size = 0
        for one in members:
            batch.append(one)
            size += one.file.file_size_in_bytes
            if size >= self._target:
                yield batch
                batch, size = [], 0
        if len(batch) >= fewest:
            yield batch

    def _merge_groups(
        self, follower: TableFollower, bins: list[_FileGroup], arrangement: PhysicalLayout
    ) -> int:
        """Do steps 2 to 4 for some groups at a time; return the change in the number of files."""
        done = 0
        for start in range(0, min(len(bins), _MAX_MERGES_PER_RUN), _MERGES_PER_COMMIT):
            chosen = bins[start : start + _MERGES_PER_COMMIT]
            new = self._write_merged_files(follower, chosen, arrangement)
            if not self._commit_merged_files(chosen, new, follower.table.metadata):
                _log.info("compaction_left", table=self._name, merged=len(new))
                return done
            done += len(new) - sum(map(len, chosen))
        return done

    def _write_merged_files(
        self, follower: TableFollower, bins: Iterable[_FileGroup], arrangement: PhysicalLayout
    ) -> dict[str, PartitionValues]:
        """Step 2: write the merged files of some groups; return address -> partition."""
        metadata = follower.table.metadata
        folder = BucketLayout(self._spec.name).iceberg_table_folder(self._name)
        new: dict[str, PartitionValues] = {}
        # One after the other: each may need much memory, and epochs go on beside them.
        for group in bins:
            parts = [one.file for one in group]
            work = partial(merge_data_files, metadata, parts, folder, arrangement, None)
            new |= self._run(work).list_addresses(self._store)
        return new

    def _commit_merged_files(
        self,
        bins: Iterable[_FileGroup],
        new: Mapping[str, PartitionValues],
        metadata: TableMetadata,
    ) -> bool:
        """Steps 3 and 4; return False if the merged files cannot be committed."""
        gone = [part.file for parts in bins for part in parts]
        for _ in range(_COMMIT_ATTEMPTS):
            try:
                follower = self._load_follower()
                if follower.table.metadata.default_spec_id != metadata.default_spec_id:
                    return False  # the new files are of a partitioning that is past
                before = follower.metadata_location
                follower.replace_files(gone, new)
            # Another publisher committed. The parts may still be there, so the same files are tried
            # again.
            except CommitFailedException:
                continue
            except (
                NoSuchTableError,
                ValidationException,
                FileNotFoundError,
            ):  # a sleeper's files may be gone already
                return False
            replace_table_location(
                self._store, self._spec.name, self._name, before, follower.metadata_location
            )
            return True
        return False


def _compute_size_level(size: int) -> int:
    """Return the size level; files of one level differ by less than the number of files merged."""
    if size < _LOWEST_LEVEL_BYTES:
        return 0
    return 1 + int(math.log(size / _LOWEST_LEVEL_BYTES, _MIN_FILES_PER_MERGE))


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
        PoisonError: the pointer is damaged or gone.
    """
    current = read_published_cut(store, spec.name)
    # Notes, readable or not, tell that there was one. Without it no one knows what tables need.
    if current is None and store.stat(BucketLayout(spec.name).table_versions_key) is not None:
        raise POINTER_LOST(pipeline=spec.name)
    notes = _read_notes(spec, store)
    found: set[str] = set()
    for table, versions in _open_tables(spec, store, current, notes) if current else ():
        with translate_read_errors(spec, table):
            found |= _collect_named_files(versions)
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
        grace: seconds for which such a file is kept: what `note_table_versions` returned.
        dry_run: only list them.
        clock: gives the age of a file.

    Returns:
        The deleted files, with `dry_run` those to delete; at most 100,000.

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
        for table, versions in _open_tables(spec, store, current, notes)
        for entry in _list_orphan_files(spec, store, table, versions, grace)
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
    versions: dict[str, StaticTable],
    grace: float,
) -> Iterator[ObjectInfo]:
    # The versions are read before the listings: what is added between the two is too young, or has
    # a bound above this version's sequence number.
    with translate_read_errors(spec, table):
        named = _collect_named_files(versions)
    metadata = next(iter(versions.values())).metadata
    number = get_newest_sequence_number(metadata)
    folder = BucketLayout(spec.name).iceberg_table_folder(table)
    for entry in store.list_objects(f"{folder}/{MERGED_FOLDER}/"):
        bound = parse_commit_bound(entry.key)
        if bound is not None and bound < number and store.uri(entry.key) not in named:
            yield entry
    snapshot = metadata.current_snapshot()
    address = _normalize_address(snapshot.manifest_list) if snapshot else ""
    # A catalog may have put the table elsewhere. Then nothing here belongs to it.
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


def _open_tables(
    spec: PipelineSpec, store: Store, current: PublishedCut, notes: list[JsonObject]
) -> Iterator[tuple[str, dict[str, StaticTable]]]:
    """Yield the tables that the pointer names, with their versions.

    Those of windows and streams that have left the spec are among them, unless someone has deleted
    them since.
    """
    for table, location in current.tables.items():
        with translate_read_errors(spec, table):
            try:
                versions = _open_versions(store, table, location, notes)
            except FileNotFoundError:
                if table in spec.table_names:
                    raise
                continue
        yield table, versions


def _open_versions(
    store: Store, table: str, location: str, notes: list[JsonObject]
) -> dict[str, StaticTable]:
    """Return the version at a location, then those that were noted, by their locations."""
    properties = build_io_properties(store)
    versions = {location: StaticTable.from_metadata(location, properties)}
    for noted in {note["tables"][table] for note in notes if table in note["tables"]} - {location}:
        # A table that was rebuilt since then has lost its versions; no reader opens them any more.
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
    return set(map(_normalize_address, named))


def _normalize_address(address: str) -> str:
    """Return an address in the form of `Store.uri`; Java's catalogs write others.

    >>> [_normalize_address(one) for one in ("file:/a/b", "file:///a/b", "s3a://a/b", "/a/b")]
    ['/a/b', '/a/b', 's3://a/b', '/a/b']
    """
    return re.sub(r"^file:/+", "/", address).replace("s3a://", "s3://", 1)


def _read_notes(spec: PipelineSpec, store: Store) -> list[JsonObject]:
    """Return what the pointer named and when (seconds since 1970), oldest first."""
    try:
        stored = store.get(BucketLayout(spec.name).table_versions_key)
    except NotFoundError:
        return []
    try:
        notes: list[JsonObject] = parse_json(stored.data)["notes"]
    except (ValueError, KeyError, TypeError):  # damaged: made again, and nothing deleted until then
        return []
    return notes
