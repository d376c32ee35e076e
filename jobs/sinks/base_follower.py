"""A follower that applies the log slot by slot and keeps its mark itself.

What PostgreSQL, files and webhooks have in common.

`<pipeline>/sinks/<name>.json` says how far it is. For a sink that is applied at least once it *is*
the ledger; a transactional sink has its ledger where its rows are, and this is a copy for
retention, which must not retire what a sink still needs. The copy is written after the fact, so it
never says too much.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pyarrow.parquet as pq
from pyarrow import BufferReader

from tidegate.checkpoints.manifest import Manifest, RetiredEpoch
from tidegate.checkpoints.shared_documents import SharedDocument, change_document, read_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, FencedError, PoisonError, TransientError
from tidegate.jobs.sinks.lineage_position import CurrentLineage, FollowerPosition
from tidegate.jobs.sinks.output_tables import build_checkpoint_rows
from tidegate.jobs.spec.pipeline import CHECKPOINTS, PipelineSpec

_MAX_CONFLICTS = 20  # in a row, before asking the caller to come back later


class LedgerMovedError(TransientError):
    """Another publisher moved the ledger meanwhile: nothing was applied; judge again."""


class StoredPosition(SharedDocument):
    """How far a sink is: slots 1 to `upto` of the lineage of `timeline`."""

    uid: str = ""
    timeline: int = 0
    upto: int = 0

    @property
    def position(self) -> FollowerPosition:
        """Without the pipeline."""
        return FollowerPosition(self.timeline, self.upto)


def build_position_key(pipeline: str, sink: str) -> str:
    """Where a sink's mark lies."""
    return f"{pipeline}/sinks/{sink}.json"


def read_stored_position(store: Store, pipeline: str, sink: str) -> StoredPosition | None:
    """The mark in the store, or None before the first."""
    return read_document(store, build_position_key(pipeline, sink), StoredPosition)[0]


