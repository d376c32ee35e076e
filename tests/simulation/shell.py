"""The driver's process as it is: `pipeline_run`, with all its threads, on the simulated world.

Replaced are Spark, the sources, the servers behind the sinks, and the scratch folder; threads,
clocks and dice come from the world. The lease, the wait for `desired.json`, the probe of the store,
the loop, the publisher, status, housekeeping, inbox, drain and release are the real ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tenacity
from tests.oracle.memory_source import MemorySource
from tests.oracle.mover import OracleMover
from tests.simulation.basics import Violation, replaced
from tests.simulation.catalog_model import SimSink, external_files
from tests.simulation.cheap import record_of
from tests.simulation.servers import sink_of
from tests.simulation.storage import SimStore
from tests.simulation.threads import SimRandom, SimSignals, SimThreading, SimTime

from tidegate.checkpoints import errors, host_clock, lease, slot_log
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.errors import FailureClass, TidegateError
from tidegate.jobs.driver import (
    epoch_loop,
    housekeeping,
    landing_log,
    pipeline_run,
    startup,
    status_reporter,
)
from tidegate.jobs.driver.epoch_loop import EndConditions, EpochLoop, RunOutcome
from tidegate.jobs.driver.housekeeping import Housekeeper
from tidegate.jobs.driver.pipeline_run import RunOptions, run_until_end
from tidegate.jobs.driver.status_reporter import DriverSteps
from tidegate.jobs.engine import publisher
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from tests.simulation.actors import Stage
    from tests.simulation.world import Process, World

_PERSONS = (FailureClass.POISON, FailureClass.CONFIGURATION)
_DENIED_PATIENCE = 60.0  # seconds; ten minutes in the product, which few schedules would reach
_MOST_REFUSALS = 8  # the pauses between them, 1, 2, 4, 8 and three times 15 s, make the patience
_PROBES = 3  # of a store, before it counts as dishonest; stated again, because a bug may change it
_SCRATCH = Path("/nonexistent")  # nothing is ever written there


class SimSteps(DriverSteps):
    """The driver's steps; the world knows the step of each process."""

    def enter(self, name: str) -> None:
        """Announce a step."""
        super().enter(name)
        self._clock.world.current_process().step = name  # type: ignore[attr-defined]


class SimLoop(EpochLoop):
    """The loop; what it says and does is compared with what there is."""

    _stage: Stage
    _bounded = False

    def run(self) -> RunOutcome:
        """Run, and check a claim that everything was read and published."""
        process = self._stage.world.current_process()
        process.runs, process.calm_since = True, self._stage.world.now
        outcome = super().run()
        if outcome.state == "finished" and not _is_stale(self._stage.world, process):
            self._stage.require_finished(self.engine.resume_state.head)
        self._stage.world.current_process().step = "end"
        return outcome

    def _record_outcome(self, report: EpochReport, seconds: float) -> None:
        self._stage.world.current_process().refusals.clear()
        super()._record_outcome(report, seconds)

    def _announce_sink_wait(self) -> None:
        super()._announce_sink_wait()
        self._stage.world.current_process().refusals.clear()

    def _require_passing(self, error: Exception) -> TidegateError:
        process = self._stage.world.current_process()
        if isinstance(error, StoreDeniedError):
            process.refusals.append(self._stage.world.now)
        passing = super()._require_passing(error)
        if len(process.refusals) > _MOST_REFUSALS:
            raise Violation(f"{process.name} was refused {len(process.refusals)} times, and waits")
        return passing

    def _wait_for_publisher(self) -> bool:
        threads = self.publisher._threads.values()
        # Before the wait: it does not count a sink that catches up, and the driver may seal more.
        self._bounded = not any(thread.catches_up for thread in threads)
        return super()._wait_for_publisher()

    def _run_epoch(self) -> EpochReport:
        limit = self.spec.outputs.max_unpublished
        report = super()._run_epoch()
        if report.manifest is not None:
            self._stage.require_answers(report.manifest.requests)
        # After a restore a driver goes on until it sees that its lease was taken.
        stale = _is_stale(self._stage.world, self._stage.world.current_process())
        if report.sealed and self._bounded and not stale:
            self._stage.require_published(self.engine.resume_state.head, limit)
        return report


