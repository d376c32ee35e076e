"""A bounded feed whose cuts are fixed by the spec.

One object per source and epoch, no wall-clock option.

So the tables after any kills and restores must hold the same rows as an undisturbed run's.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2026, 3, 1, tzinfo=UTC)
SOURCES = ("north", "south", "east")
DONE = "_DONE"
"""The name of the file that says that a source has no more objects."""
SPEC = """\
apiVersion: tidegate/v1
name: steady
sources:
  north: &source
    path: inbox/north/
    schema: {kind: string, at: timestamp, item: string, amount: long, barrier: long}
    event_time: at
    lag: 30s
    limits: {objects: 1}
    bounded: true
    barriers: {kind: kind, types: [shift], id: barrier}
  south: {<<: *source, path: inbox/south/}
  east: {<<: *source, path: inbox/east/}
coalesce: {idle_timeout: never}
release: {mode: ordered}
windows:
  per_minute:
    kind: tumbling
    size: 1m
    keys: [item]
    aggregates: {n: count(*), total: sum(amount), mean: avg(amount), most: max(amount)}
    lateness: 2m
checkpoint: {idle_interval: 100ms}
spark: {driver_memory: 1g, jvm: quick}
"""


def write_feed(store: Path, objects: int, *, seed: int = 5) -> int:
    """Write the inbox; returns the number of data rows.

    A tenth of the rows is up to five minutes behind.
    """
    dice = random.Random(seed)
    rows = 0
    for source in SOURCES:
        folder = store / "inbox" / source
        folder.mkdir(parents=True)
        for number in range(objects):
            table = _object(dice, number)
            rows += table.num_rows - table.column("kind").to_pylist().count("shift")
            pq.write_table(table, folder / f"{number:05d}.parquet")
        (folder / DONE).touch()
    return rows


def _object(dice: random.Random, number: int) -> pa.Table:
    stamps = [
        60 * number + dice.randrange(60) - (dice.randrange(300) if dice.random() < 0.1 else 0)
        for _ in range(40)
    ]
    kinds = ["data"] * 40
    if number % 7 == 6:
        cut = dice.randrange(20, 40)
        kinds[cut], stamps[cut] = "shift", 60 * number + 59
    return pa.table(
        {
            "kind": kinds,
            "at": pa.array(
                [START + timedelta(seconds=s) for s in stamps], pa.timestamp("us", tz="UTC")
            ),
            "item": [dice.choice("abc") for _ in kinds],
            "amount": pa.array([dice.randrange(1000) for _ in kinds], pa.int64()),
            "barrier": pa.array([number if k == "shift" else None for k in kinds], pa.int64()),
        }
    )
