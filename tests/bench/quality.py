"""Time and memory of the quality checks over many epochs: ``make bench-quality``.

Not a test. The epochs are made up: 100 rows each, two of them late, one barrier. They are sealed in a
local store with their files, published into real Iceberg tables and compacted as a driver does. Then
the checks run three times as `tidegate quality` runs them, with the import of their libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from tests.engine.harness import spec_of
from tests.epochs import seal_epoch
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Counters
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.output_tables import build_table_schema, write_parquet_once
from tidegate.jobs.sinks.table_maintenance import compact_tables
from tidegate.jobs.spec.pipeline import BARRIERS, EVENTS, LATE, PipelineSpec

_SOURCES = ("a", "b")
_READ = 50  # rows of each source in an epoch; one of them is late for events and window
_PUBLISHED_TOGETHER = 500
_LATE = {"late": 1, "late:w": 1, "late_rows": 1}


def seal_epochs(spec: PipelineSpec, log: SlotLog, first: int, last: int) -> None:
    """Seal epochs with their files, whose counters say what the files hold."""
    released = _READ - 1
    epoch = {"read": _READ, "released": released, **_LATE}
    for slot in range(first, last + 1):
        files = {}
        for name in (LATE, BARRIERS, EVENTS):
            key = f"{log.pipeline}/timelines/0/tables/{name}/{slot:010d}-made/rows.parquet"
            rows = build_rows(spec, name, range(slot, slot + 1))
            files[name] = [write_parquet_once(log.store, key, rows)]
        total = {name: rows * slot for name, rows in epoch.items()}
        counters = Counters(
            read=2 * _READ * slot,
            released=2 * released * slot,
            late=2 * slot,
            per_source={source: dict(total) for source in _SOURCES},
        )
        notes: dict[str, Any] = {"next_position": 2 * released * slot}
        notes["epoch"] = {"read": 2 * _READ, "released": 2 * released, "late": 2}
        seal_epoch(log, counters=counters, notes=notes, files=files, timings={"seal_before": 0.01})


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


def measure_quality_run(spec: PipelineSpec, store: LocalStore) -> dict[str, Any]:
    """Run the checks in a process of their own, print what it took, and return the result."""
    command = [sys.executable, "-m", "tidegate.jobs.cli", "quality", "--json"]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(spec.model_dump_json(by_alias=True))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)  # the runs are the only children
        began = time.perf_counter()
        run = subprocess.run(
            [*command, str(file), "--store", store.url],
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])["data"]
    sys.stdout.write(
        f"{seconds:.1f} s, {processor:.1f} s of processor time ({result['seconds']:.1f} s without"
        f" start and imports), largest memory {used.ru_maxrss / 1e6:.2f} GB, load average"
        f" {os.getloadavg()[0]:.1f}\n"
    )
    sys.stdout.flush()
    return result


def main() -> int:
    """Print what quality runs over the same epochs took; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args()
    spec = spec_of()
    with TemporaryDirectory() as folder:
        store = LocalStore(folder)
        ensure_identity(store, spec.name)
        log, sink = SlotLog(store, spec.name), IcebergSink(spec, store, "u")
        for first in range(1, chosen.epochs + 1, _PUBLISHED_TOGETHER):
            seal_epochs(spec, log, first, min(chosen.epochs, first + _PUBLISHED_TOGETHER - 1))
            sink.follow(log)
            compact_tables(spec, store)
        results = [measure_quality_run(spec, store) for _ in range(chosen.runs)]
    failed = ", ".join(sorted({check["id"] for found in results for check in found["failed"]}))
    checks = len(results[0]["checks"])
    sys.stdout.write(f"{chosen.epochs:,} epochs, {checks} checks, failed: {failed or 'none'}\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
