"""A driver that may not drive, yet: who keeps it away, what it does then, and what it costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tenacity import Retrying, stop_after_attempt

from tests.manual_clock import ManualClock, set_desired_at
from tests.servers.memory_store import Fault, MemoryStore
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_requests import (
    DesiredDocument,
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease, read_lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity, move_identity
from tidegate.errors import ConfigurationError, FencedError
from tidegate.jobs.driver import startup
from tidegate.jobs.driver.startup import ALIVE_FILE, LaunchOptions, LeaderElection

NewTurn = Callable[[bool], LeaderElection]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def turn_of(store: MemoryStore, tmp_path: Path) -> NewTurn:
    """The turn of a driver, as a standby or alone."""
    once = Retrying(stop=stop_after_attempt(1), reraise=True)
    return lambda standby: LeaderElection(
        store,
        "p",
        threading.Event(),
        once,
        LaunchOptions("memory://", standby=standby),
        tmp_path / ALIVE_FILE,
    )


def want(store: MemoryStore, state: DesiredState) -> None:
    """Someone says so."""
    set_desired_state(store, "p", state, who="ann", why="upgrade")


def test_no_desired_state_was_recorded(turn_of: NewTurn, store: MemoryStore) -> None:
    """Then the driver that was started may drive."""
    for standby in (False, True):
        one = turn_of(standby)
        assert one.wait_until_wanted()
        lease = one.acquire_lease("uid")
        assert lease is not None
        lease.release()
    assert read_desired_state(store, "p") == DesiredDocument()


@pytest.mark.parametrize("state", [DesiredState.STOPPED, DesiredState.RECOVERING])
def test_a_driver_without_standby_ends(
    turn_of: NewTurn, store: MemoryStore, state: DesiredState
) -> None:
    """With who said what, and what to do; the lease is as before."""
    want(store, state)
    with pytest.raises(FencedError, match=rf"p should be {state} \(set by ann: upgrade\)") as said:
        turn_of(False).wait_until_wanted()
    assert said.value.advice == "when it should run again: tidegate start p"
    assert read_lease(store, "p") is None


def test_a_persons_own_run_ends_a_stop_but_no_restore(turn_of: NewTurn, store: MemoryStore) -> None:
    """`tidegate run` means run.

    Where nothing was said, nothing is: Airflow's sweep would start it again forever.
    """
    one = turn_of(False)
    one.clear_stop("bob")
    assert read_desired_state(store, "p") == DesiredDocument()
    want(store, DesiredState.STOPPED)
    one.clear_stop("bob")
    assert (read_desired_state(store, "p").state, read_desired_state(store, "p").who) == (
        DesiredState.RUN,
        "bob",
    )
    want(store, DesiredState.RECOVERING)
    one.clear_stop("bob")
    assert read_desired_state(store, "p").state is DesiredState.RECOVERING


@pytest.mark.parametrize("standby", [False, True])
def test_a_recovery_that_died_does_not_keep_drivers_away(
    turn_of: NewTurn, store: MemoryStore, *, standby: bool
) -> None:
    """Without Airflow no sweep ends it, so the next driver does after a quarter of an hour."""
    killed = ManualClock(wall_ticks=SYSTEM_CLOCK.wall_ticks() - 16 * 60 * 1_000_000)
    recovering = DesiredState.RECOVERING
    set_desired_at(killed, store, "p", recovering, who="ann", why="restore")
    one = turn_of(standby)
    one.stop.set()  # it looks once
    assert one.wait_until_wanted()
    desired = read_desired_state(store, "p")
    assert (desired.state, desired.who) == (DesiredState.RUN, "driver")
    assert desired.why == "the recovery begun by ann was abandoned"


def test_a_recovery_noted_under_a_clock_that_is_ahead_ends_as_well(
    turn_of: NewTurn, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quarter of an hour is counted from the first look, not until that clock's time."""
    now = SYSTEM_CLOCK.wall_ticks()
    ahead = ManualClock(wall_ticks=now + 86_400_000_000)
    set_desired_at(ahead, store, "p", DesiredState.RECOVERING, who="ann")
    with pytest.raises(FencedError, match="recovering"):
        turn_of(False).wait_until_wanted()
    monkeypatch.setattr(type(SYSTEM_CLOCK), "wall_ticks", lambda _: now + 16 * 60 * 1_000_000)
    assert turn_of(False).wait_until_wanted()