class _Sources:
    """The rows of the stage, as a driver finds them."""

    def __init__(self, stage: Stage, *_: object, **__: object) -> None:
        self.all = [
            source if isinstance(source, MemorySource) else source.open()
            for source in stage.sources.values()
        ]

    def open_logs(self) -> None:
        """Read the arrival logs."""
        for source in self.all:
            if isinstance(source, ObjectSource):
                source.open_logs()

    def map_side_by_side(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """One after another: actors take turns."""
        return [call(item) for item in items]

    def collect_status(self) -> dict[str, Any]:
        """Nothing to add."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


def drive(stage: Stage, process: Process, options: RunOptions) -> None:
    """The body of a driver's process: run the pipeline, and note how it ended."""
    try:
        outcome = run_until_end(stage.spec, options)
    except TidegateError as error:
        if error.code == "driver.unexpected" and not stage.world.defects:
            raise Violation(f"{process.name} met a defect: {error.message}") from error
        if error.failure_class in _PERSONS and not _has_cause(stage, process, error):
            raise Violation(f"{process.name} waits for a person: {error}") from error
        damaged = error.code == "checkpoint.left"
        if process.runs and error.failure_class is FailureClass.TRANSIENT and not damaged:
            raise Violation(f"{process.name} did not wait: {error}") from error
        process.exited = f"{type(error).__name__}: {error.code}"
        process.error = error
        stage.world.note(f"{process.name} ends: {error.code}: {error.message}")
    else:
        process.exited = "done"
        process.outcome = outcome.state
        stage.world.note(f"{process.name} ends: {outcome.state}, {outcome.why}")
    process.alive = False


def _has_cause(stage: Stage, process: Process, error: TidegateError) -> bool:
    """Something is damaged, or the driver is one that slept through a takeover.

    A driver that starts needs a person where the store refuses it. One that runs needs one only
    when it was refused again and again for all of its patience, without an epoch in between.
    """
    if isinstance(error, StoreDeniedError):
        refused_since = min(process.refusals, default=stage.world.now)
        return not process.runs or stage.world.now - refused_since >= _DENIED_PATIENCE
    if error.code == "store.dishonest":  # an honest one, if a proxy repeats writes of each probe
        return len(process.repeated_probes) >= _PROBES
    if error.code == "manifest.newer_format":
        return process.version == "1"
    world = stage.world
    return bool(world.damaged or world.lost or world.garbled) or _is_stale(world, process)


def _is_stale(world: World, process: Process) -> bool:
    """Another process has had the lease since."""
    tokens = world.bucket.tokens
    return tokens.get(process.name, 1 << 60) < max(tokens.values(), default=0)


def options_of(
    epochs: int | None, *, standby: bool = True, asked_by: str | None = None
) -> RunOptions:
    """The options of a driver that ends after some epochs, or after a silence; None: by neither."""
    # The silence ends a driver that reads a topic: that source is never done.
    idle = None if epochs is None else min(2.4 * epochs, 12.0)
    return RunOptions(
        "sim://",
        EndConditions(idle=idle, epochs=epochs),
        standby=standby,
        asked_by=asked_by,
        work=_SCRATCH,
    )


def _make_sinks(spec: PipelineSpec, store: SimStore, uid: str, _run: object = None) -> list[Any]:
    stage = store.world.stage
    return [
        SimSink(spec, store, uid, stage.open_catalog(store)),
        *sink_of(spec, store, uid, stage.server),
    ]


@contextmanager
def _start_mover(run: Any, *_: object) -> Iterator[Callable[[], OracleMover]]:
    yield lambda: OracleMover(run.store, run.spec, run.store.world.stage.sources)


class _View:
    """No files to look at."""

    def close(self) -> None:
        """Nothing to close."""


def _log_of(store: SimStore, _: str) -> Any:
    from tests.simulation.actors import WatchedLog

    return WatchedLog(store)


def _author_of(world: World, uid: str, driver: str, _: str) -> ManifestAuthor:
    return ManifestAuthor(uid, driver, world.current_process().version)


def _read_record(world: World, data: bytes, where: str = "a slot") -> Any:
    """Parse a record as the version of the current process does."""
    record = record_of(data, where)
    actor = world.current()
    if actor is not None and actor.process.version < getattr(record, "code_version", ""):
        raise errors.RECORD_OF_NEWER_FORMAT(where=where, version=3, newest=2)
    return record


@contextmanager
def real_shell(world: World) -> Iterator[None]:
    """What `pipeline_run` takes from its surroundings comes from the world."""
    threads, time = SimThreading(world), SimTime(world)

    def loop(*parts: Any) -> SimLoop:
        found = partial(SimLoop, monotonic=time.monotonic)(*parts)
        found._stage = world.stage
        return found

    steps = partial(_steps_of, world)
    stand_ins: dict[str, object] = {
        "open_store": lambda url: SimStore(world),
        "open_work_folder": nullcontext,
        "InputView": lambda *_: _View(),
        "PipelineSources": lambda *_, **__: _Sources(world.stage),
        "_start_mover": _start_mover,
        "require_no_mistakes": lambda spec: [],  # the spec is right, and judging it takes long
        "make_sinks": _make_sinks,
        "read_faults_from_environment": lambda: world,
        "ManifestAuthor": partial(_author_of, world),
        "EpochLoop": loop,
    }
    patches: list[tuple[object, str, object]] = [
        *((pipeline_run, name, what) for name, what in stand_ins.items()),
        (startup, "SlotLog", _log_of),
        (startup, "DriverSteps", steps),
        (startup, "Housekeeper", partial(Housekeeper, monotonic=time.monotonic)),
        *(
            (module, "threading", threads)
            for module in (
                pipeline_run,
                publisher,
                host_clock,
                lease,
                status_reporter,
            )
        ),
        *((module, "time", time) for module in (publisher, status_reporter, tenacity)),
        (pipeline_run, "signal", SimSignals(world)),
        (landing_log, "read_faults_from_environment", lambda: world),
        (slot_log, "parse_record", partial(_read_record, world)),
        (tenacity.wait, "random", SimRandom(world.rng)),
        (secrets, "token_bytes", lambda size=16: world.rng.randbytes(size)),
        (host_clock.Clock, "monotonic", lambda _: world.clock().monotonic()),
        (host_clock.Clock, "wall_ticks", lambda _: world.clock().wall_ticks()),
        (host_clock.Clock, "sleep", lambda _, seconds: world.clock().sleep(seconds)),
        (ProcessIdentity, "this_process", lambda *_: world.current_process().holder),
        (status_reporter, "bind_log_context", lambda **_: None),
        (epoch_loop, "DENIED_PATIENCE", _DENIED_PATIENCE),
        (housekeeping, "_LOOK_EVERY", world.housekeeping_every),
        (housekeeping, "_INDEX_AFTER", 2),
        (housekeeping, "_HOUR", 0.0),
        (
            housekeeping,
            "list_referenced_files",
            lambda spec, store: external_files(world.stage.catalog, store),
        ),
    ]
    with replaced(patches):
        yield


def _steps_of(world: World, lease: Any, max_gap: int) -> SimSteps:
    return SimSteps(lease, max_gap, world.clock())
