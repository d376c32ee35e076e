"""Real drivers on a real MinIO, each killed by `kill -9` at a random moment.

Each driver is a process of its own, forked from one that has imported the product, and computes
without a JVM: a start takes a second. A third of them is killed while it starts, every fifth begins
with a restore, and beside every fourth a process maintains the bucket, without any grace, and is
killed as well. The bucket keeps all versions, so that the protocol's steps can be read afterwards
(`tests/e2e/real_trace.py`). The last driver runs to the end; its tables must hold each row once.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.e2e.drivers import Steady
from tests.e2e.feed import SOURCES, SPEC
from tests.e2e.real_trace import (
    Tables,
    forge_histories,
    keep_versions,
    read_changes,
    take_changes,
)
from tests.servers.minio import RealMinio, running
from tests.simulation.protocol_trace import UntakenError
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.jobs.spec.loader import load_spec

# The driver's own maintenance is left to `maintain`, which gives no grace.
QUICK = SPEC.replace(
    "checkpoint: {idle_interval: 100ms}",
    "checkpoint: {min_interval: 200ms, idle_interval: 100ms, retain: 6, retain_for: 1s,"
    " maintain_every: never}",
).replace("spark: {driver_memory: 1g, jvm: quick}\n", "")
_OBJECTS_PER_KILL = 8
_AHEAD = 12  # objects of each source that lie in the bucket before they are read
_PATIENCE = 240.0  # seconds for a start or the end on a busy machine
_PRELOADED = (
    "tests.e2e.real_kills",
    "tidegate.jobs.driver.pipeline_run",
    "tidegate.jobs.spark.mover",
)


def drive(spec: Path, store_url: str, recover_to: str, log: Path) -> None:
    """What a driver's process does; the log has what it says."""
    _write_to(log)
    from tidegate.jobs.driver.log_output import configure_logs
    from tidegate.jobs.driver.pipeline_run import RunOptions, run_pipeline

    configure_logs(json=True)
    code = run_pipeline(load_spec(spec), RunOptions(store_url, recover_to=recover_to))
    os._exit(code)


def maintain(spec: Path, store_url: str, log: Path) -> None:
    """What a process that maintains the bucket does, until it is killed."""
    _write_to(log)
    from tidegate.jobs.driver.housekeeping import make_retention
    from tidegate.jobs.sinks.table_maintenance import compact_tables, delete_orphan_files

    pipeline, store = load_spec(spec), open_store(store_url)
    slots = SlotLog(store, pipeline.name)
    while True:
        with suppress(TidegateError):  # a driver may be moving the same things
            make_retention(pipeline, slots, keep_for=0.0, grace=0.0).run()
            compact_tables(pipeline, store)
            delete_orphan_files(pipeline, store, grace=0.0)
        time.sleep(0.2)


def _write_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


