"""The driver's loop: what ends a run, and what it must not miss before it ends."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Bench, PlainSteps, row, spec_of
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.checkpoints.bucket_layout import generate_attempt_id
from tidegate.checkpoints.driver_requests import RequestKind, read_ack, submit_request
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import FencedError, PoisonError, TransientError
from tidegate.jobs.driver import epoch_loop
from tidegate.jobs.driver.epoch_loop import EndConditions, EpochLoop
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.engine.epoch_engine import EpochReport, EpochRequests
from tidegate.jobs.engine.interfaces import NoFaults
from tidegate.jobs.engine.publisher import Publisher


class LoopSteps(PlainSteps):
    """Steps of a driver whose lease a test may take away."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.lost_lease = threading.Event()
        self.error: FencedError | None = None

    def enter(self, name: str) -> None:
        """No one to tell."""

    def begin_epoch(self) -> None:
        """Nothing to forget."""

    def require_not_lost(self) -> None:
        """As the real ones do."""
        if self.lost_lease.is_set():
            assert self.error is not None
            raise self.error


class Status:
    """Keeps what the driver says about itself."""

    def __init__(self) -> None:
        self.state = ""
        self.said: list[tuple[str, str]] = []

    def set_state(self, state: str, *, error: Any = None, why: str | None = None) -> None:
        """Note a state and its reason."""
        self.state = state
        self.said.append((state, why or ""))

    def write(self) -> None:
        """Nothing to write."""

    def record_decision(self, decision: Any, held_back: Any) -> None:
        """Nothing to show."""

    def record_epoch(self, manifest: Any, seconds: float) -> None:
        """Nothing to show."""


class TableSink:
    """Follows the log; `away` failures come first, and each tells how far it was."""

    def __init__(self, name: str = "table") -> None:
        self.name = name
        self.upto = 0
        self.away: Callable[[], bool] = lambda: False

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Go to the head, unless the sink is away."""
        if self.away():
            raise TransientError("the table is away", code="sink.unavailable")
        self.upto = log.head().slot
        return 1

    def lag(self, log: SlotLog) -> int:
        """Slots that are missing."""
        return log.head().slot - self.upto


class Stop(threading.Event):
    """Waiting moves the clock; `between` runs at each wait, with its number."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self._shell, self._waits = shell, 0

    def wait(self, timeout: float | None = None) -> bool:
        """Let the time pass, and run what the test planned for it."""
        self._shell.bench.clock.advance(timeout or 0.0)
        self._waits += 1
        self._shell.between(self._waits)
        return self.is_set()


class Shell:
    """The real loop, engine, publisher and inbox of one driver, on a memory store."""

    def __init__(self, until: EndConditions | None = None, **fields: Any) -> None:
        self.bench = Bench(spec_of(**fields), MemoryStore())
        self.steps, self.status, self.sink = LoopSteps(self.bench.clock), Status(), TableSink()
        self.engine = self.bench.engine(steps=self.steps)
        self.stop: threading.Event = Stop(self)
        self.between: Callable[[int], None] = lambda number: None
        self.reports: list[EpochReport] = []
        self.publisher = Publisher([self.sink], self.engine._log, NoFaults())
        clock = self.bench.clock
        inbox = RequestInbox(
            self.bench.store,
            self.bench.spec,
            lambda: self.steps.token,
            self.stop,
            lambda: self.engine.resume_state.head.record,
            clock,
        )
        self.steps.require_lease = lambda: self.steps.token  # type: ignore[method-assign]
        self.loop = EpochLoop(
            self.engine,
            self.publisher,
            until or EndConditions(),
            self.bench.spec,
            self.steps,  # type: ignore[arg-type]
            self.status,  # type: ignore[arg-type]
            inbox,
            self.stop,
            NoFaults(),
            lambda report, seconds: self.reports.append(report),
            clock.monotonic,
        )

    def feed(self, *seconds: float, end: bool = False) -> None:
        """Rows for both sources."""
        for source in self.bench.sources.values():
            source.append(*[row(second) for second in seconds])
            if end:
                source.end()

    def run(self) -> Any:
        """Run to the end, with the publisher's thread beside it."""
        head = self.engine.resume_state.head
        self.publisher.start(head.timeline, head.slot)
        try:
            return self.loop.run()
        finally:
            self.publisher.stop()

    def late_seal(self) -> None:
        """Let the next PUT of a slot go without an answer; it is delivered by the test."""
        self.engine._log._seal_budget = 0.0
        sent: list[int] = []

        def hook(request: StoreRequest) -> Fault | None:
            if request.verb == "create" and "/slots/" in request.key and not sent:
                sent.append(1)
                return Fault.LATE
            return None

        assert isinstance(self.bench.store, MemoryStore)
        self.bench.store.hook = hook

    def deliver(self) -> None:
        """Let the late PUT arrive."""
        assert isinstance(self.bench.store, MemoryStore)
        self.bench.store.bucket.deliver_held()


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_loop, "_SINK_POLL_INTERVAL", 0.01)


