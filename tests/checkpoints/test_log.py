"""The redo log: one record per slot, fate decided by content, restores as forks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Counters, ForkRecord, Manifest, RetiredEpoch
from tidegate.checkpoints.slot_log import (
    LineageSegment,
    Sealed,
    SealUndecidedError,
    SlotLog,
    SlotTaken,
    _build_lineage,
)
from tidegate.checkpoints.store import ObjectInfo, Store
from tidegate.errors import ConfigurationError, PoisonError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.checkpoints.conftest import Author


class Folder(LocalStore):
    """A local store that counts its listings."""

    listings = 0

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Count it."""
        self.listings += 1
        return super().list_objects(prefix, start_after=start_after, limit=limit)


def script(*faults: Fault | None) -> MemoryStore:
    """A store whose first creates meet these faults, one each."""
    left = list(faults)
    return MemoryStore(
        hook=lambda request: left.pop(0) if left and request.verb == "create" else None
    )


def test_an_empty_log_is_before_the_first_slot(log: SlotLog) -> None:
    """The head of nothing is slot 0 of timeline 0, without a parent and without state."""
    head = log.head()
    assert (head.timeline, head.slot, head.checkpoint, head.sha256) == (0, 0, None, None)
    assert (head.segments, head.next_slot) == ([], 1)


def test_a_look_at_a_known_head_of_a_folder_lists_no_slots(tmp_path: Path, author: Author) -> None:
    """Slots are never deleted, and a folder would sort the names of all of them each time."""
    store = Folder(tmp_path / "store")
    log, writer = SlotLog(store, "p"), SlotLog(LocalStore(store.root), "p")
    author.extend(writer, 1)
    assert log.head().slot == 1
    store.listings = 0
    for slot in (2, 3):
        author.extend(writer, 1)
        assert (log.head().slot, log.head().slot) == (slot, slot)
    assert store.listings == 0
    author.extend(writer, 40)
    assert log.head().slot == 43  # far away: listed once more
    assert store.listings == 1


def test_sealed_epochs_chain_on_every_store(store: Store, author: Author) -> None:
    """On each kind of store, epochs follow each other and name their parent and its hash."""
    log = SlotLog(store, "p")
    first, second = author.extend(log, 2)
    filled = log.read_slot(0, 1)
    assert filled is not None
    assert (second.parent, second.parent_sha256) == (str(first.id), filled.sha256)
    head = log.head()
    assert (head.slot, head.record) == (2, second)
    assert [str(f.epoch.id) for f in log.iterate_ancestors(head.checkpoint)] == [
        str(second.id),
        str(first.id),
    ]


def test_the_head_costs_one_list_and_one_get(author: Author) -> None:
    """Finding the newest of many epochs takes two requests, and the listing names one of them."""
    asked: list[str] = []
    limits = set[int | None]()

    class WatchedStore(MemoryStore):
        def list_objects(
            self, prefix: str, *, start_after: str | None = None, limit: int | None = None
        ) -> Iterator[ObjectInfo]:
            limits.add(limit)
            return super().list_objects(prefix, start_after=start_after, limit=limit)

    bucket = MemoryBucket()
    author.extend(SlotLog(MemoryStore(bucket), "p"), 30)
    watched = SlotLog(WatchedStore(bucket, hook=lambda request: asked.append(request.verb)), "p")
    assert watched.head().slot == 30
    assert asked == ["list", "get"]
    assert watched.head().slot == 30
    assert asked == ["list", "get", "list"], "what the listing still names was read"
    assert limits == {1}
    author.extend(SlotLog(MemoryStore(bucket), "p"), 1)
    assert watched.head().slot == 31


def test_the_second_attempt_of_a_slot_is_lost(log: SlotLog, author: Author) -> None:
    """Whoever comes second learns who was first, and may go on after it."""
    head = log.head()
    mine, theirs = author.manifest(head), author.manifest(head)
    assert isinstance(log.seal(theirs), Sealed)
    outcome = log.seal(mine)
    assert isinstance(outcome, SlotTaken)
    assert outcome.other == theirs


