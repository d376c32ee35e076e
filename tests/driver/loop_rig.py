"""The real loop of a driver on a memory store and an injected clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.engine.harness import Bench, PlainSteps, row, spec_of
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import FencedError, TransientError
from tidegate.jobs.driver.epoch_loop import EndConditions, EpochLoop
from tidegate.jobs.driver.operator_requests import RequestInbox
from tidegate.jobs.engine.epoch_engine import EpochReport
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

    def __init__(self, rig: LoopRig) -> None:
        super().__init__()
        self._rig, self._waits = rig, 0

    def wait(self, timeout: float | None = None) -> bool:
        """Let the time pass, and run what the test planned for it."""
        self._rig.bench.clock.advance(timeout or 0.0)
        self._waits += 1
        self._rig.between(self._waits)
        return self.is_set()


class LoopRig:
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
