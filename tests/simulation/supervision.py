"""Airflow's side: the stream task with its trigger, the sweep and the recover task, as actors.

The operators and the trigger are the real ones. Airflow itself is replaced: a task runs until it
defers, its trigger runs until it fires, a failed try comes again after a while, and the sweep comes
every minute. A launch makes a driver's process of the simulation, and a signal reaches it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

# Importing Airflow makes its home folder: not in the user's.
os.environ.setdefault(
    "AIRFLOW_HOME", str(Path(tempfile.gettempdir()) / f"tidegate-sim-{os.getuid()}")
)

from airflow.sdk.exceptions import TaskDeferred
from airflow.triggers.base import BaseTaskEndEvent
from tests.simulation.basics import NEVER, PIPELINE, Violation, replaced
from tests.simulation.cheap import parsed
from tests.simulation.shell import drive, options_of
from tests.simulation.storage import SimStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import LEASE_TTL, read_lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.errors import FailureClass, TidegateError
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.operators import (
    driver_shutdown,
    pipeline_operator,
    recover_and_pin,
    stream_operator,
    sweep_operator,
    trigger,
)
from tidegate.operators.driver_launch import LaunchedDriver
from tidegate.operators.driver_shutdown import terminate_driver
from tidegate.operators.recover_and_pin import RecoverOperator
from tidegate.operators.stream_operator import StreamOperator
from tidegate.operators.sweep_operator import StopOperator, SweepOperator

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from tests.simulation.actors import Stage
    from tests.simulation.world import Process, World

_RETRIES, _RETRY_DELAY, _SWEEP_EVERY, _SWEEPS = 2, 5.0, 60.0, 4
_RUN_ENDS_AFTER = (0.0, 1.0, 3.0, 6.0)  # seconds for which a run counts as active after its task
_DRIVER_WITHIN = 30.0  # seconds; a restore looks again after ten
_OPTIONS = SupervisionSpec(retries=_RETRIES, start_timeout=30_000_000, rotate_after=None)


class _Access:
    """The address of the simulated bucket."""

    url = "sim://"

    def __init__(self, world: World) -> None:
        self._world = world

    def open(self) -> SimStore:
        """A way to it."""
        return SimStore(self._world)

    open_shared = open


def _launch(
    world: World,
    pipeline: str,
    spec: str,
    access: Any,
    recover_to: str,
    *,
    submit: Any,
    standby: bool = False,
) -> LaunchedDriver:
    """Make a driver's process on the host of the task."""
    here = world.current_process().host
    world.stage.airflow.launched_at = world.now
    name = f"a{len(world.processes)}"
    process = world.process(name, here)
    options = options_of(None, standby=standby)
    world.spawn(name, process, partial(drive, world.stage, process, options))
    return LaunchedDriver(name, name, process.holder, name)


class _Notes(dict[str, Any]):
    """A task state store."""

    def set(self, key: str, value: Any, *, retention: Any) -> None:
        """Keep it."""
        self[key] = value


@dataclass
class _Run:
    """A run of a DAG; Airflow's scheduler needs a moment to end it after its task."""

    dag: str
    active_until: float = NEVER


