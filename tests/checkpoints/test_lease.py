"""The lease: takeover without comparing clocks, fencing by token, lost answers, proven death,
wedged drivers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.lease import (
    LEASE_RENEW_INTERVAL,
    LEASE_TTL,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    LeaseObserver,
    LeaseRenewer,
    LeaseWait,
    evict_lease_holder,
    read_lease,
)
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import (
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
    StoreUnavailableError,
)
from tidegate.errors import ConfigurationError, FencedError, PoisonError


def far_away(name: str) -> ProcessIdentity:
    """A holder on another host, about which nothing can be proven from here."""
    return ProcessIdentity(
        driver=name, host="elsewhere", boot="b", namespace="n", pid=1, start_ticks=1
    )


def _nothing() -> None:
    pass


class Sleepy(ManualClock):
    """A clock on which something else happens whenever someone waits."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = _nothing

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.meanwhile()


@pytest.fixture
def sleepy() -> Sleepy:
    return Sleepy()


def test_a_free_lease_is_taken_at_once_on_every_store(store: Store, clock: ManualClock) -> None:
    """First start, renewal, release and next start work on each kind of store, without waiting."""
    before = clock.monotonic()
    one = Lease.acquire(store, "p", far_away("one"), clock=clock, uid="u")
    one.renew()
    one.ensure_held()
    one.release()
    two = Lease.acquire(store, "p", far_away("two"), clock=clock, uid="u")
    assert (one.token, two.token, clock.monotonic()) == (1, 2, before)
    view = read_lease(store, "p")
    assert view is not None
    assert view.holder == two.holder
    assert view.record.uid == "u"


def test_every_renewal_changes_the_etag(memory: MemoryStore, clock: ManualClock) -> None:
    """Equal content would hide a sign of life; the nonce makes each renewal visible."""
    lease = Lease.acquire(memory, "p", far_away("one"), clock=clock)
    etags = set()
    for _ in range(5):
        view = read_lease(memory, "p")
        assert view is not None
        etags.add(view.etag)
        lease.renew()
    assert len(etags) == 5


def test_a_live_holder_is_left_alone(memory: MemoryStore, sleepy: Sleepy) -> None:
    """A renewal seen while watching means: held, by name."""
    lease = Lease.acquire(memory, "p", far_away("one"), clock=sleepy)
    sleepy.meanwhile = lease.renew
    with pytest.raises(LeaseHeldError, match=r"one \(pid 1 on elsewhere\)"):
        Lease.acquire(memory, "p", far_away("two"), clock=sleepy)


def test_a_silent_holder_is_replaced_after_its_ttl_on_the_observers_clock(
    memory: MemoryStore,
) -> None:
    """Takeover waits out the TTL on the newcomer's own clock, however wrong the other clock is."""
    one = Lease.acquire(memory, "p", far_away("one"), clock=ManualClock(start=9e9))
    clock = ManualClock(start=5.0)
    two = Lease.acquire(memory, "p", far_away("two"), clock=clock)
    assert LEASE_TTL < clock.monotonic() - 5.0 < LEASE_TTL + 1.5
    assert two.token == 2
    with pytest.raises(LeaseLostError, match="token 2 is held by two"):
        one.renew()
    with pytest.raises(LeaseLostError):
        one.ensure_held()
    assert one._lost is not None


def test_a_standby_waits_until_the_holder_falls_silent(memory: MemoryStore, sleepy: Sleepy) -> None:
    """A standby driver outlasts many renewals and takes over a TTL after the last one."""
    one = Lease.acquire(memory, "p", far_away("one"), clock=sleepy)
    renewals = iter(range(40))
    sleepy.meanwhile = lambda: one.renew() if next(renewals, None) is not None else None
    two = Lease.acquire(memory, "p", far_away("two"), clock=sleepy, wait=LeaseWait(standby=True))
    assert two.token == 2
    assert next(renewals, None) is None


def test_a_standby_can_be_told_to_stop(memory: MemoryStore, sleepy: Sleepy) -> None:
    """`stop` ends the wait."""
    one = Lease.acquire(memory, "p", far_away("one"), clock=sleepy)
    sleepy.meanwhile = one.renew
    looks = iter(range(5))
    with pytest.raises(LeaseHeldError):
        Lease.acquire(
            memory,
            "p",
            far_away("two"),
            clock=sleepy,
            wait=LeaseWait(standby=True, stop=lambda: next(looks, None) is None),
        )


