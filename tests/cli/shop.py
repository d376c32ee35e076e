"""A pipeline with late rows, driven through the command line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.engine.harness import PlainSteps
from tests.manual_clock import ManualClock
from tests.oracle.mover import OracleMover

from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch_engine import Engine, EngineRuntime, EpochPorts
from tidegate.jobs.engine.interfaces import Mover, NoFaults
from tidegate.jobs.engine.manifest_writer import ManifestAuthor
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.sinks.published_tables import RowSelection, read_table, scan_table
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec

SPEC = """\
apiVersion: tidegate/v1
name: shop
sources:
  web: {path: inbox/web/, schema: {at: timestamp, item: string, price: long}, event_time: at, lag: 0s, limits: {objects: 1}}
windows:
  hourly: {kind: tumbling, size: 1h, keys: [item], aggregates: {sold: count(*), revenue: sum(price), best: max(price)}}
"""
OBJECTS: list[list[tuple[str | None, str, int]]] = [
    [("10:05", "tea", 3), ("10:40", "tea", 4)],
    [("12:10", "cup", 9), ("12:30", "tea", 5)],
    [("10:20", "tea", 2), ("11:15", "cup", 8), ("13:00", "tea", 1)],
    [(None, "pot", 70), ("23:00", "cup", 1)],
]


class Shop:
    """A pipeline with late rows and a dead letter, run by the real engine."""

    def __init__(
        self, store: Store, spec: PipelineSpec, folder: Path, mover: Mover | None = None
    ) -> None:
        self.store, self.spec, self.folder = store, spec, folder
        self.log = SlotLog(store, spec.name)
        self.uid = ensure_identity(store, spec.name)
        clock = ManualClock()
        source = spec.sources["web"]
        self.engine = Engine(
            spec,
            self.log,
            EpochPorts(
                [ObjectSource("web", source, store)],
                mover or OracleMover(store, spec),
                DriverTables(store).write,
            ),
            EngineRuntime(
                ManifestAuthor(self.uid, "driver", "0"), PlainSteps(clock), clock, NoFaults()
            ),
        )

    def put(self, number: int, rows: list[tuple[str | None, str, int]]) -> None:
        """One object of the inbox."""
        times = [None if at is None else f"2026-05-01T{at}:00+00:00" for at, _, _ in rows]
        stamps = pa.array(times, pa.string()).cast(pa.timestamp("us", tz="UTC"))
        table = pa.table(
            {"at": stamps, "item": [i for _, i, _ in rows], "price": [p for _, _, p in rows]}
        )
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        self.store.put(f"inbox/web/{number:04d}.parquet", buffer.getvalue())

    def run(self) -> None:
        """Read what is there, an object an epoch, and publish it."""
        while self.engine.run_epoch().rows:
            pass
        self.publish()

    def publish(self) -> None:
        """Bring the tables to the head."""
        IcebergSink(self.spec, self.store, self.uid).follow(self.log)

    def table(self, name: str, **options: Any) -> list[dict[str, Any]]:
        """Rows as readers see them."""
        rows: list[dict[str, Any]] = read_table(self.spec, self.store, name, **options).to_pylist()
        return rows

    def scan(self, name: str, **options: Any) -> list[dict[str, Any]]:
        """Rows with their merges or without."""
        selection = RowSelection(**options)
        rows: list[dict[str, Any]] = scan_table(self.spec, self.store, name, selection).to_pylist()
        return rows

    def results(self, **options: Any) -> dict[tuple[str, str], tuple[int, int, int]]:
        """(hour, item) -> (sold, revenue, best)."""
        rows = self.table("hourly", current_only=True, **options)
        return {
            (f"{r['window_start']:%H}", r["item"]): (r["sold"], r["revenue"], r["best"])
            for r in rows
        }

    def exact(self) -> list[str]:
        """What an independent recomputation finds wrong."""
        return audit_exactness(
            self.spec,
            self.store,
            self.log,
            lambda name: read_table(self.spec, self.store, name, current_only=True),
        ).problems
