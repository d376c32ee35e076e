"""Merges small files of older epochs.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
import structlog
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    RESTError,
    ValidationException,
)
from pyiceberg.table.metadata import TableMetadata
from sqlalchemy.exc import SQLAlchemyError

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.errors import COMPACTION_UNAVAILABLE
from tidegate.jobs.sinks.iceberg_catalog import (
    open_catalog,
    resolve_namespace,
)
from tidegate.jobs.sinks.lineage_position import (
    PublishedCut,
    read_published_cut,
    replace_table_location,
)
from tidegate.jobs.sinks.published_tables import use_plain_types
from tidegate.jobs.sinks.table_files import (
    LiveDataFile,
    PartitionValues,
    PhysicalLayout,
    conform_to_schema,
    make_merged_stem,
    read_file_rows,
    split_by_partition,
    write_partition_files,
)
from tidegate.jobs.sinks.table_follower import TableFollower
from tidegate.jobs.spec.pipeline import PipelineSpec

_NEWEST_SLOTS_KEPT = 100  # newest slots whose files stay as they are
_MIN_FILES_PER_MERGE = 8  # files of similar size that are worth a new one
_LOWEST_LEVEL_BYTES = 64_000  # smaller files count as files of one size
_MERGES_PER_COMMIT = 16  # merged files in one commit: bounds what a conflict costs
_MAX_MERGES_PER_RUN = 256  # merged files per table and run, so that a run over a long history ends
_COMMIT_ATTEMPTS = 5

_log = structlog.get_logger("tidegate.compaction")


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The number of data files of main before and after, and why nothing was done, if so."""

    before: int
    after: int
    skipped: str = ""


def compact_tables(spec: PipelineSpec, store: Store) -> dict[str, CompactionResult]:
    """Merge small files of every published table; rows, positions and restores are unaffected.

    Publishers may run at the same time.

    Returns:
        Table -> result; tables that need nothing have equal numbers. Empty if the spec switches
        compaction off or nothing was published.

    Raises:
        TransientError: the catalog or the store cannot be reached; finished merges stay.
    """
    current = read_published_cut(store, spec.name)
    if current is None or not spec.outputs.compact:
        return {}
    try:
        with closing(open_catalog(spec, store, durable=True)) as catalog:
            return {
                table: _TableCompactor(spec, store, catalog, current, table).compact()
                for table in current.tables
            }
    except (OSError, ImportError, SQLAlchemyError, RESTError) as error:
        raise COMPACTION_UNAVAILABLE(
            pipeline=spec.name, cause=str(error).splitlines()[0]
        ) from error


@dataclass(frozen=True, slots=True)
class _FileGroup:
    """Files that become one file per partition."""

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
        """Plan, write, commit and point."""
        try:
            follower = self._load_follower()
            if follower.owner_uid() != self._uid:
                return CompactionResult(0, 0, "another pipeline publishes into it")
            files, arrangement = follower.live_files(), follower.current_layout()
        except NoSuchTableError:
            return CompactionResult(0, 0, "the catalog does not have it")
        except ValueError as error:  # only other engines can cause it
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
        """Step 1: yield groups of files to merge."""
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
        """Do steps 2 to 4 for some groups at a time; return the change in the number of files."""
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
        """Step 2: write the merged files of some groups; return address -> partition."""
        files, metadata = follower.table.io, follower.table.metadata
        schema = use_plain_types(metadata.schema().as_arrow().empty_table()).schema
        schema = pa.schema([field.remove_metadata() for field in schema])
        new: dict[str, PartitionValues] = {}
        layout = BucketLayout(self._spec.name)
        for one in bins:
            rows = pa.concat_tables(
                [conform_to_schema(read_file_rows(files, part.file), schema) for part in one.parts]
            )
            # A mismatch means that the files are not those that Iceberg describes.
            assert rows.num_rows == one.row_count  # noqa: S101
            new |= write_partition_files(
                self._store_merged_file,
                f"{layout.iceberg_table_folder(self._name)}/{make_merged_stem(metadata)}",
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
        """Steps 3 and 4; return False if the merged files cannot be committed."""
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
    """Return the size level; files of one level differ by less than the number of files merged."""
    return (
        0
        if size < _LOWEST_LEVEL_BYTES
        else 1 + int(math.log(size / _LOWEST_LEVEL_BYTES, _MIN_FILES_PER_MERGE))
    )
