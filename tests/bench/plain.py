"""The peer: plain Structured Streaming on the same files.

File source, watermark, 10 s windows by key, RocksDB, Parquet sink.

``python -m tests.bench.plain INPUT OUT [JOB]`` prints one JSON line. Time counts from a warm session
until it has stopped, as it does for tidegate. It keeps no late row: those it finds it drops.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.generate import SOURCES
from tests.bench.meter import cpu_seconds, peak_megabytes


def open_session(**more: str) -> Any:
    """A warm session with the peer's settings."""
    from pyspark.sql import SparkSession

    conf = {
        "spark.driver.memory": "4g",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        **more,
    }
    builder = SparkSession.builder.master("local[2]").appName("plain")
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.range(10).count()
    return spark


def build_query(job: str, rows: Any) -> Any:
    """The peer's way to do a job of `tests.bench.suite`.

    It has no revisions: for ``keys`` its watermark is later by the lateness.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if job == "pass":
        return rows
    group = {
        "windows": F.window("event_time", "10 seconds"),
        "keys": F.window("event_time", "10 seconds"),
        "sliding": F.window("event_time", "60 seconds", "10 seconds"),
        "sessions": F.session_window("event_time", "1 second"),
    }[job]
    return (
        rows.withWatermark("event_time", "190 seconds" if job == "keys" else "10 seconds")
        .groupBy(group.alias("window"), "key")
        .agg(F.count("*").alias("n"), F.sum("value").alias("s"))
        .select(F.col("window.start").alias("w"), "key", "n", "s")
    )


def run(spark: Any, read: Callable[[], Any], out: Path, job: str = "windows") -> dict[str, Any]:
    """Everything that `read` gives through the job; stops the session. What it took."""
    begun, spent = time.monotonic(), cpu_seconds()
    query = (
        build_query(job, read())
        .writeStream.format("parquet")
        .option("path", str(out / "windows"))
        .option("checkpointLocation", str(out / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spent, peak = cpu_seconds() - spent, peak_megabytes()
    progress = query.recentProgress
    batches = [
        batch.durationMs.get("triggerExecution", 0) / 1000
        for batch in progress
        if batch.numInputRows
    ]
    spark.stop()
    seconds = time.monotonic() - begun
    rows = sum(batch.numInputRows for batch in progress)
    took = {"seconds": round(seconds, 2), "cpu": round(spent, 2), "peak_mb": peak}
    return {**took, "rows": rows, "epochs": batches}


def main() -> None:
    """Run the query over everything that is there."""
    source, out, job = Path(sys.argv[1]), Path(sys.argv[2]), [*sys.argv[3:], "windows"][0]
    spark = open_session()

    def read() -> Any:
        files = spark.readStream.schema(
            "source int, seq long, event_time timestamp, key int, value double"
        )
        return files.option("maxFilesPerTrigger", SOURCES).parquet(str(source / "s*" / "*.parquet"))

    print(json.dumps(run(spark, read, out, job)), flush=True)


if __name__ == "__main__":
    main()
