"""Rows per second and core as workers are added to a real cluster.

``make bench-workers``.

``python -m tests.bench.workers [--master yarn] [--job windows] [--rows 4000000] [--epochs 8]
[--rounds 2]``

Measured: one worker with one core against two workers with one core each, in turns, with MinIO as
the store, workers of a standalone master or executors on a NodeManager of YARN, on the windows of `make bench-windows`: alone, with events in order of arrival
(``default``), or with events in order of time (``both``); the epochs after the second, so that neither starting nor the compiling of
the first epochs is in it. Where there are no more cores to measure with, Spark's own event log says
what more would bring: the time in which no task ran (the driver alone: plan, decide, seal) stays,
and the tasks of each stage are laid upon so many cores, longest first. That takes tasks to cost the
same on every core, and disk and network to keep up.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

from tests.bench.generate import generate
from tests.bench.meter import cpu_seconds
from tests.bench.ours import bench_spec
from tests.bench.rounds import check
from tests.servers.minio import running
from tests.servers.spark import standalone
from tests.servers.yarn import describe_site, run_yarn
from tidegate.checkpoints.s3_store import S3Store
from tidegate.json_types import JsonObject

_WARM: Final = 2  # epochs before the clock starts
_CORES: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Task:
    """One task of Spark's event log; times in seconds."""

    stage: int
    begun: float
    ended: float
    cpu: float
    shuffled: int
    """Bytes written for the next stage."""


def tasks_of(event_log: Iterable[str], since: float, until: float) -> list[Task]:
    """The tasks that ran within a time."""
    found = []
    for line in event_log:
        event = json.loads(line)
        if event["Event"] != "SparkListenerTaskEnd" or "Task Metrics" not in event:
            continue
        info, metrics = event["Task Info"], event["Task Metrics"]
        task = Task(
            event["Stage ID"],
            info["Launch Time"] / 1e3,
            info["Finish Time"] / 1e3,
            metrics["Executor CPU Time"] / 1e9,
            metrics["Shuffle Write Metrics"]["Shuffle Bytes Written"],
        )
        if since <= task.begun and task.ended <= until:
            found.append(task)
    return found


def alone(tasks: Sequence[Task], since: float, until: float) -> float:
    """Seconds in which no task ran."""
    busy, covered = 0.0, since
    for task in sorted(tasks, key=lambda task: task.begun):
        busy += max(0.0, task.ended - max(task.begun, covered))
        covered = max(covered, task.ended)
    return until - since - busy


def laid_upon(tasks: Iterable[Task], cores: int) -> float:
    """Seconds that the tasks take on so many cores, stage after stage."""
    stages = defaultdict(list)
    for task in tasks:
        stages[task.stage].append(task.ended - task.begun)
    total = 0.0
    for lengths in stages.values():
        free = [0.0] * cores
        for length in sorted(lengths, reverse=True):
            heapq.heappush(free, heapq.heappop(free) + length)
        total += max(free)
    return total


def drive(master: str, site: JsonObject, job: str, store: str, out: Path) -> dict[str, Any]:
    """One pipeline on the cluster to its end, in this process; what the warm epochs took."""
    from tidegate.jobs.driver.pipeline_run import RunOptions, run_pipeline
    from tidegate.jobs.engine.epoch_engine import EpochReport

    log = out / "event-log"
    log.mkdir(parents=True)
    conf = {
        "spark.executor.memory": "1g",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": log.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        **site,
    }
    spec = bench_spec(job, {"master": master, "driver_memory": "2g", "conf": conf})
    ends: list[
        tuple[float, int, float]
    ] = []  # wall clock, rows so far, the driver's processor time

    def note(report: EpochReport, _seconds: float) -> None:
        if report.manifest is not None:
            ends.append((time.time(), report.manifest.counters.read, cpu_seconds()))

    code = run_pipeline(spec, RunOptions(store_url=store, on_epoch=note))
    (since, before, cpu_before), (until, after, cpu_after) = ends[_WARM - 1], ends[-1]
    (events,) = (
        path for path in log.iterdir() if not path.name.startswith(".")
    )  # beside it lies its checksum
    with events.open() as lines:
        tasks = tasks_of(lines, since, until)
    seconds = until - since
    return {
        "code": code,
        "rows": after - before,
        "seconds": seconds,
        "tasks": len(tasks),
        "run": sum(task.ended - task.begun for task in tasks),
        "cpu": sum(task.cpu for task in tasks),
        "shuffled": sum(task.shuffled for task in tasks) / 1e6,
        "alone": alone(tasks, since, until),
        "driver_cpu": cpu_after - cpu_before,
        "laid": {cores: laid_upon(tasks, cores) for cores in _CORES},
    }


