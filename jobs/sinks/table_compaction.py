"""Small files of older epochs become larger ones, and merged files that no snapshot names any more are deleted.

1. **Plan** on main as it is: files of one partition and of like size, whose slots are older than
    the newest ones, so that most restores still drop whole files. Of like size: a row is written
    again a few times in its life, not in each run. Files of an earlier partitioning are planned
    whatever their size, and come out arranged as the table is now.
2. **Write** the merged files, under names that say until when they may be committed (`rewrite`).
3. **Commit** them in the place of their parts, on main as it is then: one snapshot, in which no row
  is another one. If somebody committed meanwhile, look again whether main has all the parts, and
  try again; if not (a restore took some), leave it.
4. **Point** readers to it, if they still are at what it was made from; else the next publisher
  does.

A crash after any step leaves files that nobody names. Only where all publishers use one catalog:
drivers with catalogs of their own would each merge for themselves, and one's files would be the
other's garbage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import structlog
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    RESTError,
    ValidationException,
)
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadata
from sqlalchemy.exc import SQLAlchemyError

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.store import ObjectInfo, Store
from tidegate.errors import TransientError
from tidegate.jobs.sinks.iceberg_catalog import (
    build_io_properties,
    has_shared_catalog,
    open_catalog,
    resolve_namespace,
)
from tidegate.jobs.sinks.lineage_position import (
    PublishedCut,
    read_published_cut,
    replace_table_location,
)
from tidegate.jobs.sinks.published_tables import translate_read_errors, use_plain_types
from tidegate.jobs.sinks.table_files import (
    MERGED_FOLDER,
    LiveDataFile,
    PartitionValues,
    PhysicalLayout,
    conform_to_schema,
    get_newest_sequence_number,
    make_merged_stem,
    parse_commit_bound,
    read_file_rows,
    split_by_partition,
    write_partition_files,
)
from tidegate.jobs.sinks.table_follower import TableFollower
from tidegate.jobs.spec.pipeline import PipelineSpec

_NEWEST_SLOTS_KEPT = 100  # newest slots whose files stay as they are
_MIN_FILES_PER_MERGE = 8  # files of like size that are worth a new one
_LOWEST_LEVEL_BYTES = 64_000  # bytes; files below are of one size
_MERGES_PER_COMMIT = 16  # merged files in one commit: bounds what a conflict costs
_MAX_MERGES_PER_RUN = 256  # merged files per table and run, so that a run over a long history ends
_COMMIT_ATTEMPTS = 5

_log = structlog.get_logger("tidegate.compaction")


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What a run made of one table.

    Data files of main before and after, and why nothing was done, if it could not.
    """

    before: int
    after: int
    skipped: str = ""


def compact_tables(spec: PipelineSpec, store: Store) -> dict[str, CompactionResult]:
    """Merge small files of every published table; rows, marks and restores stay what they are.

    Safe beside any publisher.

    Returns:
        Table -> what became of its files; tables that need nothing are in it with equal numbers.
        Empty where the spec says so, nothing was published, or drivers have catalogs of their own.

    Raises:
        TransientError: the catalog or the store cannot be reached; what was merged so far stays.
    """
    current = read_published_cut(store, spec.name)
    if current is None or not spec.outputs.compact or not has_shared_catalog(spec, store):
        return {}
    try:
        with closing(open_catalog(spec, store, Path(), durable=True)) as catalog:
            return {
                table: _TableCompactor(spec, store, catalog, current, table).compact()
                for table in current.tables
            }
    except (OSError, ImportError, SQLAlchemyError, RESTError) as error:
        raise TransientError(
            f"the tables of {spec.name} cannot be compacted now: {str(error).splitlines()[0]}",
            code="compaction.unavailable",
            pipeline=spec.name,
            kept="the tables",
            advice="check the store and the catalog; the next maintenance tries again",
            retry_after=60.0,
        ) from error


