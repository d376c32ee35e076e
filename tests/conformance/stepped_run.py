"""A pipeline on real Spark whose objects appear, and whose time passes, as a schedule says.

The engine, the sources, the Spark mover, the dispatcher and the tables are those of a driver. Only
the clock is injected, so that a source falls silent for a minute without a test that waits so long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.harness import PlainSteps
from tests.manual_clock import ManualClock
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.driver.pipeline_run import make_dispatcher
from tidegate.jobs.engine.epoch_engine import (
    Engine,
    EngineRuntime,
    EpochPorts,
    EpochReport,
    EpochRequests,
)
from tidegate.jobs.engine.interfaces import NoFaults
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spark.mover import SparkMover
from tidegate.jobs.spec.loader import parse_spec

UID = "0" * 32
START = 1_767_268_800_000_000  # wall clock of the first epoch: 2026-01-01T12:00:00Z


@dataclass
class SteppedRun:
    """A pipeline, its store, and the engine that a schedule steps."""

    text: str
    folder: Path
    session: Any

    def __post_init__(self) -> None:
        self.spec = parse_spec(self.text)
        self.clock = ManualClock(wall_ticks=START)
        self._store = LocalStore(self.folder / "store")
        self.requests = 0

    @contextmanager
    def open_engine(self) -> Iterator[None]:
        """Open what a driver has; the epochs are published when it is closed."""
        view = InputView(self._store, self.spec, self.folder / "work")
        sources = PipelineSources(self.spec, view)
        mover = SparkMover(view, self.spec, self.folder / "work", session=self.session)
        log = self.log()
        try:
            sources.open_logs()
            ports = EpochPorts(
                sources.all,
                mover,
                DriverTables(self._store).write,
                make_dispatcher(self.spec, self._store, log, mover),
            )
            runtime = EngineRuntime(
                ManifestAuthor(UID, "stepped", "0"), PlainSteps(self.clock), self.clock, NoFaults()
            )
            self.engine = Engine(self.spec, log, ports, runtime)
            yield
        finally:
            sources.close()
            mover.close()
        IcebergSink(self.spec, self._store, UID).follow(log)

    def put(self, source: str, name: str, data: bytes) -> None:
        """Let an object of a source appear."""
        self._store.create(f"{self.spec.sources[source].path}{name}", data)

    def step(self, seconds: float, ctis: Mapping[str, int] | None = None) -> EpochReport:
        """Let time pass and run an epoch; `ctis` are sent by a person: source -> time."""
        self.clock.advance(seconds)
        asked = EpochRequests()
        if ctis:
            self.requests += 1
            asked = EpochRequests(ids=(f"cti-{self.requests}",), ctis=tuple(ctis.items()))
        return self.engine.run_epoch(asked)

    def run_to_end(self) -> None:
        """Run epochs, a second apart, until the sources have ended."""
        while True:
            report = self.step(1)
            if report.ended and not report.pending:
                return

    def store(self) -> LocalStore:
        """The pipeline's store."""
        return self._store

    def log(self) -> SlotLog:
        """The pipeline's log."""
        return SlotLog(self._store, self.spec.name)
