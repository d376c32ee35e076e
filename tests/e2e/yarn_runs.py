"""Pipelines that Airflow's launcher submits to a real YARN, with a real MinIO as their store.

`python -m tests.e2e.yarn_runs launch` runs the scenarios of that name, without names all of them.
After each, every table has to hold the rows that a driver of this machine writes for the same
objects.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from airflow.sdk.exceptions import TaskDeferred

from tests.e2e.drivers import Piped, Steady
from tests.e2e.feed import DONE, SPEC
from tests.operators.supervising import make_context
from tests.sealed_queries.apps import Clicks
from tests.sealed_queries.rig import KilledJob
from tests.servers.jars import spark_jars
from tests.servers.minio import RealMinio, running
from tests.servers.processes import has_busy_worker, list_children
from tests.servers.yarn import NARROW_QUEUE, YarnCluster, describe_site, run_yarn
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.host_clock import poll_until
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_overview import PipelineState
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import FailureClass
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.jobs.spec.operations import JARS, SubmitSpec, SupervisionSpec
from tidegate.operators.driver_launch import (
    LaunchedDriver,
    launch_driver,
    send_signal,
)
from tidegate.operators.driver_shutdown import StopOrder, StopTimeouts, stop_driver
from tidegate.operators.liveness import StreamObserver
from tidegate.operators.store_access import StoreAccess
from tidegate.operators.stream_operator import StreamOperator

_LOCAL: Final = "spark: {driver_memory: 1g, jvm: quick}"
_ON_YARN: Final = """\
spark:
  driver_memory: 512m
  jvm: quick
  staging: bucket
  conf: {spark.executor.instances: "2", spark.executor.memory: 512m}"""
_PATIENCE: Final = 900.0  # seconds, on a busy machine
EXECUTOR: Final = "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend"
MASTERS: Final = {
    "client": "org.apache.spark.deploy.yarn.ExecutorLauncher",
    "cluster": "org.apache.spark.deploy.yarn.ApplicationMaster",
}
MODES: Final = tuple(MASTERS)
_QUEUED: Final = 20.0  # seconds
NODES: Final = 2
_JOB_FILES: Final = 4


@dataclass
class Rig:
    """A YARN, a MinIO, and the tables that every scenario has to reach."""

    yarn: YarnCluster
    minio: RealMinio
    folder: Path
    objects: int = 10
    submitted: list[LaunchedDriver] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """How many epochs read all objects: one of each source per epoch."""
        return self.objects

    @cached_property
    def expected(self) -> dict[str, list[str]]:
        """The tables of a driver of this machine, on a folder."""
        local = Steady(self.folder / "local", self.objects)
        assert local.run() == 0, local.log_text()
        return local.content()

    def feed(self, name: str, *, spec: str = SPEC, has_end: bool = True) -> Piped:
        """A pipeline of its own in the bucket, with the objects of `expected`.

        Without `has_end` the sources have no file that ends them, so that no driver ends.
        """
        url = f"s3://{self.minio.bucket}/{name}"
        fed = Steady(self.folder / name, self.objects, url, spec=spec.replace(_LOCAL, _ON_YARN))
        upload_input(fed, [file for file in list_input(fed) if has_end or file.name != DONE])
        return fed

    def check(self, piped: Piped) -> None:
        """Compare the tables with `expected`, and audit each row against its object."""
        found = piped.content()
        different = [name for name, rows in self.expected.items() if found[name] != rows]
        assert different == [], f"other rows than a local run: {different}"
        assert piped.exact().problems == []


def list_input(fed: Piped) -> list[Path]:
    """The files of all sources."""
    return [file for file in sorted(fed.inbox.rglob("*")) if file.is_file()]


def upload_input(fed: Piped, files: Sequence[Path]) -> None:
    """Put files of the sources into the bucket."""
    for file in files:
        fed.store().upload(file, str(file.relative_to(fed.inbox)))


class Submitted:
    """A driver on YARN, launched as a task of Airflow launches it.

    Args:
        rig: the servers.
        spec_file: of the pipeline or job. What is launched has its files in the same folder.
        store_url: its store.
        mode: client or cluster.
        conf: further settings of Spark.
    """

    def __init__(
        self,
        rig: Rig,
        spec_file: Path,
        store_url: str,
        mode: str,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.rig, self.spec_file, self.store_url, self.mode = rig, spec_file, store_url, mode
        self.name = load_any_spec(spec_file).name
        self.log = SlotLog(open_store(store_url), self.name)
        self.submitted: LaunchedDriver | None = None
        self._conf = {**describe_site(rig.folder), **(conf or {})}
        self._earlier = 0
        self._has_lost_submitter = False

    def launch(self, recover_to: str = "latest") -> LaunchedDriver:
        """Submit a driver."""
        self._earlier = len(self.rig.yarn.list_applications())
        self._has_lost_submitter = False
        access = StoreAccess(self.store_url)
        options = SubmitSpec(conn_id=f"yarn_{self.mode}", conf=self._conf)
        with patch.dict(os.environ, {"TIDEGATE_HOME": str(self.spec_file.parent / "home")}):
            self.submitted = launch_driver(
                self.name, str(self.spec_file), access, recover_to, submit=options
            )
        self.rig.submitted.append(self.submitted)
        return self.submitted

    def kill_submitter(self) -> None:
        """kill -9 of what waits for the driver: in cluster mode, all of spark-submit."""
        assert self.submitted is not None
        self._has_lost_submitter = True
        if self.mode == "cluster":
            assert send_signal(self.submitted.leader, signal.SIGKILL, group=True)
            return
        below = list_children(self.submitted.leader.pid)
        (waiting,) = filter(_is_submission, below)
        waiting.kill()

    def wait(self, true: Callable[[], object], what: str) -> None:
        """Wait until something is true, while spark-submit has not failed."""
        assert self.submitted is not None
        deadline = time.monotonic() + _PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{what} not seen: {self.read_log()[-6000:]}"
            code = self.submitted.read_exit_code()
            is_well = code in (None, 0) or self._has_lost_submitter
            assert is_well, f"spark-submit ended with {code}: {self.read_log()[-6000:]}"
            time.sleep(0.2)

    def wait_until_sealed(self, slot: int) -> None:
        """Wait until so many epochs are sealed."""
        self.wait(lambda: self.log.head().slot >= slot, f"epoch {slot}")

    def wait_until_ended(self) -> None:
        """Wait until YARN calls the application a success."""
        yarn = self.rig.yarn
        self.wait(lambda: yarn.read_final_status(self.application()) != "UNDEFINED", "the end")
        log = self.read_log()
        assert yarn.read_final_status(self.application()) == "SUCCEEDED", log[-6000:]
        assert "python_tasks_unavailable" not in log, log[-6000:]

    def stop(self) -> None:
        """Stop the driver as a person does, and wait until its application has ended."""
        store, why = self.log.store, "a scenario of YARN"
        set_desired_state(store, self.name, DesiredState.STOPPED, who="a test", why=why)
        order = StopOrder("a test", why, timeouts=StopTimeouts(request=_PATIENCE))
        said = stop_driver(store, self.name, order)
        assert said == "the driver drained and stopped by itself", said
        self.wait_until_ended()

    def read_log(self) -> str:
        """What the driver wrote: here in client mode, in its container in cluster mode."""
        assert self.submitted is not None
        here = Path(self.submitted.log).read_text(errors="replace")
        return here + self.rig.yarn.read_output(self.application())

    def read_token(self) -> int:
        """The fencing token of the lease; 0 before the first driver."""
        lease = read_lease(self.log.store, self.name)
        return lease.token if lease else 0

    def application(self) -> str:
        """Id of the application of the launch; `none` before there is one."""
        found = self.rig.yarn.list_applications()[self._earlier :]
        return found[-1] if found else "none"

    def count_attempts(self) -> int:
        """How often YARN has started the application master of the launch."""
        return self.rig.yarn.count_attempts(self.application())


def _is_submission(process: psutil.Process) -> bool:
    """Whether this process waits for spark-submit; its short-lived helpers may have ended."""
    with suppress(psutil.NoSuchProcess):
        return "tidegate.operators.spark_submission" in process.cmdline()
    return False


class SubmittedPipeline(Submitted):
    """The pipeline of this name, fed with the objects of `Rig.expected`.

    Without `has_end` no driver ends before `end_input`.
    """

    def __init__(
        self,
        rig: Rig,
        name: str,
        mode: str,
        conf: Mapping[str, str] | None = None,
        has_end: bool = True,
    ) -> None:
        self.piped = rig.feed(name, has_end=has_end)
        super().__init__(rig, self.piped.spec_file, self.piped.store_url, mode, conf)

    def end_input(self) -> None:
        """Say that no more objects come."""
        upload_input(self.piped, [file for file in list_input(self.piped) if file.name == DONE])

    def wait_until_done(self) -> None:
        """Wait until YARN calls the application a success, and compare the tables."""
        self.wait_until_ended()
        self.rig.check(self.piped)


def launch(rig: Rig, mode: str) -> str:
    """A driver in this mode reads everything and ends."""
    run = SubmittedPipeline(rig, f"launch-{mode}", mode)
    run.launch()
    run.wait_until_done()
    return f"{run.log.head().slot} epochs"


def adopt(rig: Rig, mode: str) -> str:
    """The submitting process dies; a new task finds the driver alive and launches no other."""
    run = SubmittedPipeline(rig, f"adopt-{mode}", mode, has_end=False)
    run.launch()
    run.wait_until_sealed(1)
    run.kill_submitter()
    sealed, token = run.log.head().slot, run.read_token()
    task = StreamOperator(
        task_id="stream",
        pipeline=run.name,
        spec=str(run.spec_file),
        supervision=SupervisionSpec(rotate_after=None),
    )
    with patch.dict(os.environ, {"TIDEGATE_STORE": run.store_url}):
        try:
            task.execute(make_context())
        except TaskDeferred as deferred:
            trigger = deferred.trigger
    assert trigger.launched is None, "a second driver was launched"
    assert trigger.floor == token
    run.end_input()
    run.wait_until_done()
    assert run.read_token() == token
    assert run.count_attempts() == 1
    assert run.log.head().slot > sealed
    return f"adopted after epoch {sealed} of {run.log.head().slot}"


def wait_for_queue(rig: Rig, mode: str) -> str:
    """The queue gives nothing for a while; then the same driver reads everything."""
    hold = rig.yarn.fill_narrow_queue()
    run = SubmittedPipeline(rig, f"queue-{mode}", mode, {"spark.yarn.queue": NARROW_QUEUE})
    launched = run.launch()
    observer = StreamObserver(run.log.store, run.name, floor=1, launched=launched)
    run.wait(lambda: rig.yarn.read_state(run.application()) == "ACCEPTED", "an application")

    def has_waited() -> bool:
        seen = observer.observe()
        assert seen is not None
        assert seen.state is PipelineState.RUNNING, seen.why
        return observer.seen is not None and observer.seen.launched_for > _QUEUED

    run.wait(has_waited, "a driver that waits for the queue")
    assert rig.yarn.read_state(run.application()) == "ACCEPTED"
    assert run.log.head().slot <= 0
    rig.yarn.kill_application(hold)
    run.wait_until_done()
    assert run.read_token() == 1
    return f"{_QUEUED:g} s without resources, then {run.log.head().slot} epochs"


def lose_executor(rig: Rig, mode: str) -> str:
    """kill -9 of an executor while an epoch is computed; YARN gives another one."""
    run = SubmittedPipeline(rig, f"executor-{mode}", mode, has_end=False)
    run.launch()
    run.wait_until_sealed(1)
    victim = _wait_for_busy_executor(run)
    before = {one.pid for one in rig.yarn.find_containers(EXECUTOR)}
    sealed = run.log.head().slot
    victim.kill()
    run.wait(
        lambda: {one.pid for one in rig.yarn.find_containers(EXECUTOR)} - before, "a new executor"
    )
    run.end_input()
    run.wait_until_done()
    assert run.count_attempts() == 1
    return f"killed after epoch {sealed} of {run.log.head().slot}"


def lose_node(rig: Rig, mode: str) -> str:
    """kill -9 of a NodeManager with all of its containers, one of which computes."""
    run = SubmittedPipeline(rig, f"node-{mode}", mode, has_end=False)
    run.launch()
    run.wait_until_sealed(1)
    victim = _wait_for_busy_executor(run)
    (master,) = rig.yarn.find_containers(MASTERS[mode])
    before = {one.pid for one in rig.yarn.find_containers(EXECUTOR)}
    lost, sealed = rig.yarn.find_node(victim), run.log.head().slot
    loses_master = rig.yarn.find_node(master) == lost
    rig.yarn.kill_node(lost)
    rig.yarn.add_node()
    # YARN misses a node after a while. A driver in client mode that ends earlier leaves YARN an
    # application without an application master, which is no success.
    if loses_master:
        run.wait(lambda: rig.yarn.has_registered(run.application(), 2), "a second attempt")
    run.wait(
        lambda: {one.pid for one in rig.yarn.find_containers(EXECUTOR)} - before, "a new executor"
    )
    run.end_input()
    run.wait_until_done()
    assert run.count_attempts() == (2 if loses_master else 1)
    what = "the application master and an executor" if loses_master else "an executor"
    return f"{what} lost after epoch {sealed} of {run.log.head().slot}"


def lose_master(rig: Rig, mode: str) -> str:
    """kill -9 of the application master, which in cluster mode has the driver; YARN starts another.

    The second attempt takes the lease, so that nothing of the first one can be sealed after it.
    """
    run = SubmittedPipeline(rig, f"master-{mode}", mode, has_end=False)
    run.launch()
    run.wait_until_sealed(1)
    _wait_for_busy_executor(run)
    (master,) = rig.yarn.find_containers(MASTERS[mode])
    sealed, token = run.log.head().slot, run.read_token()
    master.kill()
    run.wait(lambda: rig.yarn.has_registered(run.application(), 2), "a second attempt")
    run.end_input()
    run.wait_until_done()
    assert run.count_attempts() == 2
    # In client mode the driver is no part of the application master, and goes on.
    assert run.read_token() == token + (1 if mode == "cluster" else 0)
    return f"killed after epoch {sealed} of {run.log.head().slot}"


def _wait_for_busy_executor(run: Submitted) -> psutil.Process:
    """An executor with a Python worker that computes at this moment."""
    found: list[psutil.Process] = []

    def finds_one() -> bool:
        executors = run.rig.yarn.find_containers(EXECUTOR)
        found[:] = [one for one in executors if has_busy_worker(one)]
        return bool(found)

    run.wait(finds_one, "an executor that computes")
    return found[0]


def stop(rig: Rig, mode: str) -> str:
    """A stop lets the driver drain and YARN's application succeed; the next one goes on."""
    run = SubmittedPipeline(rig, f"stop-{mode}", mode)
    run.launch()
    run.wait_until_sealed(2)
    run.stop()
    sealed = run.log.head().slot
    assert sealed < rig.epochs
    set_desired_state(run.log.store, run.name, DesiredState.RUN, who="a test", why="it goes on")
    run.launch()
    run.wait_until_done()
    return f"stopped after epoch {sealed} of {run.log.head().slot}"


