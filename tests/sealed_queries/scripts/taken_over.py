"""Plain PySpark with checkpoints of its own: one by an option, one by the root that a setting names."""

import sqlite3
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, functions

try:
    from tidegate.job import on_restore
except ImportError:  # without tidegate nothing restores the job
    on_restore = lambda *_queries: lambda function: function  # noqa: E731

source, target = sys.argv[1:]
database = Path(target) / "rows.sqlite"
database.parent.mkdir(exist_ok=True)


def write_number(rows: DataFrame, batch: int) -> None:
    """Note how many rows a batch has; a repeated batch replaces its own number."""
    number = rows.count()
    with sqlite3.connect(database) as db:
        db.execute("CREATE TABLE IF NOT EXISTS numbers (batch INT PRIMARY KEY, number INT)")
        db.execute("INSERT OR REPLACE INTO numbers VALUES (?, ?)", [batch, number])


@on_restore("counted")
def forget_numbers(query: str, batch: int | None) -> None:
    """Delete the numbers of the batches after `batch`."""
    if database.exists():
        with sqlite3.connect(database) as db:
            db.execute("DELETE FROM numbers WHERE batch > ?", [-1 if batch is None else batch])


spark = SparkSession.builder.appName("taken_over").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.streaming.checkpointLocation", f"{target}/checkpoints")
clicks = (
    spark.readStream.schema("at timestamp, user string, page string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
)
(
    clicks.withColumn("section", functions.split("page", "/")[1])
    .writeStream.queryName("enriched")
    .option("checkpointLocation", f"{target}/enriched_checkpoint")
    .trigger(processingTime="1500 milliseconds")
    .start(f"{target}/enriched")
)
(
    clicks.writeStream.queryName("counted")
    .trigger(processingTime="1500 milliseconds")
    .foreachBatch(write_number)
    .start()
)
spark.streams.awaitAnyTermination()
