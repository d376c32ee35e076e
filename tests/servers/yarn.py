"""A real YARN on loopback for tests: a ResourceManager and NodeManagers, each a process of its own.

Nothing of Hadoop's distribution but jars is needed; Maven fetches them once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from getpass import getuser
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

import psutil

from tests.servers.jars import ensure_jars
from tests.servers.processes import list_children
from tidegate.checkpoints.host_clock import poll_until
from tidegate.infra.local_processes import (
    LOOPBACK,
    ProcessId,
    choose_free_port,
    is_process_alive,
    kill_processes,
    spawn_process,
)

HADOOP: Final = "3.4.2"
"""The version of the Hadoop client that pyspark brings along."""
# What the jar with YARN's servers lacks on Java 17 comes behind it.
_JARS: Final = (
    f"org.apache.hadoop:hadoop-client-minicluster:{HADOOP}",
    f"org.apache.hadoop:hadoop-client-api:{HADOOP}",
    f"org.apache.hadoop:hadoop-client-runtime:{HADOOP}",
    "org.bouncycastle:bcprov-jdk18on:1.78.1",
    "org.bouncycastle:bcpkix-jdk18on:1.78.1",
    "ch.qos.reload4j:reload4j:1.2.25",
    "org.slf4j:slf4j-reload4j:1.7.36",
    "javax.xml.bind:jaxb-api:2.3.1",
    "com.sun.xml.bind:jaxb-impl:2.3.1",
    "com.sun.xml.bind:jaxb-core:2.3.0.1",
    "javax.activation:activation:1.1.1",
)
_JARS_SHA256: Final = "217c2af1466163905b12e23b1165eb2d6d52e38f6acfaebebb1b729735ca2969"
_SERVER: Final = "org.apache.hadoop.yarn.server"
_REGISTERED: Final = "Registered with ResourceManager as "
_PATIENCE: Final = 300.0  # seconds, on a busy machine
_LISTENERS: Final = (
    "yarn.resourcemanager.address",
    "yarn.resourcemanager.scheduler.address",
    "yarn.resourcemanager.resource-tracker.address",
    "yarn.resourcemanager.admin.address",
)
_SITE: Final = {
    # Two nodes of one host differ by their ports.
    "yarn.scheduler.include-port-in-node-name": "true",
    "yarn.scheduler.minimum-allocation-mb": "128",
    "yarn.nodemanager.address": f"{LOOPBACK}:0",
    "yarn.nodemanager.localizer.address": f"{LOOPBACK}:0",
    "yarn.nodemanager.webapp.address": f"{LOOPBACK}:0",
    "yarn.nodemanager.resource.memory-mb": "6144",
    "yarn.nodemanager.resource.cpu-vcores": "8",
    # A JVM reserves far more virtual memory than it uses, so that most clusters check the real one.
    "yarn.nodemanager.pmem-check-enabled": "true",
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
    # A node that is silent for so long (ms) is lost. A busy machine needs more than seconds.
    "yarn.nm.liveness-monitor.expiry-interval-ms": "30000",
}
NARROW_QUEUE: Final = "narrow"
"""Runs one application at a time: the next one waits until that one has ended."""
_QUEUES: Final = "yarn.scheduler.capacity.root"
_SCHEDULER: Final = {
    f"{_QUEUES}.queues": f"default,{NARROW_QUEUE}",
    f"{_QUEUES}.default.capacity": "50",
    f"{_QUEUES}.{NARROW_QUEUE}.capacity": "50",
    # One user may take what is free in all queues.
    f"{_QUEUES}.default.user-limit-factor": "2",
    f"{_QUEUES}.{NARROW_QUEUE}.user-limit-factor": "2",
    "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
    # The first application is always let in.
    f"{_QUEUES}.{NARROW_QUEUE}.maximum-am-resource-percent": "0.001",
    "yarn.scheduler.capacity.node-locality-delay": "-1",
}
_LOG_SETTINGS: Final = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c{1} %m%n
"""