def expand_variables(text: str, sink: str) -> str:
    """Put environment variables in the place of ``${NAME}``.

    Raises:
        ConfigurationError: one of them is not set.
    """

    def read_variable(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        if found is None:
            raise ConfigurationError(
                f"sinks.{sink}: the environment variable {match[1]} is not set",
                code="sink.no_variable",
                advice=f"set {match[1]} where the driver is started",
            )
        return found

    return re.sub(r"\$\{(\w+)\}", read_variable, text)


class SlotFollower(ABC):
    """Implements `Sink`.

    Subclasses say where the mark is kept, and how one epoch is applied and taken back.
    """

    def __init__(
        self, name: str, spec: PipelineSpec, store: Store, uid: str, tables: tuple[str, ...] | None
    ) -> None:
        self.name, self.spec, self.store, self.uid = name, spec, store, uid
        self.tables = tables or spec.table_names

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Bring the sink to the head of the current timeline.

        Every slot by itself, so groups need no flush.

        Returns:
            Slots applied.

        Raises:
            FencedError: the sink stands on a timeline outside this log's lineage, or ahead of it.
            TransientError: it cannot be reached now, or other publishers kept winning; call again.
            ConfigurationError: it belongs to another pipeline, or refuses these credentials.
            PoisonError: an epoch that it needs was retired, or a row does not fit.
        """
        for _ in range(_MAX_CONFLICTS):
            try:
                return self._follow_once(log)
            except LedgerMovedError:
                continue
        raise TransientError(
            f"other publishers of {self.name} kept winning", code="sink.contended", retry_after=1.0
        )

    def lag(self, log: SlotLog) -> int:
        """Sealed slots that the sink has not applied yet."""
        mark, way = self._load_position(), CurrentLineage(log, log.head())
        return way.slot - (way.last_shared_slot(mark) if mark and way.is_in_log(mark) else 0)

    @abstractmethod
    def _load_position(self) -> FollowerPosition | None:
        """The mark; None before the first.

        Raises ConfigurationError when it is another pipeline's.
        """

    @abstractmethod
    def _create_ledger(self, log: SlotLog, way: CurrentLineage) -> FollowerPosition:
        """Make the ledger of a new sink."""

    @abstractmethod
    def _rewind_sink(
        self, before: FollowerPosition, after: FollowerPosition, way: CurrentLineage
    ) -> None:
        """Take back the slots after `after.upto` and go on on its timeline.

        Raises MovedError when the mark is not `before`.
        """

    @abstractmethod
    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        """Apply one epoch. Raises MovedError when the mark is not `before`."""

    @abstractmethod
    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, way: CurrentLineage
    ) -> FollowerPosition:
        """An epoch that is still to be applied was retired: get past it by other means, or refuse.

        Returns the new mark.
        """

    def _follow_once(self, log: SlotLog) -> int:
        """The mark first, then the head.

        Whatever the sink has was sealed before, so it cannot be ahead of the log.
        """
        mark = self._load_position()
        way = CurrentLineage(log, log.head())
        if mark is None:
            mark = self._create_ledger(log, way)
        if not way.is_in_log(mark):
            raise self._fenced_sink_error(mark, way)
        here = FollowerPosition(way.timeline, way.last_shared_slot(mark))
        if here != mark:
            self._rewind_sink(mark, here, way)
        begin = here.upto
        while here.upto < way.slot:
            here = self._apply_remaining_epochs(log, here, way)
        return here.upto - begin

    def _apply_remaining_epochs(
        self, log: SlotLog, here: FollowerPosition, way: CurrentLineage
    ) -> FollowerPosition:
        for filled in log.epochs_between(way.timeline, here.upto + 1, way.slot):
            if isinstance(filled.record, RetiredEpoch):
                return self._handle_retired_epoch(filled.record.slot, here, way)
            after = FollowerPosition(way.timeline, filled.epoch.slot)
            self._apply_epoch(filled.epoch, here, after)
            here = after
        return here

    def read_epoch_rows(self, epoch: Manifest, table: str) -> Iterator[Any]:
        """The epoch's rows of one table, a file at a time.

        Those of `checkpoints` follow from the manifest.
        """
        if table == CHECKPOINTS:
            yield build_checkpoint_rows([epoch])
            return
        for file in epoch.files.get(table, []):
            if file.rows:
                yield pq.read_table(BufferReader(self.store.get(file.key).data))

    def move_position(self, before: FollowerPosition | None, after: FollowerPosition) -> None:
        """Swap the mark in the store.

        Without `before` it is a copy of a ledger elsewhere and only has to be true.

        Raises:
            MovedError: the mark is not `before`.
        """
        key = build_position_key(self.spec.name, self.name)

        def advance_position(there: StoredPosition) -> StoredPosition:
            self.refuse_other_owner(there.uid)
            if there.position == after and there.uid:
                return there
            if before is not None and there.uid and there.position != before:
                raise self.ledger_moved_error(there.position, before)
            if (
                before is None
                and there.uid
                and (there.timeline, there.upto) > (after.timeline, after.upto)
            ):
                return there  # a faster publisher's word about the same ledger
            return there.model_copy(
                update={"uid": self.uid, "timeline": after.timeline, "upto": after.upto}
            )

        change_document(self.store, key, StoredPosition(), advance_position)

    def refuse_other_owner(self, owner: str) -> None:
        """Refuse what another pipeline filled."""
        if owner not in ("", self.uid):
            raise ConfigurationError(
                f"sink {self.name} of {self.spec.name} was filled by another pipeline (uid {owner},"
                f" not {self.uid})",
                code="sink.other_pipeline",
                pipeline=self.spec.name,
                kept="everything in the sink; nothing was changed",
                advice="give the sink another name and place",
            )

    def ledger_moved_error(
        self, found: FollowerPosition, expected: FollowerPosition
    ) -> LedgerMovedError:
        """The error for a ledger that is not where it was judged."""
        return LedgerMovedError(
            f"the ledger of {self.name} is at {found}, not {expected}",
            code="sink.moved",
            pipeline=self.spec.name,
        )

    def epoch_retired_error(self, slot: int) -> PoisonError:
        """The error for an epoch that is gone."""
        return PoisonError(
            f"sink {self.name} of {self.spec.name} needs slot {slot}, which was retired",
            code="sink.retired",
            pipeline=self.spec.name,
            kept="everything in the sink",
            advice=(
                f"take the old rows from the tables (tidegate tables {self.spec.name} ...), and"
                " start the sink anew under another name with: start: head"
            ),
        )

    def _fenced_sink_error(self, mark: FollowerPosition, way: CurrentLineage) -> FencedError:
        return FencedError(
            f"sink {self.name} of {self.spec.name} stands at slot {mark.upto} of timeline"
            f" {mark.timeline}, but the log ends at slot {way.slot} of timeline {way.timeline}",
            code="sink.fenced",
            pipeline=self.spec.name,
            kept="everything in the sink; nothing was changed",
            advice="check that the store is the one this sink was filled from",
        )


# Client libraries that only some sinks need, and that an extra of the package brings.


def import_client_library(module: str, *, of: str, package: str, extra: str) -> Any:
    """The module, imported when a sink first needs it.

    Args:
        module: its import name.
        of: what needs it, for the error.
        package: what it is called where it is installed from.
        extra: of tidegate, that brings it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{of} needs {package}, which is not installed",
            code="sink.no_driver",
            advice=f'install it: pip install "tidegate[{extra}]"',
        ) from error
