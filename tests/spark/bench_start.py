"""How long a driver's Spark takes to start and to run its first job, with and without the class
archive, taken in turns.

.venv/bin/python -m tests.spark.bench_start [ROUNDS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

_JOB = """
import sys
from tidegate.jobs.spark.spark_session import open_session
from tidegate.jobs.spec.loader import parse_spec
spec = parse_spec('''
apiVersion: tidegate/v1
name: start
sources: {one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}}
spark: {driver_memory: 1g, jvm: quick}
''')
session = open_session(spec)
rows = session.range(1000).selectExpr("id % 7 AS k", "id AS v").groupBy("k").sum("v")
rows.write.parquet(sys.argv[1] + "/rows")
session.read.parquet(sys.argv[1] + "/rows").collect()
session.stop()
"""


def main(rounds: int) -> None:
    """Print seconds per variant and the ratio of the medians."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with TemporaryDirectory() as empty:
        caches = {"without": {"XDG_CACHE_HOME": empty}, "with": {}}
        for number in range(rounds):
            for name, environment in caches.items():
                with TemporaryDirectory() as folder:
                    begun = time.monotonic()
                    subprocess.run(
                        [sys.executable, "-c", _JOB, folder],
                        env={**os.environ, **environment},
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        check=True,
                    )
                    seconds[name].append(time.monotonic() - begun)
                print(f"round {number + 1}, {name} archive: {seconds[name][-1]:.1f} s", flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"median without {medians['without']:.1f} s, with {medians['with']:.1f} s:"
        f" {medians['without'] / medians['with']:.2f}x"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
