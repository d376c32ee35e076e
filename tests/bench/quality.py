"""Time and memory of the quality checks over many epochs: ``make bench-quality``.

Not a test. Manifests and tables are made up: 100 rows an epoch, two of them late, one barrier.
Bucket and tables are in memory, so reading tables from Iceberg is not measured.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import pyarrow as pa

from tests.engine.harness import spec_of
from tests.epochs import seal_epoch
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.expectations.gx_runner import load_great_expectations
from tidegate.expectations.quality_run import check_quality
from tidegate.jobs.sinks.output_tables import build_checkpoint_rows, build_table_schema
from tidegate.jobs.spec.pipeline import BARRIERS, CHECKPOINTS, EVENTS, LATE, PipelineSpec

_SOURCES = ("a", "b")
_READ = 50  # rows of each source in an epoch; one of them is late for events and window
_LATE = {"late": 1, "late:w": 1, "late_rows": 1}


def seal_epochs(log: SlotLog, count: int) -> list[Manifest]:
    """Seal epochs whose counters say what the tables hold."""
    released = _READ - 1
    epoch = {"read": _READ, "released": released, **_LATE}
    for slot in range(1, count + 1):
        total = {name: rows * slot for name, rows in epoch.items()}
        counters = Counters(
            read=2 * _READ * slot,
            released=2 * released * slot,
            late=2 * slot,
            per_source={source: dict(total) for source in _SOURCES},
        )
        notes = {"next_position": 2 * released * slot}
        seal_epoch(log, counters=counters, notes=notes, timings={"seal_before": 0.01})
    head = log.head()
    return [slot.epoch for slot in log.epochs_between(head.timeline, 1, head.slot)]


def build_rows(spec: PipelineSpec, name: str, epochs: range) -> pa.Table:
    """Return the rows of a table; columns that no check needs are null."""
    per_epoch = {LATE: build_late_rows, BARRIERS: build_barrier_rows, EVENTS: build_event_rows}
    build = per_epoch.get(name)
    rows = [row for epoch in epochs for row in build(epoch)] if build else []
    schema = build_table_schema(spec, name)
    columns = [[row.get(column) for row in rows] for column in schema.names]
    plain = [pa.int64() if pa.types.is_timestamp(f.type) else f.type for f in schema]
    arrays = [
        pa.array(values, kind).cast(field.type)
        for values, kind, field in zip(columns, plain, schema, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def build_late_rows(epoch: int) -> list[dict[str, Any]]:
    """One row of each source, late for both outputs."""
    lateness = {"lateness_us": 1_000_000, "_partition": "0", "_seq": epoch, "_epoch": epoch}
    reasons = {EVENTS: "late_order", "w": "late_window"}
    return [
        {"output": output, "reason": reason, "_source": source, **lateness}
        for output, reason in reasons.items()
        for source in _SOURCES
    ]


def build_barrier_rows(epoch: int) -> list[dict[str, Any]]:
    """One complete barrier."""
    health = {"outcome": "complete", "homogeneous": True, "types": ["cut", "cut"]}
    place = {"barrier_id": epoch, "section": epoch, "_epoch": epoch}
    return [{**health, **place, "missing": [], "tardy": [], "waited_us": 1_000_000}]


def build_event_rows(epoch: int) -> list[dict[str, Any]]:
    """The released rows, in order."""
    rows = len(_SOURCES) * (_READ - 1)
    first = (epoch - 1) * rows
    return [
        {"position": n, "section": epoch, "_late": False, "t": n, "_epoch": epoch}
        | {"_source": _SOURCES[n % 2], "_partition": "0", "_seq": n}
        for n in range(first, first + rows)
    ]


def main() -> int:
    """Print what one quality run took; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10_000)
    count = parser.parse_args().epochs
    spec, store = spec_of(), MemoryStore()
    epochs = seal_epochs(SlotLog(store, spec.name), count)
    recent = range(max(0, count - spec.quality.release_epochs) + 1, count + 1)
    tables = {name: build_rows(spec, name, range(1, count + 1)) for name in (LATE, BARRIERS)}
    tables |= {CHECKPOINTS: build_checkpoint_rows(epochs), EVENTS: build_rows(spec, EVENTS, recent)}
    load_great_expectations()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, worked = time.perf_counter(), time.process_time()

    def read_table(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        del since, whole  # the events are made from there on
        return tables[name] if name in tables else build_rows(spec, name, range(0))

    result = check_quality(spec, store, read=read_table)
    wall, cpu = time.perf_counter() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed = ", ".join(check["id"] for check in result["failed"]) or "none"
    sys.stdout.write(
        f"{count:,} epochs, {len(result['checks'])} checks, failed: {failed}\n"
        f"{wall:.1f} s ({cpu:.1f} s of processor time), largest memory"
        f" {peak / 1e6:.2f} GB ({(peak - before) / 1e6:.2f} GB above the tables)\n"
    )
    return int(bool(result["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