def restore(rig: Rig, mode: str) -> str:
    """A driver launched with a checkpoint goes back to it, on a new timeline."""
    run = SubmittedPipeline(rig, f"restore-{mode}", mode)
    run.launch()
    run.wait_until_done()
    target = CheckpointCatalog(run.log).list_checkpoints()[-2]
    run.launch(str(target.id))
    run.wait_until_done()
    assert run.log.head().timeline == 1
    return f"back to {target.id}, then {run.log.head().slot} epochs"


def run_job(rig: Rig, mode: str) -> str:
    """An own job: its driver is killed, the next one goes on, and the sinks hold what they should."""
    with closing(KilledJob(rig.folder / "local-job", {}, Clicks, _JOB_FILES)) as local:
        local.run_to_end_of_input()
        expected = local.app.outputs()
    conf = {
        "spark.master": "yarn",  # the script asks for a local one
        "spark.executor.instances": "1",
        "spark.executor.memory": "512m",
    }
    url = f"s3://{rig.minio.bucket}/job-{mode}"
    folder = rig.folder / f"job-{mode}"
    with closing(KilledJob(folder, conf, Clicks, _JOB_FILES, url, location="bucket")) as job:
        run = Submitted(rig, folder / "job.yaml", url, mode)
        run.launch()
        run.wait(lambda: job.positions().get("per_minute", -1) >= 1, "two batches")
        sealed = dict(job.positions())
        job.find_holder().kill()
        assert run.submitted is not None
        assert poll_until(run.submitted.leader.is_proven_dead, _PATIENCE, 0.2)
        run.launch()
        run.wait(job.is_complete, "all files")
        run.stop()
        assert job.app.outputs() == expected
        job.read_line()
    return f"killed after batch {sealed['per_minute']}, then all of {_JOB_FILES} files"


