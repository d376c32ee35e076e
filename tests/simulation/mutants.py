"""``python -m tests.simulation.mutants``.

Bugs put in on purpose; the simulation must find each of them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pyiceberg.exceptions import CommitFailedException
from tests.simulation.actors import Stage
from tests.simulation.cheap import cheap
from tests.simulation.schedule import run_seed

from tidegate.checkpoints import errors
from tidegate.checkpoints import store as store_module
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.errors import RECORD_MALFORMED
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.retention import Retention
from tidegate.checkpoints.slot_log import Sealed, SlotLog, SlotTaken
from tidegate.checkpoints.store import (
    OutcomeUnknownError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from tidegate.errors import TidegateError
from tidegate.jobs.driver.epoch_loop import EpochLoop
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.driver.startup import LeaderElection
from tidegate.jobs.driver.status_reporter import StatusReporter
from tidegate.jobs.engine.epoch_engine import Engine
from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.files_webhook import AtLeastOnceSink, FilesSink
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.kafka_sink import ExactlyOnceKafkaSink
from tidegate.jobs.sinks.lineage_position import (
    FollowerPosition,
    read_published_cut,
    replace_table_location,
)
from tidegate.jobs.sinks.postgres_sink import PostgresSink
from tidegate.jobs.sinks.table_maintenance import _FileGroup, _TableCompactor
from tidegate.jobs.sources.arrival_log import ArrivalLog
from tidegate.jobs.streams.stream_state import ReducerStateStore
from tidegate.operators import liveness

Patches = list[Any]
_ASKS_AGAIN = "self._open = False"
_DRAINS = "while not self._publisher.drain(_SINK_POLL_INTERVAL):"
_SLOT_BEFORE = '"slot": max(1, manifest.slot - 1),'


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        make: the patches that put it in.
        rate: fault rate at which to look for it; None: as the seed says.
        focus: the kind of fault and the step that it is about; None: as the seed says.
        sink: the kind of sink beside the tables; None: as the seed says.
        fault: the fault of docs/track-record.md that the bug brings back; empty if it was never
            in the product.
    """

    name: str
    make: Callable[[], Patches]
    rate: float | None = None
    focus: tuple[str, str] | None = None
    sink: str | None = None
    fault: str = ""


def _send_anyway(log: SlotLog, key: str, data: bytes) -> str | None:
    try:
        return log.store.put(key, data)
    except (OutcomeUnknownError, StoreUnavailableError):
        return None


