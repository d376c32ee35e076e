"""What sealing costs a job: `make bench-jobs`.

1. The example of the documentation reads the same files, bare and under tidegate, in turn. Times
   between batches are those of Spark's commit files.
2. Under tidegate it is killed, and restored.
3. A query with a large state is restored from MinIO into a new folder.
"""

from __future__ import annotations

import argparse
import json
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
from typing import ClassVar

from tests.sealed_queries.apps import SCRIPTS, App, Clicks
from tests.sealed_queries.rig import COMBINATIONS, KilledJob
from tests.servers.minio import RealMinio, running
from tidegate.jobs.sealed_queries.batch_objects import restore_files, select_objects

_QUERY = "per_minute"
_WARM = 5  # first batches that are left out
_STATE_FILES = 10


class Large(App):
    """A query whose state grows by the same bytes with each file."""

    name = "large"
    queries: ClassVar[tuple[str, ...]] = ("large",)
    megabytes: ClassVar[int] = 1000

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        (folder / "in").mkdir()
        step = self.megabytes // files
        for number in range(files):
            lines = [json.dumps({"number": number * step + one}) for one in range(step)]
            path = folder / "in" / f"{number:05}.json"
            path.write_text("\n".join(lines))
            os.utime(path, (1_700_000_000 + number,) * 2)

    @property
    def script(self) -> Path:
        return SCRIPTS / "large_state.py"

    def arguments(self) -> list[str]:
        return [str(self.folder / "in")]

    def outputs(self) -> dict[str, object]:
        return {}


def measure_batches(checkpoint: Path, files: int) -> list[float]:
    """Seconds between the commits of batches with rows."""
    commits = [checkpoint / "commits" / str(batch) for batch in range(_WARM, files)]
    times = [path.stat().st_mtime_ns / 1e9 for path in commits]
    return [after - before for before, after in pairwise(times)]


def run_bare(folder: Path, files: int) -> list[float]:
    """Run the script as it is, with the same settings."""
    folder.mkdir()
    app = Clicks(folder, files)
    command = [sys.executable, str(app.script), *app.arguments()]
    checkpoint = folder / "out" / "checkpoints" / _QUERY
    settings = [f"--conf {key}={value}" for key, value in COMBINATIONS["rocksdb-2"].items()]
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": f"{' '.join(settings)} pyspark-shell",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        while not (checkpoint / "commits" / str(files - 1)).exists():
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


def _open(folder: Path, app: type[App], files: int, minio: RealMinio) -> KilledJob:
    url = f"s3://{minio.bucket}/{folder.name}"
    return KilledJob(folder, COMBINATIONS["rocksdb-2"], app, files, url, quick=False)


def _launch_to_next_batch(job: KilledJob) -> None:
    before = job.log.head().slot
    job.launch()
    job.wait(lambda: job.log.head().slot > before)


def run_sealed(folder: Path, files: int, minio: RealMinio) -> list[float]:
    """Run the same script as a job."""
    with closing(_open(folder, Clicks, files, minio)) as job:
        job.run_to_end_of_input()
        (home,) = (folder / "home" / "jobs" / "clicks").glob(f"*/{_QUERY}")
        return measure_batches(home, files)


def measure_kill_and_restore(folder: Path, files: int, minio: RealMinio) -> None:
    """Restore a job that has read all to an early batch; kill it on its way back."""
    with closing(_open(folder, Clicks, files, minio)) as job:
        job.run_to_end_of_input()
        job.restore(job.list_targets()[0])
        for what in ("restore of a small state", "kill -9"):
            with timed(f"{what}, from the next launch to the next sealed batch"):
                _launch_to_next_batch(job)
            job.kill()


def measure_large_state(folder: Path, megabytes: int, minio: RealMinio) -> None:
    """Restore a large state to the batch before the last."""
    Large.megabytes = megabytes
    with closing(_open(folder, Large, _STATE_FILES, minio)) as job:
        job.run_to_end_of_input()
        target = job.read_line()[-2]
        objects = select_objects(target.segments, "large")
        size = sum(one.bytes for one in objects) / 1e9
        with timed(f"{size:.2f} GB of state in {len(objects)} objects, from MinIO into a folder"):
            restore_files(job.log.store, "large", target.segments, folder / "restored")
        job.restore(target.id)
        with timed("restore of that state, from the launch to the next sealed batch"):
            _launch_to_next_batch(job)


def main() -> None:
    """Run all, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=40, help="of input, a batch each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000, help="of state; 0: without")
    options = parser.parse_args()
    bare: list[float] = []
    sealed: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-jobs-", ignore_cleanup_errors=True) as path:
        work = Path(path)
        with running(work) as minio:
            os.environ.update(minio.environment())
            for number in range(options.rounds):
                bare += run_bare(work / f"bare-{number}", options.files)
                sealed += run_sealed(work / f"sealed-{number}", options.files, minio)
                medians = f"{statistics.median(bare):.3f} {statistics.median(sealed):.3f}"
                print(f"round {number + 1}: medians so far {medians} s", flush=True)
            measure_kill_and_restore(work / "killed", options.files, minio)
            if options.megabytes:
                measure_large_state(work / "large", options.megabytes, minio)
    before, after = statistics.median(bare), statistics.median(sealed)
    print(f"batch, median of {len(bare)}: bare {before:.3f} s, under tidegate {after:.3f} s")
    print(f"overhead: {(after / before - 1):.1%}, {(after - before) * 1000:.0f} ms")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
