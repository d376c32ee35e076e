"""A small model of an Iceberg catalog.

Tables as chains of marked snapshots, committed by compare-and-swap on main.

`SimSink` is the real `IcebergSink`; only its catalog and its commits are of this module.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.manifest import DataFile
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import arrow_of, rows_of
from tests.simulation.coverage import ASK, COMMIT, KINDS, LOAD
from tests.simulation.protocol_trace import table_of
from tests.simulation.storage import MERGED, SimStore
from tests.simulation.world import World

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import TransientError
from tidegate.jobs.engine.arrow_tables import conform_to_schema
from tidegate.jobs.sinks import published_tables
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.lineage_position import FollowerPosition, read_published_cut
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.table_files import (
    LiveDataFile,
    PartitionValues,
    PhysicalLayout,
    get_newest_sequence_number,
    make_merged_stem,
    parse_commit_bound,
)
from tidegate.jobs.sinks.table_follower import TableFollower, TagChange
from tidegate.jobs.sinks.table_scan import Ranges, select_in_ranges
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.splice import tables_at_head

LAYOUT = BucketLayout(PIPELINE)


@dataclass(frozen=True)
class Snapshot:
    """What main was, once."""

    number: int
    parent: Snapshot | None
    mark: FollowerPosition
    files: tuple[str, ...]
    uid: str


@dataclass(frozen=True)
class Metadata:
    """One version of a table."""

    location: str
    main: Snapshot | None = None
    tags: dict[str, Snapshot] = field(default_factory=dict)
    newest: int = 0  # mark set last, by number
    default_spec_id: int = 0  # no table is partitioned

    def next_sequence_number(self) -> int:
        """What the next snapshot gets; given once."""
        return self.newest + 1

    def current_snapshot(self) -> None:
        """Not a file in the store."""

    def snapshots(self) -> set[Snapshot]:
        """All that readers may still open."""
        parent = self.main.parent if self.main else None
        return {s for s in (self.main, parent, *self.tags.values()) if s is not None}

    def files(self) -> set[str]:
        """What GC must keep for this version."""
        return {file for snapshot in self.snapshots() for file in snapshot.files}


class Catalog:
    """The catalog of one schedule. Every visit is a request that may fail."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tables: dict[str, Metadata] = {}
        self.versions: dict[str, Metadata] = {}
        self.highest: dict[
            str, int
        ] = {}  # table -> newest timeline it was ever rewound to or applied
        self.rebase = False  # pyiceberg's own retry, for a mutant
        self.fences = True
        self.validates = True
        self.names = 0  # of versions that private catalogs have written
        self._held: dict[str, LiveDataFile] = {}
        world.catalog = self
        world.table_files = self.live_files

    def live_files(self) -> set[str]:
        """What the tables name now, and what the pointer's versions name."""
        return {
            file
            for metadata in self.tables.values()
            for file in (metadata.main.files if metadata.main else ())
        }

    def held(self, key: str) -> LiveDataFile:
        """What Iceberg knows of a data file: its rows, and of which slots they are."""
        if key not in self._held:
            data = self.world.bucket.written[key]
            slots = [row["_epoch"] for row in rows_of(data)]
            file: Any = SimpleNamespace(
                file_path=f"memory://sim/{key}",
                record_count=len(slots),
                file_size_in_bytes=len(data),
                spec_id=0,
                partition=None,
            )
            self._held[key] = LiveDataFile(file, min(slots), max(slots))
        return self._held[key]

    def close(self) -> None:
        """A client's connections; there are none."""

    def visit(self, verb: str, table: str) -> str:
        """Hand the baton back, and see what goes wrong."""
        self.world.travel()
        kind = self.world.fate(f"catalog.{verb}", table, KINDS[LOAD if verb == "load" else COMMIT])
        if kind in ("503", "lost request"):
            raise OSError(kind)
        if kind in ("slow", "sleep", "crash", "clock jump"):
            self.world.endure(kind)
        return kind

    def _answer(self, kind: str) -> None:
        """What becomes of the answer to something that took effect."""
        if kind == "crash after":
            self.world.endure("crash")
        if kind == "slow answer":
            self.world.endure(kind)
        if kind == "lost answer":
            raise OSError(kind)

    def table_exists(self, identifier: tuple[str, str]) -> bool:
        """Whether it is registered."""
        return identifier[1] in self.tables

    def load_table(self, identifier: tuple[str, str]) -> Any:
        """A table as it is now."""
        self.visit("load", identifier[1])
        if identifier[1] not in self.tables:
            raise NoSuchTableError(identifier[1])
        return self.handle(identifier[1])

    def handle(self, table: str) -> Any:
        """What the follower holds."""
        return SimpleNamespace(
            catalog=self, table=table, metadata=self.tables[table], name=lambda: (PIPELINE, table)
        )

    def create_table(self, identifier: tuple[str, str], schema: Any, **_: Any) -> Any:
        """A table without a snapshot, as far as no one else was faster."""
        kind = self.visit("create", identifier[1])
        if kind == "late":
            self._later(f"create {identifier[1]}", lambda: self._created(identifier[1]))
        self._created(identifier[1])
        self._answer(kind)
        return self.load_table(identifier)  # as pyiceberg's SQL catalog does

    def _created(self, table: str) -> None:
        if table in self.tables:
            raise TableAlreadyExistsError(table)
        self._stands(table, self.version(Metadata(f"{table}/0")))

    def register_table(self, identifier: tuple[str, str], location: str) -> None:
        """A table the catalog had lost."""
        kind = self.visit("create", identifier[1])
        if kind == "late":
            self._later(
                f"register {identifier[1]}", lambda: self._registered(identifier[1], location)
            )
        self._registered(identifier[1], location)
        self._answer(kind)

    def _registered(self, table: str, location: str) -> None:
        if table in self.tables:
            raise TableAlreadyExistsError(table)
        self._judge(table, self.versions[location])
        self._stands(table, self.versions[location])

    def _judge(self, table: str, metadata: Metadata) -> None:
        """The protocol must allow this version."""
        if metadata.main is not None:
            there = table_of(metadata)
            self.world.judge.take("follow", table, there.mark, there.files)

    def _stands(self, table: str, metadata: Metadata) -> None:
        self.tables[table] = metadata
        self.world.mark(table, metadata.main and metadata.main.mark)

    def _later(self, what: str, act: Callable[[], object]) -> None:
        """A transaction that commits after the client gave up waiting; a refusal no one hears."""

        def arrive() -> None:
            with suppress(CommitFailedException, TableAlreadyExistsError):
                act()

        self.world.late.append((f"catalog: {what}", arrive))
        raise OSError("late")

    def read_version(self, location: str) -> Metadata:
        """Read a metadata file as Iceberg's libraries do, from the store."""
        self.meet_store("get", location)
        return self.versions[location]

    def meet_store(self, verb: str, location: str) -> None:
        """Hand the baton back for a request about a metadata file; it may fail."""
        key = f"{PIPELINE}/iceberg/{location}/metadata.json"
        self.world.travel()
        kind = self.world.fate(verb, key, KINDS[ASK])
        if kind in ("503", "denied"):
            raise OSError(kind)
        if kind:
            self.world.endure(kind)

    def version(self, metadata: Metadata) -> Metadata:
        """A metadata file, never changed again."""
        self.versions[metadata.location] = metadata
        return metadata

    def commit(self, handle: Any, timeline: int, change: Callable[[Metadata], Metadata]) -> None:
        """Swap main, on the condition that it is what the follower judged."""
        table, judged = handle.table, handle.metadata
        # pyiceberg reads the table again, and changes what it has read.
        seen = self.tables[table].location
        kind = self.visit("commit", table)
        commit = partial(self._committed, table, judged, seen, timeline, change)
        if kind == "late":
            self._later(f"commit {table}", commit)
        handle.metadata = commit()
        self._answer(kind)

    def _committed(
        self,
        table: str,
        judged: Metadata,
        seen: str,
        timeline: int,
        change: Callable[[Metadata], Metadata],
    ) -> Metadata:
        now = self.tables[table]
        rebases = self.rebase and timeline >= 0
        if now.main is not judged.main and not rebases:
            raise CommitFailedException(f"main of {table} has moved")
        if now.location != seen and not rebases:
            raise CommitFailedException(f"another writer has committed to {table}")
        after = change(now)
        self._judge(table, after)
        self._watch(table, timeline if timeline >= 0 else -timeline - 1, after)
        self._stands(table, self.version(replace(after, location=f"{table}/{len(self.versions)}")))
        return self.tables[table]

    def touch(self, table: str) -> None:
        """Another writer commits a version with the same rows."""
        now = self.tables[table]
        self._stands(table, self.version(replace(now, location=f"{table}/{len(self.versions)}")))

    def name_version(self, table: str, location: str) -> None:
        """The entry of a private catalog names another version, or the first one."""
        metadata = self.versions[location]
        self._judge(table, metadata)
        if metadata.main is not None:
            self._watch(table, metadata.main.mark.timeline, metadata)
        self._stands(table, metadata)

    def _watch(self, table: str, timeline: int, after: Metadata) -> None:
        highest = self.highest.get(table, 0)
        if timeline < highest:
            raise Violation(f"{table}: abandoned timeline {timeline} comes back after {highest}")
        self.highest[table] = timeline
        files = after.main.files if after.main else ()
        if len(files) != len(set(files)):
            raise Violation(f"{table}: a slot was applied twice")
        there = self.world.bucket.objects.keys() | self.world.lost
        missing = [file for file in files if file not in there]
        if missing:
            raise Violation(f"{table}: {missing[0]} was published although it is gone")


