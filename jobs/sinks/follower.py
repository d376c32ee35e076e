"""One Iceberg table as a follower of the log: marked snapshots, appended and rewound by compare-and-swap.

Rules that keep a slot from being applied twice or on the wrong timeline (design.md section 2, reproduced in the tests):

* pyiceberg's commit retry is off: it would rebase on whatever it finds, without looking at the marks.
* Every commit asserts that main still is the snapshot whose mark was judged.
* A rewind takes the abandoned slots out *and* appends an empty fence in the same commit. It needs no old snapshot, so any
  restore can be followed, however old; and main never is an old snapshot again, on which a sleeper could still commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions.parser import parse
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update.snapshot import ExpireSnapshots, ManageSnapshots

from tidegate.jobs.sinks.marks import Mark
from tidegate.jobs.spec.errors import PoisonError

__all__ = ["TABLE_PROPERTIES", "Follower", "tag_name"]

UID, TIMELINE, FROM, UPTO, FENCE = (f"tidegate.{n}" for n in ("uid", "timeline", "from", "upto", "fence"))
TABLE_PROPERTIES = {
    "commit.retry.num-retries": "0",
    "commit.manifest-merge.enabled": "true",  # else every commit rewrites a list as long as the table's history
    "commit.manifest.min-count-to-merge": "16",
    "gc.enabled": "false",  # data files belong to checkpoints; tidegate's own GC decides about them
    "write.metadata.previous-versions-max": "20",
    "write.metadata.metrics.column._epoch": "full",  # a rewind drops whole files by these bounds, however many columns there are
}


def tag_name(timeline: int, slot: int) -> str:
    """Tag of a group end: every table of the pipeline has it."""
    return f"t{timeline}-e{slot}"


class Follower:
    """A table with marks."""

    def __init__(self, table: Table, uid: str) -> None:
        self.table = table
        self.uid = uid

    @property
    def location(self) -> str:
        """Address of the table's metadata file."""
        return self.table.metadata_location

    def owner(self) -> str | None:
        """The uid of the pipeline that published last; None in a new table."""
        newest = self._newest()
        return newest.summary.additional_properties.get(UID) if newest and newest.summary else None

    def mark(self) -> Mark | None:
        """The newest marked snapshot on main; None in a table whose first commit never happened."""
        newest = self._newest()
        return _mark(newest) if newest else None

    def rolled_back(self) -> bool:
        """Whether somebody else moved main back: the newest mark that was ever set is not the one main has."""
        marked = [s for s in self.table.metadata.snapshots if _mark(s)]
        newest = self._newest()
        return newest is not None and newest is not max(marked, key=lambda s: s.sequence_number or 0)

    def tagged(self) -> list[Mark]:
        """Marks of group ends, oldest first."""
        ends = {r.snapshot_id for r in self.table.metadata.refs.values() if r.snapshot_ref_type is SnapshotRefType.TAG}
        snapshots = [s for s in self.table.metadata.snapshots if s.snapshot_id in ends]
        return sorted((m for s in snapshots if (m := _mark(s))), key=lambda m: (m.upto, m.timeline))

    def widen(self, schema: Any) -> None:
        """Add the columns of an Arrow schema that the table has not got: a spec may grow, and old rows read as null there."""
        known = {field.name for field in self.table.schema().fields}
        if not known.issuperset(schema.names):
            with self.table.update_schema() as update:
                update.union_by_name(schema)

    def begin(self, timeline: int, upto: int) -> None:
        """The first snapshot of a new table: empty, since no slot so far has rows for it."""
        with _Commit(self.table) as commit:
            _append(commit, [], self._marked(timeline, 1, upto))

    def apply(self, files: Sequence[str], timeline: int, first: int, upto: int, tags: Collection[str] | None = None) -> None:
        """Append slots `first` to `upto`.

        Args:
            files: addresses of the Parquet files of these slots.
            timeline: the lineage on which `first` and `upto` are positions.
            first: the slot after the table's mark.
            upto: the new mark.
            tags: at a group end, the names of older tags that are kept; None elsewhere.
        """
        with _Commit(self.table) as commit:
            _append(commit, files, self._marked(timeline, first, upto))
            if tags is not None:
                self._tag(commit, timeline, upto, tags)

    def rewind(self, timeline: int, position: int) -> None:
        """Take out the slots after `position`, and mark main as standing there on another timeline.

        One commit, whose snapshot nobody has seen before: main never is an old snapshot again, and whoever prepared a commit on
        the old main is refused. Files of single slots are dropped by their bounds; one that somebody has compacted is rewritten.
        """
        beyond = f"_epoch > {position}"
        with _Commit(self.table) as commit:
            with commit.update_snapshot().delete() as dropped:
                dropped.delete_by_predicate(parse(beyond))
            if dropped.rewrites_needed:
                commit.delete(beyond)
            _append(commit, [], self._marked(timeline, position + 1, position) | {FENCE: str(timeline)})

    def _newest(self) -> Snapshot | None:
        snapshot = self.table.metadata.current_snapshot()
        while snapshot is not None and _mark(snapshot) is None:
            parent = snapshot.parent_snapshot_id
            snapshot = self.table.metadata.snapshot_by_id(parent) if parent is not None else None
        return snapshot

    def _marked(self, timeline: int, first: int, upto: int) -> dict[str, str]:
        return {UID: self.uid, TIMELINE: str(timeline), FROM: str(first), UPTO: str(upto)}

    def _tag(self, commit: Transaction, timeline: int, upto: int, kept: Collection[str]) -> None:
        """Tag the new snapshot, drop old tags, and forget snapshots that nothing names any more. Files stay."""
        before = self.table.metadata
        tags = [n for n, r in before.refs.items() if r.snapshot_ref_type is SnapshotRefType.TAG]
        old = set(tags) - set(kept)
        manage = ManageSnapshots(commit).create_tag(_head(commit), tag_name(timeline, upto))
        for name in old:
            manage.remove_tag(name)
        manage.commit()
        named = {ref.snapshot_id for ref in commit.table_metadata.refs.values()}
        newest = self._newest()  # the mark before this one stays: a reader may just have opened it
        unnamed = [s.snapshot_id for s in before.snapshots if s.snapshot_id not in named and s is not newest]
        if unnamed:
            ExpireSnapshots(commit).by_ids(unnamed).commit()


