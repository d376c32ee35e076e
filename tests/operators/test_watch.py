from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_reports import DriverLog, DriverStatus, write_status
from tidegate.checkpoints.lease import Lease, LeaseView, read_lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.pipeline_overview import DriverOverview, PipelineState, needs_person
from tidegate.operators.driver_launch import LaunchedDriver
from tidegate.operators.liveness import (
    UNREADABLE_PATIENCE,
    ChangeTimer,
    LivenessLimits,
    LivenessSample,
    Observation,
    StreamObserver,
    judge_liveness,
)

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)
RULES = LivenessLimits(start_timeout=180, stall_after=120)


def _lease(token: int = 1, holder: ProcessIdentity | None = ELSEWHERE) -> LeaseView:
    store = MemoryStore()
    held = Lease.acquire(store, "p", ELSEWHERE, clock=ManualClock())
    if holder is None:
        held.release()
    view = read_lease(store, "p")
    assert view is not None
    return LeaseView(view.record.model_copy(update={"token": token}), view.etag)


def _seen(**changes: Any) -> LivenessSample:
    base: dict[str, Any] = {
        "lease": _lease(),
        "silent_for": 1.0,
        "status": {"token": 1, "state": "running"},
        "floor": 1,
    } | changes
    lease, status = base.pop("lease"), base.pop("status")
    report = status and DriverStatus(
        token=status["token"], driver="d", step="move", at=0, body=status
    )
    return LivenessSample(driver=DriverOverview(lease, report), **base)


def _state(**changes: Any) -> PipelineState:
    return judge_liveness(_seen(**changes), RULES).state


def test_a_renewed_lease_is_live() -> None:
    """Someone who renews the lease and finishes steps drives."""
    assert _state() is PipelineState.RUNNING


def test_a_silent_lease_is_lost() -> None:
    """A lease elsewhere that was not renewed for longer than its TTL is lost."""
    assert _state(silent_for=7.5) is PipelineState.LOST
    assert _state(silent_for=6.5) is PipelineState.RUNNING


def test_a_dead_holder_here_is_lost_at_once() -> None:
    """A pid of this host that belongs to no one any more needs no waiting."""
    me = ProcessIdentity.this_process()
    dead = LeaseView(
        _lease().record.model_copy(update={"holder": me.model_copy(update={"start_ticks": 1})}), "e"
    )
    found = judge_liveness(_seen(lease=dead, silent_for=0.0), RULES)
    assert found.state is PipelineState.LOST
    assert "is dead" in found.why


def test_no_step_finished_is_stalled() -> None:
    """Whoever renews the lease but finishes nothing for `stall_after` is stalled."""
    assert _state(still_for=121) is PipelineState.STALLED


def test_a_long_step_is_not_stalled_while_the_driver_allows_it() -> None:
    """A survey of a large backlog takes minutes; killing it would begin the same survey again."""
    surveying = {"token": 1, "state": "running", "step_limit": 1800.0}
    assert _state(status=surveying, still_for=1700) is PipelineState.RUNNING
    assert _state(status=surveying, still_for=1801) is PipelineState.STALLED


@pytest.mark.parametrize(("word", "still_for"), [("waiting", 9_999.0), ("starting", 170.0)])
def test_waiting_and_starting_are_not_stalled(word: str, still_for: float) -> None:
    """A driver that waits for the store, or for its JVM, does not count as stalled."""
    assert _state(status={"token": 1, "state": word}, still_for=still_for) is PipelineState.RUNNING


def test_a_launched_process_may_take_its_time() -> None:
    """Between launch and lease only the process shows life, and its patience ends at
    `start_timeout`.
    """
    before = {"token": 3, "state": "failed"}  # the words of a predecessor
    start: dict[str, Any] = {
        "lease": _lease(3, None),
        "floor": 4,
        "process_alive": True,
        "status": before,
    }
    assert _state(**start, launched_for=30.0) is PipelineState.RUNNING
    assert _state(**start, launched_for=200.0) is PipelineState.STALLED


def test_a_running_process_without_its_lease_is_stalled() -> None:
    """A wedged driver loses its lease; its process must be removed before another starts."""
    assert _state(silent_for=9.0, process_alive=True) is PipelineState.STALLED


