"""Base of the sinks that apply the log slot by slot: PostgreSQL, Kafka, files and webhooks.

`<pipeline>/sinks/<name>.json` holds the sink's position. For a sink that is applied at least once
it *is* the ledger. A transactional sink has its ledger next to its rows; there the document is a
copy, so that retention does not retire what the sink still needs. The copy is written after the
ledger. Only for Kafka it may be ahead: an epoch without messages moves the copy alone.

See `docs/decisions/0050-sinks-keep-their-own-ledger.md`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.manifest import Manifest, RetiredEpoch
from tidegate.checkpoints.shared_documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ErrorDefinition, PoisonError, TidegateError
from tidegate.jobs.engine.arrow_tables import read_parquet_object
from tidegate.jobs.engine.interfaces import WorkRunner
from tidegate.jobs.spec.pipeline import BARRIERS, CHECKPOINTS, PipelineSpec
from tidegate.jobs.spec.source_options import resolve_address
from tidegate.json_types import JsonObject

from .errors import (
    CONTENDED,
    EPOCH_RETIRED,
    LEDGER_MOVED,
    NO_CLIENT_LIBRARY,
    SINK_FENCED,
    SINK_OF_OTHER_PIPELINE,
    LedgerMovedError,
)
from .lineage_position import CurrentLineage, FollowerPosition, describe_restore
from .output_tables import build_checkpoint_rows

# Lost races in a row before the caller is asked to come back later.
_MAX_CONFLICTS = 20


class StoredPosition(SharedDocument):
    """The position of a sink: it is done with slots 1 to `upto` of the lineage of `timeline`.

    `uid` is that of the pipeline; empty if no pipeline has filled the sink. A sink with
    ``start: head`` skipped the first slots.
    """

    uid: str = ""
    timeline: int = 0
    upto: int = 0

    @property
    def position(self) -> FollowerPosition:
        """The position without the pipeline's uid."""
        return FollowerPosition(self.timeline, self.upto)


def read_stored_position(store: Store, pipeline: str, sink: str) -> StoredPosition | None:
    """Return the position in the store, or None before the first."""
    return read_document(store, BucketLayout(pipeline).sink_position_key(sink), StoredPosition)[0]


def resolve_sink_address(sink: str, field: str, address: str) -> str:
    """Replace the variables of the environment in an address of a sink.

    Raises:
        ConfigurationError: one of them is not set.
    """
    return resolve_address(f"sinks.{sink}.{field}", address, os.environ)


