"""The real engine on plain parts: oracle mover, memory store, manual clock.

No Spark, no threads.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq

from tests.manual_clock import ManualClock
from tests.oracle.memory_source import MemorySource
from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch_engine import Engine, EngineRuntime, EpochPorts
from tidegate.jobs.engine.interfaces import Faults, Mover, NoFaults, RowDispatcher, Source
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.spec.pipeline import PipelineSpec

SECOND = 1_000_000


class PlainSteps:
    """Steps without a lease; `token` can be set to anything, `lost` makes the lease check raise.

    All time on `clock` counts as worked.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.token = 1
        self.lost: Exception | None = None
        self.timings: Mapping[str, float] = {}

    @contextmanager
    def measure_step(self, name: str) -> Iterator[None]:
        """Nothing to announce."""
        yield

    def begin_attempt(self, epoch: int, name: str) -> None:
        """No one to tell."""

    def require_lease(self) -> int:
        """The token, or the planted error."""
        if self.lost is not None:
            raise self.lost
        return self.token

    def read_worked_ticks(self) -> int:
        """The clock's reading."""
        return int(self.clock.monotonic() * SECOND)


class Bench:
    """One pipeline on a memory store, with as many engines (drivers) as a test wants."""

    def __init__(self, spec: PipelineSpec, store: Store | None = None) -> None:
        self.spec = spec
        self.store = store or MemoryStore()
        self.clock = ManualClock()
        self.sources = {name: MemorySource(name) for name in spec.sources}
        self.log = SlotLog(self.store, spec.name, clock=self.clock)

    def engine(
        self,
        *,
        faults: Faults | None = None,
        steps: PlainSteps | None = None,
        dispatch: RowDispatcher | None = None,
        sources: Sequence[Source] | None = None,
        mover: Mover | None = None,
        run: int = 0,
    ) -> Engine:
        """A driver's engine, at the head; `run` counts the starts behind a stop."""
        return Engine(
            self.spec,
            SlotLog(self.store, self.spec.name, clock=self.clock),
            EpochPorts(
                sources or list(self.sources.values()),
                mover or OracleMover(self.store, self.spec, self.sources),
                DriverTables(self.store).write,
                dispatch,
            ),
            EngineRuntime(
                ManifestAuthor("uid", "driver", "0"),
                steps or PlainSteps(self.clock),
                self.clock,
                faults or NoFaults(),
                run,
            ),
        )

    def epochs(self) -> list[Manifest]:
        """Sealed epochs of the current lineage."""
        head = self.log.head()
        return [f.epoch for f in self.log.epochs_between(head.timeline, 1, head.slot)]

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Rows of a table over all sealed epochs, in order of epochs."""
        found: list[dict[str, Any]] = []
        for epoch in self.epochs():
            for file in epoch.files.get(table, []):
                found += pq.read_table(io.BytesIO(self.store.get(file.key).data)).to_pylist()
        return found


def spec_of(**fields: Any) -> PipelineSpec:
    """A small pipeline.

    Sources a and b with columns t, v and barrier rows; ordered; one 10 s window.
    """
    source = {
        "path": "inbox/x/",
        "schema": {"t": "timestamp", "v": "long", "kind": "string", "n": "long"},
        "event_time": "t",
        "lag": "0",
        "barriers": {"kind": "kind", "types": ["cut"], "id": "n"},
    }
    raw: dict[str, Any] = {
        "name": "p",
        "sources": {"a": source, "b": source},
        "windows": {
            "w": {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)", "s": "sum(v)"}}
        },
    }
    return PipelineSpec.model_validate(raw | fields)


def row(second: float, value: int = 1) -> dict[str, Any]:
    """A data row at a second of event time."""
    return {"t": int(second * SECOND), "v": value, "kind": "data", "n": None}


def barrier(second: float, number: int) -> dict[str, Any]:
    """A barrier row."""
    return {"t": int(second * SECOND), "v": None, "kind": "cut", "n": number}


def restore(bench: Bench, target: CheckpointId | None) -> None:
    """What `tidegate checkpoints restore` does."""
    lease = Lease.acquire(bench.store, "p", ProcessIdentity.this_process(), clock=bench.clock)
    commit_restore(
        bench.log, lease, plan_restore(bench.log, target), request_id="r", who="ann", why=""
    )
    lease.release()
