"""What a fold costs.

The same reducer with keys over the same released rows: dispatched by this process, by one Spark task,
and with the batch folded by groups of keys.

    python -m tests.bench.folds --rows 1000000 --keys 10000

Prints the table of docs/measurements.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import structlog

from tests.engine.harness import spec_of
from tests.spark.agreement import spec_of as spark_spec_of
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC, write_parquet_object
from tidegate.jobs.spark.spark_session import open_session
from tidegate.jobs.spark.stream_tasks import TaskDispatcher
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.streams.dispatcher import DispatchRunner, make_local_runner
from tidegate.jobs.streams.row_dispatch import DispatchedRows, DispatchWork
from tidegate.jobs.streams.row_history import LogHistory
from tidegate.jobs.streams.stream_rows import read_parquet_files
from tidegate.jobs.streams.stream_state import AttachmentState, DispatchState

_NEVER = sys.maxsize
_SUMS = {"n": "count(*)", "s": "sum(v)", "m": "max(v)"}
REDUCERS: dict[str, dict[str, Any]] = {
    "a function, one dispatch a row": {"function": "tests.streams.folds:totals", "initial": 0},
    "aggregates: count, sum, max": {"aggregates": _SUMS},
}


def build_spec(reducer: dict[str, Any]) -> PipelineSpec:
    """A pipeline with one reducer over one source."""
    columns = dict.fromkeys(("k", *_SUMS) if "aggregates" in reducer else ("v",), "long")
    source = {
        "path": "inbox/x/",
        "schema": {"t": "timestamp", "k": "long", "v": "long"},
        "event_time": "t",
        "lag": "0",
    }
    return spec_of(
        sources={"a": source},
        windows={},
        streams={"d": {"schema": columns}},
        reducers={"r": {"from": "events", "to": "d", "keys": ("k",), "recheck": 100, **reducer}},
    )


def release_rows(store: LocalStore, spec: PipelineSpec, rows: int, keys: int) -> DispatchWork:
    """Write released events, keys at random."""
    folders = AttemptFolders(BucketLayout(spec.name), CheckpointId(0, 1, "a" * 16))
    chance = np.random.default_rng(7)
    table = pa.table(
        {
            "t": pa.array(np.arange(rows) * 1000, pa.int64()).cast(TIMESTAMP_UTC),
            "k": chance.integers(0, keys, rows),
            "v": chance.integers(0, 100, rows),
            "_source": pa.repeat("a", rows),
            "_partition": pa.repeat("0", rows),
            "_seq": np.arange(rows),
            "position": np.arange(rows),
        }
    )
    key = f"{folders.table_prefix('events')}part-0.parquet"
    released = (write_parquet_object(store, key, table, "table:events"),)
    state = DispatchState(attachments={"r": AttachmentState()})
    return DispatchWork(spec, folders, 0, 0, state, (), released, 0)


def measure_dispatch(run: DispatchRunner, work: DispatchWork) -> tuple[float, DispatchedRows]:
    """Seconds and result."""
    begun = time.monotonic()
    found = run(work)
    return time.monotonic() - begun, found


def main(arguments: list[str] | None = None) -> int:
    """Dispatch in three ways, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000, 200_000, 1_000_000])
    parser.add_argument("--keys", type=int, default=10_000)
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    session = open_session(spark_spec_of())
    print("| reducer | rows | this process s | one task s | groups s | rows/s in groups |")
    print("|---|" + "---:|" * 5)
    for name, reducer in REDUCERS.items():
        spec = build_spec(reducer)
        for count in [1000, *chosen.rows]:  # the first tasks start Python, and are not shown
            with TemporaryDirectory(prefix="tidegate-folds-") as folder:
                store = LocalStore(Path(folder))
                work = release_rows(store, spec, count, chosen.keys)
                history = LogHistory(SlotLog(store, spec.name, clock=SYSTEM_CLOCK), "t")
                here = make_local_runner(store, history)
                tasks = TaskDispatcher(session, spec, store, history, here, _NEVER)
                runs: list[DispatchRunner] = [here, tasks, replace(tasks, least=1)]
                found = [measure_dispatch(run, work) for run in runs]
                tables = [read_parquet_files(store, one.files["d"]) for _, one in found]
            if any(table != tables[0] for table in tables):
                print(f"{name}: the results differ")
                return 1
            if count != 1000:
                times = " | ".join(f"{seconds:.2f}" for seconds, _ in found)
                print(f"| {name} | {count:,} | {times} | {count / found[2][0]:,.0f} |", flush=True)
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