def _believe_412(log: SlotLog, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
    original = SlotLog._read_back_slot

    def seal(key: str, data: bytes) -> str | None:
        try:
            return log.store.create(key, data)
        except PreconditionFailedError:
            raise _NotMineError from None
        except (OutcomeUnknownError, StoreUnavailableError):
            return None

    try:
        with patch.object(log, "_send_record", seal):
            return _SEAL(log, record)
    except _NotMineError:
        filled = original(log, log.layout.slot_key(record.timeline, record.slot))
        return SlotTaken(filled.record if filled else record, filled.sha256 if filled else "", "")


class _NotMineError(Exception):
    """A 412."""


_SEAL, _NEWEST = SlotLog.seal, SlotLog.newest_record
_BROUGHT_IN = _TableCompactor._commit_merged_files
_GARBAGE = Retention._unmarked_entries
_RECORD = Slice.to_record
_STAGE = Stage.__init__
_MOVE = PostgresSink._move_ledger
_DELIVER = FilesSink._deliver_epoch


def _newest_once(log: SlotLog, timeline: int) -> Any:
    known = log._newest
    return (
        known if known is not None and known.record.timeline == timeline else _NEWEST(log, timeline)
    )


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
    return _SEAL(log, record)


def _with(**attributes: object) -> Callable[..., None]:
    def init(stage: Stage, *given: Any) -> None:
        _STAGE(stage, *given)
        for name, value in attributes.items():
            setattr(stage.catalog, name, value)

    return init


def _garbage_of_all(retention: Retention, marked: Any) -> Iterator[Any]:
    return _GARBAGE(retention, replace(marked, bounds=dict.fromkeys(marked.bounds, 1 << 40)))


def _read_again(part: Any) -> dict[str, Any]:
    record = _RECORD(part)
    if "next" not in record["resume"]:  # of objects
        return record
    following = record["resume"]["next"]
    return record | {
        "resume": {"next": max(0, following - 1)} if part.end > part.start else record["resume"]
    }


def _skip_one(part: Any) -> dict[str, Any]:
    record = _RECORD(part)
    if "next" not in record["resume"]:
        return record
    return record | {
        "resume": {"next": record["resume"]["next"] + (part.end > part.start and part.pending)}
    }


def _trim_late(engine: Engine, cut: Any, survey: Any) -> Any:
    return cut


def _give_up(log: SlotLog, key: str, data: bytes) -> str | None:
    """An answer that did not come is taken for a success."""
    try:
        return log.store.create(key, data)
    except OutcomeUnknownError:
        return "surely"
    except (PreconditionFailedError, StoreUnavailableError):
        return None


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


def _select_all(retention: Retention, abandoned: list[Any], newest_kept: Any) -> set[str]:
    return {row.id for row in abandoned if row.id is not None}


def _no_claim(roots: RootsFile, *_: Any, **__: Any) -> Any:
    return roots.read()


_ONLY_EXPECTED = "except TidegateError as error"


def _call_damaged(where: str, **_: Any) -> Exception:
    return RECORD_MALFORMED(where=where, cause="an unknown version")


def _reword(owner: Any, name: str, text: str, instead: str) -> Any:
    """The function as it is, with a piece of its text replaced: a repair taken out, or a bug put in.

    Raises:
        AssertionError: the text is not there once; then the repair looks different by now.
    """
    there = inspect.getattr_static(owner, name)
    function: Any = there.fget if isinstance(there, property) else there
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, f"{name} does not have {text!r} once"
    scope: dict[str, Any] = {}
    code = compile(
        f"from __future__ import annotations\n{source.replace(text, instead)}", name, "exec"
    )
    exec(code, function.__globals__, scope)
    return patch.object(owner, name, scope[name])


MUTANTS = (
    Mutant(
        "streams: states of an attempt that lost its slot are kept",
        lambda: [
            _reword(
                ReducerStateStore,
                "load",
                "if known is None or known[0] != keys:",
                "if known is None:",
            )
        ],
        focus=("lost request", "splice request"),
    ),
    Mutant(
        "objects: a lost race for the arrival log is taken for a win",
        lambda: [
            _reword(
                ArrivalLog,
                "_append_or_reload",
                "self._read_all_pages()",
                "self._remember_keys(keys)",
            )
        ],
        focus=("slow", "arrival log"),
    ),
    Mutant(
        "one 403 ends a running driver",
        lambda: [
            _reword(
                EpochLoop,
                "_require_passing",
                "if isinstance(error, StoreDeniedError):",
                "if False:",
            )
        ],
        focus=("denied", "plan restore"),
        fault="B7",
    ),
    Mutant(
        "a full disk is not waited for",
        lambda: [
            _reword(
                EpochLoop,
                "_require_passing",
                "full_disk = detect_full_disk(self._spec.name, error)",
                "full_disk = None",
            )
        ],
        focus=("full disk", "move"),
    ),
    Mutant(
        "a defect ends housekeeping",
        lambda: [
            _reword(Housekeeper, "run_round", "except Exception as error", _ONLY_EXPECTED),
            patch.dict(Housekeeper.run_round.__globals__, {"TidegateError": TidegateError}),
        ],
        focus=("defect", "index"),
        fault="B5",
    ),
    Mutant(
        "a record of a newer version counts as damaged",
        lambda: [patch.object(errors, "RECORD_OF_NEWER_FORMAT", _call_damaged)],
    ),
    Mutant(
        "a long step counts as stuck whatever the driver allows",
        lambda: [
            _reword(
                liveness,
                "_judge_holder",
                "limit = max(limits.stall_after, step_limit)",
                "limit = 20.0",
            )
        ],
        focus=("slow disk", "survey"),
        fault="B6",
    ),
    Mutant(
        "finished before the sinks have drained",
        lambda: [_reword(EpochLoop, "_finish", _DRAINS, "while False:")],
        rate=0.2,
        fault="A4",
    ),
    Mutant(
        "readers learn of a restore with the next epoch",
        lambda: [
            _reword(
                IcebergSink,
                "_follow_once",
                "self._publish_cut(lineage)\n        return 0",
                "return 0",
            )
        ],
        sink="postgres",
        fault="F5",
    ),
    Mutant(
        "one probe decides about a store",
        lambda: [patch.object(store_module, "_PROBES", 1)],
        focus=("retried", "probe"),
        fault="F7",
    ),
    Mutant(
        "savepoints are not acknowledged",
        lambda: [patch.object(RequestInbox, "acknowledge_applied", lambda inbox, report: None)],
        focus=("sleep", "ask"),
    ),
    Mutant(
        "the trigger takes a silent lease for a driver",
        lambda: [patch.object(liveness, "_is_lease_held", lambda lease, *_: not lease.is_free)],
        focus=("sleep", "lease"),
    ),
    Mutant(
        "the status counts another epoch",
        lambda: [_reword(StatusReporter, "record_epoch", '"slot": manifest.slot,', _SLOT_BEFORE)],
    ),
    Mutant("seal without condition", lambda: [patch.object(SlotLog, "_send_record", _send_anyway)]),
    Mutant("a 412 taken as a loss without reading back", lambda: [_seal(_believe_412)], 0.1),
    Mutant(
        "an unknown outcome taken as a success",
        lambda: [patch.object(SlotLog, "_send_record", _give_up)],
        0.1,
    ),
    Mutant(
        "the newest slot is the one that was read last",
        lambda: [patch.object(SlotLog, "newest_record", _newest_once)],
    ),
    Mutant("publish before seal", lambda: [_seal(_publish_first)]),
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
        "GC of an undecided attempt",
        lambda: [patch.object(Retention, "_unmarked_entries", _garbage_of_all)],
        focus=("sleep", "seal"),
    ),
    Mutant(
        "GC forgets the files of tables",
        lambda: [patch.object(Retention, "_catalog_keys", lambda retention, uris: iter(()))],
    ),
    Mutant(
        "off by one in the cut: the last row again",
        lambda: [patch.object(Slice, "to_record", _read_again)],
    ),
    Mutant(
        "off by one in the cut: a row skipped",
        lambda: [patch.object(Slice, "to_record", _skip_one)],
    ),
    Mutant(
        "restore without a claim",
        lambda: [patch.object(RootsFile, "claim", _no_claim)],
        focus=("sleep", "fork"),
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
            _reword(ExactlyOnceKafkaSink, "_write_transaction", _ASKS_AGAIN, "self._open = True")
        ],
        sink="kafka",
        focus=("lost answer", "sink apply"),
    ),
    Mutant(
        "Kafka: the copy in the store counts, and the ledger does not",
        lambda: [
            _reword(
                ExactlyOnceKafkaSink,
                "_load_position",
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
            _reword(
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
        "an epoch that lost its slot was the last one",
        lambda: [patch.object(Engine, "_seal_epoch", _keep_ended)],
        focus=("sleep", "seal"),
        fault="A2",
    ),
    Mutant(
        "retention: an abandoned epoch goes whatever it leads to",
        lambda: [
            patch.object(Retention, "_select_needless", _select_all),
            patch.object(CheckpointCatalog, "find_gap", lambda catalog, target: None),
        ],
        focus=("sleep", "stub"),
        fault="A1",
    ),
    Mutant(
        "what is condemned does not count as retired",
        lambda: [
            _reword(
                CheckpointCatalog,
                "mark_gaps",
                "retiring = self._roots.read().retiring_checkpoints",
                "retiring = set()",
            )
        ],
        focus=("sleep", "index"),
        fault="F24",
    ),
    Mutant(
        "a finished run fails with the note that it is over",
        lambda: [
            _reword(
                LeaderElection,
                "note_finished",
                "except (TransientError, FencedError, StoreDeniedError) as error",
                "except AssertionError as error",
            )
        ],
        focus=("denied", "desired"),
        fault="F26",
    ),
    Mutant(
        "sinks begin with a head that has moved on",
        lambda: [_reword(EpochLoop, "run", "self._publish_to_head()", "pass")],
        focus=("sleep", "reload"),
        fault="F27",
    ),
    Mutant(
        "files: named before they are there",
        lambda: [patch.object(FilesSink, "_deliver_epoch", _announce_first)],
        sink="files",
    ),
)


def _keep_ended(engine: Engine, *rest: Any) -> Any:
    report = _SEAL_EPOCH(engine, *rest)
    ended = all(part.done for part in rest[0].order.cut.slices)
    return replace(report, ended=ended, pending=False) if report.lost else report


_SEAL_EPOCH = Engine._seal_epoch


def _seal(replacement: Callable[..., Any]) -> Any:
    return patch.object(SlotLog, "seal", replacement)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is in."""
    patches = mutant.make()
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def hunt(mutant: Mutant, seconds: float, seed: int = 0) -> tuple[int, str]:
    """Schedules until it was found, and what was found; an empty text if it was missed."""
    begun, number = time.monotonic(), 0
    with cheap(), planted(mutant):
        while time.monotonic() - begun < seconds:
            number += 1
            try:
                world = run_seed(
                    seed + number, rate=mutant.rate, focus=mutant.focus, sink=mutant.sink
                )
            except (AttributeError, NameError):  # a defect of the mutant itself
                raise
            except Exception as error:  # a defect that ends a driver is found as well
                return number, f"{type(error).__name__}: {error}"
            if world.violation is not None:
                return number, str(world.violation)
    return number, ""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each bug")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    missed = 0
    for mutant in MUTANTS:
        begun = time.monotonic()
        number, what = hunt(mutant, given.seconds, given.seed)
        missed += not what
        spent = f"{number} schedules, {time.monotonic() - begun:.1f} s"
        told = f"found after {spent}: {what[:200]}" if what else f"MISSED in {spent}"
        print(f"{mutant.name:<48} {told}", flush=True)  # noqa: T201
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
