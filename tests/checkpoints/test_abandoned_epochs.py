"""Abandoned epochs: all that lead to one that stays, stay too; where one is gone, no restore."""

from __future__ import annotations

import pytest
from tests.checkpoints.conftest import Author
from tests.checkpoints.hourly_history import HourlyHistory

from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.errors import ConfigurationError

POLICY = RetentionPolicy(keep_last=1, keep_for=0, grace=0)


@pytest.fixture
def history(log: SlotLog, author: Author) -> HourlyHistory:
    return HourlyHistory(log, author)


def test_a_mistaken_restore_can_be_undone_while_a_checkpoint_of_then_would_stay(
    history: HourlyHistory,
) -> None:
    """Retention spares all epochs that a young restore has left, however old they are."""
    epochs = history.seal(60)
    history.restore(epochs[9].id)
    history.seal(2)
    assert history.retire(24) == 10
    assert history.kinds(0) == "s" * 10 + "e" * 50 + "f"
    assert history.restore(epochs[-1].id) == 50


def test_an_abandoned_timeline_goes_as_a_whole(history: HourlyHistory) -> None:
    """Once neither a young restore nor a young epoch keeps its end, all of it is retired."""
    epochs = history.seal(6)
    history.restore(epochs[2].id)
    history.seal(30)
    history.retire(24)
    assert history.kinds(0) == "s" * 6 + "f"


def test_a_pin_keeps_what_leads_to_it(history: HourlyHistory) -> None:
    """Retention keeps an abandoned pin and every epoch between the parting and the pin."""
    epochs = history.seal(6)
    pin_checkpoint(history.log, "gold", epochs[4].id, who="ann")
    history.restore(epochs[1].id)
    history.seal(40)
    history.retire(1)
    assert history.kinds(0) == "sseeesf"
    assert history.restore(epochs[4].id) == 3


def test_a_checkpoint_behind_a_retired_epoch_is_refused(history: HourlyHistory) -> None:
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


def test_a_gap_that_opens_after_the_plan_is_refused(history: HourlyHistory) -> None:
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
    Retention(history.log, POLICY, external=tuple, clock=history.clock)._retire_slot(epochs[4].id)
    history.catalog.index.note_retired([epochs[4].id])
    with pytest.raises(ConfigurationError, match="slot 5"):
        commit_restore(history.log, lease, plan, request_id="late", who="ann", why="")
    assert history.log.head().timeline == 1


def test_a_gap_that_is_condemned_but_not_retired_yet_is_refused(history: HourlyHistory) -> None:
    """Retention sleeps between its decision and its stub, while the beginning is restored."""
    epochs = history.seal(4)
    roots = RootsFile(history.log.store, "p", history.clock)
    roots.condemn_retired(lambda _: ({str(epochs[1].id)}, set()))
    history.log.fork(history.log.head(), None, request_id="beginning", who="ann", why="")
    history.seal(1)
    with pytest.raises(ConfigurationError, match="slot 2, which lies between"):
        history.restore(epochs[2].id)
    assert history.log.head().timeline == 1


def test_nothing_is_offered_across_a_gap_whose_note_is_missing(history: HourlyHistory) -> None:
    """A retention run broke off between a stub and its note in the index (simulation, seed 350)."""
    epochs = history.seal(4)
    history.catalog.list_checkpoints()
    roots = RootsFile(history.log.store, "p", history.clock)
    roots.condemn_retired(lambda _: ({str(epochs[1].id)}, set()))
    Retention(history.log, POLICY, external=tuple, clock=history.clock)._retire_slot(epochs[1].id)
    history.log.fork(history.log.head(), None, request_id="beginning", who="ann", why="")
    history.seal(1)
    listed = {row.id: row for row in history.catalog.list_checkpoints(all_timelines=True)}
    offered = {row.slot for row in listed.values() if row.is_restorable and row.timeline == 0}
    assert offered == {1}
    assert listed[str(epochs[3].id)].gap == 2
    with pytest.raises(ConfigurationError, match="slot 2, which lies between"):
        plan_restore(history.log, epochs[2].id)
