"""Generate the input of sensors.yaml.

One object per sensor and half minute, 2 % of the readings up to 20 s behind.

Usage: python docs/examples/sensors.py STORE_FOLDER
"""

import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2026, 1, 1, tzinfo=UTC)
SILENT_AFTER = {"kitchen": 600, "cellar": 600, "attic": 240}  # seconds of event time


def main(store: Path) -> None:
    """Write ten minutes of readings into ``<store>/inbox/sensors/<sensor>/``."""
    dice = random.Random(7)
    for sensor, seconds in SILENT_AFTER.items():
        folder = store / "inbox" / "sensors" / sensor
        folder.mkdir(parents=True, exist_ok=True)
        for begin in range(0, seconds, 30):
            stamps = [
                begin + s - (dice.randint(6, 20) if dice.random() < 0.02 else 0) for s in range(30)
            ]
            table = pa.table(
                {
                    "at": pa.array(
                        [START + timedelta(seconds=s) for s in stamps], pa.timestamp("us", tz="UTC")
                    ),
                    "celsius": [round(dice.gauss(18, 3), 2) for _ in stamps],
                    "battery": pa.array([100 - begin // 60] * len(stamps), pa.int32()),
                }
            )
            pq.write_table(table, folder / f"{begin:05d}.parquet")
    print(
        f"wrote {sum(s // 30 for s in SILENT_AFTER.values())} objects below"
        f" {store / 'inbox' / 'sensors'}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