class Airflow:
    """What Airflow knows: the runs that are active.

    Attributes:
        launched_at: when a task last launched a driver.
        restored: recover task that has restored a checkpoint -> since when it waits for an epoch.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.world = stage, stage.world
        stage.airflow = self
        self.launched_at = 0.0
        self.restored: dict[Process, float] = {}
        self._dag_runs: list[_Run] = []
        self._processes = 0

    def start_stream(self) -> None:
        """A person starts the stream: one run of its DAG, in a process of its own."""
        self._run("stream", "airflow", self._stream_task)

    def start_sweep(self) -> None:
        """The sweep comes again and again."""
        self._spawn("sweep", self._sweep)

    def start_recover(self, delay: float) -> None:
        """A person restores a checkpoint after a while."""
        self._run("recover", "recover", self._recover_task, delay)

    def start_stop(self, delay: float) -> None:
        """A person stops the stream after a while, and maybe restores a checkpoint right away."""
        self._spawn("stop", self._stop, delay)

    def _spawn(self, role: str, body: Callable[[], None], delay: float = 0.0) -> Process:
        self._processes += 1
        process = self.world.process(f"{role}{self._processes}", self.world.rng.randrange(3))
        self.world.spawn(process.name, process, body, role, delay)
        return process

    def _run(
        self, dag: str, role: str, task: Callable[[dict[str, Any]], None], delay: float = 0.0
    ) -> None:
        run = _Run(dag)
        self._dag_runs.append(run)
        context = self._context()

        def body() -> None:
            # A killed worker: Airflow notices, and the run ends.
            try:
                self._try_task(task, context)
            finally:
                run.active_until = self.world.now + self.world.rng.choice(_RUN_ENDS_AFTER)
            self.world.current_process().alive = False

        self._spawn(role, body, delay)

    def _try_task(self, task: Callable[[dict[str, Any]], None], context: dict[str, Any]) -> None:
        for number in range(1, _RETRIES + 2):
            context["ti"].try_number = number
            try:
                return task(context)
            except TidegateError as error:
                if error.failure_class in (FailureClass.POISON, FailureClass.CONFIGURATION):
                    self.world.note(f"task failed: {error}")
                    return None
            self.world.clock().sleep(_RETRY_DELAY)
        return None

    def _context(self) -> dict[str, Any]:
        def count_runs(dag_id: str, states: list[str]) -> int:
            dag = dag_id.rpartition(".")[2]
            runs = [run for run in self._dag_runs if run.dag == dag]
            return sum(self.world.now < run.active_until for run in runs) * ("running" in states)

        task = SimpleNamespace(
            try_number=1, max_tries=_RETRIES, get_dr_count=count_runs, xcom_push=lambda **_: None
        )
        run = SimpleNamespace(triggering_user_name="ann")
        return {
            "run_id": f"run{self.world.rng.getrandbits(32):08x}",
            "ti": task,
            "dag_run": run,
            "task_state_store": _Notes(),
        }

    def _stream_task(self, context: dict[str, Any]) -> None:
        _run_task(_operators()[0], context)

    def _recover_task(self, context: dict[str, Any]) -> None:
        operator = _operators()[1]
        log = operator.open_log()
        offered = [
            row.id
            for row in CheckpointCatalog(log, workers=1).list_checkpoints(all_timelines=True)
            if row.is_restorable and row.id is not None
        ]
        if offered:
            chosen = CheckpointId.parse(self.world.rng.choice(offered))
            me = self.world.current_process()
            try:
                with patch.object(operator, "checkpoint", str(chosen)):
                    _run_task(operator, context, partial(self._note_restored, me))
            finally:
                self.restored.pop(me, None)

    def _note_restored(self, task: Process) -> None:
        if task not in self.restored:
            self.restored[task] = task.calm_since = self.world.now
            task.runs = True

    def require_driver(self) -> None:
        """A restore that nothing disturbs does not leave the stream down until the sweep comes.

        Raises:
            Violation: the current task waits for an epoch, and nothing has launched a driver.
        """
        world, task = self.world, self.world.current_process()
        since = self.restored.get(task, NEVER)
        if world.now - since <= _DRIVER_WITHIN or task.calm_since > since:
            return
        if world.damaged or world.lost or world.garbled:  # a driver may have needed a person
            return
        lease, desired = (
            parsed(world.bucket.objects[key])
            for key in (world.bucket.layout.lease_key, world.bucket.layout.desired_key)
        )
        launched = self.launched_at >= since or world.bucket.renewed_at > since
        driven = any(actor.role == "driver" and actor.process.alive for actor in world.actors)
        over = all(run.active_until <= since + 8 for run in self._dag_runs if run.dag == "stream")
        if over and not (launched or driven or lease["holder"]) and desired["state"] == "run":
            raise Violation(f"nothing has launched a driver for {world.now - since:.0f} s")

    def _stop(self) -> None:
        with suppress(TidegateError):
            _operators()[3].execute(self._context())
            if self.world.rng.random() < 0.5:
                self.start_recover(self.world.rng.choice((0.0, 1.0, 4.0)))
        self.world.current_process().alive = False

    def _sweep(self) -> None:
        for _ in range(_SWEEPS):
            self.world.clock().sleep(_SWEEP_EVERY)
            with suppress(TidegateError):
                if _operators()[2].execute(self._context()):
                    self.start_stream()


def _run_task(
    operator: BaseOperator, context: Any, note_deferral: Callable[[], None] = lambda: None
) -> None:
    """Run a task as Airflow does: a task that defers goes on with the event of its trigger."""
    act: Callable[[], Any] = partial(operator.execute, context)
    while True:
        try:
            act()
        except TaskDeferred as deferred:
            note_deferral()
            event = _run_now(_first_of(deferred.trigger.run()))
            if isinstance(event, BaseTaskEndEvent):
                return  # the triggerer has ended the task
            method = getattr(operator, deferred.method_name)
            act = partial(method, context, event.payload, **(deferred.kwargs or {}))
        else:
            return


@cache
def _operators() -> tuple[StreamOperator, RecoverOperator, SweepOperator, StopOperator]:
    common: dict[str, Any] = {"pipeline": PIPELINE, "spec": "p.yaml"}
    return (
        StreamOperator(task_id="stream", supervision=_OPTIONS, **common),
        RecoverOperator(task_id="recover", reason="a test", dry_run_only="False", **common),
        SweepOperator(task_id="look", pipelines=[PIPELINE]),
        StopOperator(task_id="stop", reason="enough", **common),
    )


def _run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine whose awaits never suspend it: they hand the baton back themselves."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a coroutine of the trigger was suspended")


async def _first_of(events: Any) -> Any:
    return await anext(events)


class _Looks:
    """The looks of a trigger at a store: made here, without threads and without a breaker."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def run(self, act: Callable[..., Any], *given: Any) -> Any:
        """Call it here: its requests hand the baton back."""
        return act(*given)