def refuse_large_rows(rig: Rig, mode: str) -> str:
    """Rows that do not fit into a container are refused by name, and no container is killed."""
    spec = SPEC.replace("barrier: long}", "barrier: long, payload: string}")
    spec = spec.replace(_LOCAL, _ON_YARN)
    url = f"s3://{rig.minio.bucket}/memory-{mode}"
    fed = Steady(rig.folder / f"memory-{mode}", 3, url, spec=spec)
    large = fed.inbox / "inbox/south/00001.parquet"
    _add_payload(large)
    upload_input(fed, list_input(fed))
    run = Submitted(rig, fed.spec_file, url, mode)
    launched = run.launch()
    assert poll_until(lambda: launched.read_exit_code() is not None, _PATIENCE, 0.2)
    log = run.read_log()
    code = launched.read_exit_code()
    assert code == FailureClass.POISON.exit_code, f"{code}: {log[-6000:]}"
    for said in ("rows.no_memory", f"{large.name} rows 0 to 40"):
        assert said in log, f"{said!r} not in {log[-6000:]}"
    assert "physical memory limits" not in log, "a container was killed"
    return f"refused after epoch {run.log.head().slot}"


def _add_payload(file: Path) -> None:
    """Give each row of an object 32 MB, which the file holds in much less."""
    rows = pq.read_table(file)
    schema = rows.schema.append(pa.field("payload", pa.string()))
    with pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
        for place in range(len(rows)):
            payload = pa.array(["x" * (32 << 20)])
            writer.write_table(rows.slice(place, 1).append_column("payload", payload))


