"""Pipelines whose executors are pods of a real API server of Kubernetes, with a real MinIO.

`python -m tests.e2e.kubernetes_runs launch` runs the scenarios of that name, without names all of
them. The driver runs here, with the rights that the chart gives to drivers. Its pods have the
chart's template, and keys of their own from a Secret. After each scenario every table has to hold
the rows that a driver without a cluster writes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import psutil
from ruamel.yaml import YAML

from tests.e2e.drivers import Piped, Steady, wait_for
from tests.e2e.feed import SPEC
from tests.infra.deploy import DEPLOY
from tests.servers.kubernetes import NAMESPACE, KubernetesApi, Node, run_kubernetes
from tests.servers.minio import RealMinio, running
from tests.servers.processes import has_busy_worker
from tidegate.checkpoints.host_clock import poll_until
from tidegate.infra.policies import Role, build_policy
from tidegate.infra.provision import Credentials, grant_policy

_LOCAL: Final = "spark: {driver_memory: 1g, jvm: quick}"
_RELEASE: Final = "sea"
_TOKEN: Final = "driver-token"
_DRIVER: Final = f"system:serviceaccount:{NAMESPACE}:{_RELEASE}-tidegate"
_SECRET: Final = "executor-keys"
_IMAGE: Final = "spark:none"
_PATIENCE: Final = 900.0  # seconds, on a busy machine
OBJECTS: Final = 10


@dataclass
class Rig:
    """An API server, its node, a MinIO, and the tables that every scenario has to reach."""

    api: KubernetesApi
    node: Node
    minio: RealMinio
    folder: Path

    @cached_property
    def expected(self) -> dict[str, list[str]]:
        """The tables of a driver without a cluster."""
        local = Steady(self.folder / "local", OBJECTS)
        assert local.run() == 0, local.log_text()
        return local.content()

    def feed(self, name: str) -> Piped:
        """A pipeline of its own in the bucket, with the objects of `expected`."""
        conf = {
            "spark.executor.instances": "2",
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.kubernetes.namespace": NAMESPACE,
            "spark.kubernetes.container.image": _IMAGE,
            "spark.kubernetes.executor.podTemplateFile": str(self.folder / "pod.yaml"),
            "spark.kubernetes.authenticate.caCertFile": str(self.api.ca),
            "spark.kubernetes.authenticate.oauthTokenFile": str(self.folder / "token"),
        }
        spark = {
            "master": f"k8s://{self.api.address}",
            "driver_memory": "512m",
            "jvm": "quick",
            "staging": "bucket",
            "conf": conf,
        }
        spec = SPEC.replace(_LOCAL, f"spark: {json.dumps(spark)}")
        url = f"s3://{self.minio.bucket}/{name}"
        fed = Steady(self.folder / name, OBJECTS, url, spec=spec)
        for file in sorted(fed.inbox.rglob("*")):
            if file.is_file():
                fed.store().upload(file, str(file.relative_to(fed.inbox)))
        return fed

    def check(self, piped: Piped) -> None:
        """Compare the tables with `expected`, and audit each row against its object."""
        assert "python_tasks_unavailable" not in piped.log_text()
        found = piped.content()
        different = [name for name, rows in self.expected.items() if found[name] != rows]
        assert different == [], f"other rows than a local run: {different}"
        assert piped.exact().problems == []

    def list_pods(self) -> list[dict[str, Any]]:
        """The pods that the API server has."""
        return list(self.api.ask(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"])


class Running:
    """A driver that reads a pipeline, until the end of the scenario."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.piped = rig, rig.feed(name)
        self.pods_before = len(rig.node.started)
        self.driver = self.piped.start()

    def wait(self, true: Callable[[], object]) -> None:
        """Wait until something is true, while the driver runs."""
        try:
            wait_for(true, self.driver, seconds=_PATIENCE)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {self._read_logs()}") from error

    def wait_until_done(self) -> int:
        """Wait for the end, and compare the tables; how many epochs there are."""
        code = self.driver.wait(_PATIENCE)
        assert code == 0, f"{code}: {self._read_logs()}"
        self.rig.check(self.piped)
        return self.read_slot()

    def read_slot(self) -> int:
        """How many epochs are sealed."""
        return self.piped.log().head().slot

    def count_pods(self) -> int:
        """How many pods this run has started."""
        return len(self.rig.node.started) - self.pods_before

    def _read_logs(self) -> str:
        return self.piped.log_text()[-6000:] + self.rig.node.read_output()[-6000:]


def launch(rig: Rig, run: Running) -> str:
    """A driver reads everything, ends, and leaves no pod."""
    epochs = run.wait_until_done()
    assert run.count_pods() >= 2
    poll_until(lambda: not rig.list_pods(), _PATIENCE, 0.3)
    assert rig.list_pods() == []
    return f"{epochs} epochs in {run.count_pods()} pods"


def lose_executor(rig: Rig, run: Running) -> str:
    """kill -9 of an executor while it computes; Spark makes another pod."""
    victim, sealed = _wait_for_busy_executor(rig, run), run.read_slot()
    before = run.count_pods()
    victim.kill()
    run.wait(lambda: run.count_pods() > before)
    return f"killed after epoch {sealed} of {run.wait_until_done()}"


