"""`make bench-triggerer`: many streams under one real triggerer, with simulated drivers.

Prints the triggerer's share of a core and its memory, idle and with all streams watched, and how long it took to notice ten
losses at once: five whose process is gone, five whose lease is no longer renewed. Nothing is asserted: it is for figures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from tidegate.checkpoints.keeper import LeaseKeeper
from tidegate.checkpoints.lease import Holder, Lease
from tidegate.checkpoints.open import open_store
from tidegate.checkpoints.status import Status, write_status
from tidegate.checkpoints.store import Store
from tidegate.infra.airflow_api import AirflowApi
from tidegate.infra.stack import Stack, StackSettings
from tidegate.infra.stack_state import StackState

_REPOSITORY = Path(__file__).resolve().parents[2]
_SPEC = """\
apiVersion: tidegate/v1
name: {name}
sources:
  one: {{path: inbox/one, schema: {{at: timestamp}}, event_time: at, lag: 1m}}
"""
_LOST = 10


class Simulated:
    """A driver that only renews its lease; its process is a `sleep` that can be killed."""

    def __init__(self, store: Store, name: str) -> None:
        self.name, self._store = name, store
        self.process = subprocess.Popen(["sleep", "100000"])
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        holder = Holder.this_process(name).model_copy(update={"pid": self.process.pid, "start_ticks": int(fields[19])})
        self.lease = Lease.acquire(store, name, holder)
        self.keeper = LeaseKeeper(self.lease).start()

    def beat(self) -> None:
        """As a driver does every two seconds."""
        self.keeper.step("wait", 120.0)
        body = {"state": "running", "step_since": time.time()}
        write_status(self._store, self.name, Status(token=self.lease.token, driver=self.name, step="wait", at=0, body=body))

    def fall_silent(self) -> None:
        """The lease is no longer renewed, nor given back."""
        self.keeper.stop()

    def die(self) -> None:
        """The process is gone as well."""
        self.fall_silent()
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as later:
        _bench(Path(folder), chosen.streams, chosen.seconds, later)


def _bench(folder: Path, streams: int, seconds: float, later: ExitStack) -> None:
    names = [f"stream{number:03}" for number in range(streams)]
    stack = _stack(folder, names)
    later.callback(stack.down, _say)
    stack.up(_say)
    os.environ |= stack.environment()
    api = stack.api()
    api.wait_for_dag(f"{names[-1]}.stream", timeout=300)
    _say(f"no stream      {_cost(stack, seconds)}")
    fleet = [Simulated(open_store(stack.store), name) for name in names]
    for driver in fleet:
        later.callback(driver.process.kill)
    over = threading.Event()
    later.callback(over.set)
    threading.Thread(target=_beat, args=(fleet, over), daemon=True).start()
    for name in names:
        api.trigger(f"{name}.stream")
    while len(watched := _watched(api)) < streams:
        _say(f"{len(watched)} of {streams} are watched")
        time.sleep(10)
    _say(f"{streams} streams     {_cost(stack, seconds)}")
    _lose(api, fleet[:_LOST])


def _lose(api: AirflowApi, lost: list[Simulated]) -> None:
    for number, driver in enumerate(lost):
        (driver.die if number % 2 else driver.fall_silent)()
    begun = time.monotonic()
    noticed: dict[str, tuple[int, float]] = {}
    while len(noticed) < len(lost) and time.monotonic() - begun < 60:
        watched = _watched(api)
        for number, driver in enumerate(lost):
            if driver.name not in watched and driver.name not in noticed:
                noticed[driver.name] = (number % 2, time.monotonic() - begun)
        time.sleep(0.2)
    for kind, what in ((1, "process gone"), (0, "lease silent")):
        times = sorted(after for found, after in noticed.values() if found == kind)
        _say(f"{what}: {len(times)} of {_LOST // 2} noticed, after {', '.join(f'{t:.1f}' for t in times)} s")


def _beat(fleet: list[Simulated], over: threading.Event) -> None:
    while not over.wait(2.0):
        for driver in fleet:
            driver.beat()


def _watched(api: AirflowApi) -> set[str]:
    """Pipelines whose task is deferred."""
    found = api.request("GET", "/dags/~/dagRuns/~/taskInstances?state=deferred&task_id=stream&limit=100")["task_instances"]
    return {task["dag_id"].removesuffix(".stream") for task in found if task["task_id"] == "stream"}


def _cost(stack: Stack, seconds: float) -> str:
    mark = StackState.load(stack.home / "stack.json").processes["triggerer"]
    leader = psutil.Process(mark.pid)
    family = [leader, *leader.children(recursive=True)]
    before, begun = sum(_cpu(p) for p in family), time.monotonic()
    time.sleep(seconds)
    share = (sum(_cpu(p) for p in family) - before) / (time.monotonic() - begun)
    memory = sum(p.memory_full_info().uss for p in family) / 2**20
    threads = sum(p.num_threads() for p in family)
    return f"triggerer: {share:6.1%} of a core, {memory:6.0f} MiB, {threads} threads"


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _stack(folder: Path, names: list[str]) -> Stack:
    dags = folder / "dags"
    (dags / "pipelines").mkdir(parents=True)
    (dags / "tidegate_dags.py").write_bytes((_REPOSITORY / "dags" / "tidegate_dags.py").read_bytes())
    for name in names:
        (dags / "pipelines" / f"{name}.yaml").write_text(_SPEC.format(name=name))
    os.environ["TIDEGATE_DRIVER"] = "false"  # what is lost in the end stays lost
    return Stack(StackSettings(home=folder / "home", dags=dags))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