SCENARIOS: Final[dict[str, Callable[[Rig, str], str]]] = {
    "launch": launch,
    "adopt": adopt,
    "queue": wait_for_queue,
    "executor": lose_executor,
    "node": lose_node,
    "master": lose_master,
    "stop": stop,
    "restore": restore,
    "memory": refuse_large_rows,
    "job": run_job,
}
_IN_CLIENT_MODE: Final = ("memory", "job")
"""In cluster mode YARN starts a driver that has failed again, and a job is refused."""
RUNS: Final = (
    *((name, mode) for name in SCENARIOS for mode in MODES if name not in _IN_CLIENT_MODE),
    *((name, "client") for name in _IN_CLIENT_MODE),
)
"""Each scenario with the modes in which it is run."""


@contextmanager
def rig_on_yarn(folder: Path) -> Iterator[Rig]:
    """Servers, connections and settings until the end of the block."""
    jars = ",".join(map(str, spark_jars("spark-s3a", JARS["s3a"])))
    with ExitStack() as stack:
        minio = stack.enter_context(running(folder))
        yarn = stack.enter_context(run_yarn(folder / "y", NODES))
        environment = {
            **minio.environment(),
            **{f"AIRFLOW_CONN_YARN_{mode.upper()}": _connect(mode) for mode in MODES},
            "HADOOP_CONF_DIR": str(yarn.conf),
            "TIDEGATE_SPARK_JARS": jars,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        stack.enter_context(patch.dict(os.environ, environment))
        rig = Rig(yarn, minio, folder)
        stack.callback(_kill_submitted, rig.submitted)
        yield rig


def _kill_submitted(submitted: Sequence[LaunchedDriver]) -> None:
    """End what a scenario that failed has left."""
    for launched in submitted:
        send_signal(launched.leader, signal.SIGKILL, group=True)


def _connect(mode: str) -> str:
    return json.dumps({"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": mode}})


def run_scenarios(rig: Rig, chosen: Sequence[tuple[str, str]]) -> int:
    """Run scenarios in these modes and print each with its result; the number that failed."""
    failed = 0
    for name, mode in chosen:
        began = time.monotonic()
        try:
            result = SCENARIOS[name](rig, mode)
        except Exception as error:  # the other scenarios do not depend on it
            traceback.print_exc()
            failed += 1
            result = f"FAILED: {error}"
        print(f"{name} {mode}: {result} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
    print(f"{len(chosen) - failed} of {len(chosen)} on YARN")  # noqa: T201
    return failed


def main() -> int:
    """Run the scenarios that the command line names, in the modes that it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    names, modes = options.names or SCENARIOS, [options.mode] if options.mode else MODES
    chosen = [(name, mode) for name, mode in RUNS if name in names and mode in modes]
    if not chosen:
        parser.error("no scenario is run in this mode")
    # Short: containers have sockets below it.
    with TemporaryDirectory(prefix="ty", dir="/tmp") as folder, rig_on_yarn(Path(folder)) as rig:
        return int(run_scenarios(rig, chosen) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
