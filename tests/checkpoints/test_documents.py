"""Small documents.

Compare-and-swap without ABA, wishes, requests and their acknowledgements, status, pins and claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.manual_clock import ManualClock, set_desired_at
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.driver_reports import DriverStatus, read_status, write_status
from tidegate.checkpoints.driver_requests import (
    ANSWER_RETENTION,
    Ack,
    AckOutcome,
    DesiredDocument,
    DesiredState,
    RequestKind,
    RequestQueue,
    acknowledge_request,
    list_pending_requests,
    read_ack,
    read_desired_state,
    set_desired_state,
    submit_request,
)
from tidegate.checkpoints.pins import Roots, RootsFile, pin_checkpoint
from tidegate.checkpoints.shared_documents import change_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, PoisonError, TransientError

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author

C = CheckpointId(0, 1, "abcdef")


def once(*faults: Fault) -> MemoryStore:
    """A store whose first writes meet these faults."""
    left = list(faults)
    return MemoryStore(hook=lambda request: left.pop(0) if left and request.is_write else None)


@pytest.mark.parametrize("fault", [Fault.NO_EFFECT, Fault.LOST_ANSWER, Fault.LATE, Fault.TWICE])
def test_a_change_happens_once_whatever_the_answer(fault: Fault) -> None:
    """A lost answer is found out by reading: the step has nothing left to do, or is tried again."""
    store = once(fault)
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    assert read_desired_state(store, "p").revision == 1
    while store.bucket.held:
        assert store.bucket.deliver_held() is False
    assert read_desired_state(store, "p").state is DesiredState.RUN


def test_a_held_up_swap_never_fits_again() -> None:
    """Back at the old wish, the document has a new revision.

    The late swap of long ago is refused.
    """
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    clock = ManualClock()
    set_desired_at(clock, store, "p", DesiredState.RUN, who="ann")
    late = [Fault.LATE]
    slow = MemoryStore(
        bucket, hook=lambda request: late.pop() if late and request.is_write else None
    )
    set_desired_at(clock, slow, "p", DesiredState.STOPPED, who="bob")
    set_desired_at(clock, store, "p", DesiredState.RUN, who="ann")
    assert bucket.deliver_held() is False
    assert read_desired_state(store, "p").state is DesiredState.RUN


def test_never_started_means_stopped_and_foreign_moves_are_refused() -> None:
    """The default wish is 'stopped'.

    With `only_from` a wish that moved meanwhile is not overwritten.
    """
    store = MemoryStore()
    assert read_desired_state(store, "p") == DesiredDocument()
    set_desired_state(
        store, "p", DesiredState.RECOVERING, who="ann", only_from=DesiredState.STOPPED
    )
    with pytest.raises(ConfigurationError, match=r"should be recovering \(set by ann\), not run"):
        set_desired_state(store, "p", DesiredState.STOPPED, who="bob", only_from=DesiredState.RUN)


def test_a_start_behind_a_stop_is_counted() -> None:
    """A run begins with it; neither the first start nor the end of a restore is one."""
    store = MemoryStore()
    runs: list[int] = []
    run, stopped, recovering = DesiredState.RUN, DesiredState.STOPPED, DesiredState.RECOVERING
    for state in (run, stopped, stopped, run, run, recovering, run, stopped, run):
        runs.append(set_desired_state(store, "p", state, who="ann", why=f"{len(runs)}").run)
    assert runs == [0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert b'"run":' not in DesiredDocument(state=run).to_bytes()


def test_a_contended_document_is_a_transient_error() -> None:
    """When others are always faster, the change gives up instead of spinning."""
    bucket = MemoryBucket()
    number = iter(range(1000))

    def rival(request: StoreRequest) -> Fault | None:
        if request.is_write:
            bucket.objects[request.key] = DesiredDocument(
                revision=next(number), why=str(number)
            ).to_bytes()
        return None

    with pytest.raises(TransientError, match="could not be changed"):
        set_desired_state(MemoryStore(bucket, hook=rival), "p", DesiredState.RUN, who="ann")


def test_a_document_that_cannot_be_read_is_named() -> None:
    """Garbage is an error with the address, not a fresh start."""
    store = MemoryStore()
    store.put("p/roots.json", b"{")
    with pytest.raises(PoisonError, match=r"p/roots\.json is not a readable Roots"):
        RootsFile(store, "p").read()


def test_steps_that_change_nothing_write_nothing() -> None:
    """A step that returns the document as it was makes no request beyond the read."""
    writes: list[str] = []
    store = MemoryStore(
        hook=lambda request: writes.append(request.verb) if request.is_write else None
    )
    change_document(store, "p/roots.json", Roots(), lambda roots: roots)
    assert len(writes) <= 1


def test_requests_wait_until_acknowledged_on_every_store(store: Store, clock: ManualClock) -> None:
    """A request is pending until its acknowledgement is written."""
    first = submit_request(store, "p", RequestKind.STOP, who="ann", token=3, clock=clock)
    clock.advance(1)
    second = submit_request(
        store, "p", RequestKind.SAVEPOINT, who="ann", name="before-release", clock=clock
    )
    assert [r.id for r in list_pending_requests(store, "p")] == [first.id, second.id]
    ack = Ack(id=first.id, outcome=AckOutcome.APPLIED, token=3, at=clock.wall_ticks())
    assert acknowledge_request(store, "p", ack) == ack
    assert (
        acknowledge_request(store, "p", ack.model_copy(update={"outcome": AckOutcome.REFUSED}))
        == ack
    )
    assert read_ack(store, "p", first.id) == ack
    assert read_ack(store, "p", second.id) is None
    assert list_pending_requests(store, "p") == [second]


def test_a_stale_request_does_not_fit_a_successor(clock: ManualClock) -> None:
    """A stop for token 3 is refused by the driver with token 4, and by anybody after its expiry."""
    request = submit_request(
        MemoryStore(), "p", RequestKind.STOP, who="ann", token=3, ttl=60, clock=clock
    )
    assert request.refusal_outcome(3, clock.wall_ticks()) is None
    assert request.refusal_outcome(4, clock.wall_ticks()) is AckOutcome.REFUSED
    clock.advance(60)
    assert request.refusal_outcome(3, clock.wall_ticks()) is AckOutcome.EXPIRED


@pytest.mark.parametrize("kind", list(RequestKind))
def test_every_request_names_its_target(kind: RequestKind) -> None:
    """A request without token, barrier or name is refused when it is made."""
    with pytest.raises(ValueError, match="names its"):
        submit_request(MemoryStore(), "p", kind, who="ann")


def test_submitting_twice_is_once() -> None:
    """The same request id returns the request that lies there; a lost answer does not double it."""
    store = once(Fault.LOST_ANSWER)
    one = submit_request(store, "p", RequestKind.DRAIN, who="ann", token=1, request_id="r")
    assert submit_request(store, "p", RequestKind.DRAIN, who="bob", token=2, request_id="r") == one
    assert list_pending_requests(store, "p") == [one]


def test_answered_requests_are_deleted_after_an_hour(clock: ManualClock) -> None:
    """A driver deletes a request and its acknowledgement when the asker has had time to read it."""
    store = MemoryStore()
    queue = RequestQueue(store, "p", clock)
    done = submit_request(store, "p", RequestKind.STOP, who="ann", token=1, clock=clock)
    still_open = submit_request(store, "p", RequestKind.STOP, who="ann", token=1, clock=clock)
    ack = Ack(id=done.id, outcome=AckOutcome.APPLIED, token=1, at=clock.wall_ticks())
    acknowledge_request(store, "p", ack)
    clock.advance(ANSWER_RETENTION - 1)
    assert queue.list_pending() == [still_open]
    assert read_ack(store, "p", done.id) == ack
    clock.advance(1)
    assert queue.list_pending() == [still_open]
    assert [entry.key for entry in store.list_objects("p/")] == [f"p/requests/{still_open.id}.json"]


def test_a_successor_deletes_what_its_predecessor_answered(clock: ManualClock) -> None:
    """The age of an answer is read from the acknowledgement, not remembered by one process."""
    store = MemoryStore()
    done = submit_request(store, "p", RequestKind.STOP, who="ann", token=1, clock=clock)
    acknowledge_request(
        store, "p", Ack(id=done.id, outcome=AckOutcome.APPLIED, token=1, at=clock.wall_ticks())
    )
    clock.advance(ANSWER_RETENTION)
    assert RequestQueue(store, "p", clock).list_pending() == []
    assert list(store.list_objects("p/")) == []


def test_a_request_is_deleted_before_its_acknowledgement(clock: ManualClock) -> None:
    """After a crash between the two deletions, the request cannot be applied again."""
    deleted: list[str] = []

    def note_delete(request: StoreRequest) -> None:
        if request.verb == "delete":
            deleted.append(request.key)

    store = MemoryStore(hook=note_delete)
    done = submit_request(store, "p", RequestKind.STOP, who="ann", token=1, clock=clock)
    acknowledge_request(store, "p", Ack(id=done.id, outcome=AckOutcome.APPLIED, token=1, at=0))
    RequestQueue(store, "p", clock).list_pending()
    assert deleted == [f"p/requests/{done.id}.json", f"p/acks/{done.id}.json"]


def test_garbage_is_no_status() -> None:
    """A report is read back as it was written; garbage and absence are no report."""
    store = MemoryStore()
    assert read_status(store, "p") is None
    write_status(
        store,
        "p",
        DriverStatus(token=4, driver="d", step="move", at=1, body={"frontiers": {"a": 5}}),
    )
    status = read_status(store, "p")
    assert status is not None
    assert status.body == {"frontiers": {"a": 5}}
    store.put("p/status.json", b"{")
    assert read_status(store, "p") is None


def test_pins_keep_names_apart() -> None:
    """A pin may be repeated, not moved; unpin frees the name."""
    roots = RootsFile(MemoryStore(), "p")
    roots.pin("golden", C, who="ann")
    roots.pin("golden", C, who="bob")
    with pytest.raises(ConfigurationError, match="already names"):
        roots.pin("golden", CheckpointId(0, 2, "abcdef"), who="bob")
    assert roots.read().protected_checkpoints == {str(C)}
    roots.unpin("golden")
    roots.unpin("golden")
    assert roots.read().protected_checkpoints == set()


def test_what_is_condemned_cannot_be_pinned_or_restored() -> None:
    """Pin and claim of a condemned checkpoint are refused with the reason.

    An acquittal lifts it.
    """
    roots = RootsFile(MemoryStore(), "p")
    roots.condemn_damaged(C, "checksum of x")
    roots.condemn_damaged(C, "again")
    with pytest.raises(ConfigurationError, match="damaged: checksum of x"):
        roots.pin("x", C, who="ann")
    with pytest.raises(ConfigurationError, match="damaged: checksum of x"):
        roots.claim("r", C, timeline=0, slot=9, who="ann")
    with pytest.raises(ConfigurationError, match="damaged: checksum of x"):
        roots.require_not_condemned(C)
    assert roots.read().condemned.keys() == {str(C)}
    roots.clear_condemned([str(C)])
    roots.require_not_condemned(C)
    roots.pin("x", C, who="ann")


def test_retirement_passes_over_pins_and_claims_and_drops_void_claims() -> None:
    """What is pinned or claimed is never condemned; a void claim protects nothing any more."""
    roots = RootsFile(MemoryStore(), "p")
    ids = [CheckpointId(0, n, "abcdef") for n in range(1, 5)]
    roots.pin("golden", ids[0], who="ann")
    roots.claim("live", ids[1], timeline=0, slot=9, who="ann")
    roots.claim("void", ids[2], timeline=0, slot=5, who="ann")
    after = roots.condemn_retired(lambda seen: ({str(c) for c in ids}, {"void"}))
    assert after.retiring_checkpoints == {str(ids[2]), str(ids[3])}
    assert set(after.claims) == {"live"}


def test_a_claim_that_comes_in_between_is_seen() -> None:
    """When a restore claims a checkpoint while retention decides, the decision is made again."""
    bucket = MemoryBucket()
    asked: list[Roots] = []

    def decide(seen: Roots) -> tuple[set[str], set[str]]:
        if not asked:
            RootsFile(MemoryStore(bucket), "p").claim("r", C, timeline=0, slot=9, who="ann")
        asked.append(seen)
        return {str(C)}, set()

    assert RootsFile(MemoryStore(bucket), "p").condemn_retired(decide).retiring_checkpoints == set()
    assert len(asked) == 2


def test_pinning_looks_at_the_slot(log: SlotLog, author: Author) -> None:
    """Only a checkpoint that was completed can be pinned."""
    manifest = author.seal(log)
    pin_checkpoint(log, "golden", manifest.id, who="ann")
    with pytest.raises(ConfigurationError, match="not a completed"):
        pin_checkpoint(log, "other", CheckpointId(0, 1, "ffffff"), who="ann")
    assert set(RootsFile(log.store, "p").read().pins) == {"golden"}
