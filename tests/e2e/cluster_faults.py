"""Faults of a standalone cluster, by itself and behind a Spark Connect server.

`python -m tests.e2e.cluster_faults job-1 --master connect` runs one fault. After each one every row
is in exactly one place, all tables are those of a driver without a cluster, and no process has read
a file that no manifest names.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.drivers import Piped, Steady, wait_for
from tests.e2e.feed import SPEC
from tests.e2e.task_faults import FOLDED, TaskFaults
from tests.rows_on_spark.processes import Family, Seen
from tests.rows_on_spark.proxy import NamingProxy, run_proxy
from tests.rows_on_spark.requests import StorePlace
from tests.servers.minio import RealMinio, running
from tests.servers.spark import Cluster, connect_server, standalone
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import FailureClass

MASTERS: Final = ("standalone", "connect")
OBJECTS: Final = 3
_LOCAL: Final = "spark: {driver_memory: 1g, jvm: quick}"
_FEED: Final = SPEC.replace("barrier: long}", "barrier: long, payload: string}")
_STREAMS: Final = """\
streams:
  large: {}
  totals: {schema: {item: string, n: long, total: long}}
pipes:
  pick: {from: events, to: large, where: amount >= 100, inherit: true}
reducers:
  sum: {from: large, to: totals, keys: [item], aggregates: {n: count(*), total: sum(amount)}, inherit: true}
