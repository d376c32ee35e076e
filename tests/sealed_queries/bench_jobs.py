"""What sealing costs a job: `make bench-jobs`.

The example of the documentation reads the same files twice, bare and under tidegate. Then the job
is killed, and restored. Times between batches are those of Spark's commit files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from tests.sealed_queries.apps import Clicks
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog

_QUERY = "per_minute"
_WARM = 3  # first batches that are left out


def measure_batches(checkpoint: Path, files: int) -> list[float]:
    """Seconds between the commits of batches with rows."""
    commits = [checkpoint / "commits" / str(batch) for batch in range(_WARM, files)]
    times = [path.stat().st_mtime_ns / 1e9 for path in commits]
    return [after - before for before, after in pairwise(times)]


def run_bare(folder: Path, files: int) -> list[float]:
    """Run the script as it is."""
    folder.mkdir()
    app = Clicks(folder, files)
    command = [sys.executable, str(app.script), *app.arguments()]
    checkpoint = folder / "out" / "checkpoints" / _QUERY
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        while not (checkpoint / "commits" / str(files)).exists():
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    return measure_batches(checkpoint, files)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the seconds of a block."""
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


def measure_job(folder: Path, files: int) -> list[float]:
    """Run the job, kill it half way, restore it at the end."""
    with closing(KilledJob(folder, COMBINATIONS["rocksdb-2"], Clicks, files)) as job:
        job.run_to_end_of_input()
        (home,) = (folder / "home" / "jobs" / "clicks").glob(f"*/{_QUERY}")
        found = measure_batches(home, files)
        rows = CheckpointCatalog(job.log).list_checkpoints()
        target = next(row.id for row in rows if row.id and row.slot == files)
        job.restore(CheckpointId.parse(target))
        before = job.log.head().slot
        with timed("restore, from the launch to the first sealed batch"):
            job.launch()
            job.wait(lambda: job.log.head().slot > before)
        job.kill()
        before = job.log.head().slot
        with timed("kill -9, from the next launch to the next sealed batch"):
            job.launch()
            job.wait(lambda: job.log.head().slot > before)
        return found


def main() -> None:
    """Run both, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=30, help="of input, a batch each")
    files = parser.parse_args().files
    with tempfile.TemporaryDirectory(prefix="bench-jobs-", ignore_cleanup_errors=True) as work:
        bare = statistics.median(run_bare(Path(work) / "bare", files))
        sealed = statistics.median(measure_job(Path(work) / "sealed", files))
    print(f"batch, median of {files - _WARM - 1}: bare {bare:.3f} s, under tidegate {sealed:.3f} s")
    print(f"overhead: {(sealed / bare - 1):.1%}, {(sealed - bare) * 1000:.0f} ms")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
