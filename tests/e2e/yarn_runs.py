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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

import psutil

from tests.e2e.drivers import Piped, Steady
from tests.e2e.feed import SPEC
from tests.servers.jars import spark_jars
from tests.servers.minio import RealMinio, running
from tests.servers.yarn import YarnCluster, run_yarn
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.jobs.spec.operations import JARS, SubmitSpec
from tidegate.operators.driver_launch import (
    LaunchedDriver,
    launch_driver,
    send_signal,
)
from tidegate.operators.driver_shutdown import StopOrder, StopTimeouts, stop_driver
from tidegate.operators.store_access import StoreAccess

_LOCAL: Final = "spark: {driver_memory: 1g, jvm: quick}"
_ON_YARN: Final = """\
spark:
  driver_memory: 512m
  jvm: quick
  staging: bucket
  conf: {spark.executor.instances: "2", spark.executor.memory: 512m}"""
_PATIENCE: Final = 900.0  # seconds, on a busy machine
EXECUTOR: Final = "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend"
MODES: Final = ("client", "cluster")
NODES: Final = 2


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

    def feed(self, name: str, *, spec: str = SPEC) -> Piped:
        """A pipeline of its own in the bucket, with the objects of `expected`."""
        url = f"s3://{self.minio.bucket}/{name}"
        fed = Steady(self.folder / name, self.objects, url, spec=spec.replace(_LOCAL, _ON_YARN))
        for file in sorted(fed.inbox.rglob("*")):
            if file.is_file():
                fed.store().upload(file, str(file.relative_to(fed.inbox)))
        return fed

    def check(self, piped: Piped) -> None:
        """Compare the tables with `expected`, and audit each row against its object."""
        found = piped.content()
        different = [name for name, rows in self.expected.items() if found[name] != rows]
        assert different == [], f"other rows than a local run: {different}"
        assert piped.exact().problems == []


class Submitted:
    """A pipeline on YARN, launched as a task of Airflow launches it."""

    def __init__(self, rig: Rig, piped: Piped, mode: str) -> None:
        self.rig, self.piped, self.mode = rig, piped, mode
        self.name = piped.spec.name
        self.submitted: LaunchedDriver | None = None
        self._earlier = 0

    def launch(self, recover_to: str = "latest") -> LaunchedDriver:
        """Submit a driver."""
        self._earlier = len(self.rig.yarn.list_applications())
        access = StoreAccess(self.piped.store_url)
        options = SubmitSpec(conn_id=f"yarn_{self.mode}", conf=_describe_site(self.rig.folder))
        with patch.dict(os.environ, {"TIDEGATE_HOME": str(self.piped.folder / "home")}):
            self.submitted = launch_driver(
                self.name, str(self.piped.spec_file), access, recover_to, submit=options
            )
        self.rig.submitted.append(self.submitted)
        return self.submitted

    def wait(self, true: Callable[[], object], what: str) -> None:
        """Wait until something is true, while spark-submit has not failed."""
        assert self.submitted is not None
        deadline = time.monotonic() + _PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{what} not seen: {self.read_log()[-6000:]}"
            code = self.submitted.read_exit_code()
            assert code in (None, 0), f"spark-submit ended with {code}: {self.read_log()[-6000:]}"
            time.sleep(0.2)

    def wait_until_sealed(self, slot: int) -> None:
        """Wait until so many epochs are sealed."""
        self.wait(lambda: self.piped.log().head().slot >= slot, f"epoch {slot}")

    def wait_until_done(self) -> None:
        """Wait until YARN calls the application a success, and compare the tables."""
        self.wait_until_ended()
        self.rig.check(self.piped)

    def wait_until_ended(self) -> None:
        """Wait until YARN calls the application a success."""
        yarn = self.rig.yarn
        self.wait(lambda: yarn.read_final_status(self.application()) != "UNDEFINED", "the end")
        log = self.read_log()
        assert yarn.read_final_status(self.application()) == "SUCCEEDED", log[-6000:]
        assert "python_tasks_unavailable" not in log, log[-6000:]

    def read_log(self) -> str:
        """What the driver wrote: here in client mode, in its container in cluster mode."""
        assert self.submitted is not None
        here = Path(self.submitted.log).read_text(errors="replace")
        return here + self.rig.yarn.read_output(self.application())

    def application(self) -> str:
        """Id of the application of the launch; `none` before there is one."""
        found = self.rig.yarn.list_applications()[self._earlier :]
        return found[-1] if found else "none"

    def count_attempts(self) -> int:
        """How often YARN has started the application master of the launch."""
        return self.rig.yarn.count_attempts(self.application())


