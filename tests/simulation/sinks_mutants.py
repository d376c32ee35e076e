"""Bugs in what follows the log: the tables, their compaction, and other sinks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pyiceberg.exceptions import CommitFailedException
from tests.simulation.actors import Stage
from tests.simulation.planting import SEAL, Mutant, replace_seal, reword

from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.retention import Retention
from tidegate.checkpoints.slot_log import Sealed, SlotLog, SlotTaken
from tidegate.jobs.driver.epoch_loop import EpochLoop
from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.files_webhook import AtLeastOnceSink, FilesSink
from tidegate.jobs.sinks.iceberg_catalog import StoreCatalog
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.kafka_sink import ExactlyOnceKafkaSink
from tidegate.jobs.sinks.lineage_position import (
    FollowerPosition,
    read_published_cut,
    replace_table_location,
)
from tidegate.jobs.sinks.postgres_sink import PostgresSink
from tidegate.jobs.sinks.table_maintenance import _FileGroup, _TableCompactor

_ASKS_AGAIN = "self._open = False"


_BROUGHT_IN = _TableCompactor._commit_merged_files


_STAGE = Stage.__init__


_MOVE = PostgresSink._move_ledger


_DELIVER = FilesSink._deliver_epoch


def _publish_first(log: SlotLog, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
    """Apply the attempt's files to `events`, then seal."""
    world = log.store.world  # type: ignore[attr-defined]
    catalog = world.catalog
    if isinstance(record, Manifest) and "events" in catalog.tables:
        from tests.simulation.catalog_model import ModelFollower

        follower = ModelFollower(catalog.handle("events"), record.uid)
        mark = follower.newest_position()
        if mark is not None and mark.timeline == record.timeline and mark.upto < record.slot:
            keys = [log.store.uri(f.key) for f in record.files.get("events", [])]
            with suppress(CommitFailedException, OSError):
                follower.append_slots(keys, record.timeline, record.slot, record.slot)
    return SEAL(log, record)


def _with(**attributes: object) -> Callable[..., None]:
    def init(stage: Stage, *given: Any, **named: Any) -> None:
        _STAGE(stage, *given, **named)
        for name, value in attributes.items():
            setattr(stage.catalog, name, value)

    return init


def _rows_then_ledger(
    sink: PostgresSink, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
) -> None:
    with sink._transaction_cursor() as cursor:
        for table in sink.tables:
            for rows in sink.read_epoch_rows(epoch, table):
                sink._insert_rows(cursor, table, rows)
    with sink._transaction_cursor() as cursor:
        sink._move_ledger(cursor, before, after)


def _move_anyway(
    sink: PostgresSink, cursor: Any, before: FollowerPosition, after: FollowerPosition
) -> None:
    # Whatever the ledger says is taken for the predecessor.
    there = sink._read_ledger(cursor, lock=True)
    _MOVE(sink, cursor, there or before, after)


def _mark_first(
    sink: AtLeastOnceSink, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
) -> None:
    sink.move_position(before, after)
    sink._deliver_epoch(epoch)


def _rewind_silently(
    sink: AtLeastOnceSink, before: FollowerPosition, after: FollowerPosition, way: Any
) -> None:
    sink.move_position(before, after)


def _announce_first(sink: FilesSink, epoch: Manifest) -> None:
    receiver, kept = sink._target, list[tuple[str, bytes]]()
    # Its last write comes first.
    sink._target = SimpleNamespace(put=lambda key, data: kept.append((key, data)))
    try:
        _DELIVER(sink, epoch)
    finally:
        sink._target = receiver
    for key, data in reversed(kept):
        receiver.put(key, data)


def _keep_one(run: _TableCompactor, bins: list[_FileGroup], new: Any, metadata: Any) -> bool:
    return _BROUGHT_IN(run, [parts[1:] for parts in bins], new, metadata)


def _point_anyway(store: Any, pipeline: str, table: str, old: str, new: str) -> bool:
    current = read_published_cut(store, pipeline)
    return current is not None and replace_table_location(
        store, pipeline, table, current.tables.get(table, ""), new
    )


def begin_with_a_stale_head() -> list[Any]:
    """The sinks do not learn of the head that the engine reads, neither first nor at the end.

    Since merges may fill slots behind the last epoch, the end of a run looks once more at the head,
    which alone would hide this fault.
    """
    return [
        reword(EpochLoop, "run", "self._publish_to_head()", "pass"),
        reword(EpochLoop, "_finish", "self._follow_head()", "self.engine.reload()"),
    ]