@dataclass(eq=False, repr=False)  # options may have passwords
class SlotFollower(ABC):
    """A sink that applies the log slot by slot; implements `Sink`.

    Subclasses define where the ledger is kept, and how an epoch is applied and taken back.

    Attributes:
        given: the sink's options; each subclass names their type.
        run: moves the rows, on Spark in a task; None: this process does.
        progress: what is done of an epoch that failed, for the next try.
    """

    name: str
    given: Any
    spec: PipelineSpec
    store: Store
    uid: str
    run: WorkRunner | None = None

    def __post_init__(self) -> None:
        self.tables = self.given.tables or self.spec.table_names
        self.progress: Any = None
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 - a sink without state needs none
        """Prepare what the subclass needs, without opening a connection."""

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Bring the sink to the head of the current timeline.

        Every slot is applied by itself, so `flush` changes nothing.

        Returns:
            The number of slots applied.

        Raises:
            FencedError: the sink is on a timeline outside this log's lineage, or ahead of it.
            TransientError: it cannot be reached now, or other publishers were faster each time.
                Call again.
            ConfigurationError: it belongs to another pipeline or refuses these credentials, or a
                variable or client library is missing.
            PoisonError: an epoch that it needs was retired, or a row does not fit.
        """
        missed = ""
        for _ in range(_MAX_CONFLICTS):
            try:
                return self._follow_once(log)
            except LedgerMovedError:
                continue
            except PoisonError as error:
                # Another publisher may have applied the epoch meanwhile, and retention deleted it.
                if error.message == missed:
                    raise
                missed = error.message
        raise CONTENDED(pipeline=self.spec.name, what=self.name)

    def lag(self, log: SlotLog) -> int:
        """Return the number of sealed slots that the sink lacks; it reads the ledger for that."""
        position = self._load_position()
        return CurrentLineage(log, log.head()).count_missing_slots(position)

    @abstractmethod
    def _load_position(self) -> FollowerPosition | None:
        """Return the sink's position; None before the first.

        Raises:
            ConfigurationError: the ledger belongs to another pipeline.
        """

    def _create_ledger(self, lineage: CurrentLineage) -> FollowerPosition:
        """Create the ledger of a new sink and return its first position."""
        slot = lineage.slot if self.given.start == "head" else 0
        first = FollowerPosition(lineage.timeline, slot)
        # A publisher that began before the restore may still deliver an epoch that does not count.
        if lineage.timeline > 0:
            self._rewind_sink(None, first, lineage)
        else:
            self.move_position(None, first)
        return first

    @abstractmethod
    def _rewind_sink(
        self, before: FollowerPosition | None, after: FollowerPosition, lineage: CurrentLineage
    ) -> None:
        """Take back the slots after `after.upto` and continue on the timeline of `after`.

        `before` is None for a sink that is new.

        Raises:
            LedgerMovedError: the position is not `before`.
        """

    @abstractmethod
    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        """Apply one epoch. Raises `LedgerMovedError` if the position is not `before`."""

    def _move_rows(self, move: Callable[..., None], *given: Any) -> bool:
        """Call a method of this sink where rows are moved; return whether that was a task.

        In a task the method is called of a new sink with the same options. It finds there what the
        spec says, the rows of sealed epochs and `progress`, and none of the sink's documents.
        """
        if self.run is None:
            move(*given)
            return False
        # Here: it imports what readers of tables do not need.
        from tidegate.jobs.rows.topic_reading import remove_settings

        # Settings of other clients are not the task's business, and may be secret.
        spec = remove_settings(self.spec).model_copy(update={"sinks": {self.name: self.given}})
        work = SinkWork(
            type(self),
            (self.name, self.given, spec),
            self.uid,
            move.__name__,
            given,
            self.progress,
        )
        error, self.progress = self.run(work)
        if error is not None:
            raise error
        return True

    def _move_epoch(self, move: Callable[..., None], epoch: Manifest, *given: Any) -> bool:
        """As `_move_rows`; an epoch without rows is not worth a task."""
        mine = [t for t in self.tables if t not in (BARRIERS, CHECKPOINTS)]
        if any(file.rows for table in mine for file in epoch.files.get(table, ())):
            return self._move_rows(move, epoch, *given)
        move(epoch, *given)
        return False

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, lineage: CurrentLineage
    ) -> FollowerPosition:
        """Get past a retired epoch that was not applied yet, or raise; return the new position."""
        raise self.make_error(EPOCH_RETIRED, slot=slot)

    def _follow_once(self, log: SlotLog) -> int:
        """Read the position, then the head.

        Whatever the sink has was sealed before, so it cannot be ahead of the log.
        """
        # In this order: a position that is read after the head could be ahead of it.
        stored = self._load_position()
        lineage = CurrentLineage(log, log.head())
        if stored is None:
            stored = self._create_ledger(lineage)
        if not lineage.is_in_log(stored):
            raise self.make_error(SINK_FENCED, **lineage.describe_mismatch(stored))
        here = FollowerPosition(lineage.timeline, lineage.last_shared_slot(stored))
        # Another timeline means a restore, even if no slot has to be taken back: receivers must
        # know it, and the ledger must name the timeline that it continues.
        if here != stored:
            self._rewind_sink(stored, here, lineage)
        begin = here.upto
        while here.upto < lineage.slot:
            here = self._apply_remaining_epochs(log, here, lineage)
        return here.upto - begin

    def _apply_remaining_epochs(
        self, log: SlotLog, here: FollowerPosition, lineage: CurrentLineage
    ) -> FollowerPosition:
        for filled in log.epochs_between(lineage.timeline, here.upto + 1, lineage.slot):
            if isinstance(filled.record, RetiredEpoch):
                # It retires once it is applied: another publisher may have done that meanwhile.
                if (moved := self._load_position()) != here:
                    raise self.make_error(LEDGER_MOVED, position=moved, expected=here)
                return self._handle_retired_epoch(filled.record.slot, here, lineage)
            after = FollowerPosition(lineage.timeline, filled.epoch.slot)
            self._apply_epoch(filled.epoch, here, after)
            here = after
        return here

    def read_epoch_rows(self, epoch: Manifest, table: str) -> Iterator[Any]:
        """Yield the epoch's rows of one table, a file at a time.

        Those of `checkpoints` follow from the manifest.
        """
        if table == CHECKPOINTS:
            yield build_checkpoint_rows([epoch])
            return
        for file in epoch.files.get(table, []):
            if file.rows:
                yield read_parquet_object(self.store, file.key)

    def describe_epoch(self, epoch: Manifest) -> JsonObject:
        """Return the fields by which receivers recognise an epoch."""
        return {
            "pipeline": self.spec.name,
            "uid": self.uid,
            "timeline": epoch.timeline,
            "epoch": epoch.slot,
        }

    def describe_restore(self, after: FollowerPosition, lineage: CurrentLineage) -> JsonObject:
        """Return what tells receivers which epochs count."""
        return describe_restore(self.spec.name, self.uid, after, lineage.list_segments())

    def read_own_position(self) -> FollowerPosition | None:
        """Return the sink's position in the store; None before the first.

        Raises:
            ConfigurationError: another pipeline filled the sink.
        """
        stored = read_stored_position(self.store, self.spec.name, self.name)
        if stored is None:
            return None
        self.refuse_other_owner(stored.uid)
        return stored.position

    def move_position(self, before: FollowerPosition | None, after: FollowerPosition) -> None:
        """Swap the position in the store.

        Without `before` it is a copy of a ledger elsewhere, and is written unless the store has a
        newer copy. Nothing happens if the position is `after` already.

        Raises:
            LedgerMovedError: the position is not `before`.
            ConfigurationError: another pipeline filled the sink.
        """
        key = BucketLayout(self.spec.name).sink_position_key(self.name)

        def advance_position(there: StoredPosition) -> StoredPosition:
            """Return the document to be stored in place of the one that is there."""
            self.refuse_other_owner(there.uid)
            # Two publishers may copy one ledger in either order: a faster one may have been here.
            is_done = there.position >= after if before is None else there.position == after
            if there.uid:
                if is_done:
                    return there
                if before is not None and there.position != before:
                    raise self.make_error(LEDGER_MOVED, position=there.position, expected=before)
            return there.model_copy(update={"uid": self.uid, **asdict(after)})

        change_document(self.store, key, StoredPosition(), advance_position)

    def refuse_other_owner(self, owner: str) -> None:
        """Refuse the sink if `owner`, the uid that is recorded there, is another pipeline's.

        An empty `owner` means that no pipeline has filled the sink.

        Raises:
            ConfigurationError: another pipeline filled it.
        """
        if owner not in ("", self.uid):
            raise self.make_error(SINK_OF_OTHER_PIPELINE, owner=owner, uid=self.uid)

    def make_error(self, entry: ErrorDefinition, **fields: object) -> TidegateError:
        """Return an error of the catalogue about this sink."""
        error: TidegateError = entry(pipeline=self.spec.name, sink=self.name, **fields)
        return error


@dataclass(frozen=True)
class SinkWork:
    """A call of a sink's method as `RowWork`.

    It returns the error that tidegate has for a failure, if there was one, and the new `progress`.
    """

    kind: type[SlotFollower]
    sink: tuple[str, Any, PipelineSpec]
    uid: str
    method: str
    given: tuple[Any, ...]
    progress: Any

    def __call__(self, store: Store) -> tuple[TidegateError | None, Any]:
        """Call the method of a new sink."""
        sink = self.kind(*self.sink, store, self.uid)
        sink.progress = self.progress
        try:
            getattr(sink, self.method)(*self.given)
        except TidegateError as error:
            return error, sink.progress
        return None, sink.progress


def import_client_library(module: str, *, of: str, extra: str) -> Any:
    """Import a client library that only some sinks use, at the time when a sink first needs it.

    Args:
        module: its import name.
        of: what needs it, for the error.
        extra: the extra of tidegate that installs it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        # Its name in the package index.
        package = module.replace("_", "-")
        raise NO_CLIENT_LIBRARY(what=of, package=package, extra=extra) from error
