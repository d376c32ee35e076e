"""Publishes sealed epochs to the pipeline's Iceberg tables, as a follower of its log.

See `docs/architecture.md`, section 2.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError, get_first_line
from tidegate.jobs.engine.interfaces import WorkRunner, run_work_here
from tidegate.jobs.eventtime.decision_types import BarrierOutcome
from tidegate.jobs.spec.pipeline import BARRIERS, CHECKPOINTS, EVENTS, PipelineSpec
from tidegate.secret_masks import mask_address

from .errors import (
    CATALOG_DENIED,
    CONTENDED,
    FILE_DAMAGED,
    FILE_MISSING,
    TABLE_FENCED,
    TABLE_OF_OTHER_PIPELINE,
    TABLES_UNREACHABLE,
)
from .file_arrangement import merge_data_files, rewrite_epoch_files
from .iceberg_catalog import (
    build_table_location,
    list_outage_errors,
    open_catalog,
    resolve_namespace,
)
from .lineage_position import (
    CurrentLineage,
    FollowerPosition,
    PublishedCut,
    advance_published_cut,
    read_published_cut,
)
from .output_tables import (
    ARRIVAL_SLOT_COLUMN,
    SPLICE_COLUMN,
    build_checkpoint_rows,
    build_table_schema,
    write_parquet_once,
)
from .table_files import PartitionValues, PhysicalLayout
from .table_follower import (
    BARRIER_TAG_PREFIX,
    TABLE_PROPERTIES,
    TableFollower,
    TagChange,
    build_tag_name,
)

# Tables committed at a time: a commit works for 40 ms and waits four times as long for the store.
_COMMIT_THREADS = 3
_LOST_RACES = (CommitFailedException, NoSuchTableError, TableAlreadyExistsError)
# Lost races in a row before the caller is asked to come back later. Of two publishers, each loses
# at most every other race.
_MAX_CONFLICTS = 20
# Slots between group ends: an empty snapshot per untouched table and epoch would double the cost of
# publishing.
_SLOTS_PER_GROUP = 10
# Slots in one snapshot while catching up: bounds memory and the size of one commit.
_MAX_SLOTS_PER_SNAPSHOT = 100
# Tags kept of group ends, for 200 slots, and of barriers; every snapshot kept makes every commit
# slower.
_MAX_TAGS = 20


class IcebergSink:
    """Publishes sealed epochs into the tables `<namespace>.<table>`, each slot exactly once.

    A restore rewinds the tables. The `checkpoints` table is committed last: its position says that
    every other table has been brought at least that far, even where a table without new files has
    an older position. At a group end every table gets a snapshot and the same tag. So it does at a
    slot that completes a barrier (`docs/semantics.md`, section 3.4).
    """

    name = "iceberg"
    follower: type[TableFollower] = TableFollower  # the simulation replaces it by a model

    def __init__(
        self, spec: PipelineSpec, store: Store, uid: str, run: WorkRunner | None = None
    ) -> None:
        self.spec, self.store, self.uid = spec, store, uid
        self._run_here: WorkRunner = partial(run_work_here, store)
        self._run = run or self._run_here  # moves rows, on Spark in tasks
        self._layout = BucketLayout(spec.name)
        self._tables: dict[str, TableFollower] = {}
        self._published_cut: PublishedCut | None = None
        self._searched = FollowerPosition(0, 0)  # no barrier completes up to there, unpublished
        self._pool = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="tidegate-iceberg")

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Bring all tables to the head of the current timeline; after a restore, rewind them first.

        Args:
            log: the pipeline's log.
            flush: if False, fewer than `outputs.publish_every` new epochs wait for the next call,
                unless one of them completes a barrier.

        Returns:
            The number of slots applied.

        Raises:
            FencedError: the tables are on a timeline outside this log's lineage, or ahead of it.
            TransientError: the catalog or the store cannot be reached now, or other publishers were
                faster each time. Call again.
            PoisonError: an epoch that the tables still need was retired, its files are missing, or
                they do not fit the tables.
            ConfigurationError: another pipeline publishes into a table, the catalog refuses access,
                or a variable that the spec names is not set.
        """
        missed = ""
        for _ in range(_MAX_CONFLICTS):
            try:
                with self._translate_sink_errors():
                    return self._follow_once(log, flush)
            except _LOST_RACES:
                self._tables.clear()  # another publisher committed: load and decide again
            except PoisonError as error:
                # Another publisher may have applied the epoch since the tables were loaded, and
                # retention deleted it. No commit was tried that would show it: load and look again.
                if error.message == missed:
                    raise
                missed = error.message
                self._tables.clear()
        raise CONTENDED(pipeline=self.spec.name, what="the tables")

    def lag(self, log: SlotLog) -> int:
        """Return the number of sealed slots that the tables do not show yet.

        It opens the catalog, and registers tables again that the catalog lost. It raises
        TransientError and ConfigurationError as `follow` does, but loses a race at most once.
        """
        try:
            with self._translate_sink_errors():
                self._load_tables()
                lineage = CurrentLineage(log, log.head())
                return lineage.slot - min(lineage.slot, self._published_slot(lineage))
        except _LOST_RACES as error:
            self._tables.clear()
            raise CONTENDED(pipeline=self.spec.name, what="the tables") from error

    def open_table(self, table: str) -> Table:
        """Load a table from the catalog, whose errors are not translated.

        Raises:
            NoSuchTableError: nothing was published yet, no result of this window was, or it is not
                a table of this pipeline.
        """
        return self._catalog.load_table(self._table_identifier(table))

    def _follow_once(self, log: SlotLog, flush: bool) -> int:
        """Follow in four steps.

        1. Load the tables, then the head. Whatever a table shows was sealed before, so no table can
           be ahead of the log.
        2. Rewind tables that are on another timeline.
        3. Apply slots in groups, the `checkpoints` table last.
        4. Advance the readers' pointer.
        """
        self._load_tables()
        lineage = CurrentLineage(log, log.head())
        if lineage.slot == 0 and not self._tables:
            return 0
        self._rewind_tables(lineage)
        begin = self._published_slot(lineage)
        if not flush and not self._is_group_due(log, lineage, begin):
            # Readers must see that a restore took epochs back, even if no epoch follows it.
            self._publish_cut(lineage)
            return 0
        while (done := self._published_slot(lineage)) < lineage.slot:
            upto = min(lineage.slot, done + _MAX_SLOTS_PER_SNAPSHOT)
            self._apply_slot_group(log, lineage, upto)
            # Also between groups: what the pointer names must be in the tables' newest versions,
            # or garbage collection could delete it from under a reader (see `table_maintenance`).
            self._publish_cut(lineage)
        self._publish_cut(lineage)
        return lineage.slot - begin

    def _load_tables(self) -> None:
        """Open the registered tables; register again those that the catalog lost.

        `checkpoints` is loaded first: the others, loaded later, then hold at least what its
        position says about them. While `checkpoints` is not loaded, tables from an earlier call are
        dropped: another publisher may have moved them on, and only a commit on `checkpoints` would
        show that.
        """
        reload = CHECKPOINTS not in self._tables
        if reload:
            self._tables.clear()
        # Read at most once, and only if a table is missing.
        read_cut = cache(lambda: read_published_cut(self.store, self.spec.name))
        for table in sorted(self.spec.table_names, key=lambda name: name != CHECKPOINTS):
            if table not in self._tables and self._register_lost_table(table, read_cut):
                follower = self.follower(self.open_table(table), self.uid)
                self._tables[table] = self._require_same_owner(follower)
        if reload and CHECKPOINTS in self._tables:
            # `_rewind_tables` moves it back if a person rolled back a table by hand. A table that
            # was loaded after another publisher repaired it holds less than the earlier
            # `checkpoints` says, and would look as if it had no files in the slots that it lacks.
            before = self._tables[CHECKPOINTS].newest_position()
            now = self.follower(self.open_table(CHECKPOINTS), self.uid).newest_position()
            if before and (
                now is None or (now.timeline == before.timeline and now.upto < before.upto)
            ):
                raise CommitFailedException(
                    f"{CHECKPOINTS} went back from slot {before.upto} while the tables were loaded"
                )

    def _register_lost_table(self, table: str, read_cut: Callable[[], PublishedCut | None]) -> bool:
        """Return whether the table exists, after registering it if only the pointer names it."""
        identifier = self._table_identifier(table)
        if self._catalog.table_exists(identifier):
            return True
        cut = read_cut()
        # The pointer of a copied store names tables of the original pipeline.
        if cut is None or cut.uid != self.uid or table not in cut.tables:
            return False
        # The tables are where the pointer says; only the catalog has to be filled again.
        self._catalog.register_table(identifier, cut.tables[table])
        return True

    def _require_same_owner(self, follower: TableFollower) -> TableFollower:
        owner = follower.owner_uid()
        if owner not in (None, self.uid):
            raise TABLE_OF_OTHER_PIPELINE(
                pipeline=self.spec.name,
                table=".".join(follower.table.name()),
                owner=owner,
                uid=self.uid,
            )
        return follower

    def _rewind_tables(self, lineage: CurrentLineage) -> None:
        """Bring every table onto this lineage by removing what was published after the fork.

        A table that a person rolled back by hand holds less than `checkpoints` says. Then
        `checkpoints` goes back as far, and goes first, so that the slots are applied to that table
        again even after a crash at any point of this method.
        """
        positions, complete = self._read_positions(lineage), self._count_complete_slots(lineage)
        rolled_back = {
            table: lineage.last_shared_slot(position)
            for table, position in positions.items()
            if self._tables[table].was_rolled_back()
        }
        for table, position in sorted(positions.items(), key=lambda item: item[0] != CHECKPOINTS):
            if table == CHECKPOINTS:
                target = min([complete, *rolled_back.values()])
            else:
                # A table without files in the last slots has an older position than `checkpoints`,
                # and lacks nothing up to there.
                shared = max(complete, lineage.last_shared_slot(position))
                target = rolled_back.get(table, shared)
            moved_on = position.timeline != lineage.timeline
            if moved_on or table in rolled_back or target < position.upto:
                cut_files = partial(self._cut_files, table)
                self._tables[table].rewind(lineage.timeline, target, cut_files)

    def _cut_files(
        self, table: str, metadata: TableMetadata, files: list[DataFile], last: int
    ) -> dict[str, PartitionValues]:
        """Write merged files again without the rows after slot `last`; address -> partition."""
        folder = self._layout.iceberg_table_folder(table)
        layout = PhysicalLayout.from_metadata(metadata)
        written: dict[str, PartitionValues] = {}
        for file in files:
            work = partial(merge_data_files, metadata, [file], folder, layout, last)
            written |= self._run(work).list_addresses(self.store)
        return written

    def _count_complete_slots(self, lineage: CurrentLineage) -> int:
        """Return up to which slot the tables are complete that were not moved back by hand.

        If `checkpoints` was, it may show what a restore has removed from the others since.
        """
        complete, checkpoints = self._published_slot(lineage), self._tables.get(CHECKPOINTS)
        last = checkpoints.last_position() if checkpoints else None
        return min(complete, lineage.count_applied_slots(last))

    def _read_positions(self, lineage: CurrentLineage) -> dict[str, FollowerPosition]:
        """Return the positions of the tables that have one; raise if one is not in the log."""
        positions = {}
        for table, follower in self._tables.items():
            position = follower.newest_position()
            if position is None:
                continue
            if not lineage.is_in_log(position):
                mismatch = lineage.describe_mismatch(position)
                raise TABLE_FENCED(pipeline=self.spec.name, table=table, **mismatch)
            positions[table] = position
        return positions

    def _is_group_due(self, log: SlotLog, lineage: CurrentLineage, begin: int) -> bool:
        """Return whether enough epochs wait, or one of them completes a barrier."""
        if lineage.slot - begin >= self.spec.outputs.publish_every:
            return True
        positions = (follower.newest_position() for follower in self._tables.values())
        # A publisher died within a group: without the rest of it the tables show no one cut.
        if any(position is not None and position.upto > begin for position in positions):
            return True
        if self._searched.timeline == lineage.timeline:
            begin = max(begin, self._searched.upto)
        waiting = log.epochs_between(lineage.timeline, begin + 1, lineage.slot)
        if any(self._list_barrier_tags(filled.epoch) for filled in waiting):
            return True
        self._searched = FollowerPosition(lineage.timeline, lineage.slot)
        return False

    def _list_barrier_tags(self, epoch: Manifest) -> list[str]:
        """Return the tags of the barriers that an epoch completes.

        With `alignment: pass` rows behind a barrier have left before it closes, so it cuts no rows.
        """
        if self.spec.barriers.alignment == "pass":
            return []
        complete = (b for b in epoch.barriers if b["outcome"] == BarrierOutcome.COMPLETE)
        return [f"{BARRIER_TAG_PREFIX}{barrier['id']}" for barrier in complete]

    def _apply_slot_group(self, log: SlotLog, lineage: CurrentLineage, upto: int) -> None:
        """Apply slots up to `upto`, or up to the first one that completes a barrier.

        Tables without new files get a snapshot only where there is a new tag.
        """
        epochs: list[Manifest] = []
        for filled in log.epochs_between(lineage.timeline, self._published_slot(lineage) + 1, upto):
            epochs.append(filled.epoch)
            if self._list_barrier_tags(filled.epoch):
                break
        tags = self._select_tags(lineage, epochs[-1])
        others = [t for t in self.spec.table_names if t != CHECKPOINTS]
        commits = [
            self._pool.submit(self._apply_to_table, table, lineage, epochs, tags)
            for table in others
        ]
        wait(commits)  # after a lost race none may go on beside the next try
        for commit in commits:
            commit.result()
        self._apply_to_table(CHECKPOINTS, lineage, epochs, tags)

    def _apply_to_table(
        self, table: str, lineage: CurrentLineage, epochs: list[Manifest], tags: TagChange | None
    ) -> None:
        """Apply epochs to one table: those after its position, which may be ahead after a crash."""
        follower = self._tables.get(table)
        position = follower.newest_position() if follower else None
        missing = [e for e in epochs if position is None or e.slot > position.upto]
        by_epoch = [self._list_epoch_files(table, epoch) for epoch in missing]
        files = [key for keys in by_epoch for key in keys]
        if not missing or (follower is None and table in self.spec.windows and not files):
            # A window's table is made from its first file, which has the types of its columns.
            return
        first, upto = missing[0].slot, missing[-1].slot
        if follower is None:
            follower = self._create_table(table, files, lineage.timeline, first - 1)
            if not lineage.is_current():
                # The restore's follower may have rewound the tables before this one existed. If the
                # timeline is still current here, that follower meets the table and moves it on, and
                # the commit below is refused.
                raise CommitFailedException(f"a restore ended timeline {lineage.timeline}")
        elif files:
            follower.add_missing_columns(self._wanted_schema(table, files, follower))
        merges = [epoch for epoch in missing if epoch.is_merge]
        if table == EVENTS and merges:
            follower.add_missing_columns(pa.schema([(SPLICE_COLUMN, pa.string())]))
        if table in self.spec.streams and any(table in epoch.files for epoch in merges):
            columns = [(SPLICE_COLUMN, pa.string()), (ARRIVAL_SLOT_COLUMN, pa.int64())]
            follower.add_missing_columns(pa.schema(columns))
        if files or tags is not None:
            sealed = zip(missing, by_epoch, strict=True)
            prepared = self._prepare_files(table, follower, sealed) if files else {}
            follower.append_slots(prepared, lineage.timeline, first, upto, tags)

    def _prepare_files(
        self, table: str, follower: TableFollower, sealed: Iterable[tuple[Manifest, list[str]]]
    ) -> dict[str, PartitionValues]:
        """Return the files to append, rearranged if the spec has a layout for the table."""
        wanted = PhysicalLayout.from_spec(self.spec.outputs.layout.get(table))
        follower.set_layout(wanted)
        if not wanted:
            return {self.store.uri(key): () for _, keys in sealed for key in keys}
        arrangement = follower.current_layout()  # the same, with the fields in the table's order
        # The tables of barriers and checkpoints are the driver's own.
        run = self._run_here if table in (BARRIERS, CHECKPOINTS) else self._run
        written: dict[str, PartitionValues] = {}
        for epoch, keys in sealed:
            stem = f"{self._layout.table_prefix(table, epoch.id)}{arrangement.digest}"
            if keys:
                work = partial(rewrite_epoch_files, self.spec.name, keys, stem, arrangement)
                written |= run(work).list_addresses(self.store)
        return written

    def _list_epoch_files(self, table: str, epoch: Manifest) -> list[str]:
        """Return the keys of the epoch's files of a table.

        The file of `checkpoints` follows from the manifest alone, so any publisher may write it.
        """
        if table != CHECKPOINTS:
            return [f.key for f in epoch.files.get(table, []) if f.rows]
        key = f"{self._layout.table_prefix(table, epoch.id)}publisher.parquet"
        return [write_parquet_once(self.store, key, build_checkpoint_rows([epoch])).key]

    def _select_tags(self, lineage: CurrentLineage, last: Manifest) -> TagChange | None:
        """Return the tags of the group that `last` ends, and the older ones to keep.

        None without a new tag. Of either kind the newest tags of this lineage are kept.
        """
        follower = self._tables.get(CHECKPOINTS)
        tagged = {
            name: position.upto
            for name, position in (follower.list_tags() if follower else {}).items()
            if lineage.count_applied_slots(position) == position.upto
        }
        barriers = [name for name in tagged if name.startswith(BARRIER_TAG_PREFIX)]
        groups = [name for name in tagged if not name.startswith(BARRIER_TAG_PREFIX)]
        completed, ends = self._list_barrier_tags(last), []
        if last.slot - max((tagged[name] for name in groups), default=0) >= _SLOTS_PER_GROUP:
            ends = [build_tag_name(lineage.timeline, last.slot)]
        kept = _select_newest(groups, ends) + _select_newest(barriers, completed)
        return TagChange((*ends, *completed), frozenset(kept)) if ends or completed else None

    def _create_table(
        self, table: str, files: list[str], timeline: int, upto: int
    ) -> TableFollower:
        """Create a table whose position says that it is empty up to slot `upto`."""
        schema = self._wanted_schema(table, files)
        location = build_table_location(self.spec, self.store, table)
        empty = self._catalog.create_table(
            self._table_identifier(table), schema, location=location, properties=TABLE_PROPERTIES
        )
        created = self.follower(empty, self.uid)
        self._refuse_begun_table(created)
        self._tables[table] = created
        created.initialize(timeline, upto)
        return created

    def _refuse_begun_table(self, created: TableFollower) -> None:
        """Refuse a table that another publisher started between its creation and this call.

        Catalogs may load a table after creating it. By then it can hold commits of another
        publisher, even on a newer timeline.

        Raises:
            CommitFailedException: the table has a position; a commit would come on top of it.
        """
        if created.newest_position() is not None:
            raise CommitFailedException(
                f"{'.'.join(created.table.name())} was begun by another publisher"
            )

    def _wanted_schema(
        self, table: str, files: list[str], follower: TableFollower | None = None
    ) -> Any:
        """Return the columns that a table should have.

        Those of a window come from its newest file if the table lacks a column of the spec.
        """
        schema = build_table_schema(self.spec, table)
        present = {field.name for field in follower.table.schema().fields} if follower else set()
        if table not in self.spec.windows or present.issuperset(schema.names):
            return schema
        return pq.read_schema(io.BytesIO(self.store.get(files[-1]).data)).remove_metadata()

    def _publish_cut(self, lineage: CurrentLineage) -> None:
        locations = {table: follower.metadata_location for table, follower in self._tables.items()}
        current = PublishedCut(self.uid, lineage.timeline, self._published_slot(lineage), locations)
        # Saves a read and a write of the pointer when nothing changed.
        if self._published_cut != current:
            advance_published_cut(self.store, self.spec.name, current)
            self._published_cut = current

    def _published_slot(self, lineage: CurrentLineage) -> int:
        """Return the slot up to which all tables are complete."""
        follower = self._tables.get(CHECKPOINTS)
        return lineage.count_applied_slots(follower.newest_position() if follower else None)

    def _table_identifier(self, table: str) -> tuple[str, str]:
        return resolve_namespace(self.spec), table

    @cached_property
    def _catalog(self) -> Catalog:
        return open_catalog(self.spec, self.store)

    @contextmanager
    def _translate_sink_errors(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowInvalid as error:
            raise FILE_DAMAGED(pipeline=self.spec.name, cause=get_first_line(error)) from error
        except FileNotFoundError as error:
            self._tables.clear()
            raise FILE_MISSING(pipeline=self.spec.name, cause=error) from error
        except (ForbiddenError, UnauthorizedError) as error:
            raise CATALOG_DENIED(
                pipeline=self.spec.name,
                catalog=mask_address(str(self.spec.outputs.catalog)),
                cause=get_first_line(error),
            ) from error
        # This may be a commit of unknown outcome: the next call sees it in the tables' positions.
        except list_outage_errors() as error:
            self._tables.clear()
            raise TABLES_UNREACHABLE(
                pipeline=self.spec.name, cause=get_first_line(error)
            ) from error


def _select_newest(old: list[str], new: list[str]) -> list[str]:
    """Return those of the old tags, oldest first, for which there is room beside the new ones."""
    return old[max(0, len(old) + len(new) - _MAX_TAGS) :]
