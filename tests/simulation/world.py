"""One OS thread, many actors.

A seeded scheduler, a virtual clock, a store and everything that may go wrong with them.

Each actor is a greenlet that runs real code. It hands the baton back at every request and every
sleep; a seed decides who goes on, what becomes of the request, who is killed and who falls asleep.
The same seed gives the same schedule.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet
from tests.simulation.basics import LATENCY, NEVER, Crash, Violation
from tests.simulation.coverage import CELLS, DISK, KINDS, POINT, STEPS, step_of
from tests.simulation.protocol_trace import TraceJudge
from tests.simulation.storage import SimBucket

from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.errors import TidegateError

# A quarter of the seeds are cruel to one of these steps, a quarter to any cell of the table.
CRUEL = tuple(
    (kind, step)
    for step in (
        "seal",
        "fork",
        "claim",
        "condemn",
        "lease",
        "commit",
        "replace",
        "sweep",
        "sink apply",
        "sink mark",
    )
    for kind in ("sleep", "sleep", "late", "lost answer", "retried", "crash after", "crash")
    if (kind, step) in CELLS
)
CRUELTY = 0.3  # chance of the fault that a seed is about
NAPS = (
    0.5,
    3.0,
    8.0,
    30.0,
    120.0,
    4000.0,
    NEVER,
)  # seconds; forever means: until everyone else has ended


@dataclass(eq=False)
class Process:
    """A process on a host: it dies and sleeps as a whole."""

    name: str
    host: int
    pid: int
    world: World
    asleep_until: float = 0.0
    denied_until: float = 0.0  # the store refuses its keys
    repeated_probes: set[str] = field(default_factory=set)  # whose writes a proxy has repeated
    refusals: list[float] = field(default_factory=list)  # that its loop met since the last epoch
    busy_until: float = 0.0  # its disk is slow, and the step in time
    runs: bool = False  # its loop has begun
    calm_since: float = NEVER  # it runs, and nothing has gone wrong with what it did
    version: str = "2"  # of tidegate; the older one, "1", cannot read what the newer one seals
    step: str = "start"
    exited: str = ""
    error: TidegateError | None = None
    outcome: str = ""  # of a driver: the state in which its run ended
    handlers: dict[int, Callable[[int, object], None]] = field(default_factory=dict)  # of signals
    watchers: list[Actor] = field(default_factory=list)  # who waits for its end
    _alive: bool = True

    @property
    def alive(self) -> bool:
        """Whether its threads run."""
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        self._alive = alive
        self.world.died = True
        for actor in self.watchers:
            actor.wake = self.world.now
        self.watchers.clear()

    @property
    def holder(self) -> ProcessIdentity:
        """The content of the lease."""
        return ProcessIdentity(
            driver=self.name,
            host=f"host{self.host}",
            boot="b",
            namespace="n",
            pid=self.pid,
            start_ticks=self.pid,
        )


@dataclass(eq=False)
class Actor:
    """A thread of a process."""

    name: str
    process: Process
    thread: greenlet
    wake: float = 0.0
    role: str = "driver"
    seen: tuple[int, str] = (0, "")


@dataclass
class Rule:
    """A line of a scripted schedule: what happens to the n-th matching request of a process.

    `fault` is a kind of fault, or a condition: then the process (or with `wedge` this thread alone)
    sleeps until it holds.
    """

    process: str
    verb: str
    part: str
    fault: str | Callable[[], bool]
    nth: int = 1
    fired: bool = False
    wedge: bool = False

    def meets(self, process: str, verb: str, key: str) -> bool:
        """Whether this is the request it waits for."""
        fits = verb == self.verb or (
            self.verb == "fill" and verb in ("create", "put")
        )  # a mutant puts where the code creates
        if self.fired or process != self.process or not fits or self.part not in key:
            return False
        self.nth -= 1
        self.fired = self.nth == 0
        return self.fired


class World:
    """Everything of one schedule.

    Attributes:
        rate: chance that something goes wrong with a request.
        focus: (kind, step) that this schedule is about.
        faults: (kind, step) -> how often.
        states: hashes of the states seen.
        late: writes that are still on their way: what, and how it takes effect.
    """

    def __init__(
        self,
        seed: int,
        *,
        rate: float | None = None,
        states: set[int] | None = None,
        focus: tuple[str, str] | None = None,
    ) -> None:
        Violation.newest = None
        self.rng = Random(seed)
        self.seed = seed
        self.rate = (
            self.rng.choice((0.0, 0.01, 0.03) if focus else (0.0, 0.01, 0.03, 0.1, 0.2))
            if rate is None
            else rate
        )
        drawn = self.rng.choice(
            (("", ""), ("", ""), self.rng.choice(CRUEL), self.rng.choice(CELLS))
        )
        self.focus = drawn if focus is None else focus
        self.now = 1000.0
        self.steps = 0
        self.faults: Counter[tuple[str, str]] = Counter()
        self.states = states if states is not None else set()
        self.rules: list[Rule] = []
        self.bucket = SimBucket(self)
        self.table_files: Callable[[], set[str]] = set
        self.late: list[tuple[str, Callable[[], None]]] = []
        self.actors: list[Actor] = []
        self.processes: list[Process] = []
        self.slot_marks: tuple[Any, ...] = ()
        self._marks: dict[str, object] = {}
        self.stamp = 0
        self.waits: dict[Process, Callable[[], bool]] = {}
        self.calm = False
        self.damaged: set[str] = set()  # keys of slots that a script has damaged
        self.lost: set[str] = set()  # keys of files of epochs that were damaged where they lie
        self.garbled: set[str] = set()  # keys of documents that only a person can mend
        self.hopeless = False  # only a person can help
        self.defects = 0  # exceptions that no code expects, put in on purpose
        self.housekeeping_every = NEVER  # seconds between two rounds of a driver's own housekeeping
        self.stage: Any = None
        self.catalog: Any = None
        self.judge = TraceJudge()
        self.trace: list[str] | None = None
        self.violation: Violation | None = None
        self.died = False
        self._main = getcurrent()
        self._running: Actor | None = None
        self._pids = count(100)
        self._clocks = [SimClock(self, host) for host in range(4)]
        self._offsets = [self.rng.uniform(-500, 500) for _ in range(4)]
        self.skews = [
            self.rng.choice((0, 0, 5_000_000, -90_000_000, 3_600_000_000)) for _ in range(4)
        ]

    # processes and actors

    def process(self, name: str, host: int = 0) -> Process:
        """A new process."""
        process = Process(name, host, next(self._pids), self)
        self.processes.append(process)
        return process

    def spawn(
        self,
        name: str,
        process: Process,
        body: Callable[[], None],
        role: str = "driver",
        delay: float = 0.0,
    ) -> Actor:
        """A new actor; it begins when the scheduler chooses it."""

        def run() -> None:
            try:
                body()
            except Crash:
                pass
            except TidegateError as error:
                process.exited = f"{type(error).__name__}: {error}"
                process.alive = False
                self.note(f"{name} ends: {process.exited}")
            except Violation as found:
                self.violation = self.violation or found

        actor = Actor(name, process, greenlet(run, self._main), self.now + delay, role)
        self.actors.append(actor)
        return actor

    def kill(self, process: Process) -> None:
        """Every thread of it ends here."""
        process.alive = False
        self.note(f"{process.name} killed")
        if self._running is not None and self._running.process is process:
            raise Crash

    def dead(self, holder: ProcessIdentity) -> bool:
        """What an observer on the same host can prove (replaces /proc)."""
        me = self.current()
        if me is None or holder.host != f"host{me.process.host}":
            return False
        return any(p.pid == holder.pid and not p.alive for p in self.processes)

    def current(self) -> Actor | None:
        """Who has the baton; no one while the scheduler has it."""
        return self._running

    def current_process(self) -> Process:
        """The process of the thread that has the baton."""
        assert self._running is not None
        return self._running.process

    def clock(self) -> SimClock:
        """The clock of the host on which whoever has the baton runs; the judge's is the first."""
        return self._clocks[self._running.process.host if self._running else 0]

    def note(self, line: str) -> None:
        """A line of the story, if anybody listens."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.2f} {line}")

    # the scheduler

    def run(self, limit: int = 4000, until: Callable[[], bool] = lambda: False) -> None:
        """Until no one is left, or `until`, or `limit` steps."""
        for _ in range(limit):
            if self.died:
                self.bury()
            self.violation = self.violation or Violation.newest
            if not self.actors or until() or self.violation is not None:
                break
            self._next()
        self.violation = self.violation or Violation.newest
        if self.violation is not None:
            raise self.violation

    def bury(self) -> None:
        """Unwind the threads of dead processes."""
        while self.died:
            self.died = False
            for actor in self.actors:
                if not actor.process.alive and actor.thread:  # started, and not at its end
                    self._switch(actor, Crash)
            self.actors = [a for a in self.actors if a.process.alive and not a.thread.dead]

    def _next(self) -> None:
        """Let someone go on who is ready; if no one is, let time pass first."""
        if self.waits:
            self._wake_waiting()
        ready = self._list_ready()
        if (
            self.late
            and (self.rate > 0 or self.focus[0])
            and not self.calm
            and self.rng.random() < 0.02
        ):
            self.deliver()
        actor = ready[int(self.rng.random() * len(ready))] if len(ready) > 1 else ready[0]
        self.steps += 1
        self.now += 1e-5
        self._switch(actor)
        if actor.thread.dead:
            self.actors.remove(actor)
        seen = self.stamp, actor.process.step
        if actor.seen != seen:
            actor.seen = seen
            self.states.add(hash((self.stamp, *[(a.name, a.process.step) for a in self.actors])))

    def mark(self, what: str, how: object) -> None:
        """Note what the bucket or a table looks like now: a part of the state."""
        self._marks[what] = how
        self.stamp = hash(tuple(self._marks.items()))

    def _switch(self, actor: Actor, error: type[BaseException] | None = None) -> None:
        self._running = actor
        try:
            _ = actor.thread.switch() if error is None else actor.thread.throw(error)
        finally:
            self._running = None

    def _list_ready(self) -> list[Actor]:
        """Who may go on now; if no one may, time passes until someone may."""
        actors = self.actors
        times = [
            asleep if (asleep := actor.process.asleep_until) > actor.wake else actor.wake
            for actor in actors
        ]
        soonest, now = min(times), self.now
        if soonest == NEVER:  # only sleepers are left
            self._wake_sleepers()
            return self._list_ready()
        if soonest > now:
            self.now = now = soonest
            if times.count(soonest) == 1:  # as most often
                return [actors[times.index(soonest)]]
        return [actor for actor, at in zip(actors, times, strict=True) if at <= now]

    def _wake_sleepers(self) -> None:
        """Wake them long after everything.

        Raises:
            RuntimeError: each of them waits for another one.
        """
        self.now += 10_000.0
        for actor in self.actors:
            self.wake(actor.process)
        if all(actor.wake > self.now for actor in self.actors):
            raise RuntimeError(f"no one will ever wake: {[actor.name for actor in self.actors]}")

    def wake(self, process: Process) -> None:
        """A sleeper goes on, with all its threads; what it was asked meanwhile it could not answer."""
        process.asleep_until = min(process.asleep_until, self.now)
        self.waits.pop(process, None)
        self._disturb(process)

    def _wake_waiting(self) -> None:
        for process, condition in [*self.waits.items()]:
            if condition():
                self.note(f"{process.name} wakes")
                process.asleep_until = self.now
                del self.waits[process]

    def deliver(self) -> None:
        """A write that was on its way arrives."""
        what, arrive = self.late.pop(self.rng.randrange(len(self.late)))
        self.note(f"late: {what}")
        arrive()

    def travel(self) -> None:
        """A request is on its way; others go on meanwhile."""
        self.pause(self.now + LATENCY)

    def pause(self, until: float) -> None:
        """The current actor hands the baton back."""
        actor = self._running
        if actor is None:
            self.now = max(self.now, until)
            return
        if not actor.process.alive:
            raise Crash
        actor.wake = until
        self._main.switch()
        if not actor.process.alive:
            raise Crash

    # faults

    def fate(self, verb: str, key: str, kinds: tuple[str, ...]) -> str:
        """What happens to this request: a kind of fault, or nothing."""
        actor = self._running
        if actor is None:
            return ""
        for rule in self.rules:
            if rule.meets(actor.process.name, verb, key):
                return self._scripted(actor, rule)
        if self.calm:
            return ""
        kind, where = self.focus
        if kind and kind in kinds and step_of(actor.role, actor.process.step, verb, key) == where:
            if self.rng.random() >= CRUELTY:
                return ""
        elif self.rng.random() < self.rate:
            kind = kinds[int(self.rng.random() * len(kinds))]
        else:
            return ""
        return self._noted(actor, kind, verb, key)

    def _noted(self, actor: Actor, kind: str, verb: str, key: str) -> str:
        step = step_of(actor.role, actor.process.step, verb, key)
        self.faults[kind, step] += 1
        self._disturb(actor.process)
        self.note(f"{actor.name}: {kind} at {verb} {key} in {step}")
        return kind

    def _disturb(self, process: Process) -> None:
        if process.runs:
            asleep = process.asleep_until if process.asleep_until < NEVER else 0.0
            process.calm_since = max(self.now, process.denied_until, process.busy_until, asleep)

    def _scripted(self, actor: Actor, rule: Rule) -> str:
        self._disturb(actor.process)
        if isinstance(rule.fault, str):
            self.note(f"{actor.name}: {rule.fault} at {rule.verb} {rule.part}")
            return rule.fault
        self.note(f"{actor.name}: sleeps at {rule.verb} {rule.part}")
        if rule.wedge:
            while not rule.fault():
                self.pause(self.now + 1.0)
            return ""
        actor.process.asleep_until = NEVER
        self.waits[actor.process] = rule.fault
        self.pause(self.now)
        self._disturb(actor.process)
        return ""

    def endure(self, kind: str) -> None:
        """The faults that hit a process rather than a request."""
        actor = self._running
        if actor is None:
            return
        if kind == "crash":
            self.kill(actor.process)
        elif kind == "sleep":
            nap = self.rng.choice(NAPS)
            actor.process.asleep_until = self.now + nap
            self._disturb(actor.process)
            self.pause(self.now)
        elif kind == "clock jump":
            self.skews[actor.process.host] += self.rng.choice(
                (-7_200_000_000, 60_000_000, 86_400_000_000)
            )
        elif kind in ("slow", "slow answer"):
            self.pause(self.now + self.rng.choice((0.3, 2.0, 7.0, 20.0)))
        elif kind == "slow disk":  # within every step's time
            actor.process.busy_until = self.now + self.rng.choice((5.0, 30.0, 100.0))
            self._disturb(actor.process)  # before its other threads are judged meanwhile
            self.pause(actor.process.busy_until)
        self._disturb(actor.process)
        if kind == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch")

    def deny(self) -> None:
        """The keys of the current process are refused, once or for a while."""
        process = self.current_process()
        process.denied_until = self.now + self.rng.choice((0.0, 0.0, 5.0, 40.0))
        self._disturb(process)

    def reach(self, point: str) -> None:
        """Fault points of the engine: also between two requests a process may die."""
        actor = self._running
        if actor is None:
            return
        driver = actor.role == "driver"  # the publisher's threads have points as well
        if driver:
            actor.process.step = point.partition(".")[0]
        disk = driver and DISK in STEPS.get(actor.process.step, ())
        kind = self.fate("point", point, KINDS[DISK if disk else POINT])
        if kind:
            self.endure(kind)


class SimClock(Clock):
    """A host's clock: its own zero, its own idea of the date."""

    def __init__(self, world: World, host: int) -> None:
        self.world, self.host = world, host

    def monotonic(self) -> float:
        """Seconds since this host started."""
        return self.world.now + self.world._offsets[self.host]

    def wall_ticks(self) -> int:
        """Microseconds since 1970, as this host believes."""
        return 1_750_000_000_000_000 + int(self.world.now * 1_000_000) + self.world.skews[self.host]

    def sleep(self, seconds: float) -> None:
        """Others go on meanwhile."""
        self.world.pause(self.world.now + max(seconds, 1e-6))