@contextlib.contextmanager
def open_cluster(kind: str, workers: int, out: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster with so many workers of one core each: its master, and settings of Spark for it."""
    if kind == "standalone":
        with standalone(out, workers, cores=1) as cluster:
            yield cluster.master, {}
        return
    # Short: containers have sockets below it.
    with TemporaryDirectory(prefix="ty", dir="/tmp") as folder, run_yarn(Path(folder), 1) as yarn:
        conf = {
            **describe_site(out),
            "spark.executor.instances": str(workers),
            "spark.executor.cores": "1",
            "spark.executor.memoryOverhead": "1g",  # the node checks it: the Python worker's
        }
        with patch.dict(os.environ, {"HADOOP_CONF_DIR": str(yarn.conf)}):
            yield "yarn", conf


def contend(kind: str, workers: int, job: str, source: Path, out: Path) -> dict[str, Any]:
    """A new cluster of so many workers with one core each, a MinIO, and a driver process."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with (
        running(out / "minio") as minio,
        open_cluster(kind, workers, out) as (master, site),
        (out / "driver.log").open("wb") as log,
    ):
        store = S3Store(minio.settings())
        for path in sorted(source.rglob("*")):
            if path.is_file():
                store.upload(path, f"inbox/{path.relative_to(source)}")
        command = [sys.executable, "-m", "tests.bench.workers", "--drive", master]
        command += ["--site", json.dumps(site)]
        command += ["--job", job, "--store", f"s3://{minio.bucket}", "--work", str(out / "logs")]
        own = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        done = subprocess.run(
            command,
            env={**os.environ, **own, **minio.environment()},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode != 0:
            text = (out / "driver.log").read_text()
            raise SystemExit(f"the driver ended with {done.returncode}:\n{text[-3000:]}")
        for info in store.list_objects(f"bench_{job}/timelines/0/tables/"):
            path = out / "store" / info.key
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(info.key, path)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {check(job, source, out / 'store')}", flush=True)
    return found


def report(rounds: Sequence[dict[int, dict[str, Any]]]) -> Iterator[str]:
    """Medians as Markdown tables."""

    def median(workers: int, what: str) -> float:
        return float(statistics.median(one[workers][what] for one in rounds))

    yield (
        "| workers of 1 core | rows/s | rows/s and core | tasks s | their cpu s | shuffled MB |"
        " without a task s | driver s |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for workers in rounds[0]:
        rate = median(workers, "rows") / median(workers, "seconds")
        figures = (
            f"{median(workers, what):.1f}"
            for what in ("run", "cpu", "shuffled", "alone", "driver_cpu")
        )
        yield f"| {workers} | {rate:,.0f} | {rate / workers:,.0f} | " + " | ".join(figures) + " |"
    yield ""
    yield "| from the stages of one core | seconds | rows/s | rows/s and core |"
    yield "|---|---|---|---|"
    for cores in _CORES:
        laid = statistics.median(one[1]["laid"][str(cores)] + one[1]["alone"] for one in rounds)
        rate = median(1, "rows") / laid
        yield f"| {cores} cores | {laid:.1f} | {rate:,.0f} | {rate / cores:,.0f} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--job", choices=["windows", "default", "both"], default="windows")
    parser.add_argument("--work", type=Path, help="keep input and the last outputs here")
    parser.add_argument("--master", choices=["standalone", "yarn"], default="standalone")
    parser.add_argument("--drive", metavar="MASTER", help=argparse.SUPPRESS)
    parser.add_argument("--site", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        with contextlib.redirect_stdout(sys.stderr):
            found = drive(given.drive, given.site, given.job, given.store, given.work)
        print(json.dumps(found))
        sys.exit(found["code"])
    with TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        work = (given.work or Path(scratch)).resolve()
        source = work / f"input-{given.rows}-{given.epochs}"
        if not source.exists():
            generate(source, given.rows, given.epochs)
        rounds: list[dict[int, dict[str, Any]]] = []
        for number in range(given.rounds):
            order = (1, 2) if number % 2 == 0 else (2, 1)  # no one always goes first
            one = {
                workers: contend(
                    given.master, workers, given.job, source, work / f"workers-{workers}"
                )
                for workers in order
            }
            rounds.append(dict(sorted(one.items())))
            times = ", ".join(
                f"{workers}: {found['seconds']:.1f} s" for workers, found in rounds[-1].items()
            )
            print(f"round {number + 1}: {times}, load {os.getloadavg()[0]:.1f}", flush=True)
        print(
            f"{given.job} on {given.master}: {given.rows:,} rows in {given.epochs} epochs, {given.rounds} rounds,"
            f" {os.cpu_count()} cores; medians"
        )
        print("\n".join(report(rounds)))


if __name__ == "__main__":
    main()
