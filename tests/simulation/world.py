"""One OS thread, many actors: a seeded scheduler, a virtual clock, a store and everything that may go wrong with them.

Each actor is a greenlet that runs real code. It hands the baton back at every request and every sleep; a seed decides who goes
on, what becomes of the request, who is killed and who falls asleep. The same seed gives the same schedule.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from threading import Event
from typing import Any

from greenlet import getcurrent, greenlet

from tidegate.checkpoints.holder import Holder
from tidegate.checkpoints.layout import Layout
from tidegate.checkpoints.memory import MemoryBucket, MemoryStore, Request, etag_of
from tidegate.checkpoints.store import Entry, OutcomeUnknownError, PreconditionFailedError, StoreUnavailableError
from tidegate.jobs.spec.errors import TidegateError

__all__ = ["Actor", "Crash", "Process", "Rule", "SimBucket", "SimClock", "SimStore", "Violation", "World"]

PIPELINE = "p"
LATENCY = 0.004  # virtual seconds a request takes when nothing is wrong
NEVER = float("inf")
READ_FAULTS = ("503", "slow", "sleep", "crash")
WRITE_FAULTS = (
    *("503", "409", "500", "lost request", "lost answer", "late", "twice", "retried"),
    *("slow", "slow answer", "sleep", "crash", "crash after"),
)
STEP_FAULTS = ("crash", "sleep", "clock jump")
FOCI = tuple(  # half of the seeds are cruel to one kind of request
    (part, kind)
    for part in (
        "create p/timelines/0/slots",
        "create p/timelines/1/slots",
        "swap p/roots",
        "p/lease",
        "catalog.commit",
        "delete",
    )
    for kind in ("sleep", "sleep", "late", "lost answer", "retried", "crash after", "crash")
)
NAPS = (0.5, 3.0, 8.0, 30.0, 120.0, 4000.0, NEVER)  # seconds; for ever means: until everybody else has ended


class Crash(BaseException):
    """kill -9: nothing catches it."""


class Violation(Exception):  # noqa: N818 - it is no error of a program but a finding
    """What must never happen has happened."""


@dataclass(eq=False)
class Process:
    """A process on a host: it dies and sleeps as a whole."""

    name: str
    host: int
    pid: int
    alive: bool = True
    asleep_until: float = 0.0
    step: str = "start"
    exited: str = ""
    stop: Event = field(default_factory=Event)
    draining: bool = False  # set by the driver, cleared by its publisher once all that was sealed is published

    @property
    def holder(self) -> Holder:
        """What stands in the lease."""
        return Holder(driver=self.name, host=f"host{self.host}", boot="b", namespace="n", pid=self.pid, start_ticks=self.pid)


@dataclass(eq=False)
class Actor:
    """A thread of a process."""

    name: str
    process: Process
    thread: greenlet
    wake: float = 0.0
    role: str = "driver"

    @property
    def step(self) -> str:
        """Row of the coverage table."""
        return self.process.step if self.role == "driver" else self.role


@dataclass
class Rule:
    """A line of a scripted schedule: what happens to the n-th matching request of a process.

    `fault` is a name of WRITE_FAULTS, or a condition: then the process (or with `wedge` this thread alone) sleeps until it holds.
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
        fits = verb == self.verb or (self.verb == "fill" and verb in ("create", "put"))  # a mutant puts where the code creates
        if self.fired or process != self.process or not fits or self.part not in key:
            return False
        self.nth -= 1
        self.fired = self.nth == 0
        return self.fired


