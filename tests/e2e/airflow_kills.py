"""kill -9 of everything a supervised stream consists of, one after another, and a look at what
Airflow makes of it.

Nothing here restarts a dead Airflow process or MinIO but `Stack.up`, called as soon as the process
is seen to be gone: it plays the process manager (systemd, Kubernetes) that an operator has.
Drivers are never started from here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil

from tests.e2e.feed import SOURCES
from tests.operators.conftest import task_state
from tests.servers.airflow import ApiForTests
from tests.servers.processes import kill_jvms, list_children
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError, TransientError
from tidegate.infra.local_processes import find_processes_with, is_process_alive
from tidegate.infra.local_stack import Stack
from tidegate.infra.stack_state import StackState

PIPELINE = "steady"
PATIENCE = 600.0  # seconds for one kill to be overcome; the machine may be busy


@dataclass(frozen=True)
class Kill:
    """One line of the table; seconds since the kill.

    Attributes:
        noticed_by: who acted on it.
        drivers: driver processes it took, which Airflow had to replace.
        pause: the longest time without a sealed epoch from the kill to the recovery.
    """

    what: str
    noticed_by: str
    noticed: float
    recovered: float
    drivers: int
    pause: float


@dataclass(frozen=True)
class Sighting:
    """The stream at one moment.

    Attributes:
        task: state of its task, in Airflow's database: the API server may be the one that is dead.
        drivers: pids of all driver processes.
    """

    at: float
    task: str
    drivers: tuple[int, ...]


class Feed(threading.Thread):
    """Delivers one object of each source a second, through any outage of the store, until it is
    asked to end.
    """

    def __init__(self, folder: Path, store_url: str) -> None:
        super().__init__(name="feed", daemon=True)
        self._folder, self._store, self._over = folder, open_store(store_url), threading.Event()

    def run(self) -> None:
        objects = len(list((self._folder / "inbox" / SOURCES[0]).glob("*.parquet")))
        for number in range(objects):
            for source in SOURCES:
                self._deliver(f"inbox/{source}/{number:05d}.parquet")
            if self._over.wait(1.0):
                break
        for source in SOURCES:
            self._deliver(f"inbox/{source}/_DONE")

    def finish(self) -> None:
        """Say that there is nothing more to come."""
        self._over.set()
        self.join()

    def _deliver(self, key: str) -> None:
        while True:
            try:
                self._store.put(key, (self._folder / key).read_bytes())
            except TransientError:
                time.sleep(0.5)
            else:
                return


class Watch(threading.Thread):
    """Looks at the task and at the processes several times a second and keeps what it saw."""

    def __init__(self, stack: Stack, run: str) -> None:
        super().__init__(name="watch", daemon=True)
        self._stack, self.run_id = stack, run
        self._stack_id = StackState.load(stack.home / "stack.json").stack_id
        self._over = threading.Event()
        self.seen: list[Sighting] = []

    def run(self) -> None:
        while not self._over.wait(0.25):
            self.seen.append(self.look())

    def look(self) -> Sighting:
        """One look."""
        state = task_state(self._stack, f"{PIPELINE}.stream", self.run_id)
        return Sighting(time.monotonic(), state, tuple(self._drivers()))

    def end(self) -> None:
        """No further looks."""
        self._over.set()
        self.join()

    def well_but_dead(self, *states: str) -> float:
        """The longest time, in seconds, for which Airflow showed these states and no driver process
        was there.
        """
        longest, since = 0.0, None
        for seen in self.seen:
            if seen.task in states and not seen.drivers:
                since = seen.at if since is None else since
                longest = max(longest, seen.at - since)
            else:
                since = None
        return longest

    def _drivers(self) -> Iterator[int]:
        for mark in find_processes_with("TIDEGATE_STACK_ID", self._stack_id):
            try:
                command = Path(f"/proc/{mark.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[1:3] == [
                b"-m",
                b"tidegate.jobs.driver",
            ]:  # its shell and its JVM have others
                yield mark.pid


class Killer:
    """Kills one thing at a time, and returns when it is overcome."""

    def __init__(self, stack: Stack, watch: Watch, say: Callable[[str], None]) -> None:
        self._stack, self._watch, self._say = stack, watch, say
        self._log = SlotLog(open_store(stack.store_url), PIPELINE)
        self._api = ApiForTests.of(stack)

    def wait_until_running(self) -> None:
        """The stream is watched and has sealed something."""
        self._until(
            lambda: self._watch.look().task == "deferred" and self._slot() >= 3, time.monotonic()
        )

    def component(self, name: str) -> Kill:
        """An Airflow process.

        The process manager starts it again; the stream must not even pause.
        """
        mark = StackState.load(self._stack.home / "stack.json").processes[name]
        watcher = self._triggerer_job()
        killed, at = self._now()
        os.kill(mark.pid, SIGKILL)
        noticed = self._until(lambda: not is_process_alive(mark), killed)
        self._stack.up(self._say)
        back = {
            "triggerer": lambda: self._triggerer_job() not in (None, watcher),
            "api-server": lambda: True,
        }
        recovered = self._until(back.get(name, lambda: self._beats(name, at)), killed)
        return self._overcome(name, "process manager", noticed, killed, at, recovered=recovered)

    def driver(self) -> Kill:
        """The Python process; its JVM goes with it."""
        driver, token = self._driver(), self._token()
        killed, at = self._now()
        os.kill(driver, SIGKILL)
        noticed = self._until(lambda: self._acted(driver), killed)
        return self._overcome("driver", "triggerer", noticed, killed, at, after=token)

    def jvm(self) -> Kill:
        """The JVM below the driver."""
        driver, token = self._driver(), self._token()
        killed, at = self._now()
        kill_jvms(driver)
        noticed = self._until(lambda: self._acted(driver), killed)
        return self._overcome("JVM", "driver, triggerer", noticed, killed, at, after=token)

    def worker(self) -> Kill:
        """The worker that is about to launch a driver in place of a killed one.

        Its process and the task's below it.
        """
        token = self._token()
        os.kill(self._driver(), SIGKILL)
        self._until(lambda: self._watch.look().task == "running", time.monotonic())
        scheduler = psutil.Process(
            StackState.load(self._stack.home / "stack.json").processes["scheduler"].pid
        )
        self._until(lambda: self._at_work(scheduler), time.monotonic())
        killed, at = self._now()
        for process in self._at_work(scheduler):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        noticed = self._until(lambda: self._watch.look().task != "running", killed)
        return self._overcome("worker and driver", "scheduler", noticed, killed, at, after=token)

    def minio(self) -> Kill:
        """The bucket itself.

        Nothing can be sealed until it is back; nothing may be started either.
        """
        said = self._waits()
        killed, at = self._now()
        self._stack.minio_server().kill()
        noticed = self._until(lambda: self._waits() > said, killed)
        self._stack.up(self._say)
        return self._overcome("MinIO", "driver", noticed, killed, at)

    def _overcome(
        self,
        what: str,
        by: str,
        noticed: float,
        killed: float,
        at: int,
        *,
        after: int = 0,
        recovered: float | None = None,
    ) -> Kill:
        """Wait for two more sealed epochs and a watched task; `after`.

        The token of the driver that it took, if it took one.
        """
        sealed = self._until(lambda: self._sealed_after(at, after), killed)
        self._until(lambda: self._watch.look().task == "deferred", killed)
        slot = self._log.head().slot
        self._until(lambda: self._slot() >= slot + 2, killed)
        head = self._log.head()
        times = [f.epoch.created_at for f in self._log.epochs_between(head.timeline, 1, head.slot)]
        pause = max(b - a for a, b in pairwise(times) if b > at) / 1e6
        row = Kill(
            what, by, noticed, sealed if recovered is None else recovered, int(after > 0), pause
        )
        self._say(
            f"killed {what}: noticed after {row.noticed:.1f} s, recovered after"
            f" {row.recovered:.1f} s"
        )
        return row

    def _acted(self, killed: int) -> bool:
        """Airflow does something about the loss of this driver, or has done it."""
        seen = self._watch.look()
        return seen.task != "deferred" or any(driver != killed for driver in seen.drivers)

    def _sealed_after(self, at: int, above: int) -> bool:
        try:
            record = self._log.head().record
        except TidegateError:
            return False
        return record is not None and record.created_at > at and record.lease_token > above

    def _until(self, true: Callable[[], object], since: float) -> float:
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen in {PATIENCE:.0f} s; now: {self._watch.look()}")
            time.sleep(0.1)
        return time.monotonic() - since

    def _now(self) -> tuple[float, int]:
        return time.monotonic(), time.time_ns() // 1000

    def _driver(self) -> int:
        (pid,) = self._watch.look().drivers
        return pid

    def _token(self) -> int:
        record = self._log.head().record
        return record.lease_token if record else 0

    def _slot(self) -> int:
        try:
            return self._log.head().slot
        except TidegateError:
            return 0

    def _waits(self) -> int:
        """How often drivers have said that they wait for the store."""
        logs = (self._stack.home / "drivers" / PIPELINE).glob("*.log")
        return sum(log.read_text(errors="replace").count('"event": "transient"') for log in logs)

    def _triggerer_job(self) -> int | None:
        """The job that watches the stream."""
        task = self._api.task_instances(f"{PIPELINE}.stream", self._watch.run_id)["stream"]
        job = task.get("triggerer_job")
        return None if job is None else int(job["id"])

    def _beats(self, name: str, at: int) -> bool:
        """The component has reported since then."""
        part: dict[str, Any] = self._api.request("GET", "/monitor/health")[name.replace("-", "_")]
        beat = part.get(f"latest_{name.replace('-', '_')}_heartbeat")
        return beat is not None and datetime.fromisoformat(beat).timestamp() * 1e6 > at

    def _at_work(self, scheduler: psutil.Process) -> list[psutil.Process]:
        """Executor processes with a task, and the task's."""
        found = []
        for worker in scheduler.children():
            below = list_children(worker.pid)
            if below:
                found += [worker, *below]
        return found


def table(kills: list[Kill]) -> str:
    """The table of docs/airflow.md."""
    head = [
        "| kill -9 of | noticed by | after | recovered after | longest pause of the stream |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {k.what} | {k.noticed_by} | {k.noticed:.1f} s | {k.recovered:.1f} s | {k.pause:.1f} s |"
        for k in kills
    ]
    return "\n".join([*head, *rows])
