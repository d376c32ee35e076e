"""Random races on one bucket.

Any interleaving of requests, any fault at any request, crashes, late and doubled writes.

The `Stage` runs the actors one request at a time, as a string of bytes drawn by Hypothesis says. A
failing string shrinks and replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from tests.checkpoints.conftest import RACE, SCRIPT, Author, Ledger, Stage
from tests.servers.memory_store import MemoryBucket, MemoryStore

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.lease import Lease, LeaseWait
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.errors import ConfigurationError, TidegateError

AUTHOR = Author()


def driver(stage: Stage, name: str, seals: int, answers: list[tuple[Manifest, bool]]) -> None:
    """Adds an actor that seals epochs one after the other, whatever others do, and notes what
    the log answered.
    """

    def body(store: MemoryStore, clock: Clock) -> None:
        log = SlotLog(store, "p", clock=clock, seal_budget=3.0, jitter=lambda: 0.5)
        for number in range(seals):
            manifest = AUTHOR.manifest(
                log.head(), driver=name, attempt=sha256_of_bytes(f"{name}{number}".encode())[:12]
            )
            answers.append((manifest, isinstance(log.seal(manifest), Sealed)))

    stage.actor(name, body)


def restorer(stage: Stage, name: str, won: list[str]) -> None:
    """Adds an actor that goes back to the parent of the head, or to the beginning."""

    def body(store: MemoryStore, clock: Clock) -> None:
        log = SlotLog(store, "p", clock=clock, seal_budget=3.0, jitter=lambda: 0.5)
        head = log.head()
        target = next(iter(log.iterate_ancestors(head.checkpoint)), None)
        back = (
            log.open_checkpoint(head.checkpoint).epoch.parent
            if head.checkpoint and target
            else None
        )
        checkpoint = next(
            (f.epoch.id for f in log.iterate_ancestors(head.checkpoint) if str(f.epoch.id) == back),
            None,
        )
        if isinstance(log.fork(head, checkpoint, request_id=name, who=name, why="", at=0), Sealed):
            won.append(name)

    stage.actor(name, body)


def judge(bucket: MemoryBucket, answers: list[tuple[Manifest, bool]], won: list[str]) -> None:
    """What must hold of the bucket and of the answers to the actors, whatever happened."""
    log = SlotLog(MemoryStore(bucket), "p")
    for manifest, sealed in answers:
        filled = log.read_slot(manifest.timeline, manifest.slot)
        assert filled is not None, "an actor got an answer although the slot is empty"
        assert (filled.record == manifest) is sealed, (
            "an actor got another answer than the slot holds"
        )
    head, forks = log.head(), log.list_forks()
    assert set(won) <= {fork.request_id for fork in forks}, (
        "a restore that got the answer that it won is not in the log"
    )
    before = None
    for position, filled in enumerate(log.epochs_between(head.timeline, 1, head.slot), start=1):
        assert filled.epoch.slot == position
        assert filled.epoch.parent == (str(before) if before else None)
        before = filled.epoch.id
    assert before == head.checkpoint
    for timeline in range(head.timeline + 1):
        no_gaps_and_one_fork(log, timeline, ended=timeline < head.timeline)


def no_gaps_and_one_fork(log: SlotLog, timeline: int, *, ended: bool) -> None:
    """Slots are filled without gaps, each names the hash before it, and only the last one may be a
    fork.
    """
    newest = log.newest_record(timeline)
    if newest is None:
        return
    first = log.lineage(timeline)[-1].first
    records = [log.read_slot(timeline, slot) for slot in range(first, newest.record.slot + 1)]
    kinds = [isinstance(filled.record, ForkRecord) for filled in records if filled is not None]
    assert len(kinds) == len(records), "a gap between slots"
    assert kinds == [False] * (len(kinds) - 1) + [ended]
    for before, after in pairwise(records):
        assert before is not None
        assert after is not None
        assert after.record.parent_sha256 == before.sha256


@RACE
@given(SCRIPT)
@example(b"")
def test_drivers_and_restorers_race_without_harm(script: bytes) -> None:
    """Two drivers and two restorers.

    One record per slot, no gaps, and every answer is true.
    """
    stage = Stage(script, bucket=Ledger())
    answers: list[tuple[Manifest, bool]] = []
    won: list[str] = []
    driver(stage, "one", 3, answers)
    driver(stage, "two", 3, answers)
    restorer(stage, "ann", won)
    restorer(stage, "bob", won)
    stage.play()
    judge(stage.bucket, answers, won)


@RACE
@given(SCRIPT)
def test_two_drivers_never_hold_the_lease_at_once(script: bytes) -> None:
    """While any observer must still wait for one holder, no one else believes to hold the lease.

    Tokens are never shared.
    """
    stage = Stage(script)
    leases: dict[str, Lease] = {}
    tokens: list[int] = []

    def body(name: str) -> Callable[[MemoryStore, Clock], None]:
        holder = ProcessIdentity(
            driver=name, host="elsewhere", boot="b", namespace="n", pid=1, start_ticks=1
        )

        def run(store: MemoryStore, clock: Clock) -> None:
            lease = Lease.acquire(store, "p", holder, clock=clock, wait=LeaseWait(standby=True))
            leases[name] = lease
            tokens.append(lease.token)
            for _ in range(3):
                clock.sleep(2.0)
                lease.renew()
            lease.release()

        return run

    def at_most_one() -> None:
        held = [
            name
            for name, lease in leases.items()
            if lease._lost is None and lease.remaining_seconds > 0
        ]
        assert len(held) <= 1, f"held at once by {held}"

    stage.after_each = at_most_one
    for name in ("one", "two", "three"):
        stage.actor(name, body(name))
    stage.play()
    assert len(tokens) == len(set(tokens))


class TestMutants:
    """The races find the classic mistakes; each is put in on purpose."""

    def _found(self, monkeypatch: pytest.MonkeyPatch, name: str, replacement: object) -> None:
        monkeypatch.setattr(SlotLog, name, replacement)
        run = settings(RACE, max_examples=1000, database=None, phases=[Phase.generate])
        race: Any = test_drivers_and_restorers_race_without_harm
        hunt = run(given(SCRIPT)(race.hypothesis.inner_test))
        with pytest.raises((AssertionError, TidegateError, BaseExceptionGroup)):
            hunt()

    def test_sealing_without_the_condition(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A plain PUT overwrites someone's epoch, and the races see it."""
        self._found(monkeypatch, "_send_record", lambda log, key, data: log.store.put(key, data))

    def test_taking_a_412_for_a_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without reading back, the repetition of a successful PUT is reported as a loss."""
        from tidegate.checkpoints.slot_log import SlotTaken

        monkeypatch.setattr(
            SlotLog,
            "_decide_outcome",
            lambda log, record, mine, filled: SlotTaken(filled.record, filled.sha256, filled.etag),
        )
        self._found(monkeypatch, "_refuse_unconserved_rows", lambda log, record: None)

    def test_taking_an_unknown_outcome_for_a_success(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Believing in a PUT whose answer was lost tells fates the slot does not hold."""
        from tidegate.checkpoints.store import OutcomeUnknownError

        def believing(log: SlotLog, key: str, data: bytes) -> str | None:
            try:
                return log.store.create(key, data)
            except OutcomeUnknownError:
                return "surely"
            except TidegateError:
                return None

        self._found(monkeypatch, "_send_record", believing)


def test_an_actor_that_errs_is_reported() -> None:
    """The stage hides crashes and our own errors, but no defect of the code under test."""
    stage = Stage(b"")

    def body(store: MemoryStore, clock: Clock) -> None:
        raise ZeroDivisionError

    stage.actor("one", body)
    with pytest.raises(ZeroDivisionError):
        stage.play()
    quiet = Stage(b"")

    def refused(store: MemoryStore, clock: Clock) -> None:
        raise ConfigurationError("no", code="x")

    quiet.actor("one", refused)
    quiet.play()