@pytest.mark.parametrize(
    "fault", [Fault.NO_EFFECT, Fault.LOST_ANSWER, Fault.LATE, Fault.TWICE, Fault.REFUSED]
)
def test_a_faulty_answer_never_decides(fault: Fault, author: Author, clock: ManualClock) -> None:
    """Whatever happened to the answer, the attempt is sealed exactly once and known to be."""
    store = script(fault, fault, None)
    log = SlotLog(store, "p", clock=clock)
    manifest = author.manifest(log.head())
    assert isinstance(log.seal(manifest), Sealed)
    while store.bucket.held:
        assert store.bucket.deliver_held() is False
    assert log.head().record == manifest


def test_a_412_on_ones_own_object_is_a_success(author: Author, clock: ManualClock) -> None:
    """A create that meets the object of its own lost answer is sealed: content decides."""
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p", clock=clock)
    manifest = author.manifest(log.head())
    bucket.objects[log.layout.slot_key(0, 1)] = manifest.to_bytes()
    assert isinstance(log.seal(manifest), Sealed)


def test_the_same_attempt_id_with_other_bytes_is_another_attempt(
    log: SlotLog, author: Author
) -> None:
    """Equal attempt ids prove nothing; the bytes do."""
    manifest = author.manifest(log.head())
    log.seal(manifest)
    assert isinstance(log.seal(manifest.model_copy(update={"driver": "twin"})), SlotTaken)


def test_a_late_put_is_a_correct_epoch_and_the_next_driver_goes_on_after_it(
    author: Author, clock: ManualClock
) -> None:
    """A PUT that lands after its driver gave up fills the slot.

    A rival of that slot loses to it.
    """
    bucket = MemoryBucket()
    hook = lambda request: Fault.LATE if request.verb == "create" else None  # noqa: E731
    sleeper = SlotLog(MemoryStore(bucket, hook=hook), "p", clock=clock, seal_budget=1.0)
    manifest = author.manifest(sleeper.head())
    with pytest.raises(SealUndecidedError) as caught:
        sleeper.seal(manifest)
    assert "kept" in caught.value.as_dict()
    assert bucket.deliver_held() is True
    rival = SlotLog(MemoryStore(bucket), "p", clock=clock)
    assert isinstance(rival.seal(author.manifest(SlotLog(MemoryStore(), "p").head())), SlotTaken)
    assert author.seal(rival).parent == str(manifest.id)


def test_an_undecided_seal_can_be_asked_again(author: Author, clock: ManualClock) -> None:
    """Sealing the same record later finds it in its slot.

    While the store is away, it is asked more and more seldom, until the budget is used up.
    """
    down, tries = [True], list[float]()

    def refuse(request: StoreRequest) -> Fault | None:
        if not down[0] or request.verb not in {"create", "get"}:
            return None
        if request.verb == "create":
            tries.append(clock.monotonic())
        assert len(tries) < 30, "it is asked without a pause"
        return Fault.REFUSED

    store = MemoryStore(hook=refuse)
    log = SlotLog(store, "p", clock=clock, seal_budget=5.0)
    manifest = author.manifest(log.head())
    before = clock.monotonic()
    with pytest.raises(SealUndecidedError):
        log.seal(manifest)
    assert 2.5 < tries[-1] - before <= clock.monotonic() - before <= 5.0
    assert tries[1] - tries[0] < 0.1 < tries[-1] - tries[-2]
    down[0] = False
    assert isinstance(log.seal(manifest), Sealed)