def test_a_holder_proven_dead_is_replaced_at_once(memory: MemoryStore, clock: ManualClock) -> None:
    """A process of this host that ended leaves its lease to the next one without a wait."""
    code = (
        "from tidegate.checkpoints.pipeline_identity import ProcessIdentity;"
        " print(ProcessIdentity.this_process().model_dump_json(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        holder = ProcessIdentity.model_validate_json(child.stdout.readline())
        Lease.acquire(memory, "p", holder, clock=clock)
        assert not holder.is_proven_dead()
        child.kill()
    before = clock.monotonic()
    assert Lease.acquire(memory, "p", ProcessIdentity.this_process("next"), clock=clock).token == 2
    assert clock.monotonic() == before


def test_a_zombie_and_a_reused_pid_are_dead() -> None:
    """A child that ended but was not waited for is dead; so is a pid whose start time differs."""
    me = ProcessIdentity.this_process()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(
            os.P_PID, child.pid, os.WEXITED | os.WNOWAIT
        )  # it ended, and is a zombie from here on
        assert me.model_copy(update={"pid": child.pid}).is_proven_dead()
    assert me.model_copy(update={"start_ticks": me.start_ticks - 1}).is_proven_dead()
    assert not me.is_proven_dead()


@pytest.mark.parametrize("field", ["host", "boot", "namespace"])
def test_nothing_is_proven_across_hosts_boots_and_containers(field: str) -> None:
    """A pid says something only on its own host, boot and pid namespace."""
    dead = ProcessIdentity.this_process().model_copy(update={"start_ticks": 0})
    assert dead.is_proven_dead()
    assert not dead.model_copy(update={field: "other"}).is_proven_dead()


@pytest.mark.parametrize("fault", [Fault.NO_EFFECT, Fault.LOST_ANSWER, Fault.LATE])
def test_a_lost_answer_to_the_first_take_is_read_back(fault: Fault, clock: ManualClock) -> None:
    """However the create was lost, exactly one lease results and its holder knows it."""
    faults = [fault]
    bucket = MemoryBucket()
    store = MemoryStore(
        bucket, hook=lambda request: faults.pop() if faults and request.is_write else None
    )
    lease = Lease.acquire(store, "p", far_away("one"), clock=clock)
    while bucket.held:
        bucket.deliver_held()
    lease.renew()
    assert lease.token == 1


def test_a_store_that_never_answers_a_take_is_reported(clock: ManualClock) -> None:
    """A driver that starts tries it several times, not for ever, and says what is wrong."""
    writes: list[str] = []

    def lose(request: StoreRequest) -> Fault | None:
        writes.extend([request.verb] if request.is_write else [])
        return Fault.NO_EFFECT if request.is_write else None

    with pytest.raises(OutcomeUnknownError, match="no answer several times in a row"):
        Lease.acquire(MemoryStore(hook=lose), "p", far_away("one"), clock=clock)
    assert 1 < len(writes) < 20


def test_a_renewal_whose_answer_was_lost_is_taken_up(clock: ManualClock) -> None:
    """The holder reads back, recognises its nonce, and goes on as the holder without another."""
    faults: list[Fault] = []
    writes: list[str] = []

    def ask(request: StoreRequest) -> Fault | None:
        writes.extend([request.verb] if request.is_write else [])
        return faults.pop() if faults and request.is_write else None

    lease = Lease.acquire(MemoryStore(hook=ask), "p", far_away("one"), clock=clock)
    faults.append(Fault.LOST_ANSWER)
    writes.clear()
    clock.advance(2)
    lease.renew()
    assert writes == ["swap"]
    assert lease.remaining_seconds == LEASE_TTL
    lease.renew()
    lease.ensure_held()


def test_a_renewal_that_lands_late_does_not_cost_the_lease(clock: ManualClock) -> None:
    """A held-up renewal that arrives between two others is recognised as one's own."""
    faults: list[Fault] = []
    bucket = MemoryBucket()
    store = MemoryStore(
        bucket, hook=lambda request: faults.pop() if faults and request.is_write else None
    )
    lease = Lease.acquire(store, "p", far_away("one"), clock=clock)
    faults.append(Fault.LATE)
    with pytest.raises(OutcomeUnknownError):
        lease.renew()
    assert bucket.deliver_held() is True
    clock.advance(1)
    lease.renew()
    assert (
        lease.remaining_seconds == LEASE_TTL - 1
    )  # counted from when the renewal that is in place was sent
    lease.renew()
    assert lease.remaining_seconds == LEASE_TTL


def test_the_holders_time_counts_from_before_it_sent(clock: ManualClock) -> None:
    """A slow answer shortens the lease: observers may have seen the renewal long ago."""

    def slow(request: StoreRequest) -> Fault | None:
        if request.verb == "swap":
            clock.advance(4)
        return None

    lease = Lease.acquire(MemoryStore(hook=slow), "p", far_away("one"), clock=clock)
    lease.renew()
    assert lease.remaining_seconds == LEASE_TTL - 4


@pytest.mark.parametrize("slept", [LEASE_TTL, LEASE_TTL + 0.5, 60.0])
def test_a_sleeper_without_a_successor_goes_on(
    memory: MemoryStore, clock: ManualClock, slept: float
) -> None:
    """Once its time ran out, check renews; when no one took the lease, it is simply kept."""
    lease = Lease.acquire(memory, "p", far_away("one"), clock=clock)
    clock.advance(slept)
    assert lease.remaining_seconds <= 0
    lease.ensure_held()
    assert lease.remaining_seconds == LEASE_TTL


def test_a_check_while_its_time_runs_costs_no_request(clock: ManualClock) -> None:
    """The driver checks its lease in each epoch; only the thread renews it meanwhile."""
    asked: list[str] = []
    store = MemoryStore(hook=lambda request: asked.append(request.verb))
    lease = Lease.acquire(store, "p", far_away("one"), clock=clock)
    asked.clear()
    clock.advance(LEASE_TTL - 0.1)
    lease.ensure_held()
    assert asked == []


def test_an_absent_store_is_not_a_loss(clock: ManualClock) -> None:
    """While the store is away the lease is neither lost nor renewed."""
    away = [False]
    store = MemoryStore(hook=lambda request: Fault.REFUSED if away[0] else None)
    lease = Lease.acquire(store, "p", far_away("one"), clock=clock)
    away[0] = True
    with pytest.raises(StoreUnavailableError):
        lease.renew()
    assert lease._lost is None
    clock.advance(LEASE_TTL + 1)
    with pytest.raises(StoreUnavailableError):
        lease.ensure_held()
    away[0] = False
    lease.ensure_held()


def test_eviction_raises_the_token_and_frees_the_lease(
    memory: MemoryStore, clock: ManualClock
) -> None:
    """An evicted driver finds out; the next one starts at once with a higher token still."""
    one = Lease.acquire(memory, "p", far_away("one"), clock=clock)
    assert evict_lease_holder(memory, "p", expected_token=one.token) == 2
    with pytest.raises(LeaseLostError):
        one.ensure_held() if one.remaining_seconds <= 0 else one.renew()
    before = clock.monotonic()
    two = Lease.acquire(memory, "p", far_away("two"), clock=clock)
    assert (two.token, clock.monotonic()) == (3, before)
    assert evict_lease_holder(memory, "p", expected_token=1) == 3
    two.renew()
    assert evict_lease_holder(MemoryStore(), "p") == 0


@pytest.mark.parametrize("renewals", [0, 1, 3])
def test_an_eviction_comes_through_between_renewals(clock: ManualClock, renewals: int) -> None:
    """The holder renews just before the eviction arrives: it is tried again, at most some times."""
    bucket, left = MemoryBucket(), [renewals]
    lease = Lease.acquire(MemoryStore(bucket), "p", far_away("one"), clock=clock)

    def renew_first(request: StoreRequest) -> None:
        if request.verb == "swap" and left[0]:
            left[0] -= 1
            lease.renew()

    evicting = MemoryStore(bucket, hook=renew_first)
    assert evict_lease_holder(evicting, "p") == 2
    with pytest.raises(LeaseLostError):
        lease.renew()
    second = Lease.acquire(MemoryStore(bucket), "p", far_away("two"), clock=clock)
    lease, left[0] = second, 1000
    with pytest.raises(PreconditionFailedError, match="a renewal each time"):
        evict_lease_holder(evicting, "p")
    second.renew()


@pytest.mark.parametrize("fault", [Fault.NO_EFFECT, Fault.LOST_ANSWER])
def test_an_eviction_without_an_answer_is_tried_again(fault: Fault, clock: ManualClock) -> None:
    """Whether or not the first request arrived, the holder is out afterwards."""
    bucket, faults = MemoryBucket(), [fault]
    lease = Lease.acquire(MemoryStore(bucket), "p", far_away("one"), clock=clock)
    lossy = MemoryStore(
        bucket, hook=lambda request: faults.pop() if faults and request.is_write else None
    )
    token = evict_lease_holder(lossy, "p")
    view = read_lease(lossy, "p")
    assert view is not None
    assert (view.token, view.is_free) == (token, True)
    with pytest.raises(LeaseLostError, match=f"token {token} is held by no one"):
        lease.renew()


def test_a_lost_lease_is_known_as_lost_whatever_the_etags(clock: ManualClock) -> None:
    """ETags have no order: that of the successor may sort before or behind one's own."""
    orders = set[bool]()
    while len(orders) < 2:
        memory = MemoryStore()
        one = Lease.acquire(memory, "p", far_away("one"), clock=clock)
        before = memory.get("p/lease.json").etag
        evict_lease_holder(memory, "p")
        orders.add(memory.get("p/lease.json").etag < before)
        with pytest.raises(LeaseLostError, match="token 2"):
            one.renew()


def test_a_released_lease_stays_released(memory: MemoryStore, clock: ManualClock) -> None:
    """After release, check refuses; releasing a lost lease is silent."""
    one = Lease.acquire(memory, "p", far_away("one"), clock=clock)
    one.release()
    with pytest.raises(LeaseLostError, match="released"):
        one.ensure_held()
    two = Lease.acquire(memory, "p", far_away("two"), clock=clock)
    one.release()
    two.renew()


def test_two_newcomers_cannot_both_take_it(memory: MemoryStore, clock: ManualClock) -> None:
    """Of two takers of a free lease one holds it and the other meets a live holder."""
    Lease.acquire(memory, "p", far_away("old"), clock=clock).release()
    rival: list[Lease] = []

    def overtake(request: StoreRequest) -> Fault | None:
        if request.verb == "swap" and not rival:
            rival.append(
                Lease.acquire(MemoryStore(memory.bucket), "p", far_away("rival"), clock=clock)
            )
        return None

    waiting = Sleepy()
    waiting.meanwhile = lambda: rival[0].renew()
    with pytest.raises(LeaseHeldError, match="rival"):
        Lease.acquire(
            MemoryStore(memory.bucket, hook=overtake), "p", far_away("late"), clock=waiting
        )
    rival[0].renew()


def test_an_observer_measures_silence_on_its_own_clock(
    memory: MemoryStore, clock: ManualClock
) -> None:
    """The watch counts from the last change it saw and forgets nothing between looks."""
    watch = LeaseObserver(memory, "p", clock)
    assert watch.is_expired(watch.observe())
    lease = Lease.acquire(memory, "p", far_away("one"), clock=clock)
    view = watch.observe()
    clock.advance(5)
    watch.observe()
    assert (watch.silent_seconds, watch.is_expired(view)) == (5, False)
    lease.renew()
    watch.observe()
    assert (watch.silent_seconds, watch.renewals_seen) == (0, 1)
    clock.advance(LEASE_TTL + 0.1)
    assert watch.is_expired(watch.observe())


@pytest.mark.parametrize(("silent", "expired"), [(6.0, False), (6.1, True)])
def test_a_lease_may_be_taken_after_six_seconds_of_silence(
    memory: MemoryStore, clock: ManualClock, silent: float, expired: bool
) -> None:
    """Three renewals fit into them, as docs/architecture.md says: one that is late costs nothing."""
    Lease.acquire(memory, "p", far_away("one"), clock=clock)
    watch = LeaseObserver(memory, "p", clock)
    watch.observe()
    clock.advance(silent)
    assert watch.is_expired(watch.observe()) is expired
    assert 3 * LEASE_RENEW_INTERVAL == 6.0


def test_a_driver_has_ended_once_it_no_longer_holds_the_lease(
    memory: MemoryStore, clock: ManualClock
) -> None:
    """It has released the lease, lost it to another driver, fallen silent, or never had one."""
    watch = LeaseObserver(memory, "p", clock)
    assert watch.has_ended(1)
    one = Lease.acquire(memory, "p", far_away("one"), clock=clock)
    assert not watch.has_ended(one.token)
    one.release()
    assert watch.has_ended(one.token)
    two = Lease.acquire(memory, "p", far_away("two"), clock=clock)
    assert watch.has_ended(one.token)
    assert not watch.has_ended(two.token)
    clock.advance(LEASE_TTL + 1)
    assert watch.has_ended(two.token)


def test_a_slow_answer_is_no_silence(clock: ManualClock) -> None:
    """What the holder did while the store thought about it, or while the observer was held up,
    no one has seen yet.
    """
    slow = [0.0]

    def hook(request: StoreRequest) -> None:
        clock.advance(slow.pop() if slow else 0.0)

    store = MemoryStore(hook=hook)
    Lease.acquire(store, "p", far_away("one"), clock=clock)
    watch = LeaseObserver(store, "p", clock)
    watch.observe()
    clock.advance(2)
    slow.append(LEASE_TTL + 1)
    view = watch.observe()
    clock.advance(LEASE_TTL + 1)
    assert (watch.silent_seconds, watch.is_expired(view)) == (2, False)
    assert watch.is_expired(watch.observe())


def test_a_lease_has_the_version_of_its_format(memory: MemoryStore, clock: ManualClock) -> None:
    """Drivers of two versions read each other's lease, so what it says of its form is fixed."""
    Lease.acquire(memory, "p", far_away("one"), clock=clock)
    assert json.loads(memory.get("p/lease.json").data)["format_version"] == 1


def test_garbage_in_the_lease_is_named(memory: MemoryStore) -> None:
    """A lease that cannot be read is an error that names the object."""
    memory.put("p/lease.json", b"no")
    with pytest.raises(PoisonError, match=r"lease\.json is not a lease"):
        read_lease(memory, "p")


def test_a_wedged_driver_loses_its_lease_although_its_thread_lives(
    memory: MemoryStore, clock: ManualClock
) -> None:
    """Past the step's deadline nothing is renewed.

    The next step renews again, or learns of the loss.
    """
    keeper = LeaseRenewer(Lease.acquire(memory, "p", far_away("one"), clock=clock), clock=clock)
    keeper.announce_step("move", 10)
    clock.advance(9)
    keeper.renew_once()
    assert keeper.lease.remaining_seconds == LEASE_TTL
    clock.advance(2)
    keeper.renew_once()
    assert keeper.is_overdue
    assert keeper.lease.remaining_seconds == LEASE_TTL - 2
    keeper.announce_step("seal", 10)
    keeper.renew_once()
    assert keeper.lease.remaining_seconds == LEASE_TTL
    clock.advance(11)
    Lease.acquire(memory, "p", far_away("two"), clock=clock)
    keeper.announce_step("plan", 10)
    keeper.renew_once()
    assert keeper.lost.is_set()
    assert isinstance(keeper.error, FencedError)


def test_a_driver_has_a_minute_to_announce_its_first_step(
    memory: MemoryStore, clock: ManualClock
) -> None:
    """A driver that hangs while it starts keeps the lease for 60 s."""
    keeper = LeaseRenewer(Lease.acquire(memory, "p", far_away("one"), clock=clock), clock=clock)
    clock.advance(60)
    assert not keeper.is_overdue
    clock.advance(0.1)
    assert keeper.is_overdue


def test_the_keeper_survives_a_store_that_is_away(clock: ManualClock) -> None:
    """Failed renewals are noted, not fatal, whatever their class."""
    faults: list[Fault] = []
    store = MemoryStore(hook=lambda request: faults.pop() if faults else None)
    keeper = LeaseRenewer(Lease.acquire(store, "p", far_away("one"), clock=clock), clock=clock)
    faults.append(Fault.REFUSED)
    keeper.renew_once()
    assert isinstance(keeper.trouble, StoreUnavailableError)
    keeper.renew_once()
    assert keeper.trouble is None
    assert not keeper.lost.is_set()


def test_the_thread_renews_by_itself(memory: MemoryStore) -> None:
    """Started, the keeper renews without being asked, and stops on request."""
    lease = Lease.acquire(memory, "p", far_away("one"))
    watch = LeaseObserver(memory, "p")
    watch.observe()
    with LeaseRenewer(lease, every=0.01) as keeper:
        deadline = lease.remaining_seconds
        while watch.renewals_seen < 3 and deadline > 0:
            watch.observe()
            deadline = lease.remaining_seconds
    assert watch.renewals_seen >= 3
    assert not keeper.lost.is_set()


def test_a_lease_of_another_pipeline_is_refused(memory: MemoryStore, clock: ManualClock) -> None:
    """The uid in the lease guards against two pipelines of one name."""
    Lease.acquire(memory, "p", far_away("one"), clock=clock, uid="u1").release()
    with pytest.raises(ConfigurationError, match="u1, not u2"):
        Lease.acquire(memory, "p", far_away("two"), clock=clock, uid="u2")


def test_pipeline_names_are_checked(memory: MemoryStore) -> None:
    """A name that cannot be a key is refused before anything is written."""
    with pytest.raises(ConfigurationError):
        Lease.acquire(memory, "../p", far_away("one"))