class SimBucket(MemoryBucket):
    """A bucket that watches what must never happen to it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.layout = Layout(PIPELINE)
        self.needs: dict[str, set[str]] = {}  # slot key -> keys its manifest names
        self.records: dict[str, dict[str, Any]] = {}  # slot key -> what was sealed there first
        self.bytes: dict[str, bytes] = {}  # of slots, as first filled

    def apply(self, request: Request) -> str:
        """Let a write take effect, if the bucket may look like that."""
        there = self.objects.get(request.key)
        if request.verb == "delete":
            self._deleting(request.key)
        etag = super().apply(request)
        if "/slots/" in request.key:
            self._filled(request, there)
        elif request.key == self.layout.lease:
            self.world.lease_mark = _lease_mark(request.data or b"{}")
        return etag

    def _filled(self, request: Request, there: bytes | None) -> None:
        data = request.data or b""
        record = json.loads(data)
        if record["kind"] == "stub":
            self.needs.pop(request.key, None)
            return
        if there is not None and there != data:
            raise Violation(f"a filled slot changed: {request.key}")
        self.records[request.key], self.bytes[request.key] = record, data
        self.world.slot_marks = (*self.world.slot_marks, (record["timeline"], record["slot"], record.get("driver", "fork")))
        if record["kind"] == "epoch":
            files = {f["key"] for f in [*record["segments"], *(f for fs in record["files"].values() for f in fs)]}
            missing = sorted(files - self.objects.keys())
            if missing:
                raise Violation(f"slot {record['slot']} of {record['timeline']} was sealed although {missing[0]} is gone")
            self.needs[request.key] = files

    def _deleting(self, key: str) -> None:
        if self.layout.attempt_of(key) is None or key not in self.objects:
            return
        for slot, files in self.needs.items():
            if key in files:
                raise Violation(f"{key} was deleted although {slot} names it")
        if key in self.world.table_files():
            raise Violation(f"{key} was deleted although a table names it")


def _lease_mark(data: bytes) -> tuple[Any, ...]:
    record = json.loads(data)
    return record["token"], record["holder"] and record["holder"]["driver"]


class World:
    """Everything of one schedule.

    Attributes:
        rate: chance that something goes wrong with a request.
        faults: (kind, step) -> how often.
        states: hashes of the states seen.
    """

    def __init__(self, seed: int, *, rate: float | None = None, states: set[int] | None = None) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.rate = self.rng.choice((0.0, 0.01, 0.03, 0.1, 0.2)) if rate is None else rate
        self.focus = self.rng.choice((*FOCI, *[("", "")] * len(FOCI)))
        self.now = 1000.0
        self.steps = 0
        self.faults: Counter[tuple[str, str]] = Counter()
        self.states = states if states is not None else set()
        self.rules: list[Rule] = []
        self.bucket = SimBucket(self)
        self.table_files: Callable[[], set[str]] = set
        self.table_marks: Callable[[], object] = tuple
        self.actors: list[Actor] = []
        self.processes: list[Process] = []
        self.slot_marks: tuple[Any, ...] = ()
        self.lease_mark: tuple[Any, ...] = ()
        self.waits: dict[Process, Callable[[], bool]] = {}
        self.calm = False
        self.failed_pins: set[str] = set()
        self.damaged: set[str] = set()  # keys of slots that a script has damaged
        self.catalog: Any = None
        self.trace: list[str] | None = None
        self.violation: Violation | None = None
        self._main = getcurrent()
        self._pids = count(100)
        self._offsets = [self.rng.uniform(-500, 500) for _ in range(4)]
        self.skews = [self.rng.choice((0, 0, 5_000_000, -90_000_000, 3_600_000_000)) for _ in range(4)]

    # processes and actors

    def process(self, name: str, host: int = 0) -> Process:
        """A new process."""
        process = Process(name, host, next(self._pids))
        self.processes.append(process)
        return process

    def spawn(self, name: str, process: Process, body: Callable[[], None], role: str = "driver", delay: float = 0.0) -> Actor:
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
        if any(a.process is process and a.thread is getcurrent() for a in self.actors):
            raise Crash

    def dead(self, holder: Holder) -> bool:
        """What an observer on the same host can prove (stands in for /proc)."""
        me = self.current()
        if me is None or holder.host != f"host{me.process.host}":
            return False
        return any(p.pid == holder.pid and not p.alive for p in self.processes)

    def current(self) -> Actor | None:
        """Who has the baton."""
        thread = getcurrent()
        return next((a for a in self.actors if a.thread is thread), None)

    def note(self, line: str) -> None:
        """A line of the story, if anybody listens."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.2f} {line}")

    # the scheduler

    def run(self, limit: int = 4000, until: Callable[[], bool] = lambda: False) -> None:
        """Until nobody is left, or `until`, or `limit` steps."""
        for _ in range(limit):
            self._bury()
            if not self.actors or until() or self.violation is not None:
                break
            self._next()
        if self.violation is not None:
            raise self.violation

    def _bury(self) -> None:
        for actor in [a for a in self.actors if not a.process.alive and not a.thread.dead]:
            if actor.thread:  # started: unwind it
                actor.thread.throw(Crash)
            else:
                self.actors.remove(actor)
        self.actors = [a for a in self.actors if not a.thread.dead]

    def _next(self) -> None:
        for process, condition in [*self.waits.items()]:
            if condition():
                self.note(f"{process.name} wakes")
                process.asleep_until = self.now
                del self.waits[process]
        ready = [a for a in self.actors if max(a.wake, a.process.asleep_until) <= self.now]
        if not ready:
            self._advance()
            return
        if self.bucket.held and self.rate > 0 and not self.calm and self.rng.random() < 0.02:
            self.deliver()
        actor = ready[self.rng.randrange(len(ready))] if len(ready) > 1 else ready[0]
        self.steps += 1
        self.now += 1e-5
        actor.thread.switch()
        self.states.add(hash((self.slot_marks, self.lease_mark, self.table_marks(), *((a.name, a.step) for a in self.actors))))

    def _advance(self) -> None:
        soonest = min(max(a.wake, a.process.asleep_until) for a in self.actors)
        if soonest == NEVER:  # only sleepers are left: they wake now, long after everything
            for actor in self.actors:
                actor.process.asleep_until = min(actor.process.asleep_until, self.now)
                self.waits.pop(actor.process, None)
            self.now += 10_000.0
        else:
            self.now = max(self.now, soonest)

    def deliver(self) -> None:
        """A held write arrives."""
        number = self.rng.randrange(len(self.bucket.held))
        self.note(f"late: {self.bucket.held[number].verb} {self.bucket.held[number].key}")
        self.bucket.deliver(number)

    def pause(self, until: float) -> None:
        """The current actor hands the baton back."""
        actor = self.current()
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
        actor = self.current()
        if actor is None:
            return ""
        for rule in self.rules:
            if rule.meets(actor.process.name, verb, key):
                return self._scripted(actor, rule)
        if self.calm:
            return ""
        focused = (
            self.focus[1] != ""
            and verb != "step"
            and self.focus[0] in f"{verb} {key}".replace("put ", "create ")
            and self.rng.random() < 0.3
        )
        if focused and self.focus[1] in kinds:
            kind = self.focus[1]
        elif self.rng.random() < self.rate:
            kind = kinds[self.rng.randrange(len(kinds))]
        else:
            return ""
        self.faults[kind, actor.step] += 1
        self.note(f"{actor.name}: {kind} at {verb} {key} in {actor.step}")
        return kind

    def _scripted(self, actor: Actor, rule: Rule) -> str:
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
        return ""

    def endure(self, kind: str) -> None:
        """The faults that hit a process rather than a request."""
        actor = self.current()
        if actor is None:
            return
        if kind == "crash":
            self.kill(actor.process)
        elif kind == "sleep":
            nap = self.rng.choice(NAPS)
            actor.process.asleep_until = self.now + nap
            self.pause(self.now)
        elif kind == "clock jump":
            self.skews[actor.process.host] += self.rng.choice((-7_200_000_000, 60_000_000, 86_400_000_000))
        elif kind in ("slow", "slow answer"):
            self.pause(self.now + self.rng.choice((0.3, 2.0, 7.0, 20.0)))

    def reach(self, point: str) -> None:
        """Fault points of the engine: also between two requests a process may die."""
        kind = self.fate("step", point, STEP_FAULTS)
        if kind:
            self.endure(kind)