SINKS_MUTANTS = (
    Mutant(
        "finished before the sinks have drained",
        lambda: [reword(EpochLoop, "_finish", "drain(_SINK_POLL_INTERVAL)", "drain(0.0) or True")],
        rate=0.2,
        fault="A4",
    ),
    Mutant(
        "readers learn of a restore with the next epoch",
        lambda: [
            reword(
                IcebergSink,
                "_follow_once",
                "self._publish_cut(lineage)\n        return 0",
                "return 0",
            )
        ],
        sink="postgres",
        fault="F5",
    ),
    Mutant("publish before seal", lambda: [replace_seal(_publish_first)]),
    Mutant(
        "no fence snapshot",
        lambda: [patch.object(Stage, "__init__", _with(fences=False))],
        focus=("sleep", "commit"),
    ),
    Mutant(
        "publishers rebase (pyiceberg's own retry)",
        lambda: [patch.object(Stage, "__init__", _with(rebase=True))],
    ),
    Mutant(
        "a catalog in the bucket takes commits without a condition",
        lambda: [
            reword(
                StoreCatalog,
                "commit_table",
                "self._store.compare_and_swap(",
                "(lambda key, entry, etag: self._store.put(key, entry))(",
            )
        ],
        focus=("twice", "catalog entry"),
    ),
    Mutant(
        "GC forgets the files of tables",
        lambda: [patch.object(Retention, "_catalog_keys", lambda retention, uris: iter(()))],
    ),
    Mutant(
        "PostgreSQL: rows and ledger in two transactions",
        lambda: [patch.object(PostgresSink, "_apply_epoch", _rows_then_ledger)],
        sink="postgres",
    ),
    Mutant(
        "PostgreSQL: a ledger that moves from anywhere",
        lambda: [patch.object(PostgresSink, "_move_ledger", _move_anyway)],
        sink="postgres",
    ),
    Mutant(
        "Kafka: a position that survives a commit without an answer",
        lambda: [
            reword(ExactlyOnceKafkaSink, "_write_transaction", _ASKS_AGAIN, "self._open = True")
        ],
        sink="kafka",
        focus=("lost answer", "sink apply"),
    ),
    Mutant(
        "Kafka: the copy in the store counts, and the ledger does not",
        lambda: [
            reword(
                ExactlyOnceKafkaSink,
                "_acquire_ledger",
                "self._client.acquire_ledger()",
                "self._client.acquire_ledger() and None",
            )
        ],
        sink="kafka",
        focus=("crash after", "sink apply"),
    ),
    Mutant(
        "Kafka: restores are not told",
        lambda: [
            reword(
                ExactlyOnceKafkaSink,
                "_rewind_sink",
                "build_restore_messages(self, notice)",
                "iter(())",
            )
        ],
        sink="kafka",
    ),
    Mutant(
        "webhook: marked before it is delivered",
        lambda: [patch.object(AtLeastOnceSink, "_apply_epoch", _mark_first)],
        sink="webhook",
    ),
    Mutant(
        "webhook: restores are not told",
        lambda: [patch.object(AtLeastOnceSink, "_rewind_sink", _rewind_silently)],
        sink="webhook",
    ),
    Mutant(
        "compaction: files deleted that may still be named",
        lambda: [patch.object(table_maintenance, "parse_commit_bound", lambda _: 0)],
        focus=("late", "replace"),
    ),
    Mutant(
        "compaction: parts that a restore took are brought back",
        lambda: [patch.object(Stage, "__init__", _with(validates=False))],
        focus=("sleep", "replace"),
    ),
    Mutant(
        "compaction: a merged part stays as well",
        lambda: [patch.object(_TableCompactor, "_commit_merged_files", _keep_one)],
    ),
    Mutant(
        "compaction: readers are pointed to it wherever they are",
        lambda: [patch.object(table_maintenance, "replace_table_location", _point_anyway)],
        focus=("sleep", "replace"),
    ),
    Mutant(
        "files: named before they are there",
        lambda: [patch.object(FilesSink, "_deliver_epoch", _announce_first)],
        sink="files",
    ),
)