@pytest.mark.parametrize("chance", [0.0, 1.0])
@pytest.mark.parametrize("budget", [0.0, 1.0, 3.0, 30.0])
def test_a_seal_never_waits_beyond_its_budget(
    author: Author, clock: ManualClock, budget: float, chance: float
) -> None:
    """However chance varies the pauses: none is longer than two seconds, and none crosses the end."""
    tries: list[float] = []

    def refuse(request: StoreRequest) -> Fault | None:
        tries.extend([clock.monotonic()] if request.verb == "create" else [])
        return Fault.REFUSED if request.verb in {"create", "get"} else None

    store, began = MemoryStore(hook=refuse), clock.monotonic()
    log = SlotLog(store, "p", clock=clock, seal_budget=budget, jitter=lambda: chance)
    with pytest.raises(SealUndecidedError):
        log.seal(author.manifest(log.head()))
    assert budget - 2.0 < clock.monotonic() - began <= budget
    assert all(later - earlier < 2.001 for earlier, later in pairwise(tries))


def test_counters_that_do_not_add_up_are_never_sealed(log: SlotLog, author: Author) -> None:
    """The row equation is checked before anything is sent."""
    with pytest.raises(PoisonError, match="accounts for 9"):
        log.seal(author.manifest(log.head(), counters=Counters(read=10, released=9)))
    assert log.head().slot == 0


def restore(log: SlotLog, target: CheckpointId | None) -> Sealed | SlotTaken:
    """Fork at the head."""
    return log.fork(log.head(), target, request_id="r", who="ann", why="test")


def test_a_restore_opens_the_next_timeline_after_its_target(log: SlotLog, author: Author) -> None:
    """After a fork the head is at the target, and the next epoch goes on from it in the new
    timeline.
    """
    one, two, _ = author.extend(log, 3, with_files=True)
    restore(log, two.id)
    head = log.head()
    assert (head.timeline, head.slot, head.record) == (1, 2, two)
    assert (len(head.segments), head.segments) == (1, two.segments)
    assert head.fork is not None
    after = author.seal(log)
    assert str(after.id).startswith("t1-000003-")
    fork = log.read_slot(0, 4)
    assert fork is not None
    assert (after.parent, after.parent_sha256) == (str(two.id), fork.sha256)
    assert log.head().fork is None
    assert [f.epoch.id for f in log.iterate_ancestors(after.id)] == [after.id, two.id, one.id]


def test_a_restore_may_return_to_the_beginning(log: SlotLog, author: Author) -> None:
    """Without a target the new timeline starts at slot 1."""
    author.extend(log, 2)
    restore(log, None)
    assert author.seal(log).id.slot == 1
    assert log.lineage(1) == [LineageSegment(1, 1, None)]


def test_a_lineage_of_two_thousand_restores_is_read() -> None:
    """Each restore adds one timeline; their number is not bounded by the interpreter's stack."""
    restores = 2000
    forks = [
        ForkRecord(
            timeline=number,
            slot=number + 2,
            new_timeline=number + 1,
            fork_slot=number + 1,
            parent_sha256=None,
            request_id="r",
            who="ann",
            why="",
            at=0,
            recover_to=f"t{number}-{number + 1:06d}-aaaaaaaaaaaa",
            recover_to_sha256=None,
        )
        for number in range(restores)
    ]
    assert _build_lineage(restores, forks) == [
        *(LineageSegment(number, number + 1, number + 1) for number in range(restores)),
        LineageSegment(restores, restores + 1, None),
    ]


def test_a_restore_may_return_to_an_abandoned_timeline(log: SlotLog, author: Author) -> None:
    """What one restore left behind, another can bring back; lineages follow."""
    old = author.extend(log, 5)
    restore(log, old[1].id)
    author.extend(log, 2)
    restore(log, old[3].id)
    last = author.seal(log)
    assert log.lineage(2) == [LineageSegment(0, 1, 4), LineageSegment(2, 5, None)]
    assert log.lineage(1) == [LineageSegment(0, 1, 2), LineageSegment(1, 3, 4)]
    assert log.lineage(0) == [LineageSegment(0, 1, 5)]
    assert [f.epoch.id for f in log.epochs_between(2, 1, 9)] == [*[m.id for m in old[:4]], last.id]


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 2), (2, 3), (3, 2)])
def test_both_ends_of_a_stretch_of_epochs_belong_to_it(
    log: SlotLog, author: Author, first: int, last: int
) -> None:
    """A follower that asks for the slots up to one of them gets no later one."""
    author.extend(log, 4)
    found = [filled.record.slot for filled in log.epochs_between(0, first, last)]
    assert found == list(range(first, last + 1))


