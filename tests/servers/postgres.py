"""A real PostgreSQL for tests: Debian's package, in a folder of its own, on a free port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tidegate.infra.local_processes import choose_free_port


class PostgresServer:
    """Started by `start`; PostgreSQL refuses to run as root, so root becomes `postgres`."""

    def __init__(self, folder: Path) -> None:
        self._bin = binaries()
        self._data, self._log, self.port = folder / "data", folder / "postgres.log", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(folder, account.pw_uid, account.pw_gid)
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._call(
            "initdb",
            "-D",
            str(self._data),
            "-A",
            "trust",
            "-U",
            "tidegate",
            "--no-sync",
            "-E",
            "UTF8",
        )

    def start(self) -> None:
        """Start and wait until it answers.

        After a crash its children may be around for a moment, and it ends at once: again.
        """
        deadline = time.monotonic() + 300.0
        while True:
            if self._process is None or self._process.poll() is not None:
                self._process = self._launch()
            try:
                psycopg.connect(self.url).close()
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(self._log.read_text()[-2000:]) from error
                time.sleep(0.1)
            else:
                return

    @property
    def url(self) -> str:
        """Where it listens now: someone else may have taken the port of a server that was down."""
        return f"postgresql://tidegate@127.0.0.1:{self.port}/postgres"

    def _launch(self) -> subprocess.Popen[bytes]:
        self.port = choose_free_port()
        options = [
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
            "-p",
            str(self.port),
        ]
        with self._log.open("ab") as log:
            command = [str(self._bin / "postgres"), "-D", str(self._data), *options]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self._as)

    def stop(self, *, hard: bool = False) -> None:
        """Stop; `hard` as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if hard else signal.SIGINT)
            self._process.wait(timeout=300)
            self._process = None

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query gives."""
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def run(self, statement: str) -> None:
        """Execute a statement."""
        with psycopg.connect(self.url) as connection:
            connection.execute(statement)

    def _call(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [self._bin / name, *arguments],
            check=True,
            capture_output=True,
            cwd="/",
            timeout=600,
            **self._as,
        )


def binaries() -> Path:
    """Where PostgreSQL's programs are; the test is skipped where they are nowhere."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = next((place for place in places if (place / "initdb").is_file()), None)
    if found is None and (given := shutil.which("initdb")):
        found = Path(given).resolve().parent
    if found is None:
        pytest.skip("no PostgreSQL: sudo apt-get install -y postgresql")
    return found


@contextmanager
def running(make_folder: Callable[[str], Path]) -> Iterator[PostgresServer]:
    """A server for as long as the context lasts."""
    folder = make_folder("postgres")
    for parent in [*folder.parents][:3] if os.geteuid() == 0 else []:
        parent.chmod(
            parent.stat().st_mode | 0o011
        )  # pytest's folders are closed to the account it runs under
    server = PostgresServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
