"""Real driver processes for tests.

Start one with a fault, wait for its end, read the tables as a user would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.e2e.feed import SPEC, write_feed
from tidegate.checkpoints.deployed_specs import make_copy, read_deployed, start_deploy
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.exactness_audit import ExactnessReport, audit_exactness
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_any_spec, parse_spec
from tidegate.jobs.spec.user_code import collect_code

SIGKILLED = -9
_VOLATILE = {"_timeline", "_epoch", "opened", "closed", "waited_us", "participants"}


def deploy_file(store: Store, file: Path) -> None:
    """Have the next driver run a file that was edited, as `tidegate deploy` does."""
    spec = load_any_spec(file)
    if read_deployed(store, spec.name).wanted is not None:
        start_deploy(store, spec.name, make_copy(spec, collect_code(spec, file)), who="a test")


class Piped:
    """A pipeline in a folder of its own, driven by real processes."""

    def __init__(self, folder: Path, spec: str, store_url: str | None = None) -> None:
        self.folder = folder
        self.inbox = folder / "store"
        self.store_url = store_url or str(self.inbox)
        self.inbox.mkdir(parents=True)
        self.spec = parse_spec(spec)
        self.spec_file = folder / f"{self.spec.name}.yaml"
        self.spec_file.write_text(spec)
        self.launches = 0

    def start(
        self,
        fault: str = "",
        *options: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """A driver process; its log is ``<folder>/driver-<n>.log``.

        `prefix` is put before the command.
        """
        driver = [
            sys.executable,
            "-m",
            "tidegate.jobs.driver",
            str(self.spec_file),
            "--store",
            self.store_url,
            *options,
        ]
        return self.spawn([*prefix, *driver], {"TIDEGATE_FAULT": fault, **(environment or {})})

    def spawn(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Any process of the pipeline, with a log like a driver's."""
        self.launches += 1
        with (self.folder / f"driver-{self.launches}.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}, cwd=self.folder
            )

    def run(
        self, fault: str = "", *options: str, environment: Mapping[str, str] | None = None
    ) -> int:
        """Start and wait; returns the exit code."""
        return self.start(fault, *options, environment=environment).wait(timeout=900)

    def log_text(self, launch: int | None = None) -> str:
        """The log of a launch (default: the latest), for assertions and their messages."""
        return (self.folder / f"driver-{launch or self.launches}.log").read_text()[-20_000:]

    def said(self, event: str, launch: int | None = None) -> list[dict[str, Any]]:
        """What a launch logged under this event."""
        lines = [
            line
            for line in self.log_text(launch).splitlines()
            if line.startswith("{") and line.endswith("}")
        ]
        return [found for found in map(json.loads, lines) if found.get("event") == event]

    def change_spec(self, text: str) -> None:
        """Edit the spec and deploy it."""
        self.spec_file.write_text(text)
        deploy_file(self.store(), self.spec_file)

    def store(self) -> Store:
        """The pipeline's store."""
        return open_store(self.store_url)

    def log(self) -> SlotLog:
        """The pipeline's log."""
        return SlotLog(self.store(), self.spec.name)

    def table(self, name: str) -> pa.Table:
        """A published table."""
        return read_table(self.spec, self.store(), name)

    def exact(self) -> ExactnessReport:
        """The independent check."""
        store = self.store()
        return audit_exactness(
            self.spec,
            store,
            self.log(),
            lambda name: read_table(self.spec, store, name, current_only=True),
        )

    def content(self) -> dict[str, list[str]]:
        """All rows of all tables a user cares about, without what exactness leaves out."""
        found = {}
        for name in ("events", "late", *self.spec.windows, "barriers", "dead_letters"):
            rows = self.table(name).to_pylist()
            found[name] = sorted(
                repr(sorted((k, v) for k, v in row.items() if k not in _VOLATILE)) for row in rows
            )
        return found


class Steady(Piped):
    """The steady pipeline, fed."""

    def __init__(
        self, folder: Path, objects: int, store_url: str | None = None, *, spec: str = SPEC
    ) -> None:
        super().__init__(folder, spec, store_url)
        self.rows = write_feed(self.inbox, objects)


def wait_for(
    true: Callable[[], object], driver: subprocess.Popen[bytes], *, seconds: float = 900.0
) -> None:
    """Look until something is true; fails when the driver ended or took too long.

    Raises:
        TimeoutError: it did not become true.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if driver.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(
                f"not seen in {seconds:g} s; the driver's exit code is {driver.returncode}"
            )
        time.sleep(0.1)
