"""A real Kafka broker as a local process (KRaft, one node), from Maven's artifacts.

For tests and for trying things out.

Nothing of Kafka's distribution but its jars is needed: storage is formatted and the server started
by its own classes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from tidegate.errors import TransientError
from tidegate.infra.local_processes import (
    LOOPBACK,
    ProcessId,
    choose_free_port,
    is_process_alive,
    kill_processes,
    spawn_process,
    stop_processes,
)


class KafkaServer:
    """One broker and controller on loopback ports.

    Data outlives the process, so a killed broker can be started again.

    Args:
        jars: the broker's.
        folder: for its data and its log.
        tls: settings of its keystore (``ssl.keystore.location``, ...); `servers` then names a port
            that speaks TLS.
        login: name and password of a user who has only the rights that `KafkaClient.allow` gives;
            `servers` then names a port that asks for them.
    """

    def __init__(
        self,
        jars: list[Path],
        folder: Path,
        *,
        tls: Mapping[str, str] | None = None,
        login: tuple[str, str] | None = None,
    ) -> None:
        self._secure = "SSL" if tls else "SASL_PLAINTEXT" if login else ""
        self._own = {**(tls or {}), **(_login_settings(*login) if login else {})}
        self._class_path = os.pathsep.join(map(str, jars))
        self.folder = folder
        self.log = folder / "kafka.log"
        self.mark: ProcessId | None = None
        self._ports: tuple[int, int, int] | None = None

    @property
    def open_servers(self) -> str:
        """The address that asks for neither TLS nor a login."""
        assert self._ports is not None
        return f"{LOOPBACK}:{self._ports[0]}"

    @property
    def servers(self) -> str:
        """Its address, for clients."""
        assert self._ports is not None
        return f"{LOOPBACK}:{self._ports[2 if self._secure else 0]}"

    def start(self, timeout: float = 90.0) -> None:
        """Start and wait until it listens.

        Raises:
            TransientError: it ended, or did not listen in time; the message names its log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "server.properties"
        if self._ports is None:
            self._ports = (choose_free_port(), choose_free_port(), choose_free_port())
            settings.write_text(self._settings())
            self._java(
                "kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", str(settings)
            )
        command = [
            "java",
            "-Xmx512m",
            "-XX:+UseSerialGC",
            "-cp",
            self._class_path,
            "kafka.Kafka",
            str(settings),
        ]
        self.mark = spawn_process(command, log=self.log, env=dict(os.environ), cwd=self.folder)
        deadline = time.monotonic() + timeout
        while not self._listens():
            if not is_process_alive(self.mark) or time.monotonic() > deadline:
                raise TransientError(
                    f"Kafka did not start on {self.servers}",
                    code="infra.kafka",
                    advice=f"read {self.log}",
                )
            time.sleep(0.1)

    def kill(self) -> None:
        """End with kill -9."""
        if self.mark is not None:
            kill_processes([self.mark])

    def stop(self) -> None:
        """End it in an orderly way, or at least end it."""
        if self.mark is not None:
            stop_processes([self.mark], 10.0)

    def _listens(self) -> bool:
        assert self._ports is not None
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((LOOPBACK, self._ports[2 if self._secure else 0])) == 0

    def _java(self, *command: str) -> None:
        subprocess.run(
            ["java", "-Xmx256m", "-cp", self._class_path, *command],
            check=True,
            capture_output=True,
            timeout=120,
        )

    def _settings(self) -> str:
        assert self._ports is not None
        broker, controller, secure = self._ports
        listeners = f"PLAINTEXT://{LOOPBACK}:{broker}" + (
            f",{self._secure}://{LOOPBACK}:{secure}" if self._secure else ""
        )
        lines = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
            "listeners": f"{listeners},CONTROLLER://{LOOPBACK}:{controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
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
            **self._own,
        }
        return "".join(f"{name}={value}\n" for name, value in lines.items())


def _login_settings(name: str, password: str) -> dict[str, str]:
    """A broker that knows one user, and lets everybody at its other port do everything."""
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
            f'{module} required user_{name}="{password}";'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }


def _cluster_id() -> str:
    """A random id as Kafka writes them.

    One that begins with a dash would be taken for an option.
    """
    while (made := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made