class YarnCluster:
    """A ResourceManager and NodeManagers that check the memory of their containers.

    Args:
        folder: for logs and for the containers' own files. Its path should be short: sockets of
            containers lie below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "conf"
        """For `HADOOP_CONF_DIR` of whoever submits."""
        self._class_path = os.pathsep.join(map(str, ensure_jars("yarn", _JARS, _JARS_SHA256)))
        self._web = f"{LOOPBACK}:{choose_free_port()}"
        listens = {name: f"{LOOPBACK}:{choose_free_port()}" for name in _LISTENERS}
        self._site = {**_SITE, **listens, "yarn.resourcemanager.webapp.address": self._web}
        self._manager: ProcessId | None = None
        self.nodes: list[ProcessId] = []

    def start(self) -> None:
        """Start the ResourceManager and wait until it answers; it has no nodes yet.

        Raises:
            TimeoutError: it ended or did not answer in time; the message has the end of its log.
        """
        self.conf.mkdir(parents=True)
        _write_settings(
            self.conf / "core-site.xml",
            {"fs.defaultFS": "file:///", "hadoop.tmp.dir": str(self.folder / "tmp")},
        )
        _write_settings(self.conf / "yarn-site.xml", self._site)
        _write_settings(self.conf / "capacity-scheduler.xml", _SCHEDULER)
        (self.conf / "log4j.properties").write_text(_LOG_SETTINGS)
        log = self.folder / "resourcemanager.log"
        self._manager = self._java(log, self.conf, f"{_SERVER}.resourcemanager.ResourceManager")
        self._wait(self._manager, log, lambda: bool(self._ask("info")))

    def add_node(self) -> int:
        """Start one more NodeManager and wait until the ResourceManager has it.

        Raises:
            TimeoutError: as for `start`.
        """
        number = len(self.nodes)
        place = self.folder / f"n{number}"
        settings = {
            **self._site,
            "yarn.nodemanager.local-dirs": str(place / "l"),
            "yarn.nodemanager.log-dirs": str(place / "logs"),
        }
        (place / "conf").mkdir(parents=True)
        _write_settings(place / "conf" / "yarn-site.xml", settings)
        log = self.folder / f"nodemanager-{number}.log"
        own = f"{place / 'conf'}{os.pathsep}{self.conf}"
        self.nodes.append(self._java(log, own, f"{_SERVER}.nodemanager.NodeManager"))
        self._wait(self.nodes[number], log, lambda: _REGISTERED in log.read_text(errors="replace"))
        return number

    def kill_node(self, number: int) -> None:
        """kill -9 of a NodeManager and of its containers, as when a host dies."""
        containers = list_children(self.nodes[number].pid)
        kill_processes([self.nodes[number]])
        for process in containers:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        """End everything, containers included."""
        for number in range(len(self.nodes)):
            self.kill_node(number)
        if self._manager is not None:
            kill_processes([self._manager])

    def list_applications(self) -> list[str]:
        """Ids of all applications, the oldest first, as the ResourceManager's log has them."""
        return re.findall(r" (application_\w+) State change from NEW to ", self._read_log())

    def fill_narrow_queue(self) -> str:
        """Run an application in the queue that sleeps; returns its id when it runs."""
        application = str(self._ask("apps/new-application", "POST", {})["applicationId"])
        submission = {
            "applicationId": application,
            "applicationName": "sleeper",
            "queue": NARROW_QUEUE,
            "containerLaunchContextInfo": {"commands": ["exec sleep 3600"]},
            "resource": {"memory": 128, "vCores": 1},
        }
        self._ask("apps", "POST", submission)
        number = application.removeprefix("application_")
        began = re.compile(rf"appattempt_{number}_\d+ State change from ALLOCATED to LAUNCHED")
        poll_until(lambda: began.search(self._read_log()), _PATIENCE, 0.3)
        assert began.search(self._read_log()), f"no sleeper: {self._read_log()[-3000:]}"
        return application

    def kill_application(self, application: str) -> None:
        """End an application as YARN's command line does."""
        self._ask(f"apps/{application}/state", "PUT", {"state": "KILLED"})

    def read_state(self, application: str) -> str:
        """ACCEPTED while it waits for resources, RUNNING, FINISHED; `none` before it is known."""
        with suppress(HTTPError):
            return str(self._ask(f"apps/{application}/state")["state"])
        return "none"

    def _ask(self, path: str, method: str = "GET", body: object = None) -> dict[str, Any]:
        """The ResourceManager's answer; empty without a content."""
        request = Request(
            f"http://{self._web}/ws/v1/cluster/{path}?user.name={getuser()}",
            method=method,
            headers={"Content-Type": "application/json", "Accept": "application/json"},
            data=None if body is None else json.dumps(body).encode(),
        )
        with urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def read_final_status(self, application: str) -> str:
        """SUCCEEDED, FAILED or KILLED; UNDEFINED while the application has not ended."""
        found = re.search(rf"appId={application},.*finalStatus=(\w+)", self._read_log())
        return found[1] if found else "UNDEFINED"

    def count_attempts(self, application: str) -> int:
        """How often YARN has started the application master."""
        number = application.removeprefix("application_")
        return len(set(re.findall(rf"appattempt_{number}_\d+", self._read_log())))

    def has_registered(self, application: str, attempt: int) -> bool:
        """Whether this attempt's application master has registered."""
        number = f"appattempt_{application.removeprefix('application_')}_{attempt:06}"
        return f"{number} State change from LAUNCHED to RUNNING" in self._read_log()

    def read_output(self, application: str) -> str:
        """What all containers of an application have written to their standard output so far."""
        files = sorted(self.folder.glob(f"n*/logs/{application}/*/stdout"))
        return "".join(file.read_text(errors="replace") for file in files)

    def _read_log(self) -> str:
        return (self.folder / "resourcemanager.log").read_text(errors="replace")

    def find_containers(self, main_class: str) -> list[psutil.Process]:
        """The Java processes in containers that run this class of Spark."""
        found = []
        for process in (child for mark in self.nodes for child in list_children(mark.pid)):
            with suppress(psutil.NoSuchProcess):
                if process.name() == "java" and main_class in process.cmdline():
                    found.append(process)
        return found

    def find_node(self, container: psutil.Process) -> int:
        """The number of the node that runs a process in a container."""
        below = [list_children(mark.pid) for mark in self.nodes]
        return next(number for number, found in enumerate(below) if container in found)

    def _java(self, log: Path, conf: Path | str, main_class: str) -> ProcessId:
        opened = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "util")]
        path = f"{conf}{os.pathsep}{self._class_path}"
        options = ["-Xmx384m", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true", *opened]
        options.append(f"-Djava.io.tmpdir={self.folder}")
        command = ["java", *options, "-cp", path, main_class]
        return spawn_process(command, log=log, env=dict(os.environ), cwd=self.folder)

    def _wait(self, mark: ProcessId, log: Path, is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            with suppress(OSError):
                if is_up():
                    return
            if not is_process_alive(mark) or time.monotonic() > deadline:
                raise TimeoutError(f"not up: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)


@contextmanager
def run_yarn(folder: Path, nodes: int) -> Iterator[YarnCluster]:
    """A YARN with so many nodes until the end of the block."""
    cluster = YarnCluster(folder)
    try:
        cluster.start()
        for _ in range(nodes):
            cluster.add_node()
        yield cluster
    finally:
        cluster.stop()


def describe_site(folder: Path) -> dict[str, str]:
    """Settings of Spark for hosts that have Spark and this Python at the same paths.

    What a submission uploads goes below `folder`.
    """
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.submodule_search_locations
    python = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": LOOPBACK}
    return {
        "spark.yarn.jars": f"local:{spark.submodule_search_locations[0]}/jars/*",
        "spark.yarn.stagingDir": f"file://{folder}/staging",
        **{f"spark.yarn.appMasterEnv.{name}": value for name, value in python.items()},
        **{f"spark.executorEnv.{name}": value for name, value in python.items()},
    }


def _write_settings(file: Path, settings: Mapping[str, str]) -> None:
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(value)}</value></property>\n"
        for name, value in settings.items()
    )
    file.write_text(f"<configuration>\n{properties}</configuration>\n")
