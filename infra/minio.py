"""A real MinIO server as a local process, with one bucket and a user who may use it and nothing else."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from tidegate.infra.ports import LOOPBACK, choose_free_port
from tidegate.infra.processes import ProcessId, is_process_alive, kill_processes, spawn_process, stop_processes
from tidegate.infra.provision import REGION, Credentials, build_bucket_policy, grant_policy
from tidegate.jobs.spec.errors import TransientError

__all__ = ["REGION", "Credentials", "MinioServer", "provision_bucket"]

_START_TIMEOUT = 120.0  # seconds until it answers: one on an idle machine, and a server that ends is seen at once


class MinioServer:
    """One MinIO process on a loopback port, its web console off.

    The data folder and the root credentials outlive the process, so a killed server can be started again.

    Args:
        program: the server program, from `ensure_minio`.
        data: folder of the objects; made if missing.
        log: file that gets the server's output.
        root: the root user's keys.
        port: wanted port; another one is taken if somebody listens there.
        mark: a running server to adopt (then `port` is its port).
    """

    def __init__(
        self,
        program: Path,
        data: Path,
        log: Path,
        *,
        root: Credentials | None = None,
        port: int | None = None,
        mark: ProcessId | None = None,
    ) -> None:
        self.program = program
        self.data = data
        self.log = log
        self.root = root or Credentials.generate("root")
        self.mark = mark
        self._port = port

    @property
    def port(self) -> int:
        """The port it listens on, or listened on when it last ran."""
        if self._port is None:
            raise RuntimeError("start() chooses the port")
        return self._port

    @property
    def endpoint(self) -> str:
        """Its URL, for S3 clients."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may still be starting)."""
        return self.mark is not None and is_process_alive(self.mark)

    def start(self, timeout: float = _START_TIMEOUT) -> None:
        """Start the server, unless it runs, and wait until it answers.

        Raises:
            TransientError: it ended, or did not answer in time; the message names its log.
        """
        self.start_process()
        self.wait_until_healthy(timeout)

    def start_process(self) -> ProcessId:
        """Start the process, unless it runs, and return at once, so that the caller can note it down before waiting."""
        if self.mark is None or not is_process_alive(self.mark):
            self._port = choose_free_port(self._port)
            self.data.mkdir(parents=True, exist_ok=True)
            self.mark = spawn_process(self._build_command(), log=self.log, env=self._build_environment(), cwd=self.data.parent)
        return self.mark

    def wait_until_healthy(self, timeout: float = _START_TIMEOUT) -> None:
        """Wait until it answers.

        Raises:
            TransientError: it ended, or did not answer in time; the message names its log.
        """
        deadline = time.monotonic() + timeout
        while not self.is_healthy():
            if not self.alive or time.monotonic() > deadline:
                what = "did not answer in time" if self.alive else "ended while starting"
                raise TransientError(f"MinIO {what} on {self.endpoint}", code="infra.minio_start", advice=f"read {self.log}")
            time.sleep(0.05)

    def stop(self, grace: float = 10.0) -> None:
        """End it in an orderly way."""
        if self.mark is not None:
            stop_processes([self.mark], grace)

    def kill(self) -> None:
        """End with kill -9, as a crash would. `start()` brings it back with the same port, keys and objects."""
        if self.mark is not None:
            kill_processes([self.mark])

    def is_healthy(self) -> bool:
        """Whether it answers and can serve writes."""
        try:
            with urllib.request.urlopen(f"{self.endpoint}/minio/health/cluster", timeout=10) as answer:  # noqa: S310 - http on loopback
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def _build_command(self) -> list[str]:
        # A certificate in the default ~/.minio/certs would turn the server to https.
        certificates = self.data.parent / "minio-certs"
        address = f"{LOOPBACK}:{self.port}"
        return [str(self.program), "server", "--quiet", "--address", address, "--certs-dir", str(certificates), str(self.data)]

    def _build_environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MINIO_")}
        return {
            **inherited,
            "MINIO_ROOT_USER": self.root.access_key,
            "MINIO_ROOT_PASSWORD": self.root.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",  # it would ask a server on the internet for news
        }


def provision_bucket(server: MinioServer, bucket: str, app: Credentials) -> None:
    """Make the bucket and a user who may read, write and list this bucket only. Safe to repeat."""
    grant_policy(server.endpoint, server.root, bucket, app, build_bucket_policy(bucket))
