"""The peer: plain Structured Streaming on the same files.

File source, watermark, 10 s windows by key, RocksDB, Parquet sink.

``python -m tests.bench.plain INPUT OUT`` prints one JSON line. Time counts from a warm session
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
from tests.bench.meter import cpu_seconds


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


def run(spark: Any, read: Callable[[], Any], out: Path) -> dict[str, Any]:
    """Everything that `read` gives through the windows; stops the session. What it took."""
    from pyspark.sql import functions as F  # noqa: N812

    begun, spent = time.monotonic(), cpu_seconds()
    windows = (
        read()
        .withWatermark("event_time", "10 seconds")
        .groupBy(F.window("event_time", "10 seconds"), "key")
        .agg(F.count("*").alias("n"), F.sum("value").alias("s"))
        .select(F.col("window.start").alias("w"), "key", "n", "s")
    )
    query = (
        windows.writeStream.format("parquet")
        .option("path", str(out / "windows"))
        .option("checkpointLocation", str(out / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spent = cpu_seconds() - spent
    progress = query.recentProgress
    batches = [
        batch.durationMs.get("triggerExecution", 0) / 1000
        for batch in progress
        if batch.numInputRows
    ]
    spark.stop()
    seconds = time.monotonic() - begun
    rows = sum(batch.numInputRows for batch in progress)
    return {"seconds": round(seconds, 2), "rows": rows, "epochs": batches, "cpu": round(spent, 2)}


def main() -> None:
    """Run the query over everything that is there."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    spark = open_session()

    def read() -> Any:
        files = spark.readStream.schema(
            "source int, seq long, event_time timestamp, key int, value double"
        )
        return files.option("maxFilesPerTrigger", SOURCES).parquet(str(source / "s*" / "*.parquet"))

    print(json.dumps(run(spark, read, out)), flush=True)


if __name__ == "__main__":
    main()
