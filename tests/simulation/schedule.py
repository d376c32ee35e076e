"""One schedule from one seed: who acts, what goes wrong, a fresh recovery, the judgement."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.simulation.actors import Stage
from tests.simulation.basics import NEVER, PIPELINE, Violation, replaced
from tests.simulation.catalog_model import SCANS
from tests.simulation.cheap import cheap
from tests.simulation.compaction_model import COMPACTION
from tests.simulation.coverage import IN_BUCKET, IN_CATALOGS, OF_STREAMS, SPLICING, SUPERVISED
from tests.simulation.judge import judge
from tests.simulation.object_feed import FOOTERS
from tests.simulation.onlooker import compare_offers, look_on
from tests.simulation.private_catalog import PRIVATE
from tests.simulation.servers import read_model_table
from tests.simulation.shapes import SINK_KINDS, choose_shape
from tests.simulation.shell import real_shell
from tests.simulation.storage import JudgeStore
from tests.simulation.supervision import Airflow, real_supervision
from tests.simulation.threads import SimTime
from tests.simulation.world import Process, World

from tidegate.checkpoints import store
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver import (
    epoch_listeners,
    epoch_loop,
    error_classification,
    housekeeping,
    landing_log,
    operator_requests,
    pipeline_run,
    startup,
    status_reporter,
)
from tidegate.jobs.sinks import iceberg_sink, postgres_sink, table_files, table_maintenance
from tidegate.jobs.sources import arrival_log
from tidegate.jobs.splice import merge
from tidegate.operators.stream_view import StreamView

SHARE_RESTORED = 0.25  # of the schedules, which then take twice as long
STEPS = 3000  # of one schedule; what is not done by then is cut off by the recovery


class _Inline:
    """A pool without threads: one OS thread holds the baton."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, ask: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """In order."""
        return iter([ask(item) for item in items])

    def submit(self, ask: Callable[..., Any], *given: Any) -> Future[Any]:
        """At once; an error comes from here already."""
        done: Future[Any] = Future()
        done.set_result(ask(*given))
        return done

    def shutdown(self, **_: object) -> None:
        """Nothing waits."""


class _Silent:
    """A log no one reads."""

    def warning(self, *_: object, **__: object) -> None:
        """Nothing."""

    info = error = warning


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """What the real code takes from its surroundings comes from the world.

    Random names, dead processes, pools.
    """
    stand_ins: list[tuple[object, str, object]] = [
        (
            secrets,
            "token_hex",
            lambda size=16: f"{world.rng.getrandbits(8 * size):0{2 * size}x}",
        ),
        (ProcessIdentity, "is_proven_dead", lambda holder: world.dead(holder)),
        *((module, "ThreadPoolExecutor", _Inline) for module in _POOLED),
        *((module, "touch_alive_file", lambda alive: None) for module in (pipeline_run, startup)),
        *((module, "_log", _Silent()) for module in _TALKATIVE),
        *(*COMPACTION, *SCANS, *PRIVATE, FOOTERS, (merge, "time", SimTime(world))),
        (table_files, "_COMMITS_UNTIL_EXPIRY", 2),
        (iceberg_sink, "_SLOTS_PER_GROUP", 3),
        (postgres_sink, "read_table", read_model_table),
    ]
    with replaced(stand_ins), cheap(), real_shell(world), real_supervision(world):
        yield


_POOLED = (iceberg_sink, store)
_TALKATIVE = (
    *(table_maintenance, operator_requests, startup, epoch_loop, pipeline_run, housekeeping),
    *(status_reporter, error_classification, epoch_listeners, landing_log, arrival_log),
)
_NAMES_FILE = ("checkpoint.none_whole", "file.unreadable", "sink.file_missing")
"""How a driver refuses files that are damaged, if only a person can mend them."""
_NAMES_DOCUMENT = ("document.malformed", "manifest.malformed", "identity.malformed")
"""How it refuses damaged documents."""
_RESTORE, _RETENTION = ("plan restore", "claim", "fork"), ("mark", "condemn", "stub", "sweep")
_COMPACTION = ("merge", "replace", "cut merged", "delete merged")


def cast(stage: Stage) -> None:
    """Who takes part: drawn from the seed, with those in it whose steps it is about."""
    rng, about = stage.world.rng, stage.world.focus[1]
    spliced = about in SPLICING or stage.world.focus in OF_STREAMS
    many = 3 if about in (*_RETENTION, *_COMPACTION) or spliced else 0
    if about in ("cut merged", "delete merged"):
        _long(stage)
        many = 6
    stage.rolling = rng.random() < 0.15
    stage.lander("lander")
    stage.feeder(many or rng.randrange(1, 4))
    # Where Airflow starts drivers, mostly no one else does.
    for number in range(rng.choice((0, 0, 1, 2) if about in SUPERVISED else (1, 2, 2, 3))):
        stage.driver(
            f"d{number}",
            host=rng.randrange(3),
            epochs=many or rng.randrange(1, 4),
            delay=rng.choice((0.0, 0.5, 5.0)),
            respawn=rng.randrange(2),
        )
    for number in range(rng.choice((1, 2) if about in _RESTORE else (0, 0, 1, 1, 2))):
        stage.restorer(
            f"r{number}",
            host=rng.randrange(3),
            back=rng.choice((-1, 0, 1, 1, 2, 3)),
            delay=rng.choice((0.3, 1.0, 4.0, 12.0)),
        )
    for number in range(rng.choice((1, 2) if about in _RETENTION else (0, 1, 1, 2))):
        stage.collector(
            f"g{number}",
            keep=1 if about in _RETENTION else rng.choice((1, 1, 2)),
            runs=rng.randrange(1, 4),
            delay=rng.choice((4.0, 8.0, 12.0) if about in _RETENTION else (0.3, 1.0, 4.0)),
        )
    for number in range(
        rng.choice((1, 2) if about in ("ask", "pin", "requests") else (0, 0, 0, 1))
    ):
        stage.person(f"h{number}", delay=rng.choice((0.3, 1.0, 4.0)))
    for number in range(rng.choice((1, 2) if about in _COMPACTION else (0, 0, 1))):
        stage.compactor(
            f"c{number}",
            host=rng.randrange(3),
            runs=rng.randrange(1, 4),
            delay=rng.choice((1.0, 3.0, 6.0, 12.0)),
        )
    if stage.spec.streams:
        _splice(stage, many=spliced)
    _surround(stage)
    if not stage.private and rng.random() < 0.3:
        stage.neighbour(rng.randrange(3, 12))
    stage.ends = rng.random() < 0.3


def _surround(stage: Stage) -> None:
    """Airflow, someone who looks on, and a disk that damages objects."""
    rng, about = stage.world.rng, stage.world.focus[1]
    if rng.random() < 0.25 or about in SUPERVISED:
        _supervise(stage)
    if rng.random() < 0.25:
        process = stage.world.process("onlooker", rng.randrange(3))
        stage.world.spawn("onlooker", process, partial(look_on, stage), "onlooker")
    if rng.random() < 0.06:
        stage.damager("x0", delay=rng.choice((2.0, 6.0, 15.0)))


def _splice(stage: Stage, *, many: bool) -> None:
    """Attachments come and go, and someone merges what they collect."""
    rng = stage.world.rng
    stage.person("hs", delay=rng.choice((0.5, 2.0, 5.0)))
    for number in range(rng.choice((1, 2) if many else (0, 1))):
        stage.merger(f"m{number}", host=rng.randrange(3), delay=rng.choice((3.0, 6.0, 12.0)))


def _supervise(stage: Stage) -> None:
    """Airflow starts the stream, sweeps, and maybe restores."""
    rng, airflow = stage.world.rng, Airflow(stage)
    airflow.start_stream()
    airflow.start_sweep()
    if rng.random() < 0.5 or stage.world.focus[1] == "recover":
        airflow.start_recover(rng.choice((0.3, 4.0, 12.0)))
    airflow.start_stop(rng.choice((5.0, 15.0, 40.0)))


def _long(stage: Stage) -> None:
    """A history in which merged files are restored into, replaced and forgotten while drivers live."""
    rng = stage.world.rng
    stage.restorer(
        "rl", host=rng.randrange(3), back=rng.choice((1, 2, 3)), delay=rng.choice((12.0, 16.0))
    )
    stage.driver("dl", host=rng.randrange(3), epochs=6, delay=20.0, respawn=2)
    stage.compactor("cl", host=rng.randrange(3), runs=6, delay=rng.choice((6.0, 10.0)))


def recover(stage: Stage) -> None:
    """The storm is over.

    A fresh driver reads everything and publishes it; then the sleepers wake, and another one
    follows.
    """
    world = stage.world
    asleep = (p for p in world.processes if p.alive and p.asleep_until > world.now + 3000)
    # A landing query that sleeps holds the lock of its folder: only its death lets another one in.
    sleepers = [p for p in asleep if p.name != "lander"]
    for process in world.processes:
        process.alive = process.alive and process in sleepers
    world.calm, world.rules = True, []
    stage.end_sources()
    stage.lander("calm lander")
    _fresh(stage, "fresh")
    if world.hopeless:
        return
    if stage.compacts:
        _compacted(stage)
    open_before = {*world.bucket.asked}
    while world.late:
        world.deliver()
    asked_late = world.bucket.asked.keys() - open_before
    merged = bool(stage.spec.streams) and world.rng.random() < 0.5 and _merged(stage)
    if sleepers or merged or asked_late or world.rng.random() < 0.2:
        for process in sleepers:
            world.wake(process)
        world.run(STEPS)
        _fresh(stage, "after")
    judge(stage)
    if world.garbled:  # what may be offered of them is shown in vain
        return
    compare_offers(stage, StreamView(JudgeStore(world.bucket), PIPELINE, fresh=0.0))
    if world.rng.random() < SHARE_RESTORED:
        _restore_offered(stage)


def _restore_offered(stage: Stage) -> None:
    """Restore checkpoints that people are offered, and judge again after each.

    That its files are there is not enough: every epoch that leads to it has to be published again.
    Some schedules restore all that are offered, one after the other.
    """
    chosen = _list_offered(stage)
    stage.world.rng.shuffle(chosen)
    for number, name in enumerate(chosen if stage.world.rng.random() < 0.3 else chosen[:1]):
        if name in _list_offered(stage):
            _restore_one(stage, name, number)


def _list_offered(stage: Stage) -> list[str]:
    log = SlotLog(JudgeStore(stage.world.bucket), PIPELINE)
    listed = CheckpointCatalog(log, workers=1).list_checkpoints(all_timelines=True)
    return [row.id for row in listed if row.is_restorable and row.id is not None]


def _restore_one(stage: Stage, checkpoint: str, number: int) -> None:
    process = stage.restore_to(f"offered{number}", CheckpointId.parse(checkpoint))
    stage.world.run(STEPS, until=lambda: not process.alive or bool(process.exited))
    if not process.exited.startswith("done"):
        raise Violation(f"{checkpoint} is offered, but its restore ended with {process.exited}")
    _fresh(stage, f"restored{number}")
    if not stage.world.hopeless:
        judge(stage)


def _fresh(stage: Stage, name: str) -> None:
    world = stage.world
    process = _run_driver(stage, name)
    if process.error is not None and process.error.code == "checkpoint.left" and world.lost:
        process = _run_driver(stage, f"{name} again")  # it goes back to one that is whole
    error = process.error
    clear = (*(_NAMES_FILE if world.lost else ()), *(_NAMES_DOCUMENT if world.garbled else ()))
    if error is not None and error.code in clear:
        world.note(f"only a person can help: {error.message}")
        world.hopeless = True
    elif not process.exited.startswith("done"):
        raise Violation(f"the recovery ended with {process.exited or 'nothing'}")


def _run_driver(stage: Stage, name: str) -> Process:
    """Run a driver that a person starts, and starts again if no driver is wanted meanwhile.

    A sleeper that wakes may take the lease first, and finish in its place. The driver would then
    wait, as a standby does, until somebody wants it.
    """
    world, begun = stage.world, stage.world.now
    process = stage.driver(name, host=3, epochs=60, asked_by=name)

    def has_ended() -> bool:
        return not process.alive or bool(process.exited)

    def is_unwanted() -> bool:
        return world.bucket.stopped_at > begun and name not in world.bucket.tokens

    world.run(4 * STEPS, until=lambda: has_ended() or is_unwanted())
    if has_ended() or not is_unwanted():
        return process
    process.alive = False
    return _run_driver(stage, f"{name}'")


def _compacted(stage: Stage) -> None:
    """Whatever the storm left of the tables is merged once more, before the sleepers wake."""
    process = stage.compactor("calm", host=3, runs=1)
    stage.world.run(STEPS, until=lambda: not process.alive)


def _merged(stage: Stage) -> bool:
    """What attachments have collected is merged, behind the end of the sources."""
    process = stage.merger("calm merger", host=3)
    stage.world.run(4 * STEPS, until=lambda: not process.alive)
    return True


def sink_for(world: World) -> str:
    """A kind of sink beside the tables, or none."""
    if world.focus[1].startswith("sink"):
        return world.rng.choice(SINK_KINDS)
    return world.rng.choice(("", "", "", "", *SINK_KINDS))


def choose_catalog(world: World) -> bool:
    """Whether the tables have a catalog of their own; half of the schedules share one."""
    about = world.focus[1]
    if about in IN_CATALOGS:
        return about in IN_BUCKET
    return world.rng.random() < 0.5


def run_seed(
    seed: int,
    *,
    rate: float | None = None,
    states: set[int] | None = None,
    trace: bool = False,
    focus: tuple[str, str] | None = None,
    sink: str | None = None,
) -> World:
    """One schedule. Its finding, if any, is in `violation`."""
    world = World(seed, rate=rate, states=states, focus=focus)
    world.trace = [] if trace else None
    world.housekeeping_every = world.rng.choice((NEVER, 3.0))
    with simulated(world):
        kind = sink or sink_for(world)
        shape = choose_shape(world.rng, kind, world.focus)
        stage = Stage(world, kind, shape, private=choose_catalog(world))
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
    """Everyone still alive dies."""
    for process in world.processes:
        process.alive = False
    world.bury()
    for feed in world.stage.sources.values() if world.stage else ():
        feed.close()