class _Commit(Transaction):
    """A transaction that builds its metadata once per staged change, not at every look: a sixth of the time."""

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
            CommitFailedException: somebody else committed first; nothing of this commit took effect.
        """
        try:
            return super().commit_transaction()
        except ValueError as error:  # main is the same snapshot, but not for the first time: pyiceberg compares sequence numbers
            raise CommitFailedException(str(error)) from error


def _append(commit: Transaction, files: Sequence[str], properties: dict[str, str]) -> None:
    if files:
        # The duplicate check would read every manifest of the table; the marks make duplicates impossible.
        try:
            commit.add_files(list(files), snapshot_properties=properties, check_duplicate_files=False)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise _misfit(commit, error) from error
        return
    with commit.update_snapshot(snapshot_properties=properties).fast_append():
        pass


def _head(commit: Transaction) -> int:
    return commit.table_metadata.refs[MAIN_BRANCH].snapshot_id


def _misfit(commit: Transaction, error: Exception) -> PoisonError:
    table = ".".join(commit._table.name())
    return PoisonError(
        f"a file of an epoch does not fit the table {table}: {error}",
        code="sink.misfit",
        kept="the sealed epochs; the table shows the ones before",
        advice="if the spec's columns changed, give the pipeline a new name or outputs.namespace",
    )


def _mark(snapshot: Snapshot) -> Mark | None:
    found: dict[str, Any] = snapshot.summary.additional_properties if snapshot.summary else {}
    if UPTO not in found:
        return None
    return Mark(int(found[TIMELINE]), int(found[UPTO]))
