"""Generate the input of machines.yaml.

One object per five minutes of machines that are switched on and off.

Usage: python docs/examples/machines.py STORE_FOLDER
"""

import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2026, 1, 1, 8, tzinfo=UTC)
MACHINES = {"saw": 2200, "press": 1500, "lathe": 3000, "drill": 700, "lamps": 400}
SECONDS, OBJECT = 3600, 300


def main(store: Path) -> None:
    """Write an hour of switching into ``<store>/inbox/machines/``.

    A clock that ends the hour follows.
    """
    dice, rows = random.Random(7), [(5, "lamps", "on")]
    for machine in ("saw", "press", "lathe", "drill"):
        second = dice.randint(0, 120)
        while second < SECONDS - 600:
            runs = dice.randint(30, 600)
            rows += [(second, machine, "on"), (second + runs, machine, "off")]
            second += runs + dice.randint(20, 400)
    rows.append(
        (SECONDS + 60, "clock", "strikes")
    )  # neither on nor off: an ordinary row, which lets the last minutes close
    folder = store / "inbox" / "machines"
    folder.mkdir(parents=True, exist_ok=True)
    for begin in range(0, SECONDS + OBJECT, OBJECT):
        part = [row for row in sorted(rows) if begin <= row[0] < begin + OBJECT]
        table = pa.table(
            {
                "at": pa.array(
                    [START + timedelta(seconds=second) for second, _, _ in part],
                    pa.timestamp("us", tz="UTC"),
                ),
                "machine": pa.array([machine for _, machine, _ in part], pa.string()),
                "turned": pa.array([turned for _, _, turned in part], pa.string()),
                "watts": pa.array([MACHINES.get(machine, 0) for _, machine, _ in part], pa.int32()),
            }
        )
        pq.write_table(table, folder / f"{begin:05d}.parquet")
    print(f"wrote {len(rows)} rows below {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