def launch(rig: Rig, mode: str) -> str:
    """A driver in this mode reads everything and ends."""
    run = Submitted(rig, rig.feed(f"launch-{mode}"), mode)
    run.launch()
    run.wait_until_done()
    return f"{run.piped.log().head().slot} epochs"


def lose_executor(rig: Rig, mode: str) -> str:
    """kill -9 of an executor while an epoch is computed; YARN gives another one."""
    run = Submitted(rig, rig.feed(f"executor-{mode}"), mode)
    run.launch()
    run.wait_until_sealed(1)
    victim: list[psutil.Process] = []

    def finds_busy_executor() -> bool:
        victim[:] = [one for one in rig.yarn.find_containers(EXECUTOR) if _has_busy_worker(one)]
        return bool(victim)

    run.wait(finds_busy_executor, "an executor that computes")
    before = {one.pid for one in rig.yarn.find_containers(EXECUTOR)}
    sealed = run.piped.log().head().slot
    victim[0].kill()
    run.wait(
        lambda: {one.pid for one in rig.yarn.find_containers(EXECUTOR)} - before, "a new executor"
    )
    run.wait_until_done()
    assert run.count_attempts() == 1
    return f"killed after epoch {sealed} of {run.piped.log().head().slot}"


def _has_busy_worker(executor: psutil.Process) -> bool:
    """Whether a Python worker of an executor computes at this moment."""
    with suppress(psutil.NoSuchProcess):
        children = executor.children(recursive=True)
        return any(child.status() == psutil.STATUS_RUNNING for child in children)
    return False


def stop(rig: Rig, mode: str) -> str:
    """A stop lets the driver drain and YARN's application succeed; the next one goes on."""
    run = Submitted(rig, rig.feed(f"stop-{mode}"), mode)
    run.launch()
    run.wait_until_sealed(2)
    store, why = run.piped.store(), "a scenario of YARN"
    set_desired_state(store, run.name, DesiredState.STOPPED, who="a test", why=why)
    order = StopOrder("a test", why, timeouts=StopTimeouts(request=_PATIENCE))
    said = stop_driver(store, run.name, order)
    assert said == "the driver drained and stopped by itself", said
    sealed = run.piped.log().head().slot
    run.wait_until_ended()
    assert sealed < rig.epochs
    set_desired_state(store, run.name, DesiredState.RUN, who="a test", why=why)
    run.launch()
    run.wait_until_done()
    return f"stopped after epoch {sealed} of {run.piped.log().head().slot}"


def restore(rig: Rig, mode: str) -> str:
    """A driver launched with a checkpoint goes back to it, on a new timeline."""
    run = Submitted(rig, rig.feed(f"restore-{mode}"), mode)
    run.launch()
    run.wait_until_done()
    target = CheckpointCatalog(run.piped.log()).list_checkpoints()[-2]
    run.launch(str(target.id))
    run.wait_until_done()
    assert run.piped.log().head().timeline == 1
    return f"back to {target.id}, then {run.piped.log().head().slot} epochs"


SCENARIOS: Final[dict[str, Callable[[Rig, str], str]]] = {
    "launch": launch,
    "executor": lose_executor,
    "stop": stop,
    "restore": restore,
}
RUNS: Final = (
    ("launch", "client"),
    ("executor", "client"),
    ("stop", "client"),
    ("restore", "client"),
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


def _describe_site(folder: Path) -> dict[str, str]:
    """Settings of a site whose hosts have Spark and this Python at the same paths."""
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.submodule_search_locations
    python = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return {
        "spark.yarn.jars": f"local:{spark.submodule_search_locations[0]}/jars/*",
        "spark.yarn.stagingDir": f"file://{folder}/staging",
        **{f"spark.yarn.appMasterEnv.{name}": value for name, value in python.items()},
        **{f"spark.executorEnv.{name}": value for name, value in python.items()},
    }


def run_scenarios(rig: Rig, chosen: Sequence[tuple[str, str]]) -> int:
    """Run scenarios in these modes and print each with its result; the number that failed."""
    failed = 0
    for name, mode in chosen:
        began = time.monotonic()
        try:
            result = SCENARIOS[name](rig, mode)
        except AssertionError as error:
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
    # Short: containers have sockets below it.
    with TemporaryDirectory(prefix="ty", dir="/tmp") as folder, rig_on_yarn(Path(folder)) as rig:
        return int(run_scenarios(rig, chosen) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
