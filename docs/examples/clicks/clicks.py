"""Two streaming queries over clicks: plain PySpark that runs with and without tidegate.

python make_clicks.py /tmp/clicks/in 12 &
spark-submit clicks.py /tmp/clicks/in /tmp/clicks/out
tidegate run clicks.yaml
"""

import sqlite3
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

try:
    from tidegate.job import on_restore
except ImportError:  # without tidegate nothing restores the job

    def on_restore(*_queries):
        """Take the place of tidegate's function."""
        return lambda function: function


source, target = sys.argv[1:3]
Path(target).mkdir(parents=True, exist_ok=True)
database = str(Path(target) / "clicks.sqlite")


def write_counts(counts: DataFrame, batch: int) -> None:
    """Put the counts of a batch into SQLite; a repeated batch replaces its own rows."""
    rows = [(batch, str(r.start), r.page, r.clicks) for r in counts.collect()]
    with sqlite3.connect(database) as db:
        db.execute("CREATE TABLE IF NOT EXISTS counts (batch INT, minute, page, clicks INT)")
        db.execute("DELETE FROM counts WHERE batch = ?", [batch])
        db.executemany("INSERT INTO counts VALUES (?, ?, ?, ?)", rows)


@on_restore("per_minute")
def forget_counts(query: str, batch: int | None) -> None:
    """Delete what the batches after `batch` have written."""
    if Path(database).exists():
        with sqlite3.connect(database) as db:
            db.execute("DELETE FROM counts WHERE batch > ?", [-1 if batch is None else batch])


spark = SparkSession.builder.appName("clicks").master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "2")
clicks = (
    spark.readStream.schema("at timestamp, user string, page string")
    .option("maxFilesPerTrigger", 1)
    .json(source)
    .withWatermark("at", "1 minute")
)
enriched = (
    clicks.withColumn("section", F.split("page", "/")[1])
    .writeStream.queryName("enriched")
    .option("checkpointLocation", f"{target}/checkpoints/enriched")
    .format("parquet")
    .start(f"{target}/enriched")
)
per_minute = (
    clicks.groupBy(F.window("at", "1 minute"), "page")
    .agg(F.count("*").alias("clicks"))
    .select("window.start", "page", "clicks")
    .writeStream.queryName("per_minute")
    .option("checkpointLocation", f"{target}/checkpoints/per_minute")
    .outputMode("update")
    .foreachBatch(write_counts)
    .start()
)
spark.streams.awaitAnyTermination()
