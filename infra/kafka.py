"""A real Kafka broker as a local process (KRaft, one node), from Maven's artifacts: for tests and for trying things out.

The jars (44 MB) are fetched once by Maven into the cache folder. Nothing else of Kafka's distribution is needed: storage is
formatted and the server started by its own classes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

from tidegate.infra.minio_build import cache_folder
from tidegate.infra.ports import LOOPBACK, free_port
from tidegate.infra.processes import ProcessMark, is_alive, kill, spawn, stop
from tidegate.jobs.spec.errors import TransientError

__all__ = ["BROKER", "CONNECTOR", "KafkaServer", "ensure_jars"]

BROKER = ("org.apache.kafka:kafka_2.13:4.3.1",)
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.spark:spark-avro_2.13:4.1.1",
)
_BESIDE_SPARK = "kafka-clients-*.jar commons-pool2-*.jar spark-sql-kafka-*.jar spark-token-provider-*.jar spark-avro_*.jar"
_FETCH_SECONDS = 420


def ensure_jars(name: str, artifacts: tuple[str, ...]) -> list[Path]:
    """The jars of some artifacts and of all they need, fetched by Maven unless they are in the cache.

    Raises:
        TransientError: Maven is not there, or its registry cannot be reached.
    """
    folder = cache_folder() / "jars" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(mkdtemp(prefix=".fetch-", dir=folder.parent))
        try:
            (work / "pom.xml").write_text(_pom(artifacts))
            _maven(work)
            (work / "jars").replace(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    chosen = _BESIDE_SPARK.split() if artifacts == CONNECTOR else ["*.jar"]  # Spark has the rest, and its own versions of it
    return sorted(jar for pattern in chosen for jar in folder.glob(pattern))


def _pom(artifacts: tuple[str, ...]) -> str:
    own = "<exclusions><exclusion><groupId>org.apache.spark</groupId><artifactId>*</artifactId></exclusion>"
    own += "<exclusion><groupId>org.apache.hadoop</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    dependencies = ""
    for artifact in artifacts:
        group, name, version, *classifier = artifact.split(":")
        place = f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        place += "".join(f"<classifier>{kind}</classifier>" for kind in classifier)
        dependencies += f"<dependency>{place}{own if group == 'org.apache.spark' else ''}</dependency>"
    head = "<modelVersion>4.0.0</modelVersion><groupId>tidegate</groupId><artifactId>fetch</artifactId><version>1</version>"
    return f"<project>{head}<dependencies>{dependencies}</dependencies></project>"


def _maven(work: Path) -> None:
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={work / 'jars'}"]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    except FileNotFoundError:
        raise TransientError("Maven is not installed", code="infra.no_maven", advice="sudo apt-get install -y maven") from None
    except subprocess.TimeoutExpired:
        raise TransientError("Maven did not finish in time", code="infra.maven", advice="try again") from None
    if done.returncode:
        said = next((line for line in done.stdout.splitlines() if "ERROR" in line), "no reason given")
        raise TransientError(f"Maven could not fetch the jars: {said[:300]}", code="infra.maven", advice="check the network")


class KafkaServer:
    """One broker and controller on loopback ports. Data outlives the process, so a killed broker can be started again.

    Args:
        jars: the broker's.
        folder: for its data and its log.
        tls: settings of its keystore (``ssl.keystore.location``, ...); `servers` then names a port that speaks TLS.
    """

    def __init__(self, jars: list[Path], folder: Path, *, tls: Mapping[str, str] | None = None) -> None:
        self._tls = dict(tls or {})
        self._class_path = os.pathsep.join(map(str, jars))
        self.folder = folder
        self.log = folder / "kafka.log"
        self.mark: ProcessMark | None = None
        self._ports: tuple[int, int, int] | None = None

    @property
    def servers(self) -> str:
        """Its address, for clients."""
        assert self._ports is not None  # noqa: S101 - chosen by start()
        return f"{LOOPBACK}:{self._ports[2 if self._tls else 0]}"

    def start(self, timeout: float = 90.0) -> None:
        """Start and wait until it listens.

        Raises:
            TransientError: it ended, or did not listen in time; the message names its log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "server.properties"
        if self._ports is None:
            self._ports = (free_port(), free_port(), free_port())
            settings.write_text(self._settings())
            self._java("kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", str(settings))
        command = ["java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", self._class_path, "kafka.Kafka", str(settings)]
        self.mark = spawn(command, log=self.log, env=dict(os.environ), cwd=self.folder)
        deadline = time.monotonic() + timeout
        while not self._listens():
            if not is_alive(self.mark) or time.monotonic() > deadline:
                raise TransientError(f"Kafka did not start on {self.servers}", code="infra.kafka", advice=f"read {self.log}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End with kill -9."""
        if self.mark is not None:
            kill([self.mark])

    def stop(self) -> None:
        """End it in an orderly way, or at least end it."""
        if self.mark is not None:
            stop([self.mark], 10.0)

    def _listens(self) -> bool:
        assert self._ports is not None  # noqa: S101
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((LOOPBACK, self._ports[2 if self._tls else 0])) == 0

    def _java(self, *command: str) -> None:
        subprocess.run(["java", "-Xmx256m", "-cp", self._class_path, *command], check=True, capture_output=True, timeout=120)

    def _settings(self) -> str:
        assert self._ports is not None  # noqa: S101
        broker, controller, secure = self._ports
        listeners = f"PLAINTEXT://{LOOPBACK}:{broker}" + (f",SSL://{LOOPBACK}:{secure}" if self._tls else "")
        lines = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
            "listeners": f"{listeners},CONTROLLER://{LOOPBACK}:{controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SSL:SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.folder / "data"),
            "num.partitions": "3",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "log.retention.check.interval.ms": "500",
            "log.segment.delete.delay.ms": "0",
            "log.cleaner.backoff.ms": "200",
            **self._tls,
        }
        return "".join(f"{name}={value}\n" for name, value in lines.items())


def _cluster_id() -> str:
    """A random id as Kafka writes them; one that begins with a dash would be taken for an option."""
    while (made := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made