def test_a_bounded_run_reads_what_a_lost_last_slot_left() -> None:
    """A run is not finished while its last epoch has lost the slot to an earlier attempt."""
    shell = Shell()
    shell.feed(1, 2)
    shell.late_seal()
    seal = shell.engine._log.seal

    def seal_after_late_put(record: Any) -> Any:
        if shell.reports or len(sealed) != 1:
            sealed.append(record)
            return seal(record)
        sealed.append(record)
        shell.deliver()  # the first attempt's PUT arrives while the second is being sealed
        return seal(record)

    sealed: list[Any] = []
    shell.engine._log.seal = seal_after_late_put  # type: ignore[method-assign]

    def producer(number: int) -> None:
        if number == 1:
            shell.feed(3, 4, 5, end=True)

    shell.between = producer
    outcome = shell.run()
    assert outcome.state == "finished"
    assert any(report.lost for report in shell.reports)
    counters = shell.bench.epochs()[-1].counters
    assert counters.read == 10
    assert shell.sink.upto == shell.bench.log.head().slot


def test_an_epoch_sealed_without_an_answer_is_published() -> None:
    """A slot whose PUT arrives late reaches the sinks although no new row comes."""
    shell = Shell()
    shell.feed(1, 2)
    shell.late_seal()

    def world(number: int) -> None:
        if number == 1:
            shell.deliver()
        if number > 3 and shell.publisher.drain(5.0):
            shell.stop.set()

    shell.between = world
    assert shell.run().state == "stopped"
    assert shell.bench.log.head().slot == 1
    assert shell.sink.upto == 1


def test_a_slot_of_another_process_is_published_on_a_quiet_stream() -> None:
    """An idle driver looks at the head now and then, and its sinks follow."""
    shell = Shell(coalesce={"idle_timeout": "never"})
    shell.feed(1)
    other: list[int] = []

    def world(number: int) -> None:
        if number == 3:
            report = shell.bench.engine().run_epoch(EpochRequests(ids=("merge",)))
            other.append(report.sealed.slot if report.sealed else 0)
        if number > 90:
            assert shell.publisher.drain(5.0)
            shell.stop.set()

    shell.between = world
    shell.run()
    assert other == [2]
    assert shell.sink.upto == 2


def test_finished_waits_for_the_sinks() -> None:
    """A bounded run says "finished" only when every sink has every epoch."""
    shell = Shell()
    shell.feed(1, 2, end=True)
    shell.sink.away = lambda: not any("not in every sink" in why for _, why in shell.status.said)
    assert shell.run().state == "finished"
    assert shell.sink.upto == shell.bench.log.head().slot
    assert any("table (1)" in why for _, why in shell.status.said)


def test_an_epoch_sealed_between_two_looks_at_the_head_is_published() -> None:
    """The sinks begin with one head; another driver seals the rest before the engine reads its own."""
    shell = Shell()
    shell.publisher.start(0, 0)
    while not shell.publisher.publish_seconds:
        pass
    shell.feed(1, 2, end=True)
    shell.bench.engine().run_epoch()
    shell.engine.reload()
    assert shell.loop.run().state == "finished"
    shell.publisher.stop()
    assert shell.sink.upto == shell.bench.log.head().slot == 1