class SimClock:
    """A host's clock: its own zero, its own idea of the date."""

    def __init__(self, world: World, host: int) -> None:
        self.world, self.host = world, host

    def now(self) -> float:
        """Seconds since this host started."""
        return self.world.now + self.world._offsets[self.host]

    def ticks(self) -> int:
        """Microseconds since 1970, as this host believes."""
        return 1_750_000_000_000_000 + int(self.world.now * 1_000_000) + self.world.skews[self.host]

    def sleep(self, seconds: float) -> None:
        """Others go on meanwhile."""
        self.world.pause(self.world.now + max(seconds, 1e-6))


class Baton:
    """A lock between the threads of a process that are all one OS thread here."""

    def __init__(self, world: World) -> None:
        self._world, self._depth = world, 0
        self._owner: object | None = None

    def __enter__(self) -> None:
        me = getcurrent()
        while self._owner is not None and self._owner is not me:
            self._world.pause(self._world.now + 0.01)
        self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None


class SimStore(MemoryStore):
    """One process's way to the bucket."""

    def __init__(self, world: World) -> None:
        super().__init__(world.bucket, name="sim")
        self.world = world

    def list(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> Iterator[Entry]:
        """In pages, each as the bucket stands when it is asked for."""
        left, after = limit if limit is not None else 1 << 60, start_after
        while left > 0:
            size = min(left, 40)
            page = [*super().list(prefix, start_after=after, limit=size)]
            yield from page
            if len(page) < size:
                return
            left, after = left - len(page), page[-1].key

    def _read(self, verb: str, key: str) -> None:
        self._travel()
        kind = self.world.fate(verb, key, READ_FAULTS)
        if kind == "503":
            raise StoreUnavailableError.at(self.uri(key), "503")
        if kind:
            self.world.endure(kind)

    def _write(self, request: Request) -> str:
        self._travel()
        kind = self.world.fate(request.verb, request.key, WRITE_FAULTS)
        if kind == "503":
            raise StoreUnavailableError.at(self.uri(request.key), "503")
        if kind in ("sleep", "crash", "slow"):
            self.world.endure(kind)
        if kind in ("409", "lost request"):
            raise OutcomeUnknownError.at(self.uri(request.key), kind)
        if kind == "late":
            self.bucket.held.append(request)
            raise OutcomeUnknownError.at(self.uri(request.key), kind)
        return self._effect(request, kind)

    def _effect(self, request: Request, kind: str) -> str:
        if kind in ("lost answer", "500", "crash after"):
            with suppress(PreconditionFailedError):
                self.bucket.apply(request)
            if kind == "crash after":
                self.world.endure("crash")
            raise OutcomeUnknownError.at(self.uri(request.key), kind)
        etag = self.bucket.apply(request)
        if kind == "retried" and request.verb in ("create", "swap"):  # the client library asked twice; the second answer counts
            raise PreconditionFailedError.at(request.key, "the first answer", etag)
        if kind == "twice":
            self.bucket.held.append(request)
        if kind == "slow answer":
            self.world.endure(kind)
        return etag

    def _travel(self) -> None:
        self.world.pause(self.world.now + LATENCY)


def etag(data: bytes) -> str:
    """As the bucket gives it."""
    return etag_of(data)
