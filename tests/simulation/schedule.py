"""One schedule from one seed: who acts, what goes wrong, a fresh recovery, the judgement."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from tests.simulation.actors import Stage
from tests.simulation.judge import judge
from tests.simulation.world import Violation, World

from tidegate.checkpoints import index, retention, verify
from tidegate.checkpoints.holder import Holder
from tidegate.jobs.driver import inbox, recovery
from tidegate.jobs.sinks import iceberg

__all__ = ["finish", "recover", "run_seed", "simulated"]

STEPS = 5000  # of one schedule; what is not done by then is cut off by the recovery


class _Inline:
    """A pool without threads: one OS thread holds the baton."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, ask: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """In order."""
        return iter([ask(item) for item in items])


class _Silent:
    """A log nobody reads."""

    def warning(self, *_: object, **__: object) -> None:
        """Nothing."""

    info = warning


def _write_table(table: Any, where: io.BytesIO, **_: object) -> None:
    """Arrow's own format in the place of Parquet: half of a schedule's time would go into encoding a dozen rows."""
    with pa.ipc.new_stream(where, table.schema) as stream:
        stream.write_table(table)


def _read_table(source: Any, **_: object) -> Any:
    with pa.ipc.open_stream(source) as stream:
        return stream.read_all()


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """What the real code takes from its surroundings comes from the world: random names, dead processes, pools."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(secrets, "token_hex", lambda size=16: f"{world.rng.getrandbits(8 * size):0{2 * size}x}"))
        stack.enter_context(patch.object(Holder, "proven_dead", lambda holder: world.dead(holder)))
        for module in (index, retention, verify):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", _Inline))
        for module in (inbox, recovery):
            stack.enter_context(patch.object(module, "_log", _Silent()))
        stack.enter_context(patch.object(pq, "write_table", _write_table))
        stack.enter_context(patch.object(pq, "read_table", _read_table))
        stack.enter_context(patch.object(iceberg, "_GROUP", 3))
        yield


def cast(stage: Stage) -> None:
    """Who takes part: drawn from the seed."""
    rng = stage.world.rng
    stage.feeder(rng.randrange(2, 5))
    for number in range(rng.choice((1, 2, 2, 3))):
        stage.driver(
            f"d{number}",
            host=rng.randrange(3),
            epochs=rng.randrange(1, 5),
            delay=rng.choice((0.0, 0.5, 5.0)),
            respawn=rng.randrange(2),
        )
    for number in range(rng.choice((0, 0, 1, 1, 2))):
        stage.restorer(
            f"r{number}", host=rng.randrange(3), back=rng.choice((-1, 0, 1, 1, 2, 3)), delay=rng.choice((0.3, 1.0, 4.0, 12.0))
        )
    for number in range(rng.choice((0, 1, 1, 2))):
        stage.collector(
            f"g{number}",
            keep=rng.choice((1, 1, 2)),
            runs=rng.randrange(1, 4),
            delay=rng.choice((0.3, 1.0, 4.0)),
            pin=rng.random() < 0.2,
        )


def recover(stage: Stage) -> None:
    """The storm is over. A fresh driver reads everything and publishes it; then the sleepers wake, and another one follows."""
    world = stage.world
    sleepers = [p for p in world.processes if p.alive and p.asleep_until > world.now + 3000]
    for process in world.processes:
        process.alive = process.alive and process in sleepers
    world.calm, world.rules = True, []
    for source in stage.sources.values():
        source.end()
    _fresh(stage, "fresh")
    while world.bucket.held:
        world.deliver()
    if sleepers or world.rng.random() < 0.2:
        for process in sleepers:
            process.asleep_until = 0.0
            world.waits.pop(process, None)
        world.run(STEPS)
        _fresh(stage, "after")
    judge(stage)


def _fresh(stage: Stage, name: str) -> None:
    process = stage.driver(name, host=3, epochs=60)
    stage.world.run(4 * STEPS, until=lambda: not process.alive or bool(process.exited))
    if not process.exited.startswith("done"):
        raise Violation(f"the recovery ended with {process.exited or 'nothing'}")


def run_seed(
    seed: int,
    *,
    rate: float | None = None,
    states: set[int] | None = None,
    trace: bool = False,
    focus: tuple[str, str] | None = None,
) -> World:
    """One schedule. Its finding, if any, is in `violation`."""
    world = World(seed, rate=rate, states=states)
    world.trace = [] if trace else None
    world.focus = focus or world.focus
    with simulated(world):
        stage = Stage(world)
        try:
            cast(stage)
            world.run(STEPS)
            recover(stage)
        except Violation as found:
            world.violation = found
        finally:
            finish(world)
    return world


def finish(world: World) -> None:
    """Everybody still alive dies."""
    for process in world.processes:
        process.alive = False
    world._bury()
