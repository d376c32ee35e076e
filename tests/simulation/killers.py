"""Schedules known to kill protocols like this one, each with the mend that makes it harmless here.

A killer is a script: who acts, who falls asleep at which request until what has happened. It ends
like every schedule, with a fresh recovery and the judgement. Without its mend the same script ends
in a violation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from tests.simulation import actors, driver_mutants, log_mutants, sinks_mutants
from tests.simulation.actors import Stage
from tests.simulation.basics import Violation
from tests.simulation.killer_scripts import (
    abandoned_publish_and_gc,
    bad_newest,
    begun_by_another,
    claim_and_gc,
    crash_after_fork,
    follower_file_and_gc,
    head_moves_behind_sinks,
    hole_on_the_way,
    late_delivery,
    late_merge,
    late_put,
    lost_last_slot,
    lost_pin,
    lost_renewal,
    pin_and_gc,
    retried_put,
    sleeper_and_gc,
    sleeper_and_restore,
    stale_stop,
    straddling_merge,
    straddling_publish,
    table_only,
    takeover,
    two_database_publishers,
    two_publishers,
    two_restores,
    wedged,
    wiped_bucket,
)
from tests.simulation.planting import replace_seal
from tests.simulation.schedule import finish, recover, simulated
from tests.simulation.world import World

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import (
    DriverRequest,
)
from tidegate.checkpoints.lease import Lease, LeaseRenewer
from tidegate.checkpoints.pins import Roots, RootsFile
from tidegate.checkpoints.retention import Retention
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver import pipeline_run
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.engine.epoch_engine import Engine
from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.files_webhook import AtLeastOnceSink
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.postgres_sink import PostgresSink


@dataclass(frozen=True)
class Killer:
    """A script, and how to take its mend out.

    Attributes:
        fault: the fault of docs/track-record.md that it shows; empty if it was never in the product.
    """

    name: str
    script: Callable[[Stage], None]
    without: Callable[[], list[Any]]
    sink: str = ""
    fault: str = ""


def play(killer: Killer, *, mended: bool = True) -> World:
    """The script, the recovery, the judgement. The finding, if any, is in `violation`."""
    world = World(1, rate=0.0)
    world.focus = ("", "")
    world.trace = []
    with simulated(world), ExitStack() as stack:
        for one in [] if mended else killer.without():
            stack.enter_context(one)
        stage = Stage(world, killer.sink)
        for step in range(4):
            stage.feed(step)
        try:
            killer.script(stage)
            recover(stage)
        except Violation as found:
            world.violation = found
        finally:
            finish(world)
    return world


def _unconditional() -> list[Any]:
    return [patch.object(SlotLog, "_send_record", log_mutants._send_anyway)]


def _forget_applied(inbox: RequestInbox) -> list[DriverRequest]:
    manifest = inbox.newest()
    return [
        r for r in inbox._queue.list_pending() if manifest is None or r.id not in manifest.requests
    ]


def _lost_renewal_is_a_loss(lease: Lease) -> bool:
    lease._lost = "no answer"
    raise lease._lease_lost_error()


def _without_folders(retention: Retention, marked: Any) -> Any:
    return log_mutants._GARBAGE(retention, replace(marked, attempts=frozenset()))


KILLERS = (
    Killer("a sleeper wakes after a takeover", takeover, _unconditional),
    Killer("a sleeper wakes after a restore", sleeper_and_restore, _unconditional),
    Killer(
        "a sleeper wakes after GC",
        sleeper_and_gc,
        lambda: [patch.object(Retention, "_unmarked_entries", log_mutants._garbage_of_all)],
    ),
    Killer(
        "a PUT repeated by the client library",
        retried_put,
        lambda: [replace_seal(log_mutants._believe_412)],
    ),
    Killer("a PUT that lands minutes later", late_put, _unconditional),
    Killer("two restores at once", two_restores, _unconditional),
    Killer(
        "a crash between fork record and tables",
        crash_after_fork,
        lambda: [patch.object(IcebergSink, "_rewind_tables", lambda *_: None)],
    ),
    Killer(
        "two publishers of one epoch",
        two_publishers,
        lambda: [patch.object(Stage, "__init__", sinks_mutants._with(rebase=True))],
    ),
    Killer(
        "a publish that straddles a restore",
        straddling_publish,
        lambda: [patch.object(Stage, "__init__", sinks_mutants._with(fences=False))],
    ),
    Killer(
        "a table made by one publisher and begun by another",
        begun_by_another,
        lambda: [patch.object(IcebergSink, "_refuse_begun_table", lambda *_: None)],
    ),
    Killer(
        "a compaction that straddles a restore",
        straddling_merge,
        lambda: [patch.object(Stage, "__init__", sinks_mutants._with(validates=False))],
    ),
    Killer(
        "a compaction that lands after its files were looked through",
        late_merge,
        lambda: [patch.object(table_maintenance, "parse_commit_bound", lambda _: 0)],
    ),
    Killer(
        "GC against a restore being written",
        claim_and_gc,
        lambda: [patch.object(RootsFile, "claim", log_mutants._no_claim)],
    ),
    Killer(
        "GC against a pin",
        pin_and_gc,
        lambda: [patch.object(Roots, "protected_checkpoints", set())],
    ),
    Killer(
        "GC against an abandoned epoch that leads to a pinned one",
        hole_on_the_way,
        lambda: [
            patch.object(Retention, "_select_needless", log_mutants._select_all),
            patch.object(CheckpointCatalog, "find_gap", lambda catalog, target: None),
        ],
        fault="A1",
    ),
    Killer(
        "GC against a file only a table names",
        table_only,
        lambda: [patch.object(Retention, "_catalog_keys", lambda *_: iter(()))],
    ),
    Killer(
        "GC against a follower's own new file",
        follower_file_and_gc,
        lambda: [patch.object(Retention, "_unmarked_entries", _without_folders)],
        fault="E1",
    ),
    Killer(
        "GC against a publisher that missed a restore",
        abandoned_publish_and_gc,
        lambda: [patch.object(actors, "have_followers_rewound", lambda *_: True)],
        fault="E2",
    ),
    Killer(
        "a lease renewal whose answer was lost",
        lost_renewal,
        lambda: [patch.object(Lease, "_read_back_renewal", _lost_renewal_is_a_loss)],
    ),
    Killer(
        "a newest checkpoint found bad",
        bad_newest,
        lambda: [patch.object(pipeline_run, "select_start_checkpoint", lambda *_: None)],
    ),
    Killer(
        "a stale stop request",
        stale_stop,
        lambda: [patch.object(DriverRequest, "refusal_outcome", lambda *_: None)],
    ),
    Killer(
        "a bucket wiped while the catalog survives",
        wiped_bucket,
        lambda: [patch.object(IcebergSink, "_require_same_owner", lambda _, follower: follower)],
    ),
    Killer(
        "two publishers of a database",
        two_database_publishers,
        lambda: [patch.object(PostgresSink, "_move_ledger", sinks_mutants._move_anyway)],
        "postgres",
    ),
    Killer(
        "a delivery of an abandoned epoch after the restore",
        late_delivery,
        lambda: [patch.object(AtLeastOnceSink, "_rewind_sink", sinks_mutants._rewind_silently)],
        "webhook",
    ),
    Killer(
        "a last epoch whose slot a superseded driver wins",
        lost_last_slot,
        lambda: [patch.object(Engine, "_seal_epoch", driver_mutants._keep_ended)],
        fault="A2",
    ),
    Killer(
        "a last epoch behind the head that the sinks began with",
        head_moves_behind_sinks,
        sinks_mutants.begin_with_a_stale_head,
        fault="F27",
    ),
    Killer(
        "a savepoint sealed but not pinned",
        lost_pin,
        lambda: [patch.object(RequestInbox, "_list_unfinished", _forget_applied)],
    ),
    Killer(
        "a wedged driver whose heartbeat lives",
        wedged,
        lambda: [patch.object(LeaseRenewer, "is_overdue", False)],
    ),
)
