"""Drivers on other people's Spark.

A standalone cluster through spark-submit, and a Spark Connect server that outlives them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.drivers import SIGKILLED, Steady, wait_for
from tests.e2e.feed import SPEC
from tests.servers.spark import Cluster, ConnectServer, connect_server, standalone
from tests.wheels import build_wheels
from tidegate.errors import FailureClass
from tidegate.jobs.spec.operations import SubmitSpec
from tidegate.operators.driver_launch import LaunchedDriver, launch_driver
from tidegate.operators.store_access import StoreAccess

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
LOCAL = "spark: {driver_memory: 1g, jvm: quick}"
SMALL = 'spark: {driver_memory: 512m, conf: {spark.cores.max: "1", spark.executor.memory: 512m%s}}'
# Executors go between two epochs, which min_interval keeps apart, and come again for the next.
DYNAMIC = """, spark.dynamicAllocation.enabled: "true", spark.dynamicAllocation.shuffleTracking.enabled: "true",
  spark.dynamicAllocation.executorIdleTimeout: 1s, spark.dynamicAllocation.shuffleTracking.timeout: 1s"""
SPECS = {
    "left": SPEC.replace(LOCAL, SMALL % ""),
    "right": (
        SPEC.replace(LOCAL, SMALL % DYNAMIC).replace(
            "idle_interval: 100ms", "idle_interval: 100ms, min_interval: 6s"
        )
    ),
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A master with two workers, named by an Airflow connection."""
    with standalone(tmp_path, 2) as found:
        host, _, port = found.master.rpartition(":")
        connection = {
            "conn_type": "spark",
            "host": host,
            "port": int(port),
            "extra": {"deploy-mode": "client"},
        }
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(connection))
        monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield found


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Our wheels, and drivers that run on a Python which has everything but tidegate."""
    found = build_wheels(REPOSITORY, tmp_path / "dist")
    venv.create(tmp_path / "venv", symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # A path line: links to a checkout, which are such lines themselves, are not followed through
    # it.
    (tmp_path / "venv" / "lib" / version / "site-packages" / "borrowed.pth").write_text(
        sysconfig.get_path("purelib")
    )
    python = tmp_path / "venv" / "bin" / "python"
    bare = subprocess.run(
        [python, "-c", "import pyspark, tidegate"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert "No module named 'tidegate'" in bare.stderr
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    return tuple(found)


def _until(true: Callable[[], object], launched: LaunchedDriver, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        said = Path(launched.log).read_text(errors="replace")[-5000:]
        assert time.monotonic() < deadline, f"not seen in {seconds:.0f} s: {said}"
        assert launched.read_exit_code() in (None, 0), said
        time.sleep(0.1)


# In CI, `test_no_shared_disk.py` loses a worker of a cluster, `test_airflow_submit.py` submits, and
# the tests against the wheel run from it.
@pytest.mark.long
def test_two_pipelines_on_a_cluster_that_loses_a_worker(
    cluster: Cluster, wheels: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are submitted with our wheels, side by side, one with dynamic allocation, and the worker
    with most executors dies.

    Both tables are exact, and executors of the one came and went.
    """
    pipelines = {name: Steady(tmp_path / name, 10, spec=spec) for name, spec in SPECS.items()}
    options = SubmitSpec(conn_id="cluster", py_files=wheels)
    started = {}
    for name, steady in pipelines.items():
        monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / f"{name}-home"))
        spec, access = str(steady.spec_file), StoreAccess(steady.store_url)
        started[name] = launch_driver("steady", spec, access, "latest", submit=options)
    for name, steady in pipelines.items():
        _until(lambda steady=steady: steady.log().head().slot >= 2, started[name])  # type: ignore[misc]
    cluster.kill_worker(cluster.busiest())
    for name, steady in pipelines.items():
        _until(lambda name=name: started[name].read_exit_code() == 0, started[name])  # type: ignore[misc]
        assert steady.exact().problems == []
        assert "Traceback" not in Path(started[name].log).read_text()
    assert pipelines["left"].content() == pipelines["right"].content()
    assert (
        max(cluster.executors().values()) > 4
    )  # beyond the first two and those in place of the dead ones


def over(server: ConnectServer) -> str:
    """The steady pipeline on a Spark Connect server."""
    return SPEC.replace(LOCAL, f"spark: {{master: '{server.address}'}}")


def test_a_connect_server_that_dies_is_not_blamed_on_rows(tmp_path: Path) -> None:
    """kill -9 of the server.

    The driver ends as after an outage, and on the next server another one goes on exactly.
    """
    with connect_server(tmp_path) as server:
        steady = Steady(tmp_path / "p", 10, spec=over(server))
        driver = steady.start()
        wait_for(lambda: steady.log().head().slot >= 2, driver, seconds=600)
        server.kill()
        assert driver.wait(timeout=600) == FailureClass.TRANSIENT.exit_code, steady.log_text()
        assert "Traceback" not in steady.log_text()
    with connect_server(tmp_path) as server:
        steady.change_spec(over(server))
        assert steady.start().wait(timeout=600) == 0, steady.log_text()
    assert steady.exact().problems == []


# In CI, the test above has a second driver over Connect go on from what the first one sealed.
@pytest.mark.long
def test_a_driver_over_connect_is_replaced_while_its_jvm_runs(tmp_path: Path) -> None:
    """kill -9 of the driver.

    The next one goes on with the same server and its JVM, and the tables are exact.
    """
    with connect_server(tmp_path) as server:
        steady = Steady(tmp_path / "p", 24, spec=over(server))
        driver = steady.start()
        wait_for(lambda: steady.log().head().slot >= 4, driver, seconds=600)
        driver.kill()
        assert driver.wait() == SIGKILLED
        killed, before = time.time_ns() // 1000, steady.log().head().slot
        assert steady.start().wait(timeout=600) == 0, steady.log_text()
    first = next(filled.epoch for filled in steady.log().epochs_between(0, before + 1, before + 1))
    gap = (first.created_at - killed) / 1e6
    sys.stdout.write(f"kill -9 of a driver over Connect to the next sealed epoch: {gap:.1f} s\n")
    assert steady.exact().problems == []
