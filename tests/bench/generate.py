"""The input of the throughput benches.

Four sources, a little disorder, as Parquet files of equal size.

``python -m tests.bench.generate FOLDER [--rows 20000000] [--files 10]``

Row i of a source has event time T0 + i ms, so each source sends 1,000 rows per second of event
time; 1 % of the rows are 1 to 30 s behind, 0.01 % two minutes. There are 1,000 keys, some more
frequent than others, and values are multiples of 1/1024, so that sums are exact in any order. Each
file holds one source's share of one trigger; names and modification times grow with arrival, so
that a file source of Structured Streaming and tidegate's objects read the very same bytes in the
same order.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

T0: Final = 1_700_000_000_000_000  # a multiple of 10 s
SOURCES: Final = 4
KEYS: Final = 1_000
TRIGGER_ROWS: Final = 2_000_000
ROW_GROUP: Final = 100_000


def generate(folder: Path, rows: int, files: int, seed: int = 1, keys: int = KEYS) -> None:
    """Write `files` files for each source below `folder`, and the marker of its end."""
    dice = np.random.default_rng(seed)
    per_file = rows // (files * SOURCES)
    for number in range(files):
        for source in range(SOURCES):
            path = folder / f"s{source}" / f"part-{number:05d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(
                make_rows(dice, source, number * per_file, per_file, keys),
                path,
                row_group_size=ROW_GROUP,
            )
            os.utime(path, (T0 // 1_000_000 + number, T0 // 1_000_000 + number))
    for source in range(SOURCES):
        (folder / f"s{source}" / "_DONE").touch()


def make_rows(
    dice: np.random.Generator, source: int, first: int, count: int, keys: int
) -> pa.Table:
    """Return `count` rows of a source, from its row `first` on."""
    place = np.arange(first, first + count, dtype=np.int64)
    draw = dice.random(count)
    behind = np.where(
        draw < 0.0001,
        120_000_000,
        np.where(draw < 0.0101, dice.integers(1_000_000, 30_000_001, count), 0),
    )
    key = np.minimum((dice.random(count) ** 1.5 * keys).astype(np.int32), keys - 1)
    columns = {
        "source": pa.array(np.full(count, source, dtype=np.int32)),
        "seq": pa.array(place),
        "event_time": pa.array(T0 + place * 1_000 - behind, pa.timestamp("us", "UTC")),
        "key": pa.array(key),
        "value": pa.array(dice.integers(0, 1_024, count) / 1_024.0),
    }
    return pa.table(columns)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--files", type=int, default=10, help="triggers; 2 M rows each by default")
    given = parser.parse_args()
    generate(given.folder, given.rows, given.files)


if __name__ == "__main__":
    main()