def test_finished_waits_for_a_merge_that_was_sealed_behind_the_last_epoch() -> None:
    """The merge fills a slot when the sinks have followed the last epoch."""
    shell = Shell()
    shell.feed(1, 2, end=True)
    follow, log = shell.sink.follow, shell.bench.log

    def follow_before_merge(log: SlotLog, *, flush: bool = True) -> int:
        count, head = follow(log, flush=flush), log.head()
        if head.slot == 1:
            assert head.record is not None
            facts = {"slot": 2, "attempt": generate_attempt_id(), "parent": str(head.record.id)}
            merge = head.record.model_copy(update={**facts, "parent_sha256": head.sha256})
            assert isinstance(log.seal(merge), Sealed)
        return count

    shell.sink.follow = follow_before_merge  # type: ignore[method-assign]
    assert shell.run().state == "finished"
    assert shell.sink.upto == log.head().slot == 2


def test_a_run_whose_lease_was_taken_does_not_call_itself_finished() -> None:
    """Another driver seals while the sinks follow the last epoch; what is left is its work."""
    shell = Shell()
    shell.feed(1, 2, end=True)
    follow = shell.sink.follow

    def follow_and_lose(log: SlotLog, *, flush: bool = True) -> int:
        count = follow(log, flush=flush)
        if log.head().slot == 1:
            shell.bench.engine().run_epoch(EpochRequests(ids=("asked",)))
            shell.steps.error = FencedError("taken", code="lease.lost")
            shell.steps.lost_lease.set()
        return count

    shell.sink.follow = follow_and_lose  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        shell.run()


def test_a_finished_run_that_waits_for_a_sink_does_what_it_is_asked() -> None:
    """A savepoint needs an epoch, and the wait may take as long as the sink is away."""
    shell = Shell()
    shell.feed(1, 2, end=True)
    store, clock = shell.bench.store, shell.bench.clock
    shell.sink.away = lambda: shell.bench.log.head().slot < 2
    collect, looks = shell.loop.inbox.collect, []

    def ask_on_third_look() -> EpochRequests:
        looks.append(1)
        if len(looks) == 3:
            submit_request(
                store,
                "p",
                RequestKind.SAVEPOINT,
                who="ann",
                name="now",
                request_id="s",
                clock=clock,
            )
        if len(looks) == 1000:
            shell.stop.set()
        return collect()

    shell.loop.inbox.collect = ask_on_third_look  # type: ignore[method-assign]
    assert shell.run().state == "finished"
    ack = read_ack(store, "p", "s")
    assert ack is not None
    assert ack.outcome == "applied"
    assert shell.sink.upto == 2


def test_what_is_met_behind_a_full_disk_is_not_taken_for_one() -> None:
    """The head that is read again after the wait is damaged; that needs a person, not room."""
    shell = Shell()
    shell.feed(1)
    run_epoch = shell.engine.run_epoch

    def fill_disk_behind_epoch(*asked: Any, **named: Any) -> EpochReport:
        if shell.reports:
            shell.bench.store.put(shell.bench.log.layout.slot_key(0, 1), b"{")
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch")
        return run_epoch(*asked, **named)

    shell.engine.run_epoch = fill_disk_behind_epoch  # type: ignore[method-assign]
    with pytest.raises(PoisonError) as raised:
        shell.run()
    assert classify_error("p", raised.value).code == "manifest.malformed"


def test_a_stop_while_a_merge_has_the_next_slot_is_no_end_of_the_sources() -> None:
    """What the merge seals afterwards is in no sink, so another driver has to start."""
    shell = Shell()
    shell.feed(1, 2, end=True)
    store, clock = shell.bench.store, shell.bench.clock
    run_epoch = shell.engine.run_epoch

    def hold_behind_epoch(*asked: Any, **named: Any) -> EpochReport:
        report = run_epoch(*asked, **named)
        submit_request(store, "p", RequestKind.HOLD, who="ann", name="m", ttl=1e9, clock=clock)
        return report

    shell.engine.run_epoch = hold_behind_epoch  # type: ignore[method-assign]
    shell.between = lambda number: shell.stop.set()
    outcome = shell.run()
    assert outcome.state == "stopped"
    assert outcome.why == "asked to stop before a merge had filled the next slot"


def test_a_stop_ends_the_wait_of_a_finished_run() -> None:
    """A stop request is heard while a finished run waits for a sink; the run is then "stopped"."""
    shell = Shell()
    shell.feed(1, 2, end=True)
    shell.sink.away = lambda: True
    submit_request(
        shell.bench.store,
        "p",
        RequestKind.STOP,
        token=1,
        who="ann",
        request_id="late",
        clock=shell.bench.clock,
    )
    inbox = shell.loop.inbox
    inbox.collect = _ignore_first(inbox.collect)  # type: ignore[method-assign]
    assert shell.run().state == "stopped"


