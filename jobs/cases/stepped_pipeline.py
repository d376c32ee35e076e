"""A pipeline in this process whose rows appear, and whose time passes, as someone says.

The engine, sources, mover, dispatcher and tables are those of a driver. Only the clock is injected,
and nothing else drives the pipeline, so there is no lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TransientError
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
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import DONE_MARKER, ObjectSource

if TYPE_CHECKING:
    from tidegate.jobs.spec.pipeline import PipelineSpec

UID: Final = "0" * 32
"""Identity of a pipeline that nothing but its case knows."""
_MOST_ATTEMPTS = 3  # an object that turns out damaged is a dead letter in the second one


@dataclass
class SteppedClock(Clock):
    """A clock that moves only by `sleep`.

    Attributes:
        wall: microseconds since 1970 UTC.
        passed: seconds since it began.
    """

    wall: int
    passed: float = 0.0

    def monotonic(self) -> float:
        """Return the seconds since it began."""
        return self.passed

    def wall_ticks(self) -> int:
        """Return the wall clock, which moves with the seconds."""
        return self.wall + round(self.passed * 1_000_000)

    def sleep(self, seconds: float) -> None:
        """Move forward at once."""
        self.passed += seconds


@dataclass
class SteppedProgress:
    """The steps of an epoch without a lease: all time of the clock counts as worked."""

    clock: Clock

    @contextmanager
    def measure_step(self, name: str) -> Iterator[None]:
        """Announce nothing."""
        yield

    def begin_attempt(self, epoch: int, name: str) -> None:
        """Announce nothing."""

    def require_lease(self) -> int:
        """Return the token of the only driver."""
        return 1

    @property
    def timings(self) -> Mapping[str, float]:
        """No step has a time."""
        return {}

    def read_worked_ticks(self) -> int:
        """Return the reading of the clock."""
        return round(self.clock.monotonic() * 1_000_000)


class SteppedPipeline:
    """A pipeline in a folder.

    Args:
        spec: its sources are objects, at paths within the store.
        folder: for the store, and for scratch files.
        session: a Spark session, or a `LocalSession`.
        start: wall clock at the beginning, ticks.
    """

    def __init__(self, spec: PipelineSpec, folder: Path, session: Any, start: int) -> None:
        self.spec, self._session, self._work = spec, session, folder / "work"
        self.clock = SteppedClock(start)
        self.local_store = LocalStore(folder / "store")
        self._requests = 0

    @property
    def slot_log(self) -> SlotLog:
        """The pipeline's log."""
        return SlotLog(self.local_store, self.spec.name)

    @contextmanager
    def open_engine(self) -> Iterator[None]:
        """Open what a driver has. A second time it goes on as a driver that starts again."""
        # Spark is imported here only.
        from tidegate.jobs.spark.mover import SparkMover

        view = InputView(self.local_store, self.spec, self._work)
        self.sources = PipelineSources(self.spec, view)
        mover = SparkMover(view, self.spec, self._work, session=self._session)
        log = self.slot_log
        try:
            self.sources.open_logs()
            ports = EpochPorts(
                self.sources.all,
                mover,
                DriverTables(self.local_store).write,
                make_dispatcher(self.spec, self.local_store, log, mover),
            )
            author = ManifestAuthor(UID, "stepped", "0")
            steps = SteppedProgress(self.clock)
            self.engine = Engine(
                self.spec, log, ports, EngineRuntime(author, steps, self.clock, NoFaults())
            )
            yield
        finally:
            self.sources.close()
            mover.close()

    def put(self, source: str, name: str, data: bytes) -> None:
        """Let an object of a source appear; `name` may begin with the folder of a partition."""
        self.local_store.create(f"{self.spec.sources[source].path}{name}", data)

    def end(self, source: str) -> None:
        """Let a source have no more objects after those that it has."""
        for one in self.sources.all:
            if one.name == source and isinstance(one, ObjectSource):
                for member in one.list_members():
                    folder = "" if one.spec.partition_by == "source" else f"{member.partition}/"
                    self.put(source, folder + DONE_MARKER, b"")

    def step(self, seconds: float, ctis: Mapping[str, int] | None = None) -> EpochReport:
        """Let time pass and run an epoch; `ctis` are sent by a person: source -> time.

        Raises:
            TidegateError: as `Engine.run_epoch`.
        """
        self.clock.sleep(seconds)
        asked = EpochRequests()
        if ctis:
            self._requests += 1
            asked = EpochRequests(ids=(f"cti-{self._requests}",), ctis=tuple(ctis.items()))
        return self._run_epoch(asked)

    def _run_epoch(self, asked: EpochRequests) -> EpochReport:
        for _ in range(_MOST_ATTEMPTS - 1):
            try:
                return self.engine.run_epoch(asked)
            except TransientError:
                continue
        return self.engine.run_epoch(asked)