class RealKills:
    """One pipeline and its drivers.

    Attributes:
        restores: how many drivers began with a restore.
        maintenances: how many processes maintained the bucket.
    """

    def __init__(self, folder: Path, minio: RealMinio, kills: int, seed: int) -> None:
        self._kills, self._dice = kills, random.Random(seed)
        self._objects = _OBJECTS_PER_KILL * kills + 2 * _AHEAD
        self.prefix = f"{seed}/"
        self.steady = Steady(folder, self._objects, f"s3://{minio.bucket}/{seed}", spec=QUICK)
        self._store = self.steady.store()
        self._slots = SlotLog(self._store, self.steady.spec.name)
        self._fed = 0
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED])
        self._log = folder / "driver.log"
        self._start_seconds = 2.0  # of the driver before; until then a guess
        self.restores = self.maintenances = 0
        keep_versions(minio)

    def run(self) -> None:
        """Kill the drivers, then let the last one end.

        Raises:
            TimeoutError: a driver sealed nothing for minutes.
            RuntimeError: a driver ended by itself.
        """
        for number in range(self._kills):
            target = self._draw_target() if number % 5 == 4 else "latest"
            self.restores += target != "latest"
            processes = [self._start(drive, target)]
            if number % 4 == 3:
                processes.append(self._start(maintain))
                self.maintenances += 1
            self._wait_for_moment(processes[0], early=self._dice.random() < 1 / 3)
            for process in processes:
                process.kill()
                process.join()
        self._finish()

    def _start(self, work: Callable[..., None], *arguments: str) -> ForkServerProcess:
        given = (self.steady.spec_file, self.steady.store_url, *arguments, self._log)
        process = self._context.Process(target=work, args=given)
        process.start()
        return process

    def _draw_target(self) -> str:
        """Return a checkpoint that is not the newest one."""
        head = self._slots.head()
        filled = self._slots.epochs_between(head.timeline, max(1, head.slot - 4), head.slot - 1)
        older = [slot.record for slot in filled if slot.record.kind == "epoch"]
        return str(self._dice.choice(older).id) if older else "latest"

    def _wait_for_moment(self, driver: ForkServerProcess, *, early: bool) -> None:
        if early:
            time.sleep(self._dice.uniform(0.0, self._start_seconds))
            return
        began, before = time.monotonic(), self._slot()
        self._until(lambda: self._slot() != before, driver)
        self._start_seconds = time.monotonic() - began
        seconds = self._dice.uniform(0.0, 1.5)
        ends = time.monotonic() + seconds
        self._until(lambda: time.monotonic() > ends, driver)

    def _until(self, true: Callable[[], bool], driver: ForkServerProcess) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not true():
            self._feed()
            if driver.exitcode is not None:
                raise RuntimeError(f"a driver ended with {driver.exitcode}: {self._tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing in {_PATIENCE:.0f} s: {self._tail()}")
            time.sleep(0.05)

    def _slot(self) -> tuple[int, int]:
        head = self._slots.head()
        return head.timeline, head.slot

    def _feed(self) -> None:
        """Put objects ahead of the newest epoch, but not all of them before the end."""
        upto = min(self._slot()[1] + _AHEAD, self._objects)
        for number in range(self._fed, upto):
            for source in SOURCES:
                name = f"inbox/{source}/{number:05d}.parquet"
                self._store.put(name, (self.steady.inbox / name).read_bytes())
        self._fed = max(self._fed, upto)

    def _finish(self) -> None:
        for source in SOURCES:
            self._store.put(f"inbox/{source}/_DONE", b"")
        driver = self._start(drive, "latest")
        driver.join(_PATIENCE)
        if driver.exitcode != 0:
            driver.kill()
            raise RuntimeError(f"the last driver ended with {driver.exitcode}: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text()[-4000:] if self._log.exists() else "no log"


@dataclass
class RealHistory:
    """What came of killed drivers.

    Attributes:
        steps: of the protocol that were taken, by kind.
        problems: a step that the protocol does not allow, and what an independent check of the
            tables says; empty means that all is well.
        forgeries: bug planted in the history -> the step that was rejected, or nothing.
    """

    kills: int
    restores: int
    maintenances: int
    seconds: float
    steps: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    forgeries: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.steps.most_common())
        return "\n".join(
            [
                f"{self.kills} real drivers killed in {self.seconds:.0f} s, {self.restores} of them"
                f" after a restore, and {self.maintenances} processes of maintenance",
                f"{self.steps.total()} steps: {kinds}",
                *(self.problems or ["all taken, and every row is in the tables once"]),
            ]
        )


def run_real_kills(kills: int, seed: int) -> RealHistory:
    """Kill drivers on a MinIO of its own, in a temporary folder, and judge what they left."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="tidegate-kills-") as name:
        folder = Path(name)
        with running(folder, "kills") as minio, patch.dict(os.environ, minio.environment()):
            run = RealKills(folder / "pipeline", minio, kills, seed)
            run.run()
            seconds = time.monotonic() - began
            found = RealHistory(kills, run.restores, run.maintenances, seconds)
            found.problems += run.steady.exact().problems
            _judge(minio, run.prefix, run.steady.spec.name, found)
    return found


def _judge(minio: RealMinio, prefix: str, pipeline: str, found: RealHistory) -> None:
    changes, tables = read_changes(minio, prefix), Tables(minio, prefix)
    try:
        judge = take_changes(changes, pipeline, tables)
    except UntakenError as error:
        found.problems.append(str(error))
        return
    found.steps.update(step[0] for step in judge.trace or ())
    for bug, history in forge_histories(changes, judge.protocol).items():
        try:
            take_changes(history, pipeline, tables)
        except UntakenError as error:
            found.forgeries[bug] = str(error)
        else:
            found.forgeries[bug] = ""
