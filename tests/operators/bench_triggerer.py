"""`make bench-triggerer`.

What watching many streams costs one triggerer, and how soon ten losses at once are noticed.

The triggers run in one event loop, as in the triggerer, against a real MinIO; the drivers are
simulated in a process of their own. Five drivers die with their process, five only fall silent.
Nothing is asserted: it is for figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import psutil

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.lease import Lease, LeaseRenewer
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.store import Store
from tidegate.infra.local_processes import stop_processes
from tidegate.infra.minio_server import MinioServer, ensure_minio, provision_bucket
from tidegate.infra.provision import REGION, Credentials
from tidegate.operators.trigger import StreamTrigger

_URL = "s3://tidegate"
_LOST = 10
_PATIENCE = 30.0  # seconds for the losses to be noticed


class Simulated:
    """A driver that only renews its lease; its process is a `sleep` that can be killed."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        nothing = subprocess.DEVNULL
        self.process = subprocess.Popen(
            ["sleep", "3600"], stdin=nothing, stdout=nothing, stderr=nothing
        )
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        holder = ProcessIdentity.this_process(name).model_copy(
            update={"pid": self.process.pid, "start_ticks": int(fields[19])}
        )
        self.lease = Lease.acquire(store, name, holder)
        self.keeper = LeaseRenewer(self.lease).start()

    def beat(self) -> None:
        """As a driver does every two seconds."""
        self.keeper.announce_step("wait", 120.0)
        body = {"state": "running", "step_since": time.time()}
        write_status(
            self._store,
            self._name,
            DriverStatus(token=self.lease.token, driver=self._name, step="wait", at=0, body=body),
        )

    def end(self, *, process: bool) -> None:
        """The lease is no longer renewed, nor given back.

        The process is gone as well, or is not.
        """
        self.keeper.stop()
        if process:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--fleet", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names = [f"stream{number:03}" for number in range(chosen.streams)]
    if chosen.fleet:
        _fleet(names)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = MinioServer(ensure_minio(_say), Path(folder) / "data", Path(folder) / "minio.log")
        try:
            _serve(server)
            asyncio.run(_bench(names, chosen.seconds))
        finally:
            if server.mark is not None:
                stop_processes([server.mark])


def _serve(server: MinioServer) -> None:
    server.start_process()
    server.wait_until_healthy()
    keys = Credentials.generate("app")
    provision_bucket(server, _URL.removeprefix("s3://"), keys)
    os.environ |= {
        "TIDEGATE_STORE": _URL,
        "TIDEGATE_S3_ENDPOINT": server.endpoint,
        "TIDEGATE_S3_ACCESS_KEY": keys.access_key,
        "TIDEGATE_S3_SECRET_KEY": keys.secret_key,
        "TIDEGATE_S3_REGION": REGION,
    }


async def _bench(names: list[str], seconds: float) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.operators.bench_triggerer",
        "--fleet",
        "--streams",
        str(len(names)),
    ]
    fleet = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert fleet.stdin is not None
    assert fleet.stdout is not None
    try:
        await asyncio.to_thread(fleet.stdout.readline)
        me, noticed = psutil.Process(), dict[str, float]()
        before = me.memory_full_info().uss
        watching = [asyncio.create_task(_watch(name, noticed)) for name in names]
        await asyncio.sleep(10)  # clients, connections and the triggers' own settling
        share = await _share(me, seconds)
        memory = (me.memory_full_info().uss - before) / 2**20
        _say(
            f"{len(names)} streams: {share:.1%} of a core, {memory:.0f} MiB, {me.num_threads()}"
            " threads"
        )
        await _lose(names, noticed, fleet.stdin, fleet.stdout)
        for task in watching:
            task.cancel()
    finally:
        fleet.stdin.close()
        fleet.wait(10)


async def _watch(name: str, noticed: dict[str, float]) -> None:
    async for _ in StreamTrigger(pipeline=name, floor=1).run():
        noticed[name] = time.monotonic()


async def _share(process: psutil.Process, seconds: float) -> float:
    before, begun = process.cpu_times(), time.monotonic()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system) / (
        time.monotonic() - begun
    )


async def _lose(names: list[str], noticed: dict[str, float], ask: IO[str], answer: IO[str]) -> None:
    begun = time.monotonic()
    ask.write("lose\n")
    ask.flush()
    await asyncio.to_thread(answer.readline)
    while len(noticed) < _LOST and time.monotonic() - begun < _PATIENCE:
        await asyncio.sleep(0.1)
    for first, what in ((1, "process gone"), (0, "lease silent")):
        times = sorted(noticed[name] - begun for name in names[first:_LOST:2] if name in noticed)
        _say(
            f"{what}: {len(times)} of {_LOST // 2} noticed, after"
            f" {', '.join(f'{t:.1f}' for t in times)} s"
        )
    _say(f"false alarms: {len(set(noticed) - set(names[:_LOST]))}")


def _fleet(names: list[str]) -> None:
    store = open_store(_URL)
    fleet = [Simulated(store, name) for name in names]
    driving = list(fleet)

    def beat() -> None:
        while True:
            for driver in list(driving):
                driver.beat()
            time.sleep(2.0)

    threading.Thread(target=beat, daemon=True).start()
    _say("up")
    for _ in sys.stdin:  # one line loses ten; the end of the input ends all
        lost, driving[:] = driving[:_LOST], driving[_LOST:]
        for number, driver in enumerate(lost):
            driver.end(process=bool(number % 2))
        _say("lost")
    for driver in fleet:
        driver.process.kill()
    os._exit(0)  # the keepers' threads and leases go with us


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
