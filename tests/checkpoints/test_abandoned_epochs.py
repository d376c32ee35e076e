"""Abandoned epochs: all that lead to one that stays, stay too; where one is gone, no restore."""

from __future__ import annotations

import pytest
from tests.checkpoints.conftest import Author

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.host_clock import ManualClock
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pins import pin_checkpoint
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.errors import ConfigurationError

HOUR = 3_600_000_000  # microseconds


class History:
    """A log with a clock: epochs an hour apart, restores, and retention that keeps a day."""

    def __init__(self, log: SlotLog, author: Author) -> None:
        self.clock = ManualClock(wall_ticks=1_750_000_000_000_000)
        self.log = SlotLog(log.store, "p", clock=self.clock)
        self.catalog = CheckpointCatalog(self.log, workers=1)
        self._author, self._restores = author, 0

    def seal(self, count: int) -> list[Manifest]:
        """Seal epochs, one an hour."""
        made = []
        for _ in range(count):
            self.clock.advance(3600)
            made.append(self._author.seal(self.log, created_at=self.clock.wall_ticks()))
        return made

    def restore(self, target: CheckpointId) -> int:
        """Restore; return how many epochs come back."""
        self._restores += 1
        holder = ProcessIdentity.this_process("restore")
        lease = Lease.acquire(self.log.store, "p", holder, clock=self.clock)
        plan = plan_restore(self.log, target)
        commit_restore(self.log, lease, plan, request_id=f"r{self._restores}", who="ann", why="")
        lease.release()
        return plan.epochs_regained

    def retire(self, hours: float) -> int:
        """Keep the newest epoch and those of so many hours; return how many were retired."""
        policy = RetentionPolicy(keep_last=1, keep_for=hours * 3600, grace=0)
        return len(Retention(self.log, policy, external=tuple, clock=self.clock).run().retired)

    def kinds(self, timeline: int) -> str:
        """A letter per slot of a timeline."""
        return "".join(row.kind[0] for row in self.catalog.index.iterate_summaries(timeline))


@pytest.fixture
def history(log: SlotLog, author: Author) -> History:
    return History(log, author)


def test_a_mistaken_restore_can_be_undone_while_a_checkpoint_of_then_would_stay(
    history: History,
) -> None:
    """Retention spares all epochs that a young restore has left, however old they are."""
    epochs = history.seal(60)
    history.restore(epochs[9].id)
    history.seal(2)
    assert history.retire(24) == 10
    assert history.kinds(0) == "s" * 10 + "e" * 50 + "f"
    assert history.restore(epochs[-1].id) == 50


def test_an_abandoned_timeline_goes_as_a_whole(history: History) -> None:
    """Once neither a young restore nor a young epoch keeps its end, all of it is retired."""
    epochs = history.seal(6)
    history.restore(epochs[2].id)
    history.seal(30)
    history.retire(24)
    assert history.kinds(0) == "s" * 6 + "f"


def test_a_pin_keeps_what_leads_to_it(history: History) -> None:
    """Retention keeps an abandoned pin and every epoch between the parting and the pin."""
    epochs = history.seal(6)
    pin_checkpoint(history.log, "gold", epochs[4].id, who="ann")
    history.restore(epochs[1].id)
    history.seal(40)
    history.retire(1)
    assert history.kinds(0) == "sseeesf"
    assert history.restore(epochs[4].id) == 3


def test_a_checkpoint_behind_a_retired_epoch_is_refused(history: History) -> None:
    """Epochs retired while they were current leave a gap when their timeline is abandoned.

    The plan of a restore across it is refused, and the listing calls it not restorable.
    """
    first = history.seal(6)
    history.restore(first[2].id)
    second = history.seal(30)
    history.retire(24)
    assert "s" in history.kinds(1)
    pinned = history.seal(1)[0]
    old = history.log.fork(
        history.log.head(), None, request_id="beginning", who="ann", why="start again"
    )
    assert isinstance(old, Sealed)
    history.seal(1)
    with pytest.raises(ConfigurationError, match="slot 1, which lies between") as refused:
        plan_restore(history.log, pinned.id)
    assert refused.value.code == "restore.gap"
    listed = {row.id: row for row in history.catalog.list_checkpoints(all_timelines=True)}
    assert (listed[str(second[-1].id)].gap, listed[str(second[-1].id)].is_restorable) == (1, False)
    assert listed[str(history.log.head().checkpoint)].is_restorable


def test_a_gap_that_opens_after_the_plan_is_refused(history: History) -> None:
    """The restore looks again once its claim protects the way to the checkpoint."""
    epochs = history.seal(6)
    history.restore(epochs[2].id)
    history.seal(1)
    holder = ProcessIdentity.this_process("restore")
    lease = Lease.acquire(history.log.store, "p", holder, clock=history.clock)
    plan = plan_restore(history.log, epochs[5].id)
    pin_checkpoint(history.log, "end", epochs[5].id, who="ann")
    stub = history.log.read_slot(0, 5)
    assert stub is not None
    Retention(history.log, external=tuple, clock=history.clock)._retire_slot(epochs[4].id)
    history.catalog.index.note_retired([epochs[4].id])
    with pytest.raises(ConfigurationError, match="slot 5"):
        commit_restore(history.log, lease, plan, request_id="late", who="ann", why="")
    assert history.log.head().timeline == 1
