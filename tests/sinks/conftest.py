"""A log with hand-made epochs, and the tables that follow it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.epochs import retire_epoch
from tests.manual_clock import ManualClock
from tests.sinks.elsewhere import run_elsewhere

from tidegate.checkpoints.bucket_layout import (
    LAST_SLOT,
    BucketLayout,
    CheckpointId,
    generate_attempt_id,
)
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.output_tables import build_table_schema, write_parquet_once
from tidegate.jobs.spec.pipeline import PipelineSpec

UID = "0" * 32


def make_spec(columns: dict[str, str] | None = None, **more: Any) -> PipelineSpec:
    """A pipeline with one window."""
    columns = columns or {"t": "timestamp", "carrier": "string", "delay": "double"}
    return PipelineSpec.model_validate(
        {
            "name": "p",
            "sources": {
                "a": {"path": "inbox/a", "schema": columns, "event_time": "t", "lag": "1s"}
            },
            "windows": {
                "hourly": {"kind": "tumbling", "size": "1h", "aggregates": {"n": "count(*)"}}
            },
            **more,
        }
    )


@dataclass
class World:
    """A store, its log, and epochs sealed by hand.

    Slot s releases `rows` events with `_epoch` s.
    """

    store: Store
    workdir: Path
    spec: PipelineSpec = field(default_factory=make_spec)
    values: Callable[[int, int], dict[str, list[Any]]] = lambda slot, rows: {}
    """(slot, rows) -> column -> values; what it does not name is null."""

    def __post_init__(self) -> None:
        self.log = SlotLog(self.store, self.spec.name, clock=ManualClock())
        self.layout = BucketLayout(self.spec.name)

    def sink(self, uid: str = UID) -> IcebergSink:
        """A publisher; all of them share a catalog."""
        return IcebergSink(self.spec, self.store, uid, partial(run_elsewhere, self.store))

    def seal(
        self,
        count: int = 1,
        tables: tuple[str, ...] = ("events",),
        rows: int = 2,
        barrier: tuple[int, str] | None = None,
    ) -> Manifest:
        """Seal epochs that write these tables; `barrier` is the id and outcome of one that closes."""
        for _ in range(count):
            manifest = self._epoch(tables, rows)
            if barrier:
                closed = {"id": barrier[0], "outcome": barrier[1]}
                manifest = manifest.model_copy(update={"barriers": [closed]})
            assert isinstance(self.log.seal(manifest), Sealed)
        return manifest

    def fork(self, to: CheckpointId | None) -> None:
        """Restore."""
        assert isinstance(
            self.log.fork(self.log.head(), to, request_id="r", who="me", why="test", at=0), Sealed
        )

    def retire(self, slot: int) -> None:
        """Replace a manifest by its stub."""
        retire_epoch(self.log, slot)

    def forget_after(self, timeline: int, slot: int) -> None:
        """A bucket that lost its newest slots."""
        for entry in list(self.store.list_objects(self.layout.timelines_prefix)):
            found = re.search(r"/(\d+)/slots/(\d+)\.json$", entry.key)
            if found and (int(found[1]), LAST_SLOT - int(found[2])) > (timeline, slot):
                self.store.delete(entry.key)
        self.log = SlotLog(self.store, self.spec.name, clock=ManualClock())

    def lose_catalog(self) -> None:
        """The SQLite file is gone."""
        assert isinstance(self.store, LocalStore)
        for file in (self.store.root / ".tidegate-store").glob("catalog.sqlite*"):
            file.unlink()

    def rows(self, sink: IcebergSink, table: str = "events") -> list[tuple[int, int]]:
        """(timeline, epoch) of every row on main, sorted."""
        found = sink.open_table(table).scan().to_arrow()
        return sorted(zip(found["_timeline"].to_pylist(), found["_epoch"].to_pylist(), strict=True))

    def published_slot(self) -> int:
        """The slot of the published cut; 0 before the first."""
        cut = read_published_cut(self.store, self.spec.name)
        return cut.upto if cut else 0

    def wanted(self, table: str = "events") -> list[tuple[int, int]]:
        """What a table must hold: the rows of the current lineage."""
        head = self.log.head()
        epochs = [f.epoch for f in self.log.epochs_between(head.timeline, 1, head.slot)]
        if table == "checkpoints":
            return [(e.timeline, e.slot) for e in epochs]
        return sorted(
            (e.timeline, e.slot)
            for e in epochs
            for f in e.files.get(table, [])
            for _ in range(f.rows)
        )

    def wanted_of(self, upto: int, rows: int = 2) -> list[tuple[int, int]]:
        """The rows of the first slots of timeline 0, whether or not they were retired."""
        return [(0, slot) for slot in range(1, upto + 1) for _ in range(rows)]

    def exact(self, sink: IcebergSink) -> bool:
        """Whether every table holds the lineage's rows, each once."""
        head = self.log.head()
        epochs = [f.epoch for f in self.log.epochs_between(head.timeline, 1, head.slot)]
        tables = {"events", "checkpoints", *(t for e in epochs for t in e.files)}
        return all(self.rows(sink, t) == self.wanted(t) for t in tables)

    def _epoch(self, tables: tuple[str, ...], rows: int) -> Manifest:
        head = self.log.head()
        me = CheckpointId(head.timeline, head.next_slot, generate_attempt_id())
        files = {table: [self._file(table, me, rows)] for table in tables}
        return Manifest(
            pipeline=self.spec.name,
            uid=UID,
            spec_digest="",
            code_version="0",
            timeline=me.timeline,
            slot=me.slot,
            parent=str(head.checkpoint) if head.checkpoint else None,
            parent_sha256=head.sha256,
            attempt=me.attempt,
            lease_token=1,
            driver="test",
            recorded_now=0,
            counters=Counters(read=rows, released=rows),
            files=files,
            notes={"epoch": {"read": rows, "released": rows}},
            created_at=me.slot,
        )

    def _file(self, table: str, me: CheckpointId, rows: int) -> FileRef:
        schema = build_table_schema(self.spec, table)
        own = {"_timeline": [me.timeline] * rows, "_epoch": [me.slot] * rows}
        given = {
            name: values
            for name, values in self.values(me.slot, rows).items()
            if name in schema.names
        }
        columns = {f.name: [None] * rows for f in schema} | given | own
        data = pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema}, schema=schema)
        return write_parquet_once(
            self.store, f"{self.layout.table_prefix(table, me)}part-0.parquet", data
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(LocalStore(tmp_path / "store"), tmp_path / "work")