def test_two_restores_cannot_both_win(log: SlotLog, author: Author) -> None:
    """Two forks from one head need the same slot; the loser sees the winner."""
    one, two = author.extend(log, 2)
    head = log.head()
    assert isinstance(log.fork(head, one.id, request_id="a", who="ann", why=""), Sealed)
    outcome = log.fork(head, two.id, request_id="b", who="bob", why="")
    assert isinstance(outcome, SlotTaken)
    assert isinstance(outcome.other, ForkRecord)
    assert outcome.other.request_id == "a"
    assert log.head().record == one


def test_a_sleeper_of_the_old_timeline_meets_the_fork(log: SlotLog, author: Author) -> None:
    """A driver that slept through a restore loses its slot to the fork record."""
    one, _ = author.extend(log, 2)
    sleeper = author.manifest(log.head())
    restore(log, one.id)
    outcome = log.seal(sleeper)
    assert isinstance(outcome, SlotTaken)
    assert isinstance(outcome.other, ForkRecord)


def test_only_completed_checkpoints_can_be_restored(log: SlotLog, author: Author) -> None:
    """An attempt that did not fill its slot, or an empty slot, is refused by name."""
    one = author.seal(log)
    for wrong in (
        CheckpointId(0, 1, "ffffffffffff"),
        CheckpointId(0, 7, one.attempt),
        CheckpointId(3, 1, one.attempt),
    ):
        with pytest.raises(ConfigurationError, match="not a completed checkpoint"):
            restore(log, wrong)


def test_a_retired_attempt_still_knows_its_fate(log: SlotLog, author: Author) -> None:
    """When a stub replaced the manifest, its sleeper still gets the answer 'sealed', and the chain still
    holds.
    """
    one, two = author.extend(log, 2)
    filled = log.read_slot(0, 1)
    assert filled is not None
    stub = RetiredEpoch(
        timeline=0,
        slot=1,
        attempt=one.attempt,
        parent=None,
        parent_sha256=None,
        original_sha256=filled.sha256,
        created_at=one.created_at,
        retired_at=0,
    )
    log.store.compare_and_swap(filled.key, stub.to_bytes(), filled.etag)
    assert isinstance(log.seal(one), Sealed)
    replaced = log.read_slot(0, 1)
    assert replaced is not None
    assert replaced.sha256 == two.parent_sha256
    with pytest.raises(PoisonError, match="stub"):
        restore(log, one.id)


def test_a_record_in_the_wrong_slot_is_found_out(log: SlotLog, author: Author) -> None:
    """A manifest that was copied by hand to another slot is refused."""
    manifest = author.manifest(log.head())
    log.store.put(BucketLayout("p").slot_key(0, 2), manifest.to_bytes())
    with pytest.raises(PoisonError, match="copied"):
        log.head()


def test_a_log_opened_elsewhere_follows_many_forks(log: SlotLog, author: Author) -> None:
    """A fresh reader finds the current timeline by following forks from timeline 0."""
    manifests: list[Manifest] = []
    for _ in range(5):
        manifests.append(author.seal(log))
        restore(log, manifests[0].id)
    fresh = SlotLog(log.store, "p")
    assert (fresh.head().timeline, fresh.head().slot) == (5, 1)
    assert [f.new_timeline for f in fresh.list_forks()] == [1, 2, 3, 4, 5]


def test_faults_while_reading_surface_as_transient(author: Author) -> None:
    """A store that is away makes reading fail, never look empty."""

    def away(request: StoreRequest) -> Fault | None:
        return Fault.REFUSED if request.verb in {"get", "list"} else None

    from tidegate.checkpoints.store import StoreUnavailableError

    with pytest.raises(StoreUnavailableError):
        SlotLog(MemoryStore(hook=away), "p").head()