def delete_orphan_files(
    spec: PipelineSpec,
    store: Store,
    *,
    grace: float,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> list[ObjectInfo]:
    """Delete merged files that no snapshot names and that none will name any more: see `rewrite`.

    Args:
        spec: the pipeline.
        store: its store.
        grace: seconds for which such a file stays.
        dry_run: only say which.
        clock: tells how old a file is.
    """
    current = read_published_cut(store, spec.name)
    if current is None or not has_shared_catalog(spec, store):
        return []
    going: list[ObjectInfo] = []
    for table, location in current.tables.items():
        # First what is named, then what is there: a file that comes in between has a bound above
        # this table's number.
        with translate_read_errors(spec, table):
            found = StaticTable.from_metadata(location, build_io_properties(store))
            named, number = (
                _collect_snapshot_files(found),
                get_newest_sequence_number(found.metadata),
            )
        for entry in store.list_objects(f"{spec.name}/iceberg/{table}/{MERGED_FOLDER}/"):
            bound = parse_commit_bound(entry.key)
            young = (
                entry.modified is not None
                and clock.wall_ticks() / 1_000_000 - entry.modified < grace
            )
            if (
                bound is not None
                and bound < number
                and store.uri(entry.key) not in named
                and not young
            ):
                going.append(entry)
    for entry in going if not dry_run else ():
        store.delete(entry.key)
    return going


def _collect_snapshot_files(table: StaticTable) -> set[str]:
    manifests = {
        m.manifest_path: m for s in table.metadata.snapshots for m in s.manifests(table.io)
    }
    return {
        e.data_file.file_path for m in manifests.values() for e in m.fetch_manifest_entry(table.io)
    }


@dataclass(frozen=True, slots=True)
class _FileGroup:
    """Files that become one per partition."""

    parts: tuple[LiveDataFile, ...]

    @property
    def row_count(self) -> int:
        return sum(part.file.record_count for part in self.parts)


class _TableCompactor:
    """One table in one run."""

    def __init__(
        self, spec: PipelineSpec, store: Store, catalog: Catalog, current: PublishedCut, table: str
    ) -> None:
        self._spec, self._store, self._catalog = spec, store, catalog
        self._uid, self._name = current.uid, table
        self._target = spec.outputs.file_mb * 1_000_000

    def compact(self) -> CompactionResult:
        """All four steps."""
        try:
            follower = self._load_follower()
            if follower.owner_uid() != self._uid:
                return CompactionResult(0, 0, "another pipeline publishes into it")
            files, arrangement = follower.live_files(), follower.current_layout()
        except NoSuchTableError:
            return CompactionResult(0, 0, "the catalog does not have it")
        except ValueError as error:  # only other engines bring a table there
            return CompactionResult(0, 0, str(error))
        done = self._merge_groups(follower, list(self._plan_groups(follower, files)), arrangement)
        return CompactionResult(len(files), len(files) + done)

    def _load_follower(self) -> TableFollower:
        return TableFollower(
            self._catalog.load_table((resolve_namespace(self._spec), self._name)), self._uid
        )

    def _plan_groups(
        self, follower: TableFollower, files: Iterable[LiveDataFile]
    ) -> Iterator[_FileGroup]:
        """Step 1."""
        mark = follower.newest_position()
        upto = (mark.upto if mark else 0) - _NEWEST_SLOTS_KEPT
        groups: dict[tuple[int, str, int], list[LiveDataFile]] = {}
        present = follower.table.metadata.default_spec_id
        for one in files:
            if one.last is None or one.last > upto:
                continue
            size, number = one.file.file_size_in_bytes, one.file.spec_id
            if number != present:
                groups.setdefault((number, str(one.file.partition), 0), []).append(one)
            elif size < self._target / 2:
                groups.setdefault(
                    (number, str(one.file.partition), _compute_size_level(size)), []
                ).append(one)
        for (number, _, _), members in groups.items():
            fewest = _MIN_FILES_PER_MERGE if number == present else 1
            yield from self._split_into_groups(
                sorted(members, key=lambda one: (one.first or 0, one.file.file_path)), fewest
            )

    def _split_into_groups(self, members: list[LiveDataFile], fewest: int) -> Iterator[_FileGroup]:
        batch: list[LiveDataFile] = []
        size = 0
        for one in members:
            batch.append(one)
            size += one.file.file_size_in_bytes
            if size >= self._target:
                yield _FileGroup(tuple(batch))
                batch, size = [], 0
        if len(batch) >= fewest:
            yield _FileGroup(tuple(batch))

    def _merge_groups(
        self, follower: TableFollower, bins: list[_FileGroup], arrangement: PhysicalLayout
    ) -> int:
        """Steps 2 to 4 for so many bins at a time; by how many files main has grown or shrunk."""
        done = 0
        for start in range(0, min(len(bins), _MAX_MERGES_PER_RUN), _MERGES_PER_COMMIT):
            chosen = bins[start : start + _MERGES_PER_COMMIT]
            new = self._write_merged_files(follower, chosen, arrangement)
            if not self._commit_merged_files(chosen, new, follower.table.metadata):
                _log.info("compaction_left", table=self._name, merged=len(new))
                return done
            done += len(new) - sum(len(one.parts) for one in chosen)
        return done

    def _write_merged_files(
        self, follower: TableFollower, bins: Iterable[_FileGroup], arrangement: PhysicalLayout
    ) -> dict[str, PartitionValues]:
        """Step 2."""
        files, metadata = follower.table.io, follower.table.metadata
        schema = use_plain_types(metadata.schema().as_arrow().empty_table()).schema
        schema = pa.schema([field.remove_metadata() for field in schema])
        new: dict[str, PartitionValues] = {}
        for one in bins:
            rows = pa.concat_tables(
                [conform_to_schema(read_file_rows(files, part.file), schema) for part in one.parts]
            )
            assert rows.num_rows == one.row_count  # noqa: S101 - the files would not be those that Iceberg describes
            new |= write_partition_files(
                self._store_merged_file,
                f"{self._spec.name}/iceberg/{self._name}/{make_merged_stem(metadata)}",
                split_by_partition(rows, arrangement),
            )
        return new

    def _store_merged_file(self, key: str, data: bytes, _rows: int) -> str:
        self._store.create(key, data)
        return self._store.uri(key)

    def _commit_merged_files(
        self,
        bins: Iterable[_FileGroup],
        new: Mapping[str, PartitionValues],
        metadata: TableMetadata,
    ) -> bool:
        """Steps 3 and 4."""
        gone = [part.file for one in bins for part in one.parts]
        for _ in range(_COMMIT_ATTEMPTS):
            try:
                follower = self._load_follower()
                if follower.table.metadata.default_spec_id != metadata.default_spec_id:
                    return False  # the new files are of a partitioning that is past
                before = follower.metadata_location
                follower.replace_files(gone, new)
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
    """Files of one level differ in size by less than the number that is merged."""
    return (
        0
        if size < _LOWEST_LEVEL_BYTES
        else 1 + int(math.log(size / _LOWEST_LEVEL_BYTES, _MIN_FILES_PER_MERGE))
    )
