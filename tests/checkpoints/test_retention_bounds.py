"""Which checkpoints retention keeps, to the tick and to the epoch, and what a second run leaves."""

from __future__ import annotations

import pytest
from tests.checkpoints.conftest import Author
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.retention import Retention, RetentionPolicy, SweepReport
from tidegate.checkpoints.slot_log import SlotLog

LATER = 1_760_000_000_000_000  # microseconds; after everything the author writes


def retire(log: SlotLog, keep_last: int = 0, keep_for: float = 0, at: int = LATER) -> SweepReport:
    """One run of retention at a time of the wall clock."""
    policy = RetentionPolicy(keep_last=keep_last, keep_for=keep_for, grace=0)
    clock = ManualClock(wall_ticks=at)
    return Retention(log, policy, external=lambda: (), clock=clock, workers=1).run()


@pytest.mark.parametrize(("late", "retired"), [(0, False), (1, True)])
def test_an_epoch_stays_for_exactly_keep_for(
    log: SlotLog, author: Author, late: int, retired: bool
) -> None:
    """A checkpoint is kept until its age in microseconds is above `keep_for` seconds."""
    first, _ = author.extend(log, 2)
    report = retire(log, keep_for=10, at=first.created_at + 10_000_000 + late)
    assert report.retired == (str(first.id),) * retired


def test_only_epochs_of_the_current_lineage_count_as_the_newest(
    log: SlotLog, author: Author
) -> None:
    """`keep_last` counts the checkpoints that lead to the head, not those that a restore left."""
    old = author.extend(log, 5)
    log.fork(log.head(), old[1].id, request_id="r", who="ann", why="")
    author.seal(log)
    assert retire(log, keep_last=2).retired == tuple(str(old[n].id) for n in (0, 2, 3, 4))


def test_a_stub_is_written_once(log: SlotLog, author: Author) -> None:
    """A run that goes on where another one died keeps the stubs, and when they were written."""
    first, _ = author.extend(log, 2)
    retire(log)
    stub = log.store.get(log.layout.slot_key(0, 1)).data
    RootsFile(log.store, "p").condemn_retired(lambda seen: ({str(first.id)}, set()))
    assert retire(log, at=LATER + 1).retired == (str(first.id),)
    assert log.store.get(log.layout.slot_key(0, 1)).data == stub


def test_a_pipeline_without_epochs_has_nothing_to_retire(log: SlotLog) -> None:
    """Retention ends at once on a log without records."""
    assert (retire(log).retired, retire(log).deleted) == ((), ())


def test_a_driver_that_goes_on_sealing_does_not_hold_up_the_sweep(
    log: SlotLog, author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs that are sealed during a run need no files that the run has not seen."""
    author.extend(log, 3)
    read_head, sealed = log.head, list[Manifest]()

    def seal_and_read() -> object:
        if len(sealed) < 50:
            sealed.append(author.seal(SlotLog(log.store, "p")))
        return read_head()

    monkeypatch.setattr(log, "head", seal_and_read)
    retire(log)
    assert len(sealed) < 50


def test_only_timelines_that_a_restore_has_opened_are_looked_at(author: Author) -> None:
    """Without a restore, retention sends no request about timeline 1."""
    asked = list[str]()
    store = MemoryStore(hook=lambda request: asked.append(request.key))
    log = SlotLog(store, "p")
    author.extend(log, 3)
    retire(log)
    assert "p/timelines/0/" in "".join(asked)
    assert "p/timelines/1/" not in "".join(asked)