class _Asyncio:
    """The module `asyncio`, for the trigger."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def to_thread(self, act: Callable[..., Any], *given: Any) -> Any:
        """Call it here: its requests hand the baton back."""
        return act(*given)

    async def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self._world.clock().sleep(seconds)
        self._world.stage.airflow.require_driver()


def _signal(world: World, there: ProcessIdentity, number: Signals, *, group: bool = False) -> bool:
    for process in world.processes:
        if process.pid == there.pid and process.alive:
            if process.host != world.current_process().host:
                return False
            world.note(f"{number.name} to {process.name}")
            if number is Signals.SIGKILL:
                process.alive = False
            elif number in process.handlers:
                process.handlers[number](number, None)
            return True
    return False


def _terminate(world: World, store: SimStore, pipeline: str, token: int, say: Any) -> str:
    """Terminate a driver as the stream task does, unless it works under its lease."""
    lease = read_lease(store, pipeline)
    name = lease.holder.driver if lease is not None and lease.holder is not None else ""
    for process in world.processes:
        works = process.alive and process.asleep_until <= world.now < process.busy_until
        # A store that refuses the keys of a driver refuses its renewals too.
        works = works and world.now > process.denied_until + LEASE_TTL
        # Nor does anybody know of a driver whose renewals have not arrived for as long.
        works = works and world.now <= world.bucket.renewed_at + LEASE_TTL
        if process.name == name and works and lease is not None and lease.token == token:
            raise Violation(f"{name} is terminated although its step is in time")
    return terminate_driver(store, pipeline, token, say)


def _exit_code(world: World, launched: LaunchedDriver) -> int | None:
    process = next(p for p in world.processes if p.name == launched.attempt)
    if process.alive:
        return None
    if process.error is not None:
        return process.error.failure_class.exit_code
    return 0 if process.exited == "done" else 137


@contextmanager
def real_supervision(world: World) -> Iterator[None]:
    """What Airflow's side takes from its surroundings comes from the world."""

    def log_of(store: SimStore, _: str) -> Any:
        from tests.simulation.actors import WatchedLog

        return WatchedLog(store)

    silent = SimpleNamespace(info=_say_nothing, error=_say_nothing, warning=_say_nothing)
    access = SimpleNamespace(resolve=lambda *_: _Access(world))
    patches: list[tuple[object, str, object]] = [
        *((m, "StoreAccess", access) for m in (pipeline_operator, sweep_operator)),
        *((m, "SlotLog", log_of) for m in (pipeline_operator, stream_operator)),
        *(
            (m, "launch_driver", partial(_launch, world))
            for m in (stream_operator, recover_and_pin)
        ),
        *((m, "send_signal", partial(_signal, world)) for m in (stream_operator, driver_shutdown)),
        *((m, "record_launch", _say_nothing) for m in (stream_operator,)),
        (stream_operator, "record_adoption", _say_nothing),
        (stream_operator, "terminate_driver", partial(_terminate, world)),
        (stream_operator, "make_driver_folder", lambda pipeline: Path("/nonexistent")),
        *(
            (trigger, name, _say_nothing)
            for name in ("record_look", "record_stream_end", "record_unwatched")
        ),
        (trigger, "asyncio", _Asyncio(world)),
        (trigger, "find_looks", _Looks),
        # Its breaker would count seconds of this machine, not of the world.
        (sweep_operator, "wrap_store", lambda store: store),
        (StreamOperator, "_show_driver_log", _say_nothing),
        (LaunchedDriver, "read_exit_code", lambda launched: _exit_code(world, launched)),
        *((kind, "log", silent) for kind in (trigger.EpochTrigger, *map(type, _operators()))),
    ]
    with replaced(patches):
        yield


def _say_nothing(*_: object, **__: object) -> None: ...
