"""The simulation of jobs: the real wrapper, seal loop, restore, retention and takeover.

Spark and the sinks are models (`job_spark.py`); the store is in memory, checkpoints are in a folder.
One thread takes one step after another, as a seed says: a batch is planned, written or committed;
batches are sealed; the JVM is killed, or Python, or both; Python is suspended until another launch
has taken over; the store is away; the clock goes back; somebody restores; retention runs. A launch
may be killed between any two of its own steps, or be suspended until another one has taken over. At
the end the input closes and a driver runs until it is finished.

In some histories scripts are odd as well: they hang before or after the start of a query, end a
query or Spark too early, end with a code of their own when they are stopped, leave their only query
without a name, look at rows by a memory sink, or have a log of their own; the spec declares a sink
repeatable only when somebody wants to restore; and no row may come for hours.

What must hold:

- a job is finished only if every query has read its input, without an error;
- a job that was stopped has not failed, and one that hangs or has lost a query does not go on;
- a job that has nothing to do goes on, and the page calls it well; the script's own log is kept;
- each sink has each row once, or, if the spec declares that it may repeat batches, at least once;
- every batch that is sealed and not retired restores, as it was sealed;
- a refusal comes only where the product announces it.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest
from tests.simulation.job_spark import (
    DeltaSink,
    FileSink,
    KeyedSink,
    ModelCheckpoint,
    ModelContext,
    ModelJVM,
    ModelQuery,
    ModelSink,
    RepeatingSink,
    TableSink,
)
from tests.simulation.job_surfaces import keeps_script_log, list_findings

from tidegate import job as job_module
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError, FencedError, TidegateError
from tidegate.jobs.driver.startup import select_head
from tidegate.jobs.driver.status_reporter import DriverSteps
from tidegate.jobs.sealed_queries import (
    batch_sealer,
    job_location,
    job_run,
    seal_loop,
    sink_restore,
)
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects, restore_files
from tidegate.jobs.sealed_queries.checkpoint_files import (
    find_planned_batch,
    list_committed_batches,
    read_offsets,
)
from tidegate.jobs.sealed_queries.checkpoint_folder import HostFolder
from tidegate.jobs.sealed_queries.job_run import JobSession
from tidegate.jobs.sealed_queries.seal_loop import SparkReports
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts
from tidegate.jobs.spec.job_spec import JobSpec

JOB = "job"
_UID = "uid"
_ROWS = 16
_STEPS = 90
_FORMATS = {
    "files": "json",
    "table": "iceberg",
    "delta": "delta",
    "keyed": "foreach",
    "guarded": "foreach",
    "repeated": "foreach",
}
_LAUNCHES_AT_END = 12
_MOMENTS = ("prepare_query", "restore_sink", "publish_query")  # of a launch; it may die around it
_OVERTAKEN_AT = ("note_jvm", "prepare_query")  # it may sleep before these


class KilledError(BaseException):
    """The process was killed; not an error that the product could handle."""


class ViolationError(AssertionError):
    """Something that must hold did not."""


class ModelSession(JobSession):
    """The real session of a job, without its threads, and with a model of Spark below."""

    def __init__(self, world: JobWorld, lease: Lease) -> None:
        self._spec, self._store, self._uid = world.spec, world.store, _UID
        self._options: Any = SimpleNamespace(home=world.folder / "home", on_seal=lambda _: None)
        self._stop, self._digest = threading.Event(), "digest"
        self._slot_log = world.make_log()
        self._steps = DriverSteps(lease, 0, world.clock)
        self._status: Any = MagicMock(state="running")
        self._listeners: Any = MagicMock(metrics=None)
        self._reports, self._sessions = SparkReports(), []
        self._script_ended = threading.Event()
        self._forgotten, self._began = set(), world.clock.monotonic()
        self._world = world

    def _report_seal(self, manifest: Manifest) -> None:
        self._world.note_seal(manifest)

    def close(self) -> None:
        """Do nothing: there are no threads."""


@dataclass(eq=False)
class Driver:
    """One launch of the job: its Python, its JVM and its queries."""

    python: int
    jvm: ModelJVM
    lease: Lease
    session: ModelSession
    queries: dict[str, ModelQuery] = field(default_factory=dict)
    frozen: bool = False


class JobWorld:
    """One simulated job with everything around it.

    Args:
        seed: decides every choice.
        folder: for checkpoints and file sinks.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.dice, self.folder, self.clock = random.Random(seed), folder, ManualClock()
        self._bucket, self._away = MemoryBucket(), False
        self.store = MemoryStore(self._bucket, hook=self._judge_request)
        self.kinds = self.dice.sample([*_FORMATS], self.dice.randint(1, 2))
        sinks: dict[str, Callable[[], ModelSink]] = {
            "files": partial(FileSink, folder / "out"),
            "table": partial(TableSink, self.clock.wall_ticks),
            "delta": DeltaSink,
            "keyed": KeyedSink,
            "guarded": KeyedSink,
            "repeated": RepeatingSink,
        }
        # What scripts and people do beside the product has choices of its own.
        self._more = random.Random(f"{seed} more")
        self._is_odd = seed % 4 == 3  # most histories are long ones
        self._has_no_end, self._looks_at_rows, declares, nameless = (
            self._is_odd and self._more.random() < 0.6 for _ in range(4)
        )
        # The query without a name has that of the job.
        is_alone = self.kinds[0] in ("files", "table", "delta") and len(self.kinds) == 1
        self._nameless = self.kinds if nameless and is_alone else []
        # Its function has no guard by numbers, so batches may come twice once the spec says so.
        self._declared_later = ["guarded"] if declares and "guarded" in self.kinds else []
        if self._declared_later:
            sinks["guarded"] = RepeatingSink
        self.sinks = {kind: sinks[kind]() for kind in self.kinds}
        self.spec = JobSpec.model_validate(
            {"kind": "job", "name": JOB, "app": "app.py", "repeatable": ["repeated"]}
        )
        self.driver: Driver | None = None
        self.events: list[str] = []
        self.counts: Counter[str] = Counter()
        self._dead: set[int] = set()
        self._pids = 1_000_000
        self._python = self._next_pid()  # the process that runs at the moment
        self._arrived, self._poison = 0, self._choose_poison()
        self._kill_at: tuple[str, bool] | None = None
        self._overtaken_at: str | None = None  # where the launch at hand is suspended
        self._users: dict[Path, int] = {}  # folder of a launch -> its newest process
        self._overtakers: list[Driver | None] = []
        self._retains = self.dice.random() < 0.6  # else all timelines can be restored
        # Queries of which a sink may have batches that no seal and no folder knows.
        self._unknown: set[str] = set()

    def make_log(self) -> SlotLog:
        """Open the job's log, as a process does."""
        return SlotLog(self.store, JOB, clock=self.clock, seal_budget=0.0, jitter=lambda: 0.0)

    def run(self) -> None:
        """Run one whole history, and judge it.

        Raises:
            ViolationError: something that must hold did not.
        """
        moves = {
            self._take_spark_step: 50,
            self._seal: 9,
            self._launch: 9,
            self._kill_jvm: 1,
            self._kill_python: 2,
            self._kill_both: 2,
            self._freeze: 3,
            self._restore: 4,
            self._retain: 2 if self._retains else 0,
            self._turn_store: 2,
            self._turn_clock_back: 1,
            self._lose_host: 1,
            self._finish: 3,
        }
        with self._install():
            for _ in range(_STEPS):
                self.clock.advance(0.5)
                self._arrived = min(_ROWS, self._arrived + self.dice.randint(0, 1))
                (move,) = self.dice.choices([*moves], [*moves.values()])
                if self._is_odd and self._more.random() < 0.1:
                    self._do_odd_thing()
                is_down = self.driver is None or self.driver.frozen
                (self._launch if is_down and self.dice.random() < 0.5 else move)()
                if self.counts["refused"]:
                    return
            self._run_to_end()
            self._judge_batches()

    # What happens.

    def _take_spark_step(self) -> None:
        if self.driver is None or not self.driver.queries:
            return
        name = self.dice.choice([*self.driver.queries])
        query = self.driver.queries[name]
        size = partial(self.dice.randint, 1, 3)
        if query.take_step(self._arrived, self._poison, size):
            self._note(f"{name} step")
            if query.error and self.dice.random() < 0.5:  # the listener may hear of it later
                self.driver.session._reports.failures[name] = query.error

    def _seal(self) -> None:
        if self.driver is not None and not self.driver.frozen:
            self._seal_as(self.driver)

    def _seal_as(self, driver: Driver) -> None:
        loop = driver.session._loop
        with self._act_as(driver.python):
            waits = loop._guard(lambda: loop.seal_committed(patience=0.0) < 0)
            loop.check_queries()
        if isinstance(loop.error, FencedError):
            self._end_driver("fenced")
        elif loop.error is not None:
            self._end_driver(f"failed {loop.error.code}")
        elif waits:
            self._note("waits for the store")

    def _launch(self) -> None:
        """Launch a driver if the one before lets go of the lease: it is dead, or suspended."""
        before = self.driver
        if self._away or (before is not None and not before.frozen):
            return
        # What watches a driver from outside ends its JVM before the lease runs out.
        if before is not None:
            self.end_jvm_of_frozen(before)
        self._python = self._next_pid()
        self._kill_at = None
        self._overtaken_at = None
        if self.dice.random() < 0.1:
            self._overtaken_at = self.dice.choice(_OVERTAKEN_AT)
        elif self.dice.random() < 0.25:
            self._kill_at = (self.dice.choice(_MOMENTS), self.dice.random() < 0.5)
        driver: Driver | None = None
        try:
            driver = self._start_driver()
        except FencedError:
            self._dead |= {self._python, self._python + 1}
            self._note("fenced while it was launched")
        except KilledError:
            self._dead |= {self._python, self._python + 1}
            self._note("killed while it was launched")
        except ConfigurationError as error:
            self._dead |= {self._python, self._python + 1}
            self._judge_refusal(error)
        except (TidegateError, ValueError) as error:
            raise ViolationError(f"the launch failed: {error}") from error
        self._kill_at = self._overtaken_at = None
        self._let_others_end(before, driver)

    def _let_others_end(self, before: Driver | None, driver: Driver | None) -> None:
        """Wake who was suspended when others took over: one driver of them is left."""
        self.driver = driver
        if self._overtakers:
            self.driver = self._overtakers.pop()
            if driver is not None:
                self.end_jvm_of_frozen(driver)
                self._wake(driver)
        if before is not None:
            self._wake(before)

    def _overtake(self) -> None:
        """Suspend the launch at hand until another one has taken over and seals batches."""
        self._overtaken_at, launched, before = None, self._python, self.driver
        self._note("the launch is suspended")
        self._python = self._next_pid()
        self.driver = self._start_driver()
        for _ in range(6):
            self._take_spark_step()
            self._seal()
        self._overtakers.append(self.driver)
        self._python, self.driver = launched, before

    def _start_driver(self) -> Driver:
        identity = ProcessIdentity.this_process()
        lease = Lease.acquire(self.store, JOB, identity, clock=self.clock)
        session, jvm = ModelSession(self, lease), ModelJVM(self._next_pid())
        driver = Driver(self._python, jvm, lease, session)
        select_head(self.spec, session._slot_log, lease, "latest")
        location = session._location
        if self._users.get(location.folder, self._python) not in {self._python, *self._dead}:
            raise ViolationError("two launches that live share a folder")
        self._users[location.folder] = self._python
        location.note_jvm(jvm.pid)
        self._note(f"launch {lease.token} in {location.folder.name[-6:]}")
        if self._is_odd and self._more.random() < 0.05:
            self._hang_before_queries(session)
        if self._is_odd and self._more.random() < 0.1:
            self._log_in_script()
        for kind in self.kinds:
            self._start_query(driver, kind)
        if self._looks_at_rows:
            self._look_at_rows(session)
        return driver

    def _hang_before_queries(self, session: ModelSession) -> None:
        """Let the script hang until the process ends itself."""
        self.clock.advance(self.spec.start_within / 1e6 + 1.0)
        session._refuse_stalled_start()
        if session._loop.error is None:
            raise ViolationError("the script hangs, and the job runs on")
        raise KilledError

    def _log_in_script(self) -> None:
        """Let the script configure a log of its own, and write a line."""
        self._note("the script logs")
        if not keeps_script_log(self.spec, self.folder / f"script-{len(self.events)}"):
            raise ViolationError("the log of the script is lost")

    def _look_at_rows(self, session: ModelSession) -> None:
        """Start a query into memory in append mode, which Spark starts in a new checkpoint only."""
        facts = WriterFacts(name="memory", format="memory", session=ModelContext())
        address = session._start_query(facts)
        if address is not None:
            if find_planned_batch(HostFolder(Path(address))) is not None:
                raise ViolationError("a memory sink does not go on from a checkpoint")
            ModelCheckpoint(Path(address)).plan(0, {"rows": 1})

    def _start_query(self, driver: Driver, kind: str) -> None:
        facts = WriterFacts(name=kind, format=_FORMATS[kind], session=ModelContext())
        facts.path = str(self.folder / "out") if kind in ("files", "delta") else None
        facts.table = "t" if kind == "table" else None
        facts.trigger = None if self._has_no_end else "availableNow"
        location, name = driver.session._location, self._get_name(kind)
        if kind in self._nameless:
            facts.name = None
        knows = location.get_folder(name).exists() or location.get_sealed_batch(name) is not None
        if not knows and self.sinks[kind].read_rows() and not self._was_sealed(kind):
            self._unknown.add(kind)
        address = driver.session._start_query(facts)
        assert address is not None
        query = ModelQuery(driver.jvm, Path(address), self.sinks[kind], facts)
        facts.query = query
        driver.queries[name] = query

    def _finish(self) -> None:
        """The script returns, as it sees no active query: it may be wrong about them."""
        driver = self.driver
        if driver is None or driver.frozen or self._away:
            return
        is_done = self._has_read_all(driver)
        jvm_is_gone = not driver.jvm.alive
        has_failed = any(query.error for query in driver.queries.values())
        if not (is_done or jvm_is_gone or has_failed):
            return
        if is_done:
            for query in driver.queries.values():
                query.ended = True
        self._seal_as(driver)
        if self.driver is not driver:
            return
        if is_done and self._has_no_end:
            self._stop_job(driver)
            return
        try:
            driver.session._judge_end(None)
        except Exception as error:
            self._end_driver(f"failed {type(error).__name__}")
            return
        self._end_driver("finished")
        if not is_done or has_failed or jvm_is_gone:
            raise ViolationError("finished without evidence")

    def _stop_job(self, driver: Driver) -> None:
        """Somebody stops the job; what ends its queries ends the script with a code of its own."""
        session = driver.session
        session._stop.set()
        try:
            outcome = session._judge_end(session._fail("the script ended with 1"))
        except TidegateError as error:
            raise ViolationError(f"a stop ended as a failure: {error}") from error
        self._end_driver(outcome.state)

    def _do_odd_thing(self) -> None:
        """Something that scripts do, if a driver runs."""
        driver = self.driver
        if driver is None or driver.frozen or self._away or not driver.jvm.alive:
            return
        if not driver.queries or any(query.ended for query in driver.queries.values()):
            return
        odd_things = [
            self._hang,
            self._wait_for_rows,
            *([self._end_early, self._lose_query] * self._has_no_end),
        ]
        self._more.choice(odd_things)(driver)

    def _hang(self, driver: Driver) -> None:
        """A query works without an end, before it plans a batch or inside one."""
        name = self._more.choice([*driver.queries])
        self._note(f"{name} hangs")
        driver.queries[name].hangs = True
        loop = driver.session._loop

        def look() -> bool:
            loop._refuse_stalled_query()
            return False

        with self._act_as(driver.python):
            for _ in range(4):
                loop._guard(look)
                self.clock.advance(self.spec.batch_within / 2e6)
        if loop.error is None:
            raise ViolationError(f"{name} hangs, and the job runs on")
        self._end_driver(f"failed {loop.error.code}")

    def _wait_for_rows(self, driver: Driver) -> None:
        """The queries read what is there, and then no row comes for hours."""
        for query in driver.queries.values():
            while query.take_step(self._arrived, self._poison, lambda: 3):
                pass
        if any(query.error for query in driver.queries.values()):
            return
        self._seal_as(driver)
        if self.driver is not driver:
            return
        self._note("no row comes")
        loop = driver.session._loop
        with self._act_as(driver.python):
            for _ in range(4):
                self.clock.advance(self.spec.batch_within / 1e6)
                loop._refuse_stalled_query()
        findings = list_findings(self.store, JOB, driver.session._steps, self.clock)
        if findings:
            raise ViolationError(f"a job without new rows is not called well: {findings}")

    def _end_early(self, driver: Driver) -> None:
        """The script stops Spark, and returns, though its queries have no end."""
        self._note("the script stops Spark")
        for query in driver.queries.values():
            query.ended = True
        try:
            driver.session._judge_end(None)
        except TidegateError as error:
            self._end_driver(f"failed {error.code}")
            return
        raise ViolationError("finished although the queries have no end")

    def _lose_query(self, driver: Driver) -> None:
        """The script stops one query, and goes on."""
        name = self._more.choice([*driver.queries])
        self._note(f"the script stops {name}")
        driver.queries[name].ended = True
        driver.session._reports.ends.add(name)
        self._seal_as(driver)
        if self.driver is driver:
            raise ViolationError(f"{name} is gone, and the job goes on")

    def _has_read_all(self, driver: Driver) -> bool:
        if not driver.jvm.alive:
            return False
        for query in driver.queries.values():
            committed = list_committed_batches(HostFolder(query.folder))
            if not committed or read_offsets(HostFolder(query.folder), committed[-1]) != [
                {"rows": _ROWS}
            ]:
                return False
        return True

    def _end_driver(self, why: str) -> None:
        driver = self.driver
        assert driver is not None
        self._note(why)
        self._kill(driver.python, driver.jvm)
        driver.session._give_up_raced_queries()
        with suppress(TidegateError):
            driver.lease.release()
        if why.startswith("failed") and self._poison is not None:
            self._poison = None  # somebody corrects the input

    def _kill_jvm(self) -> None:
        if self.driver is not None:
            self._note("kill JVM")
            self.driver.jvm.alive = False
            self._dead.add(self.driver.jvm.pid)

    def _kill_python(self) -> None:
        """Kill Python alone: its JVM may do some steps more before it ends itself."""
        if self.driver is None:
            return
        self._note("kill Python")
        driver = self.driver
        for _ in range(self.dice.randint(0, 4)):
            self._take_spark_step()
        self._kill(driver.python, driver.jvm)

    def _kill_both(self) -> None:
        if self.driver is not None:
            self._note("kill driver")
            self._kill(self.driver.python, self.driver.jvm)

    def _kill(self, python: int, jvm: ModelJVM) -> None:
        jvm.alive = False
        self._dead |= {python, jvm.pid}
        self.driver = None

    def _freeze(self) -> None:
        if self.driver is not None and not self.driver.frozen:
            self._note("Python is suspended")
            self.driver.frozen = True

    def end_jvm_of_frozen(self, driver: Driver) -> None:
        """What the watchdog does within the TTL of the lease."""
        driver.jvm.alive = False
        self._dead.add(driver.jvm.pid)

    def _wake(self, driver: Driver) -> None:
        """The driver before goes on, after another has taken over; it may seal, and then ends."""
        current, self.driver = self.driver, driver
        for _ in range(8):
            self.driver = self.dice.choice([driver, current])
            self._take_spark_step()
        self.driver, driver.frozen = driver, False
        self._seal_as(driver)
        self._dead |= {driver.python, driver.jvm.pid}
        driver.jvm.alive = False
        self.driver = current

    def _restore(self) -> None:
        """Restore some checkpoint, or the beginning; sometimes twice in a row."""
        if self._away or (self.driver is not None and self.driver.frozen):
            return
        self._kill_both()
        for _ in range(self.dice.randint(1, 2)):
            log, targets = self.make_log(), [one.id for one in self._list_sealed()]
            to_beginning = not targets or self.dice.random() < 0.3
            target = None if to_beginning else self.dice.choice(targets)
            identity = ProcessIdentity.this_process()
            lease = Lease.acquire(self.store, JOB, identity, clock=self.clock)
            request = f"r{len(self.events)}"
            try:
                self._restore_as(log, lease, target, request)
            except ConfigurationError as error:  # an epoch on the way was retired
                if error.code == "restore.sink" and self._declared_later:
                    self._restore_declared(log, lease, target, request)
            lease.release()
        if self._retains and self.dice.random() < 0.5:  # before the next launch
            self._retain()

    def _restore_declared(
        self, log: SlotLog, lease: Lease, target: CheckpointId | None, request: str
    ) -> None:
        """A sink cannot follow, so somebody declares it, and restores again."""
        declared = (*self.spec.repeatable, *self._declared_later)
        self.spec = self.spec.model_copy(update={"repeatable": declared})
        self._note("the spec declares a sink")
        try:
            self._restore_as(log, lease, target, request)
        except ConfigurationError as error:
            if error.code == "restore.sink":
                raise ViolationError(f"refused for no good reason: {error}") from error

    def _restore_as(
        self, log: SlotLog, lease: Lease, target: CheckpointId | None, request: str
    ) -> None:
        plan = plan_restore(log, target, spec=self.spec)
        commit_restore(log, lease, plan, request_id=request, who="ann", why="a mistake")
        self._note(f"restore {target and (target.timeline, target.slot)}")

    def _retain(self) -> None:
        if self._away:
            return
        self.clock.advance(1.0)  # nothing is young
        policy = RetentionPolicy(keep_last=self.dice.randint(1, 4), keep_for=0, grace=0)
        log = self.make_log()
        report = Retention(log, policy, external=list, clock=self.clock, workers=1).run()
        self._note(f"retired {len(report.retired)}")

    def _turn_store(self) -> None:
        self._away = not self._away
        self._note("store away" if self._away else "store back")

    def _turn_clock_back(self) -> None:
        seconds = self.dice.choice([1, 5])
        self.clock._wall_offset -= seconds * 1_000_000
        self._note(f"clock back {seconds} s")

    def _lose_host(self) -> None:
        """The next launch is on another host: it finds no folder."""
        if self.driver is None and (self.folder / "home").exists():
            self._note("another host")
            home = self.folder / "home"
            home.rename(self.folder / f"home-{len(self.events)}")

    # What must hold.

    def _run_to_end(self) -> None:
        self._arrived, self._poison, self._away = _ROWS, None, False
        for _ in range(_LAUNCHES_AT_END):
            if self.driver is None or self.driver.frozen:
                self._launch()
            driver = self.driver
            if self.counts["refused"]:
                return
            for _ in range(12 * _ROWS):
                self._take_spark_step()
                if self.dice.random() < 0.5:
                    self._seal()
                if driver is None or self.driver is not driver or self._has_read_all(driver):
                    break
            self._finish()
            if self.events[-1] in ("finished", "stopped"):
                self._judge_sinks()
                return
            if self.driver is not None and not self.driver.jvm.alive:
                self._end_driver("JVM is gone")
        raise ViolationError("the job comes to no end")

    def _judge_sinks(self) -> None:
        for name, sink in self.sinks.items():
            counts = Counter(sink.read_rows())
            lost = sorted(set(range(_ROWS)) - set(counts))
            twice = sorted(row for row, times in counts.items() if times > 1)
            # docs/jobs.md, "Limits": nothing knows of batches before a first one is sealed.
            if name in self._unknown:
                continue
            if lost:
                raise ViolationError(f"{name}: rows {lost} are lost")
            if twice and name not in ("repeated", *self._declared_later):
                raise ViolationError(f"{name}: rows {twice} are there twice")

    def _judge_refusal(self, error: ConfigurationError) -> None:
        self.counts["refused"] += 1
        self._note(f"refused {error.code}")
        # docs/jobs.md, "Limits": until a first batch is sealed nothing knows what a sink has. A sink
        # that no one can read or take back stays with the folder of its query.
        is_justified = {
            "job.sink_ahead": not self._was_sealed("files"),
            "job.sink_unknown": self._was_sealed("guarded"),
        }
        if not is_justified.get(error.code):
            raise ViolationError(f"refused for no good reason: {error}") from error

    def _judge_batches(self) -> None:
        """Restore every sealed batch that is left."""
        for number, manifest in enumerate(self._list_sealed()):
            notes = BatchNotes.from_manifest(manifest)
            assert notes is not None
            for name, at in notes.queries.items():
                folder = self.folder / "judge" / f"{number}-{name}"
                try:
                    restore_files(self.store, name, manifest.segments, folder)
                except TidegateError as error:
                    raise ViolationError(f"{manifest.id} does not restore: {error}") from error
                host = HostFolder(folder)
                (offset,) = read_offsets(host, at.batch)
                sealed = json.loads(manifest.cut[f"{name}/0"]["end"])
                if list_committed_batches(host)[-1] != at.batch or offset != sealed:
                    raise ViolationError(f"{manifest.id} restores another batch of {name}")

    def _list_sealed(self) -> list[Manifest]:
        """List the sealed batches of all timelines that are not retired."""
        log = self.make_log()
        newest = [log.newest_record(timeline) for timeline in range(log.head().timeline + 1)]
        slots = [
            log.read_slot(timeline, slot)
            for timeline, last in enumerate(newest)
            for slot in range(1, last.record.slot + 1 if last else 1)
        ]
        return [one.record for one in slots if one and isinstance(one.record, Manifest)]

    def _get_name(self, kind: str) -> str:
        """Return the name that the query of a sink has in the product."""
        return JOB if kind in self._nameless else kind

    def _was_sealed(self, kind: str) -> bool:
        start = f"seal of {self._get_name(kind)} "
        return any(event.startswith(start) for event in self.events)

    # How the world is built.

    def _choose_poison(self) -> int | None:
        return self.dice.randrange(_ROWS) if self.dice.random() < 0.2 else None

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.counts[event.split()[0]] += 1

    def _next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def _judge_request(self, _request: StoreRequest) -> Fault | None:
        return Fault.REFUSED if self._away else None

    @contextmanager
    def _act_as(self, python: int) -> Iterator[None]:
        before, self._python = self._python, python
        try:
            yield
        finally:
            self._python = before

    def note_seal(self, manifest: Manifest) -> None:
        """Note which batch was sealed."""
        notes = BatchNotes.from_manifest(manifest)
        assert notes is not None
        self._note(f"seal of {notes.query} {notes.queries[notes.query].batch}")

    def _let_spark_go_on(self) -> Callable[..., Any]:
        """Spark does not wait while a batch is uploaded, and deletes old files."""
        store_files = QueryObjects.store_files

        def store(objects: QueryObjects, *given: Any) -> Any:
            stored = store_files(objects, *given)
            for _ in range(self.dice.randint(0, 4)):
                self._take_spark_step()
            return stored

        return store

    def _allow_kill(self, owner: Any, moment: str) -> Any:
        call = getattr(owner, moment)

        def run(*args: Any, **kwargs: Any) -> Any:
            """Call it, and die before or after if it is the moment."""
            if self._kill_at == (moment, False):
                raise KilledError
            if self._overtaken_at == moment:
                self._overtake()
            result = call(*args, **kwargs)
            if self._kill_at == (moment, True):
                raise KilledError
            return result

        return patch.object(owner, moment, run)

    @contextmanager
    def _install(self) -> Iterator[None]:
        """Put the models in the place of processes, clocks and Spark."""
        keyed = self.sinks.get("keyed")
        callbacks = {"keyed": keyed.take_back} if isinstance(keyed, KeyedSink) else {}

        def describe_process(_kind: object, driver: str | None = None) -> ProcessIdentity:
            return ProcessIdentity.of_process(self._python, driver)

        still = SimpleNamespace(
            strftime=lambda *_: "20260101T000000",
            gmtime=lambda: None,
            monotonic=self.clock.monotonic,
            sleep=self.clock.sleep,
        )
        patches = [
            patch.object(ProcessIdentity, "this_process", classmethod(describe_process)),
            patch.object(ProcessIdentity, "is_proven_dead", lambda one: one.pid in self._dead),
            patch.object(job_location, "time", still),
            patch.object(job_location, "_OWNER_ENDS_WITHIN", -1.0),
            patch.object(batch_sealer, "SYSTEM_CLOCK", self.clock),
            patch.object(seal_loop, "_RETRY_AFTER", 0.0),
            patch.object(seal_loop, "time", still),
            patch.object(job_run, "time", still),
            patch.object(job_module, "_callbacks", callbacks),
            patch.object(sink_restore, "_load_iceberg", lambda _facts: self.sinks["table"]),
            patch("deltalake.DeltaTable", lambda _address: self.sinks["delta"]),
            patch.object(QueryObjects, "store_files", self._let_spark_go_on()),
            self._allow_kill(job_location.JobLocation, "note_jvm"),
            self._allow_kill(job_location.JobLocation, "prepare_query"),
            self._allow_kill(job_run, "restore_sink"),
            self._allow_kill(job_location.JobLocation, "publish_query"),
        ]
        with ExitStack() as stack:
            for one in patches:
                stack.enter_context(one)
            yield


def run_world(seed: int) -> JobWorld:
    """Run one history.

    Raises:
        ViolationError: something that must hold did not; its notes are the history.
    """
    memory = Path("/dev/shm")
    place = str(memory) if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tidegate-job-world-", dir=place) as folder:
        world = JobWorld(seed, Path(folder))
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"seed {seed}, {world.kinds}: " + "; ".join(world.events))
            raise
        return world
