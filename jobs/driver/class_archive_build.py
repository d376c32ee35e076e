"""Build Spark's class archive: run a driver on a small feed, and let its JVM dump its classes.

See `docs/decisions/0007-each-machine-keeps-an-archive-of-spark-classes.md`.
"""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import CLASS_ARCHIVE_FAILED, NO_JAVA

_BUILD_TIMEOUT = 600.0  # seconds
# The rule has a form that only Spark SQL computes: otherwise DuckDB would, and no JVM would start.
_WARMUP_SPEC = """\
apiVersion: tidegate/v1
name: warm
sources:
  one: &source
    path: inbox/one
    schema: {kind: string, at: timestamp, item: string, amount: long, ratio: double}
    event_time: at
    lag: 30s
    limits: {objects: 1}
    bounded: true
    barriers: {kind: kind, types: [shift]}
    rules: {named: {predicate: "item rlike '^[a-z]'"}}
  two: {<<: *source, path: inbox/two}
coalesce: {idle_timeout: never}
release: {mode: ordered}
windows:
  per_minute:
    kind: tumbling
    size: 1m
    keys: [item]
    aggregates: {n: count(*), total: sum(amount), mean: avg(ratio), most: max(amount)}
    lateness: 2m
checkpoint: {idle_interval: 100ms}
spark: {driver_memory: 1g, jvm: quick}
"""
_WARMUP_OBJECTS = 3


def build_class_archive(again: bool = False) -> tuple[Path, bool]:
    """Build this machine's class archive if it does not exist.

    Args:
        again: build it even if it exists.

    Returns:
        The archive, and whether it was built now.

    Raises:
        ConfigurationError: Java is not installed.
        TransientError: the driver's run failed or took longer than 600 s; its last lines are in
            the message.
    """
    from tidegate.jobs.spark.spark_session import ARCHIVE_DUMP_VARIABLE, locate_class_archive

    archive = locate_class_archive()
    if archive is None:
        raise NO_JAVA()
    if archive.is_file() and not again:
        return archive, False
    archive.parent.mkdir(parents=True, exist_ok=True)
    # In the folder of the cache, so that the last step is a rename: other processes never read half
    # an archive.
    with TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder, "made.jsa")
        spec = Path(folder, "warm.yaml")
        spec.write_text(_WARMUP_SPEC, "utf-8")
        _write_warmup_feed(Path(folder, "store"))
        output = _run_warmup_driver(
            [str(spec), "--store", f"{folder}/store"],
            {**os.environ, ARCHIVE_DUMP_VARIABLE: str(made)},
        )
        if not made.is_file():
            raise CLASS_ARCHIVE_FAILED(log=output[-2000:])
        made.replace(archive)
    return archive, True


def _run_warmup_driver(arguments: list[str], environment: dict[str, str]) -> str:
    # The JVM writes the archive after Python has ended. It keeps the pipe open until then, so that
    # reading the output to its end waits for the archive.
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tidegate.jobs.driver", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=_BUILD_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.output or b"").decode(errors="replace")
        raise CLASS_ARCHIVE_FAILED(
            log=f"{output[-2000:]}\nended after {_BUILD_TIMEOUT:.0f} s"
        ) from error
    return done.stdout.decode(errors="replace")


def _write_warmup_feed(store: Path) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    for source in ("one", "two"):
        folder = store / "inbox" / source
        folder.mkdir(parents=True)
        for number in range(_WARMUP_OBJECTS):
            # In order, late, and ahead; the last row is the barrier.
            minutes = [number, max(0, number - 3), number + 1, number]
            table = pa.table(
                {
                    "kind": ["data", "data", "data", "shift"],
                    "at": pa.array(
                        [begin + timedelta(minutes=m) for m in minutes],
                        pa.timestamp("us", tz="UTC"),
                    ),
                    "item": ["a", "b", "a", "b"],
                    "amount": pa.array([1, 2, 3, 4], pa.int64()),
                    "ratio": [0.1, 0.2, 0.3, 0.4],
                }
            )
            pq.write_table(table, folder / f"{number:05d}.parquet")
        (folder / "_DONE").touch()