def _ignore_first(collect: Callable[[], Any]) -> Callable[[], Any]:
    """Hide requests from the first look, as if they came later."""
    looks: list[int] = []

    def later() -> Any:
        looks.append(1)
        return collect() if len(looks) > 1 else EpochRequests()

    return later


@pytest.mark.parametrize("kind", [RequestKind.STOP, RequestKind.DRAIN])
def test_a_stop_is_heard_while_a_sink_is_away(kind: RequestKind) -> None:
    """Stop and drain end a driver that waits for a sink, and it runs no further epoch."""
    shell = Shell(outputs={"max_unpublished": 1})
    shell.feed(1)
    shell.sink.away = lambda: True

    def world(number: int) -> None:
        shell.feed(number + 1)

    shell.between = world
    asked: list[int] = []
    collect = shell.loop.inbox.collect

    def collect_in_wait() -> Any:
        if shell.status.state == "waiting" and not asked:
            asked.append(shell.bench.log.head().slot)
            submit_request(
                shell.bench.store,
                "p",
                kind,
                token=1,
                who="ann",
                request_id="r",
                clock=shell.bench.clock,
            )
        return collect()

    shell.loop.inbox.collect = collect_in_wait  # type: ignore[method-assign]
    assert shell.run().state == "stopped"
    assert asked == [shell.bench.log.head().slot]


def test_a_lost_lease_is_seen_while_a_sink_is_away() -> None:
    """An evicted driver does not stay until the sink is back."""
    shell = Shell(outputs={"max_unpublished": 1})
    shell.feed(1)
    shell.sink.away = lambda: True
    shell.between = lambda number: shell.feed(number + 1)
    set_state = shell.status.set_state

    def evict(state: str, **why: Any) -> None:
        set_state(state, **why)
        if state == "waiting":
            shell.steps.error = FencedError("gone", code="lease.lost")
            shell.steps.lost_lease.set()

    shell.status.set_state = evict  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="gone"):
        shell.run()


def test_an_outage_is_not_silence() -> None:
    """`--until-idle` does not end a run on the ground of time in which the store was away."""
    shell = Shell(until=EndConditions(idle=0.5))
    shell.feed(1, 2, 3)
    failures: list[int] = []

    def hook(request: StoreRequest) -> Fault | None:
        if threading.current_thread() is not threading.main_thread():
            return None
        failures.append(1)
        return Fault.REFUSED if len(failures) <= 3 else None

    assert isinstance(shell.bench.store, MemoryStore)
    shell.bench.store.hook = hook
    outcome = shell.run()
    assert outcome.why == "no row for 0.5 s"
    assert shell.bench.epochs()[-1].counters.read == 6


def test_a_sink_that_catches_up_does_not_hold_the_driver() -> None:
    """A new sink on an old pipeline, slow but getting on, lets the driver seal."""
    shell = Shell(outputs={"max_unpublished": 2}, checkpoint={"idle_epochs": "always"})
    engine = shell.bench.engine()
    for second in range(6):
        shell.feed(second)
        engine.run_epoch()
    shell.engine.reload()
    caught_up = threading.Event()
    follow = shell.sink.follow

    def follow_slowly(log: SlotLog, *, flush: bool = True) -> int:
        if shell.sink.upto < 3:
            shell.sink.upto += 1
            raise TransientError("one part failed", code="sink.unavailable")
        caught_up.wait(30.0)
        return follow(log, flush=flush)

    shell.sink.follow = follow_slowly  # type: ignore[method-assign]

    def world(number: int) -> None:
        shell.feed(10 + number)
        if number == 5:
            shell.stop.set()
            caught_up.set()

    shell.between = world
    shell.run()
    assert shell.bench.log.head().slot >= 11
    assert not any(state == "waiting" for state, _ in shell.status.said)


