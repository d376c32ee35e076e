"""A real API server of Kubernetes on loopback, and a node that is a part of the tests.

etcd and kube-apiserver are the real ones; `make kubernetes` builds them. The node has no container
runtime. It starts the command of each pod as a process of this machine and reports its state, as a
kubelet does. Images, networks and limits of resources have no effect.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

from tests.servers.certificates import make_certificate
from tests.servers.processes import list_children
from tidegate.checkpoints.host_clock import PeriodicThread
from tidegate.infra.local_processes import (
    LOOPBACK,
    ProcessId,
    choose_free_port,
    is_process_alive,
    kill_processes,
    spawn_process,
)
from tidegate.infra.minio_server import locate_cache_folder

NAMESPACE: Final = "default"
EXECUTOR: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_ADMIN: Final = "admin-token"
_PATIENCE: Final = 300.0  # seconds, on a busy machine
_EVERY: Final = 0.2  # seconds between two looks at the pods
_MERGE: Final = "application/merge-patch+json"


class KubernetesApi:
    """etcd and kube-apiserver, which checks tokens and rights.

    Args:
        folder: for their data and logs.
        users: token -> name of a user without rights of its own.
    """

    def __init__(self, folder: Path, users: Mapping[str, str]) -> None:
        self.folder, self._users = folder, users
        self.address = f"https://{LOOPBACK}:{choose_free_port()}"
        self.ca = folder / "ca.pem"
        self._servers: list[ProcessId] = []

    def start(self) -> None:
        """Start both and wait until the API answers.

        Raises:
            TimeoutError: one ended, or did not answer in time; the message has the end of its log.
        """
        certificates = self.folder / "certificates"
        make_certificate(self.folder, certificates)
        key, public = certificates / "private.key", certificates / "public.crt"
        rows = [f"{_ADMIN},admin,admin,system:masters"]
        rows += [f"{token},{name},{name}" for token, name in self._users.items()]
        (self.folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        etcd, peers = (f"http://{LOOPBACK}:{choose_free_port()}" for _ in range(2))
        self._start_server(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )
        self._start_server(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--bind-address={LOOPBACK}",
            f"--advertise-address={LOOPBACK}",
            f"--secure-port={self.address.rpartition(':')[2]}",
            f"--tls-cert-file={public}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            # No controller makes the service accounts that it asks for.
            "--disable-admission-plugins=ServiceAccount",
        )
        self._wait(lambda: bool(self.ask(f"/api/v1/namespaces/{NAMESPACE}")))

    def stop(self) -> None:
        """End both."""
        kill_processes(self._servers)

    def ask(
        self, path: str, method: str = "GET", body: object = None, content: str = "application/json"
    ) -> dict[str, Any]:
        """The answer of the API server to its administrator.

        Raises:
            HTTPError: it refused.
        """
        request = Request(
            self.address + path,
            method=method,
            headers={"Content-Type": content, "Authorization": f"Bearer {_ADMIN}"},
            data=None if body is None else json.dumps(body).encode(),
        )
        trust = ssl.create_default_context(cafile=str(self.ca))
        with urlopen(request, timeout=30, context=trust) as answer:
            return dict(json.loads(answer.read()))

    def create(self, group: str, kind: str, body: Mapping[str, Any]) -> None:
        """Create an object, as `kubectl create` does."""
        self.ask(f"/{group}/namespaces/{NAMESPACE}/{kind}", "POST", body)

    def _start_server(self, name: str, *options: str) -> None:
        program = locate_cache_folder() / "bin" / name
        log = self.folder / f"{name}.log"
        self._servers.append(spawn_process([str(program), *options], log=log, cwd=self.folder))

    def _wait(self, is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            with suppress(OSError):
                if is_up():
                    return
            if not all(map(is_process_alive, self._servers)) or time.monotonic() > deadline:
                logs = [file.read_text(errors="replace") for file in self.folder.glob("*.log")]
                raise TimeoutError("not up: " + "".join(text[-3000:] for text in logs))
            time.sleep(0.3)


class Node:
    """Runs the pods of the namespace as processes of this machine.

    Args:
        api: where the pods are.
        folder: for their working folders and their output.
    """

    def __init__(self, api: KubernetesApi, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[str] = []
        """Names of all pods that were started, the oldest first."""
        self._work = PeriodicThread("node", self._look, _EVERY)

    def start(self) -> None:
        """Run pods until `stop`."""
        self._work.start()

    def stop(self) -> None:
        """End all pods."""
        self._work.stop(_PATIENCE)
        for process in self.running.values():
            _kill(process)

    def find_executors(self) -> list[psutil.Process]:
        """The JVMs of Spark's executors."""
        found = []
        for process in list(self.running.values()):
            if process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(process.pid))
        return found

    def read_output(self) -> str:
        """What all pods have written so far."""
        return "".join(log.read_text(errors="replace") for log in self._folder.glob("*/log"))

    def _look(self) -> None:
        with suppress(OSError):  # the next look does the rest
            for pod in self._api.ask(self._pods)["items"]:
                name = pod["metadata"]["name"]
                if "deletionTimestamp" in pod["metadata"]:
                    self._delete(name)
                elif name not in self.running:
                    self._run(pod)
                elif pod["status"]["phase"] == "Running":
                    self._report_end(pod)

    def _run(self, pod: Mapping[str, Any]) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        target = {"apiVersion": "v1", "kind": "Node", "name": "node"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        self._api.ask(f"{self._pods}/{name}/binding", "POST", {**binding, "target": target})
        folder = self._folder / uid
        folder.mkdir(parents=True)
        (container,) = pod["spec"]["containers"]
        environment = self._build_environment(name, container, folder)
        with (folder / "log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                _build_command(container["args"], environment),
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(name)
        self._report(pod, "Running", {"running": {"startedAt": _now()}}, is_ready=True)

    def _build_environment(
        self, name: str, container: Mapping[str, Any], folder: Path
    ) -> dict[str, str]:
        """What the image, the pod and its secrets give the container."""
        spark = find_spec("pyspark")
        assert spark is not None
        assert spark.submodule_search_locations
        found = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        found |= {"SPARK_HOME": spark.submodule_search_locations[0], "SPARK_LOCAL_IP": LOOPBACK}
        # As an image has it, with tidegate's packages.
        found |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        for one in container.get("envFrom", []):
            secret = self._api.ask(
                f"/api/v1/namespaces/{NAMESPACE}/secrets/{one['secretRef']['name']}"
            )
            found |= {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
        fields = {"status.podIP": LOOPBACK, "metadata.name": name}
        for one in container["env"]:
            given = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[one["name"]] = one.get("value", "") if given is None else fields[given]
        # Volumes are folders of the pod.
        for mount in container.get("volumeMounts", []):
            place = folder / mount["name"]
            place.mkdir(exist_ok=True)
            where = mount["mountPath"]
            found = {key: text.replace(where, str(place)) for key, text in found.items()}
        return found

    def _report_end(self, pod: Mapping[str, Any]) -> None:
        code = self.running[pod["metadata"]["name"]].poll()
        if code is not None:
            ended = {"exitCode": code if code >= 0 else 128 - code, "finishedAt": _now()}
            phase = "Failed" if code else "Succeeded"
            self._report(pod, phase, {"terminated": ended}, is_ready=False)

    def _report(
        self, pod: Mapping[str, Any], phase: str, state: Mapping[str, Any], *, is_ready: bool
    ) -> None:
        (container,) = pod["spec"]["containers"]
        name, image = container["name"], container["image"]
        shown = {"name": name, "image": image, "imageID": "", "restartCount": 0, "state": state}
        status = {
            "phase": phase,
            "podIP": LOOPBACK,
            "podIPs": [{"ip": LOOPBACK}],
            "containerStatuses": [{**shown, "ready": is_ready}],
        }
        path = f"{self._pods}/{pod['metadata']['name']}/status"
        self._api.ask(path, "PATCH", {"status": status}, _MERGE)

    def _delete(self, name: str) -> None:
        if name in self.running:
            _kill(self.running[name])
        with suppress(HTTPError):  # it is gone
            self._api.ask(f"{self._pods}/{name}", "DELETE", {"gracePeriodSeconds": 0})


def _build_command(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """What the entry point of Spark's image runs for an executor."""
    assert arguments == ["executor"], arguments
    numbered = [key for key in environment if key.startswith("SPARK_JAVA_OPT_")]
    numbered.sort(key=lambda key: int(key.rpartition("_")[2]))
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    options = {
        "driver-url": "SPARK_DRIVER_URL",
        "executor-id": "SPARK_EXECUTOR_ID",
        "cores": "SPARK_EXECUTOR_CORES",
        "app-id": "SPARK_APPLICATION_ID",
        "hostname": "SPARK_EXECUTOR_POD_IP",
        "resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
        "podName": "SPARK_EXECUTOR_POD_NAME",
    }
    return [
        "java",
        *(environment[key] for key in numbered),
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        f"{environment['SPARK_HOME']}/jars/*",
        EXECUTOR,
        *(text for name, key in options.items() for text in (f"--{name}", environment[key])),
    ]


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:  # its number may be that of another process by now
        return
    for child in list_children(process.pid):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait(_PATIENCE)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def run_kubernetes(folder: Path, users: Mapping[str, str]) -> Iterator[tuple[KubernetesApi, Node]]:
    """An API server with one node until the end of the block."""
    folder.mkdir()
    api = KubernetesApi(folder, users)
    node = Node(api, folder / "pods")
    try:
        api.start()
        node.start()
        yield api, node
    finally:
        node.stop()
        api.stop()