@pytest.mark.parametrize("word", ["finished", "stopped"])
def test_last_words_of_the_watched_driver_count(word: str) -> None:
    """What the driver said last decides when the lease is free."""
    assert _state(lease=_lease(1, None), status={"token": 1, "state": word}) is PipelineState(word)


def test_last_words_of_an_earlier_driver_do_not_count() -> None:
    """A status with a token below the floor was written by a predecessor."""
    assert (
        _state(lease=_lease(1, None), floor=2, status={"token": 1, "state": "finished"})
        is PipelineState.LOST
    )


def test_a_failure_keeps_its_class() -> None:
    """The error travels with the observation, and poison is final."""
    error = {"class": "poison", "message": "row 7", "code": "x"}
    found = judge_liveness(
        _seen(lease=_lease(1, None), status={"token": 1, "state": "failed", "error": error}), RULES
    )
    assert found.state is PipelineState.FAILED
    assert needs_person(found.error)
    assert Observation.from_dict(found.as_dict()) == found


@pytest.mark.parametrize(
    ("code", "expected", "kind"),
    [
        (0, PipelineState.STOPPED, None),
        (1, PipelineState.FAILED, "poison"),
        (2, PipelineState.FAILED, "configuration"),
        (3, PipelineState.FAILED, "transient"),
        (4, PipelineState.FAILED, "fenced"),
        (137, PipelineState.LOST, None),
    ],
)
def test_an_exit_code_replaces_a_missing_report(
    code: int, expected: PipelineState, kind: str | None
) -> None:
    """A driver that could not even write its status is classified by its exit code.

    A signal means lost.
    """
    found = judge_liveness(_seen(lease=None, status=None, exit_code=code), RULES)
    assert (found.state, found.error.get("class")) == (expected, kind)


def test_a_timer_starts_again_with_every_change() -> None:
    """Standstill is counted from the last change, on the caller's clock."""
    timer = ChangeTimer()
    assert [
        timer.seconds_unchanged(value, now)
        for value, now in [("a", 5.0), ("a", 9.0), ("b", 10.0), ("b", 11.5)]
    ] == [0, 4, 0, 1.5]


def test_an_outage_of_the_store_is_not_held_against_the_driver() -> None:
    """While the store was away no one could renew: silence is counted again from its return."""
    clock, bucket, away = ManualClock(), MemoryBucket(), [False]
    store = MemoryStore(bucket)
    Lease.acquire(store, "p", ELSEWHERE, clock=clock)
    observer = StreamObserver(
        MemoryStore(bucket, hook=lambda _: Fault.REFUSED if away[0] else None),
        "p",
        floor=1,
        clock=clock,
    )
    assert observer.observe() is not None
    away[0] = True
    clock.advance(30)
    assert observer.observe() is None
    away[0] = False
    found = observer.observe()
    assert found is not None
    assert found.state is PipelineState.RUNNING
    clock.advance(8)
    lost = observer.observe()
    assert lost is not None
    assert lost.state is PipelineState.LOST


@pytest.mark.parametrize("launched", [False, True])
def test_time_without_an_answer_counts_neither_for_nor_against_a_driver(
    tmp_path: Path, launched: bool
) -> None:
    """An outage longer than `stall_after` and `start_timeout` changes no verdict, and hides none.

    The driver could not report, so its last report is as old as the outage when the store returns.
    """
    clock, bucket, away = ManualClock(), MemoryBucket(), [False]
    store = MemoryStore(bucket)
    process = LaunchedDriver("a", "/log", ProcessIdentity.this_process(), str(tmp_path / "a.exit"))
    if not launched:
        Lease.acquire(store, "p", ELSEWHERE, clock=clock)
        body = {"state": "running", "step_since": 1}
        write_status(store, "p", DriverStatus(token=1, driver="d", step="wait", at=0, body=body))
    observer = StreamObserver(
        MemoryStore(bucket, hook=lambda _: Fault.REFUSED if away[0] else None),
        "p",
        floor=1,
        launched=process if launched else None,
        limits=LivenessLimits(start_timeout=120, stall_after=120, lease_margin=9_999),
        clock=clock,
    )

    def look(seconds: float) -> PipelineState | None:
        clock.advance(seconds)
        found = observer.observe()
        return found.state if found else None

    assert look(0) is PipelineState.RUNNING
    assert look(100) is PipelineState.RUNNING
    away[0] = True
    assert [look(2), look(600), look(600)] == [None, None, None]
    away[0] = False
    assert look(5) is PipelineState.RUNNING
    assert look(10) is PipelineState.RUNNING
    assert look(10) is PipelineState.STALLED