def test_a_stuck_new_sink_holds_the_driver() -> None:
    """A sink that fails twice without applying an epoch counts as away, also at its first start."""
    shell = Shell(outputs={"max_unpublished": 1})
    shell.feed(1)
    shell.bench.engine().run_epoch()
    shell.engine.reload()
    shell.sink.away = lambda: True
    shell.between = lambda number: shell.feed(number + 1)
    set_state = shell.status.set_state

    def stop_when_waiting(state: str, **why: Any) -> None:
        set_state(state, **why)
        if state == "waiting":
            shell.stop.set()

    shell.status.set_state = stop_when_waiting  # type: ignore[method-assign]
    assert shell.run().state == "stopped"


def _deny(shell: Shell, seconds: float) -> None:
    """The store refuses the driver's main thread from the second epoch on, for some seconds."""
    begun: list[float] = []

    def hook(request: StoreRequest) -> Fault | None:
        if threading.current_thread() is not threading.main_thread() or not shell.reports:
            return None
        now = shell.bench.clock.monotonic()
        begun.append(now)
        if now - begun[0] < seconds:
            raise StoreDeniedError("403 ExpiredToken", code="store.denied")
        return None

    assert isinstance(shell.bench.store, MemoryStore)
    shell.bench.store.hook = hook


def test_a_store_that_refuses_a_running_driver_is_waited_for() -> None:
    """Keys that expire, or a policy that is rolled out, do not end a running stream."""
    shell = Shell(until=EndConditions(epochs=2))
    shell.feed(1)
    shell.between = lambda number: shell.feed(number + 1)
    _deny(shell, 300.0)
    assert shell.run().why == "2 epochs were asked for"
    assert ("waiting", "trying again by itself, for 10 minutes") in shell.status.said


def test_a_store_that_goes_on_refusing_ends_the_run() -> None:
    """A key that was withdrawn is an error of the configuration after ten minutes."""
    shell = Shell()
    shell.feed(1)
    _deny(shell, float("inf"))
    begun = shell.bench.clock.monotonic()
    with pytest.raises(StoreDeniedError, match="ExpiredToken"):
        shell.run()
    assert 600.0 <= shell.bench.clock.monotonic() - begun <= 700.0


def test_time_in_which_no_one_asked_is_no_refusal() -> None:
    """A host that slept for hours between two refusals has not been refused for hours."""
    shell = Shell(until=EndConditions(epochs=2))
    shell.feed(1)
    shell.between = lambda number: shell.feed(number + 1)
    _deny(shell, 30.0 + 4 * 3600.0)
    wait, slept = shell.stop.wait, list[float]()

    def sleep_once(seconds: float | None = None) -> bool:
        if shell.status.state == "waiting" and not slept:
            slept.append(4 * 3600.0)
            shell.bench.clock.advance(slept[0])
        return wait(seconds)

    shell.stop.wait = sleep_once  # type: ignore[method-assign, assignment]
    assert shell.run().why == "2 epochs were asked for"


@pytest.mark.parametrize("seed", range(60))
def test_finished_is_complete_whatever_the_store_answers(seed: int) -> None:
    """However requests are lost, late or refused, a run that says "finished" has read every row into
    exactly one epoch, and every sink has every epoch.
    """
    chance = random.Random(seed)
    last = chance.randrange(1, 5)
    shell = Shell()
    shell.engine._log._seal_budget = 0.0
    store = shell.bench.store
    assert isinstance(store, MemoryStore)

    def hook(request: StoreRequest) -> Fault | None:
        if threading.current_thread() is not threading.main_thread():
            return None
        seals = request.verb == "create" and "/slots/" in request.key
        if seals and store.bucket.held and chance.random() < 0.5:
            store.bucket.deliver_held()  # an earlier attempt arrives first
        if chance.random() > (0.4 if seals else 0.02):
            return None
        # What is written before the seal is written once, and has no answer to lose.
        return chance.choice([*Fault, Fault.LATE, Fault.LATE]) if seals else Fault.REFUSED

    def world(number: int) -> None:
        if number <= last:
            shell.feed(*range(2 * number, 2 * number + 2), end=number == last)
        elif number > 60:
            store.hook = None
        while store.bucket.held and chance.random() < 0.3:
            store.bucket.deliver_held()

    shell.between, store.hook = world, hook
    shell.feed(0)
    assert shell.run().state == "finished"
    store.hook = None
    head = shell.bench.log.head()
    assert head.record is not None
    assert head.record.counters.read == 2 * (1 + last * 2)
    assert shell.sink.upto == head.slot
