"""Restores: what a plan says, what binds it, and that only one wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.batch_notes import SinkPlan, SinkRewind
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.errors import HeadMovedError
from tidegate.checkpoints.lease import Lease, LeaseLostError, evict_lease_holder
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity
from tidegate.checkpoints.restore import (
    RestoreAudit,
    RestoreAuditEntry,
    RestoreEvent,
    commit_restore,
    plan_restore,
    read_restore_audits,
    record_restore_event,
)
from tidegate.checkpoints.slot_log import SealUndecidedError, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author


def lease_of(log: SlotLog, clock: ManualClock) -> Lease:
    """A lease for the process that restores."""
    return Lease.acquire(log.store, "p", ProcessIdentity.this_process(), clock=clock)


def test_a_restore_end_to_end_on_every_store(
    store: Store, author: Author, clock: ManualClock
) -> None:
    """Plan, commit, and the next epoch goes on from the target on a new timeline.

    The old one stays.
    """
    log = SlotLog(store, "p")
    manifests = author.extend(log, 4, with_files=True)
    plan = plan_restore(log, manifests[1].id)
    assert (plan.epochs_rewound, plan.epochs_regained) == (2, 0)
    assert (plan.rows["read"], plan.rows["released"], plan.tables) == (20, 20, {"events": 20})
    commit_restore(log, lease_of(log, clock), plan, request_id="r", who="ann", why="test")
    assert author.seal(log).parent == str(manifests[1].id)
    assert log.open_checkpoint(manifests[3].id).epoch == manifests[3]


@pytest.mark.parametrize("slot", [1, 2, 3])
def test_a_plan_counts_the_epochs_behind_its_target(
    log: SlotLog, author: Author, slot: int
) -> None:
    """The target itself stays, also if it is the first epoch of all or the head."""
    target = author.extend(log, 3)[slot - 1]
    plan = plan_restore(log, target.id)
    assert (plan.epochs_rewound, plan.epochs_regained) == (3 - slot, 0)
    assert plan.rows["read"] == 10 * (3 - slot)
    assert (plan.target, plan.head) == (str(target.id), str(log.head().checkpoint))
    assert plan.since == target.created_at
    assert (plan.timeline, plan.slot, plan.sha256) == (0, 3, log.head().sha256)


def test_before_the_first_epoch_there_is_no_head_to_leave(log: SlotLog) -> None:
    """A plan for the beginning of an empty pipeline names no checkpoint and takes nothing back."""
    plan = plan_restore(log, None)
    assert (plan.head, plan.target, plan.since, plan.sha256) == (None, None, None, None)
    assert (plan.epochs_rewound, plan.epochs_regained, plan.spec_changed) == (0, 0, False)
    assert set(plan.rows.values()) == {0}


@pytest.mark.parametrize("rewind", SinkRewind)
def test_only_a_sink_that_cannot_follow_stops_a_restore(
    log: SlotLog, author: Author, clock: ManualClock, rewind: SinkRewind
) -> None:
    """Each other sink follows a restore in its way, and the one that cannot is named."""
    target, _ = author.extend(log, 2)
    sinks = (
        SinkPlan(query="first", sink="files", newest=2, batch=1, rewind=SinkRewind.LOG),
        SinkPlan(query="orders", sink="topic", newest=2, batch=1, rewind=rewind),
    )
    plan = plan_restore(log, target.id).model_copy(update={"sinks": sinks})
    lease = lease_of(log, clock)
    if rewind is SinkRewind.REFUSED:
        with pytest.raises(ConfigurationError, match="orders"):
            commit_restore(log, lease, plan, request_id="r", who="ann", why="")
    else:
        commit_restore(log, lease, plan, request_id="r", who="ann", why="")
    assert log.head().timeline == (rewind is not SinkRewind.REFUSED)


def test_a_plan_changes_nothing(log: SlotLog, author: Author) -> None:
    """A dry run writes index pages at most."""
    manifests = author.extend(log, 3)
    before = {e.key for e in log.store.list_objects("")}
    plan_restore(log, manifests[0].id)
    plan_restore(log, None)
    assert all(
        key.startswith(log.layout.index_prefix)
        for key in {e.key for e in log.store.list_objects("")} - before
    )


def test_a_plan_tells_windows_and_spec(log: SlotLog, author: Author) -> None:
    """Emitted results per window are summed over the rewound epochs; a changed spec is said."""
    one = author.seal(log)
    late = {"late": [FileRef(key="k", rows=2, bytes=1, sha256="s", kind="table:late")]}
    author.seal(log, notes={"epoch": {"windows": {"hourly": 3, "daily": 1}}}, files=late)
    author.seal(log, notes={"epoch": {"windows": {"hourly": 4}}}, spec_digest="other")
    plan = plan_restore(log, one.id)
    assert plan.windows == {"daily": 1, "hourly": 7}
    assert plan.tables == {"late": 2}
    assert plan.spec_changed
    assert not plan_restore(log, log.head().checkpoint).spec_changed


def test_the_beginning_is_a_target(log: SlotLog, author: Author, clock: ManualClock) -> None:
    """Without a checkpoint to trust, everything is read again from slot 1."""
    author.extend(log, 3)
    plan = plan_restore(log, None)
    assert (plan.target, plan.epochs_rewound, plan.rows["read"]) == (None, 3, 30)
    assert plan.epochs_regained == 0
    commit_restore(log, lease_of(log, clock), plan, request_id="r", who="ann", why="")
    assert (log.head().timeline, log.head().slot) == (1, 0)


def test_going_forward_to_an_abandoned_timeline(
    log: SlotLog, author: Author, clock: ManualClock
) -> None:
    """Rewound and regained epochs are counted from where the two histories part."""
    old = author.extend(log, 6)
    lease = lease_of(log, clock)
    commit_restore(log, lease, plan_restore(log, old[2].id), request_id="r1", who="ann", why="")
    author.extend(log, 2)
    plan = plan_restore(log, old[4].id)
    assert (plan.epochs_rewound, plan.epochs_regained) == (2, 2)
    commit_restore(log, lease, plan, request_id="r2", who="ann", why="")
    assert log.head().record == old[4]
    assert plan_restore(log, old[5].id).epochs_regained == 1


def test_a_plan_is_bound_to_its_head(log: SlotLog, author: Author, clock: ManualClock) -> None:
    """After another epoch, or another restore, the plan is refused and nothing happens."""
    manifests = author.extend(log, 3)
    plan = plan_restore(log, manifests[0].id)
    author.seal(log)
    with pytest.raises(HeadMovedError, match="planned at slot 3 of timeline 0; the log is at 4"):
        commit_restore(log, lease_of(log, clock), plan, request_id="r", who="ann", why="")
    assert log.head().timeline == 0
    assert RootsFile(log.store, "p").read().claims == {}


def test_of_two_approved_restores_one_wins(
    log: SlotLog, author: Author, clock: ManualClock
) -> None:
    """The second of two plans for one head is refused, even if it gets as far as the slot."""
    one, two, _ = author.extend(log, 3)
    plans = plan_restore(log, one.id), plan_restore(log, two.id)
    lease = lease_of(log, clock)
    commit_restore(log, lease, plans[0], request_id="a", who="ann", why="")
    with pytest.raises(HeadMovedError):
        commit_restore(log, lease, plans[1], request_id="b", who="bob", why="")
    assert log.head().record == one


def test_an_epoch_that_slips_in_between_wins(
    log: SlotLog, author: Author, clock: ManualClock
) -> None:
    """A sleeper that fills the slot between the check and the PUT is a correct epoch.

    The restore asks again.
    """
    manifests = author.extend(log, 2)
    plan = plan_restore(log, manifests[0].id)
    bucket: MemoryBucket = log.store.bucket  # type: ignore[attr-defined]
    slipped: list[Manifest] = []

    def hook(request: StoreRequest) -> Fault | None:
        if request.verb == "create" and "/slots/" in request.key and not slipped:
            slipped.append(author.seal(log))
        return None

    rival = SlotLog(MemoryStore(bucket, hook=hook), "p", clock=clock)
    with pytest.raises(HeadMovedError):
        commit_restore(rival, lease_of(log, clock), plan, request_id="r", who="ann", why="")
    assert log.head().record == slipped[0]


def test_a_restore_whose_answer_was_lost_can_be_called_again(
    author: Author, clock: ManualClock
) -> None:
    """The same request finds its own fork record, also after the next driver has sealed."""
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p")
    manifests = author.extend(log, 2)
    plan = plan_restore(log, manifests[0].id)
    down: list[bool] = []

    def hook(request: StoreRequest) -> Fault | None:
        if request.verb == "create" and "/slots/" in request.key:
            down.append(True)
            return Fault.LOST_ANSWER
        return Fault.REFUSED if down else None

    mute = SlotLog(MemoryStore(bucket, hook=hook), "p", clock=clock, seal_budget=1.0)
    lease = lease_of(log, clock)
    with pytest.raises(SealUndecidedError):
        commit_restore(mute, lease, plan, request_id="r", who="ann", why="")
    author.seal(log)
    assert commit_restore(log, lease, plan, request_id="r", who="ann", why="").slot == 3
    with pytest.raises(HeadMovedError):
        commit_restore(log, lease, plan, request_id="other", who="ann", why="")


def test_no_restore_without_the_lease(log: SlotLog, author: Author, clock: ManualClock) -> None:
    """An evicted restorer stops before it writes anything."""
    manifests = author.extend(log, 2)
    lease = lease_of(log, clock)
    evict_lease_holder(log.store, "p")
    clock.advance(10)
    with pytest.raises(LeaseLostError):
        commit_restore(
            log, lease, plan_restore(log, manifests[0].id), request_id="r", who="ann", why=""
        )
    assert log.head().timeline == 0
    assert RootsFile(log.store, "p").read().claims == {}


def test_a_condemned_target_is_refused(log: SlotLog, author: Author, clock: ManualClock) -> None:
    """What verification condemned cannot be restored."""
    manifests = author.extend(log, 2)
    RootsFile(log.store, "p").condemn_damaged(manifests[0].id, "checksum")
    with pytest.raises(ConfigurationError, match="damaged"):
        commit_restore(
            log,
            lease_of(log, clock),
            plan_restore(log, manifests[0].id),
            request_id="r",
            who="ann",
            why="",
        )
    assert log.head().timeline == 0


def test_a_lease_that_is_lost_while_the_target_is_claimed_ends_the_restore(
    author: Author, clock: ManualClock
) -> None:
    """The lease is checked again right before the fork record is written."""
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p")
    manifests = author.extend(log, 2)
    lease = lease_of(log, clock)

    def hook(request: StoreRequest) -> Fault | None:
        if request.key.endswith("roots.json") and request.is_write:
            evict_lease_holder(log.store, "p")
            clock.advance(10)
        return None

    slow = SlotLog(MemoryStore(bucket, hook=hook), "p", clock=clock)
    plan = plan_restore(log, manifests[0].id)
    with pytest.raises(LeaseLostError):
        commit_restore(slow, lease, plan, request_id="r", who="ann", why="")
    assert log.head().timeline == 0


def test_the_newest_fifty_histories_of_restores_are_shown(memory: MemoryStore) -> None:
    """They are ordered by their first step, and older ones stay in the bucket."""
    for number in range(60):
        at = (number * 7) % 60
        asked = RestoreAuditEntry(what=RestoreEvent.ASKED, who="ann", at=at)
        approved = RestoreAuditEntry(what=RestoreEvent.APPROVED, who="bob", at=900 - at)
        trail = RestoreAudit(request=f"r{number:02d}", steps=(asked, approved))
        memory.put(BucketLayout("p").restore_audit_key(trail.request), trail.to_bytes())
    shown = [trail.steps[0].at for trail in read_restore_audits(memory, "p")]
    assert shown == list(range(59, 9, -1))


def test_a_look_at_the_histories_reads_at_most_two_hundred() -> None:
    """The page asks for them each time it is opened, and none is ever deleted."""
    read: list[str] = []
    bucket = MemoryBucket()
    step = RestoreAuditEntry(what=RestoreEvent.ASKED, who="ann", at=1)
    for number in range(260):
        trail = RestoreAudit(request=f"r{number:03d}", steps=(step,))
        key = BucketLayout("p").restore_audit_key(trail.request)
        bucket.objects[key] = trail.to_bytes()

    def note_reads(request: StoreRequest) -> None:
        read.extend([request.key] if request.verb == "get" else [])

    assert len(read_restore_audits(MemoryStore(bucket, hook=note_reads), "p")) == 50
    assert read == sorted(bucket.objects)[-200:]


def test_a_history_without_a_step_is_not_shown(memory: MemoryStore) -> None:
    """What has no first step has no place in the order of the page, and does not break it."""
    record_restore_event(memory, "p", "r1", RestoreEvent.ASKED, who="ann")
    memory.put(BucketLayout("p").restore_audit_key("r2"), RestoreAudit(request="r2").to_bytes())
    assert [trail.request for trail in read_restore_audits(memory, "p")] == ["r1"]


def test_a_step_of_a_restore_is_noted_once_for_each_person(memory: MemoryStore) -> None:
    """A task that is tried again adds nothing; another person or another step is a new entry."""
    asked, approved, failed = RestoreEvent.ASKED, RestoreEvent.APPROVED, RestoreEvent.FAILED
    steps = [(approved, "bob"), (asked, "ann"), (asked, "cy"), (approved, "ann"), (failed, "ann")]
    for what, who in [*steps, *steps[:2], *steps]:
        trail = record_restore_event(memory, "p", "r", what, who=who, detail="first")
    assert [(step.what, step.who) for step in trail.steps] == steps
    assert read_restore_audits(memory, "p") == [trail]


def test_the_history_of_a_restore_keeps_why_and_head_of_the_first_request(
    memory: MemoryStore,
) -> None:
    """A later target replaces the earlier one; reason and head stay as they were first given."""
    for target, head, why in (("t", "h", ""), ("u", "i", "late rows"), ("", "", "other")):
        trail = record_restore_event(
            memory, "p", "r", RestoreEvent.ASKED, who="ann", target=target, head=head, why=why
        )
    assert (trail.target, trail.head, trail.why) == ("u", "h", "late rows")
    assert read_restore_audits(memory, "p") == [trail]


def test_a_copy_is_not_restored(log: SlotLog, author: Author, clock: ManualClock) -> None:
    """Its next driver would be refused; the plan can be looked at nevertheless."""
    manifests, key = author.extend(log, 2), BucketLayout("p").identity_key
    ensure_identity(log.store, "p")
    identity = log.store.get(key).data
    log.store.put(key, identity.replace(b"memory://", b"memory://not-"))
    plan, head = plan_restore(log, manifests[0].id), log.head()
    with pytest.raises(ConfigurationError, match="is a copy of"):
        commit_restore(log, lease_of(log, clock), plan, request_id="r", who="ann", why="")
    assert log.head() == head
