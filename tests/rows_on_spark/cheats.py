"""A small honest program on Spark, and five drivers that cheat; each must be found by its check.

``python -m tests.rows_on_spark.cheats MODE MASTER STORE COPY EVENT_LOG`` runs one of them. It reads
the objects of STORE in tasks of Spark and logs as tidegate's driver does. COPY is a folder with the
same objects: a cheat that takes rows from there escapes the check of the store, so that its own
check has to find it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from tests.rows_on_spark.requests import RESULT_BOUND, StorePlace
from tests.rows_on_spark.stage import Stage, build_spark_settings
from tidegate.checkpoints.open_store import open_store
from tidegate.jobs.driver.log_output import configure_logs

HONEST: Final = "honest"
CHEATS: Final = {
    "collect": "results",
    "thread_pool": "store",
    "side_process": "time",
    "giant_task": "division",
    "create_data_frame": "rows",
}
"""What each cheat is called, and the only check that must find it."""
NAME: Final = "planted"
OBJECTS: Final = 6
ROWS: Final = 440_000  # 3.5 MB of doubles, below the bytes of a task; all objects are above them
_SIDE: Final = """\
import sys
from pathlib import Path
import numpy, pyarrow.parquet
for path in sorted(Path(sys.argv[1]).glob("*.parquet")) * 3:
    numpy.sort(pyarrow.parquet.read_table(path)["value"].to_numpy())
"""

_log = structlog.get_logger("planted")


def write_input(stage: Stage, prefix: str) -> Path:
    """Write the objects into the store and into a folder, which is returned."""
    copy, dice = stage.folder / "copy", np.random.default_rng(3)
    copy.mkdir()
    store = stage.open_store(prefix)
    for number in range(OBJECTS):
        path = copy / f"{number}.parquet"
        table = pa.table({"value": dice.random(ROWS)})
        pq.write_table(table, path, use_dictionary=False)
        store.upload(path, f"inbox/{path.name}")
    store.close()
    return copy


def build_command(stage: Stage, mode: str, prefix: str, copy: Path) -> list[str]:
    """The command of one program."""
    store = f"s3://{stage.minio.bucket}/{prefix}"
    module = "tests.rows_on_spark.cheats"
    given = [mode, stage.master, store, str(copy), str(stage.event_log)]
    return [sys.executable, "-m", module, *given]


def locate_input(stage: Stage, prefix: str) -> StorePlace:
    """Where the program and its input are in the store."""
    return StorePlace(stage.minio.bucket, prefix, NAME)


def run_program(mode: str, master: str, store: str, copy: Path, event_log: Path) -> None:
    """Run one program: one epoch over all objects."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(NAME)
    settings: dict[str, Any] = {
        **build_spark_settings(event_log),
        "spark.driver.maxResultSize": str(RESULT_BOUND),
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
    }
    session = builder.config(map=settings).getOrCreate()
    keys = [f"inbox/{number}.parquet" for number in range(OBJECTS)]
    if mode == "create_data_frame":
        tasks = _ship_rows(session, copy)
    elif mode == "giant_task":
        tasks = _read_in_tasks(session, store, [keys])
    elif mode == "collect":
        half = OBJECTS // 2  # Spark bounds the results of one job: two stay below it
        kept = [
            _read_in_tasks(session, store, [[key] for key in part], slot, keep=True)
            for slot, part in enumerate((keys[:half], keys[half:]), 1)
        ]
        tasks = [task for part in kept for task in part]
    else:
        tasks = _read_in_tasks(session, store, [[key] for key in keys])
    if mode == "thread_pool":
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(open_store(store).get, keys))
    if mode == "side_process":
        subprocess.run([sys.executable, "-c", _SIDE, str(copy)], check=True)
    _log.info("sealed", epoch=1, rows=sum(task["rows"] for task in tasks))
    session.stop()


def _read_in_tasks(
    session: Any, store: str, parts: Sequence[Sequence[str]], slot: int = 1, *, keep: bool = False
) -> list[dict[str, Any]]:
    """Read each part in a task and report; with `keep` the rows come to the driver as well."""

    def read(number: int, items: Iterable[Sequence[str]]) -> Iterator[tuple[dict[str, Any], bytes]]:
        begun, rows, size, kept = time.process_time(), 0, 0, b""
        opened = open_store(store)
        for keys in items:
            for key in keys:
                data = opened.get(key).data
                table = pq.read_table(pa.BufferReader(data))
                rows, size = rows + table.num_rows, size + len(data)
                kept += data if keep else b""
        opened.close()
        yield _report(number, rows, size, begun), kept

    found = session.sparkContext.parallelize(parts, len(parts)).mapPartitionsWithIndex(read)
    return _log_tasks([report for report, _ in found.collect()], slot)


def _ship_rows(session: Any, copy: Path) -> list[dict[str, Any]]:
    """Read in the driver, and let tasks report the rows that they were sent."""
    from pyspark import TaskContext

    table = pa.concat_tables([pq.read_table(path) for path in sorted(copy.glob("*.parquet"))])

    def count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun, rows, size = time.process_time(), 0, 0
        for batch in batches:
            rows, size = rows + batch.num_rows, size + batch.nbytes
        context = TaskContext.get()
        assert context is not None
        report = _report(context.partitionId(), rows, size, begun)
        yield pa.RecordBatch.from_pylist([report])

    shape = "task long, rows long, bytes long, pid long, parent long, cpu double"
    frame = session.createDataFrame(table).repartition(OBJECTS).mapInArrow(count, shape)
    return _log_tasks([row.asDict() for row in frame.collect()])


def _report(number: int, rows: int, size: int, begun: float) -> dict[str, Any]:
    cpu = time.process_time() - begun
    own = {"pid": os.getpid(), "parent": os.getppid(), "cpu": cpu}
    return {"task": number, "rows": rows, "bytes": size, **own}


def _log_tasks(tasks: list[dict[str, Any]], slot: int = 1) -> list[dict[str, Any]]:
    # Of the jobs of one slot the last counts, because an epoch may be read again.
    _log.info("tasks_finished", job="read", slot=slot, tasks=tasks)
    return tasks


if __name__ == "__main__":
    configure_logs(json=True)
    run_program(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
