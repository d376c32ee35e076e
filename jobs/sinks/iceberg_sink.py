"""The Iceberg tables of a pipeline, as a follower of its log (design.md section 2, 'Iceberg as a follower')."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    RESTError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.table import Table
from sqlalchemy.exc import SQLAlchemyError

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import PreconditionFailedError, Store
from tidegate.errors import ConfigurationError, FencedError, PoisonError, TransientError
from tidegate.jobs.sinks.iceberg_catalog import (
    build_table_location,
    open_catalog,
    resolve_namespace,
)
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    PublishedCut,
    advance_published_cut,
    build_cut_key,
    read_published_cut,
)
from tidegate.jobs.sinks.output_tables import (
    build_checkpoint_rows,
    build_table_schema,
    write_parquet_once,
)
from tidegate.jobs.sinks.row_positions import ARRIVAL_SLOT_COLUMN, SPLICE_COLUMN
from tidegate.jobs.sinks.table_files import (
    PartitionValues,
    PhysicalLayout,
    split_by_partition,
    write_partition_files,
)
from tidegate.jobs.sinks.table_follower import TABLE_PROPERTIES, TableFollower, build_tag_name
from tidegate.jobs.spec.pipeline import CHECKPOINTS, EVENTS, PipelineSpec

# Tables committed at a time: a commit is 40 ms of work and four times that of waiting for the
# store.
_COMMIT_THREADS = 3
# In a row, before asking the caller to come back later: two publishers lose at most every other
# one.
_MAX_CONFLICTS = 20
# Slots between group ends: an empty snapshot per untouched table and epoch would double the cost of
# publishing.
_SLOTS_PER_GROUP = 10
_MAX_SLOTS_PER_SNAPSHOT = (
    100  # slots in one snapshot while catching up: bounds memory and the size of one commit
)
# Bytes of an epoch's files arranged at a time; the names of arranged files depend on it.
_BATCH_BYTES = 64_000_000
_MAX_TAGS = 20  # group ends kept as tags, 200 slots; every snapshot kept makes every commit slower


class IcebergSink:
    """Publishes sealed epochs.

    Tables `<namespace>.<table>`, each slot exactly once, rewound by a restore.

    The `checkpoints` table is committed last: its mark says that every other table was brought that
    far, though a table without new files has an older mark. At a group end every table gets a
    snapshot and the same tag.
    """

    name = "iceberg"
    follower: type[TableFollower] = (
        TableFollower  # the simulation puts a model of a table in its place
    )

    def __init__(self, spec: PipelineSpec, store: Store, uid: str, workdir: Path) -> None:
        self.spec, self.store, self.uid = spec, store, uid
        self._workdir = workdir
        self._layout = BucketLayout(spec.name)
        self._catalog: Catalog | None = None
        self._tables: dict[str, TableFollower] = {}
        self._pointed: PublishedCut | None = None
        self._pool = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="tidegate-iceberg")

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Bring all tables to the head of the current timeline; rewind first if a fork says so.

        Args:
            log: the pipeline's log.
            flush: without it, fewer than `outputs.publish_every` new epochs wait for the next call.

        Returns:
            Slots applied.

        Raises:
            FencedError: the tables stand on a timeline outside this log's lineage, or ahead of it.
            TransientError: catalog or store cannot be reached now, or other publishers kept
                winning; call again.
            PoisonError: an epoch that the tables still need was retired, or its files are gone.
        """
        for _ in range(_MAX_CONFLICTS):
            try:
                with self._translate_sink_errors():
                    return self._follow_once(log, flush)
            except (CommitFailedException, NoSuchTableError, TableAlreadyExistsError):
                self._tables.clear()  # somebody else committed: load again, judge again
        raise TransientError(
            "other publishers kept winning",
            code="sink.contended",
            pipeline=self.spec.name,
            retry_after=1.0,
        )

    def lag(self, log: SlotLog) -> int:
        """Sealed slots that the tables do not show yet."""
        with self._translate_sink_errors():
            self._load_tables()
            head = log.head()
            return head.slot - min(head.slot, self._published_slot(CurrentLineage(log, head)))

    def readable_epoch(self) -> int:
        """The newest slot that readers of all tables can see as one cut; 0 before the first."""
        current = read_published_cut(self.store, self.spec.name)
        return current.upto if current else 0

    def open_table(self, table: str) -> Table:
        """A table as the catalog has it now.

        Raises:
            NoSuchTableError: it never had a row, or is no table of this pipeline.
        """
        return self._get_catalog().load_table(self._table_identifier(table))

    def rebuild_tables(self, log: SlotLog) -> int:
        """Register every table anew and publish the whole log into it. Files stay where they are.

        Raises:
            PoisonError: an epoch of the lineage was retired; its files are known to the old tables
                only.
        """
        with self._translate_sink_errors():
            catalog = self._get_catalog()
            for table in self.spec.table_names:
                if catalog.table_exists(self._table_identifier(table)):
                    catalog.drop_table(self._table_identifier(table))
            self._tables.clear()
            self.store.delete(build_cut_key(self.spec.name))
            self._pointed = None
        return self.follow(log)

    def _follow_once(self, log: SlotLog, flush: bool) -> int:
        """Follow in four steps.

        1. Load the tables, then the head: whatever a table shows was sealed before, so nothing can
            be ahead of the log.
        2. Rewind tables that stand on another timeline.
        3. Apply slot by slot group, the `checkpoints` table last.
        4. Move the readers' pointer.
        """
        self._load_tables()
        head = log.head()
        way = CurrentLineage(log, head)
        if head.slot == 0 and not self._tables:
            return 0
        self._rewind_tables(way)
        begin = self._published_slot(way)
        if not flush and head.slot - begin < self.spec.outputs.publish_every:
            return 0
        while (done := self._published_slot(way)) < head.slot:
            self._apply_slot_group(log, way, min(head.slot, done + _MAX_SLOTS_PER_SNAPSHOT))
        self._publish_cut(way)
        return head.slot - begin

    def _load_tables(self) -> None:
        """Open what is registered; what the pointer names but the catalog lost is registered again.

        `checkpoints` first: the others, loaded after it, then hold at least what its mark says
        about them. As long as it is unknown, the others are never taken from an earlier call:
        another publisher may have moved them on since, and only a commit on `checkpoints` would
        tell.
        """
        catalog = self._get_catalog()
        known = None
        anew = CHECKPOINTS not in self._tables
        if anew:
            self._tables.clear()
        for table in sorted(self.spec.table_names, key=lambda name: name != CHECKPOINTS):
            if table in self._tables:
                continue
            identifier = self._table_identifier(table)
            if not catalog.table_exists(identifier):
                known = (
                    known
                    or read_published_cut(self.store, self.spec.name)
                    or PublishedCut(self.uid, 0, 0)
                )
                if known.uid != self.uid or table not in known.tables:
                    continue
                catalog.register_table(identifier, known.tables[table])
            self._tables[table] = self._require_same_owner(
                self.follower(catalog.load_table(identifier), self.uid)
            )
        if anew and CHECKPOINTS in self._tables:
            self._refuse_rolled_back_checkpoints()

    def _refuse_rolled_back_checkpoints(self) -> None:
        """Look at `checkpoints` once more, after the others.

        It goes back where a table was rolled back by hand (see `_rewind_tables`). A table that was
        loaded after another publisher had mended it holds less than the `checkpoints` of before
        says, and looks as if it had no files in the slots that it lacks.

        Raises:
            CommitFailedException: it has gone back meanwhile.
        """
        before = self._tables[CHECKPOINTS].newest_position()
        now = self.follower(
            self._get_catalog().load_table(self._table_identifier(CHECKPOINTS)), self.uid
        ).newest_position()
        if before and (now is None or (now.timeline == before.timeline and now.upto < before.upto)):
            raise CommitFailedException(
                f"{CHECKPOINTS} went back from slot {before.upto} while the tables were loaded"
            )

    def _require_same_owner(self, follower: TableFollower) -> TableFollower:
        owner = follower.owner_uid()
        if owner not in (None, self.uid):
            raise ConfigurationError(
                f"the table {'.'.join(follower.table.name())} belongs to another pipeline (uid"
                f" {owner}, not {self.uid})",
                code="sink.other_pipeline",
                pipeline=self.spec.name,
                kept="the tables; nothing was changed",
                advice="set outputs.namespace or outputs.catalog to a place of its own",
            )
        return follower

    def _rewind_tables(self, way: CurrentLineage) -> None:
        """Bring every table onto this lineage: what was published after the fork is taken out.

        A table that somebody rolled back by hand holds less than `checkpoints` says. Then
        `checkpoints` goes back as far, and goes first, so that the slots are applied to that table
        again, also after a crash at any point of this.
        """
        marks = {
            table: mark
            for table, follower in self._tables.items()
            if (mark := follower.newest_position())
        }
        for table, mark in marks.items():
            if not way.is_in_log(mark):
                raise self._fenced_table_error(table, mark, way)
        complete = self._published_slot(way)
        rolled_back = {
            table: way.last_shared_slot(mark)
            for table, mark in marks.items()
            if self._tables[table].was_rolled_back()
        }
        for table, mark in sorted(marks.items(), key=lambda item: item[0] != CHECKPOINTS):
            if table == CHECKPOINTS:
                position = min([complete, *rolled_back.values()])
            else:
                position = rolled_back.get(table, max(complete, way.last_shared_slot(mark)))
            if mark.timeline != way.timeline or table in rolled_back or position < mark.upto:
                self._tables[table].rewind(way.timeline, position)

    def _apply_slot_group(self, log: SlotLog, way: CurrentLineage, upto: int) -> None:
        """Apply everything up to a slot.

        Tables without new files are left alone, unless the group ends here.
        """
        done = self._published_slot(way)
        epochs = [filled.epoch for filled in log.epochs_between(way.timeline, done + 1, upto)]
        tags = self._select_kept_tags(way, upto)
        others = [t for t in self.spec.table_names if t != CHECKPOINTS]
        list(self._pool.map(lambda table: self._apply_to_table(table, way, epochs, tags), others))
        self._apply_to_table(CHECKPOINTS, way, epochs, tags)

    def _apply_to_table(
        self, table: str, way: CurrentLineage, epochs: list[Manifest], tags: set[str] | None
    ) -> None:
        """Apply epochs to one table: those after its mark, which may be ahead after a crash."""
        follower = self._tables.get(table)
        mark = follower.newest_position() if follower else None
        left = [e for e in epochs if mark is None or e.slot > mark.upto]
        by_epoch = [self._list_epoch_files(table, epoch) for epoch in left]
        files = [key for keys in by_epoch for key in keys]
        if not left or (follower is None and table in self.spec.windows and not files):
            # A window's table is made from its first file, which tells the types of its columns.
            return
        first, upto = left[0].slot, left[-1].slot
        if follower is None:
            follower = self._create_table(table, files, way.timeline, first - 1)
            if not way.is_current():
                # The restore's follower may have rewound the tables before this one was there. If
                # it holds until here, that follower meets the table and moves it on, and what is
                # committed below is refused.
                raise CommitFailedException(f"a restore ended timeline {way.timeline}")
        elif files:
            follower.add_missing_columns(self._wanted_schema(table, files, follower))
        if table == EVENTS and any(epoch.is_merge for epoch in left):
            follower.add_missing_columns(pa.schema([(SPLICE_COLUMN, pa.string())]))
        if table in self.spec.streams and any(
            epoch.is_merge and table in epoch.files for epoch in left
        ):
            follower.add_missing_columns(
                pa.schema([(SPLICE_COLUMN, pa.string()), (ARRIVAL_SLOT_COLUMN, pa.int64())])
            )
        if files or tags is not None:
            sealed = zip(left, by_epoch, strict=True)
            follower.append_slots(
                self._prepare_files(table, follower, sealed) if files else [],
                way.timeline,
                first,
                upto,
                tags,
            )

    def _prepare_files(
        self, table: str, follower: TableFollower, sealed: Iterable[tuple[Manifest, list[str]]]
    ) -> list[str] | dict[str, PartitionValues]:
        """The files to append.

        Those that the epochs sealed, or the same rows arranged as the spec has it.
        """
        wanted = PhysicalLayout.from_spec(self.spec.outputs.layout.get(table))
        follower.set_layout(wanted)
        if not wanted:
            return [self.store.uri(key) for _, keys in sealed for key in keys]
        arrangement = follower.current_layout()  # the same, with the fields in the table's order
        written: dict[str, PartitionValues] = {}
        for epoch, keys in sealed:
            stem = f"{self._layout.table_prefix(table, epoch.id)}{arrangement.digest}"
            for number, rows in enumerate(self._read_row_batches(keys)):
                written |= write_partition_files(
                    self._create_layout_file,
                    f"{stem}-{number:03d}",
                    split_by_partition(rows, arrangement),
                )
        return written

    def _read_row_batches(self, keys: list[str]) -> Iterator[pa.Table]:
        """The rows of an epoch's files, so many at a time."""
        batch: list[pa.Table] = []
        size = 0
        for key in keys:
            data = self.store.get(key).data
            batch.append(pq.read_table(io.BytesIO(data)))
            size += len(data)
            if size >= _BATCH_BYTES:
                yield pa.concat_tables(batch, promote_options="permissive")
                batch, size = [], 0
        if batch:
            yield pa.concat_tables(batch, promote_options="permissive")

    def _create_layout_file(self, key: str, data: bytes, rows: int) -> str:
        """Store a file of the epoch under a key that says what is in it.

        A second publisher finds the first one's.
        """
        try:
            self.store.create(key, data)
        except PreconditionFailedError:
            found = pq.read_metadata(io.BytesIO(self.store.get(key).data)).num_rows
            if found != rows:
                raise PoisonError(
                    f"{self.store.uri(key)} has {found} rows, not {rows}",
                    code="sink.other_rows",
                    pipeline=self.spec.name,
                    kept="the sealed epochs; the table shows the ones before",
                    advice=(
                        "find out who wrote it; once it is moved away, the driver writes it anew"
                    ),
                ) from None
        return self.store.uri(key)

    def _list_epoch_files(self, table: str, epoch: Manifest) -> list[str]:
        """The epoch's files of a table.

        That of `checkpoints` follows from the manifest, so any publisher may write it.
        """
        if table != CHECKPOINTS:
            return [f.key for f in epoch.files.get(table, []) if f.rows]
        key = f"{self._layout.table_prefix(table, epoch.id)}publisher.parquet"
        return [write_parquet_once(self.store, key, build_checkpoint_rows([epoch])).key]

    def _select_kept_tags(self, way: CurrentLineage, upto: int) -> set[str] | None:
        """At a group end the older tags that stay.

        The newest ones of this lineage; None elsewhere.
        """
        follower = self._tables.get(CHECKPOINTS)
        tagged = (
            [
                m
                for m in follower.tagged_positions()
                if way.is_in_log(m) and way.last_shared_slot(m) == m.upto
            ]
            if follower
            else []
        )
        if upto - max((m.upto for m in tagged), default=0) < _SLOTS_PER_GROUP:
            return None
        return {build_tag_name(m.timeline, m.upto) for m in tagged[-_MAX_TAGS + 1 :]}

    def _create_table(
        self, table: str, files: list[str], timeline: int, upto: int
    ) -> TableFollower:
        """A new table, marked as empty up to the sink's position."""
        identifier, catalog = self._table_identifier(table), self._get_catalog()
        schema = self._wanted_schema(table, files)
        location = build_table_location(self.spec, self.store, table)
        created = self.follower(
            catalog.create_table(
                identifier, schema, location=location, properties=TABLE_PROPERTIES
            ),
            self.uid,
        )
        self._refuse_begun_table(created)
        self._tables[table] = created
        created.initialize(timeline, upto)
        return created

    def _refuse_begun_table(self, created: TableFollower) -> None:
        """A catalog may load what it has just created.

        By then another publisher may have begun it, on a newer timeline even.

        Raises:
            CommitFailedException: it is so; what was committed on top of that would come after it.
        """
        if created.newest_position() is not None:
            raise CommitFailedException(
                f"{'.'.join(created.table.name())} was begun by another publisher"
            )

    def _wanted_schema(
        self, table: str, files: list[str], follower: TableFollower | None = None
    ) -> Any:
        """The columns a table should have.

        A window's come from its newest file when the spec names one the table lacks.
        """
        schema = build_table_schema(self.spec, table)
        known = {field.name for field in follower.table.schema().fields} if follower else set()
        if table not in self.spec.windows or known.issuperset(schema.names):
            return schema
        return pq.read_schema(io.BytesIO(self.store.get(files[-1]).data)).remove_metadata()

    def _publish_cut(self, way: CurrentLineage) -> None:
        places = {table: follower.metadata_location for table, follower in self._tables.items()}
        current = PublishedCut(self.uid, way.timeline, self._published_slot(way), places)
        if self._pointed != current:
            advance_published_cut(self.store, self.spec.name, current)
            self._pointed = current

    def _published_slot(self, way: CurrentLineage) -> int:
        """The slot up to which everything is in the tables."""
        follower = self._tables.get(CHECKPOINTS)
        mark = follower.newest_position() if follower else None
        return way.last_shared_slot(mark) if mark and way.is_in_log(mark) else 0

    def _table_identifier(self, table: str) -> tuple[str, str]:
        return resolve_namespace(self.spec), table

    def _get_catalog(self) -> Catalog:
        if self._catalog is None:
            self._catalog = open_catalog(self.spec, self.store, self._workdir)
        return self._catalog

    def _fenced_table_error(
        self, table: str, mark: FollowerPosition, way: CurrentLineage
    ) -> FencedError:
        return FencedError(
            f"table {table} of {self.spec.name} stands at slot {mark.upto} of timeline"
            f" {mark.timeline}, but the log ends at slot {way.slot} of timeline {way.timeline}",
            code="sink.fenced",
            pipeline=self.spec.name,
            kept="the tables; nothing was changed",
            advice="check that the store is the one these tables were made from",
        )

    @contextmanager
    def _translate_sink_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._tables.clear()
            raise PoisonError(
                f"a file of {self.spec.name}'s tables is gone: {error}",
                code="sink.file_missing",
                pipeline=self.spec.name,
                kept="all other files",
                advice=f"look with: tidegate checkpoints verify {self.spec.name}",
            ) from error
        except (ForbiddenError, UnauthorizedError) as error:
            raise ConfigurationError(
                f"the catalog {self.spec.outputs.catalog} refuses {self.spec.name}:"
                f" {str(error).splitlines()[0]}",
                code="sink.catalog_denied",
                pipeline=self.spec.name,
                kept="everything sealed; the tables catch up later",
                advice=(
                    "set outputs.catalog_options (token or credential, as env:NAME) and the rights"
                    " on the namespace"
                ),
            ) from error
        except (
            OSError,
            SQLAlchemyError,
            RESTError,
        ) as error:  # also a commit of unknown outcome: the marks tell, next time
            self._tables.clear()
            raise TransientError(
                f"the tables of {self.spec.name} cannot be reached: {str(error).splitlines()[0]}",
                code="sink.unavailable",
                pipeline=self.spec.name,
                kept="everything sealed; the tables catch up later",
                advice="check the store and the catalog; tidegate tries again by itself",
                retry_after=2.0,
            ) from error