def test_a_flapping_store_does_not_hide_a_stalled_driver() -> None:
    """Every second look fails: the time before such a look still counts."""
    clock, bucket, looks = ManualClock(), MemoryBucket(), [0]
    store = MemoryStore(bucket)
    Lease.acquire(store, "p", ELSEWHERE, clock=clock)
    write_status(store, "p", DriverStatus(token=1, driver="d", step="wait", at=0, body={}))
    observer = StreamObserver(
        MemoryStore(bucket, hook=lambda _: Fault.REFUSED if looks[0] % 2 else None),
        "p",
        floor=1,
        limits=LivenessLimits(lease_margin=9_999),
        clock=clock,
    )
    states = set()
    for _ in range(200):
        looks[0] += 1
        clock.advance(2)
        found = observer.observe()
        states.add(found.state if found else None)
    assert PipelineState.STALLED in states


def test_an_unreadable_bucket_is_a_failure_only_when_it_lasts() -> None:
    """A refusal may be an expired key, and a document of a newer version may be rolled back."""
    clock, store = ManualClock(), MemoryStore()
    Lease.acquire(store, "p", ELSEWHERE, clock=clock)
    key = BucketLayout("p").lease_key
    good = store.get(key).data
    observer = StreamObserver(store, "p", floor=1, clock=clock)
    store.put(key, b'{"format_version": 99}')
    assert observer.observe() is None
    clock.advance(UNREADABLE_PATIENCE - 1)
    assert observer.observe() is None
    store.put(key, good)
    assert observer.observe() is not None
    store.put(key, b'{"format_version": 99}')
    assert observer.observe() is None
    clock.advance(UNREADABLE_PATIENCE)
    found = observer.observe()
    assert found is not None
    assert found.state is PipelineState.FAILED
    assert "could not be read for 300 s" in found.why
    assert found.error["code"]


def test_an_early_end_on_another_host_is_read_from_the_log(tmp_path: Path) -> None:
    """A configuration error must not look like a slow start until the time-out, at every retry."""
    clock, store = ManualClock(), MemoryStore()
    log = tmp_path / "a.log"
    error = {"class": "configuration", "code": "spec.x", "message": "no such column"}
    log.write_text(json.dumps({"event": "ended", **error}) + "\n")
    launched = LaunchedDriver("a", str(log), ELSEWHERE, str(tmp_path / "a.exit"))
    observer = StreamObserver(store, "p", floor=1, launched=launched, clock=clock)
    clock.advance(11)
    starting = observer.observe()
    assert starting is not None
    assert starting.state is PipelineState.RUNNING
    DriverLog(store, "p", "a", log).send_new_pieces()
    clock.advance(11)
    found = observer.observe()
    assert found is not None
    assert found.state is PipelineState.FAILED
    assert needs_person(found.error)


def test_the_floor_follows_the_driver() -> None:
    """When another driver takes over, its words count and the old one's no longer do."""
    clock, store = ManualClock(), MemoryStore()
    first = Lease.acquire(store, "p", ELSEWHERE, clock=clock)
    observer = StreamObserver(store, "p", floor=first.token, clock=clock)
    observer.observe()
    first.release()
    Lease.acquire(store, "p", ELSEWHERE, clock=clock)
    observer.observe()
    assert observer.floor == 2
    write_status(
        store, "p", DriverStatus(token=1, driver="d", step="x", at=0, body={"state": "finished"})
    )
    clock.advance(60)
    found = observer.observe()
    assert found is not None
    assert found.state is PipelineState.LOST
