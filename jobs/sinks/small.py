"""The small tables that the driver writes itself, without Spark: barriers, dead objects, checkpoints."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.canonical import sha256_of_bytes
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import PreconditionFailedError, Store
from tidegate.jobs.engine.interfaces import DeadObject, MoveOrder
from tidegate.jobs.eventtime.types import BarrierHealth, Decision
from tidegate.jobs.sinks.schemas import build_system_schema
from tidegate.jobs.spec.pipeline import BARRIERS, CHECKPOINTS, DEAD_LETTERS
from tidegate.jobs.spec.time import TICK_MAX, TICK_MIN

__all__ = ["DriverTables", "build_barrier_rows", "build_checkpoint_rows", "build_dead_object_rows", "write_parquet_once"]


class DriverTables:
    """Writes what the driver itself knows of an attempt: its closed barriers and its dead objects."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, order: MoveOrder) -> dict[str, tuple[FileRef, ...]]:
        """Table -> files, in the attempt's own folders. Nothing is written for a table without rows."""
        dead = [d for part in order.cut.slices for d in part.dead]
        found = {
            BARRIERS: build_barrier_rows(order.decision, order.timeline, order.epoch),
            DEAD_LETTERS: build_dead_object_rows(dead, order.timeline, order.epoch),
        }
        return {
            table: (write_parquet_once(self._store, f"{order.prefix}/tables/{table}/{order.tag}/driver.parquet", rows),)
            for table, rows in found.items()
            if rows.num_rows
        }


def build_barrier_rows(decision: Decision, timeline: int, epoch: int) -> Any:
    """One row per barrier that closed in the epoch."""
    return _build_system_table(BARRIERS, [{**_barrier_to_row(b), "_timeline": timeline, "_epoch": epoch} for b in decision.barriers])


def build_dead_object_rows(dead: Iterable[DeadObject], timeline: int, epoch: int) -> Any:
    """One dead letter per object that could not be read."""
    rows = [
        {
            "reason": d.reason,
            "detail": d.detail,
            "object": d.key,
            "etag": d.etag,
            "_source": d.member.source,
            "_partition": d.member.partition,
            "_seq": d.seq,
            "_timeline": timeline,
            "_epoch": epoch,
        }
        for d in dead
    ]
    return _build_system_table(DEAD_LETTERS, rows)


def build_checkpoint_rows(manifests: Sequence[Manifest]) -> Any:
    """One row per sealed epoch, from its manifest alone; `rows_…` are the epoch's own, not cumulative."""
    return _build_system_table(CHECKPOINTS, [_checkpoint_to_row(m) for m in manifests])


def write_parquet_once(store: Store, key: str, table: Any) -> FileRef:
    """Write rows as one Parquet object under a key whose content never differs: a second writer keeps the first's."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="snappy")
    data = buffer.getvalue()
    try:
        store.create(key, data)
    except PreconditionFailedError:
        data = store.get(key).data
    kind = f"table:{key.split('/')[-3]}"
    return FileRef(key=key, rows=table.num_rows, bytes=len(data), sha256=sha256_of_bytes(data), kind=kind)


def _barrier_to_row(barrier: BarrierHealth) -> dict[str, Any]:
    participants = {
        member: {"arrived": arrived, "seq": seq, "event_time": time}
        for member, (arrived, seq, time) in barrier.participants.items()
    }
    return {
        "barrier_id": barrier.id,
        "outcome": barrier.outcome.value,
        "types": list(barrier.types),
        "homogeneous": barrier.homogeneous,
        "participants": json.dumps(participants, sort_keys=True),
        "missing": list(barrier.missing),
        "ended": list(barrier.ended),
        "tardy": list(barrier.tardy),
        "opened": barrier.opened,
        "closed": barrier.closed,
        "waited_us": barrier.wait_ticks,
        "section": barrier.section,
    }


def _checkpoint_to_row(manifest: Manifest) -> dict[str, Any]:
    epoch: Mapping[str, Any] = manifest.notes.get("epoch", {})
    frontier = manifest.decision.get("frontier_after", TICK_MIN)
    seal = manifest.timings.get("seal_before")  # no manifest can hold the time of its own seal
    return {
        "checkpoint_id": str(manifest.id),
        "slot": manifest.slot,
        "attempt": manifest.attempt,
        "sealed_at": manifest.created_at,
        "recorded_now": manifest.recorded_now,
        "frontier": frontier if TICK_MIN < frontier < TICK_MAX else None,
        "final": frontier >= TICK_MAX,
        "rows_read": epoch.get("read", 0),
        "rows_released": epoch.get("released", 0),
        "rows_late": epoch.get("late", 0),
        "rows_dropped": sum(epoch.get("dropped", {}).values()),
        "rows_rejected": epoch.get("rejected", 0),
        "rows_dead": epoch.get("dead_lettered", 0),
        "rows_retained": manifest.counters.retained,
        "windows_emitted": sum(epoch.get("windows", {}).values()),
        "bytes": manifest.notes.get("bytes_written", 0),
        "epoch_ms": 1000 * sum(manifest.timings.values()),
        "seal_ms": None if seal is None else 1000 * seal,
        "unpublished": manifest.notes.get("unpublished"),
        "_timeline": manifest.timeline,
        "_epoch": manifest.slot,
    }


def _build_system_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    schema = build_system_schema(name)
    return pa.table([_build_array([row.get(f.name) for row in rows], f.type) for f in schema], schema=schema)


def _build_array(values: list[Any], kind: Any) -> Any:
    return pa.array(values, pa.int64()).cast(kind) if pa.types.is_timestamp(kind) else pa.array(values, kind)
