"""Keeps one Iceberg table in step with the log: appends slots and rewinds after a restore.

Snapshots carry the table's position in the log. These rules keep a slot from being applied twice or
on the wrong timeline (`docs/architecture.md`, section 2; the tests reproduce the failures):

* pyiceberg's commit retry is off: it would rebase on any snapshot, without looking at its position.
* Every commit asserts that main is still the snapshot whose position was checked.
* A rewind removes the abandoned slots *and* appends an empty fence snapshot in the same commit. It
  needs no old snapshot, so the table can follow any restore, however old. And main is never an old
  snapshot again, on which a delayed publisher could still commit.

See `docs/decisions/0005-tables-are-rewound-in-one-commit.md`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions.parser import parse
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_of
from pyiceberg.table.update.snapshot import ExpireSnapshots, ManageSnapshots
from pyiceberg.transforms import IdentityTransform, parse_transform
from pyiceberg.utils.concurrent import ExecutorFactory

from .errors import TABLE_MISFIT
from .lineage_position import FollowerPosition
from .table_files import (
    LiveDataFile,
    PartitionValues,
    PhysicalLayout,
    describe_data_file,
    list_live_files,
    stage_file_replacement,
)

UID, TIMELINE, FROM, UPTO, FENCE, COMPACTED = (
    f"tidegate.{n}" for n in ("uid", "timeline", "from", "upto", "fence", "compacted")
)
TABLE_PROPERTIES = {
    "commit.retry.num-retries": "0",
    # Without merging, every commit rewrites a manifest list as long as the table's history.
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "16",
    # When pyiceberg merges manifests, it writes the entries of all that are smaller again.
    # With its own 8 MB a driver fell behind within half an hour (`make bench-latency`).
    "commit.manifest.target-size-bytes": "131072",
    # Data files belong to checkpoints; only tidegate's garbage collection may delete them.
    "gc.enabled": "false",
    "write.metadata.previous-versions-max": "20",
    # A rewind drops whole files by these bounds. By default only the first columns have some.
    "write.metadata.metrics.column._epoch": "full",
}


BARRIER_TAG_PREFIX = "barrier-"


CutFiles = Callable[[TableMetadata, list[DataFile], int], Mapping[str, PartitionValues]]
"""Writes data files of a table again, without the rows after a slot; returns address -> partition.
"""


def build_tag_name(timeline: int, slot: int) -> str:
    """Return the tag of a group end; every table of the pipeline has it."""
    return f"t{timeline}-e{slot}"


@dataclass(frozen=True)
class TagChange:
    """The tags that a commit gives to its snapshot; of the older ones it keeps only `kept`."""

    new: tuple[str, ...]
    kept: frozenset[str]


@dataclass(eq=False, repr=False)
class TableFollower:
    """A table whose snapshots carry positions in the log.

    Each change is one commit. It raises CommitFailedException if another publisher committed first;
    then nothing was changed, and the table must be loaded again.
    """

    table: Table
    uid: str

    @property
    def metadata_location(self) -> str:
        """The address of the table's metadata file."""
        return self.table.metadata_location

    def owner_uid(self) -> str | None:
        """Return the uid of the pipeline that published last; None for a new table."""
        newest = self._newest_published_snapshot()
        return newest.summary.additional_properties.get(UID) if newest and newest.summary else None

    def newest_position(self) -> FollowerPosition | None:
        """Return the newest position on main; None if the table's first commit never happened."""
        newest = self._newest_published_snapshot()
        return _parse_position(newest) if newest else None

    def was_rolled_back(self) -> bool:
        """Return whether a person or another program moved main back.

        Then the newest position that was ever committed is not the one of main.
        """
        newest = self._newest_published_snapshot()
        return newest is not None and newest is not self._last_published_snapshot()

    def last_position(self) -> FollowerPosition | None:
        """Return the newest position that was ever committed, also if main was moved back."""
        last = self._last_published_snapshot()
        return _parse_position(last) if last else None

    def _last_published_snapshot(self) -> Snapshot | None:
        # Snapshots without a position, of compactions, do not count.
        marked = [s for s in self.table.metadata.snapshots if _parse_position(s)]
        return max(marked, key=lambda s: s.sequence_number or 0, default=None)

    def list_tags(self) -> dict[str, FollowerPosition]:
        """Return tag -> position of its snapshot, oldest first.

        The publisher tags all tables after each group of slots (`IcebergSink`), and keeps the
        newest tags.
        """
        metadata = self.table.metadata
        tagged = {
            name: _parse_position(snapshot)
            for name, ref in metadata.refs.items()
            if ref.snapshot_ref_type is SnapshotRefType.TAG
            and (snapshot := metadata.snapshot_by_id(ref.snapshot_id)) is not None
        }
        found = [(name, position) for name, position in tagged.items() if position is not None]
        return dict(sorted(found, key=lambda item: (item[1].upto, item[1].timeline)))

    def add_missing_columns(self, schema: Any) -> None:
        """Add the columns of an Arrow schema that the table lacks.

        A spec may gain columns; old rows read as null there.
        """
        # Columns are never dropped: older files still have them, and a spec may gain them again.
        known = {field.name for field in self.table.schema().fields}
        if not known.issuperset(schema.names):
            with self.table.update_schema() as update:
                update.union_by_name(schema)

    def current_layout(self) -> PhysicalLayout:
        """Return how new files of the table are partitioned and sorted.

        Raises:
            ValueError: the table uses a transform that tidegate does not support.
        """
        return PhysicalLayout.from_metadata(self.table.metadata)

    def set_layout(self, wanted: PhysicalLayout) -> None:
        """Set how new files of the table are partitioned and sorted.

        Existing files stay as they are.
        """
        metadata = self.table.metadata
        if _has_layout(metadata, wanted):
            return
        name = metadata.schema().find_column_name
        fields = {(name(f.source_id), str(f.transform)): f.name for f in metadata.spec().fields}
        parts = {(part.column, part.iceberg_transform): part for part in wanted.partitions}
        with _CachedTransaction(self.table) as commit:
            with commit.update_spec() as update:
                for known in fields.keys() - parts.keys():
                    update.remove_field(fields[known])
                for part in (part for known, part in parts.items() if known not in fields):
                    update.add_field(part.column, parse_transform(part.iceberg_transform))
            with commit.update_sort_order() as sorting:
                for key in wanted.order:
                    add_field = sorting.desc if key.descending else sorting.asc
                    add_field(key.column, IdentityTransform())

    def initialize(self, timeline: int, upto: int) -> None:
        """Commit the first snapshot of a new table, which is empty: no slot so far has rows."""
        with _CachedTransaction(self.table) as commit:
            _append_files(commit, {}, self._position_properties(timeline, 1, upto))

    def append_slots(
        self,
        files: Mapping[str, PartitionValues],
        timeline: int,
        first: int,
        upto: int,
        tags: TagChange | None = None,
    ) -> None:
        """Append slots `first` to `upto`.

        Args:
            files: address -> partition of the Parquet files of these slots.
            timeline: the lineage on which `first` and `upto` are positions.
            first: the slot after the table's position.
            upto: the new position.
            tags: the change of tags where `upto` gets one; None elsewhere.

        Raises:
            PoisonError: a file does not fit the table.
        """
        with _CachedTransaction(self.table) as commit:
            _append_files(commit, files, self._position_properties(timeline, first, upto))
            if tags is not None:
                self._tag_and_expire(commit, tags)

    def rewind(self, timeline: int, position: int, cut_files: CutFiles) -> None:
        """Remove the slots after `position`, and set main's position to it on `timeline`.

        This is one commit with a new snapshot: main is never an old snapshot again, so a commit
        that was prepared on the old main is refused. Files of single slots are dropped by their
        bounds; a file with more slots is rewritten, by `cut_files`.

        The snapshots between carry the position of the fence as well. If a person rolls main back
        to one of them by hand, the position before them would claim rows that were dropped.

        Tags behind `position` are removed: what they name is not part of the lineage any more.
        """
        beyond, marked = (
            f"_epoch > {position}",
            self._position_properties(timeline, position + 1, position),
        )
        with _CachedTransaction(self.table) as commit:
            # By whole files first; this reads metadata only.
            with commit.update_snapshot(snapshot_properties=marked).delete() as dropped:
                dropped.delete_by_predicate(parse(beyond))
            if dropped.rewrites_needed and not self._rewrite_merged_files(
                commit, position, marked, cut_files
            ):
                commit.delete(beyond, snapshot_properties=marked)
            _append_files(commit, {}, marked | {FENCE: str(timeline)})
            _change_tags(commit, [n for n, at in self.list_tags().items() if at.upto > position])

    def live_files(self) -> list[LiveDataFile]:
        """Return the data files of main.

        Raises:
            ValueError: another engine deleted single rows.
        """
        return list(list_live_files(self.table.metadata, self.table.io))

    def replace_files(self, gone: Collection[DataFile], new: Mapping[str, PartitionValues]) -> None:
        """Replace files by merged files with the same rows.

        The new snapshot has no position, so the table keeps its position.

        Raises:
            CommitFailedException: main has moved.
            ValidationException: main does not have the old files any more, or the new ones came too
                late.
        """
        with _CachedTransaction(self.table) as commit:
            stage_file_replacement(
                commit, self.table.io, gone, new, Operation.REPLACE, {COMPACTED: str(len(gone))}
            )

    def _rewrite_merged_files(
        self,
        commit: Transaction,
        position: int,
        marked: Mapping[str, str],
        cut_files: CutFiles,
    ) -> bool:
        """Rewrite merged files without the rows after a position.

        Returns:
            False if files that tidegate did not merge hold such rows.
        """
        metadata, files = commit.table_metadata, self.table.io
        try:
            beyond = [
                one
                for one in list_live_files(metadata, files)
                if one.last is None or one.last > position
            ]
        except ValueError:
            # Another engine has deleted single rows, so the files do not show what is
            # in the table.
            return False
        # Files that other programs wrote are not rewritten here; the caller decides about them.
        if not all(one.is_merged and one.last is not None for one in beyond):
            return False
        gone = [one.file for one in beyond]
        new = cut_files(metadata, gone, position)
        stage_file_replacement(commit, files, gone, new, Operation.OVERWRITE, marked)
        return True

    def _newest_published_snapshot(self) -> Snapshot | None:
        metadata = self.table.metadata
        line = ancestors_of(metadata.current_snapshot(), metadata)
        return next((snapshot for snapshot in line if _parse_position(snapshot)), None)

    def _position_properties(self, timeline: int, first: int, upto: int) -> dict[str, str]:
        return {UID: self.uid, TIMELINE: str(timeline), FROM: str(first), UPTO: str(upto)}

    def _tag_and_expire(self, commit: Transaction, tags: TagChange) -> None:
        """Tag the new snapshot, drop old tags, and expire snapshots without a reference.

        Data files stay.
        """
        before = self.table.metadata
        known = [n for n, r in before.refs.items() if r.snapshot_ref_type is SnapshotRefType.TAG]
        # In one commit: readers of tags see the old set or the new one.
        _change_tags(commit, set(known) - tags.kept - set(tags.new), tags.new)
        named = {ref.snapshot_id for ref in commit.table_metadata.refs.values()}
        newest = (
            self._newest_published_snapshot()
        )  # the mark before this one stays: a reader may just have opened it
        unnamed = [
            s.snapshot_id
            for s in before.snapshots
            if s.snapshot_id not in named and s is not newest
        ]
        if unnamed:
            ExpireSnapshots(commit).by_ids(unnamed).commit()