class ModelFollower(TableFollower):
    """A table with marks, on the model."""

    table: Any

    @property
    def metadata_location(self) -> str:
        """Name of the version."""
        return str(self._metadata.location)

    def owner_uid(self) -> str | None:
        """Who published last."""
        return self._metadata.main.uid if self._metadata.main else None

    def newest_position(self) -> FollowerPosition | None:
        """The mark of main."""
        return self._metadata.main.mark if self._metadata.main else None

    def was_rolled_back(self) -> bool:
        """No one rolls back by hand here."""
        return False

    def last_position(self) -> FollowerPosition | None:
        """The mark of main, which no one rolls back."""
        return self.newest_position()

    def list_tags(self) -> dict[str, FollowerPosition]:
        """Marks of group ends and barriers, oldest first."""
        tagged = [(name, snapshot.mark) for name, snapshot in self._metadata.tags.items()]
        return dict(sorted(tagged, key=lambda item: (item[1].upto, item[1].timeline)))

    def add_missing_columns(self, schema: Any) -> None:
        """All columns are there."""

    def set_layout(self, wanted: PhysicalLayout) -> None:
        """Files lie as they lie."""

    def current_layout(self) -> PhysicalLayout:
        """Neither partitioned nor sorted."""
        return PhysicalLayout()

    def live_files(self) -> list[LiveDataFile]:
        """The files of main."""
        return [
            self.table.catalog.held(key)
            for key in (self._metadata.main.files if self._metadata.main else ())
        ]

    def replace_files(self, gone: Collection[DataFile], new: Mapping[str, PartitionValues]) -> None:
        """Merged files in the place of others; refused as by `rewrite.put_files`."""
        main, coming = self._metadata.main, _keys(new)
        leaving = set(_keys(file.file_path for file in gone))
        if main is None or (self.table.catalog.validates and not leaving <= set(main.files)):
            raise ValidationException("main has not got all the parts")
        if any(
            (parse_commit_bound(path) or 0) <= get_newest_sequence_number(self.table.metadata)
            for path in new
        ):
            raise ValidationException("too late")
        self._require_there(coming)

        def change(metadata: Metadata) -> Metadata:
            assert metadata.main is not None
            after = self._appended(metadata, coming, metadata.main.mark)
            assert after.main is not None
            return replace(
                after,
                main=replace(
                    after.main, files=tuple(f for f in after.main.files if f not in leaving)
                ),
            )

        self._commit(main.mark.timeline, change)

    def initialize(self, timeline: int, upto: int) -> None:
        """The first snapshot."""
        self._commit(timeline, lambda m: self._appended(m, (), FollowerPosition(timeline, upto)))

    def append_slots(
        self,
        files: Collection[str],
        timeline: int,
        first: int,
        upto: int,
        tags: TagChange | None = None,
    ) -> None:
        """Append, tag, forget."""

        def change(metadata: Metadata) -> Metadata:
            after = self._appended(metadata, _keys(files), FollowerPosition(timeline, upto))
            assert after.main is not None
            if tags is None:
                return after
            kept = {n: s for n, s in metadata.tags.items() if n in tags.kept}
            return replace(after, tags=kept | dict.fromkeys(tags.new, after.main))

        self._require_there(_keys(files))
        self._commit(timeline, change)

    def rewind(self, timeline: int, position: int, _cut_files: object = None) -> None:
        """Drop later slots and append the fence; a merged file with such slots is written again."""
        judged = self._metadata.main
        kept = tuple(
            left for f in (judged.files if judged else ()) if (left := self._left_of(f, position))
        )

        def change(metadata: Metadata) -> Metadata:
            old = metadata.main
            while old is not None and old.mark.upto > position:
                old = old.parent
            if not self.table.catalog.fences and old is not None:
                return replace(metadata, main=old)
            after = self._appended(replace(metadata), (), FollowerPosition(timeline, position))
            assert after.main is not None
            tags = {n: s for n, s in metadata.tags.items() if s.mark.upto <= position}
            return replace(after, main=replace(after.main, files=kept), tags=tags)

        self._commit(-timeline - 1, change)

    def _left_of(self, key: str, position: int) -> str | None:
        """The file without the slots after a position; None if nothing is left of it."""
        if MERGED not in key:
            return key if _slot(key) <= position else None
        one = self.table.catalog.held(key)
        if (one.last or 0) <= position or (one.first or 0) > position:
            return key if (one.last or 0) <= position else None
        cut = f"{PIPELINE}/iceberg/{self.table.table}/{make_merged_stem(self.table.metadata)}-{0:016x}.parquet"
        store = SimStore(self.table.catalog.world)
        try:
            rows = [row for row in rows_of(store.get(key).data) if row["_epoch"] <= position]
            store.put(cut, marshal.dumps(rows, 2))
        except NotFoundError as error:
            raise FileNotFoundError(key) from error
        except TransientError as error:
            raise OSError(str(error)) from error
        return cut

    def _require_there(self, keys: Iterable[str]) -> None:
        """pyiceberg reads the footers."""
        bucket = self.table.catalog.world.bucket
        for key in keys:
            if key not in bucket.objects:
                raise FileNotFoundError(key)
            if bucket.objects[key] != bucket.written[key]:
                raise pa.ArrowInvalid(f"no footer: {key}")

    @property
    def _metadata(self) -> Metadata:
        found: Metadata = self.table.metadata
        return found

    def _appended(
        self, metadata: Metadata, files: Iterable[str], mark: FollowerPosition
    ) -> Metadata:
        before = metadata.main
        number = metadata.newest + 1
        main = Snapshot(number, before, mark, (*(before.files if before else ()), *files), self.uid)
        return replace(metadata, main=main, newest=number)

    def _commit(self, timeline: int, change: Callable[[Metadata], Metadata]) -> None:
        self.table.catalog.commit(self.table, timeline, change)


