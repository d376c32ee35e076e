"""What the real code takes from `threading` and `time`, on greenlets and the world's clock.

A thread is an actor of the process that starts it, and every wait hands the baton back. So the
driver's own threads run here as they are written, and a seed decides who goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from signal import Signals
from typing import TYPE_CHECKING

from tests.simulation.basics import NEVER, Violation

if TYPE_CHECKING:
    from tests.simulation.world import Actor, World

ROLES = {
    "tidegate-lease": "lease",
    "tidegate-status": "status",
    "tidegate-housekeeping": "housekeeping",
    "tidegate-publish-iceberg": "publish",
}
"""Name of a thread -> role of its actor; every other thread follows the log with a sink."""


class _Waiters:
    """Actors that wait for something, each until a time of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._waiting: list[Actor] = []

    def wait(self, timeout: float | None) -> None:
        """Hand the baton back until `wake`, or until the time is over."""
        world, me = self.world, self.world.current()
        if me is None:
            return
        self._waiting.append(me)
        world.pause(NEVER if timeout is None else world.now + max(timeout, 1e-6))
        if me in self._waiting:
            self._waiting.remove(me)

    def wake(self) -> None:
        """Let everyone go on who waits."""
        for actor in self._waiting:
            actor.wake = self.world.now
        self._waiting.clear()


class SimEvent:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._waiters, self._set = _Waiters(world), False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it."""
        self._set = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it; whether it is set then."""
        if not self._set:
            self._waiters.wait(timeout)
        return self._set


class SimLock:
    """`threading.RLock`, and `Lock`, which is never taken twice by one thread."""

    def __init__(self, world: World) -> None:
        self._waiters, self._world, self._depth = _Waiters(world), world, 0
        self._owner: Actor | None = None

    def __enter__(self) -> None:
        me = self._world.current()
        while me is not None and self._owner is not None and self._owner is not me:
            self._waiters.wait(None)
        self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._waiters.wake()


class SimCondition:
    """`threading.Condition`; no actor hands the baton back while it holds the lock."""

    def __init__(self, world: World) -> None:
        self._waiters, self._world = _Waiters(world), world

    def __enter__(self) -> SimCondition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it holds, or until the time is over."""
        until = None if timeout is None else self._world.now + timeout
        while not holds() and (until is None or self._world.now < until):
            self._waiters.wait(None if until is None else until - self._world.now)
        return holds()

    def notify_all(self) -> None:
        """Let everyone look again."""
        self._waiters.wake()


class SimThread:
    """`threading.Thread`: an actor of the process that starts it."""

    def __init__(
        self, world: World, *, target: Callable[[], None], name: str, daemon: bool = False
    ) -> None:
        self._world, self._target, self._name = world, target, name
        self._ended = SimEvent(world)
        self._begun = False

    def start(self) -> None:
        """Begin when the scheduler chooses it."""
        me = self._world.current()
        assert me is not None
        self._begun = True
        name = f"{me.process.name}.{self._name.rpartition('-')[2]}"
        self._world.spawn(name, me.process, self._run, ROLES.get(self._name, "sink"))

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._begun and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._target()
        except Exception as error:
            raise Violation(f"the thread {self._name} has died of {error!r}") from error
        finally:
            self._ended.set()


class SimThreading:
    """The module `threading`."""

    def __init__(self, world: World) -> None:
        self.Event = partial(SimEvent, world)
        self.Lock = self.RLock = partial(SimLock, world)
        self.Condition = partial(SimCondition, world)
        self.Thread = partial(SimThread, world)
        self.current_thread = self.main_thread = world.current


class SimSignals:
    """The module `signal`: handlers of the current process."""

    SIGTERM, SIGINT = Signals.SIGTERM, Signals.SIGINT

    def __init__(self, world: World) -> None:
        self._world = world

    def signal(self, number: int, handler: Callable[[int, object], None] | None) -> None:
        """Install a handler; there was none before."""
        handlers = self._world.current_process().handlers
        if handler is None:
            handlers.pop(number)
        else:
            handlers[number] = handler


class SimTime:
    """The module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        """Seconds on the clock of the current process's host."""
        return self._world.clock().monotonic()

    perf_counter = monotonic


class SimRandom:
    """The module `random`, with the world's dice."""

    def __init__(self, dice: Random) -> None:
        self.uniform = dice.uniform