class _CachedTransaction(Transaction):
    """A transaction that builds its metadata once per staged change instead of at every access.

    A commit takes a sixth of the time.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._built: tuple[int, TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata with the staged changes."""
        if self._built is None or self._built[0] != len(self._updates):
            self._built = (len(self._updates), super().table_metadata)
        return self._built[1]

    def commit_transaction(self) -> Table:
        """Commit once.

        Raises:
            CommitFailedException: another publisher committed first; nothing was changed.
        """
        try:
            return super().commit_transaction()
        # Main is the same snapshot, but not for the first time: pyiceberg compares sequence
        # numbers.
        except ValueError as error:
            raise CommitFailedException(str(error)) from error


def _has_layout(metadata: TableMetadata, wanted: PhysicalLayout) -> bool:
    try:
        found = PhysicalLayout.from_metadata(metadata)
    except ValueError:
        return False
    return set(found.partitions) == set(wanted.partitions) and found.order == wanted.order


def _append_files(
    commit: Transaction, files: Mapping[str, PartitionValues], properties: dict[str, str]
) -> None:
    """Do what pyiceberg's `add_files` does, also for partitions that column bounds cannot tell.

    Its check for duplicates would read every manifest of the table; the marks make duplicates
    impossible.
    """
    if files and commit.table_metadata.name_mapping() is None:
        names = commit.table_metadata.schema().name_mapping.model_dump_json()
        commit.set_properties({TableProperties.DEFAULT_NAME_MAPPING: names})
    describe = partial(describe_data_file, commit._table.io, commit.table_metadata)
    update = commit.update_snapshot(snapshot_properties=properties)
    with update.merge_append() if files else update.fast_append() as append:
        try:
            # In threads: each of up to a hundred files costs requests to the store.
            for one in ExecutorFactory.get_or_create().map(describe, files, files.values()):
                append.append_data_file(one)
        except pa.ArrowInvalid:  # damaged, whatever its columns are
            raise
        except (ValueError, TypeError, NotImplementedError) as error:
            raise TABLE_MISFIT(table=".".join(commit._table.name()), cause=error) from error


def _change_tags(commit: Transaction, old: Collection[str], new: Collection[str] = ()) -> None:
    """Remove tags, and give others to the newest snapshot."""
    if not old and not new:
        return
    manage = ManageSnapshots(commit)
    for name in old:
        manage.remove_tag(name)
    for name in new:
        manage.create_tag(commit.table_metadata.refs[MAIN_BRANCH].snapshot_id, name)
    manage.commit()


def _parse_position(snapshot: Snapshot) -> FollowerPosition | None:
    found: dict[str, Any] = snapshot.summary.additional_properties if snapshot.summary else {}
    if UPTO not in found:
        return None
    return FollowerPosition(int(found[TIMELINE]), int(found[UPTO]))