class SimSink(IcebergSink):
    """The real sink on the model of a catalog."""

    follower = ModelFollower

    def __init__(self, spec: PipelineSpec, store: Store, uid: str, catalog: Any) -> None:
        super().__init__(spec, store, uid)
        self._model = catalog

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Follow, and check that readers learn of a restore although no epoch follows it."""
        world = self._model.world
        timeline = world.judge.protocol.timeline
        applied = super().follow(log, flush=flush)
        seen = world.judge.protocol.pointer
        if self._tables and seen[0] < timeline:
            raise Violation(f"the tables follow timeline {timeline}, and readers see {seen}")
        return applied

    @property
    def _catalog(self) -> Any:
        return self._model

    def _wanted_schema(
        self, table: str, files: list[str], follower: TableFollower | None = None
    ) -> Any:
        return None


def read_data_file(store: SimStore, key: str) -> bytes:
    """A file of a table, as Iceberg's libraries read it."""
    try:
        data = store.get(key).data
    except NotFoundError as error:
        raise FileNotFoundError(key) from error
    if data != store.bucket.written[key]:
        raise pa.ArrowInvalid(f"no footer: {key}")
    return data


class ModelScan:
    """`TableScan` on the model: a version that the readers' pointer names."""

    def __init__(self, store: SimStore, address: str) -> None:
        world, table = store.world, address.partition("/")[0]
        spec, main = world.stage.spec, world.catalog.versions[address].main
        world.travel()
        files = main.files if main else ()
        self._parts = [arrow_of(spec, table, read_data_file(store, key)) for key in files]
        schema = build_table_schema(spec, table)
        added = {
            f.name: f for part in self._parts for f in part.schema if f.name not in schema.names
        }
        self.schema = pa.schema([*schema, *added.values()])

    def read(
        self,
        columns: Collection[str] | None = None,
        ranges: Ranges | None = None,
        *,
        with_value: str | None = None,
    ) -> pa.Table:
        """The rows within the ranges."""
        parts = [conform_to_schema(part, self.schema) for part in self._parts]
        rows = select_in_ranges(pa.concat_tables([self.schema.empty_table(), *parts]), ranges or {})
        if with_value:
            rows = rows.filter(pc.is_valid(rows[with_value]))
        return rows.select([n for n in self.schema.names if columns is None or n in columns])


SCANS: tuple[tuple[object, str, object], ...] = tuple(
    (module, "TableScan", ModelScan) for module in (published_tables, tables_at_head)
)
"""Who reads published tables: module, name, replacement."""


def external_files(catalog: Catalog, store: SimStore) -> set[str]:
    """`tables.referenced_files` on the model: what the published versions name."""
    current = read_published_cut(store, PIPELINE)
    versions = [
        catalog.versions[location] for location in (current.tables.values() if current else ())
    ]
    return {store.uri(file) for version in versions for file in version.files()}


def key_of(uri: str) -> str:
    """The key in an address."""
    return uri.removeprefix("memory://sim/")


def _keys(uris: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(key_of, uris))


def _slot(key: str) -> int:
    attempt = LAYOUT.parse_attempt(key)
    return attempt.slot if attempt else 0
