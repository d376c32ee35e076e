"""A pipeline on real Spark whose objects appear, and whose time passes, as a schedule says.

It is that of test cases, with the tables that readers have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.cases.stepped_pipeline import UID, SteppedPipeline
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.spec.loader import parse_spec

START = 1_767_268_800_000_000  # wall clock of the first epoch: 2026-01-01T12:00:00Z


class SteppedRun(SteppedPipeline):
    """A pipeline that a schedule steps."""

    def __init__(self, text: str, folder: Path, session: Any) -> None:
        super().__init__(parse_spec(text), folder, session, START)

    @contextmanager
    def open_engine(self) -> Iterator[None]:
        """As a driver; the epochs are published when it is closed."""
        with super().open_engine():
            yield
        IcebergSink(self.spec, self.local_store, UID).follow(self.slot_log)

    def run_to_end(self) -> None:
        """Run epochs, a second apart, until the sources have ended."""
        while True:
            report = self.step(1)
            if report.ended and not report.pending:
                return

    def store(self) -> LocalStore:
        """The pipeline's store."""
        return self.local_store

    def log(self) -> SlotLog:
        """The pipeline's log."""
        return self.slot_log
