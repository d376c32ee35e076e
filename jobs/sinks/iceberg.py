"""The Iceberg tables of a pipeline, as a follower of its log (design.md section 2, 'Iceberg as a follower')."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.table import Table
from sqlalchemy.exc import SQLAlchemyError

from tidegate.checkpoints.layout import Layout
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.catalog import Current, move_current, namespace, open_catalog, read_current, table_location
from tidegate.jobs.sinks.follower import TABLE_PROPERTIES, Follower, tag_name
from tidegate.jobs.sinks.marks import Mark, Way
from tidegate.jobs.sinks.schemas import table_schema
from tidegate.jobs.sinks.small import checkpoint_rows, write_small
from tidegate.jobs.spec.errors import ConfigurationError, FencedError, PoisonError, TransientError
from tidegate.jobs.spec.pipeline import CHECKPOINTS, PipelineSpec

__all__ = ["IcebergSink"]

_THREADS = 3  # tables committed at a time: a commit is 40 ms of work and four times that of waiting for the store
_CONFLICTS = 20  # in a row, before asking the caller to come back later: two publishers lose at most every other one
_GROUP = 10  # slots between group ends; an untouched table lags at most this far, so a restart reads few manifests
_MOST = 100  # slots in one snapshot while catching up: bounds memory and the size of one commit
_TAGS = 20  # group ends kept as tags, 200 slots
_RUNG = 100  # and one in so many slots for as long as checkpoints are kept: a restore publishes at most these again


class IcebergSink:
    """Publishes sealed epochs: tables `<namespace>.<table>`, each slot exactly once, rewound by a restore.

    The `checkpoints` table is committed last: its mark says that every other table was brought that far, though a table
    without new files has an older mark. At a group end every table gets a snapshot and the same tag.
    """

    name = "iceberg"

    def __init__(self, spec: PipelineSpec, store: Store, uid: str, workdir: Path) -> None:
        self.spec, self.store, self.uid = spec, store, uid
        self._workdir = workdir
        self._layout = Layout(spec.name)
        self._catalog: SqlCatalog | None = None
        self._tables: dict[str, Follower] = {}
        self._epochs: dict[int, Manifest] = {}  # of the timeline below; only those that some table still needs
        self._timeline = -1
        self._pointed: Current | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tidegate-iceberg")

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Bring all tables to the head of the current timeline; rewind first if a fork says so.

        Args:
            log: the pipeline's log.
            flush: without it, fewer than `outputs.publish_every` new epochs wait for the next call.

        Returns:
            Slots applied.

        Raises:
            FencedError: the tables stand on a timeline outside this log's lineage, or ahead of it.
            TransientError: catalog or store cannot be reached now, or other publishers kept winning; call again.
            PoisonError: an epoch that the tables still need was retired, or its files are gone.
        """
        for _ in range(_CONFLICTS):
            try:
                with self._translated():
                    return self._follow(log, flush)
            except (CommitFailedException, NoSuchTableError, TableAlreadyExistsError):
                self._tables.clear()  # somebody else committed: load again, judge again
        raise TransientError("other publishers kept winning", code="sink.contended", pipeline=self.spec.name, retry_after=1.0)

    def lag(self, log: SlotLog) -> int:
        """Sealed slots that the tables do not show yet."""
        with self._translated():
            self._load()
            head = log.head()
            return head.slot - min(head.slot, self._position(Way(log, head)))

    def readable_epoch(self) -> int:
        """The newest slot that readers of all tables can see as one cut; 0 before the first."""
        current = read_current(self.store, self.spec.name)
        return current.upto if current else 0

    def open_table(self, table: str) -> Table:
        """A table as the catalog has it now.

        Raises:
            NoSuchTableError: it never had a row, or is no table of this pipeline.
        """
        return self._open().load_table(self._identifier(table))

    def rebuild(self, log: SlotLog) -> int:
        """Register every table anew and publish the whole log into it. Files stay where they are.

        Raises:
            PoisonError: an epoch of the lineage was retired; its files are known to the old tables only.
        """
        with self._translated():
            catalog = self._open()
            for table in self.spec.tables:
                if catalog.table_exists(self._identifier(table)):
                    catalog.drop_table(self._identifier(table))
            self._tables.clear()
            self._create(CHECKPOINTS, None, 0, 0)
        return self.follow(log)

    def _follow(self, log: SlotLog, flush: bool) -> int:
        """Follow in four steps.

        1. Load the tables, then the head: whatever a table shows was sealed before, so nothing can be ahead of the log.
        2. Rewind tables that stand on another timeline.
        3. Apply slot by slot group, the `checkpoints` table last.
        4. Move the readers' pointer.
        """
        self._load()
        head = log.head()
        way = Way(log, head)
        self._remember(way)
        if head.slot == 0 and not self._tables:
            return 0
        self._rewind(way)
        begin = self._position(way)
        if not flush and head.slot - begin < self.spec.outputs.publish_every:
            return 0
        while (done := self._position(way)) < head.slot:
            self._group(log, way, min(head.slot, done + _MOST))
        self._point(way)
        return head.slot - begin

    def _load(self) -> None:
        """Open what is registered; what the pointer names but the catalog lost is registered again."""
        catalog = self._open()
        known = None
        for table in self.spec.tables:
            if table in self._tables:
                continue
            identifier = self._identifier(table)
            if not catalog.table_exists(identifier):
                known = known or read_current(self.store, self.spec.name) or Current(self.uid, 0, 0)
                if known.uid != self.uid or table not in known.tables:
                    continue
                catalog.register_table(identifier, known.tables[table])
            self._tables[table] = self._checked(Follower(catalog.load_table(identifier), self.uid))

    def _checked(self, follower: Follower) -> Follower:
        owner = follower.owner()
        if owner not in (None, self.uid):
            raise ConfigurationError(
                f"the table {'.'.join(follower.table.name())} belongs to another pipeline (uid {owner}, not {self.uid})",
                code="sink.other_pipeline",
                pipeline=self.spec.name,
                kept="the tables; nothing was changed",
                advice="set outputs.namespace or outputs.catalog to a place of its own",
            )
        return follower

    def _rewind(self, way: Way) -> None:
        """Bring every table onto this lineage.

        Tables may find themselves at different positions, as their snapshots allow. `checkpoints` goes no further than the
        others, and goes first: what its mark says about them must hold after a crash at any point of this.
        """
        reached: dict[str, tuple[int, Mark]] = {}
        for table, follower in self._tables.items():
            mark = follower.mark()
            if mark is not None and self._must_rewind(table, mark, way):
                reached[table] = self._reach(follower, way, limit=way.slot)
        if CHECKPOINTS in reached:
            least = min(position for position, _ in reached.values())
            reached[CHECKPOINTS] = self._reach(self._tables[CHECKPOINTS], way, limit=least)
        for table in sorted(reached, key=lambda name: name != CHECKPOINTS):
            position, mark = reached[table]
            self._tables[table].rewind(mark, way.timeline, position)

    def _must_rewind(self, table: str, mark: Mark, way: Way) -> bool:
        if mark.timeline > way.timeline or (mark.timeline == way.timeline and way.position(mark) is None):
            raise self._fenced(table, mark.timeline, mark.upto, way)
        return mark.timeline != way.timeline

    def _reach(self, follower: Follower, way: Way, limit: int) -> tuple[int, Mark]:
        """The furthest position on the lineage that one of the table's snapshots holds; the empty root holds at any."""
        found = [(position, mark) for mark in follower.marks() if (position := way.position(mark)) is not None]
        return max((min(p, limit) if m.root else p, m) for p, m in found if p <= limit or m.root)

    def _group(self, log: SlotLog, way: Way, upto: int) -> None:
        """Apply everything up to a slot. Tables without new files are left alone, unless the group ends here."""
        low = self._low(way)
        for filled in log.epochs(way.timeline, min(set(range(low + 1, upto + 1)) - set(self._epochs), default=upto + 1), upto):
            self._epochs[filled.record.slot] = filled.epoch
        tags = self._tags(way, upto)
        others = [t for t in self.spec.tables if t != CHECKPOINTS]
        list(self._pool.map(lambda table: self._bring(table, way, upto, tags, self._files), others))
        self._bring(CHECKPOINTS, way, upto, tags, self._checkpoint_files)
        done = self._low(way)
        self._epochs = {slot: epoch for slot, epoch in self._epochs.items() if slot > done}

    def _bring(
        self, table: str, way: Way, upto: int, tags: set[str] | None, files_of: Callable[[str, int, int], list[str]]
    ) -> None:
        follower = self._tables.get(table)
        first = 1 + (self._slot(follower) if follower else self._position(way))
        if first > upto:
            return
        files = files_of(table, first, upto)
        if follower is None:
            if not files and table in self.spec.windows:
                return  # a window's column types are known from its first file
            follower = self._create(table, files[0] if files else None, way.timeline, first - 1)
        if files or tags is not None:
            follower.apply([self.store.uri(key) for key in files], way.timeline, first, upto, tags)

    def _files(self, table: str, first: int, upto: int) -> list[str]:
        return [f.key for slot in range(first, upto + 1) for f in self._epochs[slot].files.get(table, []) if f.rows]

    def _checkpoint_files(self, table: str, first: int, upto: int) -> list[str]:
        """One file per slot in the attempt's own folder; its content follows from the manifest, so anybody may write it."""
        written = []
        for epoch in (self._epochs[slot] for slot in range(first, upto + 1)):
            key = f"{self._layout.table(table, epoch.id)}publisher.parquet"
            written.append(write_small(self.store, key, checkpoint_rows([epoch])).key)
        return written

    def _tags(self, way: Way, upto: int) -> set[str] | None:
        """At a group end the tags that stay: the newest ones, and a ladder of older ones; None elsewhere."""
        follower = self._tables.get(CHECKPOINTS)
        tagged = [m for m in follower.tagged() if way.position(m) is not None] if follower else []
        if upto - max((m.upto for m in tagged), default=0) < _GROUP:
            return None
        oldest = upto - self.spec.checkpoint.retain - _RUNG
        rungs = {m.upto // _RUNG: m for m in tagged if m.upto >= oldest}.values()
        return {tag_name(m.timeline, m.upto) for m in [*rungs, *tagged[-_TAGS:]]}

    def _create(self, table: str, sample: str | None, timeline: int, upto: int) -> Follower:
        """A new table, marked as empty up to the sink's position."""
        identifier, catalog = self._identifier(table), self._open()
        schema = table_schema(self.spec, table)
        if sample is not None and table in self.spec.windows:
            schema = pq.read_schema(io.BytesIO(self.store.get(sample).data)).remove_metadata()
        location = table_location(self.spec, self.store, table)
        created = catalog.create_table(identifier, schema, location=location, properties=TABLE_PROPERTIES)
        self._tables[table] = Follower(created, self.uid)
        self._tables[table].begin(timeline, upto)
        return self._tables[table]

    def _point(self, way: Way) -> None:
        places = {table: follower.location for table, follower in self._tables.items()}
        current = Current(self.uid, way.timeline, self._position(way), places)
        if self._pointed != current:
            move_current(self.store, self.spec.name, current)
            self._pointed = current

    def _position(self, way: Way) -> int:
        """The slot up to which everything is in the tables."""
        follower = self._tables.get(CHECKPOINTS)
        mark = follower.mark() if follower else None
        return (way.position(mark) or 0) if mark else 0

    def _low(self, way: Way) -> int:
        """The oldest mark of all tables: manifests after it may still be needed."""
        return min([self._position(way), *(self._slot(f) for f in self._tables.values())])

    def _slot(self, follower: Follower) -> int:
        mark = follower.mark()
        return mark.upto if mark else 0

    def _remember(self, way: Way) -> None:
        if way.timeline != self._timeline:
            self._epochs.clear()
            self._timeline = way.timeline

    def _identifier(self, table: str) -> tuple[str, str]:
        return namespace(self.spec), table

    def _open(self) -> SqlCatalog:
        if self._catalog is None:
            self._catalog = open_catalog(self.spec, self.store, self._workdir)
        return self._catalog

    def _fenced(self, table: str, timeline: int, upto: int, way: Way) -> FencedError:
        return FencedError(
            f"table {table} of {self.spec.name} stands at slot {upto} of timeline {timeline}, "
            f"but the log ends at slot {way.slot} of timeline {way.timeline}",
            code="sink.fenced",
            pipeline=self.spec.name,
            kept="the tables; nothing was changed",
            advice="check that the store is the one these tables were made from",
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
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
        except (OSError, SQLAlchemyError) as error:
            self._tables.clear()
            raise TransientError(
                f"the tables of {self.spec.name} cannot be reached: {str(error).splitlines()[0]}",
                code="sink.unavailable",
                pipeline=self.spec.name,
                kept="everything sealed; the tables catch up later",
                advice="check the store and the catalog; tidegate tries again by itself",
                retry_after=2.0,
            ) from error
