"""Real Spark servers on loopback for tests.

A standalone master with its workers, and a Spark Connect server.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psutil

from tests.servers.processes import list_children
from tidegate.infra.local_processes import (
    ProcessId,
    choose_free_port,
    is_process_alive,
    kill_processes,
    spawn_process,
)

_PATIENCE = 300.0  # seconds: two servers at once on a busy machine


@dataclass(frozen=True)
class Cluster:
    """A standalone master and its workers."""

    master: str
    workers: Sequence[ProcessId]
    log: Path
    """The master's."""
    head: ProcessId
    """The master."""

    def busiest(self) -> int:
        """The worker with most executors: its death is felt."""
        return max(
            range(len(self.workers)),
            key=lambda number: len(list_children(self.workers[number].pid)),
        )

    def executors(self) -> dict[str, int]:
        """Application -> how many executors it has been given so far."""
        return dict(
            Counter(
                re.findall(r"Launching executor (\S+)/\d+ on", self.log.read_text(errors="replace"))
            )
        )

    def list_processes(self) -> list[psutil.Process]:
        """The master, the workers and their executors."""
        marks = [self.head, *self.workers]
        below = [child for mark in self.workers for child in list_children(mark.pid)]
        return [*(psutil.Process(mark.pid) for mark in marks), *below]

    def kill_worker(self, number: int) -> None:
        """kill -9 of a worker and of the executors it runs, as when a host dies."""
        mark = self.workers[number]
        below = list_children(mark.pid)
        kill_processes([mark])
        for executor in below:
            with suppress(psutil.NoSuchProcess):
                executor.kill()


@contextmanager
def standalone(
    folder: Path,
    workers: int,
    *,
    cores: int = 2,
    hidden: Path | None = None,
    have_own_hosts: bool = False,
) -> Iterator[Cluster]:
    """A master with so many workers, of so many cores each.

    Args:
        folder: for logs, and for the workers' own files.
        workers: how many.
        cores: of each.
        hidden: a folder that the workers see empty, as hosts with another disk would.
        have_own_hosts: each worker has an address of its own. Spark runs no task twice on one host.
    """
    port = choose_free_port()
    url = f"spark://127.0.0.1:{port}"
    own = "org.apache.spark.deploy"
    log = folder / "master.log"
    marks = [
        _start(
            log,
            f"{own}.master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--webui-port",
            "0",
        )
    ]
    try:
        _until(log, "I have been elected leader", marks[0])
        for number in range(workers):
            place = [
                "--work-dir",
                str(folder / f"worker-{number}"),
                "--host",
                f"127.0.0.{number + 1 if have_own_hosts else 1}",
                "--webui-port",
                "0",
            ]
            size = ["--cores", str(cores), "--memory", "2g"]
            log = folder / f"worker-{number}.log"
            marks.append(
                _start(log, f"{own}.worker.Worker", *place, *size, url, prefix=_apart(hidden))
            )
        for number in range(workers):
            _until(
                folder / f"worker-{number}.log",
                "Successfully registered with master",
                marks[number + 1],
            )
        yield Cluster(url, marks[1:], folder / "master.log", marks[0])
    finally:
        kill_processes(marks)


@dataclass(frozen=True)
class ConnectServer:
    """A Spark Connect server and its `sc://` address."""

    address: str
    mark: ProcessId

    def kill(self) -> None:
        """kill -9."""
        kill_processes([self.mark])


@contextmanager
def connect_server(folder: Path, conf: Mapping[str, str] | None = None) -> Iterator[ConnectServer]:
    """A Spark Connect server on this machine, with further settings of Spark."""
    port, log = choose_free_port(), folder / "connect.log"
    address = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
    }
    settings = {
        **address,
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.master": "local[2]",
        **(conf or {}),
    }
    options = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    mark = _start(
        log, "org.apache.spark.deploy.SparkSubmit", "--class", server, *options, "spark-internal"
    )
    try:
        _until_open(port, mark, log)
        yield ConnectServer(f"sc://127.0.0.1:{port}", mark)
    finally:
        kill_processes([mark])


def can_hide() -> bool:
    """Whether this user may give a process a view of the disk of its own."""
    return subprocess.run([*_APART, "true"], capture_output=True, check=False).returncode == 0


_APART: Final = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def _apart(hidden: Path | None) -> list[str]:
    """What to put before a command so that it sees this folder empty."""
    return (
        []
        if hidden is None
        else [*_APART, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
    )


def _start(log: Path, *command: str, prefix: Sequence[str] = ()) -> ProcessId:
    """Run one of Spark's own classes with the Spark that pyspark brings along."""
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.submodule_search_locations
    home = spark.submodule_search_locations[0]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPARK")}
    # Else the web pages and the executors would listen on every interface.
    own = {
        "SPARK_HOME": home,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SCALA_VERSION": "2.13",
        "PYSPARK_PYTHON": sys.executable,
    }
    return spawn_process(
        [*prefix, f"{home}/bin/spark-class", *command], log=log, env=inherited | own, cwd=log.parent
    )


def _until(log: Path, words: str, mark: ProcessId) -> None:
    deadline = time.monotonic() + _PATIENCE
    while re.search(words, log.read_text(errors="replace")) is None:
        _still_waiting(mark, deadline, log)


def _until_open(port: int, mark: ProcessId, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        _still_waiting(mark, deadline, log)


def _still_waiting(mark: ProcessId, deadline: float, log: Path) -> None:
    if not is_process_alive(mark) or time.monotonic() > deadline:
        raise TimeoutError(f"not up: {log.read_text(errors='replace')[-3000:]}")
    time.sleep(0.1)
