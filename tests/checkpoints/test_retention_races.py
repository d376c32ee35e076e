"""Retention and garbage collection while others act: whatever the order, nothing needed is deleted."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import pytest
from hypothesis import Phase, given, settings
from tests.checkpoints.conftest import RACE, SCRIPT, Author, Ledger, Stage
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryBucket, MemoryStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import TidegateError, TransientError

LATER = 1_760_000_000_000_000  # microseconds; after everything the author writes


def collector(stage: Stage) -> None:
    """Adds an actor that retires and sweeps twice, as eagerly as it may."""

    def body(store: MemoryStore, clock: Clock) -> None:
        log = SlotLog(store, "p", clock=clock)
        for _ in range(3):
            policy = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
            with suppress(TransientError):  # the next run goes on
                Retention(
                    log, policy, external=list, clock=ManualClock(wall_ticks=LATER), workers=1
                ).run()

    stage.actor("gc", body)


def writer(stage: Stage, name: str) -> None:
    """Adds a driver that writes files first and seals then.

    A segment of the state lives on from epoch to epoch.
    """

    def body(store: MemoryStore, clock: Clock) -> None:
        author, log = (
            Author(),
            SlotLog(store, "p", clock=clock, seal_budget=3.0, jitter=lambda: 0.5),
        )
        for _ in range(4):
            head = log.head()
            manifest = author.manifest(head, driver=name)
            new = author.file(store, manifest.id, str(manifest.id).encode(), table=None)
            carried = head.record.segments[-1:] if head.record else []
            log.seal(manifest.model_copy(update={"segments": [*carried, new]}))

    stage.actor(name, body)


def returner(stage: Stage, name: str, steps_back: int) -> None:
    """Adds a restorer that claims a checkpoint before it forks, as `commit_restore` does."""

    def body(store: MemoryStore, clock: Clock) -> None:
        log = SlotLog(store, "p", clock=clock, seal_budget=3.0, jitter=lambda: 0.5)
        head = log.head()
        epochs = [
            f.record.id
            for f in log.iterate_ancestors(head.checkpoint)
            if isinstance(f.record, Manifest)
        ]
        target = epochs[min(steps_back, len(epochs) - 1)] if epochs else None
        if target is not None:
            RootsFile(store, "p").claim(
                name, target, timeline=head.timeline, slot=head.next_slot, who=name
            )
            log.fork(head, target, request_id=name, who=name, why="", at=0)

    stage.actor(name, body)


def pinner(stage: Stage, pinned: list[CheckpointId]) -> None:
    """Adds an actor that pins the oldest checkpoint it finds."""

    def body(store: MemoryStore, clock: Clock) -> None:
        log = SlotLog(store, "p", clock=clock)
        epochs = [
            f.record.id
            for f in log.iterate_ancestors(log.head().checkpoint)
            if isinstance(f.record, Manifest)
        ]
        if epochs:
            pin_checkpoint(log, "golden", epochs[-1], who="pin")
            pinned.append(epochs[-1])

    stage.actor("pin", body)


def everything_left_is_whole(bucket: MemoryBucket, pinned: list[CheckpointId]) -> None:
    """Every checkpoint that is not a stub has all its files.

    The head and what was pinned are among them.
    """
    log = SlotLog(MemoryStore(bucket), "p")
    head = log.head()
    for timeline in range(head.timeline + 1):
        for row in CheckpointCatalog(log, workers=1).index.iterate_summaries(timeline):
            filled = log.read_slot(timeline, row.slot)
            assert filled is not None
            if (
                isinstance(filled.record, Manifest)
                and str(filled.record.id)
                not in RootsFile(log.store, "p").read().retiring_checkpoints
            ):
                assert (
                    verify_checkpoint(log, filled.record.id, workers=1).verdict
                    is CheckpointVerdict.HEALTHY
                )
    for checkpoint in pinned:
        assert isinstance(log.open_checkpoint(checkpoint).record, Manifest), (
            "a pinned checkpoint was retired"
        )


def race_with_gc(script: bytes) -> None:
    """Two drivers, a restorer, someone who pins, and two collectors at once."""
    bucket = Ledger(stubs=True)
    author = Author()
    author.extend(SlotLog(MemoryStore(bucket), "p"), 4, with_files=True)
    stage = Stage(script, bucket=bucket)
    pinned: list[CheckpointId] = []
    writer(stage, "one")
    collector(stage)
    returner(stage, "ann", 2)
    pinner(stage, pinned)
    writer(stage, "two")
    stage.play()
    everything_left_is_whole(bucket, pinned)


@RACE
@given(SCRIPT)
def test_gc_during_drivers_restores_and_pins_deletes_nothing_needed(script: bytes) -> None:
    """Whatever the interleaving, faults and crashes.

    Every checkpoint that is left can be restored.
    """
    race_with_gc(script)


def test_gc_of_undecided_attempts_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a sweep one slot too far takes files from under a driver that is about to seal."""
    original = Retention._mark_needed_files

    def one_too_far(self: Retention, leaving: Iterable[str]) -> object:
        marked = original(self, leaving)
        return type(marked)({t: bound + 1 for t, bound in marked.bounds.items()}, marked.keys)

    monkeypatch.setattr(Retention, "_mark_needed_files", one_too_far)
    with pytest.raises((AssertionError, TidegateError, BaseExceptionGroup)):
        settings(RACE, max_examples=500, database=None, phases=[Phase.generate])(
            given(SCRIPT)(race_with_gc)
        )()
