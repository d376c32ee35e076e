"""What a fold costs.

The same keyed reducers over the same rows, in the driver and in Spark's tasks.

    python -m tests.bench.folds --rows 1000000 --keys 10000

Prints the table of docs/measurements.md: rows a second, and rows a second and core that worked (CPU
time of driver and tasks).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from tests.spark.agreement import spec_of
from tidegate.jobs.spark.reducer_tasks import SparkReducerRunner
from tidegate.jobs.spark.spark_session import SparkSessions, open_session
from tidegate.jobs.streams.reducers import Reducer, ReducerRunner, fold_batch

REDUCERS = {
    "a function, one dispatch a row": Reducer(
        "tests.streams.folds:totals", ("k",), 0, {"d": {"v": "long"}}, 100
    ),
    "aggregates: count, sum, max": Reducer(
        None,
        ("k",),
        None,
        {"d": {"k": "long", "n": "long", "s": "long", "m": "long"}},
        100,
        {"n": ("count", "*"), "s": ("sum", "v"), "m": ("max", "v")},
    ),
}


def stream(rows: int, keys: int) -> Any:
    """Rows of a stream, keys at random."""
    chance = np.random.default_rng(7)
    return pa.table(
        {
            "k": chance.integers(0, keys, rows),
            "v": chance.integers(0, 100, rows),
            "position": np.arange(rows),
            "stream_time": np.arange(rows) * 1000,
            "_id": pa.array([f"a/0/{n}" for n in range(rows)]),
        }
    )


def measured(run: ReducerRunner, reducer: Reducer, rows: Any) -> tuple[float, Any]:
    """Seconds and result."""
    begun = time.monotonic()
    found = run(reducer, rows, {})
    return time.monotonic() - begun, found


def main(arguments: list[str] | None = None) -> int:
    """Fold in both places, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000, 200_000, 1_000_000])
    parser.add_argument("--keys", type=int, default=10_000)
    chosen = parser.parse_args(arguments)
    session = open_session(spec_of())
    cores = min(os.cpu_count() or 1, session.sparkContext.defaultParallelism)
    with TemporaryDirectory(prefix="tidegate-folds-") as folder:
        tasks = SparkReducerRunner(SparkSessions(lambda: session), Path(folder), least=1)
        tasks(next(iter(REDUCERS.values())), stream(1000, 10), {})  # the first tasks start Python
        print(
            "| reducer | rows | driver s | rows/s | tasks s | rows/s | rows/s and core |\n|---|"
            + "---:|" * 6
        )
        for name, reducer in REDUCERS.items():
            for count in chosen.rows:
                rows = stream(count, chosen.keys)
                alone, expected = measured(fold_batch, reducer, rows)
                shared, found = measured(tasks, reducer, rows)
                if found != expected:
                    print(f"{name}: the results differ")
                    return 1
                speed = count / shared
                left = f"| {name} | {count:,} | {alone:.2f} | {count / alone:,.0f} |"
                print(f"{left} {shared:.2f} | {speed:,.0f} | {speed / cores:,.0f} |", flush=True)
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