def delete_pod(rig: Rig, run: Running) -> str:
    """The pod of an executor that computes is deleted; Spark makes another one."""
    victim, sealed = _wait_for_busy_executor(rig, run), run.read_slot()
    before = run.count_pods()
    name = next(name for name, one in rig.node.running.items() if one.pid == victim.pid)
    rig.api.ask(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", "DELETE")
    run.wait(lambda: run.count_pods() > before)
    return f"deleted after epoch {sealed} of {run.wait_until_done()}"


def lose_driver(rig: Rig, run: Running) -> str:
    """kill -9 of the driver; its executors end by themselves, and the next driver goes on."""
    _wait_for_busy_executor(rig, run)
    sealed = run.read_slot()
    jvms = [one for one in psutil.Process(run.driver.pid).children(True) if one.name() == "java"]
    run.driver.kill()
    run.driver.wait(_PATIENCE)
    orphans = rig.node.find_executors()
    _, alive = psutil.wait_procs([*jvms, *orphans], _PATIENCE)
    assert alive == [], "an executor has outlived its driver"
    run.driver = run.piped.start()
    return f"killed after epoch {sealed} of {run.wait_until_done()}"


def _wait_for_busy_executor(rig: Rig, run: Running) -> psutil.Process:
    """An executor with a Python worker that computes at this moment, after the first epoch."""
    run.wait(lambda: run.read_slot() >= 1)
    found: list[psutil.Process] = []

    def finds_one() -> bool:
        found[:] = [one for one in rig.node.find_executors() if has_busy_worker(one)]
        return bool(found)

    run.wait(finds_one)
    return found[0]


SCENARIOS: Final[dict[str, Callable[[Rig, Running], str]]] = {
    "launch": launch,
    "executor": lose_executor,
    "pod": delete_pod,
    "driver": lose_driver,
}


@contextmanager
def rig_on_kubernetes(folder: Path) -> Iterator[Rig]:
    """Servers and settings until the end of the block."""
    with ExitStack() as stack:
        minio = stack.enter_context(running(folder))
        api, node = stack.enter_context(run_kubernetes(folder / "k", {_TOKEN: _DRIVER}))
        environment = {**minio.environment(), "SPARK_LOCAL_IP": "127.0.0.1"}
        stack.enter_context(patch.dict(os.environ, environment))
        (folder / "token").write_text(_TOKEN)
        _apply_chart(api, folder)
        _create_secret(api, minio)
        yield Rig(api, node, minio, folder)


def _apply_chart(api: KubernetesApi, folder: Path) -> None:
    """Create the rights of drivers, and write the template of executors, as the chart has them."""
    text = (DEPLOY / "helm" / "tidegate" / "templates" / "executors.yaml").read_text()
    values = {
        ".Release.Name": _RELEASE,
        ".Release.Namespace": NAMESPACE,
        ".Values.executors.image": _IMAGE,
        ". | quote": _SECRET,
    }
    text = re.sub(r"{{ ([^}]+) }}", lambda found: values.get(found[1], ""), text)
    # What is left are lines of control, and settings that are none here.
    text = "\n".join(line for line in text.splitlines() if "{{" not in line)
    settings, role, binding = YAML(typ="safe").load_all(text)
    (folder / "pod.yaml").write_text(settings["data"]["pod.yaml"])
    rights = "apis/rbac.authorization.k8s.io/v1"
    api.create(rights, "roles", role)
    api.create(rights, "rolebindings", binding)


def _create_secret(api: KubernetesApi, minio: RealMinio) -> None:
    """Give executors keys of their own, which write rows and no slot."""
    keys, server = Credentials.generate("executor"), minio.server
    for name in SCENARIOS:
        inputs = ["inbox/"]
        rights = build_policy(Role.EXECUTOR, minio.bucket, "steady", prefix=name, inputs=inputs)
        grant_policy(server.endpoint, server.root, minio.bucket, keys, rights)
    given = {
        "TIDEGATE_EXECUTOR_S3_ACCESS_KEY": keys.access_key,
        "TIDEGATE_EXECUTOR_S3_SECRET_KEY": keys.secret_key,
    }
    api.create("api/v1", "secrets", {"metadata": {"name": _SECRET}, "stringData": given})


def run_scenarios(rig: Rig, names: Sequence[str]) -> int:
    """Run scenarios and print each with its result; the number that failed."""
    failed = 0
    for name in names:
        began = time.monotonic()
        run = Running(rig, name)
        try:
            result = SCENARIOS[name](rig, run)
        except Exception as error:  # the other scenarios do not depend on it
            traceback.print_exc()
            failed += 1
            result = f"FAILED: {error}"
        finally:
            run.driver.kill()
            run.driver.wait()
        print(f"{name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
    print(f"{len(names) - failed} of {len(names)} on Kubernetes")  # noqa: T201
    return failed


def main() -> int:
    """Run the scenarios that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCENARIOS)}; default: all")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    names = [name for name in SCENARIOS if name in (options.names or SCENARIOS)]
    with TemporaryDirectory(prefix="tk", dir="/tmp") as place:
        folder = Path(place)
        with rig_on_kubernetes(folder) as rig:
            return int(run_scenarios(rig, names) > 0)


if __name__ == "__main__":
    sys.exit(main())
