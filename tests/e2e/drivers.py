"""Real driver processes for tests: start one with a fault, wait for its end, read the tables as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.feed import SPEC, write_feed
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.open import open_store
from tidegate.jobs.sinks.exact import Exactness, check_exact
from tidegate.jobs.sinks.tables import read_table
from tidegate.jobs.spec.loader import parse_spec

SIGKILLED = -9
_VOLATILE = {"_timeline", "_epoch", "opened", "closed", "waited_us", "participants"}


class Steady:
    """The steady pipeline on a store of its own."""

    def __init__(self, folder: Path, objects: int, store_url: str | None = None) -> None:
        self.folder = folder
        self.inbox = folder / "store"
        self.store_url = store_url or str(self.inbox)
        self.inbox.mkdir(parents=True)
        self.rows = write_feed(self.inbox, objects)
        self.spec_file = folder / "steady.yaml"
        self.spec_file.write_text(SPEC)
        self.spec = parse_spec(SPEC)
        self.launches = 0

    def start(self, fault: str = "", *options: str) -> subprocess.Popen[bytes]:
        """A driver process; its log is ``<folder>/driver-<n>.log``."""
        self.launches += 1
        command = [sys.executable, "-m", "tidegate.jobs.driver", str(self.spec_file), "--store", self.store_url, *options]
        environment = {**os.environ, "TIDEGATE_FAULT": fault}
        with (self.folder / f"driver-{self.launches}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)

    def run(self, fault: str = "", *options: str) -> int:
        """Start and wait; returns the exit code."""
        return self.start(fault, *options).wait(timeout=240)

    def log_text(self) -> str:
        """The log of the latest launch, for assertion messages."""
        return (self.folder / f"driver-{self.launches}.log").read_text()[-4000:]

    def exact(self) -> Exactness:
        """The independent check."""
        store = open_store(self.store_url)
        return check_exact(
            self.spec, store, SlotLog(store, "steady"), lambda name: read_table(self.spec, store, name, current_only=True)
        )

    def content(self) -> dict[str, list[str]]:
        """All rows of all tables a user cares about, without what exactness leaves out."""
        store = open_store(self.store_url)
        found = {}
        for name in ("events", "late", "per_minute", "barriers", "dead_letters"):
            rows = read_table(self.spec, store, name).to_pylist()
            found[name] = sorted(repr(sorted((k, v) for k, v in row.items() if k not in _VOLATILE)) for row in rows)
        return found