def test_a_standby_survives_a_store_that_fails_once(
    turn_of: NewTurn, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has waited before; the patience of the start was over after ten minutes."""
    monkeypatch.setattr(startup, "_LOOK_EVERY", 0.01)
    faults = iter([Fault.REFUSED])
    store.hook = lambda request: next(faults, None) if "lease" in request.key else None
    lease = turn_of(True).acquire_lease("uid")
    assert lease is not None


def test_a_standby_waits_for_the_wish(
    turn_of: NewTurn, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It leaves the free lease alone, shows that it lives, and goes on when the pipeline should run
    again.
    """
    monkeypatch.setattr(startup, "_LOOK_EVERY", 0.01)
    want(store, DesiredState.STOPPED)
    waiting = turn_of(True)
    came: list[bool] = []
    thread = threading.Thread(target=lambda: came.append(waiting.wait_until_wanted()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert (tmp_path / ALIVE_FILE).exists()
    want(store, DesiredState.RUN)
    thread.join(10)
    assert came == [True]
    assert read_lease(store, "p") is None


def test_a_standby_of_airflow_ends_with_the_stream(
    turn_of: NewTurn, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow starts another one when it is needed; a restore is waited for nevertheless."""
    waiting = turn_of(True)
    options = LaunchOptions("memory://", standby=True, ends_when_stopped=True)
    monkeypatch.setattr(waiting, "options", options)
    want(store, DesiredState.RECOVERING)
    waiting.stop.set()
    assert not waiting.wait_until_wanted()
    want(store, DesiredState.STOPPED)
    with pytest.raises(FencedError, match="p should be stopped"):
        waiting.wait_until_wanted()


def test_a_stop_that_comes_with_the_lease_is_seen(
    turn_of: NewTurn, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stops finds the lease free, so no one is asked to end.

    The driver that took it in that moment gives it back.
    """
    really = Lease.acquire

    def acquire(*given: object, **named: object) -> Lease:
        found: Lease = really(*given, **named)  # type: ignore[arg-type]
        want(store, DesiredState.STOPPED)
        return found

    monkeypatch.setattr(Lease, "acquire", acquire)
    with pytest.raises(FencedError, match="p should be stopped"):
        turn_of(False).acquire_lease("uid")
    lease = read_lease(store, "p")
    assert lease is not None
    assert lease.is_free


def test_a_standby_that_is_asked_to_end_does(turn_of: NewTurn, store: MemoryStore) -> None:
    """Beside a driver, and beside a stopped pipeline; neither is an error."""
    waiting = turn_of(True)
    waiting.stop.set()
    driver = Lease.acquire(store, "p", ProcessIdentity.this_process("other"), uid="uid")
    assert waiting.acquire_lease("uid") is None
    driver.release()
    want(store, DesiredState.STOPPED)
    assert waiting.acquire_lease("uid") is None
    assert not waiting.wait_until_wanted()


@pytest.mark.parametrize("standby", [False, True])
def test_a_driver_that_waited_during_a_move_is_refused(
    turn_of: NewTurn, store: MemoryStore, *, standby: bool
) -> None:
    """It read the identity before; the moved pipeline has the same uid at its new address."""
    uid, target = ensure_identity(store, "p"), MemoryStore(name="elsewhere")
    key = BucketLayout("p").identity_key

    def move() -> None:
        mover = Lease.acquire(store, "p", ProcessIdentity.this_process("move"))
        target.put(key, store.get(key).data)
        move_identity(store, target, "p")
        mover.release()

    waiting = turn_of(standby)
    with pytest.raises(ConfigurationError, match="is a copy of"):
        waiting.run_session(move, lambda *_: pytest.fail("it drives"))
    assert ensure_identity(target, "p") == uid
    lease = read_lease(store, "p")
    assert lease is not None
    assert lease.is_free


def test_no_one_starts_what_was_moved(turn_of: NewTurn, store: MemoryStore) -> None:
    """Airflow would start drivers there, each of which is refused."""
    ensure_identity(store, "p")
    key = BucketLayout("p").identity_key
    store.put(key, store.get(key).data.replace(b"memory://test", b"memory://elsewhere"))
    want(store, DesiredState.STOPPED)
    with pytest.raises(ConfigurationError, match="is a copy of"):
        turn_of(False).clear_stop("bob")
    assert read_desired_state(store, "p").state is DesiredState.STOPPED