"""
_SPECULATION: Final = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "2",
    "spark.speculation.minTaskRuntime": "500ms",
}
_CONF: Final = {
    "slow": _SPECULATION,
    "again": {"spark.task.maxFailures": "1"},  # each try takes as long as a new executor
}
_AWAY: Final = 120.0  # seconds
_RESTARTS: Final = 3
_PATIENCE: Final = 900.0  # seconds, on a busy machine


class _Strangers(Family):
    """Processes that need no names here."""

    def find_owner(self, port: int, listening: int) -> Seen | None:
        """No one."""
        return None


@dataclass(frozen=True)
class Shape:
    """What the rows are like.

    Attributes:
        payload: bytes of a row.
        copies: how often each row is there.
        streams: the part of the spec with streams.
    """

    payload: int
    copies: int = 1
    streams: str = ""


_UNITS: Final = Shape(payload=96 << 10)
"""An object is a unit of its own."""
_SHARED: Final = Shape(payload=384 << 10)
"""Two tasks share the release of an epoch."""
_STREAMED: Final = Shape(payload=0, copies=600, streams=_STREAMS)
"""Two tasks fold the batches of a reducer."""


class Heavy(Steady):
    """The steady pipeline with many bytes or rows, so that each job has several tasks."""

    def __init__(self, folder: Path, store_url: str | None, spark: str, shape: Shape) -> None:
        spec = _FEED.replace(_LOCAL, spark) + shape.streams
        super().__init__(folder, OBJECTS, store_url, spec=spec)
        dice = random.Random(11)
        for file in sorted(self.inbox.rglob("*.parquet")):
            rows = pa.concat_tables([pq.read_table(file)] * shape.copies)
            payload = [
                base64.b64encode(dice.randbytes(shape.payload)).decode() for _ in range(len(rows))
            ]
            pq.write_table(rows.append_column("payload", [payload]), file)
        if store_url is not None:
            for file in sorted(self.inbox.rglob("*")):
                if file.is_file():
                    self.store().upload(file, str(file.relative_to(self.inbox)))

    def content(self) -> dict[str, list[str]]:
        """With the rows of the streams."""
        streams = {
            name: sorted(
                repr(sorted(row.items()))
                for row in self.table(name).drop_columns(["_timeline", "_epoch"]).to_pylist()
            )
            for name in self.spec.streams
        }
        return {**super().content(), **streams}


@dataclass
class Rig:
    """Servers for one fault."""

    proxy: NamingProxy
    faults: TaskFaults
    cluster: Cluster
    pipeline: Heavy
    shape: Shape


@dataclass
class Bench:
    """What all faults share.

    Args:
        folder: for everything.
        minio: the store.
    """

    folder: Path
    minio: RealMinio

    _expected: dict[Shape, dict[str, list[str]]] = field(default_factory=dict)

    def compute_expected(self, shape: Shape) -> dict[str, list[str]]:
        """The tables of a driver without a cluster."""
        if shape not in self._expected:
            local = Heavy(self.folder / f"local-{len(self._expected)}", None, _LOCAL, shape)
            assert local.run() == 0, local.log_text()
            self._expected[shape] = local.content()
        return self._expected[shape]

    @contextmanager
    def open_rig(self, fault: str, kind: str) -> Iterator[Rig]:
        """A cluster of two workers, and a pipeline that is fed."""
        name = f"{fault}-{kind}"
        folder = self.folder / name
        folder.mkdir()
        faults = TaskFaults(folder / "faults")
        with ExitStack() as stack:
            proxy = stack.enter_context(run_proxy(self.minio.server.port, _Strangers("")))
            store = {**self.minio.environment(), "TIDEGATE_S3_ENDPOINT": proxy.endpoint}
            own = {**store, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
            stack.enter_context(patch.dict(os.environ, own))
            with patch.dict(os.environ, faults.environment()):
                servers = standalone(folder, 2, cores=1, have_own_hosts=fault == "slow")
                cluster = stack.enter_context(servers)
            conf = {"spark.executor.memory": "1g", **_CONF.get(fault, {})}
            if kind == "connect":
                own_master = {**conf, "spark.master": cluster.master}
                server = stack.enter_context(connect_server(folder, own_master))
                spark = f"spark: {{master: '{server.address}'}}"
            else:
                spark = (
                    f"spark: {{master: '{cluster.master}', driver_memory: 1g,"
                    f" conf: {json.dumps(conf)}}}"
                )
            url = f"s3://{self.minio.bucket}/{name}"
            shape = _SHAPES.get(fault, _UNITS)
            pipeline = Heavy(folder / "p", url, spark, shape)
            yield Rig(proxy, faults, cluster, pipeline, shape)

    def check(self, rig: Rig) -> str:
        """Compare all tables, audit each row, and look for reads of files that no manifest names."""
        pipeline = rig.pipeline
        found, expected = pipeline.content(), self.compute_expected(rig.shape)
        assert all(expected[name] for name in pipeline.spec.streams), "streams without rows"
        different = [name for name, rows in expected.items() if found[name] != rows]
        assert different == [], f"other rows than without a cluster: {different}"
        assert pipeline.exact().problems == []
        assert "python_tasks_unavailable" not in pipeline.log_text(1)
        requests = list(rig.proxy.requests)  # those of the readers above, too
        named = list_named_files(pipeline.log())
        place = StorePlace(self.minio.bucket, pipeline.store_url.rpartition("/")[2], "steady")
        read = {place.get_key(one.path) for one in requests if one.method == "GET"}
        written = rig.faults.read_written()
        orphans = {one.key for one in written} - named
        assert named & read, "the proxy has seen no read at all"
        assert orphans & read == set(), "a file was read that no manifest names"
        assert len({one.key for one in written}) == len(written), "two tasks wrote one name"
        return f"{len(written)} files of tasks, {len(orphans)} of them named by no manifest"


def list_named_files(log: SlotLog) -> set[str]:
    """The keys of all files that the manifests of a log name."""
    head = log.head().slot
    epochs = log.epochs_between(0, 1, head)
    return {file.key for filled in epochs for file in filled.epoch.all_files()}


def kill_in_job_1(bench: Bench, rig: Rig) -> str:
    """kill -9 of an executor, when a task that reads rows has written its late ones."""
    return _kill_executor(bench, rig, "table:late")


def kill_in_job_2(bench: Bench, rig: Rig) -> str:
    """kill -9 of an executor, when a task that releases rows has written its file."""
    return _kill_executor(bench, rig, "table:events")


def kill_in_shared_release(bench: Bench, rig: Rig) -> str:
    """kill -9 of one of two executors that share the release of an epoch, after its first file."""
    result = _kill_executor(bench, rig, "table:events")
    shared = rig.faults.count_shared_stages("table:events")
    assert shared > 0, "no two tasks have shared a release"
    return f"{shared} shared releases; {result}"


def kill_in_dispatch(bench: Bench, rig: Rig) -> str:
    """kill -9 of an executor, when a task that dispatches to streams has written its files."""
    return _kill_executor(bench, rig, "table:totals")


def kill_in_fold(bench: Bench, rig: Rig) -> str:
    """kill -9 of an executor, when a task has folded one of the groups of keys of a batch."""
    rig.faults.kill_executor_after(FOLDED)
    _run_to_end(rig)
    assert rig.faults.has_killed(FOLDED), "no executor was killed"
    return bench.check(rig)


def _kill_executor(bench: Bench, rig: Rig, kind: str) -> str:
    rig.faults.kill_executor_after(kind)
    _run_to_end(rig)
    assert rig.faults.has_killed(kind), "no executor was killed"
    result = bench.check(rig)
    assert not result.endswith(" 0 of them named by no manifest"), result
    return result


def kill_again(bench: Bench, rig: Rig) -> str:
    """kill -9 of each executor that takes a slice: the driver names it and ends after minutes."""
    rig.faults.kill_executors_after("table:late")
    code = rig.pipeline.start().wait(timeout=_PATIENCE)
    log = rig.pipeline.log_text()
    assert code == FailureClass.POISON.exit_code, f"{code}: {log}"
    assert "spark.executors_lost_again" in log, log
    named = re.search(r"(\d+ jobs) lost their executors with (.+?\.parquet rows 0 to \d+)", log)
    assert named is not None, log
    sealed = rig.pipeline.log().head().slot
    # Without the fault the next driver reads everything.
    rig.faults.stop_killing("table:late")
    _run_to_end(rig)
    ended = f"ended after epoch {sealed} and {named[1]} with {named[2]}"
    return f"{ended}; {bench.check(rig)}"


def slow_worker(bench: Bench, rig: Rig) -> str:
    """A worker that is slow by ten; Spark starts its tasks a second time elsewhere."""
    rig.faults.slow_down()
    _run_to_end(rig)
    result = bench.check(rig)
    repeated = rig.faults.count_repeated_tasks()
    assert repeated > 0, "no task has run twice"
    return f"{repeated} tasks ran twice; {result}"


def lose_cluster(bench: Bench, rig: Rig) -> str:
    """Master, workers and executors stop for two minutes in the middle of the run."""
    driver = rig.pipeline.start()
    wait_for(lambda: rig.pipeline.log().head().slot >= 1, driver)
    stopped = rig.cluster.list_processes()
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    sealed = rig.pipeline.log().head().slot
    time.sleep(_AWAY)
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    assert sealed < OBJECTS, "the run had ended before"
    restarts = _wait_for_end(rig.pipeline, driver)
    result = bench.check(rig)
    return f"{_AWAY:g} s away after epoch {sealed}, {restarts} restarts; {result}"


def _run_to_end(rig: Rig) -> None:
    _wait_for_end(rig.pipeline, rig.pipeline.start())


def _wait_for_end(pipeline: Piped, driver: subprocess.Popen[bytes]) -> int:
    """Wait for the end, and start a driver again that gave up for a passing reason; how often."""
    for restarts in range(_RESTARTS):
        code = driver.wait(timeout=_PATIENCE)
        if code == 0:
            return restarts
        assert code == FailureClass.TRANSIENT.exit_code, f"{code}: {pipeline.log_text()}"
        driver = pipeline.start()
    raise AssertionError(f"{_RESTARTS} drivers gave up: {pipeline.log_text()}")


FAULTS: Final[dict[str, Callable[[Bench, Rig], str]]] = {
    "job-1": kill_in_job_1,
    "job-2": kill_in_job_2,
    "share": kill_in_shared_release,
    "streams": kill_in_dispatch,
    "fold": kill_in_fold,
    "again": kill_again,
    "slow": slow_worker,
    "away": lose_cluster,
}
_SHAPES: Final = {"share": _SHARED, "streams": _STREAMED, "fold": _STREAMED}
RUNS: Final = (
    ("job-1", "standalone"),
    ("job-2", "standalone"),
    ("share", "standalone"),  # Spark Connect does not say how many tasks run at a time
    ("streams", "standalone"),
    ("fold", "standalone"),
    ("again", "standalone"),
    ("job-1", "connect"),
    ("job-2", "connect"),
    ("streams", "connect"),
    ("fold", "connect"),
    ("slow", "standalone"),
    ("away", "standalone"),
    ("slow", "connect"),
    ("away", "connect"),
)
"""Each fault with the masters on which it is run."""


@contextmanager
def open_bench(folder: Path) -> Iterator[Bench]:
    """A store for all faults until the end of the block."""
    with running(folder) as minio:
        yield Bench(folder, minio)


def run_fault(bench: Bench, name: str, master: str) -> str:
    """Run a fault on servers of its own; what it has done."""
    with bench.open_rig(name, master) as rig:
        return FAULTS[name](bench, rig)


def main() -> int:
    """Run the faults that the command line names, on the masters that it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--master", choices=MASTERS, help="default: both")
    options = parser.parse_args()
    if unknown := set(options.names) - set(FAULTS):
        parser.error(f"no fault {', '.join(sorted(unknown))}")
    masters = [options.master] if options.master else MASTERS
    names = options.names or FAULTS
    chosen = [(name, master) for name, master in RUNS if name in names and master in masters]
    differences = 0
    with TemporaryDirectory() as folder, open_bench(Path(folder)) as bench:
        for name, master in chosen:
            began = time.monotonic()
            try:
                result = run_fault(bench, name, master)
            except AssertionError as error:
                differences += 1
                result = f"DIFFERENT: {error}"
            seconds = time.monotonic() - began
            print(f"{name} {master}: {result} ({seconds:.0f} s)", flush=True)  # noqa: T201
    print(f"{len(chosen)} faults, {differences} differences")  # noqa: T201
    return int(differences > 0)


if __name__ == "__main__":
    raise SystemExit(main())
